"""Names what is wrong in a recording: each cause with its evidence, its cost and its cure; one file a cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.diagnosis.finding import Chart, Evidence, Finding, Series, Where, ranked

if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy

__all__ = ["CAUSES", "Chart", "Evidence", "Finding", "Series", "Where", "diagnose", "ranked"]

# The order is the ledger's: the best-evidenced cause claims first, and what one has claimed no other gets.
CAUSES: tuple[str, ...] = (
    # threads, inside calls
    "profiler_overhead",
    "pageable_memory",
    "synchronisation",
    "aliased_stream",
    "channels_exhausted",
    "fence_before_copies",
    "launch_queue_saturation",
    "context_lock_stall",
    "descriptor_bound_batch",
    "first_calls",
    "allocation_on_hot_path",
    "unexplained",
    # copy engines and the device
    "redundant_loads",
    "link_degraded",
    "small_copies",
    "weights_not_overlapped",
    "link_bound",
    "head_of_line_copies",
    "python_or_gil_bound",
    "gpu_starved",
    # results at stake
    "store_not_ordered",
    "load_not_ordered",
)


def diagnose(recording: Recording, occupancy: Occupancy | None = None) -> list[Finding]:
    """All findings of a recording, as `ranked` orders them; an empty list means that nothing was found.

    `occupancy` is what `recordings.occupancy.occupancy(recording)` returned, where the caller has it already.
    """
    from importlib import import_module

    from kvprobe.diagnosis.frame import Frame

    frame = Frame(recording, occupancy)
    if not len(frame.start) and not len(frame.x_start):
        return []
    found: list[Finding] = []
    for cause in CAUSES:
        finding = import_module(f"kvprobe.diagnosis.{cause}").find(frame)
        if finding is not None:
            found.append(finding)
    return ranked(found)
