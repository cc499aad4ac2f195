"""What no cause has claimed of the account: shared by the two causes that name it after its lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.account import Account, GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import Array

__all__ = ["left_between_kernels", "most_left"]


def most_left(joined: JoinedRecording, lines: Sequence[Line]) -> tuple[GpuAccount | None, Array, str]:
    """The GPU of which most time in these lines is unexplained, and where that is.

    What lies between kernels, where that is enough for a finding; else what lies before or after them, if that is more.

    Returns:
        the GPU; the mask over its stretches; and what is missing there that would show that a model waited: "no kernel
        ran before these copies", "no kernel ran after these copies", or "" between kernels.
    """
    best: tuple[GpuAccount | None, Array, str] = None, np.zeros(0, dtype=bool), ""
    most = False, 0
    for gpu in joined.account.gpus:
        for mine, lacks in _parts(gpu, lines):
            ns = gpu.stretches.sum_ns(mine)
            weight = not lacks and ns >= CRITICAL * gpu.asked_ns, ns
            if ns and weight > most:
                most, best = weight, (gpu, mine, lacks)
    return best


def left_between_kernels(account: Account, lines: Sequence[Line]) -> tuple[int, float]:
    """Of the GPU with most unexplained time in these lines between kernels, however little: its ns, and its share."""
    left = [(gpu.stretches.sum_ns(_parts(gpu, lines)[0][0]), gpu.window_ns) for gpu in account.gpus if gpu.seen]
    ns, window_ns = max(left, default=(0, 0))
    return ns, ns / window_ns if window_ns else 0.0


def _parts(gpu: GpuAccount, lines: Sequence[Line]) -> tuple[tuple[Array, str], ...]:
    """Masks over unexplained stretches between kernels, before and after them, and what is missing in each."""
    cut = gpu.stretches
    free = (cut.cause == NOBODY) & among(cut.line, lines)
    first, last = gpu.computes
    after = free & (cut.start >= last)
    before = free & ~after & (cut.start < first)
    between = free & ~before & ~after
    if cut.ns[between].sum() >= cut.ns[before].sum():  # what comes first is like what follows
        between, before = between | before, free & False
    return (
        (between, ""),
        (before, "no kernel ran before these copies"),
        (after, "no kernel ran after these copies"),
    )
