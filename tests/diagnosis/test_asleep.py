"""A thread that sleeps between steps while the GPU has nothing to do: an event loop, by `kvprobe run` on an H200."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

from kvprobe.account import Line
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

NAME = "an_event_loop_that_looks_for_the_token_each_three_milliseconds.kvprobe.tar.gz"
PACKED = Path(__file__).resolve().parents[1] / "gpu" / "data" / "asleep" / NAME


@pytest.mark.parametrize(("used", "slept"), [(1, True), (4, False)])
def test_a_thread_of_a_process_that_uses_no_cpu_sleeps(tmp_path, used, slept):
    """Where its process uses four times the CPU time that was noted, the thread may prepare the next step."""
    recording = open_recording(unpack(PACKED, tmp_path))
    recording.tables["pauses"]["process_ns"][:] *= used
    found = examine(recording)
    first, (gpu,) = found[0], found.account.gpus
    # 3 ms of sleep after each step of 1.2 ms; the CPU time is the event loop's own
    assert gpu.share(Line.ELSEWHERE if slept else Line.PYTHON) > 0.6
    assert first.cause == ("waiting_for_host" if slept else "gpu_starved")
    assert ("the thread slept, or waited for something outside CUDA" in first.title) == slept
    assert slept or "while the host prepared the next step" in first.title
    assert first.cure[0].text.startswith("Do not let the thread sleep" if slept else "Prepare the next step")
