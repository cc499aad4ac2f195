"""Large copies run far below what the link can do, or below what it did earlier in the same recording.

Mechanism: a PCIe link has trained down to fewer lanes or an older generation, a switch is throttled or shared, the host
memory lies on the far NUMA node, or power management slows the link.

Signature: at least eight pinned copies of at least 1 MiB run at less than 70% of the link's rate, and they are most of
the copies of their stretch of time. (If a recording has no copies of 1 MiB, the largest quarter counts, from 256 KiB
on.) Copies that overlap another copy, of the same or the opposite direction, do not count, because they share the link.
The link's rate is the machine's figure if the recording has one. Otherwise it is the best rate that the recording
itself shows, so a link that was slow all the time is seen only with the machine's figure.

Time lost: for each of these copies, its duration less what its bytes need at the link's rate. Predicted saving: kvprobe
predicts none, because the recording does not tell which of the reasons applies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.diagnosis.finding import MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import DIRECTIONS, Array, JoinedRecording, ms
from kvprobe.recordings.intervals import Cover, in_time
from kvprobe.recordings.model import Direction, Engine, Memory, Recording

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
FLOOR, LEAST = 0.7, 8


class _SlowCopies(NamedTuple):
    """Large copies of one direction below the link's rate.

    Attributes:
        rows: of the executions, (rows,).
        loss: ns that each took longer than at the link's rate, (rows,).
        evidence: what they reached, and what the link gives.
    """

    rows: Array
    loss: Array
    evidence: list[Evidence]


def find(joined: JoinedRecording) -> Finding | None:
    """Slow stretches of large copies."""
    found = [slow for one in (Direction.H2D, Direction.D2H) if (slow := _slow_copies(joined, one))]
    if not found:
        return None
    rows, loss = np.concatenate([slow.rows for slow in found]), np.concatenate([slow.loss for slow in found])
    lost = int(loss.sum())
    return joined.device_finding(
        CAUSE,
        "{calls} large copies ran below the link's rate and lost {lost}",
        "likely",
        rows,
        loss,
        evidence=[
            *(evidence for slow in found for evidence in slow.evidence),
            Evidence(f"at that rate they would have taken {ms(lost)} less", lost, "ns"),
            *_of_machine(joined.recording),
        ],
        cure=(
            Change(
                "Check the link: nvidia-smi -q -d PCIE (current against maximum generation and width) under load",
                "setting",
            ),
            Change(
                "Put the process and its pinned memory on the GPU's NUMA node: numactl --cpunodebind --membind",
                "setting",
            ),
            Change("Look for another user of the same switch, and for power capping", "setting"),
        ),
    )


def _large_copies(joined: JoinedRecording, direction: Direction) -> Array:
    """Rows of large pinned copies in order of time that had the link to themselves; none where they are too few."""
    table = joined.recording.executions
    every = np.flatnonzero(table["engine"] == Engine.COPY)
    every = every[joined.x_end[every] > joined.x_start[every]]
    way = table["direction"][every]
    mine = every[(way == direction) & (table["memory"][every] != Memory.PAGEABLE)]
    none = np.zeros(0, dtype=np.int64)
    if not len(mine):
        return none
    size, large = table["bytes"][mine], 1 << 20
    if not (size >= large).any():
        large = max(int(np.percentile(size, 75)), 256 << 10)
    rows = mine[size >= large]
    if len(rows) < LEAST:
        return none
    other = every[(way != direction) & (way != Direction.D2D)]
    shared = Cover(joined.x_start[other], joined.x_end[other]).within(joined.x_start[rows], joined.x_end[rows])
    rows = in_time(rows[10 * shared < joined.x_end[rows] - joined.x_start[rows]], joined.x_start)
    apart = np.ones(len(rows), dtype=bool)
    apart[1:] &= joined.x_start[rows[1:]] >= np.maximum.accumulate(joined.x_end[rows])[:-1] - 1_000
    rows = rows[apart]
    return rows if len(rows) >= LEAST else none


def _slow_copies(joined: JoinedRecording, direction: Direction) -> _SlowCopies | None:
    table, rows = joined.recording.executions, _large_copies(joined, direction)
    if not len(rows):
        return None
    speed = table["bytes"][rows] / (joined.x_end[rows] - joined.x_start[rows]) * 1e9
    rate, how = joined.link(direction)
    if rate <= 0:
        rate, how = float(np.percentile(speed, 90)), "fastest copies seen here"
    slow = speed < FLOOR * rate
    if slow.sum() < LEAST:
        return None
    at = np.flatnonzero(slow)
    # A stretch: among the copies from its first slow one to its last, most must be slow.
    if slow[at[0] : at[-1] + 1].mean() < 0.7:
        return None
    rows = rows[slow]
    loss = (joined.x_end[rows] - joined.x_start[rows] - table["bytes"][rows] / rate * 1e9).astype(np.int64)
    reached = float(np.median(speed[slow]))
    name = DIRECTIONS[direction]
    evidence = [
        Evidence(
            f"{name}: {len(rows):,} large copies ran at {reached / 1e9:.2f} GB/s (median)",
            reached,
            "bytes/s",
            MEASURED,
        ),
        Evidence(f"{name}: the link carries {rate / 1e9:.2f} GB/s", rate, "bytes/s", how),
        *_of_others(speed[~slow], at),
    ]
    return _SlowCopies(rows, loss, evidence)


def _of_others(speed: Array, slow: Array) -> list[Evidence]:
    """What copies reached before and after the slow ones; these are the entries `slow` of all of them, in time."""
    before = int(slow[0])
    after = len(speed) + len(slow) - 1 - int(slow[-1])
    if before + after < LEAST:
        return []
    reached = float(np.median(speed))
    when = "before and after" if before and after else "before" if before else "after"
    text = f"{before + after:,} others as large ran at {reached / 1e9:.2f} GB/s (median) {when}: what slowed them "
    text += "came and went" if before and after else "came while the program ran" if before else "went away again"
    return [Evidence(text, reached, "bytes/s", MEASURED)]


def _of_machine(recording: Recording) -> list[Evidence]:
    """How the link is trained, where the recording says so."""
    return [
        Evidence(
            f"{name} is {recording.machine[name]}",
            float(recording.machine[name]),
            "1",
            recording.machine_how.get(name, "NVML"),
        )
        for name in ("pcie_gen", "pcie_width", "pcie_gen_max", "pcie_width_max")
        if name in recording.machine
    ]
