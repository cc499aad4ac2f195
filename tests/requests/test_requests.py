"""Steps and requests against the truth: who was late, by how much, and by which line of the account."""

from __future__ import annotations

import json
import os
import re
import runpy
import textwrap
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvprobe import cli
from kvprobe.account import COPIES, Account, Line, account_of
from kvprobe.commands import requests
from kvprobe.instrument import event_log
from kvprobe.output import REQUESTS
from kvprobe.recordings import open_recording
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Phase, Recording, RequestTime, Source, Table
from kvprobe.recordings.parquet import write
from kvprobe.recordings.serving import ServingWindow
from kvprobe.recordings.vocabulary import Names
from kvprobe.reporting import build_page, late
from kvprobe.reporting.units import duration
from kvprobe.requests import LEAST, LOAD, TURN, Requests, of_account, usual
from kvprobe.requests.late import Waits, _StepSplit
from kvprobe.requests.served import served
from kvprobe.requests.split import PARTS
from kvprobe.runfolder.folder import RunFolder

ROOT = Path(__file__).parents[2]
LATE = runpy.run_path(str(ROOT / "benchmarks" / "late_requests.py"))
MS = 1_000_000


@pytest.fixture(scope="module")
def loop():
    """A server's loop in virtual time, its truth, and what was worked out."""
    recording, truth = LATE["played"](400, 16, 1, 0.02)
    return recording, truth, LATE["requests_of"](recording)


def test_every_late_request_is_named_and_none_that_was_not(loop):
    _, truth, told = loop
    result = LATE["compared"](told, truth)
    assert min(result["delays"].values()) >= 1 and set(result["delays"]) == {"host", "link", "queue", "tier"}
    assert result["late_steps"] == [len(truth.steps), 0, 0]
    assert result["late_requests"] == [len(truth.late - truth.early), 0, 0]
    assert len(truth.late) < told.requests / 2


def test_the_split_is_within_two_hundredths_of_the_truth(loop):
    _, truth, told = loop
    errors = LATE["compared"](told, truth)["worst_split_error"]
    assert set(errors) == {"host", "link", "queue", "tier"} and max(errors.values()) <= 0.02


def test_a_step_behind_a_full_queue_has_its_cause_and_its_calls(loop):
    _, truth, told = loop
    queues = [one for one in told.late if truth.steps.get(one.step, ("",))[0] == "queue"]
    assert queues
    for one in queues:
        assert one.cause == "launch_queue_saturation"
        assert "cudaMemcpyAsync" in {call.name for call in one.inside.calls}


def test_lines_never_exceed_a_step_and_add_up_to_it(loop):
    recording, _, _ = loop
    account = account_of(Joined(recording))
    joining = _StepSplit(recording, account, served(recording), Joined(recording).serving)
    assert (joining.lines >= 0).all()
    assert (joining.lines.sum(axis=1) == joining.told.took_ns).all()
    waits = np.arange(len(joining.took))
    assert (joining.parts(waits) >= 0).all()
    assert (joining.parts(waits).sum(axis=1) == joining.took).all()


def test_the_command_and_the_page_show_them(loop, tmp_path, capsys):
    recording, _, told = loop
    write(recording, tmp_path / "served")
    assert cli.main(["requests", str(tmp_path / "served")]) == 0
    said = capsys.readouterr().out
    assert "Time between tokens: p50" in said and f"Late: {told.late_steps:,} of {told.steps:,} steps" in said
    assert cli.main(["requests", str(tmp_path / "served"), "--json"]) == 0
    printed = capsys.readouterr().out
    assert msgspec.json.decode(printed, type=REQUESTS.kind)["served"]  # of the type that the schema is made from
    found = json.loads(printed)["served"]
    assert found["late_steps"] == told.late_steps
    assert {one["request"] for one in found["late_requests"]} == {one.name for one in told.late_requests}
    assert cli.main(["report", str(tmp_path / "served"), "-o", str(tmp_path / "page.html"), "-q"]) == 0
    assert "Which requests were late?" in (tmp_path / "page.html").read_text()
    assert "Which requests were late?" not in build_page(recording, findings=None)


