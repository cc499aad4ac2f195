"""Programs by authors without knowledge of the diagnosis, recorded on an H100 or H200, that it first judged wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import COPIES, Line
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.startup import startup
from kvprobe.diagnosis.verdict import Verdict, of_recording
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind, Recording, Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grade import FORMATS, link_fell, unpack

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
def test_what_waits_behind_a_callback_in_its_stream_is_known_and_names_the_call(form, tmp_path):
    """A callback of 0.1 ms between each two layers of 0.25 ms; no recorder says into which stream they went."""
    found, verdict = judged(opened(form, "a_callback_after_each_layer", tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert verdict.state == "found" and finding.cause == "waiting_for_host"
    (gpu,) = found.account.gpus
    assert gpu.share(Line.ELSEWHERE) == pytest.approx(0.485, abs=0.01)  # the program's own account says 0.4879 waiting
    assert any("cudaLaunchHostFunc put them into the stream: 799 calls" in one.text for one in finding.evidence)
    assert finding.cure[0].predicted_saving_ns <= gpu.ns(Line.ELSEWHERE)


@pytest.mark.parametrize("form", ["kineto", "nsys"])
def test_nobody_waits_for_what_is_loaded_before_the_first_kernel(form, tmp_path):
    found, verdict = judged(opened(form, "weights_loaded_once_and_nothing_served", tmp_path))
    assert verdict.state == "undecided" and "no kernel ran before these copies" in verdict.reason
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
    """The same recording, with the three calls returning half-way: no slot became free then.

    What the stream stood behind is a function of the host, and where even that is not shown, nothing is known.
    """
    recording = opened("nsys", "layers_handed_to_a_peer_that_is_late", tmp_path)
    calls = recording.calls
    took = calls["end_ns"] - calls["start_ns"]
    long = (calls["kind"] == CallKind.COPY) & (took > 10_000_000)
    assert long.sum() == 3
    calls["end_ns"][long] -= took[long] // 2
    found, verdict = judged(recording)
    assert verdict.state == "found" and "behind a host function" in verdict.reason
    assert "fence_before_copies" not in {one.cause for one in found if not one.abstains}
    recording.names = [name.replace("LaunchHostFunc", "ThreadExchangeStreamCaptureMode") for name in recording.names]
    found, verdict = judged(recording)
    assert verdict.state == "undecided"
    assert "fence_before_copies" not in {one.cause for one in found if not one.abstains}


def test_loads_that_a_stream_holds_back_until_each_kernel_is_over_are_told_without_addresses(tmp_path):
    """Submitted a layer ahead, on a stream that waits for the default one: each load runs between two kernels."""
    found, _ = judged(opened("kineto", "a_prefetch_that_the_default_stream_serialises", tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert finding.cause == "weights_not_overlapped"
    assert finding.lost_ns == pytest.approx(78e6, rel=0.02)


@pytest.mark.parametrize("form", ["kineto", "nsys"])
def test_pauses_between_requests_are_an_open_question_in_recordings_of_cuda_calls_alone(form, tmp_path):
    """A client thinks for 40 ms after each answer of ten steps; the server waits in `recv`, which nobody recorded."""
    found, verdict = judged(opened(form, "requests_over_a_socket_with_pauses", tmp_path))
    assert verdict.state == "undecided" and "waited for a request or prepared one" in verdict.reason
    assert not [one for one in found if one.severity != "info"]
    assert found.account.gpus[0].open_ns == pytest.approx(607e6, rel=0.01)  # 15 pauses


def test_a_recorder_that_says_where_threads_sleep_decides_them(tmp_path):
    """The same recording, with the function that its program waits in."""
    recording = opened("nsys", "requests_over_a_socket_with_pauses", tmp_path)
    calls = recording.calls
    order = np.argsort(calls["start_ns"])
    end, start = calls["end_ns"][order][:-1], calls["start_ns"][order][1:]
    pauses = start - end > 30_000_000
    zero = np.zeros(int(pauses.sum()), int)
    recording.names.append("recv")
    times = {"start_ns": end[pauses] + 20_000, "end_ns": start[pauses] - 20_000}
    whose = {"process": zero + calls["process"][0], "thread": zero + calls["thread"][0]}
    recording.tables["os_calls"] = Table("os_calls", times | whose | {"name": zero + len(recording.names) - 1})
    found, verdict = judged(recording)
    assert verdict.state == "healthy" and "had nothing to do for 76%" in verdict.reason
    assert found.account.gpus[0].open_ns == 0


def test_what_a_model_loads_once_out_of_pageable_memory_is_start_up_with_its_rate(tmp_path):
    """16 layers in 20 ms, before any kernel; then a second of serving without a gap."""
    recording = opened("kineto", "weights_from_pageable_memory_once_then_served", tmp_path)
    found, verdict = judged(recording)
    assert verdict.state == "healthy" and not [one for one in found if one.severity != "info"]
    (part,) = [one for one in startup(recording, found.serving).parts if one.what == "loading from pageable memory"]
    assert part.calls == 16 and part.bytes_per_s == pytest.approx(5.04e9, rel=0.01)


def test_chunks_that_are_not_there_yet_are_no_weights_that_nobody_prefetched(tmp_path):
    """Each is read from a file into one buffer, after a wait for the kernel before."""
    found, _ = judged(opened("nsys", "a_prefix_read_from_a_file_before_each_prefill", tmp_path))
    assert {one.cause for one in found if one.severity != "info"} == {"gpu_starved"}


def test_a_link_that_became_slow_and_recovered_is_told_from_a_slow_one(tmp_path):
    """From one copy to the next it gave 23.5 of 54.5 GB/s, both ways, and came back over 100 ms."""
    recording = opened("nsys", "loads_that_stand_behind_stores_of_one_stream", tmp_path)
    (finding,) = [one for one in judged(recording)[0] if one.cause == "link_degraded"]
    others = [one for one in finding.evidence if "came and went" in one.text]
    assert len(others) == 2 and all(one.value == pytest.approx(54.3e9, rel=0.01) for one in others)
    assert link_fell(recording)
    recording.executions["end_ns"][:] = recording.executions["start_ns"] + 100_000  # as long as one another
    assert not link_fell(recording)


def test_slow_calls_of_no_known_cause_that_hardly_held_the_gpu_up_leave_nothing_undecided(tmp_path):
    """286 calls took 21 ms longer than usual; inside them the GPU waited for 7.4 ms of 1.5 s."""
    found, verdict = judged(opened("kineto", "blocks_compacted_on_a_side_stream_beside_decode", tmp_path))
    (question,) = [one for one in found if one.cause == "unexplained"]
    assert question.lost_ns > 20_000_000 and question.at_stake == "info" and question.cost_share < 0.01
    assert verdict.state == "healthy" and found.account.gpus[0].share(Line.COMPUTING) > 0.97


@pytest.mark.parametrize("form", ["run", "kineto", "nsys"])
def test_what_runs_no_kernel_waits_for_its_host_between_copies(form, tmp_path):
    """3,000 copies of 64 KiB with a wait after each: nothing runs for three quarters of the time."""
    found, verdict = judged(opened(form, "one_small_copy_then_a_wait_three_thousand_times", tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert verdict.state == "found" and finding.cause == "waiting_for_host"
    (gpu,) = found.account.gpus
    assert not gpu.runs_kernels and gpu.share(Line.SUBMITTING, Line.PYTHON, Line.WAITING_FOR_DEVICE) > 0.6
    assert finding.cure[0].text.startswith("Do not let the host wait between two steps")
    assert finding.cure[0].predicted_saving_ns is None  # nothing shows who waits for these copies


def test_how_much_marks_slow_a_thread_that_only_launches_is_told_by_its_launches(tmp_path):
    """Two threads launch by turns: marks were paused for 86% of the time, and next to no other call was made then."""
    name = "two_threads_that_give_each_other_the_turn_after_each_small_kernel"
    found, verdict = judged(opened("run", name, tmp_path))
    (gpu,) = found.account.gpus
    assert gpu.samples.ns > 0.8 * gpu.window_ns and gpu.samples.error_ns < 0.02 * gpu.window_ns
    assert verdict.state == "found" and gpu.share(Line.PYTHON) > 0.65
    assert gpu.share(Line.COMPUTING) == pytest.approx(0.17, abs=0.02)  # as Nsight Systems saw of another run


def test_what_the_window_ends_with_stands_for_no_pause(tmp_path):
    """An eager model's steps, 27 looks of 3 ms at them, and behind them 0.4 s in which the program ends."""
    name = "torch_a_deep_network_of_small_layers_whose_adamw_goes_over_its_parameters_one_by_one"
    found, verdict = judged(opened("run", name, tmp_path))
    (finding,) = [one for one in found if one.severity != "info"]
    assert verdict.state == "found" and finding.cause == "python_or_gil_bound"
    assert len(finding.where) == 2  # autograd launches from a thread of its own
    (gpu,) = found.account.gpus
    assert finding.device_ns > 0.95 * gpu.ns(Line.PYTHON)
    assert gpu.share(Line.PYTHON) > 0.5 and gpu.share(Line.NOTHING_TO_DO) < 0.19  # before its end, the program works
    assert gpu.samples.error_ns < 0.03 * gpu.window_ns


def test_copies_of_a_graph_are_as_small_as_they_are_many(tmp_path):
    """A graph of 400 copies of 4 KiB: its bytes are no large copy, which would tell what the link carries."""
    recording = opened("run", "torch_fields_of_a_batch_that_a_cuda_graph_copies_one_by_one_before_its_step", tmp_path)
    found, _ = judged(recording)
    (gpu,) = found.account.gpus
    assert gpu.share(Line.BELOW_LINK_RATE) > 0.6 and gpu.ns(Line.AT_LINK_RATE) == 0
    first = next(one for one in found if one.severity != "info")
    assert first.cause == "waiting_for_copies" and first.cure[0].text.startswith("Join these small copies")
    assert any("copies of 4 KiB" in one.text for one in first.evidence)
