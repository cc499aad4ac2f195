"""A model's sleep and wake are told from the calls: how much, in which phases; an allocator that grows is neither."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.recordings.model import CallKind, Direction, Recording, Source, Table
from kvprobe.recordings.sleeps import APART_NS, Spent, sleeps
from kvprobe.reporting.slept import sleep_tables

MIB, MS = 1 << 20, 1_000_000
NAMES = ["", "cudaHostAlloc", "cudaMemcpy", "cuMemUnmap", "cuMemRelease", "cuMemCreate", "cuMemMap", "cudaFreeHost"]
PIN, COPY, UNMAP, RELEASE, CREATE, MAP, UNPIN = range(1, 8)
Call = tuple[int, int, int, int]  # name, MiB, what a copy's direction or a mapping's address is, ms


def recorded(calls: Sequence[Call], pause_ns: int = 0) -> Recording:
    """Calls of one thread, one behind the other; ms 0 is the pause."""
    rows, now = [], 0
    for name, size, what, took in calls:
        rows.append((now, now + took * MS, name, size * MIB, what))
        now += took * MS if took else pause_ns
    start, end, name_of, size_of, what_of = (np.array(column) for column in zip(*rows, strict=True))
    copy = name_of == COPY
    table = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": end,
            "process": start * 0,
            "thread": start * 0 + 7,
            "name": name_of,
            "kind": np.where(copy, CallKind.COPY_SYNC, CallKind.ALLOC),
            "stream": start * 0 - 1,
            "bytes": size_of,
            "direction": np.where(copy, what_of, 0),
            "dst": np.where(copy, 0, what_of),
        },
    )
    processes = Table("processes", {"pid": [1]})
    return Recording([Source("made", "kvprobe")], {"calls": table, "processes": processes}, list(NAMES))


def down(address: int, size: int = 64) -> list[Call]:
    return [(PIN, size, 0, 8), (COPY, size, Direction.D2H, 2), (UNMAP, size, address, 1), (RELEASE, 0, 0, 1)]


def up(address: int, size: int = 64) -> list[Call]:
    return [(CREATE, size, 0, 1), (MAP, size, address, 1), (COPY, size, Direction.H2D, 2), (UNPIN, 0, 0, 4)]


def test_a_sleep_and_a_wake_are_told_with_their_phases() -> None:
    found = sleeps(recorded([*down(100), *down(200), *up(100), *up(200)]))
    assert [(one.side, one.bytes, one.ns) for one in found] == [
        ("sleep", 128 * MIB, 24 * MS),
        ("wake", 128 * MIB, 16 * MS),
    ]
    assert found[0].phases == {
        "pin": Spent(2, 128 * MIB, 16 * MS),
        "copy": Spent(2, 128 * MIB, 4 * MS),
        "unmap": Spent(4, 128 * MIB, 4 * MS),
    }
    assert found[1].phases == {
        "map": Spent(4, 128 * MIB, 4 * MS),
        "copy": Spent(2, 128 * MIB, 4 * MS),
        "unpin": Spent(2, 0, 8 * MS),
    }


def test_weights_that_are_thrown_away_sleep_too() -> None:
    thrown: list[Call] = [(UNMAP, 64, 100, 1), (RELEASE, 0, 0, 1)]
    again: list[Call] = [(CREATE, 64, 0, 1), (MAP, 64, 100, 1)]
    assert [(one.side, one.bytes) for one in sleeps(recorded([*thrown, *again]))] == [
        ("sleep", 64 * MIB),
        ("wake", 64 * MIB),
    ]


def test_an_allocator_that_grows_or_ends_neither_sleeps_nor_wakes() -> None:
    grows: list[Call] = [(CREATE, 64, 0, 1), (MAP, 64, 100, 1), (COPY, 64, Direction.H2D, 2)]
    ends: list[Call] = [(UNMAP, 64, 100, 1), (RELEASE, 0, 0, 1)]
    assert sleeps(recorded([*grows, *ends])) == []
    assert sleeps(recorded([(PIN, 64, 0, 8), (COPY, 64, Direction.D2H, 2), (UNPIN, 0, 0, 1)])) == []


def test_a_pause_ends_one() -> None:
    apart = [*down(100), (0, 0, 0, 0), *down(200), *up(100), *up(200)]
    assert [one.side for one in sleeps(recorded(apart, APART_NS))] == ["sleep", "sleep", "wake"]


def test_the_section_says_rates_beside_the_link() -> None:
    recording = recorded([*down(100), *up(100)])
    recording.machine["link_bytes_per_s"] = 64 * MIB / (6 * MS) * 1e9
    asleep, awake = sleep_tables(recording, 0)
    assert asleep is not None and awake is not None
    texts = [cell.text.replace("\xa0", " ") for cell in asleep.rows[0]]
    columns = dict(zip(asleep.columns, texts, strict=True))
    assert columns["Took"] == "12.0 ms"
    assert columns["Pin"] == "8.00 ms, 8.39 GB/s"
    assert columns["Of the link"] == "50%"
    assert sleep_tables(recorded([(COPY, 64, Direction.D2H, 2)]), 0) == [None, None]
