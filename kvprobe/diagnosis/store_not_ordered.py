"""Nothing orders a store (GPU to CPU) after the compute that writes what it reads: silent corruption.

Mechanism: the store runs on a stream of its own. If nothing makes this stream wait (`cudaStreamWaitEvent`, or a wait of
the host), the store may read KV that the forward pass is still writing. vLLM up to 0.12 had this error (fixed by its
pull request 31341).

Signature: stores on a stream without kernels begin to execute while a kernel that was launched before the store was
submitted is still running. In at least three bursts of stores this is so, and in fewer than half of the bursts the
stream was told to wait for an event.

A correct program may store the blocks of an earlier step while a kernel of the next step runs. So kvprobe also counts
these waits:
 - a wait that the stream was told some bursts before, up to as many bursts as a model has layers: the layers of a step
   are stored one by one between the launches of the next step;
 - a wait of the host: after the last launch of the earlier step, the host waits for this step or asks whether it is
   done, and then stores.

If a thread launches nothing, it may store blocks of earlier steps, or counters that no kernel writes, which begin under
a kernel by chance. So kvprobe counts the thread's stores only if at least nine of ten of its bursts began under an
older kernel, and if so few of the others are not chance: the GPU was without a kernel for so long that four times as
many bursts would have begun then, and at least three.

If the recording does not tell which streams wait, kvprobe says nothing. Recordings do not say which event a stream
waits for or which addresses kernels write. So kvprobe cannot tell whether bytes were really wrong: the finding is
likely, never certain.

Time lost: kvprobe states none. Predicted saving: kvprobe predicts none, because the results are at stake and not the
time.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
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
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.model import Direction

CAUSE = cause_of(__name__)
BY_CHANCE = 0.9  # of the bursts of threads that launch nothing; a kernel runs by chance while fewer of them begin
LEAST_IDLE, LESS_THAN_CHANCE = 3, 4  # so many of these bursts would begin without a kernel; so many times as did


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Where the recording does not tell who waits for whom, nothing is said of order."""
    return order_not_shown(joined)


def _burst_after_last(burst: Array, start: Array, ordered_at: Array) -> Array:
    """Of each store, the first burst behind the last of these instants before it; -1 where there is none."""
    before = np.searchsorted(ordered_at, start) - 1
    out = np.full(len(burst), -1, dtype=np.int64)
    out[before >= 0] = burst[np.searchsorted(start, ordered_at[before[before >= 0]])]
    return out


def _asked(joined: JoinedRecording, process: int, rows: Array, burst: Array) -> Array:
    """Mask over stores: since its last launch their thread waited for the device, or asked, about something else."""
    mask = np.zeros(len(rows), dtype=bool)
    host = asks(joined, process)
    host = host[~np.isin(joined.stream[host], joined.stream[rows])]
    launches = joined.launches(process)
    for caller in distinct(joined.caller[rows]):
        mine = np.flatnonzero(joined.caller[rows] == caller)
        asked_at = joined.start[host[joined.caller[host] == caller]]
        launched = joined.start[launches[joined.caller[launches] == caller]]
        if not len(launched):  # nothing that it stores can be of its own
            launched = np.array([np.iinfo(np.int64).max])
        start = joined.start[rows[mine]]
        asked, made = (np.searchsorted(times, start) - 1 for times in (asked_at, launched))
        since = asked >= 0
        since[since] = (made[since] < 0) | (asked_at[asked[since]] > launched[np.maximum(made[since], 0)])
        since &= may_order(burst[mine], _burst_after_last(burst[mine], start, asked_at))
        mask[mine] = since
    return mask


def _by_chance(joined: JoinedRecording, launches: Array, began: Array, burst: Array, under: Array) -> bool:
    """Whether these stores, of threads that launch nothing, may have begun under older kernels by chance.

    Args:
        joined: the recording.
        launches: rows of the launches of their process that have an execution.
        began: when each store began to execute, (stores,).
        burst: number of its burst.
        under: whether it began under an older kernel.
    """
    begin, end = began.min(keepdims=True), began.max(keepdims=True)
    running = int(Cover(joined.start[launches], joined.exec_end[launches]).within(begin, end)[0])
    count = len(distinct(burst))
    others, idle = count - len(distinct(burst[under])), count * (1 - running / max(int(end[0] - begin[0]), 1))
    return others > (1 - BY_CHANCE) * count or idle < LEAST_IDLE or idle < LESS_THAN_CHANCE * others


def find(joined: JoinedRecording) -> Finding | None:
    """Stores that began under older kernels, without waits."""
    guilty = []
    evidence: list[Evidence] = []
    for process, copies in copies_apart(joined, Direction.D2H):
        rows = copies.rows
        launches = joined.launches(process)
        launches = launches[joined.exec_end[launches] >= 0]
        if not len(launches):
            continue
        latest_end = np.maximum.accumulate(joined.exec_end[launches])
        before = np.searchsorted(joined.start[launches], joined.start[rows]) - 1
        under = (before >= 0) & (latest_end[np.maximum(before, 0)] > joined.exec_start[rows])
        burst = bursts(joined, process, rows)
        count = int(burst[-1]) + 1
        apart = ~among(joined.caller[rows], distinct(joined.caller[launches]))
        times, streams = waits(joined, process)
        on_stores = times[np.isin(streams, joined.stream[rows])]
        under &= ~may_order(burst, _burst_after_last(burst, joined.start[rows], on_stores))
        under &= ~_asked(joined, process, rows, burst)
        began = joined.exec_start[rows[apart]]
        if apart.any() and _by_chance(joined, launches, began, burst[apart], under[apart]):
            under &= ~apart
        bad = distinct(burst[under])
        if len(bad) < LEAST or 2 * len(bad) < count or 2 * len(on_stores) >= count:
            continue
        rows = rows[under]
        overlap = latest_end[before[under]] - joined.exec_start[rows]
        guilty.append(rows)
        evidence += [
            Evidence(
                f"{len(rows):,} stores in {len(bad)} of {count} bursts began while a kernel launched before them "
                f"was still running, up to {ms(int(overlap.max()))} before it ended",
                int(overlap.max()),
                "ns",
                MEASURED,
            ),
            Evidence(
                f"their streams were told to wait for an event {len(on_stores):,} times in {count} bursts"
                if len(on_stores)
                else f"in {count} bursts their streams were never told to wait for an event",
                len(on_stores),
                "calls",
                COUNTED,
            ),
        ]
    if not guilty:
        return None
    rows = np.concatenate(guilty)
    return joined.finding(
        CAUSE,
        "{calls} stores are not ordered after the kernels that write their data",
        "likely",
        unordered_loss(joined, rows),
        severity="critical",
        evidence=evidence,
        reason="the recording does not say which bytes a kernel writes: a store of older blocks would be in order",
        cure=(
            Change(
                "Before each store: record an event on the compute stream and let the store's stream wait for it "
                "(store_stream.wait_stream(torch.cuda.current_stream()))"
            ),
            Change("vLLM up to 0.12: upgrade, or use kvprobe's adapter, which adds it", "setting", "vllm", "0.13"),
        ),
    )
