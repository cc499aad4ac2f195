"""Redundant-load dedup inside a server's scheduler: what is in flight, who should wait, what loads really take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from kvprobe.instrument import metrics

if TYPE_CHECKING:
    from kvprobe.instrument.adapter import Adapter

__all__ = ["SchedulerDedup"]

UNKNOWN_NS = 100_000_000  # bound on a wait before any load was timed


class SchedulerDedup:
    """Dedup of one scheduler; it learns what is in flight by comparing the scheduler's own tables.

    Under `fix="off"` it only counts redundant loads. Under `"auto"` it starts off, switches on when a redundant load
    is seen, and off again where followers wait longer than their own loads would have taken (`kvprobe.offload.dedup`).
    A block counts 1 byte here: schedulers know blocks, not bytes.
    """

    def __init__(self, adapter: Adapter) -> None:
        """Starts with nothing in flight."""
        from kvprobe.offload.dedup import LoadDedup

        self._adapter = adapter
        self._loading: dict[Hashable, tuple[int, list[Hashable]]] = {}
        self._block_ns: deque[float] = deque(maxlen=32)
        mode = "auto" if adapter.fix == "auto" else "off"
        self.dedup = LoadDedup(time.monotonic_ns, self.would_take_ns, 1, mode)
        self._told = 0
        self._redundant = 0

    def would_take_ns(self, blocks: int) -> int:
        """Time from asking for a load of so many blocks to the scheduler's knowing its end, as measured here."""
        return int(median(self._block_ns) * blocks) if self._block_ns else UNKNOWN_NS

    def sync(self, loading: Mapping[Hashable, Collection[Hashable]]) -> None:
        """Compare with the scheduler's table of loads in flight: request -> keys of its blocks."""
        now = time.monotonic_ns()
        for request in [r for r in self._loading if r not in loading]:
            started, keys = self._loading.pop(request)
            if keys:
                self._block_ns.append((now - started) / len(keys))
            self.dedup.ended(keys)
        for request, asked in loading.items():
            if request not in self._loading and asked:
                self._loading[request] = (now, list(asked))
                self.dedup.started(asked)
        stats = self.dedup.stats
        if stats.redundant_bytes != self._redundant:
            metrics.count("redundant", self._adapter.server)
            if not self._redundant:
                self._adapter.decide(
                    "note",
                    "redundant_loads: blocks are loaded while another request is loading them",
                    blocks=stats.redundant_bytes,
                )
            self._redundant = stats.redundant_bytes
        self._tell()

    def should_wait(self, request: Hashable, keys: list[Hashable]) -> bool:
        """Whether this request should ask again later instead of loading these blocks now."""
        before = self.dedup.stats.waits
        answer = self.dedup.lookup(request, keys, lambda key: True)
        if self.dedup.stats.waits != before:
            metrics.count("deferred", self._adapter.server)
        self._tell()
        return answer is None

    def _tell(self) -> None:
        stats = self.dedup.stats
        for _, on, reason in stats.switches[self._told :]:
            self._adapter.decide(
                "switch" if on else "rollback",
                f"redundant_loads: {reason}",
                before="dedup off" if on else "dedup on",
                after="dedup on" if on else "dedup off",
                redundant_blocks=stats.redundant_bytes,
                avoided_blocks=stats.avoided_bytes,
                waits=stats.waits,
                waited_ns=stats.waited_ns,
                gave_up=stats.gave_up,
            )
        self._told = len(stats.switches)
