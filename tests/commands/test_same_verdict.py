"""The same words of the same bytes: triage, report, check, stats and the page, over every recording there is."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from kvprobe.diagnosis import FULL_QUEUE

GPU_DATA = Path(__file__).parents[1] / "gpu" / "data"
SHARED = Path(os.environ.get("KVPROBE_SHARED_DATA", "absent"))
RECORDINGS = [
    *sorted(GPU_DATA.glob("*.json.gz")),
    *sorted(GPU_DATA.glob("*.sqlite.gz")),
    *sorted(path for suffix in ("*.json.gz", "*.sqlite") for path in SHARED.glob(f"*/{suffix}")),
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
    word = {"undecided": "Undecided", "healthy": "Nothing found"}.get(report["verdict"]["state"])
    assert word is None or word in headline
    assert all(0 <= one["share"] <= 1 for one in report["findings"])
