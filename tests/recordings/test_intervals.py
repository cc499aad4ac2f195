"""Arithmetic on intervals, against the same done instant by instant and value by value."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvprobe.recordings import intervals
from kvprobe.recordings.intervals import (
    Cover,
    ascending,
    distinct,
    group_starts,
    in_time,
    running_max_by_group,
    union,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=7)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for a, b in pairs for t in range(a, b)}


@given(INTERVALS)
@example([(0, 3), (3, 5), (1, 2), (7, 9)])
@example([(0, 3), (4, 5)])
@example([(2, 9), (3, 4), (5, 6)])
def test_a_union_covers_the_same_instants_once_in_their_order(pairs):
    start, end = union(*arrays(pairs))
    assert instants(list(zip(start.tolist(), end.tolist(), strict=True))) == instants(pairs)
    assert (end > start).all() and (start[1:] > end[:-1]).all()


@given(INTERVALS, INTERVALS)
def test_a_cover_tells_how_much_of_anything_it_covers(pairs, asked):
    cover, there = Cover(*arrays(pairs)), instants(pairs)
    assert cover.total_ns == len(there)
    assert cover.upto(np.arange(16)).tolist() == [sum(t < until for t in there) for until in range(16)]
    within = [len(there & set(range(a, b))) for a, b in asked]
    assert cover.within(*arrays(asked)).tolist() == within
    assert cover.intersect_ns(Cover(*arrays(asked))) == len(there & instants(asked))
    gaps = set(range(min(there), max(there))) - there if there else set()
    assert instants(list(zip(*(a.tolist() for a in cover.gaps()), strict=True))) == gaps


@given(st.lists(st.integers(-3, 6), max_size=8))
@example([1, 1 << 20, 3])
@example([1, (1 << 20) - 1, 1])
@example([5, 1 << 40])
@example([0, 0])
def test_values_come_sorted_and_once(values):
    column = np.array(values, dtype=np.int64)
    assert ascending(column).tolist() == sorted(values)
    assert distinct(column).tolist() == sorted(set(values))
    keyed = np.sort(column)
    firsts = [i for i in range(len(values)) if i == 0 or keyed[i] != keyed[i - 1]]
    assert group_starts(keyed).tolist() == firsts


def test_a_large_value_is_not_counted_into_a_table(monkeypatch):
    monkeypatch.setattr(np, "bincount", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert distinct(np.array([3, 1 << 20])).tolist() == [3, 1 << 20]
    assert distinct(np.array([-1, 3, 3])).tolist() == [-1, 3]
    monkeypatch.undo()
    monkeypatch.setattr(np, "unique", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert distinct(np.array([(1 << 20) - 1, 0, 0])).tolist() == [0, (1 << 20) - 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.permutations(range(8)))
def test_rows_come_in_the_order_of_their_times_and_equal_ones_stay(times, rows):
    some = [row for row in rows if row < len(times)]
    found = in_time(np.array(some, dtype=np.int64), np.array(times)).tolist()
    assert found == sorted(some, key=lambda row: times[row])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.integers(-5, 5), st.sampled_from((-(1 << 61), 1 << 61)))), max_size=9
    )
)
@example([(0, 5), (1, -5), (1, -4), (2, -(1 << 61)), (2, 1 << 61), (3, 0)])
@example([(0, 5), (0, 3), (1, -5), (1, -7), (2, -4), (3, 9), (3, 1)])
def test_a_running_maximum_begins_anew_in_each_group(pairs):
    pairs = sorted(pairs, key=lambda pair: pair[0])
    group, value = (
        (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True)) if pairs else (np.zeros(0),) * 2
    )
    expected = []
    for _, of_one in itertools.groupby(pairs, key=lambda pair: pair[0]):
        expected += itertools.accumulate((one for _, one in of_one), max)
    assert running_max_by_group(value, group).tolist() == expected
    with mock.patch.object(intervals, "_FEW", 0):  # as of many groups
        assert running_max_by_group(value, group).tolist() == expected
