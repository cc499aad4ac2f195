"""Programs of later shapes whose kernels wait for copies: at the link's rate, below it, or for bytes already there."""

from __future__ import annotations

import ctypes as ct
import random

from accounts import Pool, paced, stamp
from device import D2H, H2D, Device
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    FULL_QUEUE,
    NOT_NEEDED,
    PAGEABLE,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Truth,
    pageable,
    program,
)


def stamp_pageable(at: int, number: int) -> None:
    ct.c_uint64.from_address(at).value = number + 1


@program(line=AT_LINK_RATE, like=("redundant_loads", "link_degraded", "synchronisation"))
def kv_of_each_request_loaded_when_it_comes(d: Device) -> Truth:
    """Each request's KV is loaded when the request comes and its prefill waits for it: nothing is fetched ahead."""
    pool = Pool(d, d.bytes_of(120))
    for request in range(100):
        d.order(d.copies[0], d.compute, 2 * (request % 60))  # the slots are those of the request before
        for i in range(10):
            pool.fetch(i, 10 * request + i, d.copies[0])
        d.order(d.compute, d.copies[0], 2 * (request % 60) + 1)
        d.launch(900_000)
        d.spent.add(AT_LINK_RATE, 10 * pool.size / d.bytes_per_us * 1e3)
        paced(d, request)
    return {}


@program(line=AT_LINK_RATE, also=("synchronisation", "weights_not_overlapped", "gpu_starved"))
def experts_loaded_when_they_are_routed_to(d: Device) -> Truth:
    """A mixture of experts: the router's choice is read back, then two experts are loaded, and their kernel waits."""
    pool, chance = Pool(d, d.bytes_of(140)), random.Random(5)
    cached, victim = [-1] * 4, 0
    for _ in range(160):
        d.launch(120_000)  # attention and router
        d.store(pool.count - 1, 256, d.compute)
        d.sync(d.compute)
        for expert in chance.sample(range(16), 2):
            if expert not in cached:
                d.spent.add(AT_LINK_RATE, pool.size / d.bytes_per_us * 1e3)
                cached[victim] = expert
                pool.fetch(victim, expert, d.copies[0])
                victim = (victim + 1) % 4
        d.order(d.compute, d.copies[0], 1)
        d.launch(150_000)
    return {}


