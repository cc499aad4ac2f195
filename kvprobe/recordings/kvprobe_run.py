"""Reads what `kvprobe run` (or an engine) recorded: ring files and the JSON files beside them, as one Recording.

Totals are exact. A process is one row of `processes` for each program that it ran: `exec` starts a new ring file under
the same pid. `processes.state` is "closed" (it ended in order), "running", "replaced" (by exec), or how it ended:
"killed by SIGKILL", "exit code 3", "ended without its exit handlers".
"""

from __future__ import annotations

import os
import platform
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.probe.processes import alive
from kvprobe.probe.ring import (
    CALLS,
    RECORD,
    SANE,
    SLOT,
    TRANSFER,
    UNTIMED,
    RingSnapshot,
    handles_of,
    read_ring,
    stream_handles,
)
from kvprobe.recordings.assemble import sorted_table, stream_rows
from kvprobe.recordings.merge import ONE_BY_ONE, at_once
from kvprobe.recordings.model import SCHEMAS, Array, CallKind, Label, Recording, Source, Table
from kvprobe.recordings.vocabulary import Names
from kvprobe.runfolder.folder import CONFIDENTIAL, RunFolder
from kvprobe.runfolder.secrets import redact_text

__all__ = ["read"]

Progress = Callable[[str, float], None]

APART_NS = 20_000  # two records of one copy, by the clocks of two libraries
_NEVER = np.iinfo(np.int64).max
RANKS = ("RANK", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")


@dataclass
class _Process:
    """One program of one process: its ring files and what the files beside them say of it."""

    pid: int
    files: RunFolder
    rings: list[RingSnapshot] = field(default_factory=list)
    checkin: dict[str, Any] = field(default_factory=dict)
    state: str = "running"

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


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], progress: Progress | None = None
) -> Recording:
    """Reads run folders and single ring files.

    Args:
        paths: folders of `kvprobe run`, or .kvp files; one or several (one folder for each node).
        progress: called with what is being done and the fraction done.

    Raises:
        RecordingError: no ring file can be read; files of a run that cannot be are named in `notes` instead.
    """
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    names, notes, unread = Names(), list[str](), list[str]()
    processes: list[_Process] = []
    source: list[Source] = []
    folders: dict[Path, RunFolder] = {}

    def run_folder(path: Path) -> RunFolder:
        return folders.setdefault(path, RunFolder(path))

    runs: dict[Path, dict[str, Any]] = {}
    ends: dict[Path, dict[str, Any]] = {}
    for path in given:
        folder = path if path.is_dir() else path.parent
        files = sorted(path.glob("*.kvp")) if path.is_dir() else [path]
        if path.is_dir():
            runs[folder] = run_folder(folder).run()
            ends[folder] = run_folder(folder).end()
        rings = []
        for i, file in enumerate(files):
            if progress is not None:
                progress(f"reading {file.name}", i / max(1, len(files)) * 0.8)
            try:
                rings.append(read_ring(file))
            except RecordingError as error:
                if not path.is_dir():
                    raise
                notes.append(f"not read: {error}")
                unread.append(f"not read: {error}")
        processes += _processes(run_folder(folder), rings, runs.get(folder, {}), path.is_dir(), bool(ends.get(folder)))
        command = redact_text(" ".join(runs.get(folder, {}).get("command", [])))
        tool = f"kvprobe {runs.get(folder, {}).get('version', '')}".strip()
        size = sum(file.stat().st_blocks * 512 for file in files)  # they have holes
        source.append(Source(str(path), "kvprobe", tool=tool, command=command, bytes=size))
        notes += _notes(runs.get(folder, {}), ends.get(folder, {}), rings, path)
        if runs.get(folder) and not ends.get(folder):
            unread.append(_NOT_OVER)
    if progress is not None:
        progress("putting processes together", 0.85)
    shifts = _shifts(processes, runs)
    if _recorded_one_by_one(processes, shifts):
        notes.append(ONE_BY_ONE)
    ranks = [_rank(process) for process in processes]
    order = sorted(
        range(len(processes)),
        key=lambda i: (ranks[i] if ranks[i] >= 0 else 1 << 30, _node(processes[i], runs), processes[i].start_ns),
    )
    processes = [processes[i] for i in order]
    shifts = [shifts[i] for i in order]
    recording = Recording(source=source, has_executions=False)
    _fill(recording, processes, shifts, runs, names)
    notes += _launch_queue(recording, processes, shifts, names)
    for process in processes:
        if not (process.state in ("closed", "running", "replaced") or process.state.startswith("exit code")):
            notes.append(
                f"process {process.pid} {process.state}; its totals are complete, only the newest single calls were "
                f"kept"
            )
    for folder, run in runs.items():
        facts = {key: run[key] for key in ("host", "kernel", "cpus", "python", "gpu_nodes") if key in run}
        recording.machine.update(facts)
        recording.machine_how.update(dict.fromkeys(facts, f"run.json of {folder.name}"))
        protected = ends.get(folder, {}).get(CONFIDENTIAL)
        if protected is not None:
            recording.machine[CONFIDENTIAL] = protected
            recording.machine_how[CONFIDENTIAL] = f"end.json of {folder.name}, reported by the driver"
    known = [(p.unix_offset_ns, by) for p, by in zip(processes, shifts, strict=True) if p.unix_offset_ns is not None]
    offset = next((offset - by for offset, by in known if offset is not None), None)
    if offset is None:
        clocks = next((run for run in runs.values() if "monotonic_ns" in run and "realtime_ns" in run), None)
        offset = clocks["realtime_ns"] - clocks["monotonic_ns"] if clocks else None
    if offset is not None:
        recording.machine["unix_offset_ns"] = offset
        recording.machine_how["unix_offset_ns"] = "both clocks, read together when the recording began"
    recording.notes += notes
    recording.incomplete += unread
    for one in folders.values():
        recording.notes += one.damaged
    recording.names = names.list
    if progress is not None:
        progress("read", 1.0)
    return recording


