"""What was outstanding at each call of a launch queue, counted from the timing events that `kvprobe run` put into it.

A mark knows how many slots of its stream had been given when it was recorded, and when the device had reached it. So
the slots that were given are known at every mark and, by the calls that were kept, between two of them; those that were
done are known at the ends of every span, and are taken to have become so evenly within it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvprobe.launchqueue.constants import BAND_SHARE
from kvprobe.launchqueue.evidence import HeldAt, Pinned
from kvprobe.launchqueue.levels import with_slot
from kvprobe.recordings.assemble import quantile
from kvprobe.recordings.model import SUBMITTING, Array, Recording, Table

if TYPE_CHECKING:
    from kvprobe.recordings.occupancy import StreamOccupancy

__all__ = ["MarkedDepth", "depth_by_marks", "held_at", "pinned"]


FRINGE = 0.02  # of the calls of a band: those at its lower end come from below


class MarkedDepth(NamedTuple):
    """Slots that were taken at the entry of each call of a queue.

    Attributes:
        own: of the queue's own streams, (calls,) float64.
        known: where that is known, (calls,) bool.
        everywhere: of all streams of the process together, the most at any of these calls: some share a queue.
    """

    own: Array
    known: Array
    everywhere: int


def depth_by_marks(recording: Recording, queue: StreamOccupancy) -> MarkedDepth | None:
    """What marks tell of the entries of the queue's calls; None where no mark of its streams counted slots."""
    calls, rows = recording.calls, queue.calls
    if not recording.marks.rows or not len(rows):
        return None
    process = int(calls["process"][rows[0]])
    marks = recording.marks.where(recording.marks["process"] == process)
    if not np.isin(marks["stream"], queue.streams).any():
        return None
    at = calls["start_ns"][rows]
    own, known, everywhere = np.zeros(len(rows)), np.ones(len(rows), dtype=bool), np.zeros(len(rows))
    holes = _holes(recording, process)
    submits = np.isin(calls["kind"], SUBMITTING) & (calls["process"] == process)
    for stream in np.unique(marks["stream"]).tolist():
        some = marks.where(marks["stream"] == stream)
        given, told = _given(some, np.sort(calls["start_ns"][submits & (calls["stream"] == stream)]), at, holes)
        depth = np.maximum(given - _done(some, at), 0)
        everywhere += depth
        if stream in queue.streams:
            own += depth
            known &= told
    return MarkedDepth(own, known, int(everywhere[known].max(initial=0)))


def pinned(
    marked: MarkedDepth, duration: Array, until_next: Array, judged: Array, depths: tuple[float, float]
) -> tuple[Pinned, Array, Array] | None:
    """Where the counts of a queue's calls gather.

    Args:
        marked: the counts.
        duration: of each call, ns.
        until_next: from the entry of each call to that of the next, ns.
        judged: calls that can be judged.
        depths: least and most submissions that the queue may take.

    Returns:
        The evidence, which calls it is about, and what each of them took more than calls with a slot; None: no call
        was counted near such a depth.
    """
    known = marked.known & judged
    counts = np.round(np.maximum(marked.own, 0)).astype(np.int64)
    if not (known & (counts >= depths[0])).any():
        return None
    often = np.bincount(counts[known])
    width = max(2, round(BAND_SHARE * depths[1]))
    bands = np.convolve(often, np.ones(width, dtype=np.int64))[width - 1 :]  # calls from each count on
    begin = int(np.argmax(bands))
    most = begin + width - 1
    within = np.cumsum(often[begin : most + 1])
    least = begin + int(np.searchsorted(within, FRINGE * within[-1], "right"))
    slot = with_slot(counts, depths[0])
    elsewhere = bands[: max(0, begin - 2 * width)]
    top, below = known & (counts >= least), duration[known & slot]
    usual = quantile(below, 0.5) if len(below) else quantile(duration[top], 0.25)
    quick = quantile(below, 0.25) if len(below) else 0.0
    lost = np.where(top, np.maximum(duration - usual, 0), 0).astype(np.int64)
    evidence = Pinned(
        least,
        min(most, int(counts[known].max())),
        int(top.sum()),
        int(elsewhere.max(initial=0)),
        len(below),
        quantile(duration[top], 0.25) / quick if quick else 0.0,
        float(duration[top].sum()) / max(int(until_next[top].sum()), 1),
        depths,
        int((lost > 0).sum()),
        int(lost.sum()),
    )
    return evidence, lost > 0, lost


