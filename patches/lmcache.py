"""LMCache in a server's worker: its connectors, and vLLM's side of the separate process. Measured, never changed.

Its streams share a staging buffer and a table of block ids (`_temp_buffer`, `block_ids_buffer`): a transfer moved to
another stream would overwrite what the one before it still reads. So no stream is swapped here.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, metrics
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import BenefitTotals
from kvprobe.instrument.calls import TimedCalls, TimedFunction, tensor_bytes, timed
from kvprobe.instrument.hooks import Call, Patcher

from .lmcache_server import EngineDriven, Server, ServerOffload, object_bytes, tell

_CONNECTORS = "lmcache.v1.gpu_connector.gpu_connectors"
_LOAD_SYNC = "ends with load_stream.synchronize(): the thread waits for the whole transfer"
_ENGINE = "EngineDrivenTransferContext"
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

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Chunks and bytes of what was moved, as far as the arguments show it."""
        objects = kwargs.get("memory_objs")
        if objects is None and len(args) > 1 and isinstance(args[1], list | tuple):
            objects = args[1]
        starts = [a for a in (kwargs.get("starts"), *args[1:]) if isinstance(a, list | tuple)]
        return {"copies": len(starts[0]) if starts else 0, "bytes": object_bytes(objects)}


class MultiProcessWorker(TimedCalls):
    """vLLM's side of LMCache's separate process: what `--kv-offloading-backend lmcache` selects.

    In the lmcache-driven mode the worker hands requests over and the server copies (`lmcache.server`); in the
    engine-driven one the worker copies for itself, to and from what the server reserved.
    """

    name, versions = "lmcache.mp_worker", ">=0.5.6,<0.6"
    summary = "Times the hand-over of loads and stores from vLLM's worker to the separate server, and its own copies."
    _module = "lmcache.integration.vllm.vllm_multi_process_adapter"
    _copies = "lmcache.v1.multiprocess.transfer_context.base"
    timed = (
        timed(
            _module, "LMCacheMPWorkerAdapter.batched_submit_retrieve_requests", ("request_ids", "ops", "event"), "load"
        ),
        timed(
            _module, "LMCacheMPWorkerAdapter.batched_submit_store_requests", ("request_ids", "ops", "event"), "store"
        ),
        timed(_copies, "gather_paged_kv_to_cpu", ("kv_caches", "block_ids", "blocks_per_chunk"), "store"),
        timed(_copies, "scatter_cpu_to_paged_kv", ("kv_caches", "block_ids", "chunks", "blocks_per_chunk"), "load"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Requests and blocks that were handed over; bytes of what the worker copied."""
        if entry.target.module == self._copies:
            chunks = result if entry.direction == "store" else kwargs.get("chunks", args[2] if len(args) > 2 else ())
            skipped = kwargs.get("skip_first_n_tokens", args[4] if len(args) > 4 else 0)
            return {"copies": len(chunks), "bytes": chunk_bytes(chunks, skipped if entry.direction == "load" else 0)}
        ops = kwargs["ops"] if "ops" in kwargs else args[2]
        told: dict[str, Any] = {"requests": len(ops), "copies": sum(len(one.flat_block_ids) for one in ops)}
        context = type(getattr(args[0], "transfer_ctx", None)).__name__
        # the asynchronous one makes its stores on a thread of its own, but not its loads
        if context == _ENGINE or (context.endswith(_ENGINE) and entry.direction == "load"):
            told["cause"] = "engine-driven: this thread asks the server, copies and waits until it has answered"
        return told


def chunk_bytes(chunks: Any, skipped_tokens: int) -> int:
    """Bytes of chunks whose last dimension but one counts tokens, less those of the tokens that are left out."""
    total = tensor_bytes(*chunks)
    tokens = sum(int(one.shape[-2]) for one in chunks)
    return total - total // tokens * min(skipped_tokens, tokens) if tokens else total


class Offload(Adapter):
    """LMCache in the server's worker: what was asked for, found, kept and thrown away, and for which request."""

    name = "lmcache.offload"
    summary = (
        "Counts tokens asked for and found, chunks stored, loaded and evicted unread, and waits for loads; tells each "
        "request's loads and stores."
    )
    _engine, _cpu = "lmcache.v1.cache_engine", "lmcache.v1.storage_backend.local_cpu_backend"
    targets = (
        Target(_engine, "LMCacheEngine.retrieve", ("tokens", "mask")),
        Target(_engine, "LMCacheEngine.store", None),
        Target(_cpu, "LocalCPUBackend.submit_put_task", ("key", "memory_obj")),
        Target(_cpu, "LocalCPUBackend.get_blocking", ("key",)),
        Target(_cpu, "LocalCPUBackend.remove", ("key", "force")),
    )

    def __init__(self) -> None:
        super().__init__()
        self._account: BenefitTotals | None = None
        self._asked = 0
        self._put = 0  # chunks

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the engine's loads, and what comes and goes in its CPU memory."""
        if module.__name__ == self._engine:
            patcher.wrap(module.LMCacheEngine, "retrieve", self.retrieve)
            patcher.wrap(module.LMCacheEngine, "store", self.store)
        else:
            patcher.wrap(module.LocalCPUBackend, "submit_put_task", self.stored)
            patcher.wrap(module.LocalCPUBackend, "get_blocking", self.loaded)
            patcher.wrap(module.LocalCPUBackend, "remove", self.removed)

    def step_aside(self) -> None:
        """The last figures."""
        if self._account is not None:
            self._account.tell()

    def account(self) -> BenefitTotals | None:
        """Where to count; None while nobody would hear of it."""
        if self._account is None and (event_log.wanted() or metrics.exposed()):
            self._account = BenefitTotals(self.name, "LMCache in CPU memory")
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
                tell("load", kwargs.get("req_id"), start, start + took_ns, hit)
        return found

    def store(self, call: Call, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `store`: it returns when the chunks are in CPU memory; nothing is told where all were there before."""
        before = self._put
        start = time.monotonic_ns()
        result = call()
        if self._put != before:
            tell("store", kwargs.get("req_id"), start, time.monotonic_ns())
        return result

    def stored(self, call: Call, backend: Any, key: Any, memory_obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `submit_put_task`: nothing happens where the chunk is there already."""
        account = self.account()
        fresh = account is not None and key not in backend.hot_cache
        result = call()
        self._put += 1
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


ADAPTERS = (Connectors, Server, EngineDriven, ServerOffload, MultiProcessWorker, Offload)
