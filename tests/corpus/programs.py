"""A labelled corpus: small programs that are slow for a known reason, or healthy although they look alike.

    python tests/corpus/programs.py NAME            runs one, prints {"program", "device", "lost_ns": {cause: ns}}
    python tests/corpus/programs.py --list

A program does its work with the CUDA runtime's own calls, so it runs unchanged on a GPU and on the embedded host
runtime, and measures itself what it lost to each cause: the time of its own calls, or the device's by timing events.
`SHOWN` says which recorder can show a cause at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accounts import Spent, fill
from device import D2H, H2D, Device, beyond, now
from registry import PROGRAMS, KiB, MiB, Truth, blocked, in_thread, pageable, program, usual

# ---- the queue ------------------------------------------------------------------------------------------------------


def fenced_stores(d: Device, count: int, forward_ns: int = 25_000_000, us: float = 10) -> list[int]:
    d.launch(forward_ns)
    d.order(d.copies[0], d.compute, 0)
    size = d.bytes_of(us)
    return [d.store(i, size, d.copies[0]) for i in range(count)]


@program("fence_before_copies", "launch_queue_saturation")
def stores_behind_a_forward(d: Device) -> Truth:
    fence, rest = blocked(fenced_stores(d, 3_000))
    d.drain()
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}


@program("fence_before_copies", "launch_queue_saturation")
def stores_behind_three_forwards(d: Device) -> Truth:
    lost = [0, 0]
    for _ in range(3):
        for i, ns in enumerate(blocked(fenced_stores(d, 2_000, 15_000_000))):
            lost[i] += ns
        d.drain()
    return {"fence_before_copies": lost[0], "launch_queue_saturation": lost[1]}


@program("fence_before_copies", "launch_queue_saturation")
def stores_behind_a_forward_on_a_second_thread(d: Device) -> Truth:
    durations: list[int] = []
    thread = in_thread(lambda: durations.extend(fenced_stores(d, 2_500)))
    thread.join()
    d.synchronize()
    fence, rest = blocked(durations)
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}


@program(like=("fence_before_copies",))
def few_stores_behind_a_forward(d: Device) -> Truth:
    for _ in range(3):
        fenced_stores(d, 900, 8_000_000)
        d.drain()
    return {}


@program("launch_queue_saturation")
def loads_on_one_stream(d: Device) -> Truth:
    size = d.bytes_of(25)
    durations = [d.load(i, size, d.copies[0]) for i in range(2_500)]
    d.synchronize()
    return {"launch_queue_saturation": sum(blocked(durations))}


@program(like=("launch_queue_saturation",))
def deep_but_never_full(d: Device) -> Truth:
    size = d.bytes_of(25)
    for _ in range(3):
        for i in range(950):
            d.load(i, size, d.copies[0])
        d.drain()
    return {}


@program("launch_queue_saturation")
def launches_without_any_copy(d: Device) -> Truth:
    durations = [d.launch(40_000) for _ in range(2_500)]
    d.drain()
    return {"launch_queue_saturation": sum(blocked(durations))}


@program("launch_queue_saturation")
def launches_of_a_step_that_the_device_is_behind_with(d: Device) -> Truth:
    durations: list[int] = []
    for _ in range(2):
        durations += [d.launch(60_000) for _ in range(1_800)]
        d.drain()
    lost = sum(sum(blocked(durations[at : at + 1_800])) for at in (0, 1_800))
    return {"launch_queue_saturation": lost}


@program(like=("launch_queue_saturation",))
def launches_that_fit(d: Device) -> Truth:
    for _ in range(4):
        for _ in range(950):
            d.launch(15_000)
        d.drain()
    return {}


def over_streams(d: Device, transfers: int, copies: int, us: float) -> int:
    for stream in d.copies:
        d.load(0, 4 * KiB, stream)
    d.drain()
    time.sleep(0.005)
    d.launch(40_000_000)
    size, durations = d.bytes_of(us), []
    d.record(0, d.compute)
    for transfer in range(transfers):
        stream = d.copies[transfer % 32]
        d.check(d.lib.cudaStreamWaitEvent(stream, d.events[0], 0))
        durations += [d.load(copies * transfer + i, size, stream) for i in range(copies)]
    d.synchronize()
    return sum(blocked(durations))


@program("channels_exhausted")
def transfers_over_32_streams_behind_a_fence(d: Device) -> Truth:
    return {"channels_exhausted": over_streams(d, 70, 80, 3)}


@program(like=("channels_exhausted",))
def transfers_over_32_streams_that_fit(d: Device) -> Truth:
    over_streams(d, 40, 80, 3)
    return {}


@program("aliased_stream", "launch_queue_saturation")
def a_new_stream_that_another_thread_has_filled(d: Device) -> Truth:
    shared, size, filled = d.copies[0], d.bytes_of(30), threading.Event()
    offload: list[int] = []

    def fill() -> None:
        for i in range(1_600):
            offload.append(d.load(i, size, shared))
            if i == 1_100:
                filled.set()

    thread = in_thread(fill)
    filled.wait()
    mine = []
    for _ in range(60):
        d.launch(300_000)
        d.launch(300_000)
        mine.append(d.load(3, 4 * KiB, shared))
        d.order(d.compute, shared, 7)
        time.sleep(0.0002)  # else the other thread's times are those of the interpreter's lock
    thread.join()
    d.synchronize()
    return {"aliased_stream": beyond(mine), "launch_queue_saturation": sum(blocked(offload))}


@program("context_lock_stall", "fence_before_copies", "launch_queue_saturation")
def events_made_while_another_thread_is_blocked(d: Device) -> Truth:
    offload: list[int] = []
    thread = in_thread(lambda: offload.extend(fenced_stores(d, 1_200, 60_000_000)))
    time.sleep(0.02)
    begin = now()
    d.event()
    took = now() - begin
    thread.join()
    d.synchronize()
    fence, rest = blocked(offload)
    return {"context_lock_stall": took, "fence_before_copies": fence, "launch_queue_saturation": rest}


@program(like=("context_lock_stall",))
def events_made_beforehand(d: Device) -> Truth:
    thread = in_thread(lambda: fenced_stores(d, 900, 20_000_000))
    time.sleep(0.005)
    for i in range(20):
        d.record(i, d.copies[3])
    thread.join()
    d.synchronize()
    return {}


# ---- the calling thread ---------------------------------------------------------------------------------------------


@program("synchronisation")
def a_wait_after_every_load(d: Device) -> Truth:
    size, waited = d.bytes_of(120), 0
    for i in range(150):
        d.load(i, size, d.copies[0])
        waited += d.sync(d.copies[0])
        d.launch(180_000)
    d.launch(30_000)
    d.drain()
    return {"synchronisation": waited}


@program("synchronisation")
def a_wait_after_every_store(d: Device) -> Truth:
    size, waited = d.bytes_of(150), 0
    for i in range(100):
        d.launch(250_000)
        d.order(d.copies[1], d.compute, i)
        d.store(i, size, d.copies[1])
        waited += d.sync(d.copies[1])
    d.launch(30_000)
    d.synchronize()
    return {"synchronisation": waited}


@program(like=("synchronisation",))
def loads_ordered_by_events(d: Device) -> Truth:
    size = d.bytes_of(60)
    for i in range(150):
        d.load(i, size, d.copies[0])
        d.order(d.compute, d.copies[0], i)
        d.launch(150_000)
        if i % 16 == 15:
            d.sync(d.compute)
    d.synchronize()
    return {}


@program("synchronisation")
def a_result_read_back_in_every_step(d: Device) -> Truth:
    waited, kernel_ns = 0, 60_000 if d.gpu else 300_000  # many times a launch, on a slow machine as well
    for _ in range(80):
        for _ in range(6):
            d.launch(kernel_ns)
        d.store(1, 256, d.compute)
        waited += d.sync(d.compute)
    d.launch(30_000)
    d.synchronize()
    return {"synchronisation": waited}


@program(like=("synchronisation",))
def a_result_read_back_a_step_later(d: Device) -> Truth:
    for step in range(80):
        for _ in range(6):
            d.launch(60_000)
        d.store(1, 256, d.compute)
        d.record(step, d.compute)
        if step:
            d.sync_event(step - 1)
    d.synchronize()
    return {}


@program("synchronisation")
def synchronous_copies(d: Device) -> Truth:
    size, lost = d.bytes_of(200), 0
    for i in range(80):
        begin = now()
        d.check(d.lib.cudaMemcpy(d.device + i * 4 * KiB, d.host + i * 4 * KiB, size, H2D))
        lost += now() - begin
        d.launch(300_000)
    d.launch(50_000)
    d.synchronize()
    return {"synchronisation": lost}


@program("pageable_memory")
def large_pageable_copies(d: Device) -> Truth:
    keep, at = pageable(4 * MiB)
    durations = []
    for i in range(30):
        d.load(i, 64 * KiB, d.copies[1])
        to_device = i % 2 == 0
        dst, src = (d.device, at) if to_device else (at, d.device)
        durations.append(d.copy(dst, src, 4 * MiB, H2D if to_device else D2H, d.copies[0]))
    d.drain()
    del keep
    return {"pageable_memory": sum(durations)}


@program("pageable_memory")
def small_pageable_copies(d: Device) -> Truth:
    keep, at = pageable(1 * MiB)
    pinned = [d.load(i, 4 * KiB, d.copies[1]) for i in range(60)]
    durations = [
        d.copy(d.device + i % 16 * 64 * KiB, at + i % 16 * 64 * KiB, 64 * KiB, H2D, d.copies[0]) for i in range(600)
    ]
    d.drain()
    del keep
    return {"pageable_memory": sum(durations) - usual(pinned) * len(durations)}


@program("pageable_memory")
def small_pageable_stores(d: Device) -> Truth:
    keep, at = pageable(1 * MiB)
    durations: list[int] = []
    pinned = [d.load(i, 4 * KiB, d.copies[1]) for i in range(60)]
    for i in range(400):
        durations.append(d.copy(at + i % 16 * 16 * KiB, d.device + i % 16 * 16 * KiB, 16 * KiB, D2H, d.copies[0]))
        if i % 4 == 0:
            d.load(i, 256 * KiB, d.copies[1])
    d.synchronize()
    del keep
    return {"pageable_memory": sum(durations) - usual(pinned) * len(durations)}


@program(like=("pageable_memory", "small_copies"))
def pinned_copies_with_pauses(d: Device) -> Truth:
    for i in range(300):
        d.load(i, 64 * KiB, d.copies[0])
        if i % 30 == 29:
            time.sleep(0.001)
    d.synchronize()
    return {}


@program("allocation_on_hot_path")
def pinned_memory_for_every_step(d: Device) -> Truth:
    lost = 0
    for i in range(60):
        d.load(i, 64 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], i)
        d.launch(100_000)
    for i in range(12):
        begin = now()
        memory = d.made("cudaHostAlloc", 8 * MiB, 0)
        d.check(d.lib.cudaFreeHost(memory))
        lost += now() - begin
        d.load(i, 64 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], i)
        d.launch(100_000)
    d.drain()
    return {"allocation_on_hot_path": lost}


@program(like=("allocation_on_hot_path",))
def pinned_memory_before_the_first_step(d: Device) -> Truth:
    for _ in range(4):
        d.made("cudaHostAlloc", 16 * MiB, 0)
    time.sleep(0.02)
    for i in range(200):
        d.load(i, 64 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], i)
        d.launch(60_000)
    d.synchronize()
    return {}


@program("pinning_stall", "allocation_on_hot_path")
def memory_registered_while_others_copy(d: Device) -> Truth:
    keep, at = pageable(256 * MiB)
    slow: list[int] = []
    spent: list[int] = []
    ready = threading.Event()

    def register() -> None:
        for i in range(40):
            d.load(i, 4 * KiB, d.copies[2])
        ready.set()
        begin = now()
        d.check(d.lib.cudaHostRegister(at, 256 * MiB, 0))
        spent.append(now() - begin)
        d.load(1, 4 * KiB, d.copies[2])
        begin = now()
        d.check(d.lib.cudaHostUnregister(at))
        spent.append(now() - begin)
        d.load(1, 4 * KiB, d.copies[2])

    thread = in_thread(register)
    ready.wait()
    while thread.is_alive():
        begin = now()
        d.event()
        slow.append(now() - begin)
        slow.append(d.load(1, 4 * KiB, d.copies[3]))
        time.sleep(0.0003)
    thread.join()
    d.synchronize()
    del keep
    return {"pinning_stall": beyond(slow, 1_000_000), "allocation_on_hot_path": sum(spent)}


def scattered(d: Device, calls: int, blocks: int, size: int) -> list[int]:
    places = [i * 7919 % (d.size // size) * size for i in range(blocks)]
    dst, src = [d.device + at for at in places], [d.host + at for at in places]
    durations = []
    for _ in range(calls):
        durations.append(d.batch(dst, src, size, d.copies[0]))
        d.sync(d.copies[0])
    return durations


@program("descriptor_bound_batch")
def batches_of_many_small_blocks(d: Device) -> Truth:
    return {"descriptor_bound_batch": sum(scattered(d, 6, 6_000, 4 * KiB))}


@program(like=("descriptor_bound_batch",))
def batches_of_a_few_large_blocks(d: Device) -> Truth:
    scattered(d, 40, 24, 512 * KiB)
    return {}


# ---- bytes ----------------------------------------------------------------------------------------------------------


@program("redundant_loads")
def the_same_blocks_loaded_for_every_request(d: Device) -> Truth:
    size, blocks, lost = d.bytes_of(40), 24, 0
    for request in range(10):
        begin = d.mark(d.copies[0])
        for block in range(blocks):
            at = block * size
            d.copy(d.device + at, d.host + at, size, H2D, d.copies[0])
        end = d.mark(d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(300_000)
        d.drain()
        lost += d.between(begin, end) if request else 0
    return {"redundant_loads": lost}


@program("redundant_loads")
def a_prefix_loaded_twice_at_once(d: Device) -> Truth:
    size = d.bytes_of(60)
    begin = end = 0
    for request in range(5):
        for block in range(8):
            at, to = block * size, (request * 8 + block) * size
            if request == 1 and not block:
                begin = d.mark(d.copies[0])
            d.copy(d.device + to % (d.size - size), d.host + at, size, H2D, d.copies[0])
    end = d.mark(d.copies[0])
    d.synchronize()
    return {"redundant_loads": d.between(begin, end)}


@program(like=("redundant_loads",))
def blocks_loaded_again_after_they_were_evicted(d: Device) -> Truth:
    size = d.bytes_of(40)
    for request in range(10):
        for slot in range(8):
            block = slot + 8 * (request % 3)
            d.copy(d.device + slot * size, d.host + block * size, size, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(900_000)
        d.drain()
    return {}


@program("wasted_stores", also=("gpu_starved",))  # it asks whether the step is over, and launches late
def stores_that_nobody_loads(d: Device) -> Truth:
    size = d.bytes_of(40)
    lost = 0
    for step in range(12):
        d.launch(1_500_000)
        d.order(d.copies[1], d.compute, step)
        begin = d.mark(d.copies[1])
        for block in range(16):
            d.store(block, size, d.copies[1])
        end = d.mark(d.copies[1])
        d.order(d.copies[0], d.copies[1], step + 100)
        d.load(step % 2, size, d.copies[0])  # of sixteen blocks one comes back
        d.order(d.compute, d.copies[0], step + 50)
        d.drain()
        lost += d.between(begin, end) * 15 // 16 if step < 11 else 0
    return {"wasted_stores": lost}


@program(like=("wasted_stores",))
def stores_that_are_loaded_again(d: Device) -> Truth:
    size = d.bytes_of(40)
    for step in range(12):
        d.launch(1_500_000)
        d.order(d.copies[1], d.compute, step)
        for block in range(16):
            d.store(16 * (step % 2) + block, size, d.copies[1])
        d.order(d.copies[0], d.copies[1], step + 100)
        for block in range(16):
            d.load(16 * (step % 2) + block, size, d.copies[0])
        d.order(d.compute, d.copies[0], step + 50)
    d.synchronize()
    return {}


@program("small_copies")
def thousands_of_small_stores(d: Device) -> Truth:
    d.load(0, 16 * MiB, d.copies[0])
    d.store(0, 16 * MiB, d.copies[0])
    begin = d.mark(d.copies[0])
    d.store(0, 16 * MiB, d.copies[0])
    end = d.mark(d.copies[0])
    d.drain()
    per_ns = 16 * MiB / d.between(begin, end)
    lost = 0
    for _ in range(6):
        # Behind a kernel, so that they run one after another and the two events tell what they take.
        d.launch(8_000_000)
        d.order(d.copies[0], d.compute, 0)
        first = d.mark(d.copies[0])
        for i in range(700):
            d.store(i * 37, 4 * KiB, d.copies[0])
        last = d.mark(d.copies[0])
        d.drain()
        lost += d.between(first, last) - int(700 * 4 * KiB / per_ns)
    return {"small_copies": lost}


def blocks_one_by_one(d: Device, stride: int) -> int:
    """Loads of 4 KiB, every `stride`-th block, in bursts that fit the queue: ns in all calls but each burst's first."""
    nothing = usual([d.load(i, 0, d.copies[3]) for i in range(200)])  # what Python and ctypes take of a call
    durations: list[int] = []
    for burst in range(20):
        first = 800 * burst if stride == 1 else 37 * burst
        durations += [d.load(first + stride * i, 4 * KiB, d.copies[0]) for i in range(800)][1:]
        d.drain()
    return (usual(durations) - nothing) * len(durations)


