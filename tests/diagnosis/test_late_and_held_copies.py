"""What a GPU that waits for copies is told: loads that came late, loads that were held back, stores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.waiting_for_copies import AHEAD, BEHIND, HELD
from kvprobe.recordings import open_recording
from kvprobe.reporting.headline import of_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "accounts" / "kineto"
SAID = [
    ("kv_of_each_request_loaded_when_it_comes", HELD, "loads", "early enough to overlap with kernels"),
    ("experts_loaded_when_they_are_routed_to", AHEAD, "loads", "too late to run while the GPU computes"),
    ("the_next_step_waits_for_the_store_of_this_one", BEHIND, "stores", "only copies ran for"),
]


@pytest.mark.parametrize("program, change, what, evidence", SAID)
def test_the_change_fits_what_held_the_copies_up(program, change, what, evidence, tmp_path):
    recording = open_recording(unpack(DATA / f"{program}.json.gz", tmp_path))
    (finding,) = [one for one in examine(recording) if one.cause == "waiting_for_copies"]
    assert f" {what} (" in finding.title
    assert finding.cure[0].text.startswith(change.text)
    assert any(evidence in one.text for one in finding.evidence)


def test_loads_that_stand_behind_stores_need_a_stream_and_not_at_once_a_second_buffer(tmp_path):
    name = "loads_that_stand_behind_stores_of_one_stream.sqlite.gz"
    recording = open_recording(unpack(DATA.parents[1] / "fresh" / "nsys" / name, tmp_path))
    (finding,) = [one for one in examine(recording) if one.cause == "waiting_for_copies"]
    assert finding.cure[0].text.startswith("Let loads run while the model computes: submit them on a stream for loads")
    assert "share a stream with 300 stores" in finding.cure[0].text
    assert finding.cure[0].text.endswith("load into a second buffer")


def test_the_verdict_says_what_held_up_most_copies_and_not_the_exception(tmp_path):
    recording = open_recording(unpack(DATA / "copies_between_the_kernels_of_one_stream.json.gz", tmp_path))
    page = of_recording(recording, examine(recording), 0, 0.0, 0.0)
    assert "998 of 1,000 copies were submitted early enough" in page.detail
    assert "1 of 1,000" not in page.detail
