"""A window cut into stretches: every instant in exactly one, each with its line, and who is held to account for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import ascending
from kvprobe.recordings.model import Array

__all__ = ["NOBODY", "Stretches", "marks", "overlay"]

NOBODY = -1


@dataclass
class Stretches:
    """Stretches that follow one another without a gap; arrays of one entry a stretch.

    Attributes:
        edges: (stretches + 1,) int64: each stretch lies between an edge and the next, ns.
        line: its Line, uint8.
        caller: whose doing it is, as `Joined.caller`; NOBODY where that is nobody's, int32.
        detail: of what is not known the reason (`lines.Unknown`), int8; -1 elsewhere.
        cause: the number of the cause that explains it, int16; NOBODY where none does.
    """

    edges: Array
    line: Array
    caller: Array
    detail: Array
    cause: Array

    @classmethod
    def of(cls, edges: Array, line: Array, caller: Array, detail: Array) -> Stretches:
        """Neighbours that are alike become one; nothing is explained yet."""
        keep = edges[1:] > edges[:-1]
        line, caller, detail = line[keep], caller[keep], detail[keep]
        begins = edges[:-1][keep]
        new = np.ones(len(line), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (caller[1:] != caller[:-1]) | (detail[1:] != detail[:-1])
        first = np.flatnonzero(new)
        ends = np.append(begins[first], edges[-1:])
        cause = np.full(len(first), NOBODY, dtype=np.int16)
        return cls(
            ends.astype(np.int64),
            line[first].astype(np.uint8),
            caller[first].astype(np.int32),
            detail[first].astype(np.int8),
            cause,
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

    def total_ns(self, lines: Sequence[int] | Array) -> int:
        """Time in these lines."""
        mine = np.flatnonzero(among(self.line, [int(line) for line in lines]))
        return int((self.edges[mine + 1] - self.edges[mine]).sum())

    def cut(self, start: Array, end: Array) -> Array:
        """Cuts stretches where disjoint, ascending intervals begin and end; returns the mask of what lies in them."""
        keep = end > start
        start, end = start[keep], end[keep]
        if not len(start) or not len(self.line):
            return np.zeros(len(self.line), dtype=bool)
        new = ascending(np.column_stack((start, end)).ravel())
        new = new[(new > self.edges[0]) & (new < self.edges[-1])]
        at = np.searchsorted(self.edges, new)
        fresh = self.edges[at] != new
        fresh[1:] &= new[1:] != new[:-1]
        new, at = new[fresh], at[fresh]
        if len(new):
            for name in ("line", "caller", "detail", "cause"):
                column = getattr(self, name)
                setattr(self, name, np.insert(column, at, column[at - 1]))
            self.edges = np.insert(self.edges, at, new)
        return marks(self.edges, start, end)


def marks(edges: Array, start: Array, end: Array) -> Array:
    """Which pieces between edges lie in disjoint, ascending intervals whose ends, inside the edges, are all among them.

    A step up where an interval begins and one down where it ends: there may be millions of pieces, and few intervals.
    """
    step = np.zeros(len(edges), dtype=np.int8)
    if len(edges) < 2:
        return step[1:] > 0
    some = (end > start) & (end > edges[0]) & (start < edges[-1])
    start, end = start[some], end[some]
    step[np.searchsorted(edges, np.maximum(start, edges[0]))] += 1
    step[np.searchsorted(edges, np.minimum(end, edges[-1]))] -= 1
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