def of_steps(
    steps: list[tuple[int, int, Phase, dict[str, int]]],
    arrived: dict[str, int] | None = None,
    computed: list[int] | None = None,
) -> Recording:
    """Steps from, to (ms), phase and tokens by request; kernels fill every step of the model but its first ms.

    `computed`: tokens, of each pair of a step and a request.
    """
    names = Names()
    recording = Recording([Source("one", "trace")], has_executions=True)
    model = [one for one in steps if one[2] not in (Phase.LOAD, Phase.STORE)]
    many = len(model)
    start = np.array([one[0] * MS for one in model])
    end = np.array([one[1] * MS for one in model])
    name = names.add("launch")
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": start + MS - 2_000,
            "end_ns": start + MS,
            "kind": np.full(many, CallKind.LAUNCH),
            "thread": np.full(many, 7),
            "correlation": np.arange(many),
            "name": np.full(many, name),
            "process": np.zeros(many),
        },
    )
    recording.tables["executions"] = Table(
        "executions",
        {
            "start_ns": start + MS,
            "end_ns": end,
            "engine": np.full(many, Engine.KERNEL),
            "correlation": np.arange(many),
            "device": np.zeros(many),
            "name": np.full(many, name),
        },
    )
    recording.tables["steps"] = Table(
        "steps",
        {
            "start_ns": np.array([one[0] * MS for one in steps]),
            "end_ns": np.array([one[1] * MS for one in steps]),
            "step": np.arange(len(steps)),
            "id": np.arange(len(steps)),
            "phase": np.array([one[2] for one in steps]),
        },
    )
    pairs = [(at, names.add(who), tokens) for at, one in enumerate(steps) for who, tokens in one[3].items()]
    recording.tables["step_requests"] = Table(
        "step_requests",
        {
            "id": np.array([one[0] for one in pairs]),
            "request": np.array([one[1] for one in pairs]),
            "tokens": np.array([one[2] for one in pairs]),
            "computed": np.full(len(pairs), -1) if computed is None else np.array(computed),
        },
    )
    told = sorted((arrived or {}).items(), key=lambda item: item[1])
    recording.tables["request_times"] = Table(
        "request_times",
        {
            "time_ns": np.array([at * MS for _, at in told]),
            "request": np.array([names.add(who) for who, _ in told]),
            "what": np.full(len(told), RequestTime.ARRIVED),
        },
    )
    recording.tables["processes"] = Table("processes", {"pid": np.array([1])})
    recording.names = names.list
    return recording


def joined(recording: Recording) -> tuple[Requests, _StepSplit]:
    """What is worked out over the whole recording."""
    end = int(recording.steps["end_ns"].max())
    window = ServingWindow(end, np.array([0]), "all of it", 0, True)
    recording.window = window
    account = account_of(Joined(recording))
    told = of_account(recording, account, window)
    assert told is not None
    return told, _StepSplit(recording, account, served(recording), window)


