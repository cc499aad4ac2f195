"""Mutators of what a recording means, not of how it is written: sound files that tell of what cannot have happened.

Device activity without calls, calls without a device, correlations that several calls or executions share, clocks that
jump: for each format one function that makes one of them.
"""

from __future__ import annotations

import functools
import io
import json
import random
import sqlite3
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from kvprobe.probe.ring import FILE, HEADER_BYTES, RECORD, SECTION, SLOT

JUMPS_NS = (1, 1_000, 10**6, 10**9, 3600 * 10**9, 10**17, 1 << 61)
KINDS = ("no calls", "no device", "same correlation", "jump", "backwards", "no time", "ends first")


def _jump(rng: random.Random) -> int:
    return rng.choice(JUMPS_NS) * rng.choice((1, -1))


def of_trace(data: bytes, rng: random.Random) -> bytes:
    """A trace of Kineto; other JSON as it was."""
    try:
        document = json.loads(data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        assert isinstance(events, list)
    except (ValueError, KeyError, AssertionError, RecursionError):
        return data
    timed = [one for one in events if isinstance(one, dict) and isinstance(one.get("ts"), (int, float))]
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(KINDS)
        if kind in ("no calls", "no device"):
            gone = ("cuda_runtime", "cuda_driver") if kind == "no calls" else ("gpu_", "kernel")
            events[:] = [one for one in events if not _of_category(one, gone)]
            timed = [one for one in timed if not _of_category(one, gone)]
        elif kind == "same correlation":
            of_gpu, shared = rng.choice(((), ("gpu_", "kernel"))), rng.choice((0, 1, -1, 2**31, None))
            for one in _some(timed, rng):
                args = one.get("args")
                if isinstance(args, dict) and (not of_gpu or _of_category(one, of_gpu)):
                    args["correlation"] = _correlation(timed, rng) if shared is None else shared
        else:
            _turn_clock(timed, kind, rng)
    return json.dumps(document).encode()


def _of_category(event: Any, begins: tuple[str, ...]) -> bool:
    return isinstance(event, dict) and str(event.get("cat", "")).lower().startswith(begins)


def _some(rows: list[Any], rng: random.Random) -> list[Any]:
    first = rng.randrange(len(rows) + 1) if rng.random() < 0.5 else 0
    return rows[first :: rng.choice((1, 1, 2, 3))]


def _correlation(events: list[Any], rng: random.Random) -> Any:
    args = rng.choice(events).get("args") if events else None
    return args.get("correlation", 0) if isinstance(args, dict) else 0


def _turn_clock(events: list[Any], kind: str, rng: random.Random) -> None:
    """In microseconds; of all, or of one side's."""
    side = rng.choice(((), (), ("gpu_", "kernel"), ("cuda_",), ("gpu_user",)))
    chosen = [one for one in _some(events, rng) if not side or _of_category(one, side)]
    jump = _jump(rng) / 1000
    for place, one in enumerate(chosen):
        if kind == "jump":
            one["ts"] += jump
        elif kind == "backwards":
            one["ts"] = events[-1]["ts"] - place
        elif kind == "no time":
            one["ts"], one["dur"] = rng.choice((events[0]["ts"], 0)), 0
        elif isinstance(one.get("dur"), (int, float)):
            one["dur"] = rng.choice((-one["dur"], abs(jump), one["dur"] + jump))


# ---- SQLite ----------------------------------------------------------------------------------------------------------

_CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_DEVICE = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMSET")


def of_sqlite(data: bytes, rng: random.Random) -> bytes:
    """An export of Nsight Systems; a file that SQLite cannot change as it was."""
    try:
        db = sqlite3.connect(":memory:")
        db.deserialize(data)
        db.execute("PRAGMA journal_mode=OFF")
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: {row[1] for row in db.execute(f'PRAGMA table_info("{name}")')} for name in names}
        for _ in range(rng.choice((1, 1, 2))):
            for line in _changes(columns, rng):
                db.execute(line)
        return db.serialize()
    except (sqlite3.Error, UnicodeError, OverflowError, MemoryError):  # the last of a damaged cell, too
        return data


def _changes(columns: dict[str, set[str]], rng: random.Random) -> list[str]:
    kind, calls = rng.choice(KINDS), [name for name in columns if name in _CALLS]
    device = [name for name in columns if name in _DEVICE]
    rows = rng.choice(("1", "rowid % 2", f"rowid > {rng.randrange(40)}"))
    if kind in ("no calls", "no device"):
        verb = rng.choice(("DELETE FROM", "DELETE FROM", "DROP TABLE"))
        return [f'{verb} "{name}"' for name in (calls if kind == "no calls" else device)]
    if kind == "same correlation":
        value = rng.choice(("0", "1", "-1", "correlationId / 2", f"(SELECT MAX(correlationId) FROM {_CALLS[0]})"))
        chosen = rng.choice((calls, device, [*calls, *device]))
        return [
            f'UPDATE "{name}" SET correlationId = {value} WHERE {rows}'
            for name in chosen
            if "correlationId" in columns[name]
        ]
    timed = [name for name in rng.choice((calls, device, list(columns))) if {"start", "end"} <= columns[name]]
    jump = _jump(rng)
    change = {
        "jump": f"start = start + {jump}, end = end + {jump}",
        "backwards": "start = -start, end = -end" if rng.random() < 0.3 else "start = 1000000 - rowid, end = 1000500",
        "no time": rng.choice(("end = start", "start = 0, end = 0", "end = NULL", "start = NULL")),
        "ends first": rng.choice(("start = end, end = start", f"end = start + {jump}")),
    }[kind]
    return [f'UPDATE OR IGNORE "{name}" SET {change} WHERE {rows}' for name in timed]


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _table(data: bytes) -> tuple[pa.Table, bool]:
    if data[:4] == b"PAR1":
        return pyarrow.parquet.read_table(io.BytesIO(data), use_threads=False), True
    return pyarrow.feather.read_table(io.BytesIO(data)), False


