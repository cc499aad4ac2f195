"""A host runtime of chosen size for each test, and pools whose bytes can be looked at."""

from __future__ import annotations

import contextlib
import ctypes as ct
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvprobe.cuda import Region, device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import CudaError
from kvprobe.launchqueue import QueueLimits
from kvprobe.offload import BlockPool, OffloadEngine


@pytest.fixture
def host() -> Iterator[Callable[..., HostRuntime]]:
    """Restarts the embedded host runtime with a given configuration."""

    def start(**config: float) -> HostRuntime:
        return host_runtime(**{"submit_ns": -1.0, **config})

    yield start
    host_runtime().reset()


@dataclasses.dataclass
class Bench:
    runtime: HostRuntime
    gpu: BlockPool
    cpu: BlockPool
    limits: QueueLimits

    def engine(self, **how: object) -> OffloadEngine:
        return OffloadEngine(self.runtime, self.gpu, self.cpu, limits=self.limits, **how)  # type: ignore[arg-type]

    @staticmethod
    def bytes_of(pool: BlockPool) -> list[np.ndarray]:
        """Each layer's bytes, (blocks, block_bytes), as a live view."""
        return [
            np.frombuffer((ct.c_ubyte * region.bytes).from_address(region.address), dtype=np.uint8).reshape(
                pool.blocks, pool.block_bytes
            )
            for region in pool.regions
        ]


@pytest.fixture
def bench(host: Callable[..., HostRuntime]) -> Iterator[Callable[..., Bench]]:
    regions: list[Region] = []

    def close() -> None:  # before the runtime restarts: an address freed later may be somebody else's by then
        while regions:
            with contextlib.suppress(CudaError):  # a test may have lost the device
                regions.pop().owner.close()

    def make(
        *,
        layers: int = 2,
        blocks: int = 64,
        gpu_bytes: int = 4096,
        cpu_bytes: int = 4096,
        depth: int = 256,
        channels: int = 4,
        **config: float,
    ) -> Bench:
        close()
        runtime = host(depth=depth, copy_channels=channels, **config)
        size = blocks * max(gpu_bytes, cpu_bytes)
        device = [device_region(runtime, size) for _ in range(layers)]
        pinned = [host_region(runtime, size) for _ in range(layers)]
        regions.extend([*device, *pinned])
        gpu, cpu = BlockPool(runtime, device, gpu_bytes), BlockPool(runtime, pinned, cpu_bytes)
        random = np.random.default_rng(1)
        for layer in Bench.bytes_of(cpu):
            layer[:] = random.integers(0, 256, layer.shape, dtype=np.uint8)
        return Bench(runtime, gpu, cpu, QueueLimits(depth, channels, depth * channels, 300, 600))

    yield make
    close()
