"""Tenth programs whose kernels wait for copies: activations, a loader, windows, a mask, heads, columns, a graph."""

from __future__ import annotations

import ctypes as ct
import time
from queue import Queue
from typing import Any

from accounts import Pool, Stretches, paced_and_read, turns
from device import D2H, H2D, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    INSIDE_GPU,
    NOT_NEEDED,
    KiB,
    Truth,
    in_thread,
    tenth,
)
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


@tenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "wasted_stores", "small_copies", "pageable_memory", "launch_queue_saturation"),
)
def activations_that_leave_and_come_back_on_the_stream_that_trains(d: Device) -> Truth:
    """Seven of eight layers' activations leave behind their forward kernel and come back before their backward one.

    All is on one stream. A layer computes for 0.2 ms forward and 0.3 ms backward, and its activations take the link
    0.2 ms each way: 2.8 ms of each 6.8 ms are copies without a kernel. Each layer writes the one buffer that the layer
    before wrote, so what comes back is not on the device, and the last layer's never leaves.
    """
    pool, layers, moves, step = Pool(d, d.bytes_of(200)), 8, Stretches(d), 0
    made, back = d.device, d.device + pool.size
    for step in turns():
        for layer in range(layers):
            clear(d, made, (step * layers + layer) % 251, pool.size, d.compute)
            d.launch(200_000)
            if layer < layers - 1:
                moves.begin()
                d.copy(d.host + layer * pool.size, made, pool.size, D2H, d.compute)
                moves.end()
        d.launch(300_000)
        for layer in reversed(range(layers - 1)):
            moves.begin()
            d.copy(back, d.host + layer * pool.size, pool.size, H2D, d.compute)
            moves.end()
            d.launch(300_000)
        paced_and_read(d, step, moves, 2 * (layers - 1))
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, back, d.host, pool.size)
    if ct.string_at(d.host, 64) != bytes([step * layers % 251]) * 64:
        raise RuntimeError("other activations came back than were computed")
    return {}


@tenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "allocation_on_hot_path"),
)
def a_loader_thread_that_asks_for_the_layer_before_until_it_is_over(d: Device) -> Truth:
    """A loader asks an event until a layer's kernel of 0.5 ms is over, then loads the next layer over it, 0.5 ms.

    There is one slot. The model's thread gets the layer's number by a queue and launches its kernel behind the load's
    event, so a load and a kernel never run at once, whoever is quick: half of the time is the link's. Six layers'
    weights take turns in the slot, so each load brings other bytes than are there.
    """
    size, loads, moves = d.bytes_of(500), d.copies[0], Stretches(d, d.copies[0])
    layers, launched, there, number = min(d.size // size - 1, 6), Queue[int](), Queue[int](), 0

    def load() -> None:
        while (number := launched.get()) >= 0:
            while number and d.lib.cudaEventQuery(d.events[number % 32]):
                time.sleep(0.000_02)
            moves.read()  # the load before is over, as its kernel is
            moves.begin()
            d.copy(d.device, d.host + number % layers * size, size, H2D, loads)
            moves.end()
            d.record(64 + number % 32, loads)
            there.put(number)

    thread = in_thread(load)
    launched.put(0)
    for number in turns():
        if there.get() != number:
            raise RuntimeError("another layer was loaded than the next one")
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[64 + number % 32], 0))
        d.launch(500_000)
        d.record((number + 1) % 32, d.compute)
        launched.put(number + 1)
    launched.put(-1)
    thread.join()
    d.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    last = there.get()
    same(d, d.device + size - 64 * KiB, d.host + last % layers * size + size - 64 * KiB, 64 * KiB)
    return {}


