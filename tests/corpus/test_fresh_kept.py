"""Programs written without knowledge of the diagnosis, recorded on an H100, that it judged wrong at the first try."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.account import COPIES, Line
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import Verdict, of_recording
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind, Recording

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grade import FORMATS, unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "fresh"


def opened(form: str, program: str, into: Path) -> Recording:
    return open_recording(unpack(DATA / form / f"{program}{FORMATS[form]}", into))


def judged(recording: Recording) -> tuple[Examination, Verdict]:
    found = examine(recording)
    return found, of_recording(recording, found)


@pytest.mark.parametrize("form", ["kineto", "nsys"])
def test_small_copies_behind_a_burst_cost_what_the_gpu_waited_for_them_and_no_more(form, tmp_path):
    found, verdict = judged(opened(form, "prefixes_restored_while_others_decode", tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert finding.cause == "head_of_line_copies" and verdict.state == "found"
    (gpu,) = found.account.gpus
    assert 0.95 * gpu.ns(*COPIES) < finding.device_ns <= gpu.ns(*COPIES)  # nobody else has what it explains
    assert sum(one.predicted_saving_ns or 0 for one in found) <= gpu.not_computing_ns


@pytest.mark.parametrize("form", ["kineto", "nsys"])
def test_nobody_waits_for_what_is_loaded_before_the_first_kernel(form, tmp_path):
    found, verdict = judged(opened(form, "weights_loaded_once_and_nothing_served", tmp_path))
    assert verdict.state == "undecided" and "no kernel before them" in verdict.reason
    assert not [one for one in found if one.severity != "info"]
    assert found.account.gpus[0].share(*COPIES) > 0.9  # the account says what ran all the same


def test_a_queue_that_fills_while_its_stream_stands_still_is_told_by_when_its_call_returns(tmp_path):
    """Three calls of 37 to 40 ms at 1,021 outstanding return as their stream moves on; nothing shows the fence."""
    recording = opened("nsys", "layers_handed_to_a_peer_that_is_late", tmp_path)
    found, verdict = judged(recording)
    assert verdict.state == "found" and found[0].cause == "fence_before_copies"
    (gpu,) = found.account.gpus
    assert gpu.share(Line.FULL_QUEUE) == pytest.approx(0.68, abs=0.02)  # the program's own account says 0.6832
    assert found[0].device_ns <= gpu.ns(Line.FULL_QUEUE, *COPIES)


def test_a_call_that_returns_while_its_stream_still_stands_waited_for_something_else(tmp_path):
    """The same recording, with the three calls returning half-way: no slot became free then."""
    recording = opened("nsys", "layers_handed_to_a_peer_that_is_late", tmp_path)
    calls = recording.calls
    took = calls["end_ns"] - calls["start_ns"]
    long = (calls["kind"] == CallKind.COPY) & (took > 10_000_000)
    assert long.sum() == 3
    calls["end_ns"][long] -= took[long] // 2
    found, verdict = judged(recording)
    assert verdict.state == "undecided"
    assert "fence_before_copies" not in {one.cause for one in found if not one.abstains}


def test_loads_that_a_stream_holds_back_until_each_kernel_is_over_are_told_without_addresses(tmp_path):
    """Submitted a layer ahead, on a stream that waits for the default one: each load runs between two kernels."""
    found, _ = judged(opened("kineto", "a_prefetch_that_the_default_stream_serialises", tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert finding.cause == "weights_not_overlapped"
    assert finding.lost_ns == pytest.approx(78e6, rel=0.02)
