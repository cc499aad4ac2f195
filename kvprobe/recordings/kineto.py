"""Reads PyTorch profiler (Kineto) traces, `.json` and `.json.gz`, as a stream: memory holds columns, not the document.

The text is cut into pieces between events of `traceEvents` and each piece is decoded by itself with only the wanted
fields typed. A cut is a guess that decoding proves: a piece that was cut elsewhere than between two events of the
array is no valid JSON. Decompression runs on a thread of its own.

Times are microseconds with decimals, since 1970 or since `baseTimeNanoseconds`; a float64 since 1970 has steps of
0.25 us, so those are read as integers.
"""

from __future__ import annotations

import gc
import json
import queue
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.recordings import vocabulary as words
from kvprobe.recordings.assemble import link, sorted_table, stream_rows
from kvprobe.recordings.model import Array, CallKind, Engine, RangeStyle, Recording, Source, Table

__all__ = ["read", "rank_of"]

Progress = Callable[[str, float], None]
_CHUNK = 1 << 19
_MOST_UNSPLIT = 1 << 26  # a single event, or what stands before the events, may not be longer
_MOST_TRIES = 64
_EXACT_BELOW_US = float(1 << 42)  # below, a float64 of microseconds is within half a nanosecond

_CALLS = {"cuda_runtime", "Runtime", "cuda_driver", "Driver"}
_EXECUTIONS = {
    "kernel": Engine.KERNEL,
    "Kernel": Engine.KERNEL,
    "gpu_memcpy": Engine.COPY,
    "Memcpy": Engine.COPY,
    "gpu_memset": Engine.MEMSET,
    "Memset": Engine.MEMSET,
}
_RANGES = {"cpu_op": RangeStyle.OPERATOR, "Operator": RangeStyle.OPERATOR, "user_annotation": RangeStyle.ANNOTATION}
_LABELS = {"overhead"}
# Calls that a Kineto does not know by name: (category is a driver's, CUPTI callback id) -> name.
# Runtime ids of CUDA 12.8 (482, 483) and 13.0 (509, 510), each with its per-thread-default-stream twin.
_CBIDS = {
    **dict.fromkeys((482, 483, 509, 510), "cudaMemcpyBatchAsync"),
    **dict.fromkeys((776, 777, 796, 797), "cuMemcpyBatchAsync"),
}


class _Args(msgspec.Struct, gc=False, frozen=True):
    correlation: int = -1
    stream: int = -1
    device: int = -1
    bytes: int = 0
    cbid: int = -1
    graph_node: int = msgspec.field(default=-1, name="graph node id")
    graph: int = msgspec.field(default=-1, name="graph id")
    channel: int = -1
    copies: int = msgspec.field(default=1, name="copyCount")


class _Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    ts: float
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    pid: int | str = -1
    dur: float = 0.0
    args: _Args = _Args()


