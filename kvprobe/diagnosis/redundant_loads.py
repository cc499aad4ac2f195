"""The same host block is loaded again although its bytes are on the GPU, or on their way there.

Mechanism: two requests share a prefix; both find it in CPU memory and both load it, because the first load is not
visible until it has completed. Or whoever loads does not know what is there: the same blocks go to the same place
again and again.

Signature: a host-to-device copy with the source address and size of an earlier one of its process that has not ended
when the later one is submitted; or, after it has ended, one with its destination as well, where between the two no
copy wrote to the source and none from elsewhere to the destination, and something was waited for. So is one to another
place before the host waited for anything, so that nobody there has seen the first one end: where its source is loaded
several times within a tenth of a second and never again, and other sources are at other times (a staging buffer, which
the host fills anew, comes again and again). A load of another kind repeated after the first has ended is not counted:
the block may have been evicted since. Where the device was not recorded, a load has not ended before its stream's bytes
can have come over the fastest link there is. A kernel may have overwritten the bytes, which no recording tells: then
the finding is only likely. Needs addresses (kvprobe's own
recordings have them; Nsight Systems and Kineto do not, and then nothing is said). A load of which the destination was
given another source in between is needed (weights that pass through a few buffers are loaded again and again), and is
not counted. Of a batch only the first address is known: equal first address, size and count make it likely.

Time lost: what the copy engine spent on the repeated copies; where the recording has no executions, their bytes at the
link's rate where that is known, else what the calls took their callers, which is less.
Predicted saving: the same; a follower then waits for the load in flight, never longer than its own load would take.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import (
    COUNTED,
    INFERRED,
    MEASURED,
    Change,
    Evidence,
    Finding,
    Loss,
    NotLookedFor,
    cause_of,
)
from kvprobe.diagnosis.intervals import running_max_by_group
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.diagnosis.wasted_stores import no_addresses, waited_between
from kvprobe.recordings.model import CallKind, Direction, Memory

CAUSE = cause_of(__name__)
FEW = 8  # kernels
FASTEST = 450e9  # bytes per second of any link between CPU and GPU, one way: NVLink-C2C of a Grace Hopper
MANY = 32  # loads of what had arrived: fewer may be a block that a kernel had used up
BURST_NS = 100_000_000  # requests that share a prefix come within
SPREAD = 0.3  # of the time of all loads: so far apart are the bursts


def _device(joined: JoinedRecording) -> Array:
    """Of each call's stream: what one GPU has, another may lack; -1 where it is not known."""
    devices = np.append(joined.recording.streams["device"], -1)
    return np.asarray(devices[joined.stream])


