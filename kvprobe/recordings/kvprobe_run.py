"""Reads what `kvprobe run` (or an engine) recorded: ring files and the JSON files beside them, as one Recording.

Totals are exact. A process is one row of `processes` for each program that it ran: `exec` starts a new ring file under
the same pid. `processes.state` is "closed" (it ended in order), "running", "replaced" (by exec), or how it ended:
"killed by SIGKILL", "exit code 3", "ended without its exit handlers".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.probe.ring import (
    CALLS,
    CONTENTS,
    DESTINATION,
    PAGES,
    PAUSE,
    RECORD,
    SLOT,
    SPAN,
    TRANSFER,
    UNTIMED,
    RingSnapshot,
    handles_of,
    read_ring,
    read_ring_fd,
    stream_handles,
)
from kvprobe.probe.ring_layout import DEVICE_SHIFT, FILE_CALLS, FIRST_ADDRESS
from kvprobe.recordings.adapter_events import ns_of
from kvprobe.recordings.assemble import sorted_table, stream_rows
from kvprobe.recordings.graph_pieces import divide_graphs
from kvprobe.recordings.late_marks import lengthen_copies
from kvprobe.recordings.merge import ONE_BY_ONE
from kvprobe.recordings.model import Array, CallKind, Direction, Label, Memory, Recording, Source, Table
from kvprobe.recordings.run_events import (
    RingRecords,
    contents,
    cpu_waits,
    destinations,
    known_codes,
    page_faults,
    pauses,
    samples,
    stack_samples,
    stacks,
    transfers,
    waits,
)
from kvprobe.recordings.run_marks import marks
from kvprobe.recordings.run_processes import (
    OF_ANOTHER_NAMESPACE,
    UNTOLD,
    Process,
    ended,
    missing_of,
    node_of,
    processes_of,
    rank_of,
    recorded_one_by_one,
    shifts_of,
)
from kvprobe.recordings.run_tiers import tiers
from kvprobe.recordings.run_witness import witness
from kvprobe.recordings.steps import steps
from kvprobe.recordings.submitters import Submitters
from kvprobe.recordings.vocabulary import Names
from kvprobe.runfolder import packed
from kvprobe.runfolder.folder import CONFIDENTIAL, RunFolder
from kvprobe.runfolder.secrets import redact_text

__all__ = ["read"]

Progress = Callable[[str, float], None]

APART_NS = 20_000  # two records of one copy, by the clocks of two libraries
_NEVER = np.iinfo(np.int64).max


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
    names, found = Names(), _Files(progress)
    for path in given:
        found.take(path)
    if progress is not None:
        progress("putting processes together", 0.85)
    processes, shifts = found.in_order()
    notes, runs = found.notes, found.runs
    recording = Recording(source=found.source, has_executions=False)
    _fill(recording, processes, shifts, runs, names)
    notes += _launch_queue(recording, processes, shifts, names)
    for process in processes:
        if process.state in (UNTOLD, OF_ANOTHER_NAMESPACE):
            found.unread.append(f"how process {process.pid} ended is not known, so what is here of it may not be all")
        if not (process.state in ("closed", "running", "replaced") or process.state.startswith("exit code")):
            notes.append(
                f"process {process.pid} {process.state}; its totals are complete, only the newest single calls were "
                f"kept"
            )
    for folder, run in runs.items():
        _machine_facts(recording, run, found.ends.get(folder, {}), folder)
    _unix_offset(recording, processes, shifts, runs)
    late = lengthen_copies(recording)
    if late:
        notes.append(
            f"{late:,} copies took less time between two marks than any link needs for their bytes, as marks were "
            "reached late: how long they took is computed from when they were submitted and ended"
        )
    divided = divide_graphs(recording)
    if divided:
        notes.append(
            f"{divided:,} launches of CUDA graphs were seen as one piece each; their time is divided by what the "
            "graphs hold, copies at the link's rate and kernels the rest: computed, not measured"
        )
    recording.notes += notes
    recording.incomplete += found.unread
    for one in found.folders.values():
        recording.notes += one.damaged
    recording.names = names.list
    if progress is not None:
        progress("read", 1.0)
    return recording


@dataclass
class _Files:
    """What the given folders and ring files hold, one after another.

    Attributes:
        progress: who is told of it.
        source: each given path.
        processes: in the order in which they were found.
        runs: run.json of each folder; `ends` its end.json; `folders` the folder itself.
        notes: what to say of them; `unread` what of them is missing.
    """

    progress: Progress | None
    source: list[Source] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    runs: dict[Path, dict[str, Any]] = field(default_factory=dict)
    ends: dict[Path, dict[str, Any]] = field(default_factory=dict)
    folders: dict[Path, RunFolder] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def take(self, path: Path) -> None:
        """One run folder or one ring file."""
        whole = path.is_dir()
        folder = path if whole else path.parent
        files = self.folders.setdefault(folder, RunFolder(folder))
        if whole:
            self.runs[folder], self.ends[folder] = files.run(), files.end()
        run, end = self.runs.get(folder, {}), self.ends.get(folder, {})
        ring_files = files.rings() if whole else [path]
        rings, unreadable = self._rings(ring_files, whole)
        self.unread += missing_of(files, self.ends.get(folder), rings, unreadable)
        self.processes += processes_of(files, rings, run, whole, bool(end))
        size = sum(file.stat().st_blocks * 512 for file in ring_files if file.exists())  # they have holes
        tool = f"kvprobe {run.get('version', '')}".strip()
        command = redact_text(" ".join(run.get("command", [])))
        self.source.append(Source(str(path), "kvprobe", tool=tool, command=command, bytes=size))
        self.notes += _notes(run, end, rings, path)
        if run and not end:
            self.unread.append(_NOT_OVER)
        for pid, number in files.not_wrapped().items() if whole else ():
            self.unread.append(
                f"process {pid}: at least {number} functions were not led to the recorder, so calls are missing"
            )

    def _rings(self, files: Sequence[Path], whole: bool) -> tuple[list[RingSnapshot], list[str]]:
        """The ring files of a folder, and the names of those that cannot be read; a file given by itself must be."""
        rings, unreadable = list[RingSnapshot](), list[str]()
        for i, file in enumerate(files):
            if self.progress is not None:
                self.progress(f"reading {file.name}", i / max(1, len(files)) * 0.8)
            try:
                rings += _packed(file, rings) if file.name == packed.NAME else [read_ring(file)]
            except RecordingError as error:
                if not whole:
                    raise
                unreadable.append(file.name)
                self.notes.append(f"not read: {error}")
                self.unread.append(f"not read: {error}")
        return rings, unreadable

    def in_order(self) -> tuple[list[Process], list[int]]:
        """The processes by rank, node and start, and what to add to the times of each."""
        shifts = shifts_of(self.processes, self.runs)
        if recorded_one_by_one(self.processes, shifts):
            self.notes.append(ONE_BY_ONE)

        def place(number: int) -> tuple[int, str, int]:
            process = self.processes[number]
            rank = rank_of(process)
            return rank if rank >= 0 else 1 << 30, node_of(process, self.runs), process.start_ns

        order = sorted(range(len(self.processes)), key=place)
        return [self.processes[i] for i in order], [shifts[i] for i in order]


def _machine_facts(recording: Recording, run: dict[str, Any], end: dict[str, Any], folder: Path) -> None:
    """What run.json and end.json say of the machine."""
    facts = {key: run[key] for key in ("host", "kernel", "cpus", "python", "gpu_nodes") if key in run}
    recording.machine.update(facts)
    recording.machine_how.update(dict.fromkeys(facts, f"run.json of {folder.name}"))
    _queue_settings(recording, run, folder)
    protected = end.get(CONFIDENTIAL)
    if protected is not None:
        recording.machine[CONFIDENTIAL] = protected
        recording.machine_how[CONFIDENTIAL] = f"end.json of {folder.name}, reported by the driver"


def _unix_offset(
    recording: Recording, processes: list[Process], shifts: list[int], runs: dict[Path, dict[str, Any]]
) -> None:
    """What to add to a time of the recording to get UNIX time, from a ring file, else from a run.json."""
    known = [(p.unix_offset_ns, by) for p, by in zip(processes, shifts, strict=True)]
    offset = next((offset - by for offset, by in known if offset is not None), None)
    if offset is None:
        clocks = next((run for run in runs.values() if "monotonic_ns" in run and "realtime_ns" in run), None)
        offset = clocks["realtime_ns"] - clocks["monotonic_ns"] if clocks else None
    if offset is not None:
        recording.machine["unix_offset_ns"] = offset
        recording.machine_how["unix_offset_ns"] = "both clocks, read together when the recording began"


def _packed(pack: Path, rings: list[RingSnapshot]) -> Iterator[RingSnapshot]:
    """The rings in a pack, without those that lie beside it, too: the observer was killed between two steps."""
    beside = {Path(ring.path).name for ring in rings}
    try:
        for name, fd in packed.opened(pack):
            if name not in beside:
                yield read_ring_fd(fd, pack.parent / name)
    except OSError as error:
        raise RecordingError(f"{pack}: {error.strerror or error}") from None


def _queue_settings(recording: Recording, run: dict[str, Any], folder: Path) -> None:
    """What the run's environment says of launch queues: their scale, and channels where none were counted."""
    environment = run.get("environment") or {}
    scale = {"0.25x": 0.25, "0.5x": 0.5, "2x": 2.0, "4x": 4.0}.get(str(environment.get("CUDA_SCALE_LAUNCH_QUEUES")))
    facts: dict[str, tuple[float | int, str]] = {}
    if scale is not None:
        facts["queue_scale"] = scale, "CUDA_SCALE_LAUNCH_QUEUES"
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):  # of copies the second decides
        value = str(environment.get(name, ""))
        if value.isascii() and value.isdigit() and 1 <= int(value) <= 32 and not recording.machine_how.get("channels"):
            facts["channels"] = int(value), name
    for fact, (known, name) in facts.items():
        recording.machine[fact] = known
        recording.machine_how[fact] = f"{name} in run.json of {folder.name}"


