"""The lines of an account: into which of them an instant can fall, and how they are called."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np

from kvprobe.recordings.model import Array, CallKind, Memory

__all__ = [
    "COPIES",
    "HOST",
    "IDLE",
    "LINE_TITLES",
    "OPEN",
    "OUTSIDE_CALLS",
    "STOOD",
    "Line",
    "Unknown",
    "line_of_calls",
]


@unique
class Line(IntEnum):
    """Where an instant went. The order is that of the page."""

    COMPUTING = 0
    # Only copies run.
    AT_LINK_RATE = 1
    BELOW_LINK_RATE = 2
    INSIDE_GPU = 3
    NOT_NEEDED = 4
    # Nothing runs, and what ran next had not been submitted: what the thread that submitted it did meanwhile.
    FULL_QUEUE = 5
    WAITING_FOR_DEVICE = 6
    ALLOCATING = 7
    PAGEABLE = 8
    SUBMITTING = 9
    PYTHON = 10
    NO_CPU = 11
    TIER = 12
    ELSEWHERE = 13
    NOTHING_TO_DO = 14
    NOT_KNOWN = 15

    @property
    def key(self) -> str:
        """The name in JSON."""
        return self.name.lower()


COPIES = (Line.AT_LINK_RATE, Line.BELOW_LINK_RATE, Line.INSIDE_GPU, Line.NOT_NEEDED)
HOST = (
    Line.FULL_QUEUE,
    Line.WAITING_FOR_DEVICE,
    Line.ALLOCATING,
    Line.PAGEABLE,
    Line.SUBMITTING,
    Line.PYTHON,
    Line.NO_CPU,
    Line.TIER,
    Line.ELSEWHERE,
)
# Of these its thread was in no CUDA call.
OUTSIDE_CALLS = (Line.PYTHON, Line.NO_CPU, Line.TIER, Line.ELSEWHERE)
# The device runs nothing, as far as the recording shows.
IDLE = (*HOST, Line.NOTHING_TO_DO, Line.NOT_KNOWN)

LINE_TITLES: dict[Line, str] = {
    Line.COMPUTING: "computing",
    Line.AT_LINK_RATE: "waiting for copies, at the link's rate",
    Line.BELOW_LINK_RATE: "waiting for copies, below the link's rate",
    Line.INSIDE_GPU: "waiting for copies inside the GPU or between GPUs",
    Line.NOT_NEEDED: "waiting for copies that were not needed",
    Line.FULL_QUEUE: "waiting for the host: blocked by a full queue",
    Line.WAITING_FOR_DEVICE: "waiting for the host: in a call that waits for the GPU",
    Line.ALLOCATING: "waiting for the host: allocating, pinning or freeing",
    Line.PAGEABLE: "waiting for the host: copying pageable memory",
    Line.SUBMITTING: "waiting for the host: submitting",
    Line.PYTHON: "waiting for the host: in Python",
    Line.NO_CPU: "waiting for the host: its thread had no CPU",
    Line.TIER: "waiting for the host: reading or writing files or sockets",
    Line.ELSEWHERE: "waiting for the host: asleep, or in other code",
    Line.NOTHING_TO_DO: "nothing to do",
    Line.NOT_KNOWN: "not known",
}


@unique
class Unknown(IntEnum):
    """Why an instant is not known; `key` stands in JSON, `text` on the page."""

    BETWEEN_OPERATIONS = 0
    NO_CALL = 1
    NOT_RECORDED = 2
    NOT_COVERED = 3
    RECORDER = 4
    GRAPH = 5
    BETWEEN_REQUESTS = 6
    OUTSIDE = 7
    NOT_KEPT = 8
    ANOTHER_GPU = 9

    @property
    def key(self) -> str:
        """The name in JSON."""
        return self.name.lower()

    @property
    def text(self) -> str:
        """What is not known, for a sentence."""
        return {
            Unknown.BETWEEN_OPERATIONS: "work was submitted, but the GPU had not started it",
            Unknown.NO_CALL: "the recording does not show which call submitted the next operation",
            Unknown.NOT_RECORDED: "the recording does not show what the GPU did",
            Unknown.NOT_COVERED: "the GPU was not observed all the time",
            Unknown.RECORDER: "the recorder itself was busy",
            Unknown.GRAPH: "a CUDA graph ran, and its operations were not recorded one by one",
            Unknown.BETWEEN_REQUESTS: "nothing shows whether the thread waited for a request or prepared one",
            Unknown.NOT_KEPT: "most calls of that time were counted, and not kept one by one",
            Unknown.OUTSIDE: "the process waited for something outside CUDA: a socket, a file or a timer",
            Unknown.ANOTHER_GPU: "work was submitted, and the GPU waited for another GPU",
        }[self]

    @property
    def title(self) -> str:
        """The name of its line."""
        return "waiting for another GPU" if self == Unknown.ANOTHER_GPU else f"not known: {self.text}"


# Nothing ran, and what runs next had been submitted.
STOOD = (Unknown.BETWEEN_OPERATIONS, Unknown.ANOTHER_GPU)
# Nothing ran, and nothing shows whether the thread had been asked for anything.
OPEN = (Unknown.BETWEEN_REQUESTS, Unknown.OUTSIDE)


_BY_KIND = {
    CallKind.OTHER: Line.ELSEWHERE,
    CallKind.COPY: Line.SUBMITTING,
    CallKind.BATCH: Line.SUBMITTING,
    CallKind.MEMSET: Line.SUBMITTING,
    CallKind.LAUNCH: Line.SUBMITTING,
    CallKind.GRAPH: Line.SUBMITTING,
    CallKind.EVENT: Line.SUBMITTING,
    CallKind.COPY_SYNC: Line.WAITING_FOR_DEVICE,
    CallKind.SYNC: Line.WAITING_FOR_DEVICE,
    CallKind.CREATE: Line.ALLOCATING,
    CallKind.ALLOC: Line.ALLOCATING,
    CallKind.FREE: Line.ALLOCATING,
}


def line_of_calls(kind: Array, memory: Array) -> Array:
    """The line that the time inside each call belongs to, by the call's CallKind and Memory; (calls,) uint8."""
    table = np.full(256, Line.ELSEWHERE, dtype=np.uint8)
    for one, line in _BY_KIND.items():
        table[one] = line
    lines: Array = table[kind]
    copies = (kind == CallKind.COPY) | (kind == CallKind.COPY_SYNC)
    lines[copies & (memory == Memory.PAGEABLE)] = Line.PAGEABLE
    return lines


def line_of_kind(kind: str, pageable: bool) -> Line:
    """The same of one kind of call, by its name as in `probe.ring.CALLS`."""
    known = CallKind.__members__.get(kind, CallKind.OTHER)
    memory = Memory.PAGEABLE if pageable else Memory.PINNED
    return Line(int(line_of_calls(np.array([known], dtype=np.uint8), np.array([memory], dtype=np.uint8))[0]))
