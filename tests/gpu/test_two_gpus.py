"""Two GPUs: an engine on the second one called from threads on the first, and two ranks under `kvprobe run`."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvprobe

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def two():
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    yield
    torch.cuda.set_device(0)


@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
def test_an_engine_on_the_second_gpu_serves_a_thread_whose_current_gpu_is_the_first(policy):
    torch.cuda.set_device(1)
    stream = torch.cuda.Stream(1)
    runtime = kvprobe.find_runtime("cuda")
    blocks, size = 64, 32 * 1024
    gpu = [torch.zeros(blocks, size, dtype=torch.uint8, device="cuda:1") for _ in range(4)]
    cpu = [torch.randint(0, 255, (blocks, size), dtype=torch.uint8).pin_memory() for _ in range(4)]
    wrong, order = [], torch.randperm(blocks).tolist()
    pools = kvprobe.BlockPool(runtime, gpu, size), kvprobe.BlockPool(runtime, cpu, size)
    with kvprobe.OffloadEngine(runtime, *pools, policy=policy, compute_stream=stream.cuda_stream) as engine:

        def work():
            try:
                assert torch.cuda.current_device() == 0  # a new thread's
                before = [tensor.clone() for tensor in cpu]
                for _ in range(40):
                    loads = [engine.load(order[i : i + 8], order[i : i + 8]) for i in range(0, blocks, 8)]
                    for one in loads:
                        engine.fence(one, stream.cuda_stream)
                    with torch.cuda.stream(stream):
                        for tensor in gpu:
                            tensor.add_(1)
                    stores = [engine.store(order[i : i + 8], order[i : i + 8]) for i in range(0, blocks, 8)]
                    for one in stores:
                        one.wait()
                for left, right in zip(before, cpu, strict=True):
                    assert torch.equal(left + 40, right)
            except BaseException as error:
                wrong.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if wrong:
        raise wrong[0]


def test_two_ranks_are_told_apart_and_the_finding_names_the_one_that_is_wrong(tmp_path):
    run = [sys.executable, "-m", "kvprobe", "run", "--exec", "-o", str(tmp_path / "run"), "--"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(HERE / "rank.py")]
    done = subprocess.run([*run, *ranks], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = {}
    for line in done.stdout.splitlines():
        if "RANK {" in line:
            one = json.loads(line[line.index("RANK {") + 5 :])
            said[one["rank"]] = one
    recording = kvprobe.open_recording(tmp_path / "run")
    processes, totals = recording.processes, recording.totals
    for rank in (0, 1):
        (row,) = [i for i in range(processes.rows) if processes["rank"][i] == rank and (totals["process"] == i).any()]
        mine = (totals["process"] == row) & (totals["bytes"] == totals["calls"] * 64 * 1024)
        assert int(totals["calls"][mine].sum()) >= said[rank]["copies"]
    out = subprocess.run(
        [sys.executable, "-m", "kvprobe", "stats", "--json", str(tmp_path / "run")], capture_output=True, text=True
    )
    findings = json.loads(out.stdout)["findings"]
    full = [f for f in findings if f["cause"] in ("launch_queue_saturation", "fence_before_copies")]
    assert full, findings
    assert [place["rank"] for place in full[0]["where"]] == [1], full
    assert abs(full[0]["lost_ns"] - said[1]["slow_ns"]) < 0.15 * said[1]["slow_ns"], (full, said)
