"""Two recordings beside each other: which findings went and came, and which calls became faster or slower.

Calls that follow each other resemble each other, so a confidence interval that takes them as independent is far too
narrow. Here whole stretches of a recording are drawn again (a block bootstrap): each sample is cut into stretches of
equal number, each stretch becomes a histogram of 1% wide bins, and quantiles are read from sums of drawn histograms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvprobe.account.samples import DRAWS
from kvprobe.diagnosis.finding import SEVERITIES
from kvprobe.output.recorded import CallChangeJson, FindingChangeJson
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import SUBMITTING, CallKind, Recording
from kvprobe.reporting.charts import quantiles
from kvprobe.reporting.units import TIMES_SIGN

if TYPE_CHECKING:
    from kvprobe.diagnosis.finding import Finding

__all__ = [
    "VERDICTS",
    "FindingChange",
    "Shift",
    "SubmissionCost",
    "compare_calls",
    "compare_findings",
    "interval",
    "shift",
    "submission_cost",
]

Array = npt.NDArray[Any]
Small = tuple[int, float]  # ns, and the share that it is

BLOCKS = 40
LEAST = 40  # calls on each side: below, a quantile says nothing
VERDICTS = {"slower": "slower", "faster": "faster", "same": "", "unsure": "unsure"}  # beside the change itself
LEAST_MOVED = 0.002  # of the window: what a finding cost, is no less or more by a smaller part of it
HARDLY = 0.1  # of a finding's share: where the other side has no more than that, the finding is gone or new
NOTABLE = 0.05  # smaller changes are not called a change, however certain
_COMPARED = (*SUBMITTING, CallKind.COPY_SYNC, CallKind.SYNC, CallKind.ALLOC)


@dataclass(frozen=True)
class Shift:
    """How one figure moved: after over before, with a 95% interval; `verdict` "slower", "faster", "same", "unsure"."""

    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class CallChange:
    """One call in both recordings; median and p99 are of the host time inside it, nanoseconds."""

    name: str
    calls_before: int
    calls_after: int
    median: Shift
    p99: Shift

    def to_json(self) -> CallChangeJson:
        """All fields."""
        return cast("CallChangeJson", asdict(self))


@dataclass(frozen=True)
class SubmissionCost:
    """How the usual cost of a submission moved, and what share of the recorded time the difference is."""

    moved: Shift
    share: float


@dataclass(frozen=True)
class FindingChange:
    """One cause: "gone", "new", "less", "more" or "same", by what it cost (`Finding.cost_share`).

    "undecided" where the recording that should prove it less or more is too poor to prove anything. `severity` is the
    worse and `confidence` the weaker of the two findings'. `below_limit` is the side, "before" or "after", that has no
    finding of this cause and yet a cost, too small for one; "" none. A finding is new or gone where that is `HARDLY`
    anything, else more or less.
    """

    cause: str
    what: str
    title: str
    lost_before_ns: int
    lost_after_ns: int
    share_before: float
    share_after: float
    severity: str = "info"
    confidence: str = "likely"
    below_limit: str = ""

    def to_json(self) -> FindingChangeJson:
        """All fields."""
        return cast("FindingChangeJson", asdict(self))


def compare_findings(
    before: Sequence[Finding],
    after: Sequence[Finding],
    before_tells: bool = True,
    after_tells: bool = True,
    small_before: Mapping[str, Small] | None = None,
    small_after: Mapping[str, Small] | None = None,
) -> list[FindingChange]:
    """Matches findings by cause, most time (as a share of the time of its threads) first; abstentions are left out.

    Args:
        before: findings of the one recording; `after` of the other.
        after: see there.
        before_tells: it says enough to prove what is not in it; `after_tells` likewise.
        after_tells: see there.
        small_before: ns and share of what a cause cost there although that is too little for a finding, where known.
        small_after: likewise.
    """
    old = {one.cause: one for one in before if one.confidence != "cannot tell"}
    new = {one.cause: one for one in after if one.confidence != "cannot tell"}
    out = []
    for cause in dict.fromkeys([*old, *new]):
        one, two = old.get(cause), new.get(cause)
        costs = _cost(one, cause, small_before or {}), _cost(two, cause, small_after or {})
        lost, shares = (costs[0][0], costs[1][0]), (costs[0][1], costs[1][1])
        below = "before" if one is None and lost[0] else "after" if two is None and lost[1] else ""
        if (one is None or two is None) and min(shares) <= HARDLY * max(shares):
            what = "gone" if two is None else "new"
        elif abs(shares[1] - shares[0]) <= max(0.1 * max(shares), LEAST_MOVED):
            what = "same"
        else:
            what = "less" if shares[1] < shares[0] else "more"
        if (what in ("gone", "less") and not after_tells) or (what in ("new", "more") and not before_tells):
            what = "undecided"
        sides = [side for side in (two, one) if side]
        worst = min((side.severity for side in sides), key=SEVERITIES.index)
        sure = "certain" if all(side.confidence == "certain" for side in sides) else "likely"
        out.append(FindingChange(cause, what, sides[0].title, *lost, *shares, worst, sure, below))
    return sorted(out, key=lambda change: -max(change.share_before, change.share_after))


def _cost(finding: Finding | None, cause: str, small: Mapping[str, Small]) -> Small:
    """The ns that a cause lost and its share: of its finding, or what is known to be too little for one."""
    return (finding.lost_ns, finding.cost_share) if finding else small.get(cause, (0, 0.0))


def submission_cost(before: Recording, after: Recording, spans_ns: tuple[int, int]) -> SubmissionCost | None:
    """What the submissions that both make usually cost: medians by call, in the numbers that both hold together.

    None where no submitting call occurs often enough in both. `spans_ns` is the time that each recording covers; the
    share is one of the time of all threads that submit.
    """
    one, two = _durations(before, SUBMITTING), _durations(after, SUBMITTING)
    names = [name for name in one if name in two and min(len(one[name]), len(two[name])) >= LEAST]
    if not names:
        return None
    rng = np.random.default_rng(0)
    made = {name: len(one[name]) + len(two[name]) for name in names}
    sums, drawn = [0.0, 0.0], [np.zeros(DRAWS), np.zeros(DRAWS)]
    for name in names:
        low_ns = float(min(one[name].min(), two[name].min()))
        for side, sample in enumerate((one[name], two[name])):
            sums[side] += made[name] * quantiles(sample, 0.5)[0]
            drawn[side] += made[name] * _draw(sample, 0.5, low_ns, rng)
    calls = sum(made.values())
    moved = _shift(sums[0] / calls, sums[1] / calls, drawn[1] / drawn[0])
    time_ns = sum(span * _submitters(one) for span, one in zip(spans_ns, (before, after), strict=True))
    return SubmissionCost(moved, abs(sums[1] - sums[0]) / max(time_ns, 1))


def _submitters(recording: Recording) -> int:
    """How many threads submit."""
    calls = recording.calls
    rows = among(calls["kind"], SUBMITTING)
    return len(np.unique(np.stack([calls["process"][rows], calls["thread"][rows]]), axis=1).T)


def compare_calls(before: Recording, after: Recording, seed: int = 0) -> list[CallChange]:
    """Host time of every submitting, waiting and allocating call that both recordings hold often enough."""
    one, two = _durations(before, _COMPARED), _durations(after, _COMPARED)
    out = []
    for name in one:
        if name in two and min(len(one[name]), len(two[name])) >= LEAST:
            rng = np.random.default_rng(seed)
            x, y = one[name], two[name]
            out.append(CallChange(name, len(x), len(y), shift(x, y, 0.5, rng), shift(x, y, 0.99, rng)))
    return sorted(out, key=lambda change: -change.calls_before * change.median.before)


def _durations(recording: Recording, kinds: Sequence[CallKind]) -> dict[str, Array]:
    calls = recording.calls
    rows = np.flatnonzero(among(calls["kind"], kinds))
    name = calls["name"][rows]
    spent = np.maximum(calls["end_ns"][rows] - calls["start_ns"][rows], 1)
    return {recording.text(one): spent[name == one] for one in np.unique(name).tolist()}


def shift(before: Array, after: Array, at: float, rng: np.random.Generator) -> Shift:
    """How the quantile `at` moved from one sample (in order of time) to the other."""
    one, two = quantiles(before, at)[0], quantiles(after, at)[0]
    low_ns = float(min(before.min(), after.min()))
    drawn = [_draw(sample, at, low_ns, rng) for sample in (before, after)]
    return _shift(one, two, drawn[1] / drawn[0])


def interval(moved: Shift) -> str:
    """The interval of a change, in the same words as the change; of an unchanged time, in percent of it."""
    if moved.verdict == "same":
        return f"{moved.low - 1:+.0%} to {moved.high - 1:+.0%}"
    low, high = (moved.low, moved.high) if moved.ratio >= 1 else (1 / moved.high, 1 / max(moved.low, 1e-9))
    return f"{low:,.2f}{TIMES_SIGN} to {high:,.2f}{TIMES_SIGN}"


def _shift(one: float, two: float, ratios: Array) -> Shift:
    """The verdict on a figure that moved from `one` to `two`, by the ratios of drawn samples."""
    low, high = (float(value) for value in np.quantile(ratios, (0.025, 0.975)))
    ratio = two / max(one, 1.0)
    if low > 1 and ratio > 1 + NOTABLE:
        verdict = "slower"
    elif high < 1 and ratio < 1 - NOTABLE:
        verdict = "faster"
    elif low > 1 - 2 * NOTABLE and high < 1 + 2 * NOTABLE:
        verdict = "same"
    else:
        verdict = "unsure"
    return Shift(one, two, ratio, min(low, ratio), max(high, ratio), verdict)


def _draw(sample: Array, at: float, low_ns: float, rng: np.random.Generator) -> Array:
    """Quantiles of DRAWS samples, each put together from stretches of this one."""
    blocks = min(BLOCKS, len(sample))
    bins = (np.log(np.maximum(sample, 1) / max(low_ns, 1.0)) * 100).astype(np.int64)
    block = np.arange(len(sample)) * blocks // len(sample)
    width = int(bins.max()) + 1
    counts = np.bincount(block * width + bins, minlength=blocks * width).reshape(blocks, width)
    used = np.flatnonzero(counts.sum(axis=0))
    weights = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
    sums = np.cumsum(weights @ counts[:, used], axis=1)
    place = (sums >= np.maximum(at * sums[:, -1:], 1)).argmax(axis=1)
    # A bin is 1% wide: a place drawn within it keeps the interval of two equal samples from shrinking to a point.
    return np.asarray(max(low_ns, 1.0) * np.exp((used[place] + rng.random(DRAWS)) / 100))
