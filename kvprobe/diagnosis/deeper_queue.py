"""What more slots in a full launch queue would save: the recorded calls, played again against a deeper queue.

A thread that submits to a queue of depth D waits, for each submission, until the one D before it has been executed. The
recording tells when that was: by the execution itself, else by the return of the call that waited for its slot. With
a depth D' the same call waits for the one D' before it, and what is spared lets the thread go on earlier, up to its
next wait for the device. The device's own schedule is taken as recorded: while a queue is full, it has work. Where a
queue was found empty the device goes on with the thread, so the burst that begins there is played for itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.diagnosis.finding import Change
from kvprobe.launchqueue.constants import SCALED_ALREADY
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import CallKind, Memory

if TYPE_CHECKING:
    from kvprobe.diagnosis.joined import Array, JoinedRecording
    from kvprobe.diagnosis.queue_full import Full

__all__ = ["BATCHED", "SCALE", "counted_records", "deeper", "spared"]

SCALE = 4  # CUDA_SCALE_LAUNCH_QUEUES=4x: 1,021 submissions become 4,093 (measured, H200)
BATCHED = 8  # a queue that takes 1,021 copies took 8,168 and more in batches (measured, H200)
STAGED_NS, STAGED_BYTES_PER_NS = 50_000, 2.0  # staging runs at 8 to 10 GB/s (H200)
_LONG_AGO = -(1 << 62)


def deeper(joined: JoinedRecording, found: Full, shape: str) -> Change:
    """CUDA_SCALE_LAUNCH_QUEUES=4x, which deepens every queue, with what it alone saves of a shape of blocked calls."""
    share = 0.0 if found.ceiling >= SCALED_ALREADY and shape != "channels" else spared(joined, found, shape, SCALE)
    jetson = ". This GPU may be a Jetson's: a Jetson has hung with this setting" if _on_jetson(joined) else ""
    return Change(
        f"Set CUDA_SCALE_LAUNCH_QUEUES=4x before CUDA starts: every launch queue becomes four times as deep{jetson}",
        "environment",
        "CUDA_SCALE_LAUNCH_QUEUES",
        "4x",
        share=share,
    )


def _on_jetson(joined: JoinedRecording) -> bool:
    """Whether the recorder names the GPU of a Jetson: "Orin (nvgpu)"."""
    return bool(re.search(r"jetson|orin|xavier|tegra|thor|nvgpu", str(joined.recording.machine.get("gpu", "")), re.I))


def spared(joined: JoinedRecording, found: Full, shape: str, factor: float) -> float:
    """Share of the time lost by one shape of blocked calls that queues `factor` times as deep would save.

    Args:
        joined: the recording.
        found: its blocked calls.
        shape: "saturation", "fence", "alias" or "channels".
        factor: new depth over old; of a channel, both counted over all streams that share it.
    """
    known = found.spared  # one factor may stand for several changes
    if (shape, factor) not in known:
        known[shape, factor] = _spared(joined, found, shape, factor)
    return known[shape, factor]


def _spared(joined: JoinedRecording, found: Full, shape: str, factor: float) -> float:
    rows, ns = found.rows[shape], found.ns[shape]
    total = int(ns.sum())
    if not total:
        return 0.0
    if shape == "channels":
        streams = np.union1d(list(found.crowded), distinct(joined.stream[rows])).astype(np.int64)
        seen = joined.recording.has_executions
        depth = _outstanding(joined, streams, rows) if seen else found.channel_total
        return _replayed(joined, streams, rows, ns, depth, factor)
    saved = 0.0
    blocked = [found.rows[name] for name in ("saturation", "fence", "alias")]
    waited = [found.ns[name] for name in ("saturation", "fence", "alias")]
    all_rows, all_ns = np.concatenate(blocked), np.concatenate(waited)
    for stream in distinct(joined.stream[rows]):
        mine = joined.stream[all_rows] == stream
        depth = int(np.median(joined.occupancy.depth[all_rows[mine]]))
        share = _replayed(joined, np.array([stream]), all_rows[mine], all_ns[mine], depth, factor)
        saved += share * int(ns[joined.stream[rows] == stream].sum())
    return saved / total


def _outstanding(joined: JoinedRecording, streams: Array, rows: Array) -> int:
    """Median of what these streams together had outstanding when `rows` were entered; needs executions."""
    mine = joined.submits & among(joined.stream, streams) & (joined.exec_end >= 0)
    done = np.sort(joined.exec_end[mine])
    entered = np.sort(joined.start[mine])
    at = joined.start[rows]
    return max(int(np.median(np.searchsorted(entered, at) - np.searchsorted(done, at, "right"))), 1)


def counted_records(joined: JoinedRecording, streams: Array) -> Array:
    """Rows of the records of events that were counted as outstanding on these streams; few, or none, mostly."""
    known = (joined.kind == CallKind.EVENT) & (joined.occupancy.depth >= 0)
    records: Array = np.flatnonzero(known & among(joined.stream, streams))
    return records


def _replayed(joined: JoinedRecording, streams: Array, rows: Array, ns: Array, depth: int, factor: float) -> float:
    """Share of `ns`, lost in the calls `rows`, that is saved where the queue of `streams` is `factor` times as deep."""
    total = int(ns.sum())
    if depth <= 0 or total <= 0:
        return 0.0
    slots = max(int(depth * factor), depth)
    records = counted_records(joined, streams)
    members = np.append(np.flatnonzero(joined.submits & among(joined.stream, streams)), records)
    members = members[np.argsort(joined.start[members], kind="stable")]
    lost = np.zeros(len(joined.start), dtype=np.int64)
    np.add.at(lost, rows, ns)
    # When each had freed its slot: the call `depth` later that waited for it returned then, however late it woke.
    done = np.where(joined.exec_end[members] >= 0, joined.exec_end[members], _LONG_AGO)
    if len(records) and len(streams) == 1:  # a record of an event is done with all that its stream was given before
        done = np.maximum.accumulate(done)
    later = members[depth:]
    waited = lost[later] > 0
    done[: len(later)][waited] = np.maximum(done[: len(later)], joined.end[later])[waited]
    needed = np.full(len(joined.start), _LONG_AGO, dtype=np.int64)  # by each call, before it can return
    needed[members[slots:]] = done[: max(len(members) - slots, 0)]
    # A wait for the device ends when the device is done, however early it begins. A pageable copy is one where it took
    # longer than to stage its bytes; else it went past whatever was in front of it.
    pageable = np.flatnonzero(joined.memory == Memory.PAGEABLE)
    waits = (joined.kind == CallKind.SYNC) | (joined.kind == CallKind.COPY_SYNC)
    waits[pageable[joined.dur[pageable] > STAGED_NS + joined.bytes[pageable] / STAGED_BYTES_PER_NS]] = True
    needed[waits] = joined.end[waits]
    member = np.zeros(len(joined.start), dtype=bool)
    member[members] = True
    # A burst that began with nothing outstanding begins as early as its thread comes, and the device with it.
    fresh = members[joined.occupancy.depth[members] == 0]
    needed[fresh] = joined.end[fresh]
    member[fresh] = False
    after = 0
    order = joined.own_time
    callers = joined.caller[order]
    for caller in distinct(joined.caller[rows]):
        calls = order[callers == caller]
        own = joined.dur[calls] - lost[calls]
        between = np.maximum(
            np.diff(joined.start[calls], prepend=joined.start[calls[:1]])[1:] - joined.dur[calls[:-1]], 0
        )
        work = joined.start[calls[0]] + np.cumsum(own + np.append(0, between))
        returned = work + np.maximum(np.maximum.accumulate(needed[calls] - work), 0)
        unblocked = np.append(joined.start[calls[0]], returned[:-1]) + own + np.append(0, between)
        after += int((returned - unblocked)[member[calls]].sum())
    return min(max(1 - after / total, 0.0), 1.0)
