"""What a step's threads did while it lasted: the longest calls, and the Python stacks that were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvprobe.output.requests import CallInStepJson, StackInStepJson
from kvprobe.recordings.model import Recording

__all__ = ["CallIn", "InStep", "StackIn", "held_in"]

MOST = 3  # calls, and stacks, of a step


@dataclass(frozen=True)
class CallIn:
    """A call: its row in `calls`, its name, its thread, and how long it was in the step."""

    row: int
    name: str
    thread: int
    ns: int

    def to_json(self) -> CallInStepJson:
        """Plain values."""
        return {"call": self.name, "thread": self.thread, "ns": self.ns}


@dataclass(frozen=True)
class StackIn:
    """A stack, innermost frame first, of a thread that had been blocked for so long."""

    thread: int
    blocked_ns: int
    frames: tuple[str, ...]

    def to_json(self) -> StackInStepJson:
        """Plain values."""
        return {"thread": self.thread, "blocked_ns": self.blocked_ns, "frames": [*self.frames]}


@dataclass(frozen=True)
class InStep:
    """Of one step: what lasted longest first."""

    calls: list[CallIn] = field(default_factory=list)
    stacks: list[StackIn] = field(default_factory=list)


def held_in(
    recording: Recording, spans: Sequence[tuple[int, int]], processes: Sequence[tuple[int, ...]]
) -> list[InStep]:
    """What these intervals hold, each of the processes named beside it; calls are ascending by their start."""
    calls, stacks = recording.calls, recording.stacks
    start, end = calls["start_ns"], calls["end_ns"]
    reach = np.maximum.accumulate(end) if len(end) else end  # no call before it lasts longer
    out = []
    for (begin, stop), mine in zip(spans, processes, strict=True):
        first, last = int(np.searchsorted(reach, begin, "right")), int(np.searchsorted(start, stop))
        inside = np.minimum(end[first:last], stop) - np.maximum(start[first:last], begin)
        inside = np.where(np.isin(calls["process"][first:last], np.array(mine)), inside, 0)
        longest = np.argsort(-inside, kind="stable")[:MOST]
        found = [
            CallIn(first + at, recording.text(int(calls["name"][first + at])), int(calls["thread"][first + at]), ns)
            for at, ns in zip(longest.tolist(), inside[longest].tolist(), strict=True)
            if ns > 0
        ]
        taken = np.flatnonzero(
            (stacks["time_ns"] >= begin) & (stacks["time_ns"] <= stop) & np.isin(stacks["process"], np.array(mine))
        )
        taken = taken[np.argsort(-stacks["blocked_ns"][taken], kind="stable")][:MOST]
        held = [
            StackIn(
                int(stacks["thread"][row]),
                int(stacks["blocked_ns"][row]),
                tuple(recording.text(int(stacks["stack"][row])).split("\n")),
            )
            for row in taken.tolist()
        ]
        out.append(InStep(found, held))
    return out
