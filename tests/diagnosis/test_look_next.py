"""Where to look next: the largest wait of the account, whose thread, what the thread did, and when most of it was."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import examine
from kvprobe.diagnosis.look_next import look_next
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table
from kvprobe.recordings.serving import parse_time

US = 1_000
STEPS = 100


def recording(late: range = range(0), inside: bool = False) -> Recording:
    """Kernels of 900 us, each launched when the one before is over; in `late` steps another 200 us later.

    The thread is then in a range of the step's own number; `inside`: in the launch itself.
    """
    took = np.full(STEPS, 5 * US)
    wait = np.full(STEPS, 10 * US)
    (took if inside else wait)[list(late)] += 200 * US
    start = np.cumsum(wait + np.append(0, (took + 900 * US)[:-1]))
    end = start + took
    same, rows = np.zeros(STEPS), np.arange(STEPS)
    made = Recording([Source("some where/run.sqlite", "nsys-sqlite")], names=["", "cudaLaunchKernel", "kernel"])
    made.names += [f":aten::mm, op_id = {990 + step}" for step in range(STEPS)]
    call = {
        "start_ns": start,
        "end_ns": end,
        "process": same,
        "thread": same + 7,
        "correlation": rows,
        "name": same + 1,
    }
    made.tables["calls"] = Table("calls", {**call, "kind": same + CallKind.LAUNCH, "stream": same})
    ran = {"start_ns": end, "end_ns": end + 900 * US, "process": same, "stream": same, "correlation": rows}
    made.tables["executions"] = Table(
        "executions", {**ran, "engine": same + Engine.KERNEL, "device": same + 1, "name": same + 2}
    )
    span = {"start_ns": start - wait, "end_ns": end, "process": same, "thread": same + 7, "name": rows + 3}
    made.tables["ranges"] = Table("ranges", span)
    made.tables["processes"] = Table("processes", {"pid": [41]})
    made.tables["streams"] = Table("streams", {"handle": [0], "process": [0], "device": [1]})
    made.has_executions = True
    return made


def test_the_largest_wait_is_named_with_its_gpu_thread_and_range_and_the_part_with_most_of_it() -> None:
    made = recording(late=range(62, 70))
    look = look_next(made, examine(made))
    assert look is not None
    assert (look.gpu, look.pid, look.thread) == (1, 41, 7)
    assert look.line in (Line.PYTHON, Line.ELSEWHERE)
    (place, ns), *_ = look.places
    assert place == "in range “aten::mm”", "the operator, of whatever call"
    assert ns == pytest.approx(look.ns, rel=0.01)
    began = [int(made.calls["start_ns"][step] - made.calls["start_ns"][0]) for step in (62, 69)]
    assert look.from_ns <= began[1] and look.to_ns >= began[0], "the steps that were late"
    assert look.part_ns > 0.5 * 8 * 200 * US


def test_the_command_can_be_pasted_and_judges_that_part() -> None:
    made = recording(late=range(62, 70))
    look = look_next(made, examine(made))
    assert look is not None
    words = shlex.split(look.command)
    assert words[:3] == ["kvprobe", "report", "some where/run.sqlite"]
    for option, ns in (("--from", look.from_ns), ("--to", look.to_ns)):
        assert parse_time(words[words.index(option) + 1], option) == pytest.approx(ns, abs=US)


def test_a_wait_inside_calls_names_the_call() -> None:
    made = recording(late=range(62, 70), inside=True)
    look = look_next(made, examine(made))
    assert look is not None
    assert look.line == Line.SUBMITTING
    assert "in cudaLaunchKernel" in dict(look.places)


def test_a_line_of_code_is_named_where_stacks_were_taken_in_the_wait() -> None:
    made = recording(late=range(62, 70))
    at = made.calls["start_ns"][65] - 100 * US
    made.names.append("prepare (/srv/engine.py:40)")
    made.tables["stacks"] = Table(
        "stacks",
        {"time_ns": [at], "process": [0], "thread": [7], "blocked_ns": [0], "stack": [len(made.names) - 1]},
    )
    look = look_next(made, examine(made))
    assert look is not None
    assert "at /srv/engine.py:40" in dict(look.places)


def test_where_no_gpu_waited_there_is_nothing_to_look_at() -> None:
    made = recording()
    made.tables["executions"] = Table("executions")
    made.has_executions = False
    assert look_next(made, examine(made)) is None
