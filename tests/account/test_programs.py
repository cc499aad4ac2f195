"""Programs that were written and labelled without a look at the diagnosis: what each waits for most is said first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvprobe.account import COPIES, HOST
from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings import open_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import FORMATS, unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "accounts"
KEPT = [
    (form, path.name.removesuffix(suffix))
    for form, suffix in FORMATS.items()
    for path in sorted((DATA / form).glob(f"*{suffix}"))
]
LINES = {
    **{line: f"waiting_for_copies.{line.key}" for line in COPIES},
    **{line: f"waiting_for_host.{line.key}" for line in HOST},
}
# What these formats cannot show: addresses, and a thread that sleeps from one that computes.
AS_SHOWN = {
    "waiting_for_copies.not_needed": {"waiting_for_copies.at_link_rate"},
    "waiting_for_host.elsewhere": {"waiting_for_host.python"},
    "waiting_for_host.no_cpu": {"waiting_for_host.python"},
}


@pytest.mark.parametrize("form, program", KEPT)
def test_what_a_program_waits_for_is_found_and_a_healthy_one_is_not_blamed(form, program, tmp_path):
    said = json.loads((DATA / form / f"{program}.truth.json").read_text())
    recording = open_recording(unpack(DATA / form / f"{program}{FORMATS[form]}", tmp_path))
    found = examine(recording)
    verdict = of_recording(recording, found)
    if verdict.state == "found" and found[0].cause == "failed_calls":
        assert program == "copies_that_fail_and_are_passed_over"
        return
    if said["healthy"]:
        assert verdict.state != "found", verdict.reason
        return
    assert verdict.state == "found", verdict.reason
    gpu = found.account.main
    waited = {name: gpu.ns(line) for line, name in LINES.items()}
    wanted = {said["line"], *said["or_lines"]}
    assert max(waited, key=waited.get) in wanted.union(*(AS_SHOWN.get(one, set()) for one in wanted))
