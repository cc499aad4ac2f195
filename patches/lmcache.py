"""LMCache: the connectors inside a server's worker, and the separate `lmcache server`. Measured, never changed.

Its streams share a staging buffer and a table of block ids (`_temp_buffer`, `block_ids_buffer`): a transfer moved to
another stream would overwrite what the one before it still reads. So no stream is swapped here.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, metrics
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import Account
from kvprobe.instrument.calls import Timed, TimedCalls, timed
from kvprobe.instrument.hooks import Call, Patcher

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

    name = "lmcache.connectors"
    summary = "Times the GPU connectors' loads and stores and says which call makes the thread wait."
    timed = (
        *_connector("VLLMPagedMemGPUConnectorV2", _LOAD_SYNC, _STORE_SYNC),
        *_connector("VLLMPagedMemGPUConnectorV3", _LOAD_SYNC, _STORE_SYNC),
        *_connector(
            "VLLMPagedMemLayerwiseGPUConnector",
            "",
            "store_stream.synchronize() when sync is asked for",
            ("starts", "ends"),
        ),
        *_connector(
            "VLLMBufferLayerwiseGPUConnector",
            "torch.cuda.synchronize() for every layer",
            "store_stream.synchronize() for every layer",
            ("starts", "ends"),
        ),
        *_connector("SGLangGPUConnector", "", "torch.cuda.synchronize() after every chunk"),
        *_connector("SGLangLayerwiseGPUConnector", "", "", ("starts", "ends")),
        *_connector("TRTLLMGPUConnector", "", ""),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Chunks and bytes of what was moved, as far as the arguments show it."""
        objects = kwargs.get("memory_objs")
        if objects is None and len(args) > 1 and isinstance(args[1], list | tuple):
            objects = args[1]
        starts = [a for a in (kwargs.get("starts"), *args[1:]) if isinstance(a, list | tuple)]
        return {"copies": len(starts[0]) if starts else 0, "bytes": object_bytes(objects)}


