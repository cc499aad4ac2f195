"""Who worked while a thread made no CUDA call, by the CPU time that `kvprobe run` notes of its pauses."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, Recording

__all__ = ["Worked", "covers_of", "is_noted", "others_may_work", "process_ns", "who_worked"]

MOST = 0.5  # of a pause that somebody worked, at least; a core is shared with others
NEXT_TO_NOTHING = 0.05  # of a pause that a process worked, at most, which waited
ASLEEP = 0.25  # of a pause that a process worked, at most, whose thread slept for most of it
CLOCK_NS = 2_048  # where a pause begins is known to that
ROUGH = 0.25  # of a pause: with more time before it in the same figures they say little of other threads


@unique
class Worked(IntEnum):
    """Who used the CPU for most of a pause."""

    NOT_KNOWN = 0
    THREAD = 1  # that made no call
    ANOTHER = 2  # of the process, and the thread itself hardly did
    NOBODY = 3  # of the process
    LITTLE = 4  # somebody of the process, for a small part of it: for the rest its thread slept


def _of_pauses(recording: Recording, rows: Array, begin: int, end: int) -> Array:
    """Worked, for what lies between these instants of each of these rows of `pauses`.

    The figures also hold what was used in `more_ns` before the pause, and in the rest of a pause that lies in part
    outside: of one thread no more than that time.
    """
    pauses = {name: column[rows] for name, column in recording.pauses.items()}
    ns = np.maximum(np.minimum(pauses["end_ns"], end) - np.maximum(pauses["start_ns"], begin), 1)
    more = pauses["more_ns"] + (pauses["end_ns"] - pauses["start_ns"]) - ns
    thread, process = pauses["thread_ns"], np.maximum(pauses["process_ns"], pauses["thread_ns"])
    out = np.full(len(rows), Worked.NOT_KNOWN, dtype=np.uint8)
    others = (process - thread - more >= MOST * ns) & (more <= ROUGH * ns)
    out[others & (thread <= NEXT_TO_NOTHING * ns + more)] = Worked.ANOTHER
    out[process <= ASLEEP * ns] = Worked.LITTLE
    out[process <= NEXT_TO_NOTHING * ns] = Worked.NOBODY
    # one that never gave up its CPU wanted it all the time, and got what others left
    out[(thread - more >= MOST * ns) | (pauses["gave_up"] == 0)] = Worked.THREAD
    return out


def covers_of(recording: Recording, process: int, thread: int, begin: int, end: int) -> dict[Worked, Cover]:
    """The pauses of a thread in which each of these worked, as far as they lie between two instants."""
    pauses = recording.pauses
    rows = np.flatnonzero((pauses["process"] == process) & (pauses["thread"] == thread))
    rows = rows[(pauses["end_ns"][rows] > begin) & (pauses["start_ns"][rows] < end)]
    who = _of_pauses(recording, rows, begin, end)
    parts = {worked: rows[who == worked] for worked in Worked if worked != Worked.NOT_KNOWN}
    return {worked: Cover(pauses["start_ns"][part], pauses["end_ns"][part]) for worked, part in parts.items()}


def who_worked(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """Worked for most of each time from `start` to `end`, ns, in which a thread made no call; (times,) uint8."""
    out = np.full(len(start), Worked.NOT_KNOWN, dtype=np.uint8)
    if recording.pauses.rows and len(start):
        covers = covers_of(recording, process, thread, int(start.min()), int(end.max()))
        for worked, cover in covers.items():
            out[2 * cover.within(start, end) > end - start] = worked
    return out


def process_ns(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """CPU time that a process used in the pause that most of each time of a thread lies in, (times,) ns; 0: in none."""
    pauses, middle = recording.pauses, start + (end - start) // 2
    at = _newest(recording, process, thread, middle)
    if not len(at):
        return np.zeros(len(start), dtype=np.int64)
    inside = (pauses["start_ns"][at] <= middle) & (middle < pauses["end_ns"][at])
    return np.where(inside, np.maximum(pauses["process_ns"], pauses["thread_ns"])[at], 0)


def _newest(recording: Recording, process: int, thread: int, at: Array) -> Array:
    """The rows of the pauses of a thread that began last before these instants, or of its first; none: it has none."""
    pauses = recording.pauses
    rows = np.flatnonzero((pauses["process"] == process) & (pauses["thread"] == thread))
    rows = rows[np.argsort(pauses["start_ns"][rows], kind="stable")]
    return rows[np.maximum(np.searchsorted(pauses["start_ns"][rows], at, "right") - 1, 0)] if len(rows) else rows


def is_noted(recording: Recording, process: int) -> bool:
    """Whether the CPU time of a process's pauses was noted."""
    return bool((recording.pauses["process"] == process).any())


def others_may_work(recording: Recording, process: int, thread: int, start: Array, end: Array) -> Array:
    """Mask over waits of a thread, ns: other threads of its process may have worked for half of it and more.

    All of the CPU time that they used in the pause around the wait may lie in it. Where none was noted, nobody knows.
    """
    pauses = recording.pauses
    around = _newest(recording, process, thread, start + CLOCK_NS)
    if not len(around):
        return np.ones(len(start), dtype=bool)
    inside = (pauses["start_ns"][around] - CLOCK_NS <= start) & (end <= pauses["end_ns"][around])
    others = pauses["process_ns"][around] - pauses["thread_ns"][around]
    return np.asarray(~inside | (others >= MOST * (end - start)))
