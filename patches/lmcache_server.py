"""`lmcache server`: the separate process that keeps KV blocks in CPU memory. Measured, never changed.

Start that command under `kvprobe run`. Its copies run in threads of its own: in the lmcache-driven mode it copies over
the worker's memory, in the engine-driven one the worker copies and the server takes over and hands out.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, metrics, step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import BenefitTotals
from kvprobe.instrument.calls import Fields, TimedCalls, TimedFunction, timed
from kvprobe.instrument.hooks import Call, Patcher

_GROUPS = "lmcache.v1.multiprocess.object_group_transfer"
_ENGINE_DRIVEN = "lmcache.v1.multiprocess.modules.engine_driven_transfer"
_LMCACHE_DRIVEN = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer"
_LOOKUP = "lmcache.v1.multiprocess.modules.lookup"
_STORAGE = "lmcache.v1.distributed.storage_manager"
_L1 = "lmcache.v1.distributed.l1_manager"
_MAX_FOUND = 100_000  # look-ups that nobody loads after must not make the table grow without end
_RANGE = ("key", "instance_id")
_LOCKED = (("args", "kwargs"),)  # a decorator that takes the lock hides the parameters from whoever asks at run time


class Server(TimedCalls):
    """The lmcache-driven mode: copies of this process, over the worker's memory."""

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

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Chunks, bytes and the direction that was asked for."""
        objects = kwargs.get("memory_objs", args[2] if len(args) > 2 else None)
        way = str(kwargs.get("direction", args[-1] if len(args) > 5 else "")).upper()
        direction = "load" if "H2D" in way else "store" if "D2H" in way else "both"
        told = {"copies": len(objects or ()), "bytes": object_bytes(objects), "direction": direction}
        context = kwargs.get("cache_context", args[0] if args else None)
        if str(getattr(context, "device", "")).startswith("cpu"):
            told["cause"] = "the worker's memory is CPU memory: the copies themselves, on this thread"
        return told


class EngineDriven(TimedCalls):
    """The engine-driven mode: the engine copies for itself, the server takes and hands out buffers in CPU memory."""

    name, versions = "lmcache.engine_driven", ">=0.5.6,<0.6"
    summary = "Times the server's side of engine-driven transfers: what it takes over and hands out."
    apart = True
    timed = (
        timed(_ENGINE_DRIVEN, "EngineDrivenTransferModule.prepare_store", _RANGE, "store"),
        timed(
            _ENGINE_DRIVEN,
            "EngineDrivenTransferModule.commit_store",
            (*_RANGE, "cpu_data"),
            "store",
            "one blocking handler takes the chunks over",
        ),
        timed(
            _ENGINE_DRIVEN,
            "EngineDrivenTransferModule.prepare_retrieve",
            _RANGE,
            "load",
            "one blocking handler hands the chunks out",
        ),
    )

    def describe(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Fields:
        """Chunks and their bytes: in the message itself, or in the places of the shared memory that it names."""
        if entry.target.path.endswith("commit_store"):
            inline = kwargs["cpu_data"] if "cpu_data" in kwargs else args[3]
        else:
            places = result.context.get("slots") or ()
            if places:
                return {"copies": len(places), "bytes": sum(int(one["length"]) for one in places)}
            inline = getattr(result, "data", b"")
        if not inline:
            return {}
        key, instance_id = _range(args, kwargs)
        layout = args[0]._engine_driven_contexts[instance_id].metadata.layout_desc  # a worker may leave meanwhile
        return partial(whole_chunks, args[0].context.chunk_size, key, layout)


def whole_chunks(chunk_size: int, key: Any, layout: Any) -> dict[str, Any]:
    """All chunks of a range, of the layout that the worker registered."""
    chunks = (key.end - key.start) // chunk_size
    one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))
    return {"copies": chunks, "bytes": chunks * one}


class ServerOffload(Adapter):
    """What the server was asked for and had, what it kept, handed out and threw away, and how long loads took.

    A load is waited for from the moment it is asked of the server until the blocks are there: until the copies on the
    server's stream are over, or the worker says so. What prefill costs only the engine knows.
    """

    name, versions = "lmcache.server_offload", ">=0.5.6,<0.6"
    summary = "Counts what lmcache server was asked for and had, chunks stored, loaded, evicted unread, and waits."
    targets = (
        Target(_LOOKUP, "LookupModule._consume_prefetch_result", ("job",)),
        Target(_L1, "L1Manager.finish_write", ("keys",), otherwise=_LOCKED),
        Target(_L1, "L1Manager.delete", ("keys",), otherwise=_LOCKED),
        Target(_L1, "L1Manager.clear", (), otherwise=_LOCKED),
        Target(_STORAGE, "StorageManager._read_objects", ("keys", "owners")),
        Target(_STORAGE, "StorageManager.prepare_read_completion", ("keys",)),
        Target(_STORAGE, "StorageManager.finish_read_by_owner", ("completion",)),
        Target(
            _LMCACHE_DRIVEN,
            "LMCacheDrivenTransferModule.retrieve",
            (*_RANGE, "gpu_block_ids", "event_ipc_handle"),
        ),
        Target(
            _LMCACHE_DRIVEN,
            "LMCacheDrivenTransferModule.store_with_chunk_mask",
            (*_RANGE, "gpu_block_ids", "event_ipc_handle"),
        ),
        Target(_ENGINE_DRIVEN, "EngineDrivenTransferModule.prepare_store", _RANGE),
        Target(_ENGINE_DRIVEN, "EngineDrivenTransferModule.commit_store", (*_RANGE, "cpu_data")),
        Target(_ENGINE_DRIVEN, "EngineDrivenTransferModule.prepare_retrieve", _RANGE),
        Target(_ENGINE_DRIVEN, "EngineDrivenTransferModule.commit_retrieve", _RANGE),
    )

    def __init__(self) -> None:
        super().__init__()
        self._account: BenefitTotals | None = None
        self._lock = threading.Lock()  # handlers, the eviction and the device's callbacks have threads of their own
        self._found: dict[str, None] = {}  # requests whose chunks were found, and that have loaded nothing since
        self._loading = threading.local()  # `.load`: the load that this thread submits
        self._ending: dict[Any, deque[Any]] = {}  # first key of a completion -> the loads that end with it
        self._since: dict[Any, tuple[int, int]] = {}  # load, or store that a worker makes -> when it began, ns; tokens

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap what this module has of it."""
        around: dict[str, dict[str, Callable[..., Any]]] = {
            _L1: {"finish_write": self.stored, "delete": self.deleted, "clear": self.cleared},
            _STORAGE: {"prepare_read_completion": self.prepared, "finish_read_by_owner": self.finished},
            _LMCACHE_DRIVEN: {"retrieve": self.retrieve},
        }
        behind: dict[str, dict[str, Callable[..., None]]] = {
            _LOOKUP: {"_consume_prefetch_result": self.looked_up},
            _STORAGE: {"_read_objects": self.read},
            _LMCACHE_DRIVEN: {"store_with_chunk_mask": self.kept},
            _ENGINE_DRIVEN: {
                "prepare_store": self.awaited,
                "commit_store": self.given,
                "prepare_retrieve": self.handed_out,
                "commit_retrieve": self.taken,
            },
        }
        owners = {target.path.split(".")[0] for target in self.targets if target.module == module.__name__}
        for name, hook in around.get(module.__name__, {}).items():
            patcher.wrap(getattr(module, *owners), name, hook)
        for name, note in behind.get(module.__name__, {}).items():
            patcher.watch(getattr(module, *owners), name, note)

    def step_aside(self) -> None:
        """The last figures."""
        event_log.flush()
        if self._account is not None:
            self._account.tell()

    def account(self) -> BenefitTotals | None:
        """The account, to be used under the lock; None while nobody would hear of it."""
        if self._account is None and (event_log.wanted() or metrics.exposed()):
            with self._lock:
                self._account = self._account or BenefitTotals(self.name, "server")
        return self._account

    def _count(self, what: Callable[..., None], *arguments: Any) -> None:
        """Of chunks, on kvprobe's own thread, in the order in which they came."""
        with self._lock:
            what(*arguments)

    def looked_up(self, _: int, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind the one place where a look-up's result becomes known; None while it is not."""
        if found is not None and (account := self.account()) is not None:
            job = args[1] if len(args) > 1 else kwargs["job"]
            with self._lock:
                account.admitted(job.request_id, job.requested_tokens, None, 0)
                if found:
                    self._found[job.request_id] = None
                    if len(self._found) > _MAX_FOUND:
                        del self._found[next(iter(self._found))]

    def stored(self, call: Call, manager: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `finish_write`: a chunk that is there already is thrown away, and not stored."""
        held = manager._objects
        fresh = [key for key in keys if key not in held]
        result = call()
        if (account := self.account()) is not None:
            for size, kept in _by_size(
                (key, entry.memory_obj) for key in fresh if (entry := held.get(key)) and not entry.is_temporary
            ):
                event_log.later(self._count, account.stored, kept, size)
        return result

    def deleted(self, call: Call, manager: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `delete`, by eviction or by order."""
        held = [key for key in keys if key in manager._objects]
        result = call()
        self.gone(manager, held)
        return result

    def cleared(self, call: Call, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `clear`; it leaves what is being read."""
        held = list(manager._objects)
        result = call()
        self.gone(manager, held)
        return result

    def gone(self, manager: Any, keys: list[Any]) -> None:
        """Counts those of the keys that are there no more."""
        if (account := self.account()) is not None:
            event_log.later(self._count, account.evicted, [key for key in keys if key not in manager._objects])

    def read(self, _: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind the one place through which stored chunks are read for a worker."""
        if (account := self.account()) is not None:
            for size, had in _by_size((key, found) for key, (_, found) in result.items() if found is not None):
                event_log.later(self._count, account.loaded, had, size)

    def begins(self, account: BenefitTotals, key: Any, instance_id: int, at_ns: int) -> Any:
        """The load of a request that a look-up found; None for the other ranks of it, which load at the same time."""
        if key.request_id not in self._found:
            return None
        del self._found[key.request_id]
        load = (key.request_id, instance_id)
        account.waits(load, at_ns)
        self._begins(load, key, at_ns)
        return load

    def _begins(self, what: Any, key: Any, at_ns: int) -> None:
        if len(self._since) >= _MAX_FOUND:  # of workers that never came back
            self._since.clear()
        self._since[what] = at_ns, key.end - key.start

    def _ended(self, phase: str, what: Any, at_ns: int) -> None:
        began = self._since.pop(what, None)
        if began is not None:
            tell(phase, what[0], began[0], at_ns, began[1])

    def kept(self, began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `store_with_chunk_mask`; the last part of its result says which chunks were taken."""
        if any(result[2]):
            key, _ = _range(args, kwargs)
            tell("store", key.request_id, began_ns, time.monotonic_ns(), key.end - key.start)

    def awaited(self, began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `prepare_store`: the worker copies into what this returns, and then says so."""
        key, instance_id = _range(args, kwargs)
        with self._lock:
            self._begins((key.request_id, instance_id, "store"), key, began_ns)

    def given(self, _: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `commit_store`."""
        if result:
            key, instance_id = _range(args, kwargs)
            with self._lock:
                self._ended("store", (key.request_id, instance_id, "store"), time.monotonic_ns())

    def retrieve(self, call: Call, module: Any, key: Any, instance_id: int, *args: Any, **kwargs: Any) -> Any:
        """Around `retrieve`: it submits the copies; `finished` tells their end."""
        account = self.account()
        with self._lock:
            self._loading.load = load = account and self.begins(account, key, instance_id, time.monotonic_ns())
        try:
            result = call()
        finally:
            self._loading.load = None
        if account is not None and load is not None and result[1]:
            skipped = kwargs.get("skip_first_n_tokens", args[2] if len(args) > 2 else 0)
            with self._lock:
                account.add("hit_tokens", max(0, key.end - key.start - skipped))
        return result

    def prepared(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Around `prepare_read_completion`, inside `retrieve`: what its callback will be called with."""
        completion = call()
        load = getattr(self._loading, "load", None)
        if load is not None and completion and completion[0][1]:
            with self._lock:
                self._ending.setdefault(completion[0][1][0], deque()).append(load)
        return completion

    def finished(self, call: Call, manager: Any, completion: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `finish_read_by_owner`, which the device's stream calls when the copies before it are over."""
        account = self.account()
        with self._lock:
            first = completion[0][1][0] if completion and completion[0][1] else None
            loads = self._ending.get(first)
            if loads:
                load = loads.popleft()
                if not loads:
                    del self._ending[first]
                if account is not None:
                    self._arrived(account, load, time.monotonic_ns())
        return call()

    def _arrived(self, account: BenefitTotals, load: Any, at_ns: int) -> None:
        account.arrived(load, at_ns)
        self._ended("load", load, at_ns)

    def handed_out(self, began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `prepare_retrieve`: the worker copies what this returns, and then says so."""
        if (account := self.account()) is not None:
            key, instance_id = _range(args, kwargs)
            with self._lock:
                load = self.begins(account, key, instance_id, began_ns)
                if load is not None and result.success:
                    account.add("hit_tokens", key.end - key.start)

    def taken(self, began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `commit_retrieve`, which is asked for when the blocks are there."""
        if (account := self.account()) is not None:
            key, instance_id = _range(args, kwargs)
            with self._lock:
                self._arrived(account, (key.request_id, instance_id), began_ns)


def tell(phase: str, request: Any, began_ns: int, ended_ns: int, tokens: int | None = None) -> None:
    """A load or a store of one request's blocks, where LMCache was told whose they are; `tokens` where it is known."""
    if request is not None and step_log.wanted_at(ended_ns):
        computed = None if tokens is None else (tokens,)
        step_log.told((began_ns, ended_ns), None, phase, (str(request),), 0, computed, "lmcache")


def _range(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Of a call with _RANGE: its key and whose it is."""
    if len(args) > 2:
        return args[1], args[2]
    given = {**dict(zip(_RANGE, args[1:], strict=False)), **kwargs}
    return given["key"], given["instance_id"]


def _by_size(pairs: Iterable[tuple[Any, Any]]) -> Iterable[tuple[int, list[Any]]]:
    """Keys by the bytes of their objects, in their order; mostly all of one size."""
    found: dict[int, list[Any]] = {}
    for key, one in pairs:
        found.setdefault(object_bytes((one,)), []).append(key)
    return found.items()


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