class Server(TimedCalls):
    """`lmcache server`: copies in a process of its own, over the worker's memory. Start that command under kvprobe."""

    name, versions = "lmcache.server", ">=0.5.6,<0.6"
    summary = "Times transfers of the separate lmcache server, whose one stream serves loads and stores in turn."
    _cause = "one stream for loads and stores of all requests: waits for earlier ones"
    timed = (
        timed(
            _GROUPS,
            "transfer_kv_per_object_group",
            (
                "cache_context",
                "block_ids_gpu",
                "memory_objs",
                "object_group_id",
                "batch_size",
                "skip_first_n_tokens",
                "direction",
                "transfer_key",
            ),
            "both",
            _cause,
        ),
        timed(
            _GROUPS,
            "run_direct_transfer",
            ("cache_context", "block_ids_host", "memory_objs", "object_group_id", "skip_first_n_tokens", "direction"),
            "both",
            _cause,
        ),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Chunks, bytes and the direction that was asked for."""
        objects = kwargs.get("memory_objs", args[2] if len(args) > 2 else None)
        way = str(kwargs.get("direction", args[-1] if len(args) > 5 else "")).upper()
        direction = "load" if "H2D" in way else "store" if "D2H" in way else "both"
        return {"copies": len(objects or ()), "bytes": object_bytes(objects), "direction": direction}


class EngineDriven(TimedCalls):
    """`lmcache server` where the engine copies for itself: the server takes and hands out buffers in CPU memory."""

    name, versions = "lmcache.engine_driven", ">=0.5.6,<0.6"
    summary = "Times the server's side of engine-driven transfers: what it takes over and hands out, serialised."
    _module = "lmcache.v1.multiprocess.modules.engine_driven_transfer"
    timed = (
        timed(
            _module,
            "EngineDrivenTransferModule.commit_store",
            ("key", "instance_id", "cpu_data"),
            "store",
            "one blocking handler takes the chunks over",
        ),
        timed(
            _module,
            "EngineDrivenTransferModule.prepare_retrieve",
            ("key", "instance_id"),
            "load",
            "one blocking handler hands the chunks out",
        ),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Bytes that went through the message itself; those in shared memory are not told here."""
        data = kwargs.get("cpu_data", args[3] if len(args) > 3 else b"")
        return {"bytes": len(data if entry.direction == "store" else result.data)}


class MultiProcessWorker(TimedCalls):
    """vLLM's side of LMCache's separate process: what `--kv-offloading-backend lmcache` selects.

    The worker hands requests over and copies nothing; the copies are `lmcache.server`'s, in the server's process.
    """

    name, versions = "lmcache.mp_worker", ">=0.5.6,<0.6"
    summary = "Times the hand-over of loads and stores from vLLM's worker to the separate lmcache server."
    _module = "lmcache.integration.vllm.vllm_multi_process_adapter"
    timed = (
        timed(
            _module, "LMCacheMPWorkerAdapter.batched_submit_retrieve_requests", ("request_ids", "ops", "event"), "load"
        ),
        timed(
            _module, "LMCacheMPWorkerAdapter.batched_submit_store_requests", ("request_ids", "ops", "event"), "store"
        ),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Requests and blocks that were handed over."""
        ops = kwargs["ops"] if "ops" in kwargs else args[2]
        return {"requests": len(ops), "copies": sum(len(one.flat_block_ids) for one in ops)}


class Offload(Adapter):
    """LMCache in the server's worker: what was asked for, found, kept and thrown away."""

    name = "lmcache.offload"
    summary = "Counts tokens asked for and found, chunks stored, loaded and evicted unread, and waits for loads."
    _engine, _cpu = "lmcache.v1.cache_engine", "lmcache.v1.storage_backend.local_cpu_backend"
    targets = (
        Target(_engine, "LMCacheEngine.retrieve", ("tokens", "mask")),
        Target(_cpu, "LocalCPUBackend.submit_put_task", ("key", "memory_obj")),
        Target(_cpu, "LocalCPUBackend.get_blocking", ("key",)),
        Target(_cpu, "LocalCPUBackend.remove", ("key", "force")),
    )

    def __init__(self) -> None:
        super().__init__()
        self._account: Account | None = None
        self._asked = 0

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the engine's loads, and what comes and goes in its CPU memory."""
        if module.__name__ == self._engine:
            patcher.wrap(module.LMCacheEngine, "retrieve", self.retrieve)
        else:
            patcher.wrap(module.LocalCPUBackend, "submit_put_task", self.stored)
            patcher.wrap(module.LocalCPUBackend, "get_blocking", self.loaded)
            patcher.wrap(module.LocalCPUBackend, "remove", self.removed)

    def step_aside(self) -> None:
        """The last figures."""
        if self._account is not None:
            self._account.tell()

    def account(self) -> Account | None:
        """Where to count; None while nobody would hear of it."""
        if self._account is None and (event_log.wanted() or metrics.exposed()):
            self._account = Account(self.name, "LMCache in CPU memory")
        return self._account

    def retrieve(self, call: Call, engine: Any, tokens: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Around `retrieve`: it returns when the blocks are on the GPU, and says which tokens they are of."""
        start = time.monotonic_ns()
        found = call()
        took_ns, account = time.monotonic_ns() - start, self.account()
        if account is not None:
            self._asked += 1
            hit = int(found.sum())
            given = len(tokens) - int(mask.sum()) if mask is not None else 0
            account.admitted(kwargs.get("req_id", self._asked), len(tokens), given, hit)
            if hit:
                account.waited(took_ns)
        return found

    def stored(self, call: Call, backend: Any, key: Any, memory_obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `submit_put_task`: nothing happens where the chunk is there already."""
        account = self.account()
        fresh = account is not None and key not in backend.hot_cache
        result = call()
        if account is not None and fresh and key in backend.hot_cache:
            account.stored((key,), object_bytes((memory_obj,)))
        return result

    def loaded(self, call: Call, backend: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `get_blocking`."""
        result, account = call(), self.account()
        if account is not None and result is not None:
            account.loaded((key,), object_bytes((result,)))
        return result

    def removed(self, call: Call, backend: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `remove`, by eviction or by order."""
        result, account = call(), self.account()
        if account is not None and result:
            account.evicted((key,))
        return result


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


ADAPTERS = (Connectors, Server, EngineDriven, MultiProcessWorker, Offload)
