"""Reads PyTorch profiler (Kineto) traces, `.json` and `.json.gz`, as a stream: memory holds columns, not the document.

The text goes by in pieces, unzipped on a thread of its own; a scanner (native, or msgspec where that was not built)
makes rows of numbers of each, and the rows are filed under the model's tables. Times are microseconds with decimals,
since 1970 or since `baseTimeNanoseconds`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.recordings import vocabulary as words
from kvprobe.recordings.assemble import among, join, sorted_table, stream_rows
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.kineto_scan import META, Scanner, scanner
from kvprobe.recordings.links import link
from kvprobe.recordings.model import Array, CallKind, Engine, Recording, Source, Table
from kvprobe.recordings.trace_text import TraceText, read_ahead, text_chunks

if TYPE_CHECKING:
    from kvprobe.recordings.kineto_decode import Decoder

__all__ = ["rank_of", "read"]

Progress = Callable[[str, float], None]


@dataclass
class _Head:
    """What stands beside the events."""

    devices: list[Any] = field(default_factory=list)
    distributed: dict[str, Any] = field(default_factory=dict)
    base_ns: int = 0
    cupti: Any = None
    runtime: Any = None
    driver: Any = None


class _Renamed(dict[str, int]):
    """Name as the trace has it -> index of what it is called here."""

    def __init__(self, names: words.Names, rename: Callable[[str], str]) -> None:
        super().__init__()
        self.names, self.rename = names, rename

    def __missing__(self, key: str) -> int:
        index = self[key] = self.names.add(self.rename(key))
        return index


class _Columns:
    """Columns that grow by trace."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Array]] = {}

    def add(self, **columns: Array) -> None:
        for name, column in columns.items():
            self.parts.setdefault(name, []).append(column)

    def take(self) -> dict[str, Array]:
        """All rows, freeing the pieces column by column."""
        return {name: join(self.parts.pop(name)) for name in list(self.parts)}


