"""Every instant of a GPU in one line: computing, waiting for copies, waiting for the host, nothing to do, not known."""

from __future__ import annotations

import numpy as np

from kvprobe.account.activity import Activity, between_host_and_device
from kvprobe.account.lines import OPEN, Line, Unknown
from kvprobe.account.stretches import NOBODY, Stretches, marks, overlay
from kvprobe.account.threads import Threads
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, union
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.link_rate import FULL_LINK, LinkRate
from kvprobe.recordings.model import Array, Direction

__all__ = ["BEGINS_NS", "links_of", "stretches_of"]

BEGINS_NS = 20_000  # from the end of a submitting call until the device begins: some microseconds, 20 where it was idle

_COMPUTES, _COPIES, _IDLES, _UNCLEAR = 0, 1, 2, 3
_NO_DETAIL = -1


def stretches_of(joined: Joined, gpu: Activity, threads: Threads, begin: int, end: int) -> Stretches:
    """The account of a GPU from `begin` to `end`, ns; `threads` cover the same window."""
    edges, what = _busy(gpu, begin, end)
    parts = [_of_copies(joined, gpu, edges, what), _of_idleness(gpu, threads, edges, what)]
    computing = what == _COMPUTES
    parts.append(_same(edges[:-1][computing], edges[1:][computing], Line.COMPUTING))
    unclear = what == _UNCLEAR
    parts.append(_same(edges[:-1][unclear], edges[1:][unclear], Line.NOT_KNOWN, Unknown.GRAPH))
    start, stop, line, caller, detail = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.flatnonzero(stop > start)  # an empty one would take the place of what begins with it
    order = order[np.argsort(start[order], kind="stable")]
    out = Stretches.of(np.append(start[order], end if len(order) else begin), line[order], caller[order], detail[order])
    return _uncovered(out, gpu)


def _same(start: Array, end: Array, line: Line, detail: int = _NO_DETAIL) -> tuple[Array, ...]:
    many = len(start)
    return (
        start,
        end,
        np.full(many, line, dtype=np.uint8),
        np.full(many, NOBODY, dtype=np.int32),
        np.full(many, detail, dtype=np.int8),
    )


def _busy(gpu: Activity, begin: int, end: int) -> tuple[Array, Array]:
    """The window cut where kernels, or else copies, begin and end to run, and what each piece is."""
    masks = {_UNCLEAR: gpu.unclear, _COPIES: gpu.copying, _COMPUTES: ~(gpu.copying | gpu.unclear)}
    covers = {}
    for one, mask in masks.items():
        rows = np.flatnonzero(mask)
        covers[one] = union(*(np.clip(time[rows], begin, end) for time in (gpu.start, gpu.end)))
    edges = np.unique(
        np.concatenate([np.array([begin, end], dtype=np.int64), *(a for pair in covers.values() for a in pair)])
    )
    what = np.full(len(edges) - 1, _IDLES, dtype=np.uint8)
    for one, (first, last) in covers.items():  # whoever comes later prevails
        what[marks(edges, first, last)] = one
    return edges, what


def links_of(joined: Joined, gpu: Activity) -> tuple[LinkRate, LinkRate]:
    """The rates that this GPU's copies are compared with, to it and from it; 0 where it made none worth a word."""
    moved = [int(gpu.bytes[gpu.copying & (gpu.direction == one)].sum()) for one in (Direction.H2D, Direction.D2H)]
    made = [one > 0.01 * sum(moved) for one in moved]
    return (
        joined.link_or_assumed(Direction.H2D) if made[0] else LinkRate(),
        joined.link_or_assumed(Direction.D2H) if made[1] else LinkRate(),
    )


def _of_copies(joined: Joined, gpu: Activity, edges: Array, what: Array) -> tuple[Array, ...]:
    """Where only copies run: at the link's rate, all that run together; inside the GPU; or below the link's rate."""
    start, end = edges[:-1][what == _COPIES], edges[1:][what == _COPIES]
    if not len(start):
        return _same(start, end, Line.AT_LINK_RATE)
    alone = Cover(start, end)
    rows = np.flatnonzero(gpu.copying)
    rows = rows[gpu.end[rows] > gpu.start[rows]]
    rows = rows[alone.within(gpu.start[rows], gpu.end[rows]) > 0]
    took = gpu.end[rows] - gpu.start[rows]
    inside = gpu.direction[rows] == Direction.D2D
    share = np.zeros(len(rows))  # of the link, that each uses
    for direction in (Direction.H2D, Direction.D2H):
        mine = gpu.direction[rows] == direction
        rate = joined.link_or_assumed(direction).bytes_per_s / 1e9
        share[mine] = gpu.bytes[rows[mine]] / took[mine] / rate
    share[~(between_host_and_device(gpu.direction[rows]) | inside)] = 1.0  # which way is not known: no rate is
    at = np.concatenate((gpu.start[rows], gpu.end[rows]))
    order = np.argsort(at, kind="stable")
    at = at[order]
    last = np.append(at[1:] > at[:-1], True)  # of the changes at one instant
    knots = at[last]
    level, moving = (np.cumsum(np.concatenate((one, -one))[order])[last] for one in (share, inside.astype(np.int64)))
    slow = np.where(moving > 0, Line.INSIDE_GPU, Line.BELOW_LINK_RATE)
    line = np.where(level >= FULL_LINK, Line.AT_LINK_RATE, slow).astype(np.uint8)
    new = np.append(True, line[1:] != line[:-1])
    knots, line = knots[new], line[new]
    far = np.iinfo(np.int64).max
    before = np.array([np.iinfo(np.int64).min])
    start, end, line, _ = overlay(
        start, end, np.concatenate((before, knots, [far])), np.append(np.uint8(Line.BELOW_LINK_RATE), line)
    )
    return _late_kernels(gpu, start, end, line)


