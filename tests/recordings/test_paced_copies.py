"""Runs of copies that a slow host submits one by one: how long the device was busy with them, and when it was done."""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line, account_of
from kvprobe.probe.ring import COVERAGE, SPAN
from kvprobe.probe.ring_layout import RECORD
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.run_events import RingRecords
from kvprobe.recordings.run_marks import REASONS, marks
from kvprobe.recordings.vocabulary import Names

US, KIB = 1_000, 1 << 10
KERNELS, INSIDE = 1, 4  # of enum mark_kind: kernels, copies inside the GPU
UNSEEN = REASONS.index("when a run ended could not be seen")


def read(rows: list[tuple[int, int, int, int, int, int]]) -> Recording:
    """Rows of the ring: call, kind or reason, begin, end in us, count, and how late its mark was reached, us."""
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync", *REASONS[1:]])
    end = max(row[3] for row in rows) * US
    columns = {"start_ns": [0, end - US], "end_ns": [3 * US, end], "name": [1, 1], "thread": [7, 7]}
    columns["kind"] = [CallKind.COPY, CallKind.COPY]
    recording.tables["calls"] = Table("calls", {name: np.array(one) for name, one in columns.items()})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    records = np.zeros(len(rows) + 1, dtype=RECORD)
    for at, (call, kind, begin, until, count, late) in enumerate([(COVERAGE, 0, 0, end // US, 1, 0), *rows]):
        one = records[at : at + 1]
        one["call"], one["result"], one["count"], one["tid"] = call, kind, count, 1 + late * US
        one["start_ns"], one["dur_ns"] = begin * US, (until - begin) * US
        if call == SPAN:
            one["dst"], one["bytes"] = one["dur_ns"], 32 * KIB * count if kind == INSIDE else 0
            one["direction"] = Direction.D2D if kind == INSIDE else 0
    zero = np.zeros(len(records), dtype=np.int64)
    marks(recording, RingRecords(records, zero, zero, zero), Names(recording.names))
    return recording


ALONE = [(SPAN, INSIDE, 20 * at, 20 * at + 4, 1, 3) for at in range(6)]


def copied(recording: Recording, begin: int, end: int) -> int:
    spans = recording.spans
    mine = (spans["engine"] == Engine.COPY) & (spans["start_ns"] >= begin * US) & (spans["end_ns"] <= end * US)
    return int((spans["end_ns"] - spans["start_ns"])[mine].sum())


def test_a_run_whose_mark_is_reached_at_once_was_as_long_as_its_copies_are_alone() -> None:
    """Fifty copies in 400 us, each of 4 us by itself with what a mark takes: the device waited for its host."""
    recording = read([*ALONE, (SPAN, INSIDE, 200, 600, 50, 3)])
    assert copied(recording, 200, 600) <= 50 * 2 * US
    assert (recording.spans["start_ns"] >= 200 * US).sum() == 50


def test_a_run_that_the_device_was_behind_with_was_busy_all_the_time() -> None:
    recording = read([*ALONE, (SPAN, INSIDE, 200, 600, 50, 300)])
    assert copied(recording, 200, 600) > 300 * US


def test_copies_are_over_when_they_could_have_been_done_one_by_one() -> None:
    """Nobody saw the run end: only as long as one more copy takes something may be missing."""
    hole = (COVERAGE, UNSEEN, 600, 900, 1, 0)
    seen = read([*ALONE, (SPAN, INSIDE, 200, 600, 50, 0), hole]).coverage
    missing = seen["reason"] != 0
    assert (seen["end_ns"] - seen["start_ns"])[missing].tolist() == [4 * US]


def test_a_kernel_that_was_seen_computes_where_something_else_was_missed() -> None:
    """The end of a kernel's run was not seen in one stream, and beside that another computed."""
    rows = [(SPAN, KERNELS, 100, 200, 2, 0), (COVERAGE, UNSEEN, 200, 900, 1, 0), (SPAN, KERNELS, 150, 700, 1, 500)]
    (gpu,) = account_of(Joined(read(rows))).gpus
    cut = gpu.stretches
    assert cut.sum_ns(cut.line == Line.COMPUTING) > 590 * US
    behind = (cut.start >= 690 * US) & (cut.line == Line.NOT_KNOWN)
    assert cut.sum_ns(behind) == cut.edges[-1] - cut.start[behind][0] >= 200 * US
