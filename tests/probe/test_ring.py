"""Percentiles and bounds of the histogram, and what is refused as a ring file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.errors import RecordingError
from kvprobe.probe.ring import bucket_bounds, percentile, read_ring


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 7_000_000_000), min_size=1, max_size=50), st.floats(0, 100))
def test_a_percentile_is_within_an_eighth_of_the_truth(durations: list[int], q: float) -> None:
    bounds = bucket_bounds()
    histogram = np.bincount(np.searchsorted(bounds, durations, side="right") - 1, minlength=128)
    truth = np.percentile(durations, q, method="inverted_cdf")
    assert abs(percentile(histogram, q) - truth) <= max(0.125 * truth, 0.5)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert np.isnan(percentile(np.zeros((3, 128)), 50)).all()


def test_what_is_not_a_ring_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.kvp"
    for content, words in [
        (b"", "not a ring file"),
        (b"hello" * 1000, "not a ring file"),
        (b"KVPRING1" + b"\x09\0\0\0" + bytes(5000), "version 9"),
    ]:
        path.write_bytes(content)
        with pytest.raises(RecordingError, match=words):
            read_ring(path)
    with pytest.raises(RecordingError, match="No such file"):
        read_ring(tmp_path / "absent.kvp")
