"""The serving window: the part of a recording that is judged, and what lies before it, start-up.

A process that makes its context, loads its modules and pins its memory does that once, and its time says nothing of
how it serves. The window is given, or found for each process from its own calls: it begins where the last of the calls
that set up ended, as long as hardly any work had been submitted until then; calls that go on at the same rate
afterwards are no start-up. The same holds of loads before the first kernel: until something computes, nobody is served,
and what is loaded once is the model. A long pause that comes once, between the first calls and all others, ends the
start-up of a process that made its context in the recording: it reads its weights, or nobody asks for anything yet.
What the recorder labelled as its own work is no work of the process. Steps that a profiler marked begin the window as
well. Where detail was lost, it begins where all calls are there; where the device was marked, whose account needs few
calls, it takes in the last second whatever was kept. It ends with the last work: what a process gives back when it ends
is no serving either, nor is the time until it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from kvprobe.durations import time_text
from kvprobe.errors import UsageError
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct, in_time
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Direction, Engine, Label, Recording, Table

__all__ = ["ServingWindow", "parse_time", "recorded_span", "serving_window", "setting_up"]

WARM = 32  # submissions of a process that set-up may precede, however few there are: checks, a first step
FEW = 0.10  # of a process's submissions: more than that before a call, and it was serving already; of its time likewise
GOES_ON = 0.10  # of the rate before: where set-up calls go on at more than that, they are part of the work
PAUSE = 0.05  # of the time behind a pause: a shorter one is no matter
SEEN_NS = 1_000_000_000  # of a process whose device was marked: long beside the times in which nothing is marked
LEAST_NS = 20_000  # a call that sets up and takes less is no matter
_LOADS = (
    "moduleload",
    "libraryload",
    "getkernel",
    "modulegetfunction",
    "cuinit",
    "ctxcreate",
    "ctxretain",
    "cudasetdevice",
    "cudainit",
    "linkcreate",
    "linkcomplete",
)
HOW = {  # how a window was found
    "set-up": "where the last set-up call ended",
    "loads": "where everything that the first kernel waited for was loaded",
    "steps": "at the first marked step",
    "detail": "where every call is kept from then on",
    "seen": f"{time_text(SEEN_NS)} before the end, because only the last calls are kept one by one",
}
_STEP = re.compile(r"ProfilerStep#\d+")


@dataclass(frozen=True)
class ServingWindow:
    """What is judged of a recording.

    Attributes:
        end_ns: its last instant.
        from_ns: its first instant by process row, (processes,) int64.
        how: how it was found, in words.
        first_ns: first instant that the recording knows of.
        given: somebody named it.
    """

    end_ns: int
    from_ns: Array = field(repr=False)
    how: str
    first_ns: int
    given: bool = False

    @property
    def start_ns(self) -> int:
        """Its first instant in any process."""
        return int(self.from_ns.min()) if len(self.from_ns) else self.first_ns

    @property
    def span_ns(self) -> int:
        """Its length."""
        return max(self.end_ns - self.start_ns, 0)

    def holds(self, process: Array, start_ns: Array) -> Array:
        """Which of these, by their process row and start, lie in the window, (rows,) bool; row -1: as of the first."""
        if not len(self.from_ns):
            return np.ones(len(start_ns), dtype=bool)
        if (self.from_ns == self.from_ns[0]).all():
            begin: Array = self.from_ns[0]
        else:
            begin = self.from_ns[np.clip(process, 0, len(self.from_ns) - 1)]
        inside: Array = (start_ns >= begin) & (start_ns <= self.end_ns)
        return inside


def recorded_span(recording: Recording) -> tuple[int, int]:
    """First and last instant that the recording knows of; (0, 0) where it holds nothing."""
    tables = [t for t in (recording.calls, recording.executions, recording.transfers) if t.rows]
    if not tables:
        return 0, 0
    return min(int(t["start_ns"].min()) for t in tables), max(int(t["end_ns"].max()) for t in tables)


def setting_up(recording: Recording) -> Array:
    """Mask over calls: they make contexts, streams and events, load modules, allocate, pin or free."""
    calls = recording.calls
    mask = among(calls["kind"], (CallKind.ALLOC, CallKind.FREE, CallKind.CREATE))
    loads = np.zeros(len(recording.names) + 1, dtype=bool)
    named = np.clip(calls["name"], 0, len(recording.names))
    for one in distinct(named).tolist():
        loads[one] = any(part in recording.text(one).lower() for part in _LOADS)
    if loads.any():
        mask |= loads[named]
    return mask


def parse_time(text: str, option: str) -> int:
    """Nanoseconds of "1.5s", "20ms", "300us".

    Raises:
        UsageError: it is no time.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ns|us|ms|s)", text.strip())
    if match is None:
        raise UsageError(f"{option} {text}: not a time; write it like 1.5s, 20ms or 300us, counted from the start")
    return int(float(match[1]) * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[match[2]])


