"""The processes of a run folder: their ring files, how each ended, and what to add to its times."""

from __future__ import annotations

import platform
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.probe.processes import alive
from kvprobe.probe.ring import RingSnapshot
from kvprobe.recordings.merge import at_once
from kvprobe.runfolder.folder import RunFolder

__all__ = [
    "OF_ANOTHER_NAMESPACE",
    "UNTOLD",
    "Process",
    "ended",
    "missing_of",
    "node_of",
    "processes_of",
    "rank_of",
    "recorded_one_by_one",
    "shifts_of",
]

UNTOLD, OF_ANOTHER_NAMESPACE = "ended without its exit handlers", "not known: of another pid namespace"
RANKS = ("RANK", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")


@dataclass
class Process:
    """One program of one process: its ring files and what the files beside them say of it."""

    pid: int
    files: RunFolder
    rings: list[RingSnapshot] = field(default_factory=list)
    checkin: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    named: str = ""  # its command line when it was last looked at: it may have named itself

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.files.path

    @property
    def start_ns(self) -> int:
        """When it checked in or opened its first file."""
        starts = [ring.start_monotonic_ns for ring in self.rings]
        return min([*starts, *([int(self.checkin["t_ns"])] if self.checkin else [])])

    @property
    def end_ns(self) -> int:
        """When it closed, else the end of its newest call."""
        closed = max([0, *(ring.end_monotonic_ns for ring in self.rings)])
        newest = [int(slots["last_ns"].max()) for ring in self.rings if len(slots := ring.slots())]
        return closed or max([self.start_ns, *newest])

    @property
    def unix_offset_ns(self) -> int | None:
        """Add it to a time of the process to get UNIX time; None where no file says."""
        return next((ring.start_realtime_ns - ring.start_monotonic_ns for ring in self.rings), None)

    def counted(self) -> list[RingSnapshot]:
        """The files whose calls count: the interposer sees the calls of engines, too."""
        watched = [ring for ring in self.rings if ring.producer == "interposer"]
        return watched or self.rings


def processes_of(
    folder: RunFolder, rings: list[RingSnapshot], run: dict[str, Any], whole: bool, over: bool
) -> list[Process]:
    """One for each program that each process ran, with its state.

    Args:
        folder: the run folder, or that of a single ring file.
        rings: the ring files that were read.
        run: run.json.
        whole: the folder's other files belong to the recording, too.
        over: the run has ended.
    """
    found: list[Process] = []
    by_pid: dict[int, list[Process]] = {}
    for ring in sorted(rings, key=lambda r: (r.producer != "interposer", r.start_monotonic_ns)):
        same = by_pid.setdefault(ring.pid, [])
        if ring.producer != "interposer" and same:
            # an engine's file belongs to the program that its pid ran then
            earlier = [p for p in same if p.start_ns <= ring.end_monotonic_ns or not ring.end_monotonic_ns]
            (earlier or same)[-1].rings.append(ring)
            continue
        process = Process(ring.pid, folder, [ring])
        same.append(process)
        found.append(process)
    here = not run or run.get("host") == platform.node()
    statuses = {int(line["pid"]): line for line in folder.ended()} if whole else {}
    checkins = folder.checkins() if whole else []
    checkins_of: dict[int, list[dict[str, Any]]] = {}
    for checkin in checkins:
        checkins_of.setdefault(int(checkin["pid"]), []).append(checkin)
    # no watched call, and yet an adapter saw something
    for checkin in checkins:
        if checkin["pid"] not in by_pid and (folder.path / f"events-{checkin['pid']}.jsonl").exists():
            process = Process(int(checkin["pid"]), folder, checkin=checkin)
            by_pid[process.pid] = [process]
            found.append(process)
    for pid in folder.told_steps() if whole else ():
        if pid not in by_pid:  # a program that no start-up part is in
            of_steps = (int(line.get("begin_ns", line["t_ns"])) for lines in folder.steps(pid) for line in lines)
            begin = next((checkin for checkin in checkins_of.get(pid, ())), {"pid": pid, "t_ns": next(of_steps, 0)})
            process = Process(pid, folder, checkin=dict(begin))
            by_pid[pid] = [process]
            found.append(process)
    for same in by_pid.values():
        same.sort(key=lambda p: p.start_ns)
        for i, process in enumerate(same):
            if any(ring.state == "closed" for ring in process.counted()):  # a shared file is always so
                process.state = "closed"
            elif i + 1 < len(same):
                process.state = "replaced"
            elif process.pid in statuses and not process.rings and statuses[process.pid].get("status") == 0:
                process.state = "closed"
            elif process.pid in statuses:
                process.state = ended(statuses[process.pid].get("status"))
            elif over or not here or (running := _running(process)) is False:
                process.state = UNTOLD
            elif running is None:
                process.state = OF_ANOTHER_NAMESPACE
            if i + 1 == len(same):
                process.named = str(statuses.get(process.pid, {}).get("command", ""))
            mine = [c for c in checkins_of.get(process.pid, ()) if c["t_ns"] <= process.end_ns]
            if mine or process.rings:
                process.checkin = max(mine, key=lambda c: int(c["t_ns"]), default={})
    return found


def _running(process: Process) -> bool | None:
    found = [ring.running() for ring in process.rings] or [alive(process.pid)]
    return True if True in found else None if None in found else False


def ended(status: object) -> str:
    """How a process ended, by its status as in `ProcessEnd`."""
    if not isinstance(status, int):
        return UNTOLD
    if status >= 0:  # with 0, too: it may have left without its handlers
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def missing_of(
    folder: RunFolder, end: dict[str, Any] | None, rings: list[RingSnapshot], unread: Iterable[str]
) -> list[str]:
    """One line for each ring file that is not there, or not all of it.

    Args:
        folder: where they lie.
        end: end.json, which names them; None where only single files were given.
        rings: those that were read.
        unread: names of those that cannot be.
    """
    found = [f"the ring file {Path(ring.path).name}: {ring.damage}" for ring in rings if ring.damage]
    named = {Path(ring.path).name for ring in rings if ring.damage} | set(unread)
    if end is None:
        return found
    expected = end.get("rings", {})  # none before the run is over, while files still come and go
    there = {path.name: path.stat().st_size for path in folder.rings()} if expected else {}
    for name, size in expected.items():
        if name not in named and there.get(name, -1) < size:
            was = "cut off" if name in there else "gone"
            found.append(f"the ring file {name[:100]} is {was}: what its process did is not all here")
    for ring in rings:
        if ring.sharers:
            found.append(f"{ring.command} under --max-size were only counted, all together")
    return found + [f"process {pid} could make no ring file: {reason}" for pid, reason in folder.not_recorded()]


def rank_of(process: Process) -> int:
    """Its rank, as its ring files or its environment say; -1: none."""
    given = process.checkin.get("rank") or {}
    names = [given[name] for name in RANKS if name in given]
    text = next((text for text in (*(ring.rank for ring in process.rings), *names) if text), "")
    return int(text) if str(text).isdecimal() and len(str(text)) < 10 else -1


def node_of(process: Process, runs: dict[Path, dict[str, Any]]) -> str:
    """The machine it ran on; "" where run.json does not say."""
    return str(runs.get(process.folder, {}).get("host", ""))


def shifts_of(processes: list[Process], runs: dict[Path, dict[str, Any]]) -> list[int]:
    """What to add to each process's times: machines share no CLOCK_MONOTONIC, so several meet in UNIX time."""
    if len({node_of(process, runs) for process in processes}) <= 1:
        return [0] * len(processes)
    offsets = []
    for process in processes:
        run = runs.get(process.folder, {})
        of_run = run["realtime_ns"] - run["monotonic_ns"] if {"realtime_ns", "monotonic_ns"} <= set(run) else 0
        offsets.append(of_run if process.unix_offset_ns is None else process.unix_offset_ns)
    return [offset - offsets[0] for offset in offsets]


def recorded_one_by_one(processes: list[Process], shifts: list[int]) -> bool:
    """Whether the runs do not overlap; their `shifts` are then changed so that all begin together."""
    spans: dict[Path, tuple[int, int]] = {}
    for process, by in zip(processes, shifts, strict=True):
        start, end = process.start_ns + by, process.end_ns + by
        first, last = spans.get(process.folder, (start, end))
        spans[process.folder] = min(first, start), max(last, end)
    if at_once(list(spans.values())):
        return False
    begin = next(iter(spans.values()))[0]
    for i, process in enumerate(processes):
        shifts[i] += begin - spans[process.folder][0]
    return True
