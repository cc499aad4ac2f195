"""Charts of a recording: the drawing, the words and the table beside it say the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind, Recording, Source, Table
from kvprobe.recordings.serving import recorded_span
from kvprobe.reporting import series
from kvprobe.reporting.charts import Axis, Points, heat_chart, histogram_chart, plain, timeline
from kvprobe.reporting.recorded import submissions, view
from kvprobe.reporting.streams import processes
from kvprobe.reporting.units import NONE, TIMES_SIGN
from kvprobe.reporting.views import Section
from tests.examining import examination


def over_time(recording: Recording) -> Section:
    return next(one for one in view(recording, examination(recording)).sections if one.id == "overview")


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recordings, played = _beside("conftest"), _beside("played")


def drawn_times(spec: Any) -> np.ndarray:
    """Every time at which a chart draws a value, nanoseconds."""
    times = []
    for one in spec["series"]:
        held = np.array([value is not None for value in one.get("hi", ())], dtype=bool)
        times.append(np.array(one["t"]) if "t" in one else one["t0"] + np.flatnonzero(held) * one["dt"])
    return np.concatenate(times)


@pytest.mark.parametrize("name", ["param/resnet_kineto.json.gz", "extrap/concurrent_profile16.sqlite"])
def test_a_finding_counts_time_from_the_beginning_of_the_recording_everywhere(shared_data: Path, name: str) -> None:
    recording = open_recording(shared_data / name)
    shown = [one for one in view(recording, diagnose(recording)).findings or [] if one["chart"] and one["calls"]]
    shown = [one for one in shown if one["chart"].spec["series"][0]["name"] == "calls"]
    assert shown
    for one in shown:
        times, axis = drawn_times(one["chart"].spec), one["chart"].spec["x"]
        assert axis["from"] <= times.min() and times.max() <= axis["from"] + axis["span"]
        written = np.array([row[1].value for row in one["chart"].table.rows])
        for row in one["calls"].rows:
            assert np.abs(times - row[0].value).min() < 1_000, "a call of its table lies where the chart draws it"
            assert np.abs(written - row[0].value).min() < 1_000


def test_idle_gaps_lie_where_the_device_was_idle(shared_data: Path) -> None:
    recording = open_recording(shared_data / "param/resnet_kineto.json.gz")
    began = recorded_span(recording)[0]
    (gaps,) = (one for one in diagnose(recording) if one.cause == "gpu_starved")
    chart = plain("gaps", gaps.chart)
    ends = recording.executions["end_ns"] - began
    for time in drawn_times(chart.spec):
        assert np.abs(ends - time).min() < 1_000, "a gap begins where an execution ended"


def test_a_window_of_a_long_recording_keeps_its_times() -> None:
    time = np.arange(3000) * 1_000_000
    points = Points("copies", time, np.full(3000, 5_000))
    chart = timeline(("x", "x", "x"), [points], (1e9, 2e9), Axis("took"), zero=0.0)
    assert chart.spec["x"] == {"unit": "ns", "span": 1e9, "from": 1e9}
    assert drawn_times(chart.spec).min() == 1e9
    assert (chart.table.rows[0][0].value, chart.table.rows[-1][1].value) == (1e9, 2e9)


@pytest.mark.parametrize("longest_ns", [400, 9_000_000_000, 2**50])
def test_every_call_is_in_the_distribution_however_short_or_long(longest_ns: int) -> None:
    took = np.array([0, 0, 0, 1, 2, 5, 300, longest_ns])
    chart = histogram_chart("x", "x", "x", {"copies": series.histogram(took)})
    assert sum(row[2].value or 0 for row in chart.table.rows) == sum(chart.spec["series"][0]["counts"]) == len(took)
    assert [cell.text.replace("\u00a0", " ") for cell in chart.table.rows[0]] == ["0 ns", "1.00 ns", "3"]
    heat = heat_chart("x", "x", "x", np.arange(len(took)), took, (0, 10))
    assert sum(row[2].value or 0 for row in heat.table.rows) == len(took)
    assert [cell.text.replace("\u00a0", " ") for cell in heat.table.rows[0][:3]] == ["0 ns", "2.00 ns", "4"]
    for one in (chart, heat):  # the last row does not end below the longest call
        last = one.table.rows[-1][1]
        assert last.text == "or longer" if last.value is None else last.value > longest_ns


def test_what_was_sampled_of_two_devices_is_two_lines_and_no_metric_is_left_out() -> None:
    recording = recordings.recording()
    metrics = ["pcie_gen", "pcie_rx_bytes_per_s", *(f"metric_{i}" for i in range(9)), "power_w"]
    first = len(recording.names)
    recording.names.extend(metrics)
    many = 20 * 2 * len(metrics)
    row = np.arange(many)
    device, metric = row % 2, row // 2 % len(metrics)
    value = np.where(metric == 0, 5, 1000.0 * (1 + device) + row / many)
    columns = {"time_ns": row * 1_000_000, "process": row * 0, "device": device, "metric": first + metric}
    recording.tables["samples"] = Table("samples", {**columns, "value": value})
    overview = over_time(recording)
    shown = {chart.title: chart for chart in overview.charts if chart.id.startswith("sample-")}
    assert list(shown) == [name.replace("_", " ").capitalize() for name in metrics[1:]]
    rates = shown["Pcie rx bytes per s"]
    assert [line["name"] for line in rates.spec["series"]] == ["GPU 0", "GPU 1"]
    assert max(rates.spec["series"][0]["v"]) < 1_001.5 < 2_000 <= min(rates.spec["series"][1]["v"])
    assert "kB/s" in rates.table.rows[0][2].text
    assert [[cell.text for cell in one] for one in overview.tables[0].rows] == [
        ["Pcie gen", "0", "5", "20"],
        ["Pcie gen", "1", "5", "20"],
    ]


def test_the_slowest_blocked_call_is_in_its_chart_however_many_there_are() -> None:
    recording = played.played()[0]
    found = [one for one in diagnose(recording) if one.chart and "blocked" in one.chart["series"]]
    assert found
    for finding in found:
        blocked = finding.chart["series"]["blocked"]
        assert 1_200 <= len(blocked["x"]) <= 1_500, "there are more than are drawn"
        assert blocked["y"].max() * 1e3 == max(call.dur_ns for call in finding.calls)


def calls_alone(rows: int = 3000) -> Recording:
    """Copies of one thread, one each microsecond, then a wait as long as all of them: no device, no transfers."""
    start = np.arange(rows + 1) * 1_000
    columns = {
        "start_ns": start,
        "end_ns": start + np.append(np.full(rows, 900), rows * 1_000),
        "process": start * 0,
        "thread": start * 0 + 7,
        "kind": np.append(np.full(rows, CallKind.COPY), CallKind.SYNC),
        "stream": start * 0,
        "name": start * 0 + 1,
    }
    streams = Table("streams", {"handle": [7], "process": [0]})
    tables = {"calls": Table("calls", columns), "streams": streams, "processes": Table("processes", {"pid": [123]})}
    return Recording([Source("run", "kvprobe")], tables, ["", "cudaMemcpyAsync"])


def test_what_is_outstanding_behind_the_last_call_is_not_drawn_where_no_end_was_recorded() -> None:
    charts = {
        chart.id: chart for one in view(calls_alone(), examination(calls_alone())).sections for chart in one.charts
    }
    (line,) = charts["occupancy"].spec["series"]
    half = len(line["hi"]) // 2
    assert max(one for one in line["hi"][: half - 1] if one is not None) > 0
    assert set(line["hi"][half + 1 :]) == {None}
    assert charts["occupancy"].table.rows[-1][2].text == "\u2013"


def test_how_calls_are_drawn_is_said_of_the_calls_that_there_are() -> None:
    charts = {rows: over_time(calls_alone(rows)).charts for rows in (100, 3000)}
    said = {rows: next(one.how for one in all_ if one.id == "submissions") for rows, all_ in charts.items()}
    assert said[100] == "Every call is drawn by itself."
    assert said[3000].startswith("Each step of the line is the longest call in its slice")


def test_the_process_that_a_chart_names_is_drawn_however_many_there_are() -> None:
    many = 200
    rows = many * 4
    process = np.arange(rows) % many
    took = np.where(process == 150, 9_000, 1_000 + process)
    start = np.arange(rows) * 10_000
    kind = np.full(rows, CallKind.COPY)
    columns = {"start_ns": start, "end_ns": start + took, "process": process, "thread": process, "kind": kind}
    tables = {"calls": Table("calls", columns), "processes": Table("processes", {"pid": np.arange(many) + 1})}
    recording = Recording([Source("run", "kvprobe")], tables, [""])
    (chart,), _ = processes(recording, submissions(recording), None)
    assert "not known" in chart.summary and "none was blocked" not in chart.summary
    labels = [row["label"] for row in chart.spec["rows"]]
    assert len(labels) == 32 and "process 151" in labels and labels == sorted(labels, key=lambda one: int(one[8:]))
    assert len(chart.table.rows) == many
    assert chart.summary.endswith("Drawn are the 32 of 200 that were blocked longest or else took most.")


def test_a_table_that_is_cut_says_so() -> None:
    recording = recordings.recording()
    many = 300
    columns = {"time_ns": np.arange(many), "process": np.zeros(many), "what": np.full(many, 3), "gain": np.ones(many)}
    recording.tables["decisions"] = Table("decisions", columns)
    (decisions,) = (
        one
        for section in view(recording, examination(recording)).sections
        for one in section.tables
        if "Decisions" in one.caption
    )
    assert len(decisions.rows) == 200
    assert decisions.note == "The first 200 of 300 rows."


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (220.0, f"220{TIMES_SIGN} lower"),
        (0.5, f"2.00{TIMES_SIGN} higher"),
        (1.0, "unchanged"),
        (0.0, NONE),
        (-2.0, NONE),
        (np.nan, NONE),
        (np.inf, NONE),
    ],
)
def test_what_a_decision_gained_is_said_in_words_or_not_at_all(gain: float, text: str) -> None:
    recording = recordings.recording()
    recording.decisions["gain"][:] = gain
    (made,) = (
        one
        for section in view(recording, examination(recording)).sections
        for one in section.tables
        if "Decisions" in one.caption
    )
    assert made.rows[0][-1].text == text


def test_the_words_and_the_line_of_outstanding_submissions_agree(shared_data: Path) -> None:
    recording = open_recording(shared_data / "nsys-ai/h100_2gpu_1s.sqlite")
    charts = {chart.id: chart for one in view(recording, examination(recording)).sections for chart in one.charts}
    chart = charts["occupancy"]
    assert "began with up to 1,141 others outstanding." in chart.summary
    assert max(max(filter(None, line["hi"])) for line in chart.spec["series"]) == 1_142
    assert chart.how.endswith("it shows one more than the text, which counts only the others.")


def test_how_deep_a_queue_was_is_said_once() -> None:
    path = Path(__file__).parents[1] / "gpu/data/accounts/nsys/a_server_that_waits_at_an_empty_queue.sqlite.gz"
    recording = open_recording(path)
    charts = {chart.id: chart for one in view(recording, examination(recording)).sections for chart in one.charts}
    assert charts["occupancy"].summary.count("outstanding") == 1
