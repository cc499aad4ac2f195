"""Sixth programs whose kernels wait for copies: adapters, layers, prefixes, models, beams, experts, a full queue."""

from __future__ import annotations

import ctypes as ct
import mmap
import random
import tempfile
from typing import Any

from accounts import Pool, Stretches, going, paced
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    FULL_QUEUE,
    NOT_NEEDED,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Truth,
    sixth,
    usual,
)
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


@sixth(
    "synchronisation",
    line=AT_LINK_RATE,
    or_lines=(WAITING, BELOW_LINK_RATE),
    also=("weights_not_overlapped", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "pageable_memory", "allocation_on_hot_path", "launch_queue_saturation"),
)
def a_lora_swapped_by_synchronous_copies_out_of_pinned_memory(d: Device) -> Truth:
    """Another adapter's 20 pinned matrices go by cudaMemcpy, one after another, before each batch of 0.7 ms."""
    pool, matrices, lost, batch = Pool(d, d.bytes_of(55)), 20, 0, 0
    adapters, idle = pool.count // matrices, Stretches(d)
    for batch in going():
        for i in range(matrices):
            home = d.host + (batch % adapters * matrices + i) * pool.size
            start = now()
            d.check(d.lib.cudaMemcpy(d.device + i * pool.size, home, pool.size, H2D))
            lost += now() - start
        idle.end()
        d.launch(700_000)
        idle.begin()
        d.sync(d.compute)  # the adapter's last user is done
        idle.read()
    d.spent.add(AT_LINK_RATE, idle.ns)
    d.spent.stop()
    home = d.host + (batch % adapters * matrices + matrices - 1) * pool.size
    same(d, d.device + (matrices - 1) * pool.size, home, pool.size)
    return {"synchronisation": lost}


@sixth(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),
    also=("synchronisation", "wasted_stores", "gpu_starved"),
    like=("channels_exhausted", "aliased_stream", "launch_queue_saturation", "small_copies", "store_not_ordered"),
)
def an_offload_by_a_stream_a_layer_joined_by_the_host(d: Device) -> Truth:
    """Thirty layers' KV leave on thirty streams, 0.09 ms of the link each, and the host joins all before a step."""
    pool, layers, idle, step = Pool(d, d.bytes_of(90)), 30, Stretches(d), 0
    for step in going():
        idle.end()
        for layer in range(layers):
            clear(d, d.device + layer * pool.size, (step + layer) % 251, pool.size, d.compute)
            d.launch(40_000)
            d.order(d.copies[layer], d.compute, layer)
            at = layer * pool.size
            d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[layer])
        idle.begin()
        for stream in d.copies[:layers]:
            d.sync(stream)
        idle.read()
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, idle.ns)
    d.spent.stop()
    for layer in (0, layers - 1):
        if ct.string_at(d.host + layer * pool.size, 64) != bytes([(step + layer) % 251]) * 64:
            raise RuntimeError("other bytes left than were computed")
    return {}


@sixth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped", "head_of_line_copies", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "synchronisation", "load_not_ordered"),
)
def layers_brought_in_the_reverse_of_their_order(d: Device) -> Truth:
    """Each layer waits for its own KV alone, but the loads are given last layer first: the first layer's comes last."""
    pool, layers, request = Pool(d, d.bytes_of(95)), 12, 0
    requests, waits = pool.count // layers, Stretches(d)
    for request in going():
        d.order(d.copies[0], d.compute, 100 + request % 8)  # who had the slots has computed
        for layer in reversed(range(layers)):
            pool.fetch(layer, request % requests * layers + layer, d.copies[0])
            d.record(request % 4 * 16 + layer, d.copies[0])
        waits.begin()
        for layer in range(layers):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[request % 4 * 16 + layer], 0))
            if not layer:
                waits.end()
            d.launch(95_000)
        paced(d, request, 2)
        if request > 1:
            waits.read(2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    same(d, d.device + pool.size, d.host + (request % requests * layers + 1) * pool.size, pool.size)
    return {}


@sixth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "synchronisation", "load_not_ordered", "channels_exhausted"),
    blind=DEVICE,
)
def four_requests_that_each_bring_the_prefix_they_share(d: Device) -> Truth:
    """Four requests of a batch share a prefix; each loads it to its one place, on its own stream, then they compute."""
    pool, each, four, lost, batch = Pool(d, d.bytes_of(60)), 6, 4, 0, 0
    prefixes, loads = pool.count // each, Stretches(d)
    for batch in going():
        for request in range(four):
            d.order(d.copies[request], d.compute, batch % 4 * 16 + request)
        loads.begin()
        for request in range(four):
            for i in range(each):
                pool.fetch(i, batch % prefixes * each + i, d.copies[request])
            d.order(d.compute, d.copies[request], batch % 4 * 16 + 8 + request)
        loads.end()
        for _ in range(four):
            d.launch(250_000)
        paced(d, batch, 2)
        if batch > 1:
            loads.read(2)
    d.sync(d.compute)
    lost = loads.read() * (four - 1) // four
    d.spent.add(NOT_NEEDED, lost)
    d.spent.stop()
    same(d, d.device + 5 * pool.size, d.host + (batch % prefixes * each + 5) * pool.size, pool.size)
    return {"redundant_loads": lost}