@program("unmerged_neighbours", also=("small_copies",))
def neighbours_copied_one_by_one(d: Device) -> Truth:
    return {"unmerged_neighbours": blocks_one_by_one(d, 1)}


@program(like=("unmerged_neighbours",), also=("small_copies", "redundant_loads"))  # of a small pool they come again
def scattered_blocks_copied_one_by_one(d: Device) -> Truth:
    blocks_one_by_one(d, 2_048 + 3)
    return {}


@program(like=("small_copies",))
def copies_that_are_large_enough(d: Device) -> Truth:
    size = d.bytes_of(80)
    for step in range(10):
        for i in range(20):
            d.load(20 * step + i, size, d.copies[0])
        d.order(d.compute, d.copies[0], step)
        d.launch(2_200_000)
    d.synchronize()
    return {}


def layers(
    d: Device, steps: int, copy_us: float, compute_ns: int, ahead: int, tries_alone: int = 3
) -> tuple[int, int, int]:
    """Weights of six layers, of two sizes, through `ahead + 1` buffers: span, copying and computing, ns."""
    sizes = [d.bytes_of(copy_us * (1.5 if layer % 3 == 0 else 0.75)) for layer in range(6)]
    source = [sum(sizes[:layer]) for layer in range(6)]
    slots = [i * max(sizes) for i in range(ahead + 1)]
    marks = []
    # What a layer takes by itself.
    tries = [0] if not tries_alone else []
    for _ in range(tries_alone):
        alone = d.mark(d.copies[0])
        for layer in range(6):
            d.copy(d.device, d.host + source[layer], sizes[layer], H2D, d.copies[0])
        alone_end = d.mark(d.copies[0])
        d.drain()
        tries.append(d.between(alone, alone_end))
    copying = steps * min(tries)
    whole = d.mark(d.copies[0])
    d.order(d.compute, d.copies[0], 200)
    number = 0
    for _ in range(steps):
        for layer in range(6):
            slot = number % (ahead + 1)
            if number > ahead:  # the buffer is free when the layer that used it has computed
                d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[100 + slot], 0))
            d.copy(d.device + slots[slot], d.host + source[layer], sizes[layer], H2D, d.copies[0])
            d.order(d.compute, d.copies[0], slot)
            d.launch(compute_ns)
            d.record(100 + slot, d.compute)
            number += 1
    last = d.mark(d.compute)
    marks.append(last)
    d.drain()
    return d.between(whole, last), copying, number * compute_ns