# ---- processes -------------------------------------------------------------------------------------------------------


def _processes(
    folder: RunFolder, rings: list[RingSnapshot], run: dict[str, Any], whole: bool, over: bool
) -> list[_Process]:
    found: list[_Process] = []
    by_pid: dict[int, list[_Process]] = {}
    for ring in sorted(rings, key=lambda r: (r.producer != "interposer", r.start_monotonic_ns)):
        same = by_pid.setdefault(ring.pid, [])
        if ring.producer != "interposer" and same:
            # an engine's file belongs to the program that its pid ran then
            earlier = [p for p in same if p.start_ns <= ring.end_monotonic_ns or not ring.end_monotonic_ns]
            (earlier or same)[-1].rings.append(ring)
            continue
        process = _Process(ring.pid, folder, [ring])
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
            process = _Process(int(checkin["pid"]), folder, checkin=checkin)
            by_pid[process.pid] = [process]
            found.append(process)
    for same in by_pid.values():
        same.sort(key=lambda p: p.start_ns)
        for i, process in enumerate(same):
            if any(ring.state == "closed" for ring in process.counted()):
                process.state = "closed"
            elif i + 1 < len(same):
                process.state = "replaced"
            elif process.pid in statuses and not process.rings and statuses[process.pid].get("status") == 0:
                process.state = "closed"
            elif process.pid in statuses:
                process.state = _ended(statuses[process.pid].get("status"))
            elif over or not here or (running := _running(process)) is False:
                process.state = "ended without its exit handlers"
            elif running is None:
                process.state = "not known: of another pid namespace"
            mine = [c for c in checkins_of.get(process.pid, ()) if c["t_ns"] <= process.end_ns]
            process.checkin = max(mine, key=lambda c: int(c["t_ns"]), default={})
    return found


def _running(process: _Process) -> bool | None:
    found = [ring.running() for ring in process.rings] or [alive(process.pid)]
    return True if True in found else None if None in found else False


def _ended(status: object) -> str:
    if not isinstance(status, int):
        return "ended without its exit handlers"
    if status >= 0:  # with 0, too: it may have left without its handlers
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _rank(process: _Process) -> int:
    given = process.checkin.get("rank") or {}
    names = [given[name] for name in RANKS if name in given]
    text = next((text for text in (*(ring.rank for ring in process.rings), *names) if text), "")
    return int(text) if str(text).isdecimal() and len(str(text)) < 10 else -1


