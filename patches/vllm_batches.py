"""vLLM from 0.20 on: handlers that copy one batch of descriptors a transfer."""

from __future__ import annotations

import time
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.handover import TransferEvents
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import CODED, POOLED, Copies, Rung
from kvprobe.instrument.transfers import CopyPath

from .vllm_copies import CopyHandlers, module_with

if TYPE_CHECKING:
    from kvprobe.instrument.coded import CodedRows
    from kvprobe.instrument.device import Device


_SPEC = "vllm.v1.kv_offload.cpu.spec"
_OWN_SPEC = (_SPEC, "CPUOffloadingSpec")


class DescriptorBatches(CopyHandlers):
    """vLLM from 0.20: one batch of (source, destination, size) descriptors per transfer.

    Who else reads the CPU's blocks is known where vLLM's `CPUOffloadingSpec` itself makes the worker, each rank with
    rows of its own, or where the worker allocates them for itself: there they may lie coded (`coded.py`). A spec of
    tiers hands the same memory to threads that write it to disks or other hosts, ranks of a replicated layout read what
    another has stored, and what other specs do is not known: there they lie as they are. Expedited loads of what lies
    coded go to the submitter, too, behind its other loads; after the first one stores are not coded any more. When
    kvprobe leaves, every block lies there as it is before vLLM's own functions are back.
    """

    name = "vllm.copies.batch"
    versions = ">=0.20,<0.34"
    summary = "Times every descriptor batch: build, submit, queue wait, copy, poll delay; counts descriptors and runs."
    changes = (
        "when submission is slow, or the copies are, transfers go to the submitter (order kept), which merges "
        "neighbours and chooses the method; expedited loads stay with vLLM. bf16 blocks lie coded in CPU memory that "
        "nobody else reads, where their copies become faster by it."
    )
    rungs = (Rung("upstream", "batch"), POOLED)
    queued = False
    targets = (
        *(
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
        ),
        Target(_SPEC, "CPUOffloadingSpec.get_worker", optional=True),
    )

    def __init__(self) -> None:
        super().__init__()
        self._registrations: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._expedited: WeakSet[Any] = WeakSet()
        self._own_swaps: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._patcher_of: Patcher | None = None
        self._coded: WeakKeyDictionary[Any, CodedRows] = WeakKeyDictionary()  # both handlers of a worker share one
        self._rows: tuple[CodedRows, str, Any] | None = None  # of the transfer that is being submitted
        self._spec: Any = None  # that is making a worker

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the handler; its copy function is an attribute of each handler, or the module's `ops` before 0.24."""
        if module.__name__ == _SPEC:
            if hasattr(module.CPUOffloadingSpec, "get_worker"):
                patcher.wrap(module.CPUOffloadingSpec, "get_worker", self.around_get_worker)
            return
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
        device = self.device()
        if self.fix == "auto" and device is not None:
            self._open_coded(worker, device)
        return result

    def around_get_worker(self, call: Call, spec: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn whose worker is made."""
        self._spec = spec
        try:
            return call()
        finally:
            self._spec = None

    def _open_coded(self, worker: Any, device: Device) -> None:
        """Have what coding the worker's blocks takes, or say why they lie as they are."""
        store: Any = getattr(worker, "_store_handler", None)
        why = self._why_as_they_are(worker, store)
        try:
            if not why:
                from kvprobe.instrument.coded import CodedRows

                self.need_pinned_tensors(store.dst_tensors, device)
                size = int(store.dst_tensors[0].shape[1])
                coded = CodedRows.of(device, store.dst_tensors, size, self.decide)
                for handler in vars(worker).values():
                    if isinstance(handler, self.module.SingleDirectionOffloadingHandler):
                        self._coded[handler] = coded
        except KvprobeError as error:
            why = str(error)
        if why:
            self.decide("note", f"blocks travel as they are: {why}")

    def _why_as_they_are(self, worker: Any, store: Any) -> str:
        """Why the blocks of a worker must not lie coded; "" where they may."""
        if store is None:
            return "this version of vLLM is not known for it"
        spec, region = self._spec, getattr(worker, "_mmap_region", None)
        own = region is None or (spec is not None and (type(spec).__module__, type(spec).__name__) == _OWN_SPEC)
        if not own:
            name = type(spec).__name__ if spec is not None else "whoever made the worker"
            return f"{name} may read them in the CPU's memory, too"
        if region is not None and getattr(spec, "replicated_layout", True):
            return "in a replicated layout all ranks read them in the CPU's memory"
        if getattr(store, "_canonical_copy_plans", None) is not None or getattr(store, "dst_blocks_per_chunk", 0) != 1:
            return "the CPU's blocks are not laid out as the GPU's are"
        sizes = {int(tensor.shape[1]) for tensor in store.dst_tensors}
        sizes |= {ref.page_size_bytes for group in store.layer_refs_per_group for ref in group}
        steps = {int(tensor.stride(0)) for tensor in store.dst_tensors}
        if len(sizes) > 1 or len(steps) > 1 or not int(store.dst_tensors[0].shape[0]):
            return "they are of different sizes"
        return ""

    @staticmethod
    def need_pinned_tensors(tensors: Any, device: Device) -> None:
        """Kernels reach no other memory.

        Raises:
            KvprobeError: one of them is pageable.
        """
        if any(device.runtime.memory_kind(tensor.data_ptr()) == "pageable" for tensor in tensors):
            raise KvprobeError("the CPU's blocks are in pageable memory, which no copy kernel reaches")

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
        direction = "store" if handler.gpu_to_cpu else "load"
        path, coded = self.path_of(handler, direction), self._coded.get(handler)
        if coded is None:
            if not path.watch() and not path.pending:
                return call()
            self._own_swap(handler)
            path.begin(job_id)
            return self.submit(call, handler, path, job_id)
        pair = specs if len(specs) == 2 else specs[0] if specs else (kwargs["src_spec"], kwargs["dst_spec"])
        rows = pair[direction == "store"].block_ids
        with coded.lock:
            path.heard = coded.heard
            takes = coded.takes(direction, rows)
            if takes and handler in self._expedited:
                coded.stop("an expedited load would wait for other loads")
            watched = takes or coded.coding  # whether auto rests or not: the two are compared
            if not watched and not path.watch() and not path.pending:
                return call()
            self._own_swap(handler)
            live = path.begin(job_id)
            live.one_in = 1 if watched else live.one_in
            live.rung = CODED if takes else live.rung
            self._rows = coded, direction, rows
            try:
                return self.submit(call, handler, path, job_id)
            finally:
                self._rows = None

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
            self._taken.append(self._rows[0].call(call, *self._rows[1:]) if self._rows is not None else call)
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
        coded = self._rows[0] if self._rows is not None and path.current and path.current.rung == CODED else None
        if coded is not None and (sizes != coded.block_bytes).any():
            raise KvprobeError("vLLM copies parts of blocks")

        def starts() -> list[int]:
            self.need_pinned(path, int((src if path.direction == "load" else dst)[0]))
            if handler not in self._registrations and hasattr(self.module, "CPUOffloadingWorker"):
                raise KvprobeError(
                    "the worker was made before kvprobe was installed: where its registrations begin is not known"
                )
            tensors = [t.data_ptr() for t in (*handler.src_tensors, *handler.dst_tensors)]
            return tensors + self._registrations.get(handler, [])

        return [Copies(dst, src, sizes, self.bounds(handler, path.direction, starts))]

    def submitter_of(self, path: CopyPath) -> Any:
        """The coded rows have one of their own."""
        if self._rows is not None and path.current is not None and path.current.rung == CODED:
            return self._rows[0].submitter
        return super().submitter_of(path)

    def refuse(self, path: CopyPath, rung: Rung, why: str) -> None:
        """Where coding failed, no more is coded."""
        if rung != CODED:
            super().refuse(path, rung, why)
            return
        for coded in set(self._coded.values()):
            coded.stop(why)

    def make(self, calls: list[Call], stream: Any) -> None:
        """Rows that vLLM copies itself lie there as they are."""
        for one in calls:
            before = getattr(one, "before", None)
            if before is not None:
                before()
        super().make(calls, stream)

    def submitted(self, path: CopyPath, result: Any) -> None:
        """Coded rows know what is on its way to them."""
        live = path.current
        if self._rows is not None and live is not None and live.hand_over is not None and live.rung == CODED:
            self._rows[0].handed_over(path.direction, self._rows[2], live.hand_over)
        super().submitted(path, result)

    def step_aside(self) -> None:
        """Every block lies there as it is, for whoever reads it."""
        super().step_aside()
        for handler, coded in list(self._coded.items()):
            coded.close(is_gone=not handler.dst_tensors)  # its worker was shut down
        self._coded.clear()

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
