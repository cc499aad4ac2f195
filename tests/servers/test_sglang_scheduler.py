"""SGLang's whole engine, HiCache included, as it is and under `kvprobe run`: same tokens, and the page says what moved.

The scheduler, its radix tree, evictions, write-back and load-back, the pools, the controller and the transfer engine
are SGLang's own; sglang_platform.py says what is played. The prompts are twice as large as the KV pool.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvprobe.diagnosis import examine
from kvprobe.instrument.event_log import read_events
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import Phase
from kvprobe.reporting.recorded import view
from kvprobe.requests.served import served

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).resolve().parent
HICACHE = {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"}
BY_TOKEN = {**HICACHE, "hicache_mem_layout": "layer_first", "page_size": 1}
BY_PAGE = {**HICACHE, "hicache_mem_layout": "page_first_direct", "page_size": 16}
PROMPTS = [f"cold {start}" for start in (0, 2, 4, 6)]
PROMPTS += [f"again {turn} {start}" for turn in (0, 1) for start in (0, 4)]
EXIT = 3  # the engine's, so that it is seen to come through
CHUNKS = {"chunked_prefill_size": 256, "enable_mixed_chunk": True, "decode_log_interval": 1, "log_level": "info"}
PREFILL = re.compile(r"Prefill batch \[(\d+)\], #new-seq: (\d+), #new-token: (\d+)")
DECODE = re.compile(r"Decode batch \[(\d+)\], #running-req: (\d+)")
SLOW = {"KVHOST_DEPTH": "64", "KVHOST_H2D_GBPS": "0.004", "KVHOST_D2H_GBPS": "0.004"}  # slower than it is asked to copy


class Run(NamedTuple):
    """What an engine said, and what kvprobe wrote of it where it watched."""

    said: dict
    folder: Path
    log: str

    @property
    def tokens(self):
        return {name: self.said[name]["tokens"] for name in PROMPTS}

    def cached(self, where):
        return [sum((of or {}).get(where, 0) for of in self.said[name]["where"]) for name in PROMPTS]

    def events(self, kind):
        paths = sorted(self.folder.glob("events-*.jsonl"))
        return [event for path in paths for event in read_events(path) if event["kind"] == kind]

    def moved(self, direction):
        return sum(
            one["bytes"] * one.get("one_in", 1) for one in self.events("transfer") if one["direction"] == direction
        )


def engine(folder, arguments, words=None, **environment):
    """Runs the engine to its end; `words` are kvprobe's options, None: without kvprobe."""
    pytest.importorskip("sglang")
    folder.mkdir()
    plugin = folder / "sglang_platform.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-platform\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.platforms]\nhostrt = sglang_platform:activate\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "SGLANG"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), str(HERE), env.get("PYTHONPATH")]))
    env |= {"SGLANG_PLATFORM": "hostrt", "KVPROBE_DEVICE": "host", "TEST_ARGUMENTS": json.dumps(arguments)}
    env |= {"TEST_EXIT": str(EXIT), **environment}
    command = [sys.executable, str(HERE / "sglang_engine.py"), str(folder)]
    run = folder / "run"
    if words is not None:
        command = [sys.executable, "-m", "kvprobe", "run", "-o", str(run), *words, "--", *command]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == EXIT, done.stdout[-3000:] + done.stderr[-6000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    until = time.monotonic() + 300
    while words is not None and not (run / "end.json").exists() and time.monotonic() < until:
        time.sleep(0.2)
    return Run(json.loads(said.removeprefix("RESULT ")), run, log)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """No HiCache, no kvprobe."""
    return engine(tmp_path_factory.mktemp("sglang") / "without", {})


def test_what_was_evicted_comes_back_and_matters(tmp_path, without):
    assert without.cached("host") == without.cached("device") == [0] * 8
    assert set(without.said["counted"].values()) == {0}
    plain = engine(tmp_path / "plain", BY_TOKEN)
    assert plain.tokens == without.tokens
    assert plain.cached("host") == 4 * [0] + 4 * [1600] and plain.cached("device") == [0] * 8
    assert plain.said["counted"]["loaded_tokens"] == 4 * 1600
    lost = engine(tmp_path / "lost", BY_TOKEN, TEST_LOSE="load")
    assert lost.cached("host") == plain.cached("host")
    for name in PROMPTS:
        assert (lost.tokens[name] == plain.tokens[name]) == name.startswith("cold")


def check_offload(run):
    """The recording and the page tell what SGLang's own metrics count."""
    counted = run.said["counted"]
    assert {e["adapter"]: e["state"] for e in run.events("state") if e["adapter"].startswith("sglang.")} == {
        f"sglang.{name}": "applied" for name in ("l2_transfer", "cache_controller", "storage", "offload")
    }
    assert (run.moved("store"), run.moved("load")) == (counted["stored_bytes"], counted["loaded_bytes"])
    recording = open_recording(run.folder)
    rows = recording.offload
    assert rows.rows == 1 and recording.text(int(rows["source"][0])) == "HiCache"
    told = {name: rows[name][0].item() for name in rows}
    assert told["requests"] == 24 and told["prompt_tokens"] == 8 * 400 + 16 * 402
    assert (told["gpu_hit_tokens"], told["hit_tokens"]) == (0, 6400)
    assert (told["stored_blocks"], told["loaded_blocks"]) == (counted["stored_tokens"], counted["loaded_tokens"])
    assert (told["stored_bytes"], told["loaded_bytes"]) == (counted["stored_bytes"], counted["loaded_bytes"])
    assert told["unread_blocks"] == 0 and told["held_unread_blocks"] == counted["stored_tokens"] - 3200
    shown = view(recording, examine(recording))
    assert "sglang's HiCache" in shown.verdict.detail
    (section,) = [one for one in shown.sections if one.id == "offload"]
    row = [cell.text for cell in section.tables[0].rows[0]]
    assert row[0] == "sglang HiCache" and row[1] in ("helps", "does not help")
    assert told["prefill_ns_per_token"] > 0 and told["waits"] >= 4 and told["waited_ns"] >= 0
    assert "HiCache" in (run.folder / "report.html").read_text()


@pytest.mark.parametrize("arguments", [BY_TOKEN, BY_PAGE], ids=["by token", "by page"])
def test_the_report_says_what_moved_and_whether_it_helped(tmp_path, without, arguments):
    run = engine(tmp_path / "watched", arguments, [])
    assert run.tokens == without.tokens
    assert run.cached("host") == 4 * [0] + 4 * [1600]
    check_offload(run)
    assert {(one["policy"], one["ok"]) for one in run.events("transfer")} == {("shared", True)}
    assert all(one["submit_ns"] > 0 and one["copy_ns"] > 0 for one in run.events("transfer"))
    starts = [one["call"] for one in run.events("call") if "start_" in one["call"]]
    assert len(starts) == len(run.events("transfer"))  # not one a step


@pytest.mark.parametrize("arguments", [BY_TOKEN, BY_PAGE], ids=["by token", "by page"])
def test_under_auto_the_tokens_are_the_same(tmp_path, without, arguments):
    run = engine(tmp_path / "auto", arguments, ["--fix", "auto"], **SLOW)
    assert run.tokens == without.tokens
    assert run.cached("host") == 4 * [0] + 4 * [1600]
    check_offload(run)
    assert "switch" in {one["what"] for one in run.events("decision")}
    assert {one["policy"] for one in run.events("transfer")} == {"shared", "pooled"}


def test_steps_and_requests_are_those_of_sglangs_own_log(tmp_path):
    arguments = {**BY_TOKEN, **CHUNKS}
    plain = engine(tmp_path / "plain", arguments)
    run = engine(tmp_path / "watched", arguments, [], SGLANG_LOG_FORWARD_ITERS="1")
    assert run.tokens == plain.tokens
    recording = open_recording(run.folder)
    told = served(recording)

    before, prefills, decodes = dict.fromkeys(told.name.tolist(), 0), set(), set()
    for at, number in enumerate(told.number.tolist()):
        mine = told.step == at
        names, computed = told.name[told.request[mine]].tolist(), told.computed[mine]
        new = np.array([not before[name] for name in names])
        phase = Phase.DECODE if not new.any() else Phase.PREFILL if new.all() else Phase.MIXED
        assert told.phase[at] == phase
        if phase == Phase.DECODE:
            decodes.add((number, len(names)))
        else:
            prefills.add((number, int(new.sum()), int(computed[new].sum())))
            assert (computed[~new] == 1).all()
        for name, tokens in zip(names, told.tokens[mine].tolist(), strict=True):
            before[name] += tokens
    assert prefills == {tuple(map(int, one)) for one in PREFILL.findall(run.log)}
    assert decodes == {tuple(map(int, one)) for one in DECODE.findall(run.log)}
    assert {Phase(int(one)) for one in told.phase} == {Phase.PREFILL, Phase.MIXED, Phase.DECODE}

    assert told.arrived_told.all() and len(told.name) == 24 and set(before.values()) == {32}
    first_tokens = {}  # request -> the ends of its steps, and which of these gave its first token
    for at, name in enumerate(told.name.tolist()):
        mine = told.request == at
        first_tokens[recording.text(name)] = told.to_ns[told.step[mine]], int((told.tokens[mine] > 0).argmax())
    for said in (run.said[name] for name in PROMPTS):
        for name, first in zip(said["ids"], said["first"], strict=True):  # its stamp, by the wall clock
            ends, at = first_tokens[name]
            assert np.abs(ends - (first * 1e9 - said["by"][0])).argmin() == at


def test_without_offload_nothing_is_said_of_it(tmp_path, without):
    run = engine(tmp_path / "watched", {}, [])
    assert run.tokens == without.tokens
    assert {(e["adapter"], e["state"]) for e in run.events("state")} == {
        ("sglang", "waiting"),
        ("transformers", "waiting"),
    }
    assert not run.events("transfer") and not run.events("call") and not run.events("offload")
    recording = open_recording(run.folder)
    assert not recording.offload.rows and not recording.transfers.rows
    shown = view(recording, examine(recording))
    assert "offload" not in [one.id for one in shown.sections if one.tables or one.charts]
    assert "ffload" not in shown.verdict.detail
    assert "HiCache" not in (run.folder / "report.html").read_text()
