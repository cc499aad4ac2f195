"""A thread that launches kernel by kernel, of which `kvprobe run` counted the launches: an eager decoder on an H200."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))
from grade import unpack

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.counted_launches import counts_launches
from kvprobe.recordings import open_recording
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Recording

PACKED = Path(__file__).resolve().parents[1] / "gpu" / "data" / "eager" / "eager_decoder.kvprobe.tar.gz"
STEPS = 771  # that it printed
KERNELS_NS = 55.3e6 / 112  # of one step, by the PyTorch profiler on the same machine: 112 steps


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return open_recording(unpack(PACKED, tmp_path))


def test_launching_kernel_by_kernel_is_named_and_cured_by_graphs(recording):
    first = examine(recording)[0]
    assert (first.cause, first.severity) == ("python_or_gil_bound", "critical")
    assert "Python was slow to launch kernels" in first.title
    assert "CUDA graph" in first.cure[0].text


def test_the_gpu_computes_as_long_as_its_kernels_take(recording):
    (gpu,) = examine(recording).account.to_json()["gpus"]
    assert gpu["computing_ns"] == pytest.approx(STEPS * KERNELS_NS, rel=0.06)


def waiting(recording: Recording, part: float) -> Recording:
    """The same with so many waits of each thread as this part of its launches."""
    totals = recording.totals
    calls, launches, waits = totals["calls"].copy(), totals["kind"] == CallKind.LAUNCH, totals["kind"] == CallKind.SYNC
    calls[totals["kind"] == CallKind.COPY_SYNC] = 0
    calls[waits] = 0
    calls[np.flatnonzero(waits)[0]] = int(calls[launches].sum() * part)
    recording.tables["totals"] = type(totals)("totals", {**{c: totals[c] for c in totals.columns}, "calls": calls})
    return recording


@pytest.mark.parametrize(("part", "fits"), [(1 / 100, True), (1 / 9, False)])
def test_a_graph_cannot_hold_launches_between_which_results_are_read_back(recording, part, fits):
    first = examine(waiting(recording, part))[0]
    assert first.cause == "python_or_gil_bound" and first.cure[0].predicted_saving_ns
    assert ("once nothing waits between the kernels" in first.cure[0].text) != fits
    assert any(".item()" in one.text for one in first.cure) != fits
    assert any("about once in 9 launches" in one.text for one in first.evidence) != fits


def totals_without(recording: Recording, kind: CallKind) -> None:
    recording.tables["totals"] = recording.totals.where(recording.totals["kind"] != kind)


def test_without_counted_launches_nothing_says_why_the_gpu_waited(recording):
    totals_without(recording, CallKind.LAUNCH)
    assert [one.cause for one in examine(recording) if one.severity == "critical"] == ["waiting_for_host"]


def test_a_thread_that_waits_after_many_launches_is_another_case(recording):
    """As many waits as half of the launches, and what the thread waits for is its own result."""
    assert "python_or_gil_bound" not in [one.cause for one in examine(waiting(recording, 0.5))]


def test_gaps_that_are_more_than_the_launches_are_other_work_s(recording):
    """A few launches and no wait: what the thread does in the many gaps is not launching."""
    totals = recording.totals
    calls, launches = totals["calls"].copy(), totals["kind"] == CallKind.LAUNCH
    calls[launches] = np.minimum(calls[launches], 2_000)
    calls[(totals["kind"] == CallKind.SYNC) | (totals["kind"] == CallKind.COPY_SYNC)] = 0
    recording.tables["totals"] = type(totals)("totals", {**{c: totals[c] for c in totals.columns}, "calls": calls})
    assert calls[launches].sum() == 4_000
    assert "python_or_gil_bound" not in [one.cause for one in examine(recording)]


def test_launches_and_their_time_are_those_of_the_totals(recording):
    joined, totals = Joined(recording), recording.totals
    mine = totals["kind"] == CallKind.LAUNCH
    launched = [counts_launches(joined, caller) for caller in np.unique(joined.caller).tolist()]
    assert sum(one[0] for one in launched) == totals["calls"][mine].sum() > STEPS * 24 * 8
    assert sum(one[1] for one in launched) == totals["dur_ns"][mine].sum()
