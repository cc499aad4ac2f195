"""A window that begins before all calls were kept: what its thread did then, against the same program kept whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvprobe.account import Account, GpuAccount, Line, account_of
from kvprobe.account.lines import Unknown
from kvprobe.account.samples import MOST
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.serving import ServingWindow
from kvprobe.reporting.account import account_lines

US, MS = 1_000, 1_000_000
STEPS = 500
KINDS = (CallKind.COPY, CallKind.SYNC)


class Program:
    """Steps: forty copies one by one, with Python between them, a kernel behind them, and a wait for it."""

    def __init__(self, seed: int, until: int = STEPS, busier: float = 1.0) -> None:
        """`busier`: so many times as long does each copy's call take in steps before `until`."""
        chance, at = random.Random(seed), 0
        self.calls: list[tuple[int, int, int]] = []
        self.spans: list[tuple[int, int]] = []
        for step in range(STEPS):
            for _ in range(40):
                took = int(chance.uniform(2, 4) * US * (busier if step < until else 1))
                self.calls.append((at, at + took, CallKind.COPY))
                at += took + int(chance.uniform(1, 3) * US)
            kernel = int(chance.uniform(200, 400) * US)
            self.spans.append((at, at + kernel))
            self.calls.append((at + US, at + kernel + 5 * US, CallKind.SYNC))
            at += kernel + int(chance.uniform(20, 60) * US)
        self.end = at

    def account(
        self, kept_from: int = 0, counted: float = 0.0, seen: tuple[int, int] = (0, STEPS - 1), begin: int = 0
    ) -> GpuAccount:
        """As it was recorded where only slow calls before step `kept_from` were kept; from step `begin` on.

        `counted`: kernels are known by counts, and so much of them may be wrong. `seen`: from which step to which.
        """
        recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync", "cudaStreamSynchronize"])
        every, spans = np.array(self.calls), np.array(self.spans)
        first = int(every[kept_from * 41, 0])
        calls = every[(every[:, 0] >= first) | (every[:, 2] == CallKind.SYNC)]
        copies = calls[:, 2] == CallKind.COPY
        columns = {"start_ns": calls[:, 0], "end_ns": calls[:, 1], "kind": calls[:, 2]}
        columns |= {"thread": np.full(len(calls), 7), "stream": np.zeros(len(calls)), "name": np.where(copies, 1, 2)}
        direction = np.where(copies, int(Direction.H2D), 0)
        recording.tables["calls"] = Table("calls", {**columns, "bytes": 64 * copies, "direction": direction})
        recording.tables["totals"] = Table(
            "totals",
            {
                "kind": [int(kind) for kind in KINDS],
                "thread": [7, 7],
                "calls": [int((every[:, 2] == kind).sum()) for kind in KINDS],
                "dur_ns": [int((every[:, 1] - every[:, 0])[every[:, 2] == kind].sum()) for kind in KINDS],
            },
        )
        engine = np.full(len(spans), Engine.KERNEL)
        recording.tables["spans"] = Table(
            "spans",
            {
                "start_ns": spans[:, 0],
                "end_ns": spans[:, 1],
                "engine": engine,
                "count": np.ones(len(spans)),
                "error_ns": np.ceil(counted * (spans[:, 1] - spans[:, 0])),
            },
        )
        seen_from, seen_to = (int(every[step * 41, 0]) if step < STEPS - 1 else self.end for step in seen)
        recording.tables["coverage"] = Table("coverage", {"start_ns": [seen_from], "end_ns": [seen_to]})
        recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
        recording.tables["processes"] = Table("processes", {"pid": [1]})
        recording.lost = {0: len(every) - len(calls)} if kept_from else {}
        recording.window = ServingWindow(self.end, every[begin * 41, :1], "given by --from", 0, True)
        account = account_of(Joined(recording))
        assert not kept_from or account.threads[0].from_ns == first
        (gpu,) = account.gpus
        assert int(gpu.stretches.ns.sum()) == gpu.window_ns
        return gpu


@pytest.mark.parametrize("seed", range(4))
def test_time_in_calls_that_were_not_kept_is_not_said_to_be_the_threads_own(seed: int) -> None:
    program = Program(seed)
    truth, gpu = program.account(), program.account(kept_from=400)
    assert truth.share(Line.SUBMITTING) > 0.2
    for line in Line:
        assert gpu.share(line) == pytest.approx(truth.share(line), abs=0.02), line
    (submitting,) = (one for one in account_lines(Account([gpu], [])) if "submitting" in one)
    assert " by later calls, ± " in submitting
    told = gpu.to_json()
    assert told["by_samples_ns"] > 0.3 * gpu.window_ns and told["by_samples_error_ns"] < MOST * gpu.window_ns


def test_lost_calls_before_the_window_are_no_reason_to_doubt() -> None:
    """The sums hold the lost calls of 400 steps, and the window the last 200 of them."""
    program = Program(8)
    truth, gpu = program.account(begin=200), program.account(kept_from=400, begin=200)
    assert truth.share(Line.SUBMITTING) > 0.2
    for line in Line:
        assert gpu.share(line) == pytest.approx(truth.share(line), abs=0.02), line


def test_it_stays_unknown_where_its_error_and_that_of_counts_are_too_large_together() -> None:
    """Kernels take 55% of the time: 9% of that is 4.98 points, and what later calls tell has an error of 0.4 points."""
    program = Program(0)
    for counted, known in ((0.06, True), (0.09, False)):
        gpu = program.account(kept_from=400, counted=counted)
        told = gpu.to_json()
        assert told["by_counts_error_ns"] == pytest.approx(counted * gpu.ns(Line.COMPUTING), rel=0.01)
        assert told["by_counts_error_ns"] + told["by_samples_error_ns"] < MOST * gpu.window_ns
        assert (told["by_samples_ns"] > 0.3 * gpu.window_ns) == known


def test_a_time_before_that_was_another_by_the_sums_is_not_known() -> None:
    """The calls took three times as long before: what came afterwards says nothing of it."""
    gpu = Program(5, until=400, busier=3.0).account(kept_from=400)
    assert gpu.unknown_ns()[Unknown.NOT_KEPT] > 0.3 * gpu.window_ns
    assert gpu.ns(Line.ELSEWHERE, Line.PYTHON) < 0.1 * gpu.window_ns


def test_where_all_calls_were_kept_nothing_is_by_samples() -> None:
    assert Program(6).account().to_json()["by_samples_ns"] == 0


def test_where_nothing_was_seen_of_the_gpu_later_nothing_is_told_by_it() -> None:
    """Timing events saw it in ten steps whose calls were not kept, and not afterwards."""
    gpu = Program(7).account(kept_from=400, seen=(390, 400))
    assert gpu.to_json()["by_samples_ns"] == 0
    assert 0 < gpu.unknown_ns()[Unknown.NOT_KEPT] < MOST * gpu.window_ns
