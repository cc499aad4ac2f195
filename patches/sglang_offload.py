"""SGLang: whether HiCache pays, and its storage layer (files, Mooncake, 3FS, Nixl ...). Measured only.

A token of the host pool is a block here, whatever the page size. Loads run layer by layer beside the forward, so how
long one waited for them does not show on the scheduler: that stays unknown.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvprobe.instrument import event_log, metrics
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import Account
from kvprobe.instrument.calls import Timed, TimedCalls, timed
from kvprobe.instrument.hooks import Call, Patcher

_CONTROLLER = "sglang.srt.managers.cache_controller"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_POLICY = "sglang.srt.managers.schedule_policy"


class Storage(TimedCalls):
    """What HiCache moves between host memory and a storage back end, on its own threads."""

    name, versions = "sglang.storage", ">=0.5.20,<0.6"
    option = "--hicache-storage-backend"
    summary = "Times HiCache's storage layer: pages and bytes fetched from and backed up to storage."
    timed = (
        timed(_CONTROLLER, "HiCacheController._page_transfer", ("operation",), "load", "on the prefetch thread"),
        timed(_CONTROLLER, "HiCacheController._page_backup", ("operation",), "store", "on the backup thread"),
    )

    def before(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tokens that were done before: an operation may be continued."""
        operation = kwargs["operation"] if "operation" in kwargs else args[1]
        return args[0], operation, int(operation.completed_tokens)

    def after(self, entry: Timed, remembered: Any) -> dict[str, Any]:
        """Pages and bytes that were moved."""
        controller, operation, done = remembered
        tokens = max(0, int(operation.completed_tokens) - done)
        each = int(controller.mem_pool_host.get_size_per_token())
        return {"copies": tokens // max(1, int(controller.page_size)), "bytes": tokens * each}


class Offload(Adapter):
    """HiCache's host pool: what is written and read, and which prompts it served.

    Evictions take several ways; that a place is written again before it was read shows them all, only later.
    """

    name, versions = "sglang.offload", ">=0.5.21,<0.6"
    option = "--enable-hierarchical-cache"
    summary = "Counts HiCache's hits, tokens written, loaded, and overwritten before they were loaded."
    targets = (
        Target(_CONTROLLER, "HiCacheController.write", ("device_indices", "priority", "node_id")),
        Target(_CONTROLLER, "HiCacheController.load", ("host_indices", "priority", "node_id")),
        Target(_HYBRID, "HybridCacheController.write", ("device_indices", "priority", "node_id")),
        Target(_HYBRID, "HybridCacheController.load", ("host_indices", "priority", "node_id")),
        Target(_POLICY, "PrefillAdder.add_one_req", ("req", "has_chunked_req", "truncation_align_size")),
    )

    def __init__(self) -> None:
        super().__init__()
        self._account: Account | None = None
        self._unread: WeakKeyDictionary[Any, npt.NDArray[np.bool_]] = WeakKeyDictionary()

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the controller, and the place where requests are admitted."""
        if module.__name__ == _POLICY:
            patcher.wrap(module.PrefillAdder, "add_one_req", self.admitted)
        elif module.__name__ == _HYBRID:  # its own, beside the base class's
            patcher.wrap(module.HybridCacheController, "write", self.written)
            patcher.wrap(module.HybridCacheController, "load", self.loaded)
        else:
            patcher.wrap(module.HiCacheController, "write", self.written)
            patcher.wrap(module.HiCacheController, "load", self.loaded)

    def step_aside(self) -> None:
        """The last figures."""
        if self._account is not None:
            self._account.tell()

    def unread(self, controller: Any, indices: Any) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]] | None:
        """Which tokens of the host pool nobody has loaded since they were written, and these indices as numbers.

        None for indices on the GPU: to read them would make the scheduler wait.
        """
        if indices.is_cuda:
            return None
        found = np.asarray(indices, dtype=np.int64)
        held = self._unread.get(controller)
        if held is None or (len(found) and int(found.max()) >= len(held)):
            size = max(int(getattr(controller.mem_pool_host, "size", 0)), int(found.max(initial=-1))) + 1
            larger = np.zeros(size, dtype=np.bool_)
            if held is not None:
                larger[: len(held)] = held
            held = self._unread[controller] = larger
        return held, found

    @staticmethod
    def moved(account: Account, way: str, controller: Any, tokens: int) -> None:
        """Count tokens, and their bytes where the pool says what one takes."""
        each = getattr(controller.mem_pool_host, "get_size_per_token", None)
        account.add(f"{way}_blocks", tokens)
        if each is not None:
            account.add(f"{way}_bytes", tokens * int(each()))

    def account(self) -> Account | None:
        """Where to count; None while nobody would hear of it."""
        if self._account is None and (event_log.wanted() or metrics.exposed()):
            self._account = Account(self.name, "HiCache")
        return self._account

    def written(self, call: Call, controller: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `write`: None where the host pool has no room."""
        indices, account = call(), self.account()
        if account is not None and indices is not None:
            self.moved(account, "stored", controller, len(indices))
            known = self.unread(controller, indices)
            if known is not None:
                held, found = known
                account.add("unread_blocks", int(held[found].sum()))  # their places were given away
                held[found] = True
        return indices

    def loaded(self, call: Call, controller: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `load`: None where the GPU has no room."""
        result, account = call(), self.account()
        if account is not None and result is not None:
            self.moved(account, "loaded", controller, len(host_indices))
            known = self.unread(controller, host_indices)
            if known is not None:
                held, found = known
                held[found] = False
        return result

    def admitted(self, call: Call, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `add_one_req`: what the prompt finds on the GPU and in host memory, before it is loaded back."""
        on_gpu, on_host = len(req.prefix_indices), int(getattr(req, "host_hit_length", 0) or 0)
        account, before = self.account(), len(adder.can_run_list)
        result = call()
        if account is not None and len(adder.can_run_list) > before:
            account.admitted(req.rid, len(req.origin_input_ids), on_gpu, on_host)
        return result