def _node(process: _Process, runs: dict[Path, dict[str, Any]]) -> str:
    return str(runs.get(process.folder, {}).get("host", ""))


def _shifts(processes: list[_Process], runs: dict[Path, dict[str, Any]]) -> list[int]:
    """What to add to each process's times: machines share no CLOCK_MONOTONIC, so several meet in UNIX time."""
    if len({_node(process, runs) for process in processes}) <= 1:
        return [0] * len(processes)
    offsets = []
    for process in processes:
        run = runs.get(process.folder, {})
        of_run = run["realtime_ns"] - run["monotonic_ns"] if {"realtime_ns", "monotonic_ns"} <= set(run) else 0
        offsets.append(of_run if process.unix_offset_ns is None else process.unix_offset_ns)
    return [offset - offsets[0] for offset in offsets]


def _recorded_one_by_one(processes: list[_Process], shifts: list[int]) -> bool:
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


_NOT_OVER = "the run is not over, or its observer was killed: what has been recorded so far was read"


def _notes(run: dict[str, Any], end: dict[str, Any], rings: list[RingSnapshot], path: Path) -> list[str]:
    notes = [str(line) for line in end.get("warnings", [])]
    status = end.get("status")
    if isinstance(status, int) and status:
        notes.append(f"the command {_ended(status) if status < 0 else f'ended with exit code {status}'}")
    if run and not end:
        notes.append(_NOT_OVER)
    if not rings and path.is_dir() and not notes:
        notes.append("no process of this run made a CUDA call that kvprobe records")
    over = sum(int(ring.over_count.sum()) for ring in rings)
    if over:
        notes.append(
            f"{over} calls are in the totals only, without stream and direction: more threads or streams than "
            "a ring file has room for, calls in signal handlers, or a full disk"
        )
    if any(ring.producer == "interposer" for ring in rings):
        notes.append("host side only: what the device executed was not recorded (kvprobe run --nsys records it)")
    return notes


def _launch_queue(recording: Recording, processes: list[_Process], shifts: list[int], names: Names) -> list[str]:
    """Depth and channels as the processes calibrated them, as facts of the machine; notes where they differ.

    The calls that calibrated them are labelled as the recorder's own work: they fill a queue until one blocks.
    """
    told: dict[int, dict[str, Any]] = {}
    labels: dict[str, list[int]] = {n: [] for n in ("start_ns", "end_ns", "process", "label", "name")}
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        queue = process.files.queue(process.pid)
        start, end = _ns(queue.get("start_ns")), _ns(queue.get("end_ns"))
        # of a program that began later under the same pid it says nothing
        if not process.start_ns <= end or _ns(queue.get("depth")) <= 0:
            continue
        told[process.pid] = queue
        if queue.get("how") == "calibrated":
            facts = start + shift, end + shift, row, int(Label.INSTRUMENTATION), names.add("kvprobe: calibration")
            for column, fact in zip(labels.values(), facts, strict=True):
                column.append(fact)
    if told:
        recording.tables["labels"] = sorted_table("labels", {k: np.array(v) for k, v in labels.items()})
    notes = []
    for name, key in (("queue_depth", "depth"), ("channels", "channels")):
        values = {pid: _ns(queue.get(key)) for pid, queue in told.items()}
        if len(set(values.values())) > 1:
            some = ", ".join(f"{value} (process {pid})" for pid, value in sorted(values.items()))
            notes.append(f"processes differ in {name}, so none is taken for all: {some}")
        elif values:
            pid = min(values)
            earlier = "an earlier process in the environment of " if told[pid].get("how") == "cached" else ""
            recording.machine[name] = values[pid]
            recording.machine_how[name] = (
                f"counted in {earlier}process {pid}: small copies were submitted behind a waiting kernel until one "
                f"blocked"
            )
    return notes


# ---- tables ----------------------------------------------------------------------------------------------------------


