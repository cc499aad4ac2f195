"""Copies that seem quicker than any link, because the mark in front of them was reached late.

A mark stands in its stream's order, but no copy waits for it. Where several streams share a copy engine, that may reach
a mark only when the copy behind it is over, too: the time between two marks is not the copy's then. When such a copy
ended is known, and when its call was made. The engine makes one copy after the other, of whichever stream, as long as
it has any. So copies that each were submitted before the one before them had ended took the time from the first one's
call to the last one's end, and each of them the part that its bytes have. By as much as that is not what the link
carries, it may be wrong.
"""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.assemble import among, sorted_table
from kvprobe.recordings.link_rate import rate_or_assumed
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Recording, Table

__all__ = ["lengthen_copies"]

BEYOND = 500e9  # bytes per second: more than any GPU's link to its CPU carries; which GPU it is, `run` does not say
LEAST_ERROR = 0.05  # of what such copies are said to take
MOST_TIMES = 3  # as long as its bytes take, at most, from the first one's call to its end


def lengthen_copies(recording: Recording) -> int:
    """Gives copies whose marks were reached late the time that their engine took for them; how many these are."""
    spans = recording.spans
    took = np.maximum(spans["end_ns"] - spans["start_ns"], 1)
    late = (spans["engine"] == Engine.COPY) & among(spans["direction"], (Direction.H2D, Direction.D2H))
    late &= spans["bytes"] > took * (BEYOND / 1e9)
    if not late.any():
        return 0
    all_of = {name: spans[name] for name in spans.columns}
    recording.tables["spans"] = Table("spans", {name: column[~late] for name, column in all_of.items()})  # for rates
    made = {name: column[late] for name, column in all_of.items()}
    made["start_ns"], made["end_ns"], made["error_ns"] = _made(recording, made)
    whole = {name: np.concatenate((recording.spans[name], column)) for name, column in made.items()}
    recording.tables["spans"] = sorted_table("spans", whole)
    return int(late.sum())


def _made(recording: Recording, spans: dict[str, Array]) -> tuple[Array, Array, Array]:
    """When these copies began and ended, and by how much that may be wrong, ns."""
    start, end, error = (spans[name].copy() for name in ("start_ns", "end_ns", "error_ns"))
    given = _submitted(recording, spans)
    key = np.stack((spans["process"], spans["device"], spans["direction"])).astype(np.int64)
    _, engine = np.unique(key, axis=1, return_inverse=True)
    for one in range(int(engine.max()) + 1):
        mine = np.flatnonzero(engine.ravel() == one)
        mine = mine[np.argsort(end[mine], kind="stable")]
        rate = rate_or_assumed(recording, Direction(int(spans["direction"][mine[0]]))).bytes_per_s
        start[mine], end[mine], error[mine] = _of_engine(given[mine], end[mine], spans["bytes"][mine], rate)
    return start, end, error


def _submitted(recording: Recording, spans: dict[str, Array]) -> Array:
    """When each copy was submitted at the latest, ns: by the first call behind the copy before it in its stream.

    Where there was none before it ended, it had been submitted when that copy ended.
    """
    calls = recording.calls
    copies = np.flatnonzero(among(calls["kind"], (CallKind.COPY, CallKind.BATCH)))
    given: Array = np.zeros(len(spans["end_ns"]), dtype=np.int64)
    for stream in np.unique(spans["stream"]).tolist():
        at = np.sort(calls["start_ns"][copies[calls["stream"][copies] == stream]])
        mine = np.flatnonzero(spans["stream"] == stream)
        mine = mine[np.argsort(spans["end_ns"][mine], kind="stable")]
        end = spans["end_ns"][mine]
        before = np.append(0, end[:-1])
        following = np.append(at, np.iinfo(np.int64).max)[np.searchsorted(at, before, "right")]
        given[mine] = np.where(following < end, following, before)
    return given


def _of_engine(given: Array, end: Array, size: Array, rate: float) -> tuple[Array, Array, Array]:
    """The same of one engine's copies, ascending by end, which were submitted when `given`."""
    takes = size / rate * 1e9
    given = np.minimum(np.maximum(given, end - MOST_TIMES * takes), end - 1)
    first = np.flatnonzero(np.append(True, given[1:] > end[:-1]))
    of = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(end))))
    last = np.append(first[1:], len(end)) - 1
    begin = given[first].astype(np.float64)
    before = np.cumsum(size) - size
    share = (before - before[first][of]) / np.add.reduceat(size, first)[of]
    length = (end[last] - begin)[of]
    starts = begin[of] + length * share
    ends = np.append(starts[1:], end[-1])
    ends[last] = end[last]
    off = abs((ends - starts).sum() / takes.sum() - 1)
    return starts.astype(np.int64), ends.astype(np.int64), ((ends - starts) * max(off, LEAST_ERROR)).astype(np.int64)
