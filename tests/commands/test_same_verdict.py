"""The same words of the same bytes: triage, report, check, stats, top, run and the page, over every recording."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.diagnosis import FULL_QUEUE, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.launchqueue.constants import LEAST_BLOCKED, LIVE_LOST_SHARE
from kvprobe.native import build
from kvprobe.probe.live import Live, find_rings
from kvprobe.recordings import open_recording
from kvprobe.recordings.serving import serving_window
from tests import public_recordings
from tests.packed import extract

GPU_DATA = Path(__file__).parents[1] / "gpu" / "data"
RECORDINGS = [
    *sorted(GPU_DATA.glob("*.json.gz")),
    *sorted(GPU_DATA.glob("*.sqlite.gz")),
    *sorted(path for suffix in ("*.json.gz", "*.sqlite") for path in public_recordings.folder().glob(f"*/{suffix}")),
]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_command_says_the_same(kvprobe, tmp_path: Path, path: Path) -> None:
    if path.name.endswith(".sqlite.gz"):
        unzipped = tmp_path / path.stem
        unzipped.write_bytes(gzip.decompress(path.read_bytes()))
        path = unzipped
    (triage,) = json.loads(kvprobe("triage", path, "--json")[1])["recordings"]
    check = json.loads(kvprobe("check", path, "--no", "saturation", "--json")[1])
    stats = json.loads(kvprobe("stats", path, "--json")[1])
    report = json.loads(kvprobe("report", path, "-o", tmp_path / "page.html", "--json")[1])
    (limit,) = check["limits"]
    checked = "found" if limit["broken"] else "undecided" if limit["undecided"] else "healthy"
    named = [one for one in report["findings"] if one["cause"] in FULL_QUEUE and one["confidence"] != "cannot tell"]
    assert checked == triage["verdict"]
    assert bool(named) == (triage["verdict"] == "found")
    assert sum(one["lost_ns"] for one in named) == triage["lost_ns"]
    assert check["verdict"] == stats["verdict"] == report["verdict"]
    page = (tmp_path / "page.html").read_text()
    headline = page[page.index("<h1>") : page.index("</h1>")]
    word = {"undecided": "Undecided", "healthy": "Healthy"}.get(report["verdict"]["state"])
    assert word is None or word in headline
    assert all(0 <= one["share"] <= 1 for one in report["findings"])


RUNS = sorted((GPU_DATA / "corpus" / "run").glob("*.kvprobe.tar.gz"))
# told by all streams together, or by who waits for whom, as a wait or two are: what the sums of one stream do not show
BEYOND_TOP = {"channels_exhausted", "aliased_stream", "context_lock_stall"}


def unpacked(packed: Path, into: Path) -> Path:
    extract(packed, into)
    return into / packed.name.removesuffix(".kvprobe.tar.gz")


@pytest.mark.parametrize("packed", RUNS, ids=lambda path: path.name.split(".")[0])
def test_top_suspects_a_full_queue_where_the_report_names_one(tmp_path: Path, packed: Path) -> None:
    folder = unpacked(packed, tmp_path)
    recording = open_recording(folder)
    window, findings = serving_window(recording), examine(recording)
    live = Live(folder)
    for ring in find_rings(folder):
        live.begin(ring, window.start_ns)
    suspected = any(stream.suspected for view in live.look(window.end_ns) for stream in view.streams)
    shown = [one for one in findings if one.cause in set(FULL_QUEUE) - BEYOND_TOP and not one.abstains]
    calls = sum(place.calls for one in shown for place in one.where)
    lost = sum(one.lost_ns for one in shown) if calls >= LEAST_BLOCKED else 0
    assert suspected == (lost >= LIVE_LOST_SHARE * window.span_ns)
    assert not suspected or of_recording(recording, findings).state == "found"


@pytest.mark.parametrize("program", ["loads_on_one_stream", "copies_that_are_large_enough"])
def test_run_says_of_its_recording_what_the_other_commands_say(kvprobe, tmp_path: Path, program: str) -> None:
    build.build()
    folder, programs = tmp_path / "run", Path(__file__).parents[1] / "corpus" / "programs.py"
    command = [sys.executable, "-m", "kvprobe", "run", "--no-stacks", "-o", folder, "--", sys.executable, programs]
    # a link so slow that the queue fills, however slow the machine is
    environment = {**os.environ, **({"KVHOST_H2D_GBPS": "0.1"} if program == "loads_on_one_stream" else {})}
    words = [str(word) for word in (*command, program)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    end = time.monotonic() + 120
    while not (folder / "end.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert done.returncode == 0
    report = kvprobe("report", folder, "-o", tmp_path / "page.html")[1].splitlines()[:-1]
    check = json.loads(kvprobe("check", folder, "--no", "saturation", "--json")[1])
    verdict, (limit,) = check["verdict"], check["limits"]
    (triage,) = json.loads(kvprobe("triage", folder, "--json")[1])["recordings"]
    said = [line.removeprefix("kvprobe: ") for line in done.stderr.splitlines() if line.startswith("kvprobe: ")]
    assert report and report == said[-1 - len(report) : -1]
    titles = {"undecided": ["Undecided"], "healthy": ["Healthy"]}.get(verdict["state"], ["Critical", "Warning", "Info"])
    reason = verdict["reason"] if verdict["state"] == "found" else ""
    assert any(line.startswith(f"{title}: {reason}") for line in report for title in titles)
    assert triage["verdict"] == ("found" if limit["broken"] else "undecided" if limit["undecided"] else "healthy")
    assert triage["verdict"] != "healthy" or program == "copies_that_are_large_enough"
