"""toyserver: its cache's swap. Measured, never changed: its copies and its compute share a stream by design."""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed


class SwapIn(TimedCalls):
    """`toyserver.cache.swap_in`, which returns when the blocks have arrived."""

    name = "toyserver.cache"
    summary = "Times swap_in and counts the blocks that it moves."
    timed = (timed("toyserver.cache", "swap_in", ("blocks",), "load", "waits for its copies"),)

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """What the call moved."""
        return {"copies": result}


ADAPTERS = (SwapIn,)
