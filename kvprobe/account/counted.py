"""What a GPU did in runs that are divided by how many kernels and copies they hold: how much that is, and its error.

Readers divide runs and say by how much each piece may be wrong (`recordings.mixed_runs`). What these errors come from
is the same in all runs, so they add up. Where that is more than MOST of the window, this time is not known.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account.activity import Activity
from kvprobe.account.lines import COPIES, Line, Unknown
from kvprobe.account.samples import MOST, Samples
from kvprobe.account.stretches import NOBODY, How, Stretches
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover

__all__ = ["by_counts"]


def by_counts(cut: Stretches, gpu: Activity) -> tuple[Stretches, Samples]:
    """The account with these stretches marked, or taken back; a kernel beside them that was measured computes."""
    mine = gpu.error_ns > 0
    if not mine.any() or not len(cut.line):
        return cut, Samples()
    measured = ~(mine | gpu.copying | gpu.unclear)
    pieces, kernels = (Cover(gpu.start[some], gpu.end[some]) for some in (mine, measured))
    cut.cut(pieces.start, pieces.end)  # first, as a mask holds until stretches are cut elsewhere
    seen = cut.cut(kernels.start, kernels.end)
    told = among(cut.line, (Line.COMPUTING, *COPIES)) & cut.cut(pieces.start, pieces.end) & ~seen
    start, end = gpu.start[mine], gpu.end[mine]
    part = Cover(cut.start[told], cut.end[told]).within(start, end) / np.maximum(end - start, 1)
    samples = Samples(counted_ns=cut.sum_ns(told), counted_error_ns=int(gpu.error_ns[mine] @ part))
    if samples.counted_error_ns > MOST * (cut.edges[-1] - cut.edges[0]):
        cut.line[told], cut.caller[told], cut.detail[told] = Line.NOT_KNOWN, NOBODY, Unknown.NOT_COVERED
        told, samples = np.zeros(len(told), dtype=bool), Samples()
    how = np.where(told, How.COUNTED, How.SEEN).astype(np.uint8)
    return Stretches.of(cut.edges, cut.line, cut.caller, cut.detail, how), samples
