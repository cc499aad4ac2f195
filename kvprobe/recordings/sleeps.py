"""Sleep and wake of a model: when its memory went to the CPU and came back, and what pinning, copying and mapping took.

Told from the calls of one thread: who gives up GPU memory under addresses where memory is mapped again later, or after
copies to the CPU, puts a model to sleep (cuMemUnmap, cuMemRelease); who maps memory where some was before wakes it
(cuMemCreate, cuMemMap). What the same thread pins, copies and frees in between is part of it. An allocator that only
grows does neither. Where an adapter says that a server's function does it (`server_calls`, "phase"), that function's
calls are one sleep or wake, from its beginning to its end and by its name, whether memory was mapped or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.model import CallKind, Direction, Memory, Recording

__all__ = ["PHASES", "Sleep", "Spent", "fastest_copy", "sleeps"]

Array = npt.NDArray[Any]

SLEEP, WAKE = "sleep", "wake"
# side -> phase -> the calls of it
PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    SLEEP: {
        "pin": ("cudaHostAlloc", "cudaMallocHost", "cudaHostRegister", "cuMemHostAlloc", "cuMemHostRegister"),
        "copy": (),  # to the CPU; of LEAST_COPY bytes or more where no server says that it sleeps
        "unmap": ("cuMemUnmap", "cuMemRelease", "cuMemExportToShareableHandle"),
    },
    WAKE: {
        "map": ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"),
        "copy": (),  # to the GPU
        "unpin": ("cudaFreeHost", "cudaHostUnregister", "cuMemFreeHost", "cuMemHostUnregister"),
    },
}
_COPY = 1  # its place in both
_NEEDED = {SLEEP: "unmap", WAKE: "map"}
LEAST_COPY = 1 << 20
APART_NS = 1_000_000_000  # a longer pause ends one


@dataclass
class Spent:
    """Of one phase: calls, their bytes, their time.

    Attributes:
        calls: how many.
        bytes: that they pinned, copied, mapped or gave up.
        ns: sum of their durations.
        faults: minor page faults of the calling thread in those that took a millisecond.
        nodes: a bit for each NUMA node that some of the host's pages lie on; 0: not known.
    """

    calls: int = 0
    bytes: int = 0
    ns: int = 0
    faults: int = 0
    nodes: int = 0


@dataclass
class Sleep:
    """One sleep or one wake, of one thread.

    Attributes:
        side: "sleep" or "wake".
        process: row of `processes`.
        thread: OS thread id.
        start_ns: of its first call.
        end_ns: of its last.
        phases: by their names in PHASES[side]; those that had no call are zero.
        name: the server and its own words for it; "" where nobody said.
    """

    side: str
    process: int
    thread: int
    start_ns: int
    end_ns: int
    phases: dict[str, Spent] = field(default_factory=dict)
    name: str = ""

    @property
    def bytes(self) -> int:
        """Copied; where nothing was, unmapped or mapped."""
        return self.phases["copy"].bytes or self.phases[_NEEDED[self.side]].bytes

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes of the host's memory, as far as they are known; 15 stands for all from there on."""
        mask = 0
        for spent in self.phases.values():
            mask |= spent.nodes
        return [node for node in range(16) if mask >> node & 1]

    @property
    def ns(self) -> int:
        """From its first call to the end of its last."""
        return self.end_ns - self.start_ns

    @property
    def bytes_per_s(self) -> float:
        """In all its phases together."""
        return self.bytes / self.ns * 1e9 if self.ns else 0.0


def sleeps(recording: Recording) -> list[Sleep]:
    """In the order of time; none where no memory was mapped or unmapped, and no server said that it sleeps."""
    calls = recording.calls
    side, phase = _phases(recording)
    faults = _Faults(recording)
    found, theirs = _named_ones(recording, side, phase, faults)
    rows = np.flatnonzero((side >= 0) & ~theirs & ~((phase == _COPY) & (calls["bytes"] < LEAST_COPY)))
    if not len(rows):
        return sorted(found, key=lambda one: one.start_ns)
    rows = rows[np.lexsort((calls["start_ns"][rows], calls["thread"][rows], calls["process"][rows]))]
    same = np.ones(len(rows), dtype=bool)
    for column in (calls["process"][rows], calls["thread"][rows], side[rows]):
        same[1:] &= column[1:] == column[:-1]
    same[1:] &= calls["start_ns"][rows][1:] - calls["end_ns"][rows][:-1] < APART_NS
    places = _Places(recording)
    for group in np.split(rows, np.flatnonzero(~same)):
        one = _of(recording, group, int(side[group[0]]), phase, faults)
        if places.moved(one, group):
            found.append(one)
    return sorted(found, key=lambda one: one.start_ns)


def _named_ones(recording: Recording, side: Array, phase: Array, faults: _Faults) -> tuple[list[Sleep], Array]:
    """Those that servers said, and of each row of `calls` whether it belongs to one."""
    calls, said = recording.calls, recording.server_calls
    theirs = np.zeros(calls.rows, dtype=bool)
    found: list[Sleep] = []
    told = np.isin(said["direction"], (Direction.D2H, Direction.H2D)) & (said["phase"] > 0)
    last: dict[tuple[int, int], int] = {}
    order = np.lexsort((-said["end_ns"], said["start_ns"]))
    for row in order[told[order]].tolist():
        start, end = int(said["start_ns"][row]), int(said["end_ns"][row])
        process, thread = int(said["process"][row]), int(said["thread"][row])
        if end <= last.get((process, thread), -1):
            continue  # a function that another one calls
        last[process, thread] = end
        mine = (calls["process"] == process) & (calls["thread"] == thread)
        mine &= (calls["start_ns"] >= start) & (calls["end_ns"] <= end)
        theirs |= mine
        at = int(said["direction"][row] == Direction.H2D)
        one = _of(recording, np.flatnonzero(mine & (side == at)), at, phase, faults)
        one.process, one.thread, one.start_ns, one.end_ns = process, thread, start, end
        one.name = f"{recording.text(int(said['server'][row]))} {recording.text(int(said['phase'][row]))}"
        if not one.bytes:
            one.phases["copy"].bytes = int(said["bytes"][row])
        found.append(one)
    return found, theirs


