"""What is known of the host where timing events, and no executions, tell what a device did."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.account import COPIES, account_of
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis import examine
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table

US = 1_000


def test_a_kernel_that_was_launched_before_its_thread_began_to_wait_is_not_late() -> None:
    """The mark behind a copy is reached some microseconds late, and the launch itself was counted and not kept."""
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync", "cudaStreamSynchronize"])
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.array([0, 30 * US, 1_210 * US]),
            "end_ns": np.array([3 * US, 1_205 * US, 1_215 * US]),
            "kind": np.array([CallKind.COPY, CallKind.SYNC, CallKind.COPY]),
            "name": np.array([1, 2, 1]),
            "stream": np.array([0, 0, 0]),
            "thread": np.full(3, 7),
        },
    )
    recording.tables["spans"] = Table(
        "spans",
        {
            "start_ns": np.array([3 * US, 406 * US]),
            "end_ns": np.array([400 * US, 1_200 * US]),
            "engine": np.array([Engine.COPY, Engine.KERNEL]),
            "direction": np.array([Direction.H2D, 0]),
            "bytes": np.array([20_000_000, 0]),
            "count": np.ones(2),
            "stream": np.zeros(2),
        },
    )
    recording.tables["coverage"] = Table("coverage", {"start_ns": np.array([0]), "end_ns": np.array([1_215 * US])})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    (gpu,) = account_of(Joined(recording)).gpus
    cut = gpu.stretches
    copies = np.isin(cut.line, np.array(COPIES, dtype=np.uint8))
    assert cut.ns[copies].sum() == 397 * US
    assert cut.ns[copies & (cut.caller != NOBODY)].sum() == 27 * US


@pytest.mark.parametrize("computes", [True, False])
def test_large_loads_on_a_computing_stream_are_asked_about_only_where_the_gpu_may_have_waited(computes: bool) -> None:
    """Another worker's kernels run meanwhile, as timing events tell; without these nothing does."""
    rounds, ms = 64, 1_000 * US
    at = np.arange(rounds) * 10 * ms
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync", "cudaLaunchKernel"])
    start = np.sort(np.concatenate((at, at + 5 * US)))
    load = np.arange(2 * rounds) % 2 == 0
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": start + 3 * US,
            "kind": np.where(load, CallKind.COPY, CallKind.LAUNCH),
            "name": np.where(load, 1, 2),
            "direction": np.where(load, Direction.H2D, 0),
            "bytes": np.where(load, 128 << 20, 0),
            "stream": np.zeros(2 * rounds, dtype=np.int64),
            "thread": np.full(2 * rounds, 7),
        },
    )
    if computes:
        recording.tables["spans"] = Table(
            "spans",
            {
                "start_ns": at,
                "end_ns": at + 10 * ms,
                "engine": np.full(rounds, Engine.KERNEL),
                "count": np.ones(rounds),
                "stream": np.zeros(rounds),
            },
        )
        recording.tables["coverage"] = Table("coverage", {"start_ns": np.array([0]), "end_ns": np.array([640 * ms])})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    asked = [one.cause for one in examine(recording) if one.abstains]
    assert ("weights_not_overlapped" in asked) != computes
