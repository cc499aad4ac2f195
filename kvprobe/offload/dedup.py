"""Redundant-load dedup: a request whose blocks are being loaded already waits for that load instead of repeating it.

Waiting is a trade: it saves bytes and it can delay (vLLM issue 44294 reports a convoy). So a follower never waits
longer than loading the blocks itself would take, and dedup as a whole is on only while redundant loads are seen and
the time they would cost exceeds the time followers lost.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger("kvprobe")
WINDOW = 16  # followers whose balance decides whether dedup stays on


@dataclass
class _Follower:
    since_ns: int
    would_take_ns: int
    keys: frozenset[Hashable]  # in flight when it began to wait


@dataclass
class DedupStats:
    """What dedup saw and did; bytes and ns are sums.

    Attributes:
        redundant_bytes: loaded although a load of the same block was in flight.
        avoided_bytes: not loaded because dedup waited.
        waits: followers that waited.
        waited_ns: how long they waited.
        gave_up: followers that had waited as long as an own load would take.
        switches: (time_ns, on, reason).
    """

    redundant_bytes: int = 0
    avoided_bytes: int = 0
    waits: int = 0
    waited_ns: int = 0
    gave_up: int = 0
    switches: list[tuple[int, bool, str]] = field(default_factory=list)


class LoadDedup:
    """Tracks which hashes are being loaded, by whom, and who waits.

    Use: `lookup` before a load; `started` when it was asked for; `ended` when it ended, whichever way. Not thread
    safe: the server's scheduler is one thread.
    """

    def __init__(
        self, now_ns: Callable[[], int], would_take_ns: Callable[[int], int], block_bytes: int, mode: str = "auto"
    ) -> None:
        """Starts with nothing in flight.

        Args:
            now_ns: the clock.
            would_take_ns: how long loading that many bytes would take now, queue included.
            block_bytes: bytes of one hash's block, all layers.
            mode: "on", "off", or "auto": on when redundant loads are seen, off where it delays more than it saves.
        """
        self.mode = mode
        self.on = mode == "on"
        self.stats = DedupStats()
        self._now, self._would_take, self._block_bytes = now_ns, would_take_ns, block_bytes
        self._loading: dict[Hashable, int] = {}  # hash -> loads in flight
        self._waiting: OrderedDict[Hashable, _Follower] = OrderedDict()  # request -> follower, first come first
        self._balance: list[int] = []  # ns saved less ns lost, newest WINDOW followers

    def lookup(self, request: Hashable, keys: Sequence[Hashable], held: Callable[[Hashable], bool]) -> int | None:
        """How many of the leading keys to load, or None: not yet, ask again.

        Args:
            request: who asks; it keeps its place among those who wait.
            keys: hashes in order, without those on the GPU already.
            held: whether the CPU pool holds a hash.
        """
        count = 0
        for key in keys:
            if not held(key):
                break
            count += 1
        busy = frozenset(key for key in keys[:count] if key in self._loading)
        follower = self._waiting.get(request)
        if not self.on or not busy:
            if follower is not None:
                self._settle(request, follower, keys[:count])
            return count
        if follower is None:
            self._waiting[request] = _Follower(self._now(), self._would_take(len(busy) * self._block_bytes), busy)
            self.stats.waits += 1
            return None
        if self._now() - follower.since_ns < follower.would_take_ns:
            return None
        self.stats.gave_up += 1
        self._settle(request, follower, keys[:count])
        return count

    def started(self, keys: Iterable[Hashable]) -> None:
        """These hashes are being loaded now."""
        redundant = 0
        for key in keys:
            redundant += key in self._loading
            self._loading[key] = self._loading.get(key, 0) + 1
        if redundant:
            self.stats.redundant_bytes += redundant * self._block_bytes
            if self.mode == "auto" and not self.on:
                self._switch(True, f"{redundant} blocks were loaded while another request was loading them")

    def ended(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """A load ended, whichever way.

        Returns:
            The requests that wait, oldest first: each should look up again. After a failure the first of them finds
            nothing in flight and loads.
        """
        for key in keys:
            left = self._loading[key] - 1
            if left:
                self._loading[key] = left
            else:
                del self._loading[key]
        return list(self._waiting)

    def forget(self, request: Hashable) -> None:
        """A request that waits went away."""
        self._waiting.pop(request, None)

    @property
    def waiting(self) -> list[Hashable]:
        """Who waits, oldest first."""
        return list(self._waiting)

    def _settle(self, request: Hashable, follower: _Follower, to_load: Sequence[Hashable]) -> None:
        """A follower stopped waiting: book what that saved (what it need not load any more) and what it cost."""
        del self._waiting[request]
        waited = self._now() - follower.since_ns
        self.stats.waited_ns += waited
        spared = len(follower.keys.difference(to_load))
        self.stats.avoided_bytes += spared * self._block_bytes
        saved = follower.would_take_ns * spared // max(len(follower.keys), 1)
        self._balance = [*self._balance[1 - WINDOW :], saved - waited]
        if self.mode == "auto" and self.on and len(self._balance) == WINDOW and sum(self._balance) < 0:
            self._switch(False, f"the last {WINDOW} followers waited longer than their own loads would have taken")

    def _switch(self, on: bool, reason: str) -> None:
        self.on = on
        self._balance.clear()
        self.stats.switches.append((self._now(), on, reason))
        log.warning("redundant-load dedup %s: %s", "on" if on else "off", reason)
