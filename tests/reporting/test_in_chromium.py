"""The page as a browser sees it: silent, offline, legible, usable by keyboard and on a phone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe.diagnosis import Finding, diagnose
from kvprobe.recordings import open_recording
from kvprobe.reporting import demo, write_report
from tests.examining import examination

HOSTILE = (
    "</script><img src=x onerror=document.title='owned'>",
    "<b onclick=alert(1)>",
    "]]><!--",
    "'\"><svg onload=x>",
)


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


played, recordings = _beside("played"), _beside("conftest")


def demo_page(path: Path, **options: Any) -> Path:
    recording, figures = played.played()
    sections, lead = demo.sections(recording, figures), demo.verdict(figures)
    return write_report(recording, path, findings=diagnose(recording), extra=sections, lead_verdict=lead, **options)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a demo, of a recording, and of a recording whose every name is an attack."""
    folder = tmp_path_factory.mktemp("pages")
    plain, hostile = recordings.recording(), recordings.recording(HOSTILE)
    return {
        "demo": demo_page(folder / "demo.html"),
        "recording": write_report(plain, folder / "recording.html", findings=diagnose(plain)),
        "hostile": write_report(hostile, folder / "hostile.html", findings=diagnose(hostile)),
    }


def until(chromium: Any, script: str) -> None:
    """Waits until the script's answer is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(chromium, 60).until(lambda one: one.execute_script(script))


def opened(chromium: Any, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> Any:
    chromium.get_log("browser"), chromium.get_log("performance")
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
    chromium.get(path.as_uri())
    until(chromium, "return document.documentElement.dataset.drawn")
    return chromium


def figures(chromium: Any) -> list[str]:
    return [one.get_attribute("id") for one in chromium.find_elements("css selector", "figure[data-chart]")]


def open_findings(chromium: Any) -> None:
    """A closed finding's chart is drawn once it opens, by an event of its own."""
    chromium.execute_script('document.querySelectorAll("details.finding").forEach((d) => { d.open = true; });')
    until(
        chromium,
        """return [...document.querySelectorAll("details.finding figure[data-chart]")].every(
            (figure) => figure.querySelector(".plot svg, .js-plotly-plot"))""",
    )


@pytest.mark.parametrize("name", ["demo", "recording", "hostile"])
def test_nothing_is_said_on_the_console_and_nothing_is_fetched(
    chromium: Any, pages: dict[str, Path], name: str
) -> None:
    opened(chromium, pages[name])
    assert chromium.execute_script("return document.documentElement.dataset.ready")
    assert [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith(("file:", "data:"))] == []
    assert [url for url in urls if url.startswith("file:")] == [pages[name].as_uri()]


def test_names_of_a_recording_stay_text(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["hostile"])
    assert chromium.title != "owned"
    assert chromium.find_elements("css selector", "img, main b, [onclick], [onload], [onerror]") == []
    text = chromium.find_element("tag name", "main").get_property("textContent")
    assert HOSTILE[2] in text
    assert HOSTILE[3] in text
    labels = "return JSON.parse(document.getElementById('kvprobe-data').textContent).submissions.labels"
    assert any(one.startswith(HOSTILE[0]) for one in chromium.execute_script(labels))


@pytest.mark.parametrize("name", ["demo", "recording"])
def test_every_chart_is_drawn_and_has_words_and_a_table(chromium: Any, pages: dict[str, Path], name: str) -> None:
    opened(chromium, pages[name])
    assert len(figures(chromium)) >= 6
    open_findings(chromium)
    for figure in figures(chromium):
        found = chromium.execute_script(
            """const f = document.getElementById(arguments[0]);
            return {paths: f.querySelectorAll(".plot path[d], .plot rect").length,
                    words: f.querySelector(".summary").textContent.length,
                    rows: f.querySelectorAll("table tbody tr").length,
                    label: f.querySelector(".plot").getAttribute("aria-label"),
                    described: !!document.getElementById(f.querySelector(".plot").getAttribute("aria-describedby"))}""",
            figure,
        )
        assert found["paths"] > 3, figure
        assert found["words"] > 20, figure
        assert found["rows"] > 0, figure
        assert found["label"], figure
        assert found["described"], figure


HELD = "window.held = []; window.requestIdleCallback = (act) => window.held.push(act);"
DRAWN = "return [...document.querySelectorAll('figure[data-chart]')].filter((f) => f.querySelector('.plot svg')).length"


