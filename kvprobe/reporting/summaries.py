"""Summary tables of a recording, with the columns, the rounding and the order that `nsys stats` prints.

What is known of Nsight Systems' conventions, from its documented columns and its published output: standard deviation
is the sample's (n - 1) and 0.0 for one value; the median of an even number is the mean of the middle two; times have
one decimal, sizes are in MB of 10^6 bytes with three; rows are ordered by total, largest first; a range is printed as
"domain:text", its default domain as ":text". Calls are printed here without version suffixes, all versions of a call
in one row, where Nsight Systems prints newer ones with theirs ("cudaLaunchKernelExC_v11060").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.account import account_of
from kvprobe.account.expert_gains import expert_gains
from kvprobe.output.recorded import TableJson
from kvprobe.recordings.assemble import among
from kvprobe.recordings.descriptors import copies_by_stream, has_addresses
from kvprobe.recordings.experts import expert_uploads
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, RangeStyle, Recording
from kvprobe.reporting import experts, series, streams
from kvprobe.reporting.units import NONE, size_text

__all__ = ["REPORTS", "SummaryTable", "summary"]

Array = npt.NDArray[Any]

# Kind of a column -> text of a value, as in CSV; a terminal adds thousands separators.
_OPERATIONS = {
    Direction.H2D: "Host-to-Device",
    Direction.D2H: "Device-to-Host",
    Direction.D2D: "Device-to-Device",
    Direction.H2H: "Host-to-Host",
    Direction.UNKNOWN: "Unknown",
}


@dataclass(frozen=True)
class SummaryTable:
    """One table.

    Attributes:
        report: its name ("cuda_api_sum").
        title: for a heading.
        columns: (heading, kind) with kind "share", "ns", "ns1", "count", "mb" or "text".
        rows: values; a NaN is not known.
        note: what a reader must know; may be empty.
    """

    report: str
    title: str
    columns: Sequence[tuple[str, str]]
    rows: list[list[Any]]
    note: str = ""

    def text(self, row: Sequence[Any], separator: str = "") -> list[str]:
        """The row as text, for a person with a `separator` between thousands: a dash is what is not known."""
        return [_text(kind, value, separator) for (_, kind), value in zip(self.columns, row, strict=True)]

    def to_json(self, limit: int = 0) -> TableJson:
        """The table as JSON types, numbers unrounded, a key for each column; at most `limit` rows, 0: all."""
        keys = [_key(name) for name, _ in self.columns]
        shown = self.rows[: limit or None]
        known = [[None if isinstance(v, float) and math.isnan(v) else v for v in row] for row in shown]
        rows = [dict(zip(keys, row, strict=True)) for row in known]
        return {"title": self.title, "rows": rows, "left_out": len(self.rows) - len(shown), "note": self.note}


def _key(name: str) -> str:
    for old, new in (("(%)", "percent"), ("(ns)", "ns"), ("(MB)", "mb")):
        name = name.replace(old, new)
    return name.strip().lower().replace(" ", "_")


def _text(kind: str, value: Any, separator: str) -> str:
    if kind == "text":
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return NONE if separator else ""
    if kind in ("share", "ns1"):
        # An average that ends in 5 is common (a sum over four calls); it is rounded away from zero as SQLite does.
        rounded = Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP)
        return f"{rounded:,}" if separator else f"{rounded}"
    if kind == "mb":
        return f"{value / 1e6:,.3f}" if separator else f"{value / 1e6:.3f}"
    return f"{int(value):,}" if separator else f"{int(value)}"


TIMES = [("Avg (ns)", "ns1"), ("Med (ns)", "ns1"), ("Min (ns)", "ns"), ("Max (ns)", "ns"), ("StdDev (ns)", "ns1")]
SIZES = [("Avg (MB)", "mb"), ("Med (MB)", "mb"), ("Min (MB)", "mb"), ("Max (MB)", "mb"), ("StdDev (MB)", "mb")]


def _grouped(key: Array, value: Array) -> list[tuple[int, int, int, float, float, int, int, float]]:
    """(key, total, count, average, median, least, most, deviation) of each key, largest total first."""
    if not len(key):
        return []
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    out = []
    for one, part in zip(keys.tolist(), np.split(value[order], first[1:]), strict=True):
        total, count = int(part.sum(dtype=np.int64)), len(part)
        deviation = float(np.std(part.astype(np.float64), ddof=1)) if count > 1 else 0.0
        out.append(
            (one, total, count, total / count, float(np.median(part)), int(part.min()), int(part.max()), deviation)
        )
    return sorted(out, key=lambda row: -row[1])


def _shares(rows: list[tuple[int, int, int, float, float, int, int, float]]) -> list[float]:
    whole = sum(row[1] for row in rows) or 1
    return [row[1] * 100.0 / whole for row in rows]


def api_sum(recording: Recording) -> SummaryTable:
    """Host-side calls by name."""
    calls, totals = recording.calls, recording.totals
    columns = [("Time (%)", "share"), ("Total Time (ns)", "ns"), ("Num Calls", "count"), *TIMES, ("Name", "text")]
    if calls.rows >= int(totals["calls"].sum()):
        rows = _grouped(calls["name"], calls["end_ns"] - calls["start_ns"])
        named = [[share, *row[1:], recording.text(row[0])] for share, row in zip(_shares(rows), rows, strict=True)]
        return SummaryTable("cuda_api_sum", "CUDA API summary", columns, named)
    listed: list[list[Any]] = []
    whole, untimed = int(totals["dur_ns"].sum()) or 1, 0
    for name in np.unique(totals["name"]).tolist():
        mine = totals["name"] == name
        total, count = int(totals["dur_ns"][mine].sum()), int(totals["calls"][mine].sum())
        counts = recording.histograms[mine].sum(axis=0)
        # calls that found no slot are in no histogram, their time is in the total
        single, loose = int(counts.sum()), mine & (totals["dur_ns"] > 0) & ~recording.histograms.any(axis=1)
        timed = single + int(totals["calls"][loose].sum())
        if single:
            half, least = np.searchsorted(np.cumsum(counts), (max(single / 2, 1), 1))
            floors = [float(series.bucket_floor_ns(int(bucket))) for bucket in (half, least)]
            times = [total * 100.0 / whole, total, count, total / timed, *floors, int(totals["max_ns"][mine].max())]
        elif timed:
            times = [total * 100.0 / whole, total, count, total / timed, math.nan, math.nan, math.nan]
        else:
            times = [math.nan, math.nan, count, math.nan, math.nan, math.nan, math.nan]
        untimed += count - timed
        listed.append([*times, math.nan, recording.text(name)])
    listed.sort(key=lambda row: (math.isnan(row[1]), -row[1], -row[2]))
    note = "Totals, counts, averages and maxima are exact; medians and minima are read from histograms, up to 20% low."
    if untimed:
        note += f" {untimed:,} calls were counted, but not timed: times are of the others."
    return SummaryTable("cuda_api_sum", "CUDA API summary", columns, listed, note)


def _operations(recording: Recording) -> tuple[Array, Array, Array, list[str]]:
    """Durations, bytes and operation of the device's copies and memsets, and the operations' names."""
    table = recording.executions
    mine = np.flatnonzero((table["engine"] == Engine.COPY) | (table["engine"] == Engine.MEMSET))
    names: list[str] = []
    index: dict[str, int] = {}
    code = table["engine"][mine].astype(np.int64) << 40 | table["direction"][mine].astype(np.int64) << 32
    distinct, inverse = np.unique(code | table["name"][mine], return_inverse=True)
    operation = np.zeros(len(distinct), dtype=np.int64)
    for i, one in enumerate(distinct.tolist()):
        text = recording.text(one & 0xFFFFFFFF)
        if one >> 40 == Engine.MEMSET:
            name = "[CUDA memset]"
        elif text.startswith("memcpy "):  # the recorder's own words know peers and unified memory apart
            name = f"[CUDA {text}]"
        else:
            name = f"[CUDA memcpy {_OPERATIONS[Direction(one >> 32 & 0xFF)]}]"
        operation[i] = index.setdefault(name, len(index))
        if len(names) < len(index):
            names.append(name)
    chosen = operation[inverse] if len(distinct) else operation
    return (table["end_ns"] - table["start_ns"])[mine], table["bytes"][mine], chosen, names


def mem_time_sum(recording: Recording) -> SummaryTable:
    """Device copies and memsets by time."""
    durations, _, operation, names = _operations(recording)
    rows = _grouped(operation, durations)
    listed = [[share, *row[1:], names[row[0]]] for share, row in zip(_shares(rows), rows, strict=True)]
    columns = [("Time (%)", "share"), ("Total Time (ns)", "ns"), ("Count", "count"), *TIMES, ("Operation", "text")]
    return SummaryTable(
        "cuda_gpu_mem_time_sum", "CUDA GPU MemOps summary (by time)", columns, listed, _blind(recording)
    )


def mem_size_sum(recording: Recording) -> SummaryTable:
    """Device copies and memsets by size."""
    _, size, operation, names = _operations(recording)
    listed = [[*row[1:], names[row[0]]] for row in _grouped(operation, size)]
    columns = [("Total (MB)", "mb"), ("Count", "count"), *SIZES, ("Operation", "text")]
    return SummaryTable(
        "cuda_gpu_mem_size_sum", "CUDA GPU MemOps summary (by size)", columns, listed, _blind(recording)
    )


def kern_sum(recording: Recording) -> SummaryTable:
    """Kernels by name."""
    table = recording.executions
    mine = np.flatnonzero(table["engine"] == Engine.KERNEL)
    rows = _grouped(table["name"][mine], (table["end_ns"] - table["start_ns"])[mine])
    listed = [[share, *row[1:], recording.text(row[0])] for share, row in zip(_shares(rows), rows, strict=True)]
    columns = [("Time (%)", "share"), ("Total Time (ns)", "ns"), ("Instances", "count"), *TIMES, ("Name", "text")]
    return SummaryTable("cuda_gpu_kern_sum", "CUDA GPU kernel summary", columns, listed, _blind(recording))


def _blind(recording: Recording) -> str:
    return "" if recording.has_executions else "The recorder did not record the device."


_STYLES = {
    RangeStyle.PUSH_POP: "PushPop",
    RangeStyle.START_END: "StartEnd",
    RangeStyle.OPERATOR: "Operator",
    RangeStyle.ANNOTATION: "Annotation",
}


def nvtx_sum(recording: Recording) -> SummaryTable:
    """Ranges by domain, text and style."""
    table = recording.ranges
    width = max(len(recording.names), 1)
    key = (table["style"].astype(np.int64) * width + table["domain"]) * width + table["name"]
    rows = _grouped(key, table["end_ns"] - table["start_ns"])
    listed = []
    for share, row in zip(_shares(rows), rows, strict=True):
        style, rest = divmod(row[0], width * width)
        domain, name = divmod(rest, width)
        label = recording.text(name)
        if style in (RangeStyle.PUSH_POP, RangeStyle.START_END):
            label = f"{recording.text(domain)}:{label}"
        listed.append([share, *row[1:], _STYLES.get(RangeStyle(style), ""), label])
    columns = [
        ("Time (%)", "share"),
        ("Total Time (ns)", "ns"),
        ("Instances", "count"),
        *TIMES,
        ("Style", "text"),
        ("Range", "text"),
    ]
    return SummaryTable("nvtx_sum", "NVTX range summary", columns, listed)


def stream_sum(recording: Recording) -> SummaryTable:
    """Submitting calls by stream."""
    calls = recording.calls
    kinds = np.array([CallKind.COPY, CallKind.BATCH, CallKind.MEMSET, CallKind.LAUNCH, CallKind.GRAPH], dtype=np.uint8)
    mine = np.flatnonzero(among(calls["kind"], kinds))
    rows = _grouped(calls["stream"][mine], (calls["end_ns"] - calls["start_ns"])[mine])
    listed = [
        [share, *row[1:], streams.stream_name(recording, row[0]) if row[0] >= 0 else "unknown"]
        for share, row in zip(_shares(rows), rows, strict=True)
    ]
    columns = [("Time (%)", "share"), ("Total Time (ns)", "ns"), ("Num Calls", "count"), *TIMES, ("Stream", "text")]
    return SummaryTable("streams", "Submissions by stream (host time)", columns, listed)


def size_sum(recording: Recording) -> SummaryTable:
    """Copies by size, a row for each power of two and operation."""
    _, size, operation, names = _operations(recording)
    copies = np.array([name != "[CUDA memset]" for name in names], dtype=bool)
    keep = copies[operation] if len(names) else np.zeros(0, dtype=bool)
    size, operation = size[keep], operation[keep]
    power = np.frexp(np.maximum(size, 0).astype(np.float64))[1].astype(np.int64)
    listed = []
    for key in np.unique(power * 64 + operation).tolist():
        mine = power * 64 + operation == key
        low = 1 << (key // 64 - 1) if key // 64 else 0
        text = f"{size_text(low)} to {size_text(max(low, 1) * 2)}".replace("\u00a0", " ") if low else "0 B"
        listed.append([text, int(mine.sum()), int(size[mine].sum()), names[key % 64]])
    columns = [("Size", "text"), ("Count", "count"), ("Total (MB)", "mb"), ("Operation", "text")]
    note = _blind(recording) or "KiB and MiB count in 1,024s, MB in 1,000s."
    return SummaryTable("sizes", "Copies by size", columns, listed, note)


def descriptor_sum(recording: Recording) -> SummaryTable:
    """Copies by stream and direction: their descriptors, and what merging neighbours would save."""
    found = copies_by_stream(recording)
    whole = sum(one.host_ns for one in found) or 1
    listed: list[list[Any]] = []
    for one in found:
        known = [math.nan if count < 0 else count for count in (one.descriptors, *one.sizes, one.bursts, one.runs)]
        name = streams.stream_name(recording, one.stream) if one.stream >= 0 else "unknown"
        saved = one.saved_ns if one.runs >= 0 else math.nan
        times = [one.host_ns * 100.0 / whole, one.host_ns, one.calls, one.call_ns]
        listed.append(
            [*times, *known, saved, _OPERATIONS[one.direction], f"{name}, in batches" if one.batches else name]
        )
    columns = [
        ("Time (%)", "share"),
        ("Total Time (ns)", "ns"),
        ("Num Calls", "count"),
        ("Med (ns)", "ns1"),
        ("Copies", "count"),
        *((f"{which} Bytes", "count") for which in ("P10", "Med", "P90", "Max")),
        ("Bursts", "count"),
        ("Runs", "count"),
        ("Merging Saves (ns)", "ns"),
        ("Operation", "text"),
        ("Stream", "text"),
    ]
    note = "" if has_addresses(recording) else "The recorder does not tell the addresses of copies: runs are not known."
    return SummaryTable("descriptors", "Copies by stream and direction (host time)", columns, listed, note)


def tier_sum(recording: Recording) -> SummaryTable:
    """Reads and writes below CPU memory, of 16 KiB and more: a row for each place and direction."""
    tiers = recording.tiers
    listed: list[list[Any]] = []
    for row in range(tiers.rows):
        kind, path = (recording.text(int(tiers[name][row])) for name in ("kind", "path"))
        port = int(tiers["port"][row])
        place = path or (f"{kind}, port {port}" if port else kind) or "unknown"
        system = ", ".join(
            part
            for part in (recording.text(int(tiers["filesystem"][row])), "O_DIRECT" * int(tiers["direct"][row]))
            if part
        )
        for what in ("read", "write"):
            calls, moved, took = (int(tiers[f"{what}{end}"][row]) for end in ("s", "_bytes", "_ns"))
            if calls:
                listed.append([took, calls, moved, moved / took * 1e3 if took else math.nan, what, place, system])
    listed.sort(key=lambda one: -one[0])
    columns = [
        ("Total Time (ns)", "ns"),
        ("Num Calls", "count"),
        ("Total (MB)", "mb"),
        ("MB/s in Calls", "ns1"),
        ("Operation", "text"),
        ("Place", "text"),
        ("File System", "text"),
    ]
    unended = bool(recording.tier_operations["unended"].any())
    note = "Where operations went on after their call, as of libaio and io_uring, the time is the call's own." * unended
    return SummaryTable("tiers", "Reads and writes below CPU memory", columns, listed, note)


def expert_sum(recording: Recording) -> SummaryTable:
    """Uploads of experts that lie in CPU memory: a row for each tensor."""
    found = expert_uploads(recording)
    rows = []
    for uploads in found:
        for number, one in enumerate(uploads.tensors):
            mine = uploads.tensor == number
            again, moved = int((uploads.again & mine).sum()), int(uploads.bytes[mine].sum())
            place = streams.process_name(recording, uploads.process)
            counts = [one.different, one.visits, one.typical, one.uploads, again, moved, one.whole]
            rows.append([place, experts.tensor_name(one), one.expert_bytes, *counts])
    columns = [("Process", "text"), ("Tensor", "text"), ("Expert bytes", "count"), ("Different", "count")]
    columns += [("Steps", "count"), ("A step", "count"), ("Uploads", "count"), ("Again", "count")]
    columns += [("Bytes", "count"), ("Whole tensor", "count")]
    return SummaryTable("experts", "Uploads of experts", columns, rows)


def expert_change_sum(recording: Recording) -> SummaryTable:
    """What would reduce uploads of experts, and how much: never more than what was not computing."""
    found = expert_uploads(recording)
    rows, notes = [], list[str]()
    account = account_of(Joined(recording)) if found else None
    for uploads in found:
        assert account is not None
        place = streams.process_name(recording, uploads.process)
        gains = expert_gains(recording, account, uploads)
        notes.append(experts.scaled(gains))
        for one in gains.changes:
            saved = math.nan if one.saved_ns is None else one.saved_ns
            rows.append([place, one.what, one.count, one.bytes, one.kept, one.kept_bytes, saved])
    columns = [("Process", "text"), ("Change", "text"), ("Count", "count"), ("Bytes held", "count")]
    columns += [("Uploads saved", "count"), ("Bytes saved", "count"), ("Time saved (ns)", "ns")]
    note = " ".join(filter(None, notes))
    return SummaryTable("expert_changes", "What would reduce uploads of experts", columns, rows, note)


REPORTS: dict[str, Callable[[Recording], SummaryTable]] = {
    "cuda_api_sum": api_sum,
    "cuda_gpu_kern_sum": kern_sum,
    "cuda_gpu_mem_time_sum": mem_time_sum,
    "cuda_gpu_mem_size_sum": mem_size_sum,
    "nvtx_sum": nvtx_sum,
    "streams": stream_sum,
    "sizes": size_sum,
    "descriptors": descriptor_sum,
    "tiers": tier_sum,
    "experts": expert_sum,
    "expert_changes": expert_change_sum,
}


def summary(recording: Recording, report: str) -> SummaryTable:
    """One table by its name, a key of REPORTS."""
    return REPORTS[report](recording)
