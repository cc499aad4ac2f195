"""LMCache on its CPU stub device under `kvprobe run`: the objects it copies are the same, and a report is written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

pytest.importorskip("torch")
pytest.importorskip("lmcache")

# LMCache's own memory objects through its own copy helpers, there and back; the digests are of what arrived.
DRIVER = """
import hashlib, sys
import torch
from lmcache.v1.gpu_connector import gpu_ops
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.multiprocess import object_group_transfer
from lmcache.v1.platform import torch_dev
torch.manual_seed(int(sys.argv[1]))
allocator = HostMemoryAllocator(8 << 20)
shape = torch.Size([2, 4, 64, 128])
stored, loaded, device = [], [], [torch.randn(shape.numel()).to(torch.bfloat16) for _ in range(16)]
for tensor in device:
    stored.append(allocator.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD))
    gpu_ops.lmcache_memcpy_async_d2h(tensor, stored[-1])
for one in reversed(stored):
    loaded.append(torch.zeros(shape.numel(), dtype=torch.bfloat16))
    object_group_transfer.lmcache_memcpy_async_h2d(one, loaded[-1])
digest = lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
print(type(torch_dev).__name__, [digest(tensor) for tensor in loaded],
      all(torch.equal(a, b) for a, b in zip(device, reversed(loaded))))
try:
    gpu_ops.lmcache_memcpy_async_h2d(stored[0], loaded[0][:64])
except ValueError as error:
    print(error)
"""


def wait_for_end(folder: Path) -> str:
    """The observer's last line, which it writes after the report."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        log = (folder / "observer.log").read_text()
        if "report in" in log or "nothing was recorded" in log or "no report" in log:
            break
        time.sleep(0.1)
    return log


@pytest.mark.parametrize("fix", ["off", "auto"])
def test_objects_arrive_as_without_kvprobe_and_the_report_is_written(tmp_path: Path, fix: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    plain = subprocess.run([sys.executable, script, "7"], env=env, capture_output=True, text=True, check=True)
    folder = tmp_path / "run"
    kvprobe = [sys.executable, "-m", "kvprobe", "run", "-o", folder, "--fix", fix, "--"]
    command = [*kvprobe, sys.executable, script, "7"]
    watched = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = plain.stdout.splitlines()
    assert lines[-2].startswith("StubCPUDevice [") and lines[-2].endswith("True") and "Size mismatch" in lines[-1]
    assert watched.stdout.splitlines()[-2:] == lines[-2:]  # LMCache logs to the same stream, with the time
    assert f"report in {folder / 'report.html'}" in wait_for_end(folder)
    assert (folder / "report.html").stat().st_size > 1000
    from kvprobe.recordings import open_recording

    notes = open_recording(folder).notes
    assert any("lmcache" in note and "applied" in note for note in notes), notes
