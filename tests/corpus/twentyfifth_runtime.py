"""Twenty-fifth programs of the runtime's calls: drafts on the CPU, forks, chats, hand-overs, adapters, snapshots.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import heapq
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accounts import Pool, Stretches, decoded, paced, paced_and_read, stamp, turns
from device import D2H, H2D, Device, beyond, now
from eighth_healthy import plain_only
from fresh_copies import clear, copy_2d
from ninth_healthy import token, told
from other_shapes import gate
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
    twentyfifth,
)
from seventh_host import quickest
from twentyfourth_runtime import Mailbox
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


# ---- kernels wait for copies ----------------------------------------------------------------------------------------


class Errands:
    """Transfers of 60 us of the link each, which a thread takes out of a heap and puts on one stream.

    A step has four blocks that come for it, and eight that leave when it is over.

    Attributes:
        places: for how many steps' blocks the device has room; first: what the heap gives out first, "in" or "out".
        moves: of all transfers that are given to the thread at once.
    """

    ins, outs, kinds = 4, 8, 3

    def __init__(self, d: Device, places: int, first: str) -> None:
        self.d, self.places, self.first, self.link = d, places, first, d.copies[4]
        self.pool, self.moves = Pool(d, d.bytes_of(60)), Stretches(d, self.link)
        if self.pool.count <= 12 + 2 * self.outs:
            raise RuntimeError("the pool is too small for the errands")
        self.heap, self.changed, self.through = list[tuple[int, int, str, int]](), threading.Condition(), Mailbox()
        self.behind, self.thread = -1, in_thread(self.serve)

    def event(self, kind: int, step: int) -> int:
        """The event behind a step's kernels (0), its blocks that have come (1), and those that have left (2)."""
        return self.d.events[kind * 16 + step % 16]

    def where(self, kind: str, step: int, block: int) -> tuple[int, int]:
        """A block's slot on the device and its place on the host, as numbers of blocks."""
        if kind == "in":
            return step % self.places * self.ins + block, step % self.kinds * self.ins + block
        return 12 + step % 2 * self.outs + block, 12 + step % 2 * self.outs + block

    def ask(self, leaves: int, comes: int, behind: int) -> None:
        """Asks for the blocks of two steps, behind the kernels of a third; waits until all of it is submitted."""
        asked = [(int(self.first != "in"), comes, "in", block) for block in range(self.ins)]
        if leaves >= 0:
            asked += [(int(self.first == "in"), leaves, "out", block) for block in range(self.outs)]
        with self.changed:
            self.behind = behind
            for one in asked:
                heapq.heappush(self.heap, one)
            self.changed.notify()
        self.through.take()

    def serve(self) -> None:
        """What the thread does: the most urgent transfers first, all those that it finds."""
        d, size = self.d, self.pool.size
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.heap)
                now_due = [heapq.heappop(self.heap) for _ in range(len(self.heap))]
            if now_due[0][2] == "end":
                return
            if self.behind >= 0:
                d.check(d.lib.cudaStreamWaitEvent(self.link, self.event(0, self.behind), 0))
            self.moves.begin()
            for _, step, kind, block in now_due:
                slot, home = (one * size for one in self.where(kind, step, block))
                to, source = (d.device + slot, d.host + home) if kind == "in" else (d.host + home, d.device + slot)
                d.copy(to, source, size, H2D if kind == "in" else D2H, self.link)
                if block == (self.ins if kind == "in" else self.outs) - 1:
                    d.check(d.lib.cudaEventRecord(self.event(1 if kind == "in" else 2, step), self.link))
            self.moves.end()
            self.through.put(0)

    def compute(self, step: int, kernels: int, each_ns: int) -> None:
        """A step's kernels behind its blocks, and what it writes into those that leave."""
        d = self.d
        d.check(d.lib.cudaStreamWaitEvent(d.compute, self.event(1, step), 0))
        if step >= 2:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, self.event(2, step - 2), 0))
        for _ in range(kernels):
            d.launch(each_ns)
        slot, _ = self.where("out", step, 0)
        clear(d, d.device + slot * self.pool.size, step % 251, self.outs * self.pool.size, d.compute)
        d.check(d.lib.cudaEventRecord(self.event(0, step), d.compute))

    def end(self, left: int, came: int) -> None:
        """Ends the thread; raises unless a step's blocks have left and another's have come."""
        with self.changed:
            heapq.heappush(self.heap, (-1, 0, "end", 0))
            self.changed.notify()
        self.thread.join()
        d, size = self.d, self.pool.size
        d.synchronize()
        for block in (0, self.outs - 1):
            home = d.host + self.where("out", left, block)[1] * size
            if ct.string_at(home, 512) != bytes([left % 251]) * 512:
                raise RuntimeError("a block has left with other bytes than its step gave it")
        slot, home = (one * size for one in self.where("in", came, self.ins - 1))
        same(d, d.device + slot + size - 64 * KiB, d.host + home + size - 64 * KiB, 64 * KiB)


@twentyfifth(
    line=AT_LINK_RATE,
    also=(
        *("head_of_line_copies", "weights_not_overlapped", "link_bound", "wasted_stores", "gpu_starved"),
        *("unmerged_neighbours", "python_or_gil_bound", "synchronisation"),
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "launch_queue_saturation", "load_not_ordered"),
)
def a_heap_of_transfers_in_which_write_backs_go_before_the_blocks_that_the_next_step_waits_for(d: Device) -> Truth:
    """A thread takes transfers out of a heap: eight blocks that a step has written, then the four of the next step.

    To write back first makes room, its author thought. There is one place for the blocks that come, so all wait for
    the step before, and the next one for the last of the four: 12 times 60 us of one stream in which no kernel runs,
    then 0.4 ms of kernels. A step writes all of what leaves, and three sets of blocks take turns in the place.
    """
    errands, step = Errands(d, 1, "out"), 0
    d.spent.restart()
    for step in turns():
        errands.ask(step - 1, step, step - 1)
        errands.compute(step, 2, 200_000)
        paced_and_read(d, step, errands.moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, errands.moves.read())
    d.spent.stop()
    errands.end(step - 1, step)
    return {}