def serving_window(
    recording: Recording, begin_ns: int | None = None, end_ns: int | None = None, within: str = ""
) -> ServingWindow:
    """The window that is given, else the one that is found.

    Args:
        recording: what was read.
        begin_ns: from here on, counted from the recording's first instant.
        end_ns: until here, counted likewise.
        within: from the first to the last instant of the ranges of this name.

    Raises:
        UsageError: there is no such range, or nothing lies in the window.
    """
    first, last = recorded_span(recording)
    processes = max(
        recording.processes.rows,
        int(recording.calls["process"].max(initial=-1)) + 1,
        int(recording.executions["process"].max(initial=-1)) + 1,
        1,
    )
    if begin_ns is None and end_ns is None and not within:
        return _found(recording, first, last, processes)
    low, high, how = first, last, []
    if within:
        ranges = recording.ranges
        names = np.flatnonzero(np.array([name == within for name in recording.names], dtype=bool))
        rows = np.flatnonzero(np.isin(ranges["name"], names))
        if not len(rows):
            raise UsageError(
                f"--range {within}: no range of that name in the recording; `kvprobe stats -r nvtx_sum` lists them"
            )
        low, high = int(ranges["start_ns"][rows].min()), int(ranges["end_ns"][rows].max())
        how.append(f"the ranges named {within}")
    if begin_ns is not None:
        low = max(low, first + begin_ns)
        how.append("--from")
    if end_ns is not None:
        high = min(high, first + end_ns)
        how.append("--to")
    if low >= high or low > last or high < first:
        raise UsageError(f"nothing of the recording lies in that window: it is {time_text(last - first)} long")
    return ServingWindow(high, np.full(processes, low, dtype=np.int64), "given by " + " and ".join(how), first, True)


def _found(recording: Recording, first: int, last: int, processes: int) -> ServingWindow:
    calls = recording.calls
    begin = np.full(processes, first, dtype=np.int64)
    how: dict[int, str] = {}
    recorded, last = last, _last_work(recording, last)
    ends = "ends with the last work" if last < recorded else ""
    rows = np.flatnonzero(setting_up(recording))
    rows = rows[calls["end_ns"][rows] - calls["start_ns"][rows] >= LEAST_NS]
    needed = len(rows) or recording.lost or recording.has_executions
    submits = among(calls["kind"], SUBMITTING) if needed else np.zeros(0, dtype=bool)
    work = submits & ~_own_work(recording) if len(rows) else submits
    for process in np.unique(calls["process"][rows]).tolist():
        mine = rows[calls["process"][rows] == process]
        until = max(_set_up(calls, mine, *of, last) for of in _works(recording, process, work))
        if until > begin[process]:
            begin[process] = until
            how[process] = HOW["set-up"]
        pause = _warmed_up(recording, process, int(calls["start_ns"][mine].min()), last)
        if pause is not None and pause[1] > begin[process]:
            begin[process] = pause[1]
            how[process] = f"where a pause of {time_text(pause[1] - pause[0])} after the first calls ended"
    for process, until in _loaded(recording, submits, last).items():
        if 0 <= process < processes and until > begin[process]:
            begin[process] = until
            how[process] = HOW["loads"]
    steps = _first_step(recording)
    if len(how) == 0 and steps > first:
        begin[:] = np.maximum(begin, steps)
        how[0] = HOW["steps"]
    for process, lost in recording.lost.items():
        if lost and 0 <= process < processes:
            whole = _whole_from(recording, process, np.flatnonzero(submits & (calls["process"] == process)))
            seen = (recording.spans["process"] == process).any() and last - SEEN_NS < whole
            if seen:
                whole = last - SEEN_NS
            if whole > begin[process]:
                begin[process] = whole
                how[process] = HOW["seen" if seen else "detail"]
    said = " or ".join(dict.fromkeys(how.values()))
    told = " and ".join(filter(None, (f"begins {said}" if said else "", ends)))
    return ServingWindow(last, begin, f"it {told}" if told else "all that was recorded", first)


def _last_work(recording: Recording, last: int) -> int:
    """Where the last work ended: a submission, a wait of some length, or what ran on a device; `last` without any.

    Behind it calls give back what the process had, which takes little of the time until the last of them; where it
    takes more, they are part of what was done.
    """
    calls = recording.calls
    took = calls["end_ns"] - calls["start_ns"]
    waits = (calls["kind"] == CallKind.SYNC) & (took >= LEAST_NS)
    work = waits | among(calls["kind"], (*SUBMITTING, CallKind.COPY_SYNC))
    ends = [calls["end_ns"][work], *(t["end_ns"] for t in (recording.executions, recording.spans, recording.transfers))]
    until = max(int(one.max(initial=0)) for one in ends)
    behind = calls["start_ns"] >= until
    quick = int(took[behind].sum()) <= GOES_ON * (last - until)
    return until if 0 < until < last and quick else last


