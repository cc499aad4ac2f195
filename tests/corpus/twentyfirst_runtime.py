"""Twenty-first programs of the runtime's calls: conversations, experts, tenants, a journal, pictures, a store, a spool.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction.
"""

from __future__ import annotations

import base64
import ctypes as ct
import json
import mmap
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Full, Queue
from typing import Any

from accounts import Pool, Stretches, paced, paced_and_read, stamp, turns
from device import D2H, H2D, Device, beyond, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    COMPUTING,
    DEVICE,
    ELSEWHERE,
    FULL_QUEUE,
    INSIDE_GPU,
    NOT_NEEDED,
    NOTHING_TO_DO,
    PYTHON,
    TIER,
    KiB,
    MiB,
    Truth,
    in_thread,
    twentyfirst,
)
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins
p = ct.c_void_p


# ---- kernels wait for copies ----------------------------------------------------------------------------------------


class Talks:
    """Three conversations at a time, which grow in step from three blocks to eight and are then followed by others.

    Attributes:
        most: blocks of the longest; pool: where the blocks of six conversations are, 64 us of the link each.
    """

    least, most, kinds = 3, 8, 6

    def __init__(self, d: Device) -> None:
        self.d, self.pool = d, Pool(d, d.bytes_of(64))
        if self.pool.count <= self.most * self.kinds:
            raise RuntimeError("the pool is too small for six conversations")

    def blocks(self, turn: int) -> list[int]:
        """Which blocks of the pool are there at a turn; a conversation's are scattered."""
        cycle, within = divmod(turn, 3 * (self.most - self.least + 1))
        talk, length = cycle % 2 * 3 + within % 3, self.least + within // 3
        return [(talk * self.most + number) * 29 % (self.most * self.kinds) for number in range(length)]

    def slots(self, turn: int, places: int) -> list[int]:
        """Where they come to: `places` turns have places of their own."""
        return [turn % places * 2 * self.most + number * 2 for number in range(len(self.blocks(turn)))]

    def bring(self, turn: int, places: int, stream: int) -> None:
        """All blocks of a turn, by one batch call."""
        where = self.pool.places(self.blocks(turn), self.slots(turn, places))
        self.d.batch([to for to, _ in where], [source for _, source in where], self.pool.size, stream)

    def check(self, turn: int, places: int) -> None:
        """Raises unless the first and the last block of a turn are in their slots."""
        where = self.pool.places(self.blocks(turn), self.slots(turn, places))
        for to, home in (where[0], where[-1]):
            same(self.d, to + self.pool.size - 64 * KiB, home + self.pool.size - 64 * KiB, 64 * KiB)


