"""Device counters: through the real pynvml over a stub of the driver's library, and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.native import build
from kvprobe.probe.device import METRICS, Sampler, link_state, read_samples
from kvprobe.runfolder.folder import RunFolder


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run([*build.compiler(), "-shared", "-fPIC", "-o", library, str(source)], check=True)
    return folder


def _with_stub(stub: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(stub)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SAMPLE = """
import sys, time
from pathlib import Path
from kvprobe.probe.device import Sampler
from kvprobe.runfolder.folder import RunFolder
with Sampler(RunFolder(Path(sys.argv[1])).append_sample, interval_s=0.02) as sampler:
    while sampler.taken < 6: time.sleep(0.005)
assert not sampler.reason, sampler.reason
"""


def test_every_device_is_sampled_with_units_in_the_names(stub: Path, tmp_path: Path) -> None:
    path = tmp_path / "device.jsonl"
    before = time.monotonic_ns()
    _with_stub(stub, SAMPLE, str(tmp_path))
    samples = list(read_samples(path))
    assert {one.device for one in samples} == {0, 1}
    assert {one.metric for one in samples} == set(METRICS)
    assert all(before < one.time_ns < time.monotonic_ns() for one in samples)
    first = {one.metric: one.value for one in samples if one.device == 0}
    assert first["power_w"] == 123.456
    assert first["pcie_rx_bytes_per_s"] + first["pcie_tx_bytes_per_s"] == 3000 * 1024
    assert (first["memory_used_bytes"], first["memory_total_bytes"]) == (250, 1000)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("throttle") for line in lines[:2]] == [None, ["power cap", "thermal (hardware)"]]


def test_a_link_is_degraded_by_lanes_always_and_by_generation_only_under_load(stub: Path) -> None:
    program = "import json; from kvprobe.probe.device import devices; print(json.dumps(devices()))"
    lines, reason = json.loads(_with_stub(stub, program))
    assert reason == ""
    assert (lines[0]["name"], lines[0]["driver"]) == ("Stub 0", "580.0")
    idle, narrow = link_state(lines[0]), link_state(lines[1])
    assert (idle.gen, idle.max_gen, idle.width, idle.max_width) == (1, 5, 16, 16)
    assert not idle.degraded
    assert "idle" in idle.note
    assert narrow.degraded
    assert "8 of 16 lanes" in narrow.note
    assert link_state({**lines[0], "gpu_busy_percent": 50}).degraded


def test_without_a_driver_the_sampler_does_nothing_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "device.jsonl"
    program = """
import sys
from pathlib import Path
from kvprobe.probe.device import Sampler
from kvprobe.runfolder.folder import RunFolder
sampler = Sampler(RunFolder(Path(sys.argv[1])).append_sample).start()
sampler.stop()
assert sampler.taken == 0
print(sampler.reason)
"""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").write_bytes(b"not a library")
    said = _with_stub(empty, program, str(tmp_path))
    assert "NVML" in said
    assert json.loads(path.read_text())["why_not"] in said
    assert list(read_samples(path)) == []


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "device.jsonl"
    path.write_text('{"t_ns":5,"device":0,"power_w":10,"throttle":["power cap"]}\n{"t_ns":6,"device":0,"pow')
    assert [(one.time_ns, one.metric, one.value) for one in read_samples(path)] == [(5, "power_w", 10.0)]


def test_a_sink_that_cannot_be_written_ends_the_sampling_with_a_reason(tmp_path: Path) -> None:
    sampler = Sampler(RunFolder(tmp_path / "absent").append_sample)
    sampler.start()
    sampler.stop()
    assert "No such file" in sampler.reason