def _own_work(recording: Recording) -> Array:
    """Mask over calls: they were made inside what the recorder labelled as its own work, such as a calibration."""
    calls, labels = recording.calls, recording.labels
    mask = np.zeros(calls.rows, dtype=bool)
    own = np.flatnonzero(labels["label"] == Label.INSTRUMENTATION)
    own = own[np.argsort(labels["start_ns"][own], kind="stable")]
    for process in np.unique(labels["process"][own]).tolist():
        rows = own[labels["process"][own] == process]
        begins, ends = labels["start_ns"][rows], np.maximum.accumulate(labels["end_ns"][rows])
        at = np.searchsorted(begins, calls["start_ns"], "right") - 1
        mask |= (calls["process"] == process) & (at >= 0) & (calls["end_ns"] <= ends[np.maximum(at, 0)])
    return mask


def _set_up(calls: Table, rows: Array, made: Array, counts: Array, last: int) -> int:
    """Where the set-up of a process ended; 0 where none can be told. `made`, `counts`: what it submitted (`_works`)."""
    start, end = calls["start_ns"], calls["end_ns"]
    rows = rows[np.argsort(start[rows], kind="stable")]
    total = int(counts.sum())
    if not total:
        return 0
    ends = np.maximum.accumulate(end[rows])
    before = np.append(0, np.cumsum(counts))[np.searchsorted(made, ends, "left")]
    spent = np.cumsum(end[rows] - start[rows])
    passed = np.maximum(ends - start[rows[0]], 1)
    rate = spent / passed
    after = (spent[-1] - spent) / np.maximum(last - ends, 1)
    warm = before <= min(WARM, total // 2)
    over = (
        (before == 0)
        | (warm & _alike_ended(calls, rows, ends, last))
        | (before <= FEW * total) & (after <= GOES_ON * rate)
    )
    over &= before < total
    at = np.flatnonzero(over)
    return int(ends[at[-1]]) if len(at) else 0


def _loaded(recording: Recording, submits: Array, last: int) -> dict[int, int]:
    """Where the loads before a process's first kernel had ended, by its row; of processes that load so at start alone.

    That is: few of its submissions are among them, they took little of its time, and all later loads take far less.
    Else what the recording shows is loading, for whatever reason. `submits`: mask over calls.
    """
    calls, table = recording.calls, recording.executions
    loads = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D)
    out: dict[int, int] = {}
    for process in distinct(table["process"][loads]).tolist():
        mine = table["process"] == process
        kernels = mine & (table["engine"] == Engine.KERNEL)
        if not kernels.any():
            continue
        first = int(table["start_ns"][kernels].min())
        rows = np.flatnonzero(mine & loads)
        before = rows[table["end_ns"][rows] <= first]
        if not len(before):
            continue
        begun, until = int(table["start_ns"][before].min()), int(table["end_ns"][before].max())
        made = calls["start_ns"][submits & (calls["process"] == process)]
        if int((made < until).sum()) > FEW * len(made) or until - begun > FEW * (last - begun):
            continue
        took = int((table["end_ns"][before] - table["start_ns"][before]).sum())
        rest = int((table["end_ns"][rows] - table["start_ns"][rows]).sum()) - took
        if rest <= GOES_ON * took:  # not their rate: the first of a load a step comes at once, too
            out[process] = until
    return out


