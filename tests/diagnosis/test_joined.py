"""The parts that all causes stand on: interval arithmetic, the ledger, the shape of a finding."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvprobe.diagnosis
from kvprobe.diagnosis import CAUSES, diagnose
from kvprobe.diagnosis.finding import Change, Evidence, Finding, singular
from kvprobe.diagnosis.joined import JoinedRecording, Ledger
from kvprobe.recordings.intervals import Cover, running_max_by_group
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=30)


@given(spans, st.tuples(st.integers(-20, 250), st.integers(0, 100)))
def test_a_cover_counts_each_instant_once(intervals, asked):
    instants = {t for start, length in intervals for t in range(start, start + length)}
    start = np.array([s for s, _ in intervals], dtype=np.int64)
    cover = Cover(start, start + np.array([n for _, n in intervals], dtype=np.int64))
    assert cover.total_ns == len(instants)
    begin, end = np.array([asked[0]]), np.array([asked[0] + asked[1]])
    assert int(cover.within(begin, end)[0]) == len(instants & set(range(asked[0], asked[0] + asked[1])))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-(10**12), 10**12)), min_size=1, max_size=40))
def test_running_maximum_starts_again_in_each_group(pairs):
    pairs.sort(key=lambda pair: pair[0])
    group, value = np.array([g for g, _ in pairs]), np.array([v for _, v in pairs])
    expected = [max(v for h, v in pairs[: i + 1] if h == pairs[i][0]) for i in range(len(pairs))]
    assert running_max_by_group(value, group).tolist() == expected


def test_running_maximum_survives_times_too_far_apart_to_lift():
    value = np.array([-(1 << 62), 1 << 61, 5, 3], dtype=np.int64)
    assert running_max_by_group(value, np.array([0, 0, 1, 1])).tolist() == [-(1 << 62), 1 << 61, 5, 5]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 150)), max_size=20))
def test_a_ledger_never_gives_a_nanosecond_twice(claims):
    ledger = Ledger(np.full(5, 100))
    given_out = np.zeros(5)
    for i, (row, ns) in enumerate(claims):
        given_out[row] += ledger.claim(f"cause{i}", np.array([row]), np.array([ns]))[0]
    assert (given_out <= 100).all()
    assert (given_out + ledger.free_ns == 100).all()


def recording(calls, executions=None):
    made = Recording(source=[Source(path="made", format="test")], names=["", "cudaMemcpyAsync", "kernel"])
    made.tables["calls"] = Table("calls", calls)
    if executions is not None:
        made.tables["executions"] = Table("executions", executions)
        made.has_executions = True
    made.tables["processes"] = Table("processes", {"pid": np.array([7])})
    return made


def test_an_empty_recording_has_no_findings():
    assert not diagnose(recording({}))


def test_a_call_inside_another_owns_no_time():
    joined = JoinedRecording(
        recording(
            {
                "start_ns": np.array([0, 10, 50]),
                "end_ns": np.array([40, 30, 60]),
                "thread": np.array([1, 1, 1]),
                "name": np.ones(3, dtype=int),
                "kind": np.full(3, CallKind.COPY),
            }
        )
    )
    assert joined.nested.tolist() == [False, True, False]
    assert joined.host.free_ns.tolist() == [40, 0, 10]


def test_what_the_call_did_not_know_is_taken_from_its_execution():
    joined = JoinedRecording(
        recording(
            {
                "start_ns": np.array([0]),
                "end_ns": np.array([5]),
                "kind": np.array([CallKind.COPY]),
                "correlation": np.array([9]),
            },
            {
                "start_ns": np.array([10, 30]),
                "end_ns": np.array([20, 40]),
                "correlation": np.array([9, 9]),
                "stream": np.array([3, 3]),
                "engine": np.full(2, Engine.COPY),
                "direction": np.full(2, Direction.H2D),
                "memory": np.full(2, Memory.PINNED),
                "bytes": np.array([8, 8]),
            },
        )
    )
    assert (joined.stream[0], joined.direction[0], joined.memory[0]) == (3, Direction.H2D, Memory.PINNED)
    assert (joined.exec_start[0], joined.exec_end[0]) == (10, 40)


def test_a_finding_is_json_with_the_fields_that_stats_prints():
    finding = Finding("pageable_memory", "t", "warning", "certain", 5, (Evidence("e", 1, "ns"),), (Change("c"),))
    out = json.loads(json.dumps(finding.to_json(charts=True)))
    assert {"cause", "severity", "confidence", "lost_ns", "evidence", "cure", "predicted_saving_ns"} <= set(out)
    assert out["evidence"][0] == {"text": "e", "value": 1.0, "unit": "ns", "how": "measured"}


def test_every_cause_is_a_file_that_says_how_it_works_and_what_it_would_save():
    folder = Path(kvprobe.diagnosis.__file__).parent
    for cause in CAUSES:
        text = (folder / f"{cause}.py").read_text()
        doc = text.split('"""')[1]
        assert "Mechanism:" in doc and "Signature:" in doc, cause
        assert "\nCAUSE = cause_of(__name__)\n" in text, cause
        assert "redicted saving" in doc or cause == "unexplained", cause


# A fact of the machine, a rule of a hot path, and groups of an account's lines, which are called the same.
NO_CAUSES = {("confidential_computing", "folder.py"), ("synchronisation", "rules.py")}
NO_CAUSES |= {("waiting_for_copies", "ranks.py"), ("waiting_for_host", "ranks.py")}


def test_a_causes_name_is_written_once():
    package = Path(kvprobe.diagnosis.__file__).parents[1]
    written = []
    for path in [*package.rglob("*.py"), *package.parent.glob("patches/*.py")]:
        texts = (one.value for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Constant))
        written += [text for text in texts if text in CAUSES and (text, path.name) not in NO_CAUSES]
    assert sorted(written) == sorted(CAUSES)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_recording_of_almost_nothing_does_not_crash(rows):
    at = np.arange(rows) * 100
    for kind in CallKind:
        calls = {
            "start_ns": at,
            "end_ns": at + 50,
            "kind": np.full(rows, kind),
            "correlation": np.arange(rows),
            "thread": np.full(rows, 1),
            "count": np.ones(rows, dtype=int),
        }
        for executions in (None, {"start_ns": at + 60, "end_ns": at + 70, "correlation": np.arange(rows)}):
            assert not [one for one in diagnose(recording(calls, executions)) if not one.abstains]


def test_one_call_is_said_as_one():
    assert (
        singular("The launch queue was full: 1 submissions blocked")
        == "The launch queue was full: 1 submission blocked"
    )
    assert singular("1 large copies ran") == "1 large copy ran"
    assert singular("1 calls were entered, 21 calls are 1.1 calls") == "1 call was entered, 21 calls are 1.1 calls"
    assert singular("3 ranks of 1 recordings, 1 points, 1 ranks of 2") == "3 ranks of 1 recording, 1 point, 1 rank of 2"