_NOT_OVER = "the run is not over, or its observer was killed: what has been recorded so far was read"


def _notes(run: dict[str, Any], end: dict[str, Any], rings: list[RingSnapshot], path: Path) -> list[str]:
    notes = [str(line) for line in end.get("warnings", [])]
    status = end.get("status")
    if isinstance(status, int) and status:
        notes.append(f"the command {ended(status) if status < 0 else f'ended with exit code {status}'}")
    if run and not end:
        notes.append(_NOT_OVER)
    if not rings and path.is_dir() and not notes:
        notes.append("no process of this run made a CUDA call that kvprobe records")
    over = sum(int(ring.over_count.sum()) for ring in rings)
    if over:
        notes.append(
            f"{over} calls are in the totals only, without stream and direction: more threads or streams than "
            "a ring file can hold, calls in signal handlers, or a full disk"
        )
    if any(ring.producer == "interposer" for ring in rings):
        marked = any(len(ring.marks()) for ring in rings)
        notes.append(
            "what the device did is known from timing events: when it ran kernels and copies, and not which kernels "
            "(kvprobe run --nsys names them)"
            if marked
            else "host side only: what the device executed was not recorded (kvprobe run --nsys records it)"
        )
    return notes


def _launch_queue(recording: Recording, processes: list[Process], shifts: list[int], names: Names) -> list[str]:
    """Depth and channels as the processes calibrated them, as facts of the machine; notes where they differ.

    The calls that calibrated them are labelled as the recorder's own work: they fill a queue until one blocks.
    """
    told: dict[int, dict[str, Any]] = {}
    labels: dict[str, list[int]] = {n: [] for n in ("start_ns", "end_ns", "process", "label", "name")}
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        queue = process.files.queue(process.pid)
        start, end = ns_of(queue.get("start_ns")), ns_of(queue.get("end_ns"))
        # of a program that began later under the same pid it says nothing
        if not process.start_ns <= end or ns_of(queue.get("depth")) <= 0:
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
        values = {pid: ns_of(queue.get(key)) for pid, queue in told.items()}
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
    recording: Recording, processes: list[Process], shifts: list[int], runs: dict[Path, dict[str, Any]], names: Names
) -> None:
    """Makes every table, in steps: what the ring files hold, their streams, and what the other files add."""
    gathered = _Contents(recording.lost)
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        gathered.take(row, shift, process)
    calls, marked, looks = (_together(parts) for parts in (gathered.calls, gathered.marks, gathered.looks))
    totals = gathered.all_totals()
    streams = _streams(processes, calls, totals, marked, looks)
    recording.tables["streams"] = Table("streams", streams)
    contents(recording, looks)
    destinations(recording, _together(gathered.destinations))
    page_faults(recording, _together(gathered.faults))
    pauses(recording, _together(gathered.pauses))
    waits(recording, _together(gathered.pauses), names)
    words = _CallWords(calls.records, totals.slots, names)
    _calls(recording, calls, words)
    marks(recording, marked, names)
    submitters = _engine_submitters(processes, streams)
    transfers(recording, calls, processes, shifts, names, submitters)
    recording.tables["submitters"] = submitters.table(names)
    _totals(recording, totals, words)
    steps(recording, processes, shifts, names)
    stacks(recording, processes, shifts, names)
    stack_samples(recording, processes, shifts, names)
    cpu_waits(recording, processes, shifts)
    samples(recording, processes, shifts, names)
    tiers(recording, processes, shifts, names)
    witness(recording, processes, shifts, names)
    recording.tables["processes"] = Table(
        "processes",
        {
            "pid": np.array([p.pid for p in processes], np.int64),
            "rank": np.array([rank_of(p) for p in processes], np.int32),
            "node": names.map([node_of(p, runs) for p in processes]),
            "name": names.map([_process_name(p) for p in processes]),
            "command": names.map([_command(p) for p in processes]),
            "start_ns": np.array([p.start_ns + s for p, s in zip(processes, shifts, strict=True)], np.int64),
            "end_ns": np.array([p.end_ns + s for p, s in zip(processes, shifts, strict=True)], np.int64),
            "state": names.map([p.state for p in processes]),
        },
    )


