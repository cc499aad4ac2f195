"""vLLM's OffloadingConnector, worker side: what its copying handlers have in common, in the three shapes they have had.

Up to 0.12 one handler with two shared streams and one `cudaMemcpyAsync` a block; 0.13 to 0.19 a stream per transfer
with the same loop (`vllm_loops.py`); from 0.20 one descriptor batch per transfer (`vllm_batches.py`). Building
descriptors stays vLLM's own code: hooks around its copy operation take what it is called with. Where auto found that
worth it, the copies go to kvprobe's submitter instead, behind what vLLM's own stream holds, and the events that vLLM
asks tell the submitter's end.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvprobe.instrument.handover import CopyAdapter
from kvprobe.instrument.hooks import Call


def module_with(module: Any, **functions: Any) -> ModuleType:
    """A module with some functions of its own: takes the place of a name in one importing module only.

    A real module, because the interpreter reads attributes of those as fast as the server's own.
    """
    made = ModuleType(getattr(module, "__name__", "ops"))
    made.__dict__.update(functions, __getattr__=lambda name: getattr(module, name))
    return made


class CopyHandlers(CopyAdapter):
    """What the adapters of all three shapes share: vLLM asks its handler what has ended."""

    def finished(self, call: Call, handler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `get_finished`: note when the server noticed."""
        results = call()
        paths = self.handlers.get(handler) if results else None
        if paths:
            for result in results:
                job, ok = (result[0], result[1]) if isinstance(result, tuple) else (result.job_id, result.success)
                for path in paths.values():
                    path.done(job, ok)
        return results
