"""Depth and channels are measured in the process, whatever the environment made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from kvprobe import environment
from kvprobe.cuda import find_runtime
from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.errors import KvprobeError
from kvprobe.launchqueue import calibrate, calibration

PROGRAM = """
import json, sys
from kvprobe.cuda import find_runtime
from kvprobe.errors import KvprobeError
from kvprobe.launchqueue import calibrate, calibration
limits = [calibrate(find_runtime("host"), cache=sys.argv[1] == "cache") for _ in range(2)]
print(json.dumps([[each.depth, each.channels, each.capacity, each.how] for each in limits]))
"""


def measure(tmp_path, cache="no", **environment):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cache], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("environment", "depth", "channels", "capacity"),
    [
        ({}, 1021, 4, 4021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 1021, 1, 1021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32", "KVHOST_SUBMIT_NS": "0"}, 1021, 32, 32021),
        ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}, 1021, 8, 8021),
        ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "6", "KVHOST_SUBMIT_NS": "0"}, 1021, 6, 6021),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "4x", "KVHOST_SUBMIT_NS": "0"}, 4093, 4, 16309),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "0.25x"}, 253, 4, 949),
        ({"KVHOST_DEPTH": "64"}, 64, 4, 232),
    ],
)
def test_the_queue_is_counted_exactly(tmp_path, environment, depth, channels, capacity):
    assert measure(tmp_path, **environment) == [[depth, channels, capacity, "calibrated"]] * 2


def test_a_second_process_in_the_same_environment_reads_the_cache_and_in_another_does_not(tmp_path):
    assert [each[3] for each in measure(tmp_path, "cache")] == ["calibrated", "cached"]
    assert [each[3] for each in measure(tmp_path, "cache")] == ["cached", "cached"]
    assert measure(tmp_path, "cache", KVHOST_DEPTH="100")[0][::3] == [100, "calibrated"]


def test_a_cache_that_cannot_be_written_or_read_changes_nothing(tmp_path):
    (tmp_path / "kvprobe").write_text("a file where the folder should be")
    assert measure(tmp_path, "cache")[0][0] == 1021


def test_under_kvprobe_run_the_result_is_left_for_the_recording(tmp_path):
    before = time.monotonic_ns()
    assert measure(tmp_path, "cache", KVPROBE_RUN=str(tmp_path))[1][3] == "cached"
    (left,) = tmp_path.glob("queue-*.json")
    said = json.loads(left.read_text())
    assert (said["depth"], said["channels"], said["how"]) == (1021, 4, "cached")
    assert before < said["start_ns"] <= said["end_ns"] < time.monotonic_ns()
    assert measure(tmp_path, KVPROBE_RUN=str(tmp_path / "gone"))[0][0] == 1021
    assert not (tmp_path / "gone").exists()


def test_a_simulated_queue_is_what_it_is_configured_to_be():
    runtime = host_runtime(virtual_clock=True, depth=64, copy_channels=2)
    limits = calibrate(runtime)
    assert (limits.depth, limits.channels, limits.capacity, limits.baseline_ns) == (64, 2, 120, 1000)
    runtime.reset()


@pytest.mark.parametrize("streams", [1, 2])
def test_a_count_that_a_busy_machine_made_too_low_is_made_again(monkeypatch, streams):
    """Whoever waits for a lock whose holder lost its core looks like one that waits for a place in the queue."""
    count, wrong = calibration._capacity, [streams]

    def too_low(runtime, of, *rest):
        found = count(runtime, of, *rest)
        if len(of) in wrong:
            wrong.remove(len(of))
            found.accepted = 1
        return found

    monkeypatch.setattr(calibration, "_capacity", too_low)
    runtime = host_runtime(depth=64)
    limits = calibrate(runtime, cache=False)
    assert (limits.depth, limits.channels, limits.capacity, wrong) == (64, 4, 232, [])
    runtime.reset()


def test_counts_that_never_fit_are_refused_in_one_line(monkeypatch):
    count = calibration._capacity

    def too_low(runtime, of, *rest):
        found = count(runtime, of, *rest)
        found.accepted = 1 if len(of) == 1 else found.accepted
        return found

    monkeypatch.setattr(calibration, "_capacity", too_low)
    runtime = host_runtime(depth=64)
    with pytest.raises(KvprobeError, match="too busy; try again"):
        calibrate(runtime, cache=False)
    runtime.reset()


@pytest.mark.parametrize(
    "damaged",
    [{"depth": 1}, {"depth": "1021"}, {"channels": -4}, {"capacity": 1.5}, {"baseline_ns": None}, {"p99_ns": 1 << 60}],
)
def test_a_damaged_cache_is_measured_anew(tmp_path, damaged):
    measure(tmp_path, "cache")
    (path,) = (tmp_path / "kvprobe").glob("queue-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | damaged))
    assert [each[3] for each in measure(tmp_path, "cache")] == ["calibrated", "cached"]


def test_without_a_home_nothing_is_cached_and_all_is_measured(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid")))
    assert not environment.caches().exists()
    assert [calibrate(find_runtime("host")).how for _ in range(2)] == ["calibrated"] * 2
