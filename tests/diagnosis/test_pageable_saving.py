"""What pinned memory saves a thread that waits for its copies anyway: told by the link's rate, and by that alone."""

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table

MS = 1_000_000
MANY, SIZE = 20, 10_000_000
LINK = 50e9  # bytes a second: 0.2 ms for each copy, which took 2 ms


def loads(waited: bool = True, measured: bool = False) -> Recording:
    """Copies of pageable memory of 2 ms each, and whether each is waited for; `measured`: one pinned copy as well."""
    start = np.arange(MANY) * 4 * MS
    took = np.full(MANY, 2 * MS)
    waits = start + 2 * MS + 1_000
    kinds = np.concatenate((np.full(MANY, CallKind.COPY), np.full(MANY, CallKind.SYNC if waited else CallKind.LAUNCH)))
    order = np.argsort(np.concatenate((start, waits)), kind="stable")
    of = np.concatenate((np.arange(MANY), np.full(MANY, -1)))
    calls = {
        "start_ns": np.concatenate((start, waits)),
        "end_ns": np.concatenate((start + took, waits + 2_000)),
        "kind": kinds,
        "memory": np.where(of >= 0, Memory.PAGEABLE, Memory.UNKNOWN),
        "bytes": np.where(of >= 0, SIZE, 0),
        "direction": np.where(of >= 0, Direction.H2D, Direction.UNKNOWN),
        "thread": np.full(2 * MANY, 7),
        "stream": np.zeros(2 * MANY),
        "correlation": of,
        "name": np.where(of >= 0, 1, 2),
    }
    last = int(waits[-1])
    ran = {
        "start_ns": np.append(start + MS, last),
        "end_ns": np.append(start + took, last + int(SIZE / LINK * 1e9)),
        "engine": np.full(MANY + 1, Engine.COPY),
        "direction": np.full(MANY + 1, Direction.H2D),
        "bytes": np.full(MANY + 1, SIZE),
        "memory": np.append(np.full(MANY, Memory.PAGEABLE), Memory.PINNED),
        "stream": np.zeros(MANY + 1),
        "correlation": np.append(np.arange(MANY), MANY),
    }
    many = MANY + 1 if measured else MANY
    tables = {
        "calls": Table("calls", {name: column[order] for name, column in calls.items()}),
        "executions": Table("executions", {name: column[:many] for name, column in ran.items()}),
        "streams": Table("streams", {"handle": [9]}),
        "processes": Table("processes", {"pid": [123]}),
    }
    names = ["", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    return Recording([Source("run", "nsys")], tables, names, has_executions=True)


def share(recording: Recording) -> float | None:
    found = next(one for one in diagnose(recording) if one.cause == "pageable_memory")
    waits = [one.text for one in found.evidence if one.text.startswith(f"the thread waits for {MANY} of these copies")]
    unknown = [one.how for one in found.evidence if "By how much is not known" in one.text]
    assert bool(waits) == bool(unknown) == (found.cure[0].share is None)
    assert set(unknown) <= {"not known"}
    return found.cure[0].share


def test_the_rate_of_pageable_copies_is_not_the_links() -> None:
    assert share(loads()) is None


def test_what_the_bytes_take_on_the_link_is_not_saved() -> None:
    assert share(loads(measured=True)) == pytest.approx(0.9, abs=0.01)


def test_who_does_not_wait_saves_all_of_it_at_any_rate() -> None:
    assert share(loads(waited=False)) == 1.0
