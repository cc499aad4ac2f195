"""vLLM: whether an offload pays: hits, stores that nobody read, time waited, what prefill costs. Measured only.

The scheduler asks its KV connector for every request, whichever connector it is; so the three calls of the
connectors' common interface are watched on the scheduler's one connector. What is stored and evicted the managers of
the OffloadingConnector say; how long a step waits for loads of its own (0.33's `sync_load_budget_bytes`) its worker,
often in another process. vLLM's own objects are read, never changed.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, metrics, step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.benefit import BenefitTotals
from kvprobe.instrument.hooks import Call, Patcher

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"
_MANAGERS = {
    "vllm.v1.kv_offload.lru_manager": "LRUOffloadingManager",
    "vllm.v1.kv_offload.arc_manager": "ARCOffloadingManager",
    "vllm.v1.kv_offload.cpu.manager": "CPUOffloadingManager",
}
_ASKED = ("get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output")
_MAX_ASKED = 100_000


class Offload(Adapter):
    """Every KV connector's scheduler side; the block managers and the worker of the OffloadingConnector."""

    name = "vllm.offload"
    summary = "Counts hits, waits, stored and loaded blocks, evictions of unread blocks, and what prefill costs."
    targets = (
        Target(
            _FACTORY,
            "KVConnectorFactory.create_connector",
            ("config", "role"),
            otherwise=(("config", "role", "kv_cache_config"),),
        ),
        Target(_SCHEDULER, "Scheduler.schedule", ()),
        Target(_SCHEDULER, "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
        Target(_CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
        Target(_CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
        Target(_CONNECTOR, "KVConnectorBase_V1.update_connector_output", ("connector_output",)),
        Target(_WORKER, "OffloadingConnectorWorker.start_kv_transfers", ("metadata",), optional=True),
        *(
            Target(module, f"{name}.{method}", None)
            for module, name in _MANAGERS.items()
            for method in ("prepare_load", "prepare_store")
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self.account: BenefitTotals | None = None
        self.of_worker: BenefitTotals | None = None  # of the first rank: the others wait at the same time
        self._computed: dict[str, tuple[int, bool]] = {}  # request -> tokens on the GPU, loads beside the model
        self._loads: dict[str, int] = {}  # request -> when it began to wait for its load
        self._began: dict[int, int] = {}  # scheduler output -> when it was made
        self._ended_ns = 0

    def _lists(self, path: str) -> bool:
        """The interface's methods are replaced on the one connector of the scheduler, whatever its class."""
        return super()._lists(path) or path.rpartition(".")[2] in _ASKED

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the factory, the scheduler or a manager; the interface itself stays."""
        if module.__name__ == _FACTORY:
            patcher.wrap(module.KVConnectorFactory, "create_connector", self.around_create(patcher))
        elif module.__name__ == _SCHEDULER:
            patcher.watch(module.Scheduler, "schedule", self.scheduled)
            patcher.watch(module.Scheduler, "update_from_output", self.stepped)
        elif module.__name__ == _WORKER and hasattr(module.OffloadingConnectorWorker, "start_kv_transfers"):
            patcher.wrap(module.OffloadingConnectorWorker, "start_kv_transfers", self.started)
        elif module.__name__ in _MANAGERS:
            manager = getattr(module, _MANAGERS[module.__name__])
            patcher.wrap(manager, "prepare_load", self.loads)
            patcher.wrap(manager, "prepare_store", self.stores)

    def step_aside(self) -> None:
        """The last figures."""
        for account in (self.account, self.of_worker):
            if account is not None:
                account.tell()
        self.account = self.of_worker = None

    def around_create(self, patcher: Patcher) -> Any:
        """Around the making of a connector: the scheduler's is watched, of the worker's only the name is wanted."""

        def hook(call: Call, factory: Any, config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
            connector = call()
            name = getattr(role, "name", "")
            if event_log.wanted() or metrics.exposed():
                account = BenefitTotals(self.name, type(connector).__name__)
                if name == "SCHEDULER":
                    self.account = account
                    watching: tuple[Any, ...] = (self.asked, self.allocated, self.heard)
                    for method, watch in zip(_ASKED, watching, strict=True):
                        own = getattr(connector, method)
                        patcher.replace(connector, method, patcher.around(own, watch, f"connector.{method}"))
                elif name == "WORKER" and getattr(getattr(config, "parallel_config", None), "rank", 0) == 0:
                    self.of_worker = account
            return connector

        return hook

    def asked(self, call: Call, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Around `get_num_new_matched_tokens`: what lies on the GPU, and whether a load runs beside the model."""
        answer = call()
        if len(self._computed) >= _MAX_ASKED:
            self._computed.clear()
        self._computed[request.request_id] = num_computed_tokens, bool(answer[1])
        return answer

    def allocated(
        self, call: Call, request: Any, blocks: Any, num_external_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `update_state_after_alloc`: the request is admitted, or waits for its load from now on."""
        result = call()
        account, asked = self.account, self._computed.pop(request.request_id, None)
        if account is not None and asked is not None:
            computed, beside = asked
            account.admitted(request.request_id, request.num_tokens, computed, num_external_tokens)
            if num_external_tokens and beside:
                account.waits(request.request_id)
                if len(self._loads) >= _MAX_ASKED:
                    self._loads.clear()
                self._loads[request.request_id] = time.monotonic_ns()
        return result

    def heard(self, call: Call, connector_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `update_connector_output`: whose loads have ended."""
        result = call()
        if self.account is not None:
            for request in getattr(connector_output, "finished_recving", None) or ():
                self.account.arrived(request)
                began_ns = self._loads.pop(request, None)
                if began_ns is not None and step_log.wanted():
                    step_log.told((began_ns, time.monotonic_ns()), None, "load", (request,), 0, server="vllm")
        return result

    def scheduled(self, _: int, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `schedule`: a step begins."""
        if self.account is not None:
            if len(self._began) > 64:  # steps that were never answered
                self._began.clear()
            self._began[id(output)] = time.monotonic_ns()

    def started(self, call: Call, worker: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `start_kv_transfers`: a step makes loads of its own there, and waits for them before its forward."""
        account = self.account or self.of_worker  # where one process is both, one account
        jobs = getattr(metadata, "load_jobs", None)
        own = isinstance(jobs, dict) and any(getattr(job, "sync", False) for job in jobs.values())
        if account is None or not own:
            return call()
        start_ns = time.monotonic_ns()
        result = call()
        account.waited(time.monotonic_ns() - start_ns)
        return result

    def stepped(self, now_ns: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `update_from_output`: when that began, a step had ended; several may be under way at a time.

        One that waited for loads of its own does not tell what prefill costs.
        """
        if self.account is None:
            return
        scheduler_output = args[1] if len(args) > 1 else kwargs["scheduler_output"]
        began_ns = self._began.pop(id(scheduler_output), None)
        if began_ns is not None:
            if not getattr(scheduler_output, "has_sync_kv_loads", False):
                tokens = scheduler_output.num_scheduled_tokens.values()
                self.account.step(sum(n for n in tokens if n > 1), now_ns - max(began_ns, self._ended_ns))
            self._ended_ns = now_ns

    def loads(self, call: Call, manager: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `prepare_load`: these blocks are read."""
        if self.account is None:
            return call()
        keys = list(keys)
        result = call.using(manager, keys, *args, **kwargs)
        self.account.loaded(keys)
        return result

    def stores(self, call: Call, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `prepare_store`: what is stored, and what had to go for it."""
        output = call()
        if self.account is not None and output is not None:
            stored = getattr(output, "keys_to_store", None)
            evicted = getattr(output, "evicted_keys", None)
            self.account.evicted(output.block_hashes_evicted if evicted is None else evicted)
            self.account.stored(output.block_hashes_to_store if stored is None else stored)
        return output