class _Reader:
    """Collects what the events of one file say."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path, self.progress = path, progress
        self.names = words.Names()
        self.call_names = _Renamed(self.names, words.base_name)
        self.function_names = _Renamed(self.names, words.kineto_function)
        self.calls, self.executions, self.ranges, self.labels = _Columns(), _Columns(), _Columns(), _Columns()
        self.functions = _Columns()
        self.skipped: dict[str, int] = {}
        self.bad = 0
        self.call_pids: dict[int, int] = {}
        self.process_names: dict[int, str] = {}
        self.thread_names: dict[tuple[int, int], str] = {}

    def take_rows(self, native: Scanner | Decoder, rows: Array) -> None:
        """Files rows under their tables."""
        start = rows["start_ns"]
        end = start + rows["dur_ns"]
        codes = rows["category"]
        for code in distinct(codes).tolist():
            at = np.flatnonzero(codes == code)
            mine = rows[at]
            if code == META:
                for row in mine:
                    self.meta(native.text(row["name"]), int(row["pid"]), int(row["tid"]), native.text(row["label"]))
                continue
            category = words.KINETO_CODES[code - 1]
            common = {"start_ns": start[at], "end_ns": end[at]}
            if category in words.KINETO_CALLS:
                name = native.indexes(mine["name"], self.call_names)
                for i in np.flatnonzero(name == self.call_names["INVALID"]):
                    name[i] = self.call_names[words.kineto_call(int(mine["cbid"][i]))]
                for pid in (int(mine["pid"][0]), int(mine["pid"][-1])):
                    self.call_pids[pid] = self.call_pids.get(pid, 0) + len(mine)
                self.calls.add(**common, thread=mine["tid"].copy(), name=name, correlation=mine["correlation"].copy())
            elif category in words.KINETO_EXECUTIONS:
                engine = words.KINETO_EXECUTIONS[category]
                self.executions.add(
                    **common,
                    name=native.indexes(mine["name"], self.names.index),
                    engine=np.full(len(mine), engine, np.uint8),
                    device=mine["device"].copy(),
                    handle=mine["stream"].astype(np.int64),
                    correlation=mine["correlation"].copy(),
                    bytes=mine["bytes"].copy() if engine != Engine.KERNEL else np.zeros(len(mine), np.int64),
                    count=mine["count"].copy() if engine == Engine.COPY else np.zeros(len(mine), np.int32),
                    channel=mine["channel"].copy(),
                    graph=mine["graph"].copy(),
                )
            elif category in words.KINETO_RANGES:
                self.ranges.add(
                    **common,
                    thread=mine["tid"].copy(),
                    name=native.indexes(mine["name"], self.names.index),
                    style=np.full(len(mine), words.KINETO_RANGES[category], np.uint8),
                )
            elif category in words.KINETO_FUNCTIONS:
                name = native.indexes(mine["name"], self.function_names)
                self.functions.add(**common, thread=mine["tid"].copy(), name=name)
            else:
                labels = [words.label_of(native.text(number)) for number in mine["name"].tolist()]
                self.labels.add(
                    **common,
                    label=np.array(labels, dtype=np.uint8),
                    name=native.indexes(mine["name"], self.names.index),
                )

    def meta(self, what: str, pid: int, tid: int, name: str) -> None:
        """Takes the name of a process or thread."""
        if len(self.thread_names) > 100_000:
            return
        if what == "process_name":
            self.process_names[pid] = name
        elif what == "thread_name":
            self.thread_names[pid, tid] = name

    def recording(self, head: _Head, notes: list[str]) -> Recording:
        """The tables of everything that was taken."""
        calls, executions, ranges, labels, functions = (
            c.take() for c in (self.calls, self.executions, self.ranges, self.labels, self.functions)
        )
        base = head.base_ns
        for columns in (calls, executions, ranges, labels, functions):
            if base and columns:
                columns["start_ns"] = columns["start_ns"] + base
                columns["end_ns"] = columns["end_ns"] + base
        if calls:
            kinds = np.array([words.call_kind(name) for name in self.names.list], dtype=np.uint8)
            directions = np.array([words.call_direction(name) for name in self.names.list], dtype=np.uint8)
            calls["kind"], calls["direction"] = kinds[calls["name"]], directions[calls["name"]]
            calls["count"] = among(calls["kind"], (CallKind.COPY, CallKind.COPY_SYNC)).astype(np.int32)
        streams = self._streams(executions) if executions else {}
        for columns in (calls, executions, ranges, labels, functions):
            if columns:
                columns["process"] = np.broadcast_to(np.int32(0), (len(columns["start_ns"]),))
        tables = {
            kind: sorted_table(kind, columns)
            for kind, columns in (
                ("calls", calls),
                ("executions", executions),
                ("ranges", ranges),
                ("labels", labels),
                ("python_functions", functions),
            )
        }
        del calls, executions, ranges, labels, functions
        tables["streams"] = Table("streams", streams)
        tables |= self._process(head, tables)
        machine, how = _machine(head)
        if not machine.get("clock_relative"):
            machine["unix_offset_ns"] = 0
        source = Source(str(self.path), "kineto-json", tool=_tool(head), bytes=self.path.stat().st_size)
        recording = Recording(
            [source],
            tables,
            self.names.list,
            machine=machine,
            machine_how=how,
            has_executions=tables["executions"].rows > 0,
            notes=notes,
        )
        link(recording)
        _forget_single_batches(recording)
        return recording

    def _streams(self, executions: dict[str, Array]) -> dict[str, Array]:
        """Columns of the table of streams; the executions are told their rows of it, and what each copy is."""
        zero = np.zeros(len(executions["start_ns"]), dtype=np.int32)
        executions["stream"], streams = stream_rows(zero, executions["device"], executions.pop("handle"))
        for name in ("device", "channel", "count"):
            executions[name] = np.clip(executions[name], -1, (1 << 31) - 1).astype(np.int32)
        copies = [words.kineto_copy(name) for name in self.names.list]
        is_copy = executions["engine"] == Engine.COPY
        for i, name in enumerate(("direction", "memory")):
            table = np.array([pair[i] for pair in copies], dtype=np.uint8)
            executions[name] = np.where(is_copy, table[executions["name"]], 0).astype(np.uint8)
        _channels(streams, executions)
        return streams

    def _process(self, head: _Head, tables: dict[str, Table]) -> dict[str, Table]:
        """The one process of a trace, whose rows are in these tables, and its threads."""
        pid = max(self.call_pids, key=lambda p: self.call_pids[p]) if self.call_pids else -1
        spans = [
            t
            for kind in ("calls", "executions", "ranges")
            if tables[kind].rows
            for t in (int(tables[kind]["start_ns"][0]), int(tables[kind]["end_ns"].max()))
        ]
        rank = head.distributed.get("rank")
        rank = rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else rank_of(self.path)
        process = {
            "pid": np.array([pid]),
            "rank": np.array([rank]),
            "name": self.names.map([self.process_names.get(pid, "")]),
            "start_ns": np.array([min(spans, default=0)]),
            "end_ns": np.array([max(spans, default=0)]),
        }
        mine = [(tid, name) for (owner, tid), name in self.thread_names.items() if owner == pid]
        threads = {
            "thread": np.array([t for t, _ in mine], dtype=np.int64),
            "name": self.names.map([name for _, name in mine]),
        }
        return {"processes": Table("processes", process), "threads": Table("threads", threads)}


def _forget_single_batches(recording: Recording) -> None:
    """A batch is one operation without `copyCount` (torch 2.11): how many copies it made is then unknown, not one."""
    calls = recording.calls
    unknown = (calls["kind"] == CallKind.BATCH) & (calls["count"] == 1)
    if unknown.any():
        count = np.where(unknown, 0, calls["count"])
        recording.tables["calls"] = Table("calls", {**calls.columns, "count": count})


def _channels(streams: dict[str, Array], executions: dict[str, Array]) -> None:
    """The hardware channel of each stream where all its operations name the same one."""
    channel = np.full(len(streams["handle"]), -1, dtype=np.int32)
    known = (executions["channel"] >= 0) & (executions["stream"] >= 0)
    if known.any():
        rows, values = executions["stream"][known], executions["channel"][known]
        low = np.full(len(channel), np.iinfo(np.int32).max, dtype=np.int64)
        np.minimum.at(low, rows, values)
        np.maximum.at(channel, rows, values.astype(np.int32))
        channel[channel != low] = -1
    streams["channel"] = channel


def _tool(head: _Head) -> str:
    return "PyTorch profiler (Kineto" + (f", CUPTI {head.cupti})" if head.cupti is not None else ")")


def _machine(head: _Head) -> tuple[dict[str, Any], dict[str, str]]:
    facts: dict[str, Any] = {}
    names = [
        device["name"] for device in head.devices if isinstance(device, dict) and isinstance(device.get("name"), str)
    ]
    if names:
        facts["gpu"], facts["gpu_count"] = str(names[0])[:200], len(names)
    for fact, version in (("cuda_runtime", head.runtime), ("cuda_driver", head.driver)):
        if isinstance(version, (int, str)) and str(version).isdigit() and len(str(version)) <= 6:
            facts[fact] = f"{int(version) // 1000}.{int(version) % 1000 // 10}"
    return facts, dict.fromkeys(facts, "PyTorch profiler trace")


def rank_of(path: Path) -> int:
    """The rank that a file's name states (`rank-3.`, `rank3_`), else -1."""
    match = re.search(r"rank[-_.]?(\d{1,7})(?!\d)", path.name)
    return int(match.group(1)) if match else -1