@program("weights_not_overlapped")
def weights_copied_just_before_they_are_used(d: Device) -> Truth:
    span, copying, computing = layers(d, 12, 400, 350_000, 0)
    return {"weights_not_overlapped": min(copying, computing) - max(copying + computing - span, 0)}


@program("weights_not_overlapped")
def weights_copied_on_the_compute_stream(d: Device) -> Truth:
    sizes = [d.bytes_of(300 + 200 * (layer % 2)) for layer in range(6)]
    begin, copying = d.mark(d.compute), 0
    pairs = []
    for _ in range(12):
        for layer in range(6):
            first = d.mark(d.compute)
            d.copy(d.device, d.host + sum(sizes[:layer]), sizes[layer], H2D, d.compute)
            pairs.append((first, d.mark(d.compute)))
            d.launch(300_000)
    end = d.mark(d.compute)
    d.drain()
    copying = sum(d.between(*pair) for pair in pairs)
    computing = 72 * 300_000
    return {"weights_not_overlapped": min(copying, computing) - max(copying + computing - d.between(begin, end), 0)}


@program(like=("weights_not_overlapped", "load_not_ordered"))
def weights_prefetched_through_two_buffers(d: Device) -> Truth:
    layers(d, 12, 150, 400_000, 1)
    return {}


