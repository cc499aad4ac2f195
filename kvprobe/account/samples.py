"""What a GPU did where its recorder did not look, by what it saw before and after: lines by samples, with their error.

`kvprobe run` watches a program that its timing events would slow in stretches. Each is some milliseconds long, whatever
they cost there, and begins when enough is saved up for it, whatever the program does then: so what a stretch holds
stands for the time around it. A pause gets the mean of the NEAR stretches on each side, line by line; what its thread
did meanwhile is known, so that is done for each kind of call apart: in a wait the GPU does what it did in waits.

A stretch is known from where the work is over that stood in the streams before: often where a step ends. It is counted
with a weight that rises from its beginning and falls to its end, so that it matters little where in a step it began.

Marks may slow a program in a stretch. Its calls are counted everywhere: how many it makes a second in stretches, over
how many in pauses, is its speed there. Beside a thread that does not wait, the GPU gets as much more done in a pause,
at the cost of the host's lines.

The error is by resampling: so many stretches as there are, drawn anew, give all lines and the speed again. Where that
is more than MOST of the window, nothing is filled.

Of fewer than FEWEST stretches the error is not known that way. But a few long ones say as much as many: each counts for
as many looks as pauses of the usual length fit into it. Then the error is what pauses would come to that each were
like one of these looks, drawn at random; and as so many looks may all have missed what happens more seldom, so much of
what was not seen may be anything (1 - 0.05 ** (1 / looks) of it: else one of them would have met it, in 19 cases of
20). Nor need there be many where the thread's own calls show that it does the same all through the pauses (`steady`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvprobe.account.activity import Activity
from kvprobe.account.lines import COPIES, Line, Unknown
from kvprobe.account.steady import COVERED, may_differ
from kvprobe.account.stretches import NOBODY, How, Stretches
from kvprobe.account.threads import KEPT_NS, Threads
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.joined import Joined, on_gpu
from kvprobe.recordings.model import Array, CallKind, Engine

__all__ = ["COVERED", "DRAWS", "MOST", "Samples", "fill", "put"]

MOST = 0.05  # of the window: an error above it, and what was not seen stays not known
FEWEST = 8  # stretches, or looks: of fewer the error is not known: it is as large as what was not seen
FEWEST_STEADY = 3  # stretches, of a program that does the same all through the pauses between them
LOOKS = 64  # at most, however long stretches are
NEAR = 4  # pieces on each side of a pause that stand for it
LONGEST_NS = 20_000_000  # a longer stretch is cut into pieces: what is far from a pause stands for it less
SHORTEST_NS = 1_000_000
IDLE = 0.99  # of a piece at the window's end: it is idle throughout
OF_ALL = 0.05  # weight of all pieces beside those around a pause: for kinds of calls that these do not hold
SLOWEST = 0.5  # where marks slow a thread more, what is seen is another program
DRAWS = 400
TINY = 1e-12
LINES = len(Line)
DEVICE = np.array([Line.COMPUTING, *COPIES])


@dataclass(frozen=True)
class Samples:
    """How a GPU's account was filled.

    Attributes:
        count: stretches that stand for pauses.
        ns: of the window, known by them.
        error_ns: a line is that far from the truth at most, in 19 cases of 20.
        host_ns: of the rest, what the GPU's thread did is known by later calls (`not_kept`).
        counted_ns: of the window, known by how many kernels and copies ran (`counted`).
        counted_error_ns: a line is that much farther from the truth for it; what is known by samples of it included.
    """

    count: int = 0
    ns: int = 0
    error_ns: int = 0
    host_ns: int = 0
    counted_ns: int = 0
    counted_error_ns: int = 0

    @property
    def estimated_error_ns(self) -> int:
        """How far a line is from the truth at most, for all that is not seen: the one may add to the other."""
        return self.counted_error_ns + (self.error_ns if self.ns + self.host_ns else 0)


class _Joint(NamedTuple):
    """The window cut where the account's lines or the thread's calls change, (pieces + 1,) and (pieces,)."""

    edges: Array
    account: Array  # number of the account's line, caller and detail
    thread: Array  # Line of the thread
    kinds: int  # of account


class _Seen(NamedTuple):
    """What stretches hold, cut into pieces of about LONGEST_NS, and what they stand for."""

    start: Array  # of each piece, ns
    end: Array
    of: Array  # number of its stretch
    shares: Array  # (pieces, the thread's lines * kinds)
    weight: Array  # ns of pauses that each stands for
    near: list[Array]  # pieces around each pause
    thread: Array  # ns of pauses by line of the thread
    gaps: list[tuple[int, int]]
    looks: Array  # (looks, kinds): the account in parts of all stretches that are as long as a pause is
    differ: float  # so much of pauses may be of another kind than the rest of them (`steady`)

    @property
    def stretches(self) -> int:
        """How many stretches stand for pauses."""
        return len(np.unique(self.of[self.weight > 0]))


def fill(cut: Stretches, gpu: Activity, threads: Threads, samples: Samples) -> Samples:
    """Gives pauses of the recorder the lines of the stretches around them, in place.

    `threads` cover the window; of `samples` there is what is known by counts, and with it by how much stretches are
    wrong, and the pauses for them.
    """
    if gpu.seen_from is None or gpu.seen_to is None or not len(gpu.paused_from) or not len(cut.line):
        return samples
    begin, end = int(cut.edges[0]), int(cut.edges[-1])
    stretches = _stretches(gpu, begin, end)
    gaps = _gaps(stretches, gpu, begin, end)
    if not gaps:
        return samples
    table, number = np.unique(
        np.stack((cut.line, cut.caller, cut.detail)).astype(np.int64), axis=1, return_inverse=True
    )
    joint = _joint(cut, number.ravel(), table.shape[1], _timeline(cut, gpu, threads))
    seen = _seen(joint, stretches, gaps, table[0] == Line.NOTHING_TO_DO)
    calls = _calls(gpu, threads, seen)
    error, speed = _error(seen, calls, np.eye(LINES)[table[0]])
    counted = _counted(cut, gaps, samples)
    if error + counted.counted_error_ns > MOST * (end - begin):
        return replace(samples, count=seen.stretches, error_ns=int(error))
    mean = OF_ALL * seen.shares[seen.weight > 0].mean(axis=0)
    pieces = []
    for (start, stop), near in zip(gaps, seen.near, strict=True):
        weights = (seen.shares[near].mean(axis=0) + mean).reshape(LINES, -1)
        pieces.append(_filled(joint, start, stop, _at_speed(weights, table[0], speed)))
    put(cut, table, np.concatenate([one[0] for one in pieces]), np.concatenate([one[1] for one in pieces]), gaps)
    return replace(counted, count=seen.stretches, ns=cut.sum_ns(cut.sampled), error_ns=int(error))


def _counted(cut: Stretches, gaps: list[tuple[int, int]], samples: Samples) -> Samples:
    """What is known by counts outside of pauses; pauses that are told by that have as much of its error."""
    mine = np.flatnonzero(cut.how == How.COUNTED)
    if not len(mine):
        return samples
    cover, pauses = Cover(cut.start[mine], cut.end[mine]), np.array(gaps).T
    left = cover.total_ns - int(cover.within(*pauses).sum())
    seen = int(cut.edges[-1] - cut.edges[0] - (pauses[1] - pauses[0]).sum())
    times = left / cover.total_ns * (cut.edges[-1] - cut.edges[0]) / max(seen, 1)
    return replace(samples, counted_ns=left, counted_error_ns=int(samples.counted_error_ns * times))


def _stretches(gpu: Activity, begin: int, end: int) -> list[tuple[int, int]]:
    """Between pauses, from where all is known to where it is no more."""
    assert gpu.seen_from is not None and gpu.seen_to is not None
    edges = np.concatenate(([begin], np.column_stack((gpu.paused_from, gpu.paused_to)).ravel(), [end]))
    out = []
    for start, stop in np.clip(edges, begin, end).reshape(-1, 2).tolist():
        first = int(np.searchsorted(gpu.seen_to, start, "right"))
        last = int(np.searchsorted(gpu.seen_from, stop, "left")) - 1
        if last < first:
            continue
        one = max(start, int(gpu.seen_from[first])), min(stop, int(gpu.seen_to[last]))
        if one[1] - one[0] >= SHORTEST_NS:
            out.append(one)
    return out


def _gaps(stretches: list[tuple[int, int]], gpu: Activity, begin: int, end: int) -> list[tuple[int, int]]:
    """Between stretches, where the recorder paused."""
    if not stretches:
        return []
    ends = [begin, *(stop for _, stop in stretches)]
    begins = [*(start for start, _ in stretches), end]
    out = []
    for start, stop in zip(ends, begins, strict=True):
        at = int(np.searchsorted(gpu.paused_to, start, "right"))
        if stop > start and at < len(gpu.paused_from) and gpu.paused_from[at] < stop:
            out.append((start, stop))
    return out


def _timeline(cut: Stretches, gpu: Activity, threads: Threads) -> tuple[Array, Array]:
    """Edges and lines of the thread that the GPU waited for most."""
    whose = np.concatenate((cut.caller[cut.caller != NOBODY], gpu.caller[gpu.caller != NOBODY]))
    if not len(whose):
        return cut.edges[[0, -1]], np.zeros(1, dtype=np.uint8)
    callers, counts = np.unique(whose, return_counts=True)
    timeline = threads.of(int(callers[np.argmax(counts)]))
    return timeline.edges, np.where(timeline.open == Unknown.NOT_KEPT, Line.NOT_KNOWN, timeline.line)


def _joint(cut: Stretches, number: Array, kinds: int, timeline: tuple[Array, Array]) -> _Joint:
    begin, end = cut.edges[0], cut.edges[-1]
    edges = np.unique(np.concatenate((cut.edges, np.clip(timeline[0], begin, end))))
    account = number[np.searchsorted(cut.edges, edges[:-1], "right") - 1]
    of = np.clip(np.searchsorted(timeline[0], edges[:-1], "right") - 1, 0, len(timeline[1]) - 1)
    return _Joint(edges, account, timeline[1][of].astype(np.int64), kinds)


def _seen(joint: _Joint, stretches: list[tuple[int, int]], gaps: list[tuple[int, int]], idle: Array) -> _Seen:
    """Stretches cut into pieces, and what each holds; `idle` are the account's kinds in which there is nothing to do.

    What a window begins or ends with while there is nothing to do, stands for no pause: marks pause where much is done.
    """
    begins, ends, of = [], [], []
    for row, (start, stop) in enumerate(stretches):
        edges = np.linspace(start, stop, max(1, (stop - start) // LONGEST_NS) + 1).astype(np.int64).tolist()
        some = range(len(edges) - 1)
        for at in some if len(some) <= 2 * NEAR else (*some[:NEAR], *some[-NEAR:]):
            begins.append(edges[at])
            ends.append(edges[at + 1])
            of.append(row)
    shares = np.zeros((len(of), LINES * joint.kinds))
    for row, (start, stop) in enumerate(zip(begins, ends, strict=True)):
        first, last = _within(joint, start, stop)
        x = (np.clip(joint.edges[first : last + 1], start, stop) - start) / (stop - start)
        weight = np.diff(x - np.sin(2 * np.pi * x) / (2 * np.pi))
        np.add.at(shares[row], joint.thread[first:last] * joint.kinds + joint.account[first:last], weight)
    at_an_end = np.isin(of, (0, len(stretches) - 1))
    pieces = np.flatnonzero(~at_an_end | (shares.reshape(len(of), LINES, -1)[:, :, idle].sum(axis=(1, 2)) < IDLE))
    pieces = pieces if len(pieces) else np.arange(len(of))
    near, weight, thread = [], np.zeros(len(of)), np.zeros(LINES)
    for start, stop in gaps:
        at = int(np.searchsorted(np.array(begins)[pieces], start, "right"))
        near.append(pieces[max(at - NEAR, 0) : at + NEAR])
        weight[near[-1]] += (stop - start) / len(near[-1])
        first, last = _within(joint, start, stop)
        np.add.at(thread, joint.thread[first:last], np.diff(np.clip(joint.edges[first : last + 1], start, stop)))
    looks, differ = np.zeros((0, joint.kinds)), 0.0
    if len(stretches) < FEWEST:
        looks, differ = _looks(joint, stretches, gaps), may_differ(joint.edges, joint.thread, gaps)
    return _Seen(np.array(begins), np.array(ends), np.array(of), shares, weight, near, thread, gaps, looks, differ)


def _looks(joint: _Joint, stretches: list[tuple[int, int]], gaps: list[tuple[int, int]]) -> Array:
    """Shares of the account's kinds in parts of stretches that are as long as pauses are on average, or longer."""
    long = max(
        sum(stop - start for start, stop in some) / most for some, most in ((gaps, len(gaps)), (stretches, LOOKS))
    )
    rows = []
    for start, stop in stretches:
        edges = np.linspace(start, stop, max(1, int((stop - start) / long)) + 1).astype(np.int64).tolist()
        for begin, end in pairwise(edges):
            first, last = _within(joint, begin, end)
            ns = np.diff(np.clip(joint.edges[first : last + 1], begin, end))
            rows.append(np.bincount(joint.account[first:last], ns, joint.kinds) / (end - begin))
    return np.array(rows)


