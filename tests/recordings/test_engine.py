"""A live engine is a recording: its copies, its transfers, its streams by their use, what auto did."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import kvprobe
from kvprobe.cuda import device_region, host_region
from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.offload.rungs import Decision, Rung
from kvprobe.recordings.model import Direction
from kvprobe.reporting import build_page


@pytest.fixture
def engine():
    runtime = host_runtime()
    gpu = kvprobe.BlockPool(runtime, [device_region(runtime, 64 * 4096)], 4096)
    cpu = kvprobe.BlockPool(runtime, [host_region(runtime, 64 * 4096)], 4096)
    limits = kvprobe.QueueLimits(64, 4, 256, 1000, 2000)
    with kvprobe.OffloadEngine(runtime, gpu, cpu, policy="shared", limits=limits, detail="copies") as made:
        yield made
    for region in (*gpu.regions, *cpu.regions):  # now, and not in the middle of another test that counts memory
        region.owner.close()


def test_an_engine_is_shown_by_the_page_of_every_recording(engine):
    # engines of other tests may have written to the process's ring file before; the clocks may differ by some us
    time.sleep(0.1)
    began = time.monotonic_ns() - 50_000_000
    engine.load(range(0, 40, 2), range(0, 40, 2)).wait()
    engine.auto.decisions.append(
        Decision(1, Rung("shared", "loop"), Rung("pooled", "auto"), "the queue was full", 2e6, 1e3)
    )
    recording = kvprobe.recording_of(engine, what="my engine")
    assert recording.calls["bytes"][recording.calls["start_ns"] >= began].sum() == 20 * 4096
    assert np.count_nonzero(recording.transfers["start_ns"] >= began) == 1
    assert "shared loads" in [recording.text(name) for name in recording.streams["name"]]
    assert recording.machine["queue_depth"] == 64
    (gain,) = recording.decisions["gain"]
    assert (recording.text(recording.decisions["what"][0]), gain) == ("auto: shared to pooled", 2000)
    page = build_page(recording, findings=kvprobe.diagnose(recording))
    assert "my engine" in page and "shared loads" in page


def test_an_engine_that_records_nothing_says_so(engine):
    silent = SimpleNamespace(recorder=SimpleNamespace(path=None), auto=engine.auto, limits=engine.limits, streams={})
    with pytest.raises(kvprobe.UsageError, match="nothing was recorded"):
        kvprobe.recording_of(silent)


def test_a_ring_that_never_wrapped_has_lost_nothing(engine):
    engine.load(range(0, 40, 2), range(0, 40, 2)).wait()
    assert engine.recorder.path is not None
    assert kvprobe.recording_of(engine).lost == {}


TWENTY_BLOCKS_IN_TWO_RUNS = """
import sys
import kvprobe
from kvprobe.cuda import device_region, host_region
from kvprobe.cuda.hostruntime import host_runtime

runtime = host_runtime()
gpu = kvprobe.BlockPool(runtime, [device_region(runtime, 64 * 4096)], 4096)
cpu = kvprobe.BlockPool(runtime, [host_region(runtime, 64 * 4096)], 4096)
limits = kvprobe.QueueLimits(64, 4, 256, 1000, 2000)
with kvprobe.OffloadEngine(runtime, gpu, cpu, policy=sys.argv[1], method="loop", limits=limits) as engine:
    blocks = [*range(10), *range(30, 40)]
    engine.load(blocks, blocks).wait()
    found = kvprobe.recording_of(engine).submitters
    print(*(found[name].tolist() for name in ("direction", "transfers", "copies", "descriptors", "calls", "bytes")))
"""


@pytest.mark.parametrize("policy, pieces", [("shared", 20), ("pooled", 2)])
def test_what_merging_made_of_the_copies_is_told(policy, pieces):
    """One by one on the caller's thread, merged by the submitter; in a process of its own, as the totals are its."""
    command = [sys.executable, "-c", TWENTY_BLOCKS_IN_TWO_RUNS, policy]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == [f"[{value}]" for value in (int(Direction.H2D), 1, 20, pieces, pieces, 20 * 4096)]
