"""Small copies: those between which the thread waits and launches cannot be joined, and all others can."""

from __future__ import annotations

import numpy as np
import pytest
from hostruntime import recording_of
from scenarios import D2H, H2D, KiB, Stage

from kvprobe.diagnosis import examine

STEPS, KERNEL_NS = 400, 10_000


@pytest.mark.parametrize(
    ("copies", "waits", "launches"), [(1, True, True), (2, True, True), (1, False, True), (1, True, False)]
)
def test_a_copy_that_comes_alone_is_not_too_small(runtime, copies, waits, launches):
    """Of a step with one copy, a kernel and a wait nothing can be joined; without one of them, steps' copies can."""
    stage = Stage(runtime, depth=4096, d2h=4e9)

    def body():
        runtime.launch(stage.compute, KERNEL_NS)
        for step in range(STEPS):
            if launches:
                runtime.launch(stage.streams[0], KERNEL_NS)
            for i in range(copies):
                at = (2 * step + i) * 8 * KiB
                runtime.copy(stage.host + at, stage.device + at, 4 * KiB, D2H, stage.streams[0])
            if waits:
                runtime.sync(stage.streams[0])
        runtime.sync(stage.streams[0])

    r = recording_of(runtime, runtime.trace(body)[0])
    r.machine["link_bytes_per_s"] = 4e9
    found = [one.cause for one in examine(r)]
    assert ("small_copies" in found) == (copies > 1 or not waits or not launches)


def test_a_fixed_cost_that_grows_with_the_size_is_no_slow_link(runtime):
    """Copies of 512 bytes and of 8 KiB, as long as on an H200: 4.4 GB/s by their difference, and the link has 55."""
    stage, took = Stage(runtime, depth=4096, h2d=4e9), {512: 992, 8 * KiB: 2_752}

    def body():
        for step in range(STEPS):
            for i, size in enumerate((8 * KiB, 512, 8 * KiB)):
                at = (3 * step + i) * 16 * KiB
                runtime.copy(stage.device + at, stage.host + at, size, H2D, stage.streams[0])
            if step % 100 == 99:
                runtime.sync(stage.streams[0])

    r = recording_of(runtime, runtime.trace(body)[0])
    ran = r.executions
    ran.columns["end_ns"] = ran["start_ns"] + np.array([took[size] for size in ran["bytes"].tolist()])
    (found,) = (one for one in examine(r) if one.cause == "small_copies")
    assert found.confidence == "likely" and found.lost_ns > 0.9 * STEPS * (2 * 2_752 + 992 - 2 * 149 - 9)
