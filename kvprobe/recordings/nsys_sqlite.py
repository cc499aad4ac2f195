"""Reads the SQLite export of Nsight Systems, schema 2.9.1 (2022.1) to 3.25.0 (2026.2), without ever writing to it.

Tables are created lazily (absent means no such events), columns come and go between versions, text is not always
UTF-8, and any cell may hold any type: every number is cast in SQL, every text decoded with replacement.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.recordings import vocabulary as words
from kvprobe.recordings.assemble import (
    GrowingColumn,
    among,
    codes,
    join,
    match,
    narrowed,
    rows_in_time,
    sorted_table,
    stream_rows,
)
from kvprobe.recordings.links import link
from kvprobe.recordings.model import Array, CallKind, Engine, Label, RangeStyle, Recording, Source, Table
from kvprobe.recordings.trace_library import native_library

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

__all__ = ["MAGIC", "columns_to_recording", "read"]

MAGIC = b"SQLite format 3\0"
Progress = Callable[[str, float], None]
_BATCH = 1 << 17
_NO_STREAM = 0xFFFFFFFF  # CUPTI's stream of what names none
_PID_SHIFT, _ID_MASK = 24, 0xFFFFFF  # globalTid = ... pid << 24 | tid
_DIRECTIONS, _MEMORY = np.array(words.NSYS_DIRECTIONS, np.uint8), np.array(words.NSYS_MEMORY, np.uint8)

_KERNELS, _COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"

# What is read of each table: column -> default where the schema lacks it or the cell is NULL.
_OF_EVENTS = {"streamId": -1, "correlationId": -1, "globalPid": 0, "eventId": 0}
COLUMNS: dict[str, dict[str, int]] = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": {
        "start": 0,
        "end": 0,
        "globalTid": 0,
        "correlationId": -1,
        "nameId": -1,
        "returnValue": 0,
    },
    _KERNELS: {
        "start": 0,
        "end": 0,
        "deviceId": -1,
        "streamId": -1,
        "correlationId": -1,
        "globalPid": 0,
        "graphNodeId": -1,
        "graphId": -1,
        "shortName": -1,
        "demangledName": -1,
    },
    _COPIES: {
        "start": 0,
        "end": 0,
        "deviceId": -1,
        "streamId": -1,
        "correlationId": -1,
        "globalPid": 0,
        "graphNodeId": -1,
        "bytes": 0,
        "copyKind": 0,
        "srcKind": 7,
        "dstKind": 7,
        "copyCount": 1,
    },
    "CUPTI_ACTIVITY_KIND_MEMSET": {
        "start": 0,
        "end": 0,
        "deviceId": -1,
        "streamId": -1,
        "correlationId": -1,
        "globalPid": 0,
        "graphNodeId": -1,
        "bytes": 0,
        "memKind": 7,
    },
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": {
        "start": 0,
        "end": 0,
        "deviceId": -1,
        "streamId": -1,
        "correlationId": -1,
        "globalPid": 0,
        "graphId": -1,
    },
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _OF_EVENTS,
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": _OF_EVENTS,
    "CUPTI_ACTIVITY_KIND_OVERHEAD": {
        "start": 0,
        "end": 0,
        "globalTid": 0,
        "correlationId": -1,
        "nameId": -1,
        "overheadType": -1,
    },
    "PROFILER_OVERHEAD": {"start": 0, "end": 0, "globalTid": 0, "nameId": -1},
    "NVTX_EVENTS": {"start": 0, "end": -1, "eventType": 0, "globalTid": 0, "domainId": 0, "textId": -1},
    "TARGET_INFO_CUDA_STREAM": {"streamId": -1, "processId": -1, "contextId": -1, "priority": 0, "flag": 0},
    "ThreadNames": {"nameId": -1, "globalTid": 0},
    "OSRT_API": {"start": 0, "end": 0, "globalTid": 0, "nameId": -1},
}
_RANGE_STYLES = {59: RangeStyle.PUSH_POP, 60: RangeStyle.START_END, 70: RangeStyle.PUSH_POP, 71: RangeStyle.START_END}
DOMAIN_CREATE = 75
SLEPT_NS = 1_000_000  # of a function of the operating system: shorter ones are no pause of a step
_STREAM_NAMES = {1: "", 2: "non-blocking", 3: "null"}

Columns = dict[str, Array]


class Export:
    """An export opened for reading: its tables, and their columns as numpy arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = path.stat().st_size
        self.db = sqlite3.connect(
            f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True, check_same_thread=False
        )
        # An attacker's view or virtual table could compute without end: only plain tables are read.
        self.db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        if hasattr(self.db, "setlimit"):  # Python 3.11
            self.db.setlimit(0, 1 << 26)  # SQLITE_LIMIT_LENGTH: no text longer than 64 MiB
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON"):
            self.db.execute(f"PRAGMA {pragma}")
        rows = self.db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' LIMIT 10000").fetchall()
        self.tables = {
            name
            for name, sql in rows
            if isinstance(name, str)
            and isinstance(sql, str)
            and not sql.upper().startswith("CREATE VIRTUAL")
            and "GENERATED ALWAYS" not in sql.upper()
        }

    def names_of(self, table: str) -> set[str]:
        """The columns that this schema version has."""
        return {str(row[1]) for row in self.db.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, table: str, columns: Sequence[str], limit: int = 100_000) -> list[tuple[Any, ...]]:
        """At most `limit` rows of a small table; none where it lacks one of the columns."""
        if table not in self.tables or not set(columns) <= self.names_of(table):
            return []
        picks = ", ".join(f'"{column}"' for column in columns)
        return list(islice(self.db.execute(f'SELECT {picks} FROM "{table}"'), limit))

    def columns(self, table: str, tick: Callable[[], None] | None = None) -> Columns:
        """The wanted columns of one table, (rows,) int64 each; empty where the table is absent."""
        wanted = COLUMNS[table]
        if table not in self.tables:
            return {name: np.zeros(0, dtype=np.int64) for name in wanted}
        have = self.names_of(table)
        present = [name for name in wanted if name in have]
        if not {"start", "end"} & set(wanted) <= have or not present:
            return {name: np.zeros(0, dtype=np.int64) for name in wanted}
        asked = {name: wanted[name] for name in present}
        found = self._leaf_by_leaf(table, asked, tick)
        if found is None:
            found = self._row_by_row(table, asked, tick)
        read = len(found[0])
        out: Columns = dict(zip(present, found, strict=True))
        for name in wanted:
            if name not in out:
                out[name] = np.broadcast_to(np.int64(wanted[name]), (read,))
        return out

    @property
    def most_rows(self) -> int:
        """Rows that a table of the file can have: none takes less than four bytes."""
        return self.bytes // 4

    def _rows_expected(self, table: str) -> int:
        """About how many rows the table has, from the newest row's number; 0 where that cannot be told."""
        try:
            ((newest,),) = self.db.execute(f'SELECT max(rowid) FROM "{table}"').fetchall()
        except (sqlite3.Error, ValueError):  # a table without row numbers, or a damaged one
            return 0
        return min(newest, self.most_rows) if isinstance(newest, int) and newest > 0 else 0

    def _row_by_row(self, table: str, wanted: dict[str, int], tick: Callable[[], None] | None) -> list[Array]:
        """The columns as SQLite reads them."""
        picks = ", ".join(f'coalesce(CAST("{name}" AS INTEGER), {absent})' for name, absent in wanted.items())
        cursor = self.db.execute(f'SELECT {picks} FROM "{table}"')
        expected = self._rows_expected(table)
        found = [GrowingColumn(expected) for _ in wanted]
        while True:
            flat = np.fromiter(chain.from_iterable(islice(cursor, _BATCH)), dtype=np.int64)
            if not len(flat):
                return [column.whole() for column in found]
            matrix = flat.reshape(-1, len(wanted))
            for i, column in enumerate(found):
                column.add(matrix[:, i])
            if found[0].rows > self.most_rows:  # a damaged b-tree can repeat a page without end
                raise sqlite3.DatabaseError(f"{table} has more rows than the file can hold")
            if tick is not None:
                tick()

    def _leaf_by_leaf(self, table: str, wanted: dict[str, int], tick: Callable[[], None] | None) -> list[Array] | None:
        """The same, copied out of the file's pages by the native library; None where it cannot."""
        library = native_library()
        about = {
            str(name): (place, kind, default, key)
            for place, name, kind, _, default, key in self.db.execute(f'PRAGMA table_info("{table}")')
        }
        roots = self.db.execute(
            "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
        ).fetchall()
        order = sorted(wanted, key=lambda name: about[name][0])
        if library is None or len(roots) != 1 or any(about[name][2] is not None for name in order):
            return None  # a default would stand in for what old rows lack
        keys = [place for place, kind, _, key in about.values() if key and str(kind).upper() == "INTEGER"]
        places = np.array([about[name][0] for name in order], dtype=np.int32)
        absent = np.array([wanted[name] for name in order], dtype=np.int64)
        rank = [order.index(name) for name in wanted]
        descriptor = os.open(self.path, os.O_RDONLY)
        state = None
        try:
            state = library.kvt_table_open(
                descriptor,
                int(roots[0][0]) & 0xFFFFFFFF,
                places.ctypes.data,
                absent.ctypes.data,
                len(order),
                keys[0] if len(keys) == 1 else -1,
            )
            expected = self._rows_expected(table)
            found = [GrowingColumn(expected) for _ in wanted]
            part = np.empty((len(order), _BATCH), dtype=np.int64)
            rows = ctypes.c_uint64()
            while state:
                ended = library.kvt_table_read(state, part.ctypes.data, _BATCH, ctypes.byref(rows))
                if ended > 1:
                    return None
                read = int(rows.value)
                for column, row in zip(found, rank, strict=True):
                    column.add(part[row, :read])
                if tick is not None:
                    tick()
                if ended == 1:
                    return [column.whole() for column in found]
            return None
        finally:
            if state:
                library.kvt_table_close(state)
            os.close(descriptor)

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of `StringIds` that are asked for."""
        wanted = set(ids)
        if "StringIds" not in self.tables or not wanted:
            return {}
        found: dict[int, str] = {}
        query = f"SELECT CAST(id AS INTEGER), substr(CAST(value AS TEXT), 1, {words.Names.LONGEST}) FROM StringIds"
        for number, text in islice(self.db.execute(query), self.most_rows):
            if number in wanted and text is not None:
                found[number] = text
        return found

    def range_texts(self) -> Iterator[tuple[int, str]]:
        """Row number and text of the NVTX events that carry their text themselves."""
        if "text" not in self.names_of("NVTX_EVENTS"):
            return
        query = f"SELECT substr(CAST(text AS TEXT), 1, {words.Names.LONGEST}) FROM NVTX_EVENTS"
        for number, (text,) in enumerate(islice(self.db.execute(query), self.most_rows)):
            if text is not None:
                yield number, text

    def domains(self) -> list[tuple[Any, ...]]:
        """globalTid, domain id and name of the NVTX domains that were created."""
        if "text" not in self.names_of("NVTX_EVENTS"):
            return []
        return list(
            islice(
                self.db.execute(
                    "SELECT CAST(globalTid AS INTEGER), CAST(domainId AS INTEGER), CAST(text AS TEXT) FROM NVTX_EVENTS "
                    f"WHERE eventType = {DOMAIN_CREATE}"
                ),
                10_000,
            )
        )


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one export.

    Raises:
        RecordingError: not an export of Nsight Systems, or damaged beyond the tables it starts with.
    """
    try:
        export = Export(path)
    except (sqlite3.Error, OSError, MemoryError) as error:  # a cell that SQLite cannot make sense of is a MemoryError
        said = str(error) or "its list of tables is damaged"
        raise RecordingError(f"{path}: cannot be opened as an SQLite export ({said})") from error
    try:
        return columns_to_recording(export, path, "nsys-sqlite", progress)
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
        raise RecordingError(f"{path}: damaged SQLite export ({str(error) or 'a row cannot be read'})") from error
    finally:
        export.db.close()


