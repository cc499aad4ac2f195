"""Whether a launch queue was full where the device was not recorded: from what the host saw alone.

What was outstanding is counted from the ends of transfers, where an engine tells them of nearly all that a stream was
given, or from timing events in the stream; else it is reckoned from the calls themselves. Either way a full queue is
named only where calls are slow at one depth and quick below it, and that depth is the one that was calibrated, or one
that queues have; or where one call a burst waits for long, and its number in the burst is that depth
(`_behind_fences`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvprobe.durations import time_text
from kvprobe.launchqueue.constants import (
    COPY_DEPTHS,
    ELSEWHERE_TIMES,
    FENCE_NS,
    FLOOD_CALLS,
    LEAST_BLOCKED,
    LEAST_SEEN,
    OVER_TIMES,
    REACHED_SHARE,
    REAL_DEPTH,
    SCALED_DEPTH,
    USUAL_DEPTHS,
)
from kvprobe.launchqueue.evidence import (
    DepthStep,
    HeldAt,
    InBurst,
    MetDepths,
    NumberedLaunches,
    OtherSlowCalls,
    Paced,
    Pinned,
    StoodStill,
)
from kvprobe.launchqueue.judge import conclude
from kvprobe.launchqueue.levels import at_top, half_empty, takes, with_slot
from kvprobe.recordings.assemble import among, quantile
from kvprobe.recordings.buckets import bucket_floor_ns
from kvprobe.recordings.flooded import QueueCalls, flooded
from kvprobe.recordings.held_locks import first_of_threads, held_lock
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.marked_depth import MarkedDepth, depth_by_marks, held_at, pinned
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Engine, Label, Memory, Recording, Table
from kvprobe.recordings.numbered import (
    emptying_waits,
    launches_since_empty,
    partial,
    slots_each,
    told_to_wait,
)

if TYPE_CHECKING:
    from kvprobe.recordings.occupancy import StreamOccupancy

__all__ = ["infer", "without_cpu"]

_AFTERWARDS = 0.1  # how many calls wait behind the one that met the full queue, where it drains
_LONG_NS = 1_000_000  # a wait for more than a copy: for what the copies stand behind
# From the end of a wait, as a mark tells it, until the call that it held returns: 31 to 39 us in the recording of
# layers_handed_to_a_peer_that_is_late (tests/corpus) on an H100.
_MOVED_ON_NS = 50_000
_STANDS = Engine.WAIT, Engine.FUNCTION
_FAR_SHORTER = 10  # times: a call that waited so much shorter than those at the depth waited for something else
_INFERRED = "inferred: {}; no device activity was recorded"
_NEVER = np.iinfo(np.int64).max


class _Depths(NamedTuple):
    """How deep queues may be, where none was calibrated.

    Attributes:
        least: that is believed, where all else fits; `usual` the least and most that GPUs have.
        usual: see there.
        exactly: least and most submissions that copies find a queue to take.
        drained: that the deepest queue holds.
        flood: submissions in a row that none holds.
        about: that queues take, in words.
    """

    least: float
    usual: tuple[float, float]
    exactly: tuple[float, float]
    drained: float
    flood: int
    about: int


def _depths(recording: Recording, each: float = 1.0) -> _Depths:
    """How deep queues are where the environment scales them, in submissions that take `each` slots.

    CUDA_SCALE_LAUNCH_QUEUES makes of 1,021 slots 253 or 4,093.
    """
    scale = float(recording.machine.get("queue_scale") or 0)
    drained = COPY_DEPTHS[1] * scale if scale > 0 else SCALED_DEPTH
    scale = scale if scale > 0 else 1.0
    low, high = (((some + 3) * scale - 3) / each for some in COPY_DEPTHS)
    usual = USUAL_DEPTHS[0] * scale / each, USUAL_DEPTHS[1] * scale / each
    about = round(((1_024 * scale) - 3) / each)
    return _Depths(REAL_DEPTH / each, usual, (low, high), drained / each, round(FLOOD_CALLS * scale / each), about)


def _counted(recording: Recording, each: float) -> int:
    """What a queue takes by calibration, in submissions of so many slots each; 0 where none was."""
    fact = recording.machine.get("queue_depth")
    return round(fact / each) if isinstance(fact, (int, float)) and fact > 0 else 0


def infer(recording: Recording, queue: StreamOccupancy) -> None:
    """Depth and blocked time where the device was not recorded: from what the host saw alone."""
    marked = depth_by_marks(recording, queue)
    _infer(recording, queue, marked)
    if marked is not None and not queue.conclusion.full:
        _at_waits(recording, queue, marked)
    numbered = partial(recording, queue)
    if marked is not None:  # a thread's launches since it last waited say less than a count
        least = _counted(recording, 1.0) or _depths(recording).usual[0]
        numbered &= ~(marked.known & (half_empty(marked.own, least)))
    if numbered.any():
        base = np.array([queue.baseline_ns.get(int(name), 0) for name in recording.calls["name"][queue.calls]])
        _launches(recording, queue, numbered, base)


def _at_waits(recording: Recording, queue: StreamOccupancy, marked: MarkedDepth) -> None:
    """Calls that were held while their stream stood at a wait, and returned as it moved on, by timing events."""
    given, spans = _queue_calls(recording, queue), recording.spans
    waits = np.flatnonzero(np.isin(spans["stream"], queue.streams) & among(spans["engine"], _STANDS))
    waits = waits[np.argsort(spans["end_ns"][waits], kind="stable")]
    excess = (given.duration - given.base).astype(np.int64)
    held = given.judged & marked.known & (excess > FENCE_NS)
    at = np.searchsorted(spans["end_ns"][waits], given.end, "right") - 1
    held &= at >= 0
    last = waits[at[held]]
    moved_on = given.end[held] - spans["end_ns"][last] <= _MOVED_ON_NS
    held[held] = moved_on & (spans["start_ns"][last] <= given.start[held])
    each = slots_each(recording, queue)
    known = _counted(recording, each) or _depths(recording, each).usual[0]
    depth = np.round(marked.own * slots_each(recording, queue, with_events=False) / each).astype(np.int32)
    concluded = conclude(StoodStill(int(depth[held].max(initial=0)), float(known), fences=int(held.sum())))
    if concluded.full:
        after = np.append(spans["start_ns"][waits], _NEVER)[at + 1] > given.start  # and the stream stands at no wait
        as_deep = marked.known & at_top(depth, int(depth[held].min()))
        drains = np.maximum.accumulate(held) & after & as_deep
        blocked = held | (given.judged & given.slow & drains)
        queue.after, queue.depth = 0, depth
        queue.blocked_by(concluded, blocked, np.where(blocked, excess, 0), "inferred")
        queue.inferred_ns = int(queue.blocked_ns.sum())


def _infer(recording: Recording, queue: StreamOccupancy, marked: MarkedDepth | None) -> None:
    """The same by calls that are all there.

    What was outstanding is counted from the ends of transfers, where an engine tells them of nearly all that the stream
    was given; else it is reckoned from the calls themselves (`_by_pace`), or from the number in its burst of the one
    call that waits (`_behind_fences`).
    """
    given = _queue_calls(recording, queue)
    duration, slow, judged = given.duration, given.slow, given.judged
    each = slots_each(recording, queue)
    known, depths = _counted(recording, each), _depths(recording, each)
    if marked is not None:  # which count events, too
        counts = slots_each(recording, queue, with_events=False)
        if _by_marks(recording, queue, given, marked, counts):
            return
        marked = marked._replace(own=marked.own * counts / each, everywhere=round(marked.everywhere * counts / each))
    counted = _count(recording, queue, given, marked, known, depths)
    if counted is not None:
        depth, source, judged = counted.depth, counted.how, judged & counted.known
        full = known or _deepest(depth[slow & judged])
        full = full if known or full >= depths.least else 0
    else:
        depth, late = np.zeros(len(duration)), slice(given.whole, None)
        start, end, emptied = given.start[late], given.end[late], given.emptied[late]
        depth[late], full, source = _by_pace(start, end, slow[late], emptied, known, depths)
        source = _INFERRED.format(source)
    queue.after = 0  # of none is it known when it was executed
    queue.depth = np.minimum(depth, full or np.iinfo(np.int32).max).astype(np.int32)
    top, below = judged & at_top(depth, full), judged & with_slot(depth, full)
    blocked = top & slow
    lost = np.where(blocked, duration - given.base, 0).astype(np.int64)
    concluded = conclude(
        DepthStep(
            int(full),
            int(blocked.sum()),
            int(top.sum()),
            int(slow[below].sum()),
            int(below.sum()),
            int((judged & ~slow & (depth >= OVER_TIMES * full)).sum()),
            int(lost.sum()),
            int(queue.depth[blocked].min(initial=np.iinfo(np.int32).max)),
            source,
        )
    )
    if concluded.full:
        queue.blocked_by(concluded, blocked, lost, "inferred")
        queue.ceiling = _deepest(queue.depth[blocked])
    elif counted is None or not counted.settled:
        _by_bursts(recording, queue, given, known, depths)
        if counted is None and marked is not None and not queue.conclusion.full:
            queue.depth = np.round(marked.own).astype(np.int32)
            source = _INFERRED.format("counted by timing events, and estimated where there were none")
    queue.inferred_ns = int(queue.blocked_ns.sum())
    if queue.conclusion.because:
        return
    excess = (duration - given.base)[slow]
    queue.conclusion = conclude(
        OtherSlowCalls(
            int(excess.sum()),
            without_cpu(recording, queue.calls[slow], excess) if len(excess) else 0,
            int(given.end.max()) - int(given.start[0]),
            "slow calls",
            source,
            int(queue.depth.max(initial=0)),
            counted.least if counted is not None else 0,
            int(top.sum()) if full else 0,
        )
    )


def _by_marks(
    recording: Recording, queue: StreamOccupancy, given: QueueCalls, marked: MarkedDepth, each: float
) -> bool:
    """Whether the count gathers where the queue is full; then that is concluded. `each`: slots of what is counted."""
    known, depths = _counted(recording, each), _depths(recording, each)
    held_by = takes(known) if known else depths.exactly
    until_next = np.diff(given.start, append=given.end[-1:])
    found = pinned(marked, given.duration, until_next, given.judged, held_by)
    if found is None:
        return False
    evidence: Pinned | HeldAt
    evidence, blocked, lost = found
    concluded = conclude(evidence)
    if not concluded.full:
        excess = (given.duration - given.base).astype(np.int64)
        long = given.judged & (excess > _LONG_NS)
        evidence, blocked = held_at(marked, excess, long, held_by)
        other = long & ~blocked
        no_cpu = without_cpu(recording, queue.calls[other], excess[other]) if other.any() else 0
        evidence = replace(evidence, elsewhere_ns=evidence.elsewhere_ns - no_cpu)
        lost = np.where(blocked, excess, 0)
        concluded = conclude(evidence)
    if concluded.full:
        names = recording.calls["name"][queue.calls]
        for name in distinct(names[blocked]).tolist():  # of all its calls, the usual one may have been blocked
            mine = blocked & (names == name)
            queue.baseline_ns[name] = round(quantile((given.duration - lost)[mine], 0.5))
        queue.after = 0
        queue.depth = np.minimum(np.round(marked.own), evidence.most).astype(np.int32)
        queue.blocked_by(concluded, blocked, lost, "inferred")
        queue.ceiling = _deepest(queue.depth[blocked])
        queue.inferred_ns = int(queue.blocked_ns.sum())
    return concluded.full


class _CountedDepths(NamedTuple):
    """What was outstanding at each call, where it was counted.

    Attributes:
        depth: (calls,) float64.
        known: at which calls, (calls,) bool.
        how: in words.
        least: what a queue takes at least; 0 where a queue may have been full that this count does not show.
        settled: nothing else is asked.
    """

    depth: Array
    known: Array
    how: str
    least: int
    settled: bool


def _count(
    recording: Recording,
    queue: StreamOccupancy,
    given: QueueCalls,
    marked: MarkedDepth | None,
    known: int,
    depths: _Depths,
) -> _CountedDepths | None:
    """The count by the ends of transfers, else by timing events; None where neither is of nearly all slow calls."""
    counted = _by_transfers(recording, queue)
    if counted is not None:
        how = _INFERRED.format("counted from the ends of transfers")
        return _CountedDepths(counted, np.ones(len(counted), dtype=bool), how, known, True)
    asked = given.slow & given.judged
    if marked is None or 10 * int((asked & marked.known).sum()) < 9 * int(asked.sum()):
        return None
    least = known or int(depths.usual[0])
    never = not at_top(marked.everywhere, least)  # whatever streams share a queue
    return _CountedDepths(
        marked.own, marked.known, "counted by timing events in the stream", least if never else 0, never
    )


def _queue_calls(recording: Recording, queue: StreamOccupancy) -> QueueCalls:
    """The queue's calls; what they cost where there is a slot goes to the queue as well."""
    calls, rows = recording.calls, queue.calls
    start, end = calls["start_ns"][rows], calls["end_ns"][rows]
    duration = end - start
    base = np.zeros(len(rows))
    for name in distinct(calls["name"][rows]).tolist():
        mine = calls["name"][rows] == name
        queue.baseline_ns[name] = _quick_ns(recording, queue, name, duration[mine])
        base[mine] = queue.baseline_ns[name]
    judged = (calls["memory"][rows] != Memory.PAGEABLE) & (calls["kind"][rows] != CallKind.GRAPH)
    judged &= ~_recorders(recording, queue)
    judged &= ~partial(recording, queue)
    slow = judged & (duration > np.maximum(3 * base, base + 1000))
    whole = _whole_from(recording, queue, slow)
    judged[:whole] = False
    return QueueCalls(start, end, base, slow, judged, _emptied(recording, queue), whole)


