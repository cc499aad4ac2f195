"""In which Python functions a thread was: which frames are the program's own, and what a profile of functions tells.

The PyTorch profiler follows functions `with_stack=True`, and writes the path of each from where Python found it,
without the folder of a library or of Python itself, so that these are told by the names of their modules.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, Recording

__all__ = ["FRAME", "InFunction", "is_own", "longest_in", "mostly_in", "stack_at"]

FRAME = re.compile(r"(?P<name>.*) \((?P<file>.+):(?P<line>\d+)\)")
MOST_FRAMES = 64
_LIBRARIES = re.compile(
    r"(^<|/(site|dist)-packages/|/lib/python3[.\d]*/|(^|/)kvprobe/|^(torch|torchvision|torchaudio|triton|numpy|scipy|PIL)/)"
)
# Python's own modules, without those whose names programs like to have for their scripts.
_PYTHON = sys.stdlib_module_names - {"code", "profile", "test"}
_PROFILER = re.compile(r"\((torch/profiler/|torch/autograd/profiler)[^()]*:\d+\)$")


def is_own(file: str) -> bool:
    """Whether a file is of the program, and not of Python or of a library under it."""
    if _LIBRARIES.search(file):
        return False
    return file.startswith("/") or file.split("/")[0].removesuffix(".py") not in _PYTHON


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
