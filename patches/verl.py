"""verl: weights and optimiser of the trainer that go to the CPU and come back. Measured, never changed.

0.9.1: `Tensor.to("cpu", non_blocking=True)` has torch pin the result, in sizes of powers of two that its host allocator
keeps; the optimiser of a hybrid Megatron engine, frozen weights and gradients go by `.to("cpu")`, which is pageable and
blocks; Megatron's own buffers have a pinned copy that is made once.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed

_FSDP, _MEGATRON = "verl.utils.fsdp_utils", "verl.utils.megatron_utils"


class _Moves(TimedCalls):
    """Functions `offload_WHAT` and `load_WHAT`."""

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """The phase, after the function's name."""
        what, _, rest = entry.target.path.partition("_")
        return {"phase": f"{what}: {rest.removesuffix('_to_cpu').removesuffix('_to_gpu').replace('_', ' ')}"}


class Fsdp(_Moves):
    """`param_offload` and `optimizer_offload` of FSDP engines."""

    name, option = "verl.fsdp", "param_offload or optimizer_offload"
    summary = "Names the offload and load of weights and optimiser of an FSDP engine."
    timed = (
        timed(_FSDP, "offload_fsdp_model_to_cpu", ("model",), "store"),
        timed(_FSDP, "load_fsdp_model_to_gpu", ("model",), "load"),
        timed(_FSDP, "offload_fsdp_optimizer", ("optimizer",), "store"),
        timed(_FSDP, "load_fsdp_optimizer", ("optimizer", "device_id"), "load"),
    )


class Megatron(_Moves):
    """The same of Megatron engines."""

    name, option = "verl.megatron", "param_offload or optimizer_offload"
    summary = "Names the offload and load of weights and optimiser of a Megatron engine."
    timed = (
        timed(_MEGATRON, "offload_megatron_model_to_cpu", ("models",), "store"),
        timed(_MEGATRON, "load_megatron_model_to_gpu", ("models",), "load"),
        timed(_MEGATRON, "offload_megatron_optimizer", ("optimizers",), "store"),
        timed(_MEGATRON, "load_megatron_optimizer", ("optimizers",), "load"),
    )


ADAPTERS = (Fsdp, Megatron)
