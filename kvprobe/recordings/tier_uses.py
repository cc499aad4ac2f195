"""Which reads and writes below CPU memory are a tier's, and which copies they feed.

A file's are. A socket's or pipe's are where a copy to a GPU reads the memory that they filled, or one from a GPU filled
the memory that they sent: others carry requests, and a thread that waits for requests waits for no tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import Array, CallKind, Direction, Recording

__all__ = ["TierUses", "place_text", "tier_uses"]

FILES = ("file", "disk", "block device")
PAGE_BYTES = 16 << 10  # memory is compared in pieces of this size, larger ones where they would be too many
MOST_PIECES = 1 << 22


@dataclass(frozen=True)
class TierUses:
    """Arrays of one entry a row of `tier_operations`.

    Attributes:
        tier: it is a tier's.
        timed: its time is that of the whole operation.
        copy: row of `calls`: of a read the first copy to a GPU out of memory that it filled, of a write the last copy
            from a GPU into memory that it sent; -1 none.
    """

    tier: Array
    timed: Array
    copy: Array


@dataclass(frozen=True)
class _Memory:
    """Memory that is used at a time: rows of a table, (rows,) each."""

    rows: Array
    process: Array
    time_ns: Array
    address: Array
    bytes: Array

    def pieces(self, page: int) -> float:
        """How many there are, at most."""
        return float((self.bytes / page + 2).sum())


def tier_uses(recording: Recording) -> TierUses:
    """Of a recording's `tier_operations`, by its `calls`."""
    table = recording.tier_operations
    copy = np.full(table.rows, -1, dtype=np.int64)
    tier = np.isin(_place_keys(table["process"], table["place"]), _files(recording))
    known = (table["address"] != 0) & (table["bytes"] > 0)
    if known.any():
        reads = _operations(recording, known & (table["writes"] == 0), "end_ns")
        read, row = _followed(reads, _copies(recording, loads=True))
        order = np.argsort(recording.calls["start_ns"][row], kind="stable")[::-1]
        copy[read[order]] = row[order]  # of several the first one stays
        writes = _operations(recording, known & (table["writes"] > 0))
        row, write = _followed(_copies(recording, loads=False), writes)
        order = np.argsort(recording.calls["start_ns"][row], kind="stable")
        copy[write[order]] = row[order]
    return TierUses(tier | (copy >= 0), table["unended"] == 0, copy)


def place_text(recording: Recording, row: int) -> str:
    """A row of `tiers` for a sentence: its path or what it is, with the file system or the peer."""
    tiers = recording.tiers
    kind, path, system = (recording.text(int(tiers[name][row])) for name in ("kind", "path", "filesystem"))
    port = int(tiers["port"][row])
    more = [system, "O_DIRECT" * int(tiers["direct"][row]), f"port {port}" * (port > 0)]
    inside = ", ".join(one for one in more if one)
    return (path or kind or "unknown") + (f" ({inside})" if inside else "")


def _place_keys(process: Array, place: Array) -> Array:
    return process.astype(np.int64) << 32 | place


def _files(recording: Recording) -> Array:
    """Keys of places that are files'."""
    tiers = recording.tiers
    mine = np.array([recording.text(int(kind)) in FILES for kind in tiers["kind"]], dtype=bool)
    return _place_keys(tiers["process"][mine], tiers["place"][mine]) if tiers.rows else np.zeros(0, np.int64)


def _operations(recording: Recording, mask: Array, at: str = "start_ns") -> _Memory:
    table, rows = recording.tier_operations, np.flatnonzero(mask)
    size = table["bytes"][rows] // np.maximum(table["count"][rows], 1)  # of the first piece of memory, about
    return _Memory(rows, table["process"][rows], table[at][rows], table["address"][rows], np.maximum(size, 1))


def _copies(recording: Recording, *, loads: bool) -> _Memory:
    calls = recording.calls
    host = calls["src" if loads else "dst"]
    mine = among(calls["kind"], (CallKind.COPY, CallKind.COPY_SYNC, CallKind.BATCH)) & (host != 0)
    mine &= calls["direction"] == (Direction.H2D if loads else Direction.D2H)
    rows = np.flatnonzero(mine & (calls["bytes"] > 0))
    size = calls["bytes"][rows] // np.maximum(calls["count"][rows], 1)
    return _Memory(rows, calls["process"][rows], calls["start_ns"][rows], host[rows], np.maximum(size, 1))


def _followed(filled: _Memory, used: _Memory) -> tuple[Array, Array]:
    """Pairs of rows: who used memory, and who had filled it last before; (pairs,) each."""
    if not len(filled.rows) or not len(used.rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    page = PAGE_BYTES
    while filled.pieces(page) + used.pieces(page) > MOST_PIECES and page < 1 << 62:
        page *= 2
    a, of_a = _split(filled, page)
    b, of_b = _split(used, page)
    key = np.concatenate((a, b))
    process = np.concatenate((filled.process[of_a], used.process[of_b]))
    time = np.concatenate((filled.time_ns[of_a], used.time_ns[of_b]))
    uses = np.concatenate((np.zeros(len(a), np.uint8), np.ones(len(b), np.uint8)))
    of = np.concatenate((of_a, of_b))
    order = np.lexsort((uses, time, key, process))
    key, process, uses, of = key[order], process[order], uses[order], of[order]
    new = np.append(True, (key[1:] != key[:-1]) | (process[1:] != process[:-1]))
    place = np.arange(len(key))
    first = np.maximum.accumulate(np.where(new, place, 0))
    last = np.maximum.accumulate(np.where(uses == 0, place, -1))
    known = np.flatnonzero((uses == 1) & (last >= first))
    pairs = np.unique(np.column_stack((of[last[known]], of[known])), axis=0)
    one, other = pairs[:, 0], pairs[:, 1]
    begin = np.maximum(filled.address[one], used.address[other])
    end = np.minimum(
        filled.address[one] + filled.bytes[one].astype(np.uint64),
        used.address[other] + used.bytes[other].astype(np.uint64),
    )
    both = end > begin
    return filled.rows[one[both]], used.rows[other[both]]


def _split(memory: _Memory, page: int) -> tuple[Array, Array]:
    """The numbers of the pages that each touches, and whose they are."""
    size = np.uint64(page)
    first = memory.address // size
    end = memory.address + (memory.bytes - 1).astype(np.uint64)  # of a damaged recording it may wrap
    count = (np.maximum(end, memory.address) // size - first).astype(np.int64) + 1
    of = np.repeat(np.arange(len(first)), count)
    inside = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    return first[of] + inside.astype(np.uint64), of
