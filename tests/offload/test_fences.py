"""Loads and stores that depend on each other through fences alone, against a plain dictionary; on a GPU, too.

KVPROBE_TEST_DEVICE=cuda CUDA_DEVICE_MAX_CONNECTIONS=1 python -m pytest tests/offload/test_fences.py
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvprobe.cuda import Runtime, device_region, find_runtime, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import TransferError
from kvprobe.launchqueue import QueueLimits, calibrate
from kvprobe.offload import BlockPool, OffloadEngine

BLOCKS, BLOCK_BYTES = 64, 4096
ON_GPU = os.environ.get("KVPROBE_TEST_DEVICE") == "cuda"
COUNT = 10_000 if ON_GPU else 1_500


@pytest.fixture(params=[1, 4])
def runtime(request: pytest.FixtureRequest) -> Iterator[tuple[Runtime, QueueLimits]]:
    """One channel, or four, of a queue of 64; on a GPU what it has."""
    if ON_GPU:
        found = find_runtime("cuda")
        yield found, calibrate(found)
        return
    channels = request.param
    found = host_runtime(depth=64, copy_channels=channels, compute_channels=channels, submit_ns=-1.0)
    yield found, QueueLimits(64, channels, 64 * channels, 300, 600)
    found.reset()


@contextlib.contextmanager
def _hold(cuda: Runtime, stream: int) -> Iterator[None]:
    """Work on a stream that is not over before this is left; on a GPU it takes 100 ms, which is long enough."""
    if isinstance(cuda, HostRuntime):
        with cuda.gate() as gate:
            gate.launch(stream)
            yield
    else:
        cuda.launch_delay(stream, 100_000_000)
        yield


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_fences_alone_keep_the_order_of_what_depends_on_each_other(runtime, method):
    """Every transfer waits for the compute stream, and the compute stream for every transfer: one order, no hang."""
    cuda, limits = runtime
    rng = random.Random(7)
    device = device_region(cuda, BLOCKS * BLOCK_BYTES)
    pinned = host_region(cuda, BLOCKS * BLOCK_BYTES)
    view = np.frombuffer(pinned.owner.view(), dtype=np.uint64).reshape(BLOCKS, -1)
    view[:] = np.arange(BLOCKS, dtype=np.uint64)[:, None]
    compute = cuda.stream_create()
    cuda.memset_async(device.address, 0, device.bytes, compute)
    cpu, gpu = list(range(BLOCKS)), [0] * BLOCKS
    raised, gave_up = 0, 0

    def complain(transfer: object) -> None:
        nonlocal raised
        raised += 1
        raise RuntimeError("a callback that raises harms nobody")

    pools = (BlockPool(cuda, [device], BLOCK_BYTES), BlockPool(cuda, [pinned], BLOCK_BYTES))
    with OffloadEngine(cuda, *pools, policy="pooled", method=method, limits=limits, compute_stream=compute) as engine:
        for number in range(COUNT):
            size = rng.randint(1, BLOCKS)
            source, target = rng.sample(range(BLOCKS), size), rng.sample(range(BLOCKS), size)
            done = complain if number % 7 == 0 else None
            if rng.random() < 0.5:
                transfer = engine.load(source, target, done=done)
                for a, b in zip(source, target, strict=True):
                    gpu[b] = cpu[a]
            else:
                transfer = engine.store(source, target, done=done)
                for a, b in zip(source, target, strict=True):
                    cpu[b] = gpu[a]
            if number % 3:
                engine.fence(transfer, compute)
            else:
                transfer.wait()
            if number % 97 == 0:
                held = cuda.stream_create()
                with _hold(cuda, held):
                    given_up = engine.store([0], [0], after=held)
                    with pytest.raises(TransferError, match="did not end within"):
                        given_up.wait(timeout_s=0.0)
                engine.wait()
                assert given_up.done
                cuda.stream_destroy(held)
                gave_up += 1
                cpu[0] = gpu[0]
        engine.wait()
        assert raised == len(range(0, COUNT, 7))
        assert gave_up == len(range(0, COUNT, 97))
        assert set(engine.held.values()) == {0}
    assert [int(row[0]) for row in view] == cpu
    assert (view == view[:, :1]).all()
    cuda.memcpy(pinned.address, device.address, device.bytes, "d2h")
    assert [int(row[0]) for row in view] == gpu
    cuda.stream_destroy(compute)
    for region in (device, pinned):
        region.owner.close()
