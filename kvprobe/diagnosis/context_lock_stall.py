"""A thread that creates an event, allocates, or names a full stream waits for another thread's blocked submission.

Mechanism: a thread that submits to a full queue waits inside the driver, and holds the context lock in shared mode
while it waits. `cudaEventCreate`, `cudaStreamCreate`, `cudaMalloc`, `cudaHostAlloc` and `cudaFree` want the context
lock exclusively. So they wait until the queue has a free slot, although they name another stream or none. In a test
on an H200, a queue stayed full for 120 ms, and one of these calls took about 90 ms. The thread that waits for a slot
also holds the lock of its stream. So every call of another thread that names this stream waits, even a call that only
records an event on the stream or makes the stream wait for an event.

Signature: one of these calls takes at least 100 µs longer than usual. For most of this time, another thread of the
process is inside a slow submission, and both calls end together. (An allocation that is slow by itself ends by itself.)
If the recording shows what the GPU did, a full queue or pageable memory must have blocked the slow submission.
Otherwise the slow submission may itself have waited for something else.

Predicted saving: all of the waiting time, if the other thread's queue is no longer full. Three other changes each save
their part of the waiting time. One creates events and streams before serving. One takes memory from a pool. One lets
the thread that submits to a stream make all calls that name the stream.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.held_up import STALL_NS, held_up, longest_of, said
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.diagnosis.pinning_stall import CAUSE as PINNING_STALL
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import CallKind, Memory

CAUSE = cause_of(__name__)


def _naming(joined: JoinedRecording, holders: Array) -> tuple[Array, Array]:
    """Records of events and waits for them that another thread's submission to the same stream held up, ns of each."""
    events = (joined.kind == CallKind.EVENT) & (joined.dur > STALL_NS) & (joined.stream >= 0) & ~queue_blocked(joined)
    found = [
        held_up(joined, np.flatnonzero(events & (joined.stream == stream)), holders[joined.stream[holders] == stream])
        for stream in distinct(joined.stream[events])
    ]
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(rows for rows, _ in found)]), np.concatenate([none, *(ns for _, ns in found)])


def _holders(joined: JoinedRecording, told: bool) -> Array:
    """Rows of submissions that may hold the lock; `told`: only for reasons by which a submission waits itself."""
    holds = joined.submits & (joined.dur > STALL_NS)
    if told:
        holds &= queue_blocked(joined) | (joined.memory == Memory.PAGEABLE)
    if PINNING_STALL in joined.host.causes:
        holds &= joined.host.owner != joined.host.causes.index(PINNING_STALL)
    return np.flatnonzero(holds)


def find(joined: JoinedRecording) -> Finding | None:
    """Creations and allocations that ended with another thread's stall."""
    wants = among(joined.kind, [CallKind.CREATE, CallKind.ALLOC, CallKind.FREE])
    rows = np.flatnonzero(wants & (joined.dur > STALL_NS))
    holders = _holders(joined, told=bool(len(rows)) and joined.recording.has_executions)
    rows, ns = held_up(joined, rows, holders)
    naming, naming_ns = _naming(joined, holders)
    rows, ns = np.append(rows, naming), np.append(ns, naming_ns)
    if not len(rows):
        return None
    holding, worst = longest_of(joined, rows, holders)
    whole = int((10 * ns > 8 * joined.dur[rows]).sum())
    return joined.host_finding(
        CAUSE,
        "{calls} calls waited {lost} for another thread's blocked submission",
        "likely",
        rows,
        ns,
        evidence=(
            said(joined, rows, ns, "was inside a slow submission"),
            *(
                (
                    Evidence(
                        f"{whole:,} of them lie inside it for at least 80% of their length", whole, "calls", INFERRED
                    ),
                )
                if whole
                else ()
            ),
            Evidence(
                f"the longest submission that another call waited for is {joined.text(joined.name[worst])} of thread "
                f"{int(joined.thread[worst])}, {ms(int(joined.dur[worst]))}",
                int(joined.dur[worst]),
                "ns",
                MEASURED,
            ),
        ),
        cure=_cure(joined.kind[rows], ns),
        chart=joined.slow_calls_chart(np.concatenate((rows, holding)), "Waiting calls, and what they wait for"),
    )


def _cure(kinds: Array, ns: Array) -> list[Change]:
    """What helps the kinds of calls that waited, each with its share of the time."""
    created, named = (int(ns[kinds == kind].sum()) / int(ns.sum()) for kind in (CallKind.CREATE, CallKind.EVENT))
    cure = [Change("Fix the queue that blocks the other thread: see its finding", share=1.0)]
    if created:
        cure.append(
            Change(
                "Make events and streams up front and reuse them (torch.cuda.Event() makes its event at the first "
                "record)",
                share=created,
            )
        )
    if created + named < 1:
        cure.append(
            Change(
                "Allocate and pin before serving, and take memory from a pool while serving", share=1 - created - named
            )
        )
    if named:
        cure.append(
            Change(
                "Let the thread that submits to a stream record its events and tell it what to wait for", share=named
            )
        )
    return cure
