"""Twenty-fourth programs of the runtime's calls: engines of several threads, hand-overs, swaps, adapters, tiers.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes as ct
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Queue
from typing import Any

from accounts import Pool, Stretches, decoded, paced, paced_and_read, stamp, turns
from device import D2H, H2D, Attributes, Device, beyond, now
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
    NO_CPU,
    NOT_NEEDED,
    NOTHING_TO_DO,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    pageable,
    twentyfourth,
)
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins
p, z = ct.c_void_p, ct.c_size_t


class Mailbox:
    """What one thread leaves for another, behind a condition variable."""

    def __init__(self) -> None:
        self.items, self.changed = deque[Any](), threading.Condition()

    def put(self, item: Any) -> None:
        """Leaves something, and wakes whoever waits."""
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def take(self) -> Any:
        """The oldest, when there is one."""
        with self.changed:
            self.changed.wait_for(lambda: self.items)
            return self.items.popleft()


# ---- kernels wait for copies ----------------------------------------------------------------------------------------


class Layers:
    """The KV of requests in layers, 80 us of the link each, and a connector's thread that brings them.

    Attributes:
        places: how many requests' layers the device has room for; moves: of the connector's loads.
    """

    layers, kinds = 12, 3

    def __init__(self, d: Device, places: int) -> None:
        self.d, self.places, self.pool, self.loads = d, places, Pool(d, d.bytes_of(80)), d.copies[5]
        if self.pool.count <= self.layers * self.kinds:
            raise RuntimeError("the pool is too small for three requests")
        self.moves, self.asked, self.there = Stretches(d, self.loads), Mailbox(), Mailbox()
        self.thread = in_thread(self.serve)

    def event(self, request: int, layer: int) -> int:
        """The event behind a layer's load."""
        return self.d.events[request % 4 * self.layers + layer]

    def over(self, request: int) -> int:
        """The event behind a request's kernels."""
        return self.d.events[200 + request % 16]

    def serve(self) -> None:
        """What the connector's thread does: all layers of each request, when its place is free."""
        d = self.d
        while (request := self.asked.take()) >= 0:
            if request >= self.places:
                d.check(d.lib.cudaStreamWaitEvent(self.loads, self.over(request - self.places), 0))
            self.moves.begin()
            for layer in range(self.layers):
                slot, block = (one * self.layers + layer for one in (request % self.places, request % self.kinds))
                self.pool.fetch(slot, block, self.loads)
                d.check(d.lib.cudaEventRecord(self.event(request, layer), self.loads))
            self.moves.end()
            self.there.put(request)

    def compute(self, request: int, each_ns: int, behind: int | None = None) -> None:
        """A kernel for each layer, behind the layer's own load, or behind that of layer `behind`."""
        d = self.d
        for layer in range(self.layers):
            event = self.event(request, layer if behind is None else behind)
            d.check(d.lib.cudaStreamWaitEvent(d.compute, event, 0))
            d.launch(each_ns)
        d.check(d.lib.cudaEventRecord(self.over(request), d.compute))

    def end(self, request: int) -> None:
        """Ends the thread; raises unless the first and the last layer of a request are there."""
        self.asked.put(-1)
        self.thread.join()
        self.d.synchronize()
        end = self.pool.size - 64 * KiB
        for layer in (0, self.layers - 1):
            slot, block = (one * self.layers + layer for one in (request % self.places, request % self.kinds))
            at, home = self.d.device + slot * self.pool.size + end, self.d.host + block * self.pool.size + end
            same(self.d, at, home, 64 * KiB)


@twentyfourth(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours", "synchronisation"),
        *("python_or_gil_bound", "head_of_line_copies"),
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "launch_queue_saturation", "load_not_ordered"),
)
def layers_that_a_connector_brings_one_by_one_and_whose_kernels_all_wait_for_the_last_one_s_event(d: Device) -> Truth:
    """A connector's thread brings a request's twelve layers, an event behind each, but each kernel waits for the last.

    There is one place for layers, so a request's loads begin when the kernels before are over: 12 times 80 us of the
    link in which no kernel runs, then 12 kernels of 50 us. That is 0.96 ms of 1.6 ms. Three requests take turns in the
    place, so each load brings other bytes than are there, and requests are submitted two ahead.
    """
    layers, request = Layers(d, 1), 0
    d.spent.restart()
    for request in turns():
        layers.asked.put(request)
        layers.there.take()
        layers.compute(request, 50_000, layers.layers - 1)
        paced_and_read(d, request, layers.moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, layers.moves.read())
    d.spent.stop()
    layers.end(request)
    return {}


class Swapped:
    """Five requests of eight blocks, 50 us of the link each, of which one at a time is on the device.

    Attributes:
        out, back: streams for the blocks that leave and that come; left, came: what these took of the device's time.
    """

    requests, blocks = 5, 8

    def __init__(self, d: Device) -> None:
        self.d, self.pool, self.out, self.back = d, Pool(d, d.bytes_of(50)), d.copies[10], d.copies[11]
        self.homes = random.Random(241).sample(range(self.pool.count - 2), self.requests * self.blocks)
        self.left, self.came = Stretches(d, self.out), Stretches(d, self.back)

    def home(self, request: int, block: int) -> int:
        """Where a request's block is on the host."""
        return self.d.host + self.homes[request % self.requests * self.blocks + block] * self.pool.size

    def exchange(self, turn: int) -> None:
        """The turn before's request leaves on a stream, and behind it this one's comes on another."""
        d, size = self.d, self.pool.size
        d.order(self.out, d.compute, turn % 16 * 4)
        self.left.begin()
        for block in range(self.blocks):
            d.copy(self.home(turn - 1, block), d.device + block * size, size, D2H, self.out)
        self.left.end()
        d.order(self.back, self.out, turn % 16 * 4 + 1)
        self.came.begin()
        for block in range(self.blocks):
            d.copy(d.device + block * size, self.home(turn, block), size, H2D, self.back)
        self.came.end()
        d.order(d.compute, self.back, turn % 16 * 4 + 2)


