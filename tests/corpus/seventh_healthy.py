"""Seventh programs that are healthy: layers, heads, a pipe, training's states, plain inputs, an adapter, compaction."""

from __future__ import annotations

import ctypes as ct
import os
import random
import threading
import time
from queue import Queue

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device
from fresh_copies import clear, copy_2d
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, pageable, seventh
from unseen_copies import D2D, same


@seventh(
    line=COMPUTING,
    like=("synchronisation", "weights_not_overlapped", "link_bound", "load_not_ordered", "gpu_starved"),
)
def layers_whose_loads_the_host_joins_three_layers_ahead(d: Device) -> Truth:
    """The host waits for each layer's load by cudaStreamSynchronize before it launches that layer of 0.5 ms.

    A load takes 0.06 ms and there are four slots: the thread waits for the layer that had the slot, and three more
    layers stand in the compute stream meanwhile, 1.5 ms of work. The GPU never waits for the thread or the link.
    """
    pool, slots, layer = Pool(d, d.bytes_of(60)), 4, 0
    for layer in turns():
        slot = layer % slots
        if layer >= slots:
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[100 + slot], 0))
        pool.fetch(slot, layer, d.copies[0])
        d.sync(d.copies[0])
        d.launch(500_000)
        d.record(100 + slot, d.compute)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + layer % slots * pool.size, d.host + layer % pool.count * pool.size, pool.size)
    return {}


@seventh(
    line=COMPUTING,
    like=("small_copies", "store_not_ordered", "link_bound", "fence_before_copies", "synchronisation", "gpu_starved"),
    also=("wasted_stores",),
)
def heads_that_leave_by_2d_copies_beside_the_next_step(d: Device) -> Truth:
    """While a step of 3 ms computes, one head of four of the step before leaves by eight 2D copies of rows of 4 KiB.

    The copies have a stream of their own, and at the link's rate take 0.5 ms: were 2D copies five times as slow, they
    would still end beside the step. A step's head is another one than the next step's, and none waits for a store.
    """
    width, pitch, blocks, step = 4 * KiB, 16 * KiB, 8, 0
    rows = d.bytes_of(60) // width
    d.copy(d.device, d.host, blocks * rows * pitch, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        for _ in range(6):
            d.launch(500_000)
        d.order(d.copies[1], d.compute, step % 32)
        for block in range(blocks):
            home = (d.host + (step % 2 * blocks + block) * rows * width, width)
            head = (d.device + block * rows * pitch + step % 4 * width, pitch)
            copy_2d(d, home, head, width, rows, D2H, d.copies[1])
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    last = (blocks * rows - 1) * pitch + step % 4 * width
    same(d, d.device + last, d.host + ((step % 2 + 1) * blocks * rows - 1) * width, width)
    return {}


@seventh(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "cpu_starved", "python_or_gil_bound", "synchronisation", "slow_tier"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def prompts_read_from_a_pipe_that_is_mostly_empty(d: Device) -> Truth:
    """A batch tool reads prompts from a pipe; one comes every 60 ms or so and keeps the GPU busy for 10 ms.

    What has not come cannot be computed: the thread stands in read() for want of work, and once a prompt is there its
    eight steps of 1.3 ms are launched two ahead.
    """
    source, sink = os.pipe()

    def ask() -> None:
        for pause in (60, 40, 85, 50, 30, 75, 55, 45) * 3:
            time.sleep(pause / 1_000)
            os.write(sink, b"?" * 256)
        os.close(sink)

    thread = in_thread(ask)
    d.spent.restart()
    while True:
        with d.spent.on(NOTHING_TO_DO):
            prompt = os.read(source, 256)
        if not prompt:
            break
        for i in range(8):
            stamp(d, i * 4 * KiB, 512, i)
            d.copy(d.device, d.host + i * 4 * KiB, 4 * KiB, H2D, d.compute)
            d.launch(1_300_000)
            d.copy(d.host + d.size - 4 * KiB * (1 + i % 4), d.device + d.size - 4 * KiB, 512, D2H, d.compute)
            paced(d, i, 2)
        d.sync(d.compute)
    d.spent.stop()
    thread.join()
    os.close(source)
    return {}


@seventh(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "load_not_ordered", "store_not_ordered", "redundant_loads"),
    also=("unmerged_neighbours",),
)
def optimizer_states_streamed_past_the_updates_by_bucket(d: Device) -> Truth:
    """Each bucket is computed for 1.2 ms while the next one's state comes, 0.3 ms, and the last one's leaves.

    Loads and stores have a stream each, and three slots take turns: a load waits for the store that frees its slot, and
    both have ended, one after the other, when a bucket's kernels have run for half of their time. None waits for them.
    """
    pool, slots, homes, bucket = Pool(d, d.bytes_of(300)), 3, 8, 0
    loads, stores = d.copies[0], d.copies[1]

    def bring(bucket: int) -> None:
        slot = bucket % slots
        if bucket >= slots:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[20 + slot], 0))
        pool.fetch(slot, bucket % homes, loads)
        d.record(10 + slot, loads)

    bring(0)
    d.sync(loads)
    d.spent.restart()
    for bucket in turns():
        slot = bucket % slots
        bring(bucket + 1)
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[10 + slot], 0))
        clear(d, d.device + slot * pool.size, bucket % 251, 128 * KiB, d.compute)
        for _ in range(2):
            d.launch(600_000)
        d.order(stores, d.compute, 30 + slot)
        d.copy(d.host + bucket % homes * pool.size, d.device + slot * pool.size, pool.size, D2H, stores)
        d.record(20 + slot, stores)
        paced(d, bucket, 1)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + bucket % slots * pool.size, d.host + bucket % homes * pool.size, pool.size)
    return {}


