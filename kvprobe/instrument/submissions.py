"""Events that tell the end of what the submitter has, in the place of a server's own.

A server asks its events whether a transfer is over, waits for them, and makes streams wait for them. Copies that the
submitter carries run on other streams, and later: an event that the server recorded on its own stream says nothing of
them. So another takes its place, which is the submitter's until it is recorded anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvprobe.offload.rungs import Rung
from kvprobe.offload.submitter import Bounds, Copies

if TYPE_CHECKING:
    from kvprobe.instrument.transfers import CopyPath, WatchedTransfer
    from kvprobe.offload.submitter import Submission

__all__ = ["CODED", "POOLED", "Bounds", "Copies", "HandOver", "Rung", "SubmissionEvent", "submission_event"]

POOLED = Rung("pooled", "auto")
CODED = Rung("pooled", "coded")  # by a submitter of memory whose blocks may lie coded


class HandOver:
    """Submissions that together are one transfer of a server, or a part of one, in their order."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Submission]) -> None:
        """Takes at least one."""
        self.parts = tuple(parts)

    @property
    def done(self) -> bool:
        """Whether all have ended, either way."""
        return self.parts[-1].done and (len(self.parts) == 1 or all(part.done for part in self.parts))

    @property
    def failed(self) -> bool:
        """Whether one ended without all of its copies."""
        return self.parts[-1].failed or (len(self.parts) > 1 and any(part.failed for part in self.parts))

    @property
    def error(self) -> Exception | None:
        """Why the first of those failed."""
        return next((part.error for part in self.parts if part.failed), None)

    @property
    def copies(self) -> int:
        """As they were asked for."""
        return sum(part.copies for part in self.parts)

    @property
    def bytes(self) -> int:
        """Payload."""
        return sum(part.bytes for part in self.parts)

    @property
    def calls(self) -> int:
        """Submitting calls made so far."""
        return sum(part.calls for part in self.parts)

    @property
    def descriptors(self) -> int:
        """As how many pieces they were submitted: neighbours are merged."""
        return sum(part.descriptors for part in self.parts)

    @property
    def methods(self) -> list[str]:
        """How they were submitted."""
        return list(dict.fromkeys(method for part in self.parts for method in part.methods))

    @property
    def stream(self) -> int:
        """Handle of the stream of the newest submission; 0 before."""
        return self.parts[-1].stream

    @property
    def copy_start_ns(self) -> int:
        """When the device began with the first; 0: not known."""
        return self.parts[0].copy_start_ns

    @property
    def copy_end_ns(self) -> int:
        """When the device was done with the last; 0: not known."""
        return self.parts[-1].copy_end_ns

    @property
    def copy_ns(self) -> int:
        """What the device took; where its times are not known, an upper bound by the host's; 0: not over."""
        if not self.done:
            return 0
        if self.copy_end_ns > self.copy_start_ns > 0:
            return self.copy_end_ns - self.copy_start_ns
        return sum(part.copy_ns for part in self.parts)

    def wait(self) -> None:
        """Sleeps until all have ended; that one failed is no error here."""
        for part in self.parts:
            part.owner.wait(part)

    def fence(self, stream: int) -> bool:
        """Makes later work of `stream` wait for them. False: one of them has failed or will, and nothing waits for it.

        The last one's end implies the others': in a direction submissions end in the order they came.

        Raises:
            TransferError: one would never be submitted, or the process is a fork.
            CudaError: the wait could not be made.
        """
        last = self.parts[-1]
        last.owner.fence(last, stream)
        return not any(part.faulty for part in self.parts)


class _Submission(NamedTuple):
    """What an event stands for."""

    hand_over: HandOver
    path: CopyPath
    transfer: WatchedTransfer | None
    fall_back: Callable[[], None]


def submission_event(event: Any, hand_over: HandOver, path: CopyPath, fall_back: Callable[[], None]) -> SubmissionEvent:
    """An event in the place of `event` that is reached when the submissions have ended.

    Args:
        event: the server's own; one made here before serves again.
        hand_over: what it stands for.
        path: of the transfer; while it hands over, nothing need wait: the submitter keeps the order.
        fall_back: makes the copies in the server's own way and records the events, should a submission have failed.
    """
    made = event if isinstance(event, SubmissionEvent) else SubmissionEvent(event)
    made.submission = _Submission(hand_over, path, path.current, fall_back)
    return made


class SubmissionEvent:
    """The submissions' end, until it is recorded anew: then the server's own event again, which it holds.

    No subclass of torch's: `torch.Event.elapsed_time` takes nothing but a `torch.Event` itself. A server that keeps
    events in a pool keeps those of a transfer's start and end together, so one of these never meets one of torch's.
    """

    __slots__ = ("own", "submission")

    def __init__(self, own: Any) -> None:
        """Stands in front of `own`."""
        self.own = own
        self.submission: _Submission | None = None

    def __getattr__(self, name: str) -> Any:
        """What else the server asks of its event."""
        return getattr(self.own, name)

    def _ended(self, *, wait: bool) -> bool | None:
        """None: it is the server's own event again; else whether the submissions have ended."""
        submission = self.submission
        if submission is None:
            return None
        if wait:
            submission.hand_over.wait()
        if not submission.hand_over.done:
            return False
        if not submission.hand_over.failed:
            return True
        self.submission = None
        submission.fall_back()
        return None

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """The server's own event from now on."""
        self.submission = None
        return self.own.record(*args, **kwargs)

    def query(self) -> bool:
        """Whether it is reached."""
        ended = self._ended(wait=False)
        return bool(self.own.query()) if ended is None else ended

    def synchronize(self) -> None:
        """Sleep until it is reached."""
        if self._ended(wait=True) is None:
            self.own.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for it. What that costs the caller counts as the transfer's submission."""
        submission = self.submission
        if submission is None:
            self.own.wait(stream) if stream is not None else self.own.wait()
            return
        hand_over, path = submission.hand_over, submission.path
        if path.hands_over or (hand_over.done and not hand_over.failed):
            return
        begin_ns = time.monotonic_ns()
        if hand_over.failed or stream is None or not hand_over.fence(stream.cuda_stream):
            self.synchronize()
        if submission.transfer is not None:
            submission.transfer.waited(time.monotonic_ns() - begin_ns)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another one: the device's time of the submissions, or between the server's own events."""
        if self.submission is not None:
            return float(self.submission.hand_over.copy_ns) / 1e6
        return float(self.own.elapsed_time(end.own if isinstance(end, SubmissionEvent) else end))