@tenth(
    "link_bound",
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def attention_over_a_long_context_that_comes_window_by_window(d: Device) -> Truth:
    """A context in host memory comes by windows of keys and values, 0.36 ms of the link, for 0.15 ms of attention each.

    There are three pairs of slots, and a window is loaded as soon as the one that had its slots is over: the link is
    never free, and the device has a kernel for 0.15 ms of each 0.36 ms. Eight windows take turns in the slots, so that
    each brings other bytes than are there.
    """
    pool, loads, waits, window = Pool(d, d.bytes_of(180)), d.copies[4], Stretches(d), 0
    windows = min((pool.count - 1) // 2, 8)
    for window in turns():
        pair = window % 3 * 2
        if window > 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[64 + window % 3], 0))
        for i in range(2):
            pool.fetch(pair + i, window % windows * 2 + i, loads)
        waits.begin()
        d.order(d.compute, loads, window % 16)
        waits.end()
        d.launch(150_000)
        d.record(64 + window % 3, d.compute)
        paced_and_read(d, window, waits, lag=4)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    home = d.host + (window % windows * 2 + 1) * pool.size
    same(d, d.device + (window % 3 * 2 + 1) * pool.size, home, pool.size)
    return {"link_bound": waits.ns}


@tenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_mask_that_each_layer_has_sent_to_it_once_more(d: Device) -> Truth:
    """A tree's mask is made once for a step, and each of the step's ten layers has it sent to its one place, 0.25 ms.

    A load on the side stream waits for the kernel before it and the layer's kernel of 0.3 ms for the load, so no two
    are at once. Three masks take turns by the step: the first load of a step is needed and the other nine bring what
    is there, 2.25 ms of each 5.5 ms.
    """
    size, layers, masks, loads, waits, step = d.bytes_of(250), 10, 3, d.copies[2], Stretches(d), 0
    for step in turns():
        home = d.host + step % masks * size
        for layer in range(layers):
            event = step % 4 * 2 * layers + 2 * layer
            waits.begin()
            d.order(loads, d.compute, event)
            d.copy(d.device, home, size, H2D, loads)
            d.order(d.compute, loads, event + 1)
            waits.end()
            d.launch(300_000)
        paced_and_read(d, step, waits, layers)
    d.sync(d.compute)
    lost = waits.read() * (layers - 1) // layers
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, waits.ns - lost)
    d.spent.stop()
    home = d.host + step % masks * size
    same(d, d.device + size - 64 * KiB, home + size - 64 * KiB, 64 * KiB)
    return {"redundant_loads": lost}


class Heads:
    """A layer's keys for eight heads, and the place where each is to stand four times, for the heads that share it.

    Attributes:
        keys, repeated: addresses on the device; width: of a head's row, bytes; rows: of all heads.
    """

    group = 4

    def __init__(self, d: Device) -> None:
        self.d, self.width, self.rows = d, 256 * KiB, 256 if d.gpu else 4
        self.keys = d.made("cudaMalloc", self.rows * self.width)
        self.repeated = d.made("cudaMalloc", self.group * self.rows * self.width)

    def compute(self, step: int) -> None:
        clear(self.d, self.keys, step % 251, self.rows * self.width, self.d.compute)

    def repeat(self) -> None:
        """Each row goes to four places side by side, by a 2D copy within the device for each of the four."""
        to = self.group * self.width
        for i in range(self.group):
            place = (self.repeated + i * self.width, to)
            copy_2d(self.d, place, (self.keys, self.width), self.width, self.rows, D2D, self.d.compute)


def make_the_heads(d: Device) -> None:
    """The heads, and how long the device takes to repeat them."""
    heads, moves, taken = Heads(d), Stretches(d), []
    for step in range(6):
        d.launch(300_000)
        heads.compute(step)
        moves.ns = 0
        moves.begin()
        heads.repeat()
        moves.end()
        d.sync(d.compute)
        taken.append(moves.read())
    MADE["heads"] = heads, min(taken)


