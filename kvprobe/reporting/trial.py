"""What `kvprobe try` measured: a program with and without each change, by turns, and what may be called a gain.

A gain is named only where the Mann-Whitney U test, exact and two-sided, rejects at 5% that the rounds with a change and
those without it are of one kind. Savings are given as the median over rounds of (without - with), with the range.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvprobe.output.recorded import MeasuredJson, TriedJson
from kvprobe.recordings.model import SUBMITTING, Memory, Recording

if TYPE_CHECKING:
    from kvprobe.diagnosis.finding import Change

__all__ = ["LEAST_ROUNDS", "TEST", "TrialFigure", "TrialResult", "TrialRun", "blocked_ns", "compared", "u_test"]

TEST = "Mann-Whitney U, exact, two-sided, at 5%"
SURE = 0.05
LEAST_ROUNDS = 4  # with three rounds a side, the exact test never goes below 10%
EXACT = 8  # rounds a side up to which every way to deal them out is counted


@dataclass(frozen=True)
class TrialRun:
    """One run of the command: its wall time, the host time lost in submissions, and a figure of its own."""

    wall_ns: int
    blocked_ns: int
    figure: float | None = None


@dataclass(frozen=True)
class TrialFigure:
    """One figure without and with a change, round by round.

    Attributes:
        without, given: the figure of each round.
        saved: median over rounds of what the change takes off; `low` and `high` are the least and the most.
        p: of the test, as TEST says.
        verdict: "less" or "more" where the test tells the two apart, else "within the noise".
    """

    without: tuple[float, ...]
    given: tuple[float, ...]
    saved: float
    low: float
    high: float
    p: float
    verdict: Literal["less", "more", "within the noise"]

    def to_json(self) -> MeasuredJson:
        """All fields; `with` is what the change gave."""
        return {
            "without": list(self.without),
            "with": list(self.given),
            "saved_median": self.saved,
            "saved_low": self.low,
            "saved_high": self.high,
            "p": self.p,
            "verdict": self.verdict,
        }


@dataclass
class TrialResult:
    """One change and what it did; `figure` where the command prints one."""

    change: Change
    predicted_ns: int | None
    blocked: TrialFigure
    wall: TrialFigure
    figure: TrialFigure | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> TriedJson:
        """All fields; times in ns."""
        predicted = self.predicted_ns
        return {
            "change": {**self.change.to_json(), "predicted_saving_ns": predicted},
            "measured_over_predicted": self.blocked.saved / predicted if predicted else None,
            "blocked_ns": self.blocked.to_json(),
            "wall_ns": self.wall.to_json(),
            "figure": self.figure.to_json() if self.figure else None,
        }


def blocked_ns(recording: Recording, usual_ns: dict[str, float]) -> tuple[int, dict[str, float]]:
    """Host time that all threads lost in submissions: what these took beyond what they cost while slots are free.

    A submission counts as slow from 3 times its usual cost plus 1 µs. Pageable copies are left out.

    Args:
        recording: one run.
        usual_ns: cost of each call by name, of other runs of the same program: the least of all runs is taken.

    Returns:
        Time lost, ns; the usual costs with this run's added.
    """
    calls = recording.calls
    rows = np.flatnonzero(np.isin(calls["kind"], SUBMITTING) & (calls["memory"] != Memory.PAGEABLE))
    duration, name = (calls["end_ns"] - calls["start_ns"])[rows], calls["name"][rows]
    lost, usual = 0.0, dict(usual_ns)
    for one in np.unique(name):
        mine = duration[name == one]
        text = recording.text(int(one))
        usual[text] = min(float(np.percentile(mine, 10)), usual.get(text, np.inf))
        slow = mine > 3 * usual[text] + 1_000
        lost += float((mine[slow] - usual[text]).sum())
    return int(lost), usual


def u_test(one: Sequence[float], two: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney U test; exact (ties by mid-ranks) to eight a side, else the normal's."""
    ranks = _ranks([*one, *two])
    n, m = len(one), len(two)
    middle = n * (n + m + 1) / 2
    off = abs(sum(ranks[:n]) - middle)
    if max(n, m) <= EXACT:
        sums = [abs(sum(ranks[i] for i in chosen) - middle) for chosen in combinations(range(n + m), n)]
        return sum(other >= off - 1e-9 for other in sums) / len(sums)
    deviation = (n * m * (n + m + 1) / 12) ** 0.5
    return 2 * (1 - statistics.NormalDist().cdf(max(off - 0.5, 0.0) / deviation))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: i for i, value in reversed(list(enumerate(ordered)))}
    count = {value: ordered.count(value) for value in first}
    return [first[value] + (count[value] + 1) / 2 for value in values]


def compared(without: Sequence[float], given: Sequence[float]) -> TrialFigure:
    """The same figure in rounds without and with a change, paired by round."""
    saved = [a - b for a, b in zip(without, given, strict=True)]
    p = u_test(without, given)
    middle = statistics.median(saved)
    verdict: Literal["less", "more", "within the noise"] = "within the noise"
    if p <= SURE and middle:
        verdict = "less" if middle > 0 else "more"
    return TrialFigure(tuple(without), tuple(given), middle, min(saved), max(saved), p, verdict)
