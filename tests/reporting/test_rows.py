"""Threads and streams on one time axis: what is kept of a recording, and how a reader gets from a verdict to a call."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.diagnosis import Finding, TracedCall, diagnose
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table
from kvprobe.reporting import write_report
from kvprobe.reporting.lanes import IDLE, KERNEL, LOAD, RANGE, WAIT, WORK
from kvprobe.reporting.recorded import submissions
from kvprobe.reporting.rows import SLICES, rows_chart
from kvprobe.reporting.waits import SOON_NS
from tests.examining import examination

_SPEC = importlib.util.spec_from_file_location("conftest", Path(__file__).with_name("conftest.py"))
browsers = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(browsers)

MS = 1_000_000
STACK = "copy_ (/usr/lib/site-packages/torch/x.py:5)\nload (/app/server.py:42)\nmain (/app/server.py:7)"


def pageable(copies: int = 400) -> Recording:
    """Quick copies on one thread, then one from pageable memory that takes 100 ms, of which a stack was taken."""
    start = np.array([*(i * MS for i in range(copies)), copies * MS + 50 * MS])
    took = np.array([*[1_000] * copies, 100 * MS])
    many = copies + 1
    tables = {
        "calls": {
            "start_ns": start,
            "end_ns": start + took,
            "process": np.zeros(many),
            "kind": np.full(many, CallKind.COPY),
            "memory": np.array([Memory.PINNED] * copies + [Memory.PAGEABLE]),
            "thread": np.full(many, 7),
            "stream": np.zeros(many),
            "name": np.ones(many),
            "correlation": np.arange(many) + 1,
        },
        "executions": {
            "start_ns": start + 2_000,
            "end_ns": start + took,
            "process": np.zeros(many),
            "stream": np.zeros(many),
            "engine": np.full(many, Engine.COPY),
            "correlation": np.arange(many) + 1,
        },
        "stacks": {
            "time_ns": [int(start[-1]) + 60 * MS],
            "thread": [7],
            "process": [0],
            "blocked_ns": [60 * MS],
            "stack": [2],
        },
        "streams": {"handle": [0x7F00DEADBEEF], "process": [0], "name": [3]},
        "processes": {"pid": [123]},
    }
    made = {kind: Table(kind, columns) for kind, columns in tables.items()}
    return Recording([Source("run", "kvprobe")], made, ["", "cudaMemcpyAsync", STACK, "loads 1"], has_executions=True)


def chart_of(recording: Recording) -> dict[str, Any]:
    chart = rows_chart(recording, submissions(recording), diagnose(recording))
    assert chart is not None
    return dict(chart.spec)


def spread(digits: str) -> str:
    return re.sub(r"(\d)x(\d+),", lambda run: run[1] * int(run[2]), digits)


def test_a_thread_and_a_stream_are_rows_and_how_busy_they_were_is_kept() -> None:
    spec = chart_of(pageable())
    assert [(row["label"], row["thread"]) for row in spec["rows"]] == [
        ("thread 7", True),
        ("stream 1 (loads 1)", False),
    ]
    work = spread(spec["rows"][0]["layers"][WORK])
    assert len(work) == SLICES
    busy = np.frombuffer(work.encode(), np.uint8) - ord("0")
    assert busy.max() == 9
    # 100 of 550 ms without a pause; the quick ones are seen as well
    assert np.count_nonzero(busy == 9) / SLICES == pytest.approx(100 / 550, rel=0.01)
    assert np.count_nonzero((busy > 0) & (busy < 9)) >= 400


def test_calls_that_a_finding_names_are_kept_with_their_stack_among_many() -> None:
    recording = pageable(20_000)
    spec = chart_of(recording)
    items = spec["items"]
    assert len(items["t"]) < 8_000
    at = items["id"].index(20_000)
    assert items["d"][at] == 100 * MS
    assert spec["stacks"][items["s"][at]] == STACK
    assert spec["rows"][items["on"][at]]["label"] == "stream 1 (loads 1)"


def test_a_wait_for_an_event_leads_to_the_stream_that_recorded_it() -> None:
    names = ["", "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"]
    kinds = [CallKind.COPY, CallKind.EVENT, CallKind.EVENT, CallKind.EVENT, CallKind.COPY]
    calls = {
        "start_ns": np.arange(5) * 100,
        "end_ns": np.arange(5) * 100 + 50,
        "process": np.zeros(5),
        "kind": kinds,
        "name": [3, 1, 1, 2, 3],
        "stream": [0, 0, 1, 1, 1],
        "src": [0, 77, 88, 77, 0],
        "thread": [7] * 5,
    }
    executions = {"start_ns": [60, 460], "end_ns": [90, 490], "process": [0, 0], "stream": [0, 1], "engine": [2, 2]}
    tables = {
        "calls": Table("calls", calls),
        "executions": Table("executions", executions),
        "streams": Table("streams", {"handle": [13, 14], "process": [0, 0]}),
    }
    spec = chart_of(Recording([Source("x", "kvprobe")], tables, names, has_executions=True))
    labels = [row["label"] for row in spec["rows"]]
    assert spec["fences"] == [[300.0, labels.index("stream 14"), labels.index("stream 13")]]


def test_an_event_of_another_process_with_the_same_handle_is_another_event() -> None:
    calls = {
        "start_ns": np.arange(4) * 100,
        "end_ns": np.arange(4) * 100 + 50,
        "process": [0, 1, 0, 1],
        "kind": np.full(4, CallKind.EVENT),
        "name": [1, 1, 2, 2],
        "stream": [0, 2, 1, 3],
        "src": np.full(4, 77),
        "thread": [7, 8, 7, 8],
    }
    ran = np.arange(4)
    executions = {"start_ns": ran * 10, "end_ns": ran * 10 + 5, "process": ran // 2, "stream": ran, "engine": [2] * 4}
    tables = {
        "calls": Table("calls", calls),
        "executions": Table("executions", executions),
        "streams": Table("streams", {"handle": [13, 14, 13, 14], "process": [0, 0, 1, 1]}),
        "processes": Table("processes", {"pid": [100, 101]}),
    }
    names = ["", "cudaEventRecord", "cudaStreamWaitEvent"]
    spec = chart_of(Recording([Source("x", "kvprobe")], tables, names, has_executions=True))
    labels = [row["label"] for row in spec["rows"]]
    said = [(at, labels[to], labels[of]) for at, to, of in spec["fences"]]
    assert said == [
        (200.0, "stream 14 of process 100", "stream 13 of process 100"),
        (300.0, "stream 14 of process 101", "stream 13 of process 101"),
    ]


def two_threads() -> Recording:
    """One thread that submits for 30 of 100 ms, in calls of which one lies in the other, and one that waits for 99."""
    calls = {
        "start_ns": np.array([0, 0, 10 * MS, 1 * MS]),
        "end_ns": np.array([20 * MS, 10 * MS, 30 * MS, 100 * MS]),
        "process": np.zeros(4),
        "kind": [CallKind.COPY, CallKind.COPY, CallKind.COPY, CallKind.SYNC],
        "thread": [1, 1, 1, 2],
        "name": np.ones(4),
    }
    tables = {"calls": Table("calls", calls), "processes": Table("processes", {"pid": [123]})}
    return Recording([Source("run", "kvprobe")], tables, ["", "call"])


def test_who_waits_is_not_the_busiest_and_no_time_is_counted_twice() -> None:
    recording = two_threads()
    chart = rows_chart(recording, submissions(recording), [])
    assert chart is not None
    listed = {row[0].text: [cell.value for cell in row[2:5]] for row in chart.table.rows}
    assert listed == {"thread 1": [30 * MS, 0.3, 0], "thread 2": [0, 0, 99 * MS]}
    assert "Busiest: thread 1, for 30.0\u00a0ms, 30% of the recording." in chart.summary


def waits() -> Recording:
    """A kernel, a load behind it on another stream, and a thread that waits for one after the other, by stream."""
    calls = {
        "start_ns": np.array([0, 1, 2, 61]) * MS,
        "end_ns": np.array([1 * MS, 2 * MS, 60 * MS + 4_000, 90 * MS + 5_000]),
        "process": np.zeros(4),
        "kind": [CallKind.LAUNCH, CallKind.COPY, CallKind.SYNC, CallKind.SYNC],
        "thread": [7] * 4,
        "name": [1, 2, 3, 3],
        "stream": [0, 1, 0, 1],
        "correlation": [1, 2, -1, -1],
    }
    executions = {
        "start_ns": np.array([5, 60]) * MS,
        "end_ns": np.array([60, 90]) * MS,
        "process": [0, 0],
        "device": [0, 0],
        "stream": [0, 1],
        "engine": [Engine.KERNEL, Engine.COPY],
        "direction": [Direction.UNKNOWN, Direction.H2D],
        "bytes": [0, 1 << 20],
        "correlation": [1, 2],
        "name": [4, 0],
    }
    ranges = {
        "start_ns": np.array([0, 1, 61, 62]) * MS,
        "end_ns": np.array([60, 50, 90, 70]) * MS,
        "process": [0] * 4,
        "thread": [7] * 4,
        "name": [5, 6, 5, 6],
    }
    tables = {
        "calls": Table("calls", calls),
        "executions": Table("executions", executions),
        "ranges": Table("ranges", ranges),
        "streams": Table("streams", {"handle": [13, 14], "process": [0, 0], "device": [0, 0]}),
        "processes": Table("processes", {"pid": [123]}),
    }
    names = ["", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "attention", "step", "prepare"]
    return Recording([Source("run", "kvprobe")], tables, names, has_executions=True)


def test_a_wait_leads_from_what_ended_last_on_its_stream() -> None:
    spec = chart_of(waits())
    items, names = spec["items"], spec["names"]
    said = [(items["id"][call], names[items["n"][ran]]) for call, ran in spec["waits"]]
    assert sorted(said) == [(2, "attention"), (3, "copy to the GPU, 1.00\u00a0MiB")]


def test_a_call_that_returned_long_after_the_last_operation_leads_nowhere() -> None:
    recording = waits()
    recording.calls["end_ns"][2] += 2 * SOON_NS
    ids = [chart_of(recording)["items"]["id"][call] for call, _ in chart_of(recording)["waits"]]
    assert ids == [3]


def test_kernels_copies_steps_and_the_idle_gpu_have_a_style_each() -> None:
    recording = waits()
    found = diagnose(recording)
    chart = rows_chart(recording, submissions(recording), found, found.account)
    assert chart is not None
    labels = [row["label"] for row in chart.spec["rows"]]
    gpu = ["GPU 0"] if found.account.seen else []
    assert labels == [
        *gpu,
        "steps and ranges of thread 7",
        "ranges inside these, thread 7",
        "thread 7",
        "stream 13",
        "stream 14",
    ]
    assert gpu
    used = {row["label"]: set(row["layers"]) for row in chart.spec["rows"]}
    assert used["stream 13"] == {KERNEL}
    assert used["stream 14"] == {LOAD}
    assert used["steps and ranges of thread 7"] == used["ranges inside these, thread 7"] == {RANGE}
    assert used["thread 7"] == {WORK, WAIT}
    assert {KERNEL, IDLE} <= used["GPU 0"]
    idle = [why for why, style in _named(chart.spec) if style == IDLE]
    assert any("waiting for the host" in why or "not known" in why or why == "nothing to do" for why in idle)


def _named(spec: dict[str, Any]) -> list[tuple[str, int]]:
    items = spec["items"]
    return [(spec["names"][name], style) for name, style in zip(items["n"], items["w"], strict=True)]


def test_threads_of_the_recorder_are_no_threads_of_the_program(tmp_path: Path) -> None:
    recording = two_threads()
    recording.names.extend(["kvprobe-marks", "kvprobe-submit"])
    recording.tables["threads"] = Table("threads", {"process": [0, 0], "thread": [1, 2], "name": [2, 3]})
    found = examination(recording)
    chart = rows_chart(recording, submissions(recording), [])
    assert chart is not None
    assert [row["label"] for row in chart.spec["rows"]] == ["thread 2 (kvprobe's submitter)"]
    page = write_report(recording, tmp_path / "own.html", findings=found).read_text()
    assert "kvprobe-marks" not in page
    assert "kvprobe-submit" not in page


def many_threads(slow: int) -> Recording:
    """Thirty threads that submit all the time, and `slow` that do next to nothing but one slow pageable copy each."""
    busy = [(i * 10_000, 8_000, 100 + i % 30, Memory.PINNED) for i in range(3000)]
    rare = [(5_000 + i * 1_000_000, 400_000, 7 + i, Memory.PAGEABLE) for i in range(slow)]
    start, took, thread, memory = map(np.array, zip(*sorted(busy + rare), strict=True))
    calls = {
        "start_ns": start,
        "end_ns": start + took,
        "process": np.zeros(len(start)),
        "kind": np.full(len(start), CallKind.COPY),
        "thread": thread,
        "memory": memory,
        "name": np.ones(len(start)),
        "stream": np.zeros(len(start)),
    }
    streams = Table("streams", {"handle": [7], "process": [0]})
    tables = {"calls": Table("calls", calls), "processes": Table("processes", {"pid": [123]}), "streams": streams}
    return Recording([Source("run", "kvprobe")], tables, ["", "cudaMemcpyAsync"])


def named(row: int) -> Finding:
    call = TracedCall(row, "cudaMemcpyAsync", 123, 7, "", 0, 400_000, 400_000)
    return Finding("pageable_memory", "One", "warning", "certain", 400_000, calls=(call,))


def test_the_thread_of_a_finding_is_shown_though_others_are_busier(tmp_path: Path) -> None:
    recording = many_threads(1)
    (row,) = np.flatnonzero(recording.calls["thread"] == 7).tolist()
    chart = rows_chart(recording, submissions(recording), [named(row)])
    assert chart is not None
    assert chart.spec["rows"][0]["label"] == "thread 7"
    assert row in chart.spec["items"]["id"]
    assert chart.summary.startswith(
        "12 threads; what streams executed was not recorded; 19 more threads not shown. Busiest: thread 1"
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recording = pageable()
    return write_report(recording, tmp_path_factory.mktemp("rows") / "rows.html", findings=diagnose(recording))


chromium = browsers.chromium


def opened(chromium: Any, page: Path, width: int = 1200, fragment: str = "") -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chromium.get("about:blank")
    chromium.get(page.as_uri() + fragment)
    # charts below the first view are drawn when the browser is idle
    WebDriverWait(chromium, 60).until(lambda one: one.execute_script("return document.documentElement.dataset.drawn"))
    return chromium


def pane(chromium: Any) -> str:
    return str(chromium.find_element("css selector", "#rows .pane").text)


@pytest.mark.parametrize("width", [1200, 390])
def test_from_the_verdict_to_the_call_and_its_stack_in_three_clicks(chromium: Any, page: Path, width: int) -> None:
    opened(chromium, page, width)
    top = chromium.find_element("css selector", ".verdict")
    for words in ("cudaMemcpyAsync", "100 ms", "stream 1 (loads 1)", "thread 7", "/app/server.py:42"):
        assert words in top.text
    top.find_element("css selector", "a[href^='#call=']").click()  # the first of three
    said = pane(chromium)
    assert "cudaMemcpyAsync: 100" in said
    assert "load (/app/server.py:42)" in said
    assert "stream 1 (loads 1)" in said
    assert "call=400" in chromium.current_url


def test_the_calls_of_a_finding_lead_to_the_same_place_by_keyboard(chromium: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(chromium, page)
    link = chromium.find_element("css selector", ".finding a[href='#call=400']")
    link.send_keys(Keys.ENTER)
    assert "load (/app/server.py:42)" in pane(chromium)


def test_an_address_keeps_zoom_and_call(chromium: Any, page: Path) -> None:
    opened(chromium, page, fragment=f"#t={400 * MS}-{600 * MS}&call=400")
    assert "load (/app/server.py:42)" in pane(chromium)
    ticks = [one.text for one in chromium.find_elements("css selector", "#rows svg text")]
    assert "0 ms" not in ticks
    kept = chromium.current_url
    chromium.find_element("css selector", "#rows [aria-label='Show everything']").click()
    assert "t=" not in chromium.current_url
    assert kept.endswith("&call=400")


def test_search_finds_calls_by_name_and_by_stack(chromium: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(chromium, page)
    field = chromium.find_element("css selector", "#rows input[type=search]")
    field.send_keys("server.py:42")
    assert chromium.find_element("css selector", "#rows .search output").text.startswith("1 found")
    field.send_keys(Keys.ENTER)
    assert "cudaMemcpyAsync: 100" in pane(chromium)


SAVED = """
const saved = [], make = URL.createObjectURL;
URL.createObjectURL = (blob) => { saved.push(blob); return make(blob); };
HTMLAnchorElement.prototype.click = function () {};
document.querySelector(arguments[0]).click();
saved[0].text().then(arguments[1]);
"""


def test_a_table_becomes_csv_and_the_chart_a_trace_for_perfetto(chromium: Any, page: Path) -> None:
    opened(chromium, page)
    lines = chromium.execute_async_script(SAVED, "#streams .csv").splitlines()
    assert lines[0].startswith("Stream,Channel,Calls")
    assert lines[1].startswith("stream 1 (loads 1),") and ",401," in lines[1]
    units = dict(one.rstrip(")").split(" (") for one in lines[0].split(",") if one.endswith(")"))
    assert (
        units["Time in these calls"] == units["Longest"] == "ns"
        and units["Device busy"] == units["Share of its threads' time"] == "of 1"
    )
    busy = float(lines[1].split(",")[-1])
    assert 0 < busy <= 1
    trace = json.loads(chromium.execute_async_script(SAVED, "#rows .tools .copy"))
    longest = max(
        (one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] == 1), key=lambda one: one["dur"]
    )
    assert (longest["name"], longest["dur"], longest["args"]["row"]) == ("cudaMemcpyAsync", 100_000, 400)
    assert longest["args"]["stack"] == STACK


def test_a_link_to_a_call_that_is_not_shown_says_so(chromium: Any, tmp_path: Path) -> None:
    recording = many_threads(20)
    rows = np.flatnonzero(recording.calls["memory"] == Memory.PAGEABLE).tolist()
    page = write_report(recording, tmp_path / "many.html", findings=examination(recording, map(named, rows)))
    opened(chromium, page)
    kept = json.loads(chromium.find_element("id", "kvprobe-data").get_property("textContent"))["rows"]["items"]["id"]
    (gone, *_) = (row for row in rows if row not in kept)
    chromium.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    link = chromium.find_element("css selector", f".finding a[href='#call={gone}']")
    chromium.execute_script("arguments[0].click()", link)
    assert pane(chromium).startswith(f"Row {gone:,} of the calls is of a thread that is not shown here.")


def test_a_name_that_a_spreadsheet_would_compute_is_text(chromium: Any, tmp_path: Path) -> None:
    recording = pageable(20)
    recording.names[3] = "=HYPERLINK(x)"
    table = Table("threads", {"process": [0], "thread": [7], "name": [3]})
    recording.tables["threads"] = table
    opened(chromium, write_report(recording, tmp_path / "names.html", findings=examination(recording)))
    text = chromium.execute_async_script(SAVED, "#streams .scroll:last-child .csv")
    assert ",7,'=HYPERLINK(x),21," in text


def test_buttons_that_save_do_nothing_else(chromium: Any, page: Path) -> None:
    opened(chromium, page)
    chromium.get_log("browser")
    chromium.execute_async_script(SAVED, "#streams .csv")
    chromium.execute_async_script(SAVED, "#rows .tools .copy")
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_enter_chooses_the_call_that_is_under_way_at_the_cursor(chromium: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(chromium, write_report(two_threads(), tmp_path / "two.html", findings=examination(two_threads())))
    plot = chromium.find_element("css selector", "#rows .plot")
    chromium.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.END, Keys.ENTER)  # at 100 ms: a wait since 1 ms is under way, others began later and have ended
    assert pane(chromium).startswith("call: 99")


PRESSED = """
const event = new KeyboardEvent("keydown", {key: arguments[0], ctrlKey: true, bubbles: true, cancelable: true});
document.querySelector("#rows .plot").dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.mark.parametrize("key", ["p", "n", "Enter"])
def test_keys_of_the_browser_stay_the_browsers(chromium: Any, page: Path, key: str) -> None:
    opened(chromium, page)
    assert chromium.execute_script(PRESSED, key) is False
    assert pane(chromium) == ""


