"""vLLM up to 0.19: handlers that copy block by block, one `cudaMemcpyAsync` each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.handover import TransferEvents
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import POOLED, Copies, Rung
from kvprobe.instrument.transfers import CopyPath

from .vllm_copies import CopyHandlers, module_with


class _Loop(CopyHandlers):
    """One `cudaMemcpyAsync` a block and tensor, in a loop in C++ that ignores return codes (`ops.swap_blocks`).

    A transfer calls it once a tensor, 64 times for a model of 32 layers: what a hook costs there, a server pays 64
    times. So the handler's module gets an `ops` whose `swap_blocks` is vLLM's own function, and a hook only while a
    transfer is submitted that needs one: for its first call to time it, for all to take them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ops: Any = None  # the module's `ops`, ours
        self._own: Any = None  # vLLM's own swap_blocks
        self._hook: Any = None  # `swap` around it
        self._expected = 0
        self._seen = 0
        self._row_bytes = 0
        self._error = 0
        self._compute: Any = None  # stream that a store must wait for, where vLLM does not see to it

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the handler and give its module an `ops` with a `swap_blocks` that can be hooked for a while."""
        self.module = module
        handler = getattr(module, self.handler_name)
        patcher.wrap(handler, "__init__", self.around_init)
        patcher.wrap(handler, "transfer_async", self.transfer)
        patcher.wrap(handler, "get_finished", self.finished)
        if self.fix == "auto":
            patcher.wrap(module, "expand_block_ids", self.expanded)
        self._own = module.ops.swap_blocks
        self._hook = patcher.around(self._own, self.swap, "ops.swap_blocks")
        self._ops = module_with(module.ops, swap_blocks=self._own)
        patcher.replace(module, "ops", self._ops)

    handler_name = "SingleDirectionOffloadingHandler"

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Around `transfer_async`."""
        raise NotImplementedError

    def expanded(
        self, call: Call, block_ids: Any, block_size_factor: int, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In the place of `expand_block_ids`, which takes a turn of Python's a block: the same ids at once."""
        skip_count = args[0] if args else kwargs.get("skip_count", 0)
        if len(output) != len(block_ids) * block_size_factor - skip_count:
            return call()
        ids = np.asarray(block_ids)[:, None] * block_size_factor + np.arange(block_size_factor)
        output[:] = ids.reshape(-1)[skip_count:]
        call.done = True
        return None

    def watched(self, path: CopyPath, call: Call, handler: Any, job_id: int, swaps: int, stream: int = 0) -> Any:
        """Run vLLM's own `transfer_async` while `swap` sees its copies, or `_take` takes them."""
        self._expected, self._seen, self._row_bytes, self._stream = swaps, 0, 0, stream
        self._ops.swap_blocks = self._take if path.hands_over else self._hook
        try:
            return self._checked(path, job_id, self.submit(call, handler, path, job_id))
        finally:
            self._ops.swap_blocks = self._own

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

    def _take(self, *args: Any, **kwargs: Any) -> None:
        """Stands for `swap_blocks` while the submitter gets the copies."""
        path = self.path
        if path is not None and path.current is not None and not self._taken:
            self._first(path)
        self._taken.append(Call(self._own, args, kwargs))

    def swap(self, call: Call, src: Any, dst: Any, *rest: Any, **kwargs: Any) -> Any:
        """Around `ops.swap_blocks(src, dst[, block_bytes], mapping)`."""
        path = self.path
        live = path.current if path is not None else None
        if path is None or live is None or kwargs:
            return call()
        if not self._seen:
            self._first(path)
        self._seen += 1
        count = len(rest[-1])
        if path.row_bytes:  # all is known: vLLM is alone with the rest
            self._ops.swap_blocks = self._own
            copies = count * self._expected
            path.add(0, copies, count * path.row_bytes, copies)
            return call()
        size = _block_bytes(src, dst, *rest)
        path.add(0, count, count * size, count)
        self._row_bytes += size
        if self._seen == self._expected:
            path.row_bytes = self._row_bytes
        return call()

    def _first(self, path: CopyPath) -> None:
        """Before the first copy of a transfer."""
        if self._compute is not None or not self._stream:
            stream = self.module.torch.cuda.current_stream()
            if self._compute is not None:
                stream.wait_stream(self._compute)
                self._compute = None
            self._stream = stream.cuda_stream
        if not path.hands_over:
            path.fence(self._stream)
        path.first(self._stream)

    def copies(self, handler: Any, path: CopyPath) -> list[Copies]:
        """A mapping that the tensors share, and where each begins; tensors of one block size go together."""
        calls = [one.args for one in self._taken]
        if any(one.kwargs for one in self._taken) or any(args[-1] is not calls[0][-1] for args in calls):
            raise KvprobeError("swap_blocks was called in another way than in any version known")
        mapping = calls[0][-1].numpy()
        bases: dict[int, list[tuple[int, int]]] = {}
        for args in calls:
            bases.setdefault(_block_bytes(*args), []).append((args[1].data_ptr(), args[0].data_ptr()))

        def starts() -> list[int]:
            pairs = [pair for some in bases.values() for pair in some]
            self.need_pinned(path, pairs[0][path.direction == "load"])
            return [address for pair in pairs for address in pair]

        bounds = self.bounds(handler, path.direction, starts)
        return [
            Copies(mapping[:, 1] * size, mapping[:, 0] * size, size, bounds, pairs) for size, pairs in bases.items()
        ]


_EXPAND = Target(
    "vllm.v1.kv_offload.worker.cpu_gpu",
    "expand_block_ids",
    ("block_ids", "block_size_factor", "output", "skip_count"),
)


def _block_bytes(src: Any, dst: Any, *rest: Any) -> int:
    """Bytes of a block, as `swap_blocks` takes them."""
    return int(rest[0]) if len(rest) == 2 else int(src.element_size() * src.stride(0))


class SharedStreams(_Loop):
    """vLLM up to 0.12: two shared streams."""

    name = "vllm.copies.shared"
    versions = ">=0.11,<0.13"
    upstream = (">=0.13", "a stream per transfer since 0.13 (vLLM pull request 29013)")
    summary = "Times every transfer of CpuGpuOffloadingHandler: build, submit, queue wait, copy, poll delay."
    changes = (
        "a store waits for the compute stream; when submission is slow, or the copies are, transfers go to the "
        "submitter (order kept), which merges neighbours and chooses the method; a refused copy is no longer ignored."
    )
    rungs = (Rung("shared", "loop"), POOLED)
    handler_name = "CpuGpuOffloadingHandler"
    targets = (
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.__init__"),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.transfer_async", ("job_id", "spec")),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CpuGpuOffloadingHandler.get_finished", ()),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "CPULoadStoreSpec"),
        _EXPAND,
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "ops.swap_blocks"),
    )

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Under auto a store runs after the compute that wrote its blocks, which vLLM does not see to."""
        spec = specs[0] if specs else kwargs["spec"]
        load = isinstance(spec[0], self.module.CPULoadStoreSpec)
        path = self.path_of(handler, "load" if load else "store")
        own = handler.h2d_stream if load else handler.d2h_stream
        if path.auto is not None and not load:
            own.wait_stream(self.module.torch.cuda.current_stream())
        if not path.watch() and not path.pending:
            return self.unwatched(call, path, job_id)
        path.begin(job_id)
        swaps = sum(handler.kv_dim_before_num_blocks) + len(handler.kv_dim_before_num_blocks)
        return self.watched(path, call, handler, job_id, swaps, own.cuda_stream)

    def transfer_events(self, handler: Any, job_id: int, result: Any) -> TransferEvents:
        """Of the shared stream."""
        load = self.path is not None and self.path.direction == "load"
        return TransferEvents(handler.h2d_stream if load else handler.d2h_stream, None, handler.transfer_events[job_id])

    def replace_events(self, handler: Any, job_id: int, result: Any, start: Any, end: Any) -> Any:
        """One event a transfer."""
        handler.transfer_events[job_id] = end
        return result

    def step_aside(self) -> None:
        """What follows on the shared streams comes after what the submitter has."""
        for handler, paths in list(self.handlers.items()):
            for path in paths.values():
                if path is not self.path:
                    path.fence((handler.h2d_stream if path.direction == "load" else handler.d2h_stream).cuda_stream)
        super().step_aside()


class PooledLoop(_Loop):
    """vLLM 0.13 to 0.19: a stream per transfer, the same loop."""

    name = "vllm.copies.loop"
    versions = ">=0.13,<0.20"
    upstream = (">=0.20", "one descriptor batch per transfer since 0.20 (vLLM pull request 38460)")
    summary = "Times every transfer of SingleDirectionOffloadingHandler: build, submit, queue wait, copy, poll delay."
    changes = (
        "when submission is slow, or the copies are, transfers go to the submitter (order kept), which merges "
        "neighbours and chooses the method; in 0.13 a store waits for the compute stream; a refused copy is reported "
        "instead of ignored."
    )
    rungs = (Rung("upstream", "loop"), POOLED)
    targets = (
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "SingleDirectionOffloadingHandler.__init__"),
        Target(
            "vllm.v1.kv_offload.worker.cpu_gpu",
            "SingleDirectionOffloadingHandler.transfer_async",
            ("job_id", "transfer_spec"),
        ),
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "SingleDirectionOffloadingHandler.get_finished", ()),
        _EXPAND,
        Target("vllm.v1.kv_offload.worker.cpu_gpu", "ops.swap_blocks"),
    )

    def transfer(self, call: Call, handler: Any, job_id: int, *specs: Any, **kwargs: Any) -> Any:
        """Only the submission is touched: streams and their order are vLLM's."""
        store = bool(handler.src_tensors[0].is_cuda)
        path = self.path_of(handler, "store" if store else "load")
        unordered = store and self.fix == "auto" and self.version is not None and self.version[1].startswith("0.13.")
        if not path.watch() and not unordered and not path.pending:
            return self.unwatched(call, path, job_id)
        path.begin(job_id)
        self._compute = self.module.torch.cuda.current_stream() if unordered else None
        split = getattr(handler, "kv_dim_before_num_blocks", None)
        swaps = sum(2 if kv else 1 for kv in split) if split is not None else len(handler.src_tensors)
        return self.watched(path, call, handler, job_id, swaps)

    def transfer_events(self, handler: Any, job_id: int, result: Any) -> TransferEvents:
        """A tuple up to 0.15 or so, an object with a start event after that."""
        newest = handler._transfers[-1]
        if isinstance(newest, tuple):
            return TransferEvents(newest[1], None, newest[2])
        return TransferEvents(newest.stream, newest.start_event, newest.end_event)

    def replace_events(self, handler: Any, job_id: int, result: Any, start: Any, end: Any) -> Any:
        """In the queue and in the table of `wait`."""
        newest = handler._transfers[-1]
        if isinstance(newest, tuple):
            handler._transfers[-1] = (*newest[:2], end)
        else:
            newest.start_event, newest.end_event = start, end
        if job_id in getattr(handler, "_transfer_events", ()):
            handler._transfer_events[job_id] = end
        return result
