"""Whether a thread that makes no call works or waits, by the CPU time that was noted of its pauses."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.account import Line, Unknown, Worked
from kvprobe.account.cpu_time import who_worked
from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import Recording, Table
from tests.account.test_pauses import MS, served

NOBODY, THREAD, ANOTHER = (0.0, 0.01), (0.98, 0.99), (0.01, 0.98)


def with_cpu_time(recording: Recording, used: tuple[float, float], more_ns: int = 0, gave_up: int = 2) -> Recording:
    """The recording with a note of each pause; `used`: shares of it that the thread and its process worked."""
    calls = recording.calls
    order = np.argsort(calls["start_ns"])
    start, end = calls["end_ns"][order][:-1], calls["start_ns"][order][1:]
    start, end = start[end - start >= MS], end[end - start >= MS]
    zero, ns = np.zeros(len(start), int), end - start
    thread, process = ((ns * share).astype(np.int64) for share in used)
    columns = {"start_ns": start, "end_ns": end, "process": zero, "thread": zero + 7}
    columns |= {"thread_ns": thread, "process_ns": process, "more_ns": zero + more_ns, "gave_up": zero + gave_up}
    recording.tables["pauses"] = Table("pauses", columns)
    return recording


@pytest.mark.parametrize(
    ("used", "more_ns", "worked"),
    [
        (NOBODY, 0, Worked.NOBODY),
        (THREAD, 0, Worked.THREAD),
        (ANOTHER, 0, Worked.ANOTHER),
        ((0.1, 0.2), 0, Worked.LITTLE),
        ((0.3, 0.3), 0, Worked.NOT_KNOWN),  # a core that others want, too, or a thread that sleeps now and then
        (THREAD, 11 * MS, Worked.NOT_KNOWN),  # it may all have been used before the pause
        (ANOTHER, 11 * MS, Worked.NOT_KNOWN),
        (NOBODY, 11 * MS, Worked.NOBODY),
        ((1.9, 1.9), 18 * MS, Worked.THREAD),
    ],
)
def test_who_worked_follows_from_what_was_used(used: tuple[float, float], more_ns: int, worked: Worked) -> None:
    recording = with_cpu_time(served([0, 20 * MS], 1), used, more_ns=more_ns)
    start, end = recording.pauses["start_ns"][:1], recording.pauses["end_ns"][:1]
    assert who_worked(recording, 0, 7, start, end).tolist() == [worked]
    assert who_worked(recording, 0, 8, start, end).tolist() == [Worked.NOT_KNOWN]


def test_a_thread_that_never_gave_up_its_cpu_worked_however_little_it_got() -> None:
    recording = with_cpu_time(served([0, 20 * MS], 1), (0.04, 0.04), gave_up=0)
    start, end = recording.pauses["start_ns"][:1], recording.pauses["end_ns"][:1]
    assert who_worked(recording, 0, 7, start, end).tolist() == [Worked.THREAD]


@pytest.mark.parametrize(
    ("used", "begin_ms", "worked"),
    [
        ((0.96, 0.97), 960, Worked.NOT_KNOWN),  # all of it may have been used before the window
        ((0.96, 0.97), 0, Worked.THREAD),
        ((0.96, 0.97), 900, Worked.THREAD),  # 60 of the last 100 ms at least
        ((0.01, 0.96), 960, Worked.NOT_KNOWN),
        ((0.001, 0.001), 960, Worked.NOBODY),
    ],
)
def test_of_a_pause_that_begins_before_the_window_only_what_lies_in_it_counts(
    used: tuple[float, float], begin_ms: int, worked: Worked
) -> None:
    """A server imports for a second and then waits for its first request: one pause, and the window begins between."""
    recording = with_cpu_time(served([0, 1_000 * MS], 1), used)
    begin, end = recording.pauses["start_ns"][:1] + begin_ms * MS, recording.pauses["end_ns"][:1]
    assert who_worked(recording, 0, 7, begin, end).tolist() == [worked]


def test_a_server_whose_process_sleeps_between_requests_has_nothing_to_do() -> None:
    """40 ms in `recv` after ten steps each: rare among its pauses, and nobody works in it."""
    recording = with_cpu_time(served([0, *[40 * MS] * 15], 10), NOBODY)
    found = examine(recording)
    (gpu,) = found.account.gpus
    assert gpu.ns(Line.NOTHING_TO_DO) == pytest.approx(15 * 40 * MS, rel=0.03)
    assert of_recording(recording, found).state == "healthy"


@pytest.mark.parametrize(("kind", "told"), [("file", False), ("socket", True)])
def test_a_pause_behind_a_write_to_a_file_may_be_the_disk_s(kind: str, told: bool) -> None:
    """A checkpoint after ten steps: 0.3 ms in `write`, and 60 ms in `fsync`, which nobody records."""
    recording = with_cpu_time(served([0, *[62 * MS] * 15], 10), NOBODY)
    recording.names.append(kind)
    pauses = recording.pauses
    start, rows = pauses["start_ns"][pauses["end_ns"] - pauses["start_ns"] > 50 * MS], 15
    same = {"process": np.zeros(rows, int), "thread": np.full(rows, 7), "place": np.full(rows, 2)}
    columns = {"start_ns": start, "end_ns": start + 300_000, "writes": np.ones(rows, int)}
    recording.tables["tier_operations"] = Table("tier_operations", columns | same)
    recording.tables["tiers"] = Table("tiers", {"process": [0], "place": [2], "kind": [len(recording.names) - 1]})
    found = examine(recording)
    (gpu,) = found.account.gpus
    assert (gpu.ns(Line.NOTHING_TO_DO) > 0) == told and (gpu.open_ns > 0) == (not told)
    assert of_recording(recording, found).state == ("healthy" if told else "undecided")


def test_a_pause_in_which_nobody_works_is_no_work_of_python_s() -> None:
    """A timer or a socket before each step: without the CPU time it is the step's own, and the thread's fault."""
    found = examine(with_cpu_time(served([12 * MS] * 40, 1), NOBODY))
    (gpu,) = found.account.gpus
    assert gpu.unknown_ns()[Unknown.OUTSIDE] == gpu.open_ns == pytest.approx(39 * 12 * MS, rel=0.03)
    assert not [one for one in found if not one.abstains]
    verdict = of_recording(with_cpu_time(served([12 * MS] * 40, 1), NOBODY), found)
    assert verdict.state == "undecided" and "outside CUDA: a socket, a file or a timer" in verdict.reason


@pytest.mark.parametrize("used", [THREAD, ANOTHER], ids=["the_thread", "another"])
@pytest.mark.parametrize("pause_ns", [12 * MS, 80 * MS])
def test_a_pause_in_which_somebody_works_is_waiting_for_the_host(used: tuple[float, float], pause_ns: int) -> None:
    found = examine(with_cpu_time(served([pause_ns] * 20, 1), used))
    (gpu,) = found.account.gpus
    assert gpu.open_ns == gpu.ns(Line.NOTHING_TO_DO) == 0
    assert gpu.ns(Line.ELSEWHERE, Line.PYTHON) == pytest.approx(19 * pause_ns, rel=0.03)


def test_a_long_pause_among_short_steps_stays_open_whoever_works_in_it() -> None:
    """A server that asks for the next request again and again works, too."""
    (gpu,) = examine(with_cpu_time(served([0, *[80 * MS] * 15], 10), THREAD)).account.gpus
    assert gpu.unknown_ns()[Unknown.BETWEEN_REQUESTS] == pytest.approx(15 * 80 * MS, rel=0.03)


def test_another_thread_that_ran_is_named_with_what_cannot_be_told() -> None:
    recording = with_cpu_time(served([12 * MS] * 4, 1), ANOTHER)
    texts = [one.text for finding in examine(recording) for one in finding.evidence]
    assert [text for text in texts if "the interpreter's lock or a lock of the program's own" in text]


@pytest.mark.parametrize(("used", "steps", "named"), [(ANOTHER, 20, True), (THREAD, 20, False), (ANOTHER, 12, False)])
def test_a_python_thread_that_waits_while_another_runs_is_python_s(
    used: tuple[float, float], steps: int, named: bool
) -> None:
    recording = with_cpu_time(served([12 * MS] * steps, 1), used)
    recording.names.append("python3")
    recording.processes.columns["name"] = np.array([len(recording.names) - 1])
    found = {one.cause: one for one in examine(recording)}
    assert ("python_or_gil_bound" in found) == named
    if named:
        lost = (steps - 1) * 12 * MS
        assert found["python_or_gil_bound"].device_ns == pytest.approx(lost, rel=0.03)
        assert "a lock of the program's own" in found["python_or_gil_bound"].evidence[0].text


@pytest.mark.parametrize(
    ("short", "used_ns", "asked"),
    [
        (6, 300_000, False),  # a tenth of 3 ms, as before the long ones
        (6, 700_000, True),  # more than before those: it prepared something
        (18, 300_000, True),  # mostly it sleeps for 3 ms, and seldom for longer
    ],
)
def test_requests_that_come_soon_are_waited_for_as_the_others_are(short: int, used_ns: int, asked: bool) -> None:
    """A server that waits 60 ms for most of its requests and 3 ms for some: each time it works 0.3 ms."""
    pauses = [60 * MS] * 12 + [3 * MS] * short
    np.random.default_rng(0).shuffle(pauses)
    recording = with_cpu_time(served([0, *pauses], 1), NOBODY)
    noted = recording.pauses
    is_short = noted["end_ns"] - noted["start_ns"] < 10 * MS
    for name in ("thread_ns", "process_ns"):
        noted[name][:] = np.where(is_short, used_ns, 300_000)
    (gpu,) = examine(recording).account.gpus
    unasked_ns = 12 * 60 * MS + (0 if asked else short * 3 * MS)
    assert gpu.ns(Line.NOTHING_TO_DO) == pytest.approx(unasked_ns, rel=0.01)
    assert gpu.ns(Line.ELSEWHERE) == pytest.approx(short * 3 * MS if asked else 0, rel=0.03)
