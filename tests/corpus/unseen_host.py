"""Unseen programs whose device waits for the host: tokens, callbacks, locks, the collector, memory, a peer's bytes."""

from __future__ import annotations

import contextlib
import ctypes as ct
import gc
import hashlib
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from accounts import paced
from device import D2H, H2D, Device, now
from fresh_copies import clear
from later_host import think_by_cpu
from other_shapes import gate
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    NO_CPU,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    pageable,
    unseen,
)


@unseen(
    line=WAITING,
    or_lines=(PAGEABLE, SUBMITTING, PYTHON),
    also=("synchronisation", "pageable_memory", "small_copies", "gpu_starved", "python_or_gil_bound"),
    like=("launch_queue_saturation", "redundant_loads"),
)
def draft_tokens_read_back_one_by_one(d: Device) -> Truth:
    """Each of four drafted tokens is read into plain memory, as `item` does, before the next is drafted in 30 us."""
    keep, at = pageable(4096)
    d.spent.restart()
    begin, kernels = now(), d.kernel_ns
    for _ in range(1_000):
        for token in range(4):
            d.launch(30_000)
            d.copy(at + 8 * token, d.device, 8, D2H, d.compute)
            d.sync(d.compute)
        d.launch(120_000)
        d.copy(at + 64, d.device, 32, D2H, d.compute)
        d.sync(d.compute)
    d.spent.add(WAITING, now() - begin - (d.kernel_ns - kernels))
    del keep
    return {}


@unseen(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE,),
    also=("synchronisation", "small_copies", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("redundant_loads", "unmerged_neighbours"),
)
def logits_of_each_request_read_into_plain_memory(d: Device) -> Truth:
    """After each step the logits of 48 requests, 64 KiB each, are read into 48 plain arrays, one call a request."""
    size, rows, lost = 64 * KiB, 48, 0
    arrays = [pageable(size) for _ in range(rows)]
    d.spent.restart()
    for step in range(220):
        clear(d, d.device, step, rows * size, d.compute)
        d.launch(700_000)
        d.sync(d.compute)
        with d.spent.on(PAGEABLE):
            for row, (_, at) in enumerate(arrays):
                lost += d.copy(at, d.device + row * size, size, D2H, d.compute)
    d.synchronize()
    if any(ct.string_at(at, size) != bytes([219]) * size for _, at in arrays):
        raise RuntimeError("an array has other bytes than its logits")
    return {"pageable_memory": lost}


@unseen(
    line=WAITING,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved"),
    like=("fence_before_copies", "launch_queue_saturation", "python_or_gil_bound"),
)
def a_callback_after_each_layer(d: Device) -> Truth:
    """A callback of 0.1 ms stands between each two layers of 0.25 ms; the thread submits them a step ahead."""
    begin, kernels = now(), d.kernel_ns
    for step in range(100):
        for _ in range(8):
            d.launch(250_000)
            gate(d, 100, d.compute)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.add(WAITING, now() - begin - (d.kernel_ns - kernels))
    return {}


@unseen(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("cpu_starved", "context_lock_stall"),
)
def a_lock_of_the_block_manager_held_by_a_thread_that_hashes(d: Device) -> Truth:
    """A thread hashes blocks for 3 ms at a time with the block manager's lock, which each step of 1 ms wants first."""
    lock, stop, data = threading.Lock(), threading.Event(), bytes(MiB)
    begin = now()
    hashlib.sha256(data).digest()
    data *= max(round(3_000_000 / (now() - begin)), 1)

    def hashes() -> None:
        while not stop.is_set():
            with lock:
                hashlib.sha256(data).digest()
            time.sleep(0.0005)

    thread, begin = in_thread(hashes), now()
    d.spent.restart()
    while now() - begin < 500_000_000:
        with d.spent.on(ELSEWHERE):
            lock.acquire()
        lock.release()
        d.launch(500_000)
        d.launch(500_000)
        d.sync(d.compute)
    d.spent.stop()
    stop.set()
    thread.join()
    return {}


@unseen(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("cpu_starved", "allocation_on_hot_path"),
)
def a_garbage_collection_every_twelve_steps(d: Device) -> Truth:
    """Python's collector goes over all objects of a server, for 15 ms or more, after each twelve steps of 0.9 ms."""
    objects: list[list[int]] = []
    took = 0
    while took < 15_000_000 and len(objects) < 2_000_000:
        objects += [[] for _ in range(100_000)]
        begin = now()
        gc.collect()
        took = now() - begin
    d.spent.restart()
    for step in range(240):
        d.launch(900_000)
        paced(d, step, 1)
        if step % 12 == 11:
            d.sync(d.compute)
            with d.spent.on(PYTHON):
                gc.collect()
    d.sync(d.compute)
    d.spent.stop()
    return {}