@program("link_bound")
def prefetch_that_the_link_cannot_keep_up_with(d: Device) -> Truth:
    span, _, computing = layers(d, 12, 500, 120_000, 1, tries_alone=0)
    return {"link_bound": span - computing}


@program("head_of_line_copies")
def small_copies_behind_a_burst(d: Device) -> Truth:
    size, waited = d.bytes_of(150), 0
    for step in range(8):
        for i in range(20):
            d.load(20 * step + i, size, d.copies[0])
        begin = now()
        d.load(step, 4 * KiB, d.copies[1])
        d.record(0, d.copies[1])
        d.sync_event(0)
        waited += now() - begin
        d.drain()
    return {"head_of_line_copies": waited}


@program(like=("head_of_line_copies",))
def small_copies_before_a_burst(d: Device) -> Truth:
    size = d.bytes_of(150)
    for step in range(8):
        d.load(step, 4 * KiB, d.copies[1])
        d.order(d.compute, d.copies[1], step)
        for i in range(10):
            d.load(20 * step + i, size, d.copies[0])
        d.launch(1_500_000)
        d.drain()
    return {}


# ---- the interpreter and the host -----------------------------------------------------------------------------------


def against_the_lock(submit: Callable[[int], object], times: int) -> int:
    """Submits and sleeps 0.1 ms, while two other threads compute in Python: ns that it took beyond the sleeps.

    A thread that comes back from a sleep, as a poller does, gets the interpreter's lock when its holder must give it
    up: after the switch interval, 5 ms.
    """
    begin = now()
    for _ in range(20):
        time.sleep(0.0001)
    alone = (now() - begin) // 20
    stop = threading.Event()

    def spin() -> None:
        x = 0
        while not stop.is_set():
            for _ in range(2_000):
                x += 1

    threads = [in_thread(spin) for _ in range(2)]
    begin = now()
    for i in range(times):
        submit(i)
        time.sleep(0.0001)
    took = now() - begin
    stop.set()
    for thread in threads:
        thread.join()
    return took - times * alone