def _warmed_up(recording: Recording, process: int, set_up: int, last: int) -> tuple[int, int] | None:
    """The pause that parts a process's first calls from its serving: begin and end; None without one.

    The process sets up before it and submits little, it is much of the time, and no later pause is half as long: what
    comes again is part of the work. `set_up`: where the first set-up call began.
    """
    begins, ends = _pauses(recording, process, last)
    if not len(begins):
        return None
    *_, (work, counts) = _works(recording, process, among(recording.calls["kind"], SUBMITTING))
    before = np.append(0, np.cumsum(counts))[np.searchsorted(work, ends, "left")]
    total = int(counts.sum())
    lengths = ends - begins
    later = np.append(np.maximum.accumulate(lengths[::-1])[::-1][1:], 0)
    most = np.minimum(WARM, np.where(lengths > last - ends, total // 2, total // 3))  # longer than all behind it
    parts = (before <= np.maximum(FEW * total, most)) & (2 * later < lengths) & (begins > set_up)
    parts &= (lengths >= PAUSE * (last - ends)) & (before < total)
    at = np.flatnonzero(parts)
    return (int(begins[at[-1]]), int(ends[at[-1]])) if len(at) else None


def _pauses(recording: Recording, process: int, last: int) -> tuple[Array, Array]:
    """Begins and ends of the long times in which a process makes no call and its device does nothing that is known."""
    calls = recording.calls
    rows = in_time(np.flatnonzero(calls["process"] == process), calls["start_ns"])
    start, ends = calls["start_ns"][rows], np.maximum.accumulate(calls["end_ns"][rows])
    if not len(rows):
        return start, ends
    least = PAUSE * (last - int(start[0])) / 2
    at = np.flatnonzero(start[1:] - ends[:-1] >= least)
    begins, stops = [ends[:0]], [ends[:0]]
    for begin, end in zip(ends[at].tolist(), start[at + 1].tolist(), strict=True):
        busy = [(np.array([begin - 1, end]), np.array([begin, end + 1]))]
        for table in (recording.executions, recording.spans, recording.coverage):
            mine = (table["start_ns"] < end) & (table["end_ns"] > begin) & (table["process"] == process)
            if table is recording.coverage:
                mine &= table["reason"] > 0
            busy.append((table["start_ns"][mine].clip(begin), table["end_ns"][mine].clip(None, end)))
        free, until = Cover(*(np.concatenate(both) for both in zip(*busy, strict=True))).gaps()
        long = until - free >= least
        begins.append(free[long])
        stops.append(until[long])
    return np.concatenate(begins), np.concatenate(stops)


def _works(recording: Recording, process: int, submits: Array) -> list[tuple[Array, Array]]:
    """When a process submitted, and how much: by its calls, and by its spans where not all calls were kept.

    `kvprobe run` keeps of launches only those that took long, and has spans of a part of the time where they cost too
    much: neither is all. `submits`: mask over calls.
    """
    calls, spans = recording.calls, recording.spans
    made = ascending(calls["start_ns"][submits & (calls["process"] == process)])
    rows = in_time(np.flatnonzero(spans["process"] == process), spans["start_ns"])
    counts = spans["count"][rows]
    by_calls = made, np.ones(len(made), dtype=np.int64)
    if recording.lost.get(process) or int(counts.sum()) > len(made):
        return [by_calls, (spans["start_ns"][rows], counts)]
    return [by_calls]


def _alike_ended(calls: Table, rows: Array, ends: Array, last: int) -> Array:
    """Mask over set-up calls: those of its name do not go on behind it at their rate; else they are work."""
    name = calls["name"][rows]
    spent = calls["end_ns"][rows] - calls["start_ns"][rows]
    begin = int(calls["start_ns"][rows[0]])
    mask = np.zeros(len(rows), dtype=bool)
    for one in np.unique(name).tolist():
        mine = name == one
        passed = np.cumsum(np.where(mine, spent, 0))
        before = passed / np.maximum(ends - begin, 1)
        after = (passed[-1] - passed) / np.maximum(last - ends, 1)
        mask |= mine & (after <= GOES_ON * before)
    return mask


def _first_step(recording: Recording) -> int:
    """Where the first of several steps begins that a profiler marked; 0 without."""
    steps = np.flatnonzero(np.array([_STEP.fullmatch(name) is not None for name in recording.names], dtype=bool))
    if not len(steps):
        return 0
    rows = np.flatnonzero(np.isin(recording.ranges["name"], steps))
    return int(recording.ranges["start_ns"][rows].min()) if len(rows) > 1 else 0


def _whole_from(recording: Recording, process: int, submits: Array) -> int:
    """From when on all submissions were kept: what is left of the time before are slow ones."""
    calls = recording.calls
    start, end = calls["start_ns"][submits], calls["end_ns"][submits]
    threads = calls["thread"][submits]
    begin = 0
    for thread in _that_lost(recording, process, threads):
        mine = np.flatnonzero(threads == thread)
        took = end[mine] - start[mine]
        quick = np.flatnonzero(took <= np.median(took[-1000:]))
        if len(quick):
            begin = max(begin, int(start[mine[quick[0]]]))
    return begin


def _that_lost(recording: Recording, process: int, threads: Array) -> list[int]:
    """Threads of which the totals know more submissions than were kept, or may; `threads`: of each submission kept."""
    kept = dict(zip(*(found.tolist() for found in np.unique(threads, return_counts=True)), strict=True))
    totals = recording.totals
    made = totals.where((totals["process"] == process) & among(totals["kind"], SUBMITTING))
    if not made.rows:
        return list(kept)
    counted = {thread: int(made["calls"][made["thread"] == thread].sum()) for thread in kept}
    # threads that came after one another share their totals, which then name none
    rest = [thread for thread in kept if not counted[thread]]
    shared = int(made["calls"].sum()) - sum(counted.values())
    if shared > sum(kept[thread] for thread in rest):
        return list(kept)
    return [thread for thread in kept if counted[thread] > kept[thread]]
