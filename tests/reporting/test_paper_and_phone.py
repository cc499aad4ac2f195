"""The page where there is less room: on paper, on a phone, and its tables in a window of 1,400 pixels."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.reporting import write_report

_SPEC = importlib.util.spec_from_file_location("in_chromium", Path(__file__).with_name("test_in_chromium.py"))
pages_of = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pages_of)

DATA = Path(__file__).parents[1] / "gpu" / "data"
RECORDED = {
    "streams": "corpus/kineto/transfers_over_32_streams_behind_a_fence.json.gz",
    "prefix": "accounts/nsys/a_prefix_loaded_into_each_request_s_own_slots.sqlite.gz",
    "experts": "accounts/kineto/experts_loaded_when_they_are_routed_to.json.gz",
    "run": "corpus/run/stores_behind_a_forward.kvprobe.tar.gz",
}
NAMES = ["demo", "made", *RECORDED]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a demo, of made-up processes, and of recordings from a GPU."""
    folder = tmp_path_factory.mktemp("pages")
    made = pages_of.recordings.recording()
    out = {
        "demo": pages_of.demo_page(folder / "demo.html"),
        "made": write_report(made, folder / "made.html", findings=diagnose(made)),
    }
    for name, place in RECORDED.items():
        path = DATA / place
        if path.suffixes[-2:] == [".tar", ".gz"]:
            shutil.unpack_archive(path, folder / name)
            (path,) = (folder / name).iterdir()
        recording = open_recording(path)
        out[name] = write_report(recording, folder / f"{name}.html", findings=diagnose(recording))
    return out


PAPERS = {"a4": (8.27, 11.69), "letter": (8.5, 11)}  # inches


def printed(chromium: Any, paper: str, sheets: str = "") -> bytes:
    """The page as a PDF, which is also what a reader saves; `sheets`: which of them, "" for all."""
    wide, high = PAPERS[paper]
    how = {"paperWidth": wide, "paperHeight": high, "preferCSSPageSize": True, "printBackground": True}
    return base64.b64decode(chromium.execute_cdp_cmd("Page.printToPDF", {**how, "pageRanges": sheets})["data"])


def texts(pdf: bytes) -> int:
    """Pieces of text that a PDF draws."""
    drawn = 0
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        with contextlib.suppress(zlib.error):
            drawn += len(re.findall(rb"\bT[jJ]\b", zlib.decompress(stream)))
    return drawn


@pytest.mark.parametrize(("width", "paper"), [(1400, "a4"), (1400, "letter"), (390, "a4")])
@pytest.mark.parametrize("name", NAMES)
def test_a_report_fills_no_more_than_four_sheets_and_none_is_almost_empty(
    chromium: Any, pages: dict[str, Path], name: str, width: int, paper: str
) -> None:
    pages_of.opened(chromium, pages[name], width)
    sheets = len(re.findall(rb"/Type\s*/Page\b", printed(chromium, paper)))
    assert 1 <= sheets <= 4
    assert min(texts(printed(chromium, paper, str(sheet))) for sheet in range(1, sheets + 1)) > 12


