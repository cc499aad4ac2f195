"""What the link of a GPU can carry, as far as a recording names the link or the GPU."""

from __future__ import annotations

import pytest

from kvprobe.commands.doctor import rate_check
from kvprobe.recordings.link_rate import link_of, link_rate, rate_or_assumed
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Table


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
    found = link_of(recording)
    assert found.name == link
    assert found.bytes_per_s == pytest.approx(rate)


def test_a_rate_that_no_copy_tells_is_that_of_the_gpus_own_link():
    recording = Recording([])
    recording.machine["gpu"] = "Tesla V100-SXM2-16GB"
    assert rate_or_assumed(recording, Direction.H2D) == (13.75e9, "assumed: PCIe 3.0 x16", "PCIe 3.0 x16")
    recording.machine["link_bytes_per_s"] = 12e9
    assert rate_or_assumed(recording, Direction.H2D) == (12e9, "stated for this machine", "")


def spans(count: int, size: int) -> Table:
    columns = {"start_ns": [0], "end_ns": [10_000_000], "engine": [Engine.COPY], "direction": [Direction.H2D]}
    return Table("spans", {**columns, "count": [count], "bytes": [count * size]})


def batch(count: int, size: int) -> Table:
    columns = {"start_ns": [0], "end_ns": [1], "kind": [CallKind.BATCH], "direction": [Direction.H2D]}
    return Table("calls", {**columns, "count": [count], "bytes": [count * size]})


@pytest.mark.parametrize(("count", "size", "large"), [(16, 1 << 20, True), (16, 1 << 16, False), (4096, 4096, False)])
def test_only_large_copies_tell_the_links_rate(count: int, size: int, large: bool):
    """However many small ones lie between two marks, or are in one call."""
    recording = Recording([], {"spans": spans(count, size)})
    rate, _ = link_rate(recording, Direction.H2D)
    assert rate == (pytest.approx(count * size * 100) if large else 0)
    recording = Recording([], {"calls": batch(count, size), "spans": spans(1, count * size)})
    rate, _ = link_rate(recording, Direction.H2D)
    assert (rate > 0) == large


def test_doctor_and_a_report_say_the_same_of_a_link():
    recording = Recording([])
    recording.machine.update({"pcie_gen_max": 4, "pcie_width_max": 16})
    gpu = {"pcie_gen_max": 4, "pcie_width_max": 16}
    near, far = (rate_check("h2d", rate, 256 << 20, gpu) for rate in (22.1e9, 21.9e9))
    assert near.value == f"22.1 GB/s for 256 MiB, pinned; {link_of(recording).text}"
    assert near.value.endswith("PCIe 4.0 x16 carries 27.5 GB/s")
    assert (near.verdict, far.verdict, bool(far.todo)) == ("good", "bad", True)
    assert rate_check("d2h", 22e9, 256 << 20, {}).verdict == "unknown"
