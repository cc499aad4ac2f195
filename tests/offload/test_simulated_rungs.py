"""The simulation that auto is measured in: the same for the same seed, true to the figures, and auto's regret in it."""

from __future__ import annotations

from typing import Any

import pytest

from kvprobe.offload.auto import Auto
from tests.offload.simulated_rungs import (
    BASELINE_NS,
    DEPTH,
    LOOP,
    POOLED,
    Device,
    Server,
    Turn,
    Workload,
    cost,
    figures,
    quantile,
    row_ns,
    simulate,
    workload,
)


def plain(copies: int = 64, size: int = 65536, count: int = 1, kind: str = "loop") -> Workload:
    """Transfers of one shape, whose costs are those of calibration."""
    turn = Turn(copies, size, 10_000_000, False, 0, 1.0, 1.0, 0, 1.0)
    one = dict.fromkeys((LOOP, POOLED), 1.0)
    return Workload(kind, "h2d", [LOOP, POOLED], [turn] * count, dict(one), dict(one), dict(one), {}, (2000.0, 800.0))


def test_a_seed_is_the_same_workload_and_the_same_outcome() -> None:
    assert workload(5) == workload(5) != workload(6)
    assert simulate(5, Auto) == simulate(5, Auto)


def test_figures_are_those_of_the_reports() -> None:
    known = figures()
    assert known.loop_ns[0] == BASELINE_NS < known.loop_ns[1] < 4000
    assert 50 < 8192 * 65536 / row_ns("h2d", "batch", 65536, 8192) < 56  # GB/s
    assert 3 * row_ns("h2d", "batch", 65536, 8192) < row_ns("h2d", "loop", 65536, 8192)
    assert known.handed_ns["engine"][0] < 10_000 < known.handed_ns["adapter"][0]


def test_a_loop_of_more_copies_than_a_queue_takes_holds_its_caller_until_the_last_has_a_slot() -> None:
    work, few, many = plain(), plain(DEPTH // 2).turns[0], plain(8 * DEPTH).turns[0]
    assert cost(work, few, LOOP, 0, Device(), 0).submit_ns == 2000 * few.copies
    took = cost(work, many, LOOP, 0, Device(), 0)
    assert took.submit_ns == pytest.approx(took.copy_ns * 7 / 8, rel=0.01) and took.submit_ns > 2000 * many.copies
    assert cost(work, many, POOLED, 0, Device(), 0).submit_ns < took.submit_ns / 10


def test_what_is_outstanding_goes_down_as_the_device_copies() -> None:
    device = Device()
    device.take(0, 100, 10)
    device.take(100, 200, 10)
    assert [device.outstanding(now) for now in (0, 50, 100, 150, 200)] == [20, 15, 10, 5, 0]


def test_an_auto_that_may_change_nothing_costs_what_the_server_costs_without_it() -> None:
    def inactive(*given: Any, **settings: Any) -> Auto:
        return Auto(*given, active=False, **settings)

    for seed in range(10):
        outcome = simulate(seed, inactive)
        assert (outcome.harm, outcome.auto.changes) == (0, 0)


def test_a_rung_that_fails_is_refused_and_paid_for() -> None:
    work = plain(512, count=200)
    sound = Server(work, Auto).play()
    work.fails_at[POOLED] = 50
    broken = Server(work, Auto).play()
    assert [what for what, *_ in sound.log] == ["switch", "keep"]
    assert [what for what, *_ in broken.log][:3] == ["switch", "keep", "refuse"]
    assert broken.cost_ns > sound.cost_ns


def test_work_that_another_rung_moves_much_faster_costs_little_more_than_on_that_rung() -> None:
    work = plain(512, count=1000)
    best = Server(work, None, POOLED).play().cost_ns
    assert best < Server(work, Auto).play().cost_ns < 1.05 * best < Server(work, None, LOOP).play().cost_ns


def test_regret_over_random_workloads() -> None:
    """Of the first 150; `benchmarks/auto_regret.py` plays ten thousand, and `reports/auto-regret.txt` has its table."""
    outcomes = [simulate(seed, Auto) for seed in range(150)]
    regret, harm = sorted(one.regret for one in outcomes), sorted(one.harm for one in outcomes)
    assert quantile(regret, 0.5) < 0.03
    assert quantile(harm, 0.95) < 0.2
    assert max(one.auto.changes for one in outcomes) <= 20
