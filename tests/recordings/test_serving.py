"""The serving window: found, given, and start-up told apart from it."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.diagnosis.startup import startup
from kvprobe.diagnosis.verdict import of_full_queue
from kvprobe.errors import UsageError
from kvprobe.recordings.model import CallKind, Direction, Engine, Label, Memory, Recording, Source, Table
from kvprobe.recordings.serving import ServingWindow, parse_time, recorded_span, serving_window

MS = 1_000_000
COPY, PIN, RANGE, WAIT, RECORD = 1, 2, 3, 6, 7
NAMES = [
    "",
    "cudaMemcpyAsync",
    "cudaHostAlloc",
    "serve",
    "ProfilerStep#1",
    "ProfilerStep#2",
    "cudaDeviceSynchronize",
    "cudaEventRecord",
]


def program(calls, ranges=()):
    """A recording of (start_ns, dur_ns, name, kind, bytes) calls of one thread, and (start, end, name) ranges."""
    start, took, name, kind, size = (np.array(column) for column in zip(*sorted(calls), strict=True))
    zero = np.zeros(len(start), int)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": start + took,
                "process": zero,
                "thread": zero + 7,
                "name": name,
                "kind": kind,
                "stream": np.where(kind == CallKind.COPY, 0, -1),
                "bytes": size,
                "count": zero + 1,
            },
        ),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    if ranges:
        begin, end, text = (np.array(column) for column in zip(*ranges, strict=True))
        tables["ranges"] = Table(
            "ranges",
            {
                "start_ns": begin,
                "end_ns": end,
                "name": text,
                "process": np.zeros(len(begin), int),
                "thread": begin * 0 + 7,
            },
        )
    return Recording([Source("made", "kvprobe")], tables, list(NAMES))


def copies(count, since_ns, every_ns=100_000, took_ns=1_000):
    return [(since_ns + i * every_ns, took_ns, COPY, CallKind.COPY, 65536) for i in range(count)]


def pins(count, since_ns, took_ns, every_ns, size=1 << 30):
    return [(since_ns + i * every_ns, took_ns, PIN, CallKind.ALLOC, size) for i in range(count)]


def test_pinning_before_serving_is_start_up_with_its_rate_and_no_finding():
    r = program(pins(8, 0, 500 * MS, 501 * MS) + copies(20_000, 4_100 * MS))
    window = serving_window(r)
    assert window.start_ns == 7 * 501 * MS + 500 * MS
    before = startup(r, window)
    (part,) = before.parts
    assert (part.what, part.calls, part.bytes, part.call) == ("pinning host memory", 8, 8 << 30, "cudaHostAlloc")
    assert part.bytes_per_s == pytest.approx((8 << 30) / 4.0)
    findings = diagnose(r)
    assert not findings and of_full_queue(r, findings).state == "healthy"


@pytest.mark.parametrize(
    ("tail", "ends_ms"),
    [
        ((), 100),
        (pins(3, 300 * MS, 5_000, MS), 100),  # given back within microseconds, 0.2 s behind the last copy
        ([(300 * MS, 21_000, RECORD, CallKind.EVENT, 0)], 100),
        (pins(3, 300 * MS, 20 * MS, 21 * MS), 362),  # long calls between: what was done then
        (pins(1, 101 * MS, 50 * MS, MS), 151),
        ([(300 * MS, 5_000, WAIT, CallKind.SYNC, 0)], 100),
        ([(300 * MS, 5 * MS, WAIT, CallKind.SYNC, 0)], 305),
    ],
)
def test_a_window_ends_with_the_last_work(tail, ends_ms):
    r = program(copies(1_001, 0, took_ns=2_000) + list(tail))
    window = serving_window(r)
    assert window.end_ns == pytest.approx(ends_ms * MS, abs=10_000)
    assert ("ends with the last work" in window.how) == (bool(tail) and ends_ms == 100)


def loaded_first(loads, again=(), kernels=1_000):
    """Copies of pageable memory, `loads` at first and more of them `again`, and kernels; each takes a millisecond."""
    begins = [i * MS for i in range(loads)]
    first = loads * MS
    made = [(at, MS, COPY, CallKind.COPY, 8 << 20) for at in (*begins, *again)]
    made += [(first + i * MS, 5_000, RANGE, CallKind.LAUNCH, 0) for i in range(kernels)]
    r = program(made)
    calls = r.calls
    copy = calls["kind"] == CallKind.COPY
    zero = np.zeros(calls.rows, int)
    told = {
        "memory": np.where(copy, Memory.PAGEABLE, 0),
        "direction": np.where(copy, Direction.H2D, 0),
        "correlation": np.arange(calls.rows),
    }
    names = ("start_ns", "end_ns", "process", "thread", "name", "kind", "stream", "bytes", "count")
    r.tables["calls"] = calls = Table("calls", {name: calls[name] for name in names} | told)
    columns = {
        "start_ns": calls["start_ns"],
        "end_ns": calls["start_ns"] + MS,
        "engine": np.where(copy, Engine.COPY, Engine.KERNEL),
        "direction": calls["direction"],
        "memory": calls["memory"],
        "bytes": calls["bytes"],
        "correlation": calls["correlation"],
        "name": zero + RANGE,
        "process": zero,
        "device": zero,
        "stream": zero,
    }
    r.tables["executions"], r.has_executions = Table("executions", columns), True
    return r


def test_what_is_loaded_once_before_the_first_kernel_is_start_up():
    r = loaded_first(16)
    window = serving_window(r)
    assert window.start_ns == 16 * MS and "loaded" in window.how
    (part,) = startup(r, window).parts
    assert (part.what, part.calls, part.bytes) == ("loading from pageable memory", 16, 16 * (8 << 20))
    assert not [one for one in diagnose(r) if one.severity != "info"]


@pytest.mark.parametrize(
    "r",
    [
        loaded_first(16, again=[100 * i * MS for i in range(1, 10)]),  # goes on
        loaded_first(200),  # a fifth of what was recorded
        loaded_first(16, kernels=100),  # as many loads as a tenth of all submissions and more
    ],
)
def test_loads_that_go_on_or_are_much_of_the_recording_are_no_start_up(r):
    assert serving_window(r).start_ns == 0


def test_allocation_that_goes_on_while_serving_is_no_start_up():
    r = program(pins(100, 10_000, MS, 20 * MS) + copies(20_000, MS // 2))
    assert serving_window(r).start_ns < 100 * MS
    assert startup(r, serving_window(r)).parts[0].calls < 5
    (finding,) = (one for one in diagnose(r) if one.cause == "allocation_on_hot_path")
    assert finding.lost_ns == pytest.approx(100 * MS, rel=0.1) and 0 < finding.share <= 1


@pytest.mark.parametrize("since_ns", [0, 1 << 60])
def test_allocation_that_goes_on_behind_the_first_few_copies_is_no_start_up_whenever_the_clock_began(since_ns):
    r = program(pins(100, since_ns + 10_000, MS, 20 * MS) + copies(1_000, since_ns + MS // 2, every_ns=2 * MS))
    assert serving_window(r).start_ns - since_ns < 2 * MS


def test_one_allocation_between_two_spells_of_serving_stays_in_the_window():
    r = program(copies(10_000, 0) + pins(1, 1_000 * MS, 300 * MS, 0) + copies(10_000, 1_300 * MS))
    assert serving_window(r).start_ns == 0
    assert "allocation_on_hot_path" in {one.cause for one in diagnose(r)}


def losing(calls, totals, late=()):
    """A recording of thread 7 whose ring lost calls, and of thread 8; `totals`: (thread, calls)."""
    r = program([*calls, *late])
    columns = dict(r.calls.columns)
    columns["thread"] = np.where(np.isin(columns["start_ns"], [start for start, *_ in late]), 8, 7)
    thread, made = (np.array(column) for column in zip(*totals, strict=True))
    zero = np.zeros(len(made), int)
    r.tables["calls"] = Table("calls", columns)
    r.tables["totals"] = Table(
        "totals",
        {
            "process": zero,
            "thread": thread,
            "stream": zero,
            "name": zero + COPY,
            "kind": zero + CallKind.COPY,
            "calls": made,
        },
    )
    r.lost[0] = 5_000
    return r


@pytest.mark.parametrize("owner", [8, -1])  # a ring's thread; threads that had a ring one after another
def test_a_thread_that_began_late_and_lost_nothing_cuts_nothing_off(owner):
    early = copies(1, 5 * MS, took_ns=MS)  # a slow one is what is left of the time before
    kept = [*early, *copies(1_000, 100 * MS)]
    late = copies(100, 180 * MS + 50_000)
    assert serving_window(losing(kept, [(7, 6_001), (owner, 100)], late)).start_ns == 100 * MS
    assert serving_window(losing(kept, [(7, 6_001), (owner, 5_000)], late)).start_ns == 180 * MS + 50_000


def test_what_the_recorder_did_itself_is_no_work_of_the_process():
    calibration, pinned = copies(3_000, 0, every_ns=2_000), pins(8, 7 * MS, MS, 2 * MS)
    r = program([*calibration, *pinned, *copies(1_000, 100 * MS)])
    assert serving_window(r).start_ns == 0
    r.tables["labels"] = Table(
        "labels",
        {
            "start_ns": [0],
            "end_ns": [7 * MS],
            "process": [0],
            "thread": [7],
            "label": [Label.INSTRUMENTATION],
            "name": [0],
        },
    )
    assert serving_window(r).start_ns == pinned[-1][0] + MS


def test_marked_steps_begin_the_window_where_no_set_up_does():
    r = program(copies(2_000, 0), ranges=[(50 * MS, 90 * MS, 4), (100 * MS, 150 * MS, 5)])
    assert serving_window(r).start_ns == 50 * MS


def test_a_window_that_is_given_is_what_is_judged():
    slow = [(s + (2 * MS if 500 * MS <= s < 600 * MS else 0), *rest) for s, *rest in copies(10_000, 0)]
    r = program(slow + pins(20, 200 * MS + 10_000, 2 * MS, 10 * MS), ranges=[(600 * MS, 700 * MS, RANGE)])
    assert "allocation_on_hot_path" in {one.cause for one in diagnose(r)}
    r.window = serving_window(r, 600 * MS)
    assert r.window.given and r.window.start_ns == 600 * MS and not diagnose(r)
    r.window = serving_window(r, within="serve")
    assert (r.window.start_ns, r.window.end_ns) == (600 * MS, 700 * MS) and not diagnose(r)
    assert serving_window(r, 100 * MS, 300 * MS).span_ns == 200 * MS


@pytest.mark.parametrize("wrong", [{"begin_ns": 10_000 * MS}, {"begin_ns": 20, "end_ns": 10}, {"within": "absent"}])
def test_a_window_of_nothing_is_wrong_usage(wrong):
    with pytest.raises(UsageError):
        serving_window(program(copies(100, 0)), **wrong)


@pytest.mark.parametrize(
    ("text", "ns"), [("3ns", 3), ("300us", 300_000), (" 1.5 ms ", 1_500_000), ("0.25s", 250_000_000), ("2s", 2 * 10**9)]
)
def test_a_time_is_read_with_its_unit(text, ns):
    assert parse_time(text, "--from") == ns


@pytest.mark.parametrize("text", ["", "5", "-1s", "1 h", "1.s", "s"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="not a time"):
        parse_time(text, "--from")


def test_shares_never_exceed_the_whole_however_many_threads_wait():
    calls = []
    for thread in range(8):
        calls += [(i * MS + thread, 900_000, PIN, CallKind.ALLOC, 4096) for i in range(50)]
        calls += [(i * MS + 900_100 + thread, 1_000, COPY, CallKind.COPY, 4096) for i in range(50)]
    r = program(calls)
    threads = np.array([int(start) % 100 for start in r.calls["start_ns"]])
    r.tables["calls"] = Table("calls", {**r.calls.columns, "thread": threads})
    for finding in diagnose(r):
        assert 0 <= finding.share <= 1
        assert finding.of_ns <= 8 * 60 * MS


def test_a_million_healthy_calls_with_noise_leave_nothing_above_information():
    rng = np.random.default_rng(1)
    count = 1_000_000
    took = (1_000 * (1 + 0.3 * rng.random(count))).astype(np.int64)
    lost_cpu = rng.random(count) < 0.0002
    took[lost_cpu] += rng.integers(20_000, 4_000_000, int(lost_cpu.sum()))
    start = np.cumsum(took + rng.integers(500, 20_000, count)) - took
    r = program(copies(2, 0))
    kinds = rng.choice([CallKind.COPY, CallKind.LAUNCH, CallKind.MEMSET], count)
    r.tables["calls"] = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + took,
            "process": np.zeros(count, int),
            "thread": np.full(count, 7),
            "name": np.full(count, COPY),
            "kind": kinds,
            "stream": rng.integers(0, 4, count),
            "bytes": np.full(count, 65536),
            "count": np.ones(count, int),
            "correlation": np.arange(count),
        },
    )
    done = np.maximum.accumulate(start + took + rng.integers(2_000, 40_000, count))
    r.tables["executions"] = Table(
        "executions",
        {
            "start_ns": done - 1_500,
            "end_ns": done,
            "process": np.zeros(count, int),
            "stream": r.calls["stream"],
            "engine": np.where(kinds == CallKind.LAUNCH, 1, 2),
            "correlation": np.arange(count),
            "device": np.zeros(count, int),
            "direction": np.ones(count, int),
            "bytes": np.full(count, 65536),
            "memory": np.full(count, 2),
        },
    )
    r.tables["streams"] = Table("streams", {"process": [0] * 4, "handle": [7, 8, 9, 10]})
    r.has_executions = True
    findings = diagnose(r)
    loud = [one.cause for one in findings if one.severity != "info" and not one.abstains]
    assert loud == ["waiting_for_host"]  # its kernels are far apart
    r.tables["executions"], r.has_executions = Table("executions"), False
    assert [one.cause for one in diagnose(r) if one.severity != "info" and not one.abstains] == []


def test_what_sets_up_before_any_work_is_start_up_though_it_goes_on():
    r = program(pins(100, 0, MS, 5 * MS) + copies(5_000, 2 * MS))
    assert serving_window(r).start_ns == MS


def test_pinning_after_the_first_copies_that_goes_on_is_no_start_up():
    r = program(copies(3, 0) + pins(60, 10 * MS, 5 * MS, 30 * MS) + copies(17_000, 16 * MS))
    assert serving_window(r).start_ns == 0


@pytest.mark.parametrize(("before", "start_ns"), [(32, 60 * MS), (33, 0)])
def test_so_much_work_may_come_before_set_up(before, start_ns):
    assert serving_window(
        program(copies(before, 0) + pins(1, 10 * MS, 50 * MS, 0) + copies(200, 60 * MS))
    ).start_ns == (start_ns)


def test_what_no_known_process_did_lies_in_the_window_of_the_first():
    """Of row -1: it begins where the first one's does, wherever the others' do."""
    window = ServingWindow(200, np.array([60, 100, 50]), "", 0)
    assert window.holds(np.full(4, -1), np.array([59, 60, 200, 201])).tolist() == [False, True, True, False]


def test_a_window_by_process_holds_what_begins_in_it():
    window = ServingWindow(200, np.array([0, 100, 50]), "", 0)
    process, start = np.array([0, 0, 1, 1, 2, 2, 0, 7]), np.array([0, 50, 99, 100, 49, 50, 201, 50])
    assert window.holds(process, start).tolist() == [True, True, False, True, False, True, False, True]
    assert ServingWindow(5, np.array([7]), "", 0).span_ns == 0
    assert recorded_span(Recording([], {}, [""])) == (0, 0)


def paused(before, pause_ms, behind=(1_000,), later_ms=0, set_up=True):
    """Set-up, a few copies, a pause, and spells of copies 0.1 ms apart with a later pause between any two of them."""
    calls = pins(1, 0, 50 * MS, 0) if set_up else []
    calls += copies(before, 60 * MS)
    at = 60 * MS + before * 100_000 + pause_ms * MS
    for many in behind:
        calls += copies(many, at)
        at += many * 100_000 + later_ms * MS
    return program(calls), 60 * MS + before * 100_000 + pause_ms * MS


def test_the_pause_between_the_first_calls_and_serving_is_start_up():
    r, until = paused(before=25, pause_ms=900)
    window = serving_window(r)
    assert (window.start_ns, window.how) == (until, "it begins where a pause of 900 ms after the first calls ended")


def test_of_two_such_pauses_the_second_counts_where_it_is_long_beside_what_follows():
    r, until = paused(before=25, pause_ms=900, behind=(20, 2_000), later_ms=700)
    assert serving_window(r).start_ns == until + 20 * 100_000 + 700 * MS


@pytest.mark.parametrize(
    "more",
    [
        {"before": 112},  # more than a tenth of the work comes before it
        {"pause_ms": 4},  # nothing beside the 100 ms behind it
        {"behind": (500, 500), "later_ms": 460},  # it comes again
        {"set_up": False},  # the recording began while the process was serving
    ],
    ids=["much before it", "short", "comes again", "no set-up"],
)
def test_any_other_pause_stays_in_the_window(more):
    r, _ = paused(**{"before": 25, "pause_ms": 900} | more)
    assert serving_window(r).start_ns <= 60 * MS


@pytest.mark.parametrize(
    ("before", "behind", "cut"),
    [
        (32, 66, True),
        (33, 66, False),
        (16, 18, True),  # half of little work, where the pause is longer than all behind it
        (16, 15, False),
    ],
)
def test_of_little_work_so_much_may_come_before_a_pause(before, behind, cut):
    r, until = paused(before=before, pause_ms=900, behind=(behind,))
    assert serving_window(r).start_ns == (until if cut else 50 * MS)


def test_launches_that_were_not_kept_are_work_all_the_same():
    """Five copies before the pause, four behind it, and a kernel of each millisecond."""
    r, until = paused(before=5, pause_ms=900, behind=(4,))
    assert serving_window(r).start_ns == 50 * MS
    start = until + np.arange(100) * MS
    r.tables["spans"] = Table(
        "spans", {"start_ns": start, "end_ns": start + 900_000, "process": 0 * start, "count": 0 * start + 1}
    )
    assert serving_window(r).start_ns == until


def test_launches_that_were_not_kept_are_work_before_the_end_of_set_up_as_well():
    """Twenty copies, memory for a few milliseconds, sixty copies, and a kernel each 0.1 ms beside these."""
    r = program(pins(1, 0, 50 * MS, 0) + copies(40, 60 * MS) + pins(1, 70 * MS, 3 * MS, 0) + copies(60, 74 * MS, MS))
    assert serving_window(r).start_ns == 50 * MS
    start = 74 * MS + np.arange(600) * 100_000
    r.tables["spans"] = Table(
        "spans", {"start_ns": start, "end_ns": start + 90_000, "process": 0 * start, "count": 0 * start + 1}
    )
    assert serving_window(r).start_ns == 73 * MS


def test_what_the_device_does_is_no_pause():
    r, until = paused(before=25, pause_ms=900)
    zero = np.zeros(1, int)
    kernel = {"start_ns": [70 * MS], "end_ns": [until - 3 * MS], "engine": [Engine.KERNEL], "process": zero}
    r.tables["spans"] = Table("spans", kernel)
    assert serving_window(r).start_ns == 50 * MS
    r.tables["spans"] = Table("spans", kernel | {"end_ns": [until - 400 * MS]})
    assert serving_window(r).how == "it begins where a pause of 400 ms after the first calls ended"


def test_where_the_device_was_marked_the_window_reaches_back_a_second_whatever_was_kept():
    kept = program(pins(1, 0, 50 * MS, 0) + copies(1_000, 2_000 * MS))
    zero = np.zeros(1, int)
    kept.lost = {0: 5_000}
    assert serving_window(kept).start_ns == 2_000 * MS
    kept.tables["spans"] = Table(
        "spans", {"start_ns": [60 * MS], "end_ns": [2_100 * MS], "process": zero, "count": [9]}
    )
    assert serving_window(kept).start_ns == recorded_span(kept)[1] - 1_000 * MS
