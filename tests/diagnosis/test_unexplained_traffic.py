"""The link's counters show what no copy explains; what copies explain is no finding."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import blocks, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import Table

GB = 1e9


def found(counter, gb_per_s, copied_gb_per_s=0.0, seconds=10, noise=0.0, lost=0):
    """A sample each half second of a counter, and a copy each 10 ms."""
    size = int(max(copied_gb_per_s, 1e-6) * GB / 100)
    made = recording(blocks(list(range(seconds * 100)), size, gap_ns=9_999_000))
    made.names.append(counter)
    times = np.arange(0, seconds * GB, 0.5 * GB)
    values = gb_per_s * GB * (1 + noise * np.where(np.arange(len(times)) % 2, 1, -1))
    made.tables["samples"] = Table(
        "samples",
        {"time_ns": times, "process": np.full(len(times), -1), "metric": np.full(len(times), 3), "value": values},
    )
    made.lost = {0: lost} if lost else {}
    if lost:
        columns = {"direction": [1], "bytes": [int(copied_gb_per_s * GB * seconds)], "calls": [1], "name": [1]}
        made.tables["totals"] = Table("totals", columns)
    return {one.cause: one for one in examine(made)}.get("unexplained_traffic")


@pytest.mark.parametrize(
    "counter, way", [("pcie_rx_bytes_per_s", "to the GPU"), ("pcie_tx_bytes_per_s", "from the GPU")]
)
def test_bytes_that_no_copy_asked_for_are_named_with_their_rate(counter, way):
    one = found(counter, 21)
    assert one.title == f"The link carries 21.0 GB/s {way} that no copy explains"
    assert (one.severity, one.confidence, one.lost_on) == ("warning", "likely", "none")


def test_what_copies_brought_is_taken_off():
    assert found("pcie_rx_bytes_per_s", 21, 20) is None
    assert found("pcie_rx_bytes_per_s", 40, 20).evidence[0].value == pytest.approx(20 * GB, rel=0.1)
    assert found("pcie_rx_bytes_per_s", 21, 20, lost=1) is None


@pytest.mark.parametrize("what", [{"gb_per_s": 0.5}, {"gb_per_s": 3, "noise": 1.0}, {"gb_per_s": 21, "seconds": 1}])
def test_little_or_chance_or_too_few_samples_are_no_finding(what):
    assert found("pcie_rx_bytes_per_s", **what) is None