@program("python_or_gil_bound")
def copies_submitted_while_other_threads_hold_the_lock(d: Device) -> Truth:
    size = d.bytes_of(20)
    lost = against_the_lock(lambda i: d.load(i, size, d.copies[0]), 60)
    d.drain()
    return {"python_or_gil_bound": lost}


@program("python_or_gil_bound")
def launches_while_other_threads_hold_the_lock(d: Device) -> Truth:
    lost = against_the_lock(lambda _: d.launch(200_000), 50)
    d.synchronize()
    return {"python_or_gil_bound": lost}


@program(like=("python_or_gil_bound",), also=("redundant_loads",))  # both threads load the same blocks
def copies_by_two_threads_that_do_not_compute(d: Device) -> Truth:
    def submit(stream: int) -> None:
        for i in range(400):
            d.load(i, 64 * KiB, stream)
            if i % 20 == 19:
                time.sleep(0.003)

    thread = in_thread(lambda: submit(d.copies[0]))
    submit(d.copies[1])
    thread.join()
    d.synchronize()
    return {}


@program("gpu_starved")
def long_preparation_of_each_step(d: Device) -> Truth:
    lost = 0
    for _ in range(15):
        d.launch(3_000_000)
        d.sync(d.compute)
        begin = now()
        time.sleep(0.0123)
        lost += now() - begin
    d.launch(3_000_000)
    d.synchronize()
    return {"gpu_starved": lost}


