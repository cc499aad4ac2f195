"""Thirteenth programs that are healthy: weights, a hop, environments, scores, questions, images, audio, a robot."""

from __future__ import annotations

import ctypes as ct
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, thirteenth
from thirteenth_host import Environments, Sampler
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


@thirteenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered", "launch_queue_saturation"),
    also=("unmerged_neighbours",),
)
def packed_weights_through_two_staging_places_that_are_emptied_a_layer_ahead(d: Device) -> Truth:
    """A layer's packed weights come to one of two places, a kernel of 0.3 ms unpacks them, and the layer takes 1.2 ms.

    They take the link 0.5 ms and come as soon as the layer before the last was unpacked, which is 2.7 ms before they
    are needed. So the link is busy for a third of the time, always beside kernels, and no kernel waits for it. Layers
    take turns, so that each brings other bytes than are there.
    """
    pool, loads, layer = Pool(d, d.bytes_of(500)), d.copies[5], 0
    layers = min(pool.count - 1, 5)

    def ask(number: int) -> None:
        if number >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (number - 2) % 16], 0))
        pool.fetch(number % 2, number % layers, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for layer in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer % 16], 0))
        d.launch(300_000)
        d.record(32 + layer % 16, d.compute)
        ask(layer + 1)
        for _ in range(2):
            d.launch(600_000)
        paced(d, layer, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for last in (layer, layer + 1):
        same(d, d.device + last % 2 * pool.size + end, d.host + last % layers * pool.size + end, 64 * KiB)
    return {}


@thirteenth(
    line=COMPUTING,
    like=("redundant_loads", "small_copies", "weights_not_overlapped", "aliased_stream", "gpu_starved"),
    also=("unmerged_neighbours",),
)
def the_newest_hop_alone_sent_into_the_ring_of_a_speech_window(d: Device) -> Truth:
    """A recogniser looks at the last 16 hops of audio in a ring of 18 slots, and only the newest one is sent, 30 us.

    It comes on a side stream while the step before computes for 3 ms, behind the last step that had its slot, which is
    over by then. All slots of the ring are used again and again, but each load brings a hop that is not there.
    """
    window, ring, pool, loads, step = 16, 18, Pool(d, d.bytes_of(30)), d.copies[3], 0
    hops = min(pool.count - 1, 97)

    def send(hop: int) -> None:
        pool.fetch(hop % ring, hop % hops, loads)
        d.record(hop % 32, loads)

    for hop in range(window):
        send(hop)
    d.sync(loads)
    d.spent.restart()
    for step in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(step + window - 1) % 32], 0))
        for _ in range(3):
            d.launch(1_000_000)
        d.record(64 + step % 32, d.compute)
        if step > 1:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[64 + (step - 2) % 32], 0))
        send(step + window)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    for hop in (step, step + window):
        same(d, d.device + hop % ring * pool.size, d.host + hop % hops * pool.size, pool.size)
    return {}


def make_two_environments(_: Device) -> None:
    """Starts them."""
    MADE["environments"] = Environments(0.0025, 0.0025)


@thirteenth(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "slow_tier", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_two_environments,
)
def two_environments_of_which_one_steps_while_the_policy_acts_for_the_other(d: Device) -> Truth:
    """A policy acts for 6 ms, for one of two environments in turn, each of which takes 2.5 ms in a process of its own.

    The thread waits for the action, gives it to its environment and stands in `recv` until that has stepped; then it
    launches the policy's next turn. Meanwhile the policy acts for the other one, for 3.5 ms longer than the step takes.
    """
    environments, turn, right, ats = MADE.pop("environments"), 0, 0, [0, 0]
    d.spent.restart()
    for turn in turns():
        mine = turn % 2
        if turn > 1:
            right += environments.state(mine) == ((turn - 2) % 251).to_bytes(8, "big")
        for _ in range(3):
            d.launch(2_000_000)
        ats[mine] = token(d, turn)
        paced(d, turn, 1)
        if turn:
            environments.act(1 - mine, ct.string_at(ats[1 - mine], 512)[-1])
    d.sync(d.compute)
    d.spent.stop()
    told(ats[turn % 2], turn)
    right += environments.state((turn - 1) % 2) == ((turn - 1) % 251).to_bytes(8, "big")
    environments.end()
    if right != turn:
        raise RuntimeError("an environment has answered another action")
    return {}


def make_the_sampler(_: Device) -> None:
    """The scores, and numpy."""
    MADE["sampler"] = Sampler()


