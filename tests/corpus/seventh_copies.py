"""Seventh programs whose kernels wait for copies: tokens, rows, stages, optimizers, activations, guesses, a mask."""

from __future__ import annotations

import ctypes as ct

from accounts import Pool, Stretches, paced, paced_and_read, stamp, turns
from device import D2H, H2D, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    FULL_QUEUE,
    NOT_NEEDED,
    SUBMITTING,
    WAITING,
    KiB,
    Truth,
    seventh,
    usual,
)
from unseen_copies import same


@seventh(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE, SUBMITTING),
    also=("wasted_stores", "unmerged_neighbours", "weights_not_overlapped", "gpu_starved"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def each_new_token_s_kv_stored_by_a_copy_for_each_layer_and_sequence(d: Device) -> Truth:
    """Behind a decode step of 1 ms its tokens' KV leaves on the model's stream by 400 copies of 1 KiB.

    The copies stand between two kernels of one stream, so nothing computes meanwhile; the host is a step ahead, and two
    steps' submissions fit the queue. The GPU takes above 1.3 us for each copy, which is 0.02 us of the link: at least
    0.5 ms of each step's 1.5 ms.
    """
    each, row, block, moves = 400, 1 * KiB, 64 * KiB, Stretches(d)
    d.copy(d.device, d.host + each * block, each * block, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    step = 0
    for step in turns():
        token = step % 64 * row
        d.launch(1_000_000)
        places = [(d.host + i * block + token, d.device + i * block + token) for i in range(each)]
        moves.begin()
        d.rapid(places, row, D2H, d.compute)
        moves.end()
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    at = 7 * block + step % 64 * row
    same(d, d.device + at, d.host + at, row)
    return {"small_copies": moves.ns - int((step + 1) * each * row / d.bytes_per_us * 1_000)}


@seventh(
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE,),
    also=("wasted_stores", "small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def a_head_of_the_cache_stored_by_rows_of_64_bytes(d: Device) -> Truth:
    """Behind each step of 0.7 ms one head of sixteen leaves on the model's stream by one 2D copy of rows of 64 bytes.

    Rows of 64 bytes that lie 1 KiB apart cross the link each by itself, well below its rate. How long that takes is
    measured first, and so many rows are taken that a copy lasts 0.9 ms, if there are so many. It stands between two
    kernels of one stream: nothing computes for more than half of the time.
    """
    width, pitch, rows, moves = 64, 1 * KiB, 8_192, Stretches(d)
    most = d.size // (2 * pitch)
    d.copy(d.device, d.host, most * pitch, H2D, d.compute)
    for _ in range(3):
        moves.begin()
        copy_2d(d, (d.host, width), (d.device, pitch), width, rows, D2H, d.compute)
        moves.end()
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    rows, step, home, head = min(max(rows * 900_000 // max(took, 1), 1_024), most), 0, d.host, d.device
    d.spent.restart()
    for step in turns():
        head, home = d.device + step % 16 * width, d.host + step % 4 * most * width
        d.launch(700_000)
        moves.begin()
        copy_2d(d, (home, width), (head, pitch), width, rows, D2H, d.compute)
        moves.end()
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, head + (rows - 1) * pitch, home + (rows - 1) * width, width)
    return {}


@seventh(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours", "synchronisation"),
    like=("redundant_loads", "small_copies", "pageable_memory", "aliased_stream", "channels_exhausted"),
)
def one_micro_batch_that_crosses_four_stages_through_pinned_memory(d: Device) -> Truth:
    """Four stages of 0.3 ms have a stream each; what one made goes to pinned memory and from there to the next.

    There is one micro-batch: each stage waits by an event for the load of what the stage before stored, and the first
    for the last. Of each stage's 0.6 ms the link has 0.15 ms out and 0.15 ms in, while no kernel may run.
    """
    pool, stages, batch = Pool(d, d.bytes_of(150)), d.copies[:4], 0
    for batch in turns():
        for i, stage in enumerate(stages):
            after = stages[(i + 1) % 4]
            clear(d, d.device + i * pool.size, (4 * batch + i) % 251, pool.size, stage)
            d.launch(300_000, stage)
            d.copy(d.host + i * pool.size, d.device + i * pool.size, pool.size, D2H, stage)
            d.order(after, stage, batch % 8 * 8 + i)
            d.copy(d.device + (4 + i) * pool.size, d.host + i * pool.size, pool.size, H2D, after)
        d.order(d.compute, stages[0], 100 + batch % 8)
        paced(d, batch, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.spent.add(AT_LINK_RATE, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    same(d, d.device + 7 * pool.size, d.host + 3 * pool.size, pool.size)
    if ct.string_at(d.host + 3 * pool.size, 64) != bytes([(4 * batch + 3) % 251]) * 64:
        raise RuntimeError("other bytes crossed than were computed")
    return {}


@seventh(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "launch_queue_saturation", "synchronisation"),
)
def optimizer_states_that_come_and_go_around_each_update(d: Device) -> Truth:
    """Behind a backward pass of 2 ms eight buckets' states come, are updated for 0.15 ms and leave, on one stream.

    Everything is on the model's stream: of each step 1.6 ms are loads and 1.6 ms stores, with no kernel beside them,
    and 3.2 ms are kernels.
    """
    pool, buckets, moves, step = Pool(d, d.bytes_of(200)), 8, Stretches(d), 0
    for step in turns():
        for _ in range(4):
            d.launch(500_000)
        for bucket in range(buckets):
            moves.begin()
            pool.fetch(0, bucket, d.compute)
            moves.end()
            clear(d, d.device, (step + bucket) % 251, 64 * KiB, d.compute)
            d.launch(150_000)
            moves.begin()
            d.copy(d.host + bucket * pool.size, d.device, pool.size, D2H, d.compute)
            moves.end()
        paced_and_read(d, step, moves, 2 * buckets)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, d.device, d.host + (buckets - 1) * pool.size, pool.size)
    return {}


@seventh(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "synchronisation", "load_not_ordered", "store_not_ordered"),
)
def activations_brought_back_only_when_their_layer_s_turn_has_come(d: Device) -> Truth:
    """Twelve layers' activations leave beside the forward pass; each comes back when the layer above has gone back.

    A forward kernel takes 0.26 ms and the store of its activation 0.22 ms beside the next. A backward kernel of 0.2 ms
    waits for its load of 0.22 ms, and the load for the kernel before, as there is one slot: of a step's 8.2 ms no
    kernel runs for 2.6 ms.
    """
    pool, layers, moves, step = Pool(d, d.bytes_of(220)), 12, Stretches(d, d.copies[0]), 0
    loads, stores, back = d.copies[0], d.copies[1], d.device + 2 * pool.size
    for step in turns():
        for layer in range(layers):
            mine = d.device + layer % 2 * pool.size
            if layer > 1:  # the activation of two layers ago has left this slot
                d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer - 2], 0))
            clear(d, mine, (step * layers + layer) % 251, pool.size, d.compute)
            d.launch(260_000)
            d.order(stores, d.compute, 20 + layer)
            d.copy(d.host + layer * pool.size, mine, pool.size, D2H, stores)
            d.record(layer, stores)
        for layer in reversed(range(layers)):
            d.order(loads, d.compute, 40 + layer)
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[layer], 0))
            moves.begin()
            d.copy(back, d.host + layer * pool.size, pool.size, H2D, loads)
            moves.end()
            d.order(d.compute, loads, 60 + layer)
            d.launch(200_000)
        paced_and_read(d, step, moves, layers)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, back, d.host, pool.size)
    return {}