@seventh(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "load_not_ordered", "store_not_ordered", "fence_before_copies"),
    also=("unmerged_neighbours",),
)
def activations_brought_back_a_layer_before_they_are_needed(d: Device) -> Truth:
    """Of eight layers six activations leave beside the forward pass and come back a layer ahead of the backward's.

    A copy takes 0.2 ms, a forward kernel 0.5 ms and a backward kernel 0.7 ms, so each copy ends beside the kernel that
    follows. The last two layers' activations stay in their slots, which hides the first loads, too.
    """
    pool, layers, step = Pool(d, d.bytes_of(200)), 8, 0
    loads, stores = d.copies[0], d.copies[1]
    for step in turns():
        for layer in range(layers):
            mine = d.device + layer % 2 * pool.size
            if layer > 1:
                d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer - 2], 0))
            clear(d, mine, (step * layers + layer) % 251, min(pool.size, MiB), d.compute)
            d.launch(500_000)
            if layer < layers - 2:
                d.order(stores, d.compute, 20 + layer)
                d.copy(d.host + layer * pool.size, mine, pool.size, D2H, stores)
                d.record(layer, stores)
        for layer in reversed(range(layers)):
            if layer < layers - 2:
                d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[60 + layer], 0))
            d.launch(700_000)
            if layer > 1:  # the slot is free when this layer has gone back
                wanted = layer - 2
                d.order(loads, d.compute, 40 + layer)
                d.check(d.lib.cudaStreamWaitEvent(loads, d.events[wanted], 0))
                pool.fetch(2 + wanted % 2, wanted, loads)
                d.record(60 + wanted, loads)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + 3 * pool.size, d.host + pool.size, pool.size)
    if ct.string_at(d.host + pool.size, 64) != bytes([(step * layers + 1) % 251]) * 64:
        raise RuntimeError("other bytes came back than were computed")
    return {}


@seventh(
    line=COMPUTING,
    like=("pageable_memory", "small_copies", "synchronisation", "gpu_starved", "redundant_loads"),
    also=("wasted_stores",),
)
def small_plain_inputs_sent_while_the_last_step_computes(d: Device) -> Truth:
    """Each step's 4 KiB come out of plain memory, on a stream of their own, while the step before computes for 2.1 ms.

    The driver takes 4 KiB of plain memory into its own buffer and comes back, a matter of 10 us; the compute stream has
    more than a millisecond of work at that time, and waits for the copy by an event that is reached long before.
    """
    keep, at = pageable(64 * KiB)
    step = 0
    for step in turns():
        slot = step % 8 * 4 * KiB
        ct.memmove(at + slot, random.Random(step).randbytes(4 * KiB), 4 * KiB)
        d.copy(d.device + slot, at + slot, 4 * KiB, H2D, d.copies[6])
        d.order(d.compute, d.copies[6], step % 32)
        for _ in range(3):
            d.launch(700_000)
        d.copy(d.host + d.size - 4 * KiB * (1 + step % 4), d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + step % 8 * 4 * KiB, at + step % 8 * 4 * KiB, 4 * KiB)
    del keep
    return {}


