"""Adapters of a server's copies: the paths of its handlers, and how its copies get to the submitter.

The server's own function runs as ever, while hooks around its copy operations take what they are called with. At its
end the copies go to the submitter, behind what the server's stream holds, and the events that the server asks tell the
submitter's end. Whatever cannot go there is made in the server's own way, in its order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from kvprobe.errors import KvprobeError
from kvprobe.instrument.adapter import Adapter
from kvprobe.instrument.device import Device, device_of
from kvprobe.instrument.hooks import Call
from kvprobe.instrument.submissions import POOLED, Bounds, Copies, HandOver, Rung, submission_event
from kvprobe.instrument.transfers import CopyPath

if TYPE_CHECKING:
    from kvprobe.offload.submitter import Submitter

__all__ = ["CopyAdapter", "TransferEvents", "TransferPart"]

log = logging.getLogger("kvprobe")


class TransferEvents(NamedTuple):
    """What a server has of a transfer: the stream, its start event (None: it has none) and the event of its end."""

    stream: Any
    start: Any
    end: Any


class TransferPart(NamedTuple):
    """Calls of a transfer that become one job of the submitter.

    Attributes:
        copies: by address, in their order.
        calls: of the server's functions that would make them, in their order.
        slots: lists and places in them where the server keeps events of this part's end, apart from the transfer's;
            `calls` record those.
    """

    copies: list[Copies]
    calls: list[Call]
    slots: tuple[tuple[list[Any], int], ...] = ()


class _Fallback:
    """A part whose submission failed, in the server's own way; once, whichever event notices it first."""

    def __init__(
        self, adapter: CopyAdapter, path: CopyPath, stream: Any, part: TransferPart, hand_over: HandOver
    ) -> None:
        self.adapter, self.path, self.stream, self.part, self.hand_over = adapter, path, stream, part, hand_over
        self.rung = path.current.rung if path.current is not None else POOLED
        self.done = False

    def __call__(self) -> None:
        if self.done:
            return
        self.done = True
        error = self.hand_over.error
        log.warning("kvprobe: %s: copies are made again by the server's own code: %s", self.adapter.name, error)
        self.adapter.refuse(self.path, self.rung, f"a transfer failed: {error}")
        self.adapter.make(self.part.calls, self.stream)


