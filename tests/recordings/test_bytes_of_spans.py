"""What spans say of the bytes of copies, beside what the calls say."""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.run_marks import bytes_of_copies

MIB = 1 << 20


def with_a_memset(lost: int = 0) -> Recording:
    """Two streams: on the first 8 KiB come in 10 us, counted with a memset's 16 MiB; on the other 8 MiB at 50 GB/s."""
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync"])
    recording.lost[0] = lost
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.array([0, 20]),
            "end_ns": np.array([5, 25]),
            "kind": np.full(2, CallKind.COPY),
            "direction": np.full(2, Direction.H2D),
            "bytes": np.array([8_192, 8 * MIB]),
            "stream": np.array([0, 1]),
            "name": np.ones(2),
        },
    )
    recording.tables["spans"] = Table(
        "spans",
        {
            "start_ns": np.array([0, 20_000]),
            "end_ns": np.array([10_000, 20_000 + round(8 * MIB / 50)]),
            "engine": np.full(2, Engine.COPY),
            "direction": np.full(2, Direction.H2D),
            "bytes": np.array([16 * MIB + 8_192, 8 * MIB]),
            "count": np.array([2, 1]),
            "stream": np.array([0, 1]),
        },
    )
    return recording


def test_a_memset_among_copies_makes_the_link_no_faster() -> None:
    recording = with_a_memset()
    bytes_of_copies(recording)
    assert recording.spans["bytes"].tolist() == [16_384, 8 * MIB]
    assert round(link_rate(recording, Direction.H2D)[0] / 1e9) == 50


def test_where_calls_were_lost_the_largest_copy_is_not_known() -> None:
    recording = with_a_memset(lost=3)
    bytes_of_copies(recording)
    assert recording.spans["bytes"].tolist() == [16 * MIB + 8_192, 8 * MIB]
