"""A pause of a thread that takes far longer than its steps: nothing shows whether it waited for a request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.account import HOST, Line, Unknown
from kvprobe.commands.check import _of_account
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import CallKind, Direction, Engine, RangeStyle, Recording, Source, Table

MS = 1_000_000
LAUNCH, SYNC, MARK = 1, 2, 4


def served(pauses_ns: list[int], steps: int, step_pause_ns: int = 20_000) -> Recording:
    """Requests of `steps` steps: a kernel of a millisecond and a wait for it; a pause of the thread before each."""
    calls: list[tuple[int, int, int, int]] = []
    ran: list[tuple[int, int]] = []
    now = 0
    for pause_ns in pauses_ns:
        now += pause_ns
        for _ in range(steps):
            calls.append((now, now + 5_000, CallKind.LAUNCH, LAUNCH))
            ran.append((now + 8_000, now + 8_000 + MS))
            calls.append((now + 6_000, ran[-1][1] + 5_000, CallKind.SYNC, SYNC))
            now = calls[-1][1] + step_pause_ns
    start, end, kind, name = (np.array(column) for column in zip(*calls, strict=True))
    zero = np.zeros(len(start), int)
    launch = kind == CallKind.LAUNCH
    correlation = np.where(launch, np.cumsum(launch), -1)
    begun, ended = (np.array(column) for column in zip(*ran, strict=True))
    nought = np.zeros(len(begun), int)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": end,
                "kind": kind,
                "name": name,
                "process": zero,
                "thread": zero + 7,
                "stream": np.where(launch, 0, -1),
                "correlation": correlation,
            },
        ),
        "executions": Table(
            "executions",
            {
                "start_ns": begun,
                "end_ns": ended,
                "engine": nought + Engine.KERNEL,
                "name": nought + 3,
                "process": nought,
                "device": nought,
                "stream": nought,
                "correlation": correlation[launch],
            },
        ),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    names = ["", "cudaLaunchKernel", "cudaStreamSynchronize", "kernel", "tokenise"]
    return Recording([Source("made", "trace")], tables, names, has_executions=True)


def questions(found: Examination) -> list[str]:
    return [one.cause for one in found if one.abstains]


def test_pauses_between_requests_of_many_steps_are_an_open_question_and_nobodys_fault():
    found = examine(served([0, *[40 * MS] * 15], 10))
    (gpu,) = found.account.gpus
    assert gpu.unknown_ns()[Unknown.BETWEEN_REQUESTS] == pytest.approx(600 * MS, rel=0.01) == gpu.open_ns
    assert not [one for one in found if not one.abstains]
    assert "waiting_for_host" in questions(found)
    verdict = of_recording(served([0, *[40 * MS] * 15], 10), found)
    assert verdict.state == "undecided" and "waited for a request or prepared one" in verdict.reason


def with_pinning(recording: Recording, behind_ns: int) -> Recording:
    """Its thread pins memory for 5 ms in each of its long pauses, so long after the last call before the pause."""
    calls = recording.calls
    gap = calls["start_ns"][1:] - calls["end_ns"][:-1]
    begin = calls["end_ns"][:-1][gap > 20 * MS] + behind_ns
    recording.names.append("cudaHostAlloc")
    added = {name: np.repeat(column[:1], len(begin)) for name, column in calls.columns.items()}
    added |= {"start_ns": begin, "end_ns": begin + 5 * MS, "correlation": begin * 0 - 1, "stream": begin * 0 - 1}
    added |= {"name": begin * 0 + len(recording.names) - 1, "kind": begin * 0 + CallKind.ALLOC}
    columns = {name: np.concatenate((column, added[name])) for name, column in calls.columns.items()}
    order = np.argsort(columns["start_ns"], kind="stable")
    recording.tables["calls"] = Table("calls", {name: column[order] for name, column in columns.items()})
    return recording


@pytest.mark.parametrize("first", [True, False])
def test_memory_that_is_pinned_before_a_wait_for_a_request_keeps_nobody_waiting(first):
    """Behind the pause it does: the request is there."""
    found = examine(with_pinning(served([0, *[40 * MS] * 15], 10), 50_000 if first else 35 * MS - 50_000))
    (gpu,) = found.account.gpus
    assert gpu.ns(Line.ALLOCATING) == pytest.approx(0 if first else 14 * 5 * MS, rel=0.01)  # the first is set-up
    assert gpu.open_ns == pytest.approx(15 * 40 * MS if first else 14 * 35 * MS, rel=0.01)
    loud = {one.cause for one in found if not one.abstains and one.severity != "info"}
    assert loud == (set() if first else {"allocation_on_hot_path"})


def with_copies_at_the_end(recording: Recording) -> Recording:
    """Four stores of a millisecond behind the last kernel, each made 8 ms after the one before it was done."""
    begin = int(recording.calls["end_ns"][-1]) + np.arange(1, 5) * 9 * MS
    number = int(recording.calls["correlation"].max()) + np.arange(1, 5)
    recording.names.append("cudaMemcpyAsync")
    word = {"name": begin * 0 + len(recording.names) - 1, "correlation": number, "stream": begin * 0}
    more = {"bytes": begin * 0 + (50 << 20), "direction": begin * 0 + Direction.D2H}
    copies = {"start_ns": begin, "end_ns": begin + 5_000, "kind": begin * 0 + CallKind.COPY, **word, **more}
    ran = {"start_ns": begin + 8_000, "end_ns": begin + MS, "engine": begin * 0 + Engine.COPY, **word, **more}
    for name, added in (("calls", copies), ("executions", ran)):
        old = recording.tables[name]
        full = {one: old[one] for one in {*old.columns, *more}}
        rest = {one: np.repeat(column[:1], len(begin)) for one, column in full.items()} | added
        columns = {one: np.concatenate((column, rest[one])) for one, column in full.items()}
        recording.tables[name] = Table(name, columns)
    return recording


def test_an_open_question_gives_way_to_a_larger_one():
    """No kernel ran behind the copies, so nobody knows whether a model waited for them; the pauses are more."""
    found = examine(with_copies_at_the_end(served([0, *[40 * MS] * 15], 10)))
    one = next(one for one in found if one.cause == "waiting_for_host")
    assert one.abstains and "pauses of its thread" in one.title
    assert one.lost_ns == found.account.gpus[0].open_ns


@pytest.mark.parametrize(("most", "undecided"), [(0.10, True), (0.90, False)])
def test_a_limit_on_waiting_is_undecided_while_open_pauses_could_break_it(most, undecided):
    limit = _of_account(examine(served([0, *[40 * MS] * 15], 10)), "max-waiting-for-host", most)
    assert not limit.broken and bool(limit.undecided) == undecided
    assert not undecided or "waited for a request or prepared one; record" in limit.undecided


def test_what_is_not_known_is_told_beside_small_waits():
    """The GPU waited for 19% of the time with work to do, for several reasons; of 77% of the window nobody knows."""
    recording = served([0, *[40 * MS] * 15], 10, step_pause_ns=250_000)
    found = examine(recording)
    small = replace(found, findings=[replace(one, severity="info") for one in found])
    verdict = of_recording(recording, small)
    assert verdict.state == "found" and verdict.reason.startswith("the GPU waited for 19% of")
    (lack,) = verdict.missing
    assert "waited for a request or prepared one" in lack.what and "kvprobe run --nsys" in lack.how


def test_a_long_pause_alone_does_not_show_that_no_request_was_there():
    found = examine(served([0, *[250 * MS] * 15], 10))  # a collection of garbage takes as long
    (gpu,) = found.account.gpus
    assert gpu.ns(Line.NOTHING_TO_DO) == 0
    assert gpu.unknown_ns()[Unknown.BETWEEN_REQUESTS] == pytest.approx(15 * 250 * MS, rel=0.01)


def test_a_pause_before_each_step_is_the_step_s_own():
    found = examine(served([12 * MS] * 40, 1))
    (gpu,) = found.account.gpus
    assert gpu.open_ns == 0 and {one.cause for one in found if not one.abstains} == {"gpu_starved"}


def test_a_pause_of_35_ms_before_each_step_may_be_a_wait_for_a_request():
    """Audio comes each 40 ms, and so does a batch that is prepared for as long: calls alone do not tell them apart."""
    found = examine(served([35 * MS] * 40, 1))
    (gpu,) = found.account.gpus
    assert gpu.unknown_ns()[Unknown.BETWEEN_REQUESTS] == pytest.approx(39 * 35 * MS, rel=0.01)
    assert not [one.cause for one in found if not one.abstains and one.severity != "info"]


def test_a_pause_in_which_the_thread_marks_what_it_does_is_work():
    recording = served([0, *[40 * MS] * 15], 10)
    start = np.concatenate(
        [begin + np.arange(1, 5) * 6 * MS for begin in recording.calls["end_ns"][19:-1:20].astype(np.int64)]
    )
    zero = np.zeros(len(start), int)
    recording.tables["ranges"] = Table(
        "ranges",
        {
            "start_ns": start,
            "end_ns": start + 5 * MS,
            "name": zero + MARK,
            "process": zero,
            "thread": zero + 7,
            "style": zero + RangeStyle.PUSH_POP,
        },
    )
    found = examine(recording)
    assert found.account.gpus[0].open_ns == 0
    assert "gpu_starved" in {one.cause for one in found if not one.abstains}


def slept(recording: Recording, name: str, start: np.ndarray, end: np.ndarray) -> None:
    """The thread was in this function of the operating system, as its recorder says."""
    zero = np.zeros(len(start), int)
    recording.names.append(name)
    called = {"start_ns": start, "end_ns": end, "process": zero, "thread": zero + 7}
    recording.tables["os_calls"] = Table("os_calls", called | {"name": zero + len(recording.names) - 1})


@pytest.mark.parametrize("long", [25 * MS, 60 * MS])
@pytest.mark.parametrize(("name", "state"), [("recv", "healthy"), ("epoll_wait", "healthy"), ("fsync", "undecided")])
def test_a_thread_that_waits_for_what_others_send_was_asked_for_nothing(name, state, long):
    recording = served([0, *[long] * 15], 10)
    start = recording.calls["end_ns"][19:-1:20] + 30_000
    slept(recording, name, start, start + long - 20_000)
    found = examine(recording)
    (gpu,) = found.account.gpus
    assert gpu.ns(Line.NOTHING_TO_DO) == pytest.approx(15 * long if state == "healthy" else 0, rel=0.01)
    assert of_recording(recording, found).state == state


@pytest.mark.parametrize("long", [25 * MS, 60 * MS])
@pytest.mark.parametrize(("sleeps_for", "state"), [(0.2, "undecided"), (0.9, "healthy")])
def test_who_waits_for_another_thread_of_its_process_was_asked_for_something(sleeps_for, state, long):
    recording = served([0, *[long] * 15], 10)
    start = recording.calls["end_ns"][19:-1:20] + 30_000
    slept(recording, "epoll_wait", start, start + long - 20_000)
    loop = recording.os_calls
    both = {name: np.concatenate((loop[name], loop[name])) for name in ("start_ns", "process", "name")}
    ends = np.concatenate((loop["end_ns"], start + int(sleeps_for * long)))
    threads = np.concatenate((loop["thread"], loop["thread"] + 1))
    recording.tables["os_calls"] = Table("os_calls", both | {"end_ns": ends, "thread": threads})
    found = examine(recording)
    assert of_recording(recording, found).state == state


@pytest.mark.parametrize("long", [25 * MS, 60 * MS])
def test_a_thread_that_was_in_no_function_of_the_operating_system_worked(long):
    recording = served([0, *[long] * 15], 10)
    start = recording.calls["start_ns"][1:2]
    slept(recording, "poll", start, start + MS)  # of a call: the recorder tells when the thread sleeps
    found = examine(recording)
    assert found.account.gpus[0].open_ns == 0
    assert {one.cause for one in found if not one.abstains} == {"gpu_starved"}


@pytest.mark.parametrize("process", ["python3", "server"])
def test_waits_of_some_milliseconds_are_the_interpreter_s_where_the_thread_was_in_its_wait_for_the_lock(process):
    recording = served([4 * MS] * 100, 1)
    recording.names.append(process)
    recording.tables["processes"] = Table("processes", {"pid": [1], "name": [len(recording.names) - 1]})
    start = recording.calls["end_ns"][1::2] + 50_000
    slept(recording, "pthread_cond_timedwait", start, start + 3_900_000)
    found = examine(recording)
    named = {one.cause for one in found if not one.abstains}
    assert named == ({"python_or_gil_bound"} if process == "python3" else {"gpu_starved"})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=20),
    st.integers(1, 12),
    st.integers(0, 3_000),
)
def test_a_gpu_that_idles_for_a_tenth_is_healthy_only_where_nobody_asked(pauses, steps, between_us):
    recording = served([one * MS for one in pauses], steps, between_us * 1_000)
    found = examine(recording)
    (gpu,) = found.account.gpus
    whole = gpu.to_json()
    lines = [whole["computing_ns"], whole["nothing_to_do_ns"], *whole["not_known_ns"].values()]
    lines += [*whole["waiting_for_copies_ns"].values(), *whole["waiting_for_host_ns"].values()]
    assert sum(lines) == gpu.window_ns
    if gpu.ns(*HOST) + gpu.open_ns >= 0.1 * gpu.window_ns:
        assert of_recording(recording, found).state != "healthy"
