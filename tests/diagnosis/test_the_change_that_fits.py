"""The first change, and the call that is named, fit what a recording of a GPU shows to have cost the time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import Examination, Finding, examine
from kvprobe.recordings import open_recording
from kvprobe.reporting.headline import _facts_of, call_text, terminal_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

KEEP, POOL = "Keep the GPU's memory from one step to the next", "Allocate and pin memory once"
DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"


def examined(path: str, into: Path) -> Examination:
    return examine(open_recording(unpack(DATA / path, into)))


def of(found: Examination, cause: str) -> Finding:
    (finding,) = [one for one in found if one.cause == cause]
    return finding


@pytest.mark.parametrize(
    "name, change",
    [
        ("torch_cache_emptied_in_each_step", KEEP),
        ("device_memory_made_and_freed_in_each_step", KEEP),
        ("a_staging_buffer_pinned_for_each_request", POOL),
    ],
)
def test_memory_of_the_gpu_is_kept_and_memory_of_the_host_is_pinned_once(name, change, tmp_path):
    finding = of(examined(f"accounts/nsys/{name}.sqlite.gz", tmp_path), "allocation_on_hot_path")
    assert finding.cure[0].text.startswith(change) and 0.9 * finding.lost_ns < finding.cure[0].predicted_saving_ns
    assert not [one for one in finding.cure if one.text.startswith(POOL if change == KEEP else KEEP)]


@pytest.mark.parametrize(
    "name, calls", [("a_staging_buffer_pinned_for_each_request", 59), ("torch_pin_memory_for_each_request", 29)]
)
def test_what_is_pinned_for_each_request_is_one_finding_from_the_first_request_on(name, calls, tmp_path):
    """30 requests; a warm-up of 32 submissions is half of them, and is no start-up in a program that goes on so."""
    found = examined(f"accounts/nsys/{name}.sqlite.gz", tmp_path)
    finding = of(found, "allocation_on_hot_path")
    assert finding.title.startswith(f"{calls} allocations between submissions")
    (gpu,) = found.account.gpus
    assert finding.device_ns > 0.99 * gpu.ns(Line.ALLOCATING)
    assert not [one for one in found if one.cause == "waiting_for_host"]


@pytest.mark.parametrize("form", ["nsys/{}.sqlite.gz", "kineto/{}.json.gz"])
def test_a_thread_that_waits_for_a_host_function_of_its_own_is_told_so(form, tmp_path):
    """Each step ends with a callback of 2 ms; the thread waits for the stream while the GPU runs nothing."""
    found = examined(f"accounts/{form.format('a_callback_in_the_stream_of_the_model')}", tmp_path)
    finding = of(found, "waiting_for_host")
    assert finding.title.endswith("the thread waited for a host function that it had put into the stream")
    assert finding.cure[0].text.startswith("Take the host functions out of the stream")
    (gpu,) = found.account.gpus
    assert finding.cure[0].predicted_saving_ns == pytest.approx(gpu.ns(Line.WAITING_FOR_DEVICE), rel=0.02)
    call = finding.calls[0]
    assert call.name == "cudaLaunchHostFunc" and 2_000_000 < call.lost_ns < 3_500_000
    assert "its function cost" in call_text(call, "", "stream 7")
    assert any("waited 229 times for a host function" in one.text for one in finding.evidence) or "kineto" in form


def test_the_calls_that_are_listed_are_those_in_which_the_time_was_lost(tmp_path):
    found = examined("accounts/nsys/the_device_synchronised_after_each_kernel.sqlite.gz", tmp_path)
    finding = of(found, "waiting_for_host")
    assert "the thread submitted" in finding.title
    assert {one.name for one in finding.calls} == {"cudaLaunchKernel"}


def test_a_thread_that_does_not_wait_also_submits_ahead(tmp_path):
    """The device is synchronised after each kernel: without that, each launch runs beside the kernel before it."""
    found = examined("accounts/nsys/the_device_synchronised_after_each_kernel.sqlite.gz", tmp_path)
    first, second, *_ = of(found, "waiting_for_host").cure
    (gpu,) = found.account.gpus
    assert first.text.startswith("Do not let the host wait") and second.text.startswith(
        "Submit many operations at once"
    )
    both = gpu.ns(Line.WAITING_FOR_DEVICE, Line.SUBMITTING)
    assert gpu.ns(Line.SUBMITTING) < first.predicted_saving_ns <= both


def test_the_first_change_of_a_finding_is_its_own(tmp_path):
    found = examined("fresh/nsys/torch_layers_moved_by_to_without_non_blocking.sqlite.gz", tmp_path)
    first = of(found, "waiting_for_copies").cure[0].text
    assert first.startswith("Move fewer bytes") and "`weights_not_overlapped` counts" in first


def test_a_saving_says_of_which_of_two_things_it_is(tmp_path):
    found = examined("fresh/nsys/a_prefix_read_from_a_file_before_each_prefill.sqlite.gz", tmp_path)
    first = of(found, "gpu_starved").cure[0]
    assert "The saving is predicted for the first alone" in first.text
    (fits,) = [one for one in of(found, "gpu_starved").evidence if "can overlap with the GPU's work" in one.text]
    assert first.predicted_saving_ns == pytest.approx(fits.value, rel=0.01)


@pytest.mark.parametrize(
    "path",
    [
        "fresh/nsys/layers_handed_to_a_peer_that_is_late.sqlite.gz",
        "accounts/nsys/stores_of_16_kib_behind_a_callback.sqlite.gz",
        "accounts/kineto/kernels_and_copies_behind_a_callback.json.gz",
    ],
)
def test_a_queue_that_fills_behind_a_host_function_is_cured_at_the_function(path, tmp_path):
    """A callback of 45 to 180 ms holds the stream; where its thread waits for the stream anyway, nothing else helps."""
    recording = open_recording(unpack(DATA / path, tmp_path))
    finding = of(examine(recording), "fence_before_copies")
    assert "waited for a host function (cudaLaunchHostFunc)" in terminal_lines(recording, finding)[0]
    assert "their stream waited for a host function" in finding.evidence[0].text
    first, *others = finding.cure
    assert first.text.startswith("Shorten what the stream waits for") and first.predicted_saving_ns == finding.device_ns
    assert max(one.predicted_saving_ns or 0 for one in others) < 0.1 * finding.device_ns
    assert not [one for one in finding.cure if "forward pass" in one.text]
    recording.names = [name.replace("LaunchHostFunc", "ThreadExchangeStreamCaptureMode") for name in recording.names]
    finding = of(examine(recording), "fence_before_copies")
    assert "waited for something outside of the GPU" in finding.title
    assert finding.cure[0].text.startswith("Find what the stream waits for outside of the GPU")


@pytest.mark.parametrize("name", ["nsys_saturated.sqlite.gz", "kineto_saturated.json.gz"])
def test_a_thread_that_is_blocked_behind_the_last_kernel_is_not_said_to_cost_no_wall_time(name, tmp_path):
    """3,000 copies behind one kernel, and nothing after them: whether a model waited, the recording does not show."""
    recording = open_recording(unpack(DATA / name, tmp_path))
    finding = of(examine(recording), "launch_queue_saturation")
    assert finding.severity == "critical" and finding.no_kernel_follows
    assert {one.predicted_saving_ns for one in finding.cure} == {None}
    said = " ".join(terminal_lines(recording, finding)[-1].split())
    assert said.startswith("predicted to give the thread back")
    assert said.endswith("; nothing shows whether that saves wall time")
    assert not _facts(finding, "The GPU waited")


def _facts(finding: Finding, label: str) -> list[str]:
    return [one.value for one in _facts_of(finding) if one.label == label]


def test_what_all_findings_save_stays_within_what_the_gpu_waits(tmp_path):
    found = examined("fresh/nsys/layers_handed_to_a_peer_that_is_late.sqlite.gz", tmp_path)
    (gpu,) = found.account.gpus
    assert sum(one.predicted_saving_ns or 0 for one in found) <= gpu.not_computing_ns
