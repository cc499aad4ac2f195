"""vLLM's steps and requests as kvprobe tells them: equal to what vLLM's own log and its own outputs say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.recordings.model import Phase, Recording, Source
from kvprobe.recordings.steps import Steps
from kvprobe.recordings.vocabulary import Names
from kvprobe.requests.served import served
from kvprobe.runfolder.step_lines import one_by_one

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).resolve().parent
LINE = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, (\d+) gen"
)


def engine(folder, **environment):
    """What the engine said, and the lines of its log about steps: number, requests and tokens of both kinds."""
    pytest.importorskip("vllm")
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")}
    path = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "KVPROBE_DEVICE": "host", **environment}
    command = [sys.executable, str(HERE / "vllm_steps_engine.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [tuple(map(int, found)) for found in LINE.findall(done.stdout + done.stderr)]
    return json.loads(said[0].removeprefix("RESULT ")), lines


def test_steps_and_requests_are_those_of_vllms_own_log(tmp_path):
    plain, _ = engine(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    said, lines = engine(tmp_path, KVPROBE_RUN=str(folder))
    assert [one["tokens"] for one in said] == [one["tokens"] for one in plain]
    assert said[-1]["cached"] > 0

    recording = told_in(folder)
    told = served(recording)
    steps_are_those_of(told, lines)
    times_are_those_of(recording, told, said)


def told_in(folder):
    """The recording of what the process of the scheduler told."""
    names = Names()
    steps = Steps(names)
    (file,) = folder.glob("steps-*.jsonl")
    lines = map(json.loads, file.read_text().splitlines())
    steps.lines((one for line in lines for one in one_by_one(line)), 0, 0, 0)
    recording = Recording([Source("one", "run")], names=names.list)
    steps.fill(recording)
    return recording


def steps_are_those_of(told, lines):
    pairs = [told.step == at for at in range(len(told.number))]
    before, found = dict.fromkeys(told.name.tolist(), 0), []
    for at, mine in enumerate(pairs):  # of each step, as vLLM counts: who has no token yet is context
        names, computed, emitted = told.name[told.request[mine]].tolist(), told.computed[mine], told.tokens[mine]
        context = np.array([not before[name] for name in names])
        found.append(
            (told.number[at], context.sum(), computed[context].sum(), (~context).sum(), computed[~context].sum())
        )
        phase = Phase.DECODE if not context.any() else Phase.PREFILL if context.all() else Phase.MIXED
        assert told.phase[at] == phase
        for name, tokens in zip(names, emitted, strict=True):
            before[name] += tokens
    assert found == lines and len(lines) >= 20
    assert {int(one) for one in told.phase} >= {Phase.DECODE, Phase.MIXED}


def times_are_those_of(recording, told, said):
    ends = told.to_ns[told.step]
    loads = recording.steps["phase"] == Phase.LOAD
    assert loads.sum() == 1  # the one that came again
    assert told.arrived_told.all()
    by_name = {recording.text(int(name)).split("-")[0]: at for at, name in enumerate(told.name)}
    assert len(by_name) == len(said)
    for one in said:
        mine = np.flatnonzero(told.request == by_name[one["request"]])
        emits = mine[told.tokens[mine] > 0]
        assert told.tokens[mine].sum() == len(one["tokens"])
        assert ends[emits[0]] == pytest.approx(one["first"] * 1e9, abs=1000)  # the same time, as a float in seconds
        assert ends[emits[-1]] == pytest.approx(one["last"] * 1e9, abs=1000)
        arrived = told.since_ns[mine[0]]
        assert arrived <= one["queued"] * 1e9  # before it came to the scheduler
        assert ends[emits[0]] - arrived <= one["latency"] * 1e9 + 1e6  # vLLM's also holds the way back