SHOWN = "return [...document.querySelectorAll(arguments[0])].filter((one) => one.checkVisibility()).length"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_paper_has_verdict_account_findings_and_one_timeline(chromium: Any, pages: dict[str, Path], dark: bool) -> None:
    pages_of.opened(chromium, pages["streams"], 1400, dark=dark)
    findings = chromium.execute_script(SHOWN, ".finding")
    chromium.execute_script("document.documentElement.dataset.theme = arguments[0]", "dark" if dark else "light")
    chromium.execute_script("dispatchEvent(new Event('beforeprint'))")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        for needed in (".verdict h1", ".verdict .cures", ".account > svg", "#rows .plot > svg"):
            assert chromium.execute_script(SHOWN, needed) > 0, needed
        assert chromium.execute_script(SHOWN, ".finding .evidence") == findings > 1
        assert chromium.execute_script(SHOWN, ".finding .cures") > 1
        assert chromium.execute_script(SHOWN, "figure[data-chart]") == 1
        assert chromium.execute_script(SHOWN, "table") == 0
        drawn = "return document.querySelector('#rows .plot > svg').viewBox.baseVal.width"
        assert chromium.execute_script(drawn) == 680
        paper = "return getComputedStyle(document.querySelector('.finding')).backgroundColor"
        assert chromium.execute_script(paper) == "rgb(255, 255, 255)", "a dark page is printed on white paper"
        assert chromium.execute_script(pages_of.CONTRAST) == []
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        chromium.execute_script("dispatchEvent(new Event('afterprint'))")
    assert chromium.execute_script(drawn) > 680, "and then drawn as wide as before"


def test_findings_are_printed_without_a_script_as_well(chromium: Any, pages: dict[str, Path]) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(pages["streams"].as_uri())
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        evidence = ".finding .evidence"
        assert chromium.execute_script(SHOWN, evidence) == len(chromium.find_elements("css selector", evidence)) > 1
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_s_page_is_shorter_than_10_000_pixels(chromium: Any, pages: dict[str, Path], name: str) -> None:
    pages_of.opened(chromium, pages[name], 390, 844)
    assert chromium.execute_script("return document.documentElement.scrollHeight") < 10_000
    assert chromium.execute_script("return document.documentElement.scrollWidth") == 390


def test_a_folded_section_opens_by_its_heading_and_by_a_link(chromium: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    pages_of.opened(chromium, pages["streams"], 390, 844)
    heading = chromium.find_element("css selector", "#distributions summary")
    assert chromium.execute_script(SHOWN, "#histogram") == 0
    heading.send_keys(Keys.ENTER)
    pages_of.until(chromium, "return document.querySelector('#histogram .plot svg') !== null")
    assert chromium.execute_script(SHOWN, "#streams table") == 0
    chromium.execute_script("location.hash = 'streams'")
    pages_of.until(chromium, "return document.querySelector('#streams table').checkVisibility()")


CUT = """
document.querySelectorAll("details").forEach((d) => { d.open = true; });
const cut = [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth);
for (const cell of document.querySelectorAll("th, td"))
  if (cell.scrollWidth > cell.clientWidth + 1) cut.push(cell.closest(".scroll"));
return cut.map((one) => `${one.getAttribute("aria-label")}: ${one.scrollWidth} in ${one.clientWidth}`);
"""


@pytest.mark.parametrize("name", NAMES)
def test_no_table_is_cut_at_1_400_pixels(chromium: Any, pages: dict[str, Path], name: str) -> None:
    pages_of.opened(chromium, pages[name], 1400)
    assert chromium.execute_script(CUT) == []
    assert chromium.execute_script("return document.documentElement.scrollWidth") == 1400


@pytest.mark.parametrize("name", NAMES)
def test_the_first_screen_has_verdict_account_first_finding_and_first_change(
    chromium: Any, pages: dict[str, Path], name: str
) -> None:
    pages_of.opened(chromium, pages[name], 1400, 900)
    bottom = "const one = document.querySelector(arguments[0]); return one && one.getBoundingClientRect().bottom"
    found = {what: chromium.execute_script(bottom, what) for what in FIRST}
    found = {what: at for what, at in found.items() if at is not None}
    assert {".verdict h1", ".verdict .facts", ".verdict .account > svg"} <= set(found)
    assert ".verdict .cures > li" in found or name == "made"
    assert max(found.values()) < 900, found
    assert found.get(".verdict .cures > li", 0) < 650, "what to change comes before where the time went"


FIRST = (
    ".verdict h1",
    ".verdict .facts",
    ".verdict .account > svg",
    ".verdict .account .legend",
    ".verdict .cures > li",
    ".verdict .detail",
)
