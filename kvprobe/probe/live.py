"""Figures of running, watched processes, from two looks at their ring files: what `kvprobe top` shows.

It only reads files, so it may come and go as it likes; a look costs a few KiB a thread of the watched process.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.environment import RUN
from kvprobe.errors import RecordingError, UsageError
from kvprobe.launchqueue.constants import JUMP_TIMES, LIVE_CALLS
from kvprobe.launchqueue.evidence import LiveSums
from kvprobe.launchqueue.judge import conclude
from kvprobe.probe.errors_of_cuda import first_error
from kvprobe.probe.ring import (
    BUCKETS,
    CALLS,
    PAGEABLE,
    TRANSFER,
    RingSnapshot,
    ThreadSection,
    bucket_bounds,
    percentile,
    read_ring,
    stream_handles,
    stream_number,
)
from kvprobe.probe.ring_layout import DEVICE_SHIFT, FIRST_ADDRESS
from kvprobe.runfolder.files import temporary_folder
from kvprobe.runfolder.identity import alive

__all__ = [
    "DIRECTIONS",
    "CallTime",
    "InFlight",
    "Live",
    "ProcessView",
    "StreamView",
    "Totals",
    "find_rings",
    "totals",
]

DIRECTIONS = {0: "other", 1: "h2d", 2: "d2h", 3: "d2d", 4: "h2h"}
SUBMITTING = frozenset(n for n, (kind, _) in CALLS.items() if kind in ("COPY", "BATCH", "MEMSET", "LAUNCH", "GRAPH"))
COPYING = frozenset(n for n, (kind, _) in CALLS.items() if kind in ("COPY", "BATCH"))

SUMS = ("count", "copies", "bytes", "dur_ns", "slow", "slow_ns", "errors")

Key = tuple[int, int, int]  # stream, call, direction


@dataclass
class Totals:
    """Sums of one (stream, call, direction) over the threads of a process, as in kvp.h's kvp_slot."""

    count: int = 0
    copies: int = 0
    bytes: int = 0
    dur_ns: int = 0
    slow: int = 0
    slow_ns: int = 0
    errors: int = 0
    histogram: Any = field(default_factory=lambda: np.zeros(BUCKETS, np.uint64))

    def since(self, before: Totals) -> Totals:
        """What came after an earlier look."""
        return Totals(
            self.count - before.count,
            self.copies - before.copies,
            self.bytes - before.bytes,
            self.dur_ns - before.dur_ns,
            self.slow - before.slow,
            self.slow_ns - before.slow_ns,
            self.errors - before.errors,
            self.histogram - before.histogram,
        )

    def add(self, other: Totals) -> None:
        """Adds another's sums."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.histogram = self.histogram + other.histogram

    @property
    def timed(self) -> int:
        """Calls whose duration is known."""
        return int(self.histogram.sum())


@dataclass(frozen=True)
class InFlight:
    """A call that a thread of the process is inside of."""

    tid: int
    call: str
    stream: int
    age_ns: int
    number: int = -1


@dataclass
class StreamView:
    """One stream of a process over the last interval.

    Attributes:
        stream: handle; 0 is the legacy default stream.
        number: what the stream is called by, as in a report of the same run: "stream 3".
        submissions_per_s: copies, memsets, launches: everything that takes a slot of the launch queue.
        p50_ns: median host time of one; None where none was timed. `p99_ns` likewise.
        baseline_ns: what one costs while the queue has free slots: the lowest median seen of this kind of call.
        blocked_share: part of the wall time lost above the baseline, calls still inside included; may pass 1 where
            several threads block.
        outstanding: copies whose transfer has not ended, at most; None where the process tells of no transfers.
        bytes_per_s: by direction, "h2d", "d2h", ...
        suspected: a tenth of the calls became several times slower and the blocked share is high, as a full queue does
            it; pageable copies, which are slow by themselves, left out. Executions are not seen
            here, so it is a suspicion; a report decides.
    """

    stream: int
    submissions_per_s: float
    p50_ns: float | None
    p99_ns: float | None
    baseline_ns: float | None
    blocked_share: float
    outstanding: int | None
    bytes_per_s: dict[str, float]
    suspected: bool
    number: int = -1


@dataclass
class CallTime:
    """What a thread spent inside calls in the last interval.

    Attributes:
        submissions: how many it made.
        spent_ns: by (kind of call as in `ring.CALLS`, whether it copied pageable memory); of a call that it is still
            inside of, what lies in the interval.
    """

    tid: int
    name: str
    submissions: int
    spent_ns: dict[tuple[str, bool], int]


@dataclass
class ProcessView:
    """One watched process.

    Attributes:
        path: its ring file.
        state: "running", "closed" (it ended in order) or "killed".
        interval_s: time between the two looks.
        longest: the longest call that a thread is inside of; None if none.
        threads: those that submitted something in the interval or are inside a call, who submits most first.
        errors: calls so far that failed.
        first_error: the call that failed first and its error, "" where none did.
    """

    pid: int
    command: str
    producer: str
    path: str
    state: str
    interval_s: float
    streams: list[StreamView]
    longest: InFlight | None
    errors: int
    first_error: str = ""
    threads: list[CallTime] = field(default_factory=list)


def find_rings(target: Path | None = None) -> list[Path]:
    """Ring files of a run folder (or one file); without one: those of processes that can be watched from here.

    These are $KVPROBE_RUN, the newest ./kvprobe-*/ that has any, and engines of living processes without a run folder.

    Raises:
        UsageError: `target` is neither.
    """
    if target is not None:
        if target.is_dir():
            return sorted(target.glob("*.kvp"))
        if target.suffix == ".kvp" and target.exists():
            return [target]
        raise UsageError(f"{target} is neither a run folder nor a ring file (.kvp)")
    found: list[Path] = []
    if RUN.text:
        found += sorted(Path(RUN.text).glob("*.kvp"))
    folders = (folder for folder in Path().glob("kvprobe-*/") if any(folder.glob("*.kvp")))
    newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
    if newest is not None:
        found += sorted(newest.glob("*.kvp"))
    with contextlib.suppress(OSError):
        found += (path for path in temporary_folder(make=False).glob("engine-*.kvp") if alive(_pid_of(path)))
    return list(dict.fromkeys(path.resolve() for path in found))


def over(target: Path) -> bool:
    """Whether all that a run folder or ring file could show has ended; False where nothing has begun yet."""
    if (target / "end.json").exists():
        return True
    begun = list(snapshots(find_rings(target)))
    if any(ring.state != "closed" and ring.running() is not False for ring in begun):
        return False
    try:
        run = json.loads((target / "run.json").read_text())
    except (OSError, ValueError):
        return bool(begun)
    # of a run on another machine its end.json tells, no pid does
    return isinstance(run, dict) and run.get("host") == platform.node() and not alive(run_pid(run))


def run_pid(run: dict[str, Any]) -> int:
    """The pid of a run.json's command; 0 where it says none."""
    pid = run.get("pid")
    return pid if isinstance(pid, int) else 0


