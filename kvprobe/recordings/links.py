"""Which call caused which execution: worked out once a recording, for readers, queues and causes alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvprobe.recordings.assemble import among, match, spans
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Engine, Recording, Table

__all__ = ["Links", "link", "links_of"]


@dataclass(frozen=True)
class Links:
    """Which call caused which execution.

    Attributes:
        call: the row of the call that caused each execution, (executions,) int32; -1 where none of the recording did.
        first: the first execution row of each call, (calls,) int32; -1 where it caused none.
        began, done: start of the first and end of the last execution of each call, (calls,) int64; -1 where it caused
            none. Calls that share an id all have what one of them has.
    """

    call: Array
    first: Array
    began: Array
    done: Array
    _ids: tuple[Array, Array] = field(repr=False)


def links_of(recording: Recording) -> Links:
    """The links between a recording's calls and executions, worked out when it is first asked for."""
    calls, executions = recording.calls, recording.executions
    ids = (calls["correlation"], executions["correlation"])
    known = recording.known_links
    if isinstance(known, Links) and all(old is new for old, new in zip(known._ids, ids, strict=True)):
        return known
    first = np.full(calls.rows, -1, dtype=np.int32)
    if not calls.rows or not executions.rows:
        nothing = np.broadcast_to(np.int64(-1), (calls.rows,))
        out = Links(np.full(executions.rows, -1, dtype=np.int32), first, nothing, nothing, ids)
        recording.known_links = out
        return out
    one, call = match(calls["process"], ids[0], executions["process"], ids[1])
    again = np.flatnonzero((one >= 0) & (one != np.arange(calls.rows, dtype=np.int32)))
    if len(again):
        one, call = _submissions_first(recording, one, call)
        again = np.flatnonzero((one >= 0) & (one != np.arange(calls.rows, dtype=np.int32)))
    one = one[again]
    theirs = np.flatnonzero(call >= 0)
    first[call[theirs[::-1]]] = theirs[::-1]  # of several, the first is written last
    del theirs
    began, done = spans(call, executions["start_ns"], executions["end_ns"], calls.rows, -1)
    first[again], began[again], done[again] = first[one], began[one], done[one]
    out = recording.known_links = Links(call, first, began, done, ids)
    return out


def _submissions_first(recording: Recording, one: Array, call: Array) -> tuple[Array, Array]:
    """The match again where ids repeat: of the calls that share one, a submission owns what was executed."""
    calls, executions = recording.calls, recording.executions
    rows = np.flatnonzero(among(calls["kind"], SUBMITTING) & (one >= 0))
    if not len(rows):
        return one, call
    mine, theirs = match(
        calls["process"][rows], calls["correlation"][rows], executions["process"], executions["correlation"]
    )
    owner = np.arange(calls.rows)
    owner[one[rows]] = rows[mine]  # whoever stood for an id makes way for a submission
    one = np.where(one >= 0, owner[np.maximum(one, 0)], -1).astype(np.int32)
    return one, np.where(theirs >= 0, rows[theirs], call).astype(np.int32)


def link(recording: Recording) -> None:
    """Fills stream, direction, memory, bytes and count of calls from the executions that share their correlation id.

    A call of several executions (a graph, a batch) gets the stream of the first and the sum of bytes and copies; its
    executions are marked with `graph` where the call is a graph launch and the recorder gave no graph id.
    """
    calls, executions = recording.calls, recording.executions
    if not calls.rows or not executions.rows:
        return
    links = links_of(recording)
    theirs = np.flatnonzero(links.call >= 0)
    if not len(theirs):
        return
    owner = links.call[theirs]
    linked = links.first >= 0
    at = links.first  # of those that are not linked, any
    single = int(np.count_nonzero(linked)) == len(theirs)
    columns = dict(calls.columns)

    def fill(name: str, values: Array) -> None:
        known = linked
        if name in ("direction", "memory"):  # the call's own name may know better
            known = linked & (values != 0)
        column = columns[name]
        filled = values if known.all() else np.where(known, values, column)
        columns[name] = filled.astype(column.dtype, copy=False)

    for name in ("stream", "direction", "memory"):
        fill(name, executions[name][at])
    moves = executions["engine"][at] != Engine.KERNEL
    for name in ("bytes", "count"):
        if single:
            fill(name, executions[name][at] * moves)
            continue
        total = np.zeros(calls.rows, dtype=np.int64)
        np.add.at(total, owner, np.where(executions["engine"][theirs] != Engine.KERNEL, executions[name][theirs], 0))
        fill(name, total[links.call[at]])
    launched = calls["kind"][owner] == CallKind.GRAPH
    if launched.any():
        rows, graph = theirs[launched], np.array(executions["graph"])
        graph[rows] = np.where(graph[rows] < 0, calls["correlation"][owner[launched]], graph[rows])
        executions.columns["graph"] = graph
    recording.tables["calls"] = Table("calls", columns)
