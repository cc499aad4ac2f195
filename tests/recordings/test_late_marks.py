"""Copies of several streams on one engine, where the mark in front of each is reached when the copy is over."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.late_marks import lengthen_copies
from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Table

US, SIZE = 1_000, 3_000_000
TAKES = 60 * US  # of one copy: 50 GB/s


def recorded(took: int, bursts: int = 40) -> Recording:
    """Bursts of twelve copies, of three threads that submit four each at once; a burst each 1.5 ms.

    The engine takes one copy after the other, of the streams in turn; between the marks of each there is `took`.
    """
    calls, spans = [], []
    for burst in range(bursts):
        at = burst * 1_500 * US
        for number in range(12):
            stream, end = number % 3, at + 10 * US + (number + 1) * TAKES
            calls.append((at + (number // 3) * 4 * US + stream, stream))
            spans.append((end - took, end, stream))
    calls.sort()
    recording = Recording(source="", has_executions=False)
    start, stream = np.array(calls).T
    recording.tables["calls"] = Table(
        "calls",
        {"start_ns": start, "end_ns": start + US, "stream": stream, "kind": np.full(len(start), CallKind.COPY)},
    )
    begin, end, stream = np.array(spans).T
    same = {"engine": Engine.COPY, "direction": Direction.H2D, "bytes": SIZE, "count": 1, "process": 0, "device": 0}
    columns = {"start_ns": begin, "end_ns": end, "stream": stream}
    recording.tables["spans"] = Table("spans", columns | {k: np.full(len(begin), v) for k, v in same.items()})
    return recording


def test_copies_take_the_time_in_which_their_engine_had_them() -> None:
    recording = recorded(took=1_300)
    assert lengthen_copies(recording) == 480
    spans = recording.spans
    whole, truth = Cover(spans["start_ns"], spans["end_ns"]).total_ns, 480 * TAKES
    assert whole == pytest.approx(truth, rel=0.03)
    assert abs(whole - truth) <= spans["error_ns"].sum() < 0.15 * truth
    rate, how = link_rate(recording, Direction.H2D)
    assert rate == pytest.approx(50e9, rel=0.05) and how


@pytest.mark.parametrize("took", [TAKES, SIZE // 450])
def test_copies_as_quick_as_a_link_is_are_left_alone(took: int) -> None:
    """That of PCIe 5.0, and one on a chip, which carries 450 GB/s."""
    recording = recorded(took)
    before = {name: column.tolist() for name, column in recording.spans.columns.items()}
    assert lengthen_copies(recording) == 0
    assert {name: column.tolist() for name, column in recording.spans.columns.items()} == before
