"""vLLM from 0.20 on: handlers that copy one batch of descriptors a transfer."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.handover import TransferEvents
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import POOLED, Copies, Rung
from kvprobe.instrument.transfers import CopyPath

from .vllm_copies import CopyHandlers, module_with


class DescriptorBatches(CopyHandlers):
    """vLLM from 0.20: one batch of (source, destination, size) descriptors per transfer."""

    name = "vllm.copies.batch"
    versions = ">=0.20,<0.34"
    summary = "Times every descriptor batch: build, submit, queue wait, copy, poll delay; counts descriptors and runs."
    changes = (
        "when submission is slow, or the copies are, transfers go to the submitter (order kept), which merges "
        "neighbours and chooses the method; expedited loads stay with vLLM."
    )
    rungs = (Rung("upstream", "batch"), POOLED)
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
        self._registrations: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._expedited: WeakSet[Any] = WeakSet()
        self._own_swaps: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._patcher_of: Patcher | None = None

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the handler; its copy function is an attribute of each handler, or the module's `ops` before 0.24."""
        self.module, self._patcher_of = module, patcher
        handler = module.SingleDirectionOffloadingHandler
        patcher.wrap(handler, "__init__", self.around_init)
        patcher.wrap(handler, "transfer_async", self.transfer)
        patcher.wrap(handler, "get_finished", self.finished)
        if hasattr(module, "_select_swap_blocks_fn"):
            if hasattr(module, "CPUOffloadingWorker"):
                patcher.wrap(module.CPUOffloadingWorker, "__init__", self.around_worker_init)
            patcher.on_undo(self._put_swaps_back)
        else:
            swap = patcher.around(module.ops.swap_blocks_batch, self.swap, "ops.swap_blocks_batch")
            patcher.replace(module, "ops", module_with(module.ops, swap_blocks_batch=swap))

    def around_worker_init(self, call: Call, worker: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn where registrations of host memory begin: one copy may not cross two of them."""
        result = call()
        region = getattr(worker, "_mmap_region", None)
        addresses = list(getattr(region, "pinned_addresses", None) or [])
        for handler in vars(worker).values():  # store, load, and since 0.33 one for expedited loads
            if isinstance(handler, self.module.SingleDirectionOffloadingHandler):
                self._registrations[handler] = addresses
        expedited = getattr(worker, "_expedited_load_handler", None)
        if expedited is not None:  # they do not queue behind other loads, as in the submitter they would
            self._expedited.add(expedited)
        return result

    def rungs_of(self, handler: Any, direction: str) -> tuple[Rung, ...]:
        """Expedited loads have none but vLLM's own."""
        return self.rungs[:1] if handler in self._expedited else self.rungs

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
        if not path.watch() and not path.pending:
            return call()
        self._own_swap(handler)
        path.begin(job_id)
        return self.submit(call, handler, path, job_id)

    def swap(self, call: Call, src: Any, dst: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `swap_blocks_batch(src, dst, sizes, ...)`: three int64 tensors in host memory."""
        path = self.path
        live = path.current if path is not None else None
        if path is None or live is None:
            return call()
        stream = self.module.torch.cuda.current_stream().cuda_stream
        if path.hands_over:
            path.first(stream)
            self._stream = stream
            self._taken.append(call)
            call.done = True
            return None
        path.fence(stream)
        path.first(stream)
        live.extra["kernel"] = not self._is_dma(call.func)
        start = time.monotonic_ns()
        result = call()
        path.add(time.monotonic_ns() - start, len(src), int(sizes.sum()), 1)
        return result

    def _is_dma(self, func: Any) -> bool:
        return func is getattr(self.module.ops, "swap_blocks_batch", None) or not hasattr(func, "keywords")

    def copies(self, handler: Any, path: CopyPath) -> list[Copies]:
        """The batch's descriptors as they are.

        Raises:
            KvprobeError: host memory is pageable, or where it was registered is not known.
        """
        src, dst, sizes = (column.numpy() for column in self._taken[0].args[:3])

        def starts() -> list[int]:
            self.need_pinned(path, int((src if path.direction == "load" else dst)[0]))
            if handler not in self._registrations and hasattr(self.module, "CPUOffloadingWorker"):
                raise KvprobeError(
                    "the worker was made before kvprobe was installed: where its registrations begin is not known"
                )
            tensors = [t.data_ptr() for t in (*handler.src_tensors, *handler.dst_tensors)]
            return tensors + self._registrations.get(handler, [])

        return [Copies(dst, src, sizes, self.bounds(handler, path.direction, starts))]

    def transfer_events(self, handler: Any, job_id: int, result: Any) -> TransferEvents:
        """Of the newest transfer."""
        newest = handler._transfers[-1]
        return TransferEvents(newest.stream, newest.start_event, newest.end_event)

    def replace_events(self, handler: Any, job_id: int, result: Any, start: Any, end: Any) -> Any:
        """In the queue and in the table of `wait`."""
        newest = handler._transfers[-1]
        newest.start_event, newest.end_event = start, end
        if job_id in getattr(handler, "_transfer_events", ()):
            handler._transfer_events[job_id] = end
        return result
