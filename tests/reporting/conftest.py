"""A headless Chromium for tests of the page, and recordings to show in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A driver that logs the console and every request."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("Debian packages chromium and chromium-driver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as window:
        yield window


def recording(
    names: tuple[str, ...] = ("cudaMemcpyAsync", "cudaLaunchKernel", "step", "why"), rows: int = 6000
) -> Recording:
    """Two processes that submit copies and launches; every text in it is one of `names`."""
    rng = np.random.default_rng(3)
    start = np.sort(rng.integers(0, 2_000_000_000, rows))
    spent = rng.lognormal(np.log(2000), 0.4, rows).astype(np.int64)
    kind = np.where(rng.random(rows) < 0.4, CallKind.COPY, CallKind.LAUNCH).astype(np.uint8)
    text = ["", *names]
    second = np.arange(rows) % 2
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": start + spent,
                "process": second,
                "thread": 100 + second,
                "name": np.where(kind == CallKind.COPY, 1, 2),
                "kind": kind,
                "stream": second,
                "count": np.ones(rows),
                "bytes": np.where(kind == CallKind.COPY, 65536, 0),
                "direction": np.full(rows, Direction.H2D),
                "correlation": np.arange(rows) + 1,
            },
        ),
        "executions": Table(
            "executions",
            {
                "start_ns": start + spent + 500,
                "end_ns": start + spent + 9000,
                "process": second,
                "device": second,
                "stream": second,
                "engine": np.where(kind == CallKind.COPY, Engine.COPY, Engine.KERNEL),
                "bytes": np.where(kind == CallKind.COPY, 65536, 0),
                "direction": np.full(rows, Direction.H2D),
                "correlation": np.arange(rows) + 1,
                "name": np.full(rows, 3),
            },
        ),
        "ranges": Table(
            "ranges",
            {
                "start_ns": [0, 1_000],
                "end_ns": [900, 2_000],
                "process": [0, 0],
                "thread": [100, 100],
                "domain": [4, 0],
                "name": [3, 3],
            },
        ),
        "stacks": Table(
            "stacks",
            {"time_ns": [5_000], "process": [0], "thread": [100], "blocked_ns": [30_000_000], "gil": [1], "stack": [4]},
        ),
        "decisions": Table(
            "decisions", {"time_ns": [1_000_000_000], "process": [0], "what": [3], "reason": [4], "gain": [5.0]}
        ),
        "samples": Table(
            "samples",
            {
                "time_ns": start[:50],
                "process": np.zeros(50),
                "device": np.zeros(50),
                "metric": np.full(50, 3),
                "value": rng.random(50),
            },
        ),
        "transfers": Table(
            "transfers",
            {
                "start_ns": [0, 5_000],
                "end_ns": [4_000, 9_000],
                "process": [0, 0],
                "direction": [1, 2],
                "bytes": [1, 1],
                "build_ns": [100, 100],
                "submit_ns": [900, 100],
                "wait_ns": [500, 700],
                "copy_ns": [300, 200],
                "poll_ns": [50, 60],
            },
        ),
        "streams": Table("streams", {"process": [0, 1], "device": [0, 1], "handle": [7, 13], "name": [3, 0]}),
        "processes": Table(
            "processes",
            {"pid": [100, 101], "rank": [0, 1], "node": [3, 3], "name": [3, 3], "command": [4, 4], "state": [3, 3]},
        ),
        "threads": Table("threads", {"process": [0, 1], "thread": [100, 101], "name": [3, 4]}),
    }
    source = [Source(names[3] + ".sqlite", names[2], names[2], names[3], 1234, "")]
    machine, how = {names[2]: names[3], "queue_depth": 1021}, {names[2]: names[3]}
    return Recording(source, tables, text, machine=machine, machine_how=how, has_executions=True, notes=[names[3]])


@pytest.fixture
def small_recording() -> Recording:
    return recording()
