"""Where a count of outstanding submissions stands in a launch queue: it says which calls are compared, no conclusion.

The readers and causes split calls by these: those at the top of a queue against those that found a slot. Each takes a
number or an array of them, and a depth in submissions. Needs neither numpy nor the native library.
"""

from __future__ import annotations

from typing import Any

from kvprobe.launchqueue.constants import (
    BAND_SHARE,
    BELOW_SHARE,
    FULL_SHARE,
    LATE_SHARE,
    LEAST_BAND,
    ROOM_SHARE,
    SHALLOW_SHARE,
    SLACK,
)

__all__ = ["at_top", "band", "ceiling", "half_empty", "is_late", "is_shallow", "takes", "with_slot"]


def at_top(outstanding: Any, depth: float) -> Any:
    """So near the depth that the queue may be full, as far as a count tells."""
    return outstanding >= FULL_SHARE * depth


def with_slot(outstanding: Any, depth: float) -> Any:
    """So far below the depth that a call finds a slot, where the count is reckoned."""
    return outstanding < BELOW_SHARE * depth


def half_empty(outstanding: Any, depth: float) -> Any:
    """So far below it that slots are free by whatever count."""
    return outstanding < ROOM_SHARE * depth


def is_shallow(outstanding: Any, deepest: int) -> Any:
    """So far below the deepest of a recording that the queue does not affect a call."""
    return outstanding < SHALLOW_SHARE * deepest


def is_late(outstanding: Any, deepest: int) -> Any:
    """So near the deepest that a slow call met a full queue whose freed slots were handed on late."""
    return outstanding >= LATE_SHARE * deepest


def band(deepest: int) -> int:
    """How many submissions below its deepest a full queue stands, since it frees slots in chunks."""
    return max(LEAST_BAND, round(BAND_SHARE * deepest))


def takes(depth: float) -> tuple[float, float]:
    """The least and the most submissions that a queue takes of which this depth was counted."""
    return 0.98 * depth, 1.005 * depth + 2


def ceiling(depth: int) -> int:
    """Outstanding operations from which on a running stream's calls are watched as those at the top of its queue."""
    return depth - min(SLACK, depth // 8)
