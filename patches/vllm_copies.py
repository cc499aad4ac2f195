"""vLLM's OffloadingConnector, worker side: what its copying handlers have in common, in the three shapes they have had.

Up to 0.12 one handler with two shared streams and one `cudaMemcpyAsync` a block; 0.13 to 0.19 a stream per transfer
with the same loop (`vllm_loops.py`); from 0.20 one descriptor batch per transfer (`vllm_batches.py`). Building
descriptors stays vLLM's own code: hooks around its copy operation take what it is called with. Where auto found that
worth it, the copies go to kvprobe's submitter instead, behind what vLLM's own stream holds, and the events that vLLM
asks tell the submitter's end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import Adapter
from kvprobe.instrument.device import Device, device_of
from kvprobe.instrument.hooks import Call
from kvprobe.instrument.submissions import POOLED, Bounds, Copies, Rung, submission_event
from kvprobe.instrument.transfers import CopyPath

log = logging.getLogger("kvprobe")


def module_with(module: Any, **functions: Any) -> ModuleType:
    """A module with some functions of its own: takes the place of a name in one importing module only.

    A real module, because the interpreter reads attributes of those as fast as the server's own.
    """
    made = ModuleType(getattr(module, "__name__", "ops"))
    made.__dict__.update(functions, __getattr__=lambda name: getattr(module, name))
    return made


class CopyHandlers(Adapter):
    """What the adapters of all three shapes share: the paths of each handler, hand-over, timing, and completion."""

    rungs: tuple[Rung, ...]

    def __init__(self) -> None:
        super().__init__()
        self.handlers: WeakKeyDictionary[Any, dict[str, CopyPath]] = WeakKeyDictionary()
        self.path: CopyPath | None = None  # of the transfer that is being submitted
        self.module: Any = None
        self._taken: list[Call] = []  # calls of vLLM's copy operation that go to the submitter
        self._bounds: WeakKeyDictionary[Any, dict[str, Bounds]] = WeakKeyDictionary()

    def device(self) -> Device | None:
        """The device, prepared for curing only where curing was asked for."""
        device = device_of()
        if device is not None and self.fix == "auto":
            device.prepare()
        return device

    def path_of(self, handler: Any, direction: str) -> CopyPath:
        """The path of one direction of a handler."""
        paths = self.handlers.get(handler)
        if paths is None:
            paths = self.handlers[handler] = {}
        path = paths.get(direction)
        if path is None:
            path = paths[direction] = CopyPath(self, direction, self.device(), self.rungs_of(handler), self.queued)
        return path

    def rungs_of(self, handler: Any) -> tuple[Rung, ...]:
        """The base and the candidates for this handler."""
        return self.rungs

    queued = True  # whether every copy takes a place in the launch queue

    def paths(self) -> Iterator[CopyPath]:
        """All paths there are."""
        for paths in list(self.handlers.values()):
            yield from paths.values()

    def step_aside(self) -> None:
        """Give events and streams back. Events that stand for the submitter's end stay as they are: they are true."""
        path, self.path = self.path, None
        if path is not None:  # a hook failed while a transfer was submitted: what was taken is vLLM's own again, now
            path.handing = False
            if self._taken:
                self._make_now(path, self.module.torch.cuda.ExternalStream(self._stream))
            if path.newest is not None:
                path.newest.wait()
        for each in self.paths():
            each.forget()

    _stream = 0  # of the transfer that is being submitted; 0: torch's current one

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

    # ---- to the submitter -------------------------------------------------------------------------------------

    def copies(self, handler: Any, path: CopyPath) -> Copies:
        """What the taken calls would have copied."""
        raise NotImplementedError

    def ends(self, handler: Any, job_id: int) -> tuple[Any, Any, Any]:
        """The stream of the newest transfer, its start event (None: it has none) and the event of its end."""
        raise NotImplementedError

    def tell_ends(self, handler: Any, job_id: int, start: Any, end: Any) -> None:
        """Puts other events in the place of those."""
        raise NotImplementedError

    def hand_over(self, handler: Any, path: CopyPath, job_id: int) -> None:
        """Gives the taken calls to the submitter, behind what the transfer's stream holds; else vLLM makes them now."""
        taken = self._taken
        if not taken:
            return
        assert path.device is not None
        stream, start, end = self.ends(handler, job_id)
        live = path.current
        try:
            copies = self.copies(handler, path)
            submission = path.device.submitter.submit(
                copies, path.direction, after=stream.cuda_stream, since_ns=live.first_ns if live else 0
            )
        except Exception as error:
            if path.auto is not None:
                path.auto.refuse(POOLED, f"the submitter did not take a transfer: {error}")
            self._make_taken(path, stream, end)
            if isinstance(error, KvprobeError):
                return
            raise
        self._taken = []

        def again() -> None:
            log.warning(
                "kvprobe: %s: transfer %s is copied again by vLLM's own code: %s", self.name, job_id, submission.error
            )
            if path.auto is not None:
                path.auto.refuse(POOLED, f"a transfer failed: {submission.error}")
            with self.module.torch.cuda.stream(stream):
                if start is not None:
                    start.record(stream)
                for one in taken:
                    one.func(*one.args, **one.kwargs)
                end.record(stream)

        path.handed(submission)
        start = start if start is None else submission_event(start, submission, path, again)
        end = submission_event(end, submission, path, again)
        self.tell_ends(handler, job_id, start, end)
        path.add(0, submission.copies, submission.bytes, 1)

    def _end(self, path: CopyPath) -> None:
        """No transfer is being submitted any more."""
        path.handing, self.path, self._taken = False, None, []

    def _make_taken(self, path: CopyPath, stream: Any, end: Any) -> None:
        """What was taken, in vLLM's own way."""
        taken, self._taken = self._taken, []
        path.behind(stream.cuda_stream)
        with self.module.torch.cuda.stream(stream):
            for one in taken:
                one.func(*one.args, **one.kwargs)
            end.record(stream)

    def _make_now(self, path: CopyPath, stream: Any) -> None:
        """What was taken, in vLLM's own way and to its end: an event that was recorded before it is true again."""
        taken, self._taken = self._taken, []
        path.behind(stream.cuda_stream)
        with self.module.torch.cuda.stream(stream):
            for one in taken:
                one.func(*one.args, **one.kwargs)
        stream.synchronize()

    def bounds(self, handler: Any, direction: str, addresses: Callable[[], list[int]]) -> Bounds:
        """Where allocations begin, of one direction of a handler; found out once."""
        held = self._bounds.get(handler)
        if held is None:
            held = self._bounds[handler] = {}
        if direction not in held:
            held[direction] = Bounds(addresses())
        return held[direction]

    @staticmethod
    def need_pinned(path: CopyPath, address: int) -> None:
        """Pageable memory stays with vLLM.

        Raises:
            KvprobeError: this address of the CPU's side is not pinned.
        """
        if path.device is None or path.device.runtime.memory_kind(address) == "pageable":
            raise KvprobeError("the CPU's blocks are in pageable memory: copies from there block whoever submits them")
