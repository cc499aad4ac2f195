"""The table "Is offload helping?": what each offload moved, hit, wasted, saved and made wait."""

from __future__ import annotations

from kvprobe.diagnosis.offload_benefit import Benefit
from kvprobe.reporting.units import NONE, count_text, duration, moved_text, percent
from kvprobe.reporting.views import TableView, table

__all__ = ["LEAD", "benefits_table"]

LEAD = (
    "As counted by the servers' schedulers since they started. A store is wasted when its block was evicted or "
    "overwritten before it was loaded. “Prefill saved” is the time in which this server would have computed the tokens "
    "that came from the offload. A dash means that the server does not report the figure."
)


def benefits_table(found: list[Benefit]) -> TableView:
    """One row for each offload."""
    rows = []
    for one in found:
        wasted = percent(one.wasted_share) if one.wasted_share is not None else NONE
        size = f" ({moved_text(one.wasted_bytes)})" if one.wasted_bytes is not None else ""
        rows.append(
            [
                f"{one.server} {one.source}",
                one.conclusion,
                (moved_text(one.loaded_bytes), one.loaded_bytes),
                (percent(one.hit_share) if one.hit_share is not None else NONE, one.hit_share),
                (moved_text(one.stored_bytes), one.stored_bytes),
                (wasted + size, one.wasted_share),
                (duration(one.saved_ns), one.saved_ns),
                (duration(one.waited_ns), one.waited_ns),
                (count_text(one.requests) if one.requests is not None else NONE, one.requests),
            ]
        )
    columns = (
        "Offload",
        "Helps?",
        "Loaded",
        "Hit share",
        "Stored",
        "Stores wasted",
        "Prefill saved",
        "Waited",
        "Requests",
    )
    return table("Is offload helping?", columns, rows)
