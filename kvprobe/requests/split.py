"""Intervals split by the account's lines: cumulative sums of each line, looked up where the intervals begin and end.

The account calls it waiting for copies where only copies run. A step does not wait for them while its thread is busy
with something else: it is late whether they run or not. Which of the two it is shows when they have ended: a thread
that waited for them goes on, one that was busy stays away.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import COPIES, Account, Line
from kvprobe.account.stretches import NOBODY, overlay
from kvprobe.recordings.intervals import Cover, group_starts
from kvprobe.recordings.model import Array

__all__ = ["LOAD", "PARTS", "PART_KEYS", "TURN", "causes_in", "gpu_of", "lines_in"]

# What a request's time consists of: lines of the account while a step works for it, and before that two of its own.
TURN, LOAD = len(Line), len(Line) + 1
PARTS = len(Line) + 2
# Where a thread is that is late and waits neither for copies nor for the device.
_BUSY = (Line.ALLOCATING, Line.PAGEABLE, Line.SUBMITTING, Line.PYTHON, Line.NO_CPU, Line.TIER, Line.ELSEWHERE)
PART_KEYS = (*(line.key for line in Line), "waiting_for_turn", "waiting_for_own_load")


def gpu_of(account: Account, process: Array) -> Array:
    """For each process row the GPU, by its number in `account.gpus`, that is held against its steps; -1: none was seen.

    A process of its own has one; a scheduler whose workers are other processes has the one that most is known of.
    """
    seen = [number for number, gpu in enumerate(account.gpus) if gpu.seen]
    seen.sort(key=lambda number: -account.gpus[number].operations)
    rows = np.unique(process)
    found = [next((n for n in seen if row in account.gpus[n].processes), seen[0] if seen else -1) for row in rows]
    return np.asarray(found, dtype=np.int64)[np.searchsorted(rows, process)] if len(rows) else rows


def lines_in(account: Account, gpu: Array, start: Array, end: Array) -> Array:
    """How long each interval was in each line; what the account does not cover is not known.

    Args:
        account: of the recording.
        gpu: of each interval, as `gpu_of` says.
        start: ns, (intervals,).
        end: ns, (intervals,), none before its start.

    Returns:
        (intervals, lines) int64; each row adds up to its interval.
    """
    out = np.zeros((len(start), len(Line)), dtype=np.int64)
    for number in np.unique(gpu).tolist():
        mine = gpu == number
        if number >= 0:
            out[mine] = _of_gpu(account, number, start[mine], end[mine])
    out[:, Line.NOT_KNOWN] += (end - start) - out.sum(axis=1)
    return out


def _as_waited(account: Account, gpu: int) -> Array:
    """The line of each stretch of a GPU, with copies beside a busy thread in the line of what keeps the thread busy.

    While a thread is late, copies may run. It was busy if it stayed away for longer after them than they took, and was
    in no call that waits for the device.
    """
    cut = account.gpus[gpu].stretches
    line: Array = cut.line.copy()
    if not len(line):
        return line
    first = group_starts(cut.caller)  # of each time that one thread is late
    spell = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(line))))
    copies = np.flatnonzero(np.isin(line, np.array(COPIES, dtype=np.uint8)) & (cut.caller != NOBODY))
    for thread in account.threads:
        mine = copies[cut.caller[copies] == thread.caller]
        if len(mine) and len(thread.waits_from):
            waited = Cover(thread.waits_from, thread.waits_to).within(cut.edges[mine], cut.edges[mine + 1])
            copies = np.setdiff1d(copies, mine[2 * waited > cut.ns[mine]], assume_unique=True)
    took = np.bincount(spell[copies], weights=cut.ns[copies], minlength=len(first))
    last = np.full(len(first), -1, dtype=np.int64)
    last[spell[copies]] = copies  # ascending: the last one of each spell stays
    busy = np.flatnonzero(np.isin(line, np.array(_BUSY, dtype=np.uint8)) & (np.arange(len(line)) > last[spell]))
    away = np.bincount(spell[busy], weights=cut.ns[busy], minlength=len(first))
    after = np.full(len(first), -1, dtype=np.int64)
    after[spell[busy[::-1]]] = busy[::-1]  # the first one behind the copies
    beside = copies[away[spell[copies]] > took[spell[copies]]]
    line[beside] = line[after[spell[beside]]]
    return line


def _of_gpu(account: Account, gpu: int, start: Array, end: Array) -> Array:
    cut, lines = account.gpus[gpu].stretches, _as_waited(account, gpu)
    edges = cut.edges
    begins, ends = np.clip(start, edges[0], edges[-1]), np.clip(end, edges[0], edges[-1])
    first, last = (np.clip(np.searchsorted(edges, at, "right") - 1, 0, len(cut.line) - 1) for at in (begins, ends))
    out = np.zeros((len(start), len(Line)), dtype=np.int64)
    for line in np.unique(lines).tolist():  # one by one: of millions of stretches all sums at once are too many
        mine = lines == line
        before = np.zeros(len(mine) + 1, dtype=np.int64)
        np.cumsum(np.where(mine, cut.ns, 0), out=before[1:])
        upto = [before[at] + np.where(mine[at], t - edges[at], 0) for at, t in ((first, begins), (last, ends))]
        out[:, line] = upto[1] - upto[0]
    return out


def causes_in(account: Account, gpu: int, start: Array, end: Array, line: Array) -> list[str]:
    """The cause that explains most of one line of each interval; "" where none does."""
    found = [""] * len(start)
    if gpu < 0 or not account.causes:
        return found
    cut = account.gpus[gpu].stretches
    edges = cut.edges
    begins, ends = np.clip(start, edges[0], edges[-1]), np.clip(end, edges[0], edges[-1])
    inside = np.flatnonzero(ends > begins)
    begins, ends, piece, of = overlay(begins[inside], ends[inside], edges, np.arange(len(cut.line)))
    of = inside[of]
    mine = (cut.cause[piece] != NOBODY) & (_as_waited(account, gpu)[piece] == line[of])
    spent = np.zeros((len(start), len(account.causes)), dtype=np.int64)
    np.add.at(spent, (of[mine], cut.cause[piece[mine]]), (ends - begins)[mine])
    for row in np.flatnonzero(spent.any(axis=1)).tolist():
        found[row] = account.causes[int(np.argmax(spent[row]))]
    return found
