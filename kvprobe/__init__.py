"""kvprobe: says why KV-cache offload is slow, cures it while the server runs, and shows the gain.

The public API, re-exported; each name is imported when it is first used, so that importing kvprobe into a server costs
next to nothing.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing: the start-up hook has less than 1 ms
if TYPE_CHECKING:
    from typing import Any

    from kvprobe.cuda import PinnedPool, Runtime, find_runtime
    from kvprobe.diagnosis import Finding, diagnose
    from kvprobe.errors import (
        CudaError,
        KvprobeError,
        NativeError,
        PoolFullError,
        RecordingError,
        TransferError,
        UsageError,
    )
    from kvprobe.instrument import install, observe, uninstall
    from kvprobe.instrument.step_log import mark, mark_request
    from kvprobe.launchqueue import QueueLimits, calibrate
    from kvprobe.offload import (
        BlockCache,
        BlockPool,
        EngineOptions,
        LoadDedup,
        OffloadEngine,
        PackedPool,
        Split,
        Transfer,
    )
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.engine import recording_of
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting import write_report
    from kvprobe.reuse.sample import BlockSample

_HOMES = {
    "kvprobe.cuda": ("PinnedPool", "Runtime", "find_runtime"),
    "kvprobe.diagnosis": ("Finding", "diagnose"),
    "kvprobe.errors": (
        "CudaError",
        "KvprobeError",
        "NativeError",
        "PoolFullError",
        "RecordingError",
        "TransferError",
        "UsageError",
    ),
    "kvprobe.instrument": ("install", "observe", "uninstall"),
    "kvprobe.instrument.step_log": ("mark", "mark_request"),
    "kvprobe.launchqueue": ("QueueLimits", "calibrate"),
    "kvprobe.offload": (
        *("BlockCache", "BlockPool", "EngineOptions", "LoadDedup", "OffloadEngine", "PackedPool", "Split", "Transfer"),
    ),
    "kvprobe.recordings": ("open_recording",),
    "kvprobe.recordings.engine": ("recording_of",),
    "kvprobe.recordings.model": ("Recording",),
    "kvprobe.reuse.sample": ("BlockSample",),
    "kvprobe.reporting": ("write_report",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BlockCache",
    "BlockPool",
    "BlockSample",
    "CudaError",
    "EngineOptions",
    "Finding",
    "KvprobeError",
    "LoadDedup",
    "NativeError",
    "OffloadEngine",
    "PackedPool",
    "PinnedPool",
    "PoolFullError",
    "QueueLimits",
    "Recording",
    "RecordingError",
    "Runtime",
    "Split",
    "Transfer",
    "TransferError",
    "UsageError",
    "calibrate",
    "diagnose",
    "find_runtime",
    "install",
    "mark",
    "mark_request",
    "observe",
    "open_recording",
    "recording_of",
    "uninstall",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Imports a public name from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvprobe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
