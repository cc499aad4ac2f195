"""What merging neighbouring copies would give, for all causes that propose it."""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.deeper_queue import spared
from kvprobe.diagnosis.finding import Change
from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.diagnosis.queue_full import Full
from kvprobe.recordings.assemble import among
from kvprobe.recordings.descriptors import Neighbours, neighbours
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import Memory

__all__ = ["merged", "near"]

LEAST_FACTOR = 1.25  # times fewer slots: below it a full queue stays full


def near(joined: JoinedRecording) -> Neighbours:
    """Which copies of the recording follow and continue which."""
    return joined.once(_near)


def _near(joined: JoinedRecording) -> Neighbours:
    return neighbours(joined.recording)


def merged(joined: JoinedRecording, found: Full, shape: str) -> tuple[Change, ...]:
    """Merging before the call, with what it saves of one shape of blocked calls; nothing where it frees few slots.

    A queue that takes 1,021 submissions takes as many pieces: with k copies to a piece it is k times as deep.
    """
    streams = np.union1d(list(found.crowded) if shape == "channels" else [], distinct(joined.stream[found.rows[shape]]))
    given = joined.submits & among(joined.stream, streams)
    slots = int(given.sum())
    saved = int((given & near(joined).continues & (joined.memory != Memory.PAGEABLE)).sum())
    if not saved or slots < LEAST_FACTOR * (slots - saved):
        return ()
    return (
        Change(
            "Merge neighbouring copies before the call, up to the end of their allocation or registration: "
            f"{saved:,} of {slots:,} submissions on these streams continue the copy before them on both sides, so "
            f"{slots - saved:,} slots would do",
            share=spared(joined, found, shape, slots / max(slots - saved, 1)),
        ),
    )
