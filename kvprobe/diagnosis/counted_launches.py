"""Idle GPUs of threads whose launches `kvprobe run` counted, and did not keep one by one.

A gap behind each kernel then shows no launch that ends it. But the account has the gaps, the totals how many launches
the thread made and how long these took it, and the spans how long kernels ran.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.account import GpuAccount, Line
from kvprobe.account.stretches import NOBODY, How
from kvprobe.diagnosis.joined import Array, JoinedRecording
from kvprobe.recordings.assemble import among
from kvprobe.recordings.joined import on_gpu
from kvprobe.recordings.model import CallKind, Engine

__all__ = ["CountedGaps", "counted_gaps", "counts_launches", "launched_much"]

LAUNCHED = 10  # of the time that a thread is not in a call that was kept: part in which it launched
KEPT = 0.1  # of a thread's launches: where more are kept, they tell by themselves
OFTEN = 0.25  # waits for the device, of launches: so many, and what the thread waits for is its own result


class CountedGaps(NamedTuple):
    """Gaps of a thread that launches kernel by kernel.

    Attributes:
        start, end: of all, (gaps,) ns; where the GPU was observed now and then only, of several gaps together.
        typical_ns: how long one takes, of those that were observed.
        launches: that the thread made, in the whole recording.
        calls_ns: how long the thread was inside them.
        waits: for the device, that the thread made meanwhile.
        kernel_ns: how long a kernel took.
    """

    start: Array
    end: Array
    typical_ns: float
    launches: int
    calls_ns: int
    waits: int
    kernel_ns: float


def counts_launches(joined: JoinedRecording, caller: int) -> tuple[int, int, int]:
    """Launches of a thread that were counted, ns inside them, and waits of the thread; zeros where they were kept."""
    totals, row = joined.recording.totals, int(np.argmax(joined.caller == caller))
    mine = (totals["process"] == joined.process[row]) & (totals["thread"] == joined.thread[row])
    launches = mine & (totals["kind"] == CallKind.LAUNCH)
    made = int(totals["calls"][launches].sum())
    kept = int(((joined.caller == caller) & (joined.kind == CallKind.LAUNCH)).sum()) if made else 0
    if not made or kept > KEPT * made:
        return 0, 0, 0
    waits = mine & among(totals["kind"], (CallKind.SYNC, CallKind.COPY_SYNC))
    return made, int(totals["dur_ns"][launches].sum()), int(totals["calls"][waits].sum())


def counted_gaps(joined: JoinedRecording, gpu: GpuAccount, caller: int, short_ns: int, many: int) -> CountedGaps | None:
    """The gaps of one thread in which a GPU waited for it, if it launches one kernel after the other; else None.

    Most of the time of the gaps that were observed is in gaps shorter than `short_ns`, of which there are `many`; the
    thread makes a launch for each, and few waits for the device.
    """
    launches, calls_ns, waits = counts_launches(joined, caller)
    spans = joined.recording.spans
    if launches < many or waits > OFTEN * launches or not spans.rows:
        return None
    cut = gpu.stretches
    mine = among(cut.line, (Line.PYTHON, Line.SUBMITTING)) & (cut.caller == caller) & (cut.cause == NOBODY)
    seen = mine & (cut.how != How.SAMPLED)
    short = seen & (cut.ns < short_ns)
    if not many <= short.sum() <= launches or 2 * cut.sum_ns(short) < cut.sum_ns(seen):
        return None
    mine &= short | (cut.how == How.SAMPLED)
    kernels = (spans["engine"] == Engine.KERNEL) & on_gpu(spans, gpu) & (spans["count"] > 0)
    ran = int((spans["end_ns"] - spans["start_ns"])[kernels].sum())
    return CountedGaps(
        cut.start[mine],
        cut.end[mine],
        float(np.median(cut.ns[short])),
        launches,
        calls_ns,
        waits,
        ran / max(int(spans["count"][kernels].sum()), 1),
    )


def launched_much(joined: JoinedRecording, callers: Array, ns: int) -> bool:
    """Whether these threads spent a tenth and more of `ns`, which were in no call that was kept, on such launches."""
    launched = sum(counts_launches(joined, caller)[1] for caller in np.unique(callers).tolist() if caller >= 0)
    return LAUNCHED * launched > ns
