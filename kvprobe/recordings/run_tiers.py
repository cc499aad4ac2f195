"""Tiers below CPU memory of a run: where it read and wrote, by tiers-<pid>.jsonl, and its single operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE, UNTIMED
from kvprobe.probe.ring_layout import CALLS, FILE_CALLS, FSYNC
from kvprobe.recordings.adapter_events import ns_of
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import Array, Recording, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.recordings.vocabulary import Names

__all__ = ["tiers"]

UNTOLD = 1  # the place of operations whose descriptor could not be looked at (native/interpose/files.h)
WRITE = 6  # kvp.h: KVP_WRITE
WHOLE, COUNTED = 0, 2  # kvp.h: enum kvp_file_seen
FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x6969: "nfs",
    0x65735546: "fuse",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0xFF534D42: "cifs",
    0x00C36400: "ceph",
}
_NEW_PLACE_NS = 1_000_000_000  # a child of fork tells its places a moment before its first operation


def tiers(recording: Recording, processes: Sequence[Process], shifts: Sequence[int], names: Names) -> None:
    """Fills `tiers` and `tier_operations`; operations of which nothing but their number is known go to the notes."""
    rows: list[dict[str, Any]] = []
    operations: dict[str, list[Array]] = {}
    unseen = 0
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        rings = process.counted()
        slots = np.concatenate([ring.file_slots() for ring in rings]) if rings else None
        over = sum(int(ring.over_count[FILE_CALLS].sum()) for ring in rings)
        if slots is None or not (len(slots) or over):
            continue
        rows += _places(row, process, slots)
        records = np.concatenate([ring.files() for ring in rings])
        unseen += int(records["count"][records["transfer"] == COUNTED].sum())
        _add(operations, row, shift, records[records["transfer"] != COUNTED], names)
        if over:
            recording.notes.append(
                f"process {process.pid}: {over:,} reads and writes of files are not in the table of tiers: calls in "
                f"signal handlers, more places than a ring file can hold, or a full disk"
            )
    if rows:
        text = ("kind", "path", "filesystem")
        recording.tables["tiers"] = Table(
            "tiers",
            {key: names.map([one[key] for one in rows]) if key in text else np.array([one[key] for one in rows])
             for key in rows[0]},
        )  # fmt: skip
    if operations:
        columns = {key: np.concatenate(parts) for key, parts in operations.items()}
        recording.tables["tier_operations"] = sorted_table("tier_operations", columns)
    if unseen:
        recording.notes.append(
            f"{unseen:,} operations of io_uring were submitted by the system call itself: their files, bytes and times "
            f"cannot be seen"
        )


def _places(row: int, process: Process, slots: Array) -> list[dict[str, Any]]:
    """One row for each place that was read or written, its exact sums."""
    told: dict[int, dict[str, Any]] = {}
    for line in process.files.places(process.pid):
        if process.start_ns - _NEW_PLACE_NS <= ns_of(line.get("t_ns")) <= process.end_ns + _NEW_PLACE_NS:
            told[int(line["place"])] = line
    out = []
    for place in np.unique(slots["stream"]).tolist():
        line = told.get(place, {})
        mine = slots[slots["stream"] == place]
        wrote = (mine["direction"] & 15) == WRITE
        if not mine["bytes"].any() and FSYNC not in mine["call"]:
            continue
        sums: dict[str, Any] = {
            "process": row,
            "place": min(place, 255),
            "kind": str(line.get("kind", "")),
            "path": str(line.get("path", "")),
            "filesystem": FILESYSTEMS.get(ns_of(line.get("filesystem")), ""),
            "direct": int(ns_of(line.get("direct")) > 0),
            "port": min(max(ns_of(line.get("port")), 0), 65535),
            "here": int(ns_of(line.get("here")) > 0),
        }
        for what, rows in (("read", ~wrote), ("write", wrote)):
            sums[f"{what}s"] = min(int(mine["count"][rows].sum()), SANE)
            sums[f"{what}_bytes"] = min(int(mine["bytes"][rows].sum()), SANE)
            sums[f"{what}_ns"] = min(int(mine["dur_ns"][rows].sum()), SANE)
        out.append(sums)
    return out


def _add(operations: dict[str, list[Array]], row: int, shift: int, records: Array, names: Names) -> None:
    """Columns of `tier_operations` of one process."""
    r = records[records["dur_ns"] != UNTIMED]
    start = r["start_ns"].astype(np.int64) + shift
    called = {number: names.add(CALLS[number][1]) for number in FILE_CALLS.tolist()}
    columns = {
        "start_ns": start,
        "end_ns": start + np.minimum(r["dur_ns"], SANE).astype(np.int64),
        "process": np.full(len(r), row, np.int32),
        "thread": r["tid"].astype(np.int64),
        "name": np.array([called[int(call)] for call in r["call"]], np.int32),
        "place": np.minimum(r["stream"], 255).astype(np.int32),
        "writes": ((r["direction"] & 15) == WRITE).astype(np.uint8),
        "bytes": np.minimum(r["bytes"], SANE).astype(np.int64),
        "count": r["count"].astype(np.int32),
        "address": r["src"],
        # of several in one record it is not known
        "offset": np.where((r["dst"] < SANE) & (r["src"] > 0), r["dst"], np.uint64(2**64 - 1)).astype(np.int64),
        "unended": (r["transfer"] != WHOLE).astype(np.uint8),
    }
    for key, column in columns.items():
        operations.setdefault(key, []).append(column)
