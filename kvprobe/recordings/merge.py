"""Puts several recordings (ranks, processes, tools) on one clock and into one Recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.recordings.assemble import bounded
from kvprobe.recordings.model import SCHEMAS, Array, Recording, Table

__all__ = ["NO_CLOCK", "ONE_BY_ONE", "at_once", "merge", "recorded", "shifted"]

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
    notes: list[str] = []
    offsets = [recording.machine.get("unix_offset_ns") for recording in recordings]
    spans = [recorded(recording) for recording in recordings]
    shifts = [spans[0][0] - start for start, _ in spans]  # all begin together
    if not all(isinstance(offset, int) for offset in offsets):
        notes.append(NO_CLOCK)
    else:
        stated = [int(offset) - int(offsets[0]) for offset in offsets]  # type: ignore[arg-type]
        if at_once([(start + by, end + by) for (start, end), by in zip(spans, stated, strict=True)]):
            shifts = stated
            if any(shifts):
                notes.append("several inputs, each with its own clock, were aligned by the wall-clock time they state")
        else:
            notes.append(ONE_BY_ONE)
    names, renames = _names(recordings)
    bases: dict[str, list[int]] = {
        kind: np.concatenate([[0], np.cumsum([r.tables[kind].rows for r in recordings])]).tolist()
        for kind in ("processes", "streams")
    }
    tables: dict[str, Table] = {}
    for kind, schema in SCHEMAS.items():
        if not any(r.tables[kind].rows for r in recordings):
            continue
        columns: dict[str, Array] = {}
        for name, dtype in schema.items():
            parts = [
                _moved(
                    r.tables[kind][name],
                    kind,
                    name,
                    dtype,
                    shifts[i],
                    renames[i],
                    bases["processes"][i],
                    bases["streams"][i],
                )
                for i, r in enumerate(recordings)
            ]
            columns[name] = np.concatenate(parts)
        by = "start_ns" if "start_ns" in columns and kind != "processes" else "time_ns" if "time_ns" in columns else ""
        if by:
            order = np.argsort(columns[by], kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
        tables[kind] = Table(kind, columns)
    machine, how = dict(recordings[0].machine), dict(recordings[0].machine_how)
    for recording in recordings[1:]:
        for fact, value in recording.machine.items():
            if fact not in machine:
                machine[fact], how[fact] = value, recording.machine_how.get(fact, "")
            elif fact != "unix_offset_ns" and machine[fact] != value:
                notes.append(f"inputs differ in {fact}: {machine[fact]} and {value}")
    without = sum(not r.has_executions for r in recordings)
    if 0 < without < len(recordings):
        notes.append(f"{without} of {len(recordings)} inputs saw no device activity: occupancy is inferred there")
    for recording in recordings:
        notes += [note for note in recording.notes if note not in notes]
    lost = {
        process + bases["processes"][i]: count for i, r in enumerate(recordings) for process, count in r.lost.items()
    }
    merged = Recording(
        [source for r in recordings for source in r.source],
        tables,
        names,
        histograms=np.concatenate([r.histograms for r in recordings]),
        machine=machine,
        machine_how=how,
        has_executions=any(r.has_executions for r in recordings),
        notes=notes,
        lost=lost,
        incomplete=list(dict.fromkeys(line for r in recordings for line in r.incomplete)),
    )
    return bounded(merged)


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


def _moved(
    column: Array, kind: str, name: str, dtype: str, shift: int, rename: Array, process_base: int, stream_base: int
) -> Array:
    if dtype == "name":
        return np.asarray(rename[np.clip(column, 0, len(rename) - 1)])
    if name in _TIMES:
        return column + shift
    base = process_base if name == "process" else stream_base if name == "stream" else 0
    if base:
        return np.where(column >= 0, column + base, column).astype(column.dtype)
    return column
