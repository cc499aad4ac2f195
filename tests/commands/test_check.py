"""`kvprobe check`: an exit code that CI can trust."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kvprobe.recordings import open_recording
from kvprobe.recordings.model import SUBMITTING


def test_a_saturated_recording_breaks_its_limits(kvprobe, shared_data: Path, tmp_path: Path) -> None:
    junit = tmp_path / "out.xml"
    code, out, _ = kvprobe(
        "check",
        shared_data / "nsys-ai/h100_2gpu_1s.sqlite",
        "--max-blocked",
        "1%",
        "--max-submit-p99",
        "50us",
        "--no",
        "saturation",
        "--junit",
        junit,
    )
    assert code == 1
    assert out.count("FAIL") == 3
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("3", "3")
    assert "launch_queue_saturation" in suite[2].find("failure").get("message")


def test_a_healthy_recording_keeps_them(kvprobe, shared_data: Path, tmp_path: Path) -> None:
    junit = tmp_path / "out.xml"
    code, out, _ = kvprobe(
        "check",
        shared_data / "nsys-ai/mfu_2gpu_before.sqlite",
        "--max-blocked",
        "1%",
        "--no",
        "saturation",
        "--junit",
        junit,
    )
    assert code == 0, out
    assert ElementTree.parse(junit).getroot().find("testsuite").get("failures") == "0"


def test_what_the_profiler_costs_is_no_loss_of_the_programs(kvprobe, shared_data: Path, tmp_path: Path) -> None:
    recording = shared_data / "nsys-ai/mfu_2gpu_before.sqlite"
    findings = json.loads(kvprobe("report", recording, "--json", "-o", tmp_path / "page.html")[1])["findings"]
    (named,) = (one for one in findings if one["confidence"] != "cannot tell")
    assert named["cause"] == "profiler_overhead" and named["lost_ns"] > 100_000
    code, out, _ = kvprobe("check", recording, "--max-lost", "0.1ms", "--json")
    assert code == 0 and json.loads(out)["limits"][0]["name"] == "max-lost"


def test_each_limit_is_judged_by_itself(kvprobe, export: Path) -> None:
    _, out, _ = kvprobe("check", export, "--max-submit-p50", "1s", "--max-call", "1ns", "--json")
    said = json.loads(out)
    assert not said["ok"]
    assert {one["name"]: one["broken"] for one in said["limits"]} == {"max-submit-p50": False, "max-call": True}


def test_a_time_and_a_share_say_the_same(kvprobe, export: Path) -> None:
    codes = {limit: kvprobe("check", export, "--max-blocked", limit)[0] for limit in ("0%", "0ns", "100%", "1000s")}
    assert codes == {"0%": 1, "0ns": 1, "100%": 0, "1000s": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--max-blocked", "much"),
        ("--max-submit-p99", "50"),
        ("--no", "weather"),
        ("--no", ""),
        ("--junit", "missing/x.xml"),
    ],
)
def test_a_limit_that_means_nothing_is_one_line_and_exit_code_2(
    kvprobe, export: Path, tmp_path, monkeypatch, wrong
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = kvprobe("check", export, *wrong)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_percentile_is_said_to_be_of_the_submissions_in_the_window(kvprobe, shared_data: Path) -> None:
    recording = shared_data / "nsys-ai/mfu_2gpu_after.sqlite"
    counts = []
    for words in ((), ("--from", "0.15s")):
        code, out, _ = kvprobe("check", recording, "--max-submit-p99", "1ns", *words)
        assert code == 1
        counts.append(int(re.search(r"of ([\d,]+) submissions", out)[1].replace(",", "")))
    calls = open_recording(recording).calls
    submits = np.isin(calls["kind"], np.array(SUBMITTING))
    late = calls["start_ns"] >= calls["start_ns"].min() + 150_000_000
    assert counts[0] == submits.sum()
    assert 0 < counts[1] < counts[0]
    assert counts[1] == pytest.approx((submits & late).sum(), rel=0.1)  # the recording begins with whatever came first


def test_annotations_for_github(kvprobe, export: Path) -> None:
    asked = ("--max-call", "1ns", "--max-submit-p50", "1s", "--format", "github")
    code, out, _ = kvprobe("check", export, *asked)
    assert code == 1
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["::error"].startswith("title=kvprobe%3A max-call::") and lines["::error"].endswith("submissions")
    assert lines["::notice"].startswith("title=kvprobe%3A max-submit-p50::")


def test_an_annotation_stands_at_the_line_and_hides_no_text() -> None:
    from kvprobe.commands.check import CheckedLimit, _annotation

    broken = CheckedLimit(
        "no pageable", "none", "pageable_memory", True, "100% of\ncopies", at=f"{Path.cwd()}/a,b.py:7"
    )
    assert _annotation(broken, "error") == (
        "::error file=a%2Cb.py,line=7,title=kvprobe%3A no pageable::pageable_memory%0A100%25 of%0Acopies"
    )
    undecided = CheckedLimit("no pageable", "none", "none found", False, undecided="the file is cut off")
    assert _annotation(undecided, "warning") == "::warning title=kvprobe%3A no pageable::undecided: the file is cut off"
