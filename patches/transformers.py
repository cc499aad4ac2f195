"""transformers: the offloaded KV `Cache` and continuous batching's `OffloadingManager`. Measured, never changed.

The cache's one prefetch stream is paired with two waits that also keep the allocator from reusing memory too early,
and continuous batching copies on the compute stream by design: neither has a stream that could be swapped safely.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import TimedCalls, TimedFunction, tensor_bytes, timed

from .transformers_steps import Steps

_MANAGER = "transformers.generation.continuous_batching.offloading_manager"


class OffloadedCache(TimedCalls):
    """`Cache(offloading=True)`: a layer's whole history moves in both directions for every token."""

    name = "transformers.cache"
    summary = "Times Cache.prefetch and Cache.offload and counts the bytes that they move for each token."
    timed = (
        timed("transformers.cache_utils", "Cache.prefetch", ("layer_idx", "only_non_sliding"), "load"),
        timed("transformers.cache_utils", "Cache.offload", ("layer_idx", "only_non_sliding"), "store"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Bytes of the layer; for a prefetch, of the layer that is fetched if it is the one asked for."""
        cache = args[0]
        index = kwargs["layer_idx"] if "layer_idx" in kwargs else args[1]
        layers = cache.layers
        layer = layers[index % len(layers)] if layers else None
        size = tensor_bytes(getattr(layer, "keys", None), getattr(layer, "values", None))
        return {"layer": index, "bytes": size, "copies": 2 if size else 0, "cause": "whole history of the layer"}


class ContinuousBatching(TimedCalls):
    """`OffloadingManager`: requests swapped out and back on the compute stream."""

    name = "transformers.continuous_batching"
    versions = ">=5.20,<6"
    summary = "Times the KV swap of continuous batching: requests and bytes out and back, on the compute stream."
    timed = (
        timed(_MANAGER, "OffloadingManager._offload_to_cpu", ("victims", "victim_block_tables"), "store"),
        timed(_MANAGER, "OffloadingManager.restore_scheduled_requests", ("requests_in_batch",), "load"),
    )

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """How many blocks each allocator holds on the CPU side, before."""
        return args[0], self._held(args[0])

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """The difference is what moved."""
        manager, held = remembered
        now = self._held(manager)
        size = sum(abs(now.get(name, 0) - held.get(name, 0)) * each for name, each in self._sizes(manager).items())
        cause = "copies run on the compute stream: the next forward waits for them" if size else ""
        return {"bytes": size, "cause": cause}

    @staticmethod
    def _held(manager: Any) -> dict[str, int]:
        held: dict[str, int] = {}
        for blocks in manager._request_id_to_cpu_blocks.values():
            for name, ids in blocks.items():
                held[name] = held.get(name, 0) + len(ids)
        return held

    @staticmethod
    def _sizes(manager: Any) -> dict[str, int]:
        return {name: int(a.bytes_per_block) for name, a in manager.cache.cache_allocators.items()}


ADAPTERS = (OffloadedCache, ContinuousBatching, Steps)
