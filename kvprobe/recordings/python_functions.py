"""In which Python functions a thread was: the program's own frames, and what a profile or samples of stacks tell.

The PyTorch profiler follows functions `with_stack=True`, and writes the path of each from where Python found it,
without the folder of a library or of Python itself, so that these are told by the names of their modules.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, Recording

__all__ = [
    "FunctionSeen",
    "InFunction",
    "is_own",
    "longest_in",
    "mostly_in",
    "mostly_seen_in",
    "program_frame",
    "seen_in",
    "stack_at",
]

FRAME = re.compile(r"(?P<name>.*) \((?P<file>.+):(?P<line>\d+)\)")
MOST_FRAMES = 64
_LIBRARIES = re.compile(
    r"(^<|/(site|dist)-packages/|/lib/python3[.\d]*/|(^|/)kvprobe/|^(torch|torchvision|torchaudio|triton|numpy|scipy|PIL)/)"
)
# Python's own modules, without those whose names programs like to have for their scripts.
_PYTHON = sys.stdlib_module_names - {"code", "profile", "test"}
_INSTALLED = re.compile(r".*/(site|dist)-packages/")
_STARTER = re.compile(r"/s?bin/[^/.]+$")
_LOOK_NS = 1_000_000
_PROFILER = re.compile(r"\((torch/profiler/|torch/autograd/profiler)[^()]*:\d+\)$")


def is_own(file: str) -> bool:
    """Whether a file is of the program, and not of Python or of a library under it."""
    if _LIBRARIES.search(file):
        return False
    return file.startswith("/") or file.split("/")[0].removesuffix(".py") not in _PYTHON


def program_frame(stack: Iterable[str]) -> tuple[re.Match[str], re.Match[str]] | None:
    """Of a stack's frames the innermost one of the program, and the innermost of all; None without frames.

    A server that pip installed is no program's own file. So where only the script that starts it is, the frame is the
    innermost one of an installed package other than torch, numpy and the like.
    """
    frames = [found for found in map(FRAME.fullmatch, stack) if found]
    if not frames:
        return None
    own = (one for one in frames if is_own(one["file"]) and not _STARTER.search(one["file"]))
    installed = (one for one in frames if (to := _INSTALLED.match(one["file"])) and is_own(one["file"][to.end() :]))
    return next(own, None) or next(installed, None) or frames[0], frames[0]


def _of_program(name: str) -> bool:
    frame = FRAME.fullmatch(name)
    return frame is not None and is_own(frame["file"])


def stack_at(recording: Recording, process: int, thread: int, at_ns: int) -> tuple[str, ...]:
    """The functions that a thread was in, innermost first, without the profiler's own; none where it followed none."""
    table = recording.python_functions
    begun = int(np.searchsorted(table["start_ns"], at_ns, side="right"))
    rows = np.flatnonzero((table["end_ns"][:begun] > at_ns) & (table["thread"][:begun] == thread))
    rows = rows[table["process"][rows] == process]
    rows = rows[np.lexsort((-table["end_ns"][rows], table["start_ns"][rows]))][::-1]
    frames = (recording.text(int(one)) for one in table["name"][rows[: 2 * MOST_FRAMES]])
    return tuple(frame for frame in frames if not _PROFILER.search(frame))[:MOST_FRAMES]


@dataclass(frozen=True)
class InFunction:
    """How long a function was the innermost one of the program on a thread.

    Attributes:
        name: "function (file:line)"; the line is where it begins.
        ns: how long.
        own: whether it is of the program; a function of a library where no function of the program had called it.
        inner: what the thread was in for most of that, where that is a function that this one called; else "".
        inner_ns: for how long.
    """

    name: str
    ns: int
    own: bool
    inner: str = ""
    inner_ns: int = 0


def longest_in(recording: Recording, process: int, thread: int, times: Cover, most: int = 3) -> list[InFunction]:
    """The functions of the program that a thread was in longest in these times, the longest first."""
    start, end, inside, name = _inside(recording, process, thread, times)
    if not len(name):
        return []
    caller = _callers(start, end)
    called = np.zeros(len(inside), dtype=np.int64)
    np.add.at(called, caller[caller >= 0], inside[caller >= 0])
    alone = np.maximum(inside - called, 0)  # in the function, and in none that it called
    own = _own(recording, name)
    owner = name[_owners(caller, own[name])]
    spent = np.bincount(owner, weights=alone)
    out = []
    for one in np.argsort(-spent, kind="stable")[:most].tolist():
        if spent[one] < 1:
            break
        theirs = owner == one
        inner = np.bincount(name[theirs], weights=alone[theirs])
        deepest = int(inner.argmax())
        found = InFunction(recording.text(one), int(spent[one]), bool(own[one]))
        if deepest != one and 2 * inner[deepest] > spent[one]:
            found = InFunction(found.name, found.ns, found.own, recording.text(deepest), int(inner[deepest]))
        out.append(found)
    return out


