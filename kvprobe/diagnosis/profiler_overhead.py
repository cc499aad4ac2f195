"""Calls are slow because of the profiler: buffer flushes, buffer requests, instrumentation.

Mechanism: CUPTI and Nsight Systems write their own buffers, often on a worker thread, and meanwhile hold locks that
every CUDA call needs. Without the profiler, the program does not pay this time.

Signature: a slow call overlaps an interval that the recorder itself labelled as its own work. kvprobe compares times
and not threads, because the profiler writes its buffers on another thread. (In a public pair of H100 recordings, 10 of
16 slow calls overlap an interval of this kind.)

Predicted saving: kvprobe predicts none, because the time is the recorder's and the program has nothing to change.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.finding import LABELLED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import SLOW_NS, JoinedRecording, ms
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import CallKind, Label

CAUSE = cause_of(__name__)
PROVES = Line.NOT_KNOWN


def find(joined: JoinedRecording) -> Finding | None:
    """Slow calls that overlap the recorder's own work."""
    cover = joined.label_cover(Label.BUFFER_FLUSH, Label.RESOURCE, Label.INSTRUMENTATION)
    if not cover.total_ns:
        return None
    excess = joined.excess_ns
    rows = np.flatnonzero(joined.slow & (joined.kind != CallKind.SYNC) & (joined.host.free_ns > 0))
    overlap = cover.within(joined.start[rows], joined.end[rows])
    rows, overlap = rows[overlap > 0], overlap[overlap > 0]
    # A call that a flush delays waits for the flush's lock and then works through what queued up behind it.
    inside = cover.intersect_ns(Cover(joined.start[rows], joined.end[rows]))  # once, however many threads it delayed
    ns = np.where(overlap * 5 >= excess[rows], excess[rows], overlap)
    return joined.host_finding(
        CAUSE,
        "The profiler itself delayed {calls} calls by {lost}",
        "likely",
        rows,
        ns,
        severity="info",
        evidence=(
            Evidence(
                f"{len(rows):,} slow calls ran at times that the recorder labels as its own work",
                len(rows),
                "calls",
                LABELLED,
            ),
            Evidence(f"the recorder worked for {ms(cover.total_ns)} in all", cover.total_ns, "ns", LABELLED),
            Evidence(f"{ms(inside)} of this lie in these calls", inside, "ns", MEASURED),
        ),
        cure=(
            Change(
                "Change nothing in the program: ignore these calls, or record with `kvprobe run`, which costs less",
                "recording",
            ),
            Change("With Nsight Systems, use a shorter capture window or a larger --cuda-flush-interval", "recording"),
        ),
        least_ns=SLOW_NS,
    )
