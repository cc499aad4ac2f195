"""Eighth programs whose device waits for the host: tasks, a lock, pages, forks, a graph, a queue, a cache, a file."""

from __future__ import annotations

import asyncio
import ctypes as ct
import json
import os
import random
import tempfile
import threading
import time
from typing import Any

from accounts import Pool, Stretches, decoded, stamp, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from other_shapes import gate
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    FULL_QUEUE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    eighth,
    in_thread,
    pageable,
    usual,
)
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Clients:
    """Streams of tokens to so many clients, each with a task of its own in one event loop."""

    def __init__(self, count: int) -> None:
        self.queues = [asyncio.Queue[int]() for _ in range(count)]
        self.tasks = [asyncio.create_task(self.stream(number)) for number in range(count)]
        self.sent = [b""] * count
        self.handled = 0

    async def stream(self, number: int) -> None:
        text = ""
        while (token := await self.queues[number].get()) >= 0:
            text = f"{text} t{token}"[-200:]
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            self.sent[number] = b"data: " + json.dumps({"id": f"c-{number}", "choices": [choice]}).encode() + b"\n\n"
            self.handled += 1

    async def hand_out(self, token: int) -> None:
        """Gives a token to each stream and comes back when all have written it."""
        until = self.handled + len(self.queues)
        for queue in self.queues:
            queue.put_nowait(token)
        while self.handled < until:
            await asyncio.sleep(0)

    async def end(self) -> None:
        for queue in self.queues:
            queue.put_nowait(-1)
        await asyncio.gather(*self.tasks)


@eighth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def an_event_loop_that_wakes_each_stream_s_task_before_the_next_step(d: Device) -> Truth:
    """The engine shares an event loop with its streams' tasks: each of them writes its token before the next step.

    The thread waits for a step of 0.9 ms, gives the tokens to the tasks, and they compute in Python for 1.5 ms until
    all have written theirs; nothing is submitted meanwhile. How many streams that are is measured first.
    """

    async def serve() -> None:
        some, taken = Clients(64), []
        for token in range(8):
            begin = now()
            await some.hand_out(token)
            taken.append(now() - begin)
        await some.end()
        clients, idle, step = Clients(max(64 * 1_500_000 // min(taken), 1)), Stretches(d), 0
        await asyncio.sleep(0)
        d.spent.restart()
        for step in turns():
            decoded(d, step, idle, 3, 300_000)
            await clients.hand_out(step)
        d.spent.add(PYTHON, idle.ns)
        d.spent.stop()
        await clients.end()
        if f't{step}"'.encode() not in clients.sent[-1]:
            raise RuntimeError("a stream has not written its last token")
        same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)

    asyncio.run(serve())
    return {}


@eighth(
    "python_or_gil_bound",
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "wasted_stores"),
    like=("cpu_starved", "small_copies", "pageable_memory", "slow_tier", "launch_queue_saturation"),
)
def a_thread_that_sleeps_in_an_extension_with_the_interpreter_s_lock(d: Device) -> Truth:
    """A thread waits for its network for 6 ms in an extension that keeps the interpreter's lock, then 4 ms without it.

    The thread that decodes in steps of 0.8 ms needs the lock after each wait and each call. While the other has it, at
    most the step that was launched before computes: of each 10 ms the GPU has nothing for 5 ms. No CPU is busy.
    """
    wait, over, idle, step = ct.PyDLL(None).usleep, threading.Event(), Stretches(d), 0

    def poll() -> None:
        while not over.is_set():
            wait(6_000)
            time.sleep(0.004)

    thread = in_thread(poll)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    over.set()
    thread.join()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {"python_or_gil_bound": idle.ns}


