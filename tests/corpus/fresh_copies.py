"""Fresh programs whose kernels wait for copies, as servers make them: swaps, adapters, drafts, chunks, heads."""

from __future__ import annotations

import ctypes as ct
import random

from accounts import Pool, paced, stamp
from device import D2H, H2D, Device, now
from other_shapes import gate
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    FULL_QUEUE,
    NOT_NEEDED,
    WAITING,
    KiB,
    MiB,
    Truth,
    fresh,
    usual,
)

Place = tuple[int, int]  # an address and a pitch, bytes

STAMP = 4 * KiB


def copy_2d(d: Device, to: Place, source: Place, width: int, rows: int, kind: int, stream: int) -> None:
    """Copies rows of `width` bytes that lie a pitch apart."""
    p, z = ct.c_void_p, ct.c_size_t
    d.lib.cudaMemcpy2DAsync.argtypes = [p, z, p, z, z, z, ct.c_int, p]
    d.check(d.lib.cudaMemcpy2DAsync(*to, *source, width, rows, kind, stream))


def clear(d: Device, at: int, value: int, size: int, stream: int) -> None:
    d.lib.cudaMemsetAsync.argtypes = [ct.c_void_p, ct.c_int, ct.c_size_t, ct.c_void_p]
    d.check(d.lib.cudaMemsetAsync(at, value, size, stream))


def computed(d: Device, pool: Pool, first: int, slots: int, number: int) -> None:
    """What a step computes into slots: whole slots change, and no two are equal."""
    at = d.device + first * pool.size
    clear(d, at, number % 251, slots * pool.size, d.compute)
    new = d.host + d.size - (1 + number % 8) * slots * STAMP  # the pool's end is not among the blocks
    ct.memmove(new, random.Random(number).randbytes(slots * STAMP), slots * STAMP)
    copy_2d(d, (at, pool.size), (new, STAMP), STAMP, slots, H2D, d.compute)


@fresh(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("small_copies", "weights_not_overlapped", "unmerged_neighbours"),
    like=("redundant_loads", "wasted_stores"),
)
def preempted_requests_swapped_by_block_table(d: Device) -> Truth:
    """Each step one request's 24 blocks go out and another's come in, on the model's own stream, block by block."""
    pool, blocks = Pool(d, d.bytes_of(10)), 24
    tables = random.Random(11).sample(range(pool.count - 1 - MiB // pool.size), 6 * blocks)
    for step in range(150):
        mine, other = step % 2 * blocks, (step + 1) % 2 * blocks
        computed(d, pool, mine, blocks, step)
        d.launch(900_000)
        for i in range(blocks):
            home = d.host + tables[step % 6 * blocks + i] * pool.size
            d.copy(home, d.device + (mine + i) * pool.size, pool.size, D2H, d.compute)
        for i in range(blocks):
            pool.fetch(other + i, tables[(step + 1) % 6 * blocks + i], d.compute)
        d.spent.add(AT_LINK_RATE, 2 * blocks * pool.size / d.bytes_per_us * 1e3)
        paced(d, step)
    return {}


@fresh(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("small_copies", "weights_not_overlapped"),
    like=("redundant_loads",),
)
def a_lora_adapter_brought_for_each_batch(d: Device) -> Truth:
    """Each batch wants another of ten adapters: its 56 scattered matrices come on the model's stream before it."""
    pool, parts = Pool(d, d.bytes_of(5.5)), 56
    homes = random.Random(12).sample(range(pool.count), 10 * parts)
    for batch in range(180):
        for i in range(parts):
            pool.fetch(i, homes[batch % 10 * parts + i], d.compute)
        d.launch(700_000)
        d.spent.add(AT_LINK_RATE, parts * pool.size / d.bytes_per_us * 1e3)
        paced(d, batch)
    return {}


@fresh("redundant_loads", line=NOT_NEEDED, also=("weights_not_overlapped",), blind=DEVICE)
def draft_weights_sent_again_for_each_speculation(d: Device) -> Truth:
    """The draft model's eight layers are loaded for every speculation to where they lie already."""
    pool, lost = Pool(d, d.bytes_of(120)), 0
    marks = (0, 0)
    for cycle in range(110):
        begin = d.mark(d.compute)
        for layer in range(8):
            pool.fetch(layer, layer, d.compute)
        end = d.mark(d.compute)
        for _ in range(8):
            d.launch(60_000)
        d.launch(900_000)
        if cycle > 1:
            lost += d.between(*marks)
        marks = (begin, end)
        paced(d, cycle, 0)
    d.spent.add(NOT_NEEDED, lost)
    return {"redundant_loads": lost}


@fresh(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),
    also=("synchronisation", "weights_not_overlapped", "gpu_starved"),
    like=("redundant_loads",),
)
def chunks_of_a_prefill_launched_when_their_prefix_is_there(d: Device) -> Truth:
    """A chunk's prefix is loaded when the chunk before is over; the host waits for it, and only then launches."""
    pool = Pool(d, d.bytes_of(170))
    for chunk in range(170):
        d.order(d.copies[0], d.compute, chunk % 60)
        for i in range(3):
            pool.fetch((3 * chunk + i) % 6, 3 * chunk + i, d.copies[0])
        d.record(100, d.copies[0])
        d.sync_event(100)
        d.launch(600_000)
        d.spent.add(AT_LINK_RATE, 3 * pool.size / d.bytes_per_us * 1e3)
    return {}


@fresh(
    line=AT_LINK_RATE,
    also=("head_of_line_copies", "link_bound", "weights_not_overlapped"),
    like=("redundant_loads", "launch_queue_saturation"),
)
def the_expert_that_is_needed_behind_five_guesses(d: Device) -> Truth:
    """Five experts are loaded on a guess and never used; the one that the layer needs comes behind them."""
    pool = Pool(d, d.bytes_of(100))
    for layer in range(260):
        if layer > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[200 + layer % 2], 0))
        for i in range(6):
            pool.fetch(layer % 2 * 6 + i, 6 * layer + i, d.copies[0])
        d.order(d.compute, d.copies[0], layer % 64)
        d.launch(300_000)
        d.record(200 + layer % 2, d.compute)
        d.spent.add(AT_LINK_RATE, 6 * pool.size / d.bytes_per_us * 1e3 - 300_000)
        paced(d, layer, 4)
    return {}