_Part = tuple[int, int, Array]  # row of a process, what its clock is shifted by, its records


@dataclass
class _Totals:
    """Totals of all processes.

    Attributes:
        slots: (rows,) SLOT; `process`, `thread` and `stream` of each likewise.
        without_slot: process, call, calls, bytes and ns of what no slot could take.
    """

    slots: Array
    process: Array
    thread: Array
    stream: Array
    without_slot: list[tuple[int, int, int, int, int]]


@dataclass
class _Contents:
    """What the ring files hold, process by process.

    Attributes:
        lost: row of a process -> single calls that were overwritten; the recording's own, filled here.
        calls: single calls and transfers; `marks` of the device; `looks` at what copies carried; `destinations` that
            were looked at on the device; page `faults`; `pauses` between calls.
        totals: row of a process, slots, and the thread of each slot.
        without_slot: see `_Totals`.
    """

    lost: dict[int, int]
    calls: list[_Part] = field(default_factory=list)
    marks: list[_Part] = field(default_factory=list)
    looks: list[_Part] = field(default_factory=list)
    destinations: list[_Part] = field(default_factory=list)
    faults: list[_Part] = field(default_factory=list)
    pauses: list[_Part] = field(default_factory=list)
    totals: list[tuple[int, Array, Array]] = field(default_factory=list)
    without_slot: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def take(self, row: int, shift: int, process: Process) -> None:
        """The files of one process."""
        counted = process.counted()
        records = _joined([ring.records() for ring in counted])
        self.marks.append((row, shift, _joined([ring.marks() for ring in counted])))
        self.looks.append((row, shift, _joined([ring.notes(CONTENTS) for ring in counted])))
        self.destinations.append((row, shift, _joined([ring.notes(DESTINATION) for ring in counted])))
        self.faults.append((row, shift, _joined([ring.notes(PAGES) for ring in counted])))
        self.pauses.append((row, shift, _joined([ring.notes(PAUSE) for ring in counted])))
        missing = sum(ring.overwritten() for ring in counted) + int((records["call"] != TRANSFER).sum())
        for ring in process.rings:
            if ring not in counted:
                records = _with_engine(records, ring.records())
        self.calls.append((row, shift, records))
        lost = missing - int((records["call"] != TRANSFER).sum())  # less what the engines' files had of it
        if lost > 0:
            self.lost[row] = lost
        for ring in counted:
            for section in ring.sections:
                slots = section.slots[section.slots["call"] != TRANSFER]
                owner = section.tid if section.owners == 1 and section.tid else _only_thread(section.records)
                self.totals.append((row, slots, np.full(len(slots), owner, dtype=np.int64)))
            self.without_slot += [
                (row, int(c), int(ring.over_count[c]), int(ring.over_bytes[c]), int(ring.over_dur_ns[c]))
                for c in np.flatnonzero(ring.over_count)
                if c not in FILE_CALLS
            ]

    def all_totals(self) -> _Totals:
        """Those of all processes, on no stream yet."""
        slots = np.concatenate([part for _, part, _ in self.totals] or [np.zeros(0, SLOT)])
        rows = np.array([row for row, _, _ in self.totals], dtype=np.int32)
        process = np.repeat(rows, [len(part) for _, part, _ in self.totals])
        thread = np.concatenate([owners for _, _, owners in self.totals] or [np.zeros(0, np.int64)])
        return _Totals(slots, process, thread, np.full(len(slots), -1, np.int32), self.without_slot)


