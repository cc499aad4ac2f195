"""What no cause has claimed of the account: shared by the two causes that name it after its lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.account import GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.recordings.model import Array

__all__ = ["most_left"]


def most_left(joined: JoinedRecording, lines: Sequence[Line]) -> tuple[GpuAccount | None, Array]:
    """The GPU of which most time in these lines is unexplained, and the mask over its stretches.

    What lies before its last kernel, where there is any: a kernel came after it, and may have waited. Else all of it.
    """
    best: tuple[GpuAccount | None, Array] = None, np.zeros(0, dtype=bool)
    most = 0
    for gpu in joined.account.gpus:
        cut = gpu.stretches
        free = (cut.cause == NOBODY) & np.isin(cut.line, np.array(lines, dtype=np.uint8))
        before = free & (cut.start < gpu.last_kernel_ns)
        earlier, later = int(cut.ns[before].sum()), int(cut.ns[free & ~before].sum())
        if max(earlier, later) > most:
            most = max(earlier, later)
            best = gpu, before if earlier >= later else free & ~before
    return best
