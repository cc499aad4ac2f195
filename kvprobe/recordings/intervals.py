"""Arithmetic on sets of time intervals: union, length covered, gaps; everything vectorised."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

__all__ = ["Cover", "ascending", "distinct", "group_starts", "in_time", "running_max_by_group", "union"]

_FEW = 256  # groups that are taken one by one
_NEAR = 8  # values so close to one another are looked for one by one: a count takes as long as ten looks


def union(start: Array, end: Array) -> tuple[Array, Array]:
    """The disjoint, sorted intervals that cover the same instants as the given half-open ones."""
    keep = end > start
    if not keep.all():
        kept = np.flatnonzero(keep)  # of millions, places pick in half the time that a mask takes
        start, end = start[kept], end[kept]
    if not len(start):
        return start, end
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    if (end[1:] < end[:-1]).any():
        end = np.maximum.accumulate(end)
    apart = start[1:] > end[:-1]
    if apart.all():
        return start, end
    last = np.append(np.flatnonzero(apart), len(start) - 1)  # of those that are one
    return start[np.append(0, last[:-1] + 1)], end[last]


class Cover:
    """The union of a set of intervals, ready to be asked how much of other intervals it covers."""

    def __init__(self, start: Array, end: Array) -> None:
        """Takes any intervals, overlapping or not, in any order; times in ns."""
        self.start, self.end = union(np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64))

    @cached_property
    def _before(self) -> Array:
        """Length covered before each interval, and in all of them; who asks for gaps alone does without."""
        length = np.zeros(len(self.start) + 1, dtype=np.int64)
        np.subtract(self.end, self.start, out=length[1:])  # in place: there may be millions
        np.cumsum(length[1:], out=length[1:])
        return length

    @property
    def total_ns(self) -> int:
        """Length of the union."""
        return int(self._before[-1])

    def upto(self, t: Array) -> Array:
        """Covered length before each instant of `t`."""
        if not len(self.start):
            return np.zeros(np.shape(t), dtype=np.int64)
        i = np.searchsorted(self.start, t, side="right")
        inside = np.where(i > 0, np.maximum(self.end[i - 1] - t, 0), 0)
        covered: Array = self._before[i] - inside
        return covered

    def within(self, start: Array, end: Array) -> Array:
        """Covered length inside each [start, end)."""
        covered: Array = self.upto(np.maximum(start, end)) - self.upto(start)
        return covered

    def gaps(self) -> tuple[Array, Array]:
        """The uncovered intervals between the first and the last covered instant."""
        return self.end[:-1], self.start[1:]

    def intersect_ns(self, other: Cover) -> int:
        """Length of the instants both cover."""
        return int(other.within(self.start, self.end).sum()) if len(self.start) else 0


def ascending(value: Array) -> Array:
    """The values sorted; most columns of a recording are already."""
    return np.sort(value) if (value[1:] < value[:-1]).any() else value


def in_time(rows: Array, time_ns: Array) -> Array:
    """Rows in the order of their times; most come in it."""
    times = time_ns[rows]
    return rows[np.argsort(times, kind="stable")] if (times[1:] < times[:-1]).any() else rows


def group_starts(key: Array) -> Array:
    """First index of each run of equal values in a sorted key."""
    if not len(key):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))


def distinct(value: Array) -> Array:
    """The different values, sorted; without a sort where they are close to one another, or small and not negative."""
    if not len(value):
        return np.unique(value)
    low, high = int(value.min()), int(value.max())
    small = low >= 0 and high < 1 << 20
    if high - low < _NEAR:
        there = [one for one in range(low, high + 1) if (value == one).any()]
        return np.array(there, dtype=np.int64 if small else value.dtype)
    return np.flatnonzero(np.bincount(value)) if small else np.unique(value)


def running_max_by_group(value: Array, group: Array) -> Array:
    """Running maximum of `value` inside each group of a sorted `group` of small integers, one pass, no loop.

    Of many groups each is lifted above all before it, so that one `maximum.accumulate` serves all.
    """
    if not len(value):
        return value
    edges = np.append(group_starts(group), len(value))
    base = int(value.min())
    span = int(value.max()) - base + 1
    if len(edges) > _FEW and span < (1 << 62) // len(edges):
        rank = np.zeros(len(value), dtype=np.int64)
        np.cumsum(group[1:] != group[:-1], out=rank[1:])
        lifted = np.maximum.accumulate(value - base + rank * span)
        return np.asarray(lifted - rank * span + base)
    out = np.empty_like(value)  # a few groups, or times too far apart to lift: one by one, in less memory
    for a, b in itertools.pairwise(edges):
        out[a:b] = np.maximum.accumulate(value[a:b])
    return out