def _together(parts: list[_Part]) -> RingRecords:
    """Records of all processes, on no stream yet."""
    lengths = [len(part) for _, _, part in parts]
    process = np.repeat(np.array([row for row, _, _ in parts], dtype=np.int32), lengths)
    shift = np.repeat(np.array([by for _, by, _ in parts], dtype=np.int64), lengths)
    return RingRecords(_joined([part for _, _, part in parts]), process, shift, np.full(sum(lengths), -1, np.int32))


def _streams(
    processes: list[Process], calls: RingRecords, totals: _Totals, marked: RingRecords, looks: RingRecords
) -> dict[str, Array]:
    """Columns of one table of streams for all four, which are told their rows of it."""
    process = np.concatenate([calls.process, totals.process, marked.process, looks.process])
    of_spans = np.where(marked.records["call"] == SPAN, handles_of(marked.records), np.int64(-1))
    handles = [handles_of(calls.records), handles_of(totals.slots), of_spans, handles_of(looks.records)]
    rows, columns = stream_rows(process, np.zeros(len(process), np.int32), np.concatenate(handles))
    rows, columns = _in_order_of_use(rows, columns, processes)
    spans = np.flatnonzero(of_spans >= 0) + len(calls.process) + len(totals.process)
    columns = _with_devices(columns, rows[spans], marked.records["transfer"][of_spans >= 0])
    edges = np.cumsum([len(part) for part in handles])[:-1]
    calls.stream, totals.stream, marked.stream, looks.stream = np.split(rows, edges)
    return columns


