"""Where a thread waited for somebody else to send it something: a request, as far as a GPU is concerned."""

from __future__ import annotations

import numpy as np

from kvprobe.account.cpu_time import is_noted, others_may_work
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, Recording

__all__ = ["asked_for_nothing", "slept_alone", "waits_for_others"]

_FROM_OUTSIDE = frozenset(
    [f"recv{kind}" for kind in ("", "from", "msg", "mmsg")]
    + ["accept", "accept4", "poll", "ppoll", "select", "pselect"]
    + [f"epoll_{kind}" for kind in ("wait", "pwait", "pwait2")]
)

_FOR_A_DISK = frozenset(("fsync", "fdatasync", "msync", "sync", "syncfs"))


def _received(recording: Recording, process: int, thread: int) -> Array:
    """Rows of `os_calls` in which this thread waited for what others send."""
    slept = recording.os_calls
    mine = (slept["process"] == process) & (slept["thread"] == thread)
    names = [i for i, name in enumerate(recording.names) if name in _FROM_OUTSIDE] if mine.any() else []
    return np.flatnonzero(mine & among(slept["name"], names))


def waits_for_others(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """Mask over pauses of a thread, ns: for most of each it waited for what others send."""
    rows = _received(recording, process, thread)
    slept = recording.os_calls
    return np.asarray(2 * Cover(slept["start_ns"][rows], slept["end_ns"][rows]).within(start, end) > end - start)


def asked_for_nothing(recording: Recording, process: int, thread: int) -> tuple[Array, Array]:
    """Where this thread waited so and no other of its process made meanwhile what it may have waited for; ns."""
    slept, rows = recording.os_calls, _received(recording, process, thread)
    start, end = slept["start_ns"][rows], slept["end_ns"][rows]
    if is_noted(recording, process):
        worked = others_may_work(recording, process, thread, start, end)
    else:
        worked = _others_awake(recording, process, thread, start, end)
    return start[~worked], end[~worked]


def slept_alone(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """Mask over pauses of a thread, ns: it slept for most of each, waiting for no disk, and no other was awake."""
    slept = recording.os_calls
    disk = among(slept["name"], [i for i, name in enumerate(recording.names) if name in _FOR_A_DISK])
    mine = (slept["process"] == process) & (slept["thread"] == thread) & ~disk
    asleep = Cover(slept["start_ns"][mine], slept["end_ns"][mine]).within(start, end)
    return np.asarray((2 * asleep > end - start) & ~_others_awake(recording, process, thread, start, end))


def _others_awake(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """Mask over waits: for most of them another thread of the process, that sleeps before and after, did not.

    What it makes may be what this thread waits for. Whether one sleeps on until the end is not known.
    """
    slept = recording.os_calls
    rows = np.flatnonzero(slept["process"] == process)
    rows = rows[slept["thread"][rows] != thread]
    rows = rows[np.lexsort((slept["start_ns"][rows], slept["thread"][rows]))]
    same = slept["thread"][rows][1:] == slept["thread"][rows][:-1]
    awake = Cover(slept["end_ns"][rows][:-1][same], slept["start_ns"][rows][1:][same])
    return np.asarray(2 * awake.within(start, end) > end - start)
