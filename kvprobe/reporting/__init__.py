"""The page and the tables that show a recording: they draw, and compute nothing beyond binning."""

from __future__ import annotations

from kvprobe.reporting.page import build_page, check_writable, write_report

__all__ = ["build_page", "check_writable", "write_report"]
