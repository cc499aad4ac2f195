"""accelerate: CPU offload by `AlignDevicesHook` (one copy a parameter on every forward) and by `CpuOffload` (a model).

Measured, never changed. The copies come from pageable memory and block: nothing of kvprobe's streams would help. The
figure that matters is the share of the forward that the thread spends in them, and how many of them came from pageable
memory.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import TimedCalls, TimedFunction, tensor_bytes, timed
from kvprobe.instrument.hooks import Call, Patcher


class AlignDevices(TimedCalls):
    """`cpu_offload`, `dispatch_model(device_map=...)`, `disk_offload`."""

    name = "accelerate.hooks"
    summary = "Times the copies of AlignDevicesHook per module and forward; counts pageable and blocking ones."
    timed = (
        timed("accelerate.hooks", "AlignDevicesHook.pre_forward", ("module",), "load"),
        timed("accelerate.hooks", "AlignDevicesHook.post_forward", ("module", "output"), "store"),
    )
    targets = (Target("accelerate.hooks", "set_module_tensor_to_device", ("module", "tensor_name", "device", "value")),)

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Also see each parameter's copy."""
        super().patch(patcher, module)
        patcher.wrap(module, "set_module_tensor_to_device", self.copy)

    def copy(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Around one parameter's copy: what came from where, and whether it blocked."""
        value = kwargs.get("value", args[3] if len(args) > 3 else None)
        start = time.monotonic_ns()
        result = call()
        forward = self.running()
        if value is not None and forward is not None and len(forward[1]) < 100_000:
            pageable = value.device.type == "cpu" and not value.is_pinned()
            blocking = not kwargs.get("non_blocking", False)
            forward[1].append((time.monotonic_ns() - start, tensor_bytes(value), pageable, blocking))
        return result

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module, and the copies of this forward: took ns, bytes, pageable, blocking."""
        copies: list[tuple[int, int, bool, bool]] = []
        return args[1], copies

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """The sum over the module's parameters."""
        module, copies = remembered
        pageable = sum(c[2] for c in copies)
        cause = ""
        if copies and entry.direction == "load":
            cause = f"{pageable} of {len(copies)} copies from pageable memory, {sum(c[3] for c in copies)} blocking"
        return {
            "module": type(module).__name__,
            "copies": len(copies),
            "bytes": sum(c[1] for c in copies),
            "copy_call_ns": sum(c[0] for c in copies),
            "pageable_copies": pageable,
            "blocking_copies": sum(c[3] for c in copies),
            "cause": cause,
        }


class ModelOffload(TimedCalls):
    """`cpu_offload_with_hook`: a whole model goes to the GPU before its forward, and back before the next model's.

    diffusers' `enable_model_cpu_offload` is made of it.
    """

    name = "accelerate.model_offload"
    summary = "Times the moves of whole models by CpuOffload: bytes, and how much of them lies in pageable memory."
    timed = (
        timed("accelerate.hooks", "CpuOffload.pre_forward", ("module",), "load"),
        timed("accelerate.hooks", "CpuOffload.init_hook", ("module",), "store"),
    )

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where each parameter and buffer of the module is; its tensors change in place when it moves."""
        module = kwargs["module"] if "module" in kwargs else args[1]
        held = [*module.parameters(), *module.buffers()]
        return module, [(tensor.device, tensor.device.type == "cpu" and not tensor.is_pinned()) for tensor in held]

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """What has another device now has moved; of a load, what came from pageable memory."""
        module, held = remembered
        now = [*module.parameters(), *module.buffers()]
        moved = [
            (tensor, pageable) for tensor, (device, pageable) in zip(now, held, strict=False) if tensor.device != device
        ]
        load = entry.direction == "load"
        pageable = sum(was for _, was in moved) if load else 0
        blocking = len(moved)  # Module.to without non_blocking
        cause = f"{pageable} of {len(moved)} copies from pageable memory, {blocking} blocking" if moved and load else ""
        return {
            "module": type(module).__name__,
            "copies": len(moved),
            "bytes": tensor_bytes(*(tensor for tensor, _ in moved)),
            "pageable_copies": pageable,
            "blocking_copies": blocking,
            "cause": cause or ("a whole model goes back over the link, blocking" if moved else ""),
        }


ADAPTERS = (AlignDevices, ModelOffload)
