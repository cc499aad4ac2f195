"""The link runs at its full rate and the device waits for it: only moving fewer bytes helps.

Mechanism: the bytes that must move take longer than the compute beside them.

Signature: over the recording one direction of the link is busy for at least 80% of the time, its copies run at 80% of
the link's rate or more, and for at least 30% of the time it is busy no kernel of the process runs, although the process
has kernels. Small, redundant, degraded and unhidden copies claim first: what is left really is bytes.

Time lost: the engine's time beside which nothing computes. Predicted saving: none is modelled: only fewer
bytes help.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.intervals import Cover, distinct
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.recordings.model import Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for


def find(joined: JoinedRecording) -> Finding | None:
    """A saturated link."""
    table = joined.recording.executions
    chosen: list[Array] = []
    losses: list[Array] = []
    evidence: list[Evidence] = []
    kernel = table["engine"] == Engine.KERNEL
    for process in distinct(table["process"]):
        for direction in (Direction.H2D, Direction.D2H):
            rows = np.flatnonzero(
                (table["engine"] == Engine.COPY)
                & (table["direction"] == direction)
                & (table["process"] == process)
                & (table["memory"] != Memory.PAGEABLE)
                & (joined.x_dur > 0)
            )
            mine = kernel & (table["process"] == process)
            if len(rows) < 8 or not mine.any():
                continue
            rate, how = joined.link(direction)
            copying = Cover(joined.x_start[rows], joined.x_end[rows])
            moved = int(table["bytes"][rows].sum())
            reached = moved / max(copying.total_ns, 1) * 1e9
            if rate <= 0 or reached < 0.8 * rate or copying.total_ns < 0.8 * joined.span_ns:
                continue
            compute = Cover(joined.x_start[mine], joined.x_end[mine])
            exposed = copying.total_ns - copying.intersect_ns(compute)
            if exposed < 0.3 * copying.total_ns:
                continue
            alone = joined.x_dur[rows] - compute.within(joined.x_start[rows], joined.x_end[rows])
            chosen.append(rows)
            losses.append((alone * (exposed / max(int(alone.sum()), 1))).astype(np.int64))
            name = "host to device" if direction == Direction.H2D else "device to host"
            evidence += [
                Evidence(
                    f"{name}: {moved / 1e9:.3g} GB at {reached / 1e9:.1f} GB/s, the link busy "
                    f"{share(copying.total_ns, joined.span_ns)} of the time",
                    reached,
                    "bytes/s",
                    MEASURED,
                ),
                Evidence(f"the link gives {rate / 1e9:.1f} GB/s", rate, "bytes/s", how),
                Evidence(f"no kernel runs beside {ms(exposed)} of it", exposed, "ns", MEASURED),
            ]
    if not chosen:
        return None
    return joined.device_finding(
        CAUSE,
        "The link is the limit: {lost} of copying with nothing to compute",
        "certain",
        np.concatenate(chosen),
        np.concatenate(losses),
        evidence=evidence,
        severity="info",
        cure=(
            Change(
                "Move fewer bytes: a smaller KV type (fp8), more reuse on the GPU, a larger GPU share for weights",
                "setting",
            ),
            Change("Recompute short prefixes instead of loading them where that is faster"),
            Change("A faster link, or both directions and several GPUs' links at once", "setting"),
        ),
    )