@fresh("weights_not_overlapped", line=AT_LINK_RATE, like=("link_bound",), needs_gpu=True)
def a_prefetch_that_the_default_stream_serialises(d: Device) -> Truth:
    """Layers come one ahead on a blocking stream; the kernels run on the legacy default stream, so nothing overlaps."""
    pool, side, layers = Pool(d, d.bytes_of(300)), d.made("cudaStreamCreate"), 260
    pool.fetch(0, 0, side)
    for layer in range(layers):
        pool.fetch((layer + 1) % 3, layer + 1, side)
        d.launch(350_000, 1)  # cudaStreamLegacy
        d.record(layer % 8, 1)
        if layer > 3:
            d.sync_event((layer - 4) % 8)
    copying = layers * pool.size / d.bytes_per_us * 1e3
    d.spent.add(AT_LINK_RATE, copying)
    return {"weights_not_overlapped": int(min(copying, layers * 350_000))}


@fresh(
    line=AT_LINK_RATE,
    also=("link_bound", "weights_not_overlapped"),
    like=("redundant_loads", "small_copies", "load_not_ordered"),
)
def a_prefix_restored_layer_by_layer(d: Device) -> Truth:
    """A request's 16 layers of KV come when it starts, and each layer waits for its own, which takes twice as long."""
    pool, layers = Pool(d, d.bytes_of(120)), 16
    for request in range(90):
        d.order(d.copies[1], d.compute, 250)
        for layer in range(layers):
            pool.fetch(layer, layers * request + layer, d.copies[1])
            d.record(layer, d.copies[1])
        for layer in range(layers):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer], 0))
            d.launch(60_000)
        d.spent.add(AT_LINK_RATE, layers * (pool.size / d.bytes_per_us * 1e3 - 60_000) + 60_000)
        paced(d, request, 1)
    return {}


@fresh(
    line=AT_LINK_RATE,
    also=("head_of_line_copies", "weights_not_overlapped"),
    like=("wasted_stores", "redundant_loads"),
)
def loads_that_stand_behind_stores_of_one_stream(d: Device) -> Truth:
    """Two blocks go out and two come in on one stream: the link could carry both at once, and the kernel waits."""
    pool = Pool(d, d.bytes_of(150))
    for step in range(150):
        computed(d, pool, step % 2 * 4, 2, step)
        d.launch(550_000)
        d.order(d.copies[0], d.compute, 2 * (step % 60))
        for i in range(2):
            home = d.host + (2 * step + i) % 20 * pool.size
            d.copy(home, d.device + (step % 2 * 4 + i) * pool.size, pool.size, D2H, d.copies[0])
        for i in range(2):  # what went out seven steps ago comes back
            pool.fetch(step % 2 * 4 + 2 + i, (2 * step + 6 + i) % 20, d.copies[0])
        d.order(d.compute, d.copies[0], 2 * (step % 60) + 1)
        d.spent.add(AT_LINK_RATE, 4 * pool.size / d.bytes_per_us * 1e3)
        paced(d, step)
    return {}


