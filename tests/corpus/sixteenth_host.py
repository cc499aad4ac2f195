"""Sixteenth programs whose device waits for the host: game trees, parse trees, scales, latents, vectors, rows, text."""

from __future__ import annotations

import ctypes as ct
import math
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from accounts import Stretches, decoded, turns
from device import D2H, H2D, Device, beyond, now
from fresh_copies import clear
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
    pageable,
    sixteenth,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Game:
    """The tree of a game as a search knows it: each position has five moves, down to a depth of seven.

    Attributes:
        visits, values: of each position; its moves lead to 5 n + 1 and those behind it.
    """

    moves, depth = 5, 7

    def __init__(self) -> None:
        count = sum(self.moves**level for level in range(self.depth + 1))
        self.visits, self.values = [0] * count, [0.0] * count

    def descend(self, value: float) -> int:
        """Chooses move after move by its bound, gives all positions on the way a value, and returns the last one."""
        at, path = 0, [0]
        for _ in range(self.depth):
            best, whole = -1.0, math.log(self.visits[at] + 1)
            first = at * self.moves + 1
            for move in range(first, first + self.moves):
                seen = self.visits[move] + 1
                bound = self.values[move] / seen + math.sqrt(2 * whole / seen)
                if bound > best:
                    best, at = bound, move
            path.append(at)
        for one in path:
            self.visits[one] += 1
            self.values[one] += value
        return at