def _by_bursts(recording: Recording, queue: StreamOccupancy, given: QueueCalls, known: int, depths: _Depths) -> None:
    """Asks by the number in its burst of the one call that waits, else by floods; nothing where neither tells."""
    base, duration, rows = given.base, given.duration, queue.calls
    long = given.judged & (duration > 100 * base) & (duration > _LONG_NS)
    if long.any():
        begun, locked = given.emptied | told_to_wait(recording, queue), held_lock(recording, rows, long, given.slow)
        long &= ~first_of_threads(recording, rows)
        held_by = takes(known) if known else depths.exactly
        queues = f"the queue takes {known:,}" if known else f"queues take about {round(depths.about, -1):,}"
        slow = given.slow & given.judged
        held, place, first = _behind_fences(given.start, given.end, long, slow, begun, locked, held_by)
        lost = np.where(held, duration - base, 0).astype(np.int64)
        concluded = conclude(replace(first, lost_ns=int(lost.sum()), queues=queues))
        if concluded.full:
            queue.depth = place
            queue.blocked_by(concluded, held, lost, "inferred")
            return
    flooded(recording, queue, given, known or int(depths.exactly[1]), depths.flood)


def _launches(recording: Recording, queue: StreamOccupancy, numbered: Array, base: Array) -> None:
    """Adds launches that met a full queue, by their numbers: long ones at one depth and hardly before it.

    Of the launches beyond the depth at which a queue is full, one in thirty or more is long (slots come in chunks);
    they lose four times what long launches before it do.
    """
    calls, rows = recording.calls, queue.calls
    at = np.flatnonzero(numbered)
    place = launches_since_empty(recording, queue, numbered)
    lost = np.maximum(calls["end_ns"][rows[at]] - calls["start_ns"][rows[at]] - base[at], 0).astype(np.int64)
    long = lost > 3 * base[at]
    each = slots_each(recording, queue)
    known, depths = _counted(recording, each), _depths(recording, each)
    low = takes(known)[0] if known else depths.usual[0]
    top, early = long & (place >= low), long & (place < low)
    held = known or (_held(calls, rows[at], place, top, depths) if top.any() else 0)
    concluded = conclude(
        NumberedLaunches(
            int(top.sum()),
            int(lost[top].sum()),
            int(lost[early].sum()),
            int(place[top].max(initial=0)) - int(place[top].min(initial=0)) + 1,
            int(place[top].min(initial=np.iinfo(np.int64).max)),
            held,
            *((depths.usual,) if not known else ()),
        )
    )
    if concluded.state == "not full":
        _unexplained(recording, queue, rows[at[long]], lost[long])
        return
    if not concluded.full:
        queue.conclusion = concluded
        return
    queue.depth = queue.depth.copy()
    queue.depth[at] = np.minimum(place, held)
    blocked, spent = queue.blocked.copy(), queue.blocked_ns.copy()
    blocked[at[top]] = True
    spent[at[top]] = lost[top]
    queue.blocked_by(concluded, blocked, spent, "inferred")
    queue.inferred_ns, queue.ceiling = int(spent.sum()), held


