"""What is usual, and what is late: one rule for steps, waits for tokens and first tokens, in a recording or live.

Times are compared with those of their like (`like_of`) alone. Late is what lies beyond Tukey's outer fence: longer than
three quarters of its like by more than three times what lies between the first and the third quarter. Where all are
nearly equal, a tenth more than the median is the least that is called late. Of fewer than LEAST like ones nothing is
said. Where more than a quarter are slow, being slow is usual, and the account says why. An observer of a running server
applies the same to its latest times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.model import Array, Phase

__all__ = ["LEAST", "NOTICED", "Usual", "like_of", "usual"]

LEAST = 20  # like ones, of which a quarter is five
FENCE = 3.0  # J. W. Tukey, Exploratory Data Analysis (1977): "far out"
NOTICED = 1.1  # of the median


@dataclass(frozen=True)
class Usual:
    """Times of like ones, ns."""

    count: int
    quarter_ns: float
    median_ns: float
    three_quarters_ns: float

    @property
    def late_ns(self) -> float:
        """What takes longer is late; infinite where too few were seen."""
        if self.count < LEAST:
            return float("inf")
        spread = self.three_quarters_ns - self.quarter_ns
        return max(self.three_quarters_ns + FENCE * spread, NOTICED * self.median_ns)


def usual(took_ns: Array) -> Usual:
    """Of times of like ones, in any order; all 0 where there are none."""
    if not len(took_ns):
        return Usual(0, 0.0, 0.0, 0.0)
    quarter, median, three = (float(one) for one in np.percentile(took_ns, (25, 50, 75)))
    return Usual(len(took_ns), quarter, median, three)


def like_of(phase: Array, requests: Array, computed: Array) -> Array:
    """Steps with one number are like each other: one phase, and one power of two of their size.

    Args:
        phase: of each step, Phase.
        requests: how many are in it: the size of a step that decodes, and of one whose tokens are not known.
        computed: tokens that it computes, -1 not known: the size of any other.

    Returns:
        (steps,) int64: phase * 64 + the exponent of the size.
    """
    by_tokens = (computed > 0) & (phase != Phase.DECODE)
    size = np.maximum(np.where(by_tokens, computed, requests), 1)
    exponent: Array = np.frexp(size.astype(np.float64))[1].astype(np.int64) - 1
    return phase.astype(np.int64) * 64 + exponent
