"""diffusers: group offloading, one stream for all groups and a host wait before each. Measured, never changed.

Its transfer stream was raced more than once upstream (a missing wait on the compute stream, `record_stream` on the
wrong stream), so kvprobe names what blocks and leaves the streams alone.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import Timed, TimedCalls, tensor_bytes, timed

_MODULE = "diffusers.hooks.group_offloading"


class GroupOffload(TimedCalls):
    """`apply_group_offloading` and `enable_group_offload`."""

    name, server, distributions, versions = "diffusers.group_offload", "diffusers", ("diffusers",), ">=0.33,<1"
    summary = "Times ModuleGroup.onload_ and offload_: bytes, host waits, pageable copies, pinning at every onload."
    timed = (timed(_MODULE, "ModuleGroup.onload_", (), "load"), timed(_MODULE, "ModuleGroup.offload_", (), "store"))

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """What the group holds, and which of its settings makes the host wait."""
        group = args[0]
        tensors = [p for m in group.modules for p in m.parameters()]
        tensors += [*getattr(group, "parameters", []), *getattr(group, "buffers", [])]
        causes = []
        if group.stream is None and not group.non_blocking:
            causes.append("blocking copies on the compute stream")
        if entry.direction == "load":
            if group.stream is not None:
                causes.append("waits for the previous group's transfer on the host")
                if getattr(group, "low_cpu_mem_usage", False):
                    causes.append("pins every tensor at every onload")
            else:
                causes.append("pageable memory")
        elif group.stream is not None and not group.record_stream:
            causes.append("waits for the compute stream on the host (record_stream=False)")
        return {"bytes": tensor_bytes(*tensors), "copies": len(tensors), "cause": "; ".join(causes)}


ADAPTERS = (GroupOffload,)
