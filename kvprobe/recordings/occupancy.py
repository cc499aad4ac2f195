"""How full each launch queue was at every submission, and the host time that was spent blocked because it was full.

Depth at a call's entry = operations in flight when the recording began + submissions before it - completions before
it, one submission per correlation id, done at the end of its last operation. What is measured here of a queue is judged
in launchqueue/judge.py; native/trace/queues.c measures the same of a Kineto trace (a test compares them).

The record of an event takes a slot, too, until all before it is done. Where a recording holds every record with its
stream, and they are no few, they are counted if a full queue is found or suspected so, and cost more than without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvprobe.launchqueue.constants import ALIGNED_NS, LEAST_DEPTH
from kvprobe.launchqueue.evidence import Labels, Plateau
from kvprobe.launchqueue.judge import NOT_ASKED, STATES, conclude, overall
from kvprobe.launchqueue.levels import band, is_shallow
from kvprobe.recordings.assemble import among, correlation_keys, pairs, quantiles, rows_of
from kvprobe.recordings.inferred import infer
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.links import links_of
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Label, Memory, Recording
from kvprobe.recordings.numbered import event_records

if TYPE_CHECKING:
    from kvprobe.launchqueue.judge import QueueConclusion, State

__all__ = ["Occupancy", "StreamOccupancy", "depth_series", "group_ns", "innermost_at", "innermost_range", "occupancy"]

_NEVER = np.iinfo(np.int64).max
_AT_ONCE = 1 << 18  # calls whose temporaries stay small


class _Concluded:
    """What was concluded of a queue, or of several."""

    conclusion: QueueConclusion

    @property
    def verdict(self) -> State:
        """What is concluded."""
        return self.conclusion.state

    @property
    def reason(self) -> str:
        """From what."""
        return self.conclusion.because


@dataclass
class StreamOccupancy(_Concluded):
    """One stream, or one hardware channel that several streams share.

    Attributes:
        stream: row of `Recording.streams`; the first one of a channel.
        streams: all rows that share this queue.
        calls: rows of `Recording.calls` that submit here, in order of their start.
        depth: submissions outstanding at the entry of each of `calls`, int32.
        blocked: which of `calls` were blocked by a full queue.
        blocked_ns: host time lost in each of `calls` to a full queue, int64.
        ceiling: the deepest that a blocked call was entered at; -1 where no full queue was found.
        plateau: shallowest and deepest depth of blocked calls.
        ceiling_how: "labels", "plateau" or "inferred"; empty without a ceiling.
        baseline_ns: median duration of a call at shallow depth, by name index.
        conclusion: full, not full or cannot tell, and from what; `verdict` and `reason` are its parts.
        before, after: submissions in flight when the recording began; submissions that execute after it ended.
        graphs: graph launches among the submissions: depth is then a soft count.
        aligned, chance: share of blocked calls that return within ALIGNED_NS of an operation's end, and the share of
            random instants nearby that would.
        labelled_ns, inferred_ns: time lost by the recorder's own labels, and by inference alone.
        ends: when submissions were done, sorted, those in flight at the beginning included.
        done: when each of `calls` was done, the largest int64 where it was not in the recording; kept where graphs are.
    """

    stream: int
    streams: list[int]
    calls: Array
    depth: Array
    blocked: Array
    blocked_ns: Array
    ceiling: int = -1
    plateau: tuple[int, int] = (-1, -1)
    ceiling_how: str = ""
    baseline_ns: dict[int, int] = field(default_factory=dict)
    conclusion: QueueConclusion = NOT_ASKED
    before: int = 0
    after: int = 0
    graphs: int = 0
    aligned: float = float("nan")
    chance: float = float("nan")
    labelled_ns: int = 0
    inferred_ns: int = 0
    ends: Array = field(kw_only=True, repr=False)
    done: Array = field(kw_only=True, repr=False)

    def blocked_by(self, conclusion: QueueConclusion, blocked: Array, ns: Array, how: str) -> None:
        """Takes in calls that a full queue blocked, (calls,) bool, and the time that each lost, (calls,) int64."""
        at = self.depth[blocked]
        self.conclusion, self.ceiling_how, self.blocked, self.blocked_ns = conclusion, how, blocked, ns
        self.ceiling, self.plateau = int(at.max()), (int(at.min()), int(at.max()))


@dataclass
class Occupancy(_Concluded):
    """All queues of a recording.

    Attributes:
        streams: one entry per stream (or channel) that was submitted to, most time lost first.
        depth: of each call at entry, (calls,) int32; -1 where the call submits nothing.
        blocked: which calls were blocked by a full queue, (calls,) bool.
        baseline_ns: what each call would have cost at shallow depth, (calls,) int32, 2.1 s at most; -1 unknown.
        conclusion: "full" if one queue was; else "cannot tell" if one cannot be told; else "not full"; `verdict` and
            `reason` are its parts.
        how: "labels", "plateau" or "inferred" (no device activity was recorded).
    """

    streams: list[StreamOccupancy]
    depth: Array
    blocked: Array
    baseline_ns: Array
    conclusion: QueueConclusion
    how: str
    labelled_ns: int
    inferred_ns: int

    @cached_property
    def blocked_ns(self) -> Array:
        """Host time lost in each call, (calls,) int64; put together when it is first asked for."""
        lost = np.zeros(len(self.depth), dtype=np.int64)
        for queue in self.streams:
            if queue.blocked.any():
                lost[queue.calls] = queue.blocked_ns
        return lost


def occupancy(recording: Recording, *, use_labels: bool = True, by_channel: bool = False) -> Occupancy:
    """Depth at every submission and the time lost to full queues.

    Args:
        recording: with or without executions; without, depth is inferred from the submissions alone.
        use_labels: take the recorder's own "command buffer full" labels where it has them.
        by_channel: streams that share a known hardware channel are one queue.
    """
    calls = recording.calls
    rows = calls.rows
    depth = np.full(rows, -1, dtype=np.int32)
    blocked = np.zeros(rows, dtype=bool)
    baseline = np.full(rows, -1, dtype=np.int32)
    labelled = _labelled(recording)
    found: list[StreamOccupancy] = []
    for queue, with_records in _queues(recording, by_channel):
        _judge(recording, queue, labelled, use_labels)
        if with_records is not None:
            _judge(recording, with_records, labelled, use_labels)
            queue = max(queue, with_records, key=_weight)
        depth[queue.calls] = queue.depth
        if queue.blocked.any():
            blocked[queue.calls] = queue.blocked
        names = calls["name"][queue.calls] if len(queue.baseline_ns) > 1 else None
        for name, value in queue.baseline_ns.items():
            of_name = queue.calls if names is None else queue.calls[names == name]
            baseline[of_name] = np.clip(value, -1, np.iinfo(np.int32).max)  # a damaged file's times
        found.append(queue)
    found.sort(key=lambda q: (-int(q.blocked_ns.sum()), q.stream))
    conclusion = overall([(q.conclusion, int(q.depth.max(initial=0))) for q in found])
    how = (
        "inferred"
        if not recording.has_executions
        else "labels"
        if use_labels and labelled is not None and labelled.any()
        else "plateau"
    )
    return Occupancy(
        found,
        depth,
        blocked,
        baseline,
        conclusion,
        how,
        sum(q.labelled_ns for q in found),
        sum(q.inferred_ns for q in found),
    )


# ---- depth ----------------------------------------------------------------------------------------------------------


def _weight(queue: StreamOccupancy) -> tuple[int, int]:
    """What was found of a queue, to be compared: the verdict, then the time lost."""
    return STATES.index(queue.verdict), int(queue.blocked_ns.sum())


def _queues(recording: Recording, by_channel: bool) -> Iterator[tuple[StreamOccupancy, StreamOccupancy | None]]:
    """Each queue by its submissions, and by its records of events as well where these are worth counting."""
    calls, streams = recording.calls, recording.streams
    rows = rows_of(among(calls["kind"], SUBMITTING))
    if not len(rows):
        return
    picked: Array | slice = rows if len(rows) < calls.rows else slice(None)  # of all, columns need no copy
    start = calls["start_ns"][picked]
    if (start[1:] < start[:-1]).any():
        picked = rows = rows[np.argsort(start, kind="stable")]
    del start
    stream = _assume_streams(recording, picked)
    done, began, orphans = _completions(recording, picked)

    queue_of = np.arange(max(streams.rows, 1) + 1, dtype=np.int32)  # the last entry is for stream -1
    if by_channel and streams.rows:
        told = streams["channel"] >= 0
        for row in np.flatnonzero(told):
            same = (
                told & (streams["device"] == streams["device"][row]) & (streams["channel"] == streams["channel"][row])
            )
            same &= streams["process"] == streams["process"][row]
            queue_of[row] = np.flatnonzero(same)[0]
    known = not by_channel and bool((stream >= 0).all())  # each stream is a queue of its own
    call_groups = _groups(stream if known else np.where(stream >= 0, queue_of[stream], np.int32(-1)))
    del stream
    orphan_groups = _groups(queue_of[orphans[0]])
    nothing = np.zeros(0, dtype=np.int64)
    for queue in list(call_groups):
        members = call_groups.pop(queue)
        if queue >= 0:
            early = orphan_groups.get(queue, nothing)
            shared = np.flatnonzero(queue_of[: streams.rows] == queue).tolist()
            before = orphans[1][early], orphans[2][early]
            mine = _Submissions(rows[members], done[members], began[members])
            del members
            records = event_records(recording, shared) if len(shared) == 1 else nothing
            with_records = _among(recording, records, mine) if len(records) else None
            found = _queue(recording, queue, shared, mine, before)
            del mine  # nothing as large is kept while the queue is judged
            yield found, None if with_records is None else _queue(recording, queue, shared, with_records, before)


class _Submissions(NamedTuple):
    """Submissions to one queue in order of time, (rows,) each.

    Attributes:
        rows: of the calls.
        done: when its execution ended, ns; `_NEVER` where there is none.
        began: when that began, likewise.
    """

    rows: Array
    done: Array
    began: Array


def _among(recording: Recording, records: Array, given: _Submissions) -> _Submissions:
    """Submissions of one stream and its records of events in order of time; a record is done with all before it."""
    none = np.full(len(records), _NEVER, dtype=np.int64)
    rows, done, began = np.append(given.rows, records), np.append(given.done, none), np.append(given.began, none)
    order = np.argsort(recording.calls["start_ns"][rows], kind="stable")
    rows, done, began = rows[order], done[order], began[order]
    if recording.has_executions:
        own = np.isin(rows, records)
        reached = np.maximum.accumulate(np.where(done != _NEVER, done, 0))
        done[own] = np.maximum(reached, recording.calls["start_ns"][rows])[own]
        began[own] = done[own]
    return _Submissions(rows, done, began)


def _completions(recording: Recording, rows: Array | slice) -> tuple[Array, Array, tuple[Array, Array, Array]]:
    """When each of these submissions was done and began to run, and what no call of the recording submitted.

    Returns:
        End of the last and start of the first execution with the call's correlation id, (rows,) int64 each, the
        largest int64 where there is none; and stream, start and end of every group of executions without a call.
    """
    executions = recording.executions
    nothing = np.zeros(0, dtype=np.int64)
    if not executions.rows:
        never = np.full(len(recording.calls["kind"][rows]), _NEVER, dtype=np.int64)
        return never, never.copy(), (nothing, nothing, nothing)
    links = links_of(recording)
    ran, done, began = links.first[rows] >= 0, links.done[rows], links.began[rows]
    if not ran.all():
        done, began = np.where(ran, done, _NEVER), np.where(ran, began, _NEVER)
    start, end = executions["start_ns"], executions["end_ns"]
    ours = np.zeros(recording.calls.rows + 1, dtype=bool)  # the last entry is for those without a call
    ours[:-1][rows] = True
    loose = np.flatnonzero(~ours[links.call])
    # Those of one id count as one, those without an id one by one.
    keys = correlation_keys(executions["process"][loose], executions["correlation"][loose])
    keys = np.where(keys >= 0, keys, -1 - np.arange(len(keys)))
    order = np.argsort(keys, kind="stable")
    if not len(order):
        return done, began, (nothing, nothing, nothing)
    first = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1]]))
    loose = loose[order]
    return (
        done,
        began,
        (
            executions["stream"][loose[first]],
            np.minimum.reduceat(start[loose], first),
            np.maximum.reduceat(end[loose], first),
        ),
    )


def _groups(keys: Array) -> dict[int, Array]:
    """The positions of each key, in order."""
    if len(keys) and int(keys.min()) >= -1 and int(keys.max()) < 64:  # few queues: no order to make
        return {int(key): np.flatnonzero(keys == key) for key in np.flatnonzero(np.bincount(keys + 1)) - 1}
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, first[1:]), strict=False))  # of no keys there is one part, empty


def _assume_streams(recording: Recording, rows: Array | slice) -> Array:
    """Streams of submissions; one that never executed in the recording goes where its thread last submitted."""
    calls = recording.calls
    stream: Array = calls["stream"][rows]
    if not recording.has_executions or (stream >= 0).all():
        return stream
    stream = stream.copy()
    owner = np.stack([calls["process"][rows].astype(np.int64), calls["thread"][rows]])
    order = np.lexsort((np.arange(len(stream)), owner[1], owner[0]))
    same = np.r_[False, (owner[:, order][:, 1:] == owner[:, order][:, :-1]).all(axis=0)]
    group = np.cumsum(~same)
    for direction in (1, -1):
        walk = order[::direction]
        values, groups = stream[walk], group[::direction]
        known = np.where(values >= 0, np.arange(len(walk)), -1)
        last = np.maximum.accumulate(known)
        usable = (last >= 0) & (groups[np.maximum(last, 0)] == groups)
        stream[walk] = np.where((values < 0) & usable, values[np.maximum(last, 0)], values)
    return stream


def _queue(
    recording: Recording, stream: int, streams: list[int], given: _Submissions, orphans: tuple[Array, Array]
) -> StreamOccupancy:
    """Depth at the entry of each submission; `orphans`: start and end of executions that no call submitted."""
    (rows, done, began), (orphan_start, orphan_end) = given, orphans
    calls = recording.calls
    start = calls["start_ns"][rows]
    executed = began != _NEVER
    # Streams run in order. A submission without an execution was done (or was nothing, like a memset of no bytes)
    # before anything submitted later ran; only those after the last executed one are still outstanding at the end.
    counted = executed.copy()
    if not recording.has_executions:
        counted[:] = True
    elif len(counted) and not counted[-1]:
        counted[len(rows) - (int(executed[::-1].argmax()) if executed.any() else len(rows)) :] = True
    # For the same reason an execution without a call was in flight at the beginning only if nothing that was
    # submitted in the recording ran before it.
    first_began = int(began.min()) if len(began) else _NEVER
    early = (orphan_start <= first_began) & (orphan_end > (start[0] if len(start) else 0))
    ends = done if executed.all() and not early.any() else np.concatenate([done[executed], orphan_end[early]])
    if (ends[1:] < ends[:-1]).any():
        ends = np.sort(ends)
    depth = np.cumsum(counted, dtype=np.int32)
    depth += np.int32(early.sum())
    depth -= counted
    depth -= np.searchsorted(ends, start, "right").astype(np.int32)
    graphs = int((calls["kind"][rows] == CallKind.GRAPH).sum())
    return StreamOccupancy(
        stream,
        streams,
        rows,
        np.maximum(depth, 0),
        np.broadcast_to(np.False_, (len(rows),)),
        np.broadcast_to(np.int64(0), (len(rows),)),
        before=int(early.sum()),
        after=int((counted & ~executed).sum()),
        graphs=graphs,
        ends=ends,
        done=done if graphs else np.zeros(0, dtype=np.int64),  # an empty view would keep all of them
    )


# ---- verdict --------------------------------------------------------------------------------------------------------


def _judge(recording: Recording, queue: StreamOccupancy, labelled: Array | None, use_labels: bool) -> None:
    """Fills baseline, blocked time and verdict of a queue; `labelled` is None where the recorder labels nothing."""
    calls = recording.calls
    rows = queue.calls
    if not recording.has_executions:
        infer(recording, queue)
        return
    duration = calls["end_ns"][rows] - calls["start_ns"][rows]
    _infer(recording, queue, duration)
    queue.inferred_ns = int(queue.blocked_ns.sum())
    if labelled is None:
        return
    # A batch that found the queue (almost) empty and filled it waits for its own descriptors.
    alone = (calls["kind"][rows] == CallKind.BATCH) & (queue.depth < LEAST_DEPTH)
    known = (labelled[rows] > 0) & ~alone
    queue.labelled_ns = int(labelled[rows[known]].sum())
    if use_labels and queue.labelled_ns:
        blocked = known | (queue.blocked & _beside(recording, rows, known))
        at = queue.depth[blocked]
        evidence = Labels(int(known.sum()), int(at.min()), int(at.max()), queue.graphs > 0)
        # A label covers the driver's wait; what led to it and came after it was lost as well.
        ns = np.where(blocked, np.maximum(labelled[rows], queue.blocked_ns), 0)
        queue.blocked_by(conclude(evidence), blocked, ns, "labels")


def _infer(recording: Recording, queue: StreamOccupancy, duration: Array) -> None:
    calls, rows, depth = recording.calls, queue.calls, queue.depth
    names = calls["name"][rows]
    deepest = int(depth.max())
    # A pageable copy waits for its staging and a graph launch for its own nodes: neither says anything of the queue.
    judged = (calls["memory"][rows] != Memory.PAGEABLE) & (calls["kind"][rows] != CallKind.GRAPH)
    shallow = judged & is_shallow(depth, deepest) if deepest >= LEAST_DEPTH else judged
    floor: dict[int, float] = {}
    for name in distinct(names).tolist():
        mine = names == name
        sample = duration[mine & shallow]
        if len(sample) < 20:  # full from the start: the cheapest calls stand for the shallow ones
            every = np.sort(duration[mine])
            sample = (
                np.concatenate([sample, every[: max(1, len(every) // 10)]])
                if len(sample)
                else (every[: max(1, len(every) // 10)])
            )
        half, floor[name] = quantiles(sample, 0.5, 0.95)
        queue.baseline_ns[name] = int(half)
    if deepest < LEAST_DEPTH:
        queue.conclusion = conclude(Plateau(deepest))
        return
    # The plateau is a band, for a queue may free slots in chunks: 1,135 to 1,141 on one H100, 1,012 to 1,022 on a V100.
    at_top = judged & (depth >= deepest - band(deepest))
    slow, lost = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=np.int64)
    for name in distinct(names[at_top]).tolist():
        mine, usual = names == name, queue.baseline_ns[name]
        limit = max(floor[name], 1.5 * usual)
        top, below = np.flatnonzero(mine & at_top), np.flatnonzero(mine & shallow)
        above, typical = np.maximum(duration[top] - limit, 0.0), 0.1 * usual
        if len(below) >= 20:
            typical = float(np.maximum(duration[below] - limit, 0.0).mean())
        # Noise makes some calls slow at any depth; a full queue makes them slower on average, many times over.
        if above.mean() > max(5 * typical, 0.25 * usual):
            late = top[above > 0]
            slow[late], lost[late] = True, duration[late] - usual
    if not slow.any():
        queue.conclusion = conclude(Plateau(deepest))
        return
    # What is slow by chance at the top carries little; what a full queue costs stands out of everything slow below.
    # (Calls that a graph makes slow further down, or pageable ones, are somebody else's finding.)
    shallowest = int(depth[slow].min())
    queue.aligned, queue.chance = _alignment(queue.ends, calls["end_ns"][rows[slow]], duration[slow])
    queue.conclusion = conclude(
        Plateau(
            deepest,
            slow=int(slow.sum()),
            shallowest=shallowest,
            lost_ns=int(lost.sum()),
            at_pin=int((judged & (depth >= shallowest)).sum()),
            aligned=queue.aligned,
            chance=queue.chance,
            drained=_drained(queue.ends, calls["start_ns"][rows[slow]], calls["end_ns"][rows[slow]]),
            in_graphs=float(_graphs_outstanding(recording, queue)[slow].mean()) if queue.graphs else 0.0,
        )
    )
    if queue.conclusion.full:
        queue.blocked_by(queue.conclusion, slow, lost, "plateau")


def _distance(sorted_times: Array, at: Array) -> Array:
    """Distance of each instant to the nearest of the times, int64."""
    if not len(sorted_times):
        return np.full(len(at), _NEVER)
    right = np.searchsorted(sorted_times, at)
    low = np.abs(at - sorted_times[np.maximum(right - 1, 0)])
    high = np.abs(sorted_times[np.minimum(right, len(sorted_times) - 1)] - at)
    return cast(Array, np.minimum(low, high))


def _alignment(ends: Array, returns: Array, duration: Array) -> tuple[float, float]:
    """Share of returns within ALIGNED_NS of an operation's end, and the share of instants nearby that are.

    The instants are spread evenly over as long as each call took, before and after its return, at least 200 µs; of
    more calls than 5,000, as many are taken evenly.
    """
    aligned = float((_distance(ends, returns) <= ALIGNED_NS).mean())
    reach = np.maximum(duration, 200_000)
    # In whole nanoseconds: a float64 of nanoseconds since 1970 has steps of 256.
    count = min(len(returns), 5000)
    picked = np.arange(count) * (len(returns) - 1) // max(count - 1, 1)
    offsets = reach[picked, None] * np.arange(1, 21) // 20
    instants = np.concatenate([returns[picked, None] - offsets, returns[picked, None] + offsets]).ravel()
    return aligned, float((_distance(ends, instants) <= ALIGNED_NS).mean())


def _drained(ends: Array, start: Array, end: Array) -> float:
    """Share of calls during which at least one operation of the stream ended."""
    return float((np.searchsorted(ends, end, "right") > np.searchsorted(ends, start, "left")).mean())


def _graphs_outstanding(recording: Recording, queue: StreamOccupancy) -> Array:
    """Which calls are entered while a graph is among the outstanding submissions, (calls,) bool."""
    start = recording.calls["start_ns"][queue.calls]
    graph = recording.calls["kind"][queue.calls] == CallKind.GRAPH
    done = np.sort(queue.done[graph])
    return cast(Array, np.cumsum(graph) - graph > np.searchsorted(done, start, "right"))


# ---- labels ---------------------------------------------------------------------------------------------------------


def _labelled(recording: Recording) -> Array | None:
    """Time that the recorder labels as "command buffer full" within each call, (calls,) int64; None: it labels none.

    Labels name their call by correlation id (Nsight Systems) or not at all (Kineto): then it is the submitting call
    that contains them in time, of two the shorter one.
    """
    calls, labels = recording.calls, recording.labels
    full = np.flatnonzero(labels["label"] == Label.COMMAND_BUFFER_FULL)
    if not len(full) or not calls.rows:
        return None
    out = np.zeros(calls.rows, dtype=np.int64)
    length = np.maximum(labels["end_ns"][full] - labels["start_ns"][full], 0)
    keys = correlation_keys(labels["process"][full], labels["correlation"][full])
    call_keys = correlation_keys(calls["process"], calls["correlation"])
    order = np.argsort(call_keys, kind="stable")
    at = np.minimum(np.searchsorted(call_keys[order], keys), len(order) - 1)
    rows = np.where((keys >= 0) & (call_keys[order[at]] == keys), order[at], -1)
    submitting = np.flatnonzero(among(calls["kind"], SUBMITTING))
    starts, ends = calls["start_ns"][submitting], calls["end_ns"][submitting]
    for i in np.flatnonzero(rows < 0).tolist():
        begin, end = int(labels["start_ns"][full[i]]), int(labels["end_ns"][full[i]])
        # Calls of one thread do not overlap, so the few that start just before it suffice.
        last = int(np.searchsorted(starts, begin + 1000, "right"))
        near = np.arange(max(0, last - 64), last)
        near = near[ends[near] + 1000 >= end]
        if len(near):
            rows[i] = submitting[near[np.argmin(ends[near] - starts[near])]]
    known = rows >= 0
    np.add.at(out, rows[known], length[known])
    return cast(Array, np.minimum(out, calls["end_ns"] - calls["start_ns"]))


def _beside(recording: Recording, rows: Array, known: Array) -> Array:
    """Which of these calls run while a labelled one of another thread does, where labels say no more than when.

    Of two threads that wait for a slot in one queue at once, one has the label.
    """
    labels = recording.labels
    if (labels["correlation"][labels["label"] == Label.COMMAND_BUFFER_FULL] >= 0).any():
        return np.zeros(len(rows), dtype=bool)
    start, end = recording.calls["start_ns"][rows], recording.calls["end_ns"][rows]
    latest = np.maximum.accumulate(end[known])  # the rows are in order of their start
    before = np.searchsorted(start[known], end, "left") - 1
    return (before >= 0) & (latest[np.maximum(before, 0)] > start)


# ---- views ----------------------------------------------------------------------------------------------------------


def depth_series(recording: Recording, queue: StreamOccupancy) -> tuple[Array, Array]:
    """Outstanding submissions over time as steps: times (n,) int64 ns, ascending, and the count from each on, (n,).

    One more than the depth it met after each call, one less after each end. A submission that leaves no execution (a
    memset of no bytes) has no end: each call's own depth starts anew, so such submissions do not add up.
    """
    start, ends = recording.calls["start_ns"][queue.calls], queue.ends
    after = queue.depth + np.int32(1)
    if not len(ends):
        return start, after
    times, out = np.empty(len(start) + len(ends), np.int64), np.empty(len(start) + len(ends), np.int32)
    first = int(np.searchsorted(ends, start[0], "right")) if len(start) else len(ends)
    times[:first], out[:first] = ends[:first], np.maximum(queue.before - np.arange(1, first + 1), 0)
    for begin in range(0, len(start), _AT_ONCE):  # calls, and what ends behind them until the next piece
        behind = int(np.searchsorted(ends, start[begin + _AT_ONCE], "right")) if begin + _AT_ONCE < len(start) else None
        piece, calls = ends[first:behind], slice(begin, begin + _AT_ONCE)
        place = slice(begin + first, begin + first + len(start[calls]) + len(piece))
        _merge(times[place], out[place], (start[calls], after[calls]), piece)
        first += len(piece)
    return times, out


def _merge(times: Array, out: Array, calls: tuple[Array, Array], ends: Array) -> None:
    """Fills in a piece of a series: its `calls`, as start and outstanding after each, and ends behind the first one.

    An end at the time of a call is counted before it, as by the call's depth.
    """
    start, after = calls
    ended = np.searchsorted(ends, start, "right")  # before each call
    at = ended + np.arange(len(start))
    is_end = np.ones(len(times), dtype=bool)
    is_end[at] = False
    behind = np.flatnonzero(is_end)
    gone = np.arange(1, len(ends) + 1)
    last = behind - gone  # the call before each end
    times[at], out[at] = start, after
    times[behind], out[behind] = ends, np.maximum(after[last] - (gone - ended[last]), 0)


def group_ns(values: Array, by: Array) -> dict[int, int]:
    """Sums of `values` by key, largest first; keys without any are left out."""
    keys, inverse = np.unique(by, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, inverse, values)
    return {int(keys[i]): int(sums[i]) for i in np.argsort(-sums, kind="stable") if sums[i]}


def innermost_range(recording: Recording, rows: Array) -> Array:
    """For each of these calls, the row of `ranges` that most closely contains its entry on its thread; -1 none."""
    calls = recording.calls
    out = np.full(len(rows), -1, dtype=np.int64)
    if not recording.ranges.rows or not len(rows):
        return out
    owners, place = pairs(calls["process"][rows], calls["thread"][rows])
    for at_owner, (process, thread) in enumerate(owners):
        wanted = np.flatnonzero(place == at_owner)
        out[wanted] = innermost_at(recording, process, thread, calls["start_ns"][rows[wanted]])
    return out


def innermost_at(recording: Recording, process: int, thread: int, at_ns: Array) -> Array:
    """For each of these instants, the row of `ranges` that most closely contains it on this thread; -1 none.

    Start/end ranges may overlap; the one that began last and still runs is taken.
    """
    ranges = recording.ranges
    out = np.full(len(at_ns), -1, dtype=np.int64)
    mine = np.flatnonzero((ranges["process"] == process) & (ranges["thread"] == thread))
    if not len(mine):
        return out
    mine = mine[np.argsort(ranges["start_ns"][mine], kind="stable")]
    starts, ends = ranges["start_ns"][mine].tolist(), ranges["end_ns"][mine].tolist()
    stack: list[int] = []
    i = 0
    for at in np.argsort(at_ns, kind="stable").tolist():
        now = int(at_ns[at])
        while i < len(starts) and starts[i] <= now:
            while stack and ends[stack[-1]] <= starts[i]:
                stack.pop()
            stack.append(i)
            i += 1
        while stack and ends[stack[-1]] <= now:
            stack.pop()
        if stack:
            out[at] = mine[stack[-1]]
    return out
