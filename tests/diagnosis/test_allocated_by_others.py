"""A thread that waits while others of its process pin memory, as `kvprobe run` recorded it on an H200."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

from kvprobe.account import Line
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind

NAME = "four_threads_that_each_pin_the_buffer_of_their_part_of_a_request.kvprobe.tar.gz"
PACKED = Path(__file__).resolve().parents[1] / "gpu" / "data" / "pinned_by_others" / NAME


@pytest.mark.parametrize(("earlier_ns", "named"), [(0, True), (4_000_000, False)])
def test_the_thread_goes_on_when_the_others_have_pinned(tmp_path, earlier_ns, named):
    """Were their calls over milliseconds before it goes on, nothing would show that it waited for them."""
    recording = open_recording(unpack(PACKED, tmp_path))
    calls = recording.calls
    pins = calls["kind"] == CallKind.ALLOC
    for name in ("start_ns", "end_ns"):
        calls[name][pins] -= earlier_ns
    found = examine(recording)
    (gpu,) = found.account.gpus
    assert (found[0].cause == "allocation_on_hot_path") == named
    assert (gpu.share(Line.ALLOCATING) > 0.5) == named
    if named:
        assert found[0].severity == "critical" and found[0].confidence == "likely"
        assert found[0].cure[0].text.startswith("Allocate and pin memory once")
        assert found[0].device_ns <= gpu.ns(Line.ALLOCATING)