def _unexplained(recording: Recording, queue: StreamOccupancy, rows: Array, lost: Array) -> None:
    """A queue is not called healthy where its launches took much longer than others, for no reason that is seen."""
    calls = recording.calls
    mine = calls["process"] == calls["process"][queue.calls[0]]
    span = int(calls["end_ns"][mine].max()) - int(calls["start_ns"][mine].min())
    what, how = f"{len(rows):,} kernel launches", _INFERRED.format("launches are counted by their thread")
    concluded = conclude(OtherSlowCalls(int(lost.sum()), without_cpu(recording, rows, lost), span, what, how))
    if queue.verdict == "not full" and concluded.state == "cannot tell":
        queue.conclusion = concluded


def _held(calls: Table, rows: Array, place: Array, top: Array, depths: _Depths) -> int:
    """How many launches the queue held when the first of the long ones met it; 0 where that cannot be reckoned.

    The device runs launches while others are made: as many as it takes slots free afterwards, one for each launch that
    waits. Their number is reckoned from the earliest launch that was kept.
    """
    least = int(place[top].min())
    if least <= depths.usual[1]:
        return least
    order = np.argsort(calls["start_ns"][rows], kind="stable")
    rows, place, top = rows[order], place[order], top[order]
    ends = calls["end_ns"][rows]
    follows = top[1:] & top[:-1] & (place[1:] == place[:-1] + 1)
    if follows.sum() < LEAST_BLOCKED:
        return 0
    pace = float(np.median(np.diff(ends)[follows]))
    first = int(np.flatnonzero(top)[0])
    earlier = np.flatnonzero(place[:first] < place[first])
    if not len(earlier) or pace <= 0:
        return 0
    return round(
        float(place[first]) - float(calls["start_ns"][rows[first]] - calls["start_ns"][rows[earlier[0]]]) / pace
    )


