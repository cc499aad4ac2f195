"""The same host block is loaded again although its bytes are on the GPU, or on their way there.

Mechanism: two requests share a prefix; both find it in CPU memory and both load it, because the first load is not
visible until it has completed. Or whoever loads does not know what is there: the same blocks go to the same place
again and again.

Signature: a host-to-device copy with the source address and size of an earlier one of its process that has not ended
when the later one is submitted; or, after it has ended, one with its destination as well, where between the two no
copy wrote to the source and none from elsewhere to the destination, and something was waited for. A load of another
kind repeated after the first has ended is not counted: the block may have been evicted since. A kernel may have
overwritten the bytes, which no recording tells: then the finding is only likely. Needs addresses (kvprobe's own
recordings have them; Nsight Systems and Kineto do not, and then nothing is said). A load of which the destination was
given another source in between is needed (weights that pass through a few buffers are loaded again and again), and is
not counted. Of a batch only the first address is known: equal first address, size and count make it likely.

Time lost: what the copy engine spent on the repeated copies; where the recording has no executions, their bytes at the
link's rate where that is known, else the bytes are said, and no time.
Predicted saving: the same; a follower then waits for the load in flight, never longer than its own load would take.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, NotLookedFor
from kvprobe.diagnosis.frame import Array, Frame, ms, share
from kvprobe.diagnosis.intervals import running_max_by_group
from kvprobe.diagnosis.wasted_stores import no_addresses, waited_between
from kvprobe.recordings.model import CallKind, Direction

CAUSE = "redundant_loads"
FEW = 8  # kernels
MANY = 32  # loads of what had arrived: fewer may be a block that a kernel had used up


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


def _stored_between(frame: Frame, loads: Array) -> Array:
    """Mask over neighbours in `loads` (all but the first): the source was stored to between the two."""
    stores = np.flatnonzero((frame.direction == Direction.D2H) & (frame.dst != 0) & (frame.bytes > 0))
    out = np.zeros(max(len(loads) - 1, 0), dtype=bool)
    if not len(stores):
        return out
    key = np.unique(frame.dst[stores])
    hit = np.isin(frame.src[loads[1:]], key)
    times = {int(a): np.sort(frame.start[stores[frame.dst[stores] == a]]) for a in np.unique(frame.src[loads[1:]][hit])}
    for i in np.flatnonzero(hit):
        at = times[int(frame.src[loads[i + 1]])]
        out[i] = np.searchsorted(at, frame.start[loads[i + 1]]) > np.searchsorted(at, frame.start[loads[i]])
    return out


def _computes(frame: Frame) -> bool:
    """Whether the recording has kernels that could have used what was loaded, in its detail or in its totals."""
    totals = frame.recording.totals
    launched = int(totals["calls"][totals["kind"] == CallKind.LAUNCH].sum())
    kinds = np.isin(frame.kind, np.array([CallKind.LAUNCH, CallKind.GRAPH], dtype=np.uint8))
    return max(launched, int(kinds.sum())) >= FEW


def not_shown(frame: Frame) -> NotLookedFor | None:
    """Needs addresses."""
    return no_addresses(frame)


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
    still_there = _overwritten(frame, loads)[:-1] > frame.start[loads[1:]]
    to_the_same = ~new[1:] & (frame.dst[loads[1:]] == frame.dst[loads[:-1]]) & (frame.dst[loads[1:]] != 0)
    to_the_same &= ~_stored_between(frame, loads)
    later = to_the_same & ~again[1:] & still_there & waited_between(frame, loads[:-1], loads[1:])
    again_bytes = 10 * int(frame.bytes[loads[1:]][later].sum())
    if int(later.sum()) < MANY or again_bytes < int(frame.bytes[loads].sum()) or not _computes(frame):
        later[:] = False
    again[1:] = (again[1:] & still_there) | later
    rows = loads[again]
    if not len(rows):
        return None
    arrived = int(later.sum())
    wasted, moved = int(frame.bytes[rows].sum()), int(frame.bytes[loads].sum())
    batches = bool((frame.kind[rows] == CallKind.BATCH).any())
    evidence = [
        Evidence(f"{len(rows):,} of {len(loads)} loads copied bytes that were already there or on their way: "
                 f"{wasted / 1e6:.1f} MB, {share(wasted, moved)} of all loaded bytes", wasted, "bytes", COUNTED),
        Evidence(f"{arrived:,} of them went to where the same bytes had been loaded to, with no copy to either place "
                 "in between", arrived, "calls", COUNTED),
        Evidence(f"the block loaded most often was loaded {int(np.bincount(group).max()):,} times",
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
        Change("Limit the wait: load again where waiting would take longer than a load of its own"),
    )
    if not frame.recording.has_executions:
        rate, how = frame.link(Direction.H2D)
        ns = np.zeros(len(rows), dtype=np.int64)
        if rate > 0:
            ns = (frame.bytes[rows] / rate * 1e9).astype(np.int64)
            evidence.append(Evidence(f"their cost is their bytes at the link's rate ({how})", float(ns.sum()), "ns",
                                     INFERRED))  # fmt: skip
        return frame.finding(
            CAUSE, "{calls} loads were redundant" + (": {lost}" if rate > 0 else ""), "likely", int(ns.sum()),
            len(rows), lane="copy engine" if rate > 0 else "none", severity=None if rate > 0 else "info",
            places=frame.places(rows, ns), evidence=evidence, cure=cure,
            window=(int(frame.start[rows].min()), int(frame.end[rows].max())),
        )  # fmt: skip
    mine = np.zeros(len(frame.start), dtype=bool)
    mine[rows] = True
    executions = np.flatnonzero((frame.x_call >= 0) & mine[np.maximum(frame.x_call, 0)])
    spent = frame.x_dur[executions]
    evidence.append(Evidence(f"the copy engine spent {ms(int(spent.sum()))} on them", int(spent.sum()), "ns", MEASURED))
    return frame.device_finding(
        CAUSE, "{calls} redundant loads kept the copy engine busy for {lost}",
        "likely" if batches or arrived else "certain", executions, spent, evidence=evidence, cure=cure,
    )  # fmt: skip
