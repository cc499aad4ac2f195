"""Sixth programs whose device waits for the host: trees, embeddings, a pool, callbacks, captures, ranks, loaders."""

from __future__ import annotations

import ctypes as ct
import hashlib
import queue
import random
import re
import threading
import time
import zlib

from accounts import Pool, Stretches, going, paced, stamp, think
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    pageable,
    sixth,
)
from unseen_copies import same


@sixth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("small_copies", "cpu_starved", "redundant_loads", "slow_tier"),
)
def a_tree_of_guesses_grown_in_python_after_each_verification(d: Device) -> Truth:
    """Which guesses are accepted is read back, Python grows the next tree for 0.9 ms, and only then it is verified."""
    idle = Stretches(d)
    for step in going():
        think(900)
        stamp(d, step % 8 * 32 * KiB, 2 * KiB, step)  # the tree's mask
        idle.end()
        d.copy(d.device, d.host + step % 8 * 32 * KiB, 32 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(40_000)
        d.launch(500_000)
        d.copy(d.host + d.size - 4096, d.device + MiB, 512, D2H, d.compute)
        idle.begin()
        d.sync(d.compute)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    return {}


@sixth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "slow_tier"),
    blind=("kineto",),  # the PyTorch profiler keeps few of the driver's calls
    undecided_in=("kineto",),
)
def prompt_embeddings_in_plain_memory_by_the_driver_s_own_calls(d: Device) -> Truth:
    """The driver's calls alone: six prompts' embeddings of 2.5 MiB by cuMemcpyHtoDAsync, a kernel, a wait for it."""
    size, prompts, each, lost, turn = (2560 if d.gpu else 256) * KiB, 18, 6, 0, 0
    driver = ct.CDLL("libcuda.so.1") if d.gpu else d.lib
    send, wait, start = driver.cuMemcpyHtoDAsync_v2, driver.cuStreamSynchronize, driver.cuLaunchKernel
    send.argtypes, wait.argtypes = [ct.c_uint64, ct.c_void_p, ct.c_size_t, ct.c_void_p], [ct.c_void_p]
    start.argtypes = [ct.c_void_p, *[ct.c_uint] * 7, *[ct.c_void_p] * 3]
    keep, at = pageable(size * prompts)
    for prompt in range(prompts):
        ct.memmove(at + prompt * size, random.Random(90 + prompt).randbytes(size), size)
    duration = ct.c_uint64(350_000)
    arguments = (ct.c_void_p * 1)(ct.addressof(duration))
    d.spent.restart()
    for turn in going():
        for i in range(each):
            home, begin = at + (turn * each + i) % prompts * size, now()
            d.check(send(d.device + i * size, home, size, d.compute))
            lost += now() - begin
        d.check(start(d.kernel, 1, 1, 1, 1, 1, 1, 0, d.compute, arguments, None))
        d.kernel_ns += 350_000
        d.check(wait(d.compute))
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    same(d, d.device + 5 * size, at + (turn * each + 5) % prompts * size, size)
    del keep
    return {"pageable_memory": lost}


@sixth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("pinning_stall", "gpu_starved", "synchronisation"),
    like=("context_lock_stall", "pageable_memory", "slow_tier", "first_calls"),
)
def a_pinned_pool_enlarged_four_times_while_it_serves(d: Device) -> Truth:
    """After each fifth of a second of decode the pinned pool is enlarged, for about as long, piece by piece."""
    piece, most, lost = (128 if d.gpu else 2) * MiB, 64 if d.gpu else 4, 0
    pool, pieces, every = Pool(d, MiB), list[int](), 200_000_000 if d.gpu else 20_000_000
    grown, times = now(), 0
    for step in going():
        pool.fetch(step % 4, step, d.copies[0])
        d.order(d.compute, d.copies[0], step % 60)
        for _ in range(2):
            d.launch(500_000)
        paced(d, step, 2)
        if now() - grown > every and times < 4:
            begin, times = now(), times + 1
            for _ in range(most):
                pieces.append(d.made("cudaHostAlloc", piece, 0))
                if now() - begin > 220_000_000:
                    break
            grown = now()
            lost += grown - begin
    d.sync(d.compute)
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    for at in pieces:
        d.check(d.lib.cudaFreeHost(at))
    return {"allocation_on_hot_path": lost}


