"""The instrumented offload engine: transfers, stream policies, dedup, block pools, the auto controller."""

from kvprobe.offload.auto import Auto
from kvprobe.offload.blocks import BlockPool
from kvprobe.offload.cache import BlockCache
from kvprobe.offload.dedup import LoadDedup
from kvprobe.offload.engine import OffloadEngine
from kvprobe.offload.options import EngineOptions
from kvprobe.offload.packed import PackedPool
from kvprobe.offload.rungs import Decision, Rung, Sample
from kvprobe.offload.streams import EventPool, StreamPool
from kvprobe.offload.submitter import Bounds, Copies, Submission, Submitter
from kvprobe.offload.transfer import Split, Transfer

__all__ = [
    "Auto",
    "BlockCache",
    "BlockPool",
    "Bounds",
    "Copies",
    "Decision",
    "EngineOptions",
    "EventPool",
    "LoadDedup",
    "OffloadEngine",
    "PackedPool",
    "Rung",
    "Sample",
    "Split",
    "StreamPool",
    "Submission",
    "Submitter",
    "Transfer",
]
