"""What `kvprobe try` may call a gain, and what it counts as time blocked."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.recordings.model import CallKind, Memory, Recording, Source, Table
from kvprobe.reporting.trial import blocked_ns, compared, u_test


@pytest.mark.parametrize(
    ("one", "two", "p"),
    [
        ((1, 2, 3, 4), (5, 6, 7, 8), 2 / 70),
        ((1, 2, 3), (4, 5, 6), 2 / 20),
        ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10), 2 / 252),
        ((1, 3, 5, 7), (2, 4, 6, 8), 48 / 70),  # U = 6: 24 of 70 deals are as low
        ((1, 1, 1, 1), (1, 1, 1, 1), 1.0),
    ],
)
def test_p_is_that_of_the_published_tables(one, two, p):
    assert u_test(one, two) == pytest.approx(p)
    assert u_test(two, one) == pytest.approx(p)


def test_many_rounds_agree_with_the_exact_test():
    low, high = list(range(9)), [value + 4.5 for value in range(9)]
    assert u_test(low, high) == pytest.approx(0.0152, abs=0.01)  # exact, by enumeration of all deals


def test_what_three_rounds_show_is_never_a_gain():
    assert compared((10, 11, 12), (1, 2, 3)).verdict == "within the noise"


def test_a_gain_needs_rounds_that_can_be_told_apart():
    assert compared((10, 11, 12, 13), (1, 2, 3, 4)).verdict == "less"
    assert compared((1, 2, 3, 4), (10, 11, 12, 13)).verdict == "more"
    noisy = compared((10, 30, 12, 9), (1, 2, 31, 4))
    assert (noisy.verdict, noisy.low, noisy.high) == ("within the noise", -19, 28)


def test_blocked_time_is_what_submissions_take_beyond_their_usual_cost():
    durations = [1_000] * 50 + [1_500] + [5_001_000, 1_001_000, 9_000_000]
    start = np.arange(len(durations)) * 10_000_000
    memory = [Memory.PINNED] * 53 + [Memory.PAGEABLE]
    calls = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + durations,
            "name": [1] * len(start),
            "memory": memory,
            "kind": [CallKind.COPY] * len(start),
        },
    )
    recording = Recording([Source("run", "kvprobe")], {"calls": calls}, names=["", "cudaMemcpyAsync"])
    assert blocked_ns(recording, {}) == (6_000_000, {"cudaMemcpyAsync": 1_000.0})
    # a program of which every call waits is known by its other runs
    slow = Recording([Source("run", "kvprobe")], {"calls": calls.where(np.array([51, 52]))}, names=recording.names)
    assert blocked_ns(slow, {"cudaMemcpyAsync": 1_000.0})[0] == 6_000_000
