"""One transfer: the copies of one request in one direction, and what each part of its life took."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes as ct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.errors import TransferError
from kvprobe.native.library import JobStatus

if TYPE_CHECKING:
    from kvprobe.offload.engine import OffloadEngine

WAITING, SUBMITTING, IN_FLIGHT, DONE, FAILED = STATES = ("waiting", "submitting", "in flight", "done", "failed")
METHODS = ("loop", "batch", "kernel", "staged")  # enum kvp_method


@dataclass(frozen=True)
class Split:
    """Where a transfer's time went, in ns; the parts add up to the time from request to notice.

    Attributes:
        build_ns: the request was checked and put together.
        submit_ns: host time inside the submitting calls.
        wait_ns: queued: in the engine, behind compute, behind the transfer before it.
        copy_ns: the device worked on it.
        poll_ns: it was done and nobody had looked.
    """

    build_ns: int
    submit_ns: int
    wait_ns: int
    copy_ns: int
    poll_ns: int

    @property
    def total_ns(self) -> int:
        """From request to notice."""
        return self.build_ns + self.submit_ns + self.wait_ns + self.copy_ns + self.poll_ns


class Transfer:
    """A transfer in the engine's hands; wait for it, await it, or let the engine tell.

    Attributes:
        id: counts from 1 in one engine.
        direction: "load" (CPU to GPU) or "store" (GPU to CPU).
        tag: whatever the caller gave, for its own use.
        engine: that it belongs to.
        copies: number of pieces, `piece_bytes` each; neighbours may be copied as one.
        piece_bytes: size of a piece.
        policy: under which it was submitted, "shared" or "pooled".
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_release",
        "_status",
        "copies",
        "direction",
        "engine",
        "error",
        "id",
        "piece_bytes",
        "policy",
        "tag",
    )

    def __init__(self, engine: OffloadEngine, number: int, direction: str, tag: Any, address: int) -> None:
        """Takes over one reference to the native job at `address`."""
        self.engine, self.id, self.direction, self.tag = engine, number, direction, tag
        self._status = JobStatus.from_address(address)
        self._release = engine._release
        self.copies: int = self._status.pieces
        self.piece_bytes: int = engine.mapping.piece_bytes
        self.policy = ""
        self.error: Exception | None = None
        self._callbacks: list[Callable[[Transfer], None]] | None = []

    def __del__(self) -> None:
        """Gives the native job back."""
        self._release(self._address)

    def __repr__(self) -> str:
        return f"<{self.direction} {self.id}: {self.copies} x {self.piece_bytes} bytes, {self.state}>"

    @property
    def _address(self) -> int:
        return ct.addressof(self._status)

    @property
    def thread(self) -> int:
        """OS thread id that asked for it."""
        return int(self._status.tid)

    @property
    def state(self) -> str:
        """One of "waiting", "submitting", "in flight", "done", "failed"."""
        return STATES[self._status.state]

    @property
    def bytes(self) -> int:
        """Payload."""
        return self.copies * self.piece_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, either way."""
        return bool(self._status.state >= 3)

    @property
    def stream(self) -> int:
        """Handle of the stream of its newest submission; 0 before."""
        return int(self._status.stream)

    @property
    def submitted(self) -> int:
        """Pieces submitted so far."""
        return int(self._status.submitted)

    @property
    def calls(self) -> int:
        """Submitting calls made for it; a call that carried other transfers too counts for each of them."""
        return int(self._status.calls)

    @property
    def methods(self) -> tuple[str, ...]:
        """How it was submitted: "loop", "batch", "kernel", "staged", or several of them."""
        return tuple(name for bit, name in enumerate(METHODS) if self._status.methods >> bit & 1)

    @property
    def blocked(self) -> int:
        """Calls of the shared policy that met a full queue."""
        return int(self._status.blocked)

    @property
    def longest_ns(self) -> int:
        """The longest submitting call, on whichever thread made it."""
        return int(self._status.longest_ns)

    @property
    def submit_ns(self) -> int:
        """Host time in submitting calls, on whichever thread made them."""
        return int(self._status.submit_ns)

    @property
    def requested_ns(self) -> int:
        """When it was asked for."""
        return int(self._status.requested_ns)

    @property
    def built_ns(self) -> int:
        """When it was checked and put together, before it was handed over or submitted."""
        return int(self._status.built_ns)

    @property
    def submitted_ns(self) -> int:
        """When its last copy was submitted; 0: not yet."""
        return int(self._status.submitted_ns)

    @property
    def copy_start_ns(self) -> int:
        """When the device began with it, by the device's clock; 0: not known."""
        return int(self._status.copy_start_ns)

    @property
    def copy_end_ns(self) -> int:
        """When the device was done with it; 0: not known."""
        return int(self._status.copy_end_ns)

    @property
    def noticed_ns(self) -> int:
        """When its end was noticed; 0: not yet."""
        return int(self._status.noticed_ns)

    def result(self) -> Transfer:
        """The transfer itself if it completed.

        Raises:
            TransferError: it failed; its destination holds undefined bytes.
        """
        if self._status.state == 4:
            if self.error is None:
                self.error = self.engine._error_of(self._status)
            text = f"{self.direction} {self.id} of {self.bytes} bytes failed: {self.error}"
            raise TransferError(text) from self.error
        return self

    def wait(self, timeout_s: float | None = None) -> Transfer:
        """Sleeps until it has ended and its callbacks have run.

        Raises:
            TransferError: it failed, or the time ran out.
        """
        self.engine.wait(self, timeout_s)
        return self.result()

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls `callback(transfer)` once when it has ended, on a thread of the engine's or of whoever waits or polls.

        At once where it has ended. An exception in it is logged and harms nobody. It must not wait for a thread that
        waits for a transfer.
        """
        self.engine._add_callback(self, callback)

    def __await__(self) -> Generator[Any, None, Transfer]:
        if not self.done:
            if self.engine.simulated:
                self.engine.wait(self)
                return self.result()
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def tell() -> None:
                if not future.done():
                    future.set_result(None)

            def ended(_: Transfer) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed; nobody waits any more
                    loop.call_soon_threadsafe(tell)

            self.add_done_callback(ended)
            yield from future.__await__()
        return self.result()

    def split(self) -> Split:
        """Where the time went; zeros before it has ended."""
        noticed = self.noticed_ns
        if not noticed:
            return Split(0, 0, 0, 0, 0)
        build = self.built_ns - self.requested_ns
        copy_end = min(max(self.copy_end_ns or noticed, self.built_ns), noticed)
        copy_start = min(max(self.copy_start_ns or copy_end, self.built_ns), copy_end)
        # submission may overlap the copy: what of it lies before the copy is taken off the wait, the rest off the copy
        before = copy_start - self.built_ns
        submit = min(self.submit_ns, copy_end - self.built_ns)
        wait = max(before - submit, 0)
        copy = copy_end - self.built_ns - submit - wait
        return Split(build, submit, wait, copy, noticed - copy_end)
