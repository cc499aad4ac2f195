"""SGLang's release and resume of memory: which tags. Measured; what makes it slow is cured below Python.

0.5.23's scheduler pauses torch_memory_saver tag by tag ("kv_cache", "weights", "cuda_graph"), weights with a copy in
CPU memory only under `--enable-weights-cpu-backup`, and keeps clones of the model's buffers on the GPU meanwhile.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed

_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"


class MemoryOccupation(TimedCalls):
    """`release_memory_occupation` and `resume_memory_occupation`, in the scheduler's process."""

    name, option = "sglang.memory_occupation", "--enable-memory-saver"
    summary = "Names each release and resume of memory with its tags."
    timed = (
        timed(_MODULE, "SchedulerWeightUpdaterManager.release_memory_occupation", ("recv_req",), "store"),
        timed(_MODULE, "SchedulerWeightUpdaterManager.resume_memory_occupation", ("recv_req",), "load"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """The phase in SGLang's own words."""
        request = kwargs["recv_req"] if "recv_req" in kwargs else args[1]
        what = entry.target.path.rpartition(".")[2].replace("_", " ")
        tags = getattr(request, "tags", None) or ("all",)
        return {"phase": f"{what}: {', '.join(map(str, tags))}"}