@contextlib.contextmanager
def one_cpu_shared_in_bursts(processes: int) -> Iterator[None]:
    """This thread and processes that all compute for 30 ms of each 40 ms share one CPU."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    load = (
        f"import os, time\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\n"
        "while True:\n while time.monotonic() % 0.04 < 0.03: pass\n time.sleep(0.04 - time.monotonic() % 0.04)"
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", load]
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for child in children:
            assert child.stdout
            child.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        yield
    finally:
        os.sched_setaffinity(0, before)
        for child in children:
            child.kill()
            child.communicate()


@unseen(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation"),
    like=("context_lock_stall", "slow_tier"),
    blind=DEVICE,
)
def loaders_that_take_the_submitter_s_cpu_in_bursts(d: Device) -> Truth:
    """Three loader processes compute for 30 ms of each 40 ms on the one CPU that the submitting thread may use."""
    kernel, off = 1_500_000, 0
    with one_cpu_shared_in_bursts(3):
        d.spent.restart()
        for step in range(150):
            begin, busy = now(), time.thread_time_ns()
            d.launch(kernel)
            think_by_cpu(900)
            off += now() - begin - (time.thread_time_ns() - busy)
            d.record(step, d.compute)
            d.sync_event(step)
            d.spent.add(NO_CPU, max(now() - begin - kernel - 100_000, 0))  # of a step alone 0.1 ms is the host's
        d.spent.stop()
    return {"cpu_starved": off}


@unseen(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("synchronisation", "gpu_starved", "small_copies", "weights_not_overlapped"),
    like=("redundant_loads", "pageable_memory", "first_calls"),
)
def a_lora_adapter_in_memory_made_for_its_batch(d: Device) -> Truth:
    """For each batch 24 tensors of its adapter are made by cudaMalloc, padded to 4 MiB, and freed after it."""
    tensors, size, lost = 24, 4 * MiB if d.gpu else 256 * KiB, 0
    for batch in range(70):
        with d.spent.on(ALLOCATING):
            begin = now()
            memory = [d.made("cudaMalloc", size) for _ in range(tensors)]
            lost += now() - begin
        for i, at in enumerate(memory):
            d.copy(at, d.host + (batch % 6 * tensors + i) * 256 * KiB, 256 * KiB, H2D, d.compute)
        d.launch(1_000_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            for at in memory:
                d.check(d.lib.cudaFree(at))
            lost += now() - begin
    return {"allocation_on_hot_path": lost}


@unseen(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(WAITING,),  # the wait gives the memory back
    also=("synchronisation", "gpu_starved"),
    like=("context_lock_stall", "first_calls", "pinning_stall"),
)
def a_memory_pool_that_gives_all_back_at_each_wait(d: Device) -> Truth:
    """cudaMallocAsync's pool keeps nothing over a wait, unless told to: 2 GiB are mapped anew for each step."""
    size, lost, kernel, at = (2048 if d.gpu else 2) * MiB, 0, 800_000, ct.c_void_p()
    d.lib.cudaMallocAsync.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_void_p]
    d.lib.cudaFreeAsync.argtypes = [ct.c_void_p, ct.c_void_p]
    for step in range(90):
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaMallocAsync(ct.byref(at), size, d.compute))
            lost += now() - begin
        clear(d, int(at.value or 0), step, 1 * MiB, d.compute)
        d.launch(kernel)
        d.check(d.lib.cudaFreeAsync(at, d.compute))
        d.spent.add(WAITING, max(d.sync(d.compute) - kernel, 0))
    return {"allocation_on_hot_path": lost}


@unseen(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("synchronisation", "gpu_starved"),
    like=("pinning_stall", "pageable_memory", "redundant_loads", "slow_tier"),
)
def a_shared_segment_mapped_and_registered_for_each_request(d: Device) -> Truth:
    """A store's process hands over 48 MiB of shared memory a request: mapped, registered, 4 MiB loaded, unmapped."""
    size, part, lost, libc = (48 if d.gpu else 8) * MiB, (4 if d.gpu else 1) * MiB, 0, ct.CDLL(None)
    libc.mmap.restype = ct.c_void_p
    libc.mmap.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_int, ct.c_int, ct.c_int, ct.c_long]
    libc.munmap.argtypes = [ct.c_void_p, ct.c_size_t]
    segments = [os.memfd_create("kv") for _ in range(4)]
    for number, segment in enumerate(segments):
        os.pwrite(segment, (ct.c_char * size).from_address(d.host + number * 8 * MiB), 0)
    d.spent.restart()
    for request in range(60):
        with d.spent.on(ALLOCATING):
            access = mmap.PROT_READ | mmap.PROT_WRITE
            at = libc.mmap(None, size, access, mmap.MAP_SHARED, segments[request % 4], 0)
            begin = now()
            d.check(d.lib.cudaHostRegister(at, size, 0))
            lost += now() - begin
        d.copy(d.device + request % 2 * part, at + request % 3 * part, part, H2D, d.compute)
        d.launch(1_200_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaHostUnregister(at))
            lost += now() - begin
            libc.munmap(at, size)
    for segment in segments:
        os.close(segment)
    return {"allocation_on_hot_path": lost}


@unseen(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("pageable_memory", "cpu_starved", "small_copies"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone: `recv` of data and of requests look alike
)
def kv_received_from_a_peer_before_each_decode(d: Device) -> Truth:
    """The KV of each request, 6 MiB in pieces, comes from a peer over a socket into pinned memory, then is loaded."""
    size, piece, requests = 6 * MiB, MiB, 70
    mine, peer = socket.socketpair()
    data = memoryview(ct.string_at(d.host + 32 * MiB, 8 * MiB))

    def send() -> None:
        for request in range(requests):
            peer.recv(1)
            for at in range(0, size, piece):
                time.sleep(0.0005)  # a slow network
                peer.sendall(data[at + request * KiB :][:piece])

    thread = in_thread(send)
    d.spent.restart()
    for request in range(requests):
        home = request % 2 * size
        view, got = memoryview((ct.c_char * size).from_address(d.host + home)).cast("B"), 0
        with d.spent.on(TIER):
            mine.sendall(b"?")
            while got < size:
                got += mine.recv_into(view[got:])
        d.copy(d.device + home, d.host + home, size, H2D, d.compute)
        for _ in range(4):
            d.launch(400_000)
        d.sync(d.compute)
    d.spent.stop()
    thread.join()
    mine.close()
    peer.close()
    home = d.host + (requests - 1) % 2 * size
    if ct.string_at(home, piece) != data[(requests - 1) * KiB :][:piece]:
        raise RuntimeError("other bytes came than were sent")
    return {}
