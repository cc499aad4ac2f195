"""Which block of the CPU pool to give up for a new one: LRU, or ARC after Megiddo and Modha (FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from kvprobe.errors import UsageError

Evictable = Callable[[Hashable], bool]


class Eviction(Protocol):
    """Order of the resident keys; `victim` removes and returns the best one that may go, or None."""

    def inserted(self, key: Hashable) -> None:
        """A key became resident."""

    def used(self, key: Hashable) -> None:
        """A resident key was hit."""

    def removed(self, key: Hashable) -> None:
        """A key left for another reason than eviction."""

    def victim(self, evictable: Evictable, incoming: Hashable) -> Hashable | None:
        """Chooses a resident key for which `evictable` holds, in favour of `incoming`."""


class LRU:
    """Least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        """Capacity is not needed; the pool calls `victim` when it is full."""
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def inserted(self, key: Hashable) -> None:
        """Newest."""
        self._order[key] = None

    def used(self, key: Hashable) -> None:
        """Newest again."""
        self._order.move_to_end(key)

    def removed(self, key: Hashable) -> None:
        """Forgotten."""
        self._order.pop(key, None)

    def victim(self, evictable: Evictable, incoming: Hashable) -> Hashable | None:
        """Oldest that may go."""
        for key in self._order:
            if evictable(key):
                del self._order[key]
                return key
        return None


class ARC:
    """Adaptive replacement: balances keys seen once (T1) and often (T2) by what it evicted lately (B1, B2)."""

    def __init__(self, capacity: int) -> None:
        """`capacity` blocks are resident at most."""
        self._capacity = capacity
        self._target = 0.0  # size aimed at for T1
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._often: OrderedDict[Hashable, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._often_ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def inserted(self, key: Hashable) -> None:
        """A key whose ghost is remembered has been seen before: it joins T2, and the balance moves towards its list."""
        if key in self._once_ghosts:
            step = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._target = min(self._capacity, self._target + step)
            del self._once_ghosts[key]
            self._often[key] = None
        elif key in self._often_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._target = max(0.0, self._target - step)
            del self._often_ghosts[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def used(self, key: Hashable) -> None:
        """Seen again: to the young end of T2."""
        self._once.pop(key, None)
        self._often[key] = None
        self._often.move_to_end(key)

    def removed(self, key: Hashable) -> None:
        """Forgotten without a ghost."""
        self._once.pop(key, None)
        self._often.pop(key, None)

    def victim(self, evictable: Evictable, incoming: Hashable) -> Hashable | None:
        """Oldest of T1 when T1 is above its target, else of T2; the other list when the first has none that may go."""
        pressed = len(self._once) > self._target or (incoming in self._often_ghosts and len(self._once) == self._target)
        pairs = [(self._once, self._once_ghosts), (self._often, self._often_ghosts)]
        for residents, ghosts in pairs if self._once and pressed else pairs[::-1]:
            for key in residents:
                if evictable(key):
                    del residents[key]
                    ghosts[key] = None
                    while len(ghosts) > self._capacity:
                        ghosts.popitem(last=False)
                    return key
        return None


def eviction(name: str, capacity: int) -> Eviction:
    """The policy of that name.

    Raises:
        UsageError: neither "lru" nor "arc".
    """
    if name == "lru":
        return LRU(capacity)
    if name == "arc":
        return ARC(capacity)
    raise UsageError(f"unknown eviction policy {name!r}: use lru or arc")
