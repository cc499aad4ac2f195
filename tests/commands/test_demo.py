"""What `kvprobe demo` prints at its end: the first change, in the words of `kvprobe report`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_first_finding_and_its_first_change_are_printed_and_what_auto_keeps_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvprobe", "demo", "--device", "host", "--seconds", "1", "--report", "demo.html"]
    environment = {**os.environ, "KVHOST_CLOCK": "virtual", "COLUMNS": "60"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    *_, finding, change, saving, report = done.stdout.splitlines()
    assert finding.startswith("first finding, mainly of the time before the switch: The launch queue was full: ")
    assert change.startswith("  first change    ") and len(change) > 60, "one line, as in a report"
    assert saving.startswith("                  predicted to ")
    assert report == "report: demo.html"
    page = (tmp_path / "demo.html").read_text()
    assert finding.partition(": ")[2].split(":")[0] in page
    assert "auto: keep pooled/auto (before: shared/loop): over 8 transfers, a submission was " in done.stderr