@thirteenth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "context_lock_stall"),
    also=("wasted_stores",),
    prepare=make_the_sampler,
)
def scores_put_in_order_by_numpy_on_a_thread_while_the_next_batch_computes(d: Device) -> Truth:
    """A batch computes for 6 ms, and another thread has numpy sort the scores of one that is over, for some 2 ms.

    The thread that launches asks for the result a batch later, when two batches are ahead, and numpy sorts without the
    interpreter's lock: the device has 6 ms of kernels or more whenever it waits for an order.
    """
    sampler, batch, at, right = MADE.pop("sampler"), 0, 0, 0
    asked, lasted = list[Future[int]](), list[int]()
    rows, truth = min(max(2_000_000 // sampler.took, 1), 200), sampler.taken(0)

    def sort() -> int:
        begin = now()
        taken: list[int] = [sampler.taken(row) for row in range(rows)]
        lasted.append(now() - begin)
        return taken[0]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sort).result()
        d.spent.restart()
        for batch in turns():
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, batch)
            paced(d, batch, 2)
            asked.append(pool.submit(sort))
            if batch:
                right += asked[-2].result() == truth
        d.sync(d.compute)
        d.spent.stop()
        right += asked[-1].result() == truth
    told(at, batch)
    plain_only(d, max(lasted) < 12_000_000, f"a batch's scores took {max(lasted)} ns")
    if right != batch + 1:
        raise RuntimeError("the scores were put in another order")
    return {}


@thirteenth(
    line=COMPUTING,
    like=("gpu_starved", "python_or_gil_bound", "synchronisation", "launch_queue_saturation", "context_lock_stall"),
    also=("wasted_stores",),
)
def a_debugging_build_that_asks_for_errors_attributes_and_free_memory_around_long_kernels(d: Device) -> Truth:
    """Around each kernel of 1 ms a launcher asks for the device, the last error and 40 attributes, and for free memory.

    More than forty calls out of Python for each kernel, and a cudaMemGetInfo for each step of five. They take 0.1 ms or
    so, a tenth of the kernel, and steps are launched two ahead: the device has 5 ms of kernels or more meanwhile.
    """
    lib, step, at, free = d.lib, 0, 0, 0
    number, value = ct.c_int(), ct.c_int()
    left, whole = ct.c_size_t(), ct.c_size_t()
    lib.cudaMemGetInfo.argtypes = [ct.c_void_p, ct.c_void_p]
    lib.cudaGetLastError()  # a query before the program may have left "not ready"
    d.spent.restart()
    for step in turns():
        for _ in range(5):
            d.check(lib.cudaGetDevice(ct.byref(number)))
            for one in (1, 8, 12, 16) * 10:  # threads of a block, shared memory, registers, multiprocessors
                d.check(lib.cudaDeviceGetAttribute(ct.byref(value), one, number.value))
            d.launch(1_000_000)
            d.check(lib.cudaPeekAtLastError())
        d.check(lib.cudaMemGetInfo(ct.byref(left), ct.byref(whole)))
        free += 0 < left.value <= whole.value
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    if free != step + 1 or value.value < 1:
        raise RuntimeError("the device has no memory or no multiprocessor")
    return {}


@thirteenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "small_copies", "fence_before_copies"),
    also=("wasted_stores",),
)
def a_validation_score_waited_for_once_in_eight_batches_of_six_milliseconds(d: Device) -> Truth:
    """A trainer launches two batches of 6 ms ahead, and after each eighth waits until all is over and reads the score.

    It then looks at the score, keeps the best one, and goes on: the device has nothing for 0.1 ms or so of each 48 ms.
    In all other steps it waits as well, for the batch before the last, with two of them on the device.
    """
    batch, at, best, seen = 0, 0, -1, 0
    d.spent.restart()
    for batch in turns():
        ids = batch % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, batch)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(1_500_000)
        at = token(d, batch)
        paced(d, batch, 2)
        if batch % 8 == 7:
            d.sync(d.compute)
            best = max(best, ct.string_at(at, 512)[0])
            seen += 1
    d.sync(d.compute)
    d.spent.stop()
    told(at, batch)
    same(d, d.device, d.host + batch % 8 * 4 * KiB, 4 * KiB)
    if best != max((number % 251 for number in range(7, batch + 1, 8)), default=-1) or seen != (batch + 1) // 8:
        raise RuntimeError("the best score is another than was computed")
    return {}


class Encoder:
    """A thread that waits until an image has left the device, packs it, and gives its place back.

    Attributes:
        images: numbers of those that leave; free: places that may be used again; packed: lengths, by image.
    """

    places = 3

    def __init__(self, d: Device, size: int) -> None:
        self.d, self.size = d, size
        self.images, self.free, self.packed = Queue[int](), Queue[int](), list[int]()
        self.right = True
        for place in range(self.places):
            self.free.put(place)
        self.thread = in_thread(self.encode)

    def home(self, image: int) -> int:
        """Where an image comes to in pinned memory."""
        return self.d.host + image % self.places * self.size

    def encode(self) -> None:
        """Image after image, in their order."""
        while (image := self.images.get()) >= 0:
            self.d.sync_event(image % 16)
            part = ct.string_at(self.home(image), 256 * KiB)
            self.right &= part[:64] == bytes([image % 251]) * 64
            self.packed.append(len(zlib.compress(part, 1)))
            self.free.put(image % self.places)

    def end(self) -> None:
        """Ends the thread when it has done all."""
        self.images.put(-1)
        self.thread.join()


