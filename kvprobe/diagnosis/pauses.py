"""Where a thread was in no CUDA call for a millisecond and more, and how much of that it waited for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.joined import Array, JoinedRecording
from kvprobe.recordings.intervals import Cover, running_max_by_group

__all__ = ["Pauses", "long_pauses", "waited_within"]

LONG_NS = 1_000_000
_COLUMNS = ("start_ns", "end_ns", "waited_ns")


@dataclass
class Pauses:
    """Pauses by caller, then time; arrays of one entry a pause.

    Attributes:
        before, after: rows of the calls before and after it.
        caller: as `JoinedRecording.caller`.
        start, end: on the recording's clock, ns.
        waited_ns: for a CPU, of the kernel's count for the time around; 0 where none was noted.
    """

    before: Array
    after: Array
    caller: Array
    start: Array
    end: Array
    waited_ns: Array

    @property
    def ns(self) -> Array:
        """How long each one lasted."""
        length: Array = self.end - self.start
        return length


def long_pauses(joined: JoinedRecording) -> Pauses:
    """Pauses of all threads."""
    return joined.once(_long_pauses)


def _long_pauses(joined: JoinedRecording) -> Pauses:
    order = joined.by_caller
    caller = joined.caller[order]
    reach = running_max_by_group(joined.end[order], caller)
    begin = joined.start[order]  # later than the largest of the arrays in between: there may be millions
    long = np.flatnonzero((caller[1:] == caller[:-1]) & (begin[1:] - reach[:-1] > LONG_NS))
    start, end = reach[long], begin[long + 1]
    waited = np.zeros(len(long), dtype=np.int64)
    waits = joined.recording.cpu_waits
    if waits.rows:
        first = np.searchsorted(caller[long], caller[long], side="left")
        last = np.searchsorted(caller[long], caller[long], side="right")
        for a, b in set(zip(first.tolist(), last.tolist(), strict=True)):
            row = order[long[a]]
            mine = (waits["process"] == joined.process[row]) & (waits["thread"] == joined.thread[row])
            waited[a:b] = _of_pauses(start[a:b], end[a:b], *(waits[name][mine] for name in _COLUMNS))
    return Pauses(order[long], order[long + 1], caller[long], start, end, waited)


def _of_pauses(start: Array, end: Array, begin: Array, stop: Array, waited: Array) -> Array:
    """What was waited in each pause: a note's wait is spread over the pauses in its time, which need not hold all."""
    of_note = Cover(start, end).within(begin, stop)
    share = np.minimum(waited / np.maximum(of_note, 1), 1.0)
    return _amount_within(begin, stop, share * (stop - begin), start, end)


def _amount_within(begin: Array, stop: Array, amount: Array, start: Array, end: Array) -> Array:
    """How much of amounts, each spread evenly over its own time (disjoint, ascending), lies in each [start, end)."""
    if not len(begin):
        return np.zeros(len(start), dtype=np.int64)
    knots = np.ravel(np.column_stack((begin, stop)))
    sums = np.concatenate(([0.0], np.cumsum(amount)))
    level = np.ravel(np.column_stack((sums[:-1], sums[1:])))
    inside: Array = np.interp(end, knots, level) - np.interp(start, knots, level)
    return inside.astype(np.int64)


def waited_within(joined: JoinedRecording, caller: Array, start: Array, end: Array) -> Array:
    """How long a thread waited for a CPU in the pauses inside [start, end), for each entry; ns."""
    pauses = long_pauses(joined)
    out = np.zeros(len(start), dtype=np.int64)
    if not pauses.waited_ns.any():
        return out
    for one in np.unique(caller):
        mine, theirs = pauses.caller == one, caller == one
        out[theirs] = _amount_within(
            pauses.start[mine], pauses.end[mine], pauses.waited_ns[mine], start[theirs], end[theirs]
        )
    return out