class Mover:
    """A thread that brings prefixes of twelve pieces, 120 us of the link each, and has one credit for transfers.

    Attributes:
        places: how many prefixes the device has room for; moves: of the pieces.
    """

    pieces = 12

    def __init__(self, d: Device, places: int) -> None:
        self.d, self.places, self.pool, self.loads = d, places, Pool(d, d.bytes_of(120)), d.copies[6]
        self.kept = min(self.pool.count - 1, 28)
        if self.kept <= 2 * self.pieces:
            raise RuntimeError("the pool is too small for the prefixes")
        self.moves, self.asked, self.there = Stretches(d, self.loads), Mailbox(), Mailbox()
        self.thread = in_thread(self.serve)

    def where(self, request: int, piece: int) -> tuple[int, int]:
        """A piece's slot on the device and its block on the host."""
        return request % self.places * self.pieces + piece, (request * self.pieces + piece) % self.kept

    def serve(self) -> None:
        """What the thread does: a piece, and the next one when its event is reached."""
        d = self.d
        while (request := self.asked.take()) >= 0:
            if request >= self.places:
                over = d.events[32 + (request - self.places) % 16]
                d.check(d.lib.cudaStreamWaitEvent(self.loads, over, 0))
            for piece in range(self.pieces):
                self.moves.begin()
                self.pool.fetch(*self.where(request, piece), self.loads)
                self.moves.end()
                d.record(piece, self.loads)
                d.sync_event(piece)
            self.moves.read()
            self.there.put(request)

    def compute(self, request: int, kernels: int, each_ns: int) -> None:
        """A request's kernels, when its prefix is there."""
        for _ in range(kernels):
            self.d.launch(each_ns)
        self.d.record(32 + request % 16, self.d.compute)

    def end(self, request: int) -> None:
        """Ends the thread; raises unless the first and the last piece of a prefix are there."""
        self.asked.put(-1)
        self.thread.join()
        end = self.pool.size - 64 * KiB
        for piece in (0, self.pieces - 1):
            slot, block = (one * self.pool.size + end for one in self.where(request, piece))
            same(self.d, self.d.device + slot, self.d.host + block, 64 * KiB)


@twentyfifth(
    line=AT_LINK_RATE,
    also=(
        *("synchronisation", "weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours"),
        "python_or_gil_bound",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "slow_tier"),
)
def a_chat_s_prefix_that_a_mover_with_one_credit_brings_piece_by_piece_before_its_turn(d: Device) -> Truth:
    """A mover brings the twelve pieces of a chat's prefix, and gives the next one when the last one's event is reached.

    A piece is 120 us of the link, and to wake and to give the next some 20 us more; the engine launches the turn's
    0.6 ms of kernels when all are there. There is one place for prefixes, so the first piece waits for the turn
    before: 1.44 ms of 2.3 ms are copies beside which no kernel runs. No turn has the pieces of the turn before.
    """
    mover, request = Mover(d, 1), 0
    d.spent.restart()
    for request in turns():
        mover.asked.put(request)
        mover.there.take()
        mover.compute(request, 2, 300_000)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, mover.moves.ns)
    d.spent.stop()
    mover.end(request)
    return {}


@twentyfifth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours", "head_of_line_copies"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "load_not_ordered"),
)
def tails_of_six_forks_of_a_beam_each_brought_when_the_fork_before_has_been_through_the_scratch(d: Device) -> Truth:
    """Each of a beam's six forks has its tail, 120 us of the link, brought to the one scratch place before its 70 us.

    Events order a load behind the kernel of the fork before, and the kernel behind its load, so a kernel and a copy
    never run at once: 0.72 ms of a step's 1.14 ms are copies. Eighteen tails or more take turns in the place. Steps
    are submitted two ahead.
    """
    pool, loads, forks, step, tail = Pool(d, d.bytes_of(120)), d.copies[7], 6, 0, 0
    moves, kept = Stretches(d, loads), min(pool.count - 1, 24)
    if kept < 18:
        raise RuntimeError("the pool is too small for the tails")
    d.spent.restart()
    for step in turns():
        for fork in range(forks):
            event, tail = (step % 8 * forks + fork) * 2, (step * forks + fork) % kept
            d.order(loads, d.compute, event)
            moves.begin()
            pool.fetch(0, tail, loads)
            moves.end()
            d.order(d.compute, loads, event + 1)
            d.launch(70_000)
        paced_and_read(d, step, moves, forks, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + tail * pool.size + end, 64 * KiB)
    return {}


class Planes:
    """Quantised keys on the host, 96 bytes each: a coarse plane of 64 bytes, and behind it a fine one of 32.

    Attributes:
        rows: keys of a layer; layers: whose fine planes a step has brought.
    """

    coarse, fine, layers = 64, 32, 6

    def __init__(self, d: Device) -> None:
        self.d, self.rows = d, 8_192
        self.pitch = self.coarse + self.fine
        self.span = self.rows * self.pitch
        self.count = (d.size - MiB) // self.span

    def home(self, step: int, layer: int) -> int:
        """Where a layer's first fine plane is on the host."""
        return self.d.host + (step * self.layers + layer) % self.count * self.span + self.coarse

    def bring(self, step: int) -> None:
        """The fine planes of all layers by a 2D copy each."""
        for layer in range(self.layers):
            to = (self.d.device + layer * self.rows * self.fine, self.fine)
            copy_2d(self.d, to, (self.home(step, layer), self.pitch), self.fine, self.rows, H2D, self.d.compute)

    def check(self, step: int) -> None:
        """Raises unless the last fine plane of the last layer is there."""
        at = self.d.device + (self.layers * self.rows - 1) * self.fine
        same(self.d, at, self.home(step, self.layers - 1) + (self.rows - 1) * self.pitch, self.fine)


