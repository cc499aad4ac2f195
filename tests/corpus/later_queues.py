"""Programs of later shapes with full queues, and with queues that are deep or full and cost nothing."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from accounts import Pool, paced
from device import D2H, Device
from other_shapes import gate
from registry import AT_LINK_RATE, BELOW_LINK_RATE, COMPUTING, FULL_QUEUE, KiB, Truth, blocked, in_thread, program


@program("fence_before_copies", "launch_queue_saturation", line=FULL_QUEUE)
def stores_of_16_kib_behind_a_callback(d: Device) -> Truth:
    """A callback of 60 ms holds the store stream; 1,150 stores of 16 KiB fill it, and the decode steps come late."""
    pool, fence, rest = Pool(d, 16 * KiB), 0, 0
    chance = random.Random(1)
    d.launch(4_000_000)
    d.sync(d.compute)
    for _ in range(2):
        gate(d, 60_000, d.copies[2])
        durations = []
        for block in chance.sample(range(pool.count), 1_150):
            at = block * pool.size
            durations.append(d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[2]))
        one, others = blocked(durations)
        fence, rest = fence + one, rest + others
        d.spent.add(FULL_QUEUE, one + others)
        for _ in range(20):
            d.launch(400_000)
        d.sync(d.compute)
        d.sync(d.copies[2])
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}


@program("fence_before_copies", "launch_queue_saturation", line=FULL_QUEUE)
def kernels_and_copies_behind_a_callback(d: Device) -> Truth:
    """A callback of 180 ms holds a side stream filled with kernels and copies; the model's launches come late."""
    pool, durations = Pool(d, 64 * KiB), []
    d.launch(4_000_000)
    d.sync(d.compute)
    gate(d, 180_000, d.copies[3])
    for i in range(1_200):  # enough, whether kernels and copies share the places or have a thousand each
        durations.append(d.launch(3_000, d.copies[3]))
        durations.append(pool.fetch(i % 32, i, d.copies[3]))
    fence, rest = blocked(durations)
    d.spent.add(FULL_QUEUE, fence + rest)
    for _ in range(40):
        d.launch(500_000)
    d.sync(d.compute)
    return {"fence_before_copies": fence, "launch_queue_saturation": rest}


@program(line=COMPUTING, also=("launch_queue_saturation",), like=("gpu_starved",))
def a_queue_full_of_kernels_that_costs_nothing(d: Device) -> Truth:
    """1,500 kernels of 200 us: their thread is blocked in launches, and the GPU has a thousand kernels to compute."""
    for _ in range(1_500):
        d.launch(200_000)
    return {}


@program(line=COMPUTING, like=("launch_queue_saturation", "fence_before_copies"))
def hundreds_of_hidden_stores_that_never_fill_a_queue(d: Device) -> Truth:
    """400 stores of 128 KiB behind each prefill of 40 ms fit the queue and run beside the next prefill."""
    pool = Pool(d, 128 * KiB)
    for request in range(6):
        d.launch(40_000_000)
        d.order(d.copies[1], d.compute, request)
        if request:
            for i in range(400):
                at = (400 * request + i) % pool.count * pool.size
                d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[1])
        paced(d, request, 1)
    return {}


@program(line=COMPUTING, like=("link_bound", "weights_not_overlapped", "head_of_line_copies"))
def a_link_that_is_full_while_the_gpu_computes(d: Device) -> Truth:
    """Loads keep the link busy nine tenths of the time, two layers ahead, and the kernels never wait for them."""
    pool = Pool(d, d.bytes_of(540))
    for layer in range(500):
        if layer > 2:
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[200 + layer % 3], 0))
        pool.fetch(layer % 3, layer, d.copies[0])
        d.order(d.compute, d.copies[0], layer % 64)
        d.launch(600_000)
        d.record(200 + layer % 3, d.compute)
        paced(d, layer, 6)
    return {}


@program(line=COMPUTING, like=("context_lock_stall", "aliased_stream", "python_or_gil_bound"))
def an_offload_thread_beside_decode(d: Device) -> Truth:
    """One thread decodes; another stores finished blocks on a stream of its own, a few at a time."""
    pool = Pool(d, 512 * KiB)
    done = [False]

    def offload() -> None:
        number = 0
        while not done[0]:
            for _ in range(8):
                at = number % pool.count * pool.size
                d.copy(d.host + at, d.device + at, pool.size, D2H, d.copies[1])
                number += 1
            d.record(250, d.copies[1])
            d.sync_event(250)
            time.sleep(0.002)

    thread = in_thread(offload)
    for step in range(150):
        for _ in range(4):
            d.launch(500_000)
        paced(d, step)
    done[0] = True
    thread.join()
    return {}


@program(line=BELOW_LINK_RATE, or_lines=(AT_LINK_RATE,), also=("link_degraded", "link_bound"), forms=("run",))
def two_processes_on_one_link(d: Device) -> Truth:
    """Two processes load each request's KV at the same time, and each gets half of the link."""
    command = [sys.executable, str(Path(__file__).with_name("programs.py")), "kv_of_each_request_loaded_when_it_comes"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for child in children:
        child.communicate()
    return {}
