"""A thread that creates an event or stream, or allocates, waits because another thread is blocked while submitting.

Mechanism: a submitter that finds the queue full waits inside the driver with the context lock held in shared mode;
`cudaEventCreate`, `cudaStreamCreate`, `cudaMalloc`, `cudaHostAlloc` and `cudaFree` want it exclusively and wait until
the stall is over, although they name another stream or none. Measured on an H200: about 90 ms for a 120 ms gate.

Signature: such a call, at least 100 us beyond what it usually takes, lies inside a slow submission of another thread of
its process for most of its length, and ends with it. An allocation that is slow by itself ends by itself.

Predicted saving: all of it with the other thread's queue cured; the share of creations with events and streams made up
front, the share of allocations with memory from a pool.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Frame, ms
from kvprobe.diagnosis.intervals import Cover, ascending
from kvprobe.recordings.model import CallKind

CAUSE = "context_lock_stall"
STALL_NS = 100_000


def find(frame: Frame) -> Finding | None:
    """Creations and allocations that ended with another thread's stall."""
    wants = np.isin(frame.kind, np.array([CallKind.CREATE, CallKind.ALLOC, CallKind.FREE], dtype=np.uint8))
    rows = np.flatnonzero(wants & (frame.dur > STALL_NS))
    holders = np.flatnonzero(frame.submits & (frame.dur > STALL_NS))
    if not len(rows) or not len(holders):
        return None
    ns = np.zeros(len(rows), dtype=np.int64)
    certain = 0
    for lane in np.unique(frame.lane[rows]):
        mine = np.flatnonzero(frame.lane[rows] == lane)
        process = frame.process[rows[mine[0]]]
        others = holders[(frame.lane[holders] != lane) & (frame.process[holders] == process)]
        if not len(others):
            continue
        cover = Cover(frame.start[others], frame.end[others])
        start, end = frame.start[rows[mine]], frame.end[rows[mine]]
        inside = cover.within(start, end)
        # The waiter is released when a holder returns: some stall ends within the waiter's last tenth.
        ends = ascending(frame.end[others])
        slack = np.maximum((end - start) // 10, 50_000)
        released = np.searchsorted(ends, end + slack, side="right") > np.searchsorted(ends, end - slack, side="left")
        hit = (2 * inside > end - start) & released
        ns[mine] = np.where(hit, inside, 0)
        certain += int((hit & (10 * inside > 8 * (end - start))).sum())
    rows, ns = rows[ns > 0], ns[ns > 0]
    if not len(rows):
        return None
    names = sorted({frame.text(i) for i in np.unique(frame.name[rows])})
    holding = holders[Cover(frame.start[rows], frame.end[rows]).within(frame.start[holders], frame.end[holders]) > 0]
    worst = holding[np.argmax(frame.dur[holding])]
    created = int(ns[frame.kind[rows] == CallKind.CREATE].sum()) / int(ns.sum())
    return frame.host_finding(
        CAUSE, "{calls} calls waited {lost} for another thread's blocked submission", "likely", rows, ns,
        evidence=(
            Evidence(f"{', '.join(names)}: {len(rows):,} calls, {ms(int(ns.sum()))} of them while another thread of "
                     "the process was inside a slow submission", int(ns.sum()), "ns", MEASURED),
            Evidence(f"{certain} of them lie inside it for at least 80% of their length and end with it", certain,
                     "calls", INFERRED),
            Evidence(f"the longest such submission is {frame.text(frame.name[worst])} of thread "
                     f"{int(frame.thread[worst])}, {ms(int(frame.dur[worst]))}", int(frame.dur[worst]), "ns", MEASURED),
        ),
        cure=(
            Change("Cure the queue that blocks the other thread: see its finding", share=1.0),
            *((Change("Make events and streams up front and reuse them (torch.cuda.Event() makes its event at the "
                      "first record)", share=created),) if created else ()),
            *((Change("Allocate and pin before serving; inside it take memory from a pool", share=1 - created),)
              if created < 1 else ()),
        ),
        chart=frame.slow_calls_chart(np.concatenate((rows, holding)), "Waiting calls, and what they wait for"),
    )  # fmt: skip