def _late_kernels(gpu: Activity, start: Array, end: Array, line: Array) -> tuple[Array, ...]:
    """Copies that ran alone, cut where the next kernel was submitted: until then it is its thread that is late."""
    kernels = np.flatnonzero(~(gpu.copying | gpu.unclear))
    following = np.searchsorted(gpu.start[kernels], end)
    known = np.flatnonzero(following < len(kernels))
    next_kernel = kernels[following[known]]
    caller = np.full(len(start), NOBODY, dtype=np.int32)
    caller[known] = gpu.caller[next_kernel]
    until = start.copy()
    until[known] = np.clip(gpu.entered[next_kernel], start[known], end[known])
    until[caller == NOBODY] = start[caller == NOBODY]
    nobody = np.full(len(start), NOBODY, dtype=np.int32)
    detail = np.full(2 * len(start), _NO_DETAIL, dtype=np.int8)
    early, late = (start, until, line, caller), (until, end, line, nobody)
    return (*(np.concatenate(columns) for columns in zip(early, late, strict=True)), detail)


def _of_idleness(gpu: Activity, threads: Threads, edges: Array, what: Array) -> tuple[Array, ...]:
    """Where nothing runs: what the thread that submitted the next operation did until then."""
    start, end = edges[:-1][what == _IDLES], edges[1:][what == _IDLES]
    following = np.searchsorted(gpu.start, end)
    known = following < len(gpu.start)
    caller = np.full(len(start), NOBODY, dtype=np.int64)
    returned = end.copy()
    caller[known], returned[known] = gpu.caller[following[known]], gpu.returned[following[known]]
    caller[~known] = _last_caller(gpu, edges[-1])  # nothing came any more: what the thread did that submitted last
    at_edge = ~known | (following == 0)  # before the first operation, and behind the last, nobody had asked for one
    host = np.clip(returned, start, end)  # until then the host had its part in it
    begun = np.where(host > start, np.minimum(host + BEGINS_NS, end), start)
    begun[~known] = host[~known] = end[~known]
    behind = _behind(gpu, following, known & (caller >= 0) & (end > host))
    begun[behind] = end[behind]
    nobody = caller < 0
    parts = [_same(start[nobody], end[nobody], Line.NOT_KNOWN, Unknown.NO_CALL)]
    waiting = ~nobody & (end > begun)
    parts.append(_same(begun[waiting], end[waiting], Line.NOT_KNOWN, Unknown.BETWEEN_OPERATIONS))
    parts.append(_by(host[behind], end[behind], Line.ELSEWHERE, np.full(int(behind.sum()), NOBODY)))
    begins = ~nobody & ~behind & (begun > host)
    parts.append(_by(host[begins], begun[begins], Line.SUBMITTING, caller[begins]))
    for one in np.unique(caller[~nobody]).tolist():
        mine = (caller == one) & (host > start)
        timeline = threads.of(one)
        piece, stop, part, of = overlay(start[mine], host[mine], timeline.edges, np.arange(len(timeline.line)))
        line, why = timeline.line[part], np.where(at_edge[mine][of], NOBODY, timeline.open[part])
        unasked = at_edge[mine][of] & among(line, (Line.PYTHON, Line.ELSEWHERE))
        line, known = np.where(unasked, Line.NOTHING_TO_DO, line), why == NOBODY
        parts.append(_by(piece[known], stop[known], line[known], np.full(int(known.sum()), one)))
        for reason in OPEN:
            parts.append(_same(piece[why == reason], stop[why == reason], Line.NOT_KNOWN, reason))
        lost = why == Unknown.NOT_KEPT
        *lines, details = _by(piece[lost], stop[lost], Line.NOT_KNOWN, np.full(int(lost.sum()), one))
        parts.append((*lines, np.full_like(details, Unknown.NOT_KEPT)))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _behind(gpu: Activity, following: Array, known: Array) -> Array:
    """Mask over idle stretches: a host function stood in front of the operation `following` each, where it is known."""
    if not len(gpu.behind):
        return np.zeros(len(known), dtype=bool)
    behind: Array = known.copy()
    behind[known] = gpu.behind[following[known]] != NOBODY
    return behind


def _by(start: Array, end: Array, line: Array | Line, caller: Array) -> tuple[Array, ...]:
    many = len(start)
    lines = np.full(many, line, dtype=np.uint8) if isinstance(line, Line) else line
    return start, end, lines, caller.astype(np.int32), np.full(many, _NO_DETAIL, np.int8)


def _last_caller(gpu: Activity, end: int) -> int:
    """Who submitted the last operation whose call is known; NOBODY where none is."""
    known = np.flatnonzero((gpu.caller != NOBODY) & (gpu.start < end))
    return int(gpu.caller[known[-1]]) if len(known) else NOBODY


def _uncovered(out: Stretches, gpu: Activity) -> Stretches:
    """What nobody looked at is not known, whatever was seen beside it; but a kernel that was seen computes."""
    if gpu.seen_from is None or gpu.seen_to is None:
        return out
    seen = out.cut(gpu.seen_from, gpu.seen_to)
    reason = Unknown.NOT_COVERED if len(gpu.seen_from) else Unknown.NOT_RECORDED
    hidden = ~seen & (out.line != Line.COMPUTING)
    out.line[hidden], out.caller[hidden] = Line.NOT_KNOWN, NOBODY
    out.detail[hidden] = reason
    return Stretches.of(out.edges, out.line, out.caller, out.detail)
