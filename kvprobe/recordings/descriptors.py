"""The descriptors of a recording's copies: how many, how large, what a call costs, which neighbours could be one copy.

A copy *continues* the one before it where source and destination both begin where that one's end, and nothing speaks
against one copy of both: the same thread gave them to the same stream in the same direction, one right after the other,
and in between it waited for nothing and nobody gave that stream anything else. Addresses are known of single copies
in kvprobe's own recordings; of a batch only the first one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.launchqueue.constants import PAUSE_NS
from kvprobe.recordings.assemble import among, pairs, positions
from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import Array, CallKind, Direction, Memory, Recording
from kvprobe.recordings.serving import ServingWindow

__all__ = ["Neighbours", "StreamCopies", "call_costs", "copies_by_stream", "has_addresses", "neighbours"]


@dataclass(frozen=True)
class Neighbours:
    """What follows what among the single copies whose addresses are known.

    Attributes:
        follows: mask over calls: given to its stream right after another copy, with nothing in between.
        continues: mask over calls: it follows, and continues the copy before it.
        gap_ns: of each call that follows, the time since the call before it returned; 0 of the others.
    """

    follows: Array
    continues: Array
    gap_ns: Array


@dataclass(frozen=True)
class StreamCopies:
    """The copies of one stream and direction, of single calls or of batches.

    Attributes:
        process, stream: rows of their tables; -1 unknown.
        batches: they were submitted in batch calls.
        calls: submitting calls.
        descriptors: copies in them; -1 where the recorder does not say how many a batch has.
        bytes: payload of all.
        sizes: tenth, median and ninetieth percentile and the greatest size of a descriptor, bytes; of a batch the mean
            of its own. -1 where `descriptors` is.
        bursts: groups of copies given one right after the other; -1 where addresses are not known.
        runs: what is left once each copy that continues another is part of it; -1 where addresses are not known.
        call_ns: median time in a call.
        host_ns: time in all of them.
        saved_ns: what the calls that continue another cost, where no queue blocks them.
        link_bytes_per_s, link_how: of the link, 0 where the recording does not tell it.
    """

    process: int
    stream: int
    direction: Direction
    batches: bool
    calls: int
    descriptors: int
    bytes: int
    sizes: tuple[int, int, int, int]
    bursts: int
    runs: int
    call_ns: int
    host_ns: int
    saved_ns: int
    link_bytes_per_s: float
    link_how: str


def has_addresses(recording: Recording) -> bool:
    """Whether the recorder told where copies go from and to; True where there is no copy."""
    calls = recording.calls
    copies = among(calls["kind"], (CallKind.COPY, CallKind.BATCH)) & (calls["bytes"] > 0)
    return not bool(copies.any()) or (not _unfilled(calls["src"]) and bool(calls["src"][copies].any()))


def _unfilled(column: Array) -> bool:
    """Whether no reader filled it, which takes no look at its rows: one zero for all."""
    return len(column) > 1 and column.strides == (0,) and not column[0]


def neighbours(recording: Recording) -> Neighbours:
    """Which copies follow and continue which."""
    calls = recording.calls
    follows = np.zeros(calls.rows, dtype=bool)
    out = Neighbours(follows, follows.copy(), np.zeros(calls.rows, dtype=np.int32))
    src, dst, size, stream = calls["src"], calls["dst"], calls["bytes"], calls["stream"]
    if not calls.rows or _unfilled(src):
        return out
    copies = among(calls["kind"], (CallKind.COPY,)) & (src != 0) & (dst != 0) & (size > 0) & (stream >= 0)
    if not copies.any():
        return out
    copies &= (calls["result"] == 0) & (calls["count"] <= 1)
    order = _by_stream(calls["start_ns"], stream)
    a, b = order[:-1], order[1:]
    at = np.flatnonzero(copies[a] & copies[b] & (stream[a] == stream[b]))
    a, b = a[at], b[at]
    gap = calls["start_ns"][b] - calls["end_ns"][a]
    keep = (gap >= 0) & (gap <= PAUSE_NS)
    for name in ("thread", "direction", "memory"):
        keep &= calls[name][a] == calls[name][b]
    a, b, gap = a[keep], b[keep], gap[keep]
    keep = ~_waited(recording, a, b)
    a, b, gap = a[keep], b[keep], gap[keep]
    before = size[a].astype(np.uint64)
    both = (src[b] == src[a] + before) & (dst[b] == dst[a] + before)
    out.follows[b] = True
    out.continues[b[both]] = True
    out.gap_ns[b] = gap
    return out


def _by_stream(start_ns: Array, stream: Array) -> Array:
    """Rows of calls that name a stream, by stream and then time."""
    rows = np.flatnonzero(stream >= 0)
    times = start_ns[rows]
    if (times[1:] < times[:-1]).any():
        rows = rows[np.argsort(times, kind="stable")]
    key = stream[rows]
    if len(key) and int(key.max()) < 1 << 16:
        key = key.astype(np.uint16)  # which are sorted without comparing
    return np.asarray(rows[np.argsort(key, kind="stable")])


def _waited(recording: Recording, earlier: Array, later: Array) -> Array:
    """Mask over pairs of calls of one thread: in between it waited for the device."""
    calls = recording.calls
    mask = np.zeros(len(earlier), dtype=bool)
    waits = np.flatnonzero(among(calls["kind"], (CallKind.SYNC, CallKind.COPY_SYNC)))
    if not len(waits) or not len(earlier):
        return mask
    both = np.concatenate((waits, earlier))
    found, place = pairs(calls["process"][both], calls["thread"][both])
    for of in positions(place, len(found)):
        cut = int(np.searchsorted(of, len(waits)))
        mine = of[cut:] - len(waits)
        times = np.sort(calls["start_ns"][waits[of[:cut]]])
        if len(times) and len(mine):
            starts = (np.searchsorted(times, calls["start_ns"][rows[mine]]) for rows in (later, earlier))
            mask[mine] = next(starts) > next(starts)
    return mask


def call_costs(recording: Recording, rows: Array) -> Array:
    """What each of these calls costs its caller while slots are free, ns: at most the median of its stream's."""
    calls = recording.calls
    took: Array = np.maximum(calls["end_ns"][rows] - calls["start_ns"][rows], 0)
    found, place = pairs(calls["stream"][rows], calls["direction"][rows])
    for mine in positions(place, len(found)):
        took[mine] = np.minimum(took[mine], int(np.median(took[mine])))
    return took


