"""What it saves to upload experts ahead: the turns of the thread that uploads, played again without its waits.

A turn ends with a wait of the thread for the GPU. Where uploads follow it, it waits to know which experts are needed:
whoever knows that before does not wait there, and uploads while what came before computes. Other waits stay, as for the
results of a step: the first uploads behind them have nothing to hide behind. In each turn the thread is busy for as
long as it was, the GPU computes for as long as it did, and the link carries the same bytes; instead of a wait that goes
the thread records an event and lets the stream that computes wait for it, which together take a call that uploads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Recording

__all__ = ["UploadTurns", "ahead_ns", "turns_of"]


@dataclass(frozen=True)
class UploadTurns:
    """Of one thread, one behind the other; arrays have one entry a turn, times are in ns.

    Attributes:
        begin, wait, end: where the turn begins, where its last wait begins, and where that ends.
        busy: how long the thread was in no wait.
        issuing: how long it made calls that upload, or was between two of them.
        bytes: that it uploaded.
        call_ns: what a call that uploads takes.
    """

    begin: Array
    wait: Array
    end: Array
    busy: Array
    issuing: Array
    bytes: Array
    call_ns: float


def turns_of(
    recording: Recording, copies: Array, size: Array, issued: tuple[Array, Array], window: tuple[int, int]
) -> UploadTurns | None:
    """The turns of the thread that uploads most; None where it does not wait between its uploads.

    Args:
        recording: with its calls.
        copies: rows of the calls that upload, ascending.
        size: bytes of each.
        issued: from when to when the thread was at it, of each.
        window: from when to when turns count.
    """
    calls = recording.calls
    threads, many = np.unique(calls["thread"][copies], return_counts=True)
    most = threads[np.argmax(many)]
    mine = (calls["thread"] == most) & (calls["process"] == calls["process"][copies[0]])
    mine &= (calls["start_ns"] >= window[0]) & (calls["end_ns"] <= window[1])
    uploads = np.zeros(calls.rows, dtype=bool)
    uploads[copies] = True
    kinds = np.array((CallKind.SYNC, CallKind.COPY_SYNC), dtype=np.uint8)
    rows = np.flatnonzero(mine & ~uploads & np.isin(calls["kind"], kinds))
    rows = rows[np.argsort(calls["start_ns"][rows], kind="stable")]
    if not len(rows):
        return None
    waits, waited = calls["start_ns"][rows], np.maximum.accumulate(calls["end_ns"][rows])
    submits = np.sort(calls["start_ns"][mine & np.isin(calls["kind"], np.array((*SUBMITTING, CallKind.COPY_SYNC)))])
    # a wait right behind another is one with it
    last = np.append(np.searchsorted(submits, waited[:-1]) < np.searchsorted(submits, waits[1:]), True)
    ends, number = np.flatnonzero(last), len(np.flatnonzero(last)) - 1
    if number < 1:
        return None
    begin, wait, end = waited[ends[:-1]], waits[ends[1:]], waited[ends[1:]]
    at = np.searchsorted(begin, calls["start_ns"][copies], "right") - 1
    inside = uploads[copies] & mine[copies] & (at >= 0)
    inside &= calls["start_ns"][copies] < end[np.maximum(at, 0)]
    at = at[inside]
    spent = (issued[1] - issued[0])[inside]
    issuing, moved = (np.bincount(at, one, number) for one in (spent, size[inside]))
    if (moved > 0).sum() < 2:
        return None
    busy = end - begin - Cover(waits, waited).within(begin, end)
    each = float(np.median(calls["end_ns"][copies] - calls["start_ns"][copies]))
    return UploadTurns(begin, wait, end, busy, issuing, moved, each)


def ahead_ns(turns: UploadTurns, computing: Cover, seen: Cover, ns_a_byte: float) -> int:
    """How long all turns take if uploads begin ahead.

    Args:
        turns: as they were.
        computing: when the GPU computed, where it was seen.
        seen: when it was; turns outside take for their computing what those like them take.
        ns_a_byte: that the link takes.
    """
    lasts = turns.end - turns.begin
    told = seen.within(turns.begin, turns.end) == lasts
    computed = computing.within(turns.begin, turns.end).astype(np.float64)
    # from when the GPU had computed until the thread knew
    at = np.searchsorted(computing.start, turns.end) - 1
    before = np.minimum(computing.end[np.maximum(at, 0)], turns.end) if len(computing.end) else turns.end
    tail = (turns.end - np.maximum(before, turns.wait)).astype(np.float64)
    uploads = turns.bytes > 0
    goes = np.append(uploads[1:], False)  # the wait at the end of each turn
    for values in (computed, tail):
        _fill(values, told, 2 * uploads + goes)
    # the first uploads behind a wait that stays are made before what was launched in front of them
    made = turns.issuing + np.where(goes & ~uploads, np.append(turns.issuing[1:], 0), 0)
    thread = link = gpu = 0.0
    for row in range(len(lasts)):
        issued = thread + made[row]
        if uploads[row]:
            link = max(max(link, thread) + turns.bytes[row] * ns_a_byte, issued)
            gpu = max(gpu, link)
        gpu = max(gpu, issued) + computed[row]
        thread += turns.busy[row]
        if goes[row]:
            thread += turns.call_ns
        else:
            thread = max(thread, gpu) + tail[row]
    return round(max(thread, gpu))


def _fill(value: Array, told: Array, kind: Array) -> None:
    """Gives those that are not told the mean of their kind, or of all where none of it is."""
    for one in np.unique(kind[~told]).tolist():
        alike = told & (kind == one)
        known = alike if alike.any() else told
        value[~told & (kind == one)] = value[known].mean() if known.any() else 0.0