def mostly_in(recording: Recording, process: int, thread: int, times: Cover) -> tuple[str, int]:
    """The innermost function of the program that held a thread for most of these times, and for how long.

    With all that it called; "" and 0 where the thread was in no one function for so long.
    """
    start, end, inside, name = _inside(recording, process, thread, times)
    most: tuple[str, int] = "", 0
    if not len(name):
        return most
    upper = np.bincount(name, weights=inside)  # one that calls itself counts several times
    for one in np.flatnonzero(_own(recording, name) & (2 * upper > times.total_ns)).tolist():
        mine = name == one
        ns = times.intersect_ns(Cover(start[mine], end[mine]))
        if 2 * ns > times.total_ns and (not most[1] or ns < most[1]):
            most = recording.text(one), ns
    return most


@dataclass(frozen=True)
class FunctionSeen:
    """In how many samples of stacks a function was the innermost one of the program.

    Attributes:
        name: "function (file:line)"; the line is where the thread was in most of them.
        stacks: how many.
        inner: the function of a library that it was in for most of them; else "".
        inner_stacks: in how many.
    """

    name: str
    stacks: int
    inner: str = ""
    inner_stacks: int = 0


def seen_in(
    recording: Recording, process: int, thread: int, times: Cover, least: int = 3
) -> tuple[list[FunctionSeen], int]:
    """The functions that samples of a thread's stack show in these times, most often first; and how many samples.

    Fewer samples than `least` show nothing. A sample counts where the thread was in these times for most of the
    millisecond before it was there.
    """
    table = recording.stack_samples
    at = table["time_ns"]
    taken = (table["process"] == process) & (table["thread"] == thread)
    taken &= 2 * times.within(at - _LOOK_NS, at) > _LOOK_NS
    stacks = [recording.text(int(one)).split("\n") for one in table["stack"][taken]]
    frames = [found for found in map(program_frame, stacks) if found]
    if len(frames) < least:
        return [], len(frames)
    lines: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    inner: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for mine, innermost in frames:
        function = mine["name"], mine["file"]
        lines[function][mine["line"]] += 1
        inner[function][innermost["name"] if innermost is not mine else ""] += 1
    out = []
    for function, seen in lines.items():
        many, (within, often) = seen.total(), inner[function].most_common(1)[0]
        name = f"{function[0]} ({function[1]}:{seen.most_common(1)[0][0]})"
        out.append(FunctionSeen(name, many, *((within, often) if within and 2 * often > many else ())))
    return sorted(out, key=lambda one: -one.stacks), len(frames)


def mostly_seen_in(seen: list[FunctionSeen], looks: int) -> str:
    """The function that most of so many samples show, as `seen_in` returns them; "" where that may be chance."""
    return seen[0].name if seen and 2 * seen[0].stacks > looks + looks**0.5 else ""


def _inside(recording: Recording, process: int, thread: int, times: Cover) -> tuple[Array, Array, Array, Array]:
    """A thread's calls of functions that lie in these times, outer ones first: start, end, how much lies in them, name.

    Arrays of one entry a call; of none where there is none.
    """
    table = recording.python_functions
    rows = np.flatnonzero((table["thread"] == thread) & (table["process"] == process))
    inside = times.within(table["start_ns"][rows], table["end_ns"][rows])
    rows, inside = rows[inside > 0], inside[inside > 0]
    start, end = table["start_ns"][rows], table["end_ns"][rows]
    order = np.lexsort((-end, start))
    return start[order], end[order], inside[order], table["name"][rows[order]]


def _own(recording: Recording, name: Array) -> Array:
    """Mask over indexes of names, up to the last of these: which of these are the program's functions."""
    used = np.flatnonzero(np.bincount(name))
    own = np.zeros(int(used[-1]) + 1, dtype=bool)
    own[used] = [_of_program(recording.text(int(one))) for one in used]
    return own


def _callers(start: Array, end: Array) -> Array:
    """Of nested intervals, sorted, which one holds each most closely, (rows,) int64; -1 none.

    One begins so many levels deep as others have begun and not ended, and lies in the last one that began a level
    above.
    """
    here = np.arange(len(start))
    depth = here - np.searchsorted(np.sort(end), start, side="right")
    by_depth = np.lexsort((here, depth))
    keys = depth[by_depth] * len(start) + here[by_depth]
    at = np.searchsorted(keys, (depth - 1) * len(start) + here) - 1
    return np.where(depth > 0, by_depth[np.maximum(at, 0)], -1)


def _owners(caller: Array, own: Array) -> Array:
    """The innermost of the program's functions that each lies in, itself included; itself where it lies in none."""
    here = np.arange(len(caller))
    up = np.where(own | (caller < 0), here, caller)
    while len(further := np.flatnonzero(up[up] != up)):
        up[further] = up[up[further]]
    return np.where(own[up], up, here)
