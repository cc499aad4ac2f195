"""The files of a run folder: what is in each, its version, one function that writes and one that reads each kind.

| file | what | written by |
|---|---|---|
| `run.json` | the command, the machine, the options, both clocks (`Run`) | `kvprobe run`, `kvprobe attach` |
| `end.json` | how it ended, what was not seen (`End`) | the observer |
| `processes.jsonl` | a line for each process that ended (`ProcessEnd`) | the observer |
| `stacks-<pid>.jsonl` | a line for each blocked call whose stacks were taken (`Stacks`) | the observer |
| `stack-samples-<pid>.jsonl` | stacks of threads that make calls, now and then (`StackSample`) | the observer |
| `cpu-waits-<pid>.jsonl` | a line for each time in which a thread waited for a CPU (`CpuWait`) | the observer |
| `device.jsonl` | a line a sample of the GPU's counters (`Sample`) | the observer |
| `checkin-<pid>-<t>.json` | who a Python process is (`Checkin`) | the start-up hook |
| `events-<pid>.jsonl` | what adapters and the interposer saw and decided (`Event`) | adapters, interposer |
| `steps-<pid>.jsonl`, `told-<pid>.jsonl` | steps and requests (`StepLine`) | that process, observer |
| `steps.sock` | where other programs tell theirs: see `kvprobe/instrument/step_socket.py` | the observer |
| `tiers-<pid>.jsonl` | a line for each place that it read or wrote files or sockets (`Place`) | interposer |
| `verify-<pid>.json` | how many copies were compared, and why others were not (`Witness`) | interposer |
| `mismatches-<pid>.jsonl` | a line for each load whose bytes were others than before (`Mismatch`) | interposer |
| `queue-<pid>.json` | depth and channels as calibrated (`Queue`) | calibration |
| `<pid>-<t>.kvp`, `engine-*.kvp` | every call: see `native/src/kvp.h` | interposer, engine |
| `ended.pack` | such files of short processes that have ended: see `packed.py` | the observer |
| `no-room.kvp` | the calls of processes for whose files --max-size left no space, together | interposer |
| `not-recorded-<pid>-<errno>` | an empty folder: that process could open no file | interposer |
| `observer.log` | what the observer printed: empty where all went well | the observer |
| `stacks-request-<pid>` | an empty file: that process is asked for its stacks | the observer |
| `stacks-answer-<pid>.jsonl` | a line for each answer, its stacks | the start-up hook |
| `outcome.txt` | the lines that `kvprobe run` prints at the end | the observer |
| `observer.pid`, `detached` | who observes an attached process; that it is to end | `kvprobe attach`, `detach` |
| `not-wrapped-<pid>-<n>` | an empty folder: n functions of that process were not led to the recorder | interposer |
| `inner-<pid>.json` | where a `kvprobe run` inside this one recorded (`Inner`) | that `kvprobe run` |

Times are CLOCK_MONOTONIC nanoseconds. A reader takes the folder as anybody's work: what does not have these types is
left out and named, what is larger than any recording is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict

import msgspec

from kvprobe.errors import RecordingError
from kvprobe.runfolder import files, packed
from kvprobe.runfolder.step_lines import LONGEST_ID, MOST_REQUESTS, one_by_one

__all__ = ["CONFIDENTIAL", "VERSION", "RunFolder"]

VERSION = 1  # of the folder, in run.json; 0: none is named there. History: 1 first to name it, private files
CONFIDENTIAL: Final = "confidential_computing"  # in end.json: whether the GPUs run in that mode

Int = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Number = Int | Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class Run(TypedDict, total=False):
    """run.json."""

    schema: Annotated[int, msgspec.Meta(ge=0)]
    command: list[str]
    cwd: str
    version: str
    host: str
    kernel: str
    cpus: Int | None
    python: str
    pid: Pid
    realtime_ns: Int
    monotonic_ns: Int
    options: dict[str, Any]
    environment: dict[str, str]


class End(TypedDict, total=False):
    """end.json: `status` of the command, as `ProcessEnd.status`; null where nobody could tell.

    `rings`: the ring files that there were, seen at any time, and how many bytes each had at the end; 0 of one that had
    gone by then.
    """

    t_ns: Int
    status: Int | None
    warnings: list[str]
    rings: dict[str, Int]
    confidential_computing: bool | None


class Inner(TypedDict, total=False):
    """inner-<pid>.json."""

    folder: str


class ProcessEnd(TypedDict, total=False):
    """A process that ended: `status` is its exit status, -N for signal N, or null where the system does not tell."""

    pid: Pid
    t_ns: Int
    status: Int | None
    command: str


class Thread(TypedDict, total=False):
    """Stack of one thread, innermost frame first, as `function (file:line)`."""

    thread: Int
    name: str
    gil: bool
    active: bool
    frames: list[str]


class Stacks(TypedDict, total=False):
    """Stacks of a process of which a call was blocked."""

    t_ns: Int
    pid: Pid
    thread: Int
    call: str
    stream: Annotated[int, msgspec.Meta(ge=0)]
    blocked_ns: Int
    how: str
    error: str
    threads: list[Thread] | None


class StackSample(TypedDict):
    """Stacks of the threads of a process that make calls, at some instant."""

    t_ns: Int
    threads: list[Thread]


class _Answer(TypedDict):
    threads: list[dict[str, Any]]


class CpuWait(TypedDict, total=False):
    """Between two looks at a thread: its time waiting for a CPU and on one, and for its group's quota to be renewed."""

    begin_ns: Int
    end_ns: Int
    thread: Int
    waited_ns: Int
    ran_ns: Int
    throttled_ns: Int


