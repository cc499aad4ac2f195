"""Findings claim different time, and no change saves more than what can be saved; on recordings of real programs."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import COPIES, HOST, Line
from kvprobe.diagnosis import diagnose
from kvprobe.diagnosis.joined import ms
from kvprobe.recordings import open_recording
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Direction, Engine, Table

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"
STARVED = [
    "accounts/nsys/a_scheduler_in_python_between_steps",
    "accounts/nsys/a_submitting_thread_that_shares_its_cpu",
    "accounts/nsys/torch_tokens_handled_in_python",
    "corpus/nsys/long_preparation_of_each_step",
]
FULL = "accounts/nsys/stores_of_a_prefill_hold_back_the_next_one"


def found(name):
    recording = open_recording([DATA / f"{name}.sqlite.gz"])
    return recording, diagnose(recording)


@pytest.mark.parametrize("name", STARVED)
def test_preparing_ahead_saves_no_more_than_the_gpu_works(name):
    _, findings = found(name)
    one = next(finding for finding in findings if finding.cause == "gpu_starved")
    gpu = findings.account.main
    assert 0 < one.cure[0].predicted_saving_ns <= gpu.ns(Line.COMPUTING, *COPIES)
    assert "the step before" in one.cure[0].text or "the next step" in one.cure[0].text
    assert one.cure[0].predicted_saving_ns < one.lost_ns
    assert any("can overlap with the GPU's work" in evidence.text for evidence in one.evidence)


@pytest.mark.parametrize("name", STARVED)
def test_the_title_and_the_gpu_s_wait_are_one_figure(name):
    one = next(finding for finding in found(name)[1] if finding.cause == "gpu_starved")
    said = re.search(r"idle for (\S+ \S+),", one.title)[1]
    assert said == ms(one.lost_ns)
    assert one.device_ns == pytest.approx(one.lost_ns, rel=0.01)


@pytest.mark.parametrize("name", [*STARVED, FULL])
def test_findings_claim_together_no_more_than_the_gpu_waited(name):
    _, findings = found(name)
    gpu = findings.account.main
    told = [one for one in findings if not one.abstains]
    assert sum(one.device_ns or 0 for one in told) <= gpu.ns(*COPIES, *HOST)
    first = [one.cure[0].predicted_saving_ns or 0 for one in told if one.cure and one.cure[0].kind != "recording"]
    assert sum(first) <= gpu.not_computing_ns


def test_a_full_queue_and_a_full_link_share_what_the_gpu_waited():
    recording, findings = found(FULL)
    gpu = findings.account.main
    by_cause = {one.cause: one for one in findings}
    queue, link = by_cause["launch_queue_saturation"], by_cause["link_bound"]
    table = recording.executions
    stores = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.D2H)
    busy = Cover(table["start_ns"][stores], table["end_ns"][stores]).total_ns
    # however the copies overlap with kernels, the link is busy for longer than they run: that much is the link's own
    assert link.lost_ns == link.device_ns == pytest.approx(busy - gpu.ns(Line.COMPUTING), rel=0.01)
    assert queue.device_ns + link.device_ns <= gpu.ns(*COPIES, *HOST)
    of_queues = [
        one.cure[0].predicted_saving_ns for one in findings if one.cause in ("fence_before_copies", queue.cause)
    ]
    assert sum(of_queues) <= gpu.window_ns - busy


def test_a_full_link_in_both_directions_is_one_wait():
    recording = open_recording([DATA / "accounts/nsys/torch_layers_through_two_tensors.sqlite.gz"])
    alone = next(one for one in diagnose(recording) if one.cause == "link_bound")
    table = recording.executions
    loads = np.flatnonzero((table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D))
    both = {name: np.concatenate((table[name], table[name][loads])) for name in table}
    both["direction"][table.rows :] = Direction.D2H  # at the same times, to the CPU as well
    order = np.argsort(both["start_ns"], kind="stable")
    recording.tables["executions"] = Table("executions", {name: column[order] for name, column in both.items()})
    link = next(one for one in diagnose(recording) if one.cause == "link_bound")
    assert sum("of the serving window and moved" in one.text for one in link.evidence) == 2
    assert link.lost_ns == pytest.approx(alone.lost_ns, rel=0.02)


def test_reading_results_back_is_spoken_of_where_something_is_read_back():
    told = {name: found(name)[1] for name in STARVED}
    for name, findings in told.items():
        one = next(finding for finding in findings if finding.cause == "gpu_starved")
        reads = any("read results back" in change.text for change in one.cure)
        table = open_recording([DATA / f"{name}.sqlite.gz"]).calls
        assert not reads or (table["direction"] == Direction.D2H).any(), name


def test_where_nothing_runs_the_wait_of_the_stream_is_said_to_remain():
    _, findings = found("fresh/nsys/layers_handed_to_a_peer_that_is_late")
    fence = next(one for one in findings if one.cause == "fence_before_copies")
    assert all(one.predicted_saving_ns < 0.1 * fence.device_ns for one in fence.cure[1:])
    assert "Only the first change shortens that wait" in fence.evidence[0].text