@twentyfourth(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "wasted_stores", "gpu_starved", "unmerged_neighbours"),
        "head_of_line_copies",
    ),
    like=("redundant_loads", "store_not_ordered", "load_not_ordered", "small_copies", "synchronisation"),
)
def a_resumed_request_that_comes_on_its_own_stream_when_the_whole_victim_has_left_on_another(d: Device) -> Truth:
    """Before a turn of 0.5 ms its victim's eight blocks leave on a stream, then its own eight come on another.

    There are slots for one request, so an event orders the first load behind the last store, and the kernels behind
    the last load: 0.8 ms in which the link has one block at a time and no kernel runs. A turn rewrites all blocks of
    its request, so each store and each load has bytes that are not there yet. Turns are submitted two ahead.
    """
    swapped, turn = Swapped(d), 1
    for step in turns():
        turn = step + 1
        swapped.exchange(turn)
        for _ in range(2):
            d.launch(250_000)
        clear(d, d.device, turn % 251, swapped.blocks * swapped.pool.size, d.compute)
        paced_and_read(d, step, swapped.left, lag=2)
        swapped.came.read(2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, swapped.left.read() + swapped.came.read())
    d.spent.stop()
    for block in (0, swapped.blocks - 1):
        if ct.string_at(swapped.home(turn - 1, block), 512) != bytes([(turn - 1) % 251]) * 512:
            raise RuntimeError("a block has left with other bytes than its turn gave it")
    return {}


