"""vLLM 0.32's whole engine on a CPU, offload store and reload included, with and without kvprobe: the same tokens."""

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
    env |= {"PYTHONPATH": str(HERE), "KVPROBE_DEVICE": "host", **environment}
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_engine.py"), str(folder)], env=env, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][len("RESULT ") :])


def events(folder):
    return [event for path in sorted(folder.glob("events-*.jsonl")) for event in read_events(path)]


def test_the_whole_engine_gives_the_same_tokens_and_every_transfer_is_seen(tmp_path):
    plain = run(tmp_path)
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


def test_the_spec_without_patches_sees_the_same_transfers(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    probed = run(tmp_path, KVPROBE_RUN=str(folder), VLLM_PLUGINS="", TEST_SPEC="probed_spec.ProbedHostSpec")
    assert probed["reloaded"]["cached"] == [768]
    transfers = [e for e in events(folder) if e["kind"] == "transfer" and e["adapter"] == "vllm.spec"]
    assert sum(t["direction"] == "load" for t in transfers) == 2
    assert all(t["bytes"] > 0 and t["submit_ns"] > 0 and t["copy_ns"] > 0 for t in transfers)
