"""Under Confidential Computing copies of pinned memory block their caller, too, although the queue is short.

Mechanism: the GPU cannot read the memory of a protected guest. So the driver encrypts each copy into a buffer of its
own, and `cudaMemcpyAsync` returns when the encryption is done. This is how a copy of pageable memory behaves on other
machines. Under Confidential Computing, every copy behaves so.

Signature: the GPUs of the machine run in Confidential Computing mode. Of the copies of memory that is not pageable, at
least eight take 60 µs or more each, although their queue is not full. These slow copies move at least half of the
bytes. If most of the slow calls return when their copy is over, the finding is certain.

Needs: the mode, which `kvprobe run` asks the driver for (NVML). If a recording does not have the mode, kvprobe does not
look for this cause, because a full queue, pageable memory and pinning look alike.

Time lost: the part of these calls that is longer than a usual submission. Predicted saving: if another thread makes the
copies, the threads that launch compute save what they lost. The copies themselves do not become faster.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import SLOW_NS, JoinedRecording, ms, size
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.recordings.model import CallKind, Memory

CAUSE = cause_of(__name__)
MANY, OVER_NS = 8, 20_000
SUBMISSION_NS = 5_000  # of a launch, where the recording has none to compare with


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs the mode."""
    if joined.recording.machine.get(CAUSE) is not None:
        return None
    return NotLookedFor(
        "the recording does not tell whether the GPU runs in Confidential Computing mode",
        "kvprobe run, which asks the driver",
    )


def find(joined: JoinedRecording) -> Finding | None:
    """Copies of pinned memory that blocked their caller."""
    if not joined.recording.machine[CAUSE]:
        return None
    copies = (joined.kind == CallKind.COPY) | (joined.kind == CallKind.BATCH)
    copies &= (joined.memory != Memory.PAGEABLE) & ~queue_blocked(joined)
    long = copies & (joined.dur >= SLOW_NS)
    over = np.zeros(0, dtype=bool)
    if joined.recording.has_executions:
        known = joined.exec_end >= 0
        late = np.abs(joined.end - joined.exec_end) < OVER_NS
        over = (late | (joined.exec_end <= joined.end))[long & known]
    rows = np.flatnonzero(long)
    moved = int(joined.bytes[rows].sum())
    if len(rows) < MANY or 2 * moved < int(joined.bytes[copies].sum()):
        return None
    launches = joined.dur[joined.kind == CallKind.LAUNCH]
    usual = int(np.percentile(launches, 25)) if len(launches) >= MANY else SUBMISSION_NS
    ns = np.maximum(joined.dur[rows] - usual, 0)
    lost = int(ns.sum())
    rate = moved / max(int(joined.dur[rows].sum()), 1) * 1e9
    mine = int(ns[joined.on_launching_thread(rows)].sum())
    return joined.host_finding(
        CAUSE,
        "{calls} copies of pinned memory blocked their caller for {lost}: the GPU runs in Confidential Computing mode",
        "certain" if len(over) and 2 * int(over.sum()) > len(over) else "likely",
        rows,
        ns,
        evidence=(
            Evidence("the driver says that Confidential Computing is on", 1, "1", "reported by the driver (NVML)"),
            Evidence(
                f"{len(rows):,} copies of {size(moved)} together blocked their threads for {ms(lost)} while "
                f"their queues had free slots: {rate / 1e9:.2f} GB/s",
                lost,
                "ns",
                MEASURED,
            ),
            *(
                (
                    Evidence(
                        f"{int(over.sum()):,} of {len(over):,} return when their copy is over",
                        int(over.sum()),
                        "calls",
                        COUNTED,
                    ),
                )
                if over.any()
                else ()
            ),
            Evidence(f"threads that launch compute lost {ms(mine)} of this time", mine, "ns", MEASURED),
        ),
        cure=(
            Change(
                "Let another thread submit the copies, so that the model's thread does not wait for them (kvprobe's "
                "engine: pooled; for servers `kvprobe run --fix auto`)",
                "rung",
                "pooled",
                "auto",
                share=mine / max(lost, 1),
            ),
            Change("Move fewer bytes: each is encrypted by the CPU, so a smaller KV type (fp8) saves as much time"),
        ),
        chart=joined.slow_calls_chart(rows, "Copies of pinned memory that blocked their caller"),
    )
