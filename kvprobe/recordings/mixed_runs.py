"""Runs of several kinds between two marks of `kvprobe run`, divided by what their kinds take elsewhere: computed.

Where no mark may be put between kernels and copies of one stream, as its queue is too full for that or they take turns
too often, the marks around all of them tell how long they took together, and how many of each kind there were. Copies
alone are copies, whichever way each goes. Kernels have two bounds: so many kernels of this stream take as long as in
runs of kernels alone, from the shortest tenth of those to the longest; and they take what so many copies leave, which
take as long as in runs of copies alone. Both bounds must be known and leave less than 2 * MOST of the run open: its
kernels get the middle, and so are right to MOST of it. Else what the run was is not told. Large copies tell the link's
rate, and a computed length does not: it has an error, however small, by which it is known (`link_rate`).

Each piece says its part of that error: half of what the bounds leave open. Both bounds come from the same runs of one
kind, so the errors of many runs add up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.recordings.link_rate import LARGE_BYTES
from kvprobe.recordings.model import Array, Direction, Engine

__all__ = [
    "KERNEL",
    "LONGEST",
    "PACE",
    "PACE_NS",
    "SHORTEST",
    "Mixed",
    "Runs",
    "divide",
    "is_late",
    "quantile",
    "runs_of",
]

# A run whose mark is reached so soon has kept pace with its host: little of it was left to do. A clock that was placed
# before a pause may have drifted since: beside that, a part of the run's length.
PACE_NS, PACE = 10_000, 0.25
KERNEL, COPIES, KINDS = 1, (2, 3, 4), 9  # of enum mark_kind
LINK, INSIDE = (2, 3), 4  # of these copies
DIRECTIONS = {2: Direction.H2D, 3: Direction.D2H, 4: Direction.D2D}
MOST = 0.04  # of a run
FEWEST = 4  # runs of one kind, that tell how long one of it takes
TINY = 1e-9
SHORTEST, LONGEST = 0.1, 0.9  # of the lengths of its submissions


class Mixed(NamedTuple):
    """Runs of several kinds, and what each holds; arrays of one entry a run, or (runs, KINDS)."""

    start: Array  # ns
    length: Array  # without its mark, as far as it was seen, ns
    longest: Array  # the same, until it was over at the latest
    process: Array
    device: Array
    stream: Array
    late: Array  # the device was behind its host: it was busy all the time
    many: Array  # submissions of each kind
    bytes: Array
    alone: Array  # how long one of the kind takes in a stream that waits for its host, ns; -1: not known


class Runs(NamedTuple):
    """Runs of one kind that the device was behind with, which tell how long one of it takes."""

    length: Array  # without the mark, ns
    mark_ns: int
    process: Array
    stream: Array
    kind: Array
    many: Array  # submissions
    bytes: Array


def runs_of(
    records: Array, parts: Array, start: Array, owner: tuple[Array, Array], alone: Array, mark_ns: int
) -> tuple[Mixed, Array]:
    """Runs of several kinds whose parts were recorded, and for each the number of its record among `records`.

    Args:
        records: of runs of several kinds.
        parts: of all their parts.
        start: of records and then of parts, ns.
        owner: process and stream of each, in the same order.
        alone: of each part, ns.
        mark_ns: how long a mark takes.
    """
    both = np.concatenate((records, parts))
    keys = np.stack((*owner, start, both["src"].astype(np.int64)), axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    of_key = np.full(which.max(initial=-1) + 1, -1)
    of_key[which[: len(records)]] = np.arange(len(records))
    of = of_key[which[len(records) :]]
    kept = np.flatnonzero(of >= 0)
    count, size = np.zeros((2, len(records), KINDS), dtype=np.int64)
    each = np.full((len(records), KINDS), -1, dtype=np.int64)
    kind = np.minimum(parts["result"][kept], KINDS - 1)
    count[of[kept], kind], size[of[kept], kind] = parts["count"][kept], parts["bytes"][kept]
    each[of[kept], kind] = alone[kept]
    late, longest = np.zeros(len(records), dtype=bool), records["dur_ns"].astype(np.int64)
    late[of[kept]] = is_late(parts)[kept]
    length = longest.copy()
    longest[of[kept]] = parts["dur_ns"][kept]
    told = np.flatnonzero(count.sum(axis=1) == records["count"])
    made = Mixed(
        start[told],
        np.maximum(length - mark_ns, 1)[told],
        np.maximum(longest - mark_ns, 1)[told],
        owner[0][told],
        records["transfer"].astype(np.int32)[told],
        owner[1][told],
        late[told],
        count[told],
        size[told],
        each[told],
    )
    return made, told


def is_late(records: Array) -> Array:
    """Mask: the mark of a run was recorded so long before it was reached that the device was behind its host."""
    mask: Array = records["tid"] > PACE_NS + PACE * records["dur_ns"].astype(float)
    return mask


def divide(mixed: Mixed, runs: Runs, most: int) -> tuple[Array, dict[str, Array]]:
    """Divides runs of several kinds.

    Args:
        mixed: the runs.
        runs: of one kind, the same recording's.
        most: pieces of each kind in one run.

    Returns:
        Mask over the runs: those that are told; and the columns of `spans` of their pieces.
    """
    known, took, error = _lengths(mixed, runs)
    rows = np.flatnonzero(known)
    count, took, error = mixed.many[rows], took[rows], error[rows]
    there = count > 0
    rounds = np.minimum(np.where(there, count, np.iinfo(np.int64).max).min(axis=1, initial=most), most)
    order = [*COPIES, KERNEL]
    before = np.zeros_like(took)
    before[:, order] = np.cumsum(took[:, order], axis=1) - took[:, order]
    run, kind = np.nonzero(there)
    of = np.repeat(np.arange(len(run)), rounds[run])
    number = np.arange(len(of)) - np.repeat(np.cumsum(rounds[run]) - rounds[run], rounds[run])
    run, kind = run[of], kind[of]
    row, many = rows[run], rounds[run]

    def share(total: Array) -> Array:
        """Whole parts that add up to the total."""
        part: Array = total * (number + 1) // many - total * number // many
        return part

    wrong = np.ceil(took * (error / np.maximum(took.sum(axis=1), 1))[:, None]).astype(np.int64)[run, kind]
    begins = mixed.start[row] + mixed.length[row] * number // many + (before[run, kind] / many).astype(np.int64)
    directions = np.array([DIRECTIONS.get(one, Direction.UNKNOWN) for one in range(KINDS)], dtype=np.uint8)
    return known, {
        "start_ns": begins,
        "end_ns": begins + np.maximum((took[run, kind] / many).astype(np.int64), 1),
        "process": mixed.process[row],
        "device": mixed.device[row],
        "stream": mixed.stream[row],
        "engine": np.where(kind == KERNEL, Engine.KERNEL, Engine.COPY).astype(np.uint8),
        "direction": directions[kind],
        "bytes": share(mixed.bytes[row, kind]),
        "count": share(mixed.many[row, kind]),
        "graph": np.full(len(row), -1, dtype=np.int64),
        "error_ns": np.where(wrong > 0, np.maximum(share(wrong), 1), 0),
    }


def _lengths(mixed: Mixed, runs: Runs) -> tuple[Array, Array, Array]:
    """Which runs are told, how long each of their kinds took, and by how much that may be wrong between kinds.

    (runs,), (runs, KINDS) and (runs,) ns. Between kernels, copies of the link and copies inside the GPU, that is: no
    error is 0 but where a run holds one of them alone.
    """
    others = [one for one in range(KINDS) if one != KERNEL and one not in COPIES]
    copies, kernels = mixed.many[:, COPIES], mixed.many[:, KERNEL]
    low, high = _bounds(mixed, runs)
    together = _together(mixed, runs.mark_ns, low[:, COPIES].sum(axis=1), high[:, COPIES].sum(axis=1))
    least = np.maximum(low[:, KERNEL], mixed.length - together[1])
    most = np.minimum(high[:, KERNEL], mixed.longest - together[0])
    bounded = np.isfinite(high[:, KERNEL]) & np.isfinite(together[1])
    divided = mixed.late & bounded & (np.abs(most - least) <= 2 * MOST * mixed.length)
    alone = ((mixed.alone[:, COPIES] >= 0) | (copies == 0)).all(axis=1)
    small = (mixed.bytes[:, COPIES] // np.maximum(copies, 1) < LARGE_BYTES).all(axis=1)
    known = (mixed.many[:, others].sum(axis=1) == 0) & np.where(kernels > 0, divided, mixed.late | small & alone)
    took = np.zeros(mixed.many.shape)
    computed = np.clip(np.where(known & (kernels > 0), least + most, 0) / 2, 0, mixed.longest)
    whole = np.where(bounded, computed + np.where(bounded, together[0] + together[1], 0) / 2, mixed.length)
    took[:, KERNEL] = mixed.length * computed / np.clip(whole, mixed.length, mixed.longest)
    middle = np.where(np.isfinite(high), low + high, 0)[:, COPIES]
    weight = np.where(((middle > 0) | (copies == 0)).all(axis=1)[:, None], middle, copies)
    rest = (mixed.length - took[:, KERNEL]) / np.maximum(weight.sum(axis=1), TINY)
    one = np.maximum(mixed.alone[:, COPIES] - runs.mark_ns, mixed.alone[:, COPIES] / 3)
    paced = copies * one * np.minimum(mixed.length / np.maximum((copies * one).sum(axis=1), TINY), 1)[:, None]
    took[:, COPIES] = np.where(mixed.late[:, None], weight * rest[:, None], paced)
    error = _error(mixed, (low, high), np.abs(most - least) / 2, took)
    return known, took, np.maximum(error, np.where(small, 0, 1))  # large ones, each way: computed, as small as that is


def _error(mixed: Mixed, bounds: tuple[Array, Array], kernels: Array, took: Array) -> Array:
    """How far the time of any kind may be from the truth, (runs,) ns; where there are kernels, theirs is `kernels`.

    Copies inside the GPU beside others have bounds, too: what they take elsewhere, and what all else leaves.
    """
    low, high = bounds
    has = mixed.many > 0
    link, inside = has[:, LINK].any(axis=1), has[:, INSIDE]
    least = np.maximum(low[:, INSIDE], mixed.length - high[:, LINK].sum(axis=1) - high[:, KERNEL])
    most = np.minimum(high[:, INSIDE], mixed.length - low[:, LINK].sum(axis=1) - low[:, KERNEL])
    off = np.maximum(most - took[:, INSIDE], took[:, INSIDE] - least)
    error = np.maximum(np.where(has[:, KERNEL], kernels, 1), np.where(inside & link, off, 1))
    several = np.stack((has[:, KERNEL], link, inside)).sum(axis=0) > 1
    return np.where(several & mixed.late, error, 0)


def _bounds(mixed: Mixed, runs: Runs) -> tuple[Array, Array]:
    """How long each run's submissions of each kind take at least and at most, (runs, KINDS) ns; inf: not known.

    Kernels by those of the stream; copies by the process's of one way and about as large.
    """
    low, high = np.zeros(mixed.many.shape), np.where(mixed.many > 0, np.inf, 0.0)
    for kind in (KERNEL, *COPIES):
        by_size = kind in COPIES
        theirs = _size(runs.bytes, runs.many) if by_size else runs.stream
        mine = _size(mixed.bytes[:, kind], mixed.many[:, kind]) if by_size else mixed.stream
        has = mixed.many[:, kind] > 0
        for process, one in np.unique(np.stack((mixed.process, mine), axis=1)[has], axis=0).tolist():
            some = np.flatnonzero((runs.kind == kind) & (runs.process == process) & (theirs == one))
            rows = has & (mixed.process == process) & (mine == one)
            if len(some) >= FEWEST:
                each = _each(runs.length[some], runs.many[some], runs.mark_ns)
                low[rows, kind], high[rows, kind] = (mixed.many[rows, kind] * bound for bound in each)
    return low, high


def _together(mixed: Mixed, mark_ns: int, low: Array, high: Array) -> tuple[Array, Array]:
    """Bounds of all copies of each run, ns: where there are runs of copies alone that take turns alike, by those."""
    count, size = mixed.many[:, COPIES].sum(axis=1), mixed.bytes[:, COPIES].sum(axis=1)
    ways = (mixed.many[:, COPIES] > 0) @ (1 << np.arange(len(COPIES)))
    keys = np.stack((mixed.process, ways, _size(size, count)), axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which, alone = which.ravel(), mixed.late & (mixed.many.sum(axis=1) == count)
    for one in np.unique(which[alone]).tolist():
        some = alone & (which == one)
        if some.sum() >= FEWEST:
            each = _each(mixed.length[some], count[some], mark_ns)
            low[which == one], high[which == one] = (count[which == one] * bound for bound in each)
    return low, high


def _size(total: Array, count: Array) -> Array:
    """Sizes that are about as large have one number."""
    number: Array = np.round(np.log2(np.maximum(total, 1) / np.maximum(count, 1))).astype(np.int64)
    return number


def _each(length: Array, count: Array, mark_ns: int) -> tuple[float, float]:
    """How long a submission takes, from the shortest tenth to the longest, ns; perhaps with the mark behind it."""
    return quantile(length / count, count, SHORTEST), quantile((length + mark_ns) / count, count, LONGEST)


def quantile(each: Array, count: Array, part: float) -> float:
    """So much of one submission's length that this part of all take no longer; `count` of them take `each`."""
    order = np.argsort(each)
    upto = np.cumsum(count[order])
    return float(each[order][np.searchsorted(upto, part * upto[-1])])
