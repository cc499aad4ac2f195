"""What spans say of the bytes of copies, beside what the calls say."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.probe.ring import SPAN
from kvprobe.probe.ring_layout import RECORD
from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import CallKind, Direction, Recording, Source, Table
from kvprobe.recordings.run_events import RingRecords
from kvprobe.recordings.run_marks import marks
from kvprobe.recordings.vocabulary import Names

KIB, MIB, LOADS = 1 << 10, 1 << 20, 2


def read(
    spans: list[tuple[int, int, int]], largest: list[int], lost: int = 0, called: str = "cudaMemcpyAsync"
) -> Recording:
    """Spans of loads, each of a stream of its own: ns, bytes and count; `largest` call of each of these streams."""
    recording, rows = Recording([Source("made", "trace")], names=["", called]), len(spans)
    recording.lost[0] = lost
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.arange(rows),
            "end_ns": np.arange(rows) + 1,
            "name": np.ones(rows, dtype=np.int64),
            "kind": np.full(rows, CallKind.COPY),
            "direction": np.full(rows, Direction.H2D),
            "bytes": np.array(largest),
            "stream": np.arange(rows),
        },
    )
    records = np.zeros(rows, dtype=RECORD)
    records["call"], records["result"], records["direction"] = SPAN, LOADS, Direction.H2D
    for row, (ns, size, count) in enumerate(spans):
        records["start_ns"][row], records["dur_ns"][row], records["dst"][row] = 1_000 * row, ns, ns
        records["bytes"][row], records["count"][row] = size, count
    zero = np.zeros(rows, dtype=np.int64)
    marks(recording, RingRecords(records, zero, zero, np.arange(rows)), Names())
    return recording


@pytest.mark.parametrize(("lost", "kib"), [(0, 16), (3, 16 * KIB + 8)])
def test_a_memset_among_copies_makes_the_link_no_faster(lost: int, kib: int) -> None:
    """On the first stream 8 KiB came beside a memset of 16 MiB. Where calls were lost, no call may be the largest."""
    loads = [(20_000, 16 * MIB + 8 * KIB, 2), (round(8 * MIB / 50), 8 * MIB, 1)]
    recording = read(loads, [8 * KIB, 8 * MIB], lost)
    spans = recording.spans
    assert spans["bytes"][spans["stream"] == 0].sum() == kib * KIB
    assert (link_rate(recording, Direction.H2D)[0] > 55e9) == bool(lost)


@pytest.mark.parametrize(("called", "known"), [("cudaMemcpyAsync", True), ("cudaMemcpy2DAsync_ptsz", False)])
def test_copies_by_rows_tell_nothing_of_the_link(called: str, known: bool) -> None:
    rate, how = link_rate(read([(800_000, 8 * MIB, 1)], [8 * MIB], called=called), Direction.H2D)
    assert (rate > 10e9, how != "unknown") == (known, known)


def test_a_long_run_of_copies_keeps_its_bytes_in_all_its_pieces() -> None:
    spans = read([(1_000 * 3 * 700, 700 * 16 * KIB, 700)], [16 * KIB]).spans
    assert len(spans["bytes"]) > 1 and spans["bytes"].sum() == 700 * 16 * KIB