def held_at(marked: MarkedDepth, excess: Array, long: Array, depths: tuple[float, float]) -> tuple[HeldAt, Array]:
    """How many were outstanding at calls that waited for far more than a copy; and at which of them a queue's depth.

    Args:
        marked: the counts.
        excess: what each call took more than usual, ns.
        long: those calls.
        depths: least and most submissions that the queue may take.
    """
    counts = np.round(np.maximum(marked.own, 0))
    known = long & marked.known
    there = known & (depths[0] <= counts) & (counts <= depths[1])
    other = long & ~there
    found = counts[there].astype(np.int64)
    evidence = HeldAt(
        len(found),
        int(excess[there].sum()),
        int(found.min(initial=np.iinfo(np.int64).max)),
        int(found.max(initial=0)),
        int(other.sum()),
        int(excess[other].sum()),
    )
    return evidence, there


def _holes(recording: Recording, process: int) -> Array:
    """Ends of the intervals in which a process marked nothing, ascending, ns; (holes, 2) begin and end."""
    table = recording.coverage
    mine = np.flatnonzero((table["process"] == process) & (table["stopped"] > 0))
    mine = mine[np.argsort(table["start_ns"][mine], kind="stable")]
    return np.stack((table["start_ns"][mine], table["end_ns"][mine]), axis=1)


def _given(marks: Table, submits: Array, at: Array, holes: Array) -> tuple[Array, Array]:
    """Slots given before each instant, by the marks and the calls between them; and where that is known."""
    order = np.argsort(marks["given_ns"], kind="stable")
    times, slots = marks["given_ns"][order], marks["slots"][order]
    first = int(slots[0] - 1 - marks["count"][order][0])
    begins = min(int(times[0]), int(submits[0]) if len(submits) else int(times[0])) - 1
    times, slots = np.append(begins, times), np.append(first, slots)
    last = np.searchsorted(times, at, "left") - 1
    base = np.maximum(last, 0)
    own = np.searchsorted(submits, at, "left") - np.searchsorted(submits, times[base], "left")
    # launches and events are not kept one by one: what a mark counted beyond the calls is spread over those, else over
    # the time since the last
    following = np.minimum(base + 1, len(times) - 1)
    between = np.searchsorted(submits, times[following], "left") - np.searchsorted(submits, times[base], "left")
    missing = np.maximum(slots[following] - slots[base] - 1 - between, 0)
    passed = (at - times[base]) / np.maximum(times[following] - times[base], 1)
    passed = np.where(between > 0, own / np.maximum(between, 1), passed)
    given = slots[base] + own + np.where(following > base, missing * passed, 0)
    return given, (last >= 0) & _unbroken(times[base], at, holes)


def _unbroken(since: Array, at: Array, holes: Array) -> Array:
    """Mask: no hole lies between the two instants, in part or as a whole."""
    if not len(holes):
        return np.ones(len(at), dtype=bool)
    touched = np.searchsorted(holes[:, 0], at, "right") - np.searchsorted(holes[:, 1], since, "right")
    unbroken: Array = touched <= 0
    return unbroken


def _done(marks: Table, at: Array) -> Array:
    """Slots that were done at each instant."""
    order = np.argsort(marks["done_ns"], kind="stable")
    slots = marks["slots"][order].astype(float)
    times = np.stack((marks["begun_ns"][order], marks["done_ns"][order]), axis=1).ravel()
    # events lie between the submissions of a run; where more is missing than it has of those, it is marks
    begun, last = slots - 1 - marks["count"][order], np.append(-np.inf, slots[:-1])
    begun = np.where(begun - last <= marks["count"][order], np.minimum(begun, last), begun)
    done = np.stack((begun, slots), axis=1).ravel()
    at_least: Array = np.interp(at, np.maximum.accumulate(times), np.maximum.accumulate(done))
    return at_least