class CopyAdapter(Adapter):
    """What adapters of copies share. A subclass wraps the server's functions and says what was taken of a transfer.

    Attributes:
        rungs: the base and the candidates.
        queued: whether every copy of the server's takes a slot of the launch queue.
        handlers: paths by handler and direction.
        path: of the transfer that is being submitted.
        module: of the server; its `torch` makes streams.
    """

    rungs: tuple[Rung, ...]
    queued = True

    def __init__(self) -> None:
        super().__init__()
        self.handlers: WeakKeyDictionary[Any, dict[str, CopyPath]] = WeakKeyDictionary()
        self.path: CopyPath | None = None
        self.module: Any = None
        self._taken: list[Call] = []  # calls of the server's copy operation that go to the submitter
        self._stream = 0  # of the transfer that is being submitted; 0: torch's current one
        self._bounds: WeakKeyDictionary[Any, dict[Hashable, Bounds]] = WeakKeyDictionary()

    # ---- what a subclass implements ---------------------------------------------------------------------------

    def rungs_of(self, handler: Any, direction: str) -> tuple[Rung, ...]:
        """The base and the candidates for a direction of this handler."""
        return self.rungs

    def copies(self, handler: Any, path: CopyPath) -> list[Copies]:
        """What the taken calls would have copied.

        Raises:
            KvprobeError: this is nothing for the submitter.
        """
        raise NotImplementedError

    def jobs(self, handler: Any, path: CopyPath) -> list[TransferPart]:
        """The jobs that the taken calls become; none: there is nothing to copy."""
        return [TransferPart(self.copies(handler, path), self._taken)]

    def transfer_events(self, handler: Any, job_id: Any, result: Any) -> TransferEvents:
        """Stream and events of the newest transfer, for which the server's function returned `result`."""
        raise NotImplementedError

    def replace_events(self, handler: Any, job_id: Any, result: Any, start: Any, end: Any) -> Any:
        """Puts other events in the place of those; what the server's function is to return."""
        raise NotImplementedError

    def submitter_of(self, path: CopyPath) -> Submitter:
        """Who gets the transfer that is being submitted."""
        assert path.device is not None
        return path.device.submitter

    def refuse(self, path: CopyPath, rung: Rung, why: str) -> None:
        """A rung failed, and is not taken again."""
        if path.auto is not None:
            path.auto.refuse(rung, why)

    def submitted(self, path: CopyPath, result: Any) -> None:
        """The transfer is on its way."""
        path.submitted(bool(result))

    # ---- paths ------------------------------------------------------------------------------------------------

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
            path = paths[direction] = CopyPath(
                self, direction, self.device(), self.rungs_of(handler, direction), self.queued
            )
        return path

    def paths(self) -> Iterator[CopyPath]:
        """All paths there are."""
        for paths in list(self.handlers.values()):
            yield from paths.values()

    def around_init(self, call: Call, handler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a handler's constructor: pools are filled now, not on the hot path."""
        result = call()
        self.device()
        return result

    def step_aside(self) -> None:
        """Give events and streams back. Events that stand for the submitter's end stay as they are: they are true."""
        path, self.path = self.path, None
        if path is not None:  # a hook failed while a transfer was submitted: what was taken is the server's own again
            if self._taken:
                self._make_now(path, self.module.torch.cuda.ExternalStream(self._stream))
            if path.newest is not None:
                path.newest.wait()
        for each in self.paths():
            each.forget()

    # ---- to the submitter -------------------------------------------------------------------------------------

    def submit(self, call: Call, handler: Any, path: CopyPath, job_id: Any) -> Any:
        """Runs the server's own submission; hands over at its end what hooks have taken meanwhile."""
        self.path, self._taken = path, []
        try:
            result = call()
            if path.hands_over:
                result = self.hand_over(handler, path, job_id, result)
        except BaseException:
            if call.error is not None:  # the server's own; after one of ours `step_aside` sees to what was taken
                self.path, self._taken = None, []
                path.abandon()
            raise
        self.path, self._taken = None, []
        self.submitted(path, result)
        return result

    def hand_over(self, handler: Any, path: CopyPath, job_id: Any, result: Any) -> Any:
        """Gives the taken calls to the submitter, behind what the transfer's stream holds; else they are made now."""
        if not self._taken:
            return result
        stream, start, end = self.transfer_events(handler, job_id, result)
        try:
            parts = self.jobs(handler, path)
            hand_over = self._hand(path, parts, stream) if parts else None
        except Exception as error:
            rung = path.current.rung if path.current is not None else POOLED
            self.refuse(path, rung, f"the submitter did not take a transfer: {error}")
            path.keep_with_server()
            self._make_taken(path, stream, end)
            if isinstance(error, KvprobeError):
                return result
            raise
        if hand_over is None:
            path.keep_with_server()
            self._make_taken(path, stream, end)
            return result
        fallbacks = [
            _Fallback(self, path, stream, part, HandOver([one]))
            for part, one in zip(parts, hand_over.parts, strict=True)
        ]
        for part, fallback in zip(parts, fallbacks, strict=True):
            for events, at in part.slots:
                events[at] = submission_event(events[at], fallback.hand_over, path, fallback)

        def fall_back() -> None:
            if start is not None:
                with self.module.torch.cuda.stream(stream):
                    start.record(stream)
            for fallback in fallbacks:
                if fallback.hand_over.failed:
                    fallback()
            with self.module.torch.cuda.stream(stream):
                end.record(stream)

        start = start if start is None else submission_event(start, hand_over, path, fall_back)
        end = submission_event(end, hand_over, path, fall_back)
        result = self.replace_events(handler, job_id, result, start, end)
        path.add(0, hand_over.copies, hand_over.bytes, len(parts))
        self._taken = []
        return result

    def _hand(self, path: CopyPath, parts: list[TransferPart], stream: Any) -> HandOver:
        """One submission a part; the others follow the first, which waits for what the stream holds now."""
        live, copies = path.current, [part.copies for part in parts]
        after, submitter = stream.cuda_stream, self.submitter_of(path)
        if path.newest is not None and path.newest.parts[-1].owner is not submitter:
            begin_ns = time.monotonic_ns()
            path.fence(after)  # which keeps the order of its own alone
            if live is not None:  # until the others are submitted: that is no cost of this way of copying
                live.first_ns += time.monotonic_ns() - begin_ns
        since_ns = live.first_ns if live else 0
        others = live is not None and any(one.rung != live.rung for one in path.live.values())
        given = submitter.submit_all(copies, path.direction, after=after, since_ns=since_ns, behind_copies=others)
        hand_over = HandOver(given)
        path.note_hand_over(hand_over)
        return hand_over

    def make(self, calls: list[Call], stream: Any) -> None:
        """Calls of the server's, on its stream."""
        with self.module.torch.cuda.stream(stream):
            for one in calls:
                one.func(*one.args, **one.kwargs)

    def _make_taken(self, path: CopyPath, stream: Any, end: Any) -> None:
        """What was taken, in the server's own way."""
        taken, self._taken = self._taken, []
        path.fence(stream.cuda_stream)
        self.make(taken, stream)
        with self.module.torch.cuda.stream(stream):
            end.record(stream)

    def _make_now(self, path: CopyPath, stream: Any) -> None:
        """The same to its end: an event that was recorded before it is true again."""
        taken, self._taken = self._taken, []
        path.fence(stream.cuda_stream)
        self.make(taken, stream)
        stream.synchronize()

    def bounds(self, handler: Any, key: Hashable, addresses: Callable[[], list[int]]) -> Bounds:
        """Where allocations and registrations begin, of one kind of a handler's transfers; found out once."""
        held = self._bounds.get(handler)
        if held is None:
            held = self._bounds[handler] = {}
        if key not in held:
            held[key] = Bounds(addresses())
        return held[key]

    @staticmethod
    def need_pinned(path: CopyPath, address: int) -> None:
        """Pageable memory stays with the server.

        Raises:
            KvprobeError: this address of the CPU's side is not pinned.
        """
        if path.device is None or path.device.runtime.memory_kind(address) == "pageable":
            raise KvprobeError("the CPU's blocks are in pageable memory: copies from there block whoever submits them")