class _Faults:
    """Page faults and NUMA nodes of the calls in which they were counted."""

    def __init__(self, recording: Recording) -> None:
        calls, told = recording.calls, recording.page_faults
        self.minor, self.nodes = (np.zeros(calls.rows, dtype=np.int64) for _ in range(2))
        if not told.rows:
            return
        where = list(zip(*(told[name].tolist() for name in ("time_ns", "process", "thread")), strict=True))
        row_of = {key: row for row, key in enumerate(where)}
        for row in np.flatnonzero(np.isin(calls["start_ns"], told["time_ns"])).tolist():
            key = (int(calls["start_ns"][row]), int(calls["process"][row]), int(calls["thread"][row]))
            if key in row_of:
                self.minor[row], self.nodes[row] = told["minor"][row_of[key]], told["nodes"][row_of[key]]


class _Places:
    """Which addresses lost their memory, and got some again."""

    def __init__(self, recording: Recording) -> None:
        self.calls = recording.calls
        self.mapped, self.unmapped = (_named(recording, name) for name in ("cuMemMap", "cuMemUnmap"))
        self.at = np.flatnonzero(self.mapped | self.unmapped)

    def moved(self, one: Sleep, rows: Array) -> bool:
        """Whether it is a sleep or a wake, and no allocator at work."""
        sleeps = one.side == SLEEP
        own = rows[(self.unmapped if sleeps else self.mapped)[rows]]
        if not len(own):
            return False
        if sleeps and one.phases["copy"].calls:
            return True
        other = self.at[(self.mapped if sleeps else self.unmapped)[self.at]]
        other = other[self.calls["process"][other] == one.process]
        starts = self.calls["start_ns"][other]
        other = other[starts > one.start_ns if sleeps else starts < one.end_ns]
        return bool(np.isin(self.calls["dst"][own], self.calls["dst"][other]).any())


def _named(recording: Recording, name: str) -> Array:
    """Of each row of `calls`: whether it is this call."""
    known = np.array([text.partition("_")[0] == name for text in recording.names], dtype=bool)
    if not known.any():
        return np.zeros(recording.calls.rows, dtype=bool)
    out: Array = known[recording.calls["name"]]
    return out


def _phases(recording: Recording) -> tuple[Array, Array]:
    """Of each row of `calls`: its side, a row of PHASES, and its phase, a row of that; -1: none."""
    calls = recording.calls
    side, phase = (np.full(calls.rows, -1, dtype=np.int8) for _ in range(2))
    for at, phases in enumerate(PHASES.values()):
        for number, names in enumerate(phases.values()):
            for name in names:
                mine = _named(recording, name)
                side[mine], phase[mine] = at, number
    if not (side >= 0).any() and not (recording.server_calls["phase"] > 0).any():
        return side, phase
    copies = (calls["kind"] == CallKind.COPY) | (calls["kind"] == CallKind.COPY_SYNC)
    for at, direction in enumerate((Direction.D2H, Direction.H2D)):
        mine = copies & (calls["direction"] == direction)
        side[mine], phase[mine] = at, _COPY
    return side, phase


def _of(recording: Recording, rows: Array, side: int, phase: Array, faults: _Faults) -> Sleep:
    calls = recording.calls
    spent = {}
    for number, name in enumerate(PHASES[(SLEEP, WAKE)[side]]):
        mine = rows[phase[rows] == number]
        took = int((calls["end_ns"][mine] - calls["start_ns"][mine]).sum())
        nodes = int(np.bitwise_or.reduce(faults.nodes[mine])) if len(mine) else 0
        spent[name] = Spent(len(mine), int(calls["bytes"][mine].sum()), took, int(faults.minor[mine].sum()), nodes)
    if side:  # each piece is made, mapped and given access by a call of its own, all with its size
        spent["map"].bytes = int(calls["bytes"][rows[_named(recording, "cuMemMap")[rows]]].sum())
    if not len(rows):
        return Sleep((SLEEP, WAKE)[side], -1, -1, 0, 0, spent)
    process, thread = int(calls["process"][rows[0]]), int(calls["thread"][rows[0]])
    start, end = int(calls["start_ns"][rows[0]]), int(calls["end_ns"][rows[-1]])
    return Sleep((SLEEP, WAKE)[side], process, thread, start, end, spent)


def fastest_copy(recording: Recording, direction: Direction) -> tuple[float, str]:
    """Bytes per second of the fastest tenth of synchronous copies of pinned memory, and how that is known; 0: none."""
    calls = recording.calls
    took = calls["end_ns"] - calls["start_ns"]
    mine = (calls["kind"] == CallKind.COPY_SYNC) & (calls["direction"] == direction) & (took > 0)
    mine &= (calls["bytes"] >= LEAST_COPY) & (calls["memory"] == Memory.PINNED)
    if not mine.any():
        return 0.0, "unknown"
    return float(np.percentile(calls["bytes"][mine] / took[mine], 90) * 1e9), "fastest synchronous copies seen here"