class Pages:
    """Pages of 2 MiB, each with addresses of its own, whose memory comes and goes by the driver's calls."""

    def __init__(self, d: Device, pages: int) -> None:
        self.lib, self.check, self.page = ct.CDLL("libcuda.so.1") if d.gpu else d.lib, d.check, 2 * MiB
        word, pointer = ct.c_uint64, ct.c_void_p
        self.lib.cuMemAddressReserve.argtypes = [pointer, word, word, word, word]
        self.lib.cuMemCreate.argtypes = [pointer, word, pointer, word]
        self.lib.cuMemMap.argtypes = [word] * 5
        self.lib.cuMemSetAccess.argtypes = [word, word, pointer, word]
        self.lib.cuMemUnmap.argtypes, self.lib.cuMemRelease.argtypes = [word, word], [word]
        self.lib.cuMemAddressFree.argtypes = [word, word]
        self.at, self.handles = [self.reserved() for _ in range(pages)], list[int]()
        self.made_of = (ct.c_uint32 * 8)(1, 0, 1, 0, 0, 0, 0, 0)  # pinned memory of device 0
        self.access = (ct.c_uint32 * 3)(1, 0, 3)  # device 0 reads and writes

    def reserved(self) -> int:
        at = ct.c_uint64()
        self.check(self.lib.cuMemAddressReserve(ct.byref(at), self.page, 0, 0, 0))
        return at.value

    def grow(self, pages: int) -> int:
        """Maps so many pages more, and returns the address of the last one."""
        at = 0
        for _ in range(pages):
            handle, at = ct.c_uint64(), self.at[len(self.handles)]
            self.check(self.lib.cuMemCreate(ct.byref(handle), self.page, self.made_of, 0))
            self.check(self.lib.cuMemMap(at, self.page, 0, handle, 0))
            self.check(self.lib.cuMemSetAccess(at, self.page, self.access, 1))
            self.handles.append(handle.value)
        return at

    def give_back(self) -> None:
        for at, handle in zip(self.at, self.handles, strict=True):
            self.check(self.lib.cuMemUnmap(at, self.page))
            self.check(self.lib.cuMemRelease(handle))
        self.handles = []

    def end(self) -> None:
        for at in self.at:
            self.check(self.lib.cuMemAddressFree(at, self.page))


