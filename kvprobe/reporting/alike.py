"""Whether two recordings can be compared: of the same work, by the same recorder; and their accounts side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from kvprobe.account import COPIES, HOST, LINE_TITLES, Account, Line
from kvprobe.output.recorded import LineChangeJson
from kvprobe.recordings.model import Direction, Engine, Recording
from kvprobe.reporting.units import duration, percent
from kvprobe.reporting.views import TableView, table

__all__ = ["LineChange", "account_table", "compare_accounts", "unlike"]

SAME_WORK = 0.5  # of the operations, by name, direction and size: two runs of one program share far more


@dataclass(frozen=True)
class LineChange:
    """One line of the account in two recordings, all GPUs together; a share is of their windows."""

    line: str
    title: str
    before_ns: int
    after_ns: int
    share_before: float
    share_after: float

    def to_json(self) -> LineChangeJson:
        """All fields."""
        return cast("LineChangeJson", asdict(self))


def compare_accounts(before: Account, after: Account) -> list[LineChange]:
    """Lines that have any time in either; none where either does not show what a GPU did."""
    sides = [[gpu for gpu in account.gpus if gpu.seen] for account in (before, after)]
    windows = [sum(gpu.window_ns for gpu in gpus) for gpus in sides]
    if not all(windows):
        return []
    out = []
    for line in (Line.COMPUTING, *COPIES, *HOST, Line.NOTHING_TO_DO, Line.NOT_KNOWN):
        ns = [sum(gpu.ns(line) for gpu in gpus) for gpus in sides]
        if any(ns):
            out.append(LineChange(line.key, LINE_TITLES[line], ns[0], ns[1], ns[0] / windows[0], ns[1] / windows[1]))
    return out


def account_table(changes: list[LineChange]) -> TableView:
    """The same as a table."""
    rows = [
        [
            one.title,
            (f"{percent(one.share_before)} ({duration(one.before_ns)})", one.share_before),
            (f"{percent(one.share_after)} ({duration(one.after_ns)})", one.share_after),
        ]
        for one in changes
    ]
    return table("Where the time went", ["Line", "Before", "After"], rows)


def unlike(before: Recording, after: Recording) -> list[str]:
    """Why two recordings should not be compared, a sentence without its full stop for each reason."""
    out = []
    formats = [sorted({one.format for one in recording.source}) for recording in (before, after)]
    if formats[0] != formats[1]:
        out.append(f"different recorders made the recordings ({' and '.join(', '.join(one) for one in formats)})")
    work = [_work(recording) for recording in (before, after)]
    if all(work):
        total = [sum(one.values()) for one in work]
        shared = sum(min(work[0][key] / total[0], work[1][key] / total[1]) for key in work[0])
        if shared < SAME_WORK:
            out.append(f"the recordings are of different work: they share {percent(shared)} of their operations")
    return out


def _work(recording: Recording) -> Counter[tuple[str, int]]:
    """What the GPUs were given to do: kernels by name, copies by direction and size."""
    table = recording.executions
    out: Counter[tuple[str, int]] = Counter()
    kernels = table["name"][table["engine"] == Engine.KERNEL]
    for name, many in zip(*(found.tolist() for found in np.unique(kernels, return_counts=True)), strict=True):
        out[recording.text(name), 0] += many
    copies = np.flatnonzero((table["engine"] == Engine.COPY) & (table["bytes"] > 0))
    size = np.log2(np.maximum(table["bytes"][copies], 1)).astype(np.int64)
    pairs = np.stack((table["direction"][copies].astype(np.int64), size))
    for (direction, power), many in zip(*_counted(pairs), strict=True):
        out[Direction(direction).name, power] += many
    return out


def _counted(pairs: Any) -> tuple[list[Any], list[int]]:
    found, counts = np.unique(pairs, axis=1, return_counts=True)
    return found.T.tolist(), counts.tolist()
