"""Few submissions keep nothing from being called healthy where GPUs compute nearly all the time."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table

MS = 1_000_000


def replayed(ran_ms: float, graphs: int) -> Recording:
    """CUDA graphs, one in 60 ms and two submitted ahead, each of which keeps the GPU for `ran_ms`."""
    recording = Recording([Source("made", "trace")], names=["", "cudaGraphLaunch"])
    begins = np.arange(graphs) * 60 * MS
    asked = np.maximum(begins - 120 * MS, np.arange(graphs) * 20_000)
    columns = {"stream": np.zeros(graphs, dtype=np.int64), "correlation": np.arange(graphs)}
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": asked,
            "end_ns": asked + 10_000,
            "kind": np.full(graphs, CallKind.GRAPH),
            "name": np.ones(graphs, dtype=np.int64),
            "thread": np.full(graphs, 7),
            **columns,
        },
    )
    recording.tables["executions"] = Table(
        "executions",
        {
            "start_ns": begins + 20_000,
            "end_ns": begins + 20_000 + int(ran_ms * MS),
            "engine": np.full(graphs, Engine.KERNEL),
            "direction": np.full(graphs, Direction.UNKNOWN),
            **columns,
        },
    )
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.has_executions = True
    return recording


@pytest.mark.parametrize(
    ("ran_ms", "graphs", "state"), [(59.9, 26, "healthy"), (50, 26, "undecided"), (59.9, 10, "undecided")]
)
def test_few_submissions_tell_enough_of_a_gpu_that_computes(ran_ms: float, graphs: int, state: str) -> None:
    recording = replayed(ran_ms, graphs)
    verdict = of_recording(recording, examine(recording))
    assert verdict.state == state
    assert ("too few" in verdict.reason) == (state == "undecided")
