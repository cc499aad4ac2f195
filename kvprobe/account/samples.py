"""What a GPU did where its recorder did not look, by what it saw before and after: lines by samples, with their error.

`kvprobe run` watches a program that its timing events would slow in stretches. Each is some milliseconds long, whatever
they cost there, and begins when enough is saved up for it, whatever the program does then: so what a stretch holds
stands for the time around it. A pause between two stretches gets the mean of both, line by line; what its thread did
meanwhile is known, so that is done for each kind of call apart: in a wait the GPU does what it did in waits.

A stretch is known from where the work is over that stood in the streams before: often where a step ends. It is counted
with a weight that rises from its beginning and falls to its end, so that it matters little where in a step it began.

The error is twice the standard error of the mean, by how much stretches that follow one another differ: stretches far
apart may differ because the program does something else. Where it is more than MOST of the window, nothing is filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvprobe.account.activity import Activity
from kvprobe.account.lines import Line, Unknown
from kvprobe.account.stretches import NOBODY, Stretches
from kvprobe.account.threads import Threads
from kvprobe.recordings.model import Array

__all__ = ["MOST", "Samples", "fill"]

MOST = 0.05  # of the window: an error above it, and what was not seen stays not known
FEWEST = 8  # of so few the error is not known: it is as large as what was not seen
LONGEST_NS = 20_000_000  # of a long stretch so much stands for the pause beside it
SHORTEST_NS = 1_000_000
OF_ALL = 0.05  # weight of all stretches beside the two around a pause: for kinds of calls that these do not hold
LINES = len(Line)


@dataclass(frozen=True)
class Samples:
    """How a GPU's account was filled.

    Attributes:
        count: stretches that stand for pauses.
        ns: of the window, known by them.
        error_ns: a line is that far from the truth at most, in 19 cases of 20.
    """

    count: int = 0
    ns: int = 0
    error_ns: int = 0


class _Joint(NamedTuple):
    """The window cut where the account's lines or the thread's calls change, (pieces + 1,) and (pieces,)."""

    edges: Array
    account: Array  # number of the account's line, caller and detail
    thread: Array  # Line of the thread
    kinds: int  # of account


def fill(cut: Stretches, gpu: Activity, threads: Threads) -> Samples:
    """Gives pauses of the recorder the lines of the stretches around them, in place; `threads` cover the window."""
    if gpu.seen_from is None or gpu.seen_to is None or not len(gpu.paused_from) or not len(cut.line):
        return Samples()
    begin, end = int(cut.edges[0]), int(cut.edges[-1])
    stretches = _stretches(gpu, begin, end)
    gaps = _gaps(stretches, gpu, begin, end)
    hidden = sum(gap[1] - gap[0] for gap in gaps)
    if not gaps or not hidden:
        return Samples()
    table, number = np.unique(
        np.stack((cut.line, cut.caller, cut.detail)).astype(np.int64), axis=1, return_inverse=True
    )
    joint = _joint(cut, number.ravel(), table.shape[1], _main_timeline(cut, gpu, threads, stretches))
    before, after = (_weights(joint, stretches, side) for side in (-1, 1))
    share = np.zeros(2 * len(stretches))  # of what is hidden, that each side of each stretch stands for
    for start, stop, left, right in gaps:
        sides = [2 * left + 1] * (left >= 0) + [2 * right] * (right >= 0)
        share[sides] += (stop - start) / hidden / len(sides)
    both = np.stack((before, after), axis=1).reshape(2 * len(stretches), -1)
    error = _error(both.reshape(len(both), LINES, -1).sum(axis=1), share, table[0], hidden)
    count = int((share.reshape(-1, 2).sum(axis=1) > 0).sum())
    if error > MOST * (end - begin):
        return Samples(count, 0, int(error))
    mean = both.mean(axis=0)
    pieces = []
    for start, stop, left, right in gaps:
        sides = [after[left]] * (left >= 0) + [before[right]] * (right >= 0)
        weights = (np.mean(sides, axis=0) + OF_ALL * mean).reshape(LINES, -1)
        pieces.append(_filled(joint, start, stop, weights))
    _put(cut, table, np.concatenate([one[0] for one in pieces]), np.concatenate([one[1] for one in pieces]), gaps)
    return Samples(count, cut.sum_ns(cut.sampled), int(error))


def _stretches(gpu: Activity, begin: int, end: int) -> list[tuple[int, int]]:
    """Between pauses, from where all is known to where it is no more."""
    assert gpu.seen_from is not None and gpu.seen_to is not None
    edges = np.concatenate(([begin], np.column_stack((gpu.paused_from, gpu.paused_to)).ravel(), [end]))
    out = []
    for start, stop in np.clip(edges, begin, end).reshape(-1, 2).tolist():
        first = int(np.searchsorted(gpu.seen_to, start, "right"))
        last = int(np.searchsorted(gpu.seen_from, stop, "left")) - 1
        if last < first:
            continue
        one = max(start, int(gpu.seen_from[first])), min(stop, int(gpu.seen_to[last]))
        if one[1] - one[0] >= SHORTEST_NS:
            out.append(one)
    return out


def _gaps(stretches: list[tuple[int, int]], gpu: Activity, begin: int, end: int) -> list[tuple[int, int, int, int]]:
    """Between stretches, where the recorder paused: begin, end, and the numbers of the stretches around; -1: none."""
    if not stretches:
        return []
    ends = [begin, *(stop for _, stop in stretches)]
    begins = [*(start for start, _ in stretches), end]
    out = []
    for number, (start, stop) in enumerate(zip(ends, begins, strict=True)):
        at = int(np.searchsorted(gpu.paused_to, start, "right"))
        if stop > start and at < len(gpu.paused_from) and gpu.paused_from[at] < stop:
            out.append((start, stop, number - 1, number if number < len(stretches) else -1))
    return out


def _main_timeline(
    cut: Stretches, gpu: Activity, threads: Threads, stretches: list[tuple[int, int]]
) -> tuple[Array, Array]:
    """Edges and lines of the thread that the GPU waited for most; one piece where its calls were not all kept."""
    nothing = cut.edges[[0, -1]], np.zeros(1, dtype=np.uint8)
    whose = np.concatenate((cut.caller[cut.caller != NOBODY], gpu.caller[gpu.caller != NOBODY]))
    lost = any(threads.joined.recording.lost.get(one) for one in gpu.processes)
    if lost or not len(whose) or not stretches:
        return nothing
    callers, counts = np.unique(whose, return_counts=True)
    timeline = threads.of(int(callers[np.argmax(counts)]))
    return timeline.edges, timeline.line


def _joint(cut: Stretches, number: Array, kinds: int, timeline: tuple[Array, Array]) -> _Joint:
    begin, end = cut.edges[0], cut.edges[-1]
    edges = np.unique(np.concatenate((cut.edges, np.clip(timeline[0], begin, end))))
    account = number[np.searchsorted(cut.edges, edges[:-1], "right") - 1]
    of = np.clip(np.searchsorted(timeline[0], edges[:-1], "right") - 1, 0, len(timeline[1]) - 1)
    return _Joint(edges, account, timeline[1][of].astype(np.int64), kinds)


def _weights(joint: _Joint, stretches: list[tuple[int, int]], side: int) -> Array:
    """What each stretch holds near its beginning (-1) or its end: shares, (stretches, the thread's lines * kinds)."""
    out = np.zeros((len(stretches), LINES * joint.kinds))
    for row, (start, stop) in enumerate(stretches):
        if side < 0:
            stop = min(stop, start + LONGEST_NS)
        else:
            start = max(start, stop - LONGEST_NS)
        first, last = np.searchsorted(joint.edges, start, "right") - 1, np.searchsorted(joint.edges, stop, "left")
        x = (np.clip(joint.edges[first : last + 1], start, stop) - start) / (stop - start)
        weight = np.diff(x - np.sin(2 * np.pi * x) / (2 * np.pi))
        np.add.at(out[row], joint.thread[first:last] * joint.kinds + joint.account[first:last], weight)
    return out


def _error(shares: Array, weight: Array, line: Array, hidden: float) -> float:
    """Twice the standard error of any line's mean, ns; `shares` of each side of each stretch, (sides, kinds)."""
    used = np.flatnonzero(weight > 0)
    if len(np.unique(used // 2)) < FEWEST:
        return hidden
    by_line = np.zeros((len(used), LINES))
    for one in range(LINES):
        by_line[:, one] = shares[used][:, line == one].sum(axis=1)
    new = used[1:] // 2 != used[:-1] // 2  # two sides of one stretch are no two samples
    squares = (by_line[1:] - by_line[:-1])[new] ** 2 / 2
    of_stretch = np.bincount(used // 2, weight[used])
    error: float = 2 * float(np.sqrt(squares.mean(axis=0).max() * (of_stretch**2).sum())) * hidden
    return min(error, hidden)


def _filled(joint: _Joint, start: int, stop: int, weights: Array) -> tuple[Array, Array]:
    """A pause's pieces: where each begins, ascending, and its number; each kind of call has shares of its own."""
    first, last = np.searchsorted(joint.edges, start, "right") - 1, np.searchsorted(joint.edges, stop, "left")
    edges = np.clip(joint.edges[first : last + 1], start, stop)
    thread, length = joint.thread[first:last], np.diff(edges)
    order = np.argsort(-weights.sum(axis=0), kind="stable")
    begins, numbers = [], []
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero(thread == one)
        share = weights[one] if weights[one].sum() > 0 else weights.sum(axis=0)
        share = share[order] / share.sum()
        upto = np.concatenate(([0], np.cumsum(length[mine])))
        bounds = np.round(np.cumsum(share) * upto[-1]).astype(np.int64)
        bounds[-1] = upto[-1]
        inside = bounds[:-1][(bounds[:-1] > 0) & (bounds[:-1] < upto[-1])]
        cuts = np.unique(np.concatenate((upto[:-1], inside)))
        piece = np.searchsorted(upto, cuts, "right") - 1
        begins.append(edges[mine[piece]] + cuts - upto[piece])
        numbers.append(order[np.searchsorted(bounds, cuts, "right")])
    begin, number = np.concatenate(begins), np.concatenate(numbers)
    in_time = np.argsort(begin, kind="stable")
    return begin[in_time], number[in_time]


def _put(cut: Stretches, table: Array, begin: Array, number: Array, gaps: list[tuple[int, int, int, int]]) -> None:
    """Writes the pieces of all pauses into the account."""
    inside = cut.cut(np.array([one[0] for one in gaps]), np.array([one[1] for one in gaps]))
    start = np.concatenate((cut.start[~inside], begin))
    line, caller, detail = (
        np.concatenate((column[~inside], table[row][number]))
        for row, column in enumerate((cut.line, cut.caller, cut.detail))
    )
    sampled = np.concatenate((np.zeros(int((~inside).sum()), dtype=bool), np.ones(len(begin), dtype=bool)))
    sampled &= ~((line == Line.NOT_KNOWN) & (detail == Unknown.NOT_COVERED))
    order = np.argsort(start, kind="stable")
    made = Stretches.of(
        np.append(start[order], cut.edges[-1]), line[order], caller[order], detail[order], sampled[order]
    )
    cut.edges, cut.line, cut.caller, cut.detail = made.edges, made.line, made.caller, made.detail
    cut.cause, cut.sampled = made.cause, made.sampled