def without_cpu(recording: Recording, rows: Array, excess: Array) -> int:
    """How much of the excess of these calls their threads waited for a CPU, at most; ns."""
    waits, calls = recording.cpu_waits, recording.calls
    total = 0
    for process, thread in np.unique(np.column_stack((calls["process"][rows], calls["thread"][rows])), axis=0).tolist():
        notes = np.flatnonzero((waits["process"] == process) & (waits["thread"] == thread))
        mine = (calls["process"][rows] == process) & (calls["thread"][rows] == thread)
        first = np.searchsorted(waits["end_ns"][notes], calls["start_ns"][rows[mine]], side="right")
        last = np.searchsorted(waits["start_ns"][notes], calls["end_ns"][rows[mine]], side="left")
        waited = np.concatenate(([0], np.cumsum(waits["waited_ns"][notes])))
        around = np.where(last > first, waited[np.maximum(last, first)] - waited[first], 0)
        touched = np.zeros(len(notes) + 1, dtype=np.int64)  # notes that any call touches count once
        np.add.at(touched, first[last > first], 1)
        np.add.at(touched, last[last > first], -1)
        all_waited = int(waits["waited_ns"][notes][np.cumsum(touched)[:-1] > 0].sum())
        total += min(int(np.minimum(around, excess[mine]).sum()), all_waited)
    return total