@twentyfifth(
    line=BELOW_LINK_RATE,
    also=(
        *("small_copies", "descriptor_bound_batch", "link_degraded", "weights_not_overlapped", "gpu_starved"),
        "unmerged_neighbours",
    ),
    like=("redundant_loads", "pageable_memory", "launch_queue_saturation", "link_bound", "python_or_gil_bound"),
)
def fine_planes_of_quantised_keys_taken_out_from_between_the_coarse_ones_before_each_exact_pass(d: Device) -> Truth:
    """A quantised cache has a fine plane of 32 bytes behind each key's coarse one, and a step brings six layers of it.

    A 2D copy takes 8,192 rows of 32 bytes, 256 KiB or 5 us of the link, and takes many times that for so narrow rows.
    How long six take is measured first, and a step computes for 0.6 of that behind them, on the same stream. So many
    layers take turns in six places that each copy brings other bytes. Steps are submitted two ahead.
    """
    planes, moves, step, took = Planes(d), Stretches(d), 0, 1 << 40
    for probe in range(4):
        moves.begin()
        planes.bring(probe + 1)
        moves.end()
        d.sync(d.compute)
        moves.ns = 0
        took = min(took, moves.read())
    moves.ns = 0
    d.spent.restart()
    for step in turns():
        moves.begin()
        planes.bring(step)
        moves.end()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    planes.check(step)
    return {}


class Turned:
    """Layers of a cache that a prefill has made head by head, and that a decoder has token by token.

    Attributes:
        made, wanted: where both are on the device.
    """

    layers, heads, width = 4, 8, 512

    def __init__(self, d: Device) -> None:
        self.d, self.tokens = d, (32_768 if d.gpu else 256)
        self.plane = self.tokens * self.width
        self.size = self.heads * self.plane
        self.made, self.wanted = (d.made("cudaMalloc", self.layers * self.size) for _ in range(2))

    def turn(self) -> None:
        """All heads of all layers to their columns, by a 2D copy each."""
        d, width = self.d, self.width
        for layer in range(self.layers):
            for head in range(self.heads):
                to = (self.wanted + layer * self.size + head * width, self.heads * width)
                source = (self.made + layer * self.size + head * self.plane, width)
                copy_2d(d, to, source, width, self.tokens, D2D, d.compute)

    def check(self, value: int) -> None:
        """Raises unless the last token of the last head has this value; frees both."""
        d = self.d
        d.copy(d.host, self.wanted + self.layers * self.size - self.width, self.width, D2H, d.compute)
        d.sync(d.compute)
        right = ct.string_at(d.host, self.width) == bytes([value % 251]) * self.width
        for at in (self.made, self.wanted):
            d.check(d.lib.cudaFree(at))
        if not right:
            raise RuntimeError("a token has other keys than its prefill gave it")


@twentyfifth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours", "small_copies", "descriptor_bound_batch"),
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "synchronisation", "pageable_memory"),
)
def a_handed_over_cache_turned_from_head_by_head_to_token_by_token_before_its_first_decode(d: Device) -> Truth:
    """A prefill leaves its cache head by head, and a 2D copy within the device lays each head in its decoder's columns.

    Four layers of eight heads of 32,768 tokens, 512 MiB in all, stand on the model's stream before the request is
    decoded. How long the copies take is measured first, and a request computes for 0.6 of that. A request's last layer
    has new bytes each time. Requests are submitted two ahead, and nothing crosses the link before the end.
    """
    turned, moves, request, took = Turned(d), Stretches(d), 0, 1 << 40
    for _ in range(4):
        moves.begin()
        turned.turn()
        moves.end()
        d.sync(d.compute)
        moves.ns = 0
        took = min(took, moves.read())
    moves.ns = 0
    d.spent.restart()
    for request in turns():
        clear(d, turned.made + (turned.layers - 1) * turned.size, request % 251, turned.size, d.compute)
        moves.begin()
        turned.turn()
        moves.end()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, request, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    turned.check(request)
    return {}


