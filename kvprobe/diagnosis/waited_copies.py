"""Copies whose thread waits for each as soon as it is submitted: shared by the causes that speak of such copies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, Change, Evidence
from kvprobe.diagnosis.joined import Array, JoinedRecording
from kvprobe.recordings.model import CallKind

__all__ = ["WaitedCopies", "waited_copies"]

WITHOUT_WAITING = (
    "Do not let the thread wait for each copy: `.to(device, non_blocking=True)` out of pinned memory, or "
    "cudaMemcpyAsync without the synchronisation behind it. "
)


class WaitedCopies(NamedTuple):
    """Of some copies those that were waited for at once.

    Attributes:
        many: how many were waited for at once.
        of: how many copies there are.
        call: the call that most of them were waited for in.
    """

    many: int
    of: int
    call: str

    @property
    def most(self) -> bool:
        """Whether that is how these copies are made."""
        return 2 * self.many > self.of

    def evidence(self) -> list[Evidence]:
        """What was counted; nothing where it is the exception."""
        if not self.most:
            return []
        return [
            Evidence(
                f"for {self.many:,} of {self.of:,} copies, the thread waited in {self.call} until the copy was done, "
                "as PyTorch's `.to(device)` does without `non_blocking=True`",
                self.many,
                "calls",
                COUNTED,
            )
        ]

    def change(self, change: Change) -> Change:
        """The same change, which begins with not waiting where that is how these copies are made."""
        return Change(WITHOUT_WAITING + change.text, change.kind, share=change.share) if self.most else change


def waited_copies(joined: JoinedRecording, rows: Array) -> WaitedCopies:
    """Of these executions, (copies,), those that their thread waited for at once.

    The copy's own call is a synchronous one, or the next call of its thread waits until the copy is done.
    """
    call = joined.x_call[rows]
    rows, call = rows[call >= 0], call[call >= 0]
    order = joined.own_time
    if not len(rows) or not len(order):
        return WaitedCopies(0, len(rows), "")
    place = np.full(len(joined.start), -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    after = order[np.minimum(place[call] + 1, len(order) - 1)]
    waits = (place[call] >= 0) & (joined.caller[after] == joined.caller[call]) & (joined.kind[after] == CallKind.SYNC)
    waits &= (joined.start[after] < joined.x_end[rows]) & (joined.end[after] >= joined.x_end[rows])
    itself = joined.kind[call] == CallKind.COPY_SYNC
    inside = np.where(itself, call, after)[itself | waits]
    if not len(inside):
        return WaitedCopies(0, len(rows), "")
    names, counts = np.unique(joined.name[inside], return_counts=True)
    return WaitedCopies(len(inside), len(rows), joined.text(int(names[np.argmax(counts)])))
