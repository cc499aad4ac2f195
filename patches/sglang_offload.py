"""SGLang: whether HiCache pays, and its storage layer (files, Mooncake, 3FS, Nixl ...). Measured only.

A token of the host pool is a block here, whatever the page size. Loads run layer by layer beside the forward, and what
is waited for them is waited on the GPU. Counted as waiting is what a step with a load took beyond what its own prompt
tokens cost: a little too much, as every step costs something.
"""

from __future__ import annotations

import time
from collections import deque
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvprobe.instrument import event_log, metrics
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import BenefitTotals
from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed
from kvprobe.instrument.hooks import Call, Patcher

_CONTROLLER = "sglang.srt.managers.cache_controller"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_POLICY = "sglang.srt.managers.schedule_policy"
_SCHEDULER = "sglang.srt.managers.scheduler"
_MAX_STEPS = 64  # of those that are under way, and of those with a load while nobody knows what prefill costs


class Storage(TimedCalls):
    """What HiCache moves between host memory and a storage back end, on its own threads."""

    name, versions = "sglang.storage", ">=0.5.20,<0.6"
    option = "--hicache-storage-backend"
    summary = "Times HiCache's storage layer: pages and bytes fetched from and backed up to storage."
    timed = (
        timed(_CONTROLLER, "HiCacheController._page_transfer", ("operation",), "load", "on the prefetch thread"),
        timed(_CONTROLLER, "HiCacheController._page_backup", ("operation",), "store", "on the backup thread"),
    )

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tokens that were done before: an operation may be continued."""
        operation = kwargs["operation"] if "operation" in kwargs else args[1]
        return args[0], operation, int(operation.completed_tokens)

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """Pages and bytes that were moved."""
        controller, operation, done = remembered
        tokens = max(0, int(operation.completed_tokens) - done)
        return {
            "copies": tokens // max(1, int(controller.page_size)),
            "bytes": tokens * (_token_bytes(controller) or 0),
        }


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
        Target(_SCHEDULER, "Scheduler.run_batch", ("batch",), optional=True),
        Target(_SCHEDULER, "Scheduler.process_batch_result", ("batch", "result"), optional=True),
    )

    def __init__(self) -> None:
        super().__init__()
        self._account: BenefitTotals | None = None
        self._unread: WeakKeyDictionary[Any, npt.NDArray[np.bool_]] = WeakKeyDictionary()
        self._steps: deque[tuple[Any, int, int, bool]] = deque(maxlen=_MAX_STEPS)  # result, begin, prompt tokens, load?
        self._loads: deque[tuple[int, int]] = deque(maxlen=_MAX_STEPS)  # prompt tokens, ns
        self._ended_ns = 0  # the step before

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the controller, and the place where requests are admitted."""
        if module.__name__ == _POLICY:
            patcher.wrap(module.PrefillAdder, "add_one_req", self.admitted)
        elif module.__name__ == _SCHEDULER:
            patcher.wrap(module.Scheduler, "run_batch", self.launched)
            patcher.watch(module.Scheduler, "process_batch_result", self.finished)
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
    def moved(account: BenefitTotals, way: str, controller: Any, tokens: int) -> None:
        """Count tokens, and their bytes where the pool says what one takes."""
        each = _token_bytes(controller)
        account.add(f"{way}_blocks", tokens)
        if each is not None:
            account.add(f"{way}_bytes", tokens * each)

    def account(self) -> BenefitTotals | None:
        """Where to count; None while nobody would hear of it."""
        if self._account is None and (event_log.wanted() or metrics.exposed()):
            self._account = BenefitTotals(self.name, "HiCache")
        return self._account

    def written(self, call: Call, controller: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `write`: None where the host pool is full."""
        indices, account = call(), self.account()
        if account is not None and indices is not None:
            self.moved(account, "stored", controller, len(indices))
            known = self.unread(controller, indices)
            if known is not None:
                held, found = known
                unread = int(held[found].sum())  # their places were given away
                account.add("unread_blocks", unread)
                account.held_unread += len(found) - unread
                held[found] = True
        return indices

    def loaded(self, call: Call, controller: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `load`: None where the GPU is full."""
        result, account = call(), self.account()
        if account is not None and result is not None:
            self.moved(account, "loaded", controller, len(host_indices))
            known = self.unread(controller, host_indices)
            if known is not None:
                held, found = known
                account.held_unread -= int(held[found].sum())
                held[found] = False
        return result

    def admitted(self, call: Call, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `add_one_req`: what the prompt finds on the GPU and in host memory, before it is loaded back."""
        on_gpu, on_host = _on_gpu(req), int(getattr(req, "host_hit_length", 0) or 0)
        account, before = self.account(), len(adder.can_run_list)
        result = call()
        if account is not None and len(adder.can_run_list) > before:
            account.admitted(req.rid, len(req.origin_input_ids), on_gpu, on_host)
        return result

    def launched(self, call: Call, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `run_batch`: a step begins; under overlap its result is looked at while the next one runs."""
        if self._account is None:
            return call()
        began_ns = time.monotonic_ns()
        tokens = int(batch.extend_num_tokens or 0) if batch.forward_mode.is_extend() else 0
        load = tokens > 0 and int(getattr(batch, "hicache_consumer_index", -1)) >= 0  # decoding steps keep the index
        result = call()
        self._steps.append((result, began_ns, tokens, load))
        return result

    def finished(self, _: int, done: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `process_batch_result`, which waits for the step's end."""
        account = self._account
        if account is None:
            return
        ended_ns, result = time.monotonic_ns(), args[2] if len(args) > 2 else kwargs["result"]
        while self._steps:
            known, began_ns, tokens, load = self._steps.popleft()
            if known is not result:
                continue  # its result was never looked at
            took_ns = ended_ns - max(began_ns, self._ended_ns)
            if load:
                self._loads.append((tokens, took_ns))
            else:
                account.step(tokens, took_ns)
            each = account.prefill_ns() if self._loads else None
            while each is not None and self._loads:
                own, whole_ns = self._loads.popleft()
                account.waited(max(0, round(whole_ns - own * each)))
            break
        self._ended_ns = ended_ns


def _on_gpu(req: Any) -> int:
    """Tokens of the prompt that lie on the GPU; 0.5.21 has their indices, 0.5.22 on only their number."""
    return len(req.prefix_indices) if hasattr(req, "prefix_indices") else int(req.prefix_len)


def _token_bytes(controller: Any) -> int | None:
    """What a token takes in the host pool; of a group of pools in the one whose places are counted."""
    pool = controller.mem_pool_host
    anchor = getattr(pool, "anchor_entry", None)
    size = getattr(anchor.host_pool if anchor is not None else pool, "size_per_token", None)
    return None if size is None else int(size)