class Checkin(TypedDict, total=False):
    """A Python process at its start."""

    pid: Pid
    ppid: Pid
    t_ns: Int
    argv: list[str]
    executable: str
    prefix: str
    python: str
    preloaded: bool
    ld_preload: str
    rank: dict[str, str]


class Queue(TypedDict, total=False):
    """What a process's launch queue holds, and when that was measured."""

    start_ns: Int
    end_ns: Int
    depth: Int
    channels: Int
    capacity: Int
    baseline_ns: Int
    p99_ns: Int
    how: str


class Event(TypedDict, total=False):
    """What an adapter saw or decided; `kvprobe.instrument.event_log` says more. Adapters add fields of their own."""

    t_ns: Int
    kind: str
    adapter: str
    server: str
    id: Int | str | None
    direction: str | None
    thread: Int | None
    copies: Int | None
    bytes: Int | None
    begin_ns: Int | None
    dur_ns: Number | None
    build_ns: Number | None
    submit_ns: Number | None
    queue_ns: Number | None
    copy_ns: Number | None
    poll_ns: Number | None
    one_in: Int | None
    evidence: dict[str, Any] | None


_OfEach = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]], msgspec.Meta(max_length=MOST_REQUESTS)]


class StepLine(TypedDict, total=False):
    """A step, several alike, a request or a time of one; `kvprobe/runfolder/step_lines.py` says more."""

    t_ns: Int
    kind: str
    n: Int
    request: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]
    begin_ns: Int
    step: Int | None
    each: list[tuple[Int, Int, Int | None]]
    phase: str
    server: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]
    thread: Int | None
    trace: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]
    requests: _OfEach
    tokens: Annotated[int, msgspec.Meta(ge=0, le=2**30)] | _OfEach
    computed: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | _OfEach | None


class Place(TypedDict, total=False):
    """A folder of files, a device or the kind of a socket's peer (`native/interpose/places.c`).

    `filesystem` is statfs's f_type; `direct`: the page cache is bypassed; `port`: the peer's, 0 unknown; `here`: it is
    on this machine.
    """

    t_ns: Int
    place: Annotated[int, msgspec.Meta(ge=0, le=255)]
    kind: str
    path: str
    filesystem: Int
    device: str
    direct: Int
    port: Int
    here: Int


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Address = Count  # of user space, or a stream's handle


