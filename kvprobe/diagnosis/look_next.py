"""Where to look next in a recording of which no single cause explains much: its largest line, and who was in it where.

Nothing is judged here: of the GPU that waited for the largest part of its time between kernels, the account's largest
line that is a wait, the thread that the GPU waited for in it, what that thread did, and when most of it was.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.account import COPIES, HOST, LINE_TITLES, GpuAccount, Line, ThreadAccount
from kvprobe.diagnosis.traced import line_of
from kvprobe.durations import percent_text, time_text
from kvprobe.output.parts import NextJson
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, Recording
from kvprobe.recordings.occupancy import innermost_at
from kvprobe.recordings.python_functions import longest_in
from kvprobe.recordings.serving import recorded_span
from kvprobe.recordings.vocabulary import base_name

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination

__all__ = ["LookNext", "look_next"]

PARTS = 10  # of the serving window: the one with most of the line is looked at next
OF_LINE = 0.05  # what holds less of the line is not named
_NUMBER = re.compile(r"[\s,#:_-]*(\w+ ?= ?)?\d+$")  # at the end of a name: of an operator's call, or of a step


@dataclass(frozen=True)
class LookNext:
    """What to look at next.

    Attributes:
        gpu: number of the GPU.
        line: of its account.
        ns: how long the GPU was in it; `share` of its serving window.
        pid, thread: whom it waited for; -1 where no thread is known.
        places: what that thread did, with the time of it, most first: a range, a call, a line of code.
        from_ns, to_ns: the part of the window with most of the line, from the recording's first instant on.
        part_ns: how much of the line lies in it.
        inputs: what was read.
    """

    gpu: int
    line: Line
    ns: int
    share: float
    pid: int
    thread: int
    places: tuple[tuple[str, int], ...]
    from_ns: int
    to_ns: int
    part_ns: int
    inputs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The line, and who was in it where, in a sentence without its full stop."""
        gpu = f"GPU {self.gpu}" if self.gpu >= 0 else "the GPU"
        line = f"the longest known wait of {gpu} is “{LINE_TITLES[self.line]}”"
        said = f"{line}: {time_text(self.ns)}, {percent_text(self.share)} of the serving window"
        if self.thread < 0:
            return said
        places = " and ".join(f"{time_text(ns)} of it {place}" for place, ns in self.places)
        return f"{said}, because of thread {self.thread}" + (f", {places}" if places else "")

    @property
    def command(self) -> str:
        """What judges the part of the window with most of the line, as a command."""
        words = shlex.join(["kvprobe", "report", *self.inputs])
        return f"{words} --from {_option(self.from_ns)} --to {_option(self.to_ns)} -o part.html"

    @property
    def narrower(self) -> str:
        """What the command shows, in a sentence without its full stop."""
        part = f"{time_text(self.part_ns)} of this line lie within {time_text(self.to_ns - self.from_ns)}"
        return f"{part}, which this command judges alone: `{self.command}`"

    def to_json(self) -> NextJson:
        """The same for programs."""
        return {
            "text": self.text,
            "command": self.command,
            "gpu": self.gpu,
            "line": self.line.key,
            "ns": self.ns,
            "pid": self.pid,
            "thread": self.thread,
            "places": [{"place": place, "ns": ns} for place, ns in self.places],
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "part_ns": self.part_ns,
        }