def _within(joint: _Joint, start: int, stop: int) -> tuple[int, int]:
    """First and last of the pieces between these instants, the last left out."""
    return int(np.searchsorted(joint.edges, start, "right")) - 1, int(np.searchsorted(joint.edges, stop, "left"))


def _calls(gpu: Activity, threads: Threads, seen: _Seen) -> tuple[Array, float]:
    """Calls a ns in each piece, and in pauses: of those that are kept wherever they were made, or of launches.

    A launch is kept only where it took long, which marks make it: launches are counted, where they are more. Where
    calls were lost, only the time counts in which all were kept; a piece before gets the mean of those. If that holds
    no piece or no pause, waits that took long count at all times.
    """
    launched = _launched(gpu, threads, seen)
    joined = threads.joined
    mine = ~joined.nested & joined.calls_of_gpu(gpu)
    callers = distinct(joined.caller[mine & joined.submits]).tolist()
    kept = max((threads.kept_from(one) for one in callers), default=threads.begin)
    gaps = np.array(seen.gaps).T
    begins, ends = np.maximum(gaps[0], kept), np.maximum(gaps[1], kept)
    whole = seen.start >= kept
    if whole.any() and (ends > begins).any():
        mine &= joined.kind != CallKind.LAUNCH
    else:
        mine &= (joined.kind == CallKind.SYNC) & (joined.end - joined.start >= KEPT_NS)
        (begins, ends), whole = gaps, np.ones(len(whole), dtype=bool)
    at = np.sort(joined.end[mine])

    def count(start: Array, end: Array) -> Array:
        many: Array = np.searchsorted(at, end) - np.searchsorted(at, start)
        return many

    rates = count(seen.start, seen.end) / (seen.end - seen.start)
    rates[~whole] = np.average(rates[whole], weights=seen.weight[whole] + TINY)
    by_calls = rates, float(count(begins, ends).sum() / (ends - begins).sum())
    return launched if launched[1] > by_calls[1] else by_calls