class Pieces:
    """Requests whose KV lies token by token on the host, so that a block of a layer is pieces of 2 KiB.

    Attributes:
        size: bytes of a piece; count: pieces of a request.
    """

    size, count, requests = 2 * KiB, 1_536, 5

    def __init__(self, d: Device) -> None:
        self.d, n = d, self.count
        places = random.Random(242).sample(range((d.size - MiB) // (2 * self.size)), n * self.requests)
        self.homes = [d.host + place * 2 * self.size for place in places]  # no two lie side by side
        self.slots = [d.device + slot * 2 * self.size for slot in range(n)]
        self.to, self.sizes = (p * n)(*self.slots), (z * n)(*[self.size] * n)
        self.sources = [(p * n)(*self.homes[at * n : at * n + n]) for at in range(self.requests)]
        self.attributes, self.index = Attributes(1, 2, 0, 1, 0, 0), (z * 1)(0)

    def bring(self, request: int) -> None:
        """All pieces of a request by one batch call on the model's stream."""
        source, attributes = self.sources[request % self.requests], ct.byref(self.attributes)
        lib, compute, n = self.d.lib, self.d.compute, self.count
        self.d.check(lib.cudaMemcpyBatchAsync(self.to, source, self.sizes, n, attributes, self.index, 1, compute))

    def check(self, request: int) -> None:
        """Raises unless the first and the last piece of a request are there."""
        for piece in (0, self.count - 1):
            same(self.d, self.slots[piece], self.homes[request % self.requests * self.count + piece], self.size)


@twentyfourth(
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where the call takes longer than the device needs for its pieces
    also=("descriptor_bound_batch", "small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "pageable_memory", "launch_queue_saturation", "link_bound", "python_or_gil_bound"),
)
def pieces_of_two_kib_of_a_cache_kept_token_by_token_brought_by_one_batch_call_before_decode(d: Device) -> Truth:
    """A prefix cache keeps the KV token by token, so a request comes as 1,536 pieces of 2 KiB in one batch call.

    All pieces are 3 MiB, 57 us of the link, and the device needs many times that for so many. How long they take is
    measured first, and a request computes for 0.6 of that behind them on the same stream. Five requests take turns in
    the same slots, so that each load brings other bytes than are there. The lists were made beforehand.
    """
    pieces, moves, request, took = Pieces(d), Stretches(d), 0, 1 << 40
    for probe in range(4):
        moves.begin()
        pieces.bring(probe + 1)
        moves.end()
        d.sync(d.compute)
        moves.ns = 0
        took = min(took, moves.read())
    moves.ns = 0
    d.spent.restart()
    for request in turns():
        moves.begin()
        pieces.bring(request)
        moves.end()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, request, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    pieces.check(request)
    return {}


@twentyfourth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours", "python_or_gil_bound"),
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "small_copies", "synchronisation"),
)
def clean_layers_copied_over_merged_ones_within_the_device_by_a_thread_that_merges_adapters(d: Device) -> Truth:
    """A thread puts twelve clean layers of 64 MiB back over the merged ones before it merges each batch's adapter.

    The clean ones are kept on the device, and the copies stand on the model's stream. How long they take is measured
    first, and a batch computes for 0.6 of that. The thread is asked and answers by condition variables, two batches
    ahead of the device. Nothing crosses the link until the program ends.
    """
    size, count, moves, batch, took = (64 * MiB if d.gpu else 512 * KiB), 12, Stretches(d), 0, 1 << 40
    clean, merged = (d.made("cudaMalloc", count * size) for _ in range(2))
    asked, answered = Mailbox(), Mailbox()

    def merge(number: int) -> None:
        moves.begin()
        for layer in range(count):
            d.copy(merged + layer * size, clean + layer * size, size, D2D, d.compute)
        moves.end()
        for layer in range(count):
            clear(d, merged + layer * size, (number + layer) % 251, 4 * KiB, d.compute)

    def serve() -> None:
        while (number := asked.take()) >= 0:
            merge(number)
            answered.put(number)

    clear(d, clean, 252, count * size, d.compute)
    for number in range(4):
        merge(number)
        d.sync(d.compute)
        moves.ns = 0
        took = min(took, moves.read())
    moves.ns = 0
    thread = in_thread(serve)
    d.spent.restart()
    for batch in turns():
        asked.put(batch)
        answered.take()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, batch, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    asked.put(-1)
    thread.join()
    for at, value in ((0, batch % 251), (8 * KiB, 252), ((count - 1) * size, (batch + count - 1) % 251)):
        d.copy(d.host, merged + at, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([value]) * 512:
            raise RuntimeError("a layer has other weights than the last adapter's")
    for one in (clean, merged):
        d.check(d.lib.cudaFree(one))
    return {}


@twentyfourth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "python_or_gil_bound", "gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def masks_of_a_grammar_that_a_worker_names_for_each_step_and_the_engine_sends_though_it_has_them(d: Device) -> Truth:
    """A worker names a step's table of masks out of pinned memory, and the engine sends it, though it is there already.

    Eight steps in a row are in the same state of the grammar, and its table is not changed on either side; only the
    ninth needs another one in the same place. A table takes the link 0.5 ms and a step's kernels 0.35 ms, on one
    stream: seven of eight loads are not needed, 0.44 ms of each 0.85 ms. Steps go two ahead.
    """
    pool, alike, step, number = Pool(d, d.bytes_of(500)), 8, 0, 0
    tables, again, needed = min(pool.count - 1, 6), Stretches(d), Stretches(d)
    asked, named = Mailbox(), Mailbox()

    def name() -> None:
        while (one := asked.take()) >= 0:
            named.put(one // alike % tables)

    thread = in_thread(name)
    d.spent.restart()
    for step in turns():
        asked.put(step)
        number = named.take()
        stretch = again if step % alike else needed
        stretch.begin()
        pool.fetch(0, number, d.compute)
        stretch.end()
        for _ in range(2):
            d.launch(175_000)
        paced_and_read(d, step, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    asked.put(-1)
    thread.join()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + number * pool.size + end, 64 * KiB)
    return {"redundant_loads": again.ns}


# ---- the device waits for the host ----------------------------------------------------------------------------------


class Saved:
    """Blocks of finished requests, 40 us of the link each, that leave on one stream of their own.

    Attributes:
        slots: blocks on the device, and as many places on the host.
    """

    slots = 24

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.stream = d, d.bytes_of(40), d.copies[13]

    def save(self, count: int) -> list[int]:
        """Stores so many blocks one by one: how long each call took, ns."""
        d, size = self.d, self.size
        places = [block % self.slots * 2 * size for block in range(count)]
        return [d.copy(d.host + at, d.device + at, size, D2H, self.stream) for at in places]

    def mark(self, value: int) -> None:
        """New bytes for all blocks, in front of what is stored next."""
        clear(self.d, self.d.device, value % 251, self.slots * 2 * self.size, self.stream)

    def check(self, value: int) -> None:
        """Raises unless the blocks have left with these bytes."""
        self.d.sync(self.stream)
        for slot in (0, self.slots - 1):
            if ct.string_at(self.d.host + slot * 2 * self.size, 512) != bytes([value % 251]) * 512:
                raise RuntimeError("a block has left with other bytes than it had")


@twentyfourth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=(
        *("link_bound", "wasted_stores", "gpu_starved", "synchronisation", "unmerged_neighbours"),
        "python_or_gil_bound",
    ),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "redundant_loads"),
)
def an_executor_of_one_thread_whose_queue_has_a_flush_of_blocks_before_the_steps_of_decode(d: Device) -> Truth:
    """All that an engine wants of the device goes through an executor of one thread: a flush, then 24 steps of 1.7 ms.

    The flush is 2,600 stores of 40 us on one stream, which takes a thousand of them: the thread stands in these calls
    for 60 ms while nothing but the stores runs, as the steps before were waited for, and the futures of the steps
    stand behind it in the executor's queue. No kernel waits for a store: the steps run beside the last thousand.
    """
    saved, lost, number = Saved(d), 0, 0

    def step(at: int) -> None:
        d.launch(1_700_000)
        d.record(128 + at, d.compute)
        if at:
            d.sync_event(128 + at - 1)

    with ThreadPoolExecutor(1) as executor:
        d.spent.restart()
        for number in turns():
            executor.submit(saved.mark, number)
            flush = executor.submit(saved.save, 2_600)
            steps = [executor.submit(step, at) for at in range(24)]
            lost += beyond(flush.result())
            for one in steps:
                one.result()
            for stream in (d.compute, saved.stream):
                executor.submit(d.sync, stream).result()
        d.spent.add(FULL_QUEUE, lost)
        d.spent.stop()
    saved.check(number)
    return {"launch_queue_saturation": lost}


@twentyfourth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("cpu_starved", "launch_queue_saturation", "pageable_memory", "slow_tier", "weights_not_overlapped"),
)
def a_threshold_of_the_nucleus_sought_by_bisection_with_a_count_read_back_for_each_guess(d: Device) -> Truth:
    """Behind each token's kernel of 60 us the sampler halves an interval 14 times, and reads back a count each time.

    A count is a kernel of 6 us and a copy of 64 bytes, for which the thread waits before it knows the next guess. To
    wake, to halve, and to give the device the next kernel and copy takes longer than the 6 us; so of each token some
    0.15 ms are kernels and two thirds or more are not.
    """
    guesses, step, at, back = 14, 0, 0, d.size - 64 * KiB
    low, high = 0.0, 1.0
    d.spent.restart()
    for step in turns():
        d.launch(60_000)
        low, high = 0.0, 1.0
        for guess in range(guesses):
            d.launch(6_000)
            d.copy(d.host + back + guess * 64, d.device + back, 64, D2H, d.compute)
            d.sync(d.compute)
            middle = (low + high) / 2
            low, high = (middle, high) if ct.string_at(d.host + back, 1) and middle < 0.9 else (low, middle)
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if not low < 0.9 <= high:
        raise RuntimeError("the threshold was not found")
    return {}


