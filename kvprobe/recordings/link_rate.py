"""What the link between CPU and GPU carries, as far as a recording tells it."""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.model import Direction, Engine, Memory, Recording

__all__ = ["LARGE_BYTES", "PCIE_5", "link_rate"]

LARGE_BYTES = 1 << 20  # a copy this large runs at nearly the link's rate
PCIE_5 = 55e9  # bytes per second of large copies over PCIe 5.0 x16 (H100, H200), where nothing tells the link


def link_rate(recording: Recording, direction: Direction) -> tuple[float, str]:
    """Bytes per second that one copy of this direction can reach, and how that is known; 0 where unknown.

    The machine's own figure where the recording has one; else the ninth decile of pinned copies, or of runs of copies
    between two marks, of at least 1 MiB in this recording (a lower bound of the link).
    """
    fact = recording.machine.get("link_bytes_per_s")
    if isinstance(fact, dict):
        fact = fact.get(direction.name.lower(), fact.get(direction.name))
    if fact:
        return float(fact), recording.machine_how.get("link_bytes_per_s", "stated for this machine")
    for table in (recording.executions, recording.spans):
        took = table["end_ns"] - table["start_ns"]
        large = (table["engine"] == Engine.COPY) & (table["direction"] == direction) & (took > 0)
        large &= table["bytes"] >= LARGE_BYTES
        if table is recording.executions:
            large &= table["memory"] != Memory.PAGEABLE
        rows = np.flatnonzero(large)
        if len(rows):
            return float(np.percentile(table["bytes"][rows] / took[rows], 90) * 1e9), "fastest large copies seen here"
    return 0.0, "unknown"
