"""The thread that launches the model waits for a copy: explicit (`cudaStreamSynchronize`) or implicit (`cudaMemcpy`).

Mechanism: while the thread waits for a transfer on a copy stream it launches nothing, so the device runs dry although
the transfer needs none of its multiprocessors.

Signature: a synchronising call on a thread that launches compute and goes on launching afterwards, during which the
device copies on a stream that carries no kernels and runs no kernel. Waiting for kernels (the end of a step) is not
counted: the thread has nothing else to do then. A wait for a copy on the compute stream itself is not counted either:
the stream would have waited anyway. Needs executions; without them a wait that directly follows the submission of a
copy is counted, and the finding is only likely.

Predicted saving: all of it when the wait becomes an event on the stream.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Array, Frame, ms
from kvprobe.diagnosis.intervals import Cover, ascending, distinct, running_max_by_group
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory

CAUSE = "synchronisation"


def _for_copies(frame: Frame, rows: Array) -> Array:
    """Mask of waits that are known to be for a copy: cudaMemcpy, and a stream on which a copy was outstanding."""
    mask: Array = frame.kind[rows] == CallKind.COPY_SYNC
    table = frame.recording.executions
    for stream in distinct(frame.stream[rows][frame.stream[rows] >= 0]):
        mine = frame.stream[rows] == stream
        copies = np.flatnonzero((table["stream"] == stream) & (table["engine"] == Engine.COPY) & (frame.x_call >= 0))
        asked = ascending(frame.start[frame.x_call[copies]])
        over = ascending(frame.x_end[copies])
        at = frame.start[rows[mine]]
        mask[mine] |= np.searchsorted(asked, at) > np.searchsorted(over, at, "right")
    return mask


def find(frame: Frame) -> Finding | None:
    """Waits for copies on launching threads."""
    implicit = (frame.kind == CallKind.COPY_SYNC) & (frame.memory != Memory.PAGEABLE)
    rows = np.flatnonzero((frame.kind == CallKind.SYNC) | implicit)
    rows = rows[frame.on_launching_thread(rows)]
    if not len(rows):
        return None
    launch_lanes = frame.lane[(frame.kind == CallKind.LAUNCH) | (frame.kind == CallKind.GRAPH)]
    launch_times = frame.start[(frame.kind == CallKind.LAUNCH) | (frame.kind == CallKind.GRAPH)]
    last = {int(lane): int(launch_times[launch_lanes == lane].max()) for lane in distinct(launch_lanes)}
    rows = rows[np.array([last[int(lane)] for lane in frame.lane[rows]]) > frame.end[rows]]
    if not len(rows):
        return None
    seen = frame.recording.has_executions
    ns = np.zeros(len(rows), dtype=np.int64)
    if seen:
        table = frame.recording.executions
        apart = (
            (table["engine"] == Engine.COPY)
            & ((table["direction"] == Direction.H2D) | (table["direction"] == Direction.D2H))
            & ~np.isin(table["stream"], frame.kernel_streams)
        )
        for process in distinct(frame.process[rows]):
            mine = np.flatnonzero(frame.process[rows] == process)
            start, end = frame.start[rows[mine]], frame.end[rows[mine]]
            kernel = table["process"] == process
            copying = Cover(frame.x_start[apart & kernel], frame.x_end[apart & kernel])
            kernel &= table["engine"] == Engine.KERNEL
            kernels = Cover(frame.x_start[kernel], frame.x_end[kernel])
            either = Cover(np.concatenate((copying.start, kernels.start)), np.concatenate((copying.end, kernels.end)))
            alone = either.within(start, end) - kernels.within(start, end)
            without = (end - start) - kernels.within(start, end)
            # What is left of a wait for a copy is the thread's wake-up, which can be long on a busy machine.
            ns[mine] = np.where(_for_copies(frame, rows[mine]) | ((10 * alone >= without) & (alone > 0)), without, 0)
        ns[np.isin(frame.stream[rows], frame.kernel_streams)] = 0
    else:
        order = frame.by_lane
        position = np.where(frame.submits[order], np.arange(len(order)), -1)
        before = running_max_by_group(position, frame.lane[order])
        copies = (frame.kind == CallKind.COPY) | (frame.kind == CallKind.BATCH)
        after_copy = np.zeros(len(order), dtype=bool)
        after_copy[order] = (before >= 0) & copies[order[np.maximum(before, 0)]]
        ns = np.where(after_copy[rows] | implicit[rows], frame.dur[rows], 0)
    ns = np.where(ns > 3 * np.minimum(frame.usual_ns[rows], 10_000), ns, 0)
    rows, ns = rows[ns > 0], ns[ns > 0]
    if not len(rows):
        return None
    names = {frame.text(i): int(ns[frame.name[rows] == i].sum()) for i in np.unique(frame.name[rows])}
    worst = max(names, key=lambda name: names[name])
    return frame.host_finding(
        CAUSE, "The launching thread waited {lost} for copies, in {calls} calls", "certain" if seen else "likely",
        rows, ns,
        evidence=(
            Evidence(f"{len(rows):,} waits on threads that launch compute, {ms(int(ns.sum()))} in which "
                     + ("the device copied and no kernel ran" if seen else "a copy was the last thing submitted"),
                     int(ns.sum()), "ns", MEASURED if seen else INFERRED),
            Evidence(f"most of it in {worst}: {ms(names[worst])}", names[worst], "ns", MEASURED),
            Evidence(f"{int(implicit[rows].sum())} of them are synchronous by their nature (cudaMemcpy)",
                     int(implicit[rows].sum()), "calls", COUNTED),
        ),
        cure=(
            Change("Order with events instead of waiting: record an event behind the copy, and let the compute stream "
                   "wait for it (cudaStreamWaitEvent, torch.cuda.Stream.wait_event)", share=1.0),
            Change("Where the host needs the bytes: poll cudaEventQuery between steps instead of synchronising"),
            *((Change("cudaMemcpy: use cudaMemcpyAsync on a stream of its own, with pinned memory",
                      share=int(ns[implicit[rows]].sum()) / int(ns.sum())),) if implicit[rows].any() else ()),
        ),
        chart=frame.slow_calls_chart(rows, "Waits for copies on the launching thread"),
    )  # fmt: skip
