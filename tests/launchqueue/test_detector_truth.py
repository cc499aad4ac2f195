"""The detector against the embedded runtime's own count of blocked calls; benchmarks/detector_truth.py at full size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvprobe.launchqueue import Detector, QueueLimits, Slowness, SubmissionRun

LIMITS = QueueLimits(depth=1021, channels=4, capacity=4021, baseline_ns=1000, p99_ns=1500)


@pytest.fixture(scope="module")
def truth() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "detector_truth.py"
    spec = importlib.util.spec_from_file_location("detector_truth", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["detector_truth"] = module  # its burner processes import it by name
    spec.loader.exec_module(module)
    return module


def test_no_alarm_among_healthy_copies_with_pauses_and_pageable_memory(truth: ModuleType) -> None:
    outcome = truth.healthy(10_000, seed=7, burners=0)
    assert outcome["copies"] >= 10_000
    assert outcome["pauses"] > 0
    assert outcome["alarms"] == []
    assert "pageable memory" in outcome["said"]


@pytest.mark.slow
def test_every_seeded_saturation_is_named(truth: ModuleType) -> None:
    outcome = truth.saturations(8, seed=11)
    assert outcome["saturations"] == 8
    assert outcome["misses"] == []
    assert set(outcome["kinds"]) == {"draining", "gate", "gate, then draining"}


def _run(outstanding: int, **seen: Any) -> SubmissionRun:
    return SubmissionRun(0x10, 1, outstanding, seen.pop("submitted", 16), 0, seen.pop("end_ns", 100_000), **seen)


def test_slow_calls_with_room_in_the_queue_are_not_saturation() -> None:
    detector = Detector(LIMITS)
    slow = {"blocked": 16, "blocked_ns": 100_000, "first_blocked": 0, "longest_ns": 9_000}
    assert detector.observe(_run(300, **slow)) is Slowness.CANNOT_TELL
    assert "300 operations were outstanding of 1021" in detector.reason
    assert detector.observe(_run(300, **slow, preempted=16, preempted_ns=100_000)) is Slowness.PREEMPTED
    assert not detector.saturations


def test_a_thread_that_lost_the_cpu_at_the_ceiling_is_not_saturation() -> None:
    detector = Detector(LIMITS)
    seen = _run(
        1010,
        blocked=1,
        blocked_ns=3_000_000,
        first_blocked=3,
        longest_ns=3_000_000,
        preempted=1,
        preempted_ns=3_000_000,
        end_ns=3_020_000,
        fast=15,
        fast_ns=15_000,
    )
    assert detector.observe(seen) is Slowness.PREEMPTED
    assert not detector.saturations


def test_a_few_slow_calls_among_many_fast_ones_at_the_ceiling_are_too_few() -> None:
    detector = Detector(LIMITS)
    seen = _run(
        1010,
        submitted=200,
        blocked=5,
        blocked_ns=15_000,
        first_blocked=3,
        longest_ns=3_000,
        fast=195,
        fast_ns=195_000,
        end_ns=210_000,
    )
    assert detector.observe(seen) is Slowness.NONE
    assert not detector.saturations


def test_calls_of_one_copys_time_at_the_ceiling_add_up_over_small_transfers() -> None:
    detector = Detector(LIMITS)
    said = [
        detector.observe(
            _run(1015, submitted=2, blocked=2, blocked_ns=6_000, first_blocked=0, end_ns=6_000, longest_ns=3_000)
        )
        for _ in range(3)
    ]
    assert said[:2] == [Slowness.NONE, Slowness.SATURATION]
    found = detector.saturations[0]
    assert (found.depth, found.blocked_calls, found.lost_ns) == (1015, 4, 8_000)


def test_one_call_as_long_as_a_forward_pass_at_the_ceiling_is_enough() -> None:
    detector = Detector(LIMITS)
    seen = _run(
        1021, submitted=1, blocked=1, blocked_ns=28_000_000, first_blocked=0, longest_ns=28_000_000, end_ns=28_000_000
    )
    assert detector.observe(seen) is Slowness.SATURATION
    assert "the longest took 28.0 ms" in detector.reason


def test_one_lost_time_slice_in_a_short_calibration_does_not_hide_a_full_queue() -> None:
    detector = Detector(QueueLimits(depth=64, channels=4, capacity=232, baseline_ns=1000, p99_ns=59_000))
    assert detector.threshold_ns <= 2_400  # what a full queue costs at 4 KiB


def test_the_baseline_is_learned_from_calls_with_room_alone() -> None:
    detector = Detector(LIMITS)
    for _ in range(100):
        detector.observe(_run(1015, submitted=64, fast=64, fast_ns=64 * 1_700))
    assert detector.baseline_ns == 1000
    for _ in range(100):
        detector.observe(_run(100, submitted=64, fast=64, fast_ns=64 * 1_200))
    assert 1150 < detector.baseline_ns <= 1200


def test_the_baseline_stays_near_the_calibrated_one_however_slow_the_calls_are() -> None:
    detector = Detector(LIMITS)
    for _ in range(1_000):
        detector.observe(_run(100, submitted=64, fast=64, fast_ns=64 * 1_790))
    assert detector.baseline_ns == 1250
    assert detector.threshold_ns <= 2_000  # what a full queue costs at 4 KiB is 2.4 times the baseline


def _load(outstanding: int, blocked: int, at_ns: int, of: int = 64) -> SubmissionRun:
    """A load of small blocks of which a few met a full queue, at 2.5 times what a call costs."""
    fast, slow = (of - blocked) * 1_000, blocked * 2_500
    seen = {"fast": of - blocked, "fast_ns": fast, "blocked": blocked, "blocked_ns": slow}
    if blocked:
        seen |= {"first_blocked": 3, "first_blocked_ns": at_ns + 3_000, "longest_ns": 2_500}
    return SubmissionRun(0x10, 1, outstanding, of, at_ns, at_ns + fast + slow, **seen)


@pytest.mark.parametrize("blocked", [8, 12, 16])
@pytest.mark.parametrize("between_us", [0, 200, 2_000])
def test_small_blocks_of_which_few_meet_a_full_queue_are_noticed_within_50_ms(blocked: int, between_us: int) -> None:
    detector, now = Detector(LIMITS), 0
    for _ in range(400):
        if detector.observe(_load(1000, blocked, now)) is Slowness.SATURATION:
            break
        now += 100_000 + between_us * 1_000
    assert len(detector.saturations) == 1
    assert detector.saturations[0].noticed_ns - detector.saturations[0].onset_ns <= 50_000_000


def test_a_queue_less_deep_than_calibrated_is_told_by_completions_that_keep_pace() -> None:
    detector, now = Detector(LIMITS), 0
    for number in range(400):
        if detector.observe(_load(880 + number % 3, 10, now)) is Slowness.SATURATION:
            break
        now += 200_000
    assert len(detector.saturations) == 1
    assert detector.saturations[0].noticed_ns <= 50_000_000


def test_calls_as_slow_with_room_as_at_the_top_are_not_the_queues() -> None:
    detector, now = Detector(LIMITS), 0
    for number in range(2_000):  # the count rises and falls, a fifth of the calls is slow wherever it stands
        detector.observe(_load(64 * (number % 16), 13, now))
        now += 100_000
    assert not detector.saturations


def _costly(outstanding: int, at_ns: int, fast_ns: int, slow: int, slow_ns: int, of: int = 64) -> SubmissionRun:
    took = (of - slow) * fast_ns + slow * slow_ns
    seen = {"fast": of - slow, "fast_ns": (of - slow) * fast_ns, "blocked": slow, "blocked_ns": slow * slow_ns}
    seen |= {"first_blocked": 0, "first_blocked_ns": at_ns, "longest_ns": slow_ns}
    return SubmissionRun(0x10, 1, outstanding, of, at_ns, at_ns + took, **seen)


@pytest.mark.parametrize(("fast_ns", "named"), [(1_700, False), (1_900, True)])
def test_calls_with_room_that_are_slow_at_times_do_not_hide_a_full_queue(fast_ns: int, named: bool) -> None:
    detector, now = Detector(LIMITS), 0
    for outstanding in range(0, 256, 64):
        detector.observe(_costly(outstanding, now, 1_200, 13, 2_000))  # 1,360 ns as a mean
    while now < 50_000_000 and not detector.saturations:  # those at the top lose less than a quarter of their time
        detector.observe(_costly(1015, now, fast_ns, 20, 2_400))
        now += 200_000
    assert bool(detector.saturations) is named


def test_calls_that_are_dearer_everywhere_fill_no_queue() -> None:
    detector, now = Detector(LIMITS), 0
    for number in range(2_000):
        detector.observe(_costly(64 * (number % 16), now, 1_700, 16, 2_400))
        now += 200_000
    assert not detector.saturations


def test_a_queue_that_is_being_filled_has_room() -> None:
    detector, now = Detector(LIMITS), 0
    for number in range(1_600):
        detector.observe(_load(500 + 32 * (number % 15), 8 if number % 4 == 0 else 0, now, of=32))
        now += 100_000
    assert not detector.saturations


def test_pageable_memory_is_named_whatever_the_queue_holds() -> None:
    detector = Detector(LIMITS)
    seen = _run(1021, blocked=16, blocked_ns=160_000, first_blocked=0, longest_ns=10_000, pageable=True)
    assert detector.observe(seen) is Slowness.PAGEABLE
    assert detector.losses()["pageable memory"] == 144_000
