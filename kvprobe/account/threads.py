"""What a thread did at every instant: in which kind of call it was, and outside of calls what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account.cpu_time import Worked, is_noted, process_ns, who_worked
from kvprobe.account.lines import OPEN, Line, Unknown, line_of_calls
from kvprobe.account.outside import asked_for_nothing, slept_alone
from kvprobe.account.stretches import NOBODY
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct, group_starts
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Array, CallKind, RangeStyle
from kvprobe.recordings.tier_uses import FILES

__all__ = ["KEPT_NS", "PAUSE_NS", "ThreadTimeline", "Threads", "runs_python"]

# A thread that makes no call for so long, and of which nothing else is seen, does not prepare a step as it always does:
# that takes some milliseconds. It was asked for nothing where the recording shows that it slept, waited for no disk,
# and no other of its process worked meanwhile; else nobody knows.
PAUSE_NS = 30_000_000
SHORT_PAUSE_NS = 10_000_000  # the same of a thread that is paused for most of the time that it makes no call
# Between a step's results and the next submission a thread does the same each time. A pause that takes so many times as
# long as most of those is for something else: it waits for a request, or prepares one.
UNUSUAL, TURNS = 10, 8
ALIKE = 4  # pauses in which nobody asked, from which on the thread's shorter sleep at the same place is one, too
KEPT_NS = 20_000  # a call as long is kept in any case: `run` has a ring of its own for those
_AFTER_FILES_NS = 1_000_000  # from a write to the call that waits for the disk: fsync is not recorded
_STARVED = 0.1  # of a span that the kernel counted: less waiting for a CPU is how every thread runs


@dataclass(frozen=True)
class ThreadTimeline:
    """A thread's time in pieces.

    Attributes:
        edges: (pieces + 1,) ns, ascending.
        line: the Line of each piece, (pieces,) uint8.
        open: of pieces outside of calls of which nothing shows whether it had been asked for anything, why not: one
            of `lines.OPEN`; NOT_KEPT where calls may have been made that were not kept; NOBODY of all others,
            (pieces,) int8.
    """

    edges: Array
    line: Array
    open: Array


class Threads:
    """The timelines of a recording's threads, each made when it is asked for."""

    def __init__(self, joined: Joined, begin: int, end: int) -> None:
        """For the instants from `begin` to `end`, ns."""
        self.joined, self.begin, self.end = joined, begin, end
        self._lines = line_of_calls(joined.kind, joined.memory)
        self._known: dict[int, ThreadTimeline] = {}
        self._kept: dict[int, int] = {}
        self._rows = joined.own_time
        callers = joined.caller[self._rows]
        first = group_starts(callers)
        self._of = dict(zip(callers[first].tolist(), np.split(self._rows, first[1:]), strict=False))

    def of(self, caller: int) -> ThreadTimeline:
        """The timeline of a thread, by its caller number."""
        if caller not in self._known:
            self._known[caller] = self._make(caller)
        return self._known[caller]

    def _make(self, caller: int) -> ThreadTimeline:
        joined = self.joined
        rows = self._of.get(caller, self._rows[:0])
        start = np.clip(joined.start[rows], self.begin, self.end)
        stop = np.clip(joined.end[rows], start, self.end)
        inside = self._lines[rows]
        if len(rows):
            start, stop, inside = self._with_others(rows[0], start, stop, inside)
        edges = np.empty(2 * len(start) + 2, dtype=np.int64)
        edges[0], edges[-1] = self.begin, self.end
        edges[1:-1:2], edges[2:-1:2] = start, stop
        line = np.full(2 * len(start) + 1, self._outside(caller, rows), dtype=np.uint8)
        line[1::2] = inside
        del start, stop, inside  # as large as the edges
        gap = line.copy()
        gap[1::2] = 0
        lasts = np.diff(edges)
        unusual = _unusual(lasts, line)
        long = _pauses(lasts, gap > 0)
        del lasts
        unasked = np.full(len(line), NOBODY, dtype=np.int8)
        if len(rows):
            worked = self._worked(rows[0], edges, gap > 0)
            # for most of such a piece nobody ran Python, nor held its lock: the thread slept
            line[among(worked, (Worked.NOBODY, Worked.LITTLE))] = Line.ELSEWHERE
            busy = among(worked, (Worked.THREAD, Worked.ANOTHER))
            asked = self._asked(rows[0], line)
            long, unusual = (self._silent(caller, rows[0], edges, some[~asked[some]]) for some in (long, unusual))
            # nobody asked for anything: one whose step waits for something outside does so in each
            long = np.union1d(long, unusual[worked[unusual] == Worked.NOBODY])
            asleep = unusual[~busy[unusual]]
            unasked[asleep[self._may_sleep(rows[0], edges[asleep], edges[asleep + 1])]] = Unknown.BETWEEN_REQUESTS
            unasked[worked == Worked.NOBODY] = Unknown.OUTSIDE
            unasked[long] = NOBODY
            # who asks for the next request again and again works, too
            unasked[np.intersect1d(long[busy[long]], unusual)] = Unknown.BETWEEN_REQUESTS
            told = (worked[long] == Worked.NOBODY) & ~self._used_files(rows[0], edges[long], edges[long + 1])
            slept = self._slept_alone(rows[0], edges[long], edges[long + 1])
            untold = long[~busy[long] & ~told & ~slept]
            untold = untold[self._may_sleep(rows[0], edges[untold], edges[untold + 1])]
            unasked[untold] = np.where(worked[untold] == Worked.NOBODY, Unknown.OUTSIDE, Unknown.BETWEEN_REQUESTS)
            long = long[~busy[long] & (told | slept)]
            line[long] = Line.NOTHING_TO_DO
            alike = self._like_pauses(rows[0], edges, line, worked)
            line[alike], unasked[alike] = Line.NOTHING_TO_DO, NOBODY
            before, pause = _before_pauses(line, unasked)
            line[before], unasked[before] = line[pause], unasked[pause]
            lost = (gap > 0) & (edges[1:] <= self.kept_from(caller)) & among(worked, (Worked.NOT_KNOWN, Worked.LITTLE))
            line[lost], unasked[lost] = self._outside(caller, rows), Unknown.NOT_KEPT
            return self._without_cpu(rows[0], ThreadTimeline(edges, line, unasked), gap > 0)
        return ThreadTimeline(edges, line, unasked)

    def kept_from(self, caller: int) -> int:
        """From when on all calls of a thread were kept but launches; before, only those that took long are left, ns."""
        if caller not in self._kept:
            rows = self._of.get(caller, self._rows[:0])
            self._kept[caller] = self._find_kept(rows) if len(rows) else self.begin
        return self._kept[caller]

    def _find_kept(self, rows: Array) -> int:
        joined, process, thread = self.joined, int(self.joined.process[rows[0]]), int(self.joined.thread[rows[0]])
        totals = joined.recording.totals
        if not joined.recording.lost.get(process):
            return self.begin
        mine = rows[joined.kind[rows] != CallKind.LAUNCH]
        own = (totals["process"] == process) & (totals["thread"] == thread) & (totals["kind"] != CallKind.LAUNCH)
        if own.any() and int(totals["calls"][own].sum()) <= len(mine):
            return self.begin
        quick = mine[joined.end[mine] - joined.start[mine] < KEPT_NS]
        return int(joined.start[quick].min()) if len(quick) else self.begin

    def _worked(self, row: int, edges: Array, outside: Array) -> Array:
        """Who worked in the pieces outside of calls, as far as their CPU time was noted."""
        process, thread = int(self.joined.process[row]), int(self.joined.thread[row])
        worked = who_worked(self.joined.recording, process, thread, edges[:-1], edges[1:])
        worked[~outside] = Worked.NOT_KNOWN
        return worked

    def _asked(self, row: int, line: Array) -> Array:
        """Mask over pieces: somebody has asked for something since the thread's last call, as `run` knows.

        What others send to an address that a recorder does not tell apart may be no request.
        """
        mask = np.zeros(len(line), dtype=bool)
        if is_noted(self.joined.recording, int(self.joined.process[row])):
            inside = np.where(line[1::2] == Line.TIER, 0, np.arange(1, len(line[1::2]) + 1))
            last = np.maximum.accumulate(np.append(0, inside))
            mask[::2] = (last > 0) & (line[np.maximum(2 * last - 1, 0)] == Line.NOTHING_TO_DO)
        return mask

    def _silent(self, caller: int, row: int, edges: Array, pieces: Array) -> Array:
        """Of these pauses those in which nothing is seen of the thread, nor of another that works for it."""
        pieces = pieces[~self._seen_at_work(row, edges[pieces], edges[pieces + 1])]
        pieces = pieces[~self._in_a_step(row, edges[pieces], edges[pieces + 1])]
        return np.asarray(pieces[~self._fed(caller, edges[pieces], edges[pieces + 1])])

    def _like_pauses(self, row: int, edges: Array, line: Array, worked: Array) -> Array:
        """Pieces in which the thread slept as it does where nobody asks, and that lie between calls of the same kinds.

        A server that waits for requests does the same before each, whether the next one comes in 5 ms or in 500: where
        that was waiting mostly, and took the process no less CPU time, it was waiting each time.
        """
        gaps = np.arange(2, len(line) - 1, 2)
        gaps = gaps[among(worked[gaps], (Worked.NOBODY, Worked.LITTLE))]
        point = line[gaps - 1].astype(np.int64) << 8 | line[gaps + 1]
        idle = line[gaps] == Line.NOTHING_TO_DO
        out = [gaps[:0]]
        for one in distinct(point[idle]):
            here = point == one
            if 2 * int(idle[here].sum()) < int(here.sum()) or int(idle[here].sum()) < ALIKE:
                continue
            process, thread = int(self.joined.process[row]), int(self.joined.thread[row])
            used = process_ns(self.joined.recording, process, thread, edges[gaps[here]], edges[gaps[here] + 1])
            as_usual = used <= 2 * int(np.median(used[idle[here]]))
            out.append(gaps[here][as_usual & ~idle[here]])
        return np.concatenate(out)

    def _with_others(self, row: int, start: Array, stop: Array, lines: Array) -> tuple[Array, Array, Array]:
        """Calls and their lines, with what else is known of their thread between them: what it read, and waited for."""
        begin, end, line = (np.concatenate(both) for both in zip(self._tiers(row), self._listened(row), strict=True))
        if not len(begin):
            return start, stop, lines
        begin, end = np.clip(begin, self.begin, self.end), np.clip(end, self.begin, self.end)
        start, stop = np.concatenate((start, begin)), np.concatenate((stop, end))
        lines = np.concatenate((lines, line.astype(np.uint8)))
        order = np.argsort(start, kind="stable")
        start, stop, lines = start[order], stop[order], lines[order]
        reach = np.maximum.accumulate(np.append(self.begin, stop[:-1]))
        return np.maximum(start, reach), np.maximum(stop, np.maximum(start, reach)), lines

    def _tiers(self, row: int) -> tuple[Array, Array, Array]:
        """Where the thread of a call read or wrote below CPU memory: begins, ends, lines."""
        joined, none = self.joined, np.zeros(0, dtype=np.int64)
        if not joined.recording.tier_operations.rows:
            return none, none, none
        begin, end = joined.tier_times(int(joined.process[row]), int(joined.thread[row]))
        return begin, end, np.full(len(begin), Line.TIER)

    def _listened(self, row: int) -> tuple[Array, Array, Array]:
        """Where it waited for what others send, likewise."""
        joined = self.joined
        begin, end = asked_for_nothing(joined.recording, int(joined.process[row]), int(joined.thread[row]))
        return begin, end, np.full(len(begin), Line.NOTHING_TO_DO)

    def _outside(self, caller: int, rows: Array) -> Line:
        """Where a thread is that is in no call."""
        if not len(rows):
            return Line.ELSEWHERE
        process, thread = int(self.joined.process[rows[0]]), int(self.joined.thread[rows[0]])
        return Line.PYTHON if runs_python(self.joined, process, thread) else Line.ELSEWHERE

    def _may_sleep(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: the thread slept for most of it, or the recording does not say when it sleeps."""
        slept, process = self.joined.recording.os_calls, int(self.joined.process[row])
        if is_noted(self.joined.recording, process) or not (slept["process"] == process).any():
            return np.ones(len(start), dtype=bool)
        return self._slept(row, start, end)

    def _slept_alone(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: the thread slept, and no other of its process seems to have worked for it."""
        process, thread = int(self.joined.process[row]), int(self.joined.thread[row])
        return slept_alone(self.joined.recording, process, thread, start, end)

    def _slept(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: the recording shows that the thread slept for most of it."""
        slept, joined = self.joined.recording.os_calls, self.joined
        mine = (slept["process"] == joined.process[row]) & (slept["thread"] == joined.thread[row])
        asleep = Cover(slept["start_ns"][mine], slept["end_ns"][mine])
        return np.asarray(2 * asleep.within(start, end) > end - start)

    def _seen_at_work(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: ranges of the thread begin or end in them: it works."""
        ranges, joined = self.joined.recording.ranges, self.joined
        mask = np.zeros(len(start), dtype=bool)
        if not ranges.rows or not len(start):
            return mask
        mine = (ranges["process"] == joined.process[row]) & (ranges["thread"] == joined.thread[row])
        at = np.sort(np.concatenate((ranges["start_ns"][mine], ranges["end_ns"][mine])))
        return np.asarray(np.searchsorted(at, end, "left") - np.searchsorted(at, start, "right") > 2)

    def _in_a_step(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: for most of them a step of the process was under way: there was a request."""
        steps = self.joined.recording.steps
        mine = steps["process"] == self.joined.process[row]
        under_way = Cover(steps["start_ns"][mine], steps["end_ns"][mine])
        return np.asarray(2 * under_way.within(start, end) > end - start)

    def _used_files(self, row: int, start: Array, end: Array) -> Array:
        """Mask over pauses: the process read or wrote files in them or just before, and may wait for a disk."""
        table, tiers, process = (
            self.joined.recording.tier_operations,
            self.joined.recording.tiers,
            self.joined.process[row],
        )
        files = [i for i, name in enumerate(self.joined.recording.names) if name in FILES] if table.rows else []
        mine = (tiers["process"] == process) & np.isin(tiers["kind"], files)
        rows = (table["process"] == process) & np.isin(table["place"], tiers["place"][mine])
        used = Cover(table["start_ns"][rows], table["end_ns"][rows] + _AFTER_FILES_NS)
        return np.asarray(used.within(start, end) > 0)

    def _fed(self, caller: int, start: Array, end: Array) -> Array:
        """Mask over pauses: another thread reads in them what a copy of this thread's takes to a GPU."""
        table, copy = self.joined.recording.tier_operations, self.joined.tier_uses.copy
        mine = np.flatnonzero((copy >= 0) & (table["writes"] == 0)) if table.rows else np.zeros(0, np.int64)
        mine = mine[self.joined.caller[copy[mine]] == caller]
        at = np.sort(table["end_ns"][mine])
        return np.asarray(np.searchsorted(at, end, "right") > np.searchsorted(at, start, "left"))

    def _without_cpu(self, row: int, timeline: ThreadTimeline, outside: Array) -> ThreadTimeline:
        """The timeline with what the kernel counted as waiting for a CPU, at the end of each piece outside of calls."""
        waits, joined = self.joined.recording.cpu_waits, self.joined
        if not waits.rows:
            return timeline
        mine = (waits["process"] == joined.process[row]) & (waits["thread"] == joined.thread[row])
        span = waits["end_ns"] - waits["start_ns"]
        mine &= waits["waited_ns"] >= _STARVED * span
        if not mine.any():
            return timeline
        edges, line = timeline.edges, timeline.line
        begins, ends = edges[:-1], edges[1:]
        pieces = np.flatnonzero(outside & (ends > begins) & (line != Line.NOTHING_TO_DO))
        free = Cover(begins[pieces], ends[pieces])
        start, end = waits["start_ns"][mine], waits["end_ns"][mine]
        share = np.minimum(waits["waited_ns"][mine] / np.maximum(free.within(start, end), 1), 1.0)
        order = np.argsort(start, kind="stable")
        at = np.searchsorted(start[order], begins[pieces], "right") - 1
        inside = (at >= 0) & (begins[pieces] < end[order][np.maximum(at, 0)])
        pieces, part = pieces[inside], share[order][at[inside]]
        cut = ends[pieces] - ((ends[pieces] - begins[pieces]) * part).astype(np.int64)
        return ThreadTimeline(
            np.insert(edges, pieces + 1, cut),
            np.insert(line, pieces + 1, Line.NO_CPU),
            np.insert(timeline.open, pieces + 1, NOBODY),
        )


def _unusual(ns: Array, line: Array) -> Array:
    """Pieces outside of calls that take far longer than what the thread does after most of its waits for the device.

    Of pieces as `_make` has them: one outside of calls, one inside, and so on.
    """
    waits = 2 * np.flatnonzero((line[1::2] == Line.WAITING_FOR_DEVICE) & (ns[1::2] > 0)) + 1  # inside the window
    turns = ns[waits[waits < len(ns) - 2] + 1]  # behind the last call nothing followed
    if len(turns) < TURNS:
        return np.zeros(0, dtype=np.int64)
    least = max(SHORT_PAUSE_NS, UNUSUAL * int(np.median(turns)))
    return 2 * np.flatnonzero(ns[::2] >= least)


def _pauses(idle: Array, outside: Array) -> Array:
    """Pieces outside of calls that are pauses; where long ones are most of them, shorter ones are no work either.

    `idle` is how long each piece is; of those inside calls it is set to 0.
    """
    idle[~outside] = 0
    asleep = int(idle[idle >= PAUSE_NS].sum())
    least = SHORT_PAUSE_NS if 2 * asleep > int(idle.sum()) else PAUSE_NS
    return np.flatnonzero(idle >= least)


def _before_pauses(line: Array, unasked: Array) -> tuple[Array, Array]:
    """Allocations after which a thread submitted nothing until it paused, and the pause of each.

    Whoever came next had not asked yet while memory was allocated: if the pause was a wait for a request, nobody waited
    for the memory.
    """
    before = np.flatnonzero(line == Line.ALLOCATING)
    if not len(before):
        return before, before
    paused = (line == Line.NOTHING_TO_DO) | among(unasked, OPEN)
    calls = np.zeros(len(line), dtype=bool)
    calls[1::2] = line[1::2] != Line.ALLOCATING
    stops = np.append(np.flatnonzero(paused | calls), len(line))
    following = stops[np.searchsorted(stops, before, "right")]
    ends = following < len(line)
    ends[ends] = paused[following[ends]]
    return before[ends], following[ends]


def runs_python(joined: Joined, process: int, thread: int) -> bool:
    """Whether a recording shows that a thread runs Python: its process, its name, its functions, operators, stacks."""
    recording = joined.recording
    words: list[int] = []
    if 0 <= process < recording.processes.rows:
        words += [int(recording.processes[name][process]) for name in ("name", "command")]
    threads = recording.threads
    mine = (threads["process"] == process) & (threads["thread"] == thread)
    words += threads["name"][mine].tolist()
    if any("python" in recording.text(word).lower() for word in words):
        return True
    functions = recording.python_functions
    if functions.rows and bool(((functions["process"] == process) & (functions["thread"] == thread)).any()):
        return True
    if recording.stacks.rows and bool((recording.stacks["process"] == process).any()):
        return True
    ranges = recording.ranges
    return bool(((ranges["process"] == process) & (ranges["style"] == RangeStyle.OPERATOR)).any())
