"""Lanes of the timeline beside threads and streams: what each GPU did and when it was idle, and steps and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.account import COPIES, LINE_TITLES, Account, Line
from kvprobe.recordings.assemble import among, pairs, positions
from kvprobe.recordings.model import Direction, Engine, RangeStyle, Recording
from kvprobe.reporting.account import gpu_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MEMORY", "STYLES", "WAIT", "WORK", "Lane", "copy_text", "engine_styles", "gpu_lanes", "range_lanes"]

Array = npt.NDArray[Any]

# How a piece of the timeline is drawn: an index into STYLES, which the legend names.
WORK, WAIT, KERNEL, LOAD, STORE, OTHER, RANGE, IDLE, COPYING, MEMORY = range(10)
STYLES = (
    "submitting",
    "waiting for the GPU",
    "kernels",
    "copies to the GPU",
    "copies to the CPU",
    "other work of the device",
    "steps and ranges",
    "GPU idle",
    "only copies run",
    "allocating, pinning or freeing",
)
MOST_GPUS = 8
LEVELS = 2  # of nested ranges: a step, and what it is made of
MOST_RANGES = 4  # lanes

_TO = {Direction.H2D: "copy to the GPU", Direction.D2H: "copy to the CPU", Direction.D2D: "copy within the GPU"}


@dataclass(frozen=True)
class Lane:
    """A lane; the columns are those of its pieces, ascending by start.

    Attributes:
        label: what it is called.
        start, end: ns.
        style: how each is drawn, an index into STYLES.
        text: what each is called, by its place in the columns.
        thread: whose ranges these are, as (row of the process, thread); None for a GPU.
    """

    label: str
    start: Array
    end: Array
    style: Array
    text: Callable[[int], str]
    thread: tuple[int, int] | None = None


def engine_styles(engine: Array, direction: Array) -> Array:
    """The style of each operation of the device; kernels apart from copies, and those by direction."""
    out = np.full(len(engine), OTHER, dtype=np.uint8)
    out[engine == Engine.KERNEL] = KERNEL
    copies = engine == Engine.COPY
    out[copies & (direction == Direction.H2D)] = LOAD
    out[copies & (direction == Direction.D2H)] = STORE
    return out


def copy_text(direction: int) -> str:
    """A copy in words, by its direction."""
    return _TO.get(Direction(direction), "copy")


def gpu_lanes(account: Account | None) -> list[Lane]:
    """A lane for each GPU of the account: when it computed, when only copies ran, and when it ran nothing, and why."""
    if account is None:
        return []
    out = []
    for gpu in account.gpus[:MOST_GPUS]:
        cut = gpu.stretches
        if not gpu.seen or not len(cut.line):
            continue
        style = np.full(len(cut.line), IDLE, dtype=np.uint8)
        style[cut.line == Line.COMPUTING] = KERNEL
        style[among(cut.line, COPIES)] = COPYING
        out.append(Lane(gpu_name(account, gpu), cut.start, cut.end, style, _titles(cut.line)))
    return out


def _titles(line: Array) -> Callable[[int], str]:
    """What each stretch is called: there may be millions, of which few are asked for."""
    return lambda row: LINE_TITLES[Line(int(line[row]))]


def range_lanes(recording: Recording) -> list[Lane]:
    """Steps and NVTX ranges by thread, nested ones below those that hold them; a framework's operators are no steps."""
    table = recording.ranges
    rows = np.flatnonzero((table["style"] != RangeStyle.OPERATOR) & (table["end_ns"] > table["start_ns"]))
    if not len(rows):
        return []
    owners, place = pairs(table["process"][rows], table["thread"][rows])
    parts = sorted((rows[part] for part in positions(place, len(owners))), key=len, reverse=True)
    out: list[Lane] = []
    for part in parts[: MOST_RANGES // LEVELS]:
        owner = int(table["process"][part[0]]), int(table["thread"][part[0]])
        for depth, level in enumerate(_levels(part, table["start_ns"], table["end_ns"])):
            names = [recording.text(name) or "range" for name in table["name"][level].tolist()]
            whose = f"thread {owner[1]}" if owner[1] >= 0 else "the process"
            label = f"ranges inside these, {whose}" if depth else f"steps and ranges of {whose}"
            start, end = table["start_ns"][level], table["end_ns"][level]
            out.append(Lane(label, start, end, np.full(len(level), RANGE, dtype=np.uint8), names.__getitem__, owner))
    return out


def _levels(rows: Array, start: Array, end: Array) -> Iterator[Array]:
    """The ranges that lie in no other, then those that lie in these alone."""
    rows = rows[np.lexsort((-end[rows], start[rows]))]
    for _ in range(LEVELS):
        if not len(rows):
            return
        reach = np.maximum.accumulate(end[rows])
        outer = np.append(True, start[rows][1:] >= reach[:-1])
        yield rows[outer]
        rows = rows[~outer]