@seventh(
    line=COMPUTING,
    like=("synchronisation", "context_lock_stall", "load_not_ordered", "weights_not_overlapped", "python_or_gil_bound"),
    also=("unmerged_neighbours", "wasted_stores"),
)
def an_adapter_that_a_thread_brings_by_synchronous_copies(d: Device) -> Truth:
    """A thread brings an adapter's twelve matrices by cudaMemcpy, 0.05 ms each, and waits for each, beside decode.

    Decode goes on with the adapter that it has, in steps of 1.5 ms launched two ahead on a stream that no synchronous
    copy holds back, and takes up the new one when it is there. So the thread's waits cost the GPU nothing.
    """
    pool, matrices = Pool(d, d.bytes_of(50)), 12
    adapters, fresh, free = (pool.count - 1) // matrices, Queue[int](), Queue[int]()
    last = (0, 0)

    def bring() -> None:
        nonlocal last
        number = 0
        while (bank := free.get()) >= 0:
            for i in range(matrices):
                home = d.host + (number % adapters * matrices + i) * pool.size
                last = (d.device + (bank * matrices + i) * pool.size, home)
                d.check(d.lib.cudaMemcpy(*last, pool.size, H2D))
            fresh.put(bank)
            number += 1
            time.sleep(0.008)

    free.put(0)
    thread, bank, left = in_thread(bring), fresh.get(), -1
    free.put(1)
    d.spent.restart()
    for step in turns():
        if not fresh.empty():
            bank, left = fresh.get(), step
        if left >= 0 and step == left + 4:  # no step that computes now began with the old one
            free.put(1 - bank)
            left = -1
        for _ in range(3):
            d.launch(500_000)
        d.copy(d.host + d.size - 4 * KiB * (1 + step % 4), d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    free.put(-1)
    thread.join()
    same(d, *last, pool.size)
    return {}


@seventh(
    line=COMPUTING,
    like=("small_copies", "link_bound", "synchronisation", "launch_queue_saturation", "head_of_line_copies"),
    also=("unmerged_neighbours",),
)
def blocks_compacted_on_a_side_stream_beside_decode(d: Device) -> Truth:
    """Beside a step of 2.4 ms forty blocks of 256 KiB that no step uses move within the device, on their own stream.

    All together they take some 0.2 ms of the device's memory, and the thread as long to submit them while the step
    before computes. The step after next waits for them by an event that is reached a step earlier.
    """
    size, blocks, step = 256 * KiB, 40, 0
    d.copy(d.device, d.host, blocks * size, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        if step > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[step % 4], 0))
        for _ in range(4):
            d.launch(600_000)
        old, new = (d.device + (step + turn) % 2 * blocks * size for turn in (0, 1))
        d.rapid([(new + i * size, old + (i + 3) % blocks * size) for i in range(blocks)], size, D2D, d.copies[5])
        d.record((step + 2) % 4, d.copies[5])
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    at = d.device + (step + 1) % 2 * blocks * size
    same(d, at, d.host + 3 * (step + 1) % blocks * size, size)
    return {}


@seventh(
    line=COMPUTING,
    like=("aliased_stream", "synchronisation", "context_lock_stall", "launch_queue_saturation", "python_or_gil_bound"),
    also=("wasted_stores",),
)
def two_threads_whose_steps_take_turns_on_one_stream(d: Device) -> Truth:
    """Two threads give steps of 1.5 ms to one stream, and each waits for its own token before it gives the next.

    While one thread handles its token, the other's step computes: 1.5 ms for what takes a thread some 0.05 ms. That
    each waits for the other's step, too, costs the GPU nothing.
    """
    over = threading.Event()

    def step_of(thread: int, step: int) -> None:
        stamp(d, thread * 64 * KiB + step % 8 * 4 * KiB, 512, step)
        for _ in range(3):
            d.launch(500_000)
        back = d.size - 4 * KiB * (1 + 4 * thread + step % 4)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.record(16 * thread + step % 8, d.compute)
        d.sync_event(16 * thread + step % 8)

    def other() -> None:
        step = 0
        while not over.is_set():
            step_of(1, step)
            step += 1

    d.spent.restart()
    thread = in_thread(other)
    for step in turns():
        step_of(0, step)
    over.set()
    thread.join()
    d.sync(d.compute)
    d.spent.stop()
    return {}