@twentyfifth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours", "head_of_line_copies"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_table_of_hot_rows_sent_again_because_a_heartbeat_of_its_trainer_has_given_it_a_new_version(d: Device) -> Truth:
    """A ranker sends its table of hot rows whenever it has a new version, and the trainer's heartbeat gives it one.

    The heart beats each 0.2 ms, and a step takes some 0.9 ms, so each step finds a new version; but the rows become
    others each 12 ms alone. A table is four shards of 120 us on a stream of its own, which wait for the step before,
    and 0.4 ms of kernels wait for them. So some twelve of thirteen tables are on the device already, byte by byte.
    """
    pool, loads, shards, step, number, held = Pool(d, d.bytes_of(120)), d.copies[8], 4, 0, 0, -1
    tables, version, again, needed = 3, -1, Stretches(d, loads), Stretches(d, loads)
    d.spent.restart()
    for step in turns():
        passed = now() - d.spent.begin
        if passed // 200_000 != version:
            version, number = passed // 200_000, passed // 12_000_000 % tables
            d.order(loads, d.compute, step % 16 * 2)
            stretch = again if number == held else needed
            stretch.begin()
            for shard in range(shards):
                pool.fetch(shard, number * shards + shard, loads)
            stretch.end()
            d.order(d.compute, loads, step % 16 * 2 + 1)
            held = number
        for _ in range(2):
            d.launch(200_000)
        paced_and_read(d, step, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    for shard in (0, shards - 1):
        home = (held * shards + shard) * pool.size + end
        same(d, d.device + shard * pool.size + end, d.host + home, 64 * KiB)
    return {"redundant_loads": again.ns}


# ---- the device waits for the host ----------------------------------------------------------------------------------


class Pages:
    """Pages of adapters for later requests, loaded behind a function of the host that adds up their checksums."""

    size, count = 16 * KiB, 1_500

    def __init__(self, d: Device) -> None:
        self.d, self.loads, self.pool = d, d.copies[9], Pool(d, self.size)
        self.homes = random.Random(251).sample(range(self.pool.count - 8), self.pool.count - 8)

    def bring(self, number: int, checksum_us: int) -> list[int]:
        """The checksum's function, then each page: how long each of the loads' calls took, ns."""
        gate(self.d, checksum_us, self.loads)
        first = number * self.count
        homes = [self.homes[(first + page) % len(self.homes)] for page in range(self.count)]
        return [self.pool.fetch(2 * page, home, self.loads) for page, home in enumerate(homes)]

    def check(self, number: int) -> None:
        """Raises unless the first and the last page of a round are there."""
        self.d.sync(self.loads)
        for page in (0, self.count - 1):
            home = self.homes[(number * self.count + page) % len(self.homes)]
            same(self.d, self.d.device + 2 * page * self.size, self.d.host + home * self.size, self.size)


@twentyfifth(
    line=FULL_QUEUE,
    or_lines=(ELSEWHERE,),  # where the checksum, a function of the host, counts for more than the thread behind it
    also=(
        *("launch_queue_saturation", "fence_before_copies", "channels_exhausted", "gpu_starved", "small_copies"),
        *("unmerged_neighbours", "synchronisation", "python_or_gil_bound"),
    ),
    like=("allocation_on_hot_path", "slow_tier", "cpu_starved", "pageable_memory", "redundant_loads", "link_bound"),
)
def pages_of_adapters_for_later_requests_given_to_a_stream_that_adds_up_a_checksum_first(d: Device) -> Truth:
    """The scheduler gives a stream a function that adds up a checksum, 36 ms, and 1,500 pages behind it, then decodes.

    A stream takes a thousand submissions, so the scheduler stands in its call until the function is over, 30 ms or so
    in which nothing at all runs on the device: the steps before were waited for. The pages are 0.3 us of the link each
    and for adapters of later requests: the sixteen steps of 1 ms wait for none.
    """
    pages, lost, number = Pages(d), 0, 0
    d.spent.restart()
    for number in turns():
        lost += beyond(pages.bring(number, 36_000))
        for step in range(16):
            d.launch(1_000_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.sync(d.compute)
        d.sync(pages.loads)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    pages.check(number)
    return {}


@twentyfifth(
    line=WAITING,
    or_lines=(ELSEWHERE,),  # in a function of the host that stands in the stream
    also=("synchronisation", "gpu_starved", "wasted_stores", "python_or_gil_bound", "fence_before_copies"),
    like=("launch_queue_saturation", "small_copies", "cpu_starved", "pageable_memory", "slow_tier"),
)
def a_draft_on_the_cpu_that_guesses_in_a_function_of_the_stream_whose_end_the_engine_waits_for(d: Device) -> Truth:
    """A draft kept on the CPU guesses for 1.2 ms, as a function of the model's stream behind each verification.

    A verification is two kernels of 0.35 ms and its tokens' way back; then the function runs, and nothing else of the
    stream may. The engine waits for the stream's end before it writes the guesses and submits the next verification:
    it stands in cudaStreamSynchronize all the time.
    """
    guesses, step, at = Stretches(d), 0, 0
    d.spent.restart()
    for step in turns():
        ids = step % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, step)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(2):
            d.launch(350_000)
        at = token(d, step)
        guesses.begin()
        gate(d, 1_200, d.compute)
        guesses.end()
        d.sync(d.compute)
        told(at, step)
        guesses.read()
    d.spent.add(WAITING, guesses.ns)
    d.spent.stop()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


class Landings:
    """Room for a request that is handed over: pinned memory for the network's card, and memory on the device.

    Attributes:
        lost: ns in the calls that make both and give both back; right: requests whose bytes were on the device.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.pinned, self.far = d, (12 * MiB if d.gpu else 4 * MiB), (96 * MiB if d.gpu else MiB)
        self.lost, self.right = 0, 0

    def hand_over(self, number: int, each_ns: int) -> None:
        """Makes the landings, brings 256 KiB through them, computes, and gives them back."""
        d, size, begin = self.d, 256 * KiB, now()
        home, at = d.made("cudaHostAlloc", self.pinned, 0), d.made("cudaMalloc", self.far)
        self.lost += now() - begin
        ct.memmove(home, d.host + number % 8 * size, size)
        d.copy(at, home, size, H2D, d.compute)
        for _ in range(2):
            d.launch(each_ns)
        back = d.size - 64 * KiB
        d.copy(d.host + back, at + size - 4 * KiB, 4 * KiB, D2H, d.compute)
        d.sync(d.compute)
        self.right += ct.string_at(d.host + back, 4 * KiB) == ct.string_at(home + size - 4 * KiB, 4 * KiB)
        begin = now()
        d.check(d.lib.cudaFreeHost(home))
        d.check(d.lib.cudaFree(at))
        self.lost += now() - begin


@twentyfifth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        *("wasted_stores", "weights_not_overlapped"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "cpu_starved", "redundant_loads", "small_copies"),
)
def a_pinned_and_a_far_landing_made_for_each_request_that_a_prefill_announces_and_given_back(d: Device) -> Truth:
    """For each announced request the decoder pins 12 MiB and takes 96 MiB of the device; both go when it is answered.

    The thread that launches makes these calls itself, and has waited for the request before, so nothing is on the
    device in any of them. How long they take is measured first, and a request computes for half of that.
    """
    landings, took, number = Landings(d), 1 << 40, 0
    for probe in range(6):
        landings.hand_over(probe, 10_000)
        took, landings.lost = min(took, landings.lost), 0
    landings.right = 0
    d.spent.restart()
    for number in turns():
        landings.hand_over(number, max(took // 4, 20_000))
    d.spent.add(ALLOCATING, landings.lost)
    d.spent.stop()
    if landings.right != number + 1:
        raise RuntimeError("a request was handed over with other bytes than its own")
    return {"allocation_on_hot_path": landings.lost}


class Distributions:
    """What a draft on the CPU gives of each of five guesses: probabilities of all tokens, 1 MiB of plain memory.

    Attributes:
        sets: of five that take turns; took: ns that the calls take which send one.
    """

    size, guesses, sets = MiB, 5, 4

    def __init__(self, d: Device, stream: int) -> None:
        self.d, self.stream, whole = d, stream, self.size * self.guesses * self.sets
        self.keep, self.at = pageable(whole)
        ct.memmove(self.at, random.Random(252).randbytes(whole), whole)
        self.took = 1 << 40
        for probe in range(6):
            self.took = min(self.took, self.send(probe + 1))
            d.sync(stream)

    def places(self, step: int, guess: int) -> tuple[int, int]:
        """Where a guess's probabilities come to (two steps have places), and where they are."""
        to = self.d.device + (step % 2 * self.guesses + guess) * self.size
        return to, self.at + (step % self.sets * self.guesses + guess) * self.size

    def send(self, step: int) -> int:
        """Sends a step's five: how long the calls took, ns."""
        return sum(self.d.copy(*self.places(step, guess), self.size, H2D, self.stream) for guess in range(self.guesses))

    def check(self, step: int) -> None:
        """Raises unless the last guess of a step is there, to its last byte."""
        to, source = self.places(step, self.guesses - 1)
        end = self.size - 64 * KiB
        same(self.d, to + end, source + end, 64 * KiB)


@twentyfifth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),  # in such a copy the thread waits for the device, and a copy runs
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "unmerged_neighbours", "link_bound"),
        *("python_or_gil_bound", "wasted_stores"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
)
def probabilities_of_a_draft_on_the_cpu_sent_out_of_its_plain_arrays_before_each_verification(d: Device) -> Truth:
    """A draft on the CPU leaves the probabilities of five guesses in plain arrays of 1 MiB, which are sent one by one.

    They stand before the verification on the model's stream, and the one before was waited for, so no kernel runs
    meanwhile. How long the five calls take is measured first, and a verification computes for 0.6 of that. Four sets
    of arrays take turns, so each copy brings other bytes.
    """
    sent, lost, step, at = Distributions(d, d.compute), 0, 0, 0
    d.spent.restart()
    for step in turns():
        lost += sent.send(step)
        for _ in range(2):
            d.launch(max(sent.took * 3 // 10, 20_000))
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    sent.check(step)
    return {"pageable_memory": lost}


@twentyfifth(
    line=SUBMITTING,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores", "context_lock_stall"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "load_not_ordered", "slow_tier"),
)
def a_wait_for_the_event_of_each_block_that_a_kernel_of_three_microseconds_reads_and_one_behind_it(d: Device) -> Truth:
    """A block manager keeps an event for each block, and each small kernel waits for those of six blocks that it reads.

    Behind the kernel the block that it wrote has its event recorded. That is eight calls for 3 us of kernels, which
    take the thread 10 us or more. All events are reached long ago, and no copy runs but the token's. The thread waits
    for the token of each step before it begins the next, so the device is never behind it.
    """
    kernels, each, reads, blocks, lost, step, at = 160, 3_000, 6, 96, 0, 0, 0
    chance = random.Random(253)
    tables = [chance.sample(range(blocks), reads) for _ in range(kernels)]
    for block in range(blocks):
        d.record(block, d.copies[3])
    d.sync(d.copies[3])
    wait = d.lib.cudaStreamWaitEvent
    d.spent.restart()
    for step in turns():
        begin = now()
        for number, table in enumerate(tables):
            for block in table:
                d.check(wait(d.compute, d.events[block], 0))
            d.launch(each)
            d.record(number % blocks, d.compute)
        at = token(d, step)
        lost += max(now() - begin - kernels * each, 0)
        d.sync(d.compute)
        told(at, step)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    return {}


class Forks:
    """Beams of sequences, the blocks that each has, and how many beams have each block.

    Attributes:
        each_ns: how long it takes to drop half of the beams of a sequence and to fork the others.
    """

    sequences, beams, blocks = 64, 8, 24

    def __init__(self) -> None:
        chance, self.free = random.Random(254), list(range(1 << 16))
        self.holders = dict[int, int]()
        self.held = [[[self.taken() for _ in range(self.blocks)]] for _ in range(self.sequences)]
        for beams in self.held:
            for _ in range(self.beams - 1):
                self.fork(beams, 0)
        self.drops = [chance.sample(range(self.beams), self.beams // 2) for _ in range(257)]
        self.each_ns = max(quickest(lambda: self.step(0, 16), 8) // 16, 1)

    def taken(self) -> int:
        """A free block, which one beam has."""
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def fork(self, beams: list[list[int]], which: int) -> None:
        """One more beam, with all blocks of another but the last one."""
        for block in beams[which][:-1]:
            self.holders[block] += 1
        beams.append([*beams[which][:-1], self.taken()])

    def step(self, number: int, count: int) -> None:
        """Drops and forks beams of so many sequences."""
        for sequence in range(count):
            beams, drops = self.held[sequence % self.sequences], self.drops[(number + sequence) % len(self.drops)]
            for which in sorted(drops, reverse=True):
                for block in beams.pop(which):
                    self.holders[block] -= 1
                    if not self.holders[block]:
                        del self.holders[block]
                        self.free.append(block)
            for which in range(self.beams - len(beams)):
                self.fork(beams, which)

    def check(self) -> None:
        """Raises unless the holders of all blocks are those that the beams have."""
        had = sum(len(beam) for beams in self.held for beam in beams)
        if had != sum(self.holders.values()) or len(self.free) + len(self.holders) != 1 << 16:
            raise RuntimeError("a block was lost, or has holders that are none")


@twentyfifth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation"),
)
def holders_of_the_blocks_of_dropped_beams_counted_down_in_a_dictionary_before_the_next_step(d: Device) -> Truth:
    """Before each step of 0.8 ms a scheduler drops half of all beams and forks the rest, and counts who has a block.

    It goes over the blocks in Python for as many sequences as take it 1.6 ms, as is measured first. The step before
    was waited for, so nothing is on the device meanwhile.
    """
    forks, idle, step = Forks(), Stretches(d), 0
    count = max(1_600_000 // forks.each_ns, 1)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        forks.step(step, count)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    forks.check()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


DRAFTER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
chances, last = [one * 7_919 % 1_009 for one in range(1_024)], 0
print(flush=True)
while True:
    for one in chances:
        last = (last * 31 + one) % 65_537
"""


@contextlib.contextmanager
def drafters_on_this_cpu(count: int) -> Iterator[None]:
    """So many processes that guess for other engines all the time, on the one CPU that this thread may use."""
    before = os.sched_getaffinity(0)
    cpu = sorted(before)[len(before) // 2]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", DRAFTER, str(cpu)]
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


@twentyfifth(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation", "wasted_stores"),
    like=("context_lock_stall", "slow_tier", "launch_queue_saturation", "small_copies"),
    blind=DEVICE,
)
def drafts_on_the_cpu_in_four_processes_that_share_the_cpu_of_the_engine_that_checks_their_guesses(d: Device) -> Truth:
    """Four processes draft on the one CPU of the engine, which lays their guesses in a tree for 1.5 ms of it a step.

    The tree is 1.5 ms of the CPU and is made before each verification of 0.6 ms, which is waited for; so nothing is on
    the device meanwhile. A fifth of the CPU is the engine's, so it takes some 7 ms, in 6 ms of which others run.
    """
    off, step, at, tree = 0, 0, 0, dict[int, int]()
    with drafters_on_this_cpu(4):
        d.spent.restart()
        for step in turns():
            begin, busy = now(), time.thread_time_ns()
            while time.thread_time_ns() - busy < 1_500_000:
                tree = {guess: (guess - 1) // 3 for guess in range(1, 128)}
            for _ in range(2):
                d.launch(300_000)
            at = token(d, step)
            d.sync(d.compute)
            off += max(now() - begin - 2_200_000, 0)  # alone, a step is its tree, its kernels and 0.1 ms
        d.spent.add(NO_CPU, off)
        d.spent.stop()
    told(at, step)
    if len(tree) != 127:
        raise RuntimeError("the tree was not made")
    return {"cpu_starved": off}


class Promoted:
    """Cold prefixes of chats in a file, of which one is copied to a file in memory, and read from there, at its turn.

    Attributes:
        pieces: of a prefix; times: how often one is promoted, for 2 ms; chats: as many take turns.
    """

    size, chats, most = 256 * KiB, 3, 24

    def __init__(self, d: Device) -> None:
        self.d, self.pieces = d, self.most
        self.cold = tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115 - closed with the object
        self.warm = os.memfd_create("warm")
        chance = random.Random(255)
        self.kept = [chance.randbytes(self.most * self.size) for _ in range(self.chats)]
        for prefix in self.kept:
            self.cold.write(prefix)
        self.cold.flush()
        each = quickest(lambda: self.promote(0), 4) // self.pieces
        self.pieces = min(max(2_000_000 // max(each, 1), 2), self.most)
        self.times = -(-2_000_000 // quickest(lambda: self.promote(0), 4))

    def promote(self, chat: int) -> None:
        """A chat's prefix from one file to the other, and into pinned memory."""
        first, size = chat % self.chats * self.most * self.size, self.pieces * self.size
        os.lseek(self.warm, 0, os.SEEK_SET)
        moved = 0
        while moved < size:
            moved += os.sendfile(self.warm, self.cold.fileno(), first + moved, size - moved)
        view = (ct.c_char * size).from_address(self.d.host)
        if os.preadv(self.warm, [view], 0) != size:
            raise RuntimeError("a prefix was not read whole")

    def end(self, chat: int) -> None:
        """Raises unless a chat's prefix is on the device; both files go."""
        os.close(self.warm)
        self.cold.close()
        last = self.pieces * self.size - 4 * KiB
        if ct.string_at(self.d.host + last, 4 * KiB) != self.kept[chat % self.chats][last : last + 4 * KiB]:
            raise RuntimeError("another prefix was promoted than was asked for")
        same(self.d, self.d.device + last, self.d.host + last, 4 * KiB)


def make_the_prefixes(d: Device) -> None:
    """The files, and how long it takes to go through them."""
    MADE["promoted"] = Promoted(d)


@twentyfifth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # a recorder of calls alone sees a thread outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        *("wasted_stores", "unmerged_neighbours", "redundant_loads"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "allocation_on_hot_path"),
    prepare=make_the_prefixes,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_cold_prefix_promoted_by_sendfile_to_a_file_in_memory_and_read_from_there_at_its_chat_s_turn(d: Device) -> Truth:
    """A chat's cold prefix goes by sendfile from its file to one in memory, and by preadv into pinned memory, for 2 ms.

    The thread that launches does so itself, and has waited for the turn before, so nothing is on the device meanwhile.
    How often it takes 2 ms was measured before. A prefix has at most 6 MiB, 0.1 ms of the link; a turn has 0.8 ms of
    kernels, and three chats take turns.
    """
    promoted, step, at = MADE.pop("promoted"), 0, 0
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            for _ in range(promoted.times):
                promoted.promote(step)
        d.copy(d.device, d.host, promoted.pieces * promoted.size, H2D, d.compute)
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
    d.spent.stop()
    promoted.end(step)
    return {}


class Snapshots:
    """A thread that takes a block to the host and keeps it for 3 ms, until a far store has it.

    Attributes:
        held: whether a block is kept; taken: how many have been.
    """

    size = 64 * KiB

    def __init__(self, d: Device) -> None:
        self.d, self.stream, self.held, self.taken, self.asked = d, d.copies[12], False, 0, Mailbox()
        self.thread = in_thread(self.serve)

    def serve(self) -> None:
        """What the thread does."""
        d = self.d
        while (number := self.asked.take()) >= 0:
            clear(d, d.device, number % 251, self.size, self.stream)
            d.copy(d.host, d.device, self.size, D2H, self.stream)
            d.sync(self.stream)
            self.taken += ct.string_at(d.host + self.size - 512, 512) == bytes([number % 251]) * 512
            time.sleep(0.003)
            self.held = False

    def take(self, number: int) -> None:
        """A block is kept from now on."""
        self.held = True
        self.asked.put(number)

    def end(self, count: int) -> None:
        """Ends the thread; raises unless so many blocks have left as they were."""
        self.asked.put(-1)
        self.thread.join()
        if self.taken != count:
            raise RuntimeError("a snapshot has other bytes than its block")


@twentyfifth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores", "slow_tier"),
    like=("cpu_starved", "small_copies", "launch_queue_saturation", "context_lock_stall", "allocation_on_hot_path"),
)
def a_scheduler_that_sleeps_longer_each_time_until_a_snapshot_has_let_its_blocks_go(d: Device) -> Truth:
    """A scheduler finds no free block, and sleeps 0.5, 1, 2 and 4 ms between its tries until a snapshot lets one go.

    The snapshot's thread keeps a block for 3 ms behind each step, asleep itself, as a far store takes it; so the
    scheduler sleeps for 3.5 ms or more, and its step of 1.6 ms was waited for before. Nothing is on the device
    meanwhile but the block of 64 KiB, which takes some microseconds.
    """
    snapshots, step, lost, at = Snapshots(d), 0, 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(2):
            d.launch(800_000)
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
        snapshots.take(step)
        begin, delay = now(), 0.0005
        while snapshots.held:
            time.sleep(delay)
            delay *= 2
        lost += now() - begin
    d.spent.add(ELSEWHERE, lost)
    d.spent.stop()
    snapshots.end(step + 1)
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


@twentyfifth(
    line=COMPUTING,
    like=(
        *("head_of_line_copies", "weights_not_overlapped", "link_bound", "gpu_starved", "load_not_ordered"),
        "store_not_ordered",
    ),
    also=("wasted_stores", "unmerged_neighbours", "python_or_gil_bound"),
)
def a_heap_of_transfers_in_which_the_next_step_s_blocks_go_before_write_backs_beside_this_one(d: Device) -> Truth:
    """A thread takes transfers out of a heap: the four blocks of the next step, then eight that the last one has left.

    There are two places, so all of it, 0.72 ms of the link, runs beside this step's four kernels of 0.9 ms, behind the
    kernels of the step before. The next step waits for its four, which are there three milliseconds before.
    """
    errands, step, late = Errands(d, 2, "in"), 0, list[int]()
    errands.ask(-1, 0, -1)
    d.sync(errands.link)
    d.spent.restart()
    for step in turns():
        begin = now()
        errands.compute(step, 4, 900_000)
        errands.ask(step - 1, step + 1, step - 1)
        late.append(now() - begin)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    errands.end(step - 1, step + 1)
    plain_only(d, sorted(late)[-2] < 2_500_000, f"to submit a step took {sorted(late)[-2]} ns")
    return {}


@twentyfifth(
    line=COMPUTING,
    like=("synchronisation", "weights_not_overlapped", "link_bound", "gpu_starved", "python_or_gil_bound"),
    also=("unmerged_neighbours", "redundant_loads"),  # of 28 pieces, 24 are on the device
)
def a_chat_s_prefix_that_a_mover_with_one_credit_brings_while_the_turn_before_computes(d: Device) -> Truth:
    """A mover brings the next chat's twelve pieces, each when the last one's event is reached, beside a turn of 6 ms.

    It waits for each of them for 120 us, all of a prefix for some 1.7 ms. There are two places, and a prefix begins to
    come when the turn that has had its place is over, a whole turn before it is needed; the engine takes it a turn
    later, and launches behind a turn that is still on the device.
    """
    mover, request, waited = Mover(d, 2), 0, list[int]()
    mover.asked.put(0)
    mover.there.take()
    mover.asked.put(1)
    d.spent.restart()
    for request in turns():
        mover.compute(request, 6, 1_000_000)
        begin = now()
        if mover.there.take() != request + 1:
            raise RuntimeError("another prefix came than was asked for")
        mover.asked.put(request + 2)
        waited.append(now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    mover.there.take()
    mover.end(request + 2)
    late = sorted(waited)[-2] if len(waited) > 1 else 0
    plain_only(d, late < 9_500_000, f"a prefix was waited for {late} ns")
    return {}


@twentyfifth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "fence_before_copies", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_draft_on_the_cpu_that_guesses_for_one_half_of_a_batch_while_the_other_half_is_verified(d: Device) -> Truth:
    """A draft kept on the CPU guesses for 1.2 ms in a function of a side stream, for each half of a batch in turn.

    The function stands behind the tokens of its half's verification, and that half's next one waits for it; but the
    other half's, four kernels of 0.9 ms, run between. So the guesses are there two milliseconds before they must be.
    """
    side, step, at = d.copies[18], 0, 0
    d.spent.restart()
    for step in turns():
        ids = step % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, step)
        if step >= 2:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[32 + (step - 2) % 16], 0))
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(900_000)
        at = token(d, step)
        d.order(side, d.compute, step % 16)
        gate(d, 1_200, side)
        d.record(32 + step % 16, side)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(side)
    told(at, step)
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


@twentyfifth(
    line=COMPUTING,
    like=("pageable_memory", "synchronisation", "weights_not_overlapped", "gpu_starved", "load_not_ordered"),
    also=("unmerged_neighbours", "wasted_stores", "link_bound"),
)
def probabilities_of_a_draft_on_the_cpu_sent_out_of_plain_arrays_beside_the_verification_before(d: Device) -> Truth:
    """A draft's five plain arrays of 1 MiB are sent on a side stream while a verification of 12 ms is on the device.

    The engine stands in these calls for a millisecond or two, launches the verification behind their event, and waits
    for the one before the last; so there are 12 ms of kernels on the device whenever it sends. Two steps have places.
    """
    side, step, stood, at = d.copies[21], 0, list[int](), 0
    sent = Distributions(d, side)
    sent.send(0)
    d.sync(side)
    d.spent.restart()
    for step in turns():
        d.order(d.compute, side, step % 16)
        for _ in range(6):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 1)
        stood.append(sent.send(step + 1))
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    sent.check(step + 1)
    plain_only(d, sorted(stood)[-2] < 9_000_000, f"to send the arrays took {sorted(stood)[-2]} ns")
    return {}


@twentyfifth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "slow_tier"),
    also=("wasted_stores",),
)
def holders_of_the_blocks_of_dropped_beams_counted_down_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """A scheduler counts in Python for 1.6 ms who has which blocks, but two steps of 6 ms are on the device.

    It waits for the step before these two alone, by an event, so there are some 12 ms of kernels on the device
    whenever it counts.
    """
    forks, step, took, at = Forks(), 0, list[int](), 0
    count = max(1_600_000 // forks.each_ns, 1)
    d.spent.restart()
    for step in turns():
        for _ in range(4):
            d.launch(1_500_000)
        at = token(d, step)
        paced(d, step, 2)
        begin = now()
        forks.step(step, count)
        took.append(now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    forks.check()
    plain_only(d, sorted(took)[-2] < 9_000_000, f"to count took {sorted(took)[-2]} ns")
    return {}


class Packed:
    """Layers of a quantised cache, packed by zlib, that two threads unpack into a ring of pinned places.

    Attributes:
        places: of the ring; kinds: of layers; each_ns: what it takes to unpack one.
    """

    size, places, kinds, slots = 256 * KiB, 8, 5, 4

    def __init__(self, d: Device) -> None:
        self.d, self.executor, chance = d, ThreadPoolExecutor(2), random.Random(256)
        self.raw = [bytes(chance.choices(range(16), k=self.size)) for _ in range(self.kinds)]
        self.packed = [zlib.compress(one, 1) for one in self.raw]
        self.each_ns = quickest(lambda: self.unpack(0), 4)

    def unpack(self, layer: int) -> None:
        """What a thread does for a layer."""
        home = self.d.host + layer % self.places * self.size
        ct.memmove(home, zlib.decompress(self.packed[layer % self.kinds]), self.size)

    def ask(self, layer: int) -> Future[None]:
        """Has a layer unpacked."""
        return self.executor.submit(self.unpack, layer)

    def load(self, layer: int, stream: int) -> None:
        """An unpacked layer to its slot on the device."""
        at, home = layer % self.slots * self.size, layer % self.places * self.size
        self.d.copy(self.d.device + at, self.d.host + home, self.size, H2D, stream)

    def end(self, layer: int) -> None:
        """Ends the threads; raises unless a layer is on the device as it was before it was packed."""
        self.executor.shutdown()
        home = self.d.host + layer % self.places * self.size
        if ct.string_at(home, self.size) != self.raw[layer % self.kinds]:
            raise RuntimeError("a layer was unpacked to other bytes than were packed")
        end = self.size - 64 * KiB
        same(self.d, self.d.device + layer % self.slots * self.size + end, home + end, 64 * KiB)


def pack_the_layers(d: Device) -> None:
    """Packs them, and starts the threads."""
    MADE["packed"] = Packed(d)


@twentyfifth(
    line=COMPUTING,
    like=("slow_tier", "cpu_starved", "python_or_gil_bound", "gpu_starved", "weights_not_overlapped"),
    also=("unmerged_neighbours", "wasted_stores", "redundant_loads"),
    prepare=pack_the_layers,
)
def layers_of_a_quantised_cache_unpacked_by_two_threads_into_a_ring_four_layers_ahead(d: Device) -> Truth:
    """Two threads unpack a quantised cache by zlib, a layer in a millisecond or two, while a layer computes for 4 ms.

    Four layers are asked for ahead, and eight places take turns. The engine takes a layer's future, which was done
    long before, loads the layer on a side stream, launches behind it, and waits for the layer before the last: there
    are 4 ms or more on the device when it takes the next.
    """
    packed, loads, layer, waited, at = MADE.pop("packed"), d.copies[23], 0, list[int](), 0
    asked = [packed.ask(layer) for layer in range(4)]
    asked[0].result()
    d.spent.restart()
    for layer in turns():
        begin = now()
        asked.pop(0).result()
        waited.append(now() - begin)
        packed.load(layer, loads)
        d.order(d.compute, loads, layer % 16)
        for _ in range(2):
            d.launch(2_000_000)
        at = token(d, layer)
        paced(d, layer, 1)
        asked.append(packed.ask(layer + 4))
    d.sync(d.compute)
    d.spent.stop()
    for one in asked:
        one.result()
    told(at, layer)
    packed.end(layer)
    plain_only(d, sorted(waited)[-2] < 3_000_000, f"a layer was waited for {sorted(waited)[-2]} ns")
    return {}


FRONT_ENDS = """
import socket, sys, time
ways = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
for way in ways:
    way.connect(sys.argv[1])
ways[0].recv(16)
due = time.monotonic()
for number in range(int(sys.argv[2])):
    due += 0.07
    time.sleep(max(due - time.monotonic(), 0))
    way = ways[number % 2]
    way.send(number.to_bytes(4, "little") * 1_024)
    if way.recv(64) != b"%d" % number:
        raise SystemExit(1)
"""


class Chats:
    """Two front ends of chats, each with a connection of whole packets, and the epoll that waits for either.

    Attributes:
        count: how many turns of chats they ask for.
    """

    count = 21

    def __init__(self) -> None:
        self.folder, self.epoll = tempfile.TemporaryDirectory(dir="/tmp"), select.epoll()
        place = str(Path(self.folder.name) / "engine")
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(place)
            listener.listen(2)
            command = [sys.executable, "-S", "-c", FRONT_ENDS, place, str(self.count)]
            self.child = subprocess.Popen(command, env=env)
            self.ways = [listener.accept()[0] for _ in range(2)]
        for way in self.ways:
            self.epoll.register(way, select.EPOLLIN)
        self.by_number = {way.fileno(): way for way in self.ways}

    def asked(self) -> tuple[socket.socket, bytes]:
        """The next packet, and the front end that has sent it."""
        way = self.by_number[self.epoll.poll()[0][0]]
        return way, way.recv(8 * KiB)

    def end(self) -> None:
        """Raises unless the front ends have had all answers."""
        right = self.child.wait() == 0
        self.epoll.close()
        for way in self.ways:
            way.close()
        self.folder.cleanup()
        if not right:
            raise RuntimeError("the front ends have not had their answers")


def open_the_chats(_: Device) -> None:
    """Starts the front ends."""
    MADE["chats"] = Chats()


@twentyfifth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
    also=("wasted_stores", "unmerged_neighbours"),
    prepare=open_the_chats,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def turns_of_chats_in_whole_packets_of_two_front_ends_that_an_epoll_waits_for(d: Device) -> Truth:
    """Two front ends send a chat's turn each 70 ms, in packets, and the engine stands in an epoll until one has come.

    It brings the chat's prefix out of pinned memory, 0.2 ms of the link, computes for 7 ms, answers, and stands in the
    epoll again: for seven eighths of the time nobody has asked for anything.
    """
    chats, pool, number = MADE.pop("chats"), Pool(d, d.bytes_of(200)), 0
    d.spent.restart()
    chats.ways[0].send(b"ready")
    for number in range(chats.count):
        with d.spent.on(NOTHING_TO_DO):
            way, ids = chats.asked()
        if ids[:4] != number.to_bytes(4, "little"):
            raise RuntimeError("another turn came than was due")
        pool.fetch(0, number % 5, d.compute)
        for _ in range(7):
            d.launch(1_000_000)
        at = token(d, number)
        d.sync(d.compute)
        told(at, number)
        way.send(b"%d" % number)
    d.spent.stop()
    chats.end()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + number % 5 * pool.size + end, 64 * KiB)
    return {}