class Grown:
    """A pinned pool that a worker enlarges for each victim and a trimmer makes small again behind it.

    Attributes:
        size: bytes of a victim; lost: ns in the calls that pin and give back.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.lost, self.buffer = d, (16 * MiB if d.gpu else 8 * MiB), 0, 0
        self.asked, self.there, self.spare, self.gone = (Mailbox() for _ in range(4))
        self.threads = [in_thread(self.grow), in_thread(self.trim)]

    def grow(self) -> None:
        """What the worker does: pins room for a victim and stores its last MiB."""
        while (number := self.asked.take()) >= 0:
            begin = now()
            self.buffer = self.d.made("cudaHostAlloc", self.size, 0)
            self.lost += now() - begin
            clear(self.d, self.d.device, number % 251, MiB, self.d.copies[7])
            self.d.copy(self.buffer, self.d.device, MiB, D2H, self.d.copies[7])
            self.d.sync(self.d.copies[7])
            self.there.put(ct.string_at(self.buffer + MiB - 512, 512) == bytes([number % 251]) * 512)

    def trim(self) -> None:
        """What the trimmer does: gives all room back that nobody has."""
        while self.spare.take() >= 0:
            begin = now()
            self.d.check(self.d.lib.cudaFreeHost(self.buffer))
            self.lost += now() - begin
            self.gone.put(0)

    def out(self, number: int) -> bool:
        """A victim leaves: whether it has left with its bytes."""
        self.asked.put(number)
        return bool(self.there.take())

    def small(self) -> None:
        """The pool is small again."""
        self.spare.put(0)
        self.gone.take()

    def stop(self) -> None:
        """Ends both threads."""
        self.asked.put(-1)
        self.spare.put(-1)
        for thread in self.threads:
            thread.join()


@twentyfourth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE,),  # the thread that launches waits for the one that pins
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        *("wasted_stores", "weights_not_overlapped"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "cpu_starved", "redundant_loads", "small_copies"),
)
def a_pinned_pool_that_a_worker_enlarges_for_each_victim_and_a_trimmer_makes_small_behind_it(d: Device) -> Truth:
    """A swap worker pins 16 MiB for each victim, and a trimmer's thread gives them back before the next step begins.

    The scheduler waits for both by condition variables, and has waited for its step before, so nothing is on the device
    in either call. How long both take is measured first, and a step computes for half of that.
    """
    grown, step, right = Grown(d), 0, 0

    def both() -> None:
        grown.out(0)
        grown.small()

    took = 1 << 40
    for _ in range(6):
        both()
        took, grown.lost = min(took, grown.lost), 0
    d.spent.restart()
    for step in turns():
        right += grown.out(step)
        grown.small()
        for _ in range(2):
            d.launch(max(took // 4, 20_000))
        d.sync(d.compute)
    d.spent.add(ALLOCATING, grown.lost)
    d.spent.stop()
    grown.stop()
    if right != step + 1:
        raise RuntimeError("a victim has left with other bytes than its own")
    return {"allocation_on_hot_path": grown.lost}


class Plain:
    """A tier of plain memory into which threads of an executor swap requests of eight blocks of 1 MiB.

    Attributes:
        requests: for how many the tier has room; kinds: as many lie on the device; took: ns for a request.
    """

    size, blocks, requests, kinds, threads = MiB, 8, 4, 3, 2

    def __init__(self, d: Device) -> None:
        self.d, self.executor = d, ThreadPoolExecutor(self.threads)
        self.keep, self.at = pageable(self.size * self.blocks * self.requests)
        for kind in range(self.kinds):
            clear(d, d.device + kind * self.blocks * self.size, kind + 2, self.blocks * self.size, d.compute)
        d.sync(d.compute)
        self.took = quickest(lambda: wait(self.out(0)), 6)

    def home(self, request: int, block: int) -> int:
        """Where a request's block is in the tier."""
        return self.at + (request % self.requests * self.blocks + block) * self.size

    def half(self, request: int, which: int) -> None:
        """What one of the threads does: each second block of a request, on a stream of its own."""
        d, stream = self.d, self.d.copies[16 + which]
        for block in range(which, self.blocks, self.threads):
            at = d.device + (request % self.kinds * self.blocks + block) * self.size
            d.copy(self.home(request, block), at, self.size, D2H, stream)

    def out(self, request: int) -> list[Future[None]]:
        """A request leaves: what there is to wait for."""
        return [self.executor.submit(self.half, request, which) for which in range(self.threads)]

    def check(self, request: int) -> None:
        """Raises unless a request has left; ends the threads."""
        self.executor.shutdown()
        self.d.synchronize()
        for block in (0, self.blocks - 1):
            if ct.string_at(self.home(request, block), 512) != bytes([request % self.kinds + 2]) * 512:
                raise RuntimeError("a block has left with other bytes than it had")