@sixth(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED, BELOW_LINK_RATE),
    also=("wasted_stores", "weights_not_overlapped", "synchronisation", "gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "allocation_on_hot_path", "pageable_memory", "launch_queue_saturation"),
)
def two_models_that_evict_each_other_from_one_memory(d: Device) -> Truth:
    """Two models take turns in one memory: for each burst one's eight unchanged tensors go out, the other's come in."""
    pool, tensors, swaps, burst = Pool(d, d.bytes_of(120)), 8, Stretches(d), 0
    for tensor in range(tensors):
        pool.fetch(tensor, tensor, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for burst in going():
        out, woken = burst % 2 * tensors, (burst + 1) % 2 * tensors
        swaps.begin()
        for tensor in range(tensors):
            home = d.host + (out + tensor) * pool.size
            d.copy(home, d.device + tensor * pool.size, pool.size, D2H, d.compute)
        for tensor in range(tensors):
            pool.fetch(tensor, woken + tensor, d.compute)
        swaps.end()
        for _ in range(4):
            d.launch(300_000)
        d.sync(d.compute)
        swaps.read()
    d.spent.add(AT_LINK_RATE, swaps.ns)
    d.spent.stop()
    same(d, d.device + 7 * pool.size, d.host + ((burst + 1) % 2 * tensors + 7) * pool.size, pool.size)
    return {}


@sixth(
    line=SUBMITTING,
    # They cross no link, and are copies all the same.
    or_lines=(BELOW_LINK_RATE, AT_LINK_RATE, PYTHON),
    also=("small_copies", "gpu_starved", "synchronisation", "python_or_gil_bound", "unmerged_neighbours"),
    like=("redundant_loads", "wasted_stores", "launch_queue_saturation", "pageable_memory"),
)
def beams_whose_blocks_are_copied_layer_by_layer_for_each_token(d: Device) -> Truth:
    """When beams were chosen, 16 layers' six blocks of four beams are copied one by one on the device: 384 copies."""
    size, layers, beams, each = (32 if d.gpu else 8) * KiB, 16, 4, 6
    count, chance, moves = layers * beams * each, random.Random(81), Stretches(d)
    sides = (d.device, d.device + count * size)
    d.copy(sides[0], d.host, count * size, H2D, d.compute)
    blocks = list(range(count))
    d.sync(d.compute)
    d.spent.restart()
    for step in going():
        parents = chance.choices(range(beams), k=beams)
        from_ = [
            (layer * beams + parent) * each + i for layer in range(layers) for parent in parents for i in range(each)
        ]
        old, new = sides[step % 2], sides[(step + 1) % 2]
        places = [(new + to * size, old + block * size) for to, block in enumerate(from_)]
        moves.begin()
        d.rapid(places, size, D2D, d.compute)
        moves.end()
        d.launch(500_000)
        d.copy(d.host + d.size - 4096, d.device + d.size - 4096, 256, D2H, d.compute)
        d.sync(d.compute)  # which beams live on
        moves.read()
        blocks = [blocks[block] for block in from_]
        last = new
    d.spent.add(SUBMITTING, moves.ns)
    d.spent.stop()
    for at in random.Random(82).sample(range(count), 16):
        same(d, last + at * size, d.host + blocks[at] * size, size)
    return {}


@sixth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("link_bound", "wasted_stores", "unmerged_neighbours"),
    like=("small_copies", "synchronisation", "pageable_memory", "python_or_gil_bound"),
)
def kv_written_through_faster_than_the_link_takes_it(d: Device) -> Truth:
    """Each step of 0.45 ms writes 30 blocks through, 1.2 ms of the link, on a stream that no one waits for."""
    pool, each, lost = Pool(d, d.bytes_of(40)), 30, 0
    stream, durations = d.copies[4], list[int]()
    for step in going():
        for _ in range(3):
            d.launch(150_000)
        d.order(stream, d.compute, step % 60)
        for i in range(each):
            at = (step * each + i) % pool.count * pool.size
            durations.append(d.copy(d.host + at, d.device + at, pool.size, D2H, stream))
        paced(d, step, 3)
    d.spent.stop()
    quick = usual(durations[:600])
    lost = sum(one - quick for one in durations if one > 4 * quick + 5_000)
    window, kernels = d.spent.end - d.spent.begin, d.kernel_ns - d.spent.kernel_ns
    d.spent.add(FULL_QUEUE, min(lost, window - kernels))  # the device computes at the same time
    d.drain()
    return {"launch_queue_saturation": lost}


def map_experts(d: Device) -> None:
    """Writes the experts to a file that has no name any more and maps it; its pages are in the cache."""
    size = (96 if d.gpu else 8) * MiB
    with tempfile.TemporaryFile() as file:
        for at in range(0, size, MiB):
            file.write(random.Random(at).randbytes(MiB))
        file.flush()
        MADE["experts"] = mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    sum(mapped[at] for at in range(0, size, 4 * KiB))


@sixth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped", "unmerged_neighbours"),
    like=("slow_tier", "redundant_loads", "small_copies", "allocation_on_hot_path"),
    prepare=map_experts,
)
def experts_copied_out_of_a_file_that_is_mapped(d: Device) -> Truth:
    """For each layer three experts' two tensors go to the GPU straight out of a mapped file, whose pages are cached."""
    mapped = MADE.pop("experts")
    size = 3 * MiB if d.gpu else 512 * KiB
    at, experts, lost = ct.addressof(ct.c_char.from_buffer(mapped)), len(mapped) // (2 * size), 0
    chance, held, last = random.Random(83), list[int](), (0, 0)
    d.spent.restart()
    for _ in going():
        held = chance.sample([one for one in range(experts) if one not in held], 3)
        for i, expert in enumerate(held):
            for tensor in range(2):
                last = (d.device + (2 * i + tensor) * size, at + (2 * expert + tensor) * size)
                lost += d.copy(*last, size, H2D, d.compute)
        d.launch(350_000)
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    same(d, *last, size)
    return {"pageable_memory": lost}