class Witness(TypedDict, total=False):
    """What the byte witness of a process did (`native/interpose/witness.c`); numbers of copies where not said.

    `loads`, `stores`: seen. Not looked at: `pageable` memory, `shapes` of 2D and 3D copies, `captured` into graphs,
    `small` without a whole page, `unchosen` without a page that was looked at, `budget` spent, `crowded` out by others,
    on a stream `elsewhere`, `unreadable`. `summed`: stores whose bytes were summed when they had arrived; `unfinished`
    at the end; `crossed` by another on another stream.

    Loads: `unstored` of bytes that no store left there, `early` before the store was over, `compared`, with so many
    `compared_pages`, of these `changed`; `watched` while they were under way, `past` before that, `overwritten`.
    `untold`: mismatches without a line.

    `closed`: it ended in order. `level`: one page in 2^level was looked at, at the end. `spent_ns` in the program's
    threads, `helper_ns` in one of kvprobe's; `lag_ns`: the longest time between two looks of that. `homes`: address,
    bytes, loads that were compared and those that had changed, of each allocation; address 0: all others.
    """

    t_ns: Int
    closed: bool
    level: Annotated[int, msgspec.Meta(ge=0, le=63)]
    loads: Count
    stores: Count
    pageable: Count
    shapes: Count
    captured: Count
    small: Count
    unchosen: Count
    budget: Count
    crowded: Count
    elsewhere: Count
    unreadable: Count
    summed: Count
    unfinished: Count
    crossed: Count
    unstored: Count
    early: Count
    compared: Count
    compared_pages: Count
    changed: Count
    watched: Count
    past: Count
    overwritten: Count
    untold: Count
    spent_ns: Count
    helper_ns: Count
    lag_ns: Count
    homes: list[tuple[Address, Count, Count, Count]]


class StoreOfMismatch(TypedDict):
    """The store that filled the newest of the pages; `summed_ns`: when its bytes were summed there."""

    start_ns: Int
    summed_ns: Int
    device: Address
    address: Address
    bytes: Count
    stream: Address
    thread: Int
    call: Annotated[int, msgspec.Meta(ge=0, le=255)]


class Mismatch(TypedDict, total=False):
    """A load whose host memory `changed` since the store, or was `overwritten` while the load was under way.

    `pages` were looked at, `changed` of them differ, the `first` and the `last` at these addresses. `home`: the
    allocation.
    """

    t_ns: Int
    kind: str
    address: Address
    device: Address
    bytes: Count
    stream: Address
    thread: Int
    call: Annotated[int, msgspec.Meta(ge=0, le=255)]
    load_ns: Int
    pages: Count
    changed: Count
    first: Address
    last: Address
    home: Address
    home_bytes: Count
    store: StoreOfMismatch


Sample = dict[str, Number | str | bool | None]
_OF_A_LINE = {
    "processes": ProcessEnd,
    "stacks": Stacks,
    "stack": StackSample,
    "cpu": CpuWait,
    "device": Sample,
    "events": Event,
    "steps": StepLine,
    "told": StepLine,
    "tiers": Place,
    "mismatches": Mismatch,
}
_NOT_RECORDED = re.compile(r"not-recorded-(\d+)-(\d+)")
_STEPS = re.compile(r"(?:steps|told)-(\d{1,9})(?:-before)?\.jsonl")
_NOT_WRAPPED = re.compile(r"not-wrapped-(\d{1,10})-(\d{1,10})")