def _fill(
    recording: Recording, processes: list[_Process], shifts: list[int], runs: dict[Path, dict[str, Any]], names: Names
) -> None:
    detail: list[tuple[int, int, Array]] = []
    totals: list[tuple[int, Array, Array]] = []  # process, slots, owner threads
    over: list[tuple[int, int, int, int, int]] = []
    for row, process in enumerate(processes):
        counted = process.counted()
        records = _joined([ring.records() for ring in counted])
        published = sum(section.head for ring in counted for section in ring.sections)
        for ring in process.rings:
            if ring not in counted:
                records = _with_engine(records, ring.records())
        detail.append((row, shifts[row], records))
        lost = published - int((records["call"] != TRANSFER).sum())
        if lost > 0:
            recording.lost[row] = lost
        for ring in process.counted():
            for section in ring.sections:
                slots = section.slots[section.slots["call"] != TRANSFER]
                owner = section.tid if section.owners == 1 and section.tid else _only_thread(section.records)
                totals.append((row, slots, np.full(len(slots), owner, dtype=np.int64)))
            over += [
                (row, int(c), int(ring.over_count[c]), int(ring.over_bytes[c]), int(ring.over_dur_ns[c]))
                for c in np.flatnonzero(ring.over_count)
            ]
    records = np.concatenate([part for _, _, part in detail] or [np.zeros(0, RECORD)])
    lengths = [len(part) for _, _, part in detail]
    process_of = np.repeat(np.array([row for row, _, _ in detail], dtype=np.int32), lengths)
    shift_of = np.repeat(np.array([shift for _, shift, _ in detail], dtype=np.int64), lengths)
    slots = np.concatenate([part for _, part, _ in totals] or [np.zeros(0, SLOT)])
    slot_process = np.repeat(np.array([row for row, _, _ in totals], dtype=np.int32), [len(p) for _, p, _ in totals])
    slot_thread = np.concatenate([owners for _, _, owners in totals] or [np.zeros(0, np.int64)])

    # one table of streams for calls and totals together
    both_process = np.concatenate([process_of, slot_process])
    handles = np.concatenate([handles_of(records), handles_of(slots)])
    rows, columns = stream_rows(both_process, np.zeros(len(both_process), np.int32), handles)
    rows, columns = _in_order_of_use(rows, columns, processes)
    recording.tables["streams"] = Table("streams", columns)
    call_stream, slot_stream = rows[: len(records)], rows[len(records) :]

    kinds = np.zeros(256, dtype=np.uint8)
    name_of = np.zeros(256, dtype=np.int32)
    for number, (kind, name) in CALLS.items():
        kinds[number] = CallKind[kind].value if kind in CallKind.__members__ else CallKind.OTHER
        name_of[number] = names.add(name)
    for number in set(np.unique(records["call"])) | set(np.unique(slots["call"])):
        if int(number) not in CALLS:  # a newer writer's call
            name_of[number] = names.add(f"call {number}")

    _calls(recording, records, process_of, shift_of, call_stream, kinds, name_of)
    _transfers(recording, records, process_of, shift_of, call_stream, processes, shifts, names)
    _totals(recording, slots, slot_process, slot_thread, slot_stream, over, kinds, name_of)
    _stacks(recording, processes, shifts, names)
    _samples(recording, processes, shifts, names)
    recording.tables["processes"] = Table(
        "processes",
        {
            "pid": np.array([p.pid for p in processes], np.int64),
            "rank": np.array([_rank(p) for p in processes], np.int32),
            "node": names.map([_node(p, runs) for p in processes]),
            "name": names.map([_process_name(p) for p in processes]),
            "command": names.map([_command(p) for p in processes]),
            "start_ns": np.array([p.start_ns + s for p, s in zip(processes, shifts, strict=True)], np.int64),
            "end_ns": np.array([p.end_ns + s for p, s in zip(processes, shifts, strict=True)], np.int64),
            "state": names.map([p.state for p in processes]),
        },
    )


