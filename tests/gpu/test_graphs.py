"""What a CUDA graph of several streams holds, as `kvprobe run` reads it when it is captured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.account import Line
from kvprobe.account.lines import Unknown
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

REPLAYS = """
import torch
x, other = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
host = torch.randn(16, 4096).pin_memory()
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
x @ other
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    side.wait_stream(torch.cuda.current_stream())
    y = x @ other
    with torch.cuda.stream(side):
        z = other @ x
        COPIES
    torch.cuda.current_stream().wait_stream(side)
for _ in range(60):
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("copies", ["pass", "x[:16].copy_(host, non_blocking=True)"], ids=["kernels", "and-a-copy"])
def test_a_graph_of_two_streams_computes(tmp_path: Path, copies: str) -> None:
    program = REPLAYS.replace("COPIES", copies)
    run = [sys.executable, "-m", "kvprobe", "run", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", program]
    subprocess.run(run, check=True)
    recording = open_recording(tmp_path / "run")
    assert recording.graphs["several_streams"].tolist() == [1]
    (gpu,) = [one for one in examine(recording).account.gpus if one.seen]
    assert Unknown.GRAPH not in gpu.unknown_ns()
    assert gpu.ns(Line.COMPUTING) > 0.8 * gpu.asked_ns


SERVES = """
import torch
x, y = torch.randn(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda")
host, there, graph = torch.randn(4096).pin_memory(), torch.zeros(4096, device="cuda"), torch.cuda.CUDAGraph()
torch.add(x, x, out=y)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    for _ in range(5):
        torch.add(x, x, out=y)
for _ in range(300):
    graph.replay()
    for _ in range(100):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
"""


def test_what_a_graph_holds_is_known_when_its_threads_records_were_pushed_out(tmp_path: Path, monkeypatch) -> None:
    """A graph is instantiated once and launched for as long as a server lives: 30,000 copies later here."""
    monkeypatch.setenv("KVPROBE_RING_RECORDS", "4096")
    run = [sys.executable, "-m", "kvprobe", "run", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", SERVES]
    subprocess.run(run, check=True)
    recording = open_recording(tmp_path / "run")
    assert any(recording.lost.values())
    assert recording.graphs["kernels"].tolist() == [5]