class _CompleteExact(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    ts: msgspec.Raw
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    pid: int | str = -1
    dur: float = 0.0
    args: _Args = _Args()


class _MetaArgs(msgspec.Struct, gc=False):
    name: str = ""


class _Meta(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    args: _MetaArgs = msgspec.field(default_factory=_MetaArgs)


def _skipped(phase: str) -> type:
    return msgspec.defstruct(f"_Skip{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)


# Every other phase of the trace event format, read no further than its tag.
_SKIPPED = tuple(_skipped(phase) for phase in "sftiIBEbenNODPRcCSTpFvV(),=")


def _decoder(complete: type) -> msgspec.json.Decoder[Any]:
    union: Any = complete | _Meta
    for struct in _SKIPPED:
        union = union | struct
    return msgspec.json.Decoder(list[union])


class _Head(msgspec.Struct):
    """What stands beside the events."""

    device_properties: list[dict[str, Any]] = msgspec.field(default_factory=list, name="deviceProperties")
    distributed: dict[str, Any] = msgspec.field(default_factory=dict, name="distributedInfo")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    cupti: Any = msgspec.field(default=None, name="cupti_version")
    runtime: Any = msgspec.field(default=None, name="cuda_runtime_version")
    driver: Any = msgspec.field(default=None, name="cuda_driver_version")


def _text_chunks(path: Path, progress: Progress | None) -> Iterator[bytes]:
    """The document in pieces, unzipped where it is gzip by its first bytes (whatever it is called).

    The last piece of a truncated gzip file is followed by an EOFError.
    """
    size = max(path.stat().st_size, 1)
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        unzip = zlib.decompressobj(31)
        while raw := file.read(1 << 17 if zipped else _CHUNK):
            if progress is not None:
                progress("reading events", min(0.99, file.tell() / size))
            if not zipped:
                yield raw
                continue
            while raw:
                try:
                    text = unzip.decompress(raw, _CHUNK)
                except zlib.error as error:
                    raise EOFError(f"damaged gzip data: {error}") from error
                if text:
                    yield text
                raw = unzip.unconsumed_tail
                if unzip.eof:
                    raw = unzip.unused_data.lstrip(b"\0")  # another member, or padding
                    if raw and not raw.startswith(b"\x1f\x8b"):
                        return
                    unzip = zlib.decompressobj(31)
                    zipped_more = bool(raw)
                    if not zipped_more and not file.peek(1)[:1]:
                        return
        if zipped and not unzip.eof:
            raise EOFError("the gzip data ends in the middle")


def _ahead(source: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, made by a thread that runs a little ahead (zlib releases the interpreter lock)."""
    pieces: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=2)
    stopped = threading.Event()

    def hand(piece: bytes | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                pieces.put(piece, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for piece in source:
                if not hand(piece):
                    return
            hand(None)
        except BaseException as error:  # handed to the reader, who raises it
            hand(error)

    thread = threading.Thread(target=work, name="kvprobe-unzip", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        stopped.set()
        thread.join()


_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb'\}\s*(,)\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|id)"\s*:)')
_ANY_BOUNDARY = re.compile(rb"\}\s*(,)\s*(?=\{)")
_END = re.compile(rb"\}\s*(\])\s*(?:,\s*\"|\}|$)")
_LONG_DECIMAL = re.compile(rb'"ts"\s*:\s*\d{13,}\.')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{},]')


class _Pieces:
    """Cuts a trace into the text before its events, lists of events, and the text after them."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self.source = source
        self.ended = False
        self.cut_off = ""  # why the document ended early
        self.before = b""
        self.after = b""
        self.buffer = b""

    def _more(self) -> bool:
        if self.ended:
            return False
        try:
            piece = next(self.source, None)
        except EOFError as error:
            self.cut_off, piece = str(error), None
        if piece is None:
            self.ended = True
            return False
        self.buffer = self.buffer + piece if self.buffer else piece
        return True

    def find_events(self) -> None:
        """Reads up to the first event.

        Raises:
            RecordingError: there is no list of events.
        """
        self._more()
        self.buffer = self.buffer.removeprefix(b"\xef\xbb\xbf")
        searched = 0
        while True:
            start = self.buffer.lstrip()[:1]
            if start not in (b"{", b"["):
                raise RecordingError("no JSON" if start else "it is empty")
            if start == b"[":  # the trace event format's bare list
                self.buffer = self.buffer.lstrip()[1:]
                return
            match = _EVENTS_KEY.search(self.buffer, searched)
            if match:
                self.before, self.buffer = self.buffer[: match.end() - 1] + b"0}", self.buffer[match.end() :]
                return
            searched = max(0, len(self.buffer) - 64)
            if len(self.buffer) > _MOST_UNSPLIT or not self._more():
                raise RecordingError('JSON without a list "traceEvents": no PyTorch profiler trace')

    def lists(self, decode: Callable[[bytes], list[Any]]) -> Iterator[list[Any]]:
        """The events, in lists of what lay in one piece, decoded by `decode`."""
        while True:
            more = self._more()
            if not more:
                yield from self._last(decode)
                return
            # The newest boundary first: nearly always right, and proven by decoding.
            if len(self.buffer) < _CHUNK and not self.ended:
                continue
            tail = max(0, len(self.buffer) - (1 << 16))
            cuts = [m.start(1) for m in _BOUNDARY.finditer(self.buffer, tail)]
            if not cuts:
                cuts = [m.start(1) for m in _BOUNDARY.finditer(self.buffer)]
            for cut in reversed(cuts[-_MOST_TRIES:]):
                try:
                    events = decode(b"[" + self.buffer[:cut] + b"]")
                except msgspec.DecodeError:
                    continue
                self.buffer = self.buffer[cut + 1 :]
                yield events
                break
            else:
                boundary, end = self._scan()
                if boundary:
                    yield self._certain(decode, boundary)
                elif end is not None:
                    yield from self._finish(decode, end)
                    return
                elif len(self.buffer) > _MOST_UNSPLIT:
                    raise RecordingError(f"an event of more than {_MOST_UNSPLIT >> 20} MiB")

    def _certain(self, decode: Callable[[bytes], list[Any]], cut: int) -> list[Any]:
        text, self.buffer = self.buffer[:cut], self.buffer[cut + 1 :]
        try:
            return decode(b"[" + text + b"]")
        except msgspec.DecodeError:
            return one_by_one(text, decode)

    def _scan(self) -> tuple[int, int | None]:
        """Walks the buffer's tokens: where the last event boundary is (0 none), and where the list ends, if it does."""
        depth, boundary = 0, 0
        for match in _TOKEN.finditer(self.buffer):
            token = match.group()[:1]
            if token in (b"{", b"["):
                depth += 1
            elif token in (b"}", b"]"):
                depth -= 1
                if depth < 0:
                    return boundary, match.start()
            elif token == b"," and depth == 0:
                boundary = match.start()
        return boundary, None

    def _finish(self, decode: Callable[[bytes], list[Any]], end: int) -> Iterator[list[Any]]:
        text, self.after = self.buffer[:end], self.buffer[end + 1 :]
        self.buffer = b""
        try:
            yield decode(b"[" + text + b"]")
        except msgspec.DecodeError:
            yield one_by_one(text, decode)
        while not self.ended and len(self.after) < _MOST_UNSPLIT and self._more():
            self.after, self.buffer = self.after + self.buffer, b""

    def _last(self, decode: Callable[[bytes], list[Any]]) -> Iterator[list[Any]]:
        """The end of the document: the last events, and what follows their list."""
        boundary = 0
        for match in _BOUNDARY.finditer(self.buffer):
            boundary = match.start(1)
        for tries, match in enumerate(_END.finditer(self.buffer, boundary)):
            if tries == _MOST_TRIES:
                break
            try:
                events = decode(b"[" + self.buffer[: match.start(1)] + b"]")
            except msgspec.DecodeError:
                continue
            self.after = self.buffer[match.end(1) :]
            self.buffer = b""
            yield events
            return
        boundary, end = self._scan()
        if end is not None:
            yield from self._finish(decode, end)
            return
        self.cut_off = self.cut_off or "the document ends in the middle of its events"
        if boundary:
            yield self._certain(decode, boundary)


def one_by_one(text: bytes, decode: Callable[[bytes], list[Any]]) -> list[Any]:
    """Events of a piece that does not decode as a whole; those that do not fit are replaced by their error."""
    text = text.decode("utf-8", "replace").encode()
    try:
        return decode(b"[" + text + b"]")
    except msgspec.DecodeError:
        pass
    out: list[Any] = []
    depth, start = 0, 0
    for match in _TOKEN.finditer(text + b","):
        token = match.group()[:1]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif token == b"," and depth == 0:
            try:
                out += decode(b"[" + text[start : match.start()] + b"]")
            except msgspec.DecodeError as error:
                out.append(error)
            start = match.start() + 1
    return out


class _CallNames(dict[str, int]):
    """Name of a call as the trace has it -> index of its suffix-free name."""

    def __init__(self, names: words.Names) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, key: str) -> int:
        index = self[key] = self.names.add(words.base_name(key))
        return index


class _Numbers(dict[Any, int]):
    """Process or thread id as the trace has it -> number: 12, "12" and "stream 12" are 12, other text a hash."""

    def __missing__(self, key: Any) -> int:
        match = re.fullmatch(r"(?:stream )?(-?\d{1,18})", str(key))
        number = self[key] = int(match.group(1)) if match else zlib.crc32(str(key).encode())
        return number


def _integers(values: list[Any]) -> Array:
    """Ids as (len(values),) int64; what does not fit is -1."""
    try:
        return np.array(values, dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        return np.array([v if isinstance(v, int) and -(1 << 63) <= v < 1 << 63 else -1 for v in values], dtype=np.int64)


def _exact_ns(raws: list[msgspec.Raw]) -> Array:
    """Microseconds written in decimal -> integer nanoseconds, (len(raws),) int64, digit by digit."""
    text = b"\n".join(raws) + b"\n"
    width = len(text) // len(raws)
    if len(text) == width * len(raws) and 5 < width <= 20:
        digits = np.frombuffer(text, dtype=np.uint8).reshape(len(raws), width)
        points = width - 5
        decimal = digits[:, : width - 1] - np.uint8(48)
        if bool((digits[:, points] == 46).all() and (digits[:, -1] == 10).all()):
            decimal = np.delete(decimal, points, axis=1)
            if bool((decimal < 10).all()):
                powers = 10 ** np.arange(decimal.shape[1] - 1, -1, -1, dtype=np.int64)
                return cast(Array, (decimal.astype(np.int64) * powers).sum(axis=1))
    return np.array([_decimal_ns(bytes(raw)) for raw in raws], dtype=np.int64)


def _decimal_ns(text: bytes) -> int:
    """One decimal number of microseconds in nanoseconds; 0 where it is none or out of range."""
    match = re.fullmatch(rb"(-?)(\d{1,16})(?:\.(\d+))?", text)
    if match is None:
        try:
            value = float(text)
        except ValueError:
            return 0
        return round(value * 1000) if abs(value) < 9e15 else 0
    sign, whole, decimals = match.groups()
    ns = int(whole) * 1000 + int((decimals or b"")[:3].ljust(3, b"0") or 0)
    if ns >= 1 << 63:
        return 0
    return -ns if sign else ns


class _Columns:
    """Columns that grow by pieces."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Array]] = {}

    def add(self, **columns: Array) -> None:
        for name, column in columns.items():
            self.parts.setdefault(name, []).append(column)

    def take(self) -> dict[str, Array]:
        """All rows, freeing the pieces column by column."""
        return {name: np.concatenate(self.parts.pop(name)) for name in list(self.parts)}


class _Reader:
    """Collects what the events of one file say."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path, self.progress = path, progress
        self.names = words.Names()
        self.call_names = _CallNames(self.names)
        self.numbers = _Numbers()
        self.calls, self.executions, self.ranges, self.labels = _Columns(), _Columns(), _Columns(), _Columns()
        self.exact = False
        self.skipped: dict[str, int] = {}
        self.bad = 0
        self.call_pids: dict[Any, int] = {}
        self.process_names: dict[int, str] = {}
        self.thread_names: dict[tuple[int, int], str] = {}
        self.fast, self.slow = _decoder(_Complete), _decoder(_CompleteExact)

    def decode(self, text: bytes) -> list[Any]:
        """Decodes a list of events, with exact times where a float64 would lose nanoseconds."""
        if not self.exact:
            try:
                events = self.fast.decode(text)
            except UnicodeDecodeError as error:
                raise msgspec.DecodeError(str(error)) from error
            if not (_is_late(events) and _LONG_DECIMAL.search(text)):
                return events  # type: ignore[no-any-return]
            self.exact = True
        try:
            return self.slow.decode(text)  # type: ignore[no-any-return]
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(str(error)) from error

    def take(self, events: list[Any]) -> None:
        """Files the events of one piece under their tables."""
        groups: dict[str, list[Any]] = {}
        complete = _CompleteExact if self.exact else _Complete
        for event in events:
            if type(event) is complete:
                try:
                    groups[event.cat].append(event)
                except KeyError:
                    groups[event.cat] = [event]
            elif type(event) is _Meta:
                self.meta(event)
            elif isinstance(event, (_Complete, _CompleteExact)):
                groups.setdefault(event.cat, []).append(event)
            elif isinstance(event, Exception):
                self.bad += 1
        for category, group in groups.items():
            if category in _RANGES:
                self.take_ranges(group, _RANGES[category])
            elif category in _CALLS:
                self.take_calls(group)
            elif category in _EXECUTIONS:
                self.take_executions(group, _EXECUTIONS[category])
            elif category in _LABELS:
                self.take_labels(group)
            else:
                key = category[:40] or "uncategorised"
                if key in self.skipped or len(self.skipped) < 20:
                    self.skipped[key] = self.skipped.get(key, 0) + len(group)

    def times(self, group: list[Any]) -> tuple[Array, Array]:
        """Start and end of events, (len(group),) int64 nanoseconds each."""
        if type(group[0]) is _CompleteExact:
            start = _exact_ns([event.ts for event in group])
        else:
            start = _to_ns(np.array([event.ts for event in group], dtype=np.float64))
        dur = _to_ns(np.array([event.dur for event in group], dtype=np.float64))
        return start, start + np.maximum(dur, 0)

    def threads(self, group: list[Any]) -> Array:
        values = [event.tid for event in group]
        try:
            return np.fromiter(values, dtype=np.int64, count=len(values))
        except (TypeError, ValueError, OverflowError):
            numbers = self.numbers
            return np.fromiter((numbers[v] for v in values), dtype=np.int64, count=len(values))

    def take_calls(self, group: list[Any]) -> None:
        start, end = self.times(group)
        names = self.call_names
        name = np.array([names[event.name] for event in group], dtype=np.int32)
        if "INVALID" in names:
            for i in np.flatnonzero(name == names["INVALID"]):
                cbid = group[i].args.cbid
                name[i] = names[_CBIDS.get(cbid, f"INVALID (cbid {cbid})")]
        for event in (group[0], group[-1]):
            self.call_pids[event.pid] = self.call_pids.get(event.pid, 0) + len(group)
        self.calls.add(
            start_ns=start,
            end_ns=end,
            thread=self.threads(group),
            name=name,
            correlation=_integers([event.args.correlation for event in group]),
        )

    def take_executions(self, group: list[Any], engine: Engine) -> None:
        start, end = self.times(group)
        index = self.names.index
        n = len(group)
        args = [event.args for event in group]
        graph = _integers([a.graph_node if a.graph_node > 0 else a.graph if a.graph > 0 else -1 for a in args])
        self.executions.add(
            start_ns=start,
            end_ns=end,
            name=np.array([index[event.name] for event in group], dtype=np.int32),
            engine=np.full(n, engine, dtype=np.uint8),
            device=_integers([a.device for a in args]),
            handle=_integers([a.stream for a in args]),
            correlation=_integers([a.correlation for a in args]),
            bytes=_integers([a.bytes for a in args]) if engine != Engine.KERNEL else np.zeros(n, np.int64),
            count=_integers([a.copies for a in args]) if engine == Engine.COPY else np.zeros(n, np.int64),
            channel=_integers([a.channel for a in args]),
            graph=graph,
        )

    def take_ranges(self, group: list[Any], style: RangeStyle) -> None:
        start, end = self.times(group)
        index = self.names.index
        self.ranges.add(
            start_ns=start,
            end_ns=end,
            thread=self.threads(group),
            name=np.array([index[event.name] for event in group], dtype=np.int32),
            style=np.full(len(group), style, dtype=np.uint8),
        )

    def take_labels(self, group: list[Any]) -> None:
        start, end = self.times(group)
        self.labels.add(
            start_ns=start,
            end_ns=end,
            label=np.array([words.label_of(event.name) for event in group], dtype=np.uint8),
            name=self.names.map([event.name for event in group]),
        )

    def meta(self, event: _Meta) -> None:
        if len(self.thread_names) > 100_000:
            return
        if event.name == "process_name":
            self.process_names[self.numbers[event.pid]] = event.args.name
        elif event.name == "thread_name":
            self.thread_names[self.numbers[event.pid], self.numbers[event.tid]] = event.args.name

    def recording(self, head: _Head, notes: list[str]) -> Recording:
        """The tables of everything that was taken."""
        calls, executions, ranges, labels = (c.take() for c in (self.calls, self.executions, self.ranges, self.labels))
        base = head.base_ns
        for columns in (calls, executions, ranges, labels):
            if base and columns:
                columns["start_ns"] += base
                columns["end_ns"] += base
        if calls:
            kinds = np.array([words.call_kind(name) for name in self.names.list], dtype=np.uint8)
            directions = np.array([words.call_direction(name) for name in self.names.list], dtype=np.uint8)
            calls["kind"], calls["direction"] = kinds[calls["name"]], directions[calls["name"]]
            calls["count"] = np.isin(calls["kind"], (CallKind.COPY, CallKind.COPY_SYNC)).astype(np.int32)
        streams: dict[str, Array] = {}
        if executions:
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
        for columns in (calls, executions, ranges, labels):
            if columns:
                columns["process"] = np.broadcast_to(np.int32(0), (len(columns["start_ns"]),))
        pid = self.numbers[max(self.call_pids, key=lambda p: self.call_pids[p])] if self.call_pids else -1
        tables = {
            kind: sorted_table(kind, columns)
            for kind, columns in (("calls", calls), ("executions", executions), ("ranges", ranges), ("labels", labels))
        }
        del calls, executions, ranges, labels
        tables["streams"] = Table("streams", streams)
        spans = [
            t
            for kind in ("calls", "executions", "ranges")
            if tables[kind].rows
            for t in (int(tables[kind]["start_ns"][0]), int(tables[kind]["end_ns"].max()))
        ]
        rank = head.distributed.get("rank")
        rank = rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else rank_of(self.path)
        tables["processes"] = Table(
            "processes",
            {
                "pid": np.array([pid]),
                "rank": np.array([rank]),
                "name": self.names.map([self.process_names.get(pid, "")]),
                "start_ns": np.array([min(spans, default=0)]),
                "end_ns": np.array([max(spans, default=0)]),
            },
        )
        threads = [(tid, name) for (owner, tid), name in self.thread_names.items() if owner == pid]
        tables["threads"] = Table(
            "threads",
            {
                "thread": np.array([t for t, _ in threads], dtype=np.int64),
                "name": self.names.map([name for _, name in threads]),
            },
        )
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
        return recording


def _is_late(events: list[Any]) -> bool:
    """True where times are so large that a float64 of microseconds cannot hold nanoseconds."""
    return any(type(event) is _Complete and abs(event.ts) >= _EXACT_BELOW_US for event in events)


def _to_ns(us: Array) -> Array:
    """Microseconds (float64) -> integer nanoseconds; what no clock shows becomes 0."""
    us = np.where(np.abs(us) < 9.2e15, us, 0.0)
    whole = np.floor(us)
    # In two parts: whole microseconds since 1970 are exact in a float64, their nanoseconds are not.
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000.0).astype(np.int64)


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
    names = [device.get("name") for device in head.device_properties if isinstance(device.get("name"), str)]
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


def _read_head(pieces: _Pieces) -> _Head:
    """What the document says beside its events; damaged parts count as absent."""
    after = b'{"_":0' + pieces.after.rstrip() if pieces.after.lstrip().startswith(b",") else b"{}"
    merged: dict[str, Any] = {}
    for text in (pieces.before, after):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        except RecursionError:
            continue
        if isinstance(found, dict):
            merged.update(found)
    head = _Head()
    for field in msgspec.structs.fields(_Head):
        if field.encode_name in merged:
            try:
                setattr(head, field.name, msgspec.convert(merged[field.encode_name], field.type))
            except msgspec.ValidationError:
                continue
    if not -(1 << 62) < head.base_ns < 1 << 62:
        head.base_ns = 0
    return head


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one trace.

    A document that ends early gives what was complete in it, with a note.

    Raises:
        RecordingError: no list of events, or nothing in it that can be read.
    """
    reader = _Reader(path, progress)
    notes: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # pieces are large lists of objects without cycles
    try:
        source = _text_chunks(path, progress)
        pieces = _Pieces(_ahead(source))
        pieces.find_events()
        for events in pieces.lists(reader.decode):
            reader.take(events)
        head = _read_head(pieces)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from error
    except (OSError, EOFError) as error:
        raise RecordingError(f"{path}: cannot be read ({error})") from error
    finally:
        if collecting:
            gc.enable()
    if pieces.cut_off:
        notes.append(f"{path.name} is cut off ({pieces.cut_off}): read up to there")
    if reader.bad:
        notes.append(f"{reader.bad} events of {path.name} are damaged and were not read")
    if reader.skipped:
        listing = ", ".join(f"{count} {name}" for name, count in sorted(reader.skipped.items()))
        notes.append(f"not read, as no cause is looked for in them: {listing} events")
    recording = reader.recording(head, notes)
    if not any(recording.tables[kind].rows for kind in ("calls", "executions", "ranges", "labels")):
        if pieces.cut_off or reader.bad:
            raise RecordingError(f"{path}: nothing could be read ({pieces.cut_off or 'all events are damaged'})")
        notes.append("the trace has no CUDA calls, operations or ranges")
    if progress is not None:
        progress("reading events", 1.0)
    return recording
