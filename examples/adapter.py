"""An adapter: times a server's function that moves data, without a change to the server.

    python examples/adapter.py

The server is a toy module here. A real adapter is the same class in a file of `patches/`; see CONTRIBUTING.md.
"""

from __future__ import annotations

import types
from typing import Any

from kvprobe.instrument import event_log
from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed

toy = types.ModuleType("toyserver.cache")
exec("def swap_in(blocks, block_bytes=4096):\n    return len(blocks)\n", toy.__dict__)


class SwapIn(TimedCalls):
    """Checks that `swap_in` takes what it is expected to take, and puts a timer around it."""

    name, versions = "toyserver.cache", ">=1,<2"
    timed = (timed("toyserver.cache", "swap_in", ("blocks",), "load", "waits for its copies"),)

    def describe(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What the call moved."""
        return {"copies": result, "bytes": result * kwargs.get("block_bytes", 4096)}


adapter = SwapIn()
adapter.prepare(("toyserver", "1.4"), fix="off")  # what kvprobe does with the version that is installed
adapter.instrument(toy)  # and once the module is imported
with event_log.subscribed() as events:  # under `kvprobe run` they go to the run folder, and from there to the page
    toy.swap_in(range(8), block_bytes=65536)
print([{key: event[key] for key in ("call", "bytes", "dur_ns", "cause")} for event in events])
adapter.uninstrument()
print(f"{adapter.name}: {adapter.state}")
