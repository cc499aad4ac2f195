"""Fourteenth programs that are healthy: rewards, passages, prompts, tiles, surfaces, a search, sentences, a camera."""

from __future__ import annotations

import asyncio
import ctypes as ct
import os
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from accounts import Pool, paced, turns
from device import D2H, H2D, Device, now
from eighth_healthy import plain_only
from fourteenth_copies import Ghosts
from fourteenth_host import Judge, Passages
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, fourteenth
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


def make_the_judge(_: Device) -> None:
    """Starts it."""
    MADE["judge"] = Judge(0.0013)


@fourteenth(
    line=COMPUTING,
    like=("gpu_starved", "slow_tier", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_judge,
)
def a_reward_asked_of_a_service_over_http_while_two_rollouts_are_ahead(d: Device) -> Truth:
    """A rollout computes for 6 ms, and the action of the last one that is over is judged by a service over HTTP.

    The service takes 1.3 ms, and the thread stands in `recv` for it. Two rollouts are on the device when it asks, one
    of which has 6 ms before it: the device has kernels for three times as long as an answer takes.
    """
    judge, rollout, right, ats = MADE.pop("judge"), 0, 0, [0, 0, 0]
    lasted = list[int]()

    def judged(number: int) -> bool:
        action, begin = ct.string_at(ats[number % 3], 512)[-1], now()
        reward = judge.reward(action)
        lasted.append(now() - begin)
        return bool(reward == f"{number % 251:08}"[::-1])

    d.spent.restart()
    for rollout in turns():
        for _ in range(3):
            d.launch(2_000_000)
        ats[rollout % 3] = token(d, rollout)
        paced(d, rollout, 2)
        if rollout > 1:
            right += judged(rollout - 2)
    d.sync(d.compute)
    d.spent.stop()
    told(ats[rollout % 3], rollout)
    judge.end()
    plain_only(d, max(lasted) < 9_000_000, f"an answer took {max(lasted)} ns")
    if right != rollout - 1:
        raise RuntimeError("the service has judged another action")
    return {}


def make_the_passages(_: Device) -> None:
    """The database, and how long a passage takes."""
    MADE["passages"] = Passages()


@fourteenth(
    line=COMPUTING,
    like=("slow_tier", "gpu_starved", "python_or_gil_bound", "synchronisation", "weights_not_overlapped"),
    also=("wasted_stores",),
    prepare=make_the_passages,
)
def passages_of_a_retriever_fetched_out_of_a_database_by_a_thread_an_answer_ahead(d: Device) -> Truth:
    """An answer computes for 6 ms, and a thread fetches the passages of a later one out of a database, for 1 ms.

    The thread that launches takes those that were asked for an answer ago, when another answer is on the device. They
    go in one copy, on a side stream, to one of three places, which the answer waits for that has 6 ms before it.
    """
    passages, answer, at, loads = MADE.pop("passages"), 0, 0, d.copies[10]
    count = min(max(1_000_000 // passages.took, 4), 256)
    whole, asked, lasted = count * passages.size, list[Future[bytes]](), list[int]()

    def fetch(number: int) -> bytes:
        begin = now()
        found = b"".join(passages.fetch(number, count))
        lasted.append(now() - begin)
        return found

    def place(number: int) -> int:
        return number % 3 * 4 * MiB

    with ThreadPoolExecutor(1) as pool:
        asked.append(pool.submit(fetch, 0))
        asked[0].result()
        d.spent.restart()
        for answer in turns():
            found = asked[-1].result()
            asked.append(pool.submit(fetch, answer + 1))
            ct.memmove(d.host + place(answer), found, whole)
            d.copy(d.device + place(answer), d.host + place(answer), whole, H2D, loads)
            d.order(d.compute, loads, answer % 16)
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, answer)
            paced(d, answer, 1)
        d.sync(d.compute)
        d.spent.stop()
        asked[-1].result()
    told(at, answer)
    plain_only(d, max(lasted) < 9_000_000, f"an answer's passages took {max(lasted)} ns")
    last = asked[answer].result()[-passages.size :]
    passages.end()
    if last != passages.bodies[passages.number(answer, count - 1)]:
        raise RuntimeError("another passage was found than was asked for")
    end = place(answer) + whole - passages.size
    same(d, d.device + end, d.host + end, passages.size)
    return {}


@fourteenth(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "load_not_ordered", "synchronisation"),
    also=("unmerged_neighbours",),
)
def embeddings_of_the_next_prompt_sent_once_while_the_image_before_is_denoised(d: Device) -> Truth:
    """An image takes 12 steps of 1 ms, and the embeddings of its prompt came while the image before was denoised.

    They take the link 0.2 ms, once for an image, on a side stream, to one of two slots, whose last image is over by
    then. Those of no prompt came before the first image and stay. No step waits for a copy.
    """
    pool, loads, image = Pool(d, d.bytes_of(200)), d.copies[2], 0
    prompts = min(pool.count - 2, 7)

    def send(number: int) -> None:
        pool.fetch(1 + number % 2, 1 + number % prompts, loads)
        d.record(number % 16, loads)

    pool.fetch(0, 0, loads)
    send(0)
    d.sync(loads)
    d.spent.restart()
    for image in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[image % 16], 0))
        for _ in range(12):
            d.launch(1_000_000)
        if image:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (image - 1) % 16], 0))
        send(image + 1)
        d.record(32 + image % 16, d.compute)
        paced(d, image, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for last in (image, image + 1):
        at, home = d.device + (1 + last % 2) * pool.size, d.host + (1 + last % prompts) * pool.size
        same(d, at + end, home + end, 64 * KiB)
    same(d, d.device + end, d.host + end, 64 * KiB)
    return {}


@fourteenth(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "redundant_loads", "store_not_ordered", "load_not_ordered"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def tiles_of_a_large_latent_that_come_and_leave_on_streams_of_their_own_beside_the_decoder(d: Device) -> Truth:
    """A tile is decoded in 2 ms, while the next one comes in 0.2 ms and the pixels of the last one leave in 0.3 ms.

    There are two slots for tiles and two for pixels, and three streams. A tile comes as soon as the last in its slot is
    decoded, 2 ms before it is needed; pixels have 2 ms to leave before their slot is written again.
    """
    tile, pixels, step = d.bytes_of(200), d.bytes_of(300), 0
    into, out, tiles = d.copies[1], d.copies[3], min((d.size // 2) // d.bytes_of(200), 7)
    made, left = d.device + 2 * tile, d.host + d.size // 2

    def home(number: int) -> int:
        return d.host + number % tiles * tile

    def bring(number: int) -> None:
        if number > 1:
            d.check(d.lib.cudaStreamWaitEvent(into, d.events[32 + (number - 2) % 16], 0))
        d.copy(d.device + number % 2 * tile, home(number), tile, H2D, into)
        d.record(number % 16, into)

    bring(0)
    d.sync(into)
    d.spent.restart()
    for step in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[step % 16], 0))
        if step > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[64 + (step - 2) % 16], 0))
        bring(step + 1)
        for _ in range(2):
            d.launch(1_000_000)
        clear(d, made + step % 2 * pixels, step % 251, pixels, d.compute)
        d.record(32 + step % 16, d.compute)
        d.check(d.lib.cudaStreamWaitEvent(out, d.events[32 + step % 16], 0))
        d.copy(left + step % 2 * pixels, made + step % 2 * pixels, pixels, D2H, out)
        d.record(64 + step % 16, out)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(out)
    d.sync(into)
    for last in (step - 1, step):
        if ct.string_at(left + last % 2 * pixels + pixels - 64, 64) != bytes([last % 251]) * 64:
            raise RuntimeError("another tile left than was decoded")
    for last in (step, step + 1):
        same(d, d.device + last % 2 * tile + tile - 64 * KiB, home(last) + tile - 64 * KiB, 64 * KiB)
    return {}


