"""A tool that listens to NVTX gets a range around each copy that the engine submits at detail "copies"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.launchqueue import QueueLimits
from kvprobe.offload import BlockPool, OffloadEngine

runtime = find_runtime("host")
pools = [BlockPool(runtime, [region(runtime, 64 * 4096)], 4096) for region in (device_region, host_region)]
how = {"policy": sys.argv[1], "method": "loop", "detail": sys.argv[2], "limits": QueueLimits(1021, 8, 8021, 1000, 2000)}
with OffloadEngine(runtime, *pools, **how) as engine:
    engine.load(range(0, 64, 2), range(0, 64, 2)).wait()
    engine.store(range(1, 33, 2), range(1, 33, 2)).wait()
"""


@pytest.mark.parametrize(("detail", "ranges"), [("copies", 48), ("transfers", 0)])
@pytest.mark.parametrize("policy", ["shared", "pooled"])
def test_each_copy_of_the_engine_has_a_range_with_its_bytes(
    nvtx_tool: Path, tmp_path: Path, policy: str, detail: str, ranges: int
) -> None:
    seen = tmp_path / "seen"
    env = {**os.environ, "NVTX_INJECTION64_PATH": str(nvtx_tool), "NVTX_SEEN": str(seen)}
    subprocess.run([sys.executable, "-c", PROGRAM, policy, detail], env=env, check=True)
    lines = seen.read_text().splitlines() if seen.exists() else []
    copies = [line for line in lines if line.startswith(("H2D", "D2H"))]
    assert len(copies) == lines.count("pop") == ranges
    assert all(line.endswith(" 4096") for line in copies)
    assert sum(line.startswith("H2D") for line in copies) == ranges * 2 // 3
