"""A thread that sleeps between steps while the GPU has nothing to do: an event loop, by `kvprobe run` on an H200."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

NAME = "an_event_loop_that_looks_for_the_token_each_three_milliseconds.kvprobe.tar.gz"
PACKED = Path(__file__).resolve().parents[1] / "gpu" / "data" / "asleep" / NAME


@pytest.mark.parametrize(("used", "slept"), [(1, True), (4, False)])
def test_a_thread_of_a_process_that_uses_no_cpu_sleeps(tmp_path, used, slept):
    """Where its process uses four times the CPU time that was noted, the thread may prepare the next step."""
    recording = open_recording(unpack(PACKED, tmp_path))
    recording.tables["pauses"]["process_ns"][:] *= used
    first = examine(recording)[0]
    assert first.cause == "waiting_for_host"
    assert ("the thread slept, or waited for something outside CUDA" in first.title) == slept
    assert first.cure[0].text.startswith("Do not let the thread sleep" if slept else "Prepare the next step")
