"""The baseline and the counts of a window, at the figures where they turn."""

from __future__ import annotations

import math

import pytest

from kvprobe.launchqueue.baseline import Baseline
from kvprobe.launchqueue.call_counts import CallCounts, QueueWindow


def test_a_run_of_fast_calls_moves_it_a_twentieth_of_the_way():
    one = Baseline(1_000)
    one.learn(15, 15 * 2_000)
    assert one.ns == 1_000
    one.learn(16, 16 * 2_000)
    assert one.ns == pytest.approx(1_050)
    one.learn(16, 16 * 1_050)
    assert one.ns == pytest.approx(1_050)


@pytest.mark.parametrize(("taught_ns", "ns"), [(1e9, 1_250), (0, 800)])
def test_it_stays_within_a_quarter_of_the_calibrated_one(taught_ns, ns):
    one = Baseline(1_000)
    for _ in range(100):
        one.learn(16, 16 * taught_ns)
    assert one.ns == pytest.approx(ns)


@pytest.mark.parametrize(
    ("p99_ns", "learned_ns", "slow_ns"),
    [
        (0, 1_000, 1_800),
        (1_900, 1_000, 1_900),  # the slowest hundredth with room is not slow
        (9_000, 1_000, 2_000),  # however slow it was
        (9_000, 900, 1_944),
        (0, 1_250, 2_000),
        (0, 200, 500),
    ],
)
def test_a_call_is_slow_from_so_much_on(p99_ns, learned_ns, slow_ns):
    one = Baseline(1_000, p99_ns)
    one.ns = learned_ns
    assert one.slow_ns == pytest.approx(slow_ns, abs=1)


def test_older_calls_count_half():
    count = CallCounts()
    assert (count.share, count.odds, count.mean_ns) == (0.0, 0.0, 0.0)
    count.add(511, 11, 51_100)
    count.add(1, 1, 100)
    assert (count.calls, count.slow, count.ns) == (512, 12, 51_200)
    assert (count.share, count.odds, count.mean_ns) == (12 / 512, 12 / 500, 100)
    count.add(10, 10, 1_000)
    assert (count.calls, count.slow, count.ns) == (266, 16, 26_600)
    assert CallCounts(3, 3, 9).odds == math.inf and CallCounts(3, 0, 9).odds == 0


def test_a_window_begins_with_nothing():
    one = QueueWindow()
    assert (one.blocked, one.lost_ns, one.longest_ns, one.on_cpu, one.on_cpu_lost_ns, one.span_ns, one.whole_ns) == (
        0,
    ) * 7
    assert one.top == CallCounts(0.0, 0.0, 0.0) and one.top is not QueueWindow().top


def test_the_judge_is_told_what_was_counted():
    window = QueueWindow(1, 2, 3, 4, 5.0, 6, 7, CallCounts(10, 4, 200))
    seen = window.evidence(CallCounts(9, 3, 90), 8.0, 9)
    assert (seen.blocked, seen.lost_ns, seen.on_cpu, seen.on_cpu_lost_ns) == (1, 2, 4, 5.0)
    assert (seen.on_cpu_span_ns, seen.span_ns, seen.baseline_ns, seen.longest_on_cpu_ns) == (6, 7, 8.0, 9)
    assert (seen.top_calls, seen.top_slow, seen.top_mean_ns) == (10, 4, 20)
    assert (seen.room_odds, seen.room_mean_ns) == (0.5, 10)


def test_odds_are_slow_ones_for_each_fast_one():
    assert [CallCounts(calls, slow).odds for calls, slow in ((4, 3), (3, 3), (0, 0), (8, 2))] == [
        3.0,
        math.inf,
        0.0,
        1 / 3,
    ]
