"""Host functions in a stream: what stands behind one begins only when the function has returned.

A program puts one there with cudaLaunchHostFunc or cudaStreamAddCallback. CUDA calls it on a thread of its own when all
that stands before it in the stream is over (source: CUDA Runtime API, "Execution Control", cudaLaunchHostFunc).
"""

from __future__ import annotations

import numpy as np

from kvprobe.account.stretches import NOBODY
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Array, Engine

__all__ = ["UNNAMED", "of_executions", "of_spans"]

UNNAMED = -2  # a host function stands there, and the call that put it there was not kept
_NAMES = ("launchhostfunc", "streamaddcallback")


def of_executions(joined: Joined, rows: Array | slice) -> Array:
    """The call that put a host function between each execution and the one before it in its stream.

    Where the recorder does not say into which stream, it is one that the thread of the execution's own call put there.

    Returns:
        (executions,) rows of the calls, NOBODY where there is none; an empty array where the recording has none.
    """
    functions = _calls(joined)
    if not len(functions):
        return np.zeros(0, dtype=np.int64)
    table = joined.recording.executions
    call, stream, process = joined.x_call[rows], table["stream"][rows], table["process"][rows]
    out = np.full(len(call), NOBODY, dtype=np.int64)
    known = np.flatnonzero(call >= 0)
    asked = joined.start[call[known]]
    order = np.lexsort((joined.x_start[rows][known], asked, stream[known], process[known]))
    known, asked = known[order], asked[order]
    follows = np.zeros(len(known), dtype=bool)
    follows[1:] = (stream[known][1:] == stream[known][:-1]) & (process[known][1:] == process[known][:-1])
    since = np.where(follows, np.append(0, asked[:-1])[: len(asked)], np.iinfo(np.int64).min)
    where = np.stack((process[known], stream[known]), axis=1)
    theirs = np.stack((joined.process[functions], joined.stream[functions]), axis=1)
    for one in np.unique(theirs[theirs[:, 1] >= 0], axis=0):
        here = (where == one).all(axis=1)
        out[known[here]] = _newest(joined, functions[(theirs == one).all(axis=1)], since[here], asked[here])
    untold = functions[theirs[:, 1] < 0]
    for caller in np.unique(joined.caller[untold]).tolist():
        here = (joined.caller[call[known]] == caller) & (out[known] == NOBODY)
        out[known[here]] = _newest(joined, untold[joined.caller[untold] == caller], since[here], asked[here])
    return out


def of_spans(joined: Joined, rows: Array) -> Array:
    """The same of what `kvprobe run` measured between timing events, which say themselves where a function stood."""
    spans = joined.recording.spans
    if not (spans["engine"] == Engine.FUNCTION).any():
        return np.zeros(0, dtype=np.int64)
    functions = _calls(joined)
    order = np.flatnonzero(spans["engine"] != Engine.WAIT)
    order = order[np.lexsort((spans["start_ns"][order], spans["stream"][order], spans["process"][order]))]
    stream, process = spans["stream"][order], spans["process"][order]
    follows = (stream[1:] == stream[:-1]) & (process[1:] == process[:-1])
    after = 1 + np.flatnonzero(follows & (spans["engine"][order][:-1] == Engine.FUNCTION))
    out = np.full(spans.rows, NOBODY, dtype=np.int64)
    out[order[after]] = UNNAMED
    stood = np.where(spans["engine"][order] == Engine.FUNCTION, spans["count"][order], 0)
    where = np.stack((process, stream), axis=1)
    theirs = np.stack((joined.process[functions], joined.stream[functions]), axis=1)
    for one in np.unique(theirs, axis=0):
        mine = (where == one).all(axis=1)
        here = after[mine[after]]
        calls = functions[(theirs == one).all(axis=1)]
        # Calls and spans have one order. What lacks is the beginning: the first spans of a process are not measured.
        of = len(calls) - 1 - (int(stood[mine].sum()) - np.cumsum(np.where(mine, stood, 0))[here - 1])
        newest = np.searchsorted(joined.start[calls], spans["end_ns"][order[here - 1]]) - 1
        of = np.minimum(of, newest)
        out[order[here]] = np.where(of >= 0, calls[np.maximum(of, 0)], UNNAMED)
    return out[rows]


def _calls(joined: Joined) -> Array:
    """Rows of the calls that put one into a stream, by start."""
    if not len(joined.start):
        return np.zeros(0, dtype=np.int64)
    rows = np.flatnonzero(joined.is_named(*_NAMES) & ~joined.nested)
    return rows[np.argsort(joined.start[rows], kind="stable")]


def _newest(joined: Joined, calls: Array, since: Array, until: Array) -> Array:
    """The newest of these calls, by start, that was entered between two instants; NOBODY where none was."""
    start = joined.start[calls]
    at = np.searchsorted(start, until) - 1
    newest = np.maximum(at, 0)
    return np.where((at >= 0) & (start[newest] > since), calls[newest], NOBODY)
