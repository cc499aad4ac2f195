"""Results at stake are a finding only where the recording tells who waits for whom; else they are not looked for."""

import numpy as np
import pytest
from scenarios import SCENARIOS

from kvprobe.diagnosis import examine, notes_of
from kvprobe.recordings.model import Memory, Source, Table


def without_streams_of_waits(recording):
    """The recording as the PyTorch profiler would make it: waits are there, their streams are not."""
    calls = recording.calls
    waits = np.array([recording.text(int(i)) == "cudaStreamWaitEvent" for i in calls["name"]])
    assert waits.any()
    recording.tables["calls"] = Table("calls", {**calls.columns, "stream": np.where(waits, -1, calls["stream"])})
    return recording


@pytest.mark.parametrize(
    "scenario, cause",
    [("healthy_loads_with_a_wait", "load_not_ordered"), ("healthy_stores_with_a_wait", "store_not_ordered")],
)
def test_waits_of_unknown_streams_are_no_evidence_of_corruption(runtime, scenario, cause):
    examined = examine(without_streams_of_waits(SCENARIOS[scenario](runtime).recording))
    assert cause not in {finding.cause for finding in examined.findings}
    lacks = {one.cause: one for one in examined.not_looked_for}[cause]
    assert "does not tell which streams" in lacks.because
    assert "Nsight Systems" in lacks.shown_by
    assert any(cause in note and "because" in note for note in notes_of(examined.not_looked_for))


def test_of_an_nsight_export_nsight_itself_is_not_the_advice(runtime):
    recording = without_streams_of_waits(SCENARIOS["healthy_loads_with_a_wait"](runtime).recording)
    recording.source = [Source("old.sqlite", "nsys-sqlite")]
    lacks = {one.cause: one for one in examine(recording).not_looked_for}["load_not_ordered"]
    assert lacks.because.startswith("the export does not tell which streams")
    assert "nsys export" in lacks.shown_by and "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION" in lacks.shown_by
    recording.tables["executions"], recording.has_executions = Table("executions"), False
    lacking = {one.cause: one.shown_by for one in examine(recording).not_looked_for}
    for cause in ("load_not_ordered", "link_bound"):
        assert "with device activity" in lacking[cause] and "PyTorch" not in lacking[cause]


def test_with_their_streams_the_causes_are_looked_for(runtime):
    examined = examine(SCENARIOS["healthy_loads_with_a_wait"](runtime).recording)
    assert "load_not_ordered" not in {one.cause for one in examined.not_looked_for}


@pytest.mark.parametrize("gpus, named", [([0], True), ([1], False), ([0, 1], False)])
def test_memory_on_another_node_than_the_gpu_is_named_where_both_are_known(runtime, gpus, named):
    recording = SCENARIOS["healthy_loads_with_a_wait"](runtime).recording
    assert "remote_numa_memory" in {one.cause for one in examine(recording).not_looked_for}
    recording.machine.update(host_bytes_by_node=[0, 256 << 20, 0, 0], gpu_nodes=gpus)
    found = {finding.cause for finding in examine(recording)}
    assert ("remote_numa_memory" in found) == named


@pytest.mark.parametrize("mode, named", [(True, True), (False, False), (None, False)])
def test_pinned_copies_that_hold_their_caller_are_named_under_confidential_computing(runtime, mode, named):
    """The host runtime's pageable copies, called pinned, are what that mode makes of pinned ones."""
    recording = SCENARIOS["pageable_copies"](runtime).recording
    calls, executions = recording.calls, recording.executions
    recording.tables["calls"] = Table("calls", {**calls.columns, "memory": np.full(calls.rows, Memory.PINNED)})
    recording.tables["executions"] = Table(
        "executions", {**executions.columns, "memory": np.full(executions.rows, Memory.PINNED)}
    )
    if mode is not None:
        recording.machine["confidential_computing"] = mode
    examined = examine(recording)
    assert ("confidential_computing" in {finding.cause for finding in examined.findings}) == named
    assert ("confidential_computing" in {one.cause for one in examined.not_looked_for}) == (mode is None)
