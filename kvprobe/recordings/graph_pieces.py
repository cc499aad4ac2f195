"""The launches of CUDA graphs that `kvprobe run` saw in one piece, divided by what the graphs hold: computed, not seen.

Marks tell when a launch began and ended, and a capture told how many kernels its graph has and how many bytes its
copies carry. So the copies take their bytes at the link's rate, those to the device first and those from it last, and
the kernels take the rest. Where a graph was captured in several streams, its copies may have run beside its kernels: so
much of what they take may be computing.
"""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.link_rate import rate_or_assumed
from kvprobe.recordings.model import Array, Direction, Engine, Recording

__all__ = ["divide_graphs"]

MOST_PIECES = 64  # launches that stand between two marks


def divide_graphs(recording: Recording) -> int:
    """Divides the spans of graphs of which it is known what they hold; how many launches that were."""
    spans, graphs = recording.spans, recording.graphs
    known = {
        (int(graphs["process"][row]), int(graphs["graph"][row])): row
        for row in range(graphs.rows)
        if not graphs["host_nodes"][row]
    }
    whole = np.flatnonzero((spans["graph"] >= 0) & (spans["engine"] == Engine.OTHER))
    owners = zip(spans["process"][whole].tolist(), spans["graph"][whole].tolist(), strict=True)
    graph = np.array([known.get(one, -1) for one in owners], dtype=np.int64)
    rows, graph = whole[graph >= 0], graph[graph >= 0]
    if not len(rows):
        return 0
    many = np.clip(spans["count"][rows], 1, MOST_PIECES)
    of = np.repeat(np.arange(len(rows)), many)
    number = np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many)
    begin, length = spans["start_ns"][rows], spans["end_ns"][rows] - spans["start_ns"][rows]
    start = begin[of] + length[of] * number // many[of]
    end = begin[of] + length[of] * (number + 1) // many[of]
    loads, stores = _copying(recording, graph[of], end - start)
    size = {way: graphs[f"copy_bytes_{way.name.lower()}"][graph[of]] for way in (Direction.H2D, Direction.D2H)}
    nothing, one = np.zeros(len(of), dtype=np.int64), np.ones(len(of), dtype=np.int64)
    each = sum(size.values()) / np.maximum(graphs["copies"][graph[of]], 1)  # bytes of a copy, whichever way it goes
    many_of = {way: np.maximum(np.rint(size[way] / np.maximum(each, 1)).astype(np.int64), 1) for way in size}
    parts = [
        (start, start + loads, Engine.COPY, Direction.H2D, size[Direction.H2D], many_of[Direction.H2D]),
        (start + loads, end - stores, Engine.KERNEL, Direction.UNKNOWN, nothing, one),
        (end - stores, end, Engine.COPY, Direction.D2H, size[Direction.D2H], many_of[Direction.D2H]),
    ]
    beside = graphs["several_streams"][graph[of]] > 0
    keep = np.ones(spans.rows, dtype=bool)
    keep[rows] = False
    columns = {name: [spans[name][keep]] for name in spans.columns}
    for first, last, engine, direction, carried, held in parts:
        some = np.flatnonzero(last > first)
        row = rows[of[some]]
        made = {
            "start_ns": first[some],
            "end_ns": last[some],
            "engine": np.full(len(some), engine, dtype=np.uint8),
            "direction": np.full(len(some), direction, dtype=np.uint8),
            "bytes": carried[some],
            "count": held[some],
            "error_ns": np.where(beside[some] & (engine == Engine.COPY), (last - first)[some], 0),
        }
        for name, column in columns.items():
            column.append(made.get(name, spans[name][row]))
    recording.tables["spans"] = sorted_table("spans", {name: np.concatenate(some) for name, some in columns.items()})
    return len(of)


def _copying(recording: Recording, graph: Array, length: Array) -> tuple[Array, Array]:
    """How long the loads and the stores of each launch take, ns; all of it where the graph has no kernel."""
    graphs = recording.graphs
    took = [
        graphs[f"copy_bytes_{one.name.lower()}"][graph] / rate_or_assumed(recording, one).bytes_per_s * 1e9
        for one in (Direction.H2D, Direction.D2H)
    ]
    together = took[0] + took[1]
    alone = (graphs["kernels"][graph] == 0) & (graphs["memsets"][graph] == 0) & (together > 0)
    scale = np.where(alone | (together > length), length / np.maximum(together, 1), 1.0)
    loads, stores = ((one * scale).astype(np.int64) for one in took)
    return loads, np.where(alone, length - loads, stores)