@eighth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    blind=("kineto",),  # the PyTorch profiler keeps few of the driver's calls
    undecided_in=("kineto",),
)
def a_cache_whose_pages_are_mapped_as_each_request_grows(d: Device) -> Truth:
    """Before each step a request's cache grows by four pages of 2 MiB, made and mapped by the driver's calls.

    The step before was waited for, so no kernel runs; after sixteen steps the request ends and its pages are given back
    one by one. How long all that takes is measured first, and a step's kernel is made half as long.
    """
    steps, each, lost, step = 16, 4, 0, 0
    cache = Pages(d, steps * each)

    def request(kernel_ns: int) -> int:
        """How long the driver took to map and unmap, ns."""
        nonlocal step
        took, at = 0, 0
        for _ in range(steps):
            begin = now()
            at = cache.grow(each)
            took += now() - begin
            step += 1
            clear(d, at, step % 251, 64 * KiB, d.compute)
            if kernel_ns:
                d.launch(kernel_ns)
            d.sync(d.compute)
        d.copy(d.host, at, 64, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 64) != bytes([step % 251]) * 64:
            raise RuntimeError("a mapped page has other bytes than were computed")
        begin = now()
        cache.give_back()
        return took + now() - begin

    took = min(request(0) for _ in range(3))
    d.spent.restart()
    for _ in turns():
        lost += request(max(took // steps // 2, 5_000))
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    cache.end()
    return {"allocation_on_hot_path": lost}


@eighth(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # between two calls of a loop the thread is in Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def small_kernels_forked_over_eight_streams_and_joined_for_each_layer(d: Device) -> Truth:
    """Each of twelve layers forks to eight streams by events, a kernel of 2 us on each, and joins them again.

    That makes 34 calls a layer, which take the thread at least 40 us, for 4 us of kernels, as the eight run side by
    side. It waits for the token of each step before it begins the next, so the device is never behind it.
    """
    layers, branches, kernel, lost = 12, d.copies[8:16], 2_000, 0
    for step in turns():
        begin = now()
        for layer in range(layers):
            d.record(layer * 16, d.compute)
            for i, branch in enumerate(branches):
                d.check(d.lib.cudaStreamWaitEvent(branch, d.events[layer * 16], 0))
                d.launch(kernel, branch)
                d.order(d.compute, branch, layer * 16 + 1 + i)
            d.launch(kernel)
        back = d.size - 4 * KiB * (1 + step % 4)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.kernel_ns -= layers * (len(branches) - 1) * kernel  # side by side they take the time of one
        lost += max(now() - begin - layers * 2 * kernel, 0)
        d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    return {}


@eighth(
    line=WAITING,
    or_lines=(ELSEWHERE,),  # what the function does is no call of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("launch_queue_saturation", "fence_before_copies", "small_copies", "cpu_starved", "weights_not_overlapped"),
    needs_gpu=True,
)
def a_graph_with_a_host_function_between_its_kernels(d: Device) -> Truth:
    """A step is one graph: its input, a kernel of 0.3 ms, a function of the host of 0.5 ms, a kernel, its token.

    The nodes stand in one row, so no kernel runs while the function does; the thread has launched the graph and waits
    for its end. That is 0.5 ms of each 1.2 ms.
    """
    back = d.size - 4 * KiB

    def step_once() -> None:
        d.copy(d.device, d.host, 4 * KiB, H2D, d.compute)
        d.launch(300_000)
        gate(d, 500, d.compute)
        d.launch(300_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)

    graph = d.graph(step_once)
    d.replay(graph, 0)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        stamp(d, 0, 4 * KiB, step)
        d.replay(graph, 600_000)
        d.sync(d.compute)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    same(d, d.device, d.host, 4 * KiB)
    return {}


@eighth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    or_lines=(ELSEWHERE,),  # the thread that decodes waits for a lock, the one that has it for the queue
    also=("link_bound", "wasted_stores", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("small_copies", "unmerged_neighbours", "allocation_on_hot_path", "slow_tier", "cpu_starved"),
)
def a_block_manager_s_lock_kept_while_a_full_queue_holds_its_thread(d: Device) -> Truth:
    """A thread stores 2,400 blocks with the block manager's lock in hand; each step of 0.8 ms wants the lock first.

    A block takes 50 us of the link. On an H100 under a recorder the thread submits one in about 6 us, so the stream is
    full after 1,160 of them, 7 ms; the other 1,240 get in at the link's rate, which is 62 ms with the lock. At half
    that pace it is full after 16 ms, and the queue still has more than half of the lock's time. Then the lock is free
    until all have left, 51 ms, and 3 ms more. No kernel needs a store.
    """
    pool, each, over, lock = Pool(d, d.bytes_of(50)), 2_400, threading.Event(), threading.Lock()
    slots, durations, waited, last = 50, list[int](), 0, 0

    def store() -> None:
        nonlocal last
        while not over.is_set():
            with lock:
                for i in range(each):
                    last = i * 7 % slots
                    durations.append(
                        d.copy(d.host + last * pool.size, d.device + last * pool.size, pool.size, D2H, d.copies[9])
                    )
            d.sync(d.copies[9])
            time.sleep(0.003)

    for i in range(slots):
        clear(d, d.device + i * pool.size, i % 251, pool.size, d.compute)
    d.sync(d.compute)
    thread = in_thread(store)
    d.spent.restart()
    for step in turns():
        begin = now()
        with lock:
            waited += now() - begin
            stamp(d, d.size - 64 * KiB + step % 8 * 4 * KiB, 4 * KiB, step)
        home = d.size - 64 * KiB + step % 8 * 4 * KiB
        d.copy(d.device + home, d.host + home, 4 * KiB, H2D, d.compute)
        for _ in range(2):
            d.launch(400_000)
        d.sync(d.compute)
    d.spent.add(FULL_QUEUE, waited)
    d.spent.stop()
    over.set()
    thread.join()
    quick = usual(durations[:900])
    lost = sum(one - quick for one in durations if one > 2 * quick + 2_000)
    same(d, d.device + last * pool.size, d.host + last * pool.size, pool.size)
    if d.gpu and lost < waited // 2:
        raise RuntimeError(f"the truth is not plain: {waited} ns for the lock, {lost} ns of them for the queue")
    return {"launch_queue_saturation": lost}


def cache_block(d: Device) -> int:
    return 4 * MiB if d.gpu else 256 * KiB


def make_the_cache(d: Device) -> None:
    """Six blocks that are registered and ten that came later and are not; one of these goes to the GPU."""
    size = cache_block(d)
    keep, at = pageable(16 * size)
    for block in range(16):
        ct.memmove(at + block * size, random.Random(80 + block).randbytes(size), size)
    d.check(d.lib.cudaHostRegister(at, 6 * size, 0))
    d.copy(d.device, at + 6 * size, size, H2D, d.compute)
    d.sync(d.compute)
    MADE["cache"] = keep, at


@eighth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_cache,
)
def a_cache_whose_later_part_was_never_pinned(d: Device) -> Truth:
    """Before each step of 0.9 ms two blocks of 4 MiB come out of the pinned part of a cache, and six out of the rest.

    The cache has grown, and what it grew by is plain memory. The step before was waited for; six blocks of plain memory
    take at least 0.75 ms at 32 GB/s, each call until the driver has read its block. The two pinned ones take 0.15 ms.
    """
    (keep, at), size, lost, step = MADE.pop("cache"), cache_block(d), 0, 0
    d.spent.restart()
    for step in turns():
        for i in range(2):
            d.copy(d.device + (6 + i) * size, at + (step * 2 + i) % 6 * size, size, H2D, d.compute)
        for i in range(6):
            lost += d.copy(d.device + i * size, at + (6 + (step * 6 + i) % 10) * size, size, H2D, d.compute)
        for _ in range(3):
            d.launch(300_000)
        d.copy(d.host, d.device + 9 * size, 512, D2H, d.compute)
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    same(d, d.device + 7 * size, at + (step * 2 + 1) % 6 * size, size)
    same(d, d.device + 5 * size, at + (6 + (step * 6 + 5) % 10) * size, size)
    d.check(d.lib.cudaHostUnregister(at))
    del keep
    return {"pageable_memory": lost}


@eighth(
    line=TIER,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_checkpoint_written_to_its_file_by_the_thread_that_trains(d: Device) -> Truth:
    """After each three steps of 0.8 ms the states leave for pinned memory and the thread writes them to a file.

    To write 32 MiB takes at least 2.5 ms, were it done at 13 GB/s, and the next step is launched when it is done: no
    kernel runs for that time and for the 0.6 ms of the store, beside 2.4 ms of kernels.
    """
    size, written, turn = (32 if d.gpu else 8) * MiB, 0, 0
    view = memoryview((ct.c_char * size).from_address(d.host)).cast("B")
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), view, 0)
        d.spent.restart()
        for turn in turns():
            for _ in range(3):
                d.launch(800_000)
            clear(d, d.device, turn % 251, size, d.compute)
            d.copy(d.host, d.device, size, D2H, d.compute)
            d.sync(d.compute)
            begin, done = now(), 0
            while done < size:
                done += os.pwrite(file.fileno(), view[done:], done)
            written += now() - begin
        d.spent.add(TIER, written)
        d.spent.stop()
        if os.pread(file.fileno(), 64, size - 64) != bytes([turn % 251]) * 64:
            raise RuntimeError("the file has other bytes than were computed")
    same(d, d.device, d.host, size)
    return {}
