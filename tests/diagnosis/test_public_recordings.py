"""Recordings of public projects, each with what is known to be true of it (`tests/recordings/public/README.md`)."""

import pytest

from kvprobe.account import Line, account_of
from kvprobe.diagnosis import diagnose
from kvprobe.diagnosis.startup import startup
from kvprobe.durations import time_text
from kvprobe.recordings import open_recording
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.serving import serving_window


@pytest.fixture(scope="module")
def found(shared_data):
    known = {}

    def of(path):
        if path not in known:
            known[path] = {finding.cause: finding for finding in diagnose(open_recording(shared_data / path))}
        return known[path]

    return of


def named(findings):
    return {cause for cause, finding in findings.items() if not finding.abstains}


QUEUE = {"launch_queue_saturation", "fence_before_copies", "channels_exhausted", "aliased_stream"}
V100 = "hta/ns_resolution_rank0_v100.pt.trace.json.gz"
GRAPHS = "hta/trace_diff_test_v100.json.gz"
H100 = "nsys-ai/h100_2gpu_1s.sqlite"
OWL = "tracelens/h100_owlv2.json.gz"
RESNET = "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz"


def test_v100_is_saturated_at_1022_and_lost_233_ms(found):
    finding = found(V100)["launch_queue_saturation"]
    assert finding.confidence == "certain" and finding.severity == "info"  # the GPU computed all the time
    assert finding.device_ns < 3e6 and finding.predicted_saving_ns < 1e6
    assert finding.lost_ns == pytest.approx(233e6, rel=0.1)
    assert any("1,022 submissions" in evidence.text for evidence in finding.evidence)
    assert len({place.thread for place in finding.where}) == 2


def test_h100_lost_what_cupti_labels_in_each_process(found):
    finding = found(H100)["launch_queue_saturation"]
    assert finding.confidence == "certain" and finding.severity == "info"  # copies ran 97% of the time all the same
    assert finding.predicted_saving_ns < 1e6
    for process, labelled in ((0, 455.9e6), (1, 456.1e6)):
        lost = sum(place.lost_ns for place in finding.where if place.process == process)
        assert lost == pytest.approx(labelled, rel=0.1)
    assert any("1,135 to 1,141" in evidence.text for evidence in finding.evidence)


def test_a_wait_for_the_link_has_one_length_and_what_crosses_no_link_has_a_line_of_its_own(found, shared_data):
    finding = found(H100)["link_bound"]
    assert "898\u00a0ms" in finding.title or "898 ms" in finding.title
    said = next(one.text for one in finding.evidence if "other findings explain" in one.text)
    assert said == "GPU 0: other findings explain 22.4 ms of these 921 ms; 898 ms are left"
    assert "22.4 ms" in found(H100)["weights_not_overlapped"].title
    gpu = account_of(Joined(open_recording(shared_data / H100))).main
    lines = [time_text(gpu.ns(line)) for line in (Line.AT_LINK_RATE, Line.INSIDE_GPU)]
    assert lines == ["921 ms", "19.6 ms"]  # as the evidence has it, too
    assert any("only other copies ran for another 19.6 ms" in one.text for one in finding.evidence)


def test_a_slow_link_is_looked_into_before_fewer_bytes_are_moved(found):
    finding = found(H100)["link_bound"]
    assert finding.confidence == "likely"
    first, second = finding.cure[:2]
    assert first.text.startswith("Find out why the link carries only 27.7 GB/s (PCIe 5.0 x16 carries 55 GB/s)")
    assert "`kvprobe doctor`" in first.text and "one GPU loading at a time" in first.text
    assert second.text.startswith("Move fewer bytes")


def test_h100_is_found_saturated_without_the_labels_too(shared_data):
    from kvprobe.recordings.model import Table

    recording = open_recording(shared_data / H100)
    recording.tables["labels"] = Table("labels")
    finding = next(f for f in diagnose(recording) if f.cause == "launch_queue_saturation")
    assert not finding.abstains
    assert finding.lost_ns == pytest.approx(912e6, rel=0.1)


def test_graphs_in_the_queue_are_likely_or_abstained_from_and_never_counted_as_operations(found):
    finding = found(GRAPHS)["launch_queue_saturation"]
    assert finding.confidence in ("likely", "cannot tell")
    assert "graph" in finding.reason
    assert not any("1337" in evidence.text for evidence in finding.evidence)