def _with_devices(columns: dict[str, Array], of_spans: Array, device: Array) -> dict[str, Array]:
    """Streams with their devices: a default stream's handle says its own, others' are known where spans were seen.

    Args:
        columns: of the table of streams.
        of_spans: of each span, the row of its stream.
        device: of each span.
    """
    handle = columns["handle"]
    default = handle < FIRST_ADDRESS
    devices = np.full(len(handle), -1, dtype=np.int32)
    devices[of_spans] = device
    devices[default] = handle[default] >> DEVICE_SHIFT
    for process in np.unique(columns["process"]):
        mine = columns["process"] == process
        known = np.unique(devices[mine & (devices >= 0)])
        if len(known) < 2:  # the others are of that one, too
            devices[mine] = known[0] if len(known) else 0
    return {**columns, "device": devices, "handle": np.where(default, handle % (1 << DEVICE_SHIFT), handle)}


def _engine_submitters(processes: list[Process], streams: dict[str, Array]) -> Submitters:
    """Who submitted for engines, by the heads of their ring files."""
    submitters = Submitters()
    for row, process in enumerate(processes):
        mine = np.flatnonzero(streams["process"] == row)
        rows_of = dict(zip(streams["handle"][mine].tolist(), mine.tolist(), strict=True))
        for ring in process.rings:
            if ring.producer != "interposer":
                submitters.engine(row, ring, rows_of)
    return submitters


