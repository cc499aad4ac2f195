"""The same host block is loaded again while it is still being loaded.

Mechanism: two requests share a prefix; both find it in CPU memory and both load it, because the first load is not
visible until it has completed.

Signature: a host-to-device copy with the source address and size of an earlier one of its process that has not ended
when the later one is submitted. A load repeated after the first has ended is not counted: the block may have been
evicted since. Needs addresses (kvprobe's own recordings have them; Nsight Systems and Kineto do not, and then nothing
is said). A load of which the destination was given another source in between is needed (weights that pass through a few
buffers are loaded again and again), and is not counted. Of a batch only the first address is known: equal first
address, size and count make it likely.

Time lost: what the copy engine spent on the repeated copies (the host's share where the recording has no executions).
Predicted saving: the same; a follower then waits for the load in flight, never longer than its own load would take.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Array, Frame, ms, share
from kvprobe.diagnosis.intervals import running_max_by_group
from kvprobe.recordings.model import CallKind, Direction

CAUSE = "redundant_loads"


def _overwritten(frame: Frame, loads: Array) -> Array:
    """When the destination of each load was next given another source; far in the future where never."""
    order = np.lexsort((frame.start[loads], frame.dst[loads], frame.process[loads]))
    rows = loads[order]
    never = np.iinfo(np.int64).max
    when = np.full(len(rows), never, dtype=np.int64)
    same = (frame.dst[rows[1:]] == frame.dst[rows[:-1]]) & (frame.process[rows[1:]] == frame.process[rows[:-1]])
    other = same & (frame.src[rows[1:]] != frame.src[rows[:-1]])
    when[:-1][other] = frame.start[rows[1:]][other]
    # Where the same source came again first, its own successor decides: walk runs of equal sources from their ends.
    run = np.cumsum(np.concatenate(([True], ~(same & ~other)))) - 1
    last = np.append(np.flatnonzero(run[1:] != run[:-1]), len(rows) - 1)
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = when[last][run]
    return out


def find(frame: Frame) -> Finding | None:
    """Loads of a source that is already being loaded."""
    kinds = (frame.kind == CallKind.COPY) | (frame.kind == CallKind.BATCH)
    loads = np.flatnonzero(kinds & (frame.direction == Direction.H2D) & (frame.src != 0) & (frame.bytes > 0))
    if len(loads) < 2:
        return None
    order = np.lexsort((frame.start[loads], frame.count[loads], frame.bytes[loads], frame.src[loads],
                        frame.process[loads]))  # fmt: skip
    loads = loads[order]
    columns = (frame.process, frame.src, frame.bytes, frame.count)
    new = np.ones(len(loads), dtype=bool)
    new[1:] = np.any([column[loads[1:]] != column[loads[:-1]] for column in columns], axis=0)
    group = np.cumsum(new) - 1
    ends = np.where(frame.exec_end[loads] >= 0, frame.exec_end[loads], frame.end[loads])
    reach = running_max_by_group(ends, group)
    again = np.zeros(len(loads), dtype=bool)
    again[1:] = ~new[1:] & (frame.start[loads[1:]] < reach[:-1])
    again[1:] &= _overwritten(frame, loads)[:-1] > frame.start[loads[1:]]
    rows = loads[again]
    if not len(rows):
        return None
    wasted, moved = int(frame.bytes[rows].sum()), int(frame.bytes[loads].sum())
    batches = bool((frame.kind[rows] == CallKind.BATCH).any())
    evidence = [
        Evidence(f"{len(rows):,} of {len(loads)} loads copied bytes that were on their way already: {wasted / 1e6:.1f} "
                 f"MB, {share(wasted, moved)} of all loaded bytes", wasted, "bytes", COUNTED),
        Evidence(f"the most popular source was loaded {int(np.bincount(group).max())} times",
                 int(np.bincount(group).max()), "1", COUNTED),
    ]  # fmt: skip
    cure = (
        Change(
            "Remember what is being loaded, and let a request for the same blocks wait for that load (vLLM 0.15 and "
            "later do; kvprobe's engine: dedup=True)",
            "rung",
            "dedup",
            "on",
            share=1.0,
        ),
        Change("Gate it: where a follower would wait longer than its own load takes, load"),
    )
    if not frame.recording.has_executions:
        return frame.host_finding(CAUSE, "{calls} loads were redundant; submitting them took {lost}", "likely", rows,
                                  frame.dur[rows], evidence=evidence, cure=cure)  # fmt: skip
    mine = np.zeros(len(frame.start), dtype=bool)
    mine[rows] = True
    executions = np.flatnonzero((frame.x_call >= 0) & mine[np.maximum(frame.x_call, 0)])
    spent = frame.x_dur[executions]
    evidence.append(Evidence(f"the copy engine spent {ms(int(spent.sum()))} on them", int(spent.sum()), "ns", MEASURED))
    return frame.device_finding(
        CAUSE, "{calls} redundant loads kept the copy engine busy for {lost}", "likely" if batches else "certain",
        executions, spent, evidence=evidence, cure=cure,
    )  # fmt: skip
