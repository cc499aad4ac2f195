"""Tenth programs whose device waits for the host: a fetcher, scratch, loops, a tree, parameters, exits, a file."""

from __future__ import annotations

import asyncio
import ctypes as ct
import os
import random
import tempfile
from pathlib import Path
from queue import Queue
from typing import Any

from accounts import Pool, Stretches, decoded, stamp, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
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
    blocked,
    in_thread,
    pageable,
    tenth,
)
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


class Experts:
    """Twelve experts in plain memory, two of which have slots on the device.

    Attributes:
        at: their address; size: of each, bytes; took: ns to bring two.
    """

    count = 12

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (8 if d.gpu else 1) * MiB
        self.keep, self.at = pageable(self.count * self.size)
        for expert in range(self.count):
            ct.memmove(self.at + expert * self.size, random.Random(50 + expert).randbytes(self.size), self.size)
        self.took = min(quickest(lambda pair=pair: self.bring(pair), 1) for pair in range(4))

    def home(self, pair: int, i: int) -> int:
        return self.at + (pair * 2 + i) % self.count * self.size

    def bring(self, pair: int) -> int:
        """Two experts to the two slots; how long the calls took, ns."""
        d, stream, took = self.d, self.d.copies[6], 0
        for i in range(2):
            took += d.copy(d.device + i * self.size, self.home(pair, i), self.size, H2D, stream)
        d.sync(stream)
        return took


def make_the_experts(d: Device) -> None:
    MADE["experts"] = Experts(d)


@tenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_experts,
)
def experts_fetched_out_of_plain_memory_by_a_thread_that_the_model_asks(d: Device) -> Truth:
    """The router of each layer is waited for, then a thread brings two experts of 8 MiB out of plain memory.

    The model's thread waits at a queue meanwhile, and the device has nothing but what the driver copies. How long two
    experts take was measured before the program began, and router and experts compute for that long together.
    """
    experts, lost, asked, there, layer = MADE.pop("experts"), 0, Queue[int](), Queue[int](), 0

    def fetch() -> None:
        while (pair := asked.get()) >= 0:
            there.put(experts.bring(pair))

    thread = in_thread(fetch)
    d.spent.restart()
    for layer in turns():
        d.launch(experts.took // 4)
        d.sync(d.compute)
        asked.put(layer)
        lost += there.get()
        d.launch(experts.took * 3 // 4)
    d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    asked.put(-1)
    thread.join()
    same(d, d.device + experts.size, experts.home(layer, 1), experts.size)
    return {"pageable_memory": lost}


@tenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
)
def a_scratch_that_doubles_four_times_until_a_request_fits_it(d: Device) -> Truth:
    """Each request begins with a scratch of 32 MiB and doubles it four times: cudaMalloc, a copy, cudaFree of the old.

    What runs on the device was waited for before each of these calls, so nothing does meanwhile. How long a request's
    calls take is measured first, and its kernels take half of that.
    """
    first, doublings, request = (32 if d.gpu else 1) * MiB, 4, 0

    def serve(kernel_ns: int) -> int:
        """How long the runtime took to make and to free, ns."""
        nonlocal request
        request += 1
        begin, size = now(), first
        at = d.made("cudaMalloc", size)
        took = now() - begin
        clear(d, at, request % 251, size, d.compute)
        for _ in range(doublings):
            d.sync(d.compute)
            begin = now()
            larger = d.made("cudaMalloc", 2 * size)
            took += now() - begin
            d.copy(larger, at, size, D2D, d.compute)
            if kernel_ns:
                d.launch(kernel_ns // doublings)
            d.sync(d.compute)
            begin = now()
            d.check(d.lib.cudaFree(at))
            took += now() - begin
            at, size = larger, 2 * size
        d.copy(d.host, at + first - 64, 64, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        d.check(d.lib.cudaFree(at))
        if ct.string_at(d.host, 64) != bytes([request % 251]) * 64:
            raise RuntimeError("the scratch has lost its bytes on the way")
        return took + now() - begin

    took, lost = min(serve(0) for _ in range(3)), 0
    d.spent.restart()
    for _ in turns():
        lost += serve(max(took // 2, 20_000))
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    return {"allocation_on_hot_path": lost}


@tenth(
    line=ELSEWHERE,
    or_lines=(WAITING,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation", "allocation_on_hot_path"),
)
def an_event_loop_that_looks_for_the_token_each_three_milliseconds(d: Device) -> Truth:
    """The engine's coroutine launches a step of 1.2 ms and asks its event after each `asyncio.sleep` of 3 ms.

    Another coroutine counts what was sent and sleeps as well, so the loop stands in its selector. The step is over when
    the event is asked for the first time: above 1.8 ms of each 3 ms or more the device has nothing.
    """
    step, told, back = 0, [0], d.size - 4 * KiB

    async def report(over: asyncio.Event) -> None:
        reported = 0
        while not over.is_set():
            await asyncio.sleep(0.1)
            reported = told[0]
        told.append(reported)

    async def serve() -> None:
        nonlocal step
        over = asyncio.Event()
        reports = asyncio.create_task(report(over))
        await asyncio.sleep(0)
        d.spent.restart()
        for step in turns():
            ids = step % 8 * 4 * KiB
            stamp(d, ids, 4 * KiB, step)
            d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
            for _ in range(3):
                d.launch(400_000)
            d.copy(d.host + back, d.device, 512, D2H, d.compute)
            d.record(step % 32, d.compute)
            await asyncio.sleep(0.003)
            while d.lib.cudaEventQuery(d.events[step % 32]):
                await asyncio.sleep(0.003)
            told[0] += ct.string_at(d.host + back, 512) == ct.string_at(d.host + ids, 512)
        d.spent.stop()
        over.set()
        await reports

    asyncio.run(serve())
    d.spent.add(ELSEWHERE, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if told[0] != step + 1:
        raise RuntimeError("a step's token is not what went in")
    return {}


class Node:
    """A page of tokens in a tree of prefixes."""

    __slots__ = ("block", "children", "used")

    def __init__(self, block: int) -> None:
        self.block, self.used, self.children = block, 0, dict[tuple[int, ...], Node]()


class Tree:
    """Prefixes by pages of sixteen tokens, in Python."""

    page = 16

    def __init__(self) -> None:
        self.root, self.blocks = Node(0), 0

    def pages(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[at : at + self.page]) for at in range(0, len(prompt), self.page)]

    def put(self, prompt: list[int]) -> None:
        node = self.root
        for page in self.pages(prompt):
            if page not in node.children:
                self.blocks += 1
                node.children[page] = Node(self.blocks)
            node = node.children[page]

    def match(self, prompt: list[int], step: int) -> list[int]:
        """The blocks of the longest prefix that the tree has, which were used in this step."""
        node, blocks = self.root, list[int]()
        for page in self.pages(prompt):
            if (child := node.children.get(page)) is None:
                break
            child.used = step
            blocks.append(child.block)
            node = child
        return blocks


@tenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def a_tree_of_prefixes_walked_in_python_for_all_that_wait(d: Device) -> Truth:
    """Before each step of 0.7 ms a tree of prefixes is walked page by page for each request that waits, for 1.4 ms.

    The thread has waited for the tokens before and launches the step when it is done, so nothing is on the device
    meanwhile. How many requests that takes is measured first, in a fiftieth of the time or so.
    """
    tree, idle, step = Tree(), Stretches(d), 0
    draw = random.Random(31)
    shared = [draw.randrange(32_000) for _ in range(320)]
    prompts = [[*shared, *(draw.randrange(32_000) for _ in range(160))] for _ in range(64)]
    for prompt in prompts:
        tree.put(prompt)
    took = quickest(lambda: [tree.match(prompt, 0) for prompt in prompts[:2]])
    waiting = [prompts[i % 64] for i in range(max(2 * 1_400_000 // took, 1))]
    matched: list[list[int]] = []
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 350_000)
        matched = [tree.match(prompt, step) for prompt in waiting]
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if any(len(blocks) != 30 or blocks[19] != 20 for blocks in matched):
        raise RuntimeError("the tree has not all of a prefix that was put in")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


@tenth(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # what goes to a kernel is computed in Python between the calls
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def an_optimizer_that_launches_two_kernels_for_each_parameter(d: Device) -> Truth:
    """Behind a backward pass of 0.3 ms, whose norm is read back, 180 parameters have two kernels of 1 us each.

    For each parameter Python looks up its state and computes two corrections, then makes two calls, above 5 us in all,
    for 2 us of kernels. The device is done with each kernel before it has the next.
    """
    states = [{"step": 0, "rate": 1e-4 * (1 + i % 7), "betas": (0.9, 0.999)} for i in range(180)]
    back, lost, step, rates = d.size - 4 * KiB, 0, 0, [0.0] * len(states)
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(300_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        for i, state in enumerate(states):
            state["step"] += 1
            first, second = (1 - beta ** state["step"] for beta in state["betas"])
            rates[i] = state["rate"] * second**0.5 / first
            d.launch(1_000)
            d.launch(1_000)
        lost += max(now() - begin - len(states) * 2_000, 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512 or states[-1]["step"] != step + 1:
        raise RuntimeError("the norm is another one than was computed")
    return {}


@tenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two layers the thread wakes, looks at a number and launches
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
)
def a_confidence_awaited_after_each_layer_to_leave_early(d: Device) -> Truth:
    """Of 32 layers of 12 us each is followed by its confidence, for whose event the thread waits; the 25th is enough.

    The next layer is launched when the thread has looked at the number. To wake, to look, and to give the device a
    kernel, a memset, a copy and an event takes longer than 12 us, and of that the device has a copy of 64 bytes.
    """
    layers, enough, left, token, back = 32, 24, 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for token in turns():
        for layer in range(layers):
            d.launch(12_000)
            clear(d, d.device + back, 200 if layer >= enough else (token + layer) % 100, 64, d.compute)
            d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
            d.record(layer, d.compute)
            d.sync_event(layer)
            if ct.string_at(d.host + back, 64)[-1] >= 200:
                left += layer == enough
                break
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if left != token + 1:
        raise RuntimeError("a token left at another layer than the one that is sure")
    return {}


@tenth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("link_bound", "wasted_stores", "gpu_starved", "synchronisation", "unmerged_neighbours"),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "redundant_loads"),
)
def a_coroutine_that_swaps_all_blocks_without_giving_the_loop_back(d: Device) -> Truth:
    """A coroutine swaps 2,000 blocks, one out and one in, on one stream; the coroutine that decodes has to wait for it.

    A copy takes the link 50 us and its call about 8 us, and on an H200 a stream takes some 2,000 of them that go both
    ways. The 4,000 of a swap are 200 ms of the link, and between two swaps are only 60 steps of 1 ms: the loop stands
    for 140 ms or more in a swap, at most 35 ms of them to make the calls. No kernel waits for a copy.
    """
    pool, pairs, slots, homes, stream = Pool(d, d.bytes_of(50)), 2_000, 16, 40, d.copies[9]
    lost, swap, last = 0, 0, (0, 0)

    async def swap_all(number: int) -> None:
        nonlocal lost, last
        durations = list[int]()
        for i in range(pairs):
            slot, home = d.device + i % slots * pool.size, d.host + (number + i) % homes * pool.size
            out = d.host + (homes + i % slots) * pool.size
            durations.append(d.copy(out, slot, pool.size, D2H, stream))
            durations.append(d.copy(slot, home, pool.size, H2D, stream))
            last = slot, home
        lost += sum(blocked(durations))

    async def decode() -> None:
        for _ in range(60):
            d.launch(1_000_000)
            d.record(0, d.compute)
            d.sync_event(0)
            await asyncio.sleep(0)

    async def serve() -> None:
        nonlocal swap
        for swap in turns():
            await asyncio.gather(swap_all(swap), decode())
        d.sync(stream)

    asyncio.run(serve())
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    same(d, *last, pool.size)
    return {"launch_queue_saturation": lost}


class Spill:
    """A file below memory that a preempted request's KV goes to and comes back from.

    Attributes:
        size: of its KV, bytes; took: ns to write it and to read it.
    """

    def __init__(self, d: Device) -> None:
        self.size, self.folder = (16 if d.gpu else 4) * MiB, tempfile.TemporaryDirectory()
        self.file = os.open(Path(self.folder.name) / "spill", os.O_RDWR | os.O_CREAT)
        self.out = memoryview((ct.c_char * self.size).from_address(d.host)).cast("B")
        self.back = memoryview((ct.c_char * self.size).from_address(d.host + self.size)).cast("B")
        self.took = quickest(lambda: self.write() + self.read())

    def write(self) -> int:
        begin, done = now(), 0
        while done < self.size:
            done += os.pwrite(self.file, self.out[done:], done)
        return now() - begin

    def read(self) -> int:
        begin, done = now(), 0
        while done < self.size:
            done += os.preadv(self.file, [self.back[done:]], done)
        return now() - begin


def make_the_spill(d: Device) -> None:
    MADE["spill"] = Spill(d)


@tenth(
    line=TIER,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        "wasted_stores",
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_spill,
    undecided_in=("kineto", "nsys"),  # their recordings hold CUDA's calls alone
)
def a_preempted_request_s_kv_written_to_a_file_and_read_again(d: Device) -> Truth:
    """A preempted request's 16 MiB leave and are written to a file; after another's turn they are read and brought.

    The thread that launches also writes and reads, when the device is done: that is half of the time or more, as both
    turns together compute for as long as the file took before the program began. Each way takes the link 0.3 ms.
    """
    spill, lost, turn = MADE.pop("spill"), 0, 0
    d.spent.restart()
    for turn in turns():
        clear(d, d.device, turn % 251, spill.size, d.compute)
        d.launch(spill.took // 2)
        d.copy(d.host, d.device, spill.size, D2H, d.compute)
        d.sync(d.compute)
        lost += spill.write()
        clear(d, d.device, 252, spill.size, d.compute)  # the other request has the slots
        d.launch(spill.took // 2)
        d.sync(d.compute)
        lost += spill.read()
        d.copy(d.device, d.host + spill.size, spill.size, H2D, d.compute)
    d.sync(d.compute)
    d.spent.add(TIER, lost)
    d.spent.stop()
    os.close(spill.file)
    spill.folder.cleanup()
    same(d, d.device + spill.size - 64 * KiB, d.host + 2 * spill.size - 64 * KiB, 64 * KiB)
    if ct.string_at(d.host + 2 * spill.size - 64, 64) != bytes([turn % 251]) * 64:
        raise RuntimeError("other bytes were read than were written")
    return {}
