"""SGLang HiCache (0.5.20 on): `L2TransferEngine` and `HiCacheController`.

Carried by the entry point `sglang.srt.plugins` into every rank. The plug-in's own HookRegistry cannot take a hook
back, so kvprobe patches the same functions with its own frame, which can.
"""

from __future__ import annotations

import time
from collections import deque
from types import ModuleType
from typing import Any

from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.calls import Timed, TimedCalls, timed
from kvprobe.instrument.device import device_of
from kvprobe.instrument.guard import Call, Patcher
from kvprobe.instrument.transfers import CopyPath

_ENGINE = "sglang.srt.mem_cache.l2_transfer"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_PAGE_FIRST_BATCH_BYTES = 128 * 1024  # smaller pages are copied one by one (staged_write_back.cuh)


class Transfers(Adapter):
    """The copy engine: one shared stream a direction, submission on the scheduler's thread."""

    name, server, distributions, versions = "sglang.l2_transfer", "sglang", ("sglang",), ">=0.5.20,<0.6"
    summary = "Times every burst of L2TransferEngine: submit (on the scheduler's thread), queue wait, copy, poll delay."
    changes = (
        "when the launch queue is full, bursts go to pooled streams, each after the fence and after the burst "
        "before it; refused where pools translate indices or share host layouts."
    )
    targets = (
        Target(_ENGINE, "L2TransferEngine.submit_device_to_host", ("transfers",)),
        Target(_ENGINE, "L2TransferEngine.submit_host_to_device", ("transfers", "transfer_layer_id_max")),
        Target(_ENGINE, "shared_host_layout_domains"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, CopyPath] = {}
        self.module: Any = None
        self._refused = False
        self._pending: deque[tuple[CopyPath, int, Any]] = deque()
        self._last: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._job = 0

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap both submissions."""
        self.module = module
        engine = module.L2TransferEngine
        patcher.wrap(engine, "submit_device_to_host", self.hook("store", "device_to_host_stream"))
        patcher.wrap(engine, "submit_host_to_device", self.hook("load", "host_to_device_stream"))

    def path(self, direction: str) -> CopyPath:
        """The path of a direction, made where the device is set."""
        if direction not in self.paths:
            device = device_of()
            if device is not None and self.fix == "auto":
                device.prepare()
            self.paths[direction] = CopyPath(self, direction, device, ("shared", "pooled"))
        return self.paths[direction]

    def hook(self, direction: str, attribute: str) -> Any:
        """Around one of the two submissions."""

        def around(call: Call, engine: Any, transfers: Any, **kwargs: Any) -> Any:
            self.poll()
            path = self.path(direction)
            self._job += 1
            live = path.begin(self._job)
            own = stream = getattr(engine, attribute)
            if live.rung == "pooled" and path.device is not None and self.may_swap(transfers):
                live.taken = path.device.streams.take()
                stream = path.device.torch_stream(self.module.torch, live.taken)
                stream.wait_stream(own)  # the fence that the controller put there
            else:
                live.rung = "shared"
            last = self._last.get((id(engine), direction))
            if last is not None and self.fix == "auto":
                stream.wait_event(last[2])  # completion is kept per direction: the newest must imply the earlier ones
            path.first(stream.cuda_stream)
            setattr(engine, attribute, stream)
            start = time.monotonic_ns()
            try:
                completion = call()
            except BaseException:
                path.abandon()
                raise
            finally:
                setattr(engine, attribute, own)
            took = time.monotonic_ns() - start
            path.add(took, sum(self.copies(t, direction, engine) for t in transfers), self.size(transfers), 0)
            live.extra["tokens"] = sum(len(t.host_indices) for t in transfers)
            path.submitted()
            self._last[id(engine), direction] = (engine, attribute, completion.finish_event)
            self._pending.append((path, live.job, completion))
            return completion

        return around

    def poll(self) -> None:
        """Notice bursts that have ended; called at every submission, which is once a scheduler step."""
        for _ in range(len(self._pending)):
            path, job, completion = self._pending.popleft()
            if completion.finish_event.query():
                path.done(job)
            else:
                self._pending.append((path, job, completion))

    def may_swap(self, transfers: Any) -> bool:
        """Not where a pool translates indices (unified allocators) or shares its host layout: they assume one FIFO."""
        unified = any(getattr(t.device_pool, "host_transfer_translate", None) is not None for t in transfers)
        refused = unified or bool(self.module.shared_host_layout_domains(t.host_pool for t in transfers))
        if refused and not self._refused:
            self._refused = True
            self.decide("refuse", "these pools rely on one stream a direction: streams are left alone")
        return not refused

    @staticmethod
    def copies(transfer: Any, direction: str, engine: Any) -> int:
        """Operations a transfer becomes, estimated: the default write-back makes two copies a page behind one kernel.

        Pages of 128 KiB and more go into one batch a chunk of 64; a load is a kernel a layer.
        """
        pool = transfer.host_pool
        tokens, page = len(transfer.host_indices), int(getattr(pool, "page_size", 1) or 1)
        layers = int(getattr(pool, "layer_num", 1) or 1)
        if direction == "load" and engine.io_backend == "kernel":
            return layers
        if engine.io_backend == "direct":
            return 2 * layers * max(1, tokens // page)
        big = page * int(getattr(pool, "size_per_token", 0) or 0) // 2 >= _PAGE_FIRST_BATCH_BYTES
        return max(1, tokens // page // 64 * 2 if big else 2 * tokens // page)

    @staticmethod
    def size(transfers: Any) -> int:
        """Bytes, where the pools say how large a token is."""
        return sum(len(t.host_indices) * int(getattr(t.host_pool, "size_per_token", 0) or 0) for t in transfers)

    def step_aside(self) -> None:
        """What follows on the engine's own streams comes after what is on pooled ones."""
        for engine, attribute, event in self._last.values():
            getattr(engine, attribute).wait_event(event)
        self._last.clear()
        self._pending.clear()
        for path in self.paths.values():
            path.forget()


class Controller(TimedCalls):
    """What the scheduler's thread spends in HiCacheController."""

    name, server, distributions, versions = "sglang.cache_controller", "sglang", ("sglang",), ">=0.5.20,<0.6"
    summary = "Times HiCacheController.start_loading, start_writing and move_indices on the scheduler's thread."
    timed = (
        timed(_CONTROLLER, "HiCacheController.start_loading", (), "load", "a layer's copies are enqueued one by one"),
        timed(_CONTROLLER, "HiCacheController.start_writing", (), "store", "fence first, then two copies a token"),
        timed(_CONTROLLER, "HiCacheController.move_indices", ("host_indices", "device_indices"), "both"),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Why moving indices waits."""
        if not entry.target.path.endswith("move_indices"):
            return {}
        backend = getattr(args[0], "io_backend", "")
        cause = {"kernel": "indices are uploaded from pageable memory", "direct": "device indices are fetched: a sync"}
        return {"cause": cause.get(backend, ""), "direction": "both"}


ADAPTERS = (Transfers, Controller)
