"""vLLM's whole engine with and without offload, under `kvprobe run`: same tokens, and the report says what it gave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.recordings import open_recording
from kvprobe.reporting.recorded import view

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).resolve().parent


def engine(folder, *words, **environment):
    """The engine's results; `words` come before the command."""
    pytest.importorskip("vllm")
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")}
    env |= {"PYTHONPATH": str(HERE), "KVPROBE_DEVICE": "host", "TEST_MORE": "1", **environment}
    command = [*words, sys.executable, str(HERE / "vllm_engine.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][len("RESULT ") :])


def test_the_report_says_what_moved_and_whether_it_helped(tmp_path):
    without = engine(tmp_path, TEST_SPEC="none")
    run = tmp_path / "run"
    watched = engine(tmp_path, sys.executable, "-m", "kvprobe", "run", "-o", str(run), "--")
    for name in ("cold", "reloaded", "shared", *(f"more {n}" for n in range(4))):
        assert watched[name]["tokens"] == without[name]["tokens"]
    assert without["reloaded"]["cached"] == [0] and watched["reloaded"]["cached"] == [768]
    until = time.monotonic() + 300
    while not (run / "end.json").exists() and time.monotonic() < until:
        time.sleep(0.2)
    recording = open_recording(run)
    rows = recording.offload
    assert [recording.text(int(source)) for source in rows["source"]] == ["OffloadingConnector"]
    told = {name: rows[name][0].item() for name in rows}
    # cold, the one between, reloaded, four that share a prefix, four new ones; the middle five found 768 tokens each
    assert told["requests"] == 11
    assert told["prompt_tokens"] == 800 + 40 + 800 + 4 * 801 + 4 * 764
    assert told["hit_tokens"] + told["gpu_hit_tokens"] == 5 * 768
    assert told["stored_blocks"] >= 6 and told["loaded_blocks"] >= 12 and told["unread_blocks"] == 0
    assert told["waits"] >= 2 and told["waited_ns"] > 0
    shown = view(recording, [])
    assert "vllm's OffloadingConnector" in shown.verdict.detail
    (section,) = [one for one in shown.sections if one.id == "offload"]
    row = [cell.text for cell in section.tables[0].rows[0]]
    assert row[0] == "vllm OffloadingConnector" and row[1] == "helps"
