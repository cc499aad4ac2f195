"""A window cut into stretches: every instant in exactly one, each with its line, and who is held to account for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique

import numpy as np

from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import ascending
from kvprobe.recordings.model import Array

__all__ = ["NOBODY", "How", "Stretches", "marks", "overlay"]

NOBODY = -1


@unique
class How(IntEnum):
    """How a stretch is known."""

    SEEN = 0
    SAMPLED = 1  # by what the GPU or its thread did at other times (`samples`, `not_kept`)
    COUNTED = 2  # by how many kernels and copies ran (`counted`)


@dataclass
class Stretches:
    """Stretches that follow one another without a gap; arrays of one entry a stretch.

    Attributes:
        edges: (stretches + 1,) int64: each stretch lies between an edge and the next, ns.
        line: its Line, uint8.
        caller: whose doing it is, as `Joined.caller`; NOBODY where that is nobody's, int32.
        detail: of what is not known the reason (`lines.Unknown`), int8; -1 elsewhere.
        cause: the number of the cause that explains it, int16; NOBODY where none does.
        how: whether it was seen, or estimated (How), uint8.
    """

    edges: Array
    line: Array
    caller: Array
    detail: Array
    cause: Array
    how: Array

    @classmethod
    def of(cls, edges: Array, line: Array, caller: Array, detail: Array, how: Array | None = None) -> Stretches:
        """Neighbours that are alike become one; nothing is explained yet."""
        keep = edges[1:] > edges[:-1]
        line, caller, detail = line[keep], caller[keep], detail[keep]
        how = np.full(len(line), How.SEEN, dtype=np.uint8) if how is None else how[keep]
        begins = edges[:-1][keep]
        new = np.ones(len(line), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (caller[1:] != caller[:-1]) | (detail[1:] != detail[:-1])
        new[1:] |= how[1:] != how[:-1]
        first = np.flatnonzero(new)
        ends = np.append(begins[first], edges[-1:])
        cause = np.full(len(first), NOBODY, dtype=np.int16)
        return cls(
            ends.astype(np.int64),
            line[first].astype(np.uint8),
            caller[first].astype(np.int32),
            detail[first].astype(np.int8),
            cause,
            how[first],
        )

    @property
    def start(self) -> Array:
        """First instant of each."""
        return self.edges[:-1]

    @property
    def end(self) -> Array:
        """Where each ends."""
        return self.edges[1:]

    @property
    def ns(self) -> Array:
        """How long each is."""
        length: Array = self.edges[1:] - self.edges[:-1]
        return length

    @property
    def sampled(self) -> Array:
        """Mask: what the GPU did was not seen there, but before and after."""
        mask: Array = self.how == How.SAMPLED
        return mask

    def sum_ns(self, mask: Array) -> int:
        """How long those of a mask are together."""
        mine = np.flatnonzero(mask)
        return int((self.edges[mine + 1] - self.edges[mine]).sum())

    def total_ns(self, lines: Sequence[int] | Array) -> int:
        """Time in these lines."""
        return self.sum_ns(among(self.line, lines))

    def cut(self, start: Array, end: Array) -> Array:
        """Cuts stretches where disjoint intervals begin and end; returns the mask of what lies in them."""
        if not len(self.line):
            return np.zeros(0, dtype=bool)
        some = (end > start) & (end > self.edges[0]) & (start < self.edges[-1])
        both = np.column_stack((start[some], end[some])).ravel()
        knots = ascending(np.clip(both, self.edges[0], self.edges[-1]))  # begin, end, begin, end
        at = np.searchsorted(self.edges, knots)
        missing = self.edges[at] != knots
        fresh = missing.copy()
        fresh[1:] &= knots[1:] != knots[:-1]
        if fresh.any():
            place = at[fresh]
            pieces = np.repeat(np.arange(len(self.line)), 1 + np.bincount(place - 1, minlength=len(self.line)))
            for name in ("line", "caller", "detail", "cause", "how"):
                setattr(self, name, getattr(self, name)[pieces])
            self.edges = np.insert(self.edges, place, knots[fresh])
            at += np.cumsum(fresh) - missing
        return _between(len(self.line), at[::2], at[1::2])


def marks(edges: Array, start: Array, end: Array) -> Array:
    """Which pieces between edges lie in disjoint, ascending intervals whose ends are all among the edges."""
    return _between(len(edges) - 1, *(np.searchsorted(edges, one) for one in (start, end)))


def _between(pieces: int, first: Array, last: Array) -> Array:
    """Mask over pieces: from a `first` up to its `last`, which is left out.

    A step up and one down for each, and one sum: there may be millions of pieces.
    """
    step = np.zeros(pieces + 1, dtype=np.int8)
    step[first] += 1
    step[last] -= 1
    return np.asarray(np.cumsum(step[:-1], dtype=np.int8) > 0)


def overlay(start: Array, end: Array, edges: Array, code: Array) -> tuple[Array, Array, Array, Array]:
    """Cuts disjoint intervals where the pieces of a partition begin.

    `start` and `end` are the intervals in ns, inside the partition: its `edges`, (pieces + 1,), ascend, and `code` has
    one value a piece.

    Returns:
        start, end and code of each part, and the number of the interval it is of.
    """
    first = np.searchsorted(edges, start, "right") - 1
    last = np.maximum(np.searchsorted(edges, end, "left") - 1, first)
    many = last - first + 1
    of = np.repeat(np.arange(len(start)), many)
    piece = np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
    begins, ends = np.maximum(edges[piece], start[of]), np.minimum(edges[piece + 1], end[of])
    keep = ends > begins
    return begins[keep], ends[keep], code[piece[keep]], of[keep]
