"""Eighteenth programs whose device waits for the host: cameras, sessions, a crowded CPU, a batcher, pages, events."""

from __future__ import annotations

import contextlib
import ctypes as ct
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from accounts import Stretches, decoded, turns
from device import D2H, H2D, NON_BLOCKING, Device, now
from eighteenth_parts import Batcher, Listeners
from fresh_copies import clear
from ninth_healthy import token, told
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    NO_CPU,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    eighteenth,
    in_thread,
    pageable,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Cameras:
    """Six cameras' frames in plain memory; three are sent by a thread each, three by the thread that launches.

    Attributes:
        took: ns to send all.
    """

    cameras, kept = 6, 4

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, 3 * MiB if d.gpu else 512 * KiB
        self.keep, self.at = pageable(self.cameras * self.kept * self.size)
        for frame in range(self.cameras * self.kept):
            ct.memmove(self.at + frame * self.size, random.randbytes(self.size), self.size)
        self.number, self.over = 0, False
        self.begin, self.end = threading.Barrier(4), threading.Barrier(4)
        self.threads = [in_thread(lambda camera=camera: self.serve(camera)) for camera in range(3, 6)]
        self.took = quickest(lambda: self.send(self.number + 1))

    def frame(self, camera: int, number: int) -> int:
        """Where a camera's frame is; four take turns."""
        return self.at + (camera * self.kept + number % self.kept) * self.size

    def one(self, camera: int) -> None:
        """A camera's frame to its place on the device."""
        at = self.d.device + camera * self.size
        self.d.check(self.d.lib.cudaMemcpy(at, self.frame(camera, self.number), self.size, H2D))

    def serve(self, camera: int) -> None:
        """What the thread of a camera does."""
        while self.begin.wait() >= 0 and not self.over:
            self.one(camera)
            self.end.wait()

    def send(self, number: int) -> None:
        """The frames with this number of all cameras."""
        self.number = number
        self.begin.wait()
        for camera in range(3):
            self.one(camera)
        self.end.wait()

    def stop(self) -> None:
        """The threads end."""
        self.over = True
        self.begin.wait()
        for thread in self.threads:
            thread.join()


@eighteenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
        *("link_bound", "context_lock_stall"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
)
def frames_of_a_car_s_six_cameras_sent_by_synchronous_copies_of_four_threads(d: Device) -> Truth:
    """A car's six frames lie in plain memory, and four threads send them by cudaMemcpy before the detector begins.

    Three threads send one frame each, the thread that launches sends three, so that it stands in these calls all the
    while; then the four meet. The detector was waited for and begins when all six are there. How long they take is
    measured first, and the detector computes for 0.7 of that. Four frames of each camera take turns.
    """
    cameras, lost, step = Cameras(d), 0, 0
    d.spent.restart()
    for step in turns():
        begin = now()
        cameras.send(step)
        lost += now() - begin
        for _ in range(2):
            d.launch(max(cameras.took * 7 // 20, 20_000))
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    cameras.stop()
    end = cameras.size - 64 * KiB
    for camera in range(cameras.cameras):
        same(d, d.device + camera * cameras.size + end, cameras.frame(camera, step) + end, 64 * KiB)
    return {"pageable_memory": lost}


class Session:
    """What a server makes for each session: a mailbox of pinned memory, scratch on the device, a stream, two events.

    Attributes:
        memory_ns: what the calls have taken that make and free memory.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.memory_ns = d, 0
        self.box, self.room = (2 * MiB, 24 * MiB) if d.gpu else (512 * KiB, 512 * KiB)
        d.lib.cudaStreamDestroy.argtypes = [ct.c_void_p]

    def open(self) -> None:
        """All is made."""
        begin = now()
        self.mailbox = self.d.made("cudaHostAlloc", self.box, 0)
        self.scratch = self.d.made("cudaMalloc", self.room)
        self.memory_ns += now() - begin
        self.stream = self.d.made("cudaStreamCreateWithFlags", NON_BLOCKING)
        self.events = [self.d.event() for _ in range(2)]

    def close(self) -> None:
        """All goes."""
        for event in self.events:
            self.d.check(self.d.lib.cudaEventDestroy(event))
        self.d.check(self.d.lib.cudaStreamDestroy(self.stream))
        begin = now()
        self.d.check(self.d.lib.cudaFree(self.scratch))
        self.d.check(self.d.lib.cudaFreeHost(self.mailbox))
        self.memory_ns += now() - begin

    def whole(self) -> None:
        """Opened and closed, with nothing between."""
        self.open()
        self.close()


@eighteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE, SUBMITTING),  # streams are no memory, and not each recorder shows their making
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        *("wasted_stores", "first_calls", "channels_exhausted"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "cpu_starved", "redundant_loads", "small_copies"),
)
def a_mailbox_scratch_stream_and_events_of_its_own_made_for_each_session(d: Device) -> Truth:
    """For each session a server pins a mailbox of 2 MiB, makes 24 MiB of scratch, a stream and two events of its own.

    When its answer is in the mailbox all are given back, and the next session's are made: nothing is on the device in
    any of these calls. How long they take without a session is measured first, and a session computes for half of it.
    """
    session, lost, step, right = Session(d), 0, 0, 0
    took = quickest(session.whole, 6)
    session.memory_ns = 0
    d.spent.restart()
    for step in turns():
        begin = now()
        session.open()
        lost += now() - begin
        clear(d, session.scratch, step % 251, 512, session.stream)
        d.launch(max(took // 2, 20_000), session.stream)
        d.check(d.lib.cudaEventRecord(session.events[0], session.stream))
        d.copy(session.mailbox, session.scratch, 512, D2H, session.stream)
        d.check(d.lib.cudaEventRecord(session.events[1], session.stream))
        d.check(d.lib.cudaEventSynchronize(session.events[1]))
        right += ct.string_at(session.mailbox, 512) == bytes([step % 251]) * 512
        begin = now()
        session.close()
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if right != step + 1:
        raise RuntimeError("a session has got another answer than its own")
    return {"allocation_on_hot_path": session.memory_ns}


COMPRESSOR = """
import os, sys, zlib
os.sched_setaffinity(0, {int(sys.argv[1])})
text = os.urandom(200_000) * 5
zlib.compress(text, 1)
print(flush=True)
while True:
    zlib.compress(text, 6)
"""


@contextlib.contextmanager
def compressors_on_this_cpu(count: int) -> Iterator[None]:
    """So many processes that compress, on the one CPU that this thread may use."""
    before = os.sched_getaffinity(0)
    cpu = sorted(before)[len(before) // 2]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", COMPRESSOR, str(cpu)]
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout
            child.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        yield
    finally:
        os.sched_setaffinity(0, before)
        for child in children:
            child.kill()
            child.communicate()


@eighteenth(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation", "wasted_stores"),
    like=("context_lock_stall", "slow_tier", "launch_queue_saturation", "small_copies"),
    blind=DEVICE,
)
def a_checkpoint_compressed_by_three_processes_on_the_cpu_of_the_thread_that_launches(d: Device) -> Truth:
    """Three processes compress a checkpoint on the one CPU that the thread may use, which hashes its batch for 2 ms.

    The hashing is 2 ms of the CPU and comes before each step of 0.6 ms, which is waited for; so nothing is on the
    device meanwhile. A fourth of a CPU is the thread's, so the 2 ms take it some 8 ms, in 6 ms of which others run.
    """
    piece, off, step, at = bytes(64 * KiB), 0, 0, 0
    with compressors_on_this_cpu(3):
        d.spent.restart()
        for step in turns():
            begin, busy = now(), time.thread_time_ns()
            while time.thread_time_ns() - busy < 2_000_000:
                hashlib.sha256(piece).digest()
            for _ in range(2):
                d.launch(300_000)
            at = token(d, step)
            d.sync(d.compute)
            off += max(now() - begin - 2_700_000, 0)  # alone, a step is its hashing, its kernels and 0.1 ms
        d.spent.add(NO_CPU, off)
        d.spent.stop()
    told(at, step)
    return {"cpu_starved": off}


@eighteenth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("cpu_starved", "small_copies", "slow_tier", "launch_queue_saturation", "context_lock_stall"),
)
def a_dynamic_batcher_that_waits_for_a_fourth_request_while_three_are_there(d: Device) -> Truth:
    """A batcher waits up to 2 ms for four requests, but there are three clients, and each waits for its answer.

    So the condition variable always times out, with three requests in the batcher's hands, and then they compute for
    0.8 ms and are answered. Nothing is on the device during the 2 ms, though somebody waits for it all the time.
    """
    batcher, step, lost, seen, at = Batcher(3, 1), 0, 0, 0, 0
    batcher.answer(batcher.collect(3, 1.0))
    d.spent.restart()
    for step in turns():
        begin = now()
        batch = batcher.collect(4, 0.002)
        lost += now() - begin
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
        seen += len(batch)
        batcher.answer(batch)
    d.spent.add(ELSEWHERE, lost)
    d.spent.stop()
    batcher.stop()
    told(at, step)
    if seen < 2 * step:
        raise RuntimeError("requests were not there in time")
    return {}


class Pages:
    """Pages of cold conversations in a file, and the pinned slots into which one call reads sixteen of them.

    Attributes:
        took: ns for a read of sixteen pages.
    """

    size, each, count = 64 * KiB, 16, 768

    def __init__(self, d: Device) -> None:
        self.d, self.file = d, tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115 - closed with the object
        for _ in range(self.count // self.each):
            self.file.write(random.randbytes(self.size * self.each))
        self.file.flush()
        self.slots = d.size // 2 // (2 * self.size) // self.each * self.each
        self.order = random.Random(183).sample(range(self.slots), self.slots)
        self.took = quickest(lambda: self.read(0, 0), 6)

    def slot(self, number: int) -> int:
        """Where on the host the slot with this number is; no two lie side by side."""
        return self.d.host + self.order[number % self.slots] * 2 * self.size

    def read(self, first: int, slot: int) -> None:
        """Sixteen pages that follow each other in the file, each to a slot."""
        views = [(ct.c_char * self.size).from_address(self.slot(slot + i)) for i in range(self.each)]
        place = first % self.count * self.size
        if os.preadv(self.file.fileno(), views, place) != self.size * self.each:
            raise RuntimeError("the file is shorter than it was")


def make_the_pages(d: Device) -> None:
    """The file, and how long a read takes."""
    MADE["pages"] = Pages(d)


@eighteenth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # a recorder of calls alone sees a thread outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        *("wasted_stores", "unmerged_neighbours"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_pages,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def pages_of_a_cold_conversation_scattered_by_preadv_into_pinned_slots_before_it_goes_on(d: Device) -> Truth:
    """A conversation's pages of 64 KiB are read by `preadv`, sixteen a call, into scattered slots, for 1.6 ms.

    Then its last sixteen are sent, 20 us of the link, and its step of 0.8 ms is launched. The step before was waited
    for, so nothing is on the device until all are read. How many calls take 1.6 ms was measured before.
    """
    pages, step, at = MADE.pop("pages"), 0, 0
    calls, each = min(max(1_600_000 // pages.took, 1), 400), pages.each
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            for call in range(calls):
                pages.read((step * calls + call) * each, call * each)
        last = [pages.slot((calls - 1) * each + i) for i in range(each)]
        d.batch([d.device + i * 2 * pages.size for i in range(each)], last, pages.size, d.compute)
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    first = (step * calls + calls - 1) * each % pages.count
    right = os.pread(pages.file.fileno(), pages.size, (first + each - 1) * pages.size)
    home = pages.slot(calls * each - 1)
    pages.file.close()
    if ct.string_at(home, pages.size) != right:
        raise RuntimeError("another page was read than was asked for")
    same(d, d.device + (each - 1) * 2 * pages.size, home, pages.size)
    return {}


def make_the_listeners(_: Device) -> None:
    """Starts them."""
    MADE["listeners"] = Listeners()


@eighteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation"),
    prepare=make_the_listeners,
)
def tokens_told_to_listeners_as_events_over_sockets_before_the_next_step(d: Device) -> Truth:
    """When a step of 0.8 ms is over, each sequence's token is made an event in JSON and sent to its client's socket.

    So many sequences decode that it takes 1.6 ms, as was measured before; the clients are 32 sockets of a process that
    always has room. The next step is launched when all were told, so nothing is on the device meanwhile.
    """
    listeners, idle, step = MADE.pop("listeners"), Stretches(d), 0
    sequences = listeners.told_in(1_600)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        listeners.tell(step, sequences)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    listeners.stop()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


@eighteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE, SUBMITTING),  # a thread that waits for another one's word, and then makes one call
    also=("gpu_starved", "python_or_gil_bound", "synchronisation", "context_lock_stall"),
    like=("aliased_stream", "small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def two_threads_that_give_each_other_the_turn_after_each_small_kernel(d: Device) -> Truth:
    """An encoder's thread and a decoder's take turns by two semaphores; whoever has the turn launches a kernel of 5 us.

    To give the turn, to be woken and to have the interpreter's lock takes longer than the kernel, and only then is the
    next one launched: the device is done with each before it has another. No call waits for the device.
    """
    turn, over, kernel, seen = [threading.Semaphore(one) for one in (1, 0)], threading.Event(), 5_000, [0, 0]

    def launch(mine: int) -> None:
        while turn[mine].acquire() and not over.is_set():
            d.launch(kernel)
            seen[mine] += 1
            turn[1 - mine].release()

    d.spent.restart()
    threads = [in_thread(lambda mine=mine: launch(mine)) for mine in (0, 1)]
    time.sleep(1.5)
    over.set()
    for mine in (0, 1):
        turn[mine].release()
    for thread in threads:
        thread.join()
    d.spent.stop()
    d.spent.add(PYTHON, d.spent.end - d.spent.begin - sum(seen) * kernel)
    d.sync(d.compute)
    if abs(seen[0] - seen[1]) > 2:
        raise RuntimeError(f"the two have not taken turns: {seen}")
    return {}
