"""Programs whose authors had not seen the diagnosis, recorded on an H200, against what each of them measured itself.

In tests/gpu/data/others. These are torch programs in steps, each with one thing wrong:

* shared_prefix_loaded_by_ten_requests: waves of ten requests load the same 336 blocks of 64 KiB, each into blocks of
  its own, on a stream and a thread of their own; the host waits for nothing in between.
* equal_layers_copied_where_they_compute: 14 layers of 75 MB a step, each copied on the model's own stream right before
  the product that needs it.
* batches_of_small_scattered_blocks: 16 batches of 6,100 descriptors of 6 KiB on an empty stream.
* experts_fetched_over_a_full_link: 1.8 GB a step, fetched two layers ahead on a stream of their own, take 33 ms; the
  compute beside them takes 7 ms.

And one with nothing wrong: weights_fetched_a_layer_ahead, where copies at 42 GB/s hide behind compute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings import open_recording
from tests.packed import extract

OTHERS = Path(__file__).parents[1] / "gpu" / "data" / "others"


def examined(name, form, folder):
    path = OTHERS / f"{name}.json.gz"
    if form == "run":
        extract(OTHERS / f"{name}.kvprobe.tar.gz", folder)
        path = folder / name
    recording = open_recording([path])
    found = examine(recording)
    return found, of_recording(recording, found)


@pytest.mark.parametrize(
    "name, form, cause, lost_ms",
    [
        ("batches_of_small_scattered_blocks", "run", "descriptor_bound_batch", 231),
        ("batches_of_small_scattered_blocks", "kineto", "descriptor_bound_batch", 223),
        ("equal_layers_copied_where_they_compute", "kineto", "weights_not_overlapped", 664),
    ],
)
def test_the_cause_leads_with_the_time_that_the_program_lost(name, form, cause, lost_ms, tmp_path):
    found, verdict = examined(name, form, tmp_path)
    assert verdict.state == "found"
    assert found[0].cause == cause
    assert found[0].lost_ns / 1e6 == pytest.approx(lost_ms, rel=0.05)
    assert not [one.cause for one in found[1:] if not one.abstains and one.severity != "info"]


def test_every_load_but_the_first_of_a_wave_is_redundant(tmp_path):
    found, verdict = examined("shared_prefix_loaded_by_ten_requests", "run", tmp_path)
    assert verdict.state == "found"
    assert found[0].cause == "redundant_loads"
    assert found[0].evidence[0].value == 9 * 9 * 336 * 65536
    assert 20 < found[0].lost_ns / 1e6 < 144, "what their calls took; the program measured what the device took"


def test_without_the_device_layers_on_the_computing_stream_are_undecided(tmp_path):
    found, verdict = examined("equal_layers_copied_where_they_compute", "run", tmp_path)
    assert verdict.state == "undecided"
    assert [one.cause for one in found] == ["weights_not_overlapped"]
    assert found[0].abstains and "--nsys" in found[0].cure[0].text


def test_without_the_device_a_full_link_is_undecided_and_one_with_room_is_not(tmp_path):
    found, verdict = examined("experts_fetched_over_a_full_link", "run", tmp_path)
    assert verdict.state == "undecided"
    assert [one.cause for one in found] == ["link_bound"]
    assert found[0].abstains and "--nsys" in found[0].cure[0].text
    assert found[0].evidence[0].value == pytest.approx(48.4e9, rel=0.01)
    found, verdict = examined("weights_fetched_a_layer_ahead", "run", tmp_path)
    assert verdict.state == "undecided"  # nothing shows what the device did
    assert "link_bound" not in [one.cause for one in found]
