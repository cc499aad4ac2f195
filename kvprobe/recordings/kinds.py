"""What a recording's codes stand for: of calls, copies, memory, engines, labels and ranges. Needs no numpy."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["SUBMITTING", "CallKind", "Direction", "Engine", "Label", "Memory", "Phase", "RangeStyle", "RequestTime"]


class CallKind(IntEnum):
    """What a host-side call does; the kinds up to GRAPH submit work to a stream."""

    OTHER = 0
    COPY = 1
    BATCH = 2
    MEMSET = 3
    LAUNCH = 4
    GRAPH = 5
    EVENT = 6
    COPY_SYNC = 7
    SYNC = 8
    CREATE = 9
    ALLOC = 10
    FREE = 11


SUBMITTING = (CallKind.COPY, CallKind.BATCH, CallKind.MEMSET, CallKind.LAUNCH, CallKind.GRAPH)


class Direction(IntEnum):
    """Where bytes went."""

    UNKNOWN = 0
    H2D = 1
    D2H = 2
    D2D = 3
    H2H = 4


class Memory(IntEnum):
    """Kind of the host side's memory."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    DEVICE = 3
    MANAGED = 4


class Engine(IntEnum):
    """What executed on the device."""

    OTHER = 0
    KERNEL = 1
    COPY = 2
    MEMSET = 3
    WAIT = 4  # for another stream
    FUNCTION = 5  # none of its own: it waits for a function of the host that stands in its stream


class Label(IntEnum):
    """What the recorder itself said about an interval (CUPTI overhead kinds and the like)."""

    OTHER = 0
    COMMAND_BUFFER_FULL = 1
    BUFFER_FLUSH = 2
    LAZY_LOADING = 3
    JIT = 4
    RESOURCE = 5
    INSTRUMENTATION = 6
    GC = 7


class RangeStyle(IntEnum):
    """Who made a range, and whether it nests within its thread."""

    PUSH_POP = 0
    START_END = 1
    OPERATOR = 2
    ANNOTATION = 3


class Phase(IntEnum):
    """What a server's step did for its requests."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3  # both
    LOAD = 4  # no step of the model: blocks of one request come
    STORE = 5  # or go


class RequestTime(IntEnum):
    """Times of a request that a server told."""

    ARRIVED = 0
    FIRST_TOKEN = 1
    ENDED = 2
