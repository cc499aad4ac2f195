"""Full queues of copies on an H100 that `kvprobe run` counted by timing events, and that no other sign betrays.

Recorded by `benchmarks/queue_truth.py`: the programs found by their own clock that calls waited for a slot. Of each, a
rule that looks at slow calls alone concluded that it cannot tell, or that no queue was full.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import FULL_QUEUE, examine
from kvprobe.recordings import open_recording
from kvprobe.recordings.marked_depth import depth_by_marks
from kvprobe.recordings.occupancy import occupancy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).parents[1] / "gpu" / "data" / "queues"
RECORDINGS = sorted(DATA.glob("*.kvprobe.tar.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_a_count_that_gathers_at_the_depth_is_a_full_queue(path, tmp_path):
    recording = open_recording(unpack(path, tmp_path))
    (full,) = [queue for queue in occupancy(recording).streams if queue.conclusion.full]
    assert "counted by timing events" in full.conclusion.because
    assert 1_000 <= full.depth[full.blocked].min() <= full.depth.max() <= 1_026
    named = [one for one in examine(recording) if one.cause in FULL_QUEUE and not one.abstains]
    assert named, "the finding is there, and certain enough to be one"


@pytest.mark.parametrize("path", RECORDINGS[:1], ids=lambda path: path.name.partition(".")[0])
def test_the_same_count_with_calls_as_quick_as_ever_is_no_full_queue(path, tmp_path):
    """A program that holds itself back at the depth of a queue: none of its calls waits."""
    recording = open_recording(unpack(path, tmp_path))
    queue = max(occupancy(recording).streams, key=lambda one: len(one.calls))
    calls, rows = recording.calls, queue.calls
    counted = depth_by_marks(recording, queue)
    assert counted is not None and (counted.own > 1_000).sum() > 1_000
    quick = np.sort((calls["end_ns"] - calls["start_ns"])[rows[counted.own < 500]])
    calls["end_ns"][rows] = calls["start_ns"][rows] + quick[np.arange(len(rows)) % (len(quick) * 9 // 10)]
    assert not any(one.conclusion.full for one in occupancy(recording).streams)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_what_a_call_takes_with_a_free_slot_is_of_calls_that_had_one(path, tmp_path):
    """Not of all calls: of these programs' calls, most were blocked."""
    recording = open_recording(unpack(path, tmp_path))
    (queue,) = [queue for queue in occupancy(recording).streams if queue.conclusion.full]
    calls, counted = recording.calls, depth_by_marks(recording, queue)
    assert counted is not None
    copies = calls["name"][queue.calls] == np.bincount(calls["name"][queue.calls]).argmax()
    took = (calls["end_ns"] - calls["start_ns"])[queue.calls]
    free = float(np.median(took[copies & counted.known & (counted.own < 900)]))
    (finding,) = [one for one in examine(recording) if one.cause == "launch_queue_saturation"]
    assert queue.baseline_ns[int(calls["name"][queue.calls[copies][0]])] == pytest.approx(free, rel=0.03)
    (said,) = [one.text for one in finding.evidence if "with a free slot" in one.text]
    assert said.startswith(f"with a free slot, such a call takes {free / 1e3:.1f}"[:-1])


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_the_gpu_waits_for_a_slot_no_longer_than_the_thread_does(path, tmp_path):
    found = examine(open_recording(unpack(path, tmp_path)))
    (full,) = [one for one in found if one.cause == "launch_queue_saturation"]
    (gpu,) = [one for one in found.account.gpus if one.seen]
    assert full.device_ns <= full.lost_ns
    assert gpu.ns(Line.FULL_QUEUE) <= sum(one.lost_ns for one in found if one.cause in FULL_QUEUE)
