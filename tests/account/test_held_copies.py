"""A copy whose call waited for another thread that pinned memory was not copying meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.account import COPIES, Line, account_of
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table

MS = 1_000_000


def recorded(pinned_ms: tuple[int, int], kind: CallKind, process: int, size: int, direction: Direction) -> Recording:
    """What timing events tell of two kernels of thread 7 and a copy of thread 8 between them, by the call of which it
    began at 12 ms and was there at 400 ms; meanwhile thread 7 pins memory, or makes another call."""
    recording = Recording(
        [Source("made", "kvprobe")], names=["", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaHostAlloc"]
    )
    begin, end = (MS * at for at in pinned_ms)
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.array([0, begin, 12 * MS, 410 * MS]),
            "end_ns": np.array([5_000, end, 400 * MS, 410 * MS + 5_000]),
            "kind": np.array([CallKind.LAUNCH, kind, CallKind.COPY, CallKind.LAUNCH]),
            "thread": np.array([7, 9 if process else 7, 8, 7]),
            "process": np.array([0, process, 0, 0]),
            "name": np.array([1, 3, 2, 1]),
            "stream": np.array([0, -1, 1, 0]),
            "bytes": np.array([0, 1 << 29, size, 0]),
        },
    )
    recording.tables["spans"] = Table(
        "spans",
        {
            "start_ns": np.array([5_000, 12 * MS + 2_000, 410 * MS + 5_000]),
            "end_ns": np.array([10 * MS, 400 * MS + 200_000, 420 * MS]),
            "engine": np.array([Engine.KERNEL, Engine.COPY, Engine.KERNEL]),
            "process": np.zeros(3),
            "device": np.zeros(3),
            "stream": np.array([0, 1, 0]),
            "bytes": np.array([0, size, 0]),
            "direction": np.array([0, direction, 0]),
            "count": np.ones(3),
        },
    )
    recording.tables["coverage"] = Table(
        "coverage",
        {"start_ns": [0], "end_ns": [420 * MS], "process": [0], "device": [0], "reason": [0], "stopped": [0]},
    )
    recording.machine["link_bytes_per_s"] = 55e9
    recording.tables["streams"] = Table("streams", {"process": [0, 0], "handle": [7, 8]})
    recording.tables["processes"] = Table("processes", {"pid": [1, 2]})
    return recording


def copied_and_allocated(recording: Recording) -> tuple[int, int]:
    """Milliseconds in which the GPU waited for copies, and for who allocates."""
    (gpu,) = (one for one in account_of(Joined(recording)).gpus if one.ns(Line.COMPUTING))
    assert sum(gpu.ns(line) for line in Line) == gpu.window_ns
    copies = sum(gpu.ns(line) for line in COPIES)
    return copies // MS, gpu.ns(Line.ALLOCATING) // MS


@pytest.mark.parametrize("direction", [Direction.H2D, Direction.D2H, Direction.D2D])
def test_the_time_is_that_of_the_thread_that_pins(direction: Direction) -> None:
    assert copied_and_allocated(recorded((11, 400), CallKind.ALLOC, 0, 4 << 20, direction)) == (0, 389)


def test_what_the_copy_itself_takes_is_its_own() -> None:
    """11 GB at 55 GB/s take 200 ms, which cannot lie behind the call."""
    assert copied_and_allocated(recorded((11, 400), CallKind.ALLOC, 0, 11 * 10**9, Direction.H2D)) == (200, 189)


@pytest.mark.parametrize(
    "pinned_ms, kind, process",
    [
        ((11, 300), CallKind.ALLOC, 0),
        ((399, 400), CallKind.ALLOC, 0),
        ((11, 400), CallKind.SYNC, 0),
        ((11, 400), CallKind.ALLOC, 1),
    ],
    ids=["over long before", "begun long after", "another call", "another process"],
)
def test_else_it_is_the_copys(pinned_ms: tuple[int, int], kind: CallKind, process: int) -> None:
    copied, allocated = copied_and_allocated(recorded(pinned_ms, kind, process, 4 << 20, Direction.H2D))
    assert copied == 388 and allocated <= 1
