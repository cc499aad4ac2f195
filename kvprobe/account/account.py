"""Where the time of a recording went: for each GPU and each thread that serves, every instant in exactly one line.

The lines of a GPU add up to its window, to the nanosecond; so do those of a thread. Nothing is judged here: no length
decides whether something is a loss. Causes (`kvprobe.diagnosis`) explain parts of lines, and claim them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from kvprobe.account.activity import Activity, activities
from kvprobe.account.counted import by_counts
from kvprobe.account.gpu import BEGINS_NS, links_of, stretches_of
from kvprobe.account.lines import COPIES, HOST, OPEN, OUTSIDE_CALLS, STOOD, Line, Unknown
from kvprobe.account.not_kept import fill_not_kept
from kvprobe.account.other_gpus import tell_waits_for_others
from kvprobe.account.samples import Samples, fill
from kvprobe.account.stretches import NOBODY, Stretches, overlay
from kvprobe.account.threads import Threads
from kvprobe.output.parts import AccountJson, GpuJson, ThreadJson
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, union
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.link_rate import LinkRate
from kvprobe.recordings.model import Array, Direction
from kvprobe.recordings.python_functions import mostly_seen_in, seen_in

__all__ = ["Account", "GpuAccount", "ThreadAccount", "Times", "account_of"]

_AT_ONCE = 1 << 20  # pieces: of millions no array of their lengths is made


class Times(NamedTuple):
    """Intervals in any order, which may overlap; arrays of one entry an interval.

    Attributes:
        start, end: ns.
        where: of which GPU each is, by its number in `Account.gpus`; None: of whichever.
    """

    start: Array
    end: Array
    where: Array | None = None

    def of(self, place: int) -> tuple[Array, Array]:
        """Where those of a GPU begin and end, as disjoint ascending intervals."""
        mine: Array | slice = slice(None) if self.where is None else self.where == place
        return union(self.start[mine].astype(np.int64), self.end[mine].astype(np.int64))


@dataclass
class GpuAccount:
    """One GPU's.

    Attributes:
        device: its number; -1 unknown.
        processes: rows of the processes that use it.
        pids, ranks: of these.
        from_ns, to_ns: its window, on the recorder's own clock.
        stretches: the window, cut.
        operations: kernels and copies that ran in it.
        kernels: how many of them compute, graphs in one piece among them.
        links: the rates that its copies are compared with, to the GPU and from it; 0 where it made none.
        link_busy_ns: how long copies ran in the window, to the GPU and from it.
        samples: what is not measured and known otherwise: by stretches in which the GPU was seen, or by counts.
        behind: where operations began that stood behind a host function in their stream, ascending, and the row of the
            call that put it there (`host_functions.UNNAMED` where that was not kept). An idle stretch in front of one
            is nobody's doing (`Stretches.caller`), and in the line of other code.
        functions: by the name of a line, or of a reason why something is not known: "function (file:line)" that its
            thread was in for most of it, where stacks were taken.
    """

    device: int
    processes: tuple[int, ...]
    pids: tuple[int, ...]
    ranks: tuple[int, ...]
    from_ns: int
    to_ns: int
    stretches: Stretches
    operations: int
    kernels: int
    links: tuple[LinkRate, LinkRate] = (LinkRate(), LinkRate())
    link_busy_ns: tuple[int, int] = (0, 0)
    samples: Samples = field(default_factory=Samples)
    behind: tuple[Array, Array] = field(default_factory=lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64)))
    functions: dict[str, str] = field(default_factory=dict)

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.to_ns - self.from_ns

    @property
    def seen(self) -> bool:
        """Whether the recording shows anything of what this GPU did."""
        return bool((self.stretches.detail != Unknown.NOT_RECORDED).any()) and self.window_ns > 0

    def ns(self, *lines: Line) -> int:
        """Time in these lines."""
        return self.stretches.total_ns(lines)

    def share(self, *lines: Line) -> float:
        """The same as a share of the window, 0 to 1."""
        return self.ns(*lines) / self.window_ns if self.window_ns > 0 else 0.0

    @cached_property
    def computes(self) -> tuple[int, int]:
        """From where the first kernel began until where the last one ended; where none ran, no time at all.

        Outside nothing shows whether a model waits: before it may be starting, and afterwards it may be over. A CUDA
        graph that was recorded in one piece is a model's work, too: Nsight Systems records graphs so unless told.
        """
        cut = self.stretches
        computing = np.flatnonzero((cut.line == Line.COMPUTING) | (cut.detail == Unknown.GRAPH))
        if not len(computing):
            return self.from_ns, self.from_ns
        return int(self.stretches.start[computing[0]]), int(self.stretches.end[computing[-1]])

    @property
    def runs_kernels(self) -> bool:
        """Whether one was seen in the window: where none was, copies are all that the GPU does."""
        first, last = self.computes
        return last > first

    @property
    def asked_ns(self) -> int:
        """The window without the time in which nobody asked for anything, or nothing shows whether anybody did."""
        return self.window_ns - self.ns(Line.NOTHING_TO_DO) - self.open_ns

    @property
    def main_caller(self) -> int:
        """The thread that this GPU waited for longest, as `Stretches.caller`; NOBODY where it waited for none."""
        cut = self.stretches
        known = cut.caller >= 0
        return int(np.bincount(cut.caller[known], weights=cut.ns[known]).argmax()) if known.any() else NOBODY

    @property
    def held_by_functions(self) -> Array:
        """Mask over stretches: nothing ran, because a host function stood in front of what had been submitted."""
        cut = self.stretches
        mask: Array = (cut.line == Line.ELSEWHERE) & (cut.caller == NOBODY)
        return mask

    @property
    def open_ns(self) -> int:
        """Pauses of which nothing shows whether anybody had asked for anything."""
        unknown = self.unknown_ns()
        return sum(unknown.get(one, 0) for one in OPEN)

    @property
    def waiting_share(self) -> float:
        """Share of the time with work to do in which only copies ran, or the GPU waited for the host."""
        return self.ns(*COPIES, *HOST) / self.asked_ns if self.asked_ns > 0 else 0.0

    @property
    def waited_share(self) -> float:
        """As `waiting_share`, of waiting between kernels alone: a model waited there."""
        cut, (first, last) = self.stretches, self.computes
        mine = among(cut.line, (*COPIES, *HOST)) & (cut.start >= first) & (cut.start < last)
        return cut.sum_ns(mine) / self.asked_ns if self.asked_ns > 0 else 0.0

    @property
    def not_computing_ns(self) -> int:
        """Time that could be saved at most: waiting, for copies or the host."""
        unknown = self.unknown_ns()
        return self.ns(*COPIES, *HOST) + sum(unknown.get(one, 0) for one in STOOD)

    @property
    def link_alone_ns(self) -> int:
        """For how long only copies run however well they overlap: the link is busy for longer than kernels run."""
        return max(max(self.link_busy_ns) - self.ns(Line.COMPUTING), 0)

    def unknown_ns(self) -> dict[Unknown, int]:
        """What is not known, by reason."""
        mine = self.stretches.line == Line.NOT_KNOWN
        reasons, ns = self.stretches.detail[mine], self.stretches.ns[mine]
        return {Unknown(one): int(ns[reasons == one].sum()) for one in np.unique(reasons).tolist()}

    def matters_ns(self) -> dict[Unknown, int]:
        """As `unknown_ns`, without what every device takes from one operation that was submitted to the next."""
        cut = self.stretches
        mine = (cut.line == Line.NOT_KNOWN) & ((cut.detail != Unknown.BETWEEN_OPERATIONS) | (cut.ns >= BEGINS_NS))
        reasons, ns = cut.detail[mine], cut.ns[mine]
        return {Unknown(one): int(ns[reasons == one].sum()) for one in np.unique(reasons).tolist()}

    def to_json(self) -> GpuJson:
        """The lines in ns, in groups; they add up to `window_ns`."""
        return {
            "gpu": self.device,
            "pids": list(self.pids),
            "ranks": [rank for rank in self.ranks if rank >= 0],
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "window_ns": self.window_ns,
            "computing_ns": self.ns(Line.COMPUTING),
            "waiting_for_copies_ns": {line.key: self.ns(line) for line in COPIES},
            "waiting_for_host_ns": {line.key: self.ns(line) for line in HOST},
            "nothing_to_do_ns": self.ns(Line.NOTHING_TO_DO),
            "not_known_ns": {reason.key: ns for reason, ns in self.unknown_ns().items()},
            "by_samples_ns": self.samples.ns + self.samples.host_ns,
            "by_samples_error_ns": self.samples.error_ns if self.samples.ns + self.samples.host_ns else 0,
            "by_counts_ns": self.samples.counted_ns,
            "by_counts_error_ns": self.samples.counted_error_ns,
        }


@dataclass
class ThreadAccount:
    """One thread's: in which kind of call it was, or outside of calls.

    Attributes:
        caller: as `Joined.caller`.
        pid, thread, name: whose it is.
        launches: it launches compute.
        from_ns, to_ns: its window, on the recorder's own clock.
        spent_ns: ns by line; they add up to the window.
        waits_from, waits_to: of each wait for the device, (waits,) ns.
        waited_ns: of what it waited for the device: how long that computed, only copied, ran nothing, is not known.
    """

    caller: int
    pid: int
    thread: int
    name: str
    launches: bool
    from_ns: int
    to_ns: int
    spent_ns: dict[Line, int]
    waits_from: Array
    waits_to: Array
    waited_ns: dict[str, int] = field(default_factory=dict)

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.to_ns - self.from_ns

    def ns(self, *lines: Line) -> int:
        """Time in these lines."""
        return sum(self.spent_ns.get(line, 0) for line in lines)

    def waited_for_slots(self, ns: int) -> None:
        """Of its submitting, so much time was waiting for a slot of a full queue."""
        moved = min(ns, self.ns(Line.SUBMITTING))
        self.spent_ns[Line.SUBMITTING] = self.ns(Line.SUBMITTING) - moved
        self.spent_ns[Line.FULL_QUEUE] = self.ns(Line.FULL_QUEUE) + moved

    def to_json(self) -> ThreadJson:
        """The lines in ns; they add up to `window_ns`."""
        whole = {
            "pid": self.pid,
            "thread": self.thread,
            "name": self.name,
            "launches": self.launches,
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "window_ns": self.window_ns,
            **{f"{line.key}_ns": self.ns(line) for line in (*HOST, Line.NOTHING_TO_DO)},
            "waited_for_device_ns": self.waited_ns,
        }
        return cast("ThreadJson", whole)


@dataclass
class Account:
    """All GPUs of a recording, and all threads that submit to them, each over the serving window.

    Attributes:
        gpus: one for each GPU; where no device activity was recorded, one a process, of which nothing is known.
        threads: the thread that submitted most first.
        causes: names of the causes that have claimed something; a stretch's `cause` is a number in it.
    """

    gpus: list[GpuAccount]
    threads: list[ThreadAccount]
    causes: list[str] = field(default_factory=list)

    @property
    def seen(self) -> bool:
        """Whether the recording shows what any GPU did."""
        return any(gpu.seen for gpu in self.gpus)

    @cached_property
    def main(self) -> GpuAccount | None:
        """The GPU that most is known of."""
        seen = [gpu for gpu in self.gpus if gpu.seen]
        return max(seen, key=lambda gpu: gpu.operations, default=None)

    def claim(
        self,
        cause: str,
        times: Times,
        lines: Sequence[Line],
        *,
        becomes: Line | None = None,
        caller: int | None = None,
        most_ns: int | Callable[[GpuAccount], int] | None = None,
    ) -> dict[int, int]:
        """Gives a cause what is not claimed yet of these lines in these intervals, in ns.

        What every device takes from one operation that was submitted to the next is nobody's doing.

        Args:
            cause: its name.
            times: the intervals.
            lines: of these lines only.
            becomes: the line that the claimed time moves to, where the cause proves another than was assumed.
            caller: of this thread's doing only, or NOBODY's; None: whoever's.
            most_ns: no more than this of each GPU; the earliest of it.

        Returns:
            what it got, in ns, by the number of the GPU in `gpus`.
        """
        if cause not in self.causes:
            self.causes.append(cause)
        number = self.causes.index(cause)
        got: dict[int, int] = {}
        for place, gpu in enumerate(self.gpus):
            if not gpu.seen:
                continue
            cut = gpu.stretches
            edges, whole = cut.edges, cut.ns
            inside = cut.cut(*times.of(place))
            mine = inside & (cut.cause == NOBODY) & among(cut.line, lines)
            open_ = np.flatnonzero(mine & (cut.line == Line.NOT_KNOWN))
            stood = whole[np.searchsorted(edges, cut.start[open_], "right") - 1] >= BEGINS_NS
            mine[open_] = among(cut.detail[open_], STOOD) & stood
            if caller is not None:
                mine &= cut.caller == caller
            ns = cut.sum_ns(mine)
            most = ns if most_ns is None else most_ns if isinstance(most_ns, int) else most_ns(gpu)
            if ns > most:
                mine = _earliest(cut, mine, most)
                ns = cut.sum_ns(mine)
            if ns:
                got[place] = ns
                cut.cause[mine] = number
                if becomes is not None:
                    cut.line[mine] = becomes
                    cut.detail[mine] = Unknown.RECORDER if becomes == Line.NOT_KNOWN else NOBODY
        return got

    def claimed_ns(self, gpu: GpuAccount, cause: str, lines: Sequence[Line]) -> int:
        """What a cause has claimed of these lines of a GPU."""
        if cause not in self.causes:
            return 0
        cut = gpu.stretches
        mine = (cut.cause == self.causes.index(cause)) & among(cut.line, lines)
        return cut.sum_ns(mine)

    def to_json(self) -> AccountJson:
        """GPUs and threads."""
        return {"gpus": [gpu.to_json() for gpu in self.gpus], "threads": [one.to_json() for one in self.threads]}


def _earliest(cut: Stretches, mine: Array, most_ns: int) -> Array:
    """The earliest of these stretches that together last `most_ns`; the last of them is cut."""
    spent = np.cumsum(np.where(mine, cut.ns, 0))
    last = int(np.searchsorted(spent, most_ns))
    until = int(cut.end[last]) - (int(spent[last]) - most_ns)
    kept = mine.copy()
    before = len(cut.line)
    cut.cut(np.array([cut.edges[0]]), np.array([until]))
    if len(cut.line) > before:
        kept = np.insert(kept, last, kept[last])
    return np.asarray(kept & (cut.start < until))


def account_of(joined: Joined) -> Account:
    """The account of a recording, over its serving window.

    A GPU's window begins where the first of its processes begins to serve; a thread's where its own process does.
    """
    serving = joined.serving
    first = int(serving.from_ns.min()) if len(serving.from_ns) else serving.first_ns
    threads = Threads(joined, first, max(serving.end_ns, first))
    gpus = []
    seen = list(activities(joined))
    begins = [_begin(joined, gpu) for gpu in seen]
    cut = [
        stretches_of(joined, gpu, threads, begin, max(serving.end_ns, begin))
        for gpu, begin in zip(seen, begins, strict=True)
    ]
    tell_waits_for_others(list(zip(seen, cut, strict=True)))
    for gpu, begin, whole in zip(seen, begins, cut, strict=True):
        stretches, counts = by_counts(whole, gpu)
        samples = fill_not_kept(stretches, threads, fill(stretches, gpu, threads, counts))
        inside = (gpu.end > begin) & (gpu.start < serving.end_ns)
        gpus.append(
            GpuAccount(
                gpu.device,
                gpu.processes,
                tuple(_of(joined, "pid", row) for row in gpu.processes),
                tuple(_of(joined, "rank", row) for row in gpu.processes),
                begin,
                max(serving.end_ns, begin),
                stretches,
                int(inside.sum()),
                int((inside & ~gpu.copying).sum()),
                links_of(joined, gpu),
                _link_busy(gpu, begin, max(serving.end_ns, begin), samples),
                samples,
                _behind(gpu),
            )
        )
        gpus[-1].functions.update(_functions(joined, gpus[-1]))
    return Account(gpus, _threads(joined, threads, gpus))


def _functions(joined: Joined, gpu: GpuAccount) -> Iterator[tuple[str, str]]:
    """In which function a GPU's main thread was for most of a line outside of calls, or of what is not known of it."""
    rows = np.flatnonzero(joined.caller == gpu.main_caller)
    if not joined.recording.stack_samples.rows or not len(rows):
        return
    process, thread, cut = int(joined.process[rows[0]]), int(joined.thread[rows[0]]), gpu.stretches
    theirs = cut.caller == gpu.main_caller
    parts: list[tuple[Line | Unknown, Array]] = [(line, (cut.line == line) & theirs) for line in OUTSIDE_CALLS]
    for what, mine in [*parts, *((reason, cut.detail == reason) for reason in OPEN)]:
        times = Cover(cut.start[mine], cut.end[mine])
        name = mostly_seen_in(*seen_in(joined.recording, process, thread, times))
        if name:
            yield what.name, name


