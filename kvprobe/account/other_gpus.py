"""What a GPU waited for while its next operation had been submitted: another GPU of its processes, where that shows.

Streams of two GPUs wait for each other's events: a stage of a pipeline for the one before it. Recordings have no such
waits of the device, but their ends: an operation of the other GPU ends, and the next one here begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.account.activity import Activity
from kvprobe.account.gpu import BEGINS_NS
from kvprobe.account.lines import Unknown
from kvprobe.account.stretches import Stretches
from kvprobe.recordings.intervals import Cover

__all__ = ["tell_waits_for_others"]

# Of the time that a GPU stood still: so much of it ended with an operation of the other one, and by chance, as often as
# such operations end, it would have been so much less.
LEAST, MORE = 0.5, 0.3


def tell_waits_for_others(gpus: Sequence[tuple[Activity, Stretches]]) -> None:
    """Of each GPU, stretches in which it stood still until an operation of another one of its processes ended."""
    for gpu, cut in gpus:
        stood = np.flatnonzero((cut.detail == Unknown.BETWEEN_OPERATIONS) & (cut.ns >= BEGINS_NS))
        for other, _ in gpus:
            if other is gpu or not {*other.processes} & {*gpu.processes} or not len(stood) or not len(other.end):
                continue
            ends = np.sort(other.end)
            last = ends[np.maximum(np.searchsorted(ends, cut.end[stood], "right") - 1, 0)]
            met = (last > cut.start[stood]) & (last <= cut.end[stood]) & (cut.end[stood] - last <= BEGINS_NS)
            spent = cut.ns[stood]
            chance = Cover(ends, ends + BEGINS_NS).within(cut.start[stood], cut.end[stood]).sum() / spent.sum()
            if spent[met].sum() >= max(LEAST, chance + MORE) * spent.sum():
                cut.detail[stood[met]] = Unknown.ANOTHER_GPU
                stood = stood[~met]