def _behind_fences(
    start: Array,
    end: Array,
    long: Array,
    slow: Array,
    begun: Array,
    locked: Array,
    held_by: tuple[float, float],
) -> tuple[Array, Array, InBurst]:
    """Calls that waited at a full queue for what their copies stand behind: one long wait, then all go on.

    Nothing leaves the queue while it stands behind a forward pass, so the submission that waits is the one whose number
    in its burst is the depth. A stall of another kind hits that number by chance once in a hundred, as calls in a burst
    are thousands. What proves it beside its number: a wait of the host showed the stream empty before the burst, or
    calls wait again and again behind the long one and hardly ever before it, or another thread waited for the lock that
    the call held. A stall elsewhere that is far shorter does not speak against it.

    Args:
        start: entry of each call of the queue, ns, ascending; `end` and the others likewise, (calls,).
        end: see there.
        long: calls of a millisecond and more that may have waited; a thread's first call is long by itself.
        slow: calls that took longer than with free slots; behind the one that waited, they wait for one copy each.
        begun: before which calls a burst is known to begin: the stream was empty, or was told to wait for an event when
            it had been given nothing for 0.1 ms.
        locked: calls that held the context's lock, as another thread's wait shows.
        held_by: the least and the most submissions that a queue may hold.

    Returns:
        Which calls waited; submissions outstanding at each, int32; what is to be concluded from, its sums left out.
    """
    count = np.arange(len(start))
    low, high = held_by
    fresh = begun | np.r_[True, start[1:] - np.maximum.accumulate(end)[:-1] > _LONG_NS]
    begin = np.maximum.accumulate(np.where(fresh, count, 0))  # of the burst that a call is in
    place = count - begin
    waits = np.flatnonzero(long)
    first = waits[np.r_[True, begin[waits][1:] != begin[waits][:-1]]] if len(waits) else waits
    fits = first[(low <= place[first]) & (place[first] <= high)]
    proven = bool(begun[begin[fits]].any() or locked[fits].any()) or _drained_after(fits, begin, slow)
    held = np.zeros(len(start), dtype=bool)
    held[waits[np.isin(begin[waits], begin[fits])]] = True
    for one in fits:
        held |= slow & (begin == begin[one]) & (count > one)
    at = place[fits]
    numbers = (int(at.min()), int(at.max())) if len(fits) else (0, 0)
    took = end - start
    others = first[~np.isin(first, fits)]
    bursts = len(fits) + int((_FAR_SHORTER * took[others] >= took[fits].max(initial=0)).sum())
    evidence = InBurst(bursts, len(fits), proven, int(held.sum()), 0, *numbers, "")
    return held, np.minimum(place, numbers[1]).astype(np.int32), evidence