def _launched(gpu: Activity, threads: Threads, seen: _Seen) -> tuple[Array, float]:
    """Launches a ns in each piece, as its spans count them, and in pauses: the threads' own count less the spans'.

    A slow launch or a wait tells how many its thread has made until then; between two of them they are spread evenly.
    Where a piece has holes, as many were made in these as elsewhere in it.
    """
    calls, spans = threads.joined.recording.calls, threads.joined.recording.spans
    kernels = (spans["engine"] == Engine.KERNEL) & (spans["graph"] < 0) & on_gpu(spans, gpu)
    order = np.flatnonzero(kernels)[np.argsort(spans["start_ns"][kernels], kind="stable")]
    begun, upto = spans["start_ns"][order], np.concatenate(([0], np.cumsum(spans["count"][order])))

    assert gpu.seen_from is not None and gpu.seen_to is not None
    covered = Cover(gpu.seen_from, gpu.seen_to)

    def count(start: Array, end: Array) -> Array:
        many = upto[np.searchsorted(begun, end)] - upto[np.searchsorted(begun, start)]
        whole: Array = many * (end - start) / np.maximum(covered.within(start, end), 1)
        return whole

    first, last = seen.gaps[0][0], seen.gaps[-1][1]
    told = (calls["launches"] >= 0) & np.isin(calls["process"], gpu.processes)
    made = 0.0
    for caller in distinct(threads.joined.caller[told]).tolist():
        mine = np.flatnonzero(told & (threads.joined.caller == caller))
        mine = mine[np.argsort(calls["start_ns"][mine], kind="stable")]
        part = float(np.diff(np.interp((first, last), calls["start_ns"][mine], calls["launches"][mine]))[0])
        made += part * _share_of_gpu(threads.joined, gpu, int(mine[0]))
    gaps = np.array(seen.gaps).T
    between = count(gaps[1][:-1], gaps[0][1:]).sum() if len(seen.gaps) > 1 else 0
    rates = count(seen.start, seen.end) / (seen.end - seen.start)
    return rates, max(made - between, 0.0) / float((gaps[1] - gaps[0]).sum())