def _state(snapshot: RingSnapshot) -> str:
    if snapshot.state != "running":
        return snapshot.state
    return {True: "running", False: "killed", None: "not known: of another pid namespace"}[snapshot.running()]


def _pid_of(path: Path) -> int:
    part = path.stem.split("-")[1]
    return int(part) if part.isdigit() else 0


def snapshots(paths: Iterable[Path]) -> Iterator[RingSnapshot]:
    """What can be read of ring files; one that has just gone, or is not made yet, is left out."""
    for path in paths:
        try:
            yield read_ring(path, detail=False)
        except RecordingError:
            continue


def totals(snapshot: RingSnapshot, by_memory: bool = False) -> dict[Key, Totals]:
    """A process's sums by (stream, call, direction); with `by_memory` its high 4 bits are the kind of host memory."""
    found: dict[Key, Totals] = {}
    for slot in snapshot.slots():
        if not slot["call"]:
            continue
        key = int(slot["stream"]), int(slot["call"]), int(slot["direction"]) & (0xFF if by_memory else 0xF)
        sums = {name: int(slot[name]) for name in SUMS}
        found.setdefault(key, Totals()).add(Totals(**sums, histogram=slot["histogram"]))
    return found


def in_flight(snapshot: RingSnapshot, now_ns: int) -> list[InFlight]:
    """Calls that the process's threads are inside of, longest first."""
    calls = [
        InFlight(
            section.tid,
            CALLS[section.in_call][1] if section.in_call in CALLS else "?",
            section.in_stream,
            max(now_ns - section.in_since_ns, 0),
        )
        for section in snapshot.sections
        if section.in_call and section.in_since_ns and section.tid
    ]
    return sorted(calls, key=lambda call: -call.age_ns)


_Spent = dict[tuple[str, bool], tuple[int, int]]  # (kind of call, pageable) -> (calls, ns)


def _spent(section: ThreadSection) -> _Spent:
    """What a thread has spent in calls so far."""
    found: _Spent = {}
    for slot in section.slots[section.slots["call"] > 0]:
        kind = CALLS.get(int(slot["call"]), ("OTHER", ""))[0]
        key = kind, int(slot["direction"]) >> 4 == PAGEABLE
        count, ns = found.get(key, (0, 0))
        found[key] = count + int(slot["count"]), ns + int(slot["dur_ns"])
    return found


