"""The page and the tables that show a recording: they draw, and compute nothing beyond binning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.reporting.page import build_page, check_writable, report_of_others, write_report

__all__ = ["build_page", "check_writable", "report_of_others", "write_report"]


def __getattr__(name: str) -> Any:
    """What makes a page is imported when it is asked for: who prints tables needs nothing of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvprobe.reporting import page

    return getattr(page, name)