def _behind(gpu: Activity) -> tuple[Array, Array]:
    rows = np.flatnonzero(gpu.behind != NOBODY)
    return gpu.start[rows], gpu.behind[rows]


def _link_busy(gpu: Activity, begin: int, end: int, samples: Samples) -> tuple[int, int]:
    """How long copies of each direction ran between these instants, ns; where nobody looked, for as much of it."""
    both = (gpu.copying & (gpu.direction == one) for one in (Direction.H2D, Direction.D2H))
    there, back = (Cover(*(np.clip(time[one], begin, end) for time in (gpu.start, gpu.end))).total_ns for one in both)
    times = (end - begin) / max(end - begin - samples.ns, 1)
    return round(there * times), round(back * times)


def _begin(joined: Joined, gpu: Activity) -> int:
    from_ns = joined.serving.from_ns
    mine = [int(from_ns[row]) for row in gpu.processes if 0 <= row < len(from_ns)]
    return min(mine, default=joined.serving.start_ns)


def _of(joined: Joined, column: str, row: int) -> int:
    table = joined.recording.processes
    return int(table[column][row]) if 0 <= row < table.rows else -1


def _threads(joined: Joined, threads: Threads, gpus: list[GpuAccount]) -> list[ThreadAccount]:
    """Threads that submit something in the window, whoever submits most first."""
    mine = joined.submits & joined.serving.holds(joined.process, joined.start)
    if not mine.any():
        return []
    counts = np.bincount(joined.caller[mine])
    launching = set(joined.launching_callers.tolist())
    out = []
    for caller in np.argsort(-counts, kind="stable")[: int((counts > 0).sum())].tolist():
        row = int(np.argmax(mine & (joined.caller == caller)))
        process = int(joined.process[row])
        timeline = threads.of(caller)
        begin = int(joined.serving.from_ns[process]) if process < len(joined.serving.from_ns) else threads.begin
        begin = max(begin, min(threads.kept_from(caller), threads.end))
        edges = np.clip(timeline.edges, begin, threads.end) if begin > threads.begin else timeline.edges
        spent = np.zeros(len(Line), dtype=np.int64)
        for at in range(0, len(timeline.line), _AT_ONCE):
            np.add.at(spent, timeline.line[at : at + _AT_ONCE], np.diff(edges[at : at + _AT_ONCE + 1]))
        waits = timeline.line == Line.WAITING_FOR_DEVICE
        device = joined.call_device[mine & (joined.caller == caller)]
        theirs = [gpu for gpu in gpus if process in gpu.processes]
        gpu = theirs[int(np.argmax([(device == one.device).sum() for one in theirs]))] if theirs else None
        out.append(
            ThreadAccount(
                caller,
                joined.pid(process),
                int(joined.thread[row]),
                _name(joined, process, int(joined.thread[row])),
                caller in launching,
                int(edges[0]),
                int(edges[-1]),
                {Line(line): int(ns) for line, ns in enumerate(spent.tolist()) if ns},
                edges[:-1][waits],
                edges[1:][waits],
                _waited(edges[:-1][waits], edges[1:][waits], gpu),
            )
        )
    return out


