"""A recording of `kvprobe run` on an H200: four busy processes share the one CPU of the thread that launches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

import pytest
from grade import unpack

from kvprobe.account import HOST, Line
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "no_cpu"


def test_what_the_gpu_waited_for_a_thread_without_a_cpu_is_explained_by_that_and_comes_first(tmp_path):
    packed = DATA / "drafts_in_four_processes_on_the_cpu_of_the_engine.kvprobe.tar.gz"
    found = examine(open_recording(unpack(packed, tmp_path)))
    first, second = [one for one in found if one.severity != "info"]
    assert (first.cause, second.cause) == ("cpu_starved", "waiting_for_host")
    (gpu,) = found.account.gpus
    assert first.device_ns == gpu.ns(Line.NO_CPU) > 0.7 * gpu.window_ns
    assert second.device_ns == pytest.approx(gpu.ns(*HOST) - gpu.ns(Line.NO_CPU), rel=0.02)
    assert first.predicted_saving_ns <= first.device_ns
    assert "Give the process more CPUs" in first.cure[0].text
