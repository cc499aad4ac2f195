"""Events that tell the end of what the submitter has, in the place of a server's own.

A server asks its events whether a transfer is over, waits for them, and makes streams wait for them. Copies that the
submitter carries run on other streams, and later: an event that the server recorded on its own stream says nothing of
them. So another takes its place, which is the submission's until it is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvprobe.offload.auto import Rung
from kvprobe.offload.submitter import Bounds, Copies

if TYPE_CHECKING:
    from kvprobe.instrument.transfers import CopyPath
    from kvprobe.offload.submitter import Submission

__all__ = ["POOLED", "Bounds", "Copies", "Rung", "SubmissionEvent", "submission_event"]

POOLED = Rung("pooled", "auto")


def submission_event(event: Any, submission: Submission, path: CopyPath, again: Callable[[], None]) -> SubmissionEvent:
    """An event in the place of `event` that is reached when the submission has ended.

    Args:
        event: the server's own; one made here before serves again.
        submission: what it stands for.
        path: of the transfer; while it hands over, nothing need wait: the submitter keeps the order.
        again: makes the copies in the server's own way and records the events, should the submission have failed.
    """
    made = event if isinstance(event, SubmissionEvent) else SubmissionEvent(event)
    made.held = submission, path, again
    return made


class SubmissionEvent:
    """The submission's end, until it is recorded anew: then the server's own event again, which it holds.

    No subclass of torch's: `torch.Event.elapsed_time` takes nothing but a `torch.Event` itself. A server that keeps
    events in a pool keeps those of a transfer's start and end together, so one of these never meets one of torch's.
    """

    __slots__ = ("held", "own")

    def __init__(self, own: Any) -> None:
        """Stands in front of `own`."""
        self.own = own
        self.held: tuple[Submission, CopyPath, Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        """What else the server asks of its event."""
        return getattr(self.own, name)

    def _ended(self, *, wait: bool) -> bool | None:
        """None: it is the server's own event again; else whether the submission has ended."""
        if self.held is None:
            return None
        submission, _, again = self.held
        if wait:
            submission.owner.wait(submission)
        if not submission.done:
            return False
        if not submission.failed:
            return True
        self.held = None
        again()
        return None

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """The server's own event from now on."""
        self.held = None
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
        """Make a stream wait for it."""
        if self.held is None:
            self.own.wait(stream) if stream is not None else self.own.wait()
            return
        submission, path, _ = self.held
        if path.handing or (submission.done and not submission.failed):
            return
        if submission.failed or stream is None:
            self.synchronize()
            return
        submission.owner.fence(submission, stream.cuda_stream)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another one: the device's time of the submission, or between the server's own events."""
        if self.held is not None:
            return float(self.held[0].copy_ns) / 1e6
        return float(self.own.elapsed_time(end.own if isinstance(end, SubmissionEvent) else end))
