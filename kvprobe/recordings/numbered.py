"""Whether launches met a full queue, where only the slow ones are kept and each says its number.

kvprobe's interposer times every launch and keeps those of at least 20 µs, with the number of launches that their thread
had made; waits carry the same number. So it is known how many launches a thread had made since its stream was last
known to be empty, however few of them are in the recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.launchqueue.constants import BATCH_SLOTS
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Recording

if TYPE_CHECKING:
    from kvprobe.recordings.occupancy import StreamOccupancy

IDLE_NS = 100_000

FEW_RECORDS = 0.1  # records of events to a submission: fewer hardly change what a queue takes

__all__ = ["event_records", "launches_since_empty", "partial", "slots_each", "told_to_wait"]


def slots_each(recording: Recording, queue: StreamOccupancy, *, with_events: bool = True) -> float:
    """Slots of the queue that one of its submissions takes; `with_events`: and the events that are recorded behind it.

    One, or more where nearly all are batches of many copies, and where an event is recorded behind nearly each.
    """
    calls, rows = recording.calls, queue.calls
    batches = rows[calls["kind"][rows] == CallKind.BATCH]
    slots = 1.0
    if 10 * len(batches) >= 9 * len(rows):
        slots = max(float(np.median(np.ceil(BATCH_SLOTS * calls["count"][batches]))), 1.0)
    counted = (calls["kind"][rows] == CallKind.EVENT).any()
    return slots if counted or not with_events else slots + _records_each(recording, queue)


_RECORDS = "eventrecord"  # in the names of calls that record an event


def _records_each(recording: Recording, queue: StreamOccupancy) -> float:
    """Events recorded on the queue's streams for each of its submissions, by the totals; 0 where they are few."""
    totals = recording.totals
    mine = np.isin(totals["stream"], queue.streams)
    made = int(totals["calls"][mine & np.isin(totals["kind"], SUBMITTING)].sum())
    records = int(totals["calls"][mine & recording.are_named(_RECORDS)[totals["name"]]].sum())
    return records / made if made and records >= FEW_RECORDS * made else 0.0


def event_records(recording: Recording, streams: list[int]) -> Array:
    """Rows of the calls that record an event on these streams, none where they are few or some of them are missing."""
    calls, totals = recording.calls, recording.totals
    named = recording.are_named(_RECORDS)
    rows = np.flatnonzero(calls["kind"] == CallKind.EVENT)
    rows = rows[np.isin(calls["stream"][rows], streams)]
    rows = rows[named[calls["name"][rows]]]
    if not len(rows):  # of most streams: what follows looks at every call
        return rows
    submits = np.isin(calls["kind"], np.array(SUBMITTING, dtype=np.uint8)) & np.isin(calls["stream"], streams)
    counted = int(totals["calls"][np.isin(totals["stream"], streams) & named[totals["name"]]].sum())
    few = len(rows) < FEW_RECORDS * int(submits.sum()) or len(rows) < counted
    return rows[:0] if few else rows


def partial(recording: Recording, queue: StreamOccupancy) -> Array:
    """Which of the queue's calls are launches of which others are missing, (calls,) bool."""
    calls, rows = recording.calls, queue.calls
    mine: Array = (calls["kind"][rows] == CallKind.LAUNCH) & (calls["launches"][rows] >= 0)
    if not mine.any():
        return mine
    for thread in np.unique(calls["thread"][rows[mine]]):
        number = calls["launches"][rows[mine & (calls["thread"][rows] == thread)]]
        if int(number.max()) - int(number.min()) >= len(number):
            return mine
    return np.zeros(len(rows), dtype=bool)


def emptying_waits(recording: Recording, queue: StreamOccupancy) -> Array:
    """Rows of the calls that waited for the queue's stream or for its whole device, in no order."""
    calls = recording.calls
    names = [text.lower() for text in recording.names] or [""]
    whole = np.array(["devicesynchronize" in text or "ctxsynchronize" in text for text in names])
    one = np.array(["streamsynchronize" in text for text in names])
    waits = np.flatnonzero((calls["kind"] == CallKind.SYNC) & (calls["process"] == calls["process"][queue.calls[0]]))
    name = calls["name"][waits]
    found: Array = waits[whole[name] | one[name] & np.isin(calls["stream"][waits], queue.streams)]
    return found


def launches_since_empty(recording: Recording, queue: StreamOccupancy, mine: Array) -> Array:
    """Launches that the thread of each of `mine` had made since its stream was known to be empty, itself not counted.

    A wait for the stream or for the device, which began after the thread's launches before it, empties it. Launches to
    other streams count too: the figure is an upper bound of what was outstanding.

    Args:
        recording: of `kvprobe run`.
        queue: whose calls `mine` masks.
        mine: (calls,) bool, as `partial` returns it.

    Returns:
        One count for each call that `mine` selects, int64.
    """
    calls = recording.calls
    rows = queue.calls[mine]
    waits = emptying_waits(recording, queue)
    out = np.zeros(len(rows), dtype=np.int64)
    for thread in np.unique(calls["thread"][rows]):
        theirs = np.flatnonzero(calls["thread"][rows] == thread)
        own = waits[calls["thread"][waits] == thread]
        own = own[np.argsort(calls["end_ns"][own], kind="stable")]
        before = np.searchsorted(calls["end_ns"][own], calls["start_ns"][rows[theirs]], "right")
        made = np.append(0, np.maximum(calls["launches"][own], 0))[before]
        out[theirs] = calls["launches"][rows[theirs]] - 1 - made
    return np.maximum(out, 0)


def told_to_wait(recording: Recording, queue: StreamOccupancy) -> Array:
    """Before which of the queue's calls its stream was told to wait for an event after 0.1 ms without a call.

    Returns:
        (calls,) bool.
    """
    calls, rows = recording.calls, queue.calls
    waits = np.array(["streamwaitevent" in text.lower() for text in recording.names or [""]])
    told = np.sort(calls["start_ns"][waits[calls["name"]] & np.isin(calls["stream"], queue.streams)])
    start, end = calls["start_ns"][rows], np.maximum.accumulate(calls["end_ns"][rows])
    number = np.searchsorted(told, start)
    before = np.r_[0, number[:-1]]
    idle = np.r_[True, start[1:] - end[:-1] > IDLE_NS]
    mask: Array = (number > before) & idle
    return mask