@program(like=("gpu_starved", "python_or_gil_bound"))
def steps_prepared_ahead(d: Device) -> Truth:
    for step in range(20):
        d.launch(8_000_000)
        d.record(step, d.compute)
        time.sleep(0.004)
        if step > 1:
            d.sync_event(step - 2)
    d.synchronize()
    return {}


# ---- results at stake -----------------------------------------------------------------------------------------------


@program("load_not_ordered")
def loads_that_no_kernel_waits_for(d: Device) -> Truth:
    size = d.bytes_of(100)
    for step in range(8):
        for i in range(6):
            d.load(6 * step + i, size, d.copies[0])
        d.launch(4_000_000)
    d.synchronize()
    return {"load_not_ordered": 0}


@program("store_not_ordered")
def stores_that_wait_for_no_kernel(d: Device) -> Truth:
    size = d.bytes_of(50)
    for step in range(8):
        d.launch(4_000_000)
        for i in range(6):
            d.store(6 * step + i, size, d.copies[1])
    d.synchronize()
    return {"store_not_ordered": 0}


@program(like=("store_not_ordered", "load_not_ordered"))
def an_ordered_offload_beside_a_model(d: Device) -> Truth:
    size = d.bytes_of(40)
    for step in range(15):
        for i in range(8):
            d.load(16 * step + i, size, d.copies[0])
        d.order(d.compute, d.copies[0], 2 * step)
        for _ in range(5):
            d.launch(300_000)
        d.order(d.copies[1], d.compute, 2 * step + 1)
        for i in range(8):
            d.store(16 * step + 8 + i, size, d.copies[1])
    d.synchronize()
    return {}