def _in_order_of_use(
    rows: Array, columns: dict[str, Array], processes: list[_Process]
) -> tuple[Array, dict[str, Array]]:
    """The table of streams, a process's in the order of their first use: as `kvprobe top` numbers them."""
    turn = {
        (row, handle): place
        for row, process in enumerate(processes)
        for place, handle in enumerate(stream_handles([*process.counted(), *process.rings]))
    }
    owned = zip(columns["process"].tolist(), columns["handle"].tolist(), strict=True)
    turns = np.array([turn.get(one, len(turn)) for one in owned], dtype=np.int64)
    order = np.lexsort((columns["handle"], turns, columns["process"]))
    moved = np.empty(len(order) + 1, dtype=np.int32)
    moved[order], moved[-1] = np.arange(len(order)), -1  # the last place is for -1, no stream
    return moved[rows], {name: column[order] for name, column in columns.items()}


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, RECORD), *parts])


def _with_engine(watched: Array, engine: Array) -> Array:
    """An engine's records joined with the interposer's, which saw the same copies from inside the engine's calls.

    A copy that both have is one row: the interposer's, with the engine's transfer. What only the engine still has (the
    interposer's ring holds all calls, and wraps sooner) is added, and so are the transfers.
    """
    transfers, copies = engine[engine["call"] == TRANSFER], engine[engine["call"] != TRANSFER]
    both = _joined([watched, copies])
    keys = np.unique(both[["tid", "stream", "src", "dst", "bytes"]], return_inverse=True)[1]
    start = both["start_ns"].astype(np.int64)
    took = np.where(both["dur_ns"] == UNTIMED, 0, both["dur_ns"]).astype(np.int64)
    order = np.lexsort((start, keys))
    ours = order < len(watched)
    place = np.arange(len(order))
    # The interposer's row that is nearest in time, of those with the same key before and after.
    before = np.maximum.accumulate(np.where(ours, place, -1))
    after = np.minimum.accumulate(np.where(ours, place, len(order))[::-1])[::-1]
    theirs = np.flatnonzero(~ours)
    gaps = []
    for near in (before[theirs], after[theirs]):
        mine = order[np.clip(near, 0, len(order) - 1)]
        fits = (near >= 0) & (near < len(order)) & (keys[mine] == keys[order[theirs]])
        gaps.append(np.where(fits, np.abs(start[mine] - start[order[theirs]]), _NEVER))
    gap = np.minimum(*gaps)
    mine = order[np.where(gaps[1] < gaps[0], after[theirs], before[theirs])]
    late = start[mine] - start[order[theirs]]  # a thread may lose its core between the two: as long as the call took
    closest = np.argsort(gap, kind="stable")
    same = (gap < _NEVER) & (late >= -APART_NS) & (late <= took[order[theirs]] + APART_NS)
    closest = closest[same[closest]]
    closest = closest[np.unique(mine[closest], return_index=True)[1]]  # of several engine's rows the nearest
    theirs, mine = order[theirs[closest]], mine[closest]
    watched, missing = watched.copy(), np.ones(len(copies), dtype=bool)
    missing[theirs - len(watched)] = False
    watched["transfer"][mine] = both["transfer"][theirs]
    return _joined([watched, copies[missing], transfers])


def _only_thread(records: Array) -> int:
    threads = np.unique(records["tid"])
    return int(threads[0]) if len(threads) == 1 else -1


def _command(process: _Process) -> str:
    argv = process.checkin.get("argv")
    return redact_text(" ".join(argv) if argv else next((ring.command for ring in process.rings), ""))


def _process_name(process: _Process) -> str:
    words = _command(process).split()
    if not words:
        return str(process.pid)
    name = Path(words[0]).name
    if name.startswith("python"):
        return next((Path(word).name for word in words[1:] if not word.startswith("-")), name)
    return name


def _calls(
    recording: Recording, records: Array, process: Array, shift: Array, stream: Array, kinds: Array, name_of: Array
) -> None:
    keep = np.flatnonzero((records["call"] != TRANSFER) & (records["dur_ns"] != UNTIMED))
    r = records[keep]
    start = r["start_ns"].astype(np.int64) + shift[keep]
    transfer = r["transfer"].astype(np.int64)
    kind = kinds[r["call"]]
    # A record of one of these has the number of launches where a copy has its destination.
    counts = (kind == CallKind.SYNC) | (kind == CallKind.LAUNCH) & (r["dst"] > 0)
    recording.tables["calls"] = sorted_table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + r["dur_ns"].astype(np.int64),
            "process": process[keep],
            "thread": r["tid"].astype(np.int64),
            "name": name_of[r["call"]],
            "kind": kind,
            "stream": stream[keep],
            "direction": r["direction"] & 15,
            "memory": r["direction"] >> 4,
            "bytes": r["bytes"].astype(np.int64),
            "count": r["count"].astype(np.int32),
            "transfer": np.where(transfer > 0, transfer, -1),
            "src": r["src"],
            "dst": np.where(counts, 0, r["dst"]),
            "launches": np.where(counts, r["dst"].astype(np.int64), -1),
            "result": r["result"].astype(np.int32),
        },
    )


