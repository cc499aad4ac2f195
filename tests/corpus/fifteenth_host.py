"""Fifteenth programs whose device waits for the host: arrays, a cache, speech, boxes, experts, a journal, replicas."""

from __future__ import annotations

import ctypes as ct
import mmap
import os
import random
import tempfile
from typing import Any

from accounts import Stretches, decoded, turns
from device import D2H, Device, beyond, now
from fresh_copies import clear
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
    fifteenth,
)
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


class Embeddings:
    """Arrays in plain memory that are made anew for each batch's embeddings, the last four of which are kept.

    Attributes:
        size: of a batch's, bytes; took: ns to read one batch's.
    """

    kept = 4

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.arrays = d, (16 if d.gpu else 2) * MiB, list[mmap.mmap]()
        self.took = min(self.read() for _ in range(4))

    def read(self) -> int:
        """The batch's into an array of which no page was touched before; how long the call took, ns."""
        array = mmap.mmap(-1, self.size)
        self.arrays.append(array)
        del self.arrays[: -self.kept]
        at, begin = ct.addressof(ct.c_char.from_buffer(array)), now()
        self.d.check(self.d.lib.cudaMemcpy(at, self.d.device, self.size, D2H))
        return now() - begin


def make_the_embeddings(d: Device) -> None:
    """How long a batch's take."""
    MADE["embeddings"] = Embeddings(d)


@fifteenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "weights_not_overlapped", "python_or_gil_bound"),
        "unmerged_neighbours",
    ),
    like=("small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier", "redundant_loads"),
    prepare=make_the_embeddings,
)
def embeddings_of_each_batch_read_into_an_array_of_plain_memory_that_was_just_made(d: Device) -> Truth:
    """An embedding server reads a batch's 16 MiB by cudaMemcpy into a new array, no page of which was touched.

    The batch's kernels were waited for, so the device has only the driver's pieces of the copy, and the thread stands
    in the call until the last page was made and filled. How long a call takes was measured before the program began,
    and a batch computes for 0.7 of that.
    """
    embeddings, lost, batch = MADE.pop("embeddings"), 0, 0
    d.spent.restart()
    for batch in turns():
        clear(d, d.device + embeddings.size - 4 * KiB, batch % 251, 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(max(embeddings.took * 7 // 20, 20_000))
        d.sync(d.compute)
        lost += embeddings.read()
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    for i in range(1, 3):
        if embeddings.arrays[-i][-64:] != bytes([(batch + 1 - i) % 251]) * 64:
            raise RuntimeError("an array has other embeddings than were computed")
    return {"pageable_memory": lost}


class Cached:
    """The segments that an allocator has cached, all of the size that the last batch's shape has wanted.

    Attributes:
        shapes: how many segments of how many MiB a batch wants, by its shape; took: ns to change the shape.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.segments = d, list[int]()
        self.shapes = ((14, 192), (6, 448)) if d.gpu else ((14, 2), (6, 5))
        self.fit(1)
        self.took = quickest(self.both) // 2

    def both(self) -> None:
        """A batch of either shape."""
        for shape in range(2):
            self.fit(shape)

    def fit(self, shape: int) -> None:
        """What the allocator does when it has no segment that is large enough and is refused another one."""
        d, at = self.d, ct.c_void_p()
        if d.lib.cudaMalloc(ct.byref(at), 1 << 46) == 0:
            raise RuntimeError("there was memory of 64 TiB")
        d.lib.cudaGetLastError()
        for segment in self.segments:
            d.check(d.lib.cudaFree(segment))
        count, size = self.shapes[shape]
        self.segments = [d.made("cudaMalloc", size * MiB) for _ in range(count)]

    def end(self, shape: int) -> int:
        """The end of the last segment, 4 KiB."""
        return self.segments[-1] + self.shapes[shape][1] * MiB - 4 * KiB


def make_the_cached(d: Device) -> None:
    """The segments of the first shape, and how long a change takes."""
    MADE["cached"] = Cached(d)


@fifteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=(
        *("failed_calls", "gpu_starved", "synchronisation", "context_lock_stall", "wasted_stores"),
        "python_or_gil_bound",
    ),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_cached,
)
def segments_given_back_because_memory_was_refused_and_made_anew_for_each_batch_s_shape(d: Device) -> Truth:
    """Batches of two shapes take turns; none fits the cached segments, more is refused, all go back, others are made.

    Each cudaFree of six or fourteen segments and each cudaMalloc of as many others is called with nothing on the
    device. How long a change takes was measured before the program began, and a batch's kernels take 0.7 of that.
    """
    cached, lost, batch, right = MADE.pop("cached"), 0, 0, 0
    back = d.host + d.size - 4 * KiB
    d.spent.restart()
    for batch in turns():
        begin = now()
        cached.fit(batch % 2)
        lost += now() - begin
        clear(d, cached.end(batch % 2), batch % 251, 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(max(cached.took * 7 // 20, 20_000))
        d.copy(back, cached.end(batch % 2), 512, D2H, d.compute)
        d.sync(d.compute)
        right += ct.string_at(back, 512) == bytes([batch % 251]) * 512
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    for segment in cached.segments:
        d.check(d.lib.cudaFree(segment))
    if right != batch + 1:
        raise RuntimeError("a segment has other bytes than it was given")
    return {"allocation_on_hot_path": lost}


class Transcripts:
    """The beam of a recogniser: what was heard, as words' numbers, with how likely it ends in a pause or in a word.

    Attributes:
        beam: the best prefixes with both numbers.
    """

    best, words = 16, 10

    def __init__(self) -> None:
        draw = random.Random(313)
        self.frames = [[(draw.randrange(400), draw.random()) for _ in range(self.words)] for _ in range(61)]
        self.beam: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}

    def hear(self, frame: int) -> None:
        """Goes on by a frame: each prefix with each of the frame's words, equal ones together, the best are kept."""
        heard: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (pause, word) in self.beam.items():
            rest, repeated = heard.get(prefix, (0.0, 0.0))
            heard[prefix] = rest + (pause + word) * 0.5, repeated
            for number, likely in self.frames[frame % len(self.frames)]:
                longer = (*prefix[-24:], number)
                ends = pause if prefix and prefix[-1] == number else pause + word
                rest, repeated = heard.get(longer, (0.0, 0.0))
                heard[longer] = rest, repeated + ends * likely
        kept = sorted(heard.items(), key=lambda one: -sum(one[1]))[: self.best]
        whole = sum(map(sum, heard.values()))
        self.beam = {prefix: (pause / whole, word / whole) for prefix, (pause, word) in kept}


@fifteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def prefixes_of_a_recogniser_s_beam_merged_in_dictionaries_between_two_segments_of_speech(d: Device) -> Truth:
    """When a segment of 0.8 ms has its scores, Python goes on with the beam frame by frame, for 1.6 ms.

    Sixteen prefixes with ten words each are merged in a dictionary for each frame, and sorted. The thread has waited
    for the scores and gives the device the next segment after the last frame, so nothing else is on the device. How
    many frames take 1.6 ms is measured first.
    """
    speech, idle, segment = Transcripts(), Stretches(d), 0
    for frame in range(8):
        speech.hear(frame)
    frames = min(max(1_600_000 // quickest(lambda: speech.hear(0), 8), 2), 400)
    d.spent.restart()
    for segment in turns():
        decoded(d, segment, idle, 2, 400_000)
        for frame in range(frames):
            speech.hear(segment * frames + frame)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if len(speech.beam) != speech.best or not 0 < sum(map(sum, speech.beam.values())) <= 1.000001:
        raise RuntimeError("the beam has other prefixes than the best")
    same(d, d.device, d.host + segment % 8 * 4 * KiB, 4 * KiB)
    return {}


@fifteenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two levels the thread wakes, looks at a number and launches
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "aliased_stream"),
)
def counts_of_kept_boxes_awaited_level_by_level_on_a_detector_s_five_streams(d: Device) -> Truth:
    """Five levels of a detector have a stream each; a level's kernel of 10 us counts boxes, and the host waits for it.

    Only with the count can it launch the level's kernel that sorts them, 4 us, and then the next level's. To wake at an
    event, to look at the count, and to give the device two kernels, a memset, a copy and an event takes longer than
    the 14 us that both kernels compute; nothing else is on the device.
    """
    levels, image, right, back = d.copies[17:22], 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for image in turns():
        for level, stream in enumerate(levels):
            mine, number = back + level * 64, (image + level) % 251
            d.launch(10_000, stream)
            clear(d, d.device + mine, number, 64, stream)
            d.copy(d.host + mine, d.device + mine, 64, D2H, stream)
            d.record(level, stream)
            d.sync_event(level)
            count = ct.string_at(d.host + mine, 64)
            right += count[0] == count[-1] == number
            d.launch(4_000, stream)
    d.synchronize()
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if right != (image + 1) * len(levels):
        raise RuntimeError("a count is another than was computed")
    return {}


class Experts:
    """Forty-eight experts of a layer and the tokens that are routed to each, by lists in Python."""

    count, tokens, most = 48, 96, 4

    def __init__(self, d: Device) -> None:
        self.d, draw = d, random.Random(348)
        self.routes = [[draw.sample(range(self.count), self.most) for _ in range(self.tokens)] for _ in range(7)]

    def launch(self, layer: int) -> int:
        """Three kernels for each expert that has tokens: gather, multiply, scatter; how many kernels it were."""
        asked: list[list[int]] = [[] for _ in range(self.count)]
        for token, chosen in enumerate(self.routes[layer % len(self.routes)]):
            for expert in chosen:
                asked[expert].append(token)
        kernels = 0
        for mine in asked:
            for _ in range(3 if mine else 0):
                self.d.launch(1_000)
                kernels += 1
        return kernels


@fifteenth(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # the calls are made one by one out of Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "load_not_ordered"),
)
def three_small_kernels_for_each_of_forty_eight_experts_launched_one_by_one(d: Device) -> Truth:
    """Behind 0.25 ms of attention and routing, read back, each expert has its tokens gathered, multiplied, scattered.

    These are three kernels of 1 us for each expert, above 140 for a layer, launched one by one out of Python, which
    takes 4 us or more for each: the device is done with one before it has the next. The lists of each expert's tokens
    are made before the first of them.
    """
    experts, lost, layer, back, kernels = Experts(d), 0, 0, d.size - 4 * KiB, 0
    for layer in turns():
        clear(d, d.device + back, layer % 251, 512, d.compute)
        d.launch(250_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        kernels = experts.launch(layer)
        lost += max(now() - begin - kernels * 1_000, 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if kernels <= 2 * experts.count or ct.string_at(d.host + back, 512) != bytes([layer % 251]) * 512:
        raise RuntimeError("the layer has other routes than were computed")
    return {}


class Journal:
    """A file to which a step's finished blocks are written and flushed, at one of eight places in turn.

    Attributes:
        size: of a step's blocks, bytes, so that they take 1.6 ms where the file is no slower; took: ns that they take.
    """

    def __init__(self, d: Device) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.view = memoryview((ct.c_char * (8 * MiB)).from_address(d.host))
        self.size = 256 * KiB
        self.size = min(max(self.size * 1_600_000 // self.quickest(), 64 * KiB), 8 * MiB) & -4096
        self.took = self.quickest()

    def quickest(self) -> int:
        """How long a step's blocks take at best, at each of the places."""
        return min(self.keep(step) for step in range(8))

    def keep(self, step: int) -> int:
        """Writes a step's blocks, and waits until the file has them for good; how long it took, ns."""
        begin, done, place = now(), 0, step % 8 * self.size
        blocks = self.view[: self.size]
        while done < self.size:
            done += os.pwrite(self.file.fileno(), blocks[done:], place + done)
        os.fsync(self.file.fileno())
        return now() - begin


def make_the_journal(d: Device) -> None:
    """The file, and how long it takes."""
    MADE["journal"] = Journal(d)


@fifteenth(
    line=TIER,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_journal,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def finished_blocks_written_to_a_journal_and_flushed_before_the_next_step(d: Device) -> Truth:
    """A step's finished blocks leave for pinned memory, are written to a journal and flushed by fsync; then the next.

    The thread that launches also writes, when the step is over, so nothing is on the device meanwhile. What the file
    takes was measured before the program began, of so many blocks that it is 1.6 ms where it is no slower, and a step
    computes for 0.7 of that; the blocks take the link 0.15 ms at most.
    """
    journal, lost, step = MADE.pop("journal"), 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(2):
            d.launch(max(journal.took * 7 // 20, 20_000))
        clear(d, d.device, step % 251, journal.size, d.compute)
        d.copy(d.host, d.device, journal.size, D2H, d.compute)
        d.sync(d.compute)
        lost += journal.keep(step)
    d.spent.add(TIER, lost)
    d.spent.stop()
    end = os.pread(journal.file.fileno(), 64, (step % 8 + 1) * journal.size - 64)
    journal.file.close()
    if end != bytes([step % 251]) * 64:
        raise RuntimeError("the journal has other blocks than were computed")
    same(d, d.device, d.host, journal.size)
    return {}


class Replicas:
    """Places for experts on the device, two sets of them, in pieces that take some 35 us to be copied within it.

    Attributes:
        size: of a piece, bytes; at: where all pieces are.
    """

    pieces = 12

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (56 if d.gpu else 1) * MiB
        self.at = d.made("cudaMalloc", 2 * self.pieces * self.size)
        clear(d, self.at, 7, 2 * self.pieces * self.size, d.compute)
        probe, taken = Stretches(d), list[int]()
        for _ in range(4):
            probe.ns = 0
            d.launch(200_000)
            probe.begin()
            for i in range(8):
                self.move(i, d.compute)
            probe.end()
            d.sync(d.compute)
            taken.append(probe.read() // 8)
        self.size = min(max(self.size * 35_000 // min(taken), 64 * KiB), self.size) & -4096

    def place(self, i: int) -> int:
        """Where a piece is."""
        return self.at + i % (2 * self.pieces) * self.size

    def move(self, i: int, stream: int) -> int:
        """A piece from the one set to its replica's place in the other; how long the call took, ns."""
        d, source = self.d, i % self.pieces
        return d.copy(self.place(self.pieces + source), self.place(source), self.size, D2D, stream)


def make_the_replicas(d: Device) -> None:
    """The memory."""
    MADE["replicas"] = Replicas(d)


@fifteenth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound", "redundant_loads"),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "pageable_memory"),
    prepare=make_the_replicas,
)
def replicas_of_experts_moved_within_the_device_piece_by_piece_by_the_thread_that_decodes(d: Device) -> Truth:
    """Each 40 steps the thread that decodes moves the experts' replicas: 3,500 copies within the device on one stream.

    A copy takes the device some 35 us and its call 4 us, and a stream takes a thousand or two of them: the loop stands
    for 40 ms or more of each round, with nothing on the device but copies. Then come 40 steps of 1 ms, in which most of
    the rest is done. They compute with the replicas of a plan before: no kernel waits for a copy.
    """
    replicas, stream, count, lost, plan = MADE.pop("replicas"), d.copies[14], 3_500, 0, 0
    d.spent.restart()
    for plan in turns():
        for piece in range(replicas.pieces):
            clear(d, replicas.place(piece), (plan * 12 + piece) % 251, 4 * KiB, stream)
        lost += beyond([replicas.move(plan + i, stream) for i in range(count)])
        for step in range(40):
            d.launch(1_000_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.sync(d.compute)
    d.sync(stream)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    for piece in (0, replicas.pieces - 1):
        d.copy(d.host, replicas.place(replicas.pieces + piece), 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([(plan * 12 + piece) % 251]) * 512:
            raise RuntimeError("a replica is another than its expert")
    d.check(d.lib.cudaFree(replicas.at))
    return {"launch_queue_saturation": lost}


class Sandbox:
    """A shell that is started for each answer, computes what the answer says, and ends with what comes out.

    Attributes:
        answers: how many of a rollout are checked, so that they take some 1.6 ms; took: ns that they take.
    """

    shell = "/bin/sh"

    def __init__(self) -> None:
        self.env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self.answers = 1
        self.answers = min(max(1_600_000 // quickest(lambda: self.check(3), 8), 1), 12)
        self.took = quickest(lambda: self.check(3), 8)

    def check(self, rollout: int) -> int:
        """Starts a shell for one answer after another, and waits for its end; how many were right."""
        right = 0
        for answer in range(self.answers):
            one, other = rollout % 13 + 2, answer + 3
            said = ["sh", "-c", f"exit $(( ({one} * {other} + {answer}) % 200 ))"]
            child = os.posix_spawn(self.shell, said, self.env)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            right += code == (one * other + answer) % 200
        return right


def make_the_sandbox(_: Device) -> None:
    """How long the checks take."""
    MADE["sandbox"] = Sandbox()


@fifteenth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),  # of calls alone, the thread is outside of CUDA
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("context_lock_stall", "small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation"),
    prepare=make_the_sandbox,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def answers_of_a_rollout_checked_by_shells_that_are_started_for_them_before_the_next(d: Device) -> Truth:
    """When a rollout has its tokens, a shell is started for each of its answers, and awaited, before the next rollout.

    The thread stands in `posix_spawn` and in `waitpid` for some 1.6 ms, and the device has nothing, as the rollout is
    over and the next one wants the rewards. How long the checks take was measured before the program began, and a
    rollout computes for 0.6 of that.
    """
    sandbox, rollout, right, back = MADE.pop("sandbox"), 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for rollout in turns():
        clear(d, d.device + back, rollout % 251, 512, d.compute)
        for _ in range(2):
            d.launch(max(sandbox.took * 3 // 10, 20_000))
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        with d.spent.on(ELSEWHERE):
            right += sandbox.check(rollout)
    d.spent.stop()
    if right != (rollout + 1) * sandbox.answers:
        raise RuntimeError("a shell has come to another result than the answer")
    if ct.string_at(d.host + back, 512) != bytes([rollout % 251]) * 512:
        raise RuntimeError("a token is another than was computed")
    return {}