@seventh(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("link_bound", "redundant_loads", "unmerged_neighbours"),
    like=("small_copies", "synchronisation", "pageable_memory", "allocation_on_hot_path"),
)
def guessed_prefixes_fetched_faster_than_the_link_brings_them(d: Device) -> Truth:
    """The thread that decodes also fetches what it guesses to be asked for: 24 blocks, 1.2 ms, a step of 0.4 ms.

    No kernel waits for a guess. After some forty steps the copies' stream holds as many as it takes, and from there
    on the thread gets into the queue at the link's rate: one step in 1.2 ms, of which two thirds are without a kernel.
    """
    pool, each, durations, guessed = Pool(d, d.bytes_of(50)), 24, list[int](), 0
    for step in turns():
        for _ in range(2):
            d.launch(200_000)
        for _ in range(each):
            guessed += 7
            durations.append(pool.fetch(guessed % 64, guessed, d.copies[6]))
        paced(d, step, 3)
    d.spent.stop()
    quick = usual(durations[:600])
    lost = sum(one - quick for one in durations if one > 4 * quick + 5_000)
    window, kernels = d.spent.end - d.spent.begin, d.kernel_ns - d.spent.kernel_ns
    d.spent.add(FULL_QUEUE, min(lost, window - kernels))  # the device computes at the same time
    d.drain()
    same(d, d.device + guessed % 64 * pool.size, d.host + guessed % pool.count * pool.size, pool.size)
    return {"launch_queue_saturation": lost}


