"""Twentieth programs whose device waits for the host: hashes, a moderator, receipts, a mapping, candidates, faults."""

from __future__ import annotations

import ctypes as ct
import hashlib
import mmap
import os
import random
import socket
import subprocess
import sys
import tempfile
from array import array
from queue import Queue
from typing import Any

from accounts import Stretches, decoded, turns
from device import D2H, H2D, Device, beyond, now
from fresh_copies import clear, copy_2d
from ninth_healthy import token, told
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
    in_thread,
    twentieth,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Index:
    """Blocks of a prefix cache by the hash of their tokens and of all before them, and prompts to be looked up.

    Attributes:
        hits: blocks that were found.
    """

    tokens, prompts, blocks = 16, 64, 40

    def __init__(self) -> None:
        chance, self.hits = random.Random(202), 0
        self.asked = [array("i", chance.randbytes(4 * self.tokens * self.blocks)) for _ in range(self.prompts)]
        self.known = dict[bytes, int]()
        for number, prompt in enumerate(self.asked):
            for block, key in enumerate(self.keys(prompt)):
                if block < self.blocks // 2:
                    self.known[key] = number * self.blocks + block
        self.each_ns = max(quickest(lambda: self.look_up(0, 16), 8) // 16, 1)

    def keys(self, prompt: array[int]) -> list[bytes]:
        """The hashes of a prompt's blocks, each over the one before and its own tokens."""
        keys, last = [], b""
        for block in range(self.blocks):
            part = prompt[block * self.tokens : (block + 1) * self.tokens]
            last = hashlib.blake2b(last + part.tobytes(), digest_size=16).digest()
            keys.append(last)
        return keys

    def look_up(self, first: int, count: int) -> None:
        """So many prompts: how many of each one's blocks are known."""
        for number in range(first, first + count):
            for key in self.keys(self.asked[number % self.prompts]):
                if self.known.get(key) is None:
                    break
                self.hits += 1

    def looked_up_in(self, us: int) -> int:
        """How many prompts can be looked up in so long."""
        return max(us * 1_000 // self.each_ns, 1)


def make_the_index(_: Device) -> None:
    """The index, and how long a look-up takes."""
    MADE["index"] = Index()


@twentieth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation"),
    prepare=make_the_index,
)
def hashes_of_all_blocks_of_waiting_prompts_chained_in_python_before_each_step(d: Device) -> Truth:
    """When a step of 0.8 ms has its token, the blocks of all waiting prompts are hashed anew and looked up, for 1.6 ms.

    A block's hash is over its sixteen tokens and the hash before it, so they are made one by one. The next step is
    launched when all were looked up, so nothing is on the device meanwhile. How many prompts take 1.6 ms is measured
    before.
    """
    index, idle, step = MADE.pop("index"), Stretches(d), 0
    prompts = index.looked_up_in(1_600)
    index.hits = 0
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        index.look_up(step * prompts, prompts)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if index.hits != (step + 1) * prompts * (index.blocks // 2):
        raise RuntimeError("half of the blocks were to be found")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


MODERATOR = """
import os, re, socket, sys, time
asked, bad = socket.socket(fileno=int(sys.argv[1])), re.compile(rb"(\\w+ )*never")
while text := asked.recv(65_536):
    end = time.monotonic() + int(sys.argv[2]) * 1e-6
    while time.monotonic() < end:
        bad.match(text[:32])
    asked.send(text[:4] + b"yes.")
"""


class Moderator:
    """A process that reads the text of a step and answers after so many us whether it may go on.

    Attributes:
        asked: questions that the spinning thread asked its socket in vain.
    """

    def __init__(self, us: int = 1_600) -> None:
        self.asked = 0
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", MODERATOR, str(theirs.fileno()), str(us)]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.mine.setblocking(True)
        self.ask(0)
        self.mine.recv(64)
        self.mine.setblocking(False)

    def ask(self, step: int) -> None:
        """The text of a step goes to it."""
        self.mine.send(step.to_bytes(4, "little") + b"a token that nobody minds " * 40)

    def answered(self, step: int) -> None:
        """Asks the socket all the time until the verdict on a step is there."""
        while True:
            try:
                verdict = self.mine.recv(64)
            except BlockingIOError:
                self.asked += 1
                continue
            if verdict != step.to_bytes(4, "little") + b"yes.":
                raise RuntimeError("a verdict on another step has come")
            return

    def stop(self) -> None:
        """The process ends."""
        self.mine.close()
        self.child.wait()


def make_the_moderator(_: Device) -> None:
    """Starts it."""
    MADE["moderator"] = Moderator()


@twentieth(
    line=PYTHON,
    or_lines=(ELSEWHERE, TIER),  # it spins in Python, on a socket whose answer another process makes
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_moderator,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_moderator_process_whose_verdict_a_scheduler_spins_for_before_the_next_step(d: Device) -> Truth:
    """When a step of 0.7 ms has its token, its text goes to another process, whose verdict takes 1.6 ms.

    The scheduler asks a socket that does not block all the time, in Python, until the verdict is there, and launches
    the next step only then; so nothing is on the device for 1.6 ms of each 2.4 ms.
    """
    moderator, idle, step = MADE.pop("moderator"), Stretches(d), 0
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 350_000)
        moderator.ask(step)
        moderator.answered(step)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    moderator.stop()
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


class Receipts:
    """Pinned buffers for answers, one made for each, and a thread that gives back those that were read.

    Attributes:
        took: ns to pin one.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.read = d, (16 if d.gpu else 2) * MiB, Queue[int]()
        self.took, made = 1 << 40, list[int]()
        for _ in range(4):
            begin = now()
            made.append(d.made("cudaHostAlloc", self.size, 0))
            self.took = min(self.took, now() - begin)
        self.thread = in_thread(self.reap)
        for at in made:
            self.read.put(at)

    def reap(self) -> None:
        """What the thread does."""
        while at := self.read.get():
            self.d.check(self.d.lib.cudaFreeHost(at))

    def stop(self) -> None:
        """The thread ends."""
        self.read.put(0)
        self.thread.join()


def make_the_receipts(d: Device) -> None:
    """The thread, and how long it takes to pin a buffer."""
    MADE["receipts"] = Receipts(d)


@twentieth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE, SUBMITTING),  # where a launch has to wait for the other thread's cudaFreeHost
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        "wasted_stores",
    ),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_receipts,
)
def a_buffer_pinned_for_each_answer_and_given_back_by_a_thread_that_reaps_them(d: Device) -> Truth:
    """For each answer the server pins a buffer of 16 MiB; another thread frees those that were read.

    The answer before was waited for and handed to that thread, so nothing is on the device while the next buffer is
    made, and the two threads' calls may even wait for each other. How long it takes to pin one alone was measured
    before, and an answer computes for half of that.
    """
    receipts, lost, step, seen = MADE.pop("receipts"), 0, 0, 0
    d.spent.restart()
    for step in turns():
        begin = now()
        buffer = d.made("cudaHostAlloc", receipts.size, 0)
        lost += now() - begin
        for _ in range(2):
            d.launch(max(receipts.took // 4, 20_000))
        clear(d, d.device, step % 251, 64 * KiB, d.compute)
        d.copy(buffer, d.device, 64 * KiB, D2H, d.compute)
        d.sync(d.compute)
        seen += ct.string_at(buffer, 64) == bytes([step % 251]) * 64
        receipts.read.put(buffer)
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    receipts.stop()
    if seen != step + 1:
        raise RuntimeError("a buffer has another answer than was computed")
    return {"allocation_on_hot_path": lost}


class Spill:
    """A mapped file with places for six requests' KV, whose pages are there.

    Attributes:
        size: bytes of a request's KV; at: the first place's address; took: ns to copy one there.
    """

    places = 6

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (8 if d.gpu else 1) * MiB
        self.file = tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115 - closed with the object
        self.file.truncate(self.places * self.size)
        self.mapping = mmap.mmap(self.file.fileno(), self.places * self.size)
        self.view = ct.c_char.from_buffer(self.mapping)
        self.at = ct.addressof(self.view)
        ct.memset(self.at, 1, self.places * self.size)
        self.took = quickest(lambda: self.spill(0))

    def spill(self, number: int) -> None:
        """A request's KV straight into its place of the mapping."""
        to = self.at + number % self.places * self.size
        self.d.copy(to, self.d.device, self.size, D2H, self.d.compute)
        self.d.sync(self.d.compute)

    def end(self, number: int) -> None:
        """Raises unless a request's KV has come to the file; unmaps it."""
        del self.view
        self.mapping.close()
        tail = os.pread(self.file.fileno(), 64, (number % self.places + 1) * self.size - 64)
        self.file.close()
        if tail != bytes([number % 251]) * 64:
            raise RuntimeError("the file has other KV than was computed")


def make_the_spill(d: Device) -> None:
    """The mapping, and how long it takes to copy a request's KV to it."""
    MADE["spill"] = Spill(d)


@twentieth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING, TIER),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "weights_not_overlapped", "python_or_gil_bound"),
        *("unmerged_neighbours", "slow_tier", "link_bound"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "cpu_starved"),
    prepare=make_the_spill,
)
def kv_of_each_finished_request_copied_straight_into_a_mapped_file_that_nobody_registered(d: Device) -> Truth:
    """A request's KV, 8 MiB, is copied straight into a mapped file when its kernels are over, and then the next begins.

    The mapping is plain memory to CUDA: the copy goes through the driver's own buffers and the thread stands in it. The
    kernels were waited for, so nothing else is on the device. How long a copy takes was measured before, and a request
    computes for 0.7 of that. The file's pages are in memory, and six places in it take turns.
    """
    spill, lost, step = MADE.pop("spill"), 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(2):
            d.launch(max(spill.took * 7 // 20, 20_000))
        clear(d, d.device + spill.size - 4 * KiB, step % 251, 4 * KiB, d.compute)
        d.sync(d.compute)
        begin = now()
        spill.spill(step)
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    spill.end(step)
    return {"pageable_memory": lost}


@twentieth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON, ELSEWHERE),  # a trial is some calls, a wait and a line of Python in turn
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "aliased_stream"),
)
def a_tuner_that_times_each_trial_of_a_candidate_of_some_microseconds_alone(d: Device) -> Truth:
    """A tuner tries sixty candidates of 2 to 5 us ten times each, one trial at a time, between two timing events.

    It waits for the second event, asks how long the trial took, and only then submits the next. To record, to launch
    and to wake at an event takes some times as long as a kernel, so the device has nothing most of the time.
    """
    chance, best, trial, kernels = random.Random(203), dict[int, int](), 0, 0
    candidates = [chance.randrange(2_000, 5_000) for _ in range(60)]
    d.spent.restart()
    for trial in turns():
        number = trial // 10 % len(candidates)
        begin = d.mark(d.compute)
        d.launch(candidates[number])
        end = d.mark(d.compute)
        d.check(d.lib.cudaEventSynchronize(end))
        best[number] = min(best.get(number, 1 << 40), d.between(begin, end))
        kernels += candidates[number]
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - kernels)
    if trial > 1_000 and min(best.values()) > 1_000_000:
        raise RuntimeError("no trial took as long as its candidate")
    return {}


