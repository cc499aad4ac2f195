"""Served programs whose kernels wait for copies: a prefix hit, experts, a preemption, block tables, a full queue."""

from __future__ import annotations

import ctypes as ct
import random

from accounts import Pool, Stretches, going, paced, paced_and_read
from device import D2H, H2D, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    FULL_QUEUE,
    WAITING,
    Truth,
    blocked,
    served,
)
from unseen_copies import same


@served(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped",),
    like=("redundant_loads", "small_copies", "synchronisation", "unmerged_neighbours"),
)
def a_prefix_hit_loaded_on_the_model_s_own_stream(d: Device) -> Truth:
    """Each of twelve layers gets four blocks of its request's prefix on the model's own stream, then it runs."""
    pool, layers, each, slots = Pool(d, d.bytes_of(70)), 12, 4, 23
    loads, number, last = Stretches(d), 0, (0, 0)
    for request in going():
        for _ in range(layers):
            loads.begin()
            for _ in range(each):
                last = (number % slots, number * 7)
                pool.fetch(*last, d.compute)
                number += 1
            loads.end()
            d.launch(280_000)
        paced(d, request, 2)
        if request > 1:
            loads.read(2 * layers)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, loads.read())
    d.spent.stop()
    same(d, d.device + last[0] * pool.size, d.host + last[1] % pool.count * pool.size, pool.size)
    return {}


@served(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "weights_not_overlapped", "gpu_starved"),
    like=("redundant_loads", "descriptor_bound_batch", "load_not_ordered", "launch_queue_saturation"),
)
def experts_brought_by_one_batch_when_the_router_has_spoken(d: Device) -> Truth:
    """The router's choice is read back, and two experts' three tensors each come by one batch call before they run."""
    pool, chance, waits = Pool(d, d.bytes_of(90)), random.Random(61), Stretches(d)
    experts = pool.count // 3 - 1
    sets: list[list[int]] = [[], []]
    for layer in going():
        d.launch(150_000)
        d.copy(d.host + d.size - 4096 * (1 + layer % 8), d.device + d.size - 4096, 256, D2H, d.compute)
        d.sync(d.compute)  # the choice is there, and the slots' last users are done
        waits.read()
        mine = sets[layer % 2] = chance.sample([one for one in range(experts) if one not in sets[layer % 2]], 2)
        blocks = [3 * expert + tensor for expert in mine for tensor in range(3)]
        places = pool.places(blocks, [layer % 2 * 6 + i for i in range(6)])
        waits.begin()
        d.batch([to for to, _ in places], [home for _, home in places], pool.size, d.copies[0])
        d.order(d.compute, d.copies[0], layer % 60)
        waits.end()
        d.launch(500_000)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    same(d, d.device + 11 * pool.size, d.host + (3 * sets[1][1] + 2) * pool.size, pool.size)
    return {}


@served(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped",),
    like=("wasted_stores", "redundant_loads", "synchronisation", "small_copies"),
)
def a_preempted_request_out_and_a_resumed_one_in_on_one_stream(d: Device) -> Truth:
    """Before each four steps one request's ten blocks go out, and another's come in behind them, in one stream."""
    pool, each, requests, swaps = Pool(d, d.bytes_of(75)), 10, 3, Stretches(d)
    stream, turn = d.copies[2], 0
    for turn in going():
        out, resumed = turn % requests, (turn + 1) % requests
        clear(d, d.device, turn % 251, each * pool.size, d.compute)  # what was decoded since
        swaps.begin()
        d.order(stream, d.compute, turn % 60)
        for i in range(each):
            home = d.host + (out * each + i) * pool.size
            d.copy(home, d.device + (7 * i + turn) % each * pool.size, pool.size, D2H, stream)
        for i in range(each):
            pool.fetch((3 * i + turn) % each, resumed * each + i, stream)
        d.order(d.compute, stream, 64 + turn % 60)
        swaps.end()
        for _ in range(4):
            d.launch(400_000)
        paced(d, turn, 2)
        if turn > 1:
            swaps.read(2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, swaps.read())
    d.spent.stop()
    resumed, slot = (turn + 1) % requests, (3 * (each - 1) + turn) % each
    same(d, d.device + slot * pool.size, d.host + (resumed * each + each - 1) * pool.size, pool.size)
    return {}


@served(
    line=BELOW_LINK_RATE,
    also=("small_copies", "weights_not_overlapped"),
    like=("redundant_loads", "unmerged_neighbours", "gpu_starved", "launch_queue_saturation"),
    needs_gpu=True,
)
def a_graph_replayed_behind_columns_of_the_block_tables(d: Device) -> Truth:
    """Sixteen bytes of each row of the block tables go to the GPU by cudaMemcpy2DAsync between replays of a graph."""
    width, pitch, rows = 16, 64, 65_536
    tables, probe, kernel = d.size // (rows * pitch), Stretches(d), 0

    def send(table: int) -> None:
        copy_2d(d, (d.device, width), (d.host + table * rows * pitch, pitch), width, rows, H2D, d.compute)

    def group() -> None:
        for _ in range(6):
            d.launch(kernel)

    for table in range(2):
        probe.begin()
        send(table)
        probe.end()
    d.sync(d.compute)
    first = probe.read(1)
    kernel = max(min((probe.read() - first) // 6, 1_000_000), 20_000)  # a replay takes as long as the second copy
    graph, copies, step = d.graph(group), Stretches(d), 0
    d.spent.restart()
    for step in going():
        copies.begin()
        send(step % tables)
        copies.end()
        d.replay(graph, 6 * kernel)
        paced_and_read(d, step, copies, lag=2)
        if step == 3_000:
            break
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, copies.read())
    d.spent.stop()
    home = d.host + step % tables * rows * pitch
    columns = ct.create_string_buffer(b"".join(ct.string_at(home + row * pitch, width) for row in range(64)))
    same(d, d.device, ct.addressof(columns), 64 * width)
    return {}


@served(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("wasted_stores",),
    like=("fence_before_copies", "small_copies", "gpu_starved", "synchronisation"),
)
def a_finished_request_flushed_by_the_thread_that_decodes(d: Device) -> Truth:
    """1,600 blocks of a finished request go out in one loop, more than a queue holds, before the next step's launch."""
    pool, lost = Pool(d, d.bytes_of(80)), 0
    for turn in going():
        durations = []
        for i in range(1_600):
            home, slot = (i + turn) % pool.count * pool.size, i % pool.count * pool.size
            durations.append(d.copy(d.host + home, d.device + slot, pool.size, D2H, d.copies[1]))
        lost += sum(blocked(durations))
        for _ in range(14):
            d.launch(6_000_000)
        d.sync(d.compute)  # the stores are out by then
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    return {"launch_queue_saturation": lost}
