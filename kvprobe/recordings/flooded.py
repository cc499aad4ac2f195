"""Whether a stream was given far more than a queue holds without a pause, from what the host saw alone.

Small blocks make a call at a full queue a little longer than one that finds a slot, and slots freed in chunks make one
call in so many long. Measured is how often calls beyond the first of such a stretch are slow, at what pace they return,
and whether their being slow begins where a queue that was empty is full. Where that tells nothing, and most of them
cost well more than the quickest of the stream, all that cost about as much as they do are taken for slow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.launchqueue.constants import (
    DEARER_IN_FLOOD,
    FILLED_SHARE,
    OVER_TIMES,
    REAL_DEPTH,
    SLOW_AT_LEAST_NS,
    SLOW_TIMES,
)
from kvprobe.launchqueue.evidence import Flood
from kvprobe.launchqueue.judge import conclude
from kvprobe.launchqueue.levels import half_empty
from kvprobe.recordings.assemble import quantile
from kvprobe.recordings.buckets import bucket_floor_ns
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import Array, Recording

if TYPE_CHECKING:
    from kvprobe.recordings.occupancy import StreamOccupancy

__all__ = ["QueueCalls", "flooded"]

_STAYS = 512  # calls over which it is looked whether they stay slow
_LOOK_NS = 100_000_000  # between two looks at a thread where CPUs are scarce; elsewhere 20 ms
_LONGEST_LOOK_NS = 1_000_000_000  # that a note spans


@dataclass(frozen=True)
class QueueCalls:
    """The calls of a queue as the host saw them, (calls,) each.

    Attributes:
        start: entry of each, ns; `end` its return.
        end: see there.
        base: what it costs where the queue has a slot, ns.
        slow: calls that cost well more.
        judged: calls that say something of the queue.
        emptied: calls before which it was known to be empty.
        whole: the call from which on all are there.
    """

    start: Array
    end: Array
    base: Array
    slow: Array
    judged: Array
    emptied: Array
    whole: int

    @cached_property
    def duration(self) -> Array:
        """Ns inside each."""
        out: Array = self.end - self.start
        return out


@dataclass(frozen=True)
class _Stretches:
    """Stretches of calls without a pause.

    Attributes:
        pace: ns that the device needs for one submission.
        returned: when all calls before each had returned, ns, (calls,); so the others but `paused`.
        first: number of the first call of its stretch.
        place: number in its stretch.
        length: calls of its stretch.
        top: calls of a long stretch, so late in it that no queue has a slot.
        free: calls so soon after the queue was empty that there was a slot.
        paused: those of `top` before which the host paused.
    """

    pace: float
    returned: Array
    first: Array
    place: Array
    length: Array
    top: Array
    free: Array
    paused: Array


def flooded(recording: Recording, queue: StreamOccupancy, given: QueueCalls, held: int, flood: int) -> None:
    """Fills in the queue's conclusion where such stretches tell one.

    Args:
        recording: without device activity.
        queue: one of its queues, nothing concluded of it yet.
        given: its calls.
        held: submissions that it takes.
        flood: submissions in a row that no queue holds.
    """
    if len(queue.calls) - given.whole <= flood:
        return
    names = recording.calls["name"][queue.calls]
    base = _quick_base(recording, queue, given, names)
    found = _stretches(given, held, flood)
    top, duration = found.top, given.duration
    if int(top.sum()) < held:
        return
    usual = quantile(duration[top], 0.5)
    ways = [np.maximum(SLOW_TIMES * base, base + SLOW_AT_LEAST_NS)]
    if usual >= DEARER_IN_FLOOD * float(base[top].mean()) and usual < float(np.median(ways[0][top])):
        ways.append(np.minimum(ways[0], (base + usual) / 2))
    always = _evidence(recording, queue, given, found, flood)
    for least in ways:
        slow = given.judged & (duration >= least)
        lost = np.where(top & slow, duration - base, 0).astype(np.int64)
        begun = _onsets(given.start, slow, given.emptied, top, float(slow[top].mean()), found.pace, held)
        concluded = conclude(
            replace(
                always,
                waits=int((top & slow).sum()),
                lost_ns=int(lost.sum()),
                times=float(np.median(least[top] / np.maximum(base[top], 1))),
                slow_after=_slow_after(slow, found.paused),
                onsets=len(begun),
                misfits=sum(abs(level - held) > (OVER_TIMES - 1) * held for level in begun),
                seen_waiting=least is ways[0] or usual >= FILLED_SHARE * found.pace,
                slow_before=int(slow[found.free].sum()),
            )
        )
        if concluded.state != "not full":
            break
    if concluded.state == "not full":
        return
    if not concluded.full:
        queue.conclusion = concluded
        return
    queue.depth = np.minimum(found.place, held).astype(np.int32)
    queue.blocked_by(concluded, top & slow, lost, "inferred")
    for name in queue.baseline_ns:
        queue.baseline_ns[name] = int(base[names == name][0])


def _quick_base(recording: Recording, queue: StreamOccupancy, given: QueueCalls, names: Array) -> Array:
    """What each call costs where the queue has a slot, ns: no more than what the quickest of its name cost."""
    base = np.zeros(len(names))
    for name in distinct(names).tolist():
        mine = names == name
        quickest = _quickest_ns(recording, queue, name, given.duration[mine & given.judged])
        base[mine] = min(queue.baseline_ns[name], quickest)
    return base


def _stretches(given: QueueCalls, held: int, flood: int) -> _Stretches:
    start, end, whole = given.start, given.end, given.whole
    count = np.arange(len(start))
    returned = np.r_[start[0], np.maximum.accumulate(end)[:-1]]
    pace = quantile(end[whole + flood :] - end[whole:-flood], 0.5) / flood
    fresh = given.emptied | (start - returned > 64 * pace) | (count == whole)
    first = np.maximum.accumulate(np.where(fresh, count, 0))
    length = np.bincount(first, minlength=len(start))[first]
    place = count - first
    counts = given.judged & (count >= whole)
    top = counts & (length >= flood) & (place > OVER_TIMES * held)
    free = counts & given.emptied[first] & half_empty(place, held) & (place > 0)
    paused = np.flatnonzero(top & (start - returned > 16 * pace))
    return _Stretches(pace, returned, first, place, length, top, free, paused)


def _evidence(recording: Recording, queue: StreamOccupancy, given: QueueCalls, found: _Stretches, flood: int) -> Flood:
    """What does not depend on which calls are taken for slow; the rest is left at nothing."""
    top = found.top
    began, ended = int(given.start[top].min()), int(given.end[top].max())
    return Flood(
        longest=int(found.length[top].max()),
        waits=0,
        calls=int(top.sum()),
        lost_ns=0,
        # From the end of the call before to that of this one, for as long as nothing was drained between.
        spent_ns=int((given.end - np.minimum(found.returned, given.start))[top].sum()),
        times=0.0,
        spread=_spread(given.end[top], found.first[top], flood),
        pauses=len(found.paused),
        slow_after=0,
        onsets=0,
        misfits=0,
        seen_waiting=False,
        slow_before=0,
        before=int(found.free.sum()),
        alone=_alone(recording, queue, began, ended),
        no_cpu=_no_cpu(recording, queue, began, ended),
    )


def _spread(end: Array, first: Array, flood: int) -> float:
    """How much the time for `flood` calls varies, from the tenth to the ninetieth percentile, of its median.

    A queue takes up what a thread gains or loses on the way; calls that are slow for a reason of the host have no pace.

    Args:
        end: when each call returned; `first` the number of the first call of its stretch.
        first: see there.
        flood: submissions in a row that no queue holds.
    """
    whole = first[flood:] == first[:-flood]
    took = (end[flood:] - end[:-flood])[whole]
    return (quantile(took, 0.9) - quantile(took, 0.1)) / max(quantile(took, 0.5), 1.0) if len(took) else 0.0


def _slow_after(slow: Array, paused: Array) -> int:
    """Pauses behind which most of the next calls are slow, the first one left out: it is slow by having been away."""
    sums = np.r_[0, np.cumsum(slow)]
    end = np.minimum(paused + 9, len(slow))
    return int((2 * (sums[end] - sums[paused + 1]) > end - paused - 1).sum())


def _onsets(start: Array, slow: Array, emptied: Array, top: Array, share: float, pace: float, held: int) -> list[float]:
    """What was outstanding, at this pace, where calls began to be as often slow as at the top and stayed so.

    One figure for each time that the queue was known to be empty and was filled, of several such places the nearest to
    the full depth; none where that is not in the detail. A host that is slow by itself is never so far ahead of its own
    pace.
    """
    found: list[float] = []
    begins = np.flatnonzero(emptied)
    for a, b in zip(begins.tolist(), np.append(begins, len(start))[1:].tolist(), strict=True):
        if b - a <= held + _STAYS or not top[a:b].any():
            continue
        sums = np.r_[0, np.cumsum(slow[a:b])]
        often = sums[_STAYS:] - sums[:-_STAYS] >= 0.75 * share * _STAYS
        begun = np.flatnonzero(often & ~np.r_[False, often[:-1]])
        if not len(begun):
            continue
        here = np.arange(b - a) - (start[a:b] - start[a]) / max(pace, 1.0)
        level = here - np.minimum(np.minimum.accumulate(here), 0)
        met = []
        for one in begun.tolist():
            near = sums[one + 64 : one + _STAYS + 1] - sums[one : one + _STAYS - 63]
            met.append(float(level[one + int(np.argmax(near >= 32 * share))]))
        found.append(min(met, key=lambda depth: abs(depth - held)))
    return found


def _quickest_ns(recording: Recording, queue: StreamOccupancy, name: int, duration: Array) -> float:
    """What the quickest few hundred calls of this name take: those that a queue takes before it is first full."""
    few = REAL_DEPTH
    totals = recording.totals
    if len(recording.histograms) == totals.rows:
        process = recording.calls["process"][queue.calls[0]]
        mine = (totals["process"] == process) & (totals["name"] == name) & np.isin(totals["stream"], queue.streams)
        counts = np.cumsum(recording.histograms[mine].sum(axis=0))
        if len(counts) and counts[-1] >= 4 * few:
            bucket = int(np.searchsorted(counts, few))
            return float(bucket_floor_ns(bucket) + bucket_floor_ns(bucket + 1)) / 2
    return quantile(duration, min(few / len(duration), 0.25)) if len(duration) else np.inf


def _alone(recording: Recording, queue: StreamOccupancy, begin: int, end: int) -> bool:
    """Whether one thread alone of the queue's process called CUDA in this time."""
    calls = recording.calls
    inside = (calls["process"] == calls["process"][queue.calls[0]]) & (calls["end_ns"] > begin)
    inside &= calls["start_ns"] < end
    threads = calls["thread"][inside]
    return bool((threads == threads[0]).all())


def _no_cpu(recording: Recording, queue: StreamOccupancy, begin: int, end: int) -> float:
    """Part of this time that the stream's threads waited for a CPU.

    Their calls are slow then for that, and a queue drains in a call, so that no pause is seen. Nobody looked at a
    thread after its last note: the program ends before the next look. What that note says is taken to go on for as long
    as one look more.
    """
    waits, calls = recording.cpu_waits, recording.calls
    waited = 0.0
    for thread in distinct(calls["thread"][queue.calls]).tolist():
        mine = (waits["process"] == calls["process"][queue.calls[0]]) & (waits["thread"] == thread)
        if not mine.any():
            continue
        start, stop = waits["start_ns"][mine], waits["end_ns"][mine]
        length = np.maximum(stop - start, 1)
        last = int(np.argmax(stop))
        until = stop.copy()
        until[last] += min(max(int(length[last]), _LOOK_NS), _LONGEST_LOOK_NS)
        inside = np.clip(np.minimum(until, end) - np.maximum(start, begin), 0, None)
        waited += float((waits["waited_ns"][mine] * (inside / length)).sum())
    return waited / max(end - begin, 1)
