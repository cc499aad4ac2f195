"""Short series keep what matters of long ones: the maximum, the count, the level that still holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvprobe.reporting import series
from kvprobe.reporting.views import numbers

DURATIONS = arrays.arrays(np.int64, st.integers(1, 400), elements=st.integers(0, 2**50))


@settings(deadline=None)
@given(DURATIONS, st.integers(1, 50), st.randoms())
def test_the_maximum_and_every_value_survive_binning_in_any_order(value, bins, random) -> None:
    time = np.array([random.randrange(10**12) for _ in value])
    found = series.bin_max(time, value, bins)
    assert np.nanmax(found.high) == value.max()
    assert np.nanmin(found.low) == value.min()
    assert found.count.sum() == len(value)
    assert np.array_equal(np.isnan(found.high), found.count == 0)


def test_values_outside_the_span_are_kept_at_its_edges() -> None:
    found = series.bin_max(np.array([-5, 50, 500]), np.array([9.0, 1.0, 7.0]), 10, 0, 100)
    assert (found.high[0], found.high[-1]) == (9.0, 7.0)


def test_a_level_holds_until_the_next_step_and_is_nothing_before_the_first() -> None:
    found = series.bin_step(np.array([250, 650]), np.array([3, 0]), 10, 0, 1000)
    assert found.high.tolist() == [0, 0, 3, 3, 3, 3, 3, 0, 0, 0]


def test_a_level_that_is_not_known_any_more_is_no_level() -> None:
    found = series.bin_step(np.array([250, 650, 651]), np.array([3.0, 5.0, np.nan]), 10, 0, 1000)
    assert found.high[:7].tolist() == [0, 0, 3, 3, 3, 3, 5]
    assert np.isnan(found.high[7:]).all() and np.isnan(found.low[7:]).all()


@settings(deadline=None)
@given(st.integers(0, 2**53 - 1))
def test_buckets_are_those_of_the_native_histogram(ns: int) -> None:
    if ns < 4:
        want = ns
    else:  # kvp_bucket of kvp.h, in Python's exact integers
        exponent = ns.bit_length() - 1
        want = min((exponent - 1) * 4 + ((ns >> (exponent - 2)) & 3), series.BUCKETS - 1)
    assert series.bucket(np.array([ns]))[0] == want
    assert series.bucket_floor_ns(want) <= ns
    if want < series.BUCKETS - 1:
        assert ns < series.bucket_floor_ns(want + 1)


@settings(deadline=None)
@given(DURATIONS, st.integers(1, 40))
def test_a_heat_map_counts_every_call_once(value, columns) -> None:
    time = np.arange(len(value))
    counts, _, floor = series.heat(time, value, columns, 0, len(value))
    assert counts.sum() == len(value)
    assert series.bucket_floor_ns(floor) <= value.min()


@pytest.mark.parametrize("rows", [100, 300_000])
def test_the_slowest_are_the_slowest(rows: int) -> None:
    value = np.random.default_rng(0).lognormal(8, 1, rows).astype(np.int64)
    value[rows // 3 :: 1000] = 5  # ties and a pattern that a sample could fall for
    found = series.slowest(value, 50)
    assert np.array_equal(np.sort(value[found]), np.sort(value)[-50:])
    assert np.array_equal(found, np.sort(found))


def test_the_slowest_of_equal_values_are_as_many_as_asked_for() -> None:
    assert len(series.slowest(np.full(200_000, 7), 50)) == 50


def test_numbers_are_short_json_and_nan_is_nothing() -> None:
    assert numbers(np.array([1234567.0, 0.000123456, np.nan, 0.0, 999.96, -5.0])) == [
        1235000,
        0.0001235,
        None,
        0,
        1000,
        -5,
    ]