@tenth(
    line=INSIDE_GPU,
    also=("gpu_starved",),
    like=("small_copies", "redundant_loads", "unmerged_neighbours", "weights_not_overlapped", "synchronisation"),
    prepare=make_the_heads,
)
def keys_repeated_within_the_device_for_the_heads_that_share_them(d: Device) -> Truth:
    """Before each layer's attention its 64 MiB of keys are copied to four places within the device, by 2D copies.

    The copies stand on the model's stream between the kernel that makes the keys and the attention. How long the device
    takes for them was measured before, and the attention takes as long: nearly half of the time only copies run.
    """
    (heads, each), moves, step = MADE.pop("heads"), Stretches(d), 0
    d.spent.restart()
    for step in turns():
        heads.compute(step)
        moves.begin()
        heads.repeat()
        moves.end()
        d.launch(each)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    d.copy(d.host, heads.repeated + heads.group * heads.rows * heads.width - 64, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, 64) != bytes([step % 251]) * 64:
        raise RuntimeError("the last head's copy has other bytes than were computed")
    for at in (heads.keys, heads.repeated):
        d.check(d.lib.cudaFree(at))
    return {}


@tenth(
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE,),
    also=("small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours", "link_bound"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def a_rank_s_columns_taken_out_of_rows_of_an_odd_length(d: Device) -> Truth:
    """Before each step of 0.5 ms a rank's 20 of each 301 bytes come by one 2D copy, from and to odd addresses.

    Each row crosses the link by itself, at about a quarter of its rate. How long that takes is measured first, and so
    many rows are taken that a copy lasts 0.8 ms, or all that half of the pool has, which is 0.5 ms on an H200. It
    stands between two kernels of one stream. Four ranks' columns take turns, so that other bytes come than are there.
    """
    width, pitch, rows, moves, step = 20, 301, 65_536, Stretches(d), 0
    most = d.size // (2 * pitch)

    def bring(rank: int, count: int) -> None:
        moves.begin()
        copy_2d(d, (d.device + 1, width), (d.host + 3 + rank * width, pitch), width, count, H2D, d.compute)
        moves.end()

    took = 0
    for rank in range(3):
        bring(rank, rows)
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    rows = min(max(rows * 800_000 // max(took, 1), 1_024), most)
    d.spent.restart()
    for step in turns():
        bring(step % 4, rows)
        for _ in range(2):
            d.launch(250_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for row in (0, rows - 1):
        same(d, d.device + 1 + row * width, d.host + 3 + step % 4 * width + row * pitch, width)
    return {}


@tenth(
    line=BELOW_LINK_RATE,
    also=("small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "pageable_memory", "synchronisation", "launch_queue_saturation"),
    needs_gpu=True,
    blind=("run",),  # it sees one launch, not how long each of the graph's copies takes
    undecided_in=("run",),
)
def a_graph_of_small_loads_replayed_before_each_step(d: Device) -> Truth:
    """A sequence's pages of 16 KiB come by the copies of a graph, one for each page, before a step of 0.5 ms.

    No call is made for a page, but the GPU takes above 1 us for each, of which the link needs 0.3 us. How long 128 take
    is measured first, and so many are in the graph that a replay lasts 0.6 ms, with no kernel beside. Two graphs bring
    two sequences' pages to the same slots in turn.
    """
    size, moves, graphs, step = 16 * KiB, Stretches(d), list[int](), 0

    def slot(i: int) -> int:
        return d.device + i * 37 % 1_024 * 2 * size

    def home(sequence: int, i: int) -> int:
        return d.host + (sequence * 1_024 + i * 421 % 1_024) * 3 * size

    def pages(sequence: int, count: int) -> int:
        def bring() -> None:
            for i in range(count):
                d.copy(slot(i), home(sequence, i), size, H2D, d.compute)

        return d.graph(bring)

    def replay(graph: int) -> None:
        moves.begin()
        d.replay(graph, 0)
        moves.end()

    probe, took = pages(0, 128), 0
    for _ in range(4):
        d.launch(500_000)
        replay(probe)
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    count = min(max(128 * 600_000 // max(took, 1), 64), 1_000)
    graphs = [pages(sequence, count) for sequence in range(2)]
    for graph in graphs:
        replay(graph)
    d.sync(d.compute)
    moves.read()
    moves.ns = 0
    d.spent.restart()
    for step in turns():
        replay(graphs[step % 2])
        for _ in range(2):
            d.launch(250_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for i in (0, count - 1):
        same(d, slot(i), home(step % 2, i), size)
    return {}
