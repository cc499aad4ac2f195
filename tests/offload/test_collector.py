"""What transfers leave to the garbage collector: no cycle, and one object each, two once they were read.

A full collection in a server's process takes tens of ms, and comes the sooner the more objects are made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.launchqueue import QueueLimits
from kvprobe.offload import BlockPool, OffloadEngine

MANY = 300
LIMITS = QueueLimits(1021, 8, 8021, 1000, 2000)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    runtime = find_runtime("host")
    pools = [BlockPool(runtime, [make(runtime, 64 * 4096)], 4096) for make in (device_region, host_region)]
    with OffloadEngine(runtime, *pools, policy="pooled", limits=LIMITS) as made:
        for _ in range(3):
            made.load([1], [1]).wait()
        made.poll()
        gc.collect()
        gc.disable()
        yield made
    gc.enable()


@pytest.mark.parametrize("kind", ["list", "array"])
def test_transfers_leave_no_cycle_and_nothing_behind(engine: OffloadEngine, kind: str) -> None:
    ids = list(range(8)) if kind == "list" else np.arange(8)
    before = len(gc.get_objects())
    for number in range(MANY):
        transfer = (engine.load if number % 2 else engine.store)(ids, ids, done=lambda each: None)
        transfer.wait()
        transfer.split()
        assert engine.poll() == [transfer]
        del transfer
    assert len(gc.get_objects()) - before < 20
    gc.set_debug(gc.DEBUG_SAVEALL)  # unreachable objects that only the collector finds
    try:
        gc.collect()
        ours = [one for one in gc.garbage if (getattr(one, "__module__", None) or "").startswith("kvprobe.offload")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not ours


def test_a_transfer_is_one_object_of_the_collector_and_two_once_it_was_read(engine: OffloadEngine) -> None:
    kept, ids = [], np.arange(8)
    before = gc.get_count()[0]
    kept = [engine.load(ids, ids, after=None) for _ in range(MANY)]
    assert gc.get_count()[0] - before < 1.1 * MANY
    engine.wait()
    assert len(engine.poll()) == MANY
    assert all(each.done for each in kept)
    assert gc.get_count()[0] - before < 2.1 * MANY


def test_polls_make_no_objects(engine: OffloadEngine) -> None:
    engine.poll()
    before = gc.get_count()[0]
    for _ in range(MANY):
        engine.poll()
    assert gc.get_count()[0] - before < 10