def look_next(recording: Recording, found: Examination) -> LookNext | None:
    """Where to look in the account of `found`; None where no GPU waited."""
    gpu = max((one for one in found.account.gpus if one.seen), key=lambda one: one.waited_share, default=None)
    if gpu is None or not gpu.ns(*COPIES, *HOST):
        return None
    line = max((*COPIES, *HOST), key=gpu.ns)
    cut = gpu.stretches
    mine = np.flatnonzero(cut.line == line)
    waits = Cover(cut.start[mine], cut.end[mine])
    knots = np.linspace(gpu.from_ns, gpu.to_ns, PARTS + 1).astype(np.int64)
    inside = waits.within(knots[:-1], knots[1:])
    most = int(inside.argmax())
    first = recorded_span(recording)[0]
    thread, theirs = _thread(found.account.threads, gpu, mine)
    return LookNext(
        gpu=gpu.device,
        line=line,
        ns=gpu.ns(line),
        share=gpu.share(line),
        pid=thread.pid if thread else -1,
        thread=thread.thread if thread else -1,
        places=tuple(_places(recording, gpu, thread, theirs, line)) if thread else (),
        from_ns=int(knots[most]) - first,
        to_ns=int(knots[most + 1]) - first,
        part_ns=int(inside[most]),
        inputs=tuple(one.path for one in recording.source),
    )


def _thread(threads: list[ThreadAccount], gpu: GpuAccount, mine: Array) -> tuple[ThreadAccount | None, Array]:
    """The thread that the GPU waited for longest in these stretches, and which of them are its doing."""
    cut = gpu.stretches
    theirs = [mine[cut.caller[mine] == one.caller] for one in threads]
    most = max(range(len(threads)), key=lambda at: int(cut.ns[theirs[at]].sum()), default=-1)
    if most < 0 or not len(theirs[most]):
        return None, mine[:0]
    return threads[most], theirs[most]


def _places(
    recording: Recording, gpu: GpuAccount, thread: ThreadAccount, mine: Array, line: Line
) -> Iterator[tuple[str, int]]:
    """In which range, which call and at which line of code the thread was longest in these stretches, where known."""
    cut = gpu.stretches
    start, ns = cut.start[mine], cut.ns[mine]
    process = next((one for one in gpu.processes if int(recording.processes["pid"][one]) == thread.pid), 0)
    least = OF_LINE * int(ns.sum())
    rows = innermost_at(recording, process, thread.thread, start + ns // 2)
    names: dict[str, int] = {}
    for row, long in zip(rows.tolist(), ns.tolist(), strict=True):
        if row >= 0:
            name = _NUMBER.sub("", recording.text(int(recording.ranges["name"][row])).lstrip(":"))
            names[name] = names.get(name, 0) + long
    yield from ((f"in range “{name}”", long) for name, long in _largest(names, least))
    calls = recording.calls
    theirs = np.flatnonzero((calls["process"] == process) & (calls["thread"] == thread.thread))
    inside = Cover(start, start + ns).within(calls["start_ns"][theirs], calls["end_ns"][theirs])
    spent = np.bincount(calls["name"][theirs], weights=inside, minlength=1)
    called = {base_name(recording.text(int(one))): int(spent[one]) for one in np.flatnonzero(spent).tolist()}
    yield from ((f"in {name}", long) for name, long in _largest(called, least))
    for one in longest_in(recording, process, thread.thread, Cover(start, start + ns), most=1):
        if one.ns >= least:
            yield f"in function {one.name}", one.ns
    stacks = recording.stacks
    seen = np.flatnonzero((stacks["process"] == process) & (stacks["thread"] == thread.thread))
    code: dict[str, int] = {}
    for row in seen.tolist():
        at = int(np.searchsorted(start, stacks["time_ns"][row], "right")) - 1
        if at >= 0 and stacks["time_ns"][row] < start[at] + ns[at]:
            where = line_of(recording.text(int(stacks["stack"][row])))
            code[where] = code.get(where, 0) + int(ns[at])
    code.pop("", None)
    yield from ((f"at {where}", long) for where, long in _largest(code, 0))


def _largest(spent: dict[str, int], least: float) -> list[tuple[str, int]]:
    """The one with most time, unless it is too little to name."""
    name = max(spent, key=lambda one: spent[one], default="")
    return [(name, spent[name])] if name and spent[name] >= least else []


def _option(ns: int) -> str:
    """A time for `--from` and `--to`, to a microsecond."""
    return f"{ns / 1e6:.3f}".rstrip("0").rstrip(".") + "ms"
