"""Unseen programs whose kernels wait for copies: a woken model, experts, graphs, compaction, hand-over, tokens."""

from __future__ import annotations

import ctypes as ct
import random
from collections import OrderedDict
from queue import Queue

from accounts import Pool, paced
from device import D2H, H2D, Device
from fresh_copies import clear, computed
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    INSIDE_GPU,
    SUBMITTING,
    WAITING,
    KiB,
    Truth,
    in_thread,
    unseen,
    usual,
)

D2D = 3


def same(d: Device, at: int, home: int, size: int) -> None:
    """Raises unless `size` bytes at `at` of the device are those at `home` of the host; the pool's end is lost."""
    size, back = min(size, 64 * KiB), d.host + d.size - 64 * KiB
    d.synchronize()
    d.copy(back, at, size, D2H, d.compute)
    d.synchronize()
    if ct.string_at(back, size) != ct.string_at(home, size):
        raise RuntimeError("the device has other bytes than it was given")


@unseen(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped", "allocation_on_hot_path", "synchronisation", "gpu_starved"),
    like=("redundant_loads", "link_degraded", "first_calls"),
)
def a_model_put_to_sleep_and_woken_for_each_burst(d: Device) -> Truth:
    """Sleep frees the weights' memory; each burst waits until twelve layers are back, in memory that was just made."""
    size, layers = d.bytes_of(260), 12
    d.spent.restart()
    for burst in range(40):
        with d.spent.on(ALLOCATING):
            weights = d.made("cudaMalloc", layers * size)
        for layer in range(layers):
            d.copy(weights + layer * size, d.host + layer * size, size, H2D, d.compute)
        for _ in range(8):
            d.launch(600_000)
        d.sync(d.compute)
        if burst == 39:
            same(d, weights + 11 * size, d.host + 11 * size, size)
        with d.spent.on(ALLOCATING):
            d.check(d.lib.cudaFree(weights))
        d.spent.add(AT_LINK_RATE, layers * size / d.bytes_per_us * 1e3)
    return {}


@unseen(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "synchronisation", "load_not_ordered"),
)
def experts_fetched_on_a_miss_while_the_others_compute(d: Device) -> Truth:
    """Of four experts a layer those at hand compute while the others come; the kernel of these waits for the rest."""
    pool, experts, room = Pool(d, d.bytes_of(140)), 23, 14
    chance, held = random.Random(41), OrderedDict((slot, slot) for slot in range(room))  # expert: slot
    waits: list[tuple[int, int]] = []
    lost = 0
    for slot in range(room):
        pool.fetch(slot, slot, d.copies[0])
    d.sync(d.copies[0])
    d.spent.restart()
    for layer in range(800):
        asked = chance.sample(range(experts), 4)
        missed = [expert for expert in asked if expert not in held]
        for expert in set(asked) - set(missed):
            held.move_to_end(expert)
        d.order(d.copies[0], d.compute, layer % 60)  # whose slots are taken has computed
        d.launch(120_000)
        for expert in missed:
            _, slot = held.popitem(last=False)
            held[expert] = slot
            pool.fetch(slot, expert, d.copies[0])
        begin = d.mark(d.compute)
        d.order(d.compute, d.copies[0], 64 + layer % 60)
        waits.append((begin, d.mark(d.compute)))
        d.launch(120_000)
        paced(d, layer)
        if layer > 2:
            lost += d.between(*waits[layer - 3])
    d.spent.add(AT_LINK_RATE, lost)
    for expert, slot in held.items():
        same(d, d.device + slot * pool.size, d.host + expert * pool.size, pool.size)
    return {}


@unseen(
    "weights_not_overlapped",
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    like=("redundant_loads", "link_bound", "synchronisation"),
    needs_gpu=True,
)
def a_graph_replayed_after_each_group_s_weights(d: Device) -> Truth:
    """A group of layers is one graph; its four layers' weights come on the model's stream before each replay."""
    pool = Pool(d, d.bytes_of(100))

    def group() -> None:
        for _ in range(8):
            d.launch(100_000)

    graph, lost = d.graph(group), 0
    d.spent.restart()
    for number in range(350):
        for layer in range(4):
            pool.fetch(layer, 4 * number + layer, d.compute)
        d.replay(graph, 800_000)
        lost += int(4 * pool.size / d.bytes_per_us * 1e3)
        paced(d, number)
    d.spent.add(AT_LINK_RATE, lost)
    return {"weights_not_overlapped": lost}


@unseen(
    "weights_not_overlapped",
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),
    like=("redundant_loads", "link_bound", "load_not_ordered"),
)
def a_double_buffer_that_waits_for_the_wrong_kernel(d: Device) -> Truth:
    """Weights take turns in two buffers, but a load waits for the kernel of the other one, so nothing overlaps."""
    pool, layers, lost = Pool(d, d.bytes_of(250)), 800, 0
    for layer in range(layers):
        d.order(d.copies[0], d.compute, layer % 60)
        pool.fetch(layer % 2, layer, d.copies[0])
        d.order(d.compute, d.copies[0], 64 + layer % 60)
        d.launch(350_000)
        lost += int(pool.size / d.bytes_per_us * 1e3)
        paced(d, layer, 4)
    d.spent.add(AT_LINK_RATE, lost)
    same(d, d.device + pool.size, d.host + (layers - 1) % pool.count * pool.size, pool.size)
    return {"weights_not_overlapped": lost}


