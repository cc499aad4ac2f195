"""Programs of other shapes than those the diagnosis was made with: the same diseases, other ways to write them."""

from __future__ import annotations

import ctypes as ct
import json
import subprocess
import sys
import time
from pathlib import Path

from device import D2H, H2D, Device, now
from registry import KiB, MiB, Truth, blocked, in_thread, pageable, program, usual


def gate(d: Device, us: int, stream: int) -> None:
    """A host function in the stream: it stands still for so long."""
    sleep = ct.cast(ct.CDLL(None).usleep, ct.c_void_p)
    d.lib.cudaLaunchHostFunc.argtypes = [ct.c_void_p] * 3
    d.check(d.lib.cudaLaunchHostFunc(stream, sleep, us))


@program("fence_before_copies", "launch_queue_saturation")
def stores_behind_a_host_function(d: Device) -> Truth:
    lost = [0, 0]
    for _ in range(2):
        gate(d, 30_000, d.copies[3])
        size = d.bytes_of(10)
        durations = [d.store(i, size, d.copies[3]) for i in range(1_800)]
        lost = [a + b for a, b in zip(lost, blocked(durations), strict=True)]
        d.drain()
    return {"fence_before_copies": lost[0], "launch_queue_saturation": lost[1]}


@program("launch_queue_saturation", also=("redundant_loads",))  # both load the same blocks
def two_threads_that_feed_one_stream(d: Device) -> Truth:
    size = d.bytes_of(25)

    def feed() -> None:
        for i in range(1_400):
            d.load(i, size, d.copies[2])

    thread = in_thread(feed)
    feed()
    thread.join()
    d.synchronize()
    return {"launch_queue_saturation": 0}  # each thread's own times are also those of the interpreter's lock


@program("launch_queue_saturation")
def loads_on_the_default_stream(d: Device) -> Truth:
    size = d.bytes_of(20)
    durations = [d.load(i, size, 0) for i in range(2_200)]
    d.synchronize()
    return {"launch_queue_saturation": sum(blocked(durations))}


@program(like=("descriptor_bound_batch", "launch_queue_saturation"), also=("weights_not_overlapped",))
def batches_and_single_copies_that_fit(d: Device) -> Truth:
    size, places = d.bytes_of(30), [i * 512 * KiB for i in range(24)]
    dst, src = [d.device + at for at in places], [d.host + at for at in places]
    for request in range(12):
        d.batch(dst, src, 256 * KiB, d.copies[0])
        for i in range(60):
            d.load(61 * request + i, size, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(2_000_000)
        d.drain()
    return {}


@program(like=("launch_queue_saturation", "small_copies"))
def copies_at_a_high_rate(d: Device) -> Truth:
    for burst in range(15):
        for i in range(400):
            d.load(400 * burst + i, 96 * KiB, d.copies[i % 2])
        d.drain()
    return {}


@program("pageable_memory", also=("synchronisation",))
def a_number_read_back_in_every_step(d: Device) -> Truth:
    """As `tensor.item()`: a few bytes to pageable memory, which holds the caller until the step is over."""
    keep, at = pageable(4 * KiB)
    pinned = [d.load(i, 4 * KiB, d.copies[1]) for i in range(60)]
    durations = []
    for _ in range(60):
        for _ in range(5):
            d.launch(80_000)
        durations.append(d.copy(at, d.device, 4, D2H, d.compute))
        d.sync(d.compute)
    d.launch(30_000)
    d.synchronize()
    del keep
    return {"pageable_memory": sum(durations) - usual(pinned) * len(durations)}


@program("synchronisation")
def an_event_waited_for_after_every_copy(d: Device) -> Truth:
    size, waited = d.bytes_of(140), 0
    for i in range(120):
        d.load(i, size, d.copies[i % 4])
        d.record(i, d.copies[i % 4])
        waited += d.sync_event(i)
        d.launch(200_000)
    d.launch(30_000)
    d.drain()
    return {"synchronisation": waited}


@program("allocation_on_hot_path", also=("synchronisation",))
def memory_pinned_for_each_request(d: Device) -> Truth:
    keep, at = pageable(4 * MiB)
    lost = 0
    for i in range(60):
        d.load(i, 64 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], i)
        d.launch(60_000)
    for _ in range(25):
        begin = now()
        d.check(d.lib.cudaHostRegister(at, 4 * MiB, 0))
        lost += now() - begin
        d.copy(d.device, at, 4 * MiB, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], 3)
        d.launch(100_000)
        d.drain()
        begin = now()
        d.check(d.lib.cudaHostUnregister(at))
        lost += now() - begin
    d.launch(10_000)
    d.drain()
    del keep
    return {"allocation_on_hot_path": lost}


@program("fence_before_copies", "launch_queue_saturation", "synchronisation", "pageable_memory")
def a_fence_waits_and_pageable_copies(d: Device) -> Truth:
    d.launch(20_000_000)
    d.order(d.copies[0], d.compute, 0)
    size = d.bytes_of(10)
    fence, rest = blocked([d.store(i, size, d.copies[0]) for i in range(2_000)])
    d.drain()
    block, waited = d.bytes_of(120), 0
    for i in range(100):
        d.load(i, block, d.copies[1])
        waited += d.sync(d.copies[1])
        d.launch(150_000)
    keep, at = pageable(4 * MiB)
    held = sum(d.copy(d.device, at, 4 * MiB, H2D, d.copies[2]) for _ in range(10))
    d.launch(30_000)
    d.drain()
    del keep
    return {
        "fence_before_copies": fence,
        "launch_queue_saturation": rest,
        "synchronisation": waited,
        "pageable_memory": held,
    }


@program(like=("launch_queue_saturation", "synchronisation", "gpu_starved"))
def a_short_recording(d: Device) -> Truth:
    for i in range(40):
        d.load(i, 64 * KiB, d.copies[0])
    d.order(d.compute, d.copies[0], 0)
    d.launch(100_000)
    d.sync(d.compute)
    return {}


@program(like=("synchronisation", "python_or_gil_bound"))
def completions_polled_between_steps(d: Device) -> Truth:
    size = d.bytes_of(50)
    for step in range(40):
        for i in range(4):
            d.load(4 * step + i, size, d.copies[step % 3])
        d.record(step, d.copies[step % 3])
        d.order(d.compute, d.copies[step % 3], 100 + step)
        d.launch(1_000_000)
        for _ in range(20):
            d.lib.cudaEventQuery(d.events[step])
        if step > 2:
            d.sync(d.compute) if step % 10 == 0 else time.sleep(0.0005)
    d.drain()
    return {}


@program("launch_queue_saturation", forms=("run",))
def processes_that_each_fill_a_queue(_: Device) -> Truth:
    command = [sys.executable, str(Path(__file__).with_name("programs.py")), "loads_on_one_stream"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    said = [json.loads(child.communicate()[0])["lost_ns"]["launch_queue_saturation"] for child in children]
    return {"launch_queue_saturation": sum(said)}


@program("context_lock_stall", "fence_before_copies", "launch_queue_saturation")
def memory_allocated_while_another_thread_is_blocked(d: Device) -> Truth:
    gate(d, 60_000, d.copies[0])
    size = d.bytes_of(10)
    durations: list[int] = []
    thread = in_thread(lambda: durations.extend(d.store(i, size, d.copies[0]) for i in range(1_200)))
    time.sleep(0.02)
    begin = now()
    d.made("cudaMalloc", 1 * MiB)
    took = now() - begin
    thread.join()
    d.synchronize()
    fence, rest = blocked(durations)
    return {"context_lock_stall": took, "fence_before_copies": fence, "launch_queue_saturation": rest}