def _share_of_gpu(joined: Joined, gpu: Activity, call: int) -> float:
    """How much of what the thread of this call launched went to this GPU: it may serve several."""
    totals, devices = joined.recording.totals, np.append(joined.recording.streams["device"], -1)
    mine = (totals["process"] == joined.process[call]) & (totals["thread"] == joined.thread[call])
    mine &= among(totals["kind"], (CallKind.LAUNCH, CallKind.GRAPH)) & (devices[totals["stream"]] >= 0)
    made = totals["calls"][mine]
    return float(made[devices[totals["stream"][mine]] == gpu.device].sum() / made.sum()) if made.any() else 1.0


def _error(seen: _Seen, calls: tuple[Array, float], lines: Array) -> tuple[float, float]:
    """How far any line is from the truth at most in COVERED of all cases, ns, and the program's speed in stretches."""
    hidden = float(seen.thread.sum())
    many = int(seen.of.max()) + 1
    used = np.flatnonzero(np.bincount(seen.of, seen.weight, many) > 0)
    steady = len(used) >= FEWEST_STEADY and seen.differ < MOST
    if len(used) < FEWEST and len(seen.looks) < FEWEST and not steady:
        return hidden, 1.0

    def by_stretch(values: Array) -> Array:
        out = np.zeros((many, *values.shape[1:]))
        np.add.at(out, seen.of, (values.T * seen.weight).T)
        return out[used]

    shares = by_stretch(seen.shares.reshape(len(seen.of), LINES, -1) @ lines)
    weight, rate = by_stretch(np.ones(len(seen.of))), by_stretch(calls[0])

    def speeds(times: Array) -> Array:
        if not calls[1]:
            return np.ones(len(times))
        rates: Array = times @ rate / (times @ weight) / calls[1]
        return np.minimum(rates, 1.0)

    def told(times: Array, speed: float) -> Array:
        mean = _at_speed(np.tensordot(times, shares, 1) / (times @ weight), np.arange(LINES), speed)
        total = mean.sum(axis=1, keepdims=True)
        by_kind = np.where(total > 0, mean / np.maximum(total, TINY), mean.sum(axis=0) / mean.sum())
        lines: Array = seen.thread @ by_kind
        return lines

    draws = np.random.default_rng(0).multinomial(len(used), np.full(len(used), 1 / len(used)), DRAWS).astype(float)
    by_draw = speeds(draws)
    slow = np.quantile(by_draw, COVERED) < 1  # or else it may be chance
    speed = float(speeds(np.ones((1, len(used))))[0]) if slow else 1.0
    if speed < SLOWEST:
        return hidden, speed
    best = told(np.ones(len(used)), speed)
    if len(used) < FEWEST and not steady:
        return min(_error_by_looks(seen, best, lines), hidden), speed
    off = [_off(told(one, max(how, SLOWEST)) - best) for one, how in zip(draws, by_draw, strict=True)]
    # a few stretches differ less than all would
    error = float(np.quantile(off, COVERED)) * (len(used) + 1) / (len(used) - 1) + seen.differ * hidden
    return min(error, hidden), speed


