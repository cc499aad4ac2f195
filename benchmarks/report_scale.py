"""A recording of the size in a real bug report (1.2 million copies, 3.8 million launches), from file to open page.

Generates an Nsight Systems export (SQLite, the schema's own columns): decode steps that launch kernels on one stream
while KV blocks are copied on another whose launch queue fills; then measures `kvprobe report` (wall time, peak memory,
bytes of the page) and the page in headless Chromium (until its first view and all charts are drawn, and a zoom).

    python benchmarks/report_scale.py [--keep FILE] [--scale 1.0]

Prints one line a figure with its bound; exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BOUNDS = {
    "report_s": 10.0,
    "peak_bytes": 1.5e9,
    "page_bytes": 6e6,
    "ready_ms": 1000.0,
    "drawn_ms": 2000.0,
    "zoom_ms": 200.0,
}
ROUNDS = 5
PID = 4242
GLOBAL = PID << 24
DEPTH = 1021


def queue(
    start: np.ndarray, service: np.ndarray, call_ns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Calls into a queue of DEPTH places served in order: call start, call end, execution start, execution end."""
    n = len(start)
    entry, leave, begin, end = (np.zeros(n, dtype=np.int64) for _ in range(4))
    starts, times = start.tolist(), service.tolist()
    ends = [0] * n
    at = free = 0
    for i in range(n):
        into = max(starts[i], at)
        out = into + call_ns
        if i >= DEPTH and ends[i - DEPTH] > into:  # full: the call returns when the oldest has left
            out = max(out, ends[i - DEPTH] + 3000)
        begins = max(out, free)
        free = ends[i] = begins + times[i]
        entry[i], leave[i], begin[i], end[i] = into, out, begins, free
        at = out + 150
    return entry, leave, begin, end


def generate(path: Path, scale: float = 1.0) -> dict[str, int]:
    """Writes the export; returns how many rows of each kind it has."""
    rng = np.random.default_rng(1)
    copies, launches = int(1_200_000 * scale), int(3_800_000 * scale)
    span = int(120e9 * scale)
    bursts = max(1, copies // 4000)
    # Copies come in bursts of 4,000 from a thread of their own, launches in steps of 900 from the model's thread.
    when = np.sort(rng.uniform(0, span, bursts)).astype(np.int64)
    copy_start = np.repeat(when, -(-copies // bursts))[:copies]
    service = rng.normal(7100, 400, copies).clip(1000).astype(np.int64)
    copy = queue(copy_start, service, 1700)
    steps = max(1, launches // 900)
    launch_start = np.repeat(np.linspace(0, span, steps).astype(np.int64), -(-launches // steps))[:launches]
    kernel = queue(launch_start, rng.gamma(2.0, 9000, launches).astype(np.int64) + 1500, 3900)

    connection = sqlite3.connect(path)
    connection.executescript(
        """PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;
        CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
          eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
          returnValue INTEGER NOT NULL, callchainId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
          deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
          correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
          deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER,
          dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER,
          virtualAddress INTEGER, copyCount INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
          deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
          correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
          graphNodeId INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT,
          globalTid INTEGER, domainId INTEGER, textId INTEGER);"""
    )
    names = ["cudaMemcpyAsync_v3020", "cudaLaunchKernel_v7000", *(f"kernel_{i}" for i in range(40)), "swap_blocks"]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
    connection.executemany(
        "INSERT INTO META_DATA_EXPORT VALUES (?, ?)",
        [("EXPORT_SCHEMA_VERSION", "3.24.0"), ("EXPORT_PRODUCT_VERSION", "2025.5.2.0")],
    )

    def calls(where: tuple[np.ndarray, ...], thread: int, name: int, first: int) -> None:
        entry, leave = where[0].tolist(), where[1].tolist()
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
            ((a, b, GLOBAL | thread, first + i, name) for i, (a, b) in enumerate(zip(entry, leave, strict=True))),
        )

    calls(copy, 4250, 0, 1)
    calls(kernel, PID, 1, copies + 1)
    h2d = rng.random(copies) < 0.65  # 0.78 million of 1.2
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES"
        " (?, ?, 0, 1, NULL, 13, ?, ?, 262144, ?, NULL, ?, ?, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1)",
        (
            (a, b, i + 1, GLOBAL, 1 if up else 2, 1 if up else 2, 2 if up else 1)
            for i, (a, b, up) in enumerate(zip(copy[2].tolist(), copy[3].tolist(), h2d.tolist(), strict=True))
        ),
    )
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, NULL, 7, ?, ?, ?, ?, NULL)",
        (
            (a, b, copies + 1 + i, GLOBAL, 2 + i % 40, 2 + i % 40)
            for i, (a, b) in enumerate(zip(kernel[2].tolist(), kernel[3].tolist(), strict=True))
        ),
    )
    connection.executemany(
        "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, 0, ?)",
        (
            (int(copy[0][i]), int(copy[1][min(i + 3999, copies - 1)]), GLOBAL | 4250, len(names) - 1)
            for i in range(0, copies, 4000)
        ),
    )
    connection.commit()
    connection.close()
    return {"copies": copies, "launches": launches, "h2d": int(h2d.sum())}


def measure_report(recording: Path, page: Path) -> dict[str, float]:
    """Wall time and peak resident memory of the command itself, in a process of its own on two cores."""
    command = [sys.executable, "-m", "kvprobe", "report", str(recording), "-o", str(page), "-f", "-q"]
    cores = sorted(os.sched_getaffinity(0))[:2]
    began = time.perf_counter()
    subprocess.run(command, check=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    spent = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"report_s": spent, "peak_bytes": float(peak), "page_bytes": float(page.stat().st_size)}


def measure_page(page: Path) -> dict[str, float]:
    """Milliseconds until the first view is drawn, until every chart is, and until a zoom is; empty without Chromium.

    Each is the least of ROUNDS: what else the machine does is none of the page's.
    """
    import shutil

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        return {}
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        with webdriver.Chrome(options=options, service=Service(driver)) as window:
            rounds = [_opened(window, page) for _ in range(ROUNDS)]
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


def _opened(window: Any, page: Path) -> dict[str, float]:
    """One round, in a new document."""
    window.get("about:blank")
    began = time.perf_counter()
    window.get(page.resolve().as_uri())
    ready = window.execute_script("return document.documentElement.dataset.ready")
    opened = (time.perf_counter() - began) * 1e3
    times = window.execute_async_script(
        """const done = arguments[0], root = document.documentElement;
        const plot = document.querySelector("#submissions .plot");
        const zoom = () => {
          const t0 = performance.now(), said = () => done([Number(root.dataset.drawn), performance.now() - t0]);
          plot.focus();
          plot.dispatchEvent(new KeyboardEvent("keydown", {key: "+", bubbles: true, cancelable: true}));
          requestAnimationFrame(() => requestAnimationFrame(said));
        };
        const wait = () => root.dataset.drawn ? zoom() : setTimeout(wait, 5);
        wait();"""
    )
    return {"ready_ms": opened if ready else float("inf"), "drawn_ms": times[0], "zoom_ms": times[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="keep the recording here, and use it where it is already")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = options.keep or Path(folder, "scale.sqlite")
        if not recording.exists():
            rows = generate(recording, options.scale)
            print(f"generated {rows}, {recording.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
        page = Path(folder, "scale.html")
        figures = measure_report(recording, page)
        figures |= measure_page(page)
    missed = [name for name, value in figures.items() if value > BOUNDS[name]]
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:12} {value:15,.1f}   bound {BOUNDS[name]:15,.1f}   {'MISSED' if name in missed else 'ok'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
