"""A thread waits because another one is pinning memory.

Mechanism: `cudaHostRegister` and `cudaHostAlloc` pin page by page with the context lock held: milliseconds for 100 MB,
minutes for a pool of hundreds of GB. Meanwhile calls of other threads that need the lock wait, `cudaEventCreate` and
`cudaMalloc` for certain, and page faults of the whole process as well.

Signature: a call of another thread that does not pin itself, at least 100 us beyond what it usually takes, lies inside
the registration, allocation or release of pinned memory for most of its length, and ends with it.

Predicted saving: all of it, with the memory pinned before serving; nearly all, with it pinned in pieces.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Frame, ms
from kvprobe.diagnosis.intervals import Cover, ascending
from kvprobe.recordings.model import CallKind, Memory

CAUSE = "pinning_stall"
STALL_NS, PINNING_NS = 100_000, 500_000
PINS = ("hostregister", "hostalloc", "mallochost", "memhostalloc", "hostunregister", "freehost", "memhostregister",
        "memhostunregister")  # fmt: skip


def find(frame: Frame) -> Finding | None:
    """Calls that ended with another thread's pinning."""
    pins = frame.is_named(*PINS)
    holders = np.flatnonzero(pins & (frame.dur > PINNING_NS))
    if not len(holders):
        return None
    held = (frame.excess_ns > STALL_NS) | ((frame.kind == CallKind.CREATE) | (frame.kind == CallKind.ALLOC)) & (
        frame.dur > STALL_NS)  # fmt: skip
    waits = frame.kind != CallKind.SYNC
    rows = np.flatnonzero(held & waits & ~pins & (frame.memory != Memory.PAGEABLE) & ~frame.queue_blocked)
    ns = np.zeros(len(rows), dtype=np.int64)
    for lane in np.unique(frame.lane[rows]):
        mine = np.flatnonzero(frame.lane[rows] == lane)
        others = holders[(frame.lane[holders] != lane) & (frame.process[holders] == frame.process[rows[mine[0]]])]
        if not len(others):
            continue
        start, end = frame.start[rows[mine]], frame.end[rows[mine]]
        inside = Cover(frame.start[others], frame.end[others]).within(start, end)
        ends = ascending(frame.end[others])
        slack = np.maximum((end - start) // 10, 50_000)
        released = np.searchsorted(ends, end + slack, side="right") > np.searchsorted(ends, end - slack, side="left")
        ns[mine] = np.where((2 * inside > end - start) & released, inside, 0)
    rows, ns = rows[ns > 0], ns[ns > 0]
    if not len(rows):
        return None
    names = sorted({frame.text(i) for i in np.unique(frame.name[rows])})
    holding = holders[Cover(frame.start[rows], frame.end[rows]).within(frame.start[holders], frame.end[holders]) > 0]
    worst = holding[np.argmax(frame.dur[holding])]
    size = int(frame.bytes[worst])
    what = f"{frame.text(frame.name[worst])} of thread {int(frame.thread[worst])}" + (
        f", {size / 1e6:,.0f} MB" if size else ""
    )
    return frame.host_finding(
        CAUSE, "{calls} calls waited {lost} while another thread pinned memory", "likely", rows, ns,
        evidence=(
            Evidence(f"{', '.join(names)}: {len(rows):,} calls, {ms(int(ns.sum()))} of them while another thread of "
                     "the process pinned memory; they end with it", int(ns.sum()), "ns", MEASURED),
            Evidence(f"the longest is {what}: {ms(int(frame.dur[worst]))}", int(frame.dur[worst]), "ns", INFERRED),
        ),
        cure=(
            Change("Pin before serving, once, and hand out of the pool", share=1.0),
            Change("Register in pieces of 64 MB, after the pages have been touched: each piece holds the lock for "
                   "milliseconds", share=0.9),
        ),
        chart=frame.slow_calls_chart(np.concatenate((rows, holding)), "Waiting calls, and the pinning they wait for"),
    )  # fmt: skip