def of_table(data: bytes, rng: random.Random) -> bytes:
    """One table of an export, as Parquet or Arrow; what is no such file as it was."""
    try:
        table, is_parquet = _table(data)
        for _ in range(rng.choice((1, 1, 2))):
            table = _changed(table, rng)
        out = io.BytesIO()
        if is_parquet:
            pyarrow.parquet.write_table(table, out)
        else:
            with pa.ipc.new_file(out, table.schema) as sink:
                sink.write_table(table)
        return out.getvalue()
    except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError, OSError):
        return data


def _changed(table: pa.Table, rng: random.Random) -> pa.Table:
    kind, names = rng.choice(KINDS), table.column_names
    if kind in ("no calls", "no device"):
        return table.slice(0, rng.choice((0, 0, 1)))
    if kind == "same correlation":
        joins = [name for name in names if "correlation" in name.lower() or name in ("call", "stream", "process")]
        return _with(table, rng.choice(joins), rng, rng.choice((0, 1, -1))) if joins else table
    times = [name for name in names if name in ("start", "end", "start_ns", "end_ns", "t_ns", "dur_ns")]
    if not times:
        return table
    jump = 0 if kind in ("backwards", "no time") else _jump(rng)
    for name in times if kind == "jump" else [rng.choice(times)]:
        table = _with(table, name, rng, None, jump, kind == "backwards")
    return table


def _with(
    table: pa.Table, name: str, rng: random.Random, value: int | None, jump: int = 0, backwards: bool = False
) -> pa.Table:
    """A column with one value from a row on, or with a jump there, or in the other order; 0 where none is named."""
    values = table[name].to_pylist()
    first = rng.randrange(len(values) + 1) if rng.random() < 0.6 else 0
    if backwards:
        values = values[::-1]
    for row in range(first, len(values)):
        old = values[row]
        if value is not None or not isinstance(old, int):
            values[row] = value or 0
        else:
            values[row] = max(min(old + jump, 2**63 - 1), -(2**63)) if jump else old if backwards else 0
    return table.set_column(table.column_names.index(name), name, pa.array(values, table[name].type))


# ---- ring files and the files beside them ----------------------------------------------------------------------------


def of_ring(data: bytes, rng: random.Random) -> bytes:
    """A ring file: records whose clock jumps, runs backwards or stands; a section's pages gone, the file cut at one."""
    if len(data) < 2 * HEADER_BYTES:
        return data
    out = bytearray(data)
    header = np.frombuffer(data, FILE, 1)[0]
    step, used = int(header["section_bytes"]), int(header["sections_used"])
    slots, ring = int(header["slot_count"]), int(header["ring_capacity"])
    if not step or not used or used > 64 or slots > 4096 or ring > 1 << 20:
        return data
    at = HEADER_BYTES + rng.randrange(used) * step
    ring_at = at + HEADER_BYTES + slots * SLOT.itemsize
    what = rng.randrange(6)
    if what == 0:
        del out[rng.choice((HEADER_BYTES, 2 * HEADER_BYTES, at, ring_at, at + step - 64)) :]
    elif what == 1:
        first = rng.choice((at, at + HEADER_BYTES, ring_at, HEADER_BYTES))
        last = min(first + rng.choice((4096, 8192, len(out))), len(out))
        out[first:last] = bytes(max(last - first, 0))
    elif what == 2:
        del out[at : at + rng.choice((4096, step))]
    elif ring_at + ring * RECORD.itemsize <= len(out) and at + SECTION.itemsize <= len(out):
        records = np.frombuffer(out, RECORD, ring, ring_at)  # of a bytearray: may be written
        some = slice(rng.randrange(ring), None, rng.choice((1, 1, 2)))
        jump = np.uint64(_jump(rng) & (2**64 - 1))
        with np.errstate(over="ignore"):
            if what == 3:
                records["start_ns"][some] += jump
            elif what == 4:
                records["start_ns"][some] = records["start_ns"][some][::-1].copy()
            else:
                records["dur_ns"][some] = rng.choice((np.uint64(0), jump))
        del records
    return bytes(out)


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """A file of JSON, whole or of lines: its times jump, all of them or from a line on."""
    jump, out = _jump(rng), []
    lines = data.split(b"\n")
    first = rng.randrange(len(lines))
    for number, line in enumerate(lines):
        try:
            value = json.loads(line) if line.strip() and number >= first else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            for name, old in value.items():
                if name.endswith("_ns") and isinstance(old, int):
                    value[name] = rng.choice((old + jump, old + jump, 0, -old))
            line = json.dumps(value).encode()
        out.append(line)
    return b"\n".join(out)


BY_SUFFIX: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": of_trace,
    ".jsonl": of_lines,
    ".kvp": of_ring,
    ".sqlite": of_sqlite,
    ".nsys-rep": of_sqlite,
    ".parquet": of_table,
    ".arrow": of_table,
}
