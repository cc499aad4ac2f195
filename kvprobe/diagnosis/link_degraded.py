"""Large copies run far below what the link can do, or below what it did earlier in the same recording.

Mechanism: a PCIe link that trained down (fewer callers, an older generation), a throttled or shared switch, host memory
on the far NUMA node, power management.

Signature: pinned copies of at least 1 MiB (or, where there are none, the largest quarter, from 256 KiB) at less than
70% of the link rate, at least eight and most of those in their stretch of time. Copies that overlap one of the opposite
direction, or another of the same direction, are left out: they share the link. The link rate is the machine's where
the recording has it; else the best that the recording itself shows, so a link that was slow all the time needs the
machine's figure to be seen.

Time lost: duration - bytes / link rate, of those copies. Predicted saving: none is modelled, for the recording does not
tell which of the reasons it is.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.recordings.intervals import Cover, in_time
from kvprobe.recordings.model import Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
FLOOR, LEAST = 0.7, 8


def find(joined: JoinedRecording) -> Finding | None:
    """Slow stretches of large copies."""
    table = joined.recording.executions
    chosen: list[Array] = []
    losses: list[Array] = []
    evidence: list[Evidence] = []
    for direction in (Direction.H2D, Direction.D2H):
        every = (table["engine"] == Engine.COPY) & (joined.x_dur > 0)
        mine = every & (table["direction"] == direction) & (table["memory"] != Memory.PAGEABLE)
        if not mine.any():
            continue
        large = 1 << 20
        if not (mine & (table["bytes"] >= large)).any():
            large = max(int(np.percentile(table["bytes"][mine], 75)), 256 << 10)
        rows = np.flatnonzero(mine & (table["bytes"] >= large))
        if len(rows) < LEAST:
            continue
        other = every & (table["direction"] != direction) & (table["direction"] != Direction.D2D)
        shared = Cover(joined.x_start[other], joined.x_end[other]).within(joined.x_start[rows], joined.x_end[rows])
        rows = rows[10 * shared < joined.x_dur[rows]]
        rows = in_time(rows, joined.x_start)
        apart = np.ones(len(rows), dtype=bool)
        apart[1:] &= joined.x_start[rows[1:]] >= np.maximum.accumulate(joined.x_end[rows])[:-1] - 1_000
        rows = rows[apart]
        if len(rows) < LEAST:
            continue
        speed = table["bytes"][rows] / joined.x_dur[rows] * 1e9
        rate, how = joined.link(direction)
        if rate <= 0:
            rate, how = float(np.percentile(speed, 90)), "fastest copies seen here"
        slow = speed < FLOOR * rate
        if slow.sum() < LEAST:
            continue
        at = np.flatnonzero(slow)
        # A stretch: among the copies from its first slow one to its last, most must be slow.
        if slow[at[0] : at[-1] + 1].mean() < 0.7:
            continue
        rows = rows[slow]
        loss = (joined.x_dur[rows] - table["bytes"][rows] / rate * 1e9).astype(np.int64)
        chosen.append(rows)
        losses.append(loss)
        reached = float(np.median(speed[slow]))
        name = "host to device" if direction == Direction.H2D else "device to host"
        evidence.append(
            Evidence(
                f"{len(rows):,} large copies {name} ran at {reached / 1e9:.2f} GB/s (median)",
                reached,
                "bytes/s",
                MEASURED,
            )
        )
        evidence.append(Evidence(f"the link gives {rate / 1e9:.2f} GB/s", rate, "bytes/s", how))
    if not chosen:
        return None
    rows, loss = np.concatenate(chosen), np.concatenate(losses)
    evidence.append(Evidence(f"at that rate they would have taken {ms(int(loss.sum()))} less", int(loss.sum()), "ns"))
    for name in ("pcie_gen", "pcie_width", "pcie_gen_max", "pcie_width_max"):
        if name in joined.recording.machine:
            evidence.append(
                Evidence(
                    f"{name} is {joined.recording.machine[name]}",
                    float(joined.recording.machine[name]),
                    "1",
                    joined.recording.machine_how.get(name, "NVML"),
                )
            )
    return joined.device_finding(
        CAUSE,
        "{calls} large copies ran below the link's rate and lost {lost}",
        "likely",
        rows,
        loss,
        evidence=evidence,
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
