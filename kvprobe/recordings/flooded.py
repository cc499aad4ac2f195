"""Whether a stream was given far more than a queue holds without a pause, from what the host saw alone.

Small blocks make a call at a full queue a little longer than one that finds a slot, and slots freed in chunks make one
call in so many long. Measured is how often calls beyond the first of such a stretch are slow, at what pace they return,
and whether their being slow begins where a queue that was empty is full. Where that tells nothing, and most of them
cost well more than the quickest of the stream, all that cost about as much as they do are taken for slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.launchqueue.constants import (
    DEARER_IN_FLOOD,
    FILLED_SHARE,
    OVER_TIMES,
    REAL_DEPTH,
    ROOM_SHARE,
    SLOW_AT_LEAST_NS,
    SLOW_TIMES,
)
from kvprobe.launchqueue.evidence import Flood
from kvprobe.launchqueue.judge import conclude
from kvprobe.recordings.assemble import distinct, quantile
from kvprobe.recordings.buckets import bucket_floor_ns
from kvprobe.recordings.model import Array, Recording

if TYPE_CHECKING:
    from kvprobe.recordings.occupancy import StreamOccupancy

__all__ = ["flooded"]

_STAYS = 512  # calls over which it is looked whether they stay slow


def flooded(
    recording: Recording, queue: StreamOccupancy, judged: Array, emptied: Array, whole: int, held: int, flood: int
) -> None:
    """Fills in the queue's conclusion where such stretches tell one.

    Args:
        recording: without device activity.
        queue: one of its queues, nothing concluded of it yet.
        judged: which of its calls say something of the queue, (calls,) bool.
        emptied: before which of them it was known to be empty, likewise.
        whole: the first of them from which on all are there.
        held: submissions that it takes.
        flood: submissions in a row that no queue holds.
    """
    calls, rows = recording.calls, queue.calls
    if len(rows) - whole <= flood:
        return
    start, end = calls["start_ns"][rows], calls["end_ns"][rows]
    duration = end - start
    base = np.zeros(len(rows))
    for name in distinct(calls["name"][rows]):
        mine = calls["name"][rows] == name
        base[mine] = min(queue.baseline_ns[name], _quickest_ns(recording, queue, name, duration[mine & judged]))
    count = np.arange(len(rows))
    returned = np.r_[start[0], np.maximum.accumulate(end)[:-1]]
    pace = quantile(end[whole + flood :] - end[whole:-flood], 0.5) / flood  # what the device needs for one
    fresh = emptied | (start - returned > 64 * pace) | (count == whole)
    first = np.maximum.accumulate(np.where(fresh, count, 0))
    length = np.bincount(first, minlength=len(rows))[first]
    place = count - first
    top = judged & (length >= flood) & (place > OVER_TIMES * held) & (count >= whole)
    if int(top.sum()) < held:
        return
    least = np.maximum(SLOW_TIMES * base, base + SLOW_AT_LEAST_NS)
    usual = quantile(duration[top], 0.5)
    ways = [least]
    if usual >= DEARER_IN_FLOOD * float(base[top].mean()) and usual < float(np.median(least[top])):
        ways.append(np.minimum(least, (base + usual) / 2))
    room = judged & emptied[first] & (place < ROOM_SHARE * held) & (count >= whole) & (place > 0)
    paused = np.flatnonzero(top & (start - returned > 16 * pace))
    began, ended = int(start[top].min()), int(end[top].max())
    for least in ways:
        slow = judged & (duration >= least)
        lost = np.where(top & slow, duration - base, 0).astype(np.int64)
        begun = _onsets(start, slow, emptied, top, float(slow[top].mean()), pace, held)
        concluded = conclude(
            Flood(
                longest=int(length[top].max()),
                waits=int((top & slow).sum()),
                calls=int(top.sum()),
                lost_ns=int(lost.sum()),
                # From the end of the call before to that of this one, for as long as nothing was drained between.
                spent_ns=int((end - np.minimum(returned, start))[top].sum()),
                times=float(np.median(least[top] / np.maximum(base[top], 1))),
                spread=_spread(end[top], first[top], flood),
                pauses=len(paused),
                slow_after=_slow_after(slow, paused),
                onsets=len(begun),
                misfits=sum(abs(level - held) > (OVER_TIMES - 1) * held for level in begun),
                seen_waiting=least is ways[0] or usual >= FILLED_SHARE * pace,
                slow_before=int(slow[room].sum()),
                before=int(room.sum()),
                alone=_alone(recording, queue, began, ended),
                no_cpu=_no_cpu(recording, queue, began, ended),
            )
        )
        if concluded.state != "not full":
            break
    if concluded.state == "not full":
        return
    if not concluded.full:
        queue.conclusion = concluded
        return
    queue.depth = np.minimum(place, held).astype(np.int32)
    queue.blocked_by(concluded, top & slow, lost, "inferred")
    for name in queue.baseline_ns:
        queue.baseline_ns[name] = int(base[calls["name"][rows] == name][0])


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

    Their calls are slow then for that, and a queue drains in a call, so that no pause is seen.
    """
    waits, calls = recording.cpu_waits, recording.calls
    mine = waits["process"] == calls["process"][queue.calls[0]]
    mine &= np.isin(waits["thread"], distinct(calls["thread"][queue.calls]))
    length = np.maximum(waits["end_ns"] - waits["start_ns"], 1)
    inside = np.clip(np.minimum(waits["end_ns"], end) - np.maximum(waits["start_ns"], begin), 0, None)
    return float((waits["waited_ns"] * (inside / length))[mine].sum()) / max(end - begin, 1)
