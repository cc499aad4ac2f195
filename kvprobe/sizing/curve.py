"""What a pool of each size would find of the blocks that a recording asks for, as an LRU pool that starts empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.model import Array
from kvprobe.reuse.distances import FIRST, stack_distances
from kvprobe.sizing.uses import Uses

__all__ = ["Curve", "curve_of", "first_enough"]

MANY = 100  # blocks that were asked for again: a share of fewer says little
STEPS_OF_DOUBLING = 4


@dataclass(frozen=True)
class Curve:
    """The questions of one pool by how far back their block was used, and what follows for every size.

    Attributes:
        distance: (questions,) float64, estimated number of distinct blocks since the last use, itself included; FIRST.
        what: (questions,) uint8, LOADED or STORED.
        weight: of all questions for which each of these stands.
        asked: all questions.
        distinct: different blocks, estimated.
    """

    distance: Array
    what: Array
    weight: float
    asked: int
    distinct: int

    @property
    def again(self) -> int:
        """Of the questions seen, those whose block was used before."""
        return int((self.distance != FIRST).sum())

    @property
    def first_share(self) -> float:
        """Of all questions those for blocks that were never used before: no size finds them."""
        return min(1.0, (len(self.distance) - self.again) * self.weight / max(self.asked, 1))

    def hit_share(self, blocks: int) -> float:
        """Of all questions those that a pool of so many blocks would find.

        What is missed is counted and taken from all: a few much used blocks that happen to be in the sample, or not,
        are found by any size (the correction of SHARDS, section 4.2).
        """
        missed = int(((self.distance == FIRST) | (self.distance > blocks)).sum()) * self.weight
        return max(0.0, 1 - missed / max(self.asked, 1))

    def undecided(self, blocks: int) -> str:
        """Why this recording does not tell what a pool of so many blocks finds; "" where it does."""
        if self.again < MANY:
            return f"only {self.again:,} blocks were requested more than once: record for longer"
        if blocks > self.distinct:
            return f"only {self.distinct:,} different blocks were requested, which do not fill such a pool"
        return ""

    def sizes(self, *more: int) -> list[int]:
        """Sizes to show, ascending: four for each doubling up to all blocks, and those given."""
        top = max(self.distinct, 1)
        found = {round(top / 2 ** (step / STEPS_OF_DOUBLING)) for step in range(10 * STEPS_OF_DOUBLING)}
        return sorted({size for size in (*found, *more) if size > 0})


def curve_of(uses: Uses) -> Curve:
    """Works out all distances at once."""
    distance = stack_distances(uses.block)
    weight = 1 / uses.followed
    scaled = np.where(distance == FIRST, float(FIRST), (distance - 1) * weight + 1)
    return Curve(scaled, uses.what, weight, uses.asked, round(int((distance == FIRST).sum()) * weight))


def first_enough(curve: Curve, decided: Sequence[int], least_gain: float) -> int | None:
    """The smallest of these sizes of which no larger one finds `least_gain` more for each doubling; None of none.

    Compared with all larger ones, not with the next: a loop finds nothing in a pool that is too small by a little.
    """
    shares = {size: curve.hit_share(size) for size in decided}
    for size in decided:
        larger = (other for other in decided if other > size)
        if all(shares[other] - shares[size] < least_gain * math.log2(other / size) for other in larger):
            return size
    return None
