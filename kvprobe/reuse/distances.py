"""LRU stack distances of a whole series of uses at once, exact, with numpy.

A use finds its block in a pool that gives up the least recently used one (LRU) if, and only if, at most as many
different blocks as the pool holds were used since the block's last use, itself included. The source is Mattson and
others, "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970. One pass so answers for every size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST", "earlier_not_above", "last_uses", "stack_distances"]

FIRST = 0  # in place of a distance: nothing used this block before

Array = npt.NDArray[Any]


def last_uses(blocks: Array) -> Array:
    """For each use the position of the use of the same block before it, (n,) int64; -1 for a block's first use."""
    order = np.argsort(blocks, kind="stable")
    sorted_blocks = blocks[order]
    last = np.full(len(blocks), -1, dtype=np.int64)
    again = np.flatnonzero(sorted_blocks[1:] == sorted_blocks[:-1])
    last[order[again + 1]] = order[again]
    return last


def stack_distances(blocks: Array) -> Array:
    """For each use how many different blocks were used since this block's last use, itself included, (n,) int64.

    Args:
        blocks: (n,) any integers, in the order of use.

    Returns:
        1: the block was used just before; FIRST: it was never used before. A pool of so many blocks finds it.
    """
    last = last_uses(blocks)
    if not len(last):
        return last
    # The different blocks between are the uses whose own last use lies at or before this block's last one. All uses up
    # to that one are such, so: the earlier uses with a smaller or equal `last`, less last + 1; and one for itself.
    distance = earlier_not_above(last) - last
    return np.where(last < 0, FIRST, distance)


def earlier_not_above(values: Array) -> Array:
    """For each value how many before it are not above it, (n,) int64; meaningless among equal values below 0.

    From the whole down to single values: sorted by value and parted by position into halves, each value of a right
    half has before it, in sorted order, those of the left half that are not above it.
    """
    size = 1 << max(len(values) - 1, 1).bit_length()
    order = np.concatenate([np.argsort(values, kind="stable"), np.arange(len(values), size)])
    counts = np.zeros(size, dtype=np.int64)
    half = size >> 1
    while half:
        right = (order & half) != 0
        lefts = np.cumsum(~right)  # of all blocks so far; each block that is over has `half` of them
        index = np.arange(size)
        before = index & ~(2 * half - 1)  # where its block begins
        left_of_it = lefts - (before >> 1)
        counts[order[right]] += left_of_it[right]
        to = np.where(right, before + half + (index - before - left_of_it), before + left_of_it - 1)
        parted = np.empty_like(order)
        parted[to] = order
        order = parted
        half >>= 1
    return counts[: len(values)]
