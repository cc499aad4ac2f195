"""A queue that fills while its stream stands at a wait, where timing events and no executions tell of the device."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.occupancy import occupancy

US, MS = 1_000, 1_000_000
HELD_NS = 30 * MS


def bursts(returned_ns: int, outstanding: tuple[int, ...] = (985, 990, 1_013)) -> Recording:
    """Bursts of copies on a stream that is told to wait: one call waits, and returns so long after the wait has ended.

    `outstanding`: at that call, of each burst; counted by timing events, it is off by some.
    """
    recording = Recording([Source("made", "kvprobe")], names=["", "cudaStreamWaitEvent", "cudaMemcpyAsync"])
    calls: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    marks: list[tuple[int, int, int, int, int]] = []
    now = slots = 0
    for many in outstanding:
        began = now
        calls.append((now, now + US, CallKind.EVENT, 1))
        now += 5 * US
        for _ in range(many):
            calls.append((now, now + 2 * US, CallKind.COPY, 2))
            now += 8 * US
        over = now + HELD_NS
        calls.append((now, over + returned_ns, CallKind.COPY, 2))
        spans += [(began, over, Engine.WAIT, 1), (over, over + 5 * MS, Engine.COPY, many + 1)]
        slots += many + 2
        marks.append((over + returned_ns + US, over, over + 5 * MS, slots, many + 1))
        now = over + 20 * MS
    table = dict(zip(("start_ns", "end_ns", "kind", "name"), map(np.array, zip(*calls, strict=True)), strict=True))
    zero = np.zeros(len(calls), int)
    table |= {"stream": zero, "thread": zero + 7, "bytes": zero + 4096, "direction": zero + Direction.D2H}
    recording.tables["calls"] = Table("calls", table)
    ran = dict(zip(("start_ns", "end_ns", "engine", "count"), map(np.array, zip(*spans, strict=True)), strict=True))
    recording.tables["spans"] = Table("spans", ran | {"stream": np.zeros(len(spans), int)})
    told = ("given_ns", "begun_ns", "done_ns", "slots", "count")
    recording.tables["marks"] = Table(
        "marks", dict(zip(told, map(np.array, zip(*marks, strict=True)), strict=True)) | {"stream": [0] * len(marks)}
    )
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    return recording


def test_calls_that_return_as_their_streams_wait_ends_met_a_full_queue() -> None:
    (queue,) = occupancy(bursts(35 * US)).streams
    assert queue.conclusion.full
    assert queue.inferred_ns == pytest.approx(3 * HELD_NS, rel=0.01)


@pytest.mark.parametrize(
    ("returned_ns", "outstanding"),
    [(300 * US, (985, 990, 1_013)), (35 * US, (300, 310, 320))],
    ids=["later than that", "with few outstanding"],
)
def test_calls_that_return_for_another_reason_did_not(returned_ns: int, outstanding: tuple[int, ...]) -> None:
    (queue,) = occupancy(bursts(returned_ns, outstanding)).streams
    assert not queue.conclusion.full