@seventh(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED,),
    also=(
        *("head_of_line_copies", "weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved"),
        "unmerged_neighbours",
    ),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "load_not_ordered", "redundant_loads"),
)
def a_step_s_input_sent_behind_an_adapter_for_a_later_request(d: Device) -> Truth:
    """One stream carries all loads: a later request's adapter, 1 ms, and behind it the input of the step to come.

    When a step's token is there the host gives the adapter's 16 matrices and the next step's 4 KiB to the stream, and
    the step of 0.7 ms waits for its input. For 1 ms of each 1.7 ms no kernel runs, but copies that it needs not yet.
    """
    pool, matrices, loads, waits, step = Pool(d, d.bytes_of(62)), 16, d.copies[0], Stretches(d), 0
    adapters = (pool.count - 1) // matrices
    for step in turns():
        waits.begin()
        for i in range(matrices):
            pool.fetch(1 + step % 2 * matrices + i, 1 + step % adapters * matrices + i, loads)
        stamp(d, step % 4 * 4 * KiB, 4 * KiB, step)
        d.copy(d.device, d.host + step % 4 * 4 * KiB, 4 * KiB, H2D, loads)
        d.order(d.compute, loads, step % 32)
        waits.end()
        d.launch(700_000)
        d.copy(d.host + d.size - 4 * KiB, d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        d.sync(d.compute)
        waits.read()
    d.spent.add(AT_LINK_RATE, waits.ns)
    d.spent.stop()
    last = step % adapters * matrices + matrices
    same(d, d.device + (1 + step % 2) * matrices * pool.size, d.host + last * pool.size, pool.size)
    return {}


@seventh(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_table_of_positions_sent_again_before_each_step(d: Device) -> Truth:
    """A table that never changes goes to its one place by one copy of 0.5 ms before each step of 0.7 ms.

    It is on the model's stream, so nothing computes meanwhile: 0.5 ms of each 1.2 ms. The kernels do not write it, and
    after the first time the bytes that come are there already.
    """
    size, sends, step = d.bytes_of(500), Stretches(d), 0
    for step in turns():
        sends.begin()
        d.copy(d.device, d.host, size, H2D, d.compute)
        sends.end()
        d.launch(700_000)
        d.copy(d.host + d.size - 4 * KiB, d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        paced_and_read(d, step, sends)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, sends.read() * step // (step + 1))
    d.spent.stop()
    same(d, d.device + size - 64 * KiB, d.host + size - 64 * KiB, 64 * KiB)
    return {"redundant_loads": sends.ns * step // (step + 1)}