def test_pageable_readback_beside_the_graphs_is_named_with_its_320_ms(found):
    finding = found(GRAPHS)["pageable_memory"]
    assert finding.lost_ns == pytest.approx(320e6, rel=0.02)
    assert finding.where[0].stream_name == "stream 14"


@pytest.mark.parametrize("path, lost", [(OWL, 16.6e6), (RESNET, 12.0e6)])
def test_deep_but_healthy_queues_are_not_named_and_their_pageable_copies_are(found, path, lost):
    findings = found(path)
    assert not QUEUE & set(findings)
    assert findings["pageable_memory"].lost_ns == pytest.approx(lost, rel=0.1)


def start_up(path):
    recording = open_recording([path])
    return {part.what: part for part in startup(recording, serving_window(recording)).parts}


def test_pageable_copies_are_found_and_a_program_start_is_told_apart(found, shared_data):
    findings = found("param/resnet_kineto.json.gz")
    assert findings["pageable_memory"].lost_ns == pytest.approx(2.0e9, rel=0.1)
    starved = findings["gpu_starved"]
    assert sum(one.lost_ns for one in starved.where) == pytest.approx(starved.lost_ns, rel=1e-6), "one figure of it"
    assert "take longer than the GPU work that they could hide behind" in starved.cure[0].text
    assert not QUEUE & set(findings) and "first_calls" not in findings
    parts = start_up(shared_data / "param/resnet_kineto.json.gz")
    made = parts["context and devices"]
    assert (made.call, made.ns) == ("cudaStreamCreateWithFlags", pytest.approx(241e6, rel=0.1))
    assert parts["freeing memory"].longest_ns == pytest.approx(788e6, rel=0.1)


@pytest.mark.parametrize("path, slow", [("nsys-ai/mfu_2gpu_before.sqlite", 6), ("nsys-ai/mfu_2gpu_after.sqlite", 10)])
def test_profiler_flushes_are_named_and_the_rest_is_abstained_from(found, path, slow):
    findings = found(path)
    assert not QUEUE & set(findings)
    assert findings["profiler_overhead"].severity == "info"
    rest = findings["unexplained"]
    assert rest.abstains and rest.reason.startswith("cannot tell, because")
    assert sum(place.calls for f in (findings["profiler_overhead"], rest) for place in f.where) == slow


def test_of_the_recorders_work_no_more_lies_in_delayed_calls_than_there_is(found):
    """Two threads were delayed by the same flush: it counts once, as in the sum of the recorder's work."""
    told = found("nsys-ai/mfu_2gpu_before.sqlite")["profiler_overhead"].evidence
    whole, part = (next(one.value for one in told if words in one.text) for words in ("in all", "lie in these calls"))
    assert 0.5 * whole < part <= whole


def test_lazy_loading_is_what_was_slow_in_a_shallow_eager_step(found):
    findings = found("tracelens/b200_eager_trace.json.gz")
    assert not QUEUE & set(findings)
    assert findings["first_calls"].lost_ns == pytest.approx(211e3, rel=0.1)
    assert findings["first_calls"].severity == "info"


def test_calls_that_free_memory_at_the_end_are_in_the_account_and_said_to_be_no_part_of_the_finding(found):
    said = [one.text for one in found("extrap/concurrent_profile16.sqlite")["allocation_on_hot_path"].evidence]
    assert any(one.startswith("another ") and "such calls took 15." in one for one in said), said


def test_a_test_program_of_2022_spends_its_time_in_allocation_and_at_its_start(found, shared_data):
    findings = found("extrap/concurrent_profile16.sqlite")
    assert not QUEUE & set(findings)
    assert "allocation_on_hot_path" in named(findings)
    pinned = start_up(shared_data / "extrap/concurrent_profile16.sqlite")["pinning host memory"]
    assert (pinned.call, pinned.calls) == ("cudaHostAlloc", 10) and pinned.longest_ns == pytest.approx(22e6, rel=0.1)


def test_a_full_queue_is_not_taken_for_a_starved_device(found):
    assert "gpu_starved" not in named(found(H100))
