"""The page of a demo run: what it says first, and what it never does."""

from __future__ import annotations

import importlib.util
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import UsageError
from kvprobe.reporting import Switch, build_page, write_report

_SPEC = importlib.util.spec_from_file_location("stories", Path(__file__).with_name("stories.py"))
stories = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(stories)


def test_the_verdict_names_cause_cost_and_what_kvprobe_did() -> None:
    page = build_page(story=stories.story())
    head = page[page.index("<h1>") : page.index('id="overview"')]
    for words in ("The launch queue filled", "switched to pooled", "1,021", "18.4", "3.00"):
        assert words in head


def test_a_run_without_saturation_is_not_called_saturated() -> None:
    calm = {"submit_p50_ns": 1000.0, "submit_p99_ns": 1300.0, "longest_call_ns": 9000.0}
    page = build_page(story=stories.story(phases={"shared": calm, "auto": calm}, switches=()))
    assert "No saturation" in page
    assert "launch queue filled" not in page


def test_text_of_a_run_never_becomes_markup() -> None:
    hostile = "</script><img src=x onerror=alert(1)><!--"
    levels = (np.array([5_000_000_000, 6_000_000_000]), np.array([3, 4]))
    switch = Switch(7_000_000_000, hostile, hostile, hostile)
    page = build_page(
        story=stories.story(device=hostile, command=hostile, occupancy={hostile: levels}, switches=[switch])
    )
    tags: list[str] = []
    data: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

        def handle_data(self, text: str) -> None:
            data.append(text)

    Reader().feed(page)
    assert "img" not in tags
    assert tags.count("script") == 3  # theme, data, page.js
    specs = json.loads(next(text for text in data if text.startswith('{"')))
    assert hostile in [one["name"] for one in specs["occupancy"]["series"]]


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.html"
    target.write_text("earlier")
    monkeypatch.setattr("os.fdopen", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(None, target, story=stories.story())
    assert target.read_text() == "earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.parametrize("where", ["missing/out.html", "."])
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match="cannot write the report") as caught:
        write_report(None, tmp_path / where, story=stories.story())
    assert "\n" not in str(caught.value)


def test_a_report_needs_something_to_report() -> None:
    with pytest.raises(UsageError):
        build_page()
