"""What the byte witness of `kvprobe verify` left in a run folder: counts, allocations and mismatches as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.probe.ring_layout import CALLS
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import SCHEMAS, Recording, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.recordings.vocabulary import Names

__all__ = ["witness"]


def witness(recording: Recording, processes: Sequence[Process], shifts: Sequence[int], names: Names) -> None:
    """Fills `witness`, `witness_homes` and `mismatches` where bytes were compared; nothing where they were not."""
    counts: list[dict[str, Any]] = []
    homes: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        told = process.files.witness(process.pid)
        # a program that began later under the same pid was told of there, not this one
        if not told or not process.start_ns <= told.get("t_ns", 0):
            continue
        counts.append({"process": row, **told})
        for address, size, compared, changed in told.get("homes", ()):
            homes.append({"process": row, "address": address, "bytes": size, "compared": compared, "changed": changed})
        lines = process.files.mismatches(process.pid)
        found += [_mismatch(row, shift, line, names) for line in lines if process.start_ns <= line["load_ns"]]
    if not counts:
        return
    recording.tables["witness"] = _table("witness", counts)
    recording.tables["witness_homes"] = _table("witness_homes", homes)
    recording.tables["mismatches"] = sorted_table("mismatches", _table("mismatches", found).columns, by="time_ns")


def _mismatch(row: int, shift: int, line: dict[str, Any], names: Names) -> dict[str, Any]:
    store = line.get("store")
    began = store["start_ns"] if store else line["load_ns"]
    return {
        **line,
        "start_ns": began + shift,
        "time_ns": line["load_ns"] + shift,
        "end_ns": line["t_ns"] + shift,
        "process": row,
        "name": names.add(_call(line.get("call", 0))),
        "kind": names.add(line["kind"]),
        "handle": line.get("stream", 0),
        "device_address": line.get("device", 0),
        "stored": int(store is not None),
        "summed_after_ns": max(0, store["summed_ns"] - began) if store else -1,
        "store_name": names.add(_call(store["call"]) if store else ""),
        "store_thread": store["thread"] if store else -1,
        "store_handle": store["stream"] if store else 0,
        "store_address": store["address"] if store else 0,
        "store_device": store["device"] if store else 0,
        "store_bytes": store["bytes"] if store else -1,
    }


def _call(number: int) -> str:
    return CALLS.get(number, ("", f"call {number}"))[1]


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    types = {key: "int32" if kind == "name" else kind for key, kind in SCHEMAS[name].items()}
    return Table(name, {key: np.array([int(one.get(key, 0)) for one in rows], kind) for key, kind in types.items()})