@sixth(
    line=WAITING,
    or_lines=(ELSEWHERE, PYTHON),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("fence_before_copies", "launch_queue_saturation", "cpu_starved", "small_copies"),
)
def a_callback_in_python_between_draft_and_target(d: Device) -> Truth:
    """A function in Python, which the stream runs for 0.4 ms, stands behind each kernel, draft's and target's."""
    d.lib.cudaLaunchHostFunc.argtypes = [ct.c_void_p] * 3
    told: list[int] = []

    def tell(_: int) -> None:
        told.append(len(think(400)))

    entry = ct.CFUNCTYPE(None, ct.c_void_p)(tell)
    function, step = ct.cast(entry, ct.c_void_p), 0
    d.spent.restart()
    for step in going():
        for kernel in (200_000, 450_000):
            d.launch(kernel)
            d.check(d.lib.cudaLaunchHostFunc(d.compute, function, None))
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    kernels = d.kernel_ns - d.spent.kernel_ns
    d.spent.add(WAITING, d.spent.end - d.spent.begin - kernels)
    if len(told) != 2 * (step + 1):
        raise RuntimeError("a callback was not run")
    return {}


@sixth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation", "first_calls"),
    like=("launch_queue_saturation", "context_lock_stall", "cpu_starved", "small_copies"),
    needs_gpu=True,
)
def a_graph_captured_anew_for_each_batch(d: Device) -> Truth:
    """Each batch has a shape of its own: 120 kernels are captured, made a graph and launched once, and thrown away."""
    d.lib.cudaGraphExecDestroy.argtypes = [ct.c_void_p]
    nodes, idle, kernel, took = 120, Stretches(d), 1_000, 1

    def step_once() -> None:
        for _ in range(nodes):
            d.launch(kernel)

    for _ in range(4):
        begin = now()
        graph = d.graph(step_once)
        took = now() - begin
        d.replay(graph, 0)
        d.sync(d.compute)
        d.check(d.lib.cudaGraphExecDestroy(graph))
    kernel = max(min(took * 6 // 10 // nodes, 50_000), 3_000)
    d.spent.restart()
    for _ in going():
        graph = d.graph(step_once)  # which counts the kernels
        idle.end()
        d.replay(graph, 0)
        idle.begin()
        d.sync(d.compute)
        idle.read()
        d.check(d.lib.cudaGraphExecDestroy(graph))
    d.spent.add(SUBMITTING, idle.ns)
    d.spent.stop()
    return {}


@sixth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("cpu_starved", "context_lock_stall", "head_of_line_copies", "launch_queue_saturation"),
)
def two_ranks_of_one_process_of_which_one_prepares_longer(d: Device) -> Truth:
    """Two ranks are threads that meet after each step; one launches at once, the other has hashed for 1.4 ms."""
    meet, kernel, part = threading.Barrier(2), 400_000, 256 * KiB
    over, lost, piece, times = threading.Event(), [0], bytes(128 * KiB), []
    for _ in range(5):
        begin = now()
        hashlib.sha256(piece).digest()
        times.append(now() - begin)
    blocks = piece * max(round(1_400_000 / min(times)), 1)

    def rank(number: int) -> None:
        stream, step, end = (d.compute, d.copies[9])[number], 0, now() + 2_100_000_000
        while not over.is_set():
            if number:
                begin = now()
                hashlib.sha256(blocks).digest()  # without the interpreter's lock
                lost[0] += now() - begin - kernel  # the other's kernel runs meanwhile
            theirs, mine = (
                d.host + ((step + turn) % 2 * 2 + one) * part for turn, one in ((1, 1 - number), (0, number))
            )
            d.copy(d.device + (2 + number) * part, theirs, part, H2D, stream)  # what the other made in the last step
            clear(d, d.device + number * part, step % 251, part, stream)
            d.launch(kernel, stream)
            d.copy(mine, d.device + number * part, part, D2H, stream)
            d.sync(stream)
            step += 1
            meet.wait()
            if not number and now() > end:
                over.set()
            meet.wait()

    d.spent.restart()
    other = in_thread(lambda: rank(1))
    rank(0)
    other.join()
    d.spent.add(PYTHON, lost[0])
    d.spent.stop()
    return {}


@sixth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("slow_tier", "pageable_memory", "cpu_starved", "redundant_loads"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_training_step_whose_loader_cannot_keep_up(d: Device) -> Truth:
    """One thread unpacks batches with zlib, 4 ms each, into a ring of pinned slots; a training step takes 1.2 ms."""
    slots, size, idle = 3, 512 * KiB, Stretches(d)
    packed, took, plain = b"", 0, bytearray()
    while took < 4_000_000 and len(plain) < 64 * MiB:
        plain += random.Random(len(plain)).randbytes(64 * KiB) * 2 + bytes(256 * KiB)
        if len(plain) < size:
            continue
        packed = zlib.compress(plain, 1)
        times = []
        for _ in range(3):
            begin = now()
            zlib.decompress(packed)
            times.append(now() - begin)
        took = min(times)
    free, full = queue.Queue[int](), queue.Queue[int]()
    for slot in range(slots):
        free.put(slot)

    def unpack() -> None:
        number = 0
        while (slot := free.get()) >= 0:
            batch, number = zlib.decompress(packed), number + 1  # without the interpreter's lock
            ct.memmove(d.host + slot * size, batch, size)
            stamp(d, slot * size, 4 * KiB, number)
            full.put(slot)

    thread, slot = in_thread(unpack), 0
    d.spent.restart()
    for _ in going():
        slot = full.get()
        idle.end()
        d.copy(d.device + slot * size, d.host + slot * size, size, H2D, d.compute)
        for kernel in (400_000, 600_000, 200_000):  # forward, backward, the optimizer
            d.launch(kernel)
        idle.begin()
        d.sync(d.compute)
        idle.read()
        free.put(slot)
    d.spent.add(ELSEWHERE, idle.ns)
    d.spent.stop()
    free.put(-1)
    thread.join()
    return {}


@sixth(
    "python_or_gil_bound",
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "synchronisation"),
    like=("cpu_starved", "context_lock_stall", "small_copies"),
)
def a_thread_that_splits_prompts_by_a_pattern_beside_decode(d: Device) -> Truth:
    """A thread splits prompts by a regular expression, 5 ms in C with the interpreter's lock, which each step wants."""
    words, stop = re.compile(r"'s|'t|\w+| ?[^\s\w]+|\s+(?!\S)|\s+"), threading.Event()
    text, took = "", 0
    while took < 5_000_000 and len(text) < 8_000_000:
        text += "It's what the next request's prompt says, isn't it? " * 40
        begin = now()
        words.findall(text)
        took = now() - begin

    def splits() -> None:
        while not stop.is_set():
            words.findall(text)
            time.sleep(0.0002)

    thread, kernel, step = in_thread(splits), 1_200_000, 0
    d.spent.restart()
    for step in going():
        stamp(d, step % 8 * 16 * KiB, 2 * KiB, step)
        d.copy(d.device, d.host + step % 8 * 16 * KiB, 16 * KiB, H2D, d.compute)
        d.launch(kernel)
        d.record(step, d.compute)
        d.sync_event(step)
    d.spent.stop()
    lost = d.spent.end - d.spent.begin - (step + 1) * kernel
    d.spent.add(PYTHON, lost)
    stop.set()
    thread.join()
    return {"python_or_gil_bound": lost}
