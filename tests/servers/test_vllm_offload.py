"""vLLM's whole engine with and without offload, under `kvprobe run`: same tokens, and the report says what it gave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version

from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording
from kvprobe.reporting.recorded import view

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).resolve().parent
GENERATED = ("cold", "reloaded", "shared", *(f"more {n}" for n in range(4)))


def engine(folder, *words, **environment):
    """The engine's results; `words` come before the command."""
    pytest.importorskip("vllm")
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")}
    path = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "KVPROBE_DEVICE": "host", "TEST_MORE": "1", **environment}
    command = [*words, sys.executable, str(HERE / "vllm_engine.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][len("RESULT ") :])


def watched(folder, *options, **environment):
    """The engine under `kvprobe run`: its results, and the recording."""
    run = folder / "run"
    found = engine(folder, sys.executable, "-m", "kvprobe", "run", *options, "-o", str(run), "--", **environment)
    until = time.monotonic() + 300
    while not (run / "end.json").exists() and time.monotonic() < until:
        time.sleep(0.2)
    return found, open_recording(run)


def rows_of(recording):
    """What each account of the recording told, by its columns; the scheduler's first."""
    table = recording.offload
    assert {recording.text(int(source)) for source in table["source"]} == {"OffloadingConnector"}
    rows = [{name: table[name][row].item() for name in table} for row in range(table.rows)]
    return sorted(rows, key=lambda row: -row["requests"])


def judged(recording):
    """The page's row and the verdict's detail."""
    shown = view(recording, examine(recording))
    (section,) = [one for one in shown.sections if one.id == "offload"]
    return [cell.text for cell in section.tables[0].rows[0]], shown.verdict.detail


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return engine(tmp_path_factory.mktemp("without"), TEST_SPEC="none")


def test_the_report_says_what_moved_and_whether_it_helped(without, tmp_path):
    found, recording = watched(tmp_path)
    assert {name: found[name]["tokens"] for name in GENERATED} == {name: without[name]["tokens"] for name in GENERATED}
    assert without["reloaded"]["cached"] == [0] and found["reloaded"]["cached"] == [768]
    (told,) = rows_of(recording)
    # cold, the one between, reloaded, four that share a prefix, four new ones; the middle five found 768 tokens each
    assert told["requests"] == 11
    assert told["prompt_tokens"] == 800 + 40 + 800 + 4 * 801 + 4 * 764
    assert told["hit_tokens"] + told["gpu_hit_tokens"] == 5 * 768
    assert told["stored_blocks"] >= 6 and told["loaded_blocks"] >= 12 and told["unread_blocks"] == 0
    assert told["waits"] >= 2 and told["waited_ns"] > 0
    row, verdict = judged(recording)
    assert "vllm's OffloadingConnector" in verdict
    assert row[0] == "vllm OffloadingConnector" and row[1] == "helps"


def test_loads_that_a_step_waits_for_are_seen_and_counted_as_waits(without, tmp_path):
    import vllm

    if Version(vllm.__version__) < Version("0.33"):
        pytest.skip("vLLM waits for loads within a step since 0.33")
    budget = json.dumps({"sync_load_budget_bytes": 1 << 30})
    found, recording = watched(tmp_path, "--fix", "auto", TEST_EXTRA=budget)
    assert {name: found[name]["tokens"] for name in GENERATED} == {name: without[name]["tokens"] for name in GENERATED}
    assert found["reloaded"]["cached"] == [768]
    scheduler, worker = rows_of(recording)
    assert scheduler["hit_tokens"] == 2 * 768 and scheduler["loaded_blocks"] == 12
    assert scheduler["waits"] == -1, "no request waits beside the model"
    assert worker["waits"] == 2 and worker["waited_ns"] > 0
    assert worker["requests"] == -1
    row, _ = judged(recording)
    assert row[0] == "vllm OffloadingConnector" and row[1] in ("helps", "does not help")  # not undecided


def test_one_block_that_is_missing_gives_other_tokens(without, tmp_path):
    lossy = engine(tmp_path, TEST_SPEC="host_runtime_spec.LossySpec")
    assert lossy["cold"] == without["cold"]
    assert lossy["reloaded"]["tokens"] != without["reloaded"]["tokens"]
