"""Which calls a full queue blocked, and which of the four shapes each belongs to: shared by the causes that name them.

Depth, ceiling and blocked time come from `recordings.occupancy`. Here they are split, each call to one shape:

* fence: for most of the call nothing of its stream executed, because the stream waited for something else. What is
  left of the call is the fence's as well: so each call counts once;
* alias: most of what filled the stream was put there by another thread, which copies, while the caller works elsewhere;
* channels: the caller's own stream was far from full, the channel that it shares with others was;
* saturation: the rest: one stream, more submissions than it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvprobe.diagnosis.fences import pooled_behind_fence, still_by_waits
from kvprobe.diagnosis.usual import UsualCosts
from kvprobe.launchqueue.constants import (
    ALIGNED_NS,
    CHANNEL_SLOTS,
    LEAST_DELAYS,
    LEAST_DEPTH,
    MANY_STREAMS,
    REAL_DEPTH,
    STANDING_NS,
)
from kvprobe.launchqueue.evidence import Regular, SharedChannel, StoodStill
from kvprobe.launchqueue.judge import conclude
from kvprobe.launchqueue.levels import at_top, band, is_late, with_slot
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording, Table
from kvprobe.recordings.numbered import slots_each
from kvprobe.recordings.occupancy import Occupancy, StreamOccupancy, occupancy

__all__ = ["UNSETTLED_SHARE", "Full", "full", "queue_blocked"]

SHAPES = ("saturation", "fence", "alias", "channels")
UNSETTLED_SHARE = 0.05  # of the threads' time: slow calls too short to be looked at one by one


@dataclass
class Full:
    """Blocked calls by shape.

    Attributes:
        rows, ns: for each shape, rows of `calls` and the host time lost in each to the full queue.
        ceiling: the depth at which a queue was full, by stream row; of a channel, by its first stream.
        how: "labels", "plateau" or "inferred".
        regular: some were accepted because they return with a constant delay, not because they return at once.
        crowded: streams whose channel was full, with the depth a single stream would take.
        channel_total: deepest that streams sharing a channel were together; 0 where that was not needed.
        channels_how: how sharing is known.
        open_reason: why a queue that might have been full could not be told; "" where none.
        open_rows: its slow calls at the top; `open_ns`: how much longer each took than with a free slot.
        open_ns: see there.
        spared: what deeper queues would save, as far as asked for (`deeper_queue.spared`), by shape and factor.
    """

    rows: dict[str, Array]
    ns: dict[str, Array]
    queues: list[StreamOccupancy]
    how: str
    ceiling: int = -1
    channel_total: int = 0
    channel_streams: int = 0
    channels_how: str = ""
    regular: bool = False
    crowded: dict[int, int] = field(default_factory=dict)
    open_reason: str = ""
    open_rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    open_ns: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    spared: dict[tuple[str, float], float] = field(default_factory=dict)


def _replaced(recording: Recording, channel: Array) -> Recording:
    """The recording with these channels of its streams."""
    tables = dict(recording.tables)
    tables["streams"] = Table("streams", {**recording.streams.columns, "channel": channel})
    return Recording(
        source=recording.source,
        tables=tables,
        names=recording.names,
        machine=recording.machine,
        has_executions=recording.has_executions,
        known_links=recording.known_links,
    )


def _with_channels(recording: Recording) -> Recording | None:
    """The recording with each stream's channel, where the recorder knows channels; None where it does not.

    A stream has a channel for each kind of work; that of its copies is taken, for copies are what fills it.
    """
    if recording.streams["channel"].max() >= 0:
        return recording
    table = recording.executions
    rows = np.flatnonzero((table["channel"] >= 0) & (table["engine"] == Engine.COPY) & (table["stream"] >= 0))
    if not len(rows):
        return None
    channel = np.full(recording.streams.rows, -1, dtype=np.int32)
    pairs, counts = np.unique(np.stack((table["stream"][rows], table["channel"][rows])), axis=1, return_counts=True)
    order = np.argsort(counts, kind="stable")
    channel[pairs[0][order]] = pairs[1][order]  # the most frequent is written last
    return _replaced(recording, channel)


def _pooled(recording: Recording, joined: UsualCosts) -> Recording | None:
    """The recording with all copy streams of a direction as if they were one channel; None where there are too few."""
    channel = np.full(recording.streams.rows, -1, dtype=np.int32)
    for direction in (Direction.H2D, Direction.D2H):
        copies = joined.submits & (joined.direction == direction) & (joined.stream >= 0)
        channel[distinct(joined.stream[copies])] = int(direction)
    channel[joined.kernel_streams] = -1
    if np.bincount(channel[channel >= 0], minlength=3).max() < MANY_STREAMS:
        return None
    return _replaced(recording, channel)


def _shared_channels(joined: UsualCosts, own: Occupancy, result: Full) -> tuple[Array, Array]:
    """Calls blocked by a channel although their own stream had free slots: (rows, ns)."""
    recording = joined.recording
    none = np.zeros(0, dtype=np.int64)
    if not recording.has_executions or not recording.streams.rows:
        return none, none
    labelled = _with_channels(recording)
    known = labelled is not None
    if labelled is not None:
        shared = occupancy(labelled, by_channel=True)
        result.channels_how = "channel ids of the recorder (CUPTI)"
    else:
        pooled = _pooled(recording, joined)
        if pooled is None:
            return none, none
        shared = occupancy(pooled, by_channel=True)
        result.channels_how = "inferred: all copy streams of a direction together stop at one depth"
    rows_out, ns_out = [], []
    result.crowded = {}
    full_depth = recording.machine.get("queue_depth")
    for queue in shared.streams:
        if len(queue.streams) < 2:
            continue
        rows, ns = _near_the_top(joined, queue) if queue.conclusion.full else _regular(joined, queue)
        users = distinct(joined.stream[rows])
        limit = int(queue.depth.max()) if known else int(full_depth or CHANNEL_SLOTS)
        roomy = ~at_top(own.depth[rows], limit)
        if not conclude(SharedChannel(known, len(rows), len(users), int(roomy.sum()))).full:
            continue
        if known or roomy.any():
            result.channel_total = max(result.channel_total, int(queue.depth.max()))
            result.channel_streams = max(result.channel_streams, len(users))
        result.crowded.update({int(stream): limit for stream in queue.streams})
        rows_out.append(rows[roomy])
        ns_out.append(ns[roomy])
    if not rows_out:
        return none, none
    return np.concatenate(rows_out), np.concatenate(ns_out)


def _by_other_thread(joined: UsualCosts, queue: StreamOccupancy, rows: Array) -> Array:
    """Mask over blocked `rows` of one stream: another thread, which copies, filled it; the caller lives elsewhere."""
    mask = np.zeros(len(rows), dtype=bool)
    if len(distinct(joined.caller[queue.calls])) < 2:
        return mask
    for caller in distinct(joined.caller[rows]):
        mine = np.flatnonzero(joined.caller[rows] == caller)
        here = queue.calls[joined.caller[queue.calls] == caller]
        elsewhere = int((joined.submits & (joined.caller == caller) & (joined.stream != queue.stream)).sum())
        others = queue.calls[joined.caller[queue.calls] != caller]
        others = others[joined.submits[others]]
        copies = among(joined.direction[others], [Direction.H2D, Direction.D2H]).mean()
        if elsewhere <= len(here) or copies < 0.9:
            continue
        done = ascending(joined.exec_end[here][joined.exec_end[here] >= 0])
        at = joined.start[rows[mine]]
        own = np.searchsorted(ascending(joined.start[here]), at) - np.searchsorted(done, at, "right")
        mask[mine] = 2 * own < joined.occupancy.depth[rows[mine]]
    return mask


def _standing_still(joined: UsualCosts, queue: StreamOccupancy, rows: Array) -> Array:
    """Which blocked calls stood behind a fence: for most of the call nothing of its queue executed, and then it did."""
    table = joined.recording.executions
    theirs = among(table["stream"], queue.streams or [queue.stream])
    cover = Cover(joined.x_start[theirs], joined.x_end[theirs])
    start, end = joined.start[rows], joined.end[rows]
    still = (end - start) - cover.within(start, end)
    begins = ascending(joined.x_start[theirs])
    at = np.searchsorted(begins, start)
    # Something of the queue must begin in the call or right after it, else it was not the queue that moved.
    moved = at < len(begins)
    moved[moved] = begins[at[moved]] <= end[moved] + 1_000_000
    standing: Array = moved & (2 * still > end - start) & (still > STANDING_NS)
    return standing


def full(joined: UsualCosts) -> Full:
    """Splits all blocked calls of a recording."""
    return joined.once(_split)


def queue_blocked(joined: UsualCosts) -> Array:
    """Which calls waited for a slot in a queue, whatever the shape, (calls,) bool."""
    return joined.once(_all_blocked)


def _all_blocked(joined: UsualCosts) -> Array:
    mask = np.zeros(len(joined.start), dtype=bool)
    for rows in full(joined).rows.values():
        mask[rows] = True
    return mask


def _split(joined: UsualCosts) -> Full:
    own = joined.occupancy
    none = np.zeros(0, dtype=np.int64)
    result = Full(dict.fromkeys(SHAPES, none), dict.fromkeys(SHAPES, none), [], own.how)
    rows_of: dict[str, list[Array]] = {s: [] for s in SHAPES}
    ns_of: dict[str, list[Array]] = {s: [] for s in SHAPES}
    channel_rows, channel_ns = _shared_channels(joined, own, result)
    pooled, pooled_ns, outstanding, streams = pooled_behind_fence(joined)
    more = ~np.isin(pooled, channel_rows)
    if more.any():
        channel_rows = np.concatenate((channel_rows, pooled[more]))
        channel_ns = np.concatenate((channel_ns, pooled_ns[more]))
        result.channel_total = max(result.channel_total, outstanding)
        result.channel_streams = max(result.channel_streams, streams)
        result.channels_how = result.channels_how or "counted from the beginning of the burst"
    taken = np.zeros(len(joined.start), dtype=bool)
    taken[channel_rows] = True
    rows_of["channels"].append(channel_rows)
    ns_of["channels"].append(channel_ns)
    for queue in own.streams:
        if queue.conclusion.full:
            rows, ns = _near_the_top(joined, queue)
        else:
            rows, ns = _regular(joined, queue)
            result.regular |= bool(len(rows))
            if not len(rows):
                rows, ns = _lonely(joined, queue)
            if queue.verdict == "cannot tell" and not result.open_reason and not len(rows):
                slow, excess = _unsettled(joined, queue)
                fresh = ~np.isin(slow, rows)
                result.open_reason = queue.reason
                result.open_rows, result.open_ns = slow[fresh], excess[fresh]
        keep = ~taken[rows]
        rows, ns = rows[keep], ns[keep]
        if not len(rows):
            continue
        result.queues.append(queue)
        # What blocked in a crowded channel with free slots on its own stream, by whichever analysis, is the channel's.
        if queue.stream in result.crowded:
            roomy = ~at_top(own.depth[rows], result.crowded[queue.stream])
            rows_of["channels"].append(rows[roomy])
            ns_of["channels"].append(ns[roomy])
            taken[rows[roomy]] = True
            rows, ns = rows[~roomy], ns[~roomy]
        alias = _by_other_thread(joined, queue, rows)
        seen = joined.recording.has_executions
        fenced = _standing_still(joined, queue, rows) if seen else still_by_waits(joined, queue.stream, rows, ns)
        fenced &= ~alias
        for shape, mask in (("alias", alias), ("fence", fenced), ("saturation", ~alias & ~fenced)):
            mask = mask & (ns > 0)
            rows_of[shape].append(rows[mask])
            ns_of[shape].append(ns[mask])
        taken[rows] = True
    for shape in SHAPES:
        result.rows[shape] = np.concatenate([none, *rows_of[shape]])
        result.ns[shape] = np.concatenate([none, *ns_of[shape]])
    result.ceiling = max((q.ceiling if q.ceiling > 0 else int(q.depth.max()) for q in result.queues), default=-1)
    return result


def _unsettled(joined: UsualCosts, queue: StreamOccupancy) -> tuple[Array, Array]:
    """Slow calls of a queue of which nobody can tell whether it was full.

    With most outstanding, where that is known and each is long; all, where those too short to be looked at one by one
    take a good part of the time together.

    Returns:
        Rows of `calls`; how much longer each took than one that finds a slot, ns.
    """
    judged = (joined.memory[queue.calls] != Memory.PAGEABLE) & (joined.kind[queue.calls] != CallKind.GRAPH)
    top = at_top(queue.depth[judged], max(int(queue.depth.max()), 1))  # of a queue that held nothing there is no top
    rows = queue.calls[judged]
    quick = joined.usual_ns[rows].copy()
    for name, baseline_ns in queue.baseline_ns.items():
        mine = joined.name[rows] == name
        quick[mine] = np.minimum(quick[mine], baseline_ns)
    excess = np.maximum(joined.dur[rows] - quick, 0)
    costly = excess > 2 * quick + 1_000
    if joined.recording.has_executions:  # else the depth is what cannot be told
        costly &= top
    short = int(excess[costly & ~joined.slow[rows]].sum())
    if short < UNSETTLED_SHARE * joined.caller_span_ns(rows):
        costly = joined.slow[rows] & top
    return rows[costly], excess[costly]


def _near_the_top(joined: UsualCosts, queue: StreamOccupancy) -> tuple[Array, Array]:
    """The blocked calls of a full queue, and those a little below its plateau that waited in the same way.

    Where slots are freed late (in chunks, or by a scheduler that was itself held up), the operations that ended in
    the meantime make the queue look less full than the caller found it.
    """
    rows, ns = queue.calls[queue.blocked], queue.blocked_ns[queue.blocked]
    if queue.ceiling_how != "plateau" or queue.graphs:
        return rows, ns
    return _with_late_room(joined, queue, rows, ns, queue.ceiling)


def _with_late_room(
    joined: UsualCosts, queue: StreamOccupancy, rows: Array, ns: Array, deepest: int
) -> tuple[Array, Array]:
    """Adds the slow calls a little below the plateau, between the first and the last that were blocked at it."""
    usual, dur = joined.usual_ns[queue.calls], joined.dur[queue.calls]
    below = is_late(queue.depth, deepest) & (dur > 5 * usual + 20_000)
    below &= (joined.memory[queue.calls] != Memory.PAGEABLE) & ~np.isin(queue.calls, rows)
    more = queue.calls[below]
    starts = ascending(joined.start[rows])
    between = np.searchsorted(starts, joined.start[more])
    more = more[(between > 0) & (between < len(starts))]
    return np.concatenate((rows, more)), np.concatenate((ns, joined.excess_of(more)))


def _lonely(joined: UsualCosts, queue: StreamOccupancy) -> tuple[Array, Array]:
    """A few calls at the stream's deepest while it stood still: too few for a plateau, but its stop explains them."""
    none = np.zeros(0, dtype=np.int64)
    deepest = int(queue.depth.max(initial=0))
    if deepest < LEAST_DEPTH or not joined.recording.has_executions:
        return none, none
    depth = float(joined.recording.machine.get("queue_depth") or 0)
    excess = joined.excess_of(queue.calls)
    top = queue.calls[
        (queue.depth >= deepest - band(deepest))
        & (excess > STANDING_NS)
        & (joined.memory[queue.calls] != Memory.PAGEABLE)
    ]
    still = _standing_still(joined, queue, top)
    fenced = still.copy()
    if not depth:  # then the fence itself must be seen: a wait, and the kernel that is waited for
        told = ascending(joined.start[joined.is_named("streamwaitevent") & (joined.stream == queue.stream)])
        busy = joined.busy_inside(top, Engine.KERNEL)
        fenced &= (np.searchsorted(told, joined.start[top]) > 0) & (10 * busy > 8 * joined.dur[top])
    behind = _behind_one(joined, queue, top) | (still & _let_go(joined, queue, top))
    held = np.zeros(len(top), dtype=bool)
    if conclude(StoodStill(deepest, depth, fences=int(fenced.sum()))).full:
        held |= fenced
    if conclude(StoodStill(deepest, depth, delays=int(behind.sum()))).full:
        held |= behind
    return top[held], joined.excess_of(top[held])


