"""The quickest way to "was a launch queue full, where, and what did it cost".

PyTorch profiler traces are measured natively, without numpy and without columns of their events; other recordings, and
traces that are out of the ordinary, by the whole reader. Both come to the same answer (a test compares them).
"""

from __future__ import annotations

import os
from pathlib import Path

from kvprobe.errors import RecordingError
from kvprobe.recordings import sniff
from kvprobe.recordings.conclusion import Measured, conclude, overall
from kvprobe.recordings.pieces import Pieces, ahead, text_chunks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvprobe.recordings.conclusion import Verdict
    from kvprobe.recordings.trace_library import Queue

__all__ = ["QueueTriage", "Triage", "quick_triage", "quick_triages", "triage", "whole_triage"]


class QueueTriage:
    """One stream's launch queue.

    Attributes:
        stream, device, handle: row of the recording's streams, and what the recorder calls it.
        calls, deepest: submissions, and how many were outstanding at one's entry at most.
        verdict, reason: what is concluded, and from what.
        ceiling: the deepest that a blocked call was entered at; -1 where no full queue was found.
        lost_ns: host time lost to the full queue.
    """

    def __init__(
        self,
        stream: int,
        device: int,
        handle: int,
        calls: int,
        deepest: int,
        verdict: Verdict,
        reason: str,
        ceiling: int,
        lost_ns: int,
    ) -> None:
        self.stream, self.device, self.handle, self.calls, self.deepest = stream, device, handle, calls, deepest
        self.verdict, self.reason, self.ceiling, self.lost_ns = verdict, reason, ceiling, lost_ns


class Triage:
    """The answer for one recording.

    Attributes:
        path: what was read.
        verdict, reason: "saturated" if one queue is; else "cannot tell" if one cannot be told; else "healthy".
        how: "plateau", "labels" or "inferred", as `Occupancy.how`.
        lost_ns: host time lost to full queues.
        queues: one for each stream that was submitted to, most time lost first.
        native: whether it was measured natively.
    """

    def __init__(
        self, path: Path, verdict: Verdict, reason: str, how: str, queues: list[QueueTriage], native: bool
    ) -> None:
        self.path, self.verdict, self.reason, self.how, self.queues = path, verdict, reason, how, queues
        self.lost_ns = sum(queue.lost_ns for queue in queues)
        self.native = native


def triage(path: str | os.PathLike[str]) -> Triage:
    """The answer for one recording of any format.

    Raises:
        RecordingError: it cannot be read; its text says why.
    """
    return quick_triage(path) or whole_triage(path)


def quick_triage(path: str | os.PathLike[str], *, on_a_thread: bool = True) -> Triage | None:
    """The answer by native measuring; None where only the whole reader can tell.

    Args:
        path: a file.
        on_a_thread: unzip on a thread of its own, ahead of the scan.

    Raises:
        RecordingError: of no format that can be read.
    """
    path = Path(path)
    if sniff(path) != "kineto-json":
        return None
    chunks = text_chunks(path, None)
    pieces = Pieces(ahead(chunks) if on_a_thread else chunks)
    try:
        pieces.find_events()
        from kvprobe.recordings.kineto_queues import measure  # while the next pieces are unzipped

        measured = measure(pieces)
    except (OSError, RecordingError):
        return None
    if measured is None:
        return None
    queues = [_judged(queue) for queue in measured]
    queues.sort(key=lambda queue: (-queue.lost_ns, queue.stream))
    verdict, reason = overall([(queue.verdict, queue.reason, queue.deepest) for queue in queues])
    return Triage(path, verdict, reason, "plateau", queues, native=True)


def quick_triages(paths: Sequence[Path]) -> list[Triage | RecordingError | None]:
    """`quick_triage` of each, several at a time where there are cores; the error of those that cannot be read."""

    def attempt(path: Path) -> Triage | RecordingError | None:
        try:
            return quick_triage(path, on_a_thread=len(paths) == 1)
        except RecordingError as error:
            return error

    if len(paths) < 2:
        return [attempt(path) for path in paths]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # unzip and scan release the interpreter lock
        return list(pool.map(attempt, paths))


def _judged(queue: Queue) -> QueueTriage:
    verdict, reason = conclude(
        Measured(
            queue.deepest,
            slow=queue.slow,
            shallowest=queue.shallowest,
            lost_ns=queue.lost_ns,
            at_pin=queue.at_pin,
            aligned=queue.aligned,
            chance=queue.chance,
            drained=queue.drained,
            in_graphs=queue.in_graphs,
        )
    )
    full = verdict == "saturated"
    return QueueTriage(
        queue.row,
        queue.device,
        queue.handle,
        queue.calls,
        queue.deepest,
        verdict,
        reason,
        ceiling=queue.ceiling if full else -1,
        lost_ns=queue.lost_ns if full else 0,
    )


def whole_triage(path: str | os.PathLike[str]) -> Triage:
    """The answer by reading all of the recording.

    Raises:
        RecordingError: it cannot be read; its text says why.
    """
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.occupancy import occupancy

    recording = open_recording([path])
    found = occupancy(recording)
    device, handle = recording.streams["device"], recording.streams["handle"]
    queues = [
        QueueTriage(
            queue.stream,
            int(device[queue.stream]),
            int(handle[queue.stream]),
            len(queue.calls),
            int(queue.depth.max(initial=0)),
            queue.verdict,
            queue.reason,
            queue.ceiling,
            int(queue.blocked_ns.sum()),
        )
        for queue in found.streams
    ]
    return Triage(Path(path), found.verdict, found.reason, found.how, queues, native=False)