class Shards:
    """Shards of adapters in a mapped file, whose pages are given up after each use and come back by faults.

    Attributes:
        each_ns: what it takes to bring a shard into pinned memory.
    """

    size, count = 256 * KiB, 128

    def __init__(self, d: Device) -> None:
        self.d, self.file = d, tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115 - closed with the object
        for _ in range(self.count):
            self.file.write(random.randbytes(self.size))
        self.file.flush()
        self.mapping = mmap.mmap(self.file.fileno(), self.count * self.size)
        self.view = ct.c_char.from_buffer(self.mapping)
        self.at = ct.addressof(self.view)
        self.each_ns = max(quickest(lambda: self.bring(0, 8), 6) // 8, 1)

    def place(self, number: int) -> int:
        """Where on the host a shard comes to; no two lie side by side."""
        return self.d.host + number % 32 * 2 * self.size

    def bring(self, first: int, count: int) -> None:
        """So many shards to their places, out of pages that have to be mapped first."""
        self.mapping.madvise(mmap.MADV_DONTNEED)
        for number in range(first, first + count):
            ct.memmove(self.place(number), self.at + number % self.count * self.size, self.size)

    def end(self, number: int) -> None:
        """Raises unless a shard is in its place; unmaps the file."""
        del self.view
        self.mapping.close()
        right = os.pread(self.file.fileno(), self.size, number % self.count * self.size)
        self.file.close()
        if ct.string_at(self.place(number), self.size) != right:
            raise RuntimeError("another shard has come than was asked for")


def make_the_shards(d: Device) -> None:
    """The file, and how long it takes to bring a shard."""
    MADE["shards"] = Shards(d)


@twentieth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # faults are no calls, and a recorder of calls sees a thread outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        *("wasted_stores", "unmerged_neighbours"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "pinning_stall"),
    prepare=make_the_shards,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def shards_of_an_adapter_faulted_in_from_a_mapped_file_before_each_batch(d: Device) -> Truth:
    """Before each batch of 0.8 ms its adapter's shards are copied out of a mapped file whose pages fault, for 1.6 ms.

    The mapping's pages are given up first (MADV_DONTNEED), and the shards go to pinned memory; the last of them is then
    sent, some us of the link. The batch before was waited for, so nothing is on the device meanwhile. How many shards
    take 1.6 ms was measured before.
    """
    shards, step, at = MADE.pop("shards"), 0, 0
    count, last = min(max(1_600_000 // shards.each_ns, 1), 400), 0
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            shards.bring(step * count, count)
        last = step * count + count - 1
        d.copy(d.device, shards.place(last), shards.size, H2D, d.compute)
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    same(d, d.device, shards.place(last), shards.size)
    shards.end(last)
    return {}


class Tables:
    """Sessions' tables in rows that lie apart in pinned memory, and a 2D copy that brings one to the device.

    Attributes:
        rows: of a usual table; a long one has a fourth more, a short one a fourth less.
    """

    width, pitch, kinds = 16 * KiB, 20 * KiB, (4, 3, 5, 4)

    def __init__(self, d: Device) -> None:
        self.d, self.quarter = d, max(d.bytes_of(40) // (4 * self.width), 1)
        self.room = 5 * self.quarter * self.pitch  # for the longest
        self.count = (d.size - 64 * KiB) // self.room

    def rows(self, number: int) -> int:
        """How many rows the table with this number has."""
        return self.kinds[number % len(self.kinds)] * self.quarter

    def home(self, number: int, turn: int) -> int:
        """Where it is on the host; each turn it is another one."""
        return self.d.host + (number + turn * 7) % self.count * self.room

    def place(self, number: int) -> int:
        """Where it comes to."""
        return self.d.device + number % self.count * self.room

    def bring(self, number: int, turn: int, stream: int) -> int:
        """Submits its copy: how long that took, ns."""
        begin, to = now(), self.place(number)
        rows = self.rows(number)
        copy_2d(self.d, (to, self.width), (self.home(number, turn), self.pitch), self.width, rows, H2D, stream)
        return now() - begin


@twentieth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=(
        *("gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound", "redundant_loads"),
        *("link_bound", "small_copies"),
    ),
    like=("allocation_on_hot_path", "slow_tier", "cpu_starved", "pageable_memory", "wasted_stores"),
)
def tables_of_thousands_of_sessions_restored_by_2d_copies_of_the_thread_that_decodes(d: Device) -> Truth:
    """A thread restores 3,500 sessions' tables by a 2D copy each on one stream, then decodes forty steps of 1 ms.

    A table takes the device 30 to 50 us and its call some 6 us, and a stream takes a thousand or two of them: the
    thread stands in its calls for 50 ms or more of each round, with nothing on the device but copies. Most of the rest
    is done beside the steps, which wait for no copy: they decode other sessions.
    """
    tables, stream, count, lost, turn = Tables(d), d.copies[13], 3_500, 0, 0
    d.spent.restart()
    for turn in turns():
        lost += beyond([tables.bring(number, turn, stream) for number in range(count)])
        for step in range(40):
            d.launch(1_000_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.sync(d.compute)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    d.sync(stream)
    same(d, tables.place(count - 1), tables.home(count - 1, turn), tables.width)
    return {"launch_queue_saturation": lost}