@unseen(
    line=INSIDE_GPU,  # until copies that cross no link had a line of their own: at or below the link's rate
    or_lines=(SUBMITTING,),  # on an H100 the thread that submits them one by one is late
    also=("small_copies",),
    like=("redundant_loads", "unmerged_neighbours", "synchronisation", "wasted_stores"),
)
def kv_compacted_within_the_device_after_each_step(d: Device) -> Truth:
    """After each step 140 of 300 blocks are free, and the 140 new ones are moved one by one to where those were."""
    size, blocks, moved, lost = (512 if d.gpu else 16) * KiB, 300, 140, 0
    first, marks = blocks - moved, [(0, 0)] * 4
    chance, tail = random.Random(42), [d.device + block * size for block in range(first, blocks)]
    made = [0] * first  # by which step, block by block
    for step in range(300):
        holes = chance.sample(range(first), moved)
        clear(d, tail[0], step % 251, moved * size, d.compute)
        d.launch(500_000)
        begin = d.mark(d.compute)
        d.rapid([(d.device + to * size, at) for to, at in zip(holes, tail, strict=True)], size, D2D, d.compute)
        marks[step % 4] = (begin, d.mark(d.compute))
        for hole in holes:
            made[hole] = step
        paced(d, step, 2)
        if step > 1:
            lost += d.between(*marks[(step - 2) % 4])
    d.spent.add(INSIDE_GPU, lost)
    for block in range(first):
        ct.memset(d.host, made[block] % 251, 64 * KiB)
        same(d, d.device + block * size, d.host, size)
    return {}


@unseen(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "weights_not_overlapped"),
    like=("wasted_stores", "redundant_loads", "python_or_gil_bound"),
)
def one_request_at_a_time_from_a_prefill_to_a_decode_thread(d: Device) -> Truth:
    """A thread prefills and puts the KV out, another takes it in and decodes; the next prefill waits for its answer."""
    pool, each, requests = Pool(d, d.bytes_of(140)), 4, 150
    asked: Queue[int] = Queue()
    answered: Queue[int] = Queue()
    stream = d.copies[7]

    def decode() -> None:
        while (request := asked.get()) >= 0:
            for i in range(each):
                pool.fetch(each + i, request % 3 * each + i, stream)
            d.launch(900_000, stream)
            d.sync(stream)
            answered.put(request)

    thread = in_thread(decode)
    d.spent.restart()
    for request in range(requests):
        computed(d, pool, 0, each, request)
        d.launch(900_000)
        for i in range(each):
            home = d.host + (request % 3 * each + i) * pool.size
            d.copy(home, d.device + i * pool.size, pool.size, D2H, d.compute)
        d.sync(d.compute)
        asked.put(request)
        answered.get()
        d.spent.add(AT_LINK_RATE, 2 * each * pool.size / d.bytes_per_us * 1e3)
    asked.put(-1)
    thread.join()
    d.spent.stop()
    last = d.host + ((requests - 1) % 3 * each + each - 1) * pool.size
    for slot in (each - 1, 2 * each - 1):  # computed there, and handed over to there
        same(d, d.device + slot * pool.size, last, pool.size)
    return {}


@unseen(
    "head_of_line_copies",
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "wasted_stores", "gpu_starved"),
    like=("small_copies", "link_bound", "store_not_ordered"),
)
def tokens_read_back_behind_an_offload(d: Device) -> Truth:
    """Every third step the KV made so far leaves beside the next kernel, and this step's tokens wait behind it."""
    pool, took = Pool(d, d.bytes_of(120)), []
    for step in range(240):
        clear(d, d.device, step % 251, 12 * pool.size, d.compute)
        if step % 3 == 2:
            d.order(d.copies[1], d.compute, step % 60)
            for i in range(12):
                home = (12 * (step // 3) + i) % (pool.count - 1) * pool.size
                d.copy(d.host + home, d.device + i * pool.size, pool.size, D2H, d.copies[1])
        d.launch(500_000)
        if step % 3 == 2:  # what leaves is not to change
            d.record(100, d.copies[1])
        begin = d.mark(d.compute)
        d.copy(d.host + d.size - 4096 * (1 + step % 4), d.device + d.size - 4096, 1 * KiB, D2H, d.compute)
        end = d.mark(d.compute)
        d.sync(d.compute)
        took.append(d.between(begin, end))
        if step % 3 == 2:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100], 0))
    quick = usual(took)
    lost = sum(one - quick for one in took if one > 100_000)
    d.spent.add(AT_LINK_RATE, lost)
    return {"head_of_line_copies": lost}
