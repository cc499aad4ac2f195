"""OpenRLHF: DeepSpeed states that go to the CPU while its vLLM engines generate. Measured, never changed.

0.11.2 calls `offload_states` of DeepSpeed's optimiser with pinned memory and without blocking, then waits for the
device. Its vLLM engines sleep by vLLM's own sleep mode.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed

_MODULE = "openrlhf.utils.deepspeed.deepspeed_utils"


class DeepSpeedStates(TimedCalls):
    """`--ds.enable_sleep`."""

    name, option = "openrlhf.deepspeed", "--ds.enable_sleep"
    summary = "Names the offload and reload of DeepSpeed's states."
    timed = (
        timed(_MODULE, "offload_deepspeed_states", ("model",), "store"),
        timed(_MODULE, "reload_deepspeed_states", ("model",), "load"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """The phase, after the function's name."""
        return {"phase": f"{entry.target.path.partition('_')[0]}: DeepSpeed states"}


ADAPTERS = (DeepSpeedStates,)
