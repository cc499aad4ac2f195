"""What a program would have been shorter by, had some of its time not been spent: along what waits for what.

Two clocks are played again from the account: a thread's, and that of the GPU which waits for it. Time taken out of the
thread lets everything behind it happen earlier, until the thread waits for the device: there it is as late as the
device is. Time taken out of the device's own work lets the device be earlier at once. An idle stretch that is this
thread's doing becomes shorter by as much as the thread is earlier than the device, and never by more than its length.
So what is saved never exceeds what the account says was not computing.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account.account import Account, GpuAccount, ThreadAccount
from kvprobe.account.lines import COPIES, HOST
from kvprobe.recordings.model import Array

__all__ = ["saved_by_host"]

_TAKEN, _IDLE, _WAIT = 0, 1, 2
_SHORTEST_NS = 1_000  # stretches and waits that are shorter change nothing
_MOST = 400_000  # events that are played; of more, the longest


def saved_by_host(account: Account, caller: int, at: Array, ns: Array) -> int:
    """By how much the GPUs that wait for a thread would have been done earlier.

    Args:
        account: of the recording.
        caller: the thread, as `Joined.caller`.
        at: when time taken out of the thread ended, ns.
        ns: how much is taken out there.

    Returns:
        wall time in ns: of the GPU that gains most; 0 where none waits for this thread.
    """
    thread = next((one for one in account.threads if one.caller == caller), None)
    return max((_on_gpu(gpu, thread, caller, at, ns) for gpu in account.gpus if gpu.seen), default=0)


def _on_gpu(gpu: GpuAccount, thread: ThreadAccount | None, caller: int, at: Array, ns: Array) -> int:
    cut = gpu.stretches
    late = (cut.caller == caller) & np.isin(cut.line, np.array((*COPIES, *HOST), dtype=np.uint8))
    late &= cut.ns >= _SHORTEST_NS
    if not late.any():
        return 0
    times, sizes = [at, cut.end[late]], [ns, cut.ns[late]]
    kinds = [np.full(len(at), _TAKEN), np.full(int(late.sum()), _IDLE)]
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
    """How much earlier the device is in the end."""
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
