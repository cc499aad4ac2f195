"""The quickest way to "was a launch queue full, where, and what did it cost".

PyTorch profiler traces are measured natively, without numpy and without columns of their events. What that can answer
safely is that no queue was anywhere near full (`certain`); all else is for the whole reader and the one judge of a full
queue (`kvprobe.diagnosis.whole_triage`).
"""

from __future__ import annotations

import os
from pathlib import Path

from kvprobe.errors import RecordingError
from kvprobe.launchqueue.evidence import Deepest, Plateau
from kvprobe.launchqueue.judge import QueueConclusion, conclude, overall
from kvprobe.recordings import sniff
from kvprobe.recordings.trace_text import TraceText, read_ahead, text_chunks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvprobe.recordings.trace_library import TraceQueue

__all__ = ["WORDS", "QueueTriage", "Triage", "certain", "quick_triage", "quick_triages"]

WORDS = {"full": "found", "cannot tell": "undecided", "not full": "healthy"}  # a conclusion as a reader is told it
_ENOUGH = 64  # submissions: half of them may be start-up


class QueueTriage:
    """One stream's launch queue.

    Attributes:
        stream, device, handle: row of the recording's streams, and what the recorder calls it.
        calls, deepest: submissions, and how many were outstanding at one's entry at most.
        verdict, reason: what is concluded, and from what.
        ceiling: the deepest that a blocked call was entered at; -1 where no full queue was found.
        lost_ns: host time lost to the full queue.
        title: how the stream is called.
    """

    def __init__(
        self,
        stream: int,
        device: int,
        handle: int,
        calls: int,
        deepest: int,
        verdict: str,
        reason: str,
        ceiling: int,
        lost_ns: int,
        title: str = "",
    ) -> None:
        self.title = title or f"stream {handle}"  # the PyTorch profiler numbers its streams
        self.stream, self.device, self.handle, self.calls, self.deepest = stream, device, handle, calls, deepest
        self.verdict, self.reason, self.ceiling, self.lost_ns = verdict, reason, ceiling, lost_ns


class Triage:
    """The answer for one recording.

    Attributes:
        path: what was read.
        verdict, reason: "found", "healthy" or "undecided".
        how: "plateau", "labels" or "inferred", as `Occupancy.how`.
        lost_ns: host time lost to full queues.
        queues: one for each stream that was submitted to, most time lost first.
        native: whether it was measured natively.
        missing: what an undecided recording lacks, and how to record it.
        causes: the findings that `lost_ns` adds up, as a report names them, with the time of each.
    """

    def __init__(
        self,
        path: Path,
        verdict: str,
        reason: str,
        how: str,
        queues: list[QueueTriage],
        native: bool,
        missing: list[tuple[str, str]] | None = None,
        causes: list[tuple[str, int]] | None = None,
    ) -> None:
        self.path, self.verdict, self.reason, self.how, self.queues = path, verdict, reason, how, queues
        self.lost_ns = sum(queue.lost_ns for queue in queues) if causes is None else sum(ns for _, ns in causes)
        self.native, self.missing, self.causes = native, missing or [], causes or []


def certain(one: Triage) -> bool:
    """Whether a native answer needs no other: enough was submitted, and no queue was anywhere near full."""
    if one.verdict != "healthy" or sum(queue.calls for queue in one.queues) < _ENOUGH:
        return False
    return conclude(Deepest(tuple(queue.deepest for queue in one.queues))).state == "not full"


def quick_triage(path: str | os.PathLike[str], *, on_a_thread: bool = True) -> Triage | None:
    """The answer by native measuring; None where only the whole reader can tell.

    Args:
        path: a file.
        on_a_thread: unzip on a thread of its own, ahead of the scan.

    Raises:
        RecordingError: its format is unknown.
    """
    path = Path(path)
    if sniff(path) != "kineto-json":
        return None
    chunks = text_chunks(path, None)
    trace = TraceText(read_ahead(chunks) if on_a_thread else chunks)
    try:
        trace.find_events()
        from kvprobe.recordings.kineto_queues import measure  # while the next pieces are unzipped

        measured = measure(trace)
    except (OSError, RecordingError):
        return None
    if measured is None:
        return None
    judged = [(_judged(queue, concluded), concluded) for queue in measured for concluded in (_concluded(queue),)]
    judged.sort(key=lambda one: (-one[0].lost_ns, one[0].stream))
    concluded = overall([(one, queue.deepest) for queue, one in judged])
    queues = [queue for queue, _ in judged]
    return Triage(path, WORDS[concluded.state], concluded.because, "plateau", queues, native=True)


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


def _concluded(queue: TraceQueue) -> QueueConclusion:
    return conclude(
        Plateau(
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


def _judged(queue: TraceQueue, concluded: QueueConclusion) -> QueueTriage:
    full = concluded.full
    return QueueTriage(
        queue.row,
        queue.device,
        queue.handle,
        queue.calls,
        queue.deepest,
        WORDS[concluded.state],
        concluded.because,
        ceiling=queue.ceiling if full else -1,
        lost_ns=queue.lost_ns if full else 0,
    )