def _transfers(
    recording: Recording,
    records: Array,
    process: Array,
    shift: Array,
    stream: Array,
    processes: list[_Process],
    shifts: list[int],
    names: Names,
) -> None:
    """Transfers of engines, from ring files; those of servers, with calls and decisions, from events-<pid>.jsonl."""
    keep = np.flatnonzero(records["call"] == TRANSFER)
    r = records[keep]
    parts = np.concatenate([r["src"].astype("<u8"), r["dst"].astype("<u8")]).view("<f4").astype(np.float64) * 1e3
    parts = np.clip(np.nan_to_num(parts), 0.0, float(SANE))
    build, submit = parts[: 2 * len(r) : 2], parts[1 : 2 * len(r) : 2]
    wait, copy = parts[2 * len(r) :: 2], parts[2 * len(r) + 1 :: 2]
    total = r["dur_ns"].astype(np.int64)
    poll = np.maximum(total - build - submit - wait - copy, 0)
    start = r["start_ns"].astype(np.int64) + shift[keep]
    columns: dict[str, list[Any]] = {
        "start_ns": start.tolist(),
        "end_ns": (start + total).tolist(),
        "process": process[keep].tolist(),
        "thread": r["tid"].tolist(),
        "stream": stream[keep].tolist(),
        "direction": (r["direction"] & 15).tolist(),
        "bytes": r["bytes"].tolist(),
        "count": r["count"].tolist(),
        "transfer": r["transfer"].tolist(),
        "build_ns": build.astype(np.int64).tolist(),
        "submit_ns": submit.astype(np.int64).tolist(),
        "wait_ns": wait.astype(np.int64).tolist(),
        "copy_ns": copy.astype(np.int64).tolist(),
        "poll_ns": poll.astype(np.int64).tolist(),
        "ok": (r["result"] == 0).tolist(),
        "one_in": [1] * len(r),
    }
    decisions: dict[str, list[Any]] = {name: [] for name in ("time_ns", "process", "what", "reason", "gain")}
    ranges: dict[str, list[Any]] = {n: [] for n in ("start_ns", "end_ns", "process", "thread", "domain", "name")}
    served: dict[str, list[Any]] = {name: [] for name in SCHEMAS["server_calls"]}
    latest: dict[tuple[str, int], tuple[str, str]] = {}  # adapter and process -> what it is, where it stands
    offloads: dict[tuple[object, ...], dict[str, Any]] = {}  # process, adapter and source -> its last sums
    directions = {"load": 1, "store": 2}
    for row, (one, by) in enumerate(zip(processes, shifts, strict=True)):
        for event in one.files.events(one.pid):
            at = event.get("t_ns")
            if not isinstance(at, int) or not one.start_ns - 60_000_000_000 <= at:
                continue
            if event.get("kind") == "transfer":
                split = [_ns(event.get(name)) for name in ("build_ns", "submit_ns", "queue_ns", "copy_ns", "poll_ns")]
                took = sum(part for part in split if part > 0)
                number = event.get("id")
                begin = event.get("begin_ns")
                begun = begin if isinstance(begin, int) and begin <= at else at - took
                picked_from = min(max(_ns(event.get("one_in")), 1), 1 << 20)
                values = (
                    begun + by,
                    at + by,
                    row,
                    event.get("thread") or -1,
                    -1,
                    directions.get(str(event.get("direction")), 0),
                    event.get("bytes") or 0,
                    event.get("copies") or 0,
                    number if isinstance(number, int) else -1,
                    *split,
                    event.get("ok", True) is not False,
                    picked_from,
                )
                for column, value in zip(columns, values, strict=True):
                    columns[column].append(value)
            elif event.get("kind") == "decision":
                change = f": {event.get('from')} to {event.get('to')}" if event.get("to") else ""
                decisions["time_ns"].append(at + by)
                decisions["process"].append(row)
                decisions["what"].append(names.add(f"{event.get('adapter')}: {event.get('what')}{change}"))
                decisions["reason"].append(names.add(str(event.get("why") or "")))
                gain = (event.get("evidence") or {}).get("gain")
                decisions["gain"].append(float(gain) if isinstance(gain, (int, float)) else 0.0)
            elif event.get("kind") == "call":
                what = f"{event.get('server')} {event.get('call')}: {event.get('cause') or ''}".rstrip(": ")
                values = (
                    at + by - max(0, _ns(event.get("dur_ns"))),
                    at + by,
                    row,
                    event.get("thread") or -1,
                    names.add("kvprobe"),
                    names.add(what),
                )
                for column, value in zip(ranges, values, strict=True):
                    ranges[column].append(value)
                call = (
                    *values[:4],
                    names.add(str(event.get("server"))),
                    names.add(str(event.get("call"))),
                    directions.get(str(event.get("direction")), 0),
                    _count(event, "bytes"),
                    _count(event, "copies"),
                    _count(event, "pageable_copies"),
                    _count(event, "blocking_copies"),
                    names.add(str(event.get("cause") or "")),
                    "inside" in event,
                )
                for column, value in zip(served, call, strict=True):
                    served[column].append(value)
            elif event.get("kind") == "offload":
                sums = {name: _number(event.get(name)) for name in SCHEMAS["offload"] if name not in _OFFLOAD_NAMES}
                offloads[row, str(event.get("adapter")), str(event.get("source"))] = {
                    **sums,
                    "time_ns": at + by,
                    "process": row,
                    "server": names.add(str(event.get("server"))),
                    "source": names.add(str(event.get("source"))),
                }
            elif event.get("kind") == "state":
                version = f" on {event.get('distribution')} {event['version']}" if event.get("version") else ""
                state = f"{event.get('state')} {event.get('reason') or ''}".strip()
                if state == "waiting":
                    state = "waiting: the server did not use what it watches"
                latest[f"{event.get('adapter')}{version}", one.pid] = f"{event.get('adapter')}{version}", state
    # the start-up part speaks for a server until its adapters are there and speak for themselves
    spoken = {(adapter.partition(".")[0], pid) for adapter, pid in latest if "." in adapter}
    states = Counter(said for (adapter, pid), said in latest.items() if (adapter, pid) not in spoken)
    for (adapter, state), count in sorted(states.items()):
        recording.notes.append(f"adapter {adapter}: {state} ({count} process{'es' if count > 1 else ''})")
    if offloads:
        told = {name: np.array([one[name] for one in offloads.values()]) for name in SCHEMAS["offload"]}
        recording.tables["offload"] = Table("offload", told)
    if served["start_ns"]:
        recording.tables["server_calls"] = sorted_table("server_calls", {k: np.array(v) for k, v in served.items()})
    if ranges["start_ns"]:
        recording.tables["ranges"] = sorted_table("ranges", {k: np.array(v) for k, v in ranges.items()})
    picked = [one_in for one_in in columns["one_in"] if one_in > 1]
    if picked:
        recording.notes.append(
            f"adapters at rest watched {len(picked):,} of about {sum(picked):,} transfers, one in {max(picked)}: each "
            "counts for so many, so sums over transfers are estimates"
        )
    if columns["start_ns"]:
        recording.tables["transfers"] = sorted_table("transfers", {k: np.array(v) for k, v in columns.items()})
    if decisions["time_ns"]:
        recording.tables["decisions"] = sorted_table(
            "decisions", {k: np.array(v) for k, v in decisions.items()}, by="time_ns"
        )