def _drained_after(fits: Array, begin: Array, slow: Array) -> bool:
    """Whether in the burst of each of these calls what follows them waits, and what comes before them does not."""
    for one in fits.tolist():
        after = slow[one + 1 : int(np.searchsorted(begin, begin[one], "right"))]
        before = slow[int(begin[one]) : one]
        often = float(after.mean()) if len(after) >= LEAST_SEEN else 0.0
        if often < max(_AFTERWARDS, ELSEWHERE_TIMES * float(before.mean())):
            return False
    return len(fits) > 0


def _lost(recording: Recording, queue: StreamOccupancy) -> bool:
    """Whether calls of this queue are in the totals and no longer in detail."""
    totals = recording.totals
    if not recording.lost.get(int(recording.calls["process"][queue.calls[0]])):
        return False
    made = np.isin(totals["stream"], queue.streams) & np.isin(totals["kind"], SUBMITTING)
    return not totals.rows or int(totals["calls"][made].sum()) > len(queue.calls)


def _whole_from(recording: Recording, queue: StreamOccupancy, slow: Array) -> int:
    """The queue's call from which on all calls are there; where detail was lost, what is left before are slow ones."""
    calls, rows = recording.calls, queue.calls
    if not _lost(recording, queue):
        return 0
    threads = calls["thread"][rows]
    quick = [np.flatnonzero(~slow & (threads == thread)) for thread in np.unique(threads)]
    return max((int(some[0]) for some in quick if len(some)), default=0)


def _deepest(depth: Array) -> int:
    """The depth that all but one in two hundred stay within; 0 where there are none."""
    return int(quantile(depth, 0.995)) if len(depth) else 0


def _quick_ns(recording: Recording, queue: StreamOccupancy, name: int, duration: Array) -> int:
    """What a call of this name costs while the queue has free slots, from these on the queue's streams.

    The median of those within three times of the quickest tenth; where nine in ten are many times slower than the
    quickest, of those. The detail that was kept may hold blocked calls alone: the process's totals know quick ones.
    """
    quickest, tenth = (quantile(duration, share) for share in (0.02, 0.1))
    totals = recording.totals
    if len(recording.histograms) == totals.rows:
        process = recording.calls["process"][queue.calls[0]]
        counts = recording.histograms[(totals["process"] == process) & (totals["name"] == name)].sum(axis=0)
        if counts.sum():
            quickest = float(bucket_floor_ns(int(np.searchsorted(np.cumsum(counts), 0.02 * counts.sum())) + 1))
    quick = duration[duration <= 3 * (tenth if tenth <= 4 * quickest else quickest)]
    return int(quantile(quick, 0.5) if len(quick) else quickest)


def _recorders(recording: Recording, queue: StreamOccupancy) -> Array:
    """Which of the queue's calls lie where the recorder labelled its own work, (calls,) bool."""
    calls, labels = recording.calls, recording.labels
    out = np.zeros(len(queue.calls), dtype=bool)
    mine = (labels["label"] == Label.INSTRUMENTATION) & (labels["process"] == calls["process"][queue.calls[0]])
    start = calls["start_ns"][queue.calls]
    for begin, end in zip(labels["start_ns"][mine].tolist(), labels["end_ns"][mine].tolist(), strict=True):
        out |= (begin <= start) & (start <= end)
    return out