def _encoded(value: Any) -> bytes:
    """As JSON. Arguments and paths need not be UTF-8: what is not becomes a question mark."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False).encode(errors="replace")


class RunFolder:
    """One run folder, of this kvprobe or of anybody."""

    def __init__(self, path: Path) -> None:
        """Takes its path; nothing is looked at yet."""
        self.path = path
        self.damaged: list[str] = []  # one line for each file that was not, or not all, as it should be

    # ---- writing -----------------------------------------------------------------------------------------------

    def write_run(self, run: dict[str, Any]) -> None:
        """Writes run.json, with the version.

        Raises:
            OSError: it cannot be written.
        """
        files.write(self.path / "run.json", msgspec.json.format(_encoded({"schema": VERSION, **run})))

    def write_end(self, end: End) -> None:
        """Writes end.json; raises as `write_run`."""
        files.write(self.path / "end.json", msgspec.json.format(_encoded(end)))

    def write_inner(self, pid: int, folder: Path) -> None:
        """Writes inner-<pid>.json; raises as `write_run`."""
        files.write(self.path / f"inner-{pid}.json", _encoded(Inner(folder=str(folder))))

    def write_outcome(self, lines: list[str]) -> None:
        """Writes outcome.txt; raises as `write_run`."""
        files.write(self.path / "outcome.txt", ("\n".join(lines) + "\n").encode(errors="replace"))

    def write_observer(self, pid: int) -> None:
        """Writes observer.pid; raises as `write_run`."""
        files.write(self.path / "observer.pid", str(pid).encode())

    def mark_detached(self) -> None:
        """Tells the observer that kvprobe was detached; raises as `write_run`."""
        os.close(files.open_append(self.path / "detached"))

    def append_ended(self, line: ProcessEnd) -> None:
        """Adds a line to processes.jsonl; raises as `write_run`."""
        files.append(self.path / "processes.jsonl", _encoded(line))

    def append_stacks(self, pid: int, line: dict[str, Any]) -> None:
        """Adds a line to stacks-<pid>.jsonl; raises as `write_run`."""
        files.append(self.path / f"stacks-{pid}.jsonl", _encoded(line))

    def append_stack_sample(self, pid: int, line: dict[str, Any]) -> None:
        """Adds a line to stack-samples-<pid>.jsonl; raises as `write_run`."""
        files.append(self.path / f"stack-samples-{pid}.jsonl", _encoded(line))

    def append_cpu_wait(self, pid: int, line: CpuWait) -> None:
        """Adds a line to cpu-waits-<pid>.jsonl; raises as `write_run`."""
        files.append(self.path / f"cpu-waits-{pid}.jsonl", _encoded(line))

    def append_sample(self, line: dict[str, Any]) -> None:
        """Adds a line to device.jsonl; raises as `write_run`."""
        files.append(self.path / "device.jsonl", _encoded(line))

    def open_log(self) -> int:
        """A descriptor to append to observer.log with; raises as `write_run`."""
        return files.open_append(self.path / "observer.log")

    def ask_for_stacks(self, pid: int) -> None:
        """Asks a process for its stacks; raises as `write_run`."""
        os.close(files.open_append(self.path / f"stacks-request-{pid}"))

    @property
    def detached(self) -> bool:
        """Whether kvprobe was detached from the process."""
        return (self.path / "detached").exists()

    # ---- reading -----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """run.json; empty where there is none.

        Raises:
            RecordingError: it is of a newer kvprobe.
        """
        run = self._object("run.json", Run)
        if int(run.get("schema", 0)) > VERSION:
            raise RecordingError(
                f"{self.path}: recorded by a newer kvprobe (run folder version {run['schema']}, this one reads up to "
                f"{VERSION}); update kvprobe"
            )
        return run

    def end(self) -> dict[str, Any]:
        """end.json; empty where there is none yet."""
        return self._object("end.json", End)

    def outcome(self) -> list[str]:
        """Lines of outcome.txt; empty where there is none yet."""
        try:
            return files.read(self.path / "outcome.txt").decode(errors="replace").splitlines()
        except OSError:
            return []

    def ended(self) -> Iterator[dict[str, Any]]:
        """Lines of processes.jsonl that name a process."""
        return (line for line in self._lines("processes.jsonl") if "pid" in line)

    def stacks(self, pid: int) -> Iterator[dict[str, Any]]:
        """Lines of stacks-<pid>.jsonl."""
        return self._lines(f"stacks-{pid}.jsonl")

    def stack_samples(self, pid: int) -> Iterator[dict[str, Any]]:
        """Lines of stack-samples-<pid>.jsonl."""
        return self._lines(f"stack-samples-{pid}.jsonl")

    def answered_stacks(self, pid: int) -> list[dict[str, Any]]:
        """Whole lines of stacks-answer-<pid>.jsonl that hold stacks; none where there is no such file."""
        try:
            lines = files.read(self.path / f"stacks-answer-{pid}.jsonl").split(b"\n")[:-1]
        except OSError:
            return []
        answers: list[_Answer] = []
        for line in lines:
            try:
                answers.append(msgspec.json.decode(line, type=_Answer))
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                continue
        return [dict(answer) for answer in answers]

    def cpu_waits(self, pid: int) -> Iterator[dict[str, Any]]:
        """Lines of cpu-waits-<pid>.jsonl."""
        return self._lines(f"cpu-waits-{pid}.jsonl")

    def samples(self) -> Iterator[dict[str, Any]]:
        """Lines of device.jsonl."""
        return self._lines("device.jsonl")

    def events(self, pid: int) -> Iterator[dict[str, Any]]:
        """Lines of events-<pid>.jsonl that have a time and a kind."""
        return (line for line in self._lines(f"events-{pid}.jsonl") if "t_ns" in line and "kind" in line)

    def steps(self, pid: int) -> Iterator[Iterator[dict[str, Any]]]:
        """Lines of each file of steps of a process, oldest first, one a step; requests' numbers count within a file."""
        names = [f"{what}-{pid}{part}.jsonl" for what in ("steps", "told") for part in ("-before", "")]
        found = [name for name in names if (self.path / name).exists()]
        return (
            (one for line in self._lines(name) if "t_ns" in line and "kind" in line for one in one_by_one(line))
            for name in found
        )

    def told_steps(self) -> list[int]:
        """Processes that told steps, (pids)."""
        found = (_STEPS.fullmatch(path.name) for path in self.path.glob("*.jsonl"))
        return sorted({int(m[1]) for m in found if m})

    def places(self, pid: int) -> list[dict[str, Any]]:
        """Lines of tiers-<pid>.jsonl that have a time and a number."""
        return [line for line in self._lines(f"tiers-{pid}.jsonl") if "t_ns" in line and "place" in line]

    def witness(self, pid: int) -> dict[str, Any]:
        """verify-<pid>.json; empty where there is none."""
        return self._object(f"verify-{pid}.json", Witness)

    def mismatches(self, pid: int) -> list[dict[str, Any]]:
        """Lines of mismatches-<pid>.jsonl that say what, and where."""
        needed = {"t_ns", "kind", "address", "load_ns"}
        return [line for line in self._lines(f"mismatches-{pid}.jsonl") if needed <= set(line)]

    def queue(self, pid: int) -> dict[str, Any]:
        """queue-<pid>.json; empty where there is none."""
        return self._object(f"queue-{pid}.json", Queue)

    def checkins(self) -> list[dict[str, Any]]:
        """All checkin-*.json that say which process, and when."""
        found = (self._object(path.name, Checkin) for path in sorted(self.path.glob("checkin-*.json")))
        return [checkin for checkin in found if {"pid", "t_ns"} <= set(checkin)]

    def inner(self) -> list[str]:
        """The folders of runs inside this one: what they recorded is missing here."""
        found = (self._object(path.name, Inner) for path in sorted(self.path.glob("inner-*.json")))
        return [str(inner["folder"]) for inner in found if inner.get("folder")]

    def rings(self) -> list[Path]:
        """What has calls: the ring files, and the pack of those of short processes."""
        return [*sorted(self.path.glob("*.kvp")), *self.path.glob(packed.NAME)]

    def not_recorded(self) -> list[tuple[int, str]]:
        """Processes that could write no ring file, and why."""
        found = (_NOT_RECORDED.fullmatch(path.name) for path in sorted(self.path.glob("not-recorded-*")))
        return [(int(m[1]), os.strerror(int(m[2]))) for m in found if m and int(m[2]) in errno.errorcode]

    def not_wrapped(self) -> dict[int, int]:
        """How many functions or words that lead to one a process has at least that are not recorded: pid -> number."""
        most: dict[int, int] = {}
        for path in self.path.glob("not-wrapped-*"):
            if match := _NOT_WRAPPED.fullmatch(path.name):
                most[int(match[1])] = max(int(match[2]), most.get(int(match[1]), 0))
        return dict(sorted(most.items()))

    def _object(self, name: str, schema: Any) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(files.read(self.path / name))
            msgspec.convert(value, schema)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._say(name, error)
            return {}
        return dict(value)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects of a JSON-lines file; the last line may have been cut by a kill."""
        try:
            data = files.read(self.path / name)
        except FileNotFoundError:
            return
        except OSError as error:
            self._say(name, error)
            return
        schema = _OF_A_LINE[name.split("-")[0].split(".")[0]]
        lines = data.split(b"\n")
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                value = msgspec.json.decode(line)
                msgspec.convert(value, schema)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                if number < len(lines) - 1:
                    self._say(f"{name}, line {number + 1}", error)
                continue
            yield value

    def _say(self, what: str, error: Exception) -> None:
        if len(self.damaged) < 20:
            text = error.strerror if isinstance(error, OSError) else str(error)
            self.damaged.append(f"not read: {what}: {str(text or error).splitlines()[0][:200]}")
