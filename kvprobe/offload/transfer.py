"""One transfer of the engine: the copies of one request in one direction, and what each part of its life took."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.offload.cells import damaged
from kvprobe.offload.job import Fault, Job

if TYPE_CHECKING:
    from kvprobe.offload.engine import OffloadEngine


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


class Transfer(Job["OffloadEngine"]):
    """A transfer in the engine's hands; wait for it, await it, or let the engine tell.

    Attributes:
        tag: whatever the caller gave, for its own use.
        policy: under which it was submitted, "shared" or "pooled".
    """

    __slots__ = ("_callbacks", "policy", "tag")

    def __init__(
        self, owner: OffloadEngine, direction: str, address: int, number: int, copies: int, policy: str, tag: Any
    ) -> None:
        """Takes over one reference to the native job at `address`."""
        super().__init__(owner, direction, address, number, copies)
        self.policy, self.tag = policy, tag
        self._callbacks: list[Callable[[Transfer], None]] | tuple[()] | None = ()  # None: called

    @property
    def error(self) -> Exception | None:
        """Why it failed; None where it has not."""
        if self.failed and self._status.fault == Fault.CELL:
            return damaged(self._status, self.owner.mapping)
        return super().error

    @property
    def piece_bytes(self) -> int:
        """Size of each of its copies."""
        return self.owner.mapping.piece_bytes

    @property
    def blocked(self) -> int:
        """Calls of the shared policy that met a full queue."""
        return int(self._status.blocked)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls `callback(transfer)` once when it has ended, on a thread of the engine's or of whoever waits or polls.

        At once where it has ended. An exception in it is logged and harms nobody. It must not wait for a thread that
        waits for a transfer.
        """
        self.owner._add_callback(self, callback)

    def __await__(self) -> Generator[Any, None, Transfer]:
        if not self.done:
            if self.owner.simulated:
                self.owner.wait(self)
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