def _emptied(recording: Recording, queue: StreamOccupancy) -> Array:
    """Before which of the queue's calls it was known to be empty, (calls,) bool.

    Before the first, unless calls before it were lost; and where a wait for the stream or for its whole device began
    when all earlier calls had returned. A wait for an event or for another stream says nothing of this one.
    """
    calls, rows = recording.calls, queue.calls
    waits = emptying_waits(recording, queue)
    waits = waits[np.argsort(calls["start_ns"][waits], kind="stable")]
    # Of the waits that begin after an instant, the first to end: then everything before is done.
    ends = np.append(np.minimum.accumulate(calls["end_ns"][waits][::-1])[::-1], _NEVER)
    returned = np.maximum.accumulate(calls["end_ns"][rows])[:-1]
    done = ends[np.searchsorted(calls["start_ns"][waits], returned)]
    emptied: Array = np.r_[not _lost(recording, queue), done <= calls["start_ns"][rows][1:]]
    return emptied


def _by_transfers(recording: Recording, queue: StreamOccupancy) -> Array | None:
    """What was outstanding at each call by the ends of the transfers that the calls belong to, (calls,) float64.

    Streams run in order, so all of a transfer and of those before it is done when its last copy ends; in between,
    copies are taken to end evenly. None where transfers do not tell it of nine calls in ten.
    """
    calls, rows, table = recording.calls, queue.calls, recording.transfers
    ours = np.flatnonzero(np.isin(table["stream"], queue.streams) & (table["copy_ns"] >= 0) & (table["ok"] == 1))
    if not len(ours):
        return None
    # The ids of two engines of a process may be the same: of those with the call's id, the last that had begun.
    begun = np.sort(table["start_ns"][ours])
    key = table["transfer"][ours] << 32 | np.searchsorted(begun, table["start_ns"][ours], "right")
    ours, key = ours[np.argsort(key, kind="stable")], np.sort(key)
    start = calls["start_ns"][rows]
    wanted = calls["transfer"][rows]
    at = np.searchsorted(key, wanted << 32 | np.searchsorted(begun, start, "right"), "right") - 1
    found = (wanted >= 0) & (at >= 0)
    found &= (key[at] >> 32 == wanted) & (start <= table["end_ns"][ours][at])
    if found.mean() < 0.9:
        return None
    first, last = np.full(len(ours), len(rows)), np.full(len(ours), -1)
    np.minimum.at(first, at[found], np.flatnonzero(found))
    np.maximum.at(last, at[found], np.flatnonzero(found))
    seen = np.argsort(last, kind="stable")
    seen = seen[last[seen] >= 0]
    first, last = first[seen], last[seen]
    done = np.maximum.accumulate((table["end_ns"] - np.maximum(table["poll_ns"], 0))[ours[seen]])
    # A transfer begins when the one before is done, and not before it is given. An event before it and one behind it
    # take a slot each.
    begins = np.maximum(np.r_[0, done[:-1]], start[first])
    times = np.maximum.accumulate(np.stack((begins, done), axis=1).ravel())
    number = np.arange(len(seen))
    gone = np.stack((np.r_[0, last[:-1] + 1] + 2 * number, last + 1 + 2 * (number + 1)), axis=1).ravel()
    place = np.arange(len(rows))
    given = place + 2 * np.searchsorted(np.maximum.accumulate(first), place, "right") - 1
    outstanding: Array = np.maximum(given - np.interp(start, times, gone, left=0), 0)
    return outstanding


