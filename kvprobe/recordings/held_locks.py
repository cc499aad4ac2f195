"""What other calls of a process say of a submission: that it held the context's lock, or was its thread's first call.

A submission that finds the queue full waits inside the driver with the context's lock held. Whoever makes an event or a
stream, allocates or frees wants that lock and is let on when the submission returns. And a thread's first call of CUDA
is slow by itself: it makes the context current.
"""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.assemble import among, pairs
from kvprobe.recordings.model import Array, CallKind, Recording

__all__ = ["first_of_threads", "held_lock"]

AT_ONCE_NS = 50_000  # who waited for a call goes on so soon after it


def held_lock(recording: Recording, rows: Array, long: Array, slow: Array) -> Array:
    """Which of the long submissions held the lock, by those who waited for it, (rows,) bool.

    Such a waiter began while the submission ran (what began before could be what the submission itself waits for), and
    went on when it returned, or when a slow submission returned that followed it at once.

    Args:
        recording: of any kind.
        rows: the calls of a queue, in the order of time.
        long: of them, those that are asked about, (rows,) bool; `slow` those that took longer than with free slots.
        slow: see there.
    """
    calls = recording.calls
    mask = np.zeros(len(rows), dtype=bool)
    wants = among(calls["kind"], (CallKind.CREATE, CallKind.ALLOC, CallKind.FREE))
    waiters = np.flatnonzero(wants & (calls["end_ns"] - calls["start_ns"] > 2 * AT_ONCE_NS))
    if not len(waiters):
        return mask
    began, went_on = calls["start_ns"][waiters], calls["end_ns"][waiters]
    start, end = calls["start_ns"][rows], calls["end_ns"][rows]
    for at in np.flatnonzero(long).tolist():
        of_another = calls["process"][waiters] == calls["process"][rows[at]]
        of_another &= calls["thread"][waiters] != calls["thread"][rows[at]]
        inside = of_another & (began > start[at] + AT_ONCE_NS) & (began < end[at])
        last = at
        while True:
            mask[at] |= bool((inside & (abs(went_on - end[last]) <= AT_ONCE_NS)).any())
            last += 1
            if mask[at] or last == len(rows) or not slow[last] or start[last] - end[last - 1] > AT_ONCE_NS:
                break
    return mask


def first_of_threads(recording: Recording, rows: Array) -> Array:
    """Which of these calls are the first that their thread made in the recording, (rows,) bool."""
    calls = recording.calls
    found, place = pairs(calls["process"], calls["thread"])
    earliest = np.full(len(found), np.iinfo(np.int64).max)
    np.minimum.at(earliest, place, calls["start_ns"])
    first: Array = calls["start_ns"][rows] == earliest[place[rows]]
    return first
