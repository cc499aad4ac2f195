"""A GPU that stands still until an operation of another one has ended waits for that: a pipeline's stages do."""

import numpy as np
import pytest

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table
from kvprobe.reporting.account import account_lines

MS, STEPS = 1_000_000, 300


def ran(start, took, device):
    """Kernels of a process's two GPUs, from `start` for so long; one thread launches all before the first has run."""
    order = np.argsort(start, kind="stable")
    start, took, device = start[order], took[order], device[order]
    many = len(start)
    asked = np.arange(many) * 20_000 - many * 20_000 + int(start[0])
    recording = Recording([Source("made", "nsys")], names=["", "cudaLaunchKernel", "kernel"], has_executions=True)
    common = {"process": np.zeros(many), "correlation": np.arange(many) + 1, "stream": device}
    calls = {**common, "start_ns": asked, "end_ns": asked + 3_000, "thread": np.full(many, 7), "name": np.ones(many)}
    recording.tables["calls"] = Table("calls", {**calls, "kind": np.full(many, CallKind.LAUNCH)})
    times = {"start_ns": start, "end_ns": start + took, "device": device}
    kernels = {**common, **times, "engine": np.full(many, Engine.KERNEL)}
    recording.tables["executions"] = Table("executions", kernels)
    recording.tables["streams"] = Table("streams", {"process": [0, 0], "device": [0, 1], "handle": [7, 8]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    return recording


def pipeline(after_ns=10_000, gpus=(0, 1)):
    """Two GPUs by turns, 1 ms each: one begins so long after the other has ended."""
    begins = 100 * MS + np.arange(2 * STEPS) * (MS + after_ns)
    device = np.arange(2 * STEPS) % 2
    mine = np.isin(device, gpus)
    return ran(begins[mine], np.full(int(mine.sum()), MS), device[mine])


def waited(recording):
    """Of each GPU, the share of its window that it waited for another, and that nothing explains."""
    names = "another_gpu", "between_operations"
    gpus = examine(recording).account.gpus
    return [[gpu.to_json()["not_known_ns"].get(name, 0) / gpu.window_ns for name in names] for gpu in gpus]


def test_stages_of_a_pipeline_wait_for_each_other():
    recording = pipeline()
    assert np.array(waited(recording)) == pytest.approx(np.array([[0.5, 0.0], [0.5, 0.0]]), abs=0.02)
    found = examine(recording)
    assert sum("waiting for another GPU" in line for line in account_lines(found.account)) == 2
    verdict = of_recording(recording, found)
    assert verdict.state == "undecided" and "waited for another GPU" in verdict.reason


def test_what_begins_long_after_the_other_has_ended_waits_for_something_else():
    assert [one[0] for one in waited(pipeline(after_ns=400_000))] == [0, 0]


def test_operations_that_end_all_the_time_show_nothing():
    """One of the other GPU's kernels ends within 20 us of any instant."""
    small, large = 100 * MS + np.arange(20_000) * 10_000, 100 * MS + np.arange(100) * 2 * MS
    took, device = np.repeat([8_000, MS], [len(small), len(large)]), np.repeat([0, 1], [len(small), len(large)])
    alone, open_ = waited(ran(np.concatenate((small, large)), took, device))[1]
    assert alone == 0 and open_ > 0.4


def test_one_gpu_waits_for_no_other():
    assert waited(pipeline(gpus=(1,))) == [pytest.approx([0, 0.5], abs=0.02)]