def test_what_lies_below_the_first_view_waits_until_the_browser_is_idle(chromium: Any, pages: dict[str, Path]) -> None:
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HELD})
    try:
        chromium.get(pages["recording"].as_uri())
        assert chromium.execute_script("return document.documentElement.dataset.ready")
        above = chromium.execute_script(
            """return [...document.querySelectorAll('figure[data-chart]')].filter((f) => {
              const box = f.getBoundingClientRect(); return box.height && box.top < innerHeight; }).length"""
        )
        assert chromium.execute_script(DRAWN) == above < len(figures(chromium))
        tall = "return [...document.querySelectorAll('figure[data-chart]')].map((f) => f.offsetHeight).join()"
        before = chromium.execute_script(tall)
        chromium.execute_script("document.querySelector('#submissions .plot').focus()")
        chromium.find_element("css selector", "#submissions .plot").send_keys("+")
        assert chromium.execute_script(DRAWN) == above + 1, (
            "who is asked answers at once, its peers when it is their turn"
        )
        chromium.execute_script("while (window.held.length) window.held.shift()();")
        assert chromium.execute_script("return document.documentElement.dataset.drawn")
        assert chromium.execute_script(tall) == before, "nothing moves when it is drawn"
        ticks = "return [...document.querySelectorAll(arguments[0] + ' svg text')].map((t) => t.textContent).join()"
        zoomed = chromium.execute_script(ticks, "#occupancy")
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    opened(chromium, pages["recording"])
    assert chromium.execute_script(ticks, "#occupancy") != zoomed, "a peer that is drawn later shows the same time"


@pytest.mark.parametrize("name", ["demo", "recording"])
def test_a_phone_shows_verdict_and_what_to_do_first_and_nothing_overflows(
    chromium: Any, pages: dict[str, Path], name: str
) -> None:
    opened(chromium, pages[name], 375, 812)
    assert chromium.execute_script("return document.documentElement.scrollWidth") == 375
    bottom = chromium.execute_script(
        "return (document.querySelector('.do') || document.querySelector('.facts')).getBoundingClientRect()"
    )
    assert bottom["top"] < 812
    assert chromium.find_element("css selector", "h1").is_displayed()
    if name == "demo":
        assert bottom["bottom"] < 812


LONG = "a thread of the server's own scheduler, whose name is as long as a name of a thread can be made by anybody"
OUTSIDE = """
const bad = [];
document.querySelectorAll("details").forEach((d) => { d.open = true; });
for (const drawing of document.querySelectorAll(".plot > svg")) {
  const box = drawing.getBoundingClientRect();
  for (const text of drawing.querySelectorAll("text")) {
    const at = text.getBoundingClientRect();
    if (at.width && (at.left < box.left - 1 || at.right > box.right + 1)) bad.push(text.textContent);
  }
}
return bad;
"""


@pytest.mark.parametrize("width", [390, 768, 1200])
def test_no_text_of_a_chart_is_cut_off(chromium: Any, pages: dict[str, Path], tmp_path: Path, width: int) -> None:
    long = recordings.recording((*recordings.recording().names[1:3], LONG, "why"))
    long.decisions["time_ns"][:] = 1_900_000_000
    for path in (pages["demo"], write_report(long, tmp_path / "long.html", findings=diagnose(long))):
        opened(chromium, path, width)
        chromium.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; });")
        until(
            chromium,
            "return [...document.querySelectorAll('figure[data-chart]')].every((f) => f.querySelector('.plot svg'))",
        )
        assert chromium.execute_script(OUTSIDE) == []
    whole = chromium.execute_script("return [...document.querySelectorAll('svg text title')].map((t) => t.textContent)")
    assert any(LONG in one for one in whole) or width > 390


CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function rgba(colour) { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; }
function linear(v) { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }
function luminance(c) { const [r, g, b] = c.map(linear); return .2126 * r + .7152 * g + .0722 * b; }
function behind(node) { const layers = [];
  for (let n = node; n; n = n.parentElement) {
    const c = rgba(getComputedStyle(n).backgroundColor);
    if (c[3]) layers.push(c);
    if (c[3] === 255) break;
  }
  const over = (base, top) => [0, 1, 2].map((i) => base[i] + (top[i] - base[i]) * top[3] / 255);
  return layers.reverse().reduce(over, [255, 255, 255]); }
