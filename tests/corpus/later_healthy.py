"""Healthy programs of later shapes: the device computes, or nobody asked for anything."""

from __future__ import annotations

import ctypes as ct
import queue
import time

from accounts import Pool, paced, stamp
from device import D2H, H2D, Device
from registry import AT_LINK_RATE, COMPUTING, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, program


@program(line=COMPUTING, like=("redundant_loads", "small_copies", "unmerged_neighbours"))
def decode_with_small_inputs_rewritten_in_each_step(d: Device) -> Truth:
    """Five small inputs, rewritten by the CPU, go to the same places in each step, in front of 2 ms of kernels."""
    sizes = [512, 2 * KiB, 8 * KiB, 4 * KiB, 64]
    for step in range(150):
        for i, size in enumerate(sizes):
            at = (step % 4 * 8 + i) * 64 * KiB  # four sets take turns: none is rewritten before its copy is over
            stamp(d, at, size, 5 * step + i)
            d.copy(d.device + i * 64 * KiB, d.host + at, size, H2D, d.compute)
        for _ in range(8):
            d.launch(250_000)
        paced(d, step, 2)
    return {}


@program(line=COMPUTING, like=("synchronisation", "gpu_starved"))
def decode_whose_tokens_are_read_back_in_each_step(d: Device) -> Truth:
    """Each step of 3 ms ends with the read-back of its tokens and a wait; the next one is launched at once."""
    for step in range(110):
        for _ in range(6):
            d.launch(500_000)
        d.copy(d.host + step % 8 * 4096, d.device, 512, D2H, d.compute)
        d.sync(d.compute)
    return {}


@program(line=COMPUTING, like=("weights_not_overlapped", "link_bound", "load_not_ordered"))
def layers_prefetched_through_three_buffers(d: Device) -> Truth:
    """Weights come two layers ahead through three buffers in half the time that a layer computes."""
    pool = Pool(d, d.bytes_of(200))
    for layer in range(600):
        if layer > 2:
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[200 + layer % 3], 0))
        pool.fetch(layer % 3, layer, d.copies[0])
        d.order(d.compute, d.copies[0], layer % 64)
        d.launch(400_000)
        d.record(200 + layer % 3, d.compute)
        paced(d, layer, 5)
    return {}


@program(line=COMPUTING, or_lines=(AT_LINK_RATE,), like=("small_copies", "unmerged_neighbours", "synchronisation"))
def a_prefix_that_comes_in_three_copies(d: Device) -> Truth:
    """What others load as 700 blocks lies together and comes in three copies before each prefill of 3 ms.

    Nothing hides the copies: they take 7% of the time, the most that a program here loses and is called healthy.
    """
    pool = Pool(d, 4 * MiB if d.gpu else 256 * KiB)
    for request in range(90):
        side = request % 2 * 3
        for i in range(3):
            pool.fetch(side + i, 3 * request + i, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(3_000_000)
        d.order(d.copies[0], d.compute, 100 + request % 20)
        paced(d, request, 1)
    return {}


def serve(d: Device, steps: int, number: int) -> None:
    for step in range(steps):
        d.load(step + 100 * number, 256 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], step)
        d.launch(1_500_000)
        d.launch(1_500_000)
        d.copy(d.host, d.device, 1 * KiB, D2H, d.compute)
        d.sync(d.compute)


@program(line=NOTHING_TO_DO, like=("gpu_starved", "python_or_gil_bound"))
def a_server_that_sleeps_because_nobody_asked(d: Device) -> Truth:
    """Bursts of 24 ms of work, and between them the server sleeps for 90 ms because there is no request."""
    for burst in range(6):
        serve(d, 8, burst)
        with d.spent.on(NOTHING_TO_DO):
            time.sleep(0.09)
    serve(d, 8, 6)
    return {}


