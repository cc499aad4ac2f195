"""Who did it: tables and charts by stream, thread and process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.model import Engine, Recording
from kvprobe.reporting import charts
from kvprobe.reporting.charts import Mark
from kvprobe.reporting.units import NONE, bytes_text, duration, percent
from kvprobe.reporting.views import Chart, TableView, table

if TYPE_CHECKING:
    from kvprobe.reporting.recorded import Submissions

__all__ = ["occupancy_charts", "process_name", "processes", "stream_name", "stream_table", "thread_table"]

Array = npt.NDArray[Any]


def stream_name(recording: Recording, row: int) -> str:
    """A stream as people call it: its name, else its handle; streams of several processes say whose they are."""
    streams = recording.streams
    if not 0 <= row < streams.rows:
        return "unknown stream"
    name = recording.text(int(streams["name"][row])) or f"{int(streams['handle'][row]):#x}"
    name = name if "stream" in name.lower() else f"stream {name}"
    return (
        f"{name} of {process_name(recording, int(streams['process'][row]))}" if recording.processes.rows > 1 else name
    )


def process_name(recording: Recording, row: int) -> str:
    """A process: its rank where it has one, else its pid."""
    processes = recording.processes
    if not 0 <= row < processes.rows:
        return "process" if row < 0 else f"process {row}"
    rank, pid = int(processes["rank"][row]), int(processes["pid"][row])
    return f"rank {rank}" if rank >= 0 else f"process {pid}"


def _groups(key: Array) -> tuple[Array, Array, Array]:
    """Order, first index of each group and the groups' keys."""
    order = np.argsort(key, kind="stable")
    found, first = np.unique(key[order], return_index=True)
    return order, first, found


def _sums(found: Submissions, key: Array) -> list[tuple[int, Array, float, float, float, float]]:
    """(key, calls' positions, sum, median, p99, longest) of each group, most time first."""
    if not len(key):
        return []
    order, first, keys = _groups(key)
    out = []
    for value, part in zip(keys.tolist(), np.split(order, first[1:]), strict=True):
        durations = found.dur_ns[part]
        half, high, top = charts.quantiles(durations, 0.5, 0.99, 1.0)
        out.append((int(value), part, float(durations.sum()), half, high, top))
    return sorted(out, key=lambda one: -one[2])


def _timed(times: Sequence[float], span_ns: float) -> list[Any]:
    total, half, high, top = times
    return [
        (duration(total), total),
        (percent(total / span_ns), total / span_ns),
        (duration(half), half),
        (duration(high), high),
        (duration(top), top),
    ]


TIMED = ["Host time", "Of recorded", "Median", "p99", "Longest"]


def stream_table(recording: Recording, found: Submissions) -> tuple[TableView, str]:
    """Submissions by stream, with the device's side where the recorder saw it."""
    calls = recording.calls
    span_ns = found.span[1] - found.span[0]
    busy: dict[int, float] = {}
    moved: dict[int, float] = {}
    executions = recording.executions
    if executions.rows:
        known = executions["stream"] >= 0
        stream = executions["stream"][known]
        spent = np.bincount(stream, weights=(executions["end_ns"] - executions["start_ns"])[known])
        copied = np.where(executions["engine"] == Engine.COPY, executions["bytes"], 0)[known]
        total = np.bincount(stream, weights=copied)
        busy, moved = dict(enumerate(spent.tolist())), dict(enumerate(total.tolist()))
    rows: list[list[Any]] = []
    for row, part, *times in _sums(found, calls["stream"][found.rows])[:200]:
        payload = moved.get(row) or float(calls["bytes"][found.rows[part]].sum())
        name = stream_name(recording, row) if row >= 0 else "unknown"
        channel = int(recording.streams["channel"][row]) if 0 <= row < recording.streams.rows else -1
        rows.append(
            [
                name,
                (str(channel) if channel >= 0 else NONE, channel),
                (f"{len(part):,}", len(part)),
                *_timed(times, span_ns),
                (bytes_text(payload), payload),
                (percent(busy.get(row, 0) / span_ns) if busy else NONE, busy.get(row, 0)),
            ]
        )
    lead = "" if recording.has_executions else "The recorder did not see the device, so device time is not known."
    return table("Submissions by stream", ["Stream", "Channel", "Calls", *TIMED, "Bytes", "Device busy"], rows), lead


def thread_table(recording: Recording, found: Submissions) -> TableView:
    """Submissions by thread: who paid."""
    calls = recording.calls
    span_ns = found.span[1] - found.span[0]
    process = calls["process"][found.rows].astype(np.int64)
    threads, code = np.unique(calls["thread"][found.rows], return_inverse=True)
    rows = []
    for key, part, *times in _sums(found, process * max(len(threads), 1) + code)[:200]:
        rows.append(
            [
                process_name(recording, key // max(len(threads), 1)),
                str(int(threads[key % len(threads)])),
                (f"{len(part):,}", len(part)),
                *_timed(times, span_ns),
            ]
        )
    return table("Submissions by thread", ["Process", "Thread", "Calls", *TIMED], rows)


def processes(recording: Recording, found: Submissions) -> tuple[list[Chart | None], list[TableView | None]]:
    """Processes side by side; nothing for a recording of one."""
    if recording.processes.rows < 2:
        return [], []
    calls = recording.calls
    span_ns = found.span[1] - found.span[0]
    slow = 60_000
    rows: list[dict[str, Any]] = []
    listed: list[list[Any]] = []
    for row, part, total, half, high, top in sorted(_sums(found, calls["process"][found.rows]), key=lambda one: one[0])[
        :128
    ]:
        durations = found.dur_ns[part]
        late = float(durations[durations >= slow].sum())
        name = process_name(recording, row)
        rows.append({"label": name, "values": [late, total - late], "note": f"p99 {duration(high)}"})
        processes_ = recording.processes
        listed.append(
            [
                name,
                str(int(processes_["pid"][row])),
                recording.text(int(processes_["node"][row])) or NONE,
                recording.text(int(processes_["state"][row])) or NONE,
                (f"{len(part):,}", len(part)),
                *_timed((total, half, high, top), span_ns),
                (duration(late), late),
            ]
        )
    if not rows:
        return [], []
    worst = max(rows, key=lambda one: one["values"][0])
    summary = (
        f"Host time inside submitting calls, split at {duration(slow)} a call. "
        f"Most in long calls: {worst['label']}, {duration(worst['values'][0])}."
    )
    compared = table("Processes", ["Process", "pid", "Node", "State", "Calls", *TIMED, "In long calls"], listed)
    parts = [f"calls of {duration(slow)} and more", "shorter calls"]
    chart = Chart(
        "ranks-chart",
        "Host time in submissions",
        summary,
        {"kind": "bars", "unit": "ns", "parts": parts, "rows": rows[:32]},
        compared,
    )
    return [chart], []


def occupancy_charts(
    recording: Recording, found: Submissions, marks: Sequence[Mark]
) -> tuple[Chart | None, Chart | None]:
    """Outstanding submissions over time, and what a call costs at each depth; None where it cannot be known."""
    return None, None
