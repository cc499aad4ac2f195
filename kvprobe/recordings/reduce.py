"""Reduces one recording to a summary that merges with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvprobe.launchqueue.evidence import Incomplete
from kvprobe.launchqueue.judge import conclude
from kvprobe.recordings.buckets import BUCKETS, bucket
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording
from kvprobe.recordings.occupancy import Occupancy, occupancy
from kvprobe.recordings.summary import BINS, IN_FILES, TOP, BlockedCall, Collectives, QueueSummary, Rank, Stat, Summary

__all__ = ["rank_names", "summarize"]

_COLLECTIVE = ("nccl", "rccl")


def summarize(recording: Recording, name: str = "", keep: int = TOP, queues: Occupancy | None = None) -> Summary:
    """Reduces one recording; `name` tells its processes apart where they have no rank, `queues` are its occupancy."""
    return _Reduction(recording, name, keep, queues).summary().identified()


def rank_names(recording: Recording, name: str = "") -> list[str]:
    """How each process is called in a summary, by its row."""
    processes = recording.processes
    return [_rank_name(recording, row, name) for row in range(processes.rows)] or [name or "0"]


def _rank_name(recording: Recording, row: int, name: str) -> str:
    processes = recording.processes
    if processes["rank"][row] >= 0:
        return f"rank {int(processes['rank'][row])}"
    node = recording.text(int(processes["node"][row])) or name
    return f"{node}:{int(processes['pid'][row])}" if node else str(int(processes["pid"][row]))


class _Reduction:
    """Sums up one recording."""

    def __init__(self, recording: Recording, name: str, keep: int, queues: Occupancy | None) -> None:
        self.recording, self.keep = recording, keep
        self.ranks = rank_names(recording, name)
        self.queues = occupancy(recording) if queues is None else queues

    def rank(self, process: int) -> str:
        return self.ranks[process] if 0 <= process < len(self.ranks) else "unknown"

    def _collectives(self, row: int) -> Collectives:
        """Collectives of a process by the names of their kernels, as NCCL and RCCL give them."""
        table = self.recording.executions
        names = np.unique(table["name"])
        known = [name for name in names.tolist() if self.recording.text(name).lower().startswith(_COLLECTIVE)]
        rows = np.flatnonzero(np.isin(table["name"], known) & (table["process"] == row))
        if not len(rows):
            return Collectives()
        rows = rows[np.argsort(table["start_ns"][rows], kind="stable")]
        shift = 0
        while (len(rows) - 1) >> shift >= BINS:
            shift += 1
        took = np.maximum(table["end_ns"] - table["start_ns"], 0)[rows]
        sums = np.bincount(np.arange(len(rows)) >> shift, took)
        return Collectives(len(rows), shift, tuple(map(int, sums.tolist())))

    def summary(self) -> Summary:
        recording = self.recording
        out = Summary(1, keep=self.keep, notes=dict.fromkeys([*recording.notes, *recording.incomplete], 1))
        for row, label in enumerate(self.ranks):
            span = 0
            if row < recording.processes.rows:
                span = int(recording.processes["end_ns"][row] - recording.processes["start_ns"][row])
            rank = Rank(
                max(span, 0),
                lost_records=recording.lost.get(row, 0),
                verdict=IN_FILES[conclude(Incomplete(tuple(recording.incomplete))).state],
                recordings=1,
                collectives=self._collectives(row),
            )
            out.ranks[label] = out.ranks[label].merge(rank) if label in out.ranks else rank
        self.calls(out)
        self.executions(out)
        self.streams(out)
        blocked = np.flatnonzero(self.queues.blocked)
        longest = blocked[np.argsort(-self.queues.blocked_ns[blocked], kind="stable")[: self.keep]]
        out.top = sorted(map(self.blocked, longest.tolist()), reverse=True)
        return out

    def blocked(self, row: int) -> BlockedCall:
        calls, streams = self.recording.calls, self.recording.streams
        stream = int(calls["stream"][row])
        return BlockedCall(
            int(self.queues.blocked_ns[row]),
            self.rank(int(calls["process"][row])),
            int(calls["start_ns"][row]),
            int(calls["thread"][row]),
            self.recording.text(int(calls["name"][row])),
            int(streams["handle"][stream]) if 0 <= stream < streams.rows else -1,
            int(self.queues.depth[row]),
            int(calls["bytes"][row]),
        )

    def calls(self, out: Summary) -> None:
        recording, calls, totals = self.recording, self.recording.calls, self.recording.totals
        # Totals are exact where detail was lost; a process has one or the other.
        exact = np.unique(totals["process"]) if totals.rows else np.zeros(0, np.int32)
        rows = np.flatnonzero(~np.isin(calls["process"], exact)) if len(exact) else np.arange(calls.rows)
        for key, mine in _groups(calls, rows, ("process", "name", "kind", "direction", "memory")):
            duration = np.maximum(calls["end_ns"][mine] - calls["start_ns"][mine], 0)
            self._add(
                out,
                key,
                Stat(
                    len(mine),
                    int(calls["count"][mine].sum()),
                    int(calls["bytes"][mine].sum()),
                    int(duration.sum()),
                    int(duration.max()),
                    int((calls["result"][mine] != 0).sum()),
                    int(self.queues.blocked[mine].sum()),
                    int(self.queues.blocked_ns[mine].sum()),
                    _histogram(duration),
                ),
            )
        histograms = recording.histograms
        for key, mine in _groups(totals, np.arange(totals.rows), ("process", "name", "kind", "direction", "memory")):
            histogram = (
                tuple(histograms[mine].sum(axis=0).tolist()) if len(histograms) == totals.rows else (0,) * BUCKETS
            )
            process, name, kind, direction, memory = key
            same = np.flatnonzero(
                (calls["process"] == process)
                & (calls["name"] == name)
                & (calls["kind"] == kind)
                & (calls["direction"] == direction)
                & (calls["memory"] == memory)
            )
            count, copies, size, total_ns, errors = (
                int(totals[column][mine].sum()) for column in ("calls", "copies", "bytes", "dur_ns", "errors")
            )
            self._add(
                out,
                key,
                Stat(
                    count,
                    copies,
                    size,
                    total_ns,
                    int(totals["max_ns"][mine].max()),
                    errors,
                    int(self.queues.blocked[same].sum()),
                    int(self.queues.blocked_ns[same].sum()),
                    histogram,
                ),
            )

    def _add(self, out: Summary, key: tuple[int, ...], stat: Stat) -> None:
        process, name, kind, direction, memory = key
        words = (
            self.rank(process),
            self.recording.text(name),
            _word(CallKind, kind),
            _word(Direction, direction),
            _word(Memory, memory),
        )
        out.calls[words] = out.calls[words].merge(stat) if words in out.calls else stat

    def executions(self, out: Summary) -> None:
        table = self.recording.executions
        for key, mine in _groups(table, np.arange(table.rows), ("process", "engine", "direction", "memory")):
            duration = np.maximum(table["end_ns"][mine] - table["start_ns"][mine], 0)
            process, engine, direction, memory = key
            words = self.rank(process), _word(Engine, engine), _word(Direction, direction), _word(Memory, memory)
            stat = Stat(
                len(mine),
                int(table["count"][mine].sum()),
                int(table["bytes"][mine].sum()),
                int(duration.sum()),
                int(duration.max()),
                histogram=_histogram(duration),
            )
            out.executions[words] = out.executions[words].merge(stat) if words in out.executions else stat

    def streams(self, out: Summary) -> None:
        streams = self.recording.streams
        for queue in self.queues.streams:
            known = queue.stream < streams.rows
            rank = self.rank(int(streams["process"][queue.stream]) if known else 0)
            key = (
                rank,
                int(streams["device"][queue.stream]) if known else -1,
                int(streams["handle"][queue.stream]) if known else -1,
            )
            lost = int(queue.blocked_ns.sum())
            one = QueueSummary(
                len(queue.calls),
                int(queue.depth.max(initial=0)),
                queue.ceiling,
                int(queue.blocked.sum()),
                lost,
                queue.labelled_ns,
                IN_FILES[queue.verdict],
            )
            out.queues[key] = out.queues[key].merge(one) if key in out.queues else one
            out.ranks[rank] = out.ranks.get(rank, Rank()).merge(Rank(0, lost, 0, IN_FILES[queue.verdict]))


def _word(enum: Any, value: int) -> str:
    try:
        return str(enum(value).name).lower()
    except ValueError:
        return "unknown"


def _histogram(duration: Array) -> tuple[int, ...]:
    return tuple(np.bincount(bucket(duration), minlength=BUCKETS).tolist())


def _groups(table: Any, rows: Array, columns: Sequence[str]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Rows by equal values of the columns."""
    if not len(rows):
        return
    values = [np.asarray(table[column])[rows] for column in columns]
    order = np.lexsort(values[::-1])
    new = np.zeros(len(rows), dtype=bool)
    new[0] = True
    for value in values:
        new[1:] |= value[order][1:] != value[order][:-1]
    for part in np.split(order, np.flatnonzero(new)[1:]):
        yield tuple(int(value[part[0]]) for value in values), rows[part]
