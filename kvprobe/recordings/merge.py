"""Puts several recordings (ranks, processes, tools) on one clock and into one Recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprobe.recordings.assemble import bounded
from kvprobe.recordings.model import SCHEMAS, Array, Recording, Table

__all__ = ["NO_CLOCK", "ONE_BY_ONE", "at_once", "different_runs", "merge", "recorded", "shifted"]

_SHIFTED = "they were shifted to begin together, so times between them mean nothing"
NO_CLOCK = f"the inputs share no clock: {_SHIFTED}"
ONE_BY_ONE = f"the inputs were recorded one after another: {_SHIFTED}"
_TIMES = ("start_ns", "end_ns", "time_ns")


def merge(recordings: Sequence[Recording]) -> Recording:
    """One recording of many, on the first one's clock.

    Each recording whose `machine["unix_offset_ns"]` is known (add it to a time to get UNIX time) is shifted by its
    difference to the first one's. Where one is not known, or they were recorded one after another, times between them
    mean nothing: each is shifted so that all begin together, and a note says so. Facts of the machine are the first
    one's; others that differ are noted.
    """
    if len(recordings) == 1:
        return recordings[0]
    shifts, notes = _shifts(recordings)
    names, renames = _names(recordings)
    bases = {kind: _bases(recordings, kind) for kind in ("processes", "streams")}
    moves = [
        _Move(shift, rename, process, stream)
        for shift, rename, process, stream in zip(shifts, renames, bases["processes"], bases["streams"], strict=True)
    ]
    machine, how, differing = _machine(recordings)
    notes += differing
    without = sum(not r.has_executions for r in recordings)
    if 0 < without < len(recordings):
        notes.append(f"{without} of {len(recordings)} inputs saw no device activity: occupancy is inferred there")
    for recording in recordings:
        notes += [note for note in recording.notes if note not in notes]
    merged = Recording(
        [source for r in recordings for source in r.source],
        {kind: _table(recordings, moves, kind) for kind in SCHEMAS if any(r.tables[kind].rows for r in recordings)},
        names,
        histograms=np.concatenate([r.histograms for r in recordings]),
        machine=machine,
        machine_how=how,
        has_executions=any(r.has_executions for r in recordings),
        notes=notes,
        lost={
            process + m.process: count
            for r, m in zip(recordings, moves, strict=True)
            for process, count in r.lost.items()
        },
        incomplete=list(dict.fromkeys(line for r in recordings for line in r.incomplete)),
    )
    return bounded(merged)


def _shifts(recordings: Sequence[Recording]) -> tuple[list[int], list[str]]:
    """What to add to the times of each, and what to say of it."""
    offsets = [recording.machine.get("unix_offset_ns") for recording in recordings]
    spans = [recorded(recording) for recording in recordings]
    together = [spans[0][0] - start for start, _ in spans]  # all begin together
    if not all(isinstance(offset, int) for offset in offsets):
        return together, [NO_CLOCK]
    stated = [int(offset) - int(offsets[0]) for offset in offsets]  # type: ignore[arg-type]
    if not at_once([(start + by, end + by) for (start, end), by in zip(spans, stated, strict=True)]):
        return together, [ONE_BY_ONE]
    aligned = "several inputs, each with its own clock, were aligned by the wall-clock time they state"
    return stated, [aligned] if any(stated) else []


def different_runs(recordings: Sequence[Recording]) -> str:
    """Why these look like recordings of different runs; "" where they may be those of one.

    Ranks of a job run on one kind of GPU, and at once. Where their clocks say otherwise, as those of two hosts may,
    each has a rank of its own, or a host.
    """
    models = list(dict.fromkeys(str(one.machine["gpu"]) for one in recordings if one.machine.get("gpu")))
    why = f"their GPUs differ ({', '.join(models)})" if len(models) > 1 else ""
    if not why and ONE_BY_ONE in _shifts(recordings)[1]:
        places = [
            {
                (one.text(int(node)), int(rank))
                for node, rank in zip(one.processes["node"], one.processes["rank"], strict=True)
            }
            for one in recordings
        ]
        if sum(map(len, places)) > len(set().union(*places)):
            why = "they were recorded one after another, and not as ranks of one job"
    return why


def _bases(recordings: Sequence[Recording], kind: str) -> list[int]:
    """The row of the merged table where the rows of each recording begin."""
    rows = [recording.tables[kind].rows for recording in recordings]
    return [sum(rows[:number]) for number in range(len(rows))]


def _machine(recordings: Sequence[Recording]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The first one's facts with what others add, how each is known, and which facts differ."""
    machine, how, differing = dict(recordings[0].machine), dict(recordings[0].machine_how), []
    for recording in recordings[1:]:
        for fact, value in recording.machine.items():
            if fact not in machine:
                machine[fact], how[fact] = value, recording.machine_how.get(fact, "")
            elif fact != "unix_offset_ns" and machine[fact] != value:
                differing.append(f"inputs differ in {fact}: {machine[fact]} and {value}")
    return machine, how, differing