def _sizes(each: Array) -> tuple[int, int, int, int]:
    least, most = int(each.min()), int(each.max())
    if least == most:  # as the blocks of a pool are
        return least, least, least, least
    low, half, high = (int(value) for value in np.percentile(each, (10, 50, 90), method="lower"))
    return low, half, high, most


def copies_by_stream(recording: Recording, window: ServingWindow | None = None) -> list[StreamCopies]:
    """Copies by stream and direction, most host time first: those in a window, else all; pageable ones among them."""
    calls = recording.calls
    mask = among(calls["kind"], (CallKind.COPY, CallKind.BATCH)) & (calls["bytes"] > 0)
    rows = np.flatnonzero(mask)
    if window is not None:
        rows = rows[window.holds(calls["process"][rows], calls["start_ns"][rows])]
    if not len(rows):
        return []
    known = has_addresses(recording)
    near = neighbours(recording) if known else None
    batch = (calls["kind"][rows] == CallKind.BATCH).astype(np.int64)
    owner, direction = calls["process"][rows].astype(np.int64), calls["direction"][rows].astype(np.int64)
    groups, place = pairs(owner * (recording.streams.rows + 1) + calls["stream"][rows] + 1, direction * 2 + batch)
    took = np.maximum(calls["end_ns"][rows] - calls["start_ns"][rows], 0)
    links: dict[Direction, tuple[float, str]] = {}
    out = []
    for (_, kind), part in zip(groups, positions(place, len(groups)), strict=True):
        mine, way, batches = rows[part], Direction(kind // 2), bool(kind % 2)
        count, size = calls["count"][mine], calls["bytes"][mine]
        told = not batches or bool((count > 0).all())
        each = size // np.maximum(count, 1) if batches else size
        more = near.continues[mine] if near is not None and not batches else np.zeros(0, dtype=bool)
        if way not in links:
            links[way] = link_rate(recording, way)
        pinned = mine[more][calls["memory"][mine[more]] != Memory.PAGEABLE] if len(more) else mine[:0]
        out.append(
            StreamCopies(
                process=int(calls["process"][mine[0]]),
                stream=int(calls["stream"][mine[0]]),
                direction=way,
                batches=batches,
                calls=len(mine),
                descriptors=(int(count.sum()) if batches else len(mine)) if told else -1,
                bytes=int(size.sum()),
                sizes=_sizes(each) if told else (-1, -1, -1, -1),
                bursts=len(mine) - int(near.follows[mine].sum()) if near is not None and not batches else -1,
                runs=len(mine) - int(more.sum()) if near is not None and not batches else -1,
                call_ns=int(np.median(took[part])),
                host_ns=int(took[part].sum()),
                saved_ns=int(call_costs(recording, pinned).sum()) if len(pinned) else 0,
                link_bytes_per_s=links[way][0],
                link_how=links[way][1],
            )
        )
    return sorted(out, key=lambda one: -one.host_ns)
