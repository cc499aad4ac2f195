"""Waits for copies beside a GPU that has work left, as `kvprobe run` sees it: by timing events, and not to the end."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import GPU, HOST, recording

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import CallKind, Engine, Table
from kvprobe.recordings.run_marks import PAUSED, REASONS

MiB, US, LAYER_NS = 1 << 20, 1_000, 500_000
SPENT = REASONS.index("the budget of marks was spent")


def layers(many: int, seen: float, computing: float = 1.0):
    """A thread that joins each layer's load before it launches the layer; kernels run for `computing` of the time.

    Timing events saw the first `seen` of it; then their budget was spent until the end.
    """
    calls = []
    for layer in range(many):
        place = {"src": HOST + layer * MiB, "dst": GPU + layer % 4 * MiB}
        calls.append({"kind": CallKind.COPY, "stream": 0, "bytes": MiB, **place, "dur_ns": 2 * US})
        calls.append({"kind": CallKind.SYNC, "stream": 0, "dur_ns": LAYER_NS - 5 * US, "gap_ns": 0})
        calls.append({"kind": CallKind.LAUNCH, "stream": 1, "dur_ns": 2 * US, "gap_ns": 0})
    out = recording(calls)
    out.names.extend(REASONS[1:])
    end = int(out.calls["end_ns"].max())
    to = int(end * seen)
    starts = np.arange(0, to, LAYER_NS) + 100 * US
    columns = {"start_ns": starts, "end_ns": starts + int(LAYER_NS * computing), "stream": np.ones(len(starts))}
    out.tables["spans"] = Table(
        "spans", {**columns, "engine": np.full(len(starts), Engine.KERNEL), "count": np.ones(len(starts))}
    )
    coverage = [(0, to, 0, 0), (to, end, len(out.names) - len(REASONS) + SPENT, PAUSED)]
    names = ("start_ns", "end_ns", "reason", "stopped")
    rows = np.array(coverage if seen < 1 else coverage[:1])
    out.tables["coverage"] = Table("coverage", {name: rows[:, i] for i, name in enumerate(names)})
    return out


@pytest.mark.parametrize("seen", [1.0, 0.97, 0.85])
def test_waits_beside_a_gpu_that_computes_all_the_time_cost_nothing(seen):
    """That nobody looked at the end of the recording makes no wait there a loss."""
    made = layers(600, seen)
    found = examine(made)
    (one,) = (one for one in found if one.cause == "synchronisation")
    assert one.severity == "info"
    assert ("with more work launched before" in one.title) == (seen > 0.9)
    assert of_recording(made, found).state == ("healthy" if seen > 0.9 else "undecided")


def test_waits_that_a_gpu_waits_for_are_a_loss():
    found = examine(layers(600, 1.0, computing=0.5))
    (one,) = (one for one in found if one.cause == "synchronisation")
    assert one.severity != "info" and "with more work" not in one.title
