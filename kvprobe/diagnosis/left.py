"""What no cause has claimed of the account: shared by the two causes that name it after its lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.account import GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import Array

__all__ = ["most_left"]


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
        cut = gpu.stretches
        free = (cut.cause == NOBODY) & among(cut.line, lines)
        first, last = gpu.computes
        after = free & (cut.start >= last)
        before = free & ~after & (cut.start < first)
        between = free & ~before & ~after
        if cut.ns[between].sum() >= cut.ns[before].sum():  # what comes first is like what follows
            between, before = between | before, free & False
        parts = (
            (between, ""),
            (before, "no kernel ran before these copies"),
            (after, "no kernel ran after these copies"),
        )
        for mine, lacks in parts:
            ns = cut.sum_ns(mine)
            weight = not lacks and ns >= CRITICAL * gpu.asked_ns, ns
            if ns and weight > most:
                most, best = weight, (gpu, mine, lacks)
    return best
