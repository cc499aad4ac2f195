"""Small copies wait behind another stream's burst on the same copy engine.

Mechanism: a copy engine serves what its streams hand it in order. A few bytes that the next step needs (sequence
lengths, sampled tokens) queue behind hundreds of megabytes of blocks, although their own stream is empty. Stream
priorities do not help: they have no effect on copies.

Signature: a pinned copy of at most 64 KiB that could have started (submitted, its stream's previous operation over) at
least 100 us before it did, while the engine of its direction worked for other streams for at least 80% of that time,
and one of these streams moved at least 16 times as much meanwhile as it, and as what its own stream goes on to move:
streams that are given a burst each wait for one another as well, and are no small copies. A full queue holds the
caller; here the call returns at once.

Time lost: the waiting time, each instant of one process and direction once. Predicted saving: all but one copy of the
burst, the one being served: waiting - n x median copy of the burst.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
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


def find(joined: JoinedRecording) -> Finding | None:
    """Waiting small copies."""
    table = joined.recording.executions
    if not table.rows or not joined.start.size:
        return None
    candidates = (table["engine"] == Engine.COPY) & (table["bytes"] <= SMALL_BYTES) & (joined.x_call >= 0)
    late_at_all = joined.x_start - joined.end[np.maximum(joined.x_call, 0)] > WAIT_NS
    if not (candidates & late_at_all).any():
        return None
    before = np.full(table.rows, -1, dtype=np.int64)
    for stream in distinct(table["stream"][candidates & late_at_all & (table["stream"] >= 0)]):
        mine = np.flatnonzero(table["stream"] == stream)
        mine = in_time(mine, joined.x_start)
        before[mine[1:]] = np.maximum.accumulate(joined.x_end[mine])[:-1]
    caught: list[Array] = []
    waits: list[Array] = []
    lost, saved, burst_bytes = 0, 0, 0
    for direction in (Direction.H2D, Direction.D2H):
        copies = (table["engine"] == Engine.COPY) & (table["direction"] == direction)
        small = np.flatnonzero(
            copies & (table["bytes"] <= SMALL_BYTES) & (joined.x_call >= 0) & (table["memory"] != Memory.PAGEABLE)
        )
        if not len(small):
            continue
        ready = np.maximum(joined.end[joined.x_call[small]], before[small])
        late = joined.x_start[small] - ready > WAIT_NS
        small, ready = small[late], ready[late]
        for process in np.unique(table["process"][small]):
            for stream in np.unique(table["stream"][small][table["process"][small] == process]):
                mine = (table["process"][small] == process) & (table["stream"][small] == stream)
                rows, since = small[mine], ready[mine]
                others = np.flatnonzero(copies & (table["process"] == process) & (table["stream"] != stream))
                if not len(others):
                    continue
                busy = Cover(joined.x_start[others], joined.x_end[others])
                until = joined.x_start[rows]
                covered = busy.within(since, until)
                ahead = _moved(joined, others, since, until)
                most = np.zeros_like(ahead)  # of one stream
                for one in distinct(table["stream"][others]):
                    np.maximum(most, _moved(joined, others[table["stream"][others] == one], since, until), out=most)
                own = np.flatnonzero(copies & (table["process"] == process) & (table["stream"] == stream))
                # what its stream goes on to move in as long a time as it waited: a burst's first copy is no small one
                follows = _moved(joined, own, until, 2 * until - since)
                hit = (covered >= 0.8 * (until - since)) & (most >= 16 * np.maximum(table["bytes"][rows], follows))
                if hit.any():
                    caught.append(rows[hit])
                    waits.append(np.stack((since[hit], until[hit])))
                    burst_bytes = max(burst_bytes, int(ahead[hit].max()))
                    saved += int(hit.sum()) * int(np.median(joined.x_dur[others]))
    if not caught:
        return None
    rows, wait = np.concatenate(caught), np.concatenate(waits, axis=1)
    for process in np.unique(table["process"][rows]):
        for direction in (Direction.H2D, Direction.D2H):
            mine = (table["process"][rows] == process) & (table["direction"][rows] == direction)
            lost += Cover(wait[0, mine], wait[1, mine]).total_ns
    each = wait[1] - wait[0]
    return joined.finding(
        CAUSE,
        "{calls} small copies waited {lost} behind other streams' bursts",
        "likely",
        Loss(
            lost,
            len(rows),
            on="device",
            window=(int(wait[0].min()), int(wait[1].max())),
            places=joined.device_places(rows, each),
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
                "their own streams were idle, and the engine of their direction worked for other streams",
                lost,
                "ns",
                INFERRED,
            ),
            Evidence(f"up to {burst_bytes / 1e6:.1f} MB were ahead of one of them", burst_bytes, "bytes", MEASURED),
        ),
        cure=(
            Change("Submit the small copies of the next step before the burst, not behind it", share=1.0),
            Change(
                "Cut bursts into pieces and submit the next piece when the last has ended (pacing)",
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
            "y_label": "waited (us)",
            "series": {
                "copies": {
                    "x": (wait[0] - joined.serving.first_ns)[:2000] / 1e6,
                    "y": each[:2000] / 1e3,
                    "style": "points",
                }
            },
        },
    )
