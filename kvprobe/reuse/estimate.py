"""What LRU pools of several sizes would miss, counted while blocks are used, from a sample of them in fixed memory.

The idea is SHARDS (Waldspurger and others, "Efficient MRC construction with SHARDS", FAST 2015): of all blocks those
whose hash lies below a threshold are followed, every use of each; a distance among them is a distance among all,
divided by the share that is followed. Where more blocks come than are followed at most, the threshold is lowered and
those above it are forgotten. That a few much used blocks happen to be in the sample, or not, is corrected as there: all
uses are counted, and the difference is taken for uses that any size finds. So what is counted is what a
size would miss.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence

__all__ = ["MOST_FOLLOWED", "WHOLE", "ReuseEstimate", "id_of"]

WHOLE = 1 << 24  # the threshold that no block lies above
MOST_FOLLOWED = 8192  # blocks that are followed at most
_KEPT = 31 / 32  # of them, when the threshold is lowered
_MASK = (1 << 64) - 1


def id_of(block: Hashable) -> int:
    """48 bits that stand for a block in this process; the upper 24 are compared with a threshold."""
    mixed = (hash(block) + 0x9E3779B97F4A7C15) & _MASK  # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ mixed >> 31) >> 16


class ReuseEstimate:
    """Uses of blocks, by their ids (`id_of`), and what pools of some sizes would have missed of them.

    Attributes:
        sizes: of pools, in blocks, ascending.
        threshold: blocks whose upper 24 bits lie below it are followed.
        uses: all that were counted, of blocks that are followed and of others.
    """

    def __init__(self, sizes: Sequence[int], most: int = MOST_FOLLOWED) -> None:
        """`most`: blocks that are followed at most; below 64 counts as 64."""
        self.sizes = tuple(sizes)
        self.threshold = WHOLE
        self.uses = 0
        self._too_small = [0.0] * (len(self.sizes) + 1)  # uses that just so many of the sizes would have missed
        self._most = max(most, 64)
        self._slots: dict[int, int] = {}  # id -> when it was last used
        self._next = 0
        self._tree = array("q", bytes(8 * (2 * self._most + 1)))  # Fenwick's: how many last uses lie in each range

    @property
    def bytes(self) -> int:
        """Memory that it takes: its table, its tree, and the numbers in the table."""
        numbers = 2 * sys.getsizeof(1 << 40) * len(self._slots)
        return sys.getsizeof(self._slots) + sys.getsizeof(self._tree) + numbers

    @property
    def missed(self) -> list[float]:
        """Of the uses, by size, those that it would have missed; an estimate, exact while all blocks are followed."""
        return [float(sum(self._too_small[number + 1 :])) for number in range(len(self.sizes))]

    @property
    def hit_shares(self) -> tuple[float, ...]:
        """Of all uses those that a pool of each size would have found, 0 to 1."""
        return tuple(max(0.0, 1 - missed / max(self.uses, 1)) for missed in self.missed)

    def use(self, block: int) -> None:
        """One use of a block, by its id."""
        self.uses += 1
        if block >> 24 >= self.threshold:
            return
        weight = WHOLE / self.threshold
        slot = self._slots.get(block)
        if slot is None:
            reached = len(self.sizes)
        else:
            distance = (len(self._slots) - self._up_to(slot)) * weight + 1
            reached = bisect_left(self.sizes, distance)
            self._add(slot, -1)
        self._too_small[reached] += weight
        if self._next == 2 * self._most:
            self._renumber()
        self._slots[block] = self._next
        self._add(self._next, 1)
        self._next += 1
        if len(self._slots) > self._most:
            self._lower()

    def skip(self, uses: int) -> None:
        """So many uses of blocks that are not followed."""
        self.uses += uses

    def forget(self, block: int) -> None:
        """A block is gone from wherever it was: its next use is a first one."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self._add(slot, -1)

    def lower(self, threshold: int) -> None:
        """Follow no block at or above a threshold any more."""
        if threshold < self.threshold:
            self.threshold = threshold
            self._slots = {block: slot for block, slot in self._slots.items() if block >> 24 < threshold}
            self._renumber()

    def _lower(self) -> None:
        kept = sorted(block >> 24 for block in self._slots)
        self.lower(max(kept[int(len(kept) * _KEPT)], 1))

    def _renumber(self) -> None:
        """Slots from 0 on, in the same order."""
        ordered = sorted(self._slots, key=self._slots.__getitem__)
        self._slots = {block: slot for slot, block in enumerate(ordered)}
        self._next = len(ordered)
        for at in range(1, len(self._tree)):  # a tree over ones up to there, zeros beyond
            self._tree[at] = max(0, min(at, self._next) - (at - (at & -at)))

    def _add(self, slot: int, amount: int) -> None:
        at = slot + 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def _up_to(self, slot: int) -> int:
        """Last uses at or before a slot."""
        at, total = slot + 1, 0
        while at:
            total += self._tree[at]
            at -= at & -at
        return total