def _off(by: Array) -> float:
    """How far lines are apart, of what all of them are by, ns.

    A hole in what a stretch saw takes from the lines what is not known in its place: that is told as not known, and
    makes no line wrong.
    """
    unknown = by[Line.NOT_KNOWN]
    lines = np.delete(by, Line.NOT_KNOWN)
    off = np.where(lines * unknown < 0, np.abs(lines) - abs(unknown), np.abs(lines))
    return float(off.max())


def _error_by_looks(seen: _Seen, best: Array, lines: Array) -> float:
    """The same by looks, where there are few stretches; `best` is what all pauses are told to be, ns by line."""
    long = np.array([stop - start for start, stop in seen.gaps])
    drawn = np.random.default_rng(0).integers(len(seen.looks), size=(DRAWS, len(long)))
    pauses = np.einsum("dpk,p->dk", (seen.looks @ lines)[drawn], long.astype(float))
    off = [_off(one) for one in pauses * best.sum() / long.sum() - best]
    missed = float(1 - (1 - COVERED) ** (1 / len(seen.looks)))
    return float(np.quantile(off, COVERED)) + missed * float(seen.thread.sum())


def _at_speed(weights: Array, line: Array, speed: float) -> Array:
    """What would have been seen of a program that is not slowed, of `weights` (the thread's lines, kinds).

    Where its thread waits for the device marks slow nothing.
    """
    device, host = np.isin(line, DEVICE), ~np.isin(line, (*DEVICE, Line.NOT_KNOWN))
    busy, idle = (weights[:, mask].sum(axis=1, keepdims=True) for mask in (device, host))
    more = np.minimum(busy / speed - busy, idle)
    more[(busy == 0).ravel()] = more[Line.WAITING_FOR_DEVICE] = 0
    grown: Array = weights * (1 + more / np.maximum(busy, TINY) * device - more / np.maximum(idle, TINY) * host)
    return grown