@twentyfourth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING, ELSEWHERE),  # the thread that launches waits for the two in their copies
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "weights_not_overlapped", "python_or_gil_bound"),
        *("unmerged_neighbours", "link_bound", "context_lock_stall"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
)
def victims_swapped_into_plain_memory_by_two_threads_of_an_executor_whose_futures_are_awaited(d: Device) -> Truth:
    """A victim's eight blocks of 1 MiB leave for plain memory by two threads, and the scheduler waits for both futures.

    Only then it launches its next step, whose slots these were; the step before was waited for. So no kernel runs while
    the two stand in their copies. How long a victim takes is measured first, and a step computes for 0.6 of that.
    """
    plain, lost, step = Plain(d), 0, 0
    d.spent.restart()
    for step in turns():
        begin = now()
        for done in wait(plain.out(step)).done:
            done.result()
        lost += now() - begin
        for _ in range(2):
            d.launch(max(plain.took * 3 // 10, 20_000))
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    plain.check(step)
    return {"pageable_memory": lost}


@twentyfourth(
    line=SUBMITTING,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "context_lock_stall", "slow_tier"),
)
def small_kernels_of_eight_adapters_with_a_tracer_s_events_before_and_behind_each_of_them(d: Device) -> Truth:
    """Each of 16 layers has a kernel of 2 us for each of eight adapters, and a tracer records two events around each.

    That is three calls for 2 us of kernels, which take the thread 8 us or more; it waits for the token of each step
    before it begins the next, so the device is never behind it.
    """
    layers, adapters, kernel, lost, step, at = 16, 8, 2_000, 0, 0, 0
    for step in turns():
        begin = now()
        for _ in range(layers):
            for _ in range(adapters):
                d.mark(d.compute)
                d.launch(kernel)
                d.mark(d.compute)
        at = token(d, step)
        lost += max(now() - begin - layers * adapters * kernel, 0)
        d.sync(d.compute)
        told(at, step)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    return {}


class Running:
    """Sequences that run, their blocks, and how many have each block: what a scheduler knows when memory is short."""

    def __init__(self) -> None:
        chance = random.Random(243)
        self.blocks = [chance.sample(range(4_096), 24) for _ in range(1_024)]
        self.arrived = [chance.random() for _ in self.blocks]
        self.holders = [0] * 4_096
        for sequence in self.blocks:
            for block in sequence:
                self.holders[block] += 1
        self.each_ns = max(quickest(lambda: self.victim(64), 8) // 64, 1)

    def victim(self, count: int) -> int:
        """Which of so many sequences frees most blocks; of such, the youngest."""
        best, chosen = (-1, 0.0), 0
        for sequence in range(count):
            alone = 0
            for block in self.blocks[sequence]:
                if self.holders[block] <= 4:
                    alone += 1
            worth = (alone, self.arrived[sequence])
            if worth > best:
                best, chosen = worth, sequence
        return chosen


@twentyfourth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation"),
)
def a_victim_chosen_by_counting_the_blocks_that_each_running_sequence_has_alone_before_a_step(d: Device) -> Truth:
    """Memory is short, so before each step of 0.8 ms the scheduler counts in Python whose blocks nobody else has.

    So many sequences run that it takes 1.6 ms, as is measured first. The step before was waited for, so nothing is on
    the device meanwhile.
    """
    running, idle, step, chosen = Running(), Stretches(d), 0, set[int]()
    count = min(max(1_600_000 // running.each_ns, 1), len(running.blocks))
    times = max(1_600_000 // (running.each_ns * count), 1)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        for _ in range(times):
            chosen.add(running.victim(count))
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if len(chosen) != 1:
        raise RuntimeError("another victim was chosen though nothing has changed")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


SPINNER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
prompts = 0
print(flush=True)
while not prompts:
    pass
"""


@contextlib.contextmanager
def spinners_on_this_cpu(count: int) -> Iterator[None]:
    """So many processes that ask for prompts all the time, on the one CPU that this thread may use."""
    before = os.sched_getaffinity(0)
    cpu = sorted(before)[len(before) // 3]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", SPINNER, str(cpu)]
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


@twentyfourth(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation", "wasted_stores"),
    like=("context_lock_stall", "slow_tier", "launch_queue_saturation", "small_copies"),
    blind=DEVICE,
)
def tokenizer_processes_that_spin_for_prompts_on_the_cpu_to_which_the_engine_is_pinned(d: Device) -> Truth:
    """Three tokenizers spin for prompts on the one CPU of the engine, which makes its block tables for 2 ms a step.

    The tables are 2 ms of the CPU and are made before each step of 0.6 ms, which is waited for; so nothing is on the
    device meanwhile. A fourth of the CPU is the engine's, so the 2 ms take it some 8 ms, in 6 ms of which others run.
    """
    off, step, at, tables = 0, 0, 0, list[int]()
    with spinners_on_this_cpu(3):
        d.spent.restart()
        for step in turns():
            begin, busy = now(), time.thread_time_ns()
            while time.thread_time_ns() - busy < 2_000_000:
                tables = [block * 16 + 7 for block in range(256) if block % 3]
            for _ in range(2):
                d.launch(300_000)
            at = token(d, step)
            d.sync(d.compute)
            off += max(now() - begin - 2_700_000, 0)  # alone, a step is its tables, its kernels and 0.1 ms
        d.spent.add(NO_CPU, off)
        d.spent.stop()
    told(at, step)
    if len(tables) != 170:
        raise RuntimeError("the tables were not made")
    return {"cpu_starved": off}


class Vault:
    """A file in shared memory into which a worker writes victims in pieces of 64 KiB.

    Attributes:
        pieces: of a victim; times: how often they are written, for 2 ms; count: victims for which there is room.
    """

    size, count = 64 * KiB, 2

    def __init__(self, d: Device) -> None:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path("/tmp")
        self.d, self.stream, self.pieces = d, d.copies[19], 16
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the object
        each = quickest(lambda: self.write(0), 8) // self.pieces
        self.pieces = min(max(2_000_000 // max(each, 1), 4), 96)
        for victim in range(self.count):  # the file's pages are there from now on
            self.write(victim)
        self.times = -(-2_000_000 // quickest(lambda: self.write(0), 4))

    def write(self, victim: int) -> None:
        """A victim's pieces, from the host to the file."""
        place = victim % self.count * self.pieces
        for piece in range(self.pieces):
            view = (ct.c_char * self.size).from_address(self.d.host + piece * self.size)
            if os.pwrite(self.file.fileno(), view, (place + piece) * self.size) != self.size:
                raise RuntimeError("a piece was not written whole")

    def out(self, victim: int) -> None:
        """What the worker does: a victim to the host and to the file."""
        d, size = self.d, self.pieces * self.size
        clear(d, d.device, victim % 251, size, self.stream)
        d.copy(d.host, d.device, size, D2H, self.stream)
        d.sync(self.stream)
        with d.spent.on(TIER):
            for _ in range(self.times):
                self.write(victim)

    def check(self, victim: int) -> None:
        """Raises unless the file has a victim's last piece; it goes."""
        place = (victim % self.count * self.pieces + self.pieces - 1) * self.size
        right = os.pread(self.file.fileno(), self.size, place) == bytes([victim % 251]) * self.size
        self.file.close()
        if not right:
            raise RuntimeError("the file has another victim than was written")


def make_the_vault(d: Device) -> None:
    """The file, and how long it takes to write to it."""
    MADE["vault"] = Vault(d)


@twentyfourth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # a recorder of calls alone sees a thread outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        *("wasted_stores", "unmerged_neighbours"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_vault,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def victims_written_to_a_file_in_shared_memory_by_a_worker_before_their_slots_are_given_away(d: Device) -> Truth:
    """A worker brings a victim to the host and writes it to a file in shared memory for 2 ms, piece by piece.

    The scheduler waits for its future, as the next step of 0.8 ms needs the victim's slots, and the step before was
    waited for: nothing is on the device while the pieces are written. How often they take 2 ms was measured
    before; a victim has at most 6 MiB, 0.1 ms of the link.
    """
    vault, step, at = MADE.pop("vault"), 0, 0
    with ThreadPoolExecutor(1) as worker:
        d.spent.restart()
        for step in turns():
            worker.submit(vault.out, step).result()
            for _ in range(2):
                d.launch(400_000)
            at = token(d, step)
            d.sync(d.compute)
            told(at, step)
        d.spent.stop()
    vault.check(step)
    return {}


class Limited:
    """A prefetcher that sleeps for its rate limiter, 2 ms a block, and keeps the lock of the prefix cache meanwhile.

    Attributes:
        lock: of the cache; sent: how many blocks it has brought.
    """

    size, slots = 64 * KiB, 64

    def __init__(self, d: Device) -> None:
        self.d, self.lock, self.over, self.sent = d, threading.Lock(), threading.Event(), 0
        self.thread = in_thread(self.prefetch)

    def prefetch(self) -> None:
        """What its thread does."""
        d = self.d
        while not self.over.is_set():
            with self.lock:
                at = 2 * (self.sent % self.slots) * self.size  # no two lie side by side
                stamp(d, at, 4 * KiB, self.sent)
                d.copy(d.device + at, d.host + at, self.size, H2D, d.copies[22])
                self.sent += 1
                time.sleep(0.002)
            time.sleep(0.0003)

    def stop(self) -> None:
        """Ends the thread; raises unless its last block is there."""
        self.over.set()
        self.thread.join()
        at = 2 * ((self.sent - 1) % self.slots) * self.size
        same(self.d, self.d.device + at, self.d.host + at, self.size)


@twentyfourth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=(
        *("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores", "unmerged_neighbours"),
        "redundant_loads",
    ),
    like=("cpu_starved", "slow_tier", "small_copies", "launch_queue_saturation", "context_lock_stall"),
)
def a_rate_limiter_that_sleeps_within_the_lock_of_the_prefix_cache_which_each_step_needs(d: Device) -> Truth:
    """A prefetcher sleeps 2 ms for its rate limiter after each block, and has the lock that the scheduler needs.

    It lets the lock go for 0.3 ms between two blocks. The scheduler takes it, launches a step of 0.8 ms, waits for that
    and wants the lock again, which the prefetcher has had for half a millisecond and keeps for 1.5 ms more. Nothing is
    on the device meanwhile but the block, which takes a microsecond or two.
    """
    limited, step, lost, at = Limited(d), 0, 0, 0
    d.spent.restart()
    for step in turns():
        begin = now()
        with limited.lock:
            lost += now() - begin
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
    d.spent.add(ELSEWHERE, lost)
    d.spent.stop()
    limited.stop()
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


@twentyfourth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "gpu_starved", "load_not_ordered", "redundant_loads", "failed_calls"),
    also=("unmerged_neighbours",),
)
def layers_that_a_connector_brings_a_request_ahead_and_whose_kernels_wait_for_their_own(d: Device) -> Truth:
    """A connector's thread brings the next request's twelve layers, 80 us each, while this one computes for 3.6 ms.

    There are two places for layers, and a request's loads begin when the one that has had its place is over, a whole
    request before they are needed; each kernel waits for the event of its own layer, which is long there.
    """
    layers, request, late = Layers(d, 2), 0, list[int]()
    layers.asked.put(0)
    layers.there.take()
    d.sync(layers.loads)
    d.spent.restart()
    for request in turns():
        begin = now()
        layers.compute(request, 300_000)
        layers.asked.put(request + 1)
        layers.there.take()
        late.append(now() - begin)
        paced(d, request, 1)
    d.sync(d.compute)
    d.spent.stop()
    layers.end(request + 1)
    plain_only(d, sorted(late)[-2] < 2_500_000, f"to submit a request took {sorted(late)[-2]} ns")
    return {}


@twentyfourth(
    line=COMPUTING,
    like=("gpu_starved", "link_bound", "allocation_on_hot_path", "slow_tier", "cpu_starved", "synchronisation"),
    also=(
        *("launch_queue_saturation", "channels_exhausted", "wasted_stores", "unmerged_neighbours"),
        *("python_or_gil_bound", "context_lock_stall"),
    ),
)
def a_flush_of_blocks_by_an_executor_s_thread_of_its_own_that_stands_in_a_full_queue(d: Device) -> Truth:
    """An offload executor's thread flushes 1,300 blocks again and again and stands in a full queue for 5 to 11 ms each.

    The engine's thread launches steps of 14 ms two ahead on its own stream and needs nothing of the flush. Even where
    one of its few calls had to wait until the other thread is through, the device has 14 ms of kernels or more.
    """
    saved, step, over, stood, number = Saved(d), 0, threading.Event(), list[int](), 0

    def flush() -> int:
        rounds = 0
        while not over.is_set():
            saved.mark(rounds)
            stood.append(beyond(saved.save(1_300)))
            d.sync(saved.stream)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as executor:
        flushed = executor.submit(flush)
        d.spent.restart()
        for step in turns():
            for _ in range(2):
                d.launch(7_000_000)
            at = token(d, step)
            paced(d, step, 1)
            if now() - d.spent.begin > 1_400_000_000:  # the last flush ends before the last step does
                over.set()
        over.set()
        d.sync(d.compute)
        d.spent.stop()
        number = flushed.result()
    told(at, step)
    saved.check(number - 1)
    plain_only(d, max(stood) < 26_000_000, f"a flush stood in a full queue for {max(stood)} ns")
    return {}


@twentyfourth(
    line=COMPUTING,
    like=(
        *("synchronisation", "gpu_starved", "small_copies", "python_or_gil_bound", "weights_not_overlapped"),
        "context_lock_stall",
    ),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_decode_thread_that_waits_for_each_token_beside_chunks_of_a_prefill_launched_two_ahead(d: Device) -> Truth:
    """One thread decodes with twenty small copies, a kernel of 0.3 ms and a wait for each token; another prefills.

    The prefill's chunks are kernels of 5 ms on a stream of their own, launched two ahead, one behind the other for all
    the time. So a kernel runs whenever the decode thread copies, waits, or chooses its tokens in Python for 0.2 ms.
    """
    side, chunk, over, steps = d.copies[20], 0, threading.Event(), list[int]()

    def decode() -> None:
        step = 0
        while not over.is_set():
            stamp(d, step % 8 * 256 * KiB, 4 * KiB, step)
            for one in range(20):  # its fields do not lie side by side
                at = step % 8 * 256 * KiB + one * 8 * KiB
                d.copy(d.device + at, d.host + at, 4 * KiB if one == 0 else 256, H2D, d.compute)
            d.launch(300_000)
            d.kernel_ns -= 300_000  # it runs beside the prefill
            at = token(d, step)
            d.sync(d.compute)
            told(at, step)
            end = now() + 200_000
            while now() < end:
                sorted(range(64), key=lambda one: -one)
            steps.append(step)
            step += 1

    thread = in_thread(decode)
    d.spent.restart()
    for chunk in turns():
        d.launch(5_000_000, side)
        d.record(128 + chunk % 16, side)
        if chunk >= 2:
            d.sync_event(128 + (chunk - 2) % 16)
    d.sync(side)
    d.spent.stop()
    over.set()
    thread.join()
    plain_only(d, len(steps) > 2 * chunk, "decode was held up by the prefill")
    return {}


@twentyfourth(
    line=COMPUTING,
    like=("pageable_memory", "synchronisation", "gpu_starved", "python_or_gil_bound", "link_bound"),
    also=("wasted_stores", "unmerged_neighbours", "context_lock_stall"),
)
def victims_swapped_into_plain_memory_by_two_threads_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """A victim's eight blocks of 1 MiB leave for plain memory by two threads beside three steps of 12 ms.

    The scheduler launches two steps ahead and asks in each third one for the futures of the last victim, which are
    done after a millisecond or two; so the device has 12 ms of kernels or more when it does. A victim is not in any
    running batch, so its copies wait for no kernel and none waits for them.
    """
    plain, step, asked, at = Plain(d), 0, list[Future[None]](), 0
    d.spent.restart()
    for step in turns():
        for _ in range(3):
            d.launch(4_000_000)
        at = token(d, step)
        if step % 3 == 0:
            for done in asked:
                done.result()
            asked = plain.out(step // 3)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    plain.check(step // 3)
    told(at, step)
    plain_only(d, plain.took < 8_000_000, f"a victim took {plain.took} ns")
    return {}


@twentyfourth(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved", "slow_tier", "small_copies"),
    also=("wasted_stores", "unmerged_neighbours", "redundant_loads"),
)
def a_rate_limiter_that_sleeps_within_the_lock_of_the_cache_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """A prefetcher sleeps 2 ms within the lock that the scheduler needs, but two steps of 8 ms are on the device then.

    The scheduler waits for the lock before each step, up to 2 ms or, where it is unlucky, some 4 ms, and then waits for
    the step before the last alone; so the device has 8 ms or more of kernels whenever it wants the lock.
    """
    limited, step, waited, at = Limited(d), 0, list[int](), 0
    d.spent.restart()
    for step in turns():
        begin = now()
        with limited.lock:
            waited.append(now() - begin)
        for _ in range(2):
            d.launch(4_000_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    limited.stop()
    plain_only(d, sorted(waited)[-2] < 7_000_000, f"the lock was waited for {sorted(waited)[-2]} ns")
    return {}


@twentyfourth(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "synchronisation", "redundant_loads", "load_not_ordered"),
    also=("unmerged_neighbours",),
    needs_gpu=True,
)
def handed_over_requests_of_sixty_mib_that_come_beside_a_graph_replayed_for_the_one_before(d: Device) -> Truth:
    """Each request's KV, five blocks of 0.25 ms of the link, comes while the graph of the one before runs for 2.4 ms.

    A graph has eight kernels of 0.3 ms and is replayed behind the event of its request's last block. There are two
    places, and the loads of a request wait for the graph that has had its place: they are there a millisecond before
    they must be, though the link is busy for half of the time. Thirteen blocks take turns, and requests go two ahead.
    """
    pool, loads, blocks, request, took = Pool(d, d.bytes_of(250)), d.copies[8], 5, 0, list[int]()
    kept = 13 if pool.count > 13 else 11

    def body() -> None:
        for _ in range(8):
            d.launch(300_000)

    def bring(number: int) -> None:
        if number >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (number - 2) % 16], 0))
        for block in range(blocks):
            pool.fetch(number % 2 * blocks + block, (number * blocks + block) % kept, loads)
        d.record(number % 16, loads)

    graph = d.graph(body)
    d.replay(graph, 0)  # what its first launch takes is start-up
    bring(0)
    d.synchronize()
    d.spent.restart()
    for request in turns():
        begin = now()
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[request % 16], 0))
        d.replay(graph, 8 * 300_000)
        d.record(32 + request % 16, d.compute)
        bring(request + 1)
        took.append(now() - begin)
        paced(d, request, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for block in (0, blocks - 1):
        slot, home = (request % 2 * blocks + block), (request * blocks + block) % kept
        same(d, d.device + slot * pool.size + end, d.host + home * pool.size + end, 64 * KiB)
    plain_only(d, sorted(took)[-2] < 1_800_000, f"to submit a request took {sorted(took)[-2]} ns")
    return {}


FRONTEND = """
import sys, time
from multiprocessing.connection import Client
with Client(sys.argv[1], "AF_UNIX") as engine:
    engine.recv()
    due = time.monotonic()
    for number in range(int(sys.argv[2])):
        due += 0.068
        time.sleep(max(due - time.monotonic(), 0))
        engine.send({"number": number, "ids": number.to_bytes(4, "little") * 1_024, "temperature": 0.7})
        if engine.recv()["number"] != number:
            raise SystemExit(1)
"""


class Frontend:
    """A process that sends pickled requests each 68 ms, and the thread that takes them to the engine and answers.

    Attributes:
        count: how many requests there are; asked: those that the engine has not seen.
    """

    count = 22

    def __init__(self) -> None:
        self.folder, self.asked, self.answers = tempfile.TemporaryDirectory(dir="/tmp"), Mailbox(), Mailbox()
        place = str(Path(self.folder.name) / "engine")
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with Listener(place, "AF_UNIX") as listener:
            command = [sys.executable, "-S", "-c", FRONTEND, place, str(self.count)]
            self.child = subprocess.Popen(command, env=env)
            self.way: Connection = listener.accept()
        self.thread = in_thread(self.serve)

    def serve(self) -> None:
        """What the thread does."""
        for _ in range(self.count):
            self.asked.put(self.way.recv())
            self.way.send({"number": self.answers.take(), "text": "done"})

    def end(self) -> None:
        """Raises unless the process has had all answers."""
        self.thread.join()
        right = self.child.wait() == 0
        self.way.close()
        self.folder.cleanup()
        if not right:
            raise RuntimeError("the frontend has not had its answers")


def make_the_frontend(_: Device) -> None:
    """Starts the process and the thread."""
    MADE["frontend"] = Frontend()


def answered(d: Device, number: int, ids: bytes) -> None:
    """Answers a request in four kernels of 2 ms, and waits for its token."""
    home = d.host + number % 8 * 4 * KiB
    ct.memmove(home, ids, 4 * KiB)
    d.copy(d.device, home, 4 * KiB, H2D, d.compute)
    for _ in range(4):
        d.launch(2_000_000)
    at = token(d, number)
    d.sync(d.compute)
    told(at, number)


@twentyfourth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_frontend,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def pickled_requests_that_a_thread_takes_from_a_frontend_process_and_leaves_for_the_engine_s(d: Device) -> Truth:
    """A frontend process sends a pickled request each 68 ms; a thread takes it, and the engine's thread needs 8 ms.

    The engine stands at a condition variable until the thread has left it a request, answers in four kernels, and is
    there again; the thread waits in `recv`. For seven eighths of the time nobody has asked for anything.
    """
    frontend, number = MADE.pop("frontend"), 0
    d.spent.restart()
    frontend.way.send("ready")
    for number in range(frontend.count):
        with d.spent.on(NOTHING_TO_DO):
            request = frontend.asked.take()
        if request["number"] != number:
            raise RuntimeError("another request came than was due")
        answered(d, number, request["ids"])
        frontend.answers.put(number)
    d.spent.stop()
    frontend.end()
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}


