"""Fifteenth programs that are healthy: previews, errors, events, sleep, passes, a journal, speech, judges, clients."""

from __future__ import annotations

import ctypes as ct
import os
import socket
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, Queue
from typing import Any

from accounts import Pool, paced, turns
from device import D2H, H2D, Device, now
from eighth_healthy import plain_only
from fifteenth_host import Sandbox
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, Truth, fifteenth, in_thread
from twelfth_healthy import answered
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Previews:
    """A thread that waits for each preview of an image in one of three pinned buffers, and looks at it.

    Attributes:
        size: of a preview, bytes; there: numbers of the previews on their way; right: whether each was as it was made.
    """

    buffers = 3

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.stream = d, d.bytes_of(150), d.copies[2]
        self.there, self.right = Queue[int](), list[bool]()
        self.thread = in_thread(self.look)

    def place(self, number: int) -> int:
        """Where a preview is made on the device: one of two places."""
        return self.d.device + number % 2 * self.size

    def home(self, number: int) -> int:
        """Where it goes to."""
        return self.d.host + number % self.buffers * self.size

    def give(self, number: int) -> None:
        """Makes a preview behind the model's kernels, and has it leave on the stream of previews."""
        d = self.d
        if number > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[number % 2], 0))  # long since
        clear(d, self.place(number), number % 251, self.size, d.compute)
        d.order(self.stream, d.compute, 8 + number % 8)
        d.copy(self.home(number), self.place(number), self.size, D2H, self.stream)
        d.record(number % 2, self.stream)
        self.there.put(number)

    def look(self) -> None:
        """What the thread does."""
        while (number := self.there.get()) >= 0:
            self.d.sync_event(number % 2)
            ends = ct.string_at(self.home(number), 64) + ct.string_at(self.home(number) + self.size - 64, 64)
            self.right.append(ends == bytes([number % 251]) * 128)

    def end(self) -> None:
        """Ends the thread."""
        self.there.put(-1)
        self.thread.join()


@fifteenth(
    line=COMPUTING,
    like=("synchronisation", "store_not_ordered", "gpu_starved", "small_copies", "weights_not_overlapped"),
    also=("wasted_stores",),
)
def previews_of_an_image_that_leave_for_a_thread_behind_each_fourth_denoising_step(d: Device) -> Truth:
    """Behind each fourth denoising step of 5 ms a preview leaves, 0.15 ms of the link, on a stream of its own.

    A thread stands in cudaEventSynchronize until a preview is there, nearly all of the time. The steps are launched two
    ahead by another thread and wait for a preview's copy by an event only 40 ms later, when it is long over.
    """
    previews, step = Previews(d), 0
    for step in turns():
        for _ in range(5):
            d.launch(1_000_000)
        if step % 4 == 3:
            previews.give(step // 4)
        paced(d, step, 2)
    d.synchronize()
    d.spent.stop()
    previews.end()
    if len(previews.right) != (step + 1) // 4 or not all(previews.right):
        raise RuntimeError("the thread has seen another preview than was made")
    return {}


@fifteenth(
    line=COMPUTING,
    like=("redundant_loads", "wasted_stores", "weights_not_overlapped", "link_bound", "load_not_ordered"),
    also=("unmerged_neighbours",),
)
def errors_of_compressed_gradients_kept_on_the_host_until_the_step_after_next(d: Device) -> Truth:
    """What compression leaves of a step's gradients goes out in 0.4 ms and comes back for the step after next.

    A step is 3 ms, so an error is back some 2 ms before it is added. Stores and loads have a stream each, use the same
    two places of the host and of the device in turn, and are ordered by events; each step's bytes are new, as the
    store has brought them. Steps are launched two ahead.
    """
    size, out, back, step = d.bytes_of(400), d.copies[3], d.copies[4], 0

    def left(number: int) -> int:
        return d.device + number % 2 * size

    def added(number: int) -> int:
        return d.device + (2 + number % 2) * size

    for step in turns():
        home = d.host + step % 2 * size
        if step > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[step % 2], 0))
        for _ in range(3):
            d.launch(1_000_000)
        clear(d, left(step), step % 251, size, d.compute)
        d.order(out, d.compute, 8 + step % 8)
        d.copy(home, left(step), size, D2H, out)
        d.order(back, out, 16 + step % 8)
        d.copy(added(step), home, size, H2D, back)
        d.record(step % 2, back)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(back)
    if ct.string_at(d.host + step % 2 * size + size - 64, 64) != bytes([step % 251]) * 64:
        raise RuntimeError("the host has another error than was left")
    same(d, added(step) + size - 4 * KiB, d.host + step % 2 * size + size - 4 * KiB, 4 * KiB)
    return {}