def _thread(section: ThreadSection, now: _Spent, before: _Spent, passed_ns: int, age_ns: int) -> CallTime:
    """`age_ns`: how long the thread has been inside the call that it is inside of; 0: of none."""
    moved = {
        key: (count - before.get(key, (0, 0))[0], ns - before.get(key, (0, 0))[1]) for key, (count, ns) in now.items()
    }
    spent = {key: ns for key, (_, ns) in moved.items() if ns > 0}
    if age_ns:
        key = CALLS.get(section.in_call, ("OTHER", ""))[0], False
        spent[key] = spent.get(key, 0) + min(age_ns, passed_ns)
    submitting = {kind for kind, _ in (CALLS[one] for one in SUBMITTING)}
    return CallTime(
        section.tid, section.name, sum(count for (kind, _), (count, _) in moved.items() if kind in submitting), spent
    )


@dataclass
class _Process:
    """What is remembered of a process between looks."""

    time_ns: int
    totals: dict[Key, Totals]
    threads: dict[tuple[int, int], _Spent] = field(default_factory=dict)  # by place in the file and thread
    baseline_ns: dict[int, float] = field(default_factory=dict)  # by call


def _threads_of(snapshot: RingSnapshot) -> dict[tuple[int, int], _Spent]:
    return {(section.number, section.tid): _spent(section) for section in snapshot.sections}


class Live:
    """Looks at processes again and again; each look gives the figures since the one before."""

    def __init__(self, target: Path | None = None) -> None:
        """`target`: a run folder or ring file; None: whatever can be watched from here, looked up at every look."""
        self.target = target
        self._known: dict[str, _Process] = {}

    def begin(self, ring: Path, time_ns: int) -> None:
        """Takes a ring file to have been empty at this time: the next look shows all that it holds."""
        self._known[str(ring)] = _Process(time_ns, {})

    def look(self, now_ns: int | None = None) -> list[ProcessView]:
        """Every process that runs, and those that ended since the last look; the first look only remembers.

        `now_ns`: the time of the look on the clock of the ring files, where it is not now.
        """
        views = []
        found = list(snapshots(find_rings(self.target)))
        for snapshot in found:
            view = self._process(snapshot, time.monotonic_ns() if now_ns is None else now_ns)
            if view:
                _number(view, snapshot, found)
                views.append(view)
        return sorted(views, key=lambda view: view.pid)

    def _process(self, snapshot: RingSnapshot, now: int) -> ProcessView | None:
        sums = totals(snapshot, by_memory=True)
        state = _state(snapshot)
        known = self._known.get(snapshot.path)
        if known is None:
            self._known[snapshot.path] = _Process(now, sums, _threads_of(snapshot))
            return None
        if state != "running" and all(sums[key].count == known.totals.get(key, Totals()).count for key in sums):
            return None  # it ended, and was shown, or before anybody looked
        passed, before = now - known.time_ns, known.totals
        threads = self._threads(snapshot, known, passed, now)
        known.time_ns, known.totals = now, sums
        inside = in_flight(snapshot, now)
        by_stream: dict[int, dict[Key, Totals]] = {}
        for key, total in sums.items():
            by_stream.setdefault(key[0], {})[key] = total.since(before.get(key, Totals()))
        self._learn(known, sums, by_stream)
        outstanding = _outstanding(sums)
        streams = [
            _stream(stream, moved, known.baseline_ns, passed, inside, outstanding.get(stream))
            for stream, moved in sorted(by_stream.items())
            if any(key[1] in SUBMITTING for key in moved)
        ]
        errors = sum(one.errors for one in sums.values())
        return ProcessView(
            snapshot.pid,
            snapshot.command,
            snapshot.producer,
            snapshot.path,
            state,
            passed / 1e9,
            streams,
            inside[0] if inside else None,
            errors,
            first_error(snapshot) if errors else "",
            threads,
        )

    @staticmethod
    def _threads(snapshot: RingSnapshot, known: _Process, passed_ns: int, now_ns: int) -> list[CallTime]:
        times, before = _threads_of(snapshot), known.threads
        out = []
        for section in snapshot.sections:
            key = section.number, section.tid
            age = max(now_ns - section.in_since_ns, 0) if section.in_call and section.in_since_ns and section.tid else 0
            out.append(_thread(section, times[key], before.get(key, {}), passed_ns, age))
        known.threads = times
        return sorted((one for one in out if one.submissions or one.spent_ns), key=lambda one: -one.submissions)

    @staticmethod
    def _learn(known: _Process, sums: dict[Key, Totals], by_stream: dict[int, dict[Key, Totals]]) -> None:
        """The baseline of a call is the lowest median of any stream's interval, or the tenth percentile of all so far.

        A process that was saturated from the start has no low median yet; its few calls at shallow depth are in the
        tenth percentile, if anywhere.
        """
        for call in {key[1] for key in sums} & SUBMITTING:
            every = sum((total.histogram for key, total in sums.items() if key[1] == call), np.zeros(BUCKETS))
            candidates = [known.baseline_ns.get(call, np.inf)]
            if every.sum() >= LIVE_CALLS:
                candidates.append(float(percentile(every, 10)))
            for moved in by_stream.values():
                histogram = sum((one.histogram for key, one in moved.items() if key[1] == call), np.zeros(BUCKETS))
                if histogram.sum() >= LIVE_CALLS:
                    candidates.append(float(percentile(histogram, 50)))
            if np.isfinite(lowest := min(candidates)):
                known.baseline_ns[call] = lowest


