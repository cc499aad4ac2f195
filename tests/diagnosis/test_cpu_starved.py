"""`cpu_starved`: slow submissions are a lost CPU's only where the kernel counted the wait for one."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose, examine
from kvprobe.recordings.model import CallKind, Direction, Memory, Recording, Source, Table

MS = 1_000_000
THREAD = 7


def recording(waits: list[tuple[int, int, int, int, int]], slow_ns: int = 4 * MS) -> Recording:
    """Copies of 2 us, of which every hundredth takes `slow_ns`; waits: begin, end, waited, ran, quota, each in ns."""
    made = Recording(source=[Source("run", "kvprobe")])
    took = np.full(1_000, 2_000)
    took[50::100] = slow_ns
    start = np.arange(1_000) * 1_100_000  # no pause of several milliseconds, as waits for the interpreter's lock make
    start[np.arange(1_000) % 100 > 50] += slow_ns
    start += np.arange(1_000) // 100 * slow_ns
    rows = len(start)
    made.tables["calls"] = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + took,
            "process": np.zeros(rows),
            "thread": np.full(rows, THREAD),
            "kind": np.full(rows, CallKind.COPY),
            "stream": np.zeros(rows),
            "direction": np.full(rows, Direction.H2D),
            "memory": np.full(rows, Memory.PINNED),
            "bytes": np.full(rows, 4096),
            "count": np.ones(rows),
        },
    )
    made.tables["processes"] = Table("processes", {"pid": [1]})
    made.tables["streams"] = Table("streams", {"handle": [0], "process": [0]})
    if waits:
        begin, end, waited, ran, quota = zip(*waits, strict=True)
        columns = {"start_ns": begin, "end_ns": end, "waited_ns": waited, "ran_ns": ran, "throttled_ns": quota}
        made.tables["cpu_waits"] = Table(
            "cpu_waits", {**columns, "process": [0] * len(waits), "thread": [THREAD] * len(waits)}
        )
    return made


def spans(waited: int, ran: int, quota: int = 0, slow_ns: int = 4 * MS) -> list[tuple[int, int, int, int, int]]:
    """A span of 20 ms around each slow copy."""
    begins = [50 * 1_100_000 + at * (110 * MS + slow_ns) - 5 * MS for at in range(10)]
    return [(at, at + 20 * MS, waited, ran, quota) for at in begins]


def test_waits_for_a_cpu_that_cover_the_loss_name_it() -> None:
    (found,) = diagnose(recording(spans(waited=4 * MS, ran=16 * MS)))
    assert (found.cause, found.confidence) == ("cpu_starved", "certain")
    assert found.lost_ns == pytest.approx(10 * 4 * MS, rel=0.01)
    assert [change.name for change in found.cure] == ["CPUs"]
    assert found.cure[0].predicted_saving_ns == found.lost_ns


def test_what_the_quota_took_is_told_apart_with_its_own_saving() -> None:
    (found,) = diagnose(recording(spans(waited=4 * MS, ran=16 * MS, quota=3 * MS)))
    saved = {change.name: change.predicted_saving_ns for change in found.cure}
    assert saved["CPU quota"] == pytest.approx(0.75 * found.lost_ns, rel=0.01)
    assert saved["CPUs"] == pytest.approx(0.25 * found.lost_ns, rel=0.01)


def test_no_more_is_called_lost_than_was_waited() -> None:
    (found, *_) = diagnose(recording(spans(waited=3 * MS, ran=17 * MS)))
    assert found.cause == "cpu_starved"
    assert found.lost_ns == pytest.approx(10 * 3 * MS, rel=0.01)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(spans(waited=1 * MS, ran=19 * MS), id="waited for less than half of it"),
        pytest.param(spans(waited=3 * MS, ran=2 * MS), id="slept as long, in a lock perhaps"),
        pytest.param(
            [(at + 60 * MS, end + 60 * MS, *rest) for at, end, *rest in spans(4 * MS, 16 * MS)], id="elsewhere"
        ),
    ],
)
def test_without_enough_of_it_nothing_is_named(waits: list[tuple[int, int, int, int, int]]) -> None:
    assert {found.cause for found in diagnose(recording(waits))} == {"unexplained"}


def test_a_call_over_several_spans_is_covered_by_all_of_them() -> None:
    waits = [
        (at + part, at + part + 20 * MS, 20 * MS, 0, 0)
        for at, *_ in spans(0, 0, slow_ns=30 * MS)
        for part in (0, 20 * MS)
    ]
    (found,) = diagnose(recording(waits, slow_ns=30 * MS))
    assert found.cause == "cpu_starved"
    assert found.lost_ns == pytest.approx(10 * 30 * MS, rel=0.01)


def test_a_recording_without_the_count_says_that_it_cannot_show_it() -> None:
    made = recording([])
    made.source = [Source("trace.json", "kineto-json")]
    (lacks,) = [one for one in examine(made).not_looked_for if one.cause == "cpu_starved"]
    assert "how long threads waited for a CPU" in lacks.because


def test_a_watched_run_without_waits_was_looked_at() -> None:
    made = recording([])
    made.source = [Source("run", "kvprobe", command="serve")]
    assert not [one for one in examine(made).not_looked_for if one.cause == "cpu_starved"]


def slices(waited: int, note_ns: int = 1_000 * MS) -> Recording:
    """Copies of 2 us; after each tenth one no call for now 10, now 15 ms, `waited` of each for a CPU."""
    made = recording([])
    count = np.arange(1_000)
    pause = np.where(count % 10 == 9, np.where(count % 20 == 9, 10, 15) * MS, 10_000)
    start = np.concatenate(([0], np.cumsum(pause + 2_000)[:-1]))
    calls = dict(made.tables["calls"].columns)
    made.tables["calls"] = Table("calls", {**calls, "start_ns": start, "end_ns": start + 2_000})
    begin = np.arange(0, int(start[-1]), note_ns)
    each = np.array([int((pause > MS)[(start >= at) & (start < at + note_ns)].sum()) * waited for at in begin])
    columns = {"start_ns": begin, "end_ns": begin + note_ns, "waited_ns": each, "ran_ns": note_ns - each}
    none = np.zeros(len(begin))
    made.tables["cpu_waits"] = Table(
        "cpu_waits", {**columns, "throttled_ns": none, "process": none, "thread": none + THREAD}
    )
    return made


def test_slices_of_a_scheduler_between_calls_are_not_the_interpreters_lock() -> None:
    (found,) = diagnose(slices(waited=9 * MS))
    assert (found.cause, found.lost_on, found.confidence) == ("cpu_starved", "host", "likely")
    assert found.lost_ns == pytest.approx(100 * 9 * MS, rel=0.02)
    assert found.cure[0].predicted_saving_ns == found.lost_ns


def test_slices_for_which_no_count_was_noted_are_not_the_lock_beside_those_for_which_it_was() -> None:
    made = slices(waited=9 * MS, note_ns=100 * MS)
    half = made.tables["cpu_waits"]
    made.tables["cpu_waits"] = Table("cpu_waits", {name: column[::2] for name, column in half.columns.items()})
    (found,) = diagnose(made)
    assert found.cause == "cpu_starved"


def test_pauses_without_waits_for_a_cpu_remain_the_interpreters_lock() -> None:
    assert {found.cause for found in diagnose(slices(waited=MS // 2))} == {"python_or_gil_bound"}


@pytest.mark.parametrize(("used", "named"), [(0.98, True), (0.01, False)])
def test_pauses_in_which_no_other_thread_ran_are_not_the_interpreters_lock(used: float, named: bool) -> None:
    made = slices(waited=0)
    calls = made.calls
    start, end = calls["end_ns"][:-1], calls["start_ns"][1:]
    start, end = start[end - start >= MS], end[end - start >= MS]
    zero = np.zeros(len(start), dtype=np.int64)
    columns = {"start_ns": start, "end_ns": end, "process": zero, "thread": zero + THREAD, "thread_ns": zero}
    columns |= {"process_ns": ((end - start) * used).astype(np.int64), "more_ns": zero, "gave_up": zero + 2}
    made.tables["pauses"] = Table("pauses", columns)
    assert ("python_or_gil_bound" in {found.cause for found in diagnose(made)}) == named


def test_a_wait_is_counted_inside_calls_or_between_them_never_twice() -> None:
    made = recording(spans(waited=4 * MS, ran=16 * MS))
    calls = dict(made.tables["calls"].columns)
    later = np.cumsum(np.where(np.arange(1_000) % 100 == 51, 2 * MS, 0))  # a pause behind each slow copy
    made.tables["calls"] = Table(
        "calls", {**calls, "start_ns": calls["start_ns"] + later, "end_ns": calls["end_ns"] + later}
    )
    made.tables["cpu_waits"]["start_ns"][:] += np.arange(10) * 2 * MS
    made.tables["cpu_waits"]["end_ns"][:] += np.arange(10) * 2 * MS
    (found,) = diagnose(made)
    assert found.cause == "cpu_starved"
    assert found.lost_ns == pytest.approx(10 * 4 * MS, rel=0.01)  # all of it inside, so nothing is left for the pauses
    assert not [one for one in found.evidence if "between" in one.text]