@fifteenth(
    line=COMPUTING,
    like=("allocation_on_hot_path", "context_lock_stall", "gpu_starved", "synchronisation", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def an_event_made_for_each_layer_and_destroyed_when_its_step_is_over(d: Device) -> Truth:
    """For each of a step's twelve layers of 0.25 ms an event is made, and destroyed two steps later, when it is over.

    To make, to record and to destroy one takes some microseconds of the thread; a step is 3 ms and is launched two
    ahead. Each event is asked whether it has passed before it is destroyed.
    """
    kept, passed, step, at = list[list[int]](), 0, 0, 0
    for step in turns():
        mine = list[int]()
        for _ in range(12):
            d.launch(250_000)
            mine.append(d.event())
            d.check(d.lib.cudaEventRecord(mine[-1], d.compute))
        kept.append(mine)
        at = token(d, step)
        paced(d, step, 2)
        if step > 1:
            for event in kept.pop(0):
                passed += d.lib.cudaEventQuery(event) == 0
                d.check(d.lib.cudaEventDestroy(event))
    d.sync(d.compute)
    d.spent.stop()
    for event in [one for made in kept for one in made]:
        d.check(d.lib.cudaEventDestroy(event))
    told(at, step)
    if passed != (step - 1) * 12:
        raise RuntimeError("an event was destroyed before it had passed")
    return {}


@fifteenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "cpu_starved", "slow_tier", "python_or_gil_bound"),
    also=("wasted_stores",),
)
def a_thread_that_sleeps_for_half_of_a_step_whose_length_it_knows(d: Device) -> Truth:
    """The thread knows that a step takes 10 ms, and sleeps for 5 ms of it; the next step is on the device all the time.

    Steps are launched one ahead: when one is over, the thread sleeps, has 5 ms left to launch another one, and waits.
    It is asleep or waits for nearly all of the time, and the device has at least 5 ms of kernels whenever it wakes.
    """
    step, at, longest = 0, 0, 0
    for step in turns():
        for _ in range(5):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 1)
        begin = now()
        time.sleep(0.005)
        longest = max(longest, now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    plain_only(d, longest < 20_000_000, f"the thread slept for {longest} ns")
    return {}


@fifteenth(
    line=COMPUTING,
    like=("aliased_stream", "synchronisation", "gpu_starved", "load_not_ordered", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def a_pass_with_the_prompt_and_one_without_on_two_streams_joined_for_each_denoising_step(d: Device) -> Truth:
    """A denoising step is two passes of 2.4 ms on a stream each, side by side, and 0.6 ms that join them.

    The second stream begins behind the join before and the join waits for both, by events. All is launched two steps
    ahead, so for the device there is always the next kernel; a hand-over takes it some microseconds.
    """
    without, step, at = d.copies[6], 0, 0
    for step in turns():
        d.order(without, d.compute, step % 8)
        for _ in range(3):
            d.launch(800_000)
            d.launch(800_000, without)
        d.kernel_ns -= 3 * 800_000  # beside the other pass
        d.order(d.compute, without, 8 + step % 8)
        d.launch(600_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    return {}


class Flusher:
    """A thread that writes what the steps give it to a journal and flushes it, all that is there by then at once.

    Attributes:
        given: records that are to be written; flushed: how many the journal has for good.
    """

    record = 64 * KiB

    def __init__(self) -> None:
        self.file, self.given, self.flushed = tempfile.TemporaryFile(), Queue[bytes](), 0  # noqa: SIM115
        self.thread = in_thread(self.flush)

    def flush(self) -> None:
        """What the thread does."""
        more = True
        while more:
            group = [self.given.get()]
            try:
                while True:
                    group.append(self.given.get_nowait())
            except Empty:
                pass
            more = group[-1] != b""
            for one in filter(None, group):
                os.pwrite(self.file.fileno(), one * (self.record // len(one)), self.flushed % 256 * self.record)
                self.flushed += 1
            os.fsync(self.file.fileno())

    def end(self) -> bytes:
        """Ends the thread; what the journal has last."""
        self.given.put(b"")
        self.thread.join()
        last = os.pread(self.file.fileno(), 512, (self.flushed - 1) % 256 * self.record)
        self.file.close()
        return last


@fifteenth(
    line=COMPUTING,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "pageable_memory"),
    also=("wasted_stores",),
)
def a_journal_that_a_thread_flushes_for_groups_of_steps_launched_two_ahead(d: Device) -> Truth:
    """A thread writes each step's record of 64 KiB to a journal and stands in fsync until the file has it for good.

    Another thread launches steps of 5 ms two ahead, and gives the record of a step that is over to the first one
    without waiting for it: a slow file only makes larger groups.
    """
    flusher, step, at, past = Flusher(), 0, 0, list[int]()
    d.spent.restart()
    for step in turns():
        for _ in range(5):
            d.launch(1_000_000)
        at = token(d, step)
        past.append(at)
        paced(d, step, 2)
        if step > 1:
            flusher.given.put(ct.string_at(past[step - 2], 512))
    d.sync(d.compute)
    d.spent.stop()
    last = flusher.end()
    told(at, step)
    if flusher.flushed != step - 1 or last != bytes([(step - 2) % 251]) * 512:
        raise RuntimeError("the journal has other records than the steps have given")
    return {}


@fifteenth(
    line=COMPUTING,
    like=("redundant_loads", "small_copies", "weights_not_overlapped", "load_not_ordered", "link_bound"),
    also=("wasted_stores",),
)
def windows_of_speech_of_which_only_the_new_chunk_is_sent_to_a_ring_of_nine(d: Device) -> Truth:
    """A window of speech is six chunks and goes on by one; the new one alone is sent, two windows ahead, to a ring.

    A chunk takes the link 0.06 ms, on a stream of its own, and a window computes for 3 ms behind the event of its last
    chunk, which is there 3 ms before. A chunk takes the place of one whose last window is over by then, for which it
    waits by an event. Windows are launched one ahead.
    """
    pool, loads, window, at, ring, chunks = Pool(d, d.bytes_of(60)), d.copies[8], 0, 0, 9, 6
    recorded = min(pool.count - 2, 50)

    def send(chunk: int) -> None:
        pool.fetch(chunk % ring, chunk % recorded, loads)
        d.record(chunk % 16, loads)

    for chunk in range(chunks + 1):
        send(chunk)
    d.sync(loads)
    d.spent.restart()
    for window in turns():
        if window > 1:  # chunk `window + 7` takes the place of `window - 2`, of which that window was the last
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (window - 2) % 16], 0))
        send(window + chunks + 1)
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(window + chunks - 1) % 16], 0))
        for _ in range(3):
            d.launch(1_000_000)
        d.record(32 + window % 16, d.compute)
        at = token(d, window)
        paced(d, window, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    told(at, window)
    for chunk in (window, window + chunks + 1):
        same(d, d.device + chunk % ring * pool.size, d.host + chunk % recorded * pool.size, pool.size)
    return {}


def make_the_judge(_: Device) -> None:
    """How many answers the thread checks of each rollout."""
    MADE["judge"] = Sandbox()


@fifteenth(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "context_lock_stall"),
    also=("wasted_stores",),
    prepare=make_the_judge,
)
def answers_judged_by_shells_that_a_thread_starts_beside_rollouts_launched_two_ahead(d: Device) -> Truth:
    """A thread starts shells that check the answers of each rollout that is over, one after another, for 2 ms or so.

    Rollouts are 12 ms, and another thread launches them two ahead: the device has above 12 ms of kernels whenever the
    checks of one begin. The rewards are wanted at the end of all.
    """
    sandbox, over, rewards, rollout, at = MADE.pop("judge"), Queue[int](), list[int](), 0, 0

    def judge() -> None:
        while (one := over.get()) >= 0:
            rewards.append(sandbox.check(one))

    thread = in_thread(judge)
    d.spent.restart()
    for rollout in turns():
        for _ in range(6):
            d.launch(2_000_000)
        at = token(d, rollout)
        paced(d, rollout, 2)
        if rollout > 1:
            over.put(rollout - 2)
    d.sync(d.compute)
    d.spent.stop()
    over.put(-1)
    thread.join()
    told(at, rollout)
    if len(rewards) != rollout - 1 or any(reward != sandbox.answers for reward in rewards):
        raise RuntimeError("a rollout was judged otherwise than it should be")
    return {}


@fifteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores", "small_copies"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_microphone_whose_datagrams_of_sixty_four_milliseconds_are_recognised_in_eleven(d: Device) -> Truth:
    """A microphone sends a datagram of samples each 64 ms; it is received into pinned memory and recognised in 11 ms.

    Speech comes no faster than it is spoken: five sixths of the time the thread stands in `recv`, and all samples that
    there are were recognised. A datagram of 32 KiB is one copy of 2 us or so, in front of eleven kernels of 1 ms.
    """
    count, size, seen, at, right = 22, 32 * KiB, 0, 0, 0
    server, client = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    server.bind(("127.0.0.1", 0))
    client.connect(server.getsockname())
    heard = memoryview((ct.c_char * (2 * size)).from_address(d.host)).cast("B")

    def samples(number: int) -> bytes:
        return number.to_bytes(4, "little") * (size // 4)

    def speak() -> None:
        due = time.monotonic()
        for number in range(count):
            due += 0.064
            time.sleep(max(due - time.monotonic(), 0))
            client.send(samples(number))

    thread = in_thread(speak)
    d.spent.restart()
    while seen < count:
        home = seen % 2 * size
        with d.spent.on(NOTHING_TO_DO):
            got = server.recv_into(heard[home : home + size])
        right += got == size and heard[home : home + size] == samples(seen)
        d.copy(d.device + home, d.host + home, size, H2D, d.compute)
        for _ in range(11):
            d.launch(1_000_000)
        at = token(d, seen)
        d.sync(d.compute)
        told(at, seen)
        seen += 1
    d.spent.stop()
    thread.join()
    server.close()
    client.close()
    if right != count:
        raise RuntimeError("other samples were heard than were spoken")
    same(d, d.device + (seen - 1) % 2 * size, d.host + (seen - 1) % 2 * size, size)
    return {}


@fifteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def an_embedding_server_whose_clients_connect_anew_for_each_text(d: Device) -> Truth:
    """A client connects each 65 ms or so, sends a text, gets its embedding's number and hangs up; the server accepts.

    Texts go over connections of `multiprocessing`, and a text is five steps of 2 ms, two ahead. For five sixths of the
    time nobody has connected, and the thread stands in `accept`.
    """
    count, seen, heard = 21, 0, list[tuple[int, int]]()
    with Listener(family="AF_UNIX") as listener:
        address = listener.address

        def ask() -> None:
            for number in range(count):
                time.sleep((65, 55, 80, 60, 75, 70, 58)[number % 7] / 1_000)
                with Client(address) as one:
                    one.send(f"text {number} " + "word " * (number * 7 % 40))
                    heard.append(one.recv())

        thread = in_thread(ask)
        d.spent.restart()
        while seen < count:
            connection: Connection
            with d.spent.on(NOTHING_TO_DO):
                connection = listener.accept()
            with connection:
                text = connection.recv().split()
                answered(d, int(text[1]))
                connection.send((int(text[1]), len(text) - 2))
            seen += 1
        d.spent.stop()
        thread.join()
    if heard != [(number, number * 7 % 40) for number in range(count)]:
        raise RuntimeError("a client got the embedding of another text")
    same(d, d.device, d.host + 4 * 4 * KiB, 4 * KiB)
    return {}
