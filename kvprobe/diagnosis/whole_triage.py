"""Triage by reading the whole recording: the judge and the findings of a report, as far as queues go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.diagnosis import CAUSES, FULL_QUEUE, UNEXPLAINED, examine_joined
from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.diagnosis.queue_full import full
from kvprobe.diagnosis.verdict import of_full_queue
from kvprobe.recordings import open_recording
from kvprobe.recordings.quick_triage import WORDS, QueueTriage, Triage, certain, quick_triage

if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import StreamOccupancy
    from kvprobe.recordings.serving import ServingWindow

__all__ = ["triage", "whole_triage"]

_UNTIL = CAUSES[: 1 + max(CAUSES.index(cause) for cause in (*FULL_QUEUE, UNEXPLAINED))]


def triage(path: str | os.PathLike[str]) -> Triage:
    """The answer for one recording of any format.

    Raises:
        RecordingError: it cannot be read; its text says why.
    """
    quick = quick_triage(path)
    return quick if quick is not None and certain(quick) else whole_triage(path)


def whole_triage(path: str | os.PathLike[str], window: Callable[[Recording], ServingWindow] | None = None) -> Triage:
    """The answer by reading all of the recording.

    Args:
        path: of the recording.
        window: gives the part of the recording that is judged; without it the serving window is found.

    Raises:
        RecordingError: it cannot be read; its text says why.
        UsageError: `window` says that nothing of the recording lies in it.
    """
    recording = open_recording([path])
    if window is not None:
        recording.window = window(recording)
    joined = JoinedRecording(recording)
    findings = examine_joined(joined, _UNTIL, accounted=False)
    verdict = of_full_queue(recording, findings)
    found = joined.occupancy
    device, handle = recording.streams["device"], recording.streams["handle"]
    blocked = {queue.stream for queue in full(joined).queues} if verdict.state == "found" else set()
    queues = [
        QueueTriage(
            queue.stream,
            int(device[queue.stream]),
            int(handle[queue.stream]),
            len(queue.calls),
            int(queue.depth.max(initial=0)),
            "found" if queue.stream in blocked else WORDS[queue.verdict] if not queue.conclusion.full else "healthy",
            queue.reason,
            _full_at(joined, queue) if queue.stream in blocked else -1,
            int(queue.blocked_ns.sum()) if queue.stream in blocked else 0,
            recording.stream_title(queue.stream),
        )
        for queue in found.streams
    ]
    causes = [(one.cause, one.lost_ns) for one in findings if one.cause in FULL_QUEUE and not one.abstains]
    reason = found.reason if verdict.state == "found" and found.conclusion.full else verdict.reason
    if verdict.state == "healthy":
        reason = found.reason if found.verdict == "not full" else verdict.reason
    return Triage(
        Path(path),
        verdict.state,
        reason,
        found.how,
        queues,
        native=False,
        missing=[(one.what, one.how) for one in verdict.missing],
        causes=causes,
    )


def _full_at(joined: JoinedRecording, queue: StreamOccupancy) -> int:
    """How many submissions a stream's full queue held; where it shows no plateau, when its calls were blocked; else -1.

    Calls that a channel blocked tell nothing of their own stream's queue.
    """
    if queue.ceiling > 0:
        return queue.ceiling
    found = full(joined)
    rows = np.concatenate([found.rows[shape] for shape in ("saturation", "fence", "alias")])
    rows = rows[joined.stream[rows] == queue.stream]
    return int(joined.occupancy.depth[rows].max(initial=-1))
