"""Calls that another thread of their process held up: inside its call for most of their length, and ended by it."""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import MEASURED, Evidence
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.recordings.intervals import Cover, ascending, distinct

__all__ = ["STALL_NS", "held_up", "longest_of", "said"]

STALL_NS = 100_000  # a wait for another thread that is worth a look
RELEASED_NS = 50_000  # after the other call's end the waiter goes on within this, or within a tenth of its wait


def held_up(joined: JoinedRecording, rows: Array, holders: Array) -> tuple[Array, Array]:
    """Which of `rows` waited for a call of another thread.

    Args:
        joined: the recording.
        rows: calls that may have waited.
        holders: calls that may have held them; those of a row's own thread are left out.

    Returns:
        The rows that did, and how long each was inside such a call, ns.
    """
    ns = np.zeros(len(rows), dtype=np.int64)
    for caller in distinct(joined.caller[rows]) if len(rows) and len(holders) else ():
        mine = np.flatnonzero(joined.caller[rows] == caller)
        others = holders[
            (joined.caller[holders] != caller) & (joined.process[holders] == joined.process[rows[mine[0]]])
        ]
        if not len(others):
            continue
        start, end = joined.start[rows[mine]], joined.end[rows[mine]]
        inside = Cover(joined.start[others], joined.end[others]).within(start, end)
        # The waiter is released when a holder returns: one returns within the waiter's last tenth.
        ends = ascending(joined.end[others])
        slack = np.maximum((end - start) // 10, RELEASED_NS)
        released = np.searchsorted(ends, end + slack, side="right") > np.searchsorted(ends, end - slack, side="left")
        ns[mine] = np.where((2 * inside > end - start) & released, inside, 0)
    return rows[ns > 0], ns[ns > 0]


def longest_of(joined: JoinedRecording, rows: Array, holders: Array) -> tuple[Array, int]:
    """The holders that overlap these rows, and the longest of them."""
    holding = holders[
        Cover(joined.start[rows], joined.end[rows]).within(joined.start[holders], joined.end[holders]) > 0
    ]
    return holding, int(holding[np.argmax(joined.dur[holding])])


def said(joined: JoinedRecording, rows: Array, ns: Array, what: str) -> Evidence:
    """The calls that waited, by name, and how long, while another thread did `what`."""
    names = ", ".join(sorted({joined.text(i) for i in distinct(joined.name[rows])}))
    lost = int(ns.sum())
    return Evidence(
        f"{names}: {len(rows):,} calls, blocked for {ms(lost)} while another thread {what}, and until it had ended",
        lost,
        "ns",
        MEASURED,
    )