const bad = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
document.querySelectorAll("details").forEach((d) => { d.open = true; });
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement, style = getComputedStyle(node);
  if (!texts.currentNode.data.trim() || node.closest("script, style, :disabled, .sr, .skip, noscript, title")) continue;
  const on = [...node.classList].find((one) => one.startsWith("on-")); // drawn on a piece of the timeline
  const piece = on && node.closest(".plot").querySelector(`.call.${on.slice(3)}`), below = behind(node);
  const cover = piece && [...rgba(getComputedStyle(piece).fill).slice(0, 3), Number(getComputedStyle(piece).opacity)];
  const ink = rgba(node.closest("svg") ? style.fill : style.color);
  const paper = cover ? below.map((c, i) => c + (cover[i] - c) * cover[3]) : below;
  const [a, b] = [luminance(ink), luminance(paper)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) bad.push([node.tagName, texts.currentNode.data.trim().slice(0, 40), ratio.toFixed(2)].join(" "));
}
return bad;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["demo", "recording"])
def test_all_text_has_a_contrast_of_at_least_4_5(chromium: Any, pages: dict[str, Path], name: str, dark: bool) -> None:
    opened(chromium, pages[name], dark=dark)
    assert chromium.execute_script(CONTRAST) == []


def test_dark_mode_follows_the_system_and_the_toggle_wins(chromium: Any, pages: dict[str, Path]) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = opened(chromium, pages["demo"]).execute_script(paper)
    dark = opened(chromium, pages["demo"], dark=True).execute_script(paper)
    assert light != dark
    chromium.find_element("css selector", ".theme").click()
    assert chromium.execute_script(paper) == light
    chromium.execute_script("localStorage.clear()")


def test_a_chart_zooms_pans_and_reads_values_by_keyboard(chromium: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(chromium, pages["demo"])
    plot = chromium.find_element("css selector", "#submissions .plot")
    chromium.execute_script("arguments[0].focus()", plot)
    ticks = "return [...document.querySelectorAll(arguments[0] + ' svg text')].map((t) => t.textContent).join()"
    whole = chromium.execute_script(ticks, "#submissions")
    linked = chromium.execute_script(ticks, "#occupancy")
    plot.send_keys("+", "+")
    zoomed = chromium.execute_script(ticks, "#submissions")
    assert zoomed != whole
    assert chromium.execute_script(ticks, "#occupancy") != linked, "charts over time share one axis"
    plot.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT)
    plot.send_keys(Keys.NULL)
    assert chromium.execute_script(ticks, "#submissions") != zoomed
    said = []
    for _ in range(8):  # a step may land between two bursts, where there is nothing to read
        plot.send_keys(Keys.ARROW_RIGHT)
        said.append(chromium.find_element("css selector", "#submissions .readout").text)
    assert len(set(said)) == 8
    assert any("copies " in one and "µs" in one for one in said)
    plot.send_keys("0")
    assert chromium.execute_script(ticks, "#submissions") == whole


def test_a_legend_shows_a_line_as_a_line_and_points_as_points(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["demo"])
    keys = """return [...document.querySelectorAll("#cliff .legend button")].map(
        (one) => [one.textContent, one.querySelector("path").getAttribute("d")])"""
    chromium.execute_script("document.getElementById('cliff').scrollIntoView()")  # it is drawn when it is seen
    until(chromium, "return document.querySelector('#cliff .legend button') !== null")
    said = dict(chromium.execute_script(keys))
    assert said["median"] == "M1 6H29" != said["longest"]


@pytest.mark.parametrize("key", ["END", "HOME"])
def test_the_ends_of_a_distribution_and_of_a_heat_map_are_read_as_they_are(
    chromium: Any, tmp_path: Path, key: str
) -> None:
    from selenium.webdriver.common.keys import Keys

    recording = recordings.recording()
    calls = recording.calls
    calls["end_ns"][0], calls["end_ns"][-1] = calls["start_ns"][0], calls["start_ns"][-1] + 9_000_000_000
    opened(chromium, write_report(recording, tmp_path / "ends.html", findings=examination(recording)))
    said = {}
    for chart in ("histogram", "heat"):
        plot = chromium.find_element("css selector", f"#{chart} .plot")
        chromium.execute_script("arguments[0].focus()", plot)
        plot.send_keys(getattr(Keys, key))
        said[chart] = chromium.find_element("css selector", f"#{chart} .readout").text.replace("\u00a0", " ")
    assert said["histogram"].startswith({"END": "7.52 s or longer ·", "HOME": "0 ns to 1.00 ns ·"}[key])
    assert " 1" in said["histogram"]
    if key == "END":  # the long call began 9 s before the end: nothing was submitted there
        assert said["heat"].endswith("no calls")
    else:
        assert "calls, the longest" in said["heat"]