def _read_head(trace: TraceText) -> _Head:
    """What the document says beside its events; damaged parts count as absent."""
    after = b'{"_":0' + trace.after.rstrip() if trace.after.lstrip().startswith(b",") else b"{}"
    merged: dict[str, Any] = {}
    for text in (trace.before, after):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        except RecursionError:
            continue
        if isinstance(found, dict):
            merged.update(found)
    head = _Head(
        cupti=merged.get("cupti_version"),
        runtime=merged.get("cuda_runtime_version"),
        driver=merged.get("cuda_driver_version"),
    )
    devices, distributed, base = (
        merged.get(key) for key in ("deviceProperties", "distributedInfo", "baseTimeNanoseconds")
    )
    if isinstance(devices, list):
        head.devices = devices
    if isinstance(distributed, dict):
        head.distributed = distributed
    if isinstance(base, int) and -(1 << 62) < base < 1 << 62:
        head.base_ns = base
    return head


def _fallback() -> Decoder:
    from kvprobe.recordings.kineto_decode import Decoder

    return Decoder(words.KINETO_CODES)


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one trace.

    A document that ends early gives what was complete in it, with a note.

    Raises:
        RecordingError: no list of events, or nothing in it that can be read.
    """
    reader = _Reader(path, progress)
    notes: list[str] = []
    try:
        source = text_chunks(path, progress)
        trace = TraceText(read_ahead(source))
        trace.find_events()
        native = scanner(words.KINETO_CODES) or _fallback()
        trace.scan(lambda text, last: native.scan(text, lambda rows: reader.take_rows(native, rows), last))
        trace.read_after()
        reader.bad, reader.skipped = native.bad(), native.skipped()
        head = _read_head(trace)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from error
    except (OSError, EOFError) as error:
        raise RecordingError(f"{path}: cannot be read ({error})") from error
    incomplete = []
    if trace.cut_off:
        incomplete.append(f"{path.name} is cut off ({trace.cut_off}): read up to there")
    if reader.bad:
        incomplete.append(f"{reader.bad} events of {path.name} are damaged and were not read")
    notes += incomplete
    if reader.skipped:
        listing = ", ".join(f"{count} {name}" for name, count in sorted(reader.skipped.items()))
        notes.append(f"not read, because no cause needs them: {listing} events")
    recording = reader.recording(head, notes)
    recording.incomplete += incomplete
    if not any(recording.tables[kind].rows for kind in ("calls", "executions", "ranges", "labels")):
        if trace.cut_off or reader.bad:
            raise RecordingError(f"{path}: nothing could be read ({trace.cut_off or 'all events are damaged'})")
        notes.append("the trace has no CUDA calls, operations or ranges")
    if progress is not None:
        progress("reading events", 1.0)
    return recording