def columns_to_recording(export: Any, path: Path, form: str, progress: Progress | None = None) -> Recording:
    """Makes a Recording of anything that offers an Export's methods, whatever the format behind it."""
    if not any(table in export.tables for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "NVTX_EVENTS")):
        raise RecordingError(f"{path}: not an export of Nsight Systems (no CUDA calls, NVTX ranges or strings in it)")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as beside:  # the native library reads without Python's lock
        return _Builder(export, path, form, progress).build(beside)


class _Builder:
    """Turns the tables of an export into those of the model, one at a time."""

    def __init__(self, export: Any, path: Path, form: str, progress: Progress | None) -> None:
        self.export = export
        self.ahead: dict[str, Future[Columns]] = {}
        self.names = words.Names()
        self.notes: list[str] = []
        self.incomplete: list[str] = []
        meta = dict(self.pairs("META_DATA_EXPORT") or self.pairs("EXPORT_META_DATA"))
        product = meta.get("EXPORT_PRODUCT_NAME", "NVIDIA Nsight Systems").removeprefix("NVIDIA ")
        schema = meta.get("EXPORT_SCHEMA_VERSION", "")
        tool = " ".join(part for part in (product, meta.get("EXPORT_PRODUCT_VERSION", "")) if part)
        self.source = Source(
            str(path),
            form,
            tool=tool + (f" (schema {schema})" if schema else ""),
            command=self._command(),
            bytes=getattr(export, "bytes", 0),
        )
        if not schema:
            self.notes.append("the export names no schema version; it was read by the columns that it has")
        self.progress = progress
        self.pids = np.zeros(0, dtype=np.int64)
        self.done = 0

    def _tick(self) -> None:
        if self.progress is not None:
            self.done += 1
            self.progress("reading tables", min(0.99, self.done / (self.done + 16)))

    def pairs(self, table: str) -> list[tuple[str, str]]:
        """Name and value rows of a table, as text."""
        return [(str(name), str(value)[: 1 << 16]) for name, value in self.export.rows(table, ("name", "value"))]

    def _command(self) -> str:
        capture = self.pairs("META_DATA_CAPTURE")
        words_ = [value for name, value in capture if name == "PROCESS_0:COMMAND"]
        words_ += [value for name, value in capture if name.startswith("PROCESS_0:ARGUMENT_")]
        return " ".join(f"'{word}'" if " " in word else word for word in words_)

    def read_columns(self, table: str) -> Columns:
        """Columns of a table; a damaged one is read as far as not at all, and noted."""
        try:
            ahead = self.ahead.pop(table, None)
            found: Columns = ahead.result() if ahead is not None else self.export.columns(table, self._tick)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            self.notes.append(f"{table} was not read: {error}")
            self.incomplete.append(f"{table} was not read: {error}")
            return {name: np.zeros(0, dtype=np.int64) for name in COLUMNS[table]}
        if ahead is not None:
            self._tick()
        return found

    def process_rows(self, global_id: Array) -> Array:
        """Rows of `processes` for global process or thread ids; new processes are added."""
        return self._rows_of(*codes(np.asarray(global_id, dtype=np.int64)))

    def _rows_of(self, values: Array, place: Array) -> Array:
        """The same of ids by their codes."""
        # The bits above the pid tell virtual machines apart and are part of a process's identity.
        ids = values >> _PID_SHIFT
        fresh = np.setdiff1d(ids, self.pids)
        if len(fresh):
            self.pids = np.concatenate([self.pids, fresh])
        order = np.argsort(self.pids)
        rows = order[np.searchsorted(self.pids, ids, sorter=order)].astype(np.int32)
        return rows[place] if len(set(rows.tolist())) > 1 else np.broadcast_to(rows[:1], (len(place),))

    def text_rows(self, ids: Array, transform: Callable[[str], str] = str) -> tuple[Array, list[str]]:
        """Name indexes of string ids, and the distinct texts in the order of the distinct ids."""
        distinct, inverse = codes(ids)
        found = self.export.strings(distinct.tolist())
        texts = [transform(found.get(number, "")) for number in distinct.tolist()]
        return self.names.map(texts)[inverse] if len(distinct) else np.zeros(0, np.int32), texts

    def build(self, beside: Executor) -> Recording:
        """The recording; what the GPU did is read on a second core, while this thread reads the calls."""
        if sqlite3.threadsafety == 3:  # else a connection may not be used by two threads
            self.ahead = {table: beside.submit(self.export.columns, table) for table in (_KERNELS, _COPIES)}
        calls = self.calls()
        executions, streams = self.executions()
        tables = {
            "calls": calls,
            "executions": executions,
            "streams": streams,
            "labels": self.labels(),
            "ranges": self.ranges(),
            "threads": self.threads(),
            "os_calls": self.os_calls(),
        }
        machine, how = self.machine()
        recording = Recording(
            [self.source],
            tables,
            self.names.list,
            machine=machine,
            machine_how=how,
            has_executions=executions.rows > 0,
            notes=self.notes,
            incomplete=self.incomplete,
        )
        recording.tables["processes"] = self.processes(recording)
        link(recording)
        self.waits(recording)
        if calls.rows and not executions.rows:
            self.notes.append("no GPU activity was recorded: occupancy can only be inferred")
        if self.progress is not None:
            self.progress("reading tables", 1.0)
        return recording

    def calls(self) -> Table:
        raw = rows_in_time([self.read_columns("CUPTI_ACTIVITY_KIND_RUNTIME")], "start")
        distinct, inverse = codes(raw.pop("nameId"))
        found = self.export.strings(distinct.tolist())
        texts = [found.get(number, "") for number in distinct.tolist()]
        texts = [words.base_name(text) for text in texts]
        kinds = np.array([words.call_kind(text) for text in texts], dtype=np.uint8)
        directions = np.array([words.call_direction(text) for text in texts], dtype=np.uint8)
        indexes = self.names.map(texts)
        kind = kinds[inverse] if len(kinds) else np.zeros(0, np.uint8)
        threads, at = codes(raw.pop("globalTid"))
        columns = {
            "start_ns": raw.pop("start"),
            "end_ns": raw.pop("end"),
            "process": self._rows_of(threads, at),
            "thread": (threads & _ID_MASK)[at],
            "name": indexes[inverse] if len(kinds) else np.zeros(0, np.int32),
            "kind": kind,
            "direction": directions[inverse] if len(kinds) else np.zeros(0, np.uint8),
            "count": ((kind == CallKind.COPY) | (kind == CallKind.COPY_SYNC)).astype(np.int32),
            "correlation": raw.pop("correlationId"),
            "result": narrowed(raw.pop("returnValue"), np.int32),
        }
        return Table("calls", columns)

    def waits(self, recording: Recording) -> None:
        """Gives synchronising calls, waits and event records their stream, and events as `src`, where the export knows.

        A stream that only waits or records gets a row in `streams`; one that is only synchronised stays unknown.
        """
        calls, streams = recording.calls, recording.streams
        if not calls.rows or not streams.rows:
            return
        told = np.flatnonzero(among(calls["kind"], [CallKind.SYNC, CallKind.EVENT]))
        stream = event = None
        idle: list[tuple[int, int, int]] = []  # process, device, handle
        pairs = set(zip(streams["process"].tolist(), streams["device"].tolist(), strict=True))
        used = [process for process, _ in pairs]
        device_of = {process: device for process, device in pairs if used.count(process) == 1}  # these tables say 0
        row_of = {
            (int(process), int(handle)): row
            for row, (process, handle) in enumerate(zip(streams["process"], streams["handle"], strict=True))
        }
        for table in ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"):
            raw = self.read_columns(table)
            if not len(raw["correlationId"]) or not len(told):
                continue
            process = self.process_rows(raw["globalPid"])
            _, owner = match(calls["process"][told], calls["correlation"][told], process, raw["correlationId"])
            theirs = np.flatnonzero(owner >= 0)
            rows = told[owner[theirs]]
            if stream is None or event is None:
                stream, event = calls["stream"].copy(), calls["src"].copy()
            keys = list(zip(process[theirs].tolist(), raw["streamId"][theirs].tolist(), strict=True))
            for key, kind in zip(keys, calls["kind"][rows].tolist(), strict=True):
                if kind == CallKind.EVENT and key not in row_of and 0 <= key[1] < _NO_STREAM:
                    row_of[key] = streams.rows + len(idle)
                    idle.append((key[0], device_of.get(key[0], -1), key[1]))
            known = [row_of.get(key, -1) for key in keys]
            stream[rows] = known
            event[rows] = raw["eventId"][theirs].astype(np.uint64)
        if stream is not None and event is not None:
            recording.tables["calls"] = Table("calls", {**calls.columns, "stream": stream, "src": event})
        if idle:
            found = dict(zip(("process", "device", "handle"), np.array(idle, dtype=np.int64).T, strict=True))
            more = self.streams(found)
            both = {name: join([streams[name], more[name]]) for name in streams.columns}
            recording.tables["streams"] = Table("streams", both)

    def executions(self) -> tuple[Table, Table]:
        parts: list[Columns] = []
        for table, engine in (
            (_KERNELS, Engine.KERNEL),
            (_COPIES, Engine.COPY),
            ("CUPTI_ACTIVITY_KIND_MEMSET", Engine.MEMSET),
            ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", Engine.OTHER),
        ):
            raw = self.read_columns(table)
            rows = len(raw["start"])
            if not rows:
                continue
            nothing, unknown = (np.broadcast_to(np.int64(value), (rows,)) for value in (0, -1))
            graph, graph_id = (raw.get(name, unknown) for name in ("graphNodeId", "graphId"))
            if "graphNodeId" not in raw:
                graph = graph_id
            part: Columns = {
                "start_ns": raw["start"],
                "end_ns": raw["end"],
                "process": self.process_rows(raw["globalPid"]),
                "device": _each(lambda ids: ids.astype(np.int32), raw["deviceId"]),
                "handle": raw["streamId"],
                "engine": np.broadcast_to(np.uint8(engine), (rows,)),
                "correlation": raw["correlationId"],
                "bytes": raw.get("bytes", nothing),
                "count": _each(lambda many: many.astype(np.int32), raw.get("copyCount", nothing)),
                "direction": nothing.astype(np.uint8),
                "memory": nothing.astype(np.uint8),
                "graph": _each(lambda ids: np.where(ids == 0, -1, ids), graph),
            }
            if engine == Engine.KERNEL:
                part["graph"] = _each(
                    lambda node, ids: np.asarray(np.where((node < 0) & (ids > 0), ids, node)), part["graph"], graph_id
                )
                short, full = raw["shortName"], raw["demangledName"]
                part["name"] = self.text_rows(full if (full >= 0).all() else np.where(full >= 0, full, short))[0]
            elif engine == Engine.COPY:
                kind = np.clip(raw["copyKind"], 0, len(_DIRECTIONS) - 1)
                part["direction"] = _DIRECTIONS[kind]
                host = np.where(among(kind, (1, 3, 9, 11)), raw["srcKind"], raw["dstKind"])
                part["memory"] = _MEMORY[np.clip(host, -1, len(_MEMORY) - 1)]  # the last one: unknown
                part["name"] = self._copy_names()[kind]
            elif engine == Engine.MEMSET:
                part["memory"] = _MEMORY[np.clip(raw["memKind"], -1, len(_MEMORY) - 1)]
                part["name"] = np.full(rows, self.names.add("memset"), np.int32)
            else:
                part["name"] = np.full(rows, self.names.add("graph"), np.int32)
            parts.append(part)
        columns = rows_in_time(parts, "start_ns")
        self.stream_info = self.read_columns("TARGET_INFO_CUDA_STREAM")
        if not columns:
            return Table("executions"), Table("streams")
        columns["stream"], found = stream_rows(columns["process"], columns["device"], columns.pop("handle"))
        return Table("executions", columns), self.streams(found)

    def _copy_names(self) -> Array:
        labels = {
            0: "Unknown",
            1: "Host-to-Device",
            2: "Device-to-Host",
            3: "Host-to-Array",
            4: "Array-to-Host",
            5: "Array-to-Array",
            6: "Array-to-Device",
            7: "Device-to-Array",
            8: "Device-to-Device",
            9: "Host-to-Host",
            10: "Peer-to-Peer",
            11: "Unified Host-to-Device",
            12: "Unified Device-to-Host",
            13: "Unified Device-to-Device",
        }
        return self.names.map([f"memcpy {labels[i]}" for i in range(len(labels))])

    def streams(self, found: Columns) -> Table:
        """Adds priority and flags where the export knows them (a default stream may have no row there)."""
        info = self.stream_info
        known: dict[tuple[int, int], tuple[int, int]] = {}
        for stream, process, priority, flag in zip(
            info["streamId"].tolist(),
            info["processId"].tolist(),
            info["priority"].tolist(),
            info["flag"].tolist(),
            strict=True,
        ):
            # A negative priority is exported as the unsigned number with the same 32 bits.
            known[process, stream] = (priority - (1 << 32) if 1 << 31 <= priority < 1 << 32 else priority, flag)
        pids = (self.pids & _ID_MASK).tolist()
        rows = [
            known.get((pids[process], handle), (-1, 0))
            for process, handle in zip(found["process"].tolist(), found["handle"].tolist(), strict=True)
        ]
        found["priority"] = np.array([np.clip(row[0], -(1 << 31), (1 << 31) - 1) for row in rows], dtype=np.int32)
        found["name"] = self.names.map([_STREAM_NAMES.get(row[1], "") for row in rows])
        return Table("streams", found)

    def labels(self) -> Table:
        types = {
            number: words.label_of(str(name))
            for number, name in self.export.rows("ENUM_CUPTI_OVERHEAD_TYPE", ("id", "name"))
        }
        parts: list[Columns] = []
        for table in ("CUPTI_ACTIVITY_KIND_OVERHEAD", "PROFILER_OVERHEAD"):
            raw = self.read_columns(table)
            if not len(raw["start"]):
                continue
            name, texts = self.text_rows(raw["nameId"])
            by_text = np.array([words.label_of(text) for text in texts], dtype=np.uint8)
            label = by_text[codes(raw["nameId"])[1]]
            if "overheadType" in raw:
                by_type = np.array(
                    [types.get(number, Label.OTHER) for number in raw["overheadType"].tolist()], dtype=np.uint8
                )
                label = np.where(by_type != Label.OTHER, by_type, label)
            parts.append(
                {
                    "start_ns": raw["start"],
                    "end_ns": raw["end"],
                    "process": self.process_rows(raw["globalTid"]),
                    "thread": raw["globalTid"] & _ID_MASK,
                    "label": label,
                    "name": name,
                    "correlation": raw.get("correlationId", np.full(len(name), -1, np.int64)),
                }
            )
        if not parts:
            return Table("labels")
        return sorted_table("labels", {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def ranges(self) -> Table:
        raw = self.read_columns("NVTX_EVENTS")
        if not len(raw["start"]):
            return Table("ranges")
        last = max(int(raw["start"].max()), int(raw["end"].max()))
        wanted = np.flatnonzero(np.isin(raw["eventType"], list(_RANGE_STYLES)))
        opened = int((raw["end"][wanted] < 0).sum())
        if opened:
            self.notes.append(
                f"{opened} NVTX ranges never end in the recording: they are taken to end at its last NVTX event"
            )
        name = self._range_texts(wanted, raw["textId"])
        domains = self._domains()
        domain_keys = (
            list(zip((raw["globalTid"][wanted] >> _PID_SHIFT).tolist(), raw["domainId"][wanted].tolist(), strict=True))
            if domains
            else []
        )
        domain = (
            self.names.map([domains.get(key, "") for key in domain_keys])
            if domains
            else np.zeros(len(wanted), np.int32)
        )
        types, of_type = codes(raw["eventType"][wanted])
        style = np.array([_RANGE_STYLES[number] for number in types.tolist()], dtype=np.uint8)
        end = raw["end"][wanted]
        return sorted_table(
            "ranges",
            {
                "start_ns": raw["start"][wanted],
                "end_ns": np.where(end < 0, last, end),
                "process": self.process_rows(raw["globalTid"][wanted]),
                "thread": raw["globalTid"][wanted] & _ID_MASK,
                "domain": domain,
                "name": name,
                "style": style[of_type],
            },
        )

    def _range_texts(self, wanted: Array, text_ids: Array) -> Array:
        """Names of ranges: the text column, or `StringIds` through textId."""
        name = self.text_rows(text_ids[wanted])[0]
        row_of: Array | None = None
        for number, text in self.export.range_texts():
            if row_of is None:
                row_of = np.full(len(text_ids), -1, dtype=np.int64)
                row_of[wanted] = np.arange(len(wanted))
            if number < len(row_of) and row_of[number] >= 0:
                name[row_of[number]] = self.names.add(text)
        return name

    def _domains(self) -> dict[tuple[int, int], str]:
        """Names of NVTX domains by (process, domain id), from their creation events."""
        return {
            (tid >> _PID_SHIFT, domain): str(text)
            for tid, domain, text in self.export.domains()
            if None not in (tid, domain, text)
        }

    def threads(self) -> Table:
        raw = self.read_columns("ThreadNames")
        # Only threads of processes that did something: an export lists every process of the machine.
        keep = np.isin(raw["globalTid"] >> _PID_SHIFT, self.pids)
        raw = {name: column[keep] for name, column in raw.items()}
        return Table(
            "threads",
            {
                "process": self.process_rows(raw["globalTid"]),
                "thread": raw["globalTid"] & _ID_MASK,
                "name": self.text_rows(raw["nameId"])[0],
            },
        )

    def os_calls(self) -> Table:
        """Long calls of the operating system's functions, by processes that did something on a GPU (`-t osrt`)."""
        raw = self.read_columns("OSRT_API")
        keep = raw["end"] - raw["start"] >= SLEPT_NS
        keep &= np.isin(raw["globalTid"] >> _PID_SHIFT, self.pids)
        raw = {name: column[keep] for name, column in raw.items()}
        if not len(raw["start"]):
            return Table("os_calls")
        return sorted_table(
            "os_calls",
            {
                "start_ns": raw["start"],
                "end_ns": raw["end"],
                "process": self.process_rows(raw["globalTid"]),
                "thread": raw["globalTid"] & _ID_MASK,
                "name": self.text_rows(raw["nameId"])[0],
            },
        )

    def processes(self, recording: Recording) -> Table:
        names = {
            pid >> _PID_SHIFT: str(name)
            for pid, name in self.export.rows("PROCESSES", ("globalPid", "name"))
            if isinstance(pid, int)
        }
        start = np.zeros(len(self.pids), dtype=np.int64)
        end = np.zeros(len(self.pids), dtype=np.int64)
        for i in range(len(self.pids)):
            times = [t for table in (recording.calls, recording.executions, recording.ranges) for t in _span(table, i)]
            if times:
                start[i], end[i] = min(times), max(times)
        return Table(
            "processes",
            {
                "pid": self.pids & _ID_MASK,
                "rank": np.full(len(self.pids), -1, np.int32),
                "name": self.names.map([names.get(pid, "") for pid in self.pids.tolist()]),
                "command": self.names.map([self.source.command] * len(self.pids)),
                "start_ns": start,
                "end_ns": end,
            },
        )

    def machine(self) -> tuple[dict[str, Any], dict[str, str]]:
        facts: dict[str, Any] = {}
        # A laptop's export also lists its other display adapters; those cannot have run CUDA.
        gpus = [
            str(name)
            for (name,) in self.export.rows("TARGET_INFO_GPU", ("name",))
            if not str(name).startswith(("Intel", "Microsoft", "AMD"))
        ]
        if gpus:
            facts["gpu"], facts["gpu_count"] = gpus[0][:200], len(gpus)
        environment = dict(self.pairs("TARGET_INFO_SYSTEM_ENV"))
        for fact, name in (
            ("driver", "NvDriverVersion"),
            ("cuda_driver", "CudaDriverVersion"),
            ("cpu", "CpuDescription"),
            ("cpu_count", "CpuCores"),
            ("os", "OsDescription"),
        ):
            value = environment.get(name, "").strip()
            if value and value not in ("unknown", "0"):
                facts[fact] = value[:200]
        row = self.export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), 1)
        if row and isinstance(row[0][0], int) and row[0][0] > 0:
            facts["unix_offset_ns"] = row[0][0]
        return facts, dict.fromkeys(facts, "Nsight Systems export")


def _each(make: Callable[..., Array], *columns: Array) -> Array:
    """What `make` says of columns, row by row; of one row alone, where each of them stores one value for all."""
    if all(column.strides == (0,) for column in columns):
        return np.broadcast_to(make(*(column[:1] for column in columns))[0], (len(columns[0]),))
    return make(*columns)


def _span(table: Table, process: int) -> list[int]:
    mine = table["process"] == process
    rows = slice(None) if mine.all() else mine
    return [int(table["start_ns"][rows].min()), int(table["end_ns"][rows].max())] if mine.any() else []
