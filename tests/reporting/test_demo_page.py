"""The page of a demo run: what it says first, and what it never does."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.diagnosis.finding import Finding
from kvprobe.errors import UsageError
from kvprobe.reporting import build_page, demo, write_report

_SPEC = importlib.util.spec_from_file_location("played", Path(__file__).with_name("played.py"))
played = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(played)


def page_of(**changes: Any) -> str:
    recording, figures = played.played(**changes)
    return build_page(
        recording,
        findings=diagnose(recording),
        extra=demo.sections(recording, figures),
        lead_verdict=demo.verdict(figures),
    )


def test_the_verdict_names_cause_cost_and_what_kvprobe_did() -> None:
    page = page_of()
    head = page[page.index("<h1>") : page.index('id="findings"')]
    for words in ("The launch queue filled", "switched to pooled", "1,021", "18.4", "3.22"):
        assert words in head


def test_headline_table_and_histogram_compare_loads_with_loads() -> None:
    recording, figures = played.played()
    said = demo.verdict(figures)
    assert "9.10" in said.headline and "45.0" in said.headline
    assert said.facts[0].note.endswith("202\u00d7 lower")
    (section,) = demo.sections(recording, figures)
    histogram = next(chart for chart in section.charts if chart.id == "cost-histogram")
    assert histogram.summary.count("loads, median") == 2 and "calls" not in histogram.summary
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in section.tables[0].rows}
    assert "Moved" in rows and not any("twice" in label for label in rows)  # what overlaps depends on the speed
    loads = demo.load_costs(recording)
    assert 7000 < loads["shared"].ns.mean() < 9000 and 30 < loads["auto"].ns.mean() < 50


def test_a_run_without_saturation_is_not_called_saturated() -> None:
    figures = played.played()[1]
    calm = {**figures["auto"], "submit_p99_ns": 1300.0, "load_p99_ns": 1400.0, "longest_call_ns": 9000.0}
    said = demo.verdict({**figures, "shared": calm, "auto": calm, "switches": 0, "switch_log": []})
    assert "No saturation" in said.headline
    assert said.state == "ok"


def test_a_rate_above_the_links_is_no_share_of_it() -> None:
    figures = played.played()[1]
    link = figures["auto"]["bytes_per_s"] / 1.87
    said = {fact.label: fact.note for fact in demo.verdict({**figures, "link_bytes_per_s": link}).facts}
    assert "the link carries more than that showed" in said["Copied at"]
    assert "%" not in said["Copied at"]


def test_busy_cpus_are_said_beside_the_verdict() -> None:
    figures = played.played()[1]
    title = "Threads that submit waited 3.3 s for a CPU between their calls"
    starved = Finding("cpu_starved", title, "critical", "likely", 3_300_000_000)
    said = demo.verdict(figures, [starved])
    assert said.headline == demo.verdict(figures).headline
    assert said.detail.endswith(
        "and made both phases slower: threads that submit waited 3.3 s for a CPU between their calls."
    )
    quick = {**figures["auto"], "submit_p99_ns": 1300.0}
    calm = {**figures, "shared": quick, "switches": 0, "switch_log": []}
    assert demo.verdict(calm, [starved]).detail.startswith("Other work kept the CPUs busy")
    little = replace(starved, severity="info")
    assert demo.verdict(figures, [little]).detail == demo.verdict(figures).detail


def test_times_of_the_phases_are_for_one_copy_and_come_from_the_recording() -> None:
    recording, figures = played.played()
    (section,) = demo.sections(recording, figures)
    split = next(chart for chart in section.charts if chart.id == "cost-split")
    assert [sum(row["values"]) for row in split.spec["rows"]] == pytest.approx(
        [1881.1e6 / 576, 729.2e6 / 576], rel=1e-6
    )
    cost = demo.costs(recording)
    assert cost["auto"].time_ns.min() >= recording.decisions["time_ns"][0] > cost["before the switch"].time_ns.max()
    assert 30 < cost["auto"].ns.mean() < 50  # a load's time by its 576 copies


def test_text_of_a_run_never_becomes_markup() -> None:
    hostile = "</script><img src=x onerror=alert(1)><!--"
    page = page_of(device=hostile)
    tags: list[str] = []
    data: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

        def handle_data(self, text: str) -> None:
            data.append(text)

    Reader().feed(page)
    assert "img" not in tags
    assert tags.count("script") == 4  # theme, data, page.js, rows.js
    specs = json.loads(next(text for text in data if text.startswith('{"')))
    assert hostile in [one["label"] for one in specs["cost"]["marks"]]


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.html"
    target.write_text("earlier")
    monkeypatch.setattr("os.fdopen", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(played.played()[0], target)
    assert target.read_text() == "earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.parametrize("where", ["missing/out.html", "."])
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match="cannot write ") as caught:
        write_report(played.played()[0], tmp_path / where)
    assert "\n" not in str(caught.value)


def test_a_report_needs_something_to_report() -> None:
    with pytest.raises(UsageError):
        build_page()