@twentyfirst(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def conversations_that_grow_and_each_bring_their_whole_cache_to_the_one_place_at_their_turn(d: Device) -> Truth:
    """Three conversations take turns in one place; each brings all its blocks, 0.2 to 0.5 ms, and computes for 0.2 ms.

    The blocks come by one batch call on the model's stream, so no kernel runs beside them: 0.35 ms of 0.55 ms in the
    mean. The place has another conversation's blocks each time, so each load is needed; the three grow in step from
    three blocks to eight and are then followed by three others. Turns are submitted two ahead.
    """
    talks, moves, turn = Talks(d), Stretches(d), 0
    for turn in turns():
        moves.begin()
        talks.bring(turn, 1, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(100_000)
        paced_and_read(d, turn, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    talks.check(turn, 1)
    return {}


@twentyfirst(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def experts_whose_places_are_exchanged_two_by_two_through_a_scratch_place_before_each_batch(d: Device) -> Truth:
    """A balancer exchanges the places of sixteen experts two by two before each batch, through a scratch place.

    An exchange is three copies within the device, 32 MiB each, on the model's stream. How long the eight exchanges take
    is measured first, and a batch computes for 0.6 of that. Nothing crosses the link until the program ends, and
    batches are submitted two ahead.
    """
    size, count, moves, batch, took = (32 * MiB if d.gpu else 512 * KiB), 16, Stretches(d), 0, 1 << 40
    experts, holds = d.made("cudaMalloc", (count + 1) * size), list(range(count))
    scratch, chance = experts + count * size, random.Random(211)

    def exchange() -> None:
        order = chance.sample(range(count), count)
        moves.begin()
        for one, other in zip(order[::2], order[1::2], strict=True):
            here, there = experts + one * size, experts + other * size
            for to, source in ((scratch, here), (here, there), (there, scratch)):
                d.copy(to, source, size, D2D, d.compute)
            holds[one], holds[other] = holds[other], holds[one]
        moves.end()

    for expert in range(count):
        clear(d, experts + expert * size, expert + 1, size, d.compute)
    for _ in range(4):
        exchange()
        d.sync(d.compute)
        moves.ns = 0
        took = min(took, moves.read())
    moves.ns = 0
    d.spent.restart()
    for batch in turns():
        exchange()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, batch, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    for place in range(count):
        d.copy(d.host, experts + (place + 1) * size - 512, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([holds[place] + 1]) * 512:
            raise RuntimeError(f"another expert is in a place than the balancer of batch {batch} put there")
    d.check(d.lib.cudaFree(experts))
    return {}


@twentyfirst(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def experts_cached_under_a_key_with_the_request_s_number_so_that_none_is_ever_found(d: Device) -> Truth:
    """A cache of experts has the request in its key, so each request brings its five though the last one's are there.

    Eight requests in a row are routed to the same experts, and the cache gives them one of two sets of slots in turn:
    the other set has the very experts that come, unchanged on both sides. Five experts take the link 0.5 ms and a
    request's kernels 0.4 ms, all on one stream. So seven of eight loads are not needed: 0.44 ms of each 0.9 ms.
    """
    each, alike, pool, request = 5, 8, Pool(d, d.bytes_of(100)), 0
    groups, again, needed = min((pool.count - 1) // each, 6), Stretches(d), Stretches(d)
    slots = dict[tuple[int, int], int]()  # by request and expert: the trouble
    for request in turns():
        experts = [request // alike % groups * each + number for number in range(each)]
        missing = [one for one in experts if (request, one) not in slots]
        stretch = again if request % alike else needed
        stretch.begin()
        for number, one in enumerate(missing):
            slots[request, one] = request % 2 * each + number
            pool.fetch(slots[request, one], one, d.compute)
        stretch.end()
        for _ in range(2):
            d.launch(200_000)
        for key in [key for key in slots if key[0] < request]:
            del slots[key]
        paced_and_read(d, request, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    for (_, expert), slot in slots.items():
        same(d, d.device + slot * pool.size + end, d.host + expert * pool.size + end, 64 * KiB)
    return {"redundant_loads": again.ns}


@twentyfirst(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("head_of_line_copies", "weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "slow_tier"),
)
def two_tenants_whose_adapters_come_on_one_stream_that_both_of_their_steps_join_at_its_end(d: Device) -> Truth:
    """Two tenants' adapters, 0.2 and 0.4 ms of the link, come on one stream, and both wait for both before they step.

    Each tenant has a compute stream and one place for its adapter, and the gateway's loads wait until both steps are
    over. The steps run side by side, 0.25 ms each; so for 0.6 ms of each 0.85 ms no kernel runs and a load does. Five
    adapters of each tenant take turns, so that each load brings other bytes than are there. Steps go two ahead.
    """
    pool, loads, other, step = Pool(d, d.bytes_of(200)), d.copies[4], d.copies[20], 0
    moves, small, large = Stretches(d, loads), 0, 0
    for step in turns():
        for number, stream in enumerate((d.compute, other)):
            d.order(loads, stream, step % 16 * 2 + number)
        small, large = step % 5, 6 + step % 5 * 2
        moves.begin()
        pool.fetch(0, small, loads)
        d.copy(d.device + 2 * pool.size, d.host + large * pool.size, 2 * pool.size, H2D, loads)
        moves.end()
        for number, stream in enumerate((d.compute, other)):
            d.order(stream, loads, 64 + step % 16 * 2 + number)
            for _ in range(2):
                d.launch(125_000, stream)
        d.record(224 + step % 16, other)
        if step >= 2:
            d.sync_event(224 + (step - 2) % 16)
        paced_and_read(d, step, moves, lag=2)
    for stream in (d.compute, other):
        d.sync(stream)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + small * pool.size + end, 64 * KiB)
    same(d, d.device + 3 * pool.size + end, d.host + (large + 1) * pool.size + end, 64 * KiB)
    return {}


# ---- the device waits for the host ----------------------------------------------------------------------------------


class Journal:
    """Blocks that may leave only when the journal's flush, a function of the host on a stream of its own, is over.

    Attributes:
        count: of blocks that a round lets go.
    """

    size, count, flushes, leaves = 16 * KiB, 2_400, 14, 15

    def __init__(self, d: Device) -> None:
        self.d, self.pool = d, Pool(d, self.size)
        self.order = random.Random(212).sample(range(self.count), self.count)
        self.sleep = ct.cast(ct.CDLL(None).usleep, p)
        d.lib.cudaLaunchHostFunc.argtypes = [p, p, p]

    def let_go(self, number: int, flush_us: int) -> list[int]:
        """Flushes, then stores all blocks of a round one by one: how long each call took, ns."""
        d, flushes, leaves = self.d, self.d.copies[self.flushes], self.d.copies[self.leaves]
        clear(d, d.device, number % 251, self.count * self.size, leaves)
        d.check(d.lib.cudaLaunchHostFunc(flushes, self.sleep, flush_us))
        d.order(leaves, flushes, number)
        at = [block * self.size for block in self.order]
        return [d.copy(d.host + one, d.device + one, self.size, D2H, leaves) for one in at]

    def check(self, number: int) -> None:
        """Raises unless the blocks of the last round have left."""
        self.d.sync(self.d.copies[self.leaves])
        for block in (self.order[0], self.order[-1]):
            if ct.string_at(self.d.host + block * self.size, 512) != bytes([number % 251]) * 512:
                raise RuntimeError("a block has left with other bytes than its round gave it")


@twentyfirst(
    line=FULL_QUEUE,
    or_lines=(ELSEWHERE,),  # where the flush, a function of the host, counts for more than the thread behind it
    also=(
        *("launch_queue_saturation", "fence_before_copies", "channels_exhausted", "gpu_starved", "small_copies"),
        *("wasted_stores", "unmerged_neighbours", "synchronisation", "python_or_gil_bound"),
    ),
    like=("allocation_on_hot_path", "slow_tier", "cpu_starved", "pageable_memory", "redundant_loads", "link_bound"),
)
def blocks_let_go_behind_a_journal_s_flush_by_the_thread_that_decodes_until_the_stream_is_full(d: Device) -> Truth:
    """A thread stores 2,400 blocks on a stream that waits for the journal's flush, 40 ms, then decodes 24 steps.

    The flush is a function of the host on another stream, and an event orders the stores behind it. A stream takes a
    thousand of them, so the thread stands in its call for 36 ms or so while nothing at all runs on the device: the
    steps before were waited for. The steps, 0.8 ms each, are launched when the last store is submitted.
    """
    journal, lost, number = Journal(d), 0, 0
    d.spent.restart()
    for number in turns():
        lost += beyond(journal.let_go(number, 40_000))
        for step in range(24):
            d.launch(800_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.sync(d.compute)
        d.sync(d.copies[journal.leaves])
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    journal.check(number)
    return {}


class Pictures:
    """Requests in JSON, each with a picture in base64, and the pinned places to which the pictures come.

    Attributes:
        size: bytes of a picture; most: pictures of a batch; each_ns: what it takes to decode one.
    """

    size, count, places, most = 96 * KiB, 24, 96, 11

    def __init__(self, d: Device) -> None:
        self.d, chance = d, random.Random(213)
        self.raw = [chance.randbytes(self.size) for _ in range(self.count)]
        self.asked = [
            json.dumps({"id": number, "model": "vlm", "picture": base64.b64encode(one).decode()}).encode()
            for number, one in enumerate(self.raw)
        ]
        self.each_ns = max(quickest(lambda: self.decode(0, 4), 8) // 4, 1)

    def decode(self, first: int, count: int) -> None:
        """So many requests' pictures to their places."""
        for number in range(first, first + count):
            picture = base64.b64decode(json.loads(self.asked[number % self.count])["picture"])
            ct.memmove(self.home(number), picture, self.size)

    def home(self, number: int) -> int:
        """Where a picture comes to on the host; places lie apart."""
        return self.d.host + number % self.places * (self.size + 32 * KiB)

    def decoded_in(self, us: int) -> int:
        """How many can be decoded in so long."""
        return min(max(us * 1_000 // self.each_ns, 1), self.most)

    def send(self, first: int, count: int) -> None:
        """So many pictures to the slots of a batch, on the model's stream; no slot has any of them."""
        for slot in range(count):
            to = self.d.device + slot * 2 * self.size
            self.d.copy(to, self.home(first + slot), self.size, H2D, self.d.compute)

    def check(self, slot: int, number: int) -> None:
        """Raises unless a picture is in its slot."""
        self.d.synchronize()
        back = self.d.host + self.d.size - MiB
        self.d.copy(back, self.d.device + slot * 2 * self.size, self.size, D2H, self.d.compute)
        self.d.synchronize()
        if ct.string_at(back, self.size) != self.raw[number % self.count]:
            raise RuntimeError("another picture is on the device than was asked about")


def make_the_pictures(d: Device) -> None:
    """The requests, and how long it takes to decode one."""
    MADE["pictures"] = Pictures(d)


@twentyfirst(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_pictures,
)
def pictures_in_base64_within_json_decoded_by_the_thread_that_encodes_them_batch_by_batch(d: Device) -> Truth:
    """A thread takes pictures of 96 KiB out of JSON and base64 for 1.6 ms or more, then encodes them in 0.6 ms.

    It waits for a batch's answer before it decodes the next one's pictures, so nothing is on the device meanwhile. How
    long a picture takes to decode is measured before, and a batch has as many as take 2 ms, eleven at most; where
    eleven take less, the kernels are shortened to 0.35 of that.
    """
    pictures, idle, batch = MADE.pop("pictures"), Stretches(d), 0
    count = pictures.decoded_in(2_000)
    kernels = min(600_000, count * pictures.each_ns * 35 // 100)
    d.spent.restart()
    for batch in turns():
        pictures.decode(batch * count, count)
        idle.end()
        pictures.send(batch * count, count)
        for _ in range(2):
            d.launch(kernels // 2)
        at = token(d, batch)
        idle.begin()
        d.sync(d.compute)
        told(at, batch)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    for slot in (0, count - 1):
        pictures.check(slot, batch * count + slot)
    return {}


class Registered:
    """Windows of a corpus in plain memory, of which a cache keeps four registered, the least recently used goes first.

    Attributes:
        took: ns to give one back and register another; lost: what all that took.
    """

    windows, kept, part = 5, 4, 2 * MiB

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.lost = d, (24 if d.gpu else 4) * MiB, 0
        self.mapping = mmap.mmap(-1, self.windows * self.size)
        self.view = ct.c_char.from_buffer(self.mapping)
        self.at = ct.addressof(self.view)
        for at in range(0, self.windows * self.size, MiB):
            ct.memmove(self.at + at, random.randbytes(MiB), MiB)
        self.cache = list[int]()
        for window in range(self.kept):
            self.wanted(window)
        self.took = quickest(lambda: self.wanted((self.cache[-1] + 1) % self.windows))

    def wanted(self, window: int) -> None:
        """Registers a window, and gives back the one that was not used for the longest time."""
        begin = now()
        if window in self.cache:
            self.cache.remove(window)
        else:
            if len(self.cache) == self.kept:
                self.d.check(self.d.lib.cudaHostUnregister(self.at + self.cache.pop(0) * self.size))
            self.d.check(self.d.lib.cudaHostRegister(self.at + window * self.size, self.size, 0))
        self.cache.append(window)
        self.lost += now() - begin

    def place(self, batch: int) -> int:
        """Which part of its window a batch reads."""
        parts = self.size // self.part
        return self.at + batch % self.windows * self.size + batch // self.windows % parts * self.part

    def end(self) -> None:
        """Gives all back."""
        for window in self.cache:
            self.d.check(self.d.lib.cudaHostUnregister(self.at + window * self.size))
        del self.view
        self.mapping.close()


def make_the_windows(d: Device) -> None:
    """The corpus, of which four windows are registered, and how long it takes to exchange one."""
    MADE["windows"] = Registered(d)


@twentyfirst(
    line=ALLOCATING,
    also=(
        *("allocation_on_hot_path", "pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation"),
        *("weights_not_overlapped", "python_or_gil_bound", "wasted_stores"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "small_copies", "cpu_starved", "redundant_loads"),
    prepare=make_the_windows,
    needs_gpu=True,  # the host runtime registers memory in no time
)
def a_cache_of_four_registered_windows_for_a_job_that_goes_round_five(d: Device) -> Truth:
    """A batch job goes round five windows of 24 MiB, and its cache keeps four registered, the oldest goes first.

    So each batch gives a window back and registers another, while nothing is on the device, as the batch before was
    waited for. How long that takes was measured before; a batch brings 2 MiB of its window, 40 us of the link, and
    computes for 0.4 of it.
    """
    windows, batch = MADE.pop("windows"), 0
    following = (windows.cache[-1] + 1) % windows.windows
    windows.lost = 0
    d.spent.restart()
    for batch in turns():
        number = batch + following
        windows.wanted(number % windows.windows)
        d.copy(d.device, windows.place(number), windows.part, H2D, d.compute)
        for _ in range(2):
            d.launch(max(windows.took // 5, 15_000))
        at = token(d, batch)
        d.sync(d.compute)
        told(at, batch)
    d.spent.add(ALLOCATING, windows.lost)
    d.spent.stop()
    same(d, d.device, windows.place(batch + following), 64 * KiB)
    windows.end()
    return {"allocation_on_hot_path": windows.lost}


STORE = """
import random, socket, sys, time
asked, us, size, count = socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:])
chance = random.Random(214)
blocks = [chance.randbytes(size) for _ in range(count)]
while key := asked.recv(4, socket.MSG_WAITALL):
    end = time.monotonic() + us * 1e-6
    while time.monotonic() < end:
        pass
    asked.sendall(blocks[int.from_bytes(key, "little") % count])
"""


class Store:
    """A process that keeps blocks of KV and answers a key after 0.2 ms, as a store does that is a network away.

    Attributes:
        size: bytes of a block; each: blocks of a request.
    """

    size, count, each, us = 32 * KiB, 80, 8, 200

    def __init__(self, d: Device) -> None:
        self.d = d
        self.mine, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        numbers = [str(one) for one in (theirs.fileno(), self.us, self.size, self.count)]
        command = [sys.executable, "-S", "-c", STORE, *numbers]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.bring(0)

    def home(self, block: int) -> int:
        """Where a block comes to on the host; no two lie side by side."""
        return self.d.host + block % self.count * 2 * self.size

    def bring(self, request: int) -> None:
        """A request's blocks, each asked for when the one before has come."""
        for block in range(request * self.each, (request + 1) * self.each):
            self.mine.sendall(block.to_bytes(4, "little"))
            room, got = (ct.c_char * self.size).from_address(self.home(block)), 0
            view = memoryview(room).cast("B")
            while got < self.size:
                got += self.mine.recv_into(view[got:])

    def check(self, request: int) -> None:
        """Raises unless the last block is the one that was asked for; the process ends."""
        self.mine.close()
        self.child.wait()
        chance, last = random.Random(214), request * self.each + self.each - 1
        blocks = [chance.randbytes(self.size) for _ in range(self.count)]
        if ct.string_at(self.home(last), self.size) != blocks[last % self.count]:
            raise RuntimeError("another block has come than was asked for")


def make_the_store(d: Device) -> None:
    """Starts it, and has it answer once."""
    MADE["store"] = Store(d)


@twentyfirst(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
        *("weights_not_overlapped", "unmerged_neighbours"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_store,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone: `recv` of data and of requests look alike
)
def blocks_of_a_prefix_asked_one_by_one_of_a_store_each_when_the_one_before_has_come(d: Device) -> Truth:
    """A request's eight blocks are asked of a store in another process, each when the one before has come, 0.2 ms each.

    The thread stands in `recv` for that, with nothing on the device: the request before was waited for. Then the eight
    are sent, some us of the link, and the request computes for 0.7 ms. So the device waits 1.6 ms or more of 2.4 ms.
    """
    store, request = MADE.pop("store"), 0
    d.spent.restart()
    for request in turns():
        with d.spent.on(TIER):
            store.bring(request)
        for number in range(store.each):
            home = store.home(request * store.each + number)
            d.copy(d.device + 2 * number * store.size, home, store.size, H2D, d.compute)
        for _ in range(2):
            d.launch(350_000)
        at = token(d, request)
        d.sync(d.compute)
        told(at, request)
    d.spent.stop()
    for number in (0, store.each - 1):
        same(d, d.device + 2 * number * store.size, store.home(request * store.each + number), store.size)
    store.check(request)
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


@twentyfirst(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "redundant_loads", "failed_calls"),
    also=("unmerged_neighbours",),
)
def conversations_that_grow_and_come_a_turn_ahead_to_the_other_of_two_places(d: Device) -> Truth:
    """Three growing conversations bring all their blocks at each turn, 0.2 to 0.5 ms, while the one before computes.

    A turn is 3 ms of kernels, and its blocks come to the other of two places as soon as the turn before the last is
    over: they are there five times as soon as they must be. The thread asks each 0.3 ms whether the turn before the
    last is over, so it is never less than a turn ahead.
    """
    talks, loads, turn, late = Talks(d), d.copies[5], 0, list[int]()
    talks.bring(0, 2, loads)
    d.record(0, loads)
    d.sync(loads)
    d.spent.restart()
    for turn in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[turn % 32], 0))
        for _ in range(2):
            d.launch(1_500_000)
        d.record(32 + turn % 32, d.compute)
        if turn:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (turn - 1) % 32], 0))
        talks.bring(turn + 1, 2, loads)
        d.record((turn + 1) % 32, loads)
        while turn >= 2 and d.lib.cudaEventQuery(d.events[32 + (turn - 2) % 32]):
            begin = now()
            time.sleep(0.0003)
            late.append(now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    talks.check(turn, 2)
    talks.check(turn + 1, 2)
    worst = sorted(late)[-2] if len(late) > 1 else 0
    plain_only(d, worst < 2_500_000, f"a sleep of 0.3 ms took {worst} ns")
    return {}


@twentyfirst(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "link_bound", "allocation_on_hot_path", "slow_tier"),
    also=(
        *("launch_queue_saturation", "fence_before_copies", "channels_exhausted", "small_copies", "wasted_stores"),
        "unmerged_neighbours",
    ),
)
def blocks_let_go_behind_a_journal_s_flush_while_a_prefill_of_ninety_milliseconds_is_ahead(d: Device) -> Truth:
    """A thread stores 2,400 blocks behind a journal's flush of 20 ms, but a prefill of 90 ms is on the device.

    It launches ten kernels of 9 ms, then stores until the stream is full and stands in its call until the flush is
    over, 30 ms or so with all the rest of the stores; then it waits for the prefill before. So when it comes back to
    launch there is a prefill on the device of which most or all is left, and no kernel waits for a store.
    """
    journal, number, lasted = Journal(d), 0, list[int]()
    d.spent.restart()
    for number in turns():
        for _ in range(10):
            d.launch(9_000_000)
        begin = now()
        journal.let_go(number, 20_000)
        lasted.append(now() - begin)
        paced(d, number, 1)
    d.sync(d.compute)
    d.spent.stop()
    journal.check(number)
    plain_only(d, max(lasted) < 70_000_000, f"to let the blocks go took {max(lasted)} ns")
    return {}


@twentyfirst(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "slow_tier", "redundant_loads"),
    also=("unmerged_neighbours", "wasted_stores"),
    prepare=make_the_pictures,
)
def pictures_in_base64_within_json_decoded_by_a_thread_up_to_three_batches_ahead(d: Device) -> Truth:
    """A thread takes pictures out of JSON and base64, 1.6 ms a batch, and another encodes a batch for 7 ms.

    The first leaves batches in a queue that takes three, and so stands in it most of the time; the second waits for
    the batch before the last alone, so there are 7 ms or more on the device when it takes the next. Even where each of
    its calls has to wait for the interpreter, it is done long before.
    """
    pictures, ready, over, batch, at = MADE.pop("pictures"), Queue[int](3), threading.Event(), 0, 0
    count, gone = pictures.decoded_in(1_600), list[int]()

    def decode() -> None:
        number = 0
        while not over.is_set():
            pictures.decode(number * count, count)  # eight batches fit: three wait, two or three are on the device
            while not over.is_set():
                try:
                    ready.put(number, timeout=0.05)
                    break
                except Full:
                    continue
            number += 1

    thread = in_thread(decode)
    while not ready.full():
        time.sleep(0.001)
    d.spent.restart()
    for batch in turns():
        begin = now()
        if ready.get() != batch:
            raise RuntimeError("a batch was left out")
        pictures.send(batch * count, count)
        for _ in range(2):
            d.launch(3_500_000)
        at = token(d, batch)
        gone.append(now() - begin)
        paced(d, batch, 2)
    over.set()
    d.sync(d.compute)
    d.spent.stop()
    thread.join()
    told(at, batch)
    for slot in (0, count - 1):
        pictures.check(slot, batch * count + slot)
    plain_only(d, sorted(gone)[-2] < 6_000_000, f"to submit a batch took {sorted(gone)[-2]} ns")
    return {}


CLERK = """
import os, sys, time
folder, count, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.read(way, 1)
due = time.monotonic()
for number in range(count):
    due += 0.064
    time.sleep(max(due - time.monotonic(), 0))
    with open(f"{folder}/.{number}", "wb") as job:
        job.write(number.to_bytes(4, "little") * 1_024)
    os.rename(f"{folder}/.{number}", f"{folder}/{number}.job")
"""


class Spool:
    """A folder into which another process moves a job each 64 ms, and an inotify descriptor that tells of it.

    Attributes:
        count: how many jobs there are.
    """

    count, moved_to = 23, 0x80

    def __init__(self) -> None:
        self.folder, libc = tempfile.mkdtemp(dir="/tmp"), ct.CDLL(None, use_errno=True)
        self.told = libc.inotify_init1(os.O_NONBLOCK)
        if self.told < 0 or libc.inotify_add_watch(self.told, self.folder.encode(), self.moved_to) < 0:
            raise RuntimeError(f"the folder cannot be watched: {os.strerror(ct.get_errno())}")
        self.asked = select.poll()
        self.asked.register(self.told, select.POLLIN)
        theirs, self.way = os.pipe()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", CLERK, self.folder, str(self.count), str(theirs)]
        self.child = subprocess.Popen(command, pass_fds=[theirs], env=env)
        os.close(theirs)

    def next(self, number: int) -> bytes:
        """Waits until a job has been moved into the folder, and takes it out."""
        job = Path(self.folder) / f"{number}.job"
        while not job.exists():
            if self.asked.poll(200):
                os.read(self.told, 4 * KiB)
        text = job.read_bytes()
        job.unlink()
        return text

    def end(self) -> None:
        """Waits until the process has ended; the folder goes."""
        self.child.wait()
        os.close(self.way)
        os.close(self.told)
        shutil.rmtree(self.folder)


def make_the_spool(_: Device) -> None:
    """The folder and the process."""
    MADE["spool"] = Spool()


@twentyfirst(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_spool,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def jobs_moved_into_a_watched_folder_sixty_four_milliseconds_apart(d: Device) -> Truth:
    """Another process moves a job into a folder each 64 ms; the server waits for inotify to tell, and needs 8 ms.

    It stands in `poll` on the inotify descriptor until a job is there, reads and removes it, answers in four kernels,
    and is there again. For seven eighths of the time nobody has asked for anything that was not answered.
    """
    spool, number = MADE.pop("spool"), 0
    d.spent.restart()
    os.write(spool.way, b"-")
    for number in range(spool.count):
        with d.spent.on(NOTHING_TO_DO):
            job = spool.next(number)
        if job[:4] != number.to_bytes(4, "little"):
            raise RuntimeError("another job came than was due")
        stamp(d, number % 8 * 4 * KiB, 4 * KiB, number)
        d.copy(d.device, d.host + number % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(2_000_000)
        at = token(d, number)
        d.sync(d.compute)
        told(at, number)
    d.spent.stop()
    spool.end()
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}
