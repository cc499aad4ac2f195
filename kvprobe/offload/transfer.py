"""One transfer: the copies of one request in one direction, and what each part of its life took."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvprobe.errors import TransferError
from kvprobe.offload.blocks import U64

if TYPE_CHECKING:
    from kvprobe.offload.engine import OffloadEngine

WAITING, SUBMITTING, IN_FLIGHT, DONE, FAILED = "waiting", "submitting", "in flight", "done", "failed"


@dataclass(frozen=True)
class Split:
    """Where a transfer's time went, in ns; the parts add up to the time from request to notice.

    Attributes:
        build_ns: descriptors were put together.
        submit_ns: host time inside the submitting calls.
        wait_ns: queued: in the engine, behind compute, behind the transfer before it.
        copy_ns: the copy engine worked on it.
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


@dataclass(eq=False)
class Transfer:
    """A transfer in the engine's hands; poll it, wait for it, or await it.

    Attributes:
        id: counts from 1 in one engine.
        direction: "load" (CPU to GPU) or "store" (GPU to CPU).
        tag: whatever the caller gave, for its own use.
        copies: number of copies, `piece_bytes` each.
        state: "waiting", "submitting", "in flight", "done" or "failed".
        policy: under which it was submitted.
        stream: handle it was submitted to; 0 before.
        error: why it failed.
        blocked: calls that met a full queue, and `longest_ns` the longest call.
    """

    id: int
    direction: str
    tag: Any
    copies: int
    piece_bytes: int
    engine: OffloadEngine = field(repr=False)
    dst: U64 = field(repr=False)
    src: U64 = field(repr=False)
    state: str = WAITING
    policy: str = ""
    stream: int = 0
    submitted: int = 0
    error: Exception | None = None
    blocked: int = 0
    longest_ns: int = 0
    requested_ns: int = 0
    built_ns: int = 0
    submit_ns: int = 0
    copy_start_ns: int = 0
    copy_end_ns: int = 0
    noticed_ns: int = 0
    run_end_ns: int = field(default=0, repr=False)
    thread: int = field(default_factory=threading.get_native_id)
    after: Any = field(default=None, repr=False)
    start_event: int = field(default=0, repr=False)
    end_event: int = field(default=0, repr=False)
    range: Any = field(default=None, repr=False)
    callbacks: list[Callable[[Transfer], None]] = field(default_factory=list, repr=False)

    @property
    def bytes(self) -> int:
        """Payload."""
        return self.copies * self.piece_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, either way; does not look at the device (see `OffloadEngine.poll`)."""
        return self.state in (DONE, FAILED)

    def result(self) -> Transfer:
        """The transfer itself if it completed.

        Raises:
            TransferError: it failed; its destination holds undefined bytes.
        """
        if self.state == FAILED:
            text = f"{self.direction} {self.id} of {self.bytes} bytes failed: {self.error}"
            raise TransferError(text) from self.error
        return self

    def wait(self, timeout_s: float | None = None) -> Transfer:
        """Blocks until it has ended.

        Raises:
            TransferError: it failed, or the time ran out.
        """
        self.engine.wait(self, timeout_s)
        return self.result()

    def __await__(self) -> Generator[Any, None, Transfer]:
        pause = 0.0002
        while not self.done:
            self.engine.poll()
            if self.done:
                break
            yield from asyncio.sleep(pause).__await__()
            pause = min(pause * 1.5, 0.002)
        return self.result()

    def split(self) -> Split:
        """Where the time went; zeros for parts not reached or not timed."""
        if not self.noticed_ns:
            return Split(0, 0, 0, 0, 0)
        build = self.built_ns - self.requested_ns
        copy_end = min(max(self.copy_end_ns or self.noticed_ns, self.built_ns), self.noticed_ns)
        copy_start = min(max(self.copy_start_ns or copy_end, self.built_ns), copy_end)
        # submission may overlap the copy: what of it lies before the copy is taken off the wait, the rest off the copy
        before = copy_start - self.built_ns
        submit = min(self.submit_ns, copy_end - self.built_ns)
        wait = max(before - submit, 0)
        copy = copy_end - self.built_ns - submit - wait
        return Split(build, submit, wait, copy, self.noticed_ns - copy_end)
