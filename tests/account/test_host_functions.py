"""What stands in a stream behind a host function waits for it, wherever the recorder says where that was put."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.account import Line, Unknown, account_of
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table


def two_kernels(stream: int, thread: int) -> Recording:
    """A kernel of 1 ms, a host function, a kernel that begins 1 ms after the first: all submitted in 30 us."""
    recording = Recording([Source("made", "trace")], names=["", "cudaLaunchKernel", "cudaLaunchHostFunc", "kernel"])
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.array([0, 10_000, 20_000]),
            "end_ns": np.array([5_000, 15_000, 25_000]),
            "kind": np.array([CallKind.LAUNCH, CallKind.EVENT, CallKind.LAUNCH]),
            "correlation": np.array([1, 2, 3]),
            "thread": np.array([7, thread, 7]),
            "process": np.zeros(3),
            "name": np.array([1, 2, 1]),
            "stream": np.array([0, stream, 0]),
        },
    )
    recording.tables["executions"] = Table(
        "executions",
        {
            "start_ns": np.array([10_000, 2_010_000]),
            "end_ns": np.array([1_010_000, 3_010_000]),
            "engine": np.array([Engine.KERNEL, Engine.KERNEL]),
            "correlation": np.array([1, 3]),
            "process": np.zeros(2),
            "device": np.zeros(2),
            "stream": np.zeros(2),
            "name": np.array([3, 3]),
        },
    )
    recording.tables["streams"] = Table("streams", {"process": [0, 0], "handle": [7, 8]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    recording.has_executions = True
    return recording


@pytest.mark.parametrize(
    "stream, thread, waited",
    [(0, 7, True), (0, 8, True), (-1, 7, True), (-1, 8, False), (1, 7, False)],
    ids=["same stream", "same stream, by another thread", "no stream told", "no stream told, another thread", "other"],
)
def test_a_function_holds_up_its_own_stream(stream: int, thread: int, waited: bool) -> None:
    """Where a recorder does not say into which stream a call put it, a function is its thread's."""
    (gpu,) = account_of(Joined(two_kernels(stream, thread))).gpus
    told = gpu.ns(Line.ELSEWHERE), gpu.unknown_ns().get(Unknown.BETWEEN_OPERATIONS, 0)
    assert told == ((1_000_000, 0) if waited else (0, 1_000_000))
    assert sum(gpu.ns(line) for line in Line) == gpu.window_ns


def test_a_function_in_front_of_the_first_of_two_kernels_does_not_hold_up_the_second() -> None:
    recording = two_kernels(0, 7)
    recording.calls["start_ns"][1], recording.calls["end_ns"][1] = -10_000, -5_000
    (gpu,) = account_of(Joined(recording)).gpus
    assert gpu.ns(Line.ELSEWHERE) == 5_000  # from its submission on, the first kernel waits
    assert gpu.unknown_ns()[Unknown.BETWEEN_OPERATIONS] == 1_000_000