def test_a_step_counts_from_the_end_of_the_step_before_that_shares_a_request():
    recording = of_steps(
        [
            (0, 10, Phase.PREFILL, {"a": 1}),
            (12, 20, Phase.DECODE, {"a": 1}),
            (21, 30, Phase.PREFILL, {"b": 1}),  # nobody of before
            (30, 40, Phase.DECODE, {"a": 1, "b": 1}),
        ]
    )
    told = served(recording)
    assert (told.from_ns // MS).tolist() == [0, 10, 21, 30]
    parts = joined(recording)[1]
    first = {recording.text(int(told.name[told.request[end]])): at for at, end in enumerate(parts.ends)}
    third = parts.parts(np.array([first["a"]]))[0]  # the last wait of a: 20 to 40, of which 10 in another's step
    assert third[TURN] == 10 * MS and third[Line.COMPUTING] == 9 * MS and third.sum() == 20 * MS


def test_a_first_token_is_split_into_the_own_load_the_turn_and_the_step():
    recording = of_steps(
        [(3, 8, Phase.LOAD, {"a": 0}), (0, 10, Phase.DECODE, {"b": 1}), (10, 20, Phase.MIXED, {"a": 1, "b": 1})],
        {"a": 2},
    )
    told, parts = joined(recording)
    assert told.steps == 2 and told.arrivals == 1 and told.first_token.at(100) == 18 * MS
    row = next(
        i for i, end in enumerate(parts.ends) if recording.text(int(parts.told.name[parts.told.request[end]])) == "a"
    )
    split = parts.parts(np.array([row]))[0]
    assert (split[LOAD], split[TURN], split[Line.COMPUTING], split.sum()) == (5 * MS, 3 * MS, 9 * MS, 18 * MS)


def test_of_few_steps_nothing_is_called_late():
    steps = [(10 * at, 10 * at + 10, Phase.DECODE, {"a": 1}) for at in range(LEAST - 2)]
    last = steps[-1][1]
    told, _ = joined(of_steps([*steps, (last, last + 500, Phase.DECODE, {"a": 1})]))
    assert told.undecided and not told.late_steps and not told.late_requests
    more = [(10 * at, 10 * at + 10, Phase.DECODE, {"a": 1}) for at in range(LEAST)]
    last = more[-1][1]
    told, _ = joined(of_steps([*more, (last, last + 500, Phase.DECODE, {"a": 1})]))
    assert [one.step for one in told.late] == [LEAST] and not told.undecided
    assert told.late[0].line == Line.COMPUTING and told.late[0].longer_ns == 490 * MS


def of_sizes(lasts: list[tuple[int, int]], phase: Phase = Phase.MIXED) -> tuple[Requests, set[int]]:
    """Steps one behind the other, each of so many tokens, so many ms long; the numbers of those that are late."""
    ends = np.cumsum([ms for _, ms in lasts]).tolist()
    steps = [(end - ms, end, phase, {"a": 1}) for (_, ms), end in zip(lasts, ends, strict=True)]
    told, _ = joined(of_steps(steps, computed=[size for size, _ in lasts]))
    return told, {one.step for one in told.late}


USUAL = [(400, 9 + at % 2) for at in range(40)]  # late from 13 ms


@pytest.mark.parametrize("few", [[], [(800, 14)], [(800, 14), (700, 13), (900, 15), (810, 14), (800, 15), (800, 13)]])
def test_a_step_of_a_rare_size_is_late_where_nobody_would_call_it_usual(few):
    told, late = of_sizes([*USUAL, *few, (800, 200), *USUAL])
    assert late == {len(USUAL) + len(few)}
    (one,) = told.late
    assert one.line == Line.COMPUTING and 184 * MS <= one.longer_ns <= 191 * MS
    assert [one.name for one in told.late_requests] == ["a"] and told.late_requests[0].late_tokens == 1
    (rare,) = (one for one in told.phases if one.undecided)
    assert rare.late == 1 and rare.to_json()["late_from_ns"] == rare.usual.late_ns < 60 * MS


def test_a_step_of_a_rare_size_is_not_late_for_its_size():
    grows = [(800, 30), (1_500, 100)]  # with the square of it
    assert of_sizes([*USUAL, *grows])[1] == set()
    often = [(800, 40 + at % 3) for at in range(10)]  # slow is usual of this size
    assert of_sizes([*USUAL, *often])[1] == set()
    told, late = of_sizes([*USUAL, (100, 12), (100, 14)])  # longer than what is late of larger ones
    assert late == {len(USUAL) + 1} and sum(one.usual.count for one in told.phases if one.undecided) == 2


def test_sizes_that_count_other_things_are_not_compared():
    told, late = of_sizes([*USUAL, (-1, 200), (400, 9)])  # one request, of which it is not known how many tokens
    assert late == set()
    assert {(one.counted, one.usual.count) for one in told.phases} == {("tokens", 41), ("requests", 1)}


def test_where_a_quarter_is_slow_slow_is_usual():
    assert usual(np.array([10.0] * 80 + [30.0] * 20)).late_ns == pytest.approx(11.0)
    assert usual(np.array([10.0] * 70 + [30.0] * 30)).late_ns > 30
    assert usual(np.zeros(0)).late_ns == float("inf")


@pytest.mark.parametrize("count", [1, 2, 3, 100, 101, 1000])
def test_percentiles_are_numpys(count):
    took = np.random.default_rng(count).integers(0, 10**9, count)
    waits = Waits(np.sort(took), np.zeros(PARTS), 0)
    assert [waits.at(percent) for percent in (50, 90, 99, 100)] == np.percentile(took, (50, 90, 99, 100)).tolist()


def test_a_recording_without_a_gpu_has_late_steps_that_are_not_explained():
    steps = [(10 * at, 10 * at + 10, Phase.DECODE, {"a": 1}) for at in range(30)]
    recording = of_steps([*steps, (300, 400, Phase.DECODE, {"a": 1})])
    window = ServingWindow(400 * MS, np.array([0]), "all of it", 0, True)
    told = of_account(recording, Account([], []), window)
    assert told is not None and [one.line for one in told.late] == [Line.NOT_KNOWN]


def test_a_recording_without_steps_is_undecided(tmp_path, capsys):
    recording = of_steps([(0, 10, Phase.DECODE, {"a": 1})])
    for kind in ("steps", "step_requests"):
        recording.tables[kind] = Table(kind)
    write(recording, tmp_path / "none")
    assert cli.main(["requests", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().out
    assert "Undecided: the recording shows no steps" in said
    assert "vLLM and SGLang that offload, and transformers' generate, tell them by themselves" in said


def test_every_adapter_that_tells_steps_is_named_where_one_asks_how(capsys):
    servers = {path.name.removesuffix("_steps.py") for path in (ROOT / "patches").glob("*_steps.py")}
    assert servers == {"vllm", "sglang", "transformers"}
    assert cli.main(["requests", "--help"]) == 0
    help_text, page = capsys.readouterr().out.lower(), (ROOT / "docs" / "requests.md").read_text()
    for server in servers:
        assert server in help_text
        assert f"`{server}.steps`" in page


def test_the_example_of_a_mark_is_a_step_of_the_recording(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "requests.md").read_text()
    code = next(one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "kvprobe.mark(" in one)
    RunFolder(tmp_path).write_run({"pid": os.getpid(), "command": ["server"]})
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    monkeypatch.delenv("KVPROBE", raising=False)
    ran = []
    exec(textwrap.dedent(code), {"model": SimpleNamespace(forward=ran.append), "batch": 3})
    event_log.flush()
    recording = open_recording(tmp_path)
    assert ran == [3]
    assert recording.steps["step"].tolist() == [7] and recording.steps["phase"].tolist() == [Phase.DECODE]
    assert [recording.text(int(name)) for name in recording.step_requests["request"]] == ["a", "b"]
    assert recording.step_requests["tokens"].tolist() == [1, 1]


def test_the_slowest_waits_include_what_was_computed_and_a_cut_table_says_so(loop, capsys):
    _, _, told = loop
    tail = told.between_tokens.to_json()["tail_ns"]
    said = late.sentences(told)[0]
    assert tail["computing"] > 0
    assert f"{duration(tail['computing'])} computing" in said
    requests._print(told)
    printed = capsys.readouterr().out
    assert len(told.late_requests) > late.SHOWN
    assert f"The first {late.SHOWN} of {len(told.late_requests)} rows. --json has all." in printed


def with_copy(recording: Recording, begin: float, end: float, waits: bool) -> Recording:
    """The recording, with a copy from `begin` to `end` (ms) that the model's thread waits for in a call, or not."""
    ran, called = dict(recording.executions), dict(recording.calls)
    copy = {
        "start_ns": begin * MS,
        "end_ns": end * MS,
        "engine": Engine.COPY,
        "correlation": -1,
        "device": 0,
        "name": 0,
    }
    copy |= {"bytes": 1 << 20, "direction": Direction.H2D}
    ran = {key: np.append(ran[key], int(copy.get(key, 0))) for key in ran}
    order = np.argsort(ran["start_ns"], kind="stable")
    recording.tables["executions"] = Table("executions", {key: column[order] for key, column in ran.items()})
    if waits:
        call = {"start_ns": begin * MS, "end_ns": end * MS, "kind": CallKind.SYNC, "thread": 7, "correlation": -1}
        called = {key: np.append(called[key], int(call.get(key, 0))) for key in called}
        order = np.argsort(called["start_ns"], kind="stable")
        recording.tables["calls"] = Table("calls", {key: column[order] for key, column in called.items()})
    return recording


@pytest.mark.parametrize(
    ("until", "waits", "copies_ms"),
    [(12, False, 0), (30, False, 20), (12, True, 2)],
    ids=["the thread is busy for long behind it", "the thread goes on behind it", "the thread waits for it in a call"],
)
def test_a_copy_beside_a_busy_thread_is_not_what_a_step_waited_for(until, waits, copies_ms):
    steps = of_steps([(0, 10, Phase.DECODE, {"a": 1}), (30, 35, Phase.DECODE, {"a": 1})])
    told = joined(with_copy(steps, 10, until, waits))[1]
    (lines,) = told.lines[told.told.number == 1]
    assert sum(lines[line] for line in COPIES) == copies_ms * MS
    assert lines[Line.COMPUTING] == 4 * MS and lines.sum() == 25 * MS
    assert lines[Line.ELSEWHERE] == pytest.approx((21 - copies_ms) * MS, abs=10_000)