def _number(view: ProcessView, snapshot: RingSnapshot, found: list[RingSnapshot]) -> None:
    """Gives the streams their numbers; an engine's follow those that the interposer saw in the same process."""
    watched = [one for one in found if one.producer == "interposer" and one.pid == snapshot.pid]
    mine = [snapshot] if snapshot in watched else [*watched, snapshot]
    handles = stream_handles(mine)
    number_of = {
        handle: handle % (1 << DEVICE_SHIFT) if handle < FIRST_ADDRESS else stream_number(handles, place)
        for place, handle in enumerate(handles)
    }
    for stream in view.streams:
        stream.number = number_of.get(stream.stream, -1)
    if view.longest is not None:
        view.longest = replace(view.longest, number=number_of.get(view.longest.stream, -1))


def _outstanding(sums: dict[Key, Totals]) -> dict[int, int]:
    """Copies submitted less those of transfers that ended, by stream, where the process reports transfers."""
    ended: dict[int, int] = {}
    submitted: dict[int, int] = {}
    for (stream, call, _), total in sums.items():
        if call == TRANSFER:
            ended[stream] = ended.get(stream, 0) + total.copies
        elif call in COPYING:
            submitted[stream] = submitted.get(stream, 0) + total.copies
    return {stream: max(copies - ended.get(stream, 0), 0) for stream, copies in submitted.items()} if ended else {}


def _stream(
    stream: int,
    moved: dict[Key, Totals],
    baseline_ns: dict[int, float],
    passed_ns: int,
    inside: list[InFlight],
    outstanding: int | None,
) -> StreamView:
    seconds = max(passed_ns / 1e9, 1e-9)
    together, lost_ns = Totals(), 0.0
    jumps: list[tuple[int, int]] = []  # of each kind of call: those several times as long as the baseline, and all
    rates: dict[str, float] = {}
    bounds = bucket_bounds()[:-1]
    for (_, call, where), total in moved.items():
        if call not in SUBMITTING:
            continue
        direction, pageable = where & 15, where >> 4 == PAGEABLE
        together.add(total)
        base = baseline_ns.get(call, 0.0)
        lost_ns += max(total.dur_ns - total.timed * base, 0.0) if base else 0.0
        slow = int(total.histogram[bounds >= JUMP_TIMES * base].sum()) if base and not pageable else 0
        jumps.append((slow, total.timed))
        if call in COPYING and total.bytes:
            name = DIRECTIONS.get(direction, "other")
            rates[name] = rates.get(name, 0.0) + total.bytes / seconds
    # a call that has not returned is in no total yet
    waiting = [min(call.age_ns, passed_ns) for call in inside if call.stream == stream and call.age_ns > 1_000_000]
    share = (lost_ns + sum(waiting)) / max(passed_ns, 1)
    busiest = max((key for key in moved if key[1] in SUBMITTING), key=lambda key: moved[key].count)
    timed = together.timed > 0
    return StreamView(
        stream=stream,
        submissions_per_s=together.count / seconds,
        p50_ns=float(percentile(together.histogram, 50)) if timed else None,
        p99_ns=float(percentile(together.histogram, 99)) if timed else None,
        baseline_ns=baseline_ns.get(busiest[1]),
        blocked_share=share,
        outstanding=outstanding,
        bytes_per_s=rates,
        suspected=any(conclude(LiveSums(share * passed_ns, passed_ns, *one)).state != "not full" for one in jumps),
    )
