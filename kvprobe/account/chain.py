"""What a program would have been shorter by, had some of its time not been spent: along what waits for what.

Two clocks are played again from the account: a thread's, and that of the GPU which waits for it. Time taken out of the
thread lets everything behind it happen earlier, until the thread waits for the device: there it is as late as the
device is. Time taken out of the device's own work lets the device be earlier at once. An idle stretch that is this
thread's doing becomes shorter by as much as the thread is earlier than the device, and never by more than its length.
So what is saved never exceeds what the account says was not computing.

A call that a full queue blocks returns when the device has freed a slot. It is such a wait, too, unless it is what is
taken out: a thread that comes earlier only waits there for longer.

Work that is done one step earlier is not taken out: it only moves beside what the device does meanwhile. Of that much,
and of no more, the device waits less.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account.account import Account, GpuAccount, ThreadAccount
from kvprobe.account.lines import COPIES, HOST
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, group_starts
from kvprobe.recordings.model import Array

__all__ = ["STEP_NS", "hidden_beside_work", "saved_by_host"]

SMALL_PART = 0.1  # of the next gap: a gap that is shorter belongs to the same step
STEP_NS = 200_000  # an idle gap that is as long lies between two steps; shorter ones lie inside a step

_TAKEN, _IDLE, _WAIT = 0, 1, 2
_SHORTEST_NS = 1_000  # stretches and waits that are shorter change nothing
_MOST = 400_000  # events that are played; of more, the longest


_NONE = np.zeros(0, dtype=np.int64)


def saved_by_host(account: Account, caller: int, at: Array, ns: Array, slots: tuple[Array, Array] | None = None) -> int:
    """By how much the GPUs that wait for a thread would have been done earlier.

    Args:
        account: of the recording.
        caller: the thread, as `Joined.caller`.
        at: when time taken out of the thread ended, ns.
        ns: how much is taken out there.
        slots: the thread's waits for a slot of a full queue that stay: when each ended, and how long it was, ns.

    Returns:
        wall time in ns: of the GPU that gains most; 0 where none waits for this thread.
    """
    thread = next((one for one in account.threads if one.caller == caller), None)
    stay = slots if slots is not None else (_NONE, _NONE)
    return max((_on_gpu(gpu, thread, caller, (at, ns), stay) for gpu in account.gpus if gpu.seen), default=0)


def _on_gpu(
    gpu: GpuAccount, thread: ThreadAccount | None, caller: int, taken: tuple[Array, Array], slots: tuple[Array, Array]
) -> int:
    cut = gpu.stretches
    late = (cut.caller == caller) & among(cut.line, (*COPIES, *HOST))
    late &= cut.ns >= _SHORTEST_NS
    if not late.any():
        return 0
    stay = slots[1] >= _SHORTEST_NS
    times, sizes = [taken[0], cut.end[late], slots[0][stay]], [taken[1], cut.ns[late], slots[1][stay]]
    kinds = [np.full(len(taken[0]), _TAKEN), np.full(int(late.sum()), _IDLE), np.full(int(stay.sum()), _WAIT)]
    if thread is not None:
        waits = thread.waits_to - thread.waits_from >= _SHORTEST_NS
        times.append(thread.waits_to[waits])
        sizes.append((thread.waits_to - thread.waits_from)[waits])
        kinds.append(np.full(int(waits.sum()), _WAIT))
    when, size, kind = np.concatenate(times), np.concatenate(sizes), np.concatenate(kinds)
    if len(when) > _MOST:
        keep = np.argpartition(size, -_MOST)[-_MOST:]
        when, size, kind = when[keep], size[keep], kind[keep]
    order = np.lexsort((kind, when))
    return _played(size[order], kind[order])


def _played(size: Array, kind: Array) -> int:
    """How much earlier the device is in the end; of events of one kind in a row, only how long they are together."""
    first = group_starts(kind)
    size, kind = np.add.reduceat(size, first), kind[first]
    thread = device = 0
    for ns, what in zip(size.tolist(), kind.tolist(), strict=True):
        if what == _TAKEN:
            thread += ns
        elif what == _IDLE:
            if thread > device:
                device += min(ns, thread - device)
        else:
            thread = device  # it waits until the device is done, which is earlier by so much
    return int(device)


def hidden_beside_work(working: Cover, start: Array, end: Array, ns: Array) -> int:
    """How much of the host's work in idle gaps would lie beside the device's, were it done one step earlier.

    Gaps without work between them are one gap. A step ends with a gap of `STEP_NS` or more that is no small part of
    the next such gap, and of what the host did in its gaps no more is hidden than the device worked in it.

    Args:
        working: when the device worked.
        start: where the gaps begin, ascending and disjoint, ns.
        end: where they end, ns.
        ns: how long the host worked in each.

    Returns:
        ns; at most the sum of `ns`, and at most the time that the device worked before the last gap.
    """
    if not len(start) or not len(working.start):
        return 0
    since = np.append(min(int(working.start[0]), int(start[0])), end[:-1])
    worked = working.within(since, start)
    gap = np.cumsum(worked > 0)  # 0: before the device's first work
    needs, lasts, had = (np.bincount(gap, weights=one) for one in (ns, end - start, worked))
    ends = lasts >= STEP_NS
    long = np.flatnonzero(ends)
    ends[long[:-1]] = lasts[long[:-1]] >= SMALL_PART * lasts[long[1:]]
    step: Array = np.cumsum(ends) - ends
    return int(np.minimum(np.bincount(step, weights=needs), np.bincount(step, weights=had)).sum())
