"""The page and `kvprobe stats` name uploads by expert; recordings without any say nothing."""

from __future__ import annotations

import math

from kvprobe.account.expert_gains import ExpertGains
from kvprobe.reporting.experts import expert_tables, scaled
from kvprobe.reporting.summaries import summary
from tests.recordings.experts_made import STRIDE, Trace, as_llama_cpp


def test_stats_count_uploads_by_tensor() -> None:
    trace, uploads = as_llama_cpp()
    table = summary(trace.recording(), "experts")
    rows = [dict(zip((name for name, _ in table.columns), row, strict=True)) for row in table.rows]
    assert len(rows) == 9 and sum(row["Uploads"] for row in rows) == uploads
    assert {row["Expert bytes"] for row in rows} == {STRIDE}
    assert all(row["Uploads"] - row["Again"] == row["Different"] for row in rows)
    changes = summary(trace.recording(), "expert_changes")
    assert {row[1] for row in changes.rows} == {"slots", "fixed"}
    assert all(math.isnan(row[-1]) for row in changes.rows)  # nothing shows what the GPU did


def test_the_section_is_there_where_experts_are_uploaded() -> None:
    trace, uploads = as_llama_cpp()
    (tensors,) = expert_tables(trace.recording(), None)
    assert tensors is not None and f"{uploads:,} uploads" in tensors.note
    empty = Trace()
    empty.copy(1, 2, 3)
    assert expert_tables(empty.recording(), None) == []


def test_times_that_are_extended_say_from_what() -> None:
    said = "Times are scaled from the 74% of the window in which the GPU was observed."
    assert scaled(ExpertGains(100, 50, 0.74, [])) == said
    assert scaled(ExpertGains(100, 50, 1.0, [])) == scaled(ExpertGains(100, None, 0.74, [])) == ""
