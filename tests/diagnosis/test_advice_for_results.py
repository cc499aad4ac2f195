"""Advice for a result that the host reads back: an event for another stream does not bring its bytes."""

import sys
from pathlib import Path

from kvprobe.diagnosis import TracedCall, examine
from kvprobe.recordings import open_recording
from kvprobe.reporting.headline import call_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[2] / "tests" / "gpu" / "data" / "accounts" / "kineto"


def test_a_result_that_is_read_back_is_not_ordered_by_an_event(tmp_path) -> None:
    found = examine(open_recording(unpack(DATA / "experts_loaded_when_they_are_routed_to.json.gz", tmp_path)))
    waits = next(one for one in found if one.cause == "synchronisation")
    assert "results that it reads back" in waits.title
    assert not any("cudaStreamWaitEvent" in change.text for change in waits.cure)


def test_only_a_call_that_copies_has_a_copy() -> None:
    call = TracedCall(0, "cudaLaunchHostFunc", 1, 1, "stream 7", 0, 4_000, 2_560_000)
    assert "copy" not in call_text(call, "", "stream 7")
    assert "its copy cost" in call_text(call, "CPU to GPU (H2D)", "stream 7")
