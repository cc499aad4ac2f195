"""What the link of a GPU can carry, as far as a recording names the link or the GPU."""

from __future__ import annotations

import pytest

from kvprobe.recordings.link_rate import carried
from kvprobe.recordings.model import Recording


@pytest.mark.parametrize(
    ("machine", "link", "rate"),
    [
        ({}, "PCIe 5.0 x16", 55e9),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, "PCIe 5.0 x16", 55e9),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, "PCIe 4.0 x16", 27.5e9),
        ({"gpu": "NVIDIA L40S"}, "PCIe 4.0 x16", 27.5e9),
        ({"gpu": "NVIDIA A10G"}, "PCIe 4.0 x16", 27.5e9),
        ({"gpu": "Tesla V100-SXM2-16GB"}, "PCIe 3.0 x16", 13.75e9),
        ({"gpu": "Tesla T4"}, "PCIe 3.0 x16", 13.75e9),
        ({"gpu": "NVIDIA H100 PCIe", "pcie_gen_max": 5, "pcie_width_max": "8"}, "PCIe 5.0 x8", 27.5e9),
        ({"gpu": "Tesla T4", "pcie_gen_max": "not told", "pcie_width_max": 16}, "PCIe 3.0 x16", 13.75e9),
    ],
)
def test_the_link_is_told_by_its_lanes_or_by_the_gpus_name(machine, link, rate):
    recording = Recording([])
    recording.machine.update(machine)
    found = carried(recording)
    assert found.link == link
    assert found.rate == pytest.approx(rate)
