"""What is usual, and what is late: one rule for steps, waits for tokens and first tokens, in a recording or live.

Times are compared with those of their like (`like_of`) alone. Late is what lies beyond Tukey's outer fence: longer than
three quarters of its like by more than three times what lies between the first and the third quarter. Where all are
nearly equal, a tenth more than the median is the least that is called late. Where more than a quarter are slow, being
slow is usual, and the account says why. An observer of a running server applies the same to its latest times.

Of fewer than LEAST like ones little is known, and only what nobody would call usual is called late: of FEW or more what
lies beyond their own fence and is at least TWICE their median; of still fewer what takes longer than is late of larger
ones, or of smaller ones times the square of how much larger it is, as attention takes. Both need LEAST like ones of
another size: without them nothing shows how much such times vary, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvprobe.recordings.model import Array, Phase

__all__ = ["LEAST", "NOTICED", "Usual", "counts_tokens", "like_of", "phase_of", "usual", "usual_of_kinds"]

LEAST = 20  # like ones, of which a quarter is five
FEW = 5  # like ones whose third quarter one of them alone cannot move
TWICE = 2.0  # by so much sizes of one kind differ at most
FENCE = 3.0  # J. W. Tukey, Exploratory Data Analysis (1977): "far out"
NOTICED = 1.1  # of the median


@dataclass(frozen=True)
class Usual:
    """Times of like ones, ns.

    Attributes:
        count: how many there are.
        quarter_ns, median_ns, three_quarters_ns: of them.
        late_ns: what takes longer is late; infinite where nothing tells.
        beside: the kind that tells what is late, where there are too few of this one; -1: none does, or need.
    """

    count: int
    quarter_ns: float
    median_ns: float
    three_quarters_ns: float
    late_ns: float
    beside: int = -1

    @property
    def fence_ns(self) -> float:
        """The outer fence of these alone."""
        spread = self.three_quarters_ns - self.quarter_ns
        return max(self.three_quarters_ns + FENCE * spread, NOTICED * self.median_ns)


def usual(took_ns: Array) -> Usual:
    """Of times of like ones, in any order; all 0 where there are none."""
    if not len(took_ns):
        return Usual(0, 0.0, 0.0, 0.0, float("inf"))
    quarter, median, three = (float(one) for one in np.percentile(took_ns, (25, 50, 75)))
    found = Usual(len(took_ns), quarter, median, three, float("inf"))
    return replace(found, late_ns=found.fence_ns) if found.count >= LEAST else found


def usual_of_kinds(times: Mapping[int, tuple[Array, Array]]) -> dict[int, Usual]:
    """Of each kind, by its number of `like_of`: sizes and times, ns, of its like ones, at least one."""
    known = {kind: usual(took) for kind, (_, took) in times.items()}
    typical = {kind: float(np.median(times[kind][0])) for kind, one in known.items() if one.count >= LEAST}
    out = dict(known)
    for kind, one in known.items():
        others = [other for other in typical if other // 64 == kind // 64]
        if kind in typical or not others:
            continue
        largest = float(times[kind][0].max())
        bounds = {other: known[other].late_ns * max(largest / typical[other], 1.0) ** 2 for other in others}
        beside = min(bounds, key=lambda other: bounds[other])
        varies = known[beside].late_ns / max(known[beside].median_ns, 1.0)
        own = max(one.fence_ns, max(varies, TWICE) * one.median_ns)
        out[kind] = replace(one, late_ns=own if one.count >= FEW else bounds[beside], beside=beside)
    return out


def like_of(phase: Array, requests: Array, computed: Array) -> tuple[Array, Array]:
    """Steps with one number are like each other: one phase, and one power of two of their size, counted alike.

    Args:
        phase: of each step, Phase.
        requests: how many are in it: the size of a step that decodes, and of one whose tokens are not known.
        computed: tokens that it computes, -1 not known: the size of any other.

    Returns:
        The numbers, (steps,) int64: phase * 128, 64 more where tokens are counted, and the exponent of the size. And
        the sizes.
    """
    by_tokens = (computed > 0) & (phase != Phase.DECODE)
    size = np.maximum(np.where(by_tokens, computed, requests), 1).astype(np.int64)
    exponent = np.frexp(size.astype(np.float64))[1].astype(np.int64) - 1
    like: Array = phase.astype(np.int64) * 128 + by_tokens * 64 + exponent
    return like, size


def phase_of(like: int) -> Phase:
    """Of a kind."""
    return Phase(like // 128)


def counts_tokens(like: int) -> bool:
    """Whether the sizes of a kind are tokens; else they are requests."""
    return bool(like // 64 % 2)
