"""Batch copy calls that hold their caller because of how many descriptors they carry.

Mechanism: `cudaMemcpyBatchAsync` costs its caller 0.3 to 1.2 us for each descriptor, and the driver never merges
neighbours. 12,288 descriptors of 8 KiB took 6.3 ms to submit and 1.9 ms to execute.

Signature: the time inside batch calls grows with the number of descriptors, is long (at least 200 us a call), and is at
least half of what the device needs for the copies; the queue is not full, so it is not saturation, and host memory is
pinned.

Predicted saving: (n - runs) x cost per descriptor. The cost is the median time per descriptor of this recording's own
batches. The number of contiguous runs is known where the recording also has the loop's addresses; where it has not, one
gather kernel instead of a batch is assumed (runs = 1: one launch), which is what the saving then names.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Evidence, Finding
from kvprobe.diagnosis.frame import Frame, ms
from kvprobe.recordings.model import CallKind, Memory

CAUSE = "descriptor_bound_batch"
LONG_NS = 200_000


def find(frame: Frame) -> Finding | None:
    """Batches whose submission is the bottleneck."""
    rows = np.flatnonzero((frame.kind == CallKind.BATCH) & (frame.count >= 64) & (frame.dur >= LONG_NS)
                          & (frame.memory != Memory.PAGEABLE) & ~frame.queue_blocked)  # fmt: skip
    known = frame.exec_end[rows] >= 0
    executing = np.where(known, frame.exec_end[rows] - frame.exec_start[rows], 0)
    rows = rows[~known | (2 * frame.dur[rows] >= executing)]
    if not len(rows):
        return None
    usual = min(frame.common_ns(int(frame.process[rows[0]])), 5_000)
    ns = np.maximum(frame.dur[rows] - usual, 0)
    each = float(np.median(frame.dur[rows] / frame.count[rows]))
    descriptors, moved = int(frame.count[rows].sum()), int(frame.bytes[rows].sum())
    piece = moved / max(descriptors, 1)
    rate = moved / max(int(frame.dur[rows].sum()), 1) * 1e9
    chart = frame.slow_calls_chart(rows, "Batch calls: time against descriptors")
    chart["x_label"] = "descriptors in the call"
    some = rows[:2_000]
    chart["series"] = {"batch calls": {"x": frame.count[some], "y": frame.dur[some] / 1e3, "style": "points"}}
    return frame.host_finding(
        CAUSE, "{calls} batch calls spent {lost} on descriptors", "certain" if known.all() else "likely", rows, ns,
        saving=1 - usual * len(rows) / max(int(ns.sum()), 1),
        evidence=(
            Evidence(f"{len(rows)} batch calls of {descriptors} descriptors held their callers for {ms(int(ns.sum()))}",
                     int(ns.sum()), "ns", MEASURED),
            Evidence(f"{ms(each)} for each descriptor (median)", each, "ns", MEASURED),
            Evidence(f"a descriptor moves {piece / 1024:.1f} KiB, so the call alone limits copying to "
                     f"{rate / 1e9:.1f} GB/s", rate, "bytes/s", MEASURED),
            Evidence(f"the longest call carries {int(frame.count[rows].max())} descriptors",
                     int(frame.count[rows].max()), "1", COUNTED),
        ),
        cure=(
            "Merge neighbouring blocks into one descriptor before the call: sort by address, join runs",
            "Keep all layers of a block together, so that one descriptor moves them (vLLM: VLLM_KV_CACHE_LAYOUT=BLHNC)",
            "Gather and scatter with one kernel for blocks below about 28 KiB",
        ),
        chart=chart,
    )  # fmt: skip
