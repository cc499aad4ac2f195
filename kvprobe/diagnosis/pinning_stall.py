"""A thread waits because another one is pinning memory.

Mechanism: `cudaHostRegister` and `cudaHostAlloc` hold the context lock while they pin page by page: for milliseconds
with 100 MB, for minutes with a pool of hundreds of GB. Meanwhile, calls of other threads that need the lock wait, above
all `cudaEventCreate` and `cudaMalloc`. Page faults of the whole process wait, too.

Signature: a thread that does not pin makes a call that takes at least 100 µs longer than usual. For most of its length,
the call lies inside another thread's registration, allocation or release of pinned memory, and both end together.

Predicted saving: all of the waiting time, if the memory is pinned before serving; nearly all of it, if the memory is
pinned in pieces.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.finding import INFERRED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.held_up import STALL_NS, held_up, longest_of, said
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.durations import bytes_text
from kvprobe.recordings.model import CallKind, Memory

CAUSE = cause_of(__name__)
PROVES = Line.ALLOCATING
PINNING_NS = 500_000
PINS = (
    "hostregister",
    "hostalloc",
    "mallochost",
    "memhostalloc",
    "hostunregister",
    "freehost",
    "memhostregister",
    "memhostunregister",
)


def find(joined: JoinedRecording) -> Finding | None:
    """Calls that ended with another thread's pinning."""
    pins = joined.is_named(*PINS)
    holders = np.flatnonzero(pins & (joined.dur > PINNING_NS))
    if not len(holders):
        return None
    held = (joined.excess_ns > STALL_NS) | ((joined.kind == CallKind.CREATE) | (joined.kind == CallKind.ALLOC)) & (
        joined.dur > STALL_NS
    )
    waits = joined.kind != CallKind.SYNC
    rows = np.flatnonzero(held & waits & ~pins & (joined.memory != Memory.PAGEABLE) & ~queue_blocked(joined))
    rows, ns = held_up(joined, rows, holders)
    if not len(rows):
        return None
    holding, worst = longest_of(joined, rows, holders)
    size = int(joined.bytes[worst])
    what = f"{joined.text(joined.name[worst])} of thread {int(joined.thread[worst])}" + (
        f", {bytes_text(size)}" if size else ""
    )
    return joined.host_finding(
        CAUSE,
        "{calls} calls waited {lost} while another thread pinned memory",
        "likely",
        rows,
        ns,
        evidence=(
            said(joined, rows, ns, "pinned memory"),
            Evidence(f"the longest is {what}: {ms(int(joined.dur[worst]))}", int(joined.dur[worst]), "ns", INFERRED),
        ),
        cure=(
            Change("Pin once, before serving, and take buffers from this pool", share=1.0),
            Change(
                "Register in pieces of 64 MB, after the pages have been touched: each piece holds the lock for "
                "milliseconds",
                share=0.9,
            ),
        ),
        chart=joined.slow_calls_chart(np.concatenate((rows, holding)), "Waiting calls, and the pinning they wait for"),
    )
