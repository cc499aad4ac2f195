"""Makes the pictures of the documentation: reports of recordings in the repository, as Chromium shows them.

python docs/screenshots.py            # every picture, into docs/images
python docs/screenshots.py NAME...    # some of them

Needs Debian's chromium and chromium-driver, and selenium (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.reporting import write_report

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1080
MARGIN = 10  # around what is cut out


class Picture(NamedTuple):
    """A part of a report's page: the elements of a CSS selector, as far as they reach.

    Attributes:
        recording: a file of the repository.
        part: the selector.
        height: no more pixels than these.
    """

    recording: str
    part: str
    height: int = 10_000


LOADS = "tests/gpu/data/accounts/nsys/kv_of_each_request_loaded_when_it_comes.sqlite.gz"
PINNING = "tests/gpu/data/corpus/nsys/pinned_memory_for_every_step.sqlite.gz"
QUEUE = "tests/gpu/data/accounts/nsys/stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"
PICTURES = {
    "report": Picture(LOADS, "header.top, #verdict, figure.account"),
    "verdict": Picture(PINNING, "#verdict"),
    "account": Picture(LOADS, "figure.account"),
    "finding": Picture(LOADS, "#findings > details:first-of-type"),
    "queue": Picture(QUEUE, "#findings > details:first-of-type figure"),
}


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium in the light colours."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    found, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not found or not driver:
        raise SystemExit("docs/screenshots.py: install Debian's chromium and chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = found
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            f"--user-data-dir={folder}",
        ):
            options.add_argument(flag)
        with webdriver.Chrome(options=options, service=Service(driver)) as window:
            yield window


def taken(window: Any, picture: Picture) -> bytes:
    """A picture as PNG."""
    from selenium.webdriver.support.wait import WebDriverWait

    with tempfile.TemporaryDirectory() as folder:
        recording = open_recording(ROOT / picture.recording)
        page = write_report(recording, Path(folder) / "report.html", findings=diagnose(recording))
        size = {"width": WIDTH, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
        window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        light, still = (
            {"name": f"prefers-{name}", "value": value}
            for name, value in (("color-scheme", "light"), ("reduced-motion", "reduce"))
        )
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [light, still]})
        window.get(page.as_uri())
        WebDriverWait(window, 60).until(lambda one: one.execute_script("return document.documentElement.dataset.drawn"))
        box = window.execute_script(
            "const all = [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect());"
            "return [Math.min(...all.map((b) => b.top)) + scrollY, Math.max(...all.map((b) => b.bottom)) + scrollY,"
            " Math.min(...all.map((b) => b.left)), Math.max(...all.map((b) => b.right))]",
            picture.part,
        )
        top, bottom = max(0, box[0] - MARGIN), box[1] + MARGIN
        left, right = max(0, box[2] - MARGIN), min(WIDTH, box[3] + MARGIN)
        height = min(bottom - top, picture.height)
        clip = {"x": left, "y": top, "width": right - left, "height": height, "scale": 1}
        made = window.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        return base64.b64decode(made["data"])


def main(names: list[str]) -> None:
    """Makes these pictures, or all."""
    unknown = set(names) - set(PICTURES)
    if unknown:
        raise SystemExit(f"docs/screenshots.py: no picture is called {', '.join(sorted(unknown))}")
    IMAGES.mkdir(exist_ok=True)
    with browser() as window:
        for name in names or PICTURES:
            path = IMAGES / f"{name}.png"
            path.write_bytes(taken(window, PICTURES[name]))
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
