"""Writes a recording as a Chrome/Perfetto trace (gzipped JSON) with counters of queue occupancy, for ui.perfetto.dev.

A browser takes about a million events: blocked calls are all kept, of the rest the longest, and what was left out is
said. A counter keeps the lowest and the highest value of each bin it is thinned to.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from kvprobe.errors import UsageError
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Recording
from kvprobe.recordings.occupancy import Occupancy, depth_series, occupancy

__all__ = ["write"]

Progress = Callable[[str, float], None]
_LIMIT = 1_000_000
_DEVICE_PID = 1 << 30  # processes of the trace above this are devices
_BATCH = 4096


def write(
    recording: Recording,
    path: Path,
    *,
    limit: int = _LIMIT,
    queues: Occupancy | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Writes the trace; returns one line for each kind of event that was thinned.

    Args:
        recording: what to write.
        path: the file, by custom `*.json.gz`.
        limit: most events in the file.
        queues: occupancy of the recording where it is known already.
        overwrite: replace an existing file.
        progress: called with what is being done and the fraction done.

    Raises:
        UsageError: the file exists and `overwrite` is not set.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists: name another file, or force overwriting it")
    queues = occupancy(recording) if queues is None else queues
    notes: list[str] = []
    writer = _Writer(recording, queues, limit, notes)
    total = 0
    temporary = path.with_name(path.name + ".part")
    try:
        with gzip.open(temporary, "wt", compresslevel=4, encoding="utf-8", errors="replace") as file:
            file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
            batch: list[str] = []
            for line in writer.lines():
                batch.append(line)
                if len(batch) >= _BATCH:
                    file.write(("" if not total else ",\n") + ",\n".join(batch))
                    total += len(batch)
                    batch.clear()
                    if progress is not None:
                        progress("writing the trace", min(0.99, total / writer.expected))
            file.write(("" if not total or not batch else ",\n") + ",\n".join(batch))
            about = {
                "tool": "kvprobe",
                "origin_ns": writer.origin,
                "source": [s.path for s in recording.source],
                "thinned": notes,
                "verdict": queues.verdict,
                "reason": queues.reason,
            }
            file.write(f'\n],"otherData":{json.dumps(about)}}}\n')
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return notes


class _Writer:
    """Makes the lines of the trace, most telling first, within the limit."""

    def __init__(self, recording: Recording, queues: Occupancy, limit: int, notes: list[str]) -> None:
        self.recording, self.queues, self.left, self.notes = recording, queues, limit, notes
        starts = [
            int(table["start_ns"].min())
            for kind in ("calls", "executions", "ranges", "labels")
            if (table := recording.tables[kind]).rows
        ]
        self.origin = min(starts, default=0)
        self.expected = max(
            1, min(limit, sum(recording.tables[kind].rows for kind in ("calls", "executions", "ranges")))
        )
        pids = recording.processes["pid"].tolist() or [0]
        # Ranks of several hosts may share a pid: each process row is its own process of the trace.
        self.pids = pids if len(set(pids)) == len(pids) else list(range(1, len(pids) + 1))
        self.texts: dict[int, str] = {}

    def text(self, index: int) -> str:
        found = self.texts.get(index)
        if found is None:
            found = self.texts[index] = json.dumps(self.recording.text(index))
        return found

    def pid(self, process: int) -> int:
        return self.pids[process] if 0 <= process < len(self.pids) else 0

    def lines(self) -> Iterator[str]:
        recording, calls = self.recording, self.recording.calls
        about = list(islice(self.metadata(), self.left))
        self.left -= len(about)
        yield from about
        # A part is kept for the counters: blocked calls say what was lost, counters why.
        points = sum(len(queue.calls) + len(queue.ends) for queue in self.queues.streams)
        kept = min(points, self.left // 8)
        blocked = np.flatnonzero(self.queues.blocked)
        yield from self.slices(
            self.pick("blocked calls", blocked, calls["end_ns"] - calls["start_ns"], self.left - kept)
        )
        labels = recording.labels
        most = (self.left - kept) // 8
        chosen = self.pick("labels", np.arange(labels.rows), labels["end_ns"] - labels["start_ns"], most)
        yield from self.spans("labels", chosen, "label")
        yield from self.counters(max(kept, self.left // 4))
        others = np.flatnonzero(
            np.isin(
                calls["kind"],
                (*SUBMITTING, CallKind.COPY_SYNC, CallKind.SYNC, CallKind.ALLOC, CallKind.FREE, CallKind.CREATE),
            )
            & ~self.queues.blocked
        )
        chosen = self.pick("other calls", others, calls["end_ns"] - calls["start_ns"], self.left // 3)
        yield from self.slices(chosen)
        executions = recording.executions
        chosen = self.pick(
            "executions", np.arange(executions.rows), executions["end_ns"] - executions["start_ns"], self.left * 2 // 3
        )
        yield from self.executions(chosen)
        ranges = recording.ranges
        chosen = self.pick("ranges", np.arange(ranges.rows), ranges["end_ns"] - ranges["start_ns"], self.left)
        yield from self.spans("ranges", chosen, "range")

    def pick(self, what: str, rows: Array, duration: Array, most: int) -> Array:
        """All rows, or the longest `most` of them in their order."""
        if len(rows) > most:
            self.notes.append(f"{what}: the longest {most} of {len(rows)}")
            rows = np.sort(rows[np.argpartition(-duration[rows], most - 1)[:most]]) if most > 0 else rows[:0]
        self.left -= len(rows)
        return rows

    def metadata(self) -> Iterator[str]:
        recording = self.recording
        for row, pid in enumerate(self.pids):
            rank = int(recording.processes["rank"][row]) if row < recording.processes.rows else -1
            name = recording.text(int(recording.processes["name"][row])) if row < recording.processes.rows else ""
            label = json.dumps(f"{name or 'process'}" + (f" (rank {rank})" if rank >= 0 else ""))
            yield f'{{"ph":"M","name":"process_name","pid":{pid},"args":{{"name":{label}}}}}'
            yield (
                f'{{"ph":"M","name":"process_name","pid":{_DEVICE_PID + row},'
                f'"args":{{"name":{json.dumps(f"streams of process {pid}")}}}}}'
            )
        threads = recording.threads
        for process, thread, name in zip(
            threads["process"].tolist(), threads["thread"].tolist(), threads["name"].tolist(), strict=True
        ):
            yield (
                f'{{"ph":"M","name":"thread_name","pid":{self.pid(process)},"tid":{thread},'
                f'"args":{{"name":{self.text(name)}}}}}'
            )
        streams = recording.streams
        for row in range(streams.rows):
            label = f"{recording.stream_title(row)} (device {int(streams['device'][row])})"
            yield (
                f'{{"ph":"M","name":"thread_name","pid":{_DEVICE_PID + int(streams["process"][row])},"tid":{row},'
                f'"args":{{"name":{json.dumps(label)}}}}}'
            )

    def slices(self, rows: Array) -> Iterator[str]:
        calls = self.recording.calls
        depth, lost = self.queues.depth, self.queues.blocked_ns
        for i in rows.tolist():
            start, dur = int(calls["start_ns"][i]) - self.origin, int(calls["end_ns"][i] - calls["start_ns"][i])
            category = "blocked" if lost[i] else "call"
            extra = f',"blocked_us":{lost[i] / 1e3:.3f}' if lost[i] else ""
            yield (
                f'{{"ph":"X","cat":"{category}","name":{self.text(int(calls["name"][i]))},'
                f'"pid":{self.pid(int(calls["process"][i]))},"tid":{int(calls["thread"][i])},"ts":{_us(start)},'
                f'"dur":{_us(dur)},"args":{{"outstanding":{int(depth[i])},"stream":{int(calls["stream"][i])},'
                f'"bytes":{int(calls["bytes"][i])}{extra}}}}}'
            )

    def executions(self, rows: Array) -> Iterator[str]:
        executions = self.recording.executions
        for i in rows.tolist():
            start = int(executions["start_ns"][i]) - self.origin
            dur = int(executions["end_ns"][i] - executions["start_ns"][i])
            yield (
                f'{{"ph":"X","cat":"execution","name":{self.text(int(executions["name"][i]))},'
                f'"pid":{_DEVICE_PID + int(executions["process"][i])},"tid":{int(executions["stream"][i])},'
                f'"ts":{_us(start)},"dur":{_us(dur)},"args":{{"bytes":{int(executions["bytes"][i])}}}}}'
            )

    def spans(self, kind: str, rows: Array, category: str) -> Iterator[str]:
        table = self.recording.tables[kind]
        for i in rows.tolist():
            start, dur = int(table["start_ns"][i]) - self.origin, int(table["end_ns"][i] - table["start_ns"][i])
            yield (
                f'{{"ph":"X","cat":"{category}","name":{self.text(int(table["name"][i]))},'
                f'"pid":{self.pid(int(table["process"][i]))},"tid":{int(table["thread"][i])},"ts":{_us(start)},'
                f'"dur":{_us(dur)}}}'
            )

    def counters(self, most: int) -> Iterator[str]:
        points = sum(len(queue.calls) + len(queue.ends) for queue in self.queues.streams)
        if points > most:
            self.notes.append(f"points of occupancy: the lowest and highest of each of {most // 2} bins, of {points}")
        left = most
        for queue in self.queues.streams:  # most time lost first
            times, depth = depth_series(self.recording, queue)
            share = len(times) if points <= most else min(left, max(2, most * len(times) // points))
            if share < min(2, len(times)):
                self.notes.append(f"points of occupancy: none of the stream in row {queue.stream}")
                continue
            kept = _extremes(depth, share)
            left -= len(kept)
            self.left -= len(kept)
            label = json.dumps(
                f"outstanding on {self.recording.stream_title(queue.stream)}"
                if queue.stream < self.recording.streams.rows
                else "outstanding"
            )
            pid = self.pid(
                int(self.recording.streams["process"][queue.stream])
                if queue.stream < self.recording.streams.rows
                else 0
            )
            for time, value in zip((times[kept] - self.origin).tolist(), depth[kept].tolist(), strict=True):
                yield f'{{"ph":"C","name":{label},"pid":{pid},"ts":{_us(time)},"args":{{"outstanding":{value}}}}}'


def _us(ns: int) -> str:
    """Nanoseconds as decimal microseconds, without a float between."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _extremes(values: Array, most: int) -> Array:
    """Positions of the lowest and highest value of each of most/2 bins, in order; all where they are few."""
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.unique(np.linspace(0, len(values), max(1, most // 2) + 1).astype(np.int64))
    kept = [
        begin + offset
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        for offset in sorted({int(values[begin:end].argmin()), int(values[begin:end].argmax())})
    ]
    return np.array(kept, dtype=np.int64)
