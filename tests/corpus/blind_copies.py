"""Blind programs whose kernels wait for copies: beams, experts, one slot, checkpoints, full links, tables, managed."""

from __future__ import annotations

import ctypes as ct
import random
from typing import Any

from accounts import Pool, paced, stamp
from device import D2H, H2D, Device, now
from fresh_copies import clear, computed
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    NOT_NEEDED,
    PAGEABLE,
    KiB,
    MiB,
    Truth,
    blind_program,
)

MANAGED: dict[str, Any] = {}
ATTACH_GLOBAL = 1


@blind_program(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED, BELOW_LINK_RATE),  # a copy within the device would do
    also=("redundant_loads", "wasted_stores", "weights_not_overlapped", "small_copies", "unmerged_neighbours"),
    like=("synchronisation", "launch_queue_saturation"),
)
def kv_of_beams_reordered_through_the_host(d: Device) -> Truth:
    """Four beams' blocks go to the host after each step and come back under another beam, on the model's stream."""
    pool, beams, each = Pool(d, d.bytes_of(12)), 4, 6
    for step in range(200):
        computed(d, pool, 0, beams * each, step)
        d.launch(700_000)
        for i in range(beams * each):
            d.copy(d.host + i * pool.size, d.device + i * pool.size, pool.size, D2H, d.compute)
        for beam in range(beams):
            parent = (beam + 1 + step % 3) % beams
            for i in range(each):
                pool.fetch(beam * each + i, parent * each + i, d.compute)
        d.spent.add(AT_LINK_RATE, 2 * beams * each * pool.size / d.bytes_per_us * 1e3)
        paced(d, step)
    return {}


@blind_program(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped",),
    like=("redundant_loads", "link_degraded", "small_copies"),
)
def an_expert_cache_that_holds_one_too_few(d: Device) -> Truth:
    """Eight experts take turns in seven slots, least recently used first out: each is loaded anew on every use."""
    pool = Pool(d, d.bytes_of(350))
    for use in range(700):
        pool.fetch(use % 7, use % 8, d.compute)
        d.launch(400_000)
        d.spent.add(AT_LINK_RATE, pool.size / d.bytes_per_us * 1e3)
        paced(d, use)
    return {}


@blind_program(
    "weights_not_overlapped",
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    like=("redundant_loads", "link_bound", "synchronisation"),
)
def a_large_model_streamed_through_one_slot(d: Device) -> Truth:
    """Twelve layers share one slot: a layer's load waits until the kernel before is over, and its kernel for it."""
    pool, layers, uses, lost = Pool(d, d.bytes_of(200)), 12, 0, 0
    for token in range(100):
        for layer in range(layers):
            d.order(d.copies[0], d.compute, uses % 60)
            pool.fetch(0, layer, d.copies[0])
            d.order(d.compute, d.copies[0], 64 + uses % 60)
            d.launch(400_000)
            lost += int(pool.size / d.bytes_per_us * 1e3)
            uses += 1
        paced(d, token, 2)
    d.spent.add(AT_LINK_RATE, lost)
    return {"weights_not_overlapped": lost}


@blind_program(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("wasted_stores", "unmerged_neighbours"),
    like=("synchronisation", "fence_before_copies", "small_copies"),
)
def a_checkpoint_written_by_the_model_s_own_stream(d: Device) -> Truth:
    """Every sixth step twenty changed tensors, two milliseconds of the link, leave before the next step may run."""
    pool, tensors = Pool(d, d.bytes_of(100)), 20
    for checkpoint in range(100):
        for step in range(6):
            d.launch(700_000)
            paced(d, 6 * checkpoint + step)
        computed(d, pool, 0, tensors, checkpoint)
        for i in range(tensors):
            d.copy(d.host + i * pool.size, d.device + i * pool.size, pool.size, D2H, d.compute)
        d.spent.add(AT_LINK_RATE, tensors * pool.size / d.bytes_per_us * 1e3)
    return {}


