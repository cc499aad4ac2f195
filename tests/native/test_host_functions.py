"""Marks say which part of a stream's waiting is a host function's, on the simulated device's own clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import Line, Unknown
from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.serving import ServingWindow

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
KERNEL_NS, FUNCTION_NS, STEPS, LAYERS = 250_000, 100_000, 20, 8
PROGRAM = f"""
import ctypes as ct, sys
sys.path.insert(0, {str(CORPUS)!r})
from device import Device
d = Device(streams=1, events=8)
d.lib.kvhostNow.restype = ct.c_uint64
def work(*unused):
    d.check(d.lib.kvhostAdvance(ct.c_uint64(d.lib.kvhostNow() + {FUNCTION_NS})))
%s
for step in range({STEPS}):
    for layer in range({LAYERS}):
        if layer:
            put()
        d.launch({KERNEL_NS})
    d.sync(d.compute)
"""
PUTS = {
    "cudaLaunchHostFunc": """
function = ct.CFUNCTYPE(None, ct.c_void_p)(work)
d.lib.cudaLaunchHostFunc.argtypes = [ct.c_void_p, type(function), ct.c_void_p]
put = lambda: d.check(d.lib.cudaLaunchHostFunc(d.compute, function, None))
""",
    "cudaStreamAddCallback": """
function = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_void_p)(work)
d.lib.cudaStreamAddCallback.argtypes = [ct.c_void_p, type(function), ct.c_void_p, ct.c_uint]
put = lambda: d.check(d.lib.cudaStreamAddCallback(d.compute, function, None, 0))
""",
}


@pytest.mark.parametrize("call", PUTS)
def test_run_sees_which_part_of_a_wait_is_a_host_function_s(libraries: Path, tmp_path: Path, call: str) -> None:
    env = {**os.environ, "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(tmp_path)}
    env |= {"KVPROBE_HOSTRT": str(libraries / "libkvprobe_hostrt.so"), "KVHOST_CLOCK": "virtual", "KVPROBE_MARKS": "on"}
    subprocess.run([sys.executable, "-c", PROGRAM % PUTS[call]], env=env, check=True)
    recording = read(tmp_path)
    seen = recording.coverage
    whole = [recording.text(int(one)) == "" for one in seen["reason"]]
    begin, end = int(seen["start_ns"][whole].max()), int(seen["end_ns"][whole].max())  # from the second step on
    recording.window = ServingWindow(end, np.array([begin]), "where all was seen", begin, True)
    found = examine(recording)
    (gpu,) = found.account.gpus
    functions = (STEPS - 1) * (LAYERS - 1)
    stood = functions * FUNCTION_NS
    assert stood <= gpu.ns(Line.ELSEWHERE) <= 1.05 * stood
    assert Unknown.BETWEEN_OPERATIONS not in gpu.matters_ns()
    verdict = of_recording(recording, found)
    assert verdict.state == "found" and "behind a host function" in verdict.reason
    (finding,) = [one for one in found if one.cause == "waiting_for_host"]
    text = f"{call} put them into the stream: {functions} calls"
    assert any(text in one.text for one in finding.evidence)
    assert {one.name for one in finding.calls} == {call}
    assert finding.cure[0].predicted_saving_ns == gpu.ns(Line.ELSEWHERE)
    # Of calls that a ring no longer held, marks tell as much, but not who made them.
    recording.names = [name.replace(call, "cudaStreamQuery") for name in recording.names]
    found = examine(recording)
    assert found.account.gpus[0].ns(Line.ELSEWHERE) == gpu.ns(Line.ELSEWHERE)
    (finding,) = [one for one in found if one.cause == "waiting_for_host"]
    assert any("which calls put them into the stream was not kept" in one.text for one in finding.evidence)
