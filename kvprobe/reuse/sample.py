"""The uses of a sample of blocks, noted where they happen at the cost of a hash, in bounded memory.

As in `estimate.py`, every use of a block is kept or none is. The threshold falls where more different blocks, or more
uses, come than are followed at most: whoever reads the notes keeps to the last one, which makes one sample of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from kvprobe.reuse.estimate import MOST_FOLLOWED, WHOLE, id_of

__all__ = ["LOADED", "STORED", "WORDS", "BlockSample", "Notes"]

# What happened to a block: the pool had it and it was loaded; it was computed and stored.
LOADED, STORED = 1, 2
WORDS = {LOADED: "loaded", STORED: "stored"}
_MOST_NOTES = 1 << 18  # each time so many were made the share is halved, so that a long run makes few
_HELD_NOTES = 1 << 17  # not fetched: the oldest go first


class Notes(NamedTuple):
    """What was noted since the last time.

    Attributes:
        notes: (time_ns, id, what) of each.
        threshold: blocks whose id's upper 24 bits lie below it were followed to the end, of WHOLE.
        counts: by what happened, how often to any block, followed or not, since the beginning.
    """

    notes: list[tuple[int, int, int]]
    threshold: int
    counts: dict[int, int]


class BlockSample:
    """Notes of one pool's blocks. May be used from any thread; a block that is not followed costs a hash."""

    def __init__(self, most: int = MOST_FOLLOWED, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`most`: different blocks that are followed at most; `now_ns`: the clock."""
        self.threshold = WHOLE
        self._most, self._now = most, now_ns
        self._lock = threading.Lock()
        self._followed: set[int] = set()
        self._notes: deque[tuple[int, int, int]] = deque(maxlen=_HELD_NOTES)
        self._until_halved = _MOST_NOTES
        self._counts = dict.fromkeys(WORDS, 0)

    def note(self, what: int, blocks: Iterable[Hashable]) -> None:
        """Something happened to these blocks, in this order."""
        with self._lock:
            count, now = 0, 0
            for block in blocks:
                count += 1
                found = id_of(block)
                if found >> 24 >= self.threshold:
                    continue
                now = now or self._now()
                self._notes.append((now, found, what))
                self._followed.add(found)
                self._until_halved -= 1
                if len(self._followed) > self._most or not self._until_halved:
                    self._halve()
            self._counts[what] += count

    def _halve(self) -> None:
        """Follows half of the blocks from now on."""
        self.threshold = max(self.threshold // 2, 1)
        self._followed = {block for block in self._followed if block >> 24 < self.threshold}
        self._until_halved = _MOST_NOTES

    def fetch(self) -> Notes:
        """The notes since the last call, of blocks that are followed still."""
        with self._lock:
            kept = [one for one in self._notes if one[1] >> 24 < self.threshold]
            self._notes.clear()
            return Notes(kept, self.threshold, dict(self._counts))
