"""What every reader does with its columns at the end: rows for streams, calls joined with what they executed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvprobe.recordings.model import Array, CallKind, Engine, Recording, Table

__all__ = ["correlation_keys", "distinct", "is_kind", "join", "link", "sorted_table", "stream_rows"]

_CORRELATION_LIMIT = 1 << 40  # ids are 32 bit; anything above comes from a damaged file and joins with nothing


def correlation_keys(process: Array, correlation: Array) -> Array:
    """(rows,) int64 keys that are equal exactly where process and correlation are; -1 where there is none."""
    valid = (correlation >= 0) & (correlation < _CORRELATION_LIMIT)
    keys = np.asarray(process, dtype=np.int64) * _CORRELATION_LIMIT + correlation
    return np.where(valid, keys, np.int64(-1))


# numpy.unique, isin and percentile load numpy.ma when first used, 10 to 25 ms: a third of what a small trace takes.


def distinct(ids: Array) -> list[int]:
    """The different values among small non-negative integers (name indexes, codes), ascending."""
    return [int(value) for value in np.flatnonzero(np.bincount(ids))]


def is_kind(kinds: Array, wanted: Iterable[int]) -> Array:
    """Which of these uint8 codes are among the wanted ones, (rows,) bool."""
    table = np.zeros(256, dtype=bool)
    table[list(wanted)] = True
    return table[kinds]


def join(parts: list[Array]) -> Array:
    """One array of its parts, which are taken out of the list; a single value throughout is stored once."""
    if not parts:
        return np.zeros(0, dtype=np.int64)
    length = sum(len(part) for part in parts)
    if length > 1:
        value = next(part[0] for part in parts if len(part))
        if all(bool((part == value).all()) for part in parts):
            dtype = np.result_type(*parts)
            parts.clear()
            return np.broadcast_to(np.array(value, dtype=dtype), (length,))
    out = np.concatenate(parts)
    parts.clear()
    return out


def stream_rows(process: Array, device: Array, handle: Array) -> tuple[Array, dict[str, Array]]:
    """Gives each distinct (process, device, handle) a row of the `streams` table.

    Returns:
        The row of each input, (rows,) int32, -1 where the handle is below 0; and the columns of `streams`.
    """
    rows = np.full(len(handle), -1, dtype=np.int32)
    known = np.flatnonzero(handle >= 0)
    if not len(known):
        return rows, {
            "process": np.zeros(0, np.int32),
            "device": np.zeros(0, np.int32),
            "handle": np.zeros(0, np.int64),
        }
    p, d, h = process[known], device[known], handle[known]
    order = np.lexsort((h, d, p))
    p, d, h = p[order], d[order], h[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (p[1:] != p[:-1]) | (d[1:] != d[:-1]) | (h[1:] != h[:-1])
    rows[known[order]] = np.cumsum(new) - 1
    return rows, {
        "process": p[new].astype(np.int32),
        "device": d[new].astype(np.int32),
        "handle": h[new].astype(np.int64),
    }


def sorted_table(kind: str, columns: dict[str, Array], by: str = "start_ns") -> Table:
    """A table whose rows are ordered by time; columns are consumed one by one to keep the peak low."""
    times = columns.get(by)
    if times is not None and len(times) > 1 and np.any(times[1:] < times[:-1]):
        order = np.argsort(times, kind="stable")
        for name, column in columns.items():
            if column.strides != (0,):
                columns[name] = column[order]
    return Table(kind, columns)


def link(recording: Recording) -> None:
    """Fills stream, direction, memory, bytes and count of calls from the executions that share their correlation id.

    A call of several executions (a graph, a batch) gets the stream of the first and the sum of bytes and copies; its
    executions are marked with `graph` where the call is a graph launch and the recorder gave no graph id.
    """
    calls, executions = recording.calls, recording.executions
    if not calls.rows or not executions.rows:
        return
    call_keys = correlation_keys(calls["process"], calls["correlation"])
    execution_keys = correlation_keys(executions["process"], executions["correlation"])
    order = np.argsort(execution_keys, kind="stable")
    ordered = execution_keys[order]
    left = np.searchsorted(ordered, call_keys, "left")
    right = np.searchsorted(ordered, call_keys, "right")
    right[call_keys < 0] = left[call_keys < 0]
    del execution_keys, call_keys
    linked = np.flatnonzero(right > left)
    if not len(linked):
        return
    left, right = left[linked], right[linked]
    first = order[left]
    columns = dict(calls.columns)

    def fill(name: str, values: Array) -> None:
        column = np.array(columns[name])
        keep = values != 0 if name in ("direction", "memory") else slice(None)  # the call's own name may know better
        column[linked[keep]] = values[keep]
        columns[name] = column

    fill("stream", executions["stream"][first])
    fill("direction", executions["direction"][first])
    fill("memory", executions["memory"][first])
    is_copy = executions["engine"][order] != Engine.KERNEL
    for name, values in (("bytes", executions["bytes"]), ("count", executions["count"])):
        total = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(np.where(is_copy, values[order], 0), out=total[1:])
        fill(name, total[right] - total[left])
        del total
    graphs = np.flatnonzero(calls["kind"][linked] == CallKind.GRAPH)
    if len(graphs):
        graph = np.array(executions["graph"])
        for i in graphs:
            rows = order[left[i] : right[i]]
            graph[rows] = np.where(graph[rows] < 0, calls["correlation"][linked[i]], graph[rows])
        executions.columns["graph"] = graph
    recording.tables["calls"] = Table("calls", columns)
