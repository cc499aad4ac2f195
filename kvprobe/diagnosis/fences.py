"""Fences in front of full queues where the device was not recorded, and behind many streams at once."""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.usual import UsualCosts
from kvprobe.launchqueue.constants import MANY_STREAMS
from kvprobe.launchqueue.evidence import Made, OverStreams
from kvprobe.launchqueue.judge import conclude
from kvprobe.recordings.intervals import ascending, distinct, in_time
from kvprobe.recordings.model import Array, CallKind, Direction, Memory

__all__ = ["pooled_behind_fence", "still_by_waits"]

STILL_NS = 1_000_000  # a wait for more than a copy
TIMES = 10  # how much longer the fence holds a call than the queue does that drains afterwards
CHANNELS = 1, 2, 4, 8, 16, 32  # that the environment may have made
IDLE_NS = 2_000_000  # between two bursts


def still_by_waits(joined: UsualCosts, stream: int, rows: Array, ns: Array) -> Array:
    """Which blocked calls of a stream stood behind a fence, told by the host alone.

    A queue that drains holds each call for the time of one copy. The one call that it holds many times as long, the
    first to be blocked after the stream was told to wait for an event, waits for that event; of a stream that was never
    told, the first to be blocked after calls that were not.
    """
    still = np.zeros(len(rows), dtype=bool)
    if not len(rows):
        return still
    order = np.argsort(joined.start[rows], kind="stable")
    told = ascending(joined.start[joined.is_named("streamwaitevent") & (joined.stream == stream)])
    if len(told):
        after = np.searchsorted(told, joined.start[rows[order]])
        first = np.concatenate(([True], after[1:] != after[:-1])) & (after > 0)
    else:
        calls = in_time(np.flatnonzero(joined.submits & (joined.stream == stream)), joined.start)
        blocked = np.isin(calls, rows)
        first = np.isin(rows[order], calls[1:][blocked[1:] & ~blocked[:-1]])
    others = ns[order[~first]]
    usual = float(np.median(others)) if len(others) else 0.0
    long = first & (ns[order] > np.maximum(STILL_NS, TIMES * usual))
    still[order[long]] = True
    return still


def pooled_behind_fence(joined: UsualCosts) -> tuple[Array, Array, int, int]:
    """Copies over many streams, all told to wait, that blocked when the channels together were full.

    Of a burst of one direction over at least five streams the judge is told when the first call blocks. Counted with it
    are the later calls of the burst that were slow.

    Returns:
        Rows of `calls`; ns lost in each; submissions outstanding when the first blocked; streams in use.
    """
    rows_out: list[Array] = []
    outstanding = streams = 0
    told = joined.is_named("streamwaitevent")
    fact = joined.recording.machine.get("channels")
    counts = (int(fact),) if isinstance(fact, int) and fact > 0 else CHANNELS
    for process in distinct(joined.process):
        for direction in (Direction.H2D, Direction.D2H):
            mine = np.flatnonzero(
                (joined.kind == CallKind.COPY)
                & (joined.process == process)
                & (joined.direction == direction)
                & (joined.memory != Memory.PAGEABLE)
                & (joined.stream >= 0)
            )
            if conclude(Made(len(mine))).state == "not full" or len(distinct(joined.stream[mine])) < MANY_STREAMS:
                continue
            begin = np.concatenate(([True], joined.start[mine[1:]] - joined.end[mine[:-1]] > IDLE_NS))
            for burst in np.split(mine, np.flatnonzero(begin)[1:]):
                long = np.flatnonzero(joined.excess_of(burst) > STILL_NS)
                if not len(long) or not _fits(joined, burst, int(long[0]), counts, told):
                    continue
                slow = np.flatnonzero(joined.dur[burst] > 3 * joined.usual_ns[burst])
                rows_out.append(burst[np.union1d(slow[slow > long[0]], long)])
                outstanding = max(outstanding, int(long[0]))
                streams = max(streams, len(distinct(joined.stream[burst])))
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *rows_out])
    return rows, joined.excess_of(rows), outstanding, streams


def _fits(joined: UsualCosts, burst: Array, first: int, counts: tuple[int, ...], told: Array) -> bool:
    """Whether the first long call of a burst met full channels behind a fence."""
    stream = joined.stream[burst[first]]
    before = told & (joined.stream == stream) & (joined.start < joined.start[burst[first]])
    told_to_wait = bool((before & (joined.start > joined.start[burst[0]] - IDLE_NS)).any())
    own = int((joined.stream[burst[:first]] == stream).sum())
    return conclude(OverStreams(first, own, counts, told_to_wait)).full
