"""Each figure of auto has its experiment: a claim that holds with it, and no more once the figure is taken away.

Auto's own are ten, of which two follow from others; its users bring one each, what their other rungs take of a caller.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from kvprobe.instrument import transfers
from kvprobe.offload import auto as module
from kvprobe.offload import engine, rungs
from kvprobe.offload.auto import TRIAL, Auto
from kvprobe.offload.rungs import Rung, Sample

OWN, POOLED = Rung("shared", "loop"), Rung("pooled", "auto")
MS = 1_000_000


class Path:
    """A server's path under auto: transfers of 500 copies and 32 MiB, 10 ms apart."""

    def __init__(self, slow_ns: int = 100_000) -> None:
        """On the base; the other rung is known to take so long of a caller."""
        self.now_ns, self.log = 1, list[str]()
        self.auto = Auto([OWN, POOLED], self.decided, slow_ns=slow_ns, baseline_ns=1000, now=lambda: self.now_ns)

    def decided(self, what: str, *_: Any, **__: Any) -> None:
        """Auto's call."""
        self.log.append(what)

    def transfer(self, submit_ns: int, copy_ns: int = 0, expected_ns: int = 0) -> None:
        """One that takes so long of the host and of the device, on whatever rung stands."""
        self.now_ns += 10 * MS
        sample = Sample(500, submit_ns, 32 << 20, self.auto.rung, end_ns=self.now_ns, expected_ns=expected_ns)
        self.auto.submitted(sample)
        if copy_ns:
            sample.copy_ns = copy_ns
            self.auto.completed(sample)

    def costs(self, own: tuple[int, int], handed: tuple[int, int], count: int) -> list[str]:
        """So many transfers that cost (submit, copy) on the base, and on the other rung; what was decided."""
        for _ in range(count):
            self.transfer(*(own if self.auto.rung == OWN else handed))
        return self.log


def one_hiccup_changes_nothing() -> bool:
    """EVIDENCE: a transfer of 10 ms among healthy ones is chance."""
    path = Path()
    for number in range(100):
        path.transfer(10 * MS if number == 50 else 20_000)
    return path.log == []


def a_little_that_is_lost_changes_nothing() -> bool:
    """LOSS_NS: a few copies three times as slow as they could be have lost less than a trial may cost."""
    path = Path()
    for number in range(60):
        path.transfer(20_000, *((160_000, 50_000) if 20 <= number < 24 else (50_000, 50_000)))
    return path.log == []


