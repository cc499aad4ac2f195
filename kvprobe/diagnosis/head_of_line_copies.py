"""Small copies wait behind another stream's burst on the same copy engine.

Mechanism: a copy engine makes the copies of all its streams in order. A few bytes that the next step needs (sequence
lengths, sampled tokens) queue behind hundreds of megabytes of blocks, although their own stream is empty. Stream
priorities do not help, because they have no effect on copies.

Signature: a copy of pinned memory of at most 64 KiB starts at least 100 µs later than it could have started. (A copy
can start when it has been submitted and the previous operation of its stream is over.) For at least 80% of this time,
the copy engine of the same direction worked for other streams. One of these streams moved at least 16 times as many
bytes as the small copy and the copies that follow it on its stream. (Streams that each have a burst also wait for one
another, but their copies are not small.) The call that submits the small copy returns at once: this tells the cause
from a full queue, where the call blocks.

Time lost: the time that the small copies waited. If several copies of one process and direction waited at the same
time, this time counts once. While kernels ran, the waiting cost the GPU nothing. Predicted saving: two changes save
all of the waiting time in which the GPU ran no kernel because of it: to submit the small copies before the burst,
and to move small values without the copy engine. A third change saves less: to cut the burst into
pieces. Each small copy then still waits for one copy of the burst. (kvprobe takes their median time.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvprobe.account import Times
from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, size
from kvprobe.recordings.intervals import Cover, distinct, in_time
from kvprobe.recordings.model import Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
SMALL_BYTES, WAIT_NS = 64 << 10, 100_000


def _moved(joined: JoinedRecording, rows: Array, since: Array, until: Array) -> Array:
    """Bytes of these executions that ended in each of the times since < t <= until."""
    rows = rows[np.argsort(joined.x_end[rows], kind="stable")]
    moved = np.concatenate(([0], np.cumsum(joined.recording.executions["bytes"][rows])))
    ends = joined.x_end[rows]
    out: Array = moved[np.searchsorted(ends, until, "right")] - moved[np.searchsorted(ends, since, "right")]
    return out


class _Waits(NamedTuple):
    """Small copies that waited behind other streams' bursts, (rows,) each.

    Attributes:
        rows: of the executions.
        since: when each could have started, ns; `until`: when it did.
        until: see there.
        burst_bytes: that were ahead of one of them, at most.
        saved_ns: what they still wait for if a single copy of the burst is ahead of each.
    """

    rows: Array
    since: Array
    until: Array
    burst_bytes: int
    saved_ns: int


def find(joined: JoinedRecording) -> Finding | None:
    """Waiting small copies."""
    table = joined.recording.executions
    if not table.rows or not joined.start.size:
        return None
    late = (table["engine"] == Engine.COPY) & (table["bytes"] <= SMALL_BYTES) & (joined.x_call >= 0)
    late &= joined.x_start - joined.end[np.maximum(joined.x_call, 0)] > WAIT_NS
    if not late.any():
        return None
    before = _streams_previous_end(joined, distinct(table["stream"][late & (table["stream"] >= 0)]))
    found = [waits for one in (Direction.H2D, Direction.D2H) for waits in _behind_bursts(joined, one, before)]
    return _finding(joined, found) if found else None


def _streams_previous_end(joined: JoinedRecording, streams: Iterable[int]) -> Array:
    """When all that each execution's stream was given before it was over, ns; -1 for a first one or another stream."""
    table = joined.recording.executions
    before = np.full(table.rows, -1, dtype=np.int64)
    for stream in streams:
        mine = in_time(np.flatnonzero(table["stream"] == stream), joined.x_start)
        before[mine[1:]] = np.maximum.accumulate(joined.x_end[mine])[:-1]
    return before