@program("link_bound", line=AT_LINK_RATE, like=("weights_not_overlapped",))
def a_layer_ahead_with_more_bytes_than_compute(d: Device) -> Truth:
    """Weights come through two buffers, one layer ahead, and take three times as long as what computes with them."""
    pool, layers = Pool(d, d.bytes_of(600)), 420
    for layer in range(layers):
        if layer > 1:  # the buffer is free when the layer that used it has computed
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[200 + layer % 2], 0))
        pool.fetch(layer % 2, layer, d.copies[0])
        d.order(d.compute, d.copies[0], layer % 64)
        d.launch(200_000)
        d.record(200 + layer % 2, d.compute)
        if layer % 4 == 3:
            paced(d, layer // 4, 4)
    lost = layers * (pool.size / d.bytes_per_us * 1e3 - 200_000)
    d.spent.add(AT_LINK_RATE, lost)
    return {"link_bound": int(lost)}


@program("redundant_loads", line=NOT_NEEDED)
def a_system_prompt_loaded_for_each_request(d: Device) -> Truth:
    """The KV of one system prompt is loaded to its one place for each request, and the prefill waits for it."""
    pool, lost = Pool(d, d.bytes_of(70)), 0
    for request in range(90):
        d.order(d.copies[0], d.compute, 2 * (request % 60))
        begin = d.mark(d.copies[0])
        for i in range(14):
            pool.fetch(i, i, d.copies[0])
        end = d.mark(d.copies[0])
        pool.fetch(14 + request % 2, 14 + request % (pool.count - 14), d.copies[0])  # the request's own
        d.order(d.compute, d.copies[0], 2 * (request % 60) + 1)
        d.launch(600_000)
        paced(d, request, 1)
        if request:
            d.sync_event(2 * (request % 60) + 1)
            lost += d.between(begin, end)
    d.spent.add(NOT_NEEDED, lost)
    return {"redundant_loads": lost}


@program("redundant_loads", line=NOT_NEEDED)
def a_prefix_loaded_into_each_request_s_own_slots(d: Device) -> Truth:
    """A prefix that others hold on the device comes over the link again for each request, into slots of its own."""
    pool, lost = Pool(d, d.bytes_of(60)), 0
    slots = pool.count // 12
    for request in range(110):
        d.order(d.copies[1], d.compute, 2 * (request % 60))
        begin = d.mark(d.copies[1])
        for i in range(12):
            pool.fetch(request % slots * 12 + i, i, d.copies[1])
        end = d.mark(d.copies[1])
        d.order(d.compute, d.copies[1], 2 * (request % 60) + 1)
        d.launch(500_000)
        d.sync_event(2 * (request % 60) + 1)
        lost += d.between(begin, end) if request else 0
        paced(d, request, 1)
    d.spent.add(NOT_NEEDED, lost)
    return {"redundant_loads": lost}


@program(line=AT_LINK_RATE, or_lines=(BELOW_LINK_RATE,), like=("redundant_loads",))
def buffers_rewritten_before_each_load(d: Device) -> Truth:
    """The same host blocks go to the same places in each step, but the CPU has rewritten them: the bytes are needed."""
    pool = Pool(d, d.bytes_of(50))
    for step in range(90):
        side = step % 2 * 16
        for i in range(16):
            for part in range(4):  # new bytes at the start of each quarter
                stamp(d, (side + i) * pool.size + (part * pool.size // 4 & ~4095), 64, 97 * step + 4 * i + part)
        d.order(d.copies[0], d.compute, 2 * (step % 60))
        for i in range(16):
            pool.fetch(i, side + i, d.copies[0])
        d.order(d.compute, d.copies[0], 2 * (step % 60) + 1)
        d.launch(800_000)
        d.spent.add(AT_LINK_RATE, 16 * pool.size / d.bytes_per_us * 1e3)
        paced(d, step, 1)
    return {}


@program(line=AT_LINK_RATE, like=("wasted_stores", "synchronisation"))
def the_next_step_waits_for_the_store_of_this_one(d: Device) -> Truth:
    """Each step's KV is stored out of the one buffer that the next step writes: the next step waits for the store."""
    pool = Pool(d, d.bytes_of(250))
    for step in range(180):
        d.launch(600_000)
        d.order(d.copies[1], d.compute, 2 * (step % 60))
        for i in range(3):
            at = (3 * step + i) % pool.count * pool.size
            d.copy(d.host + at, d.device + i * pool.size, pool.size, D2H, d.copies[1])
        d.order(d.compute, d.copies[1], 2 * (step % 60) + 1)
        if step > pool.count // 3:  # what was stored before makes room: it is read again, hidden behind the kernel
            pool.fetch(8, 3 * step, d.copies[0])
            d.order(d.compute, d.copies[0], 193)
        d.spent.add(AT_LINK_RATE, 3 * pool.size / d.bytes_per_us * 1e3)
        paced(d, step)
    return {}


@program(line=NOT_NEEDED, or_lines=(AT_LINK_RATE,), also=("wasted_stores",))
def a_pool_stored_that_the_host_already_has(d: Device) -> Truth:
    """At each step's end the whole pool of finished blocks is stored again, though only one block of it is new."""
    pool, blocks = Pool(d, d.bytes_of(60)), 12
    for step in range(120):
        d.launch(700_000)
        d.order(d.copies[1], d.compute, 2 * (step % 60))
        for i in range(blocks):
            d.copy(d.host + i * pool.size, d.device + i * pool.size, pool.size, D2H, d.copies[1])
        pool.fetch(step % blocks, blocks + step % (pool.count - blocks), d.copies[1])  # the one new block's bytes
        d.order(d.compute, d.copies[1], 2 * (step % 60) + 1)
        d.spent.add(NOT_NEEDED, (blocks - 1) * pool.size / d.bytes_per_us * 1e3)
        paced(d, step)
    return {}


@program(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),
    also=("launch_queue_saturation", "unmerged_neighbours"),
)
def blocks_of_16_kib_restored_before_each_prefill(d: Device) -> Truth:
    """A prefix of 700 scattered blocks of 16 KiB is restored by single copies, and the prefill waits for them."""
    pool, lost = Pool(d, 16 * KiB), 0
    chance = random.Random(3)
    for request in range(4):
        places = pool.places(chance.sample(range(pool.count), 700), chance.sample(range(pool.count), 700))
        d.order(d.copies[0], d.compute, 2 * request)
        begin = d.mark(d.copies[0])
        d.rapid(places, 16 * KiB, H2D, d.copies[0])
        end = d.mark(d.copies[0])
        d.order(d.compute, d.copies[0], 2 * request + 1)
        d.launch(3_000_000)
        d.sync(d.compute)
        took = d.between(begin, end)
        d.spent.add(BELOW_LINK_RATE, took)
        lost += took - int(700 * 16 * KiB / d.bytes_per_us * 1e3)
    return {"small_copies": lost}


@program(
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING, WAITING),
    also=("small_copies", "unmerged_neighbours", "launch_queue_saturation"),
)
def copies_between_the_kernels_of_one_stream(d: Device) -> Truth:
    """Small kernels take turns with loads of 96 KiB on one stream, and now and then a large kernel follows."""
    pool = Pool(d, 96 * KiB)
    order = random.Random(4).sample(range(pool.count), min(1_000, pool.count))
    for i in range(1_000):
        d.launch(6_000)
        pool.fetch(i % 64, order[i % len(order)], d.compute)
        if i % 100 == 99:
            d.launch(1_000_000)
            paced(d, i // 100, 4)
    return {}


@program(line=AT_LINK_RATE, or_lines=(BELOW_LINK_RATE,), also=("descriptor_bound_batch", "small_copies"))
def a_batch_of_small_blocks_before_each_prefill(d: Device) -> Truth:
    """400 scattered blocks of 32 KiB come in one batch call before each prefill of 0.7 ms, which waits for them.

    On an H200 the batch runs at 53 GB/s: a quarter of the time goes there, because nothing is fetched ahead.
    """
    pool, chance = Pool(d, 32 * KiB), random.Random(6)
    for request in range(6):
        places = pool.places(chance.sample(range(pool.count), 400), chance.sample(range(pool.count), 400))
        d.order(d.copies[0], d.compute, 2 * request)
        d.batch([dst for dst, _ in places], [src for _, src in places], pool.size, d.copies[0])
        d.order(d.compute, d.copies[0], 2 * request + 1)
        d.launch(700_000)
        paced(d, request, 1)
    return {}


@program("pageable_memory", line=BELOW_LINK_RATE, or_lines=(PAGEABLE,))
def layers_read_out_of_pageable_memory(d: Device) -> Truth:
    """Weights lie in pageable memory; each layer's copy holds its caller, and the layer's kernel waits for it."""
    size = 8 * MiB if d.gpu else MiB
    keep, at = pageable(12 * size)
    for i in range(0, 12 * size, MiB):
        stamp_pageable(at + i, i)
    lost = 0
    for layer in range(160):
        took = d.copy(d.device + layer % 2 * size, at + layer % 12 * size, size, H2D, d.compute)
        d.launch(300_000)
        lost += took
        paced(d, layer, 1)
    del keep
    return {"pageable_memory": lost}


@program("pageable_memory", line=PAGEABLE, or_lines=(BELOW_LINK_RATE,))
def embedding_rows_read_out_of_pageable_memory(d: Device) -> Truth:
    """160 rows of 60 KiB for each request come out of a pageable table, one call a row, before its kernel."""
    row, rows = 60 * KiB, 512
    keep, at = pageable(row * rows)
    for i in range(rows):
        stamp_pageable(at + i * row, i)
    lost, chance = 0, random.Random(2)
    for _ in range(12):
        for i, number in enumerate(chance.sample(range(rows), 160)):
            with d.spent.on(PAGEABLE):
                lost += d.copy(d.device + i * row, at + number * row, row, H2D, d.compute)
        d.launch(700_000)
        d.sync(d.compute)
    del keep
    return {"pageable_memory": lost}


@program("fence_before_copies", "launch_queue_saturation", line=FULL_QUEUE, or_lines=(AT_LINK_RATE, BELOW_LINK_RATE))
def stores_of_a_prefill_hold_back_the_next_one(d: Device) -> Truth:
    """Stores of a prefill fill the queue: their thread launches the next prefill only when most are done."""
    pool, fence, rest = Pool(d, d.bytes_of(40)), 0, 0
    for request, stores in enumerate((1_150, 650, 650)):
        d.launch(12_000_000)
        d.order(d.copies[1], d.compute, request)
        durations = []
        for i in range(stores):
            at = i % pool.count * pool.size
            durations.append(d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[1]))
        blocked = [one for one in durations if one > 15_000]
        longest = max(blocked) if not request else 0  # later ones stand behind copies, not behind the fence alone
        fence, rest = fence + longest, rest + sum(blocked) - longest
    d.launch(50_000_000)
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}