def a_gain_within_the_noise_is_not_kept() -> bool:
    """MIN_GAIN: a twentieth."""
    return Path().costs((MS, 0), (MS - MS // 20, 0), 20)[:2] == ["switch", "rollback"]


def copies_that_suffer_are_not_paid_for_by_submission() -> bool:
    """MOST_COPY_COST: a caller saves a millisecond, and each load takes twice as long."""
    return Path().costs((MS, MS // 2), (20_000, MS), 30)[:2] == ["switch", "rollback"]


def one_slow_transfer_does_not_end_a_trial() -> bool:
    """TRIAL: the first that counts met something else; the others are ten times cheaper."""
    path = Path()
    while path.auto.rung == OWN:
        path.transfer(MS)
    for submit_ns in (100_000, 2 * MS, *[100_000] * 7):
        path.transfer(submit_ns)
    return path.log == ["switch", "keep"]


def a_trial_that_clearly_loses_is_cut_short() -> bool:
    """LOST: each transfer of it costs its caller 20 ms instead of one."""
    path, tried = Path(), 0
    while len(path.log) < 2:
        tried += path.auto.rung == POOLED
        path.transfer(MS if path.auto.rung == OWN else 20 * MS)
    return path.log == ["switch", "rollback"] and tried < TRIAL


def what_was_long_ago_counts_little() -> bool:
    """RECENT: a copy cost little for a thousand transfers, and since a short while more than on the other rung."""
    path = Path()
    path.costs((20_000, 0), (0, 0), 1000)
    return path.costs((MS, 0), (24_000, 0), 30)[:2] == ["switch", "keep"]


def a_kept_rung_is_judged_now_and_then() -> bool:
    """LOOK_NS: who stands on it pays for a window of eight in ten, not for all of them."""
    path = Path()
    path.costs((MS, 0), (20_000, 0), 30)
    judged = 0
    for _ in range(1000):
        path.now_ns += MS
        judged += path.auto.looks(path.now_ns)
        path.auto.submitted(Sample(500, 20_000, 32 << 20, POOLED, end_ns=path.now_ns))
    return path.log == ["switch", "keep"] and judged < 200


def what_did_not_help_is_not_tried_all_the_time() -> bool:
    """COOL_DOWN_NS: half a minute of work that the other rung makes dearer costs one trial."""
    return Path().costs((MS, 0), (2 * MS, 0), 3000).count("switch") == 1


def with_nothing_to_change_few_transfers_are_watched() -> bool:
    """REST: watching one costs its caller microseconds, and nothing was slow."""
    path, watched = Path(), 0
    for _ in range(1600):
        if path.auto.watch():
            watched += 1
            path.transfer(20_000)
    return watched < 160


@pytest.mark.parametrize(
    ("name", "nothing", "holds"),
    [
        ("EVIDENCE", 0.0, one_hiccup_changes_nothing),
        ("LOSS_NS", 0, a_little_that_is_lost_changes_nothing),
        ("MIN_GAIN", 1.0, a_gain_within_the_noise_is_not_kept),
        ("MOST_COPY_COST", math.inf, copies_that_suffer_are_not_paid_for_by_submission),
        ("TRIAL", 1, one_slow_transfer_does_not_end_a_trial),
        ("LOST", TRIAL, a_trial_that_clearly_loses_is_cut_short),
        ("RECENT", math.inf, what_was_long_ago_counts_little),
        ("LOOK_NS", 0, a_kept_rung_is_judged_now_and_then),
        ("COOL_DOWN_NS", 0, what_did_not_help_is_not_tried_all_the_time),
        ("REST", 1, with_nothing_to_change_few_transfers_are_watched),
    ],
)
def test_without_a_figure_its_experiment_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, nothing: float, holds: Callable[[], bool]
) -> None:
    assert holds()
    monkeypatch.setattr(module, name, nothing)
    assert not holds()


@pytest.mark.parametrize("takes_ns", [engine.HAND_OVER_NS, transfers.SLOW_NS])
def test_what_the_other_rung_takes_as_well_is_no_loss(takes_ns: int) -> None:
    """A path does nothing but transfers, each of which takes of its caller what it would take there."""
    for known, log in ((takes_ns, []), (0, ["switch"])):
        path = Path(known)
        for _ in range(200):
            path.now_ns += 2 * takes_ns - 10 * MS
            path.transfer(takes_ns)
        assert path.log[:1] == log


def test_there_is_no_figure_without_an_experiment() -> None:
    figures = {name for name, value in vars(module).items() if name.isupper() and isinstance(value, int | float)}
    imported = {"LEAST_SEEN", "NOTABLE_SHARE", "SLOWER_TIMES"}
    given = next(mark for mark in test_without_a_figure_its_experiment_fails.pytestmark)
    assert figures - imported == {name for name, *_ in given.args[1]}


@pytest.mark.parametrize("judging", [module, rungs])
def test_no_figure_is_without_a_name(judging: Any) -> None:
    """What doubles or halves does so; the others are units, or keep a divisor from being zero."""
    tree = ast.parse(inspect.getsource(judging))
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    numbers = {n.value for body in bodies for n in ast.walk(body) if isinstance(n, ast.Constant)}
    assert {n for n in numbers if type(n) in (int, float)} <= {0, 1, 2, 1e3, 1e6, 1e-3, 1e-9}
