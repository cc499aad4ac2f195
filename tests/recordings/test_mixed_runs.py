"""Runs of several kinds: what is told of them, and where that is left open."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.probe.ring import COVERAGE, SPAN
from kvprobe.probe.ring_layout import RECORD
from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.run_events import RingRecords
from kvprobe.recordings.run_marks import REASONS, marks
from kvprobe.recordings.vocabulary import Names

US, KIB = 1_000, 1 << 10
KERNELS, LOADS, STORES, INSIDE, WAITS = 1, 2, 3, 4, 7  # of enum mark_kind
UNTOLD, UNSEEN = REASONS.index("several kinds of work that could not be told apart"), 5
LATE = 10**6  # us
Run = tuple[int, int, dict[int, int], int]  # when it begins and ends, us; how many of each kind; how late its mark was


def read(runs: list[Run], unseen: int = 0, lost: int = 0, each: int = 8 * KIB) -> Recording:
    """Runs of one stream, of copies of `each` bytes; the end of the last one was seen so many us late.

    Parts of the kind `lost` were written over.
    """
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync", *REASONS[1:]])
    end = max(run[1] for run in runs) + unseen
    columns = {"start_ns": [0, end * US - US], "end_ns": [US, end * US], "name": [1, 1], "thread": [7, 7]}
    columns["kind"], columns["bytes"] = [CallKind.COPY, CallKind.COPY], [KIB * KIB, KIB * KIB]
    recording.tables["calls"] = Table("calls", {name: np.array(one) for name, one in columns.items()})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    rows: list[tuple[int, ...]] = [(COVERAGE, 0, 0, end, 1, 0, 1, 0)]
    for number, (begin, until, parts, late) in enumerate(runs, 1):
        last = number == len(runs)
        many, single = sum(parts.values()), len(parts) == 1
        rows.append(
            (SPAN, next(iter(parts)) if single else 0, begin, until, many, 0 if last and unseen else late, 1, number)
        )
        over = until + unseen if last else until
        rows += (
            []
            if single
            else [(SPAN, kind, begin, over, n, late, 0, number) for kind, n in parts.items() if kind != lost]
        )
    if unseen:
        rows.append((COVERAGE, UNSEEN, end - unseen, end, 1, 0, 1, 0))
    records = np.zeros(len(rows), dtype=RECORD)
    for at, (call, kind, begin, until, count, late, busy, slot) in enumerate(rows):
        one = records[at : at + 1]
        one["call"], one["result"], one["count"], one["tid"] = call, kind, count, 1 + late * US
        one["start_ns"], one["dur_ns"], one["src"] = begin * US, (until - begin) * US, slot
        one["dst"] = one["dur_ns"] * busy
        one["bytes"] = count * each if kind in (LOADS, STORES) else 0
        one["direction"] = {LOADS: Direction.H2D, STORES: Direction.D2H}.get(kind, 0)
    zero = np.zeros(len(records), dtype=np.int64)
    marks(recording, RingRecords(records, zero, zero, zero), Names(recording.names))
    return recording


def known(kernel: list[int], load: int, store: int = 4) -> list[Run]:
    """Runs of one kind each: kernels of so many us, and twenty times ten loads and ten stores."""
    out, at = [], 0
    for _ in range(20):
        for kind, each, many in ((LOADS, load, 10), (STORES, store, 10)):
            out.append((at, at + each * many, {kind: many}, LATE))
            at += each * many
        for each in kernel:
            out.append((at, at + each, {KERNELS: 1}, LATE))
            at += each
    return out


def lasted(recording: Recording, engine: Engine, begin: int) -> float:
    """How long the GPU was busy with that from there on, us."""
    spans = recording.spans
    mine = (spans["engine"] == engine) & (spans["start_ns"] >= begin * US)
    return float((spans["end_ns"] - spans["start_ns"])[mine].sum()) / US


def untold(recording: Recording) -> int:
    """For how long several kinds could not be told apart, us."""
    seen = recording.coverage
    mine = np.array([recording.text(int(one)) == REASONS[UNTOLD] for one in seen["reason"]], dtype=bool)
    return int((seen["end_ns"] - seen["start_ns"])[mine].sum()) // US


def test_kernels_get_what_both_they_and_the_copies_beside_them_say() -> None:
    """A hundred copies of 3 us and two kernels of 300 us take 0.9 ms, which is what was seen."""
    runs = known([300], 3)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 900, {LOADS: 100, KERNELS: 2}, LATE)])
    assert not untold(recording)
    assert lasted(recording, Engine.KERNEL, begin) == pytest.approx(600, abs=0.04 * 900)
    assert lasted(recording, Engine.COPY, begin) == pytest.approx(300, abs=0.04 * 900)
    spans = recording.spans
    late = spans["start_ns"] >= begin * US
    assert spans["count"][late].sum() == 102
    assert spans["bytes"][late].sum() == 100 * 8 * KIB
    assert spans["end_ns"].max() <= (begin + 900) * US


@pytest.mark.parametrize(
    ("kernel", "parts", "took", "late"),
    [
        ([300], {LOADS: 100, KERNELS: 2}, 1_400, LATE),  # longer than both take: another kernel is among them
        ([300], {LOADS: 100, KERNELS: 2}, 700, LATE),
        ([100, 900], {LOADS: 200, STORES: 200, KERNELS: 2}, 2_300, LATE),  # kernels of any length, copies that vary
        ([], {LOADS: 100, KERNELS: 2}, 900, LATE),  # how long kernels take was never seen
        ([300], {LOADS: 100, KERNELS: 2}, 900, 3),  # the device waited for its host
        ([300], {LOADS: 100, WAITS: 1, KERNELS: 2}, 900, LATE),  # for whom was waited how long is not known
    ],
    ids=["longer", "shorter", "any length", "unknown", "paced", "a wait"],
)
def test_what_their_bounds_leave_open_is_not_told(
    kernel: list[int], parts: dict[int, int], took: int, late: int
) -> None:
    runs = known(kernel, 3)
    if len(kernel) > 1:
        runs += known(kernel, 6)
        runs = [(a + 10**5 * (n >= 80), b + 10**5 * (n >= 80), *rest) for n, (a, b, *rest) in enumerate(runs)]
    begin = max(run[1] for run in runs)
    recording = read([*runs, (begin, begin + took, parts, late)])
    assert untold(recording) == took
    assert not lasted(recording, Engine.KERNEL, begin)


def test_copies_alone_are_copies_whichever_way_each_goes() -> None:
    runs = known([], 3, store=6)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 500, {LOADS: 50, STORES: 50}, LATE)])
    assert not untold(recording)
    assert not recording.spans["error_ns"].any()
    assert lasted(recording, Engine.COPY, begin) == pytest.approx(500, abs=5)
    spans = recording.spans
    late = spans["start_ns"] >= begin * US
    stored = late & (spans["direction"] == Direction.D2H)
    assert (spans["end_ns"] - spans["start_ns"])[stored].sum() == pytest.approx(333 * US, rel=0.1)


def test_a_run_that_is_divided_says_half_of_what_its_bounds_leave_open_and_errors_add_up() -> None:
    """A kernel takes 293 us, without its mark, to 305 us; a hundred loads take at most 300 us of the 898 us."""
    runs = known([295, 305], 3)
    begin, half = runs[-1][1], (2 * 305 - (900 - 2.3 - 300)) / 2
    for many in (1, 2):
        more = [(begin + 900 * n, begin + 900 * n + 900, {LOADS: 100, KERNELS: 2}, LATE) for n in range(many)]
        spans = read([*runs, *more]).spans
        divided = spans["start_ns"] >= begin * US
        assert not spans["error_ns"][~divided].any()
        assert (spans["error_ns"][divided] > 0).all()
        assert spans["error_ns"].sum() == pytest.approx(many * half * US, abs=10)


def test_copies_inside_the_gpu_may_have_taken_what_copies_beside_them_leave() -> None:
    """Fifty loads take 150 us, so fifty copies inside the GPU took 350 us: nothing tells that these are longer."""
    runs = known([], 3)
    begin = runs[-1][1]
    spans = read([*runs, (begin, begin + 500, {LOADS: 50, INSIDE: 50}, LATE)]).spans
    inside = (spans["start_ns"] >= begin * US) & (spans["direction"] == Direction.D2D)
    took = (spans["end_ns"] - spans["start_ns"])[inside].sum()
    assert spans["error_ns"].sum() >= 350 * US - took - 10


def test_large_copies_beside_kernels_are_told_and_say_nothing_of_the_link_s_rate() -> None:
    """A hundred loads and two kernels in 900 us, of which the kernels take 600 elsewhere: no load takes 9 us."""
    runs = known([300], 3)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 900, {LOADS: 100, KERNELS: 2}, LATE)], each=KIB * KIB)
    assert untold(recording) == 0
    assert lasted(recording, Engine.KERNEL, begin) == pytest.approx(600, rel=0.04)
    by_measured = link_rate(read(runs, each=KIB * KIB), Direction.H2D)
    assert link_rate(recording, Direction.H2D) == by_measured


def test_large_copies_both_ways_are_copies_and_tell_no_rate() -> None:
    runs = known([], 3, store=6)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 500, {LOADS: 50, STORES: 50}, LATE)], each=KIB * KIB)
    assert not untold(recording)
    assert lasted(recording, Engine.COPY, begin) == pytest.approx(500, abs=5)
    rates = [link_rate(recording, way)[0] for way in (Direction.H2D, Direction.D2H)]
    before = [link_rate(read(runs, each=KIB * KIB), way)[0] for way in (Direction.H2D, Direction.D2H)]
    assert rates == before and min(rates) > 0


def test_an_end_that_was_not_seen_leaves_no_more_than_that_open() -> None:
    """The run goes on for 90 us after it was seen busy: what it takes fits between, and only that end is missing."""
    runs = known([300], 3)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 830, {LOADS: 100, KERNELS: 2}, LATE)], unseen=90)
    assert not untold(recording)
    assert lasted(recording, Engine.KERNEL, begin) == pytest.approx(830 * 2 / 3, abs=0.04 * 900)
    seen = recording.coverage
    assert (seen["end_ns"] - seen["start_ns"])[seen["reason"] != 0].tolist() == [90 * US]


def test_a_run_stays_untold_where_the_ring_wrote_over_some_of_its_parts() -> None:
    runs = known([300], 3)
    begin = runs[-1][1]
    recording = read([*runs, (begin, begin + 900, {LOADS: 100, KERNELS: 2}, LATE)], lost=LOADS)
    assert untold(recording) == 900