class _CallWords:
    """What each call's number stands for.

    Attributes:
        kind: (256,) CallKind.
        name: (256,) index of its name.
    """

    def __init__(self, records: Array, slots: Array, names: Names) -> None:
        """`records`, `slots`: whose numbers may be a newer writer's."""
        self.kind = np.zeros(256, dtype=np.uint8)
        self.name = np.zeros(256, dtype=np.int32)
        for number, (kind, name) in CALLS.items():
            self.kind[number] = CallKind[kind].value if kind in CallKind.__members__ else CallKind.OTHER
            self.name[number] = names.add(name)
        for number in set(np.unique(records["call"])) | set(np.unique(slots["call"])):
            if int(number) not in CALLS:  # a newer writer's call
                self.name[number] = names.add(f"call {number}")


def _in_order_of_use(
    rows: Array, columns: dict[str, Array], processes: list[Process]
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


def _command(process: Process) -> str:
    """As it was started; what a process has called itself since (setproctitle) is its name."""
    argv = process.checkin.get("argv")
    started = " ".join(argv) if argv else ""
    later = process.named or next((ring.command for ring in process.rings), "")
    return redact_text(later if later and later.split()[:1] != started.split()[:1] else started)


def _process_name(process: Process) -> str:
    words = _command(process).split()
    if not words:
        return str(process.pid)
    name = Path(words[0]).name
    if not name.startswith("python"):
        return name
    for word in words[1:]:
        if word == "-c":
            ours = any(one.startswith("multiprocessing.") for one in words)
            return "multiprocessing worker" if ours else f"{name} -c"
        if not word.startswith("-"):
            return Path(word).name
    return name


def _calls(recording: Recording, rings: RingRecords, words: _CallWords) -> None:
    of_calls = (rings.records["call"] != TRANSFER) & (rings.records["dur_ns"] != UNTIMED)
    kept = rings.some(np.flatnonzero(of_calls))
    r = kept.records
    start = r["start_ns"].astype(np.int64) + kept.shift
    transfer = r["transfer"].astype(np.int64)
    kind = words.kind[r["call"]]
    # A record of one of these has the number of launches where a copy has its destination.
    counts = (kind == CallKind.SYNC) | (kind == CallKind.LAUNCH) & (r["dst"] > 0)
    recording.tables["calls"] = sorted_table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + r["dur_ns"].astype(np.int64),
            "process": kept.process,
            "thread": r["tid"].astype(np.int64),
            "name": words.name[r["call"]],
            "kind": kind,
            "stream": kept.stream,
            "direction": known_codes(r["direction"] & 15, Direction),
            "memory": known_codes(r["direction"] >> 4, Memory),
            "bytes": r["bytes"].astype(np.int64),
            "count": r["count"].astype(np.int32),
            "transfer": np.where(transfer > 0, transfer, -1),
            "src": r["src"],
            "dst": np.where(counts, 0, r["dst"]),
            "launches": np.where(counts, r["dst"].astype(np.int64), -1),
            "result": r["result"].astype(np.int32),
        },
    )


def _totals(recording: Recording, totals: _Totals, words: _CallWords) -> None:
    """One row a slot; calls that no slot could take follow, a row for each call's name, on no stream."""
    slots = totals.slots
    extra = np.array(totals.without_slot, dtype=np.int64).reshape(-1, 5)
    none = np.full(len(extra), -1, dtype=np.int64)
    zero = np.zeros(len(extra), dtype=np.int64)

    def both(column: Array, rest: Array) -> Array:
        return np.concatenate([column.astype(np.int64), rest.astype(np.int64)])

    recording.tables["totals"] = Table(
        "totals",
        {
            "process": both(totals.process, extra[:, 0]),
            "thread": both(totals.thread, none),
            "stream": both(totals.stream, none),
            "name": both(words.name[slots["call"]], words.name[extra[:, 1]]),
            "kind": both(words.kind[slots["call"]], words.kind[extra[:, 1]]),
            "direction": both(known_codes(slots["direction"] & 15, Direction), zero),
            "memory": both(known_codes(slots["direction"] >> 4, Memory), zero),
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