@dataclass(frozen=True)
class _Move:
    """What becomes of the columns of one recording.

    Attributes:
        shift: ns to add to times.
        rename: index of each name among all names.
        process: to add to rows of processes; `stream` likewise of streams.
        stream: see there.
    """

    shift: int
    rename: Array
    process: int
    stream: int

    def column(self, column: Array, name: str, dtype: str) -> Array:
        """One column, by what its name and type in the model say of it."""
        if dtype == "name":
            return np.asarray(self.rename[np.clip(column, 0, len(self.rename) - 1)])
        if name in _TIMES:
            return column + self.shift
        base = self.process if name == "process" else self.stream if name == "stream" else 0
        if base:
            return np.where(column >= 0, column + base, column).astype(column.dtype)
        return column


def _table(recordings: Sequence[Recording], moves: Sequence[_Move], kind: str) -> Table:
    """The rows of all, in order of time where they have one."""
    columns: dict[str, Array] = {
        name: np.concatenate(
            [move.column(r.tables[kind][name], name, dtype) for r, move in zip(recordings, moves, strict=True)]
        )
        for name, dtype in SCHEMAS[kind].items()
    }
    by = "start_ns" if "start_ns" in columns and kind != "processes" else "time_ns" if "time_ns" in columns else ""
    if by:
        order = np.argsort(columns[by], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    return Table(kind, columns)


def shifted(recording: Recording, by_ns: int) -> Recording:
    """The same recording with every time moved."""
    tables = {
        kind: Table(
            kind, {name: column + by_ns if name in _TIMES else column for name, column in table.columns.items()}
        )
        for kind, table in recording.tables.items()
    }
    return Recording(
        recording.source,
        tables,
        recording.names,
        recording.histograms,
        recording.machine,
        recording.machine_how,
        recording.has_executions,
        recording.notes,
        recording.lost,
        recording.incomplete,
    )


def at_once(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether these (first, last) times overlap in one chain, as those of inputs that were recorded together do."""
    reach = None
    for start, end in sorted(spans):
        if reach is not None and start > reach:
            return False
        reach = max(end, reach if reach is not None else end)
    return True


def recorded(recording: Recording) -> tuple[int, int]:
    """First and last time in a recording, (0, 0) where there is none."""
    times = [
        recording.tables[kind][name]
        for kind in recording.tables
        if kind != "processes" and recording.tables[kind].rows
        for name in _TIMES
        if name in recording.tables[kind].columns
    ]
    return min((int(one.min()) for one in times), default=0), max((int(one.max()) for one in times), default=0)


def _names(recordings: Sequence[Recording]) -> tuple[list[str], list[Array]]:
    index: dict[str, int] = {"": 0}
    renames = [
        np.array([index.setdefault(name, len(index)) for name in recording.names], dtype=np.int32)
        for recording in recordings
    ]
    return list(index), renames