def test_a_chart_zooms_to_what_the_mouse_drags_over(chromium: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(chromium, pages["demo"])
    plot = chromium.find_element("css selector", "#submissions .plot")
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    reset = chromium.find_element("css selector", "#submissions [aria-label='Show everything']")
    assert not reset.is_enabled()
    ActionChains(chromium).move_to_element(plot).click_and_hold().move_by_offset(120, 0).release().perform()
    assert reset.is_enabled()
    reset.click()
    assert not reset.is_enabled()


def test_tables_sort_by_value_and_say_so(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["recording"])
    heads = "#streams table:first-of-type th.n button"
    chromium.find_elements("css selector", heads)[1].click()
    column = chromium.execute_script(
        """const t = document.querySelector("#streams table"), heads = [...t.querySelectorAll("th")];
        const i = heads.findIndex((h) => h.getAttribute("aria-sort") === "descending");
        return [...t.tBodies[0].rows].map((r) => Number(r.cells[i].dataset.v));"""
    )
    assert len(column) > 1
    assert column == sorted(column, reverse=True)


def test_everything_that_can_be_clicked_can_be_reached_by_tab(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["recording"])
    stray = chromium.execute_script(
        "const all = document.querySelectorAll('button, a, summary, .plot, .scroll');"
        "return [...all].filter((node) => node.tabIndex < 0).length"
    )
    assert stray == 0


def test_printing_opens_the_findings_and_closes_them_again(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["recording"])
    closed = "return document.querySelectorAll('details.finding:not([open])').length"
    before = chromium.execute_script(closed)
    chromium.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert chromium.execute_script(closed) == 0
    chromium.execute_script("dispatchEvent(new Event('afterprint'))")
    assert chromium.execute_script(closed) == before


def test_plotly_draws_the_same_charts_without_a_request(chromium: Any, tmp_path: Path) -> None:
    page = demo_page(tmp_path / "plotly.html", interactive=True)
    assert page.stat().st_size < 6_000_000
    opened(chromium, page)
    open_findings(chromium)
    drawn = [one for one in figures(chromium) if one != "rows"]  # which the page's own script draws
    assert len(chromium.find_elements("css selector", ".js-plotly-plot")) == len(drawn) > 4
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_plotly_shades_when_a_finding_lost_its_time(chromium: Any, tmp_path: Path) -> None:
    one = Finding("one", "One", "warning", "certain", 5_000, window=(500_000_000, 900_000_000))
    recording = recordings.recording()
    page = write_report(recording, tmp_path / "p.html", findings=examination(recording, [one]), interactive=True)
    opened(chromium, page)
    shapes = chromium.execute_script("return document.querySelector('#submissions .plot').layout.shapes")
    (shaded,) = (shape for shape in shapes if shape["type"] == "rect")
    assert (shaded["x0"], shaded["x1"]) == (0.5, 0.9)


def test_a_saturated_public_recording_is_named_on_top(chromium: Any, shared_data: Path, tmp_path: Path) -> None:
    recording = open_recording(shared_data / "nsys-ai" / "h100_2gpu_1s.sqlite")
    page = write_report(recording, tmp_path / "h100.html", findings=diagnose(recording))
    assert page.stat().st_size < 1_000_000
    opened(chromium, page, 375, 812)
    top = chromium.find_element("css selector", ".verdict")
    assert "link is the limit" in top.find_element("tag name", "h1").text
    assert "Move fewer bytes" in top.text
    assert chromium.execute_script("return document.querySelector('.do').getBoundingClientRect().bottom") < 812
    assert chromium.execute_script("return document.documentElement.scrollWidth") == 375


AXIS_LABELS_THAT_MEET = """
return [...document.querySelectorAll(".plot > svg")].filter((drawing) => {
  const [a, b] = [...drawing.querySelectorAll(".axislabel")].map((label) => label.getBoundingClientRect());
  return b && a.width && a.right > b.left && a.bottom - 3 > b.top && b.bottom > a.top;
}).map((drawing) => drawing.textContent);
"""


def test_both_axes_are_named_on_a_phone_and_each_call_has_its_stream(
    chromium: Any, shared_data: Path, tmp_path: Path
) -> None:
    recording = open_recording(shared_data / "nsys-ai" / "h100_2gpu_1s.sqlite")
    page = write_report(recording, tmp_path / "r.html", findings=diagnose(recording))
    opened(chromium, page, 390)
    open_findings(chromium)
    drawn = "return [...document.querySelectorAll('[id^=finding-chart-]')].map((one) => one.textContent).join()"
    chart = chromium.execute_script(drawn)
    assert "time inside the call" in chart and "across: outstanding submissions at entry" in chart
    assert chromium.execute_script(AXIS_LABELS_THAT_MEET) == []
    streams = (
        "return [...document.querySelectorAll('.finding tbody tr td:nth-child(6)')].map((cell) => cell.textContent)"
    )
    assert {one[:7] for one in chromium.execute_script(streams)[:10]} == {"stream "}


def test_inputs_have_sections_of_their_own_whose_charts_zoom_apart(chromium: Any, tmp_path: Path) -> None:
    from kvprobe.recordings.merge import merge
    from kvprobe.reporting.inputs import Input

    both = [recordings.recording(), recordings.recording(rows=9000)]
    inputs = [Input(name, one, diagnose(one)) for name, one in zip(("calm.sqlite", "busy.sqlite"), both, strict=True)]
    whole = merge(both)
    page = write_report(whole, tmp_path / "two.html", findings=diagnose(whole), inputs=inputs)
    opened(chromium, page)
    toc = [link.get_property("textContent") for link in chromium.find_elements("css selector", ".toc a")]
    assert toc.index("Inputs") < toc.index("Over time") < toc.index("calm.sqlite") < toc.index("busy.sqlite")
    ids = figures(chromium)
    assert len(ids) == len(set(ids))
    for prefix in ("input-1", "input-2"):
        own = [one for one in ids if one.startswith(f"{prefix}-")]
        assert {f"{prefix}-rows", f"{prefix}-submissions", f"{prefix}-histogram"} <= set(own)
        for one in own:
            assert len(chromium.find_elements("css selector", f"#{one} .plot path[d], #{one} .plot rect")) > 3
    ticks = "return [...document.querySelectorAll(arguments[0] + ' svg text')].map((t) => t.textContent).join()"
    before = {one: chromium.execute_script(ticks, f"#{one}") for one in ids}
    plot = chromium.find_element("css selector", "#input-1-submissions .plot")
    chromium.execute_script("arguments[0].focus()", plot)
    plot.send_keys("+", "+")
    changed = {one for one in ids if chromium.execute_script(ticks, f"#{one}") != before[one]}
    assert {"input-1-submissions", "input-1-rows"} <= changed
    assert all(one.startswith("input-1-") for one in changed)
    link = chromium.find_element("css selector", "#inputs a[href='#input-2']")
    assert link.text == "busy.sqlite"
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
    link.click()
    assert chromium.execute_script("return location.hash") == "#input-2"
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_folded_section_draws_its_charts_when_it_opens(chromium: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    from kvprobe.recordings.merge import merge
    from kvprobe.reporting.inputs import UNFOLDED, Input

    many = [recordings.recording(rows=700) for _ in range(UNFOLDED + 1)]
    inputs = [Input(f"rank{i}.json", one, diagnose(one)) for i, one in enumerate(many)]
    whole = merge(many)
    page = write_report(whole, tmp_path / "many.html", findings=examination(whole), inputs=inputs)
    opened(chromium, page)
    drawn = "document.querySelectorAll('#input-2 .plot svg').length"
    assert chromium.execute_script(f"return {drawn}") == 0
    summary = chromium.find_element("css selector", "#input-2 summary")
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", summary)
    summary.click()
    charts = len(chromium.find_elements("css selector", "#input-2 figure[data-chart]"))
    until(chromium, f"return {drawn} >= {charts}")
    assert chromium.execute_script(f"return {drawn}") == charts > 2
    field = chromium.find_element("css selector", "#input-2-rows input[type=search]")
    field.send_keys("cudaMemcpyAsync", Keys.ENTER)
    assert chromium.find_element("css selector", "#input-2-rows .pane").text.startswith("cudaMemcpyAsync: ")
