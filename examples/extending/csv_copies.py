"""Reads copies from a CSV file whose first line is name,start_ns,end_ns,stream,bytes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvprobe.recordings.model import CallKind, Direction, Recording, Source, Table
from kvprobe.recordings.vocabulary import Names

HEAD = ["name", "start_ns", "end_ns", "stream", "bytes"]
suffixes = (".csv",)


def sniff(path: Path, start: bytes) -> bool:
    """The first line tells."""
    return start.splitlines()[:1] == [",".join(HEAD).encode()]


def read(path: Path, progress: Callable[[str, float], None] | None = None) -> Recording:
    """One process, one thread, every line a copy to the GPU."""
    recording = Recording(source=[Source(str(path), "csv", bytes=path.stat().st_size)])
    with path.open(newline="") as file:
        try:
            rows = list(csv.reader(file))[1:]
        except csv.Error as error:  # which is no ValueError
            raise ValueError(str(error)) from error
    if rows and len(rows[-1]) < len(HEAD):
        recording.incomplete.append(f"{path.name} is cut off in its last line: read up to there")
        rows.pop()
    names = Names()
    numbers = np.array([[names.add(name), *map(int, rest)] for name, *rest in rows], np.int64).reshape(-1, len(HEAD))
    name, start_ns, end_ns, handle, size = numbers.T
    handles, stream = np.unique(handle, return_inverse=True)  # `stream` counts rows of the table of streams
    columns = {"name": name, "start_ns": start_ns, "end_ns": end_ns, "stream": stream, "bytes": size}
    every = {"kind": CallKind.COPY, "direction": Direction.H2D, "process": 0}
    same = {column: np.full(len(rows), value) for column, value in every.items()}
    recording.tables["calls"] = Table("calls", {**columns, **same})
    recording.tables["processes"] = Table("processes", {"pid": np.array([1])})
    recording.tables["streams"] = Table("streams", {"handle": handles, "process": np.zeros(len(handles))})
    recording.names = names.list
    return recording