@thirteenth(
    line=COMPUTING,
    like=("synchronisation", "pageable_memory", "python_or_gil_bound", "link_bound", "store_not_ordered"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def images_that_leave_and_are_packed_by_a_thread_while_the_next_are_denoised(d: Device) -> Truth:
    """An image is denoised for 8 ms; then it leaves on a side stream, 0.4 ms of the link, and a thread packs a part.

    Images lie in one of three places on both sides, and steps are launched two ahead. The thread that packs waits for
    the copy's event and computes for 1 or 2 ms in zlib, without the interpreter's lock, beside the next image.
    """
    size, stores, image = d.bytes_of(400), d.copies[9], 0
    encoder = Encoder(d, size)
    d.spent.restart()
    for image in turns():
        encoder.free.get()
        if image >= encoder.places:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(image - encoder.places) % 16], 0))
        for _ in range(4):
            d.launch(2_000_000)
        slot = d.device + image % encoder.places * size
        clear(d, slot, image % 251, size, d.compute)
        d.order(stores, d.compute, 64 + image % 16)
        d.copy(encoder.home(image), slot, size, D2H, stores)
        d.record(image % 16, stores)
        encoder.images.put(image)
        paced(d, image, 2)
    d.sync(d.compute)
    d.spent.stop()
    encoder.end()
    if len(encoder.packed) != image + 1 or not encoder.right:
        raise RuntimeError("other images were packed than were made")
    return {}


MICROPHONE = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as server:
    server.send(b"-")
    server.recv(8)
    due = time.monotonic()
    for number in range(int(sys.argv[2])):
        due += 0.04
        time.sleep(max(due - time.monotonic(), 0))
        server.send(number.to_bytes(4, "little") * 320)
"""


class Microphone:
    """A process that sends a hop of audio each 40 ms, as a datagram of 1,280 bytes, so many times."""

    count = 36

    def __init__(self) -> None:
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", MICROPHONE, str(theirs.fileno()), str(self.count)]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.mine.recv(8)  # it is there

    def end(self) -> None:
        """Waits until the process has ended."""
        self.child.wait()
        self.mine.close()


def make_the_microphone(_: Device) -> None:
    """Starts it."""
    MADE["microphone"] = Microphone()


@thirteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_microphone,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def hops_of_audio_recognised_as_they_are_spoken_forty_milliseconds_apart(d: Device) -> Truth:
    """Another process sends a hop of audio each 40 ms, and a recogniser needs 5 ms for one.

    For seven eighths of the time nothing has been said that was not recognised, and the thread stands in `recv` of a
    datagram. No queue forms: each hop is done 35 ms before the next one comes.
    """
    microphone, hop, at = MADE.pop("microphone"), 0, 0
    microphone.mine.send(b"-")
    d.spent.restart()
    for hop in range(microphone.count):
        with d.spent.on(NOTHING_TO_DO):
            audio = microphone.mine.recv(2_048)
        if audio != hop.to_bytes(4, "little") * 320:
            raise RuntimeError("a hop of audio came out of its turn")
        ct.memmove(d.host + hop % 8 * 4 * KiB, audio, len(audio))
        d.copy(d.device, d.host + hop % 8 * 4 * KiB, len(audio), H2D, d.compute)
        for _ in range(2):
            d.launch(2_500_000)
        at = token(d, hop)
        d.sync(d.compute)
        told(at, hop)
    d.spent.stop()
    microphone.end()
    same(d, d.device, d.host + hop % 8 * 4 * KiB, 1_280)
    return {}


@thirteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores", "weights_not_overlapped"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_robot_that_asks_its_policy_for_a_plan_when_it_has_done_the_last(d: Device) -> Truth:
    """A robot asks for a plan over a connection of `multiprocessing`, and acts on it for 70 ms before it asks again.

    It sends a picture of 64 KiB, and a plan is four kernels of 3 ms. While the robot acts there is nothing to compute,
    and the policy's thread stands in `recv` of its end of the connection, for six sevenths of the time.
    """
    count, plan, at = 18, 0, 0
    mine, robots = mp.Pipe()
    plans = list[bytes]()

    def act() -> None:
        for number in range(count):
            time.sleep((70, 60, 80, 75, 65)[number % 5] / 1_000)
            robots.send((number, bytes([number]) * 64 * KiB))
            plans.append(robots.recv())

    d.spent.restart()
    thread = in_thread(act)
    for plan in range(count):
        with d.spent.on(NOTHING_TO_DO):
            number, picture = mine.recv()
        if number != plan:
            raise RuntimeError("the robot has asked out of its turn")
        home = d.host + MiB + plan % 4 * 64 * KiB
        ct.memmove(home, picture, 64 * KiB)
        d.copy(d.device, home, 64 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(3_000_000)
        at = token(d, plan)
        d.sync(d.compute)
        mine.send(ct.string_at(at, 512))
    d.spent.stop()
    thread.join()
    mine.close()
    robots.close()
    if plans != [bytes([number]) * 512 for number in range(count)]:
        raise RuntimeError("the robot got another plan than was computed")
    same(d, d.device, d.host + MiB + plan % 4 * 64 * KiB, 64 * KiB)
    return {}
