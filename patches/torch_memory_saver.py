"""torch_memory_saver: which tag is paused or resumed. Measured; what makes it slow is cured below Python.

0.0.10 (its C++ sources) takes the allocations of a tag one by one, under a lock. With a CPU backup, pinned
by default: `cudaMallocHost`, a synchronous `cudaMemcpy`, then `cuMemUnmap` and `cuMemRelease`; back: `cuMemCreate`,
`cuMemMap`, `cuMemSetAccess`, the copy, `cudaFreeHost` (kept instead where `retain_cpu_backup` is set).
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed

_MODULE = "torch_memory_saver.entrypoint"


class PauseResume(TimedCalls):
    """`torch_memory_saver.pause` and `resume`."""

    name = "torch_memory_saver.pause"
    summary = "Names each pause and resume with its tag."
    timed = (
        timed(_MODULE, "TorchMemorySaver.pause", ("tag",), "store"),
        timed(_MODULE, "TorchMemorySaver.resume", ("tag",), "load"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """The phase in its own words; its bytes only the compiled part knows."""
        what = entry.target.path.rpartition(".")[2]
        tag = kwargs.get("tag", args[1] if len(args) > 1 else None)
        return {"phase": f"{what}: {tag}" if tag else what}


ADAPTERS = (PauseResume,)
