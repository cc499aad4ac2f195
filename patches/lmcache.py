"""LMCache: the connectors inside a server's worker, and the separate `lmcache server`. Measured, never changed.

Its streams share a staging buffer and a table of block ids (`_temp_buffer`, `block_ids_buffer`): a transfer moved to
another stream would overwrite what the one before it still reads. So no stream is swapped here.
"""

from __future__ import annotations

from typing import Any

from kvprobe.instrument.calls import Timed, TimedCalls, timed

_CONNECTORS = "lmcache.v1.gpu_connector.gpu_connectors"
_GROUPS = "lmcache.v1.multiprocess.object_group_transfer"
_LOAD_SYNC = "ends with load_stream.synchronize(): the thread waits for the whole transfer"
_STORE_SYNC = "store_stream.synchronize() after every chunk that goes to host memory"


def _connector(name: str, load: str, store: str, batched: tuple[str, ...] = ("memory_objs", "starts", "ends")) -> Any:
    return (
        timed(_CONNECTORS, f"{name}.batched_to_gpu", batched, "load", load),
        timed(_CONNECTORS, f"{name}.batched_from_gpu", None, "store", store),
    )


class Connectors(TimedCalls):
    """In-process mode: `LMCacheConnectorV1` in vLLM, the SGLang connector."""

    name, server, distributions, versions = "lmcache.connectors", "lmcache", ("lmcache",), ">=0.5,<0.6"
    summary = "Times the GPU connectors' loads and stores and says which call makes the thread wait."
    timed = (
        *_connector("VLLMPagedMemGPUConnectorV2", _LOAD_SYNC, _STORE_SYNC),
        *_connector("VLLMPagedMemGPUConnectorV3", _LOAD_SYNC, _STORE_SYNC),
        *_connector(
            "VLLMPagedMemLayerwiseGPUConnector", "", "store_stream.synchronize() when sync is asked for",
            ("starts", "ends"),
        ),
        *_connector(
            "VLLMBufferLayerwiseGPUConnector", "torch.cuda.synchronize() for every layer",
            "store_stream.synchronize() for every layer", ("starts", "ends"),
        ),
        *_connector("SGLangGPUConnector", "", "torch.cuda.synchronize() after every chunk"),
    )  # fmt: skip

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Chunks and bytes of what was moved, as far as the arguments show it."""
        objects = kwargs.get("memory_objs")
        if objects is None and len(args) > 1 and isinstance(args[1], list | tuple):
            objects = args[1]
        starts = [a for a in (kwargs.get("starts"), *args[1:]) if isinstance(a, list | tuple)]
        return {"copies": len(starts[0]) if starts else 0, "bytes": object_bytes(objects)}


class Server(TimedCalls):
    """`lmcache server`: copies in a process of its own, over the worker's memory. Start that command under kvprobe."""

    name, server, distributions, versions = "lmcache.server", "lmcache", ("lmcache",), ">=0.5.6,<0.6"
    summary = "Times transfers of the separate lmcache server, whose one stream serves loads and stores in turn."
    _cause = "one stream for loads and stores of all requests: waits for earlier ones"
    timed = (
        timed(
            _GROUPS, "transfer_kv_per_object_group",
            ("cache_context", "block_ids_gpu", "memory_objs", "object_group_id", "batch_size", "skip_first_n_tokens",
             "direction", "transfer_key"), "both", _cause,
        ),
        timed(
            _GROUPS, "run_direct_transfer",
            ("cache_context", "block_ids_host", "memory_objs", "object_group_id", "skip_first_n_tokens", "direction"),
            "both", _cause,
        ),
    )  # fmt: skip

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Chunks, bytes and the direction that was asked for."""
        objects = kwargs.get("memory_objs", args[2] if len(args) > 2 else None)
        way = str(kwargs.get("direction", args[-1] if len(args) > 5 else "")).upper()
        direction = "load" if "H2D" in way else "store" if "D2H" in way else "both"
        return {"copies": len(objects or ()), "bytes": object_bytes(objects), "direction": direction}


def object_bytes(objects: Any) -> int:
    """Bytes of LMCache memory objects; those it cannot size count 0."""
    total = 0
    for one in objects or ():
        size = getattr(one, "get_size", None)
        try:
            total += int(size()) if size is not None else 0
        except Exception:
            continue
    return total


ADAPTERS = (Connectors, Server)
