"""diffusers: group offloading, one stream for all groups and a host wait before each. Measured, never changed.

Its transfer stream was raced more than once upstream (a missing wait on the compute stream, `record_stream` on the
wrong stream), so kvprobe names what blocks, and what does not wait although it must, and leaves the streams alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import TimedCalls, TimedFunction, tensor_bytes, timed
from kvprobe.instrument.hooks import Call, Patcher

_MODULE = "diffusers.hooks.group_offloading"


class GroupOffload(TimedCalls):
    """`apply_group_offloading` and `enable_group_offload`."""

    name = "diffusers.group_offload"
    summary = "Times ModuleGroup.onload_ and offload_: bytes, host waits, pageable copies, pinning at every onload."
    timed = (timed(_MODULE, "ModuleGroup.onload_", (), "load"), timed(_MODULE, "ModuleGroup.offload_", (), "store"))
    targets = (Target(_MODULE, "GroupOffloadingHook.pre_forward", ("module",)),)

    def __init__(self) -> None:
        super().__init__()
        self._raced = False

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Also look at the moment before a group computes."""
        super().patch(patcher, module)
        patcher.wrap(module.GroupOffloadingHook, "pre_forward", self.forward_begins)

    def forward_begins(self, call: Call, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Says once where a group that loads itself computes without anything having waited for its copies.

        diffusers waits for a group's stream when it loads the group after it, or when another one loaded this group.
        Where it looked for no order of groups (0.42: every parameter of a model is inside a block), it does neither.
        """
        result = call()
        group, after = hook.group, hook.next_group
        waits = after is not None and not after.onload_self
        if not self._raced and group.stream is not None and group.non_blocking and group.onload_self and not waits:
            self._raced = True
            self.decide(
                "note",
                "a group's forward begins without a wait for the copies of its weights: the output may be wrong. "
                'Use offload_type="leaf_level", or use_stream=False',
            )
        return result

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
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
