"""vLLM, scheduler side: loads that are repeated while the same blocks are in flight; and the simple connector's copies.

The scheduler may be told "not yet" (`None`) for a request: it skips it this step and asks again in the next, and once
the load in flight has ended the blocks are in the GPU's prefix cache. vLLM does so itself from 0.15 on in its
OffloadingConnector (pull request 29087), and not in its SimpleCPUOffloadConnector.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.dedup import SchedulerDedup
from kvprobe.instrument.device import device_of
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import Rung
from kvprobe.instrument.transfers import CopyPath


class _Dedup(Adapter):
    """Around a scheduler's three calls: how much can be loaded, a load was asked for, loads have ended."""

    summary = "Counts loads of blocks that are being loaded already."
    changes = (
        "a request whose blocks are in flight waits for that load, never longer than its own would take; "
        "off again where waiting costs more than it saves."
    )
    scheduler_name: str

    def __init__(self) -> None:
        super().__init__()
        self.schedulers: WeakKeyDictionary[Any, SchedulerDedup] = WeakKeyDictionary()
        self.uncached: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the scheduler's side of the connector."""
        scheduler = getattr(module, self.scheduler_name)
        patcher.wrap(scheduler, "__init__", self.around_init)
        patcher.wrap(scheduler, "get_num_new_matched_tokens", self.matched)
        patcher.wrap(scheduler, "update_state_after_alloc", self.after)
        patcher.wrap(scheduler, "update_connector_output", self.after)
        patcher.wrap(scheduler, "request_finished", self.gone)

    def around_init(self, call: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """A follower is served from the GPU's prefix cache: without one there is nothing to wait for."""
        result = call()
        config = kwargs.get("vllm_config") or (args[0] if args else None)
        config = getattr(config, "vllm_config", config)  # an OffloadingSpec holds it
        cache = getattr(config, "cache_config", None)
        self.uncached[scheduler] = cache is not None and not getattr(cache, "enable_prefix_caching", True)
        return result

    def of(self, scheduler: Any) -> SchedulerDedup:
        """This scheduler's dedup."""
        found = self.schedulers.get(scheduler)
        if found is None:
            found = self.schedulers[scheduler] = SchedulerDedup(self)
        return found

    def loading(self, scheduler: Any) -> Mapping[Hashable, Any]:
        """The scheduler's own table of loads in flight: request -> keys of blocks."""
        raise NotImplementedError

    def keys(self, scheduler: Any, request: Any, computed: int, tokens: int) -> list[Hashable]:
        """Keys of the blocks that would be loaded."""
        raise NotImplementedError

    def matched(
        self, call: Call, scheduler: Any, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `get_num_new_matched_tokens`: the server's own answer, or "not yet"."""
        answer = call()
        if self.uncached.get(scheduler):
            return answer
        tokens, asynchronous = answer
        dedup = self.of(scheduler)
        dedup.sync(self.loading(scheduler))
        keys = self.keys(scheduler, request, num_computed_tokens, tokens) if tokens and asynchronous else []
        if tokens is not None and dedup.should_wait(request.request_id, keys):
            return None, False
        return answer

    def after(self, call: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around what changes the table of loads in flight."""
        result = call()
        self.of(scheduler).sync(self.loading(scheduler))
        return result

    def gone(self, call: Call, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `request_finished`: one that waited may have been aborted."""
        result = call()
        self.of(scheduler).dedup.forget(request.request_id)
        return result


def _scheduler_targets(module: str, name: str) -> tuple[Target, ...]:
    return (
        Target(module, f"{name}.__init__"),
        Target(module, f"{name}.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
        Target(module, f"{name}.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
        Target(module, f"{name}.update_connector_output", ("connector_output",)),
        Target(module, f"{name}.request_finished", ("request", "block_ids")),
    )


class LoadDedup(_Dedup):
    """OffloadingConnector up to 0.14."""

    name = "vllm.loads.dedup"
    versions = ">=0.11,<0.15"
    upstream = (">=0.15", "requests wait for loads in flight since 0.15 (vLLM pull request 29087)")
    scheduler_name = "OffloadingConnectorScheduler"
    targets = _scheduler_targets(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "OffloadingConnectorScheduler"
    )

    def loading(self, scheduler: Any) -> Mapping[Hashable, Any]:
        """Request -> hashes."""
        table: Mapping[Hashable, Any] = scheduler._reqs_being_loaded
        return table

    def keys(self, scheduler: Any, request: Any, computed: int, tokens: int) -> list[Hashable]:
        """Hashes of the hit blocks, as the server counts them."""
        first = computed // scheduler.offloaded_block_size
        last = (computed + tokens) // scheduler.offloaded_block_size
        return list(scheduler._get_block_hashes(request, start_idx=first, end_idx=last))


class SimpleLoadDedup(_Dedup):
    """SimpleCPUOffloadConnector, which has none of its own."""

    name = "vllm.simple.dedup"
    versions = ">=0.24,<0.34"
    scheduler_name = "SimpleCPUOffloadScheduler"
    targets = _scheduler_targets("vllm.v1.simple_kv_offload.manager", "SimpleCPUOffloadScheduler")

    def loading(self, scheduler: Any) -> Mapping[Hashable, Any]:
        """Request -> ids of CPU blocks."""
        return {req: state.transfer_meta.cpu_block_ids for req, state in scheduler._reqs_to_load.items()}

    def keys(self, scheduler: Any, request: Any, computed: int, tokens: int) -> list[Hashable]:
        """The CPU blocks that the server just pinned for this request; it drops the pin when asked again."""
        pending = scheduler._pending_cpu_hits.get(request.request_id)
        return [block.block_id for group in pending[0] for block in group if not block.is_null] if pending else []


class SimpleConnector(Adapter):
    """SimpleCPUOffloadConnector's copies: one batch a step and direction, submitted by a thread of its own."""

    name, versions = "vllm.simple.copies", ">=0.20,<0.34"
    summary = "Times SimpleCPUOffloadConnector: wait in its copy thread's queue, submit, queue wait, copy, poll delay."
    targets = (
        Target(
            "vllm.v1.simple_kv_offload.copy_backend",
            "DmaCopyBackend.launch_copy",
            ("src_blocks", "dst_blocks", "is_store", "event_idx", "events_list"),
        ),
        Target("vllm.v1.simple_kv_offload.copy_backend", "copy_blocks", ("src_block_ids", "dst_block_ids", "params")),
        Target("vllm.v1.simple_kv_offload.worker", "SimpleCPUOffloadWorker._poll_stream_events", ("is_store",)),
    )

    def __init__(self) -> None:
        super().__init__()
        self._asked: deque[tuple[int, bool, int, Any]] = deque(maxlen=65536)
        self._paths: dict[bool, CopyPath] = {}

    def path(self, store: bool) -> CopyPath:
        """The path of a direction; made in the thread that submits, whose device is set."""
        if store not in self._paths:
            self._paths[store] = CopyPath(self, "store" if store else "load", device_of(), (Rung("upstream", "batch"),))
        return self._paths[store]

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the hand-over to the copy thread, the submission in it, and the poll."""
        if module.__name__.endswith("copy_backend"):
            patcher.wrap(module.DmaCopyBackend, "launch_copy", self.launch)
            patcher.wrap(module, "copy_blocks", self.copy)
        else:
            patcher.wrap(module.SimpleCPUOffloadWorker, "_poll_stream_events", self.polled)

    def launch(self, call: Call, backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `launch_copy`: it only enqueues, so what it costs the model thread is this."""
        names = ("src_blocks", "dst_blocks", "is_store", "event_idx")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._asked.append((given["event_idx"], bool(given["is_store"]), time.monotonic_ns(), backend))
        return call()

    def copy(self, call: Call, src_block_ids: Any, dst_block_ids: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `copy_blocks`, in the copy thread: building the pointers and the one batch call."""
        if not self._asked:
            return call()
        job, store, asked_ns, _ = self._asked.popleft()
        path = self.path(store)
        live = path.begin(job)
        live.extra["handover_ns"] = live.begin_ns - asked_ns
        path.first(int(params.stream_handle))
        start = time.monotonic_ns()
        try:
            result = call()
        except BaseException:
            path.abandon()
            raise
        copies = len(src_block_ids) * params.num_layers
        path.add(time.monotonic_ns() - start, copies, len(src_block_ids) * int(params.bpb.sum()), 1)
        path.submitted()
        return result

    def polled(self, call: Call, worker: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `_poll_stream_events`: every transfer up to the returned index is complete."""
        newest = call()
        store = bool(kwargs["is_store"] if "is_store" in kwargs else args[0])
        path = self._paths.get(store)
        if path is not None:
            for job in [job for job in list(path.live) if job <= newest]:
                path.done(job)
        return newest

    def step_aside(self) -> None:
        """Give the events back."""
        for path in self._paths.values():
            path.forget()
        self._asked.clear()
