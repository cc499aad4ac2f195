"""vLLM's whole engine on a CPU, offload store and reload included, with and without kvprobe: the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.instrument.event_log import read_events

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).resolve().parent


def run(folder, **environment):
    pytest.importorskip("vllm")
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")}
    path = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "KVPROBE_DEVICE": "host", **environment}
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_engine.py"), str(folder)], env=env, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][len("RESULT ") :])


def events(folder):
    return [event for path in sorted(folder.glob("events-*.jsonl")) for event in read_events(path)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


def test_the_whole_engine_gives_the_same_tokens_and_every_transfer_is_seen(plain, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    probed = run(tmp_path, KVPROBE_RUN=str(folder), KVPROBE_FIX="auto")
    assert {k: v for k, v in probed.items() if k != "metrics"} == {k: v for k, v in plain.items() if k != "metrics"}
    assert plain["reloaded"]["cached"] == [768]
    assert plain["shared"]["cached"] == [768] * 4
    seen = events(folder)
    states = {e["adapter"]: e for e in seen if e["kind"] == "state"}
    assert any(e["adapter"] == "vllm.copies.batch" and e["state"] == "applied" for e in seen if e["kind"] == "state")
    assert states["vllm.loads.dedup"]["reason"].startswith("already upstream")
    transfers = [e for e in seen if e["kind"] == "transfer"]
    stores = [t for t in transfers if t["direction"] == "store"]
    loads = [t for t in transfers if t["direction"] == "load"]
    assert sum(t["copies"] for t in stores) >= 24
    assert all(t["submit_ns"] > 0 and t["copy_ns"] > 0 for t in transfers)
    # Dedup: the reload, and one load for the four requests that share a prefix.
    assert [t["copies"] for t in loads] == [24, 24]
    assert probed["metrics"]["vllm:kv_offload_load_bytes"] == sum(t["bytes"] for t in loads)


def test_the_submitter_moves_the_whole_engines_blocks(plain, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    spec = {"TEST_SPEC": "host_runtime_spec.PooledSpec"}
    probed = run(tmp_path, KVPROBE_RUN=str(folder), KVPROBE_FIX="auto", **spec)
    assert {k: v for k, v in probed.items() if k != "metrics"} == {k: v for k, v in plain.items() if k != "metrics"}
    transfers = [e for e in events(folder) if e["kind"] == "transfer"]
    assert {t["direction"] for t in transfers} == {"load", "store"}
    assert {t["policy"] for t in transfers} == {"pooled"}
    assert all(t["ok"] for t in transfers)


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30], ids=["beside the model", "a step waits for its loads"])
def test_the_spec_without_patches_sees_the_same_transfers(tmp_path, budget_bytes):
    folder = tmp_path / "run"
    folder.mkdir()
    extra = json.dumps({"sync_load_budget_bytes": budget_bytes})  # since 0.33, whose loads are then expedited
    spec = {"TEST_SPEC": "probed_spec.ProbedHostSpec", "TEST_EXTRA": extra}
    probed = run(tmp_path, KVPROBE_RUN=str(folder), VLLM_PLUGINS="", **spec)
    assert probed["reloaded"]["cached"] == [768]
    transfers = [e for e in events(folder) if e["kind"] == "transfer" and e["adapter"] == "vllm.spec"]
    assert sum(t["direction"] == "load" for t in transfers) == 2
    assert all(t["bytes"] > 0 and t["submit_ns"] > 0 and t["copy_ns"] > 0 for t in transfers)