_OFFLOAD_NAMES = ("time_ns", "process", "server", "source")


def _number(value: object) -> float:
    """A sum or a rate of an event; -1 for what is none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= SANE
    return value if known else -1  # type: ignore[return-value]


def _count(event: dict[str, Any], field: str) -> int:
    return max(0, _ns(event.get(field)))


def _ns(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and -SANE <= value <= SANE else -1


def _totals(
    recording: Recording,
    slots: Array,
    process: Array,
    thread: Array,
    stream: Array,
    over: list[tuple[int, int, int, int, int]],
    kinds: Array,
    name_of: Array,
) -> None:
    """One row a slot; calls that no slot could take follow, a row for each call's name, on no stream."""
    extra = np.array(over, dtype=np.int64).reshape(-1, 5)
    none = np.full(len(extra), -1, dtype=np.int64)
    zero = np.zeros(len(extra), dtype=np.int64)

    def both(column: Array, rest: Array) -> Array:
        return np.concatenate([column.astype(np.int64), rest.astype(np.int64)])

    recording.tables["totals"] = Table(
        "totals",
        {
            "process": both(process, extra[:, 0]),
            "thread": both(thread, none),
            "stream": both(stream, none),
            "name": both(name_of[slots["call"]], name_of[extra[:, 1]]),
            "kind": both(kinds[slots["call"]], kinds[extra[:, 1]]),
            "direction": both(slots["direction"] & 15, zero),
            "memory": both(slots["direction"] >> 4, zero),
            "calls": both(slots["count"], extra[:, 2]),
            "copies": both(slots["copies"], extra[:, 2]),
            "bytes": both(slots["bytes"], extra[:, 3]),
            "dur_ns": both(slots["dur_ns"], extra[:, 4]),
            "max_ns": both(slots["max_ns"], zero),
            "errors": both(slots["errors"], zero),
        },
    )
    nodes = slots["node_bytes"].sum(axis=0)
    if nodes.any():
        recording.machine["host_bytes_by_node"] = nodes.tolist()
        recording.machine_how["host_bytes_by_node"] = "the NUMA node of one page of each allocation"
    recording.histograms = np.concatenate([slots["histogram"].astype(np.int64), np.zeros((len(extra), 128), np.int64)])


