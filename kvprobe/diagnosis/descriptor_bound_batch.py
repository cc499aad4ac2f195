"""Batch copy calls block their caller because they carry many descriptors.

Mechanism: a descriptor is the source, destination and size of one copy. `cudaMemcpyBatchAsync` costs its caller 0.3 to
1.2 µs for each descriptor, and the driver never merges neighbouring descriptors. 12,288 descriptors of 8 KiB took 6.3
ms to submit and 1.9 ms to execute.

Signature: the time inside batch calls grows with the number of descriptors. At least one call takes 200 µs or more.
Each call that counts takes at least 60 µs, at most 5 µs for each descriptor, and at least half of what the GPU needs
for the copies. The queue is not full, and the host memory is pinned. Kineto does not write how many descriptors a batch
has. In the recordings of Kineto, three of these calls are enough for a finding that is likely.

Predicted saving: a gather kernel instead of a batch saves the whole time except that of one launch. For merging,
kvprobe predicts no saving, because recordings do not say how many descriptors of a batch are neighbours.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import SLOW_NS, Array, JoinedRecording, ms
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.recordings.model import CallKind, Memory

CAUSE = cause_of(__name__)
LONG_NS = 200_000
EACH_NS = (300, 1_200)  # what a descriptor costs its caller
MOST_NS = 5_000  # a call that took longer for each of them waited for something else


def find(joined: JoinedRecording) -> Finding | None:
    """Batches whose submission is the bottleneck."""
    rows = _batches(joined)
    if not len(rows) or int(joined.dur[rows].max()) < LONG_NS:
        return None
    known, counted = joined.exec_end[rows] >= 0, joined.count[rows] > 0
    usual = min(joined.common_ns(int(joined.process[rows[0]])), 5_000)
    ns = np.maximum(joined.dur[rows] - usual, 0)
    chart = joined.slow_calls_chart(rows, "Batch calls: time against descriptors")
    if counted.all():
        chart["x_label"] = "descriptors in the call"
        some = rows[:2_000]
        chart["series"] = {"batch calls": {"x": joined.count[some], "y": joined.dur[some] / 1e3, "style": "points"}}
    return joined.host_finding(
        CAUSE,
        "{calls} batch calls took {lost} for their descriptors",
        "certain" if known.all() and counted.all() else "likely",
        rows,
        ns,
        evidence=_evidence(joined, rows, int(ns.sum())),
        cure=(
            Change(
                "Gather and scatter with one kernel for blocks below about 28 KiB",
                share=1 - usual * len(rows) / max(int(ns.sum()), 1),
            ),
            Change("Merge neighbouring blocks into one descriptor before the call: sort by address, join runs"),
            Change(
                "Keep all layers of a block together, so that one descriptor moves them (vLLM: "
                "VLLM_KV_CACHE_LAYOUT=BLHNC)",
                "setting",
                "VLLM_KV_CACHE_LAYOUT",
                "BLHNC",
            ),
        ),
        chart=chart,
    )


def _batches(joined: JoinedRecording) -> Array:
    """Long batch calls that waited for their descriptors, not for a queue, a device or staging."""
    long = (joined.kind == CallKind.BATCH) & (joined.dur >= SLOW_NS)
    if not (long & (joined.dur >= LONG_NS)).any():
        return np.zeros(0, dtype=np.int64)
    rows = np.flatnonzero(
        long
        & ((joined.count >= 64) | (joined.count == 0))
        & (joined.memory != Memory.PAGEABLE)
        & ~queue_blocked(joined)
    )
    known = joined.exec_end[rows] >= 0
    executing = np.where(known, joined.exec_end[rows] - joined.exec_start[rows], 0)
    rows = rows[~known | (2 * joined.dur[rows] >= executing)]
    counted = joined.count[rows] > 0
    rows = rows[~counted | (joined.dur[rows] <= MOST_NS * joined.count[rows].astype(np.int64))]
    counted = joined.count[rows] > 0
    enough: Array = rows if counted.all() or len(rows) >= 3 else rows[counted]
    return enough


def _evidence(joined: JoinedRecording, rows: Array, lost: int) -> list[Evidence]:
    """What the calls took: for each descriptor where the recorder counts them."""
    total, moved = int(joined.dur[rows].sum()), int(joined.bytes[rows].sum())
    rate = moved / max(total, 1) * 1e9
    limits = f"so the call alone limits copying to {rate / 1e9:.1f} GB/s"
    if not (joined.count[rows] > 0).all():
        low, high = (total // len(rows) // ns_each for ns_each in reversed(EACH_NS))
        return [
            Evidence(f"{len(rows):,} batch calls blocked their callers for {ms(lost)}", lost, "ns", MEASURED),
            Evidence(
                f"the recorder does not say how many descriptors; at 0.3 to 1.2 µs each, {low:,} to {high:,} a call",
                high,
                "1",
                INFERRED,
            ),
            Evidence(f"a call moves {moved / len(rows) / 1024:.1f} KiB, {limits}", rate, "bytes/s", MEASURED),
        ]
    each, descriptors = float(np.median(joined.dur[rows] / joined.count[rows])), int(joined.count[rows].sum())
    most = int(joined.count[rows].max())
    return [
        Evidence(
            f"{len(rows):,} batch calls of {descriptors} descriptors blocked their callers for {ms(lost)}",
            lost,
            "ns",
            MEASURED,
        ),
        Evidence(f"{ms(each)} for each descriptor (median)", each, "ns", MEASURED),
        Evidence(f"a descriptor moves {moved / descriptors / 1024:.1f} KiB, {limits}", rate, "bytes/s", MEASURED),
        Evidence(f"the longest call carries {most} descriptors", most, "1", COUNTED),
    ]