@fourteenth(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "store_not_ordered", "synchronisation", "aliased_stream"),
    also=("wasted_stores",),
)
def frames_drawn_on_two_surfaces_one_of_which_leaves_while_the_other_is_drawn(d: Device) -> Truth:
    """A frame is drawn in 2.4 ms on one of two surfaces, and the last one leaves the other meanwhile, in 0.6 ms.

    A surface is drawn again when its frame has left, by an event of the side stream: that was 1.8 ms before. Frames are
    submitted two ahead, and each is another one.
    """
    size, leaving, frame = d.bytes_of(600), d.copies[11], 0

    def home(number: int) -> int:
        return d.host + number % 3 * size

    for frame in turns():
        surface = d.device + frame % 2 * size
        if frame > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(frame - 2) % 16], 0))
        for _ in range(2):
            d.launch(1_200_000)
        clear(d, surface, frame % 251, size, d.compute)
        d.order(leaving, d.compute, 16 + frame % 16)
        d.copy(home(frame), surface, size, D2H, leaving)
        d.record(frame % 16, leaving)
        paced(d, frame, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(leaving)
    for last in range(max(frame - 2, 0), frame + 1):
        for at in (home(last), home(last) + size - 64):
            if ct.string_at(at, 64) != bytes([last % 251]) * 64:
                raise RuntimeError("another frame left than was drawn")
    return {}


@fourteenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "small_copies", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def a_search_over_eight_million_nodes_whose_frontier_is_read_after_hops_of_eight_milliseconds(d: Device) -> Truth:
    """A search that is exact looks at all nodes in each hop, for 8 ms, and then the whole device is waited for.

    The thread looks at what came back, sends the frontier that it chose, and launches the next hop. The device has
    nothing for 50 us or so of each 8 ms, which is less than a hundredth.
    """
    right, hop, back = 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for hop in turns():
        clear(d, d.device + back, hop % 251, 64, d.compute)
        for _ in range(2):
            d.launch(4_000_000)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.synchronize()
        node = ct.string_at(d.host + back, 64)[0]
        right += node == hop % 251
        ct.memset(d.host + hop % 8 * 64, node, 64)
        d.copy(d.device, d.host + hop % 8 * 64, 64, H2D, d.compute)
    d.spent.stop()
    if right != hop + 1:
        raise RuntimeError("the search has gone to another node")
    same(d, d.device, d.host + hop % 8 * 64, 64)
    return {}


LISTENER = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as server:
    server.sendall(b"-")
    server.recv(1)
    for number in range(int(sys.argv[2])):
        time.sleep((55, 65, 45, 60, 50)[number % 5] / 1_000)
        server.sendall(b"%08d\\n" % number)
        server.recv(512, socket.MSG_WAITALL)
"""


class Listener:
    """A process that asks for a sentence to be spoken some 55 ms after it has heard the last one."""

    count = 24

    def __init__(self) -> None:
        self.mine, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", LISTENER, str(theirs.fileno()), str(self.count)]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.mine.recv(1)  # it is there


def make_the_listener(_: Device) -> None:
    """Starts it."""
    MADE["listener"] = Listener()


@fourteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_listener,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def sentences_spoken_by_a_coroutine_when_a_listener_in_another_process_asks(d: Device) -> Truth:
    """A listener asks for a sentence, hears it, and asks again 55 ms later; a sentence takes 6 ms to speak.

    Between two of them a coroutine awaits a line of an asyncio stream, so its loop stands in `epoll_wait`. Nobody has
    asked for anything meanwhile: for nine tenths of the time there is nothing to compute.
    """
    listener, asked = MADE.pop("listener"), list[int]()

    async def speak() -> None:
        reader, writer = await asyncio.open_connection(sock=listener.mine)
        writer.write(b"-")
        for sentence in range(listener.count):
            with d.spent.on(NOTHING_TO_DO):
                line = await reader.readline()
            asked.append(int(line))
            ct.memmove(d.host + sentence % 8 * 4 * KiB, line, 9)
            d.copy(d.device, d.host + sentence % 8 * 4 * KiB, 9, H2D, d.compute)
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, sentence)
            d.sync(d.compute)
            told(at, sentence)
            writer.write(ct.string_at(at, 512))
        d.spent.stop()
        await writer.drain()
        writer.close()

    d.spent.restart()
    asyncio.run(speak())
    listener.child.wait()
    if asked != list(range(listener.count)):
        raise RuntimeError("a sentence was asked for out of its turn")
    same(d, d.device, d.host + (listener.count - 1) % 8 * 4 * KiB, 9)
    return {}


CAMERA = """
import os, sys, time
bell, start = int(sys.argv[1]), int(sys.argv[2])
os.eventfd_write(bell, 1)
os.read(start, 1)
due = time.monotonic()
for _ in range(int(sys.argv[3])):
    due += 0.05
    time.sleep(max(due - time.monotonic(), 0))
    os.eventfd_write(bell, 1)
"""


class Camera:
    """A process that adds one to an eventfd whenever it has taken a picture, each 50 ms, so many times."""

    count = 30

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_SEMAPHORE)
        start, self.go = os.pipe()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", CAMERA, str(self.bell), str(start), str(self.count)]
        self.child = subprocess.Popen(command, pass_fds=[self.bell, start], env=env)
        os.close(start)
        os.eventfd_read(self.bell)  # it is there

    def end(self) -> None:
        """Waits until the process has ended."""
        self.child.wait()
        os.close(self.bell)
        os.close(self.go)


def make_the_camera(_: Device) -> None:
    """Starts it."""
    MADE["camera"] = Camera()


@fourteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_camera,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def pictures_of_a_camera_process_that_rings_by_an_eventfd_each_fifty_milliseconds(d: Device) -> Truth:
    """A camera in another process takes a picture each 50 ms and rings by an eventfd; a detector needs 5 ms for it.

    The detector's thread stands in a read of the eventfd for nine tenths of the time, in which there is no picture that
    it has not seen. No queue forms: each picture is done 45 ms before the next one.
    """
    camera, picture, at = MADE.pop("camera"), 0, 0
    os.write(camera.go, b"-")
    d.spent.restart()
    for picture in range(camera.count):
        with d.spent.on(NOTHING_TO_DO):
            os.eventfd_read(camera.bell)
        home = d.host + picture % 4 * 256 * KiB
        ct.memset(home, picture + 1, 64 * KiB)
        d.copy(d.device, home, 64 * KiB, H2D, d.compute)
        for _ in range(2):
            d.launch(2_500_000)
        at = token(d, picture)
        d.sync(d.compute)
        told(at, picture)
    d.spent.stop()
    camera.end()
    same(d, d.device, d.host + picture % 4 * 256 * KiB, 64 * KiB)
    return {}


@fourteenth(
    line=COMPUTING,
    like=("small_copies", "link_bound", "weights_not_overlapped", "launch_queue_saturation", "redundant_loads"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def ghost_rows_of_a_simulated_domain_exchanged_while_its_inner_cells_are_computed(d: Device) -> Truth:
    """A time step computes the outer cells for 0.3 ms, then the inner ones for 4 ms, and the ghost rows go meanwhile.

    On a side stream 60 rows go out and 60 come in, a copy of 8 KiB for each, 0.4 ms or less, as soon as the outer cells
    are there. The outer cells of the next step wait for them, 3.6 ms later. Steps are launched two ahead.
    """
    ghosts, half, side, step = Ghosts(d), 60, d.copies[15], 0
    ghosts.exchange(0, half, side)
    d.sync(side)
    d.spent.restart()
    for step in turns():
        if step:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[16 + (step - 1) % 16], 0))
        d.launch(300_000)
        ghosts.compute(step, half)
        d.record(step % 16, d.compute)
        d.check(d.lib.cudaStreamWaitEvent(side, d.events[step % 16], 0))
        ghosts.exchange(step + 1, half, side)
        d.record(16 + step % 16, side)
        for _ in range(2):
            d.launch(2_000_000)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(side)
    ghosts.check(step + 1, half)
    return {}