@fresh(
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE,),
    also=("small_copies", "weights_not_overlapped", "link_degraded"),
    like=("redundant_loads", "unmerged_neighbours"),
)
def one_head_of_four_out_of_each_token(d: Device) -> Truth:
    """A rank takes its head, 256 of each 1,024 bytes, out of the host's KV by strided copies before each step."""
    rows, width, pitch = (4_096 if d.gpu else 512), 256, 1_024
    span, slot = rows * pitch, rows * width
    for step in range(160):
        for i in range(6):
            at = (6 * step + i) * span % (d.size - span - pitch + 1) // span * span + step % 4 * width
            to = d.device + (step % 2 * 6 + i) * slot
            begin = d.mark(d.compute)
            copy_2d(d, (to, width), (d.host + at, pitch), width, rows, H2D, d.compute)
            end = d.mark(d.compute)
        d.launch(600_000)
        paced(d, step, 0)
        d.spent.add(BELOW_LINK_RATE, 6 * d.between(begin, end))
    return {}


@fresh(
    "fence_before_copies",
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("small_copies",),
    like=("cpu_starved", "python_or_gil_bound"),
)
def layers_handed_to_a_peer_that_is_late(d: Device) -> Truth:
    """A host function holds the stores until a peer is ready; K, V and an event a block fill the queue behind it."""
    pool, fence, rest = Pool(d, 64 * KiB), 0, 0
    order = random.Random(14).sample(range(pool.count), min(pool.count, 1_000))
    d.launch(3_000_000)
    d.sync(d.compute)
    for turn in range(3):
        clear(d, d.device, turn + 1, 64 * MiB, d.copies[5])
        gate(d, 45_000, d.copies[5])
        durations = []
        for block in range(650):
            for half in range(2):
                at = order[(2 * block + half) % len(order)] * pool.size
                durations.append(d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[5]))
            begin = now()
            d.record(block % 100, d.copies[5])
            durations.append(now() - begin)
        quick = usual(durations[:600])
        blocked = sorted(one - quick for one in durations if one > 15_000)
        fence, rest = fence + (blocked[-1] if blocked else 0), rest + sum(blocked[:-1])
        d.spent.add(FULL_QUEUE, sum(blocked))
        for _ in range(15):
            d.launch(500_000)
        d.sync(d.compute)
        d.sync(d.copies[5])
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}


@fresh(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED,),
    also=("wasted_stores", "weights_not_overlapped"),
    like=("synchronisation", "small_copies"),
    needs_gpu=True,
)
def a_graph_that_ends_with_its_stores(d: Device) -> Truth:
    """A step is one graph: small inputs, a kernel, and the step's KV stored by copy nodes before the next may run."""
    size = d.bytes_of(90)

    def step_once() -> None:
        for i in range(4):
            d.copy(d.device + i * size, d.host + d.size - (1 + i) * 64 * KiB, 64 * KiB, H2D, d.compute)
        d.launch(650_000)
        for i in range(4):
            d.copy(d.host + i * size, d.device + i * size, size, D2H, d.compute)

    graph = d.graph(step_once)
    d.spent.restart()
    for step in range(160):
        ct.memmove(d.host + d.size - 256 * KiB, random.Random(step).randbytes(256 * KiB), 256 * KiB)
        d.replay(graph, 650_000)
        d.spent.add(AT_LINK_RATE, 4 * size / d.bytes_per_us * 1e3)
        paced(d, step, 1)
    return {}


@fresh(
    "head_of_line_copies",
    line=AT_LINK_RATE,
    like=("load_not_ordered", "weights_not_overlapped", "link_bound", "synchronisation", "small_copies"),
)
def prefixes_restored_while_others_decode(d: Device) -> Truth:
    """A request's prefix comes beside the decode steps of others; it joins at the first step that finds it there.

    What the next step reads, 2 KiB, then stands behind the whole prefix in the copy engine.
    """
    pool, request, joined, asked, lost = Pool(d, d.bytes_of(60)), 0, 0, False, 0
    marks = (0, 0)
    for step in range(200):
        if not asked:
            d.order(d.copies[3], d.compute, request % 50)  # the slots are those of one that has ended
            for i in range(12):
                pool.fetch(request % 2 * 12 + i, 12 * request + i, d.copies[3])
            d.record(100 + request % 50, d.copies[3])
            asked = True
        elif not d.lib.cudaEventQuery(d.events[100 + request % 50]):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100 + request % 50], 0))
            request, joined, asked = request + 1, joined + 1, False
        stamp(d, d.size - 4096 * (1 + step % 4), 2 * KiB, step)
        begin = d.mark(d.compute)
        d.copy(d.device + d.size - 4096, d.host + d.size - 4096 * (1 + step % 4), 2 * KiB, H2D, d.compute)
        end = d.mark(d.compute)
        d.launch(700_000)
        d.launch(700_000)
        paced(d, step, 1)
        if step and (waited := d.between(*marks)) > 100_000:
            lost += waited
        marks = begin, end
    if not joined:
        raise RuntimeError("no prefix ever came")
    d.spent.add(AT_LINK_RATE, lost)
    return {"head_of_line_copies": lost}
