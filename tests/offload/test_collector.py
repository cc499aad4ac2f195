"""What transfers leave to the garbage collector: no cycle, and one object each, two once they were read.

A full collection in a server's process takes tens of ms, and comes the sooner the more objects are made.
"""

from __future__ import annotations

import gc
import subprocess
import sys
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


# In a process of its own: what other tests left there would be garbage as well.
ALONE = """
import gc, sys
import numpy as np
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.launchqueue import QueueLimits
from kvprobe.offload import BlockPool, OffloadEngine

runtime = find_runtime("host")
pools = [BlockPool(runtime, [make(runtime, 64 * 4096)], 4096) for make in (device_region, host_region)]
ids = np.arange(8) if sys.argv[1] == "array" else list(range(8))
with OffloadEngine(runtime, *pools, policy="pooled", limits=QueueLimits(1021, 8, 8021, 1000, 2000)) as engine:
    def transfers(number):
        for each in range(number):
            transfer = (engine.load if each % 2 else engine.store)(ids, ids, done=lambda each: None)
            transfer.wait()
            transfer.split()
            assert engine.poll() == [transfer]

    transfers(3)
    gc.collect()
    gc.disable()
    before = len(gc.get_objects())
    transfers(300)
    print(len(gc.get_objects()) - before, gc.collect())
"""


@pytest.mark.parametrize("kind", ["list", "array"])
def test_transfers_leave_no_cycle_and_nothing_behind(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, kind], capture_output=True, text=True, check=False, timeout=120)
    assert not done.returncode, done.stderr
    left, unreachable = map(int, done.stdout.split())
    assert left < 20
    assert unreachable == 0  # objects that only the collector finds


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
