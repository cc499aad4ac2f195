"""What stretches in which a GPU was seen tell of the pauses between them, against the same program seen throughout."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvprobe.account import COPIES, Account, GpuAccount, Line, account_of
from kvprobe.account.lines import Unknown
from kvprobe.account.samples import MOST
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.run_marks import PAUSED, REASONS
from kvprobe.reporting.account import account_lines

US, MS = 1_000, 1_000_000
WATCHED, WATCHED_EVERY = 12 * MS, 90 * MS
SPENT = REASONS.index("the budget of marks was spent")
UNSEEN = REASONS.index("when a run ended could not be seen")


def slowed(begin: float, ns: float, marks: float) -> int:
    """When so much is done that takes `marks` times as long in the first `WATCHED` of each `WATCHED_EVERY`."""
    while True:
        inside = begin % WATCHED_EVERY < WATCHED
        edge, times = (
            begin // WATCHED_EVERY * WATCHED_EVERY + (WATCHED if inside else WATCHED_EVERY),
            marks if inside else 1,
        )
        if begin + ns * times <= edge:
            return int(begin + ns * times)
        ns, begin = ns - (edge - begin) / times, edge


def around(one: tuple[int, int], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A stretch without the holes in it."""
    inside = [hole for hole in holes if one[0] < hole[0] and hole[1] < one[1]]
    edges = [one[0], *(edge for hole in inside for edge in hole), one[1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


class Program:
    """Steps: a load, a kernel behind it, the thread waits for both, and then works in Python."""

    def __init__(
        self, seconds: float, seed: int, *, slower: float = 1.0, alike: float = 0.2, marks: float = 1.0, ms: int = MS
    ) -> None:
        """`slower`: so many times as long are loads in the second half; `alike`: how much a step's parts vary.

        `ms`: ns of what is written here as a millisecond.

        `marks`: so many times as long does Python take in stretches of `WATCHED`, as marks slow it there; the thread
        works in Python for all of a step then, and finds the kernel done.
        """
        chance, at = random.Random(seed), 0
        self.calls: list[tuple[int, int, int]] = []
        self.spans: list[tuple[int, int, int]] = []
        self.steps: list[int] = []
        end = int(seconds * 1e9)
        while at < end:
            load, kernel, python = (int(one * ms * chance.uniform(1 - alike, 1 + alike)) for one in (0.6, 1.5, 0.9))
            load = int(load * (slower if at > end // 2 else 1))
            self.steps.append(at)
            waits, over = at + 8 * US, at + 10 * US + load + kernel
            if marks > 1:
                waits = slowed(at, load + kernel + python, marks)
                over, python = waits + 5 * US, waits - at - load - kernel
            self.calls += [(at, at + 3 * US, CallKind.COPY), (waits, over, CallKind.SYNC)]
            self.spans += [(at + 3 * US, at + 3 * US + load, Engine.COPY)]
            self.spans += [(at + 4 * US + load, at + 4 * US + load + kernel, Engine.KERNEL)]
            at += 10 * US + load + kernel + python
        self.end = at

    def account(
        self,
        stretches: list[tuple[int, int]] | None = None,
        holes: list[tuple[int, int]] | None = None,
        counted: float = 0.0,
    ) -> GpuAccount:
        """As it was recorded in some stretches, or throughout; in `holes` of them something was missed.

        `counted`: what runs is known by counts, and so much of it may be wrong.
        """
        names = ["", "cudaMemcpyAsync", "cudaStreamSynchronize", *REASONS[1:]]
        recording = Recording([Source("made", "trace")], names=names)
        seen = stretches or [(0, self.end)]
        edges = [0, *(one for pair in seen for one in pair), self.end]
        pauses = [pair for pair in zip(edges[::2], edges[1::2], strict=True) if pair[1] > pair[0]]
        calls, spans = np.array(self.calls), np.array(self.spans)
        inside = np.zeros(len(spans), dtype=bool)
        for begin, end in seen:
            inside |= (spans[:, 1] > begin) & (spans[:, 0] < end)
        spans = spans[inside]
        recording.tables["calls"] = Table(
            "calls",
            {
                "start_ns": calls[:, 0],
                "end_ns": calls[:, 1],
                "kind": calls[:, 2],
                "name": np.where(calls[:, 2] == CallKind.COPY, 1, 2),
                "bytes": np.where(calls[:, 2] == CallKind.COPY, 30 << 20, 0),
                "direction": np.where(calls[:, 2] == CallKind.COPY, int(Direction.H2D), 0),
                "thread": np.full(len(calls), 7),
            },
        )
        copies = spans[:, 2] == Engine.COPY
        recording.tables["spans"] = Table(
            "spans",
            {
                "start_ns": spans[:, 0],
                "end_ns": spans[:, 1],
                "engine": spans[:, 2],
                "direction": np.where(copies, int(Direction.H2D), 0),
                "bytes": np.where(copies, 30 << 20, 0),
                "count": np.ones(len(spans)),
                "error_ns": np.ceil(counted * (spans[:, 1] - spans[:, 0])),
            },
        )
        missed = holes or []
        parts = [(*pair, 0, 0) for one in seen for pair in around(one, missed)]
        coverage = parts + [(*one, 2 + SPENT, PAUSED) for one in pauses] + [(*one, 2 + UNSEEN, 0) for one in missed]
        rows = np.array(sorted(coverage))
        columns = ("start_ns", "end_ns", "reason", "stopped")
        recording.tables["coverage"] = Table("coverage", {name: rows[:, i] for i, name in enumerate(columns)})
        recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
        recording.tables["processes"] = Table("processes", {"pid": [1]})
        (gpu,) = account_of(Joined(recording)).gpus
        return gpu


def stretches(
    end: int, seed: int, apart: float = 80 * MS, length: float = 7 * MS, steps: list[int] | None = None
) -> list[tuple[int, int]]:
    """So long, so far apart, wherever the program is; with `steps`, from where a step ends on."""
    chance, at = random.Random(seed), 0.0
    out = []
    while True:
        at += apart * chance.uniform(0.7, 1.3)
        begin = int(at) if steps is None else steps[min(int(np.searchsorted(steps, at)), len(steps) - 1)]
        if begin + length >= end:
            return out
        out.append((begin, begin + int(length)))
        at = begin + length


def shares(gpu: GpuAccount) -> dict[Line, float]:
    return {line: gpu.share(line) for line in Line}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("locked", [False, True], ids=["anywhere", "from-a-step-on"])
def test_stretches_tell_of_pauses_within_their_error(seed: int, locked: bool) -> None:
    program = Program(2.4, seed)
    truth = program.account()
    seen = stretches(program.end, seed, steps=program.steps if locked else None)
    gpu = program.account(seen)
    assert sum(b - a for a, b in seen) < 0.12 * program.end
    told = gpu.to_json()
    assert gpu.samples.count == len(seen) and told["by_samples_ns"] > 0.85 * gpu.window_ns
    assert 0 < told["by_samples_error_ns"] <= MOST * gpu.window_ns
    lines = [told["computing_ns"], told["nothing_to_do_ns"], *told["not_known_ns"].values()]
    lines += [*told["waiting_for_copies_ns"].values(), *told["waiting_for_host_ns"].values()]
    assert sum(lines) == gpu.window_ns
    for line, share in shares(truth).items():
        assert shares(gpu)[line] == pytest.approx(share, abs=MOST), line


def test_the_error_holds_in_nineteen_of_twenty_cases() -> None:
    """Of forty programs, two lines each."""
    outside = 0
    for seed in range(40):
        program = Program(2.0, seed, alike=0.5)
        truth, gpu = program.account(), program.account(stretches(program.end, seed + 100))
        if gpu.samples.ns:
            off = (abs(gpu.share(*one) - truth.share(*one)) for one in ((Line.COMPUTING,), COPIES))
            outside += sum(one > gpu.samples.error_ns / gpu.window_ns for one in off)
    assert outside <= 4


def test_a_pause_is_filled_by_what_its_thread_did_then() -> None:
    """Python that the GPU waits for stands where the thread was outside of calls, waits where it waited."""
    program = Program(2.4, 1)
    gpu = program.account(stretches(program.end, 1))
    cut = gpu.stretches
    waits = [(begin, end) for begin, end, kind in program.calls if kind == CallKind.SYNC]
    where = np.searchsorted([one[0] for one in waits], cut.start, "right") - 1
    in_a_wait = (where >= 0) & (cut.start < np.array([one[1] for one in waits])[where])
    python = cut.sampled & np.isin(cut.line, (Line.PYTHON, Line.ELSEWHERE)) & (cut.ns > 10 * US)
    computing = cut.sampled & (cut.line == Line.COMPUTING)
    assert python.any() and not (python & in_a_wait).any()
    assert cut.sum_ns(computing & in_a_wait) > 0.98 * cut.sum_ns(computing)


def test_what_marks_slow_is_told_as_it_is_without_them() -> None:
    """Python takes half as long again where marks are: without them the GPU computes for more of the time."""
    program, truth = Program(2.4, 2, marks=1.5), Program(2.4, 2, marks=1.001).account()
    gpu = program.account([(at, at + WATCHED) for at in range(0, program.end - WATCHED, WATCHED_EVERY)])
    for line, share in shares(truth).items():
        assert shares(gpu)[line] == pytest.approx(share, abs=gpu.samples.error_ns / gpu.window_ns + 0.01), line


def unknown(gpu: GpuAccount) -> float:
    return gpu.unknown_ns().get(Unknown.NOT_COVERED, 0) / gpu.window_ns


def test_too_few_stretches_tell_nothing() -> None:
    program = Program(2.4, 3)
    gpu = program.account(stretches(program.end, 3, apart=500 * MS))
    assert 0 < gpu.samples.count < 8 and gpu.samples.ns == 0
    assert unknown(gpu) > 0.9 and gpu.to_json()["by_samples_error_ns"] == 0


def test_few_stretches_are_enough_of_a_thread_that_waits_often_and_alike() -> None:
    """Of twenty programs, two lines each: its waits show all through the pauses that nothing else goes on there."""
    outside = told = 0
    for seed in range(20):
        program = Program(1.2, seed, ms=MS // 20)
        truth, gpu = program.account(), program.account(stretches(program.end, seed, apart=200 * MS, length=4 * MS))
        assert 3 <= gpu.samples.count < 8
        if gpu.samples.ns:
            told += 1
            off = (abs(gpu.share(*one) - truth.share(*one)) for one in ((Line.COMPUTING,), COPIES))
            outside += sum(one > gpu.samples.error_ns / gpu.window_ns for one in off)
    assert told >= 15 and outside <= 2


@pytest.mark.parametrize("slower", [1.5, 4.0])
def test_few_stretches_tell_nothing_where_what_the_thread_waits_for_changes(slower: float) -> None:
    program = Program(1.2, 1, ms=MS // 20, slower=slower)
    gpu = program.account(stretches(program.end, 1, apart=200 * MS, length=4 * MS))
    assert gpu.samples.count >= 3 and gpu.samples.ns == 0


def test_a_hole_in_a_stretch_is_not_known_and_makes_no_line_wrong() -> None:
    """In every second stretch half a millisecond to two was missed: that differs, what the GPU did does not."""
    program, chance = Program(2.4, 8, alike=0.05), random.Random(8)
    seen = stretches(program.end, 8, apart=160 * MS, length=10 * MS)
    holes = [(at + 3 * MS, at + 3 * MS + int(chance.uniform(3, 6) * MS)) for at, _ in seen[::2]]
    truth, gpu = program.account(), program.account(seen, holes)
    error = gpu.samples.error_ns / gpu.window_ns
    assert gpu.samples.ns and unknown(gpu) > 0.1
    for line in (Line.COMPUTING, *COPIES, Line.PYTHON):
        assert -error - unknown(gpu) < gpu.share(line) - truth.share(line) < error, line


def few_and_long(end: int, seed: int, pauses: int, hidden: float) -> list[tuple[int, int]]:
    """Stretches around a few pauses of the second half, which are `hidden` of all time together."""
    chance = random.Random(seed)
    each, at, out = int(end * hidden / pauses), 0, []
    for number in range(pauses):
        begin = int(end * (0.5 + (number + chance.uniform(0.1, 0.6)) * 0.5 / pauses))
        out.append((at, begin))
        at = begin + each
    return [*out, (at, end)]


def test_a_few_long_stretches_tell_as_much_as_many() -> None:
    """Of forty programs that were seen but for four pauses, two lines each, and nothing is said of fewer than 30."""
    outside = told = 0
    for seed in range(40):
        program = Program(1.5, seed, alike=0.5)
        seen = few_and_long(program.end, seed, 4, 0.1)
        truth, gpu = program.account(), program.account(seen)
        assert gpu.samples.count == len(seen) < 8
        if gpu.samples.ns:
            told += 1
            off = (abs(gpu.share(*one) - truth.share(*one)) for one in ((Line.COMPUTING,), COPIES))
            outside += sum(one > gpu.samples.error_ns / gpu.window_ns for one in off)
    assert told >= 30 and outside <= 4


def test_what_so_few_looks_may_have_missed_is_part_of_the_error() -> None:
    """All looks are alike, and yet three pauses of a tenth each are not told by a few stretches of that length."""
    program = Program(1.5, 7, alike=0.0)
    gpu = program.account(few_and_long(program.end, 7, 4, 0.05))
    assert gpu.samples.ns and gpu.samples.error_ns > 0.05 * gpu.samples.ns
    gpu = program.account(few_and_long(program.end, 7, 3, 0.4))
    assert gpu.samples.ns == 0 and gpu.samples.error_ns > 0.3 * 0.4 * program.end


def test_uneven_stretches_tell_nothing() -> None:
    """Steps of which each is something else: the mean of a few could be wrong by more than is said of a window."""
    program = Program(2.4, 4, alike=1.0)
    gpu = program.account(stretches(program.end, 4, apart=200 * MS, length=2 * MS))
    assert gpu.samples.count >= 8 and gpu.samples.error_ns > MOST * gpu.window_ns and gpu.samples.ns == 0
    assert unknown(gpu) > 0.9


def test_a_program_that_changes_slowly_is_followed() -> None:
    """From its middle on loads are twice as long: each pause gets what lies beside it."""
    program = Program(3.0, 5, slower=2.0)
    truth, gpu = program.account(), program.account(stretches(program.end, 5))
    assert gpu.share(*COPIES) == pytest.approx(truth.share(*COPIES), abs=MOST)
    first = gpu.stretches.start < program.end // 2
    copies = np.isin(gpu.stretches.line, np.array(COPIES, dtype=np.uint8))
    half = gpu.stretches.sum_ns(first & copies)
    assert half < gpu.stretches.sum_ns(~first & copies)


def test_lines_say_how_much_of_them_is_by_samples() -> None:
    program = Program(2.4, 6)
    gpu = program.account(stretches(program.end, 6))
    lines = account_lines(Account([gpu], []))
    (computing,) = (one for one in lines if "computing" in one)
    assert f" by {gpu.samples.count} samples, ± " in computing
    gpu.samples = replace(gpu.samples, host_ns=1_000)  # later calls told some waiting for the host, and nothing else
    lines = account_lines(Account([gpu], []))
    (computing,), (other,) = ([one for one in lines if text in one] for text in ("computing", "in other code"))
    assert f" by {gpu.samples.count} samples, ± " in computing
    assert f" by {gpu.samples.count} samples and later calls, ± " in other
    assert not any("samples" in one for one in account_lines(Account([program.account()], [])))


def test_what_stretches_have_wrong_pauses_have_wrong_too() -> None:
    """Everything that runs is known by counts, to 2%: so is all that is told by it."""
    program = Program(2.4, 6)
    gpu = program.account(stretches(program.end, 6), counted=0.02)
    told, busy = gpu.to_json(), gpu.share(Line.COMPUTING, *COPIES)
    assert told["by_counts_error_ns"] == pytest.approx(0.02 * busy * gpu.window_ns, rel=0.05)
    assert told["by_counts_ns"] + told["by_samples_ns"] <= gpu.window_ns
    assert told["by_samples_error_ns"] == program.account(stretches(program.end, 6)).to_json()["by_samples_error_ns"]
    (computing,) = (one for one in account_lines(Account([gpu], [])) if "computing" in one)
    error = 100 * (told["by_counts_error_ns"] + told["by_samples_error_ns"]) / gpu.window_ns
    assert f" estimated by {gpu.samples.count} samples and counts, ± {error:.1f}%)" in computing


def test_where_both_errors_together_are_too_large_pauses_stay_unknown() -> None:
    program = Program(2.4, 6)
    seen = stretches(program.end, 6)
    sure, gpu = program.account(seen), program.account(seen, counted=0.05)
    assert (
        sure.samples.error_ns
        < MOST * gpu.window_ns
        < sure.samples.error_ns + 0.05 * sure.share(Line.COMPUTING, *COPIES) * sure.window_ns
    )
    told = gpu.to_json()
    assert sure.to_json()["by_samples_ns"] and not told["by_samples_ns"]
    assert unknown(gpu) > 0.8 and told["by_counts_error_ns"] == pytest.approx(0.05 * told["by_counts_ns"], rel=0.01)
