"""What is known of the host where timing events, and no executions, tell what a device did."""

from __future__ import annotations

import numpy as np

from kvprobe.account import COPIES, account_of
from kvprobe.account.stretches import NOBODY
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