def _ends(joined: JoinedRecording, loads: Array) -> Array:
    """When each load had ended, or the earliest that it can have, where its execution was not recorded."""
    rate = joined.link(Direction.H2D)[0] or FASTEST
    order = np.lexsort((joined.start[loads], joined.stream[loads], joined.process[loads]))
    rows = loads[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (joined.stream[rows[1:]] != joined.stream[rows[:-1]]) | (
        joined.process[rows[1:]] != joined.process[rows[:-1]]
    )
    took = (joined.bytes[rows] / rate * 1e9).astype(np.int64)
    sums = np.cumsum(took)
    begins = running_max_by_group(joined.start[rows] - (sums - took), np.cumsum(new))  # a stream runs in order
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = np.maximum(begins + sums, joined.end[rows])
    return np.where(joined.exec_end[loads] >= 0, joined.exec_end[loads], out)


def _overwritten(joined: JoinedRecording, loads: Array) -> Array:
    """When the destination of each load was next given another source; far in the future where never."""
    order = np.lexsort((joined.start[loads], joined.dst[loads], joined.process[loads]))
    rows = loads[order]
    never = np.iinfo(np.int64).max
    when = np.full(len(rows), never, dtype=np.int64)
    same = (joined.dst[rows[1:]] == joined.dst[rows[:-1]]) & (joined.process[rows[1:]] == joined.process[rows[:-1]])
    other = same & (joined.src[rows[1:]] != joined.src[rows[:-1]])
    when[:-1][other] = joined.start[rows[1:]][other]
    # Where the same source came again first, its own successor decides: walk runs of equal sources from their ends.
    run = np.cumsum(np.concatenate(([True], ~(same & ~other)))) - 1
    last = np.append(np.flatnonzero(run[1:] != run[:-1]), len(rows) - 1)
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = when[last][run]
    return out


def _stored_between(joined: JoinedRecording, loads: Array) -> Array:
    """Mask over neighbours in `loads` (all but the first): the source was stored to between the two."""
    stores = np.flatnonzero((joined.direction == Direction.D2H) & (joined.dst != 0) & (joined.bytes > 0))
    out = np.zeros(max(len(loads) - 1, 0), dtype=bool)
    if not len(stores):
        return out
    key = np.unique(joined.dst[stores])
    hit = np.isin(joined.src[loads[1:]], key)
    times = {
        int(a): np.sort(joined.start[stores[joined.dst[stores] == a]]) for a in np.unique(joined.src[loads[1:]][hit])
    }
    for i in np.flatnonzero(hit):
        at = times[int(joined.src[loads[i + 1]])]
        out[i] = np.searchsorted(at, joined.start[loads[i + 1]]) > np.searchsorted(at, joined.start[loads[i]])
    return out


def _unseen(joined: JoinedRecording, loads: Array) -> Array:
    """Mask over neighbours in `loads` (all but the first): the host waited for nothing between the two."""
    earlier, later = loads[:-1], loads[1:]
    out: Array = (joined.memory[earlier] != Memory.PAGEABLE) & (joined.memory[later] != Memory.PAGEABLE)
    out &= joined.kind[later] == CallKind.COPY  # of a batch only the first address is known
    out &= ~np.isin(joined.stream[earlier], joined.kernel_streams)
    for process in np.unique(joined.process[earlier]):
        mine = np.flatnonzero(out & (joined.process[earlier] == process))
        times = np.sort(joined.start[(joined.kind == CallKind.SYNC) & (joined.process == process)])
        before, after = (np.searchsorted(times, joined.start[pair[mine]]) for pair in (earlier, later))
        out[mine] = before == after
    return out


def _in_bursts(joined: JoinedRecording, loads: Array, group: Array, pairs: Array) -> Array:
    """Of `pairs` (positions of the later one in `loads`) those whose source came within one burst and never again.

    None of them where the bursts are not spread over the time of all loads.
    """
    start = joined.start[loads]
    cuts = np.flatnonzero(np.diff(group, prepend=-1))
    first, last = np.minimum.reduceat(start, cuts), np.maximum.reduceat(start, cuts)
    kept: Array = pairs[(last - first <= BURST_NS)[group[pairs]]]
    span = int(start.max() - start.min())
    if not len(kept) or span < 10 * BURST_NS:
        return kept[:0]
    low, high = np.quantile(first[np.unique(group[kept])], (0.1, 0.9))
    return kept if high - low >= SPREAD * span else kept[:0]


def _computes(joined: JoinedRecording) -> bool:
    """Whether the recording has kernels that could have used what was loaded, in its detail or in its totals."""
    totals = joined.recording.totals
    launched = int(totals["calls"][totals["kind"] == CallKind.LAUNCH].sum())
    kinds = np.isin(joined.kind, np.array([CallKind.LAUNCH, CallKind.GRAPH], dtype=np.uint8))
    return max(launched, int(kinds.sum())) >= FEW


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs addresses."""
    return no_addresses(joined)


def find(joined: JoinedRecording) -> Finding | None:
    """Loads of a source that is already being loaded."""
    kinds = (joined.kind == CallKind.COPY) | (joined.kind == CallKind.BATCH)
    loads = np.flatnonzero(kinds & (joined.direction == Direction.H2D) & (joined.src != 0) & (joined.bytes > 0))
    if len(loads) < 2:
        return None
    columns = (joined.count, joined.bytes, joined.src, _device(joined), joined.process)
    loads = loads[np.lexsort((joined.start[loads], *(column[loads] for column in columns)))]
    new = np.ones(len(loads), dtype=bool)
    new[1:] = np.any([column[loads[1:]] != column[loads[:-1]] for column in columns], axis=0)
    group = np.cumsum(new) - 1
    ends = _ends(joined, loads)
    reach = running_max_by_group(ends, group)
    again = np.zeros(len(loads), dtype=bool)
    again[1:] = ~new[1:] & (joined.start[loads[1:]] < reach[:-1])
    still_there = _overwritten(joined, loads)[:-1] > joined.start[loads[1:]]
    to_the_same = ~new[1:] & (joined.dst[loads[1:]] == joined.dst[loads[:-1]]) & (joined.dst[loads[1:]] != 0)
    stored = _stored_between(joined, loads)
    to_the_same &= ~stored
    later = to_the_same & ~again[1:] & still_there & waited_between(joined, loads[:-1], loads[1:])
    again_bytes = 10 * int(joined.bytes[loads[1:]][later].sum())
    if int(later.sum()) < MANY or again_bytes < int(joined.bytes[loads].sum()) or not _computes(joined):
        later[:] = False
    soon = ~new[1:] & (joined.start[loads[1:]] - joined.start[loads[:-1]] <= BURST_NS)
    pairs = np.flatnonzero(soon & ~again[1:] & ~later & still_there & ~stored)
    if len(pairs) >= MANY:
        pairs = pairs[_unseen(joined, loads)[pairs]] + 1
        pairs = _in_bursts(joined, loads, group, pairs)
    if len(pairs) < MANY or 10 * int(joined.bytes[loads[pairs]].sum()) < int(joined.bytes[loads].sum()):
        pairs = pairs[:0]
    again[1:] = (again[1:] & still_there) | later
    again[pairs] = True
    rows = loads[again]
    if not len(rows):
        return None
    arrived = int(later.sum())
    wasted, moved = int(joined.bytes[rows].sum()), int(joined.bytes[loads].sum())
    batches = bool((joined.kind[rows] == CallKind.BATCH).any())
    most = int(np.bincount(group).max())
    kinds_of = (
        (arrived, "went to where the same bytes had been loaded to, with no copy to either place in between"),
        (len(pairs), "came before the host had waited for the load of the same bytes before them"),
    )
    evidence = [
        Evidence(
            f"{len(rows):,} of {len(loads):,} loads copied bytes that were already there or on their way: "
            f"{wasted / 1e6:,.1f} MB, {share(wasted, moved)} of all loaded bytes",
            wasted,
            "bytes",
            COUNTED,
        ),
        *(Evidence(f"{count:,} of them {what}", count, "calls", COUNTED) for count, what in kinds_of if count),
        Evidence(f"the block loaded most often was loaded {most:,} times", most, "1", COUNTED),
    ]
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
    if not joined.recording.has_executions:
        rate, how = joined.link(Direction.H2D)
        ns = np.zeros(len(rows), dtype=np.int64)
        if rate > 0:
            ns = (joined.bytes[rows] / rate * 1e9).astype(np.int64)
            evidence.append(
                Evidence(f"their cost is their bytes at the link's rate ({how})", float(ns.sum()), "ns", INFERRED)
            )
        else:
            spent = joined.dur[rows]
            took = Evidence(f"their calls alone took {ms(int(spent.sum()))}", int(spent.sum()), "ns", MEASURED)
            of_calls = joined.host_finding(
                CAUSE,
                "{calls} loads were redundant: their calls alone took {lost}",
                "likely",
                rows,
                spent,
                evidence=[*evidence, took],
                cure=cure,
            )
            if of_calls is not None:
                return of_calls
        return joined.finding(
            CAUSE,
            "{calls} loads were redundant" + (": {lost}" if rate > 0 else ""),
            "likely",
            Loss(
                int(ns.sum()),
                len(rows),
                on="copy engine" if rate > 0 else "none",
                window=(int(joined.start[rows].min()), int(joined.end[rows].max())),
                places=joined.places(rows, ns),
            ),
            severity=None if rate > 0 else "info",
            evidence=evidence,
            cure=cure,
        )
    mine = np.zeros(len(joined.start), dtype=bool)
    mine[rows] = True
    executions = np.flatnonzero((joined.x_call >= 0) & mine[np.maximum(joined.x_call, 0)])
    spent = joined.x_dur[executions]
    evidence.append(Evidence(f"the copy engine spent {ms(int(spent.sum()))} on them", int(spent.sum()), "ns", MEASURED))
    return joined.device_finding(
        CAUSE,
        "{calls} redundant loads kept the copy engine busy for {lost}",
        "likely" if batches or arrived or len(pairs) else "certain",
        executions,
        spent,
        evidence=evidence,
        cure=cure,
    )