def _filled(joint: _Joint, start: int, stop: int, weights: Array) -> tuple[Array, Array]:
    """A pause's pieces: where each begins, ascending, and its number; each kind of call has shares of its own."""
    first, last = _within(joint, start, stop)
    edges = np.clip(joint.edges[first : last + 1], start, stop)
    thread, length = joint.thread[first:last], np.diff(edges)
    order = np.argsort(-weights.sum(axis=0), kind="stable")
    begins, numbers = [], []
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero(thread == one)
        share = weights[one] if weights[one].sum() > 0 else weights.sum(axis=0)
        share = share[order] / share.sum()
        upto = np.concatenate(([0], np.cumsum(length[mine])))
        bounds = np.round(np.cumsum(share) * upto[-1]).astype(np.int64)
        bounds[-1] = upto[-1]
        inside = bounds[:-1][(bounds[:-1] > 0) & (bounds[:-1] < upto[-1])]
        cuts = np.unique(np.concatenate((upto[:-1], inside)))
        piece = np.searchsorted(upto, cuts, "right") - 1
        begins.append(edges[mine[piece]] + cuts - upto[piece])
        numbers.append(order[np.searchsorted(bounds, cuts, "right")])
    begin, number = np.concatenate(begins), np.concatenate(numbers)
    in_time = np.argsort(begin, kind="stable")
    return begin[in_time], number[in_time]


def put(cut: Stretches, table: Array, begin: Array, number: Array, gaps: list[tuple[int, int]]) -> None:
    """Writes pieces into the account in place of `gaps`: where each begins, and its column of `table`.

    Args:
        cut: the account.
        table: (3, kinds): lines, callers, details.
        begin: of the pieces, ns.
        number: (pieces,).
        gaps: disjoint, ascending; the pieces fill them.
    """
    inside = cut.cut(np.array([one[0] for one in gaps]), np.array([one[1] for one in gaps]))
    start = np.concatenate((cut.start[~inside], begin))
    line, caller, detail = (
        np.concatenate((column[~inside], table[row][number]))
        for row, column in enumerate((cut.line, cut.caller, cut.detail))
    )
    how = np.concatenate((cut.how[~inside], np.full(len(begin), How.SAMPLED, dtype=np.uint8)))
    how[(line == Line.NOT_KNOWN) & (detail == Unknown.NOT_COVERED)] = How.SEEN
    order = np.argsort(start, kind="stable")
    made = Stretches.of(np.append(start[order], cut.edges[-1]), line[order], caller[order], detail[order], how[order])
    cut.edges, cut.line, cut.caller, cut.detail = made.edges, made.line, made.caller, made.detail
    cut.cause, cut.how = made.cause, made.how