def test_the_legend_hides_what_it_names_by_mouse_and_by_keyboard(chromium: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    recording = waits()
    opened(chromium, write_report(recording, tmp_path / "legend.html", findings=diagnose(recording)))
    for button in chromium.find_elements("css selector", "#rows .legend button"):
        style = button.find_element("tag name", "rect").get_attribute("class")
        drawn = f"return document.querySelectorAll('#rows .plot .{style}').length"
        before = chromium.execute_script(drawn)
        assert before > 0, button.text
        chromium.execute_script("arguments[0].focus()", button)
        button.send_keys(Keys.SPACE)
        assert button.get_attribute("aria-pressed") == "false"
        assert chromium.execute_script(drawn) == 0
        button.send_keys(Keys.ENTER)
        assert chromium.execute_script(drawn) == before
    parts = chromium.find_elements("css selector", ".account .legend button")
    widths = (
        "return [...document.querySelectorAll('.account > svg rect')].map((one) => Number(one.getAttribute('width')))"
    )
    whole = chromium.execute_script(widths)
    assert len(parts) == len(whole) > 1
    parts[0].send_keys(Keys.ENTER)
    shown = chromium.execute_script(widths)
    assert shown[0] == 0
    assert sum(shown) == pytest.approx(1000)
    parts[0].send_keys(Keys.ENTER)
    assert chromium.execute_script(widths) == pytest.approx(whole, abs=0.1)


def test_a_mouse_over_a_call_is_told_what_it_is(chromium: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(chromium, page)
    ActionChains(chromium).move_to_element(chromium.find_element("css selector", "#rows .plot text.within")).perform()
    said = chromium.find_element("css selector", "#rows .hover")
    assert said.is_displayed()
    assert re.match(r"not known [\d.]+.ms, at [\d.]+.ms · process 123$", said.text), said.text
    assert chromium.find_element("css selector", "#rows .readout").text.startswith(said.text[:20])
    ActionChains(chromium).move_to_element(chromium.find_element("css selector", "h1")).perform()
    assert not chromium.find_elements("css selector", "#rows .hover:not([hidden])")


def test_names_of_rows_stand_beside_them_and_names_of_calls_in_them(chromium: Any, page: Path) -> None:
    """In a column of their own where there is room for one, above the rows where there is none."""
    first = "return document.querySelector('#rows .plot text.strong').getBBox()"
    left = "return Math.min(...[...document.querySelectorAll('#rows .plot path.grid')].map((one) => one.getBBox().x))"
    opened(chromium, page)
    name = chromium.execute_script(first)
    assert name["x"] + name["width"] < chromium.execute_script(left)
    outside = """
    const pieces = [...document.querySelectorAll("#rows .plot path.call")].flatMap((one) =>
      [...one.getAttribute("d").matchAll(/M([\\d.-]+) ([\\d.-]+)h([\\d.-]+)/g)].map((m) => m.slice(1).map(Number)));
    return [...document.querySelectorAll("#rows .plot text.within")].map((one) => [one, one.getBBox()])
      .filter(([, box]) => !pieces.some(([x, y, w]) =>
        x - 2 <= box.x && box.x + box.width <= x + w + 2 && Math.abs(y - box.y) < 9))
      .map(([one]) => one.textContent);
    """
    assert chromium.execute_script("return document.querySelectorAll('#rows .plot text.within').length") > 0
    assert chromium.execute_script(outside) == []
    opened(chromium, page, 390)
    name = chromium.execute_script(first)
    assert name["x"] >= chromium.execute_script(left)


def test_a_chosen_wait_says_after_what_it_returned(chromium: Any, tmp_path: Path) -> None:
    recording = waits()
    page = write_report(recording, tmp_path / "waits.html", findings=diagnose(recording))
    opened(chromium, page, fragment="#call=2")
    assert "It returned 4.00 µs after this had ended on stream 13: attention." in pane(chromium)
    assert chromium.find_elements("css selector", "#rows .fence.wait.strong")


def test_without_a_script_there_are_numbers_and_no_gaps(chromium: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(page.as_uri())
        assert not any(one.is_displayed() for one in chromium.find_elements("css selector", ".plot"))
        assert chromium.find_element("css selector", ".verdict h1").is_displayed()
        how = chromium.find_elements("css selector", ".finding[open] .evidence .how, #split .how, #histogram .how")
        assert len(how) > 1
        assert all(one.is_displayed() for one in how), "how a figure was obtained is said without a script as well"
        dead = chromium.find_elements("css selector", ".copy, .theme")
        assert dead
        assert not any(one.is_displayed() for one in dead), "what only a script does is not offered"
        table = chromium.find_element("css selector", "#rows details")
        table.find_element("tag name", "summary").send_keys(Keys.ENTER)
        assert "stream 1 (loads 1)" in table.text
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