def _behind_one(joined: UsualCosts, queue: StreamOccupancy, rows: Array) -> Array:
    """Mask over blocked calls: one operation of their queue ran for most of the call, which returned as it ended."""
    table = joined.recording.executions
    theirs = np.flatnonzero(among(table["stream"], queue.streams or [queue.stream]))
    theirs = theirs[np.argsort(joined.x_start[theirs], kind="stable")]
    start, end = joined.start[rows], joined.end[rows]
    at = np.searchsorted(joined.x_start[theirs], start + (end - start) // 5, "right") - 1
    late = end - joined.x_end[theirs[np.maximum(at, 0)]]
    mask: Array = (at >= 0) & (late >= 0) & (late <= ALIGNED_NS)
    return mask


def _let_go(joined: UsualCosts, queue: StreamOccupancy, rows: Array) -> Array:
    """Mask over blocked calls in which a queue stood still: it moved on and freed the slots that return at once.

    A queue may free a band of slots in one piece: no more of its operations ended in the call.
    """
    ended = np.searchsorted(queue.ends, joined.end[rows], "right") - np.searchsorted(queue.ends, joined.start[rows])
    mask: Array = (ended > 0) & (ended <= band(int(queue.depth.max(initial=0))))
    return mask


def _regular(joined: UsualCosts, queue: StreamOccupancy) -> tuple[Array, Array]:
    """Slow calls at the top whose alignment is not at once, but is otherwise borne out.

    A queue whose slots are handed on by a software scheduler returns tens of microseconds after the device moved on,
    which a fixed tolerance takes for chance. The judge is told how they lie to the calibrated depth and how much their
    delays gather: chance would spread them over the whole time between two ends.
    """
    none = np.zeros(0, dtype=np.int64)
    deepest = int(queue.depth.max(initial=0))
    each = slots_each(joined.recording, queue)
    depth = float(joined.recording.machine.get("queue_depth") or 0) / each
    if queue.graphs or len(queue.ends) < LEAST_DELAYS:
        return none, none
    excess, usual = joined.excess_of(queue.calls), joined.usual_ns[queue.calls]
    judged = joined.memory[queue.calls] != Memory.PAGEABLE
    top = judged & (queue.depth >= deepest - band(deepest))
    slow = excess > 3 * usual + 10_000
    rows = queue.calls[top & slow]
    below = judged & with_slot(queue.depth, deepest)
    if not len(rows):
        return none, none
    at = np.searchsorted(queue.ends, joined.end[rows], "right")
    inside = (at > 0) & (at < len(queue.ends))
    delay = joined.end[rows][inside] - queue.ends[at[inside] - 1]
    between = queue.ends[at[inside]] - queue.ends[at[inside] - 1]
    phase = delay / np.maximum(between, 1) * 2 * np.pi
    gathered = float(np.hypot(np.cos(phase).mean(), np.sin(phase).mean())) if len(phase) else 0.0
    slow_below = float(slow[below].mean()) if below.any() else 0.0
    counts = len(rows), int(top.sum()), slow_below, len(delay)
    if not conclude(Regular(deepest, depth, REAL_DEPTH / each, len(queue.streams), *counts, gathered)).full:
        return none, none
    # Slots may be freed in chunks: then most calls at the top go through, and each one in so many waits long.
    return _with_late_room(joined, queue, rows, joined.excess_of(rows), deepest)