def descents_in(us: int) -> int:
    """How many descents in the tree of a game Python makes in so long."""
    game = Game()
    took = quickest(lambda: [game.descend(0.5) for _ in range(20)], 6)
    return min(max(20 * us * 1_000 // took, 1), 20_000)


@sixteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def leaves_of_a_game_s_tree_chosen_in_python_before_each_evaluation(d: Device) -> Truth:
    """A network judges a batch of positions in 0.8 ms, and Python then walks down a tree for 1.6 ms for the next batch.

    A walk looks at the bounds of five moves at each of seven levels, and gives the positions on its way the value that
    came back. The thread has waited for the values and launches the next batch when all its leaves are chosen, so
    nothing is on the device meanwhile. How many walks take 1.6 ms is measured first.
    """
    game, count, idle, step, walks = Game(), descents_in(1_600), Stretches(d), 0, 0
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        for leaf in range(count):
            game.descend((step + leaf) % 7 / 7)
        walks += count
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if game.visits[0] != walks or sum(game.visits[1 : game.moves + 1]) != walks:
        raise RuntimeError("a walk has not passed through the tree")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


Parse = tuple["Parse", "Parse"] | int


def parse_of(sentence: int, first: int, count: int) -> Parse:
    """A parse of `count` words from the first on: two parts, each a parse, or a word."""
    if count == 1:
        return first
    left = 1 + (sentence * 31 + first * 17 + count) % (count - 1)
    return parse_of(sentence, first, left), parse_of(sentence, first + left, count - left)


@sixteenth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python, which walks a tree between them
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_recursive_network_that_launches_a_kernel_for_each_part_of_a_parse(d: Device) -> Truth:
    """Words are embedded in 0.2 ms, which is waited for; then each part of a sentence's parse has a kernel of 1 us.

    A recursion in Python launches them, the smaller parts first, and before each asks which device it is and whether
    the stream is captured, and records an event behind it, as its tracing wants: some 6 us for each. The device is done
    with a kernel before it has the next one. A sentence of 200 words has 199 parts, and two sentences are one step.
    """
    lib, words, back, lost, step, parts = d.lib, 200, d.size - 4 * KiB, 0, 0, 0
    number, capture = ct.c_int(), ct.c_int()
    lib.cudaStreamIsCapturing.argtypes = [ct.c_void_p, ct.c_void_p]
    parses = [parse_of(sentence, 0, words) for sentence in range(6)]

    def compose(part: Parse) -> int:
        if isinstance(part, int):
            return 1
        covered = compose(part[0]) + compose(part[1])
        d.check(lib.cudaGetDevice(ct.byref(number)))
        d.check(lib.cudaStreamIsCapturing(d.compute, ct.byref(capture)))
        d.launch(1_000)
        d.record(covered, d.compute)
        return covered

    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(200_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        parts += compose(parses[step % 6]) + compose(parses[(step + 1) % 6])
        lost += max(now() - begin - 2 * (words - 1) * 1_000, 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if parts != (step + 1) * 2 * words or ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("a parse does not cover its sentence")
    return {}


@sixteenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two kernels the thread wakes, computes a scale and submits
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
)
def a_scale_read_back_before_each_tensor_of_a_model_is_quantised(d: Device) -> Truth:
    """A kernel of 5 us finds a tensor's largest value, which is read back, and one of 4 us then packs the tensor by it.

    The thread waits for the stream after each largest value, makes a scale of it, and only then launches the packing
    and the search in the next tensor. To be woken, to compute and to give the device its next kernel takes longer than
    the kernels, and until then it has none.
    """
    right, tensor, scale, back = 0, 0, 1.0, d.size - 4 * KiB
    d.spent.restart()
    for tensor in turns():
        if tensor:
            d.launch(4_000)
        d.launch(5_000)
        clear(d, d.device + back, tensor % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.sync(d.compute)
        largest = ct.string_at(d.host + back, 64)
        scale = max(largest[0], 1) / 127
        right += largest == bytes([tensor % 251]) * 64
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if right != tensor + 1 or scale != max(tensor % 251, 1) / 127:
        raise RuntimeError("a largest value is another than was found")
    return {}


class Workspaces:
    """What a decoder of pictures works in: six pieces of memory, larger or smaller by the picture's size.

    Attributes:
        took: ns to make all for a picture and to give them back, with nothing on the device.
    """

    pieces, shapes = 6, ((2, 3), (3, 3), (4, 3), (3, 2), (4, 4))

    def __init__(self, d: Device) -> None:
        self.d, self.unit = d, 8 * MiB if d.gpu else 256 * KiB
        self.took = quickest(lambda: self.free(self.make(4)))

    def make(self, picture: int) -> list[int]:
        """The pieces for a picture, each twice as large as the picture's shape says, or four times."""
        wide, high = self.shapes[picture % len(self.shapes)]
        return [self.d.made("cudaMalloc", wide * high * self.unit // (1 + i % 2)) for i in range(self.pieces)]

    def free(self, pieces: list[int]) -> None:
        """All are given back, the last one first."""
        for at in reversed(pieces):
            self.d.check(self.d.lib.cudaFree(at))


def make_the_workspaces(d: Device) -> None:
    """How long a picture's take."""
    MADE["workspaces"] = Workspaces(d)


@sixteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall", "python_or_gil_bound", "wasted_stores"),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved", "redundant_loads"),
    prepare=make_the_workspaces,
)
def workspaces_made_and_freed_for_the_shape_of_each_picture_that_is_decoded(d: Device) -> Truth:
    """Pictures of five shapes take turns, and for each a decoder makes six workspaces and frees them when it is done.

    A workspace has 24 to 128 MiB. The thread waits for the picture before it frees, and launches the next one when its
    workspaces are there, so nothing is on the device in any of the twelve calls. How long they take was measured
    before, and a picture's kernels take 0.7 of that.
    """
    spaces, lost, picture, at, right = MADE.pop("workspaces"), 0, 0, 0, 0
    d.spent.restart()
    for picture in turns():
        begin = now()
        pieces = spaces.make(picture)
        lost += now() - begin
        for _ in range(2):
            d.launch(max(spaces.took * 7 // 20, 20_000))
        clear(d, pieces[-1], picture % 251, 512, d.compute)
        at = d.host + picture % 4 * 4 * KiB
        d.copy(at, pieces[-1], 512, D2H, d.compute)
        d.sync(d.compute)
        right += ct.string_at(at, 512) == bytes([picture % 251]) * 512
        begin = now()
        spaces.free(pieces)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if right != picture + 1:
        raise RuntimeError("a picture is another than was decoded")
    return {"allocation_on_hot_path": lost}


class Answers:
    """Plain memory for the vectors of an embedding server's answer, in four parts.

    Attributes:
        took: ns to bring all parts there.
    """

    parts = 4

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (4 if d.gpu else 1) * MiB
        self.keep, self.at = pageable(self.parts * self.size)
        self.took = quickest(self.bring)

    def bring(self) -> None:
        """Part after part, each into its own place."""
        for part in range(self.parts):
            at = part * self.size
            self.d.copy(self.at + at, self.d.device + at, self.size, D2H, self.d.compute)
        self.d.sync(self.d.compute)


def make_the_answers(d: Device) -> None:
    """The memory, and how long an answer takes."""
    MADE["answers"] = Answers(d)


@sixteenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
        *("link_bound", "wasted_stores"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_answers,
)
def vectors_of_an_embedding_server_brought_into_plain_memory_before_the_next_texts(d: Device) -> Truth:
    """When an embedding server has a batch's vectors, it brings them into plain memory in four parts, 16 MiB in all.

    The driver copies them by way of its own memory while the thread stands in the calls. The batch was waited for and
    the next one is launched when all vectors are there, so no kernel runs. How long an answer takes was measured before
    the program began, and a batch computes for 0.8 of that. Each batch's vectors are new.
    """
    answers, lost, batch = MADE.pop("answers"), 0, 0
    whole = answers.parts * answers.size
    d.spent.restart()
    for batch in turns():
        clear(d, d.device, batch % 251, whole, d.compute)
        for _ in range(2):
            d.launch(max(answers.took * 2 // 5, 20_000))
        d.sync(d.compute)
        begin = now()
        answers.bring()
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    for end in range(answers.size, whole + 1, answers.size):
        if ct.string_at(answers.at + end - 64, 64) != bytes([batch % 251]) * 64:
            raise RuntimeError("another vector was answered than was computed")
    return {"pageable_memory": lost}


@sixteenth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=(
        *("link_bound", "gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound"),
        "wasted_stores",
    ),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "redundant_loads", "pageable_memory"),
)
def pages_of_updated_rows_let_go_by_the_thread_that_ranks_to_a_stream_that_is_full(d: Device) -> Truth:
    """Between two batches of 1 ms a recommender lets 80 pages of updated rows go to the host, 30 us of the link each.

    They go on a side stream that no kernel waits for, and 80 take the link 2.4 ms. So after some twenty batches the
    stream has all that it takes, a thousand, and from then on the thread stands in the calls for 1.4 ms of each 2.4 ms.
    It has waited for the batch before and launches the next one after the pages: only copies run meanwhile.
    """
    size, stores, durations, batch = d.bytes_of(30), d.copies[12], list[int](), 0
    places = (d.size - MiB) // size
    d.spent.restart()
    for batch in turns():
        for page in range(80):
            place = (batch * 80 + page) % places * size
            durations.append(d.copy(d.host + place, d.device + place, size, D2H, stores))
        d.launch(1_000_000)
        d.sync(d.compute)
    lost = beyond(durations, 12_000)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    d.sync(stores)
    last = ((batch * 80 + 79) % places + 1) * size - 4 * KiB
    same(d, d.device + last, d.host + last, 4 * KiB)
    return {"launch_queue_saturation": lost}


class Passages:
    """A database file of passages, of which a query asks for some by their numbers.

    Attributes:
        took: ns to ask for eight of them.
    """

    count, size = 1_200, 12 * KiB

    def __init__(self) -> None:
        self.folder, draw = tempfile.TemporaryDirectory(), random.Random(143)
        self.base = sqlite3.connect(Path(self.folder.name) / "passages.db", check_same_thread=False)
        self.base.execute("PRAGMA cache_size = 8")
        self.base.execute("CREATE TABLE passages (number INTEGER PRIMARY KEY, body BLOB)")
        self.bodies = [draw.randbytes(self.size) for _ in range(self.count)]
        self.base.executemany("INSERT INTO passages VALUES (?, ?)", enumerate(self.bodies))
        self.base.commit()
        self.took = quickest(lambda: [self.ask(i * 131) for i in range(8)], 6)

    def ask(self, number: int) -> bytes:
        """A passage out of the database."""
        row = self.base.execute("SELECT body FROM passages WHERE number = ?", (number % self.count,)).fetchone()
        return bytes(row[0])

    def asked_in(self, us: int) -> int:
        """How many passages can be asked for in so long."""
        return min(max(8 * us * 1_000 // self.took, 1), 1_000)

    def end(self) -> None:
        """The database goes."""
        self.base.close()
        self.folder.cleanup()


def make_the_passages(_: Device) -> None:
    """The database, and how long it takes to answer."""
    MADE["passages"] = Passages()


@sixteenth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # a library in the same thread reads the file; of calls alone, it is outside of CUDA
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_passages,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def passages_asked_of_a_database_by_the_thread_that_embeds_before_each_batch(d: Device) -> Truth:
    """Before each batch of 0.8 ms the thread asks sqlite for its passages, for 1.6 ms, one SELECT for each.

    A passage has 12 KiB, in pages of a file that sqlite reads each time, because it may keep only eight of them. The
    batch before was waited for and the next one is launched behind the last passage, so nothing is on the device
    meanwhile. How many passages take 1.6 ms was measured before.
    """
    passages, step, at, last, home = MADE.pop("passages"), 0, 0, b"", 0
    count = passages.asked_in(1_600)
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            for i in range(count):
                last = passages.ask(step * 7 + i * 131)
        home = d.host + step % 8 * passages.size
        ct.memmove(home, last, passages.size)
        d.copy(d.device, home, passages.size, H2D, d.compute)
        for _ in range(2):
            d.launch(400_000)
        at = token(d, step)
        d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    passages.end()
    if ct.string_at(home, passages.size) != passages.bodies[(step * 7 + (count - 1) * 131) % passages.count]:
        raise RuntimeError("the database has answered with another passage")
    same(d, d.device, d.host + step % 8 * passages.size, passages.size)
    return {}
