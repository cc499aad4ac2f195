"""Beside a torch program on a GPU: graphs are captured, no question leaves an error, pageable bytes are right."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvprobe.cuda import device_region, find_runtime, host_region  # noqa: E402
from kvprobe.offload import BlockPool, OffloadEngine  # noqa: E402

BLOCKS, BLOCK = 1024, 65536


@pytest.fixture
def pools():
    torch.zeros(1, device="cuda")
    runtime = find_runtime("cuda")
    regions = [make(runtime, BLOCKS * BLOCK) for make in (device_region, host_region)]
    yield runtime, *(BlockPool(runtime, [region], BLOCK) for region in regions)
    for region in regions:
        region.owner.close()


def test_graphs_are_captured_in_global_mode_while_transfers_are_under_way(pools):
    runtime, gpu, cpu = pools
    over, ended = threading.Event(), []
    with OffloadEngine(runtime, gpu, cpu, policy="pooled") as engine:

        def transfers():
            while not over.is_set():
                blocks = np.random.default_rng(len(ended)).permutation(BLOCKS)
                ended.append(engine.load(blocks, blocks, after=None).wait(30))

        thread = threading.Thread(target=transfers)
        thread.start()
        x = torch.zeros(1 << 20, device="cuda")
        try:
            for _ in range(50):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(100):
                        x += 1
                graph.replay()
        finally:
            over.set()
            thread.join()
        torch.cuda.synchronize()
        assert x[0].item() == 5000
        for transfer in ended:
            transfer.result()
        assert len(ended) > 3


@pytest.mark.parametrize("policy", ["shared", "pooled"])
def test_asking_for_events_leaves_no_error_that_torch_would_take_for_its_own(pools, policy):
    runtime, gpu, cpu = pools
    compute = torch.cuda.Stream()
    blocks = np.arange(BLOCKS)
    with OffloadEngine(runtime, gpu, cpu, policy=policy, compute_stream=compute.cuda_stream) as engine:
        for _ in range(5):
            with torch.cuda.stream(compute):
                torch.cuda._sleep(20_000_000)
            transfer = engine.load(blocks, blocks)
            engine.poll()
            assert (torch.zeros(64, device="cuda") + 1).sum().item() == 64  # each launch asks for the last error
            transfer.wait(30).result()


PROGRAM = """
import hashlib, torch
made, seen = torch.Generator().manual_seed(3), hashlib.sha256()
source = torch.randint(0, 255, (24 << 20,), dtype=torch.uint8, generator=made)
x, graph = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
for turn in range(150):
    size = 1 + (turn * 7919 * 521) % (20 << 20)
    source[:size].add_(1)
    device = source[:size].to("cuda", non_blocking=True)
    source[:size].add_(1)
    if turn % 10 == 9:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
    back = (device + 1).cpu()
    seen.update(back.numpy()[::61].tobytes())
print(seen.hexdigest(), int(x[0].item()))
"""


def test_a_program_with_pageable_copies_sees_the_same_bytes_with_them_staged(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    program = [sys.executable, "-c", PROGRAM]
    alone = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    command = [sys.executable, "-m", "kvprobe", "run", "--fix", "auto", "--report", "none", "--no-stacks"]
    command += ["-o", str(tmp_path / "run"), "--", *program]
    watched = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert watched.stdout == alone.stdout
    events = "".join(path.read_text() for path in (tmp_path / "run").glob("events-*.jsonl"))
    assert "kvprobe.staging" in events
    assert "staged copy failed" not in events
