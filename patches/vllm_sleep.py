"""vLLM's sleep mode: which level, which tags, how many bytes. Measured; what makes it slow is cured below Python.

0.33's `CuMemAllocator.sleep` pins a tensor for each allocation whose tag is kept (`torch.empty(pin_memory=True)`),
copies it by `cudaMemcpy`, and unmaps it; `wake_up` maps and copies back, and lets go of the tensor. The state of the
runner and of CUDA graphs is kept at each level, weights at level 1 (sleep_mode_backend.py). Level 2 throws weights away
but for those that `sleep_preserve_parameter_names` names; these and the model's buffers the worker copies by itself.

Under `fix="auto"` the interposer is told of each allocation whether a sleep of level 1 copies it: then pinned memory
for it is there when it does. Which level a sleep will be, the call alone says (vLLM has no setting for it): where all
are of level 2, memory for the weights is made once, in vain, and let go a second after the first sleep began.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvprobe.environment import FIX
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed
from kvprobe.instrument.hooks import Call, Patcher

_COPIED = ("weights", "runtime", "cudagraph")  # by a sleep of level 1
_WORKER, _ALLOCATOR = "vllm.v1.worker.gpu_worker", "vllm.device_allocator.cumem"


class SleepMode(TimedCalls):
    """`--enable-sleep-mode`."""

    name, versions = "vllm.sleep", ">=0.11,<0.34"
    option = "--enable-sleep-mode"
    summary = "Names each sleep and wake with its level and tags, and says how many bytes were kept in CPU memory."
    timed = (
        timed(_WORKER, "Worker.sleep", ("level",), "store"),
        timed(_WORKER, "Worker.wake_up", ("tags",), "load"),
        timed(_ALLOCATOR, "CuMemAllocator.sleep", ("offload_tags",), "store"),
        timed(_ALLOCATOR, "CuMemAllocator.wake_up", ("tags",), "load"),
    )
    targets = (Target(_ALLOCATOR, "CuMemAllocator._python_malloc_callback", ("allocation_handle",), optional=True),)

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Also see allocations, where the interposer would prepare for them."""
        super().patch(patcher, module)
        tell = _listener()
        owner = getattr(module, "CuMemAllocator", None)
        if tell is None or module.__name__ != _ALLOCATOR or not hasattr(owner, "_python_malloc_callback"):
            return

        def allocated(call: Call, allocator: Any, *args: Any, **kwargs: Any) -> Any:
            """This thread maps the memory as soon as this has returned."""
            tell(int(allocator.current_tag in _COPIED))
            return call()

        patcher.wrap(owner, "_python_malloc_callback", allocated)

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """How it was called, and of the allocator how much it keeps; a worker's call learns from the allocator's."""
        outer = self.running()
        given = _given(entry, args, kwargs)
        if entry.target.module == _WORKER:
            return {"given": given}
        if entry.direction == "store" and outer is not None:
            outer["tags"] = given
        return {"given": given, "allocator": args[0], "kept": _kept(args[0])}

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """The phase in vLLM's own words; of the allocator, the bytes that it keeps now and did not before, or back."""
        given = remembered["given"]
        allocator = remembered.get("allocator")
        if entry.direction == "load":
            fields = {"phase": _said("wake up", given)}
        elif allocator is None:
            fields = {"phase": _said(f"sleep, level {given}", remembered.get("tags"))}
        else:
            fields = {"phase": _said("sleep", given)}
        if allocator is not None:
            fields["bytes"] = abs(_kept(allocator) - remembered["kept"])
        return fields


def _listener() -> Callable[[int], Any] | None:
    """The interposer's function that is told; None where it would change nothing."""
    if FIX.value() != "auto":
        return None
    told: Callable[[int], Any] | None = getattr(ctypes.CDLL(None), "kvprobe_is_backed_up", None)
    return told


def _given(entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = (entry.target.parameters or ("",))[0]
    default = 1 if name == "level" else None
    return args[1] if len(args) > 1 else kwargs.get(name, default)


def _said(what: str, tags: Any) -> str:
    tags = (tags,) if isinstance(tags, str) else tuple(tags or ())
    return f"{what}: {', '.join(map(str, tags))}" if tags else what


def _kept(allocator: Any) -> int:
    """Bytes in CPU memory that the allocator keeps."""
    held = (one.cpu_backup_tensor for one in list(allocator.pointer_to_data.values()))
    return sum(int(one.numel()) * int(one.element_size()) for one in held if one is not None)