@blind_program(
    "link_bound",
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # both directions at once are slower than one
    also=("weights_not_overlapped", "link_degraded"),
    like=("redundant_loads", "wasted_stores", "synchronisation"),
)
def groups_of_requests_rotated_over_a_full_link(d: Device) -> Truth:
    """One group computes 0.45 ms while the next comes and the last one leaves, which each takes the link 0.84 ms."""
    pool, each, groups, kernel = Pool(d, d.bytes_of(280)), 3, 4, 450_000
    load, store, steps = d.copies[0], d.copies[1], 600
    begin = now()
    for i in range(each):
        pool.fetch(i, i, load)
    for step in range(steps):
        mine, after, before = (step % 3 * each, (step + 1) % 3 * each, (step + 2) % 3 * each)
        d.order(d.compute, load, step % 30)  # the group is there
        d.order(load, store, 30 + step % 30)  # what was in the next one's slots has left
        for i in range(each):
            pool.fetch(after + i, (step + 1) % groups * each + i, load)
        for i in range(each):
            clear(d, d.device + (mine + i) * pool.size, step % 251, pool.size // 2, d.compute)
        if step:
            d.check(d.lib.cudaStreamWaitEvent(store, d.events[60 + (step - 1) % 30], 0))
            for i in range(each):
                home = d.host + ((step - 1) % groups * each + i) * pool.size
                d.copy(home, d.device + (before + i) * pool.size, pool.size, D2H, store)
        d.launch(kernel)
        d.record(60 + step % 30, d.compute)
        paced(d, step, 2)
    d.sync(d.compute)
    lost = max(now() - begin - steps * kernel, 0)
    d.spent.add(AT_LINK_RATE, lost)
    return {"link_bound": lost}


@blind_program(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "small_copies"),
    like=("link_bound",),
    blind=DEVICE,
)
def an_adapter_set_again_for_each_batch_of_a_run(d: Device) -> Truth:
    """Batches come in runs of eight that want the same adapter, and it is loaded to the same slots for each of them."""
    pool, parts, lost = Pool(d, d.bytes_of(6)), 48, 0
    homes = random.Random(31).sample(range(pool.count), 6 * parts)
    marks: list[tuple[int, int]] = []
    for batch in range(400):
        adapter = batch // 8 % 6
        begin = d.mark(d.compute)
        for i in range(parts):
            pool.fetch(i, homes[adapter * parts + i], d.compute)
        marks.append((begin, d.mark(d.compute)))
        d.launch(500_000)
        paced(d, batch, 1)
        if batch > 1 and (batch - 2) % 8:
            lost += d.between(*marks[batch - 2])
    d.spent.add(NOT_NEEDED, lost)
    return {"redundant_loads": lost}


@blind_program(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED, BELOW_LINK_RATE),  # all but one row of it was there
    also=("redundant_loads", "weights_not_overlapped", "synchronisation", "gpu_starved"),
    like=("small_copies", "pageable_memory"),
)
def a_whole_table_sent_for_one_new_row(d: Device) -> Truth:
    """A table of 0.4 ms of the link is sent before each step because one row of it, 4 KiB, is new."""
    size = d.bytes_of(400)
    for step in range(450):
        stamp(d, step * 37 % (size // 4096) * 4096, 4 * KiB, step)
        d.copy(d.device, d.host, size, H2D, d.compute)
        d.launch(700_000)
        d.spent.add(AT_LINK_RATE, size / d.bytes_per_us * 1e3)
        d.sync(d.compute)
    return {}


def ready_managed(d: Device) -> None:
    if "at" not in MANAGED:
        d.lib.cudaMallocManaged.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_uint]
        MANAGED["at"] = d.made("cudaMallocManaged", 12 * 16 * MiB, ATTACH_GLOBAL)
    ct.memmove(MANAGED["at"], d.host, 12 * 16 * MiB)  # its pages lie with the CPU, and no two are equal


@blind_program(
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE, PAGEABLE),  # how the driver copies managed pages is its own affair
    also=("pageable_memory", "weights_not_overlapped", "synchronisation", "gpu_starved", "link_degraded", "link_bound"),
    like=("redundant_loads", "small_copies"),
    prepare=ready_managed,
    needs_gpu=True,
)
def features_in_managed_memory_copied_before_each_step(d: Device) -> Truth:
    """Each step's 16 MiB of features lie in managed memory on the CPU's side; the step waits for their copy."""
    size = 16 * MiB
    for step in range(300):
        d.copy(d.device + step % 2 * size, MANAGED["at"] + step % 12 * size, size, H2D, d.compute)
        d.launch(500_000)
        paced(d, step, 1)
    return {}
