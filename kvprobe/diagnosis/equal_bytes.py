"""Whether copies carried what the copy before them had, by looks at the bytes that the recorder took of a sample.

Equal addresses make a copy a candidate; its bytes decide. A copy that was looked at is compared with the look before it
at the same place of the host; those between two looks are as the later one says. Others follow their place's looks, and
places that nobody looked at follow those of the same process and size.

A look is taken when a copy is submitted. What lies then where a store will go is what the store before it left only if
that one is over: until then it holds what was there before both. So stores are known to bring equal bytes only where a
wait or a timing event shows that the earlier one was over. That bytes have changed needs no such proof.

Of a few loads the recorder also looked at what the device had where the load went, right before it: a kernel may have
written over the bytes. A place at which it looked often is as these looks say, and others are as all of their process
and size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.recordings.model import Array, CallKind, Direction

__all__ = ["EQUAL", "NOT_KNOWN", "OTHER", "Looks", "device_looks_of", "looks_of"]

EQUAL, OTHER, NOT_KNOWN = 1, -1, 0
ENOUGH = 16  # looks at one place of the device: each sees little of it, and fewer would agree by chance
AGREE = 0.9  # of the looks at one place, or of one size: then those without are taken to be alike


@dataclass(frozen=True)
class Looks:
    """What is known of the bytes of some copies.

    Attributes:
        verdict: (copies,) int8, EQUAL: as at the copy before, from or to the same place; OTHER; or NOT_KNOWN.
        pairs: of looks that this rests on; equal: those with the same bytes.
        exist: whether the recording has looks at copies of this direction at all.
    """

    verdict: Array
    pairs: int
    equal: int
    exist: bool


def looks_of(joined: JoinedRecording, rows: Array, direction: Direction, blank: bool = True) -> Looks:
    """Compares the bytes of copies.

    Args:
        joined: the recording.
        rows: rows of copies of this direction, in any order.
        direction: H2D, looked at where they come from, or D2H, where they go.
        blank: whether equal bytes that are one word over and over tell anything.
    """
    table = joined.recording.contents
    verdict = np.zeros(len(rows), dtype=np.int8)
    mine = np.flatnonzero(table["direction"] == direction)
    if not len(mine) or not len(rows):
        return Looks(verdict, 0, 0, bool(len(mine)))
    place = joined.src if direction == Direction.H2D else joined.dst
    looked = table["src" if direction == Direction.H2D else "dst"]
    both = {
        "process": (joined.process[rows], table["process"][mine]),
        "place": (place[rows], looked[mine]),
        "bytes": (joined.bytes[rows], table["bytes"][mine]),
    }
    keys = np.stack([np.concatenate(pair).astype(np.uint64) for pair in both.values()])
    key = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    order = mine[np.lexsort((table["time_ns"][mine], key[len(rows) :]))]
    key_of = dict(zip(mine.tolist(), key[len(rows) :].tolist(), strict=True))
    look_key = np.array([key_of[one] for one in order.tolist()], dtype=np.int64)
    follows = np.zeros(len(order), dtype=bool)
    follows[1:] = look_key[1:] == look_key[:-1]
    alike = np.zeros(len(order), dtype=bool)
    alike[1:] = table["hash"][order[1:]] == table["hash"][order[:-1]]
    tells = np.ones(len(order), dtype=bool) if blank else table["blank"][order] == 0
    if direction == Direction.D2H:
        tells[1:] &= _was_over(joined, rows, order[:-1], table["time_ns"][order[1:]])
    follows &= tells | ~alike
    told = np.where(follows, np.where(alike, EQUAL, OTHER), NOT_KNOWN).astype(np.int8)
    size = np.unique(keys[[0, 2]], axis=1, return_inverse=True)[1].reshape(-1)
    pooled = _agreement(size[: len(rows)], size[len(rows) :][np.searchsorted(mine, order)], told)
    by_place = _agreement(key[: len(rows)], look_key, told)
    after = _next_look(key[: len(rows)], joined.start[rows], look_key, table["time_ns"][order], told)
    for said in (after, by_place, pooled):
        verdict = np.where(verdict == NOT_KNOWN, said, verdict).astype(np.int8)
    return Looks(verdict, int(follows.sum()), int((follows & alike).sum()), True)


def device_looks_of(joined: JoinedRecording, rows: Array) -> Looks:
    """Whether the device still had what loads brought.

    Args:
        joined: the recording.
        rows: rows of loads that bring what an earlier load brought to the same place, in any order.
    """
    table, verdict = joined.recording.destinations, np.zeros(len(rows), dtype=np.int8)
    mine = np.flatnonzero(table["looked"] > 0)
    if not len(mine) or not len(rows):
        return Looks(verdict, 0, 0, bool(len(mine)))
    order = np.argsort(joined.start[rows], kind="stable")
    at = order[np.minimum(np.searchsorted(joined.start[rows[order]], table["time_ns"][mine]), len(rows) - 1)]
    load, told = rows[at], np.full(len(rows), NOT_KNOWN, dtype=np.int8)
    known = (joined.start[load] == table["time_ns"][mine]) & (joined.dst[load] == table["dst"][mine])
    known &= joined.process[load] == table["process"][mine]
    told[at[known]] = np.where(table["same"][mine[known]] == 1, EQUAL, OTHER)
    columns = (joined.process, joined.bytes, joined.src, joined.dst)
    kind = np.stack([column[rows].astype(np.uint64) for column in columns])
    size, by_place = (np.unique(names, axis=1, return_inverse=True)[1].reshape(-1) for names in (kind[:2], kind))
    enough = np.bincount(by_place[told != NOT_KNOWN], minlength=int(by_place.max()) + 1)[by_place] >= ENOUGH
    verdict = np.where(enough, _agreement(by_place, by_place, told), _agreement(size, size, told)).astype(np.int8)
    verdict[told == OTHER] = OTHER
    return Looks(verdict, int((told != NOT_KNOWN).sum()), int((told == EQUAL).sum()), True)


def _was_over(joined: JoinedRecording, rows: Array, looks: Array, by: Array) -> Array:
    """Mask over looks at stores `rows`: a wait or a timing event shows that their copy was over by an instant.

    Either is of the copy's stream, or a wait for the whole device; it begins when the copy's call has returned, and has
    ended by then.
    """
    table, mask = joined.recording.contents, np.zeros(len(looks), dtype=bool)
    call = rows[np.argsort(joined.start[rows], kind="stable")]
    at = np.minimum(np.searchsorted(joined.start[call], table["time_ns"][looks]), len(call) - 1)
    known = (joined.start[call[at]] == table["time_ns"][looks]) & (joined.dst[call[at]] == table["dst"][looks])
    call, marks = call[at], joined.recording.marks
    waits = np.flatnonzero((joined.kind == CallKind.SYNC) & ~joined.is_named("event"))
    for_all = (joined.is_named("devicesynchronize") | joined.is_named("ctxsynchronize"))[waits]
    for stream, process in np.unique(np.stack((joined.stream, joined.process))[:, call[known]], axis=1).T.tolist():
        waited = waits[(joined.stream[waits] == stream) | (for_all & (joined.process[waits] == process))]
        marked = np.flatnonzero(marks["stream"] == stream)
        begun = np.concatenate((joined.start[waited], marks["given_ns"][marked]))
        ended = np.concatenate((joined.end[waited], marks["done_ns"][marked]))[np.argsort(begun, kind="stable")]
        first = np.append(np.minimum.accumulate(ended[::-1])[::-1], np.iinfo(np.int64).max)
        mine = np.flatnonzero(known & (joined.stream[call] == stream) & (joined.process[call] == process))
        mask[mine] = first[np.searchsorted(np.sort(begun), joined.end[call[mine]])] <= by[mine]
    return mask


def _agreement(groups: Array, look_groups: Array, told: Array) -> Array:
    """Of each group EQUAL where nearly all of its looks say so, OTHER where not, NOT_KNOWN where it has none."""
    top = int(max(groups.max(initial=0), look_groups.max(initial=0))) + 1
    equal = np.bincount(look_groups[told == EQUAL], minlength=top)
    known = equal + np.bincount(look_groups[told == OTHER], minlength=top)
    said = np.where(known == 0, NOT_KNOWN, np.where(equal >= AGREE * known, EQUAL, OTHER))
    out: Array = said[groups]
    return out


def _next_look(key: Array, start: Array, look_key: Array, look_time: Array, told: Array) -> Array:
    """What the first look at a copy's place said that is not before it: its own, or one that spans it."""
    zero = min(int(start.min()), int(look_time.min()))
    length = max(int(start.max()), int(look_time.max())) - zero + 1
    at = np.searchsorted(look_key * length + (look_time - zero), key.astype(np.int64) * length + (start - zero))
    at = np.minimum(at, len(look_key) - 1)
    fits = (look_key[at] == key) & (look_time[at] >= start)
    return np.where(fits, told[at], NOT_KNOWN)
