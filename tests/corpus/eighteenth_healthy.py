"""Eighteenth programs that are healthy: bricks, managed rows, sweeps, sessions, a batcher, windows, bursts, events."""

from __future__ import annotations

import ctypes as ct
import os
import random
import select
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from queue import Queue
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device, now
from eighteenth_copies import Volume
from eighteenth_parts import Batcher, Listeners
from eighth_healthy import plain_only
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, eighteenth, in_thread
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins
p, z = ct.c_void_p, ct.c_size_t


@eighteenth(
    line=COMPUTING,
    like=("small_copies", "weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered"),
    also=("unmerged_neighbours",),
    needs_gpu=True,
)
def bricks_cut_out_of_a_scanned_volume_by_a_3d_copy_while_the_last_is_segmented(d: Device) -> Truth:
    """A scan is segmented brick by brick, and the next brick's 16,384 rows of 64 bytes come by a 3D copy meanwhile.

    It comes on a side stream to one of two places, behind the brick that has had it. How long a copy takes is measured
    first; a brick computes for 6 ms or for six times that, so it is there long before its kernels. Bricks are
    submitted two ahead, and 128 take turns.
    """
    volume, loads, brick = Volume(d), d.copies[6], 0
    each = max(2_000_000, 2 * volume.took())

    def ask(number: int) -> None:
        if number >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (number - 2) % 16], 0))
        volume.cut(number, d.device + number % 2 * volume.size, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for brick in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[brick % 16], 0))
        for _ in range(3):
            d.launch(each)
        d.record(32 + brick % 16, d.compute)
        ask(brick + 1)
        paced(d, brick, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    for last in (brick, brick + 1):
        volume.check(last, d.device + last % 2 * volume.size)
    return {}


class Location(ct.Structure):
    """`cudaMemLocation`: a device (1) and its number."""

    _fields_ = [("kind", ct.c_int), ("number", ct.c_int)]


class Managed:
    """Four places in managed memory, which the CPU writes and a stream is told to bring to the device.

    Attributes:
        size: bytes of a place; at: the first one's address.
    """

    places, size = 4, 2 * MiB

    def __init__(self, d: Device) -> None:
        self.d, version = d, ct.c_int()
        d.lib.cudaMallocManaged.argtypes = [p, z, ct.c_uint]
        self.at = d.made("cudaMallocManaged", self.places * self.size, 1)
        d.check(d.lib.cudaRuntimeGetVersion(ct.byref(version)))
        self.by_location = version.value >= 13_000
        self.bodies = [random.randbytes(self.size) for _ in range(7)]
        where = (Location, ct.c_uint) if self.by_location else (ct.c_int,)  # of CUDA 13, and before
        d.lib.cudaMemPrefetchAsync.argtypes = [p, z, *where, p]

    def write(self, number: int) -> None:
        """New rows in the place of this number."""
        ct.memmove(self.at + number % self.places * self.size, self.bodies[number % 7], self.size)

    def bring(self, number: int, stream: int) -> None:
        """The rows of this number are to be on the device."""
        at, where = self.at + number % self.places * self.size, (Location(1, 0), 0) if self.by_location else (0,)
        self.d.check(self.d.lib.cudaMemPrefetchAsync(at, self.size, *where, stream))

    def check(self, number: int) -> None:
        """Raises unless the rows of this number are in their place; frees all."""
        home, place = self.d.host + MiB, self.at + number % self.places * self.size
        self.d.copy(home, place, 64 * KiB, D2H, self.d.compute)
        self.d.sync(self.d.compute)
        if ct.string_at(home, 64 * KiB) != self.bodies[number % 7][: 64 * KiB]:
            raise RuntimeError("other rows are in managed memory than were written")
        self.d.check(self.d.lib.cudaFree(self.at))


@eighteenth(
    line=COMPUTING,
    like=("pageable_memory", "link_bound", "weights_not_overlapped", "gpu_starved", "redundant_loads"),
    also=("wasted_stores",),
    needs_gpu=True,
)
def rows_in_managed_memory_prefetched_two_batches_before_they_are_looked_up(d: Device) -> Truth:
    """The CPU writes a batch's rows, 2 MiB, into managed memory; cudaMemPrefetchAsync brings them two batches ahead.

    They go on a side stream to the device and from there back when the CPU writes their place again, four batches
    later. A batch computes for 8 ms behind an event of its own rows, and two others are on the device when the thread
    writes and asks: that takes a millisecond or two, and the device has 8 ms or more of kernels meanwhile.
    """
    rows, side, batch, lasted = Managed(d), d.copies[11], 0, list[int]()

    def ask(number: int) -> None:
        begin = now()
        rows.write(number)
        rows.bring(number, side)
        d.record(number % 16, side)
        lasted.append(now() - begin)

    for number in range(2):
        ask(number)
    d.sync(side)
    lasted.clear()
    d.spent.restart()
    for batch in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[batch % 16], 0))
        for _ in range(4):
            d.launch(2_000_000)
        ask(batch + 2)
        paced(d, batch, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(side)
    rows.check(batch + 2)
    plain_only(d, sorted(lasted)[-2] < 7_000_000, f"to write and to ask took {sorted(lasted)[-2]} ns")
    return {}


@eighteenth(
    line=COMPUTING,
    like=("synchronisation", "weights_not_overlapped", "link_bound", "python_or_gil_bound", "gpu_starved"),
    also=("unmerged_neighbours",),
)
def sweeps_of_a_lidar_asked_after_by_stream_query_while_the_one_before_is_searched(d: Device) -> Truth:
    """A sweep comes in 0.5 ms while the one before is searched for 5 ms, and the thread asks all the time what is over.

    It asks the stream of the copy until the sweep is there, launches its search behind the one that runs, and asks for
    that one until it is over. So the device always has a search when one ends, and copies only beside one. There are
    three places for sweeps; thousands of questions are answered that something is not ready.
    """
    pool, loads, sweep, asked = Pool(d, d.bytes_of(500)), d.copies[3], 0, 0
    kept = min(pool.count - 1, 5)
    kept -= kept % 3 == 0  # another sweep each time in each of three places
    d.lib.cudaStreamQuery.argtypes = [p]
    d.spent.restart()
    for sweep in turns():
        pool.fetch(sweep % 3, sweep % kept, loads)
        while d.lib.cudaStreamQuery(loads):
            asked += 1
        for _ in range(5):
            d.launch(1_000_000)
        d.record(sweep % 16, d.compute)
        while sweep and d.lib.cudaEventQuery(d.events[(sweep - 1) % 16]):
            asked += 1
    d.sync(d.compute)
    d.spent.stop()
    if asked < sweep:
        raise RuntimeError("nobody has asked")
    end = pool.size - 64 * KiB
    same(d, d.device + sweep % 3 * pool.size + end, d.host + sweep % kept * pool.size + end, 64 * KiB)
    return {}


@eighteenth(
    line=COMPUTING,
    like=("allocation_on_hot_path", "context_lock_stall", "aliased_stream", "channels_exhausted", "first_calls"),
    also=("unmerged_neighbours",),
)
def a_stream_of_high_priority_and_two_events_made_for_each_request_s_prefix(d: Device) -> Truth:
    """A request's prefix, 0.3 ms of the link, comes on a stream of high priority that is made for it, with two events.

    The stream is destroyed when the request is over, and so are the events. A request computes for 8 ms and its prefix
    comes a request ahead to one of three places, so that the calls, some 0.1 ms for a request, and the copy are always
    beside kernels. Some seven prefixes take turns.
    """
    pool, request, held = Pool(d, d.bytes_of(300)), 0, deque[tuple[int, list[int]]]()
    lib, kept, least, greatest = d.lib, min(pool.count - 1, 7), ct.c_int(), ct.c_int()
    lib.cudaDeviceGetStreamPriorityRange.argtypes = [p, p]
    lib.cudaStreamCreateWithPriority.argtypes = [p, ct.c_uint, ct.c_int]
    lib.cudaStreamDestroy.argtypes = [p]
    d.check(lib.cudaDeviceGetStreamPriorityRange(ct.byref(least), ct.byref(greatest)))

    def ask(number: int) -> None:
        stream, events = d.made("cudaStreamCreateWithPriority", 1, greatest.value), [d.event() for _ in range(2)]
        d.check(lib.cudaEventRecord(events[0], stream))
        pool.fetch(number % 3, number % kept, stream)
        d.check(lib.cudaEventRecord(events[1], stream))
        held.append((stream, events))

    def over() -> None:
        stream, events = held.popleft()
        for event in events:
            d.check(lib.cudaEventDestroy(event))
        d.check(lib.cudaStreamDestroy(stream))

    ask(0)
    d.sync(held[0][0])
    d.spent.restart()
    for request in turns():
        d.check(lib.cudaStreamWaitEvent(d.compute, held[-1][1][1], 0))
        for _ in range(4):
            d.launch(2_000_000)
        paced(d, request, 1)  # the one before is over, and its place is free
        if request:
            over()
        ask(request + 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(held[-1][0])
    while held:
        over()
    end = pool.size - 64 * KiB
    for last in (request, request + 1):
        same(d, d.device + last % 3 * pool.size + end, d.host + last % kept * pool.size + end, 64 * KiB)
    return {}


@eighteenth(
    line=COMPUTING,
    like=("gpu_starved", "python_or_gil_bound", "synchronisation", "slow_tier", "cpu_starved"),
    also=("wasted_stores",),
)
def a_dynamic_batcher_that_waits_for_a_fourth_request_while_two_batches_compute(d: Device) -> Truth:
    """A batcher waits 2 ms in vain for a fourth request, each time, while two batches of 6 ms are on the device.

    Three clients have three requests each, six of which are on the device when it waits for more than the three that
    are there. It then launches these and waits until the batch before the last is over, whose clients ask again.
    """
    batcher, step, at, seen = Batcher(3, 3), 0, 0, 0
    under_way = deque[list[int]]()
    d.spent.restart()
    for step in turns():
        batch = batcher.collect(4 if step > 2 else 3, 0.002)
        seen += len(batch)
        under_way.append(batch)
        for _ in range(3):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 2)
        if step >= 2:
            batcher.answer(under_way.popleft())
    d.sync(d.compute)
    d.spent.stop()
    batcher.stop()
    told(at, step)
    if seen < 2 * step:
        raise RuntimeError("requests were not there in time")
    return {}


@eighteenth(
    line=COMPUTING,
    like=("allocation_on_hot_path", "context_lock_stall", "gpu_starved", "weights_not_overlapped", "redundant_loads"),
    also=("unmerged_neighbours",),
)
def windows_of_a_video_brought_into_memory_of_a_pool_that_is_trimmed_now_and_then(d: Device) -> Truth:
    """A window of a video comes in 0.3 ms into memory that its stream takes from the pool, a window ahead of its 8 ms.

    The model's stream gives the memory back behind the window's kernels. Each sixteenth time the thread trims the pool,
    while two windows are on the device, so 8 ms of kernels or more are there for what that takes, once in 128 ms.
    Some seven windows take turns.
    """
    source, loads, window, lib, pool = Pool(d, d.bytes_of(300)), d.copies[5], 0, d.lib, p()
    kept, held, all_of_it, none = min(source.count - 1, 7), deque[int](), ct.c_uint64(2**64 - 1), ct.c_uint64(0)
    lib.cudaMallocAsync.argtypes, lib.cudaFreeAsync.argtypes = [p, z, p], [p, p]
    lib.cudaDeviceGetDefaultMemPool.argtypes, lib.cudaMemPoolTrimTo.argtypes = [p, ct.c_int], [p, z]
    d.check(lib.cudaDeviceGetDefaultMemPool(ct.byref(pool), 0))
    if d.gpu:
        lib.cudaMemPoolSetAttribute.argtypes = [p, ct.c_int, p]
        d.check(lib.cudaMemPoolSetAttribute(pool, 4, ct.byref(all_of_it)))  # only the trim gives memory back

    def ask(number: int) -> None:
        held.append(d.made("cudaMallocAsync", source.size, loads))
        home = d.host + number % kept * source.size
        d.copy(held[-1], home, source.size, H2D, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for window in turns():
        d.check(lib.cudaStreamWaitEvent(d.compute, d.events[window % 16], 0))
        for _ in range(4):
            d.launch(2_000_000)
        if window % 16 == 15:
            d.check(lib.cudaMemPoolTrimTo(pool, source.size))
        ask(window + 1)
        d.check(lib.cudaFreeAsync(held.popleft(), d.compute))
        paced(d, window, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    last = source.size - 64 * KiB
    same(d, held[0] + last, d.host + (window + 1) % kept * source.size + last, 64 * KiB)
    d.check(lib.cudaFreeAsync(held.popleft(), loads))
    d.sync(loads)
    d.check(lib.cudaMemPoolTrimTo(pool, 0))
    if d.gpu:
        d.check(lib.cudaMemPoolSetAttribute(pool, 4, ct.byref(none)))
    return {}


BURSTS = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as way, open(sys.argv[2], "rb", buffering=0) as go:
    go.read(1)
    due, number = time.monotonic(), 0
    for _ in range(int(sys.argv[3])):
        due += 0.17
        time.sleep(max(due - time.monotonic(), 0))
        for _ in range(3):
            way.write(number.to_bytes(4, "little") * 1_024)
            number += 1
"""


class Bursts:
    """A process that writes three requests at once into a named pipe, each 170 ms, so many times."""

    count = 9

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        way, go = (str(Path(self.folder.name) / name) for name in ("way", "go"))
        os.mkfifo(way)
        os.mkfifo(go)
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self.child = subprocess.Popen([sys.executable, "-S", "-c", BURSTS, way, go, str(self.count)], env=env)
        self.way = os.open(way, os.O_RDONLY)  # each waits for the other side
        self.go = os.open(go, os.O_WRONLY)

    def end(self) -> None:
        """Waits until the process has ended, and removes the pipes."""
        self.child.wait()
        os.close(self.way)
        os.close(self.go)
        self.folder.cleanup()


def make_the_bursts(_: Device) -> None:
    """Starts the process."""
    MADE["bursts"] = Bursts()


@eighteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_bursts,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def bursts_of_three_requests_in_a_named_pipe_a_sixth_of_a_second_apart(d: Device) -> Truth:
    """Another process writes three requests at once into a named pipe, then nothing for 170 ms; an answer takes 6 ms.

    Requests are read and launched one behind the other while there are any, and then all are waited for. For five
    sixths of the time nobody has asked for anything that was not answered, and the thread stands in `select`.
    """
    bursts, done, at = MADE.pop("bursts"), 0, 0
    os.write(bursts.go, b"-")
    d.spent.restart()
    while done < 3 * bursts.count:
        with d.spent.on(NOTHING_TO_DO):
            select.select([bursts.way], [], [])
        for _ in range(3):
            request = b""
            while len(request) < 4 * KiB:
                request += os.read(bursts.way, 4 * KiB - len(request))
            if request[:4] != done.to_bytes(4, "little"):
                raise RuntimeError("a request came out of its turn")
            home = d.host + done % 8 * 4 * KiB
            ct.memmove(home, request, len(request))
            d.copy(d.device, home, len(request), H2D, d.compute)
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, done)
            done += 1
        d.sync(d.compute)
        told(at, done - 1)
    d.spent.stop()
    bursts.end()
    same(d, d.device, d.host + (done - 1) % 8 * 4 * KiB, 4 * KiB)
    return {}


def make_the_listeners(_: Device) -> None:
    """Starts them."""
    MADE["listeners"] = Listeners()


@eighteenth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "small_copies", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_listeners,
)
def tokens_told_to_listeners_by_a_thread_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """A step takes 6 ms, and another thread makes an event in JSON of each sequence's token and sends it, for 1.6 ms.

    The two share the interpreter's lock, but steps are launched two ahead: the device has 6 ms of kernels or more
    whenever the thread that launches has to wait for the lock. The tokens that are told are two steps old.
    """
    listeners, step, at, asked, lasted = MADE.pop("listeners"), 0, 0, Queue[int](), list[int]()
    sequences = listeners.told_in(1_600)

    def tell() -> None:
        while (number := asked.get()) >= 0:
            begin = now()
            listeners.tell(number, sequences)
            lasted.append(now() - begin)

    thread = in_thread(tell)
    d.spent.restart()
    for step in turns():
        ids = step % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, step)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 2)
        if step >= 2:
            asked.put(step - 2)
    d.sync(d.compute)
    d.spent.stop()
    asked.put(-1)
    thread.join()
    told(at, step)
    listeners.stop()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    plain_only(d, sorted(lasted)[-2] < 6_000_000, f"to tell a step's tokens took {sorted(lasted)[-2]} ns")
    return {}
