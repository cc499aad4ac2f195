"""Recordings of copies by address, made by hand: every time and every place is the test's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvprobe.recordings.model import CallKind, Direction, Memory, Recording, Source, Table

HOST, GPU = 0x7F00_0000_0000, 0x7E00_0000_0000
KiB = 1 << 10


def blocks(places: list[int], size: int = 16 * KiB, **common: Any) -> list[dict[str, Any]]:
    """Loads of these blocks: a call of 1 us each, 1 us apart."""
    return [
        {"src": HOST + place * size, "dst": GPU + place * size, "bytes": size, "kind": CallKind.COPY, **common}
        for place in places
    ]


def recording(calls: list[dict[str, Any]], **machine: Any) -> Recording:
    """Calls one after the other: `gap_ns` before each (1 us) and `dur_ns` of it (1 us) move the time on."""
    now, rows = 0, []
    for call in calls:
        now += call.get("gap_ns", 1_000)
        end = now + call.get("dur_ns", 1_000)
        known = {name: value for name, value in call.items() if name not in ("gap_ns", "dur_ns", "call")}
        rows.append({"start_ns": now, "end_ns": end, "name": 2 if call.get("kind") == CallKind.SYNC else 1, **known})
        now = end
    common = {"stream": 0, "thread": 7, "count": 1, "direction": Direction.H2D, "memory": Memory.PINNED}
    columns = {name: [row.get(name, common.get(name, 0)) for row in rows] for name in (*common, *_columns(rows))}
    unsigned = {name: np.array(columns[name], dtype=np.uint64) for name in ("src", "dst") if name in columns}
    tables = {
        "calls": Table("calls", {**columns, **unsigned}),
        "streams": Table("streams", {"handle": [9, 10]}),
        "processes": Table("processes", {"pid": [123]}),
    }
    return Recording(
        [Source("run", "kvprobe")], tables, ["", "cudaMemcpyAsync", "cudaStreamSynchronize"], machine=machine
    )


def _columns(rows: list[dict[str, Any]]) -> dict[str, None]:
    return dict.fromkeys(name for row in rows for name in row)
