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


def said(recording: Recording, *told: tuple[int, int, int, str]) -> Recording:
    """With what a server said: from and to in ms, direction, its words."""
    names = recording.names
    start, end, direction = (np.array([one[at] for one in told]) for at in range(3))
    names.append("vllm")
    server = len(names) - 1
    names.extend(one[3] for one in told)
    phase = [names.index(one[3]) for one in told]
    nothing = start * 0
    columns = {"start_ns": start * MS, "end_ns": end * MS, "direction": direction, "phase": phase}
    columns |= {"process": nothing, "thread": nothing + 7, "server": nothing + server}
    recording.tables["server_calls"] = Table("server_calls", columns)
    return recording


def test_a_server_says_what_it_calls_a_sleep_and_how_long_it_took() -> None:
    pinned_before: list[Call] = [(PIN, 64, 0, 8), (COPY, 64, Direction.D2H, 2)]
    recording = said(
        recorded([*pinned_before, *down(100), *up(100)]),
        (10, 22, Direction.D2H, "sleep, level 1: weights"),
        (11, 21, Direction.D2H, "sleep: weights"),  # inside it
        (22, 35, Direction.H2D, "wake up"),
    )
    found = sleeps(recording)
    assert [(one.name, one.side, one.ns, one.phases["copy"].calls) for one in found] == [
        ("vllm sleep, level 1: weights", "sleep", 12 * MS, 1),
        ("vllm wake up", "wake", 13 * MS, 1),
    ]
    asleep, _ = sleep_tables(recording, 0)
    assert asleep is not None and asleep.rows[0][1].text.replace("\xa0", " ") == "vllm sleep, level 1: weights"


def test_an_offload_that_maps_nothing_is_one_where_a_server_says_so() -> None:
    moved: list[Call] = [(COPY, 1, Direction.D2H, 2), (COPY, 64, Direction.D2H, 2)]
    assert sleeps(recorded(moved)) == []
    (one,) = sleeps(said(recorded(moved), (0, 9, Direction.D2H, "offload: fsdp model")))
    assert (one.bytes, one.ns) == (65 * MIB, 9 * MS)


def test_page_faults_and_nodes_stand_in_their_phase() -> None:
    recording = recorded([*down(100), *up(100)])
    start = recording.calls["start_ns"]
    columns = {"time_ns": start[[0, 1, 6]], "process": np.zeros(3), "thread": np.full(3, 7)}
    columns |= {"minor": np.array([16384, 1, 512]), "major": np.zeros(3), "nodes": np.array([1, 2, 1 << 15])}
    recording.tables["page_faults"] = Table("page_faults", columns)
    asleep, awake = sleeps(recording)
    assert (asleep.phases["pin"].faults, asleep.phases["copy"].faults, asleep.nodes) == (16384, 1, [0, 1])
    assert (awake.phases["copy"].faults, awake.nodes) == (512, [15])
    shown, _ = sleep_tables(recording, 0)
    assert shown is not None
    texts = [cell.text.replace("\xa0", " ") for cell in shown.rows[0]]
    columns_of = dict(zip(shown.columns, texts, strict=True))
    assert columns_of["Pin"] == "8.00 ms, 8.39 GB/s, 16,384 page faults"
    assert columns_of["Copy"].endswith(", 1 page fault")
    assert columns_of["NUMA node"] == "0, 1"
