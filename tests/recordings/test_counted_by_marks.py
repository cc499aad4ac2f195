"""What is said to have been outstanding where timing events counted it for a part of the time."""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.occupancy import occupancy

US, MS = 1_000, 1_000_000
COPIES, EACH_NS, AHEAD = 3_000, MS // 2, 20
UNSEEN = slice(1_000, 1_700)


def ahead_by_twenty(slow: range) -> Recording:
    """Copies of 0.5 ms that a thread gives a stream it never waits for, 20 ahead of the device all the time.

    A mark behind each tenth copy, but none in the middle; calls of these numbers take 0.1 ms.
    """
    number = np.arange(COPIES)
    start = number * EACH_NS
    took = np.where(np.isin(number, slow), 100 * US, 2 * US)
    zero = np.zeros(COPIES, int)
    recording = Recording([Source("made", "kvprobe")], names=["", "cudaMemcpyAsync"])
    recording.tables["calls"] = Table(
        "calls",
        {"start_ns": start, "end_ns": start + took, "kind": zero + CallKind.COPY, "name": zero + 1, "stream": zero}
        | {"thread": zero + 7, "bytes": zero + 25_000_000, "direction": zero + Direction.H2D},
    )
    behind = number[9::10]
    behind = behind[(behind < UNSEEN.start) | (behind >= UNSEEN.stop)]
    begun, done = (behind - 9 + AHEAD) * EACH_NS, (behind + 1 + AHEAD) * EACH_NS
    slots = behind + 1 + behind // 10 + 1
    marks = {"given_ns": start[behind] + 200 * US, "begun_ns": begun, "done_ns": done, "slots": slots}
    recording.tables["marks"] = Table("marks", marks | {"count": np.full(len(behind), 10), "stream": behind * 0})
    ran = {"start_ns": begun, "end_ns": done, "engine": np.full(len(behind), Engine.COPY), "stream": behind * 0}
    recording.tables["spans"] = Table("spans", ran | {"count": np.full(len(behind), 10)})
    hole = {"start_ns": [start[UNSEEN.start]], "end_ns": [start[UNSEEN.stop]], "stopped": [1], "reason": [0]}
    recording.tables["coverage"] = Table("coverage", hole)
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    return recording


def test_slow_calls_that_no_timing_event_counted_make_nobody_count_from_the_first_call() -> None:
    """The thread never waits for the stream, so calls alone would reckon that thousands were outstanding."""
    (queue,) = occupancy(ahead_by_twenty(slow=range(1_100, 1_104))).streams
    assert queue.verdict == "not full"
    assert queue.depth.max() <= 2 * AHEAD
    assert "estimated where there were none" in queue.reason
