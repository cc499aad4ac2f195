"""The CUDA runtime as Python objects: which library, streams, events, memory.

One interface, two providers: the CUDA runtime on a machine with an NVIDIA GPU, the embedded host runtime elsewhere.
Both export the same C symbols, so there is one code path.
"""

from kvprobe.cuda.memory import Buffer, Region, device_region, host_region, region_of
from kvprobe.cuda.pinned import PinnedBuffer, PinnedPool, PinnedStats
from kvprobe.cuda.runtime import MEMCPY_KIND, Runtime, find_runtime

__all__ = [
    "MEMCPY_KIND",
    "Buffer",
    "PinnedBuffer",
    "PinnedPool",
    "PinnedStats",
    "Region",
    "Runtime",
    "device_region",
    "find_runtime",
    "host_region",
    "region_of",
]