@program(line=NOTHING_TO_DO, like=("gpu_starved", "python_or_gil_bound", "cpu_starved", "synchronisation"))
def a_server_that_waits_at_an_empty_queue(d: Device) -> Truth:
    """Requests come every 70 ms or so through a queue of another thread; each takes 15 ms, then the queue is empty."""
    requests: queue.Queue[int] = queue.Queue()

    def clients() -> None:
        for pause in (60, 85, 70, 40, 95, 75, 60, 0):
            time.sleep(pause / 1_000)
            requests.put(pause)

    thread, number = in_thread(clients), 0
    d.spent.restart()
    while True:
        with d.spent.on(NOTHING_TO_DO):
            pause = requests.get()
        number += 1
        serve(d, 5, number)
        if not pause:
            break
    thread.join()
    return {}


@program(line=COMPUTING, like=("allocation_on_hot_path", "first_calls", "pinning_stall"))
def start_up_that_pins_and_loads_modules_then_computes(d: Device) -> Truth:
    """120 ms of pinning, registering and module loading at the start, then 400 ms of kernels and small copies."""
    kept = [d.made("cudaHostAlloc", 48 * MiB, 0) for _ in range(3 if d.gpu else 1)]
    kept.append(d.made("cudaMalloc", 64 * MiB if d.gpu else MiB))
    for _ in range(3):
        d.another_module()
    for i in range(6):
        d.copy(d.device, kept[0] + i * 8 * MiB, 8 * MiB, H2D, d.copies[0])
    d.sync(d.copies[0])
    d.spent.restart()
    for step in range(130):
        d.load(step, 128 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], step % 60)
        for _ in range(3):
            d.launch(1_000_000)
        paced(d, step)
    d.sync(d.compute)
    d.spent.stop()
    return {}


@program(line=COMPUTING, like=("allocation_on_hot_path", "context_lock_stall"))
def workspaces_out_of_the_stream_ordered_pool(d: Device) -> Truth:
    """Each step takes its workspace from cudaMallocAsync's pool and gives it back: no call waits."""
    d.lib.cudaMallocAsync.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_void_p]
    d.lib.cudaFreeAsync.argtypes = [ct.c_void_p, ct.c_void_p]
    d.check(d.lib.cudaFreeAsync(d.made("cudaMallocAsync", 64 * MiB if d.gpu else MiB, d.compute), d.compute))
    d.sync(d.compute)
    d.spent.restart()
    for step in range(160):
        workspace = d.made("cudaMallocAsync", 16 * MiB if d.gpu else 64 * KiB, d.compute)
        d.load(step, 32 * KiB, d.compute)
        for _ in range(4):
            d.launch(450_000)
        d.check(d.lib.cudaFreeAsync(workspace, d.compute))
        paced(d, step)
    return {}


@program("failed_calls", line=COMPUTING, like=("unexplained", "pageable_memory", "synchronisation"))
def copies_that_fail_and_are_passed_over(d: Device) -> Truth:
    """In each step two copies are refused (no such address, no such direction); the program goes on computing."""
    refused = 0
    for step in range(140):
        refused += d.lib.cudaMemcpyAsync(None, d.host, 64 * KiB, H2D, d.copies[0]) != 0
        refused += d.lib.cudaMemcpyAsync(d.device, d.host, 64 * KiB, 9, d.copies[0]) != 0
        d.lib.cudaGetLastError()
        d.load(step, 64 * KiB, d.copies[0])
        d.order(d.compute, d.copies[0], step % 60)
        for _ in range(3):
            d.launch(700_000)
        paced(d, step)
    if not refused:
        raise RuntimeError("none of the impossible copies was refused")
    return {"failed_calls": 0}


@program(line=COMPUTING, like=("synchronisation", "small_copies", "weights_not_overlapped"), needs_gpu=True)
def decode_by_graphs_alone(d: Device) -> Truth:
    """A step is one graph: its small inputs' copies and eight kernels; 150 launches of it, inputs rewritten."""

    def step_once() -> None:
        for i in range(3):
            d.copy(d.device + i * 64 * KiB, d.host + i * 64 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(8):
            d.launch(250_000)

    graph = d.graph(step_once)
    d.spent.restart()
    for step in range(150):
        stamp(d, step % 3 * 64 * KiB, 4 * KiB, step)
        d.replay(graph, 2_000_000)
        d.copy(d.host + MiB, d.device, 512, D2H, d.compute)
        paced(d, step, 1)
    return {}