def _stacks(recording: Recording, processes: list[_Process], shifts: list[int], names: Names) -> None:
    columns: dict[str, list[int]] = {n: [] for n in ("time_ns", "process", "thread", "blocked_ns", "gil", "stack")}
    how: set[str] = set()
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        for line in process.files.stacks(process.pid):
            at = _ns(line.get("t_ns"))
            if not process.start_ns <= at <= process.end_ns + 60_000_000_000:
                continue
            how.add(str(line.get("how")))
            for thread in line.get("threads") or []:
                blocked = thread.get("thread") == line.get("thread")
                columns["time_ns"].append(at + shift)
                columns["process"].append(row)
                columns["thread"].append(_ns(thread.get("thread")))
                columns["blocked_ns"].append(_ns(line.get("blocked_ns")) if blocked else 0)
                columns["gil"].append(1 if thread.get("gil") else 0)
                columns["stack"].append(names.add("\n".join(map(str, thread.get("frames") or []))))
    if columns["time_ns"]:
        recording.tables["stacks"] = Table("stacks", {name: np.array(values) for name, values in columns.items()})
    if "in-process" in how:
        recording.notes.append(
            "stacks were taken by the processes themselves, because py-spy was not permitted: who "
            "holds the GIL is not known, and a process that holds it while blocked cannot answer"
        )


def _samples(recording: Recording, processes: list[_Process], shifts: list[int], names: Names) -> None:
    """device.jsonl: a line a sample, `t_ns`, `device`, and a number for each metric."""
    columns: dict[str, list[Any]] = {name: [] for name in ("time_ns", "process", "device", "metric", "value")}
    of_folder = {process.folder: (process.files, shift) for process, shift in zip(processes, shifts, strict=True)}
    for folder, shift in of_folder.values():
        for line in folder.samples():
            for metric, value in line.items():
                if metric in ("t_ns", "device") or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                columns["time_ns"].append(_ns(line.get("t_ns")) + shift)
                columns["process"].append(-1)
                columns["device"].append(_ns(line.get("device", 0)))
                columns["metric"].append(names.add(metric))
                columns["value"].append(float(value))
    if columns["time_ns"]:
        recording.tables["samples"] = sorted_table("samples", {k: np.array(v) for k, v in columns.items()}, "time_ns")