# ---- two causes at once ---------------------------------------------------------------------------------------------


@program("fence_before_copies", "launch_queue_saturation", "pageable_memory")
def a_fence_and_pageable_copies(d: Device) -> Truth:
    return large_pageable_copies(d) | stores_behind_a_forward(d)


@program("synchronisation", "allocation_on_hot_path")
def waits_and_allocations(d: Device) -> Truth:
    return a_wait_after_every_load(d) | pinned_memory_for_every_step(d)


@program("launch_queue_saturation", "pageable_memory")
def full_of_launches_and_small_pageable_copies(d: Device) -> Truth:
    return small_pageable_copies(d) | launches_without_any_copy(d)


@program("synchronisation", "redundant_loads")
def waits_for_blocks_that_were_there(d: Device) -> Truth:
    size, waited, blocks, lost = d.bytes_of(50), 0, 8, 0
    for request in range(20):
        begin = d.mark(d.copies[0])
        for block in range(blocks):
            d.copy(d.device + block * size, d.host + block * size, size, H2D, d.copies[0])
        end = d.mark(d.copies[0])
        waited += d.sync(d.copies[0])
        lost += d.between(begin, end) if request else 0
        d.launch(700_000)
    d.launch(100_000)
    d.synchronize()
    return {"synchronisation": waited, "redundant_loads": lost}


