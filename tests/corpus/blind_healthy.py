"""Blind programs that are healthy: metrics, offload in layers, pauses, drafts, two stages, graphs, a start-up."""

from __future__ import annotations

import ctypes as ct
import hashlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from accounts import Pool, paced, stamp
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, blind_program, in_thread, pageable


@blind_program(
    line=COMPUTING,
    like=("context_lock_stall", "blocking_server_call", "synchronisation", "python_or_gil_bound"),
    also=("wasted_stores",),
)
def metrics_polled_beside_decode(d: Device) -> Truth:
    """A thread asks for free memory every 5 ms; decode is a step ahead of its tokens, and does not notice."""
    stop, free, total = threading.Event(), ct.c_size_t(), ct.c_size_t()
    d.lib.cudaMemGetInfo.argtypes = [ct.c_void_p, ct.c_void_p]

    def poll() -> None:
        while not stop.wait(0.005):
            d.check(d.lib.cudaMemGetInfo(ct.byref(free), ct.byref(total)))

    thread = in_thread(poll)
    for step in range(330):
        d.launch(1_000_000)
        d.launch(1_000_000)
        d.copy(d.host + step % 4 * 4096, d.device, 1 * KiB, D2H, d.compute)
        paced(d, step, 1)
    stop.set()
    thread.join()
    return {}