def _by_pace(
    start: Array, end: Array, slow: Array, emptied: Array, known: int, depths: _Depths
) -> tuple[Array, int, str]:
    """What was outstanding at each call, reckoned from the calls alone.

    A call that waits for a slot returns when one is freed, so where slow calls follow one another the time from one
    return to the next is what the stream needs for a submission. At that pace the queue is followed from where it was
    known to be empty: each call takes a slot, time frees them. It is confirmed where slow calls begin when the queue
    should be full, after as many quick calls as it has slots for: those that a pause has freed, and in one case at
    least half of the queue.

    Returns:
        Depth at each call, (calls,) float64; the depth that is full, 0 where the calls do not confirm it; how.
    """
    returned = np.r_[start[0], np.maximum.accumulate(end)[:-1]]
    runs = (
        _runs(end - start, slow, emptied | (start - returned > 16 * np.median((end - start)[slow])))
        if slow.any()
        else []
    )
    if not runs:
        # Nobody ever waited here, so a millisecond is taken for time enough.
        place = np.arange(len(start))
        fresh = emptied | (start - returned > 1_000_000)
        return place - np.maximum.accumulate(np.where(fresh, place, 0)), known, "it is counted in each burst of calls"
    between = np.concatenate([np.diff(end[first : last + 1]) for first, last in runs])
    pace = max(float(np.minimum(between, 8 * np.median((end - start)[slow])).mean()), 1.0)
    source = f"it is assumed that an operation took {time_text(pace)}, because blocked calls returned so often"
    emptied = emptied | (start - returned > depths.drained * pace)
    full = known
    if not known:
        met = [onset.depth for onset in _follow(start, end, runs, emptied, pace, np.inf)[1] if onset.filled]
        low, middle, high = np.percentile(met, (25, 50, 75)) if met else (0.0, 0.0, 0.0)
        believed = conclude(MetDepths(low, middle, high, len(met), depths.least, depths.usual)).full
        full = int(middle) if believed else 0
    depth, onsets = _follow(start, end, runs, emptied, pace, full or np.inf)
    confirmed = conclude(Paced(full, tuple((one.depth, one.free, one.calls) for one in onsets))).full
    return depth, full if confirmed else 0, source


def _runs(duration: Array, slow: Array, breaks: Array) -> list[tuple[int, int]]:
    """First and last call of each stretch in which slow calls take most of the time, a few calls apart at most.

    Not most of the calls: a queue may free slots in chunks, and then only one call in so many waits.
    """
    window = np.ones(min(16, len(slow)))
    spent, waited = (np.convolve(time, window, "same")[: len(slow)] for time in (duration, duration * slow))
    dense = waited >= 0.5 * spent
    marks = np.flatnonzero(slow & dense)
    stretch = (np.cumsum(~dense) + np.cumsum(breaks))[marks]
    parts = np.split(marks, np.flatnonzero(np.diff(stretch)) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts if len(part) >= LEAST_BLOCKED]


class _Onset(NamedTuple):
    """Where slow calls begin to follow one another.

    Attributes:
        depth: what should be outstanding there.
        free: the most slots that were free since such calls last ended; 0 where that is not known.
        filled: the queue was known to be empty since then.
        calls: how many follow.
    """

    depth: float
    free: float
    filled: bool
    calls: int


def _follow(
    start: Array, end: Array, runs: list[tuple[int, int]], emptied: Array, pace: float, full: float
) -> tuple[Array, list[_Onset]]:
    """Depth at each call of a queue that frees a slot every `pace` ns, and how each run of slow calls met it.

    A run sets it right: there the queue is full, unless it should have been far from it. `full` is infinite where it is
    to be found out: then it is whatever a run meets.
    """
    depth = np.zeros(len(start))
    onsets: list[_Onset] = []
    at, level, since = 0, 0.0, float(start[0])
    told, filled, least = bool(emptied[0]), False, 0.0  # known at all; from empty on; the least since the last run
    for first, last in sorted([(int(i), -1) for i in np.flatnonzero(emptied)] + [*runs, (len(start), -1)]):
        if first > at:
            here = level + np.arange(first - at) - (start[at:first] - since) / pace
            depth[at:first] = np.minimum(here - np.minimum(np.minimum.accumulate(here), 0), OVER_TIMES * full)
            least = min(least, float(depth[at:first].min()))
            at, level, since = first, float(min(depth[first - 1] + 1, OVER_TIMES * full)), float(start[first - 1])
        if first == len(start):
            break
        if last < 0:
            level, since, told, filled, least = 0.0, float(start[first]), True, True, 0.0
            continue
        expected = max(level - (start[first] - since) / pace, 0.0)
        least = min(least, expected)
        onsets.append(_Onset(expected, full - least if told else 0.0, filled, last + 1 - first))
        if not told or expected >= REACHED_SHARE * full or full == np.inf:
            level = expected if full == np.inf else full
            depth[first : last + 1] = level
            at, since, told, filled, least = last + 1, float(end[last]), True, False, level
    return depth, onsets
