"""Whether a thread that waits for its GPU did the same all through the pauses of its recorder, by its calls alone.

The GPU was seen in a few stretches only, its thread's calls at all times. A thread that waits after every few pieces of
work shows in them how long the GPU took: where all parts of the pauses are alike in that, the stretches between them
hold what the pauses hold. So many parts as there are, none of which is another, say how much may have been missed, as
so many looks at the GPU would (`samples`).
"""

from __future__ import annotations

import numpy as np

from kvprobe.account.lines import Line
from kvprobe.recordings.model import Array

__all__ = ["COVERED", "may_differ"]

WAITS = 8  # in a part, at the median: of fewer, what one wait more or less does is not small
PARTS = (64, 4096)  # at least, and at most
ALIKE = 0.1  # of a part's time, in any line of the thread
AS_OFTEN = 4 / 3  # waits in a part, beside the median
COVERED = 0.95  # of all cases: what an error holds for


def may_differ(edges: Array, line: Array, gaps: list[tuple[int, int]]) -> float:
    """How much of the pauses may be of another kind than the rest of them, 0 to 1; 1 where the thread does not tell.

    Pauses are cut into parts of one length. Those count that are unlike the median, and what so many parts may have
    missed in 19 cases of 20; of all lengths the one that tells most.

    Args:
        edges: (pieces + 1,), ns: where the thread's line changes, or something else does.
        line: (pieces,): its Line.
        gaps: the pauses, (from, to), ns; disjoint, ascending.
    """
    total = sum(stop - start for start, stop in gaps)
    waiting = line == Line.WAITING_FOR_DEVICE
    waits = edges[:-1][waiting & ~np.append(False, waiting[:-1])]
    kinds = np.unique(line)
    spent = np.zeros((len(kinds), len(edges)))
    np.cumsum((line == kinds[:, None]) * np.diff(edges), axis=1, out=spent[:, 1:])
    least, parts = 1.0, PARTS[0]
    while parts <= PARTS[1]:
        cuts = [np.linspace(start, stop, round(parts * (stop - start) / total) + 1) for start, stop in gaps]
        begin, end = (np.concatenate([some[side] for some in cuts]) for side in (slice(None, -1), slice(1, None)))
        often = np.searchsorted(waits, end) - np.searchsorted(waits, begin)
        if len(begin) < PARTS[0] or np.median(often) < WAITS:
            break
        shares = np.array([np.interp(end, edges, one) - np.interp(begin, edges, one) for one in spent]) / (end - begin)
        alike = (np.abs(shares - np.median(shares, axis=1, keepdims=True)) <= ALIKE).all(axis=0)
        alike &= (often <= np.median(often) * AS_OFTEN) & (often * AS_OFTEN >= np.median(often))
        missed = 1 - (1 - COVERED) ** (1 / len(begin))
        least = min(least, 1 - float((end - begin)[alike].sum()) / total + missed)
        parts *= 2
    return least
