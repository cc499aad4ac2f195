"""Nothing orders a load (CPU to GPU) before the compute that reads it: silent corruption.

Mechanism: the load runs on a stream of its own. If neither the compute stream waits for the load's event nor the host
waits before it launches, the kernels may read blocks that have not arrived.

Signature: loads run on streams without kernels. Kernels that were launched after a load was submitted run before the
load has ended. This is so in at least three bursts of loads. In fewer than half of the bursts, something follows that
could order the burst: an event that a compute stream waits for, or a call with which the host waits or asks.

A correct program that loads ahead for a later step also runs kernels during its loads. But this program waits once for
each burst, or once in each step for the bursts of all layers. So to kvprobe, one wait orders as many earlier bursts as
a model has layers.

A finding needs positive evidence: if the recording does not tell which streams wait for events, kvprobe says nothing.

Time lost: kvprobe states none. Predicted saving: kvprobe predicts none, because the results are at stake and not the
time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording
from kvprobe.diagnosis.ordering import (
    LEAST,
    asks,
    bursts,
    copies_apart,
    may_order,
    order_not_shown,
    unordered_loss,
    waits,
)
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct
from kvprobe.recordings.model import Direction

CAUSE = cause_of(__name__)


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Where the recording does not tell who waits for whom, nothing is said of order."""
    return order_not_shown(joined)


def _burst_before_next(burst: Array, start: Array, ordered_at: Array) -> Array:
    """Of each load, the last burst that begins before the next of these instants; -1 where none follows it."""
    after = np.searchsorted(ordered_at, start)
    follows = after < len(ordered_at)
    out = np.full(len(burst), -1, dtype=np.int64)
    out[follows] = burst[np.searchsorted(start, ordered_at[after[follows]]) - 1]
    return out


class _Violation(NamedTuple):
    """Loads of one process that kernels may have read too early: their rows, and figures."""

    rows: Array
    evidence: list[Evidence]


def _unordered(joined: JoinedRecording, process: int, rows: Array) -> _Violation | None:
    """`rows`: loads of the process on streams without kernels, by time."""
    launches = joined.launches(process)
    ran = joined.exec_start[launches] >= 0
    if not ran.any():
        return None
    launches = launches if ran.all() else launches[ran]
    launched = joined.start[launches]
    burst = bursts(joined, process, rows)
    count = int(burst[-1]) + 1
    times, streams = waits(joined, process)
    first, last = int(joined.start[rows[0]]), int(launched[-1])
    device_side = times[among(streams, joined.kernel_streams) & (times > first)]
    host_side = joined.start[asks(joined, process)]
    host_side = host_side[(host_side > first) & (host_side < last)]
    ordering = len(device_side) + len(host_side)
    if 2 * ordering >= count:
        return None
    kernels = Cover(joined.exec_start[launches], joined.exec_end[launches])
    followed = np.searchsorted(launched, joined.exec_end[rows]) > np.searchsorted(launched, joined.end[rows])
    under = followed & (kernels.within(joined.end[rows], joined.exec_end[rows]) > 0)
    ordered_at = ascending(np.concatenate((device_side[device_side < last], host_side)))
    under &= ~may_order(burst, _burst_before_next(burst, joined.start[rows], ordered_at))
    bad = distinct(burst[under])
    if len(bad) < LEAST or 2 * len(bad) < count:
        return None
    evidence = [
        Evidence(
            f"kernels launched after {len(bad):,} of {count:,} bursts of loads ran before the loads had ended",
            len(bad),
            "1",
            MEASURED,
        ),
        Evidence(
            f"compute streams waited for events {len(device_side):,} times, the host waited or asked "
            f"{len(host_side):,} times, in {count:,} bursts"
            if len(device_side) or len(host_side)
            else f"in {count:,} bursts neither a compute stream nor the host ever waited for an event",
            ordering,
            "calls",
            COUNTED,
        ),
    ]
    return _Violation(rows[under], evidence)


def find(joined: JoinedRecording) -> Finding | None:
    """Loads that nothing awaits."""
    each = (_unordered(joined, process, copies.rows) for process, copies in copies_apart(joined, Direction.H2D))
    found = [unordered for unordered in each if unordered]
    if not found:
        return None
    rows = np.concatenate([unordered.rows for unordered in found])
    return joined.finding(
        CAUSE,
        "{calls} loads are not ordered before the kernels that read their data",
        "likely",
        unordered_loss(joined, rows),
        severity="critical",
        evidence=[one for unordered in found for one in unordered.evidence],
        reason="the recording does not say which bytes a kernel reads: a prefetch of blocks that are not used yet "
        "would be in order",
        cure=(
            Change(
                "Record an event after the load and let the compute stream wait for it before the first kernel "
                "that reads the blocks (current_stream().wait_event(event))"
            ),
            Change("Or launch those kernels only after cudaEventQuery has reported that the load is done"),
        ),
    )
