"""The link carries bytes that no copy explains.

Mechanism: a kernel reads or writes host memory by itself: mapped or registered pages, or managed memory that moves or
is read over the link. Or another process uses the same link, or another GPU does. No call shows these bytes, and they
take the link from copies.

Signature: kvprobe compares NVML's counters of the link with the bytes that calls submitted, in windows of two seconds.
A window counts the bytes that were submitted in it and in the second before. The counters, less three standard errors
of their mean, must exceed the submitted bytes by at least a gigabyte per second and by at least a quarter of what they
show. (Each sample of NVML covers only 20 ms, and packets carry more than their payload.) If the recording has lost
single calls, kvprobe compares the totals of the whole recording instead.

Time lost: kvprobe states none, because the recording does not show what the bytes delayed. Predicted saving: kvprobe
predicts none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.finding import (
    COUNTED,
    INFERRED,
    MEASURED,
    Change,
    Evidence,
    Finding,
    Loss,
    NotLookedFor,
    cause_of,
)
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording, ms, size
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import Array, CallKind, Direction, Memory

CAUSE = cause_of(__name__)
COUNTER = {Direction.H2D: "pcie_rx_bytes_per_s", Direction.D2H: "pcie_tx_bytes_per_s"}
TO = {Direction.H2D: "to the GPU", Direction.D2H: "from the GPU"}
WINDOW_NS = 2_000_000_000
BEFORE_NS = 1_000_000_000  # so long before a window what runs in it may have been submitted
FEWEST = 4  # samples in a window
LEAST_RATE = 1e9  # bytes per second
OVERHEAD = 1.25  # of packets, and of a sample's chance
ERRORS = 3.0  # standard errors


@dataclass(frozen=True)
class _Excess:
    """What exceeds: mean rates in bytes per second over `ns`, from `start` on to `end`."""

    direction: Direction
    rate: float
    seen: float
    copied: float
    ns: int
    start: int
    end: int


def _samples(joined: JoinedRecording, direction: Direction) -> tuple[Array, Array]:
    """Times of the counter's samples and its values, of all devices together."""
    table = joined.recording.samples
    metrics = [metric for metric in distinct(table["metric"]).tolist() if joined.text(metric) == COUNTER[direction]]
    rows = np.flatnonzero(np.isin(table["metric"], metrics))
    # the devices of one look come within milliseconds of one another
    moment, place = np.unique(table["time_ns"][rows] // 50_000_000, return_inverse=True)
    values = np.bincount(place, weights=table["value"][rows], minlength=len(moment))
    return moment * 50_000_000, values


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs NVML's samples of the link."""
    if all(len(_samples(joined, direction)[0]) < FEWEST for direction in COUNTER):
        return NotLookedFor(
            "the recording holds too few samples of the link's counters", "kvprobe run on a machine with NVML"
        )
    return None


def find(joined: JoinedRecording) -> Finding | None:
    """The direction that exceeds most."""
    found = [one for direction in COUNTER if (one := _excess(joined, direction)) is not None]
    if not found:
        return None
    worst = max(found, key=lambda one: one.rate * one.ns)
    link = joined.link_or_assumed(worst.direction).bytes_per_s
    reach, by_itself = _reachable(joined)
    return joined.finding(
        CAUSE,
        f"The link carries {worst.rate / 1e9:.1f} GB/s {TO[worst.direction]} that no copy explains",
        "likely",
        Loss(0, 1, on="none", window=(worst.start, worst.end)),
        severity="warning" if worst.rate >= CRITICAL * link else "info",
        evidence=(
            Evidence(
                f"for {ms(worst.ns)} the link's counters show {worst.seen / 1e9:.1f} GB/s {TO[worst.direction]}, and "
                f"copies asked for {worst.copied / 1e9:.1f} GB/s",
                worst.rate,
                "bytes/s",
                MEASURED,
            ),
            Evidence(
                f"{size(reach)} of host memory were pinned or mapped where a kernel can reach them",
                reach,
                "bytes",
                COUNTED,
            ),
            *((Evidence("copies from or to managed memory were seen", 1, "1", INFERRED),) if by_itself else ()),
        ),
        cure=(
            Change("Look for kernels that read host memory: zero-copy buffers, UVA offload, cudaMallocManaged"),
            Change("Look for other processes on the same GPU or the same switch: `nvidia-smi dmon -s t`"),
        ),
    )


def _excess(joined: JoinedRecording, direction: Direction) -> _Excess | None:
    times, values = _samples(joined, direction)
    if len(times) < FEWEST:
        return None
    edges = np.arange(times[0], times[-1] + 1, WINDOW_NS)
    if any(joined.recording.lost.values()) or len(edges) < 2:
        edges = times[:1]
    windows = []
    for number, start in enumerate(edges.tolist()):
        end = int(times[-1]) + 1 if number == len(edges) - 1 else int(edges[number + 1])
        mine = (times >= start) & (times < end)
        if int(mine.sum()) < FEWEST or end - start < WINDOW_NS // 2:
            continue
        seen, copied = float(values[mine].mean()), _copied(joined, direction, start, end)
        sure = seen - ERRORS * float(values[mine].std(ddof=1)) / np.sqrt(int(mine.sum()))
        if sure - OVERHEAD * copied > max(LEAST_RATE, 0.25 * seen):
            windows.append((start, end, seen, copied))
    if not windows:
        return None
    ns = sum(end - start for start, end, _, _ in windows)
    seen, copied = (sum(one[i] * (one[1] - one[0]) for one in windows) / ns for i in (2, 3))
    return _Excess(direction, seen - copied, seen, copied, ns, windows[0][0], windows[-1][1])


def _copied(joined: JoinedRecording, direction: Direction, start: int, end: int) -> float:
    """What copies can have brought over the link between two times, bytes per second."""
    calls, totals = joined.recording.calls, joined.recording.totals
    if any(joined.recording.lost.values()):
        rows = totals["direction"] == direction
        return float(totals["bytes"][rows].sum()) / (end - start) * 1e9
    # where the direction is not known, as of a copy between managed memory, it may be this one
    able = (joined.direction == direction) | ((joined.direction == Direction.UNKNOWN) & (joined.kind != CallKind.ALLOC))
    able &= (joined.kind != CallKind.MEMSET) & (joined.start >= start - BEFORE_NS) & (joined.start < end)
    return float(calls["bytes"][able].sum()) / (end - start) * 1e9


def _reachable(joined: JoinedRecording) -> tuple[int, bool]:
    """Bytes of host memory that were pinned or registered, and whether managed memory was seen."""
    pins = joined.is_named("hostalloc", "mallochost", "hostregister", "memhostalloc", "memhostregister")
    pins &= joined.kind == CallKind.ALLOC
    return int(joined.bytes[pins].sum()), bool((joined.memory == Memory.MANAGED).any())