def _behind_bursts(joined: JoinedRecording, direction: Direction, before: Array) -> Iterator[_Waits]:
    """Those of one direction, a stream at a time."""
    table = joined.recording.executions
    copies = (table["engine"] == Engine.COPY) & (table["direction"] == direction)
    small = np.flatnonzero(
        copies & (table["bytes"] <= SMALL_BYTES) & (joined.x_call >= 0) & (table["memory"] != Memory.PAGEABLE)
    )
    ready = np.maximum(joined.end[joined.x_call[small]], before[small])
    late = joined.x_start[small] - ready > WAIT_NS
    small, ready = small[late], ready[late]
    for gpu in distinct(joined.x_gpu[small]):
        theirs, here = copies & (joined.x_gpu == gpu), joined.x_gpu[small] == gpu
        for stream in distinct(table["stream"][small][here]):
            mine = here & (table["stream"][small] == stream)
            own, others = theirs & (table["stream"] == stream), theirs & (table["stream"] != stream)
            if others.any():
                waits = _behind_others(joined, small[mine], ready[mine], np.flatnonzero(own), np.flatnonzero(others))
                if len(waits.rows):
                    yield waits


def _behind_others(joined: JoinedRecording, rows: Array, since: Array, own: Array, others: Array) -> _Waits:
    """Of late copies of one stream those that a burst of others held up; `own`, `others`: copies of their engine."""
    table = joined.recording.executions
    until = joined.x_start[rows]
    covered = Cover(joined.x_start[others], joined.x_end[others]).within(since, until)
    ahead = _moved(joined, others, since, until)
    most = np.zeros_like(ahead)  # of one stream
    for one in distinct(table["stream"][others]):
        np.maximum(most, _moved(joined, others[table["stream"][others] == one], since, until), out=most)
    # what its stream goes on to move in as long a time as it waited: a burst's first copy is no small one
    follows = _moved(joined, own, until, 2 * until - since)
    hit = (covered >= 0.8 * (until - since)) & (most >= 16 * np.maximum(table["bytes"][rows], follows))
    burst = int(ahead[hit].max(initial=0))
    return _Waits(rows[hit], since[hit], until[hit], burst, int(hit.sum()) * int(np.median(joined.x_dur[others])))


def _lost(joined: JoinedRecording, rows: Array, since: Array, until: Array) -> int:
    """The waiting time, each instant of one GPU and direction once."""
    table, lost = joined.recording.executions, 0
    for gpu in distinct(joined.x_gpu[rows]):
        for direction in (Direction.H2D, Direction.D2H):
            mine = (joined.x_gpu[rows] == gpu) & (table["direction"][rows] == direction)
            lost += Cover(since[mine], until[mine]).total_ns
    return lost


def _finding(joined: JoinedRecording, found: list[_Waits]) -> Finding | None:
    rows = np.concatenate([waits.rows for waits in found])
    since, until = np.concatenate([w.since for w in found]), np.concatenate([w.until for w in found])
    burst_bytes, saved = max(waits.burst_bytes for waits in found), sum(waits.saved_ns for waits in found)
    each, lost = until - since, _lost(joined, rows, since, until)
    return joined.finding(
        CAUSE,
        "{calls} small copies waited {lost} in all behind bursts of copies on other streams",
        "likely",
        Loss(
            lost,
            len(rows),
            on="device",
            window=(int(since.min()), int(until.max())),
            places=joined.device_places(rows, each),
            spans=Times(since, until, joined.where(joined.recording.executions, rows)),
        ),
        evidence=(
            Evidence(
                f"{len(rows):,} copies of at most 64 KiB could have started {ms(int(each.mean()))} earlier on "
                f"average, {ms(int(each.max()))} at the worst",
                int(each.max()),
                "ns",
                MEASURED,
            ),
            Evidence(
                "meanwhile their own streams were idle, and the copy engine was busy with other streams' copies",
                lost,
                "ns",
                INFERRED,
            ),
            Evidence(f"the largest burst ahead of one of them was {size(burst_bytes)}", burst_bytes, "bytes", MEASURED),
        ),
        cure=(
            Change("Submit the small copies of the next step before the burst, not behind it", share=1.0),
            Change(
                "Cut bursts into pieces and submit the next piece when the previous one has ended (pacing)",
                share=1 - saved / max(lost, 1),
            ),
            Change(
                "Move small values in kernel arguments or by a kernel that reads pinned memory, not by the copy engine",
                share=1.0,
            ),
        ),
        chart={
            "title": "Small copies that waited",
            "x_label": "time in the recording (ms)",
            "y_label": "waited (µs)",
            "series": {
                "copies": {
                    "x": (since - joined.serving.first_ns)[:2000] / 1e6,
                    "y": each[:2000] / 1e3,
                    "style": "points",
                }
            },
        },
    )