ASKING = """
import socket, sys, time
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as way, way.makefile("rwb") as lines:
    lines.readline()
    due = time.monotonic()
    for number in range(int(sys.argv[2])):
        due += 0.07
        time.sleep(max(due - time.monotonic(), 0))
        lines.write(number.to_bytes(4, "little").hex().encode() * 512 + b"\\n")
        lines.flush()
        if lines.readline() != b"%d\\n" % number:
            raise SystemExit(1)
"""


class Served:
    """An asyncio server in a thread, its one client in another process, and the queue to the thread of the engine.

    Attributes:
        count: how many requests there are; beats: how often its heartbeat has asked the model's stream.
    """

    count = 21

    def __init__(self, d: Device) -> None:
        self.d, self.asked, self.beats, self.began = d, Queue[bytes](), 0, threading.Event()
        self.loop, self.port, self.there = asyncio.new_event_loop(), Mailbox(), Mailbox()
        d.lib.cudaStreamQuery.argtypes = [p]
        self.thread = in_thread(lambda: self.loop.run_until_complete(self.serve()))
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", ASKING, str(self.port.take()), str(self.count)]
        self.child = subprocess.Popen(command, env=env)
        self.there.take()

    async def heart(self) -> None:
        """Asks each 10 ms whether the model's stream is idle, for a health check."""
        while True:
            self.beats += self.d.lib.cudaStreamQuery(self.d.compute) in (0, 600)
            await asyncio.sleep(0.01)

    async def serve(self) -> None:
        """Takes the client's lines to the engine until it is gone."""
        self.answers, gone = asyncio.Queue[int](), asyncio.Event()

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writer = writer
            self.there.put(0)
            while line := await reader.readline():
                self.asked.put(line)
                writer.write(b"%d\n" % await self.answers.get())
                await writer.drain()
            writer.close()
            gone.set()

        server = await asyncio.start_server(client, "127.0.0.1", 0)
        self.port.put(server.sockets[0].getsockname()[1])
        heart = asyncio.ensure_future(self.heart())
        await gone.wait()
        heart.cancel()
        server.close()

    def say(self, what: bytes) -> None:
        """Something to the client, from another thread."""
        self.loop.call_soon_threadsafe(self.writer.write, what)

    def answer(self, number: int) -> None:
        """A request's answer, from another thread."""
        self.loop.call_soon_threadsafe(self.answers.put_nowait, number)

    def end(self) -> None:
        """Raises unless the client has had all answers."""
        right = self.child.wait() == 0
        self.thread.join()
        self.loop.close()
        if not right:
            raise RuntimeError("the client has not had its answers")


def make_the_server(d: Device) -> None:
    """Starts the server and its client."""
    MADE["served"] = Served(d)


@twentyfourth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "context_lock_stall"),
    also=("wasted_stores",),
    prepare=make_the_server,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def an_asyncio_server_whose_requests_reach_the_engine_s_thread_by_a_queue_and_whose_heart_beats(d: Device) -> Truth:
    """A client asks an asyncio server each 70 ms, which gives the request to the engine's thread by a queue, for 8 ms.

    The engine stands in the queue's `get` for seven eighths of the time, as nobody has asked for anything. Meanwhile
    the server's heartbeat asks the model's stream each 10 ms whether it is idle, which it is.
    """
    served, number = MADE.pop("served"), 0
    d.spent.restart()
    served.say(b"ready\n")
    for number in range(served.count):
        with d.spent.on(NOTHING_TO_DO):
            line = served.asked.get()
        ids = bytes.fromhex(line.decode())
        if ids[:4] != number.to_bytes(4, "little"):
            raise RuntimeError("another request came than was due")
        answered(d, number, ids * 2)
        served.answer(number)
    d.spent.stop()
    served.end()
    if not served.beats:
        raise RuntimeError("the heart has not beaten")
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}
