"""Whether copies and compute on different streams were ordered at all: shared by stores and loads."""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import DEVICE_BY_NSYS, Loss, NotLookedFor, is_of_nsys
from kvprobe.diagnosis.joined import Array, JoinedRecording
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct, in_time
from kvprobe.recordings.model import CallKind, Direction, Memory

__all__ = ["AsyncCopies", "asks", "bursts", "copies_apart", "may_order", "order_not_shown", "unordered_loss", "waits"]

LEAST = 3  # bursts; fewer prove nothing
LAYERS = 128  # bursts that one wait may order: a step's layers are often copied one by one, and the largest has 126
WAITS = ("streamwaitevent", "streamwaitvalue", "streambatchmemop")
SHOWN_BY = "Nsight Systems (kvprobe run --nsys), which records the stream and the event of each wait"
EXPORTED_WHOLE = (
    "the table CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, which this export lacks rows of: export the report again with all "
    "its tables (nsys export --type sqlite), or record with Nsight Systems 2025.3 or newer (kvprobe run --nsys)"
)


class AsyncCopies:
    """Asynchronous copies of one process and direction on streams that carry no kernels, in order of submission."""

    def __init__(self, joined: JoinedRecording, process: int, direction: Direction) -> None:
        """Finds them."""
        kinds = (joined.kind == CallKind.COPY) | (joined.kind == CallKind.BATCH)
        rows = np.flatnonzero(
            kinds
            & (joined.process == process)
            & (joined.direction == direction)
            & (joined.memory != Memory.PAGEABLE)
            & (joined.stream >= 0)
            & ~among(joined.stream, joined.kernel_streams)
            & (joined.exec_end >= 0)
        )
        self.rows: Array = in_time(rows, joined.start)


def copies_apart(joined: JoinedRecording, direction: Direction) -> list[tuple[int, AsyncCopies]]:
    """For each process that has kernels: its copies on streams of their own; processes without any are left out."""
    found = []
    for process in distinct(joined.process[(joined.kind == CallKind.LAUNCH) | (joined.kind == CallKind.GRAPH)]):
        copies = AsyncCopies(joined, int(process), direction)
        if len(copies.rows):
            found.append((int(process), copies))
    return found


def waits(joined: JoinedRecording, process: int) -> tuple[Array, Array]:
    """Times and streams of stream-waits-for-event calls of a process, by time."""
    rows = np.flatnonzero((joined.process == process) & joined.is_named(*WAITS))
    rows = in_time(rows, joined.start)
    return joined.start[rows], joined.stream[rows]


def asks(joined: JoinedRecording, process: int) -> Array:
    """Rows of the calls by which the host of a process waits for the device, or asks whether it is done; by time."""
    mine = (joined.kind == CallKind.SYNC) | joined.is_named("eventquery", "streamquery")
    return in_time(np.flatnonzero(mine & (joined.process == process)), joined.start)


def may_order(burst: Array, wait_at: Array) -> Array:
    """Which copies a wait may order, (rows,) bool.

    Layers that are copied between the launches of one step are a burst each, and one wait orders all of them.

    Args:
        burst: number of the burst of each copy, (rows,).
        wait_at: number of the burst before or after which the nearest wait stands; negative where none does.
    """
    ordered: Array = (wait_at >= 0) & (np.abs(burst - wait_at) <= LAYERS)
    return ordered


def order_not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Why this recording cannot show that copies and compute are not ordered; None where it can.

    To say that nothing orders them needs every execution, and of every wait the stream that waits.
    """
    by_nsys = is_of_nsys(joined.recording)
    if not joined.recording.has_executions:
        what = "the recording does not show when copies and kernels executed"
        return NotLookedFor(what, DEVICE_BY_NSYS if by_nsys else SHOWN_BY)
    untold = int((joined.is_named(*WAITS) & (joined.stream < 0)).sum())
    if untold:
        who = "export" if by_nsys else "recorder"
        what = f"the {who} does not tell which streams {untold:,} waits for events belong to"
        return NotLookedFor(what, EXPORTED_WHOLE if by_nsys else SHOWN_BY)
    return None


def bursts(joined: JoinedRecording, process: int, rows: Array) -> Array:
    """Number of the burst that each copy belongs to: a launch of the process between two copies begins a new one."""
    at = np.searchsorted(joined.start[joined.launches(process)], joined.start[rows])
    return np.concatenate(([0], np.cumsum(at[1:] != at[:-1]))) if len(rows) else at


def unordered_loss(joined: JoinedRecording, rows: Array) -> Loss:
    """What copies that nothing orders lose: no time, but perhaps the bytes; with where they were made."""
    window = int(joined.start[rows].min()), int(joined.end[rows].max())
    return Loss(0, len(rows), on="none", window=window, places=joined.places(rows, np.zeros(len(rows), dtype=np.int64)))