@program("python_or_gil_bound", "pageable_memory")
def the_lock_and_pageable_copies(d: Device) -> Truth:
    return large_pageable_copies(d) | copies_submitted_while_other_threads_hold_the_lock(d)


@program("weights_not_overlapped", "synchronisation")
def unhidden_weights_and_a_result_in_every_step(d: Device) -> Truth:
    return weights_copied_just_before_they_are_used(d) | a_result_read_back_in_every_step(d)


@program("wasted_stores", "synchronisation")
def wasted_stores_and_waits_for_them(d: Device) -> Truth:
    size, waited, lost = d.bytes_of(60), 0, 0
    for step in range(12):
        d.launch(900_000)
        d.order(d.copies[1], d.compute, step)
        begin = d.mark(d.copies[1])
        for block in range(8):
            d.store(block, size, d.copies[1])
        end = d.mark(d.copies[1])
        waited += d.sync(d.copies[1])
        d.load(step % 2, size, d.copies[0])
        d.order(d.compute, d.copies[0], step + 50)
        lost += d.between(begin, end) * 7 // 8 if step < 11 else 0
    d.launch(60_000)
    d.synchronize()
    return {"wasted_stores": lost, "synchronisation": waited}


import blind_shapes  # noqa: E402, F401 - they register their programs
import eighteenth_shapes  # noqa: E402, F401
import eighth_shapes  # noqa: E402, F401
import eleventh_shapes  # noqa: E402, F401
import fifteenth_shapes  # noqa: E402, F401
import fourteenth_shapes  # noqa: E402, F401
import fresh_shapes  # noqa: E402, F401
import later_shapes  # noqa: E402, F401
import misjudged_shapes  # noqa: E402, F401
import nineteenth_shapes  # noqa: E402, F401
import ninth_shapes  # noqa: E402, F401
import other_shapes  # noqa: E402, F401
import served_shapes  # noqa: E402, F401
import seventeenth_shapes  # noqa: E402, F401
import seventh_shapes  # noqa: E402, F401
import sixteenth_shapes  # noqa: E402, F401
import sixth_shapes  # noqa: E402, F401
import tenth_shapes  # noqa: E402, F401
import thirteenth_shapes  # noqa: E402, F401
import twelfth_shapes  # noqa: E402, F401
import twentieth_shapes  # noqa: E402, F401
import twentyfifth_shapes  # noqa: E402, F401
import twentyfirst_shapes  # noqa: E402, F401
import twentyfourth_shapes  # noqa: E402, F401
import twentysecond_shapes  # noqa: E402, F401
import twentysixth_shapes  # noqa: E402, F401
import twentythird_shapes  # noqa: E402, F401
import unseen_shapes  # noqa: E402, F401


def prepare(name: str, device: Device) -> None:
    """What a program wants done before its recording begins, where the recorder can wait for it."""
    one = PROGRAMS[name]
    if one.line:
        fill(device)
        device.spent = Spent(device)
    if one.prepare:
        one.prepare(device)


def run(name: str, device: Device | None = None) -> dict[str, object]:
    """Runs one program, prepared already if a device is given, and returns what it says of itself."""
    one = PROGRAMS[name]
    if device is None:
        device = Device()
        prepare(name, device)
    said: dict[str, object] = {"program": name, "device": "gpu" if device.gpu else "host"}
    if one.line:
        device.spent.restart()
    begin = now()
    lost = one.body(device)
    device.synchronize()
    end = now()
    said |= {"lost_ns": lost, "span_ns": end - begin, "end_ns": end}
    if one.line:
        lines = {"line": one.line, "or_lines": one.or_lines}
        said |= {**lines, "healthy": one.healthy, "why": one.why, "account": device.spent.account()}
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=[*PROGRAMS])
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or not options.name:
        for one in PROGRAMS.values():
            faults = ", ".join(filter(None, (*one.causes, one.line)))
            said = "healthy, like " + ", ".join(one.like) if one.healthy else faults
            print(f"{one.name:60} {said}")
        return
    print(json.dumps(run(options.name)))


if __name__ == "__main__":
    main()