def _waited(start: Array, end: Array, gpu: GpuAccount | None) -> dict[str, int]:
    """What the device did while a thread waited for it, from `start` to `end`, (waits,) ns."""
    total = int((end - start).sum())
    if gpu is None or not gpu.seen or not total:
        return {"computing": 0, "copying": 0, "idle": 0, "not_known": total}
    cut = gpu.stretches
    inside = (end > cut.edges[0]) & (start < cut.edges[-1])
    begins, ends = np.clip(start[inside], *cut.edges[[0, -1]]), np.clip(end[inside], *cut.edges[[0, -1]])
    begins, ends, line, _ = overlay(begins, ends, cut.edges, cut.line)
    spent = np.bincount(line, weights=ends - begins, minlength=len(Line)).astype(np.int64)
    computing, copying = int(spent[Line.COMPUTING]), int(spent[list(COPIES)].sum())
    unknown = int(spent[Line.NOT_KNOWN])
    idle = int(spent.sum()) - computing - copying - unknown
    return {"computing": computing, "copying": copying, "idle": idle, "not_known": total - computing - copying - idle}


def _name(joined: Joined, process: int, thread: int) -> str:
    threads = joined.recording.threads
    mine = np.flatnonzero((threads["process"] == process) & (threads["thread"] == thread))
    return joined.text(int(threads["name"][mine[0]])) if len(mine) else ""
