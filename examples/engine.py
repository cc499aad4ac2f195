"""An engine: blocks go from the CPU pool to the GPU pool while the model's thread does something else.

python examples/engine.py      # a GPU where there is one, the host runtime elsewhere
"""

from __future__ import annotations

import asyncio

import kvprobe
from kvprobe.cuda import device_region, host_region

LAYERS, BLOCKS, BLOCK_BYTES = 4, 256, 64 << 10


async def main() -> None:
    """Stores blocks, loads them back, and waits in each way there is."""
    runtime = kvprobe.find_runtime("auto")
    compute = runtime.stream_create()
    # a server hands over its own tensors instead: anything with DLPack or __cuda_array_interface__, or (address, bytes)
    gpu_layers = [device_region(runtime, BLOCKS * BLOCK_BYTES) for _ in range(LAYERS)]
    cpu_layers = [host_region(runtime, BLOCKS * BLOCK_BYTES) for _ in range(LAYERS)]
    gpu = kvprobe.BlockPool(runtime, gpu_layers, BLOCK_BYTES)
    cpu = kvprobe.BlockPool(runtime, cpu_layers, BLOCK_BYTES)
    with kvprobe.OffloadEngine(runtime, gpu, cpu, policy="auto", compute_stream=compute) as engine:
        stored = engine.store(range(64), range(64), done=lambda t: print(f"{t.direction} {t.id}: {t.state}"))
        await stored  # sleeps; the event loop runs on
        loaded = engine.load(range(64), range(128, 192))
        engine.fence(loaded, compute)  # later work on `compute` finds the blocks; this thread goes on
        loaded.wait()
        print(f"{loaded.bytes >> 20} MiB under the {loaded.policy} policy: {loaded.split()}")
        print(f"decisions of auto: {[d.reason for d in engine.auto.decisions]}")


asyncio.run(main())
