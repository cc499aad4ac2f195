"""Twelfth programs whose device waits for the host: sessions, a cache, masks, a solver, operators, a pool, files."""

from __future__ import annotations

import ctypes as ct
import os
import random
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accounts import Pool, Stretches, decoded, turns
from device import D2H, H2D, Device, beyond, now
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
    pageable,
    twelfth,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Sessions:
    """Six sessions' states in plain memory, each of its own size, and one place on the device for any of them.

    Attributes:
        took: ns to take one out and to put the next one in, on average.
    """

    def __init__(self, d: Device) -> None:
        self.d, unit = d, MiB if d.gpu else 128 * KiB
        self.sizes = [n * unit for n in (9, 5, 11, 7, 12, 6)]
        self.keep, at = pageable(sum(self.sizes))
        self.at = [at + sum(self.sizes[:i]) for i in range(len(self.sizes))]
        for i, (place, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            ct.memmove(place, random.Random(120 + i).randbytes(size), size)
        d.copy(d.device, self.at[-1], self.sizes[-1], H2D, d.compute)  # the last one is there, before and after
        d.sync(d.compute)
        self.took = quickest(self.around) // len(self.sizes)

    def around(self) -> None:
        """A turn of each session."""
        for turn in range(len(self.sizes)):
            self.exchange(turn)

    def exchange(self, turn: int) -> None:
        """The session of the turn before leaves, and this turn's comes; the thread waits for both."""
        d, last, new = self.d, (turn - 1) % len(self.sizes), turn % len(self.sizes)
        d.copy(self.at[last], d.device, self.sizes[last], D2H, d.compute)
        d.copy(d.device, self.at[new], self.sizes[new], H2D, d.compute)
        d.sync(d.compute)


def make_the_sessions(d: Device) -> None:
    """The sessions, and how long an exchange takes."""
    MADE["sessions"] = Sessions(d)


@twelfth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "weights_not_overlapped", "python_or_gil_bound"),
        "unmerged_neighbours",
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_sessions,
)
def sessions_whose_states_leave_for_plain_memory_and_come_back_at_their_turn(d: Device) -> Truth:
    """At each turn the last session's state leaves for plain memory and the next one's comes out of it, 5 to 12 MiB.

    The kernels of the turn before were waited for, so the device has only what the driver copies, and the thread stands
    in the two calls. How long an exchange takes was measured before the program began, and a turn computes for 0.8 of
    that.
    """
    sessions, lost, turn = MADE.pop("sessions"), 0, 0
    marks = [0] * len(sessions.sizes)
    d.spent.restart()
    for turn in turns():
        begin = now()
        sessions.exchange(turn)
        lost += now() - begin
        mine = turn % len(marks)
        marks[mine] = turn % 251
        clear(d, d.device + sessions.sizes[mine] - 4 * KiB, marks[mine], 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(max(sessions.took * 2 // 5, 20_000))
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    sessions.exchange(turn + 1)
    for i in {turn % 6, (turn - 1) % 6, (turn - 2) % 6}:
        if ct.string_at(sessions.at[i] + sessions.sizes[i] - 64, 64) != bytes([marks[i]]) * 64:
            raise RuntimeError("a session has another state than it was left in")
    return {"pageable_memory": lost}


class Segments:
    """The memory of a cache or of a trainer's states: sixteen segments, made and given back together.

    Attributes:
        took: ns to make and to give back all.
    """

    count = 16

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (256 if d.gpu else 1) * MiB
        self.took = quickest(lambda: self.free(self.make()))

    def make(self) -> list[int]:
        """Where they are."""
        return [self.d.made("cudaMalloc", self.size) for _ in range(self.count)]

    def free(self, segments: list[int]) -> None:
        """Gives all back."""
        for at in segments:
            self.d.check(self.d.lib.cudaFree(at))


def make_the_segments(d: Device) -> None:
    """How long the driver takes for all segments."""
    MADE["segments"] = Segments(d)


@twelfth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall", "wasted_stores", "python_or_gil_bound"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_segments,
)
def a_cache_given_up_for_training_and_made_again_for_each_generation(d: Device) -> Truth:
    """An engine and a trainer share a device in turn: each makes sixteen segments, computes, waits and frees them all.

    Each cudaMalloc and cudaFree of 256 MiB is called with nothing on the device. How long sixteen of both take was
    measured before the program began, and a phase's kernels take 0.7 of that.
    """
    segments, lost, phase, right = MADE.pop("segments"), 0, 0, 0
    back = d.host + d.size - 4 * KiB
    d.spent.restart()
    for phase in turns():
        begin = now()
        places = segments.make()
        lost += now() - begin
        for at in places:
            clear(d, at + segments.size - 4 * KiB, phase % 251, 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(max(segments.took * 7 // 20, 20_000))
        d.copy(back, places[-1] + segments.size - 512, 512, D2H, d.compute)
        d.sync(d.compute)
        right += ct.string_at(back, 512) == bytes([phase % 251]) * 512
        begin = now()
        segments.free(places)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if right != phase + 1:
        raise RuntimeError("a segment has other bytes than it was given")
    return {"allocation_on_hot_path": lost}


class Grammar:
    """States of a grammar, each with the tokens that it allows, and masks of them in pinned memory.

    Attributes:
        words: bytes of a sequence's mask; states: numbers of allowed tokens, by state.
    """

    words = 4 * KiB  # of 32,000 tokens

    def __init__(self, d: Device) -> None:
        draw = random.Random(160)
        self.d, self.states = d, [draw.sample(range(32_000), 150 + 10 * (i % 7)) for i in range(24)]

    def home(self, step: int) -> int:
        """Where a step's masks are made, for 256 sequences at most."""
        return self.d.host + (1 + step % 2) * MiB

    def state(self, step: int, sequence: int) -> int:
        """Where the grammar stands for a sequence."""
        return (step * 5 + sequence * 7) % len(self.states)

    def mask(self, step: int, sequences: int) -> None:
        """Sets the bits of the allowed tokens of each sequence, one by one."""
        for sequence in range(sequences):
            bits = bytearray(self.words)
            for one in self.states[self.state(step, sequence)]:
                bits[one >> 3] |= 1 << (one & 7)
            ct.memmove(self.home(step) + sequence * self.words, bytes(bits), self.words)


@twelfth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def masks_of_a_grammar_set_bit_by_bit_for_each_sequence_before_the_next_step(d: Device) -> Truth:
    """When a step of 0.8 ms has its tokens, Python sets the bits of all tokens that a grammar allows next, for 1.6 ms.

    Some 180 bits for each sequence, in a mask of 4 KiB, all of which go to the device in one copy of 0.02 ms or less in
    front of the step. The thread has waited before, so nothing else is on the device. How many sequences take 1.6 ms is
    measured first, in a tenth of the time.
    """
    grammar, idle, step = Grammar(d), Stretches(d), 0
    sequences = min(max(8 * 1_600_000 // quickest(lambda: grammar.mask(0, 8)), 1), 256)
    d.spent.restart()
    for step in turns():
        if step:
            d.copy(d.device + MiB, grammar.home(step - 1), sequences * grammar.words, H2D, d.compute)
        decoded(d, step, idle, 2, 400_000)
        grammar.mask(step, sequences)
    d.copy(d.device + MiB, grammar.home(step), sequences * grammar.words, H2D, d.compute)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    last = sequences - 1
    mask = ct.string_at(grammar.home(step) + last * grammar.words, grammar.words)
    if sum(byte.bit_count() for byte in mask) != len(grammar.states[grammar.state(step, last)]):
        raise RuntimeError("a mask allows another number of tokens than the grammar")
    same(d, d.device + MiB + last * grammar.words, grammar.home(step) + last * grammar.words, grammar.words)
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


@twelfth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two evaluations the thread wakes, computes a number and submits
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
)
def a_solver_whose_step_size_the_host_chooses_after_each_evaluation(d: Device) -> Truth:
    """A solver evaluates for 12 us, its error is read back, the host chooses a step size, which goes to the device.

    The thread waits for the stream after each evaluation. To wake, to compute the size, and to give the device a copy
    of 64 bytes, a kernel, a memset and another copy takes longer than 12 us, and until then the device has none.
    """
    size, right, evaluation, back = 0.1, 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for evaluation in turns():
        home = evaluation % 4 * 64
        ct.memmove(d.host + home, (int(size * 1e15) << 64 | evaluation).to_bytes(64, "little"), 64)
        d.copy(d.device, d.host + home, 64, H2D, d.compute)
        d.launch(12_000)
        clear(d, d.device + back, evaluation % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.sync(d.compute)
        error = ct.string_at(d.host + back, 64)[0]
        right += error == evaluation % 251
        size = min(max(size * 0.9 * (40 / (1 + error)) ** 0.2, 0.01), 1.0)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    same(d, d.device, d.host + evaluation % 4 * 64, 64)
    if right != evaluation + 1:
        raise RuntimeError("an error is another than was computed")
    return {}


@twelfth(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # the calls are made one by one out of Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "load_not_ordered"),
)
def operators_of_a_graph_walked_by_an_executor_that_makes_each_wait_for_its_inputs(d: Device) -> Truth:
    """Behind 0.25 ms of attention, read back, an executor gives the device 120 operators of 1 us, on two streams.

    Before each operator it makes its stream wait for the events of both inputs, and after it records another event:
    four calls out of Python, above 7 us in all, for 1 us of kernel. The device is done with an operator before it has
    the next; every eighth has an input of the other stream.
    """
    lanes, count, back, lost, step = (d.compute, d.copies[15]), 120, d.size - 4 * KiB, 0, 0
    operators = [(i // 8 % 2, max(i - 1, 0), max(i - 16, 0)) for i in range(count)]

    def walk() -> None:
        for i, (lane, first, second) in enumerate(operators):
            for earlier in (first, second):
                if earlier < i:
                    d.check(d.lib.cudaStreamWaitEvent(lanes[lane], d.events[earlier], 0))
            d.launch(1_000, lanes[lane])
            d.record(i, lanes[lane])
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[count - 1], 0))

    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(250_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        walk()
        lost += max(now() - begin - count * 1_000, 0)
    d.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the attention read back is another than was computed")
    return {}


class Records:
    """Eight records of a step that a pool of four threads compresses, outside of the interpreter's lock.

    Attributes:
        size: of a record, bytes, so that all eight take the pool 1.6 ms.
    """

    def __init__(self) -> None:
        draw = random.Random(170)
        self.text, self.size = " ".join(str(draw.randrange(32_000)) for _ in range(100_000)).encode(), 8 * KiB
        self.pool = ThreadPoolExecutor(4)
        self.size = min(max(self.size * 1_600_000 // quickest(lambda: self.packed(0)), 64), 256 * KiB)

    def record(self, step: int, part: int) -> bytes:
        """One of a step's records."""
        at = (step * 8 + part) * 997 % (len(self.text) - self.size)
        return self.text[at : at + self.size]

    def packed(self, step: int) -> list[bytes]:
        """All of a step's records, compressed."""
        return list(self.pool.map(zlib.compress, [self.record(step, part) for part in range(8)]))


@twelfth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),  # of calls alone, the thread is outside of CUDA
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("context_lock_stall", "small_copies", "slow_tier", "cpu_starved", "launch_queue_saturation"),
)
def records_compressed_by_a_pool_that_the_thread_joins_before_the_next_step(d: Device) -> Truth:
    """When a step of 0.8 ms has its token, four threads compress its eight records, for which the serving one waits.

    It stands at the lock of their results for some 1.6 ms, as they do without the interpreter's lock; how large records
    take that long is measured first. The step is over and the next one is launched when all are there, so nothing is on
    the device meanwhile.
    """
    records, step, back, packed = Records(), 0, d.size - 4 * KiB, list[bytes]()
    d.spent.restart()
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        for _ in range(2):
            d.launch(400_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        with d.spent.on(ELSEWHERE):
            packed = records.packed(step)
    d.spent.stop()
    records.pool.shutdown()
    if zlib.decompress(packed[-1]) != records.record(step, 7):
        raise RuntimeError("a record is not what was compressed")
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("a token is another than was computed")
    return {}


class Adapters:
    """Six adapters in a file each, read piece by piece, each piece of which goes to the device as soon as it is there.

    Attributes:
        size: of an adapter, bytes; piece: of a piece; took: ns to read one adapter.
    """

    count, pieces = 6, 16

    def __init__(self, d: Device) -> None:
        self.d, self.piece = d, (512 if d.gpu else 128) * KiB
        self.size, self.folder = self.pieces * self.piece, tempfile.TemporaryDirectory()
        self.view = memoryview((ct.c_char * self.size).from_address(d.host)).cast("B")
        for adapter in range(self.count):
            self.path(adapter).write_bytes(random.Random(140 + adapter).randbytes(self.size))
        self.took = min(self.bring(adapter) for adapter in range(self.count))

    def path(self, adapter: int) -> Path:
        """Where an adapter is."""
        return Path(self.folder.name) / f"adapter-{adapter % self.count}.bin"

    def bring(self, adapter: int) -> int:
        """An adapter to the device; how long it took to open and to read its file, ns."""
        begin = now()
        file, took = os.open(self.path(adapter), os.O_RDONLY), now() - begin
        for at in range(0, self.size, self.piece):
            begin, done = now(), 0
            while done < self.piece:
                done += os.preadv(file, [self.view[at + done : at + self.piece]], at + done)
            took += now() - begin
            self.d.copy(self.d.device + at, self.d.host + at, self.piece, H2D, self.d.compute)
        self.d.sync(self.d.compute)
        os.close(file)
        return took


def make_the_adapters(d: Device) -> None:
    """The files, and how long one takes."""
    MADE["adapters"] = Adapters(d)


@twelfth(
    line=TIER,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_adapters,
    undecided_in=("kineto", "nsys"),  # their recordings hold CUDA's calls alone
)
def an_adapter_read_from_its_file_and_sent_piece_by_piece_before_its_batch(d: Device) -> Truth:
    """A batch's adapter of 8 MiB is read from its file in sixteen pieces, each of which is sent while the next is read.

    The thread that launches also reads, when the batch before is over. How long it takes to read one was measured
    before, and a batch's kernels take 0.7 of that; what a piece takes the link, 0.01 ms, is a small part of its read.
    """
    adapters, lost, batch = MADE.pop("adapters"), 0, 0
    d.spent.restart()
    for batch in turns():
        lost += adapters.bring(batch)
        for _ in range(2):
            d.launch(max(adapters.took * 7 // 20, 20_000))
        d.sync(d.compute)
    d.spent.add(TIER, lost)
    d.spent.stop()
    with adapters.path(batch).open("rb") as file:
        file.seek(adapters.size - 64)
        end = file.read()
    adapters.folder.cleanup()
    d.copy(d.host, d.device + adapters.size - 64, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, 64) != end:
        raise RuntimeError("the device has another adapter than the batch's file")
    return {}


@twelfth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=(
        "link_bound",
        "wasted_stores",
        "gpu_starved",
        "synchronisation",
        "unmerged_neighbours",
        "python_or_gil_bound",
    ),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "fence_before_copies"),
)
def finished_blocks_spilled_with_an_event_for_each_by_the_thread_that_schedules(d: Device) -> Truth:
    """Each 40 steps the scheduler spills 1,200 finished blocks on one stream: keys, values, and an event for a block.

    Keys and values take the link 45 us each, a call 4 to 8 us, and a stream takes a thousand or two of them: the loop
    stands for 45 ms or more of each spill, with nothing on the device but copies. Then come 40 steps of 1 ms, in which
    most of the rest leaves. They compute elsewhere: no kernel waits for a copy.
    """
    pool, blocks, slots, stream = Pool(d, d.bytes_of(45)), 1_200, 16, d.copies[13]
    homes, lost, spill = min(pool.count - 1, 60), 0, 0
    place = (0, 0)
    for spill in turns():
        durations = list[int]()
        for slot in range(slots):
            clear(d, d.device + slot * pool.size, (spill * slots + slot) % 251, pool.size, stream)
        for block in range(blocks):
            for part in range(2):
                i = block * 2 + part
                place = d.device + i % slots * pool.size, d.host + i % homes * pool.size
                durations.append(d.copy(place[1], place[0], pool.size, D2H, stream))
            begin = now()
            d.record(block % 64, stream)
            durations.append(now() - begin)
        lost += beyond(durations)
        for step in range(40):
            d.launch(1_000_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.sync(d.compute)
    d.sync(stream)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    same(d, *place, pool.size)
    return {"launch_queue_saturation": lost}