@blind_program(
    line=COMPUTING,
    like=("launch_queue_saturation", "fence_before_copies", "small_copies", "redundant_loads", "store_not_ordered"),
    also=("unmerged_neighbours", "wasted_stores"),
)
def kv_offloaded_layer_by_layer_and_partly_restored(d: Device) -> Truth:
    """Thirty layers' KV leave behind their kernels, five steps deep; every fifth step an older one's come back."""
    pool, layers, sets, n = Pool(d, d.bytes_of(15)), 30, 4, 0
    out, back = d.copies[1], d.copies[2]
    for step in range(300):
        restoring = step % 5 == 4  # each of the four sets in its turn
        if restoring:
            d.order(back, out, 100 + step % 8)
            d.order(back, d.compute, 108 + step % 8)
            for layer in range(layers):
                pool.fetch(layers + layer, (step - 2) % sets * layers + layer, back)
        for layer in range(layers):
            clear(d, d.device + layer * pool.size, (step + layer) % 251, pool.size // 4, d.compute)
            clear(d, d.device + layer * pool.size, step // 251 + 1, 4 * KiB, d.compute)
            d.launch(70_000)
            d.order(out, d.compute, n % 96)
            home = d.host + (step % sets * layers + layer) * pool.size
            d.copy(home, d.device + layer * pool.size, pool.size, D2H, out)
            n += 1
        d.order(d.compute, out, 116 + step % 8)  # all but the last store is long over
        if restoring:
            d.order(d.compute, back, 200 + step % 8)
        paced(d, step, 5)
    return {}


@blind_program(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "cpu_starved", "python_or_gil_bound", "synchronisation"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone: 40 ms in `recv` look like 40 ms of work
)
def requests_over_a_socket_with_pauses(d: Device) -> Truth:
    """A client thinks for 40 ms after each answer; the server waits in `recv`, then decodes ten steps a step ahead."""
    server, client = socket.socketpair()

    def ask() -> None:
        for _ in range(16):
            time.sleep(0.04)
            client.sendall(b"?" * 64)
            client.recv(64)
        client.close()

    thread, step = in_thread(ask), 0
    while True:
        with d.spent.on(NOTHING_TO_DO):
            asked = server.recv(64)
        if not asked:
            break
        for i in range(10):
            d.launch(1_200_000)
            d.copy(d.host + step % 4 * 4096, d.device, 1 * KiB, D2H, d.compute)
            d.record(step % 8, d.compute)
            if i:
                d.sync_event((step - 1) % 8)
            step += 1
        d.sync(d.compute)
        server.sendall(b"!" * 64)
    thread.join()
    server.close()
    d.spent.stop()
    return {}


def draft(us: int) -> bytes:
    """A small model on a CPU, in C and without the interpreter's lock."""
    end, state = now() + us * 1_000, bytes(64 * KiB)
    while now() < end:
        state = hashlib.sha256(state).digest() * 2048
    return state[:32]


@blind_program(
    line=COMPUTING,
    like=("gpu_starved", "python_or_gil_bound", "synchronisation", "cpu_starved"),
    also=("wasted_stores", "small_copies"),
)
def a_draft_model_on_a_thread_a_step_ahead(d: Device) -> Truth:
    """A CPU draft of 0.6 ms is made by a worker while the verification before, 2 ms, runs: the GPU never waits."""
    with ThreadPoolExecutor(1) as worker:
        drafted = worker.submit(draft, 600)
        for step in range(330):
            tokens = drafted.result()
            ct.memmove(d.host + step % 4 * 4096, tokens, 32)
            stamp(d, step % 4 * 4096 + 32, 2 * KiB, step)
            d.copy(d.device + step % 4 * 4096, d.host + step % 4 * 4096, 4096, H2D, d.compute)
            d.launch(2_000_000)
            d.copy(d.host + MiB + step % 4 * 4096, d.device + MiB, 512, D2H, d.compute)
            drafted = worker.submit(draft, 600)
            paced(d, step, 1)
        drafted.result()
    return {}


@blind_program(
    line=COMPUTING,
    like=("link_bound", "synchronisation", "weights_not_overlapped", "load_not_ordered", "store_not_ordered"),
    also=("redundant_loads", "wasted_stores"),
)
def two_stages_on_one_gpu_that_hand_over_through_the_host(d: Device) -> Truth:
    """Activations go from stage to stage through pinned memory, while both stages compute other micro-batches."""
    pool, kernel, second = Pool(d, d.bytes_of(100)), 800_000, d.copies[7]
    for batch in range(800):
        slot = batch % 4
        clear(d, d.device + slot * pool.size, batch % 251, pool.size, d.compute)
        d.launch(kernel)
        d.order(d.copies[0], d.compute, batch % 32)
        d.copy(d.host + slot * pool.size, d.device + slot * pool.size, pool.size, D2H, d.copies[0])
        d.order(d.copies[1], d.copies[0], 32 + batch % 32)
        d.copy(d.device + (4 + slot) * pool.size, d.host + slot * pool.size, pool.size, H2D, d.copies[1])
        d.order(second, d.copies[1], 64 + batch % 32)
        d.launch(kernel, second)
        d.kernel_ns -= kernel  # both compute at once
        d.record(128 + batch % 32, second)
        if batch > 2:
            d.sync_event(128 + (batch - 3) % 32)
    return {}


@blind_program(
    line=COMPUTING,
    like=("synchronisation", "small_copies", "weights_not_overlapped", "gpu_starved", "redundant_loads"),
    also=("wasted_stores",),
    needs_gpu=True,
)
def two_graphs_in_turn_with_input_and_token_inside(d: Device) -> Truth:
    """A decode step is one of two graphs, input copy, six kernels and token copy inside; the next is launched early."""

    def captured(side: int) -> int:
        def step_once() -> None:
            at = side * 64 * KiB
            d.copy(d.device + at, d.host + at, 16 * KiB, H2D, d.compute)
            for _ in range(6):
                d.launch(250_000)
            d.copy(d.host + MiB + at, d.device + MiB + at, 1 * KiB, D2H, d.compute)

        return d.graph(step_once)

    graphs = [captured(0), captured(1)]
    d.spent.restart()
    for step in range(450):
        ct.memmove(d.host + step % 2 * 64 * KiB, random.Random(step).randbytes(16 * KiB), 16 * KiB)
        d.replay(graphs[step % 2], 1_500_000)
        paced(d, step, 1)
    return {}


@blind_program(
    line=COMPUTING,
    like=("pageable_memory", "link_degraded", "weights_not_overlapped", "gpu_starved"),
    also=("first_calls",),
)
def weights_from_pageable_memory_once_then_served(d: Device) -> Truth:
    """A start-up brings 16 layers out of plain memory, before any kernel; then it serves for a second without a gap."""
    size = 8 * MiB if d.gpu else 1 * MiB
    keep, at = pageable(16 * size)
    ct.memmove(at, d.host, 16 * size)
    for layer in range(16):
        d.copy(d.device + layer * size, at + layer * size, size, H2D, d.copies[0])
    d.sync(d.copies[0])
    del keep
    d.spent.restart()
    for step in range(1_000):
        d.launch(1_100_000)
        paced(d, step, 3)
    return {}
