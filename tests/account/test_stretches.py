"""Stretches against the same window looked at instant by instant."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvprobe.account.stretches import NOBODY, Stretches, marks, overlay

PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(-1, 1), st.sampled_from((-1, 2))), max_size=8
)
INTERVALS = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 3)), max_size=4)


def made(pieces: list[tuple[int, int, int, int]]) -> Stretches:
    """Pieces of length, line, caller and detail, from instant 3 on."""
    length, line, caller, detail = (list(column) for column in zip(*pieces, strict=True)) if pieces else ([],) * 4
    edges = np.cumsum([3, *length])
    return Stretches.of(edges, *(np.array(column, dtype=np.int64) for column in (line, caller, detail)))


def instants(pieces: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    return [(line, caller, detail) for length, line, caller, detail in pieces for _ in range(length)]


def told(cut: Stretches) -> list[tuple[int, int, int]]:
    columns = zip(cut.ns.tolist(), cut.line.tolist(), cut.caller.tolist(), cut.detail.tolist(), strict=True)
    return [(line, caller, detail) for ns, line, caller, detail in columns for _ in range(ns)]


def disjoint(pairs: list[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """Intervals of so much after the one before, so long."""
    out, at = [], first
    for gap, length in pairs:
        out.append((at + gap, at + gap + length))
        at += gap + length + 1
    return out


def test_nobody_is_whom_a_recording_does_not_know():
    assert NOBODY == -1  # what `Joined.caller` says of a call without a thread


@given(PIECES)
@example([(1, 0, 0, -1), (2, 0, 0, -1), (0, 1, 0, -1), (1, 0, 0, -1)])
@example([(1, 0, 0, -1), (1, 0, 1, -1), (1, 0, 1, 2), (1, 1, 1, 2)])
def test_neighbours_that_are_alike_are_one_and_no_instant_changes(pieces):
    cut = made(pieces)
    assert told(cut) == instants(pieces)
    alike = (cut.line[1:] == cut.line[:-1]) & (cut.caller[1:] == cut.caller[:-1]) & (cut.detail[1:] == cut.detail[:-1])
    assert not alike.any() and (cut.ns > 0).all()
    assert (cut.cause == NOBODY).all() and len(cut.edges) == len(cut.line) + 1
    assert cut.start.tolist() == cut.edges[:-1].tolist() and cut.end.tolist() == cut.edges[1:].tolist()
    assert cut.total_ns([0, 2]) == sum(line in (0, 2) for line, _, _ in instants(pieces))


@given(PIECES, INTERVALS)
@example([(3, 0, 0, -1), (3, 1, 0, -1)], [(0, 3), (1, 1)])
@example([(3, 0, 0, -1), (3, 1, 0, -1)], [(5, 2)])
@example([(3, 0, 0, -1)], [(3, 0), (0, 2)])
def test_a_cut_marks_what_lies_inside_and_changes_no_instant(pieces, pairs):
    cut, inside = made(pieces), disjoint(pairs, 0)
    start, end = (np.array([pair[i] for pair in inside], dtype=np.int64) for i in (0, 1))
    mask = cut.cut(start, end)
    assert told(cut) == instants(pieces) and (cut.ns > 0).all() and len(cut.cause) == len(cut.line) == len(mask)
    lies = [bool(one) for one, ns in zip(mask, cut.ns.tolist(), strict=True) for _ in range(ns)]
    assert lies == [any(a <= 3 + t < b for a, b in inside) for t in range(len(lies))]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_pieces_are_marked_by_the_intervals_between_their_edges(lengths, data):
    edges = np.cumsum([0, *lengths])
    picked = data.draw(st.lists(st.integers(0, len(lengths)), unique=True, max_size=6).map(sorted))
    pairs = list(zip(picked[::2], picked[1::2], strict=False))
    start, end = (edges[[pair[i] for pair in pairs]].astype(np.int64) if pairs else np.zeros(0) for i in (0, 1))
    assert marks(edges, start, end).tolist() == [any(a <= i < b for a, b in pairs) for i in range(len(lengths))]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5))
@example([(0, 3), (0, 0), (1, 2)])
def test_an_overlay_cuts_intervals_where_pieces_begin(pairs):
    edges, code = np.array([0, 2, 3, 7, 40]), np.array([7, 8, 9, 8])
    inside = disjoint(pairs, 0)
    start, end = (np.array([pair[i] for pair in inside], dtype=np.int64) for i in (0, 1))
    found = list(zip(*(column.tolist() for column in overlay(start, end, edges, code)), strict=True))
    expected = [
        (t, int(code[np.searchsorted(edges, t, "right") - 1]), i)
        for i, (a, b) in enumerate(inside)
        for t in range(a, b)
    ]
    assert [(t, what, of) for a, b, what, of in found for t in range(a, b)] == expected
    assert all(b > a and not any(a < edge < b for edge in edges) for a, b, _, _ in found)
