"""Counts what an offload brings: blocks stored and loaded, hits, stores that nobody read, waits, what prefill costs.

A server's scheduler knows which request found what where, and its cache which block was evicted; the copies themselves
may run in another process. Each `BenefitTotals` counts one offload of one process and writes the sums as they stand, as
events of kind `offload`, at most one a second and one at the end. What a server does not show stays None: it is not
judged (`kvprobe/diagnosis/offload_benefit.py`).
"""

from __future__ import annotations

import atexit
import statistics
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

from kvprobe.instrument import event_log, metrics
from kvprobe.reuse.estimate import ReuseEstimate
from kvprobe.reuse.sample import LOADED, STORED, WORDS, BlockSample

__all__ = ["BenefitTotals"]

_EVERY_NS = 1_000_000_000
_MAX_BLOCKS = 4_000_000  # a cache that never says what it evicts must not make the table grow without end
_MAX_REQUESTS = 100_000
_STEPS = 1024
_ENOUGH_STEPS = 3
_NOTES = 4096  # uses of blocks in one event

_all: weakref.WeakSet[BenefitTotals] = weakref.WeakSet()


class BenefitTotals:
    """One offload of this process. Its methods are called on the scheduler's thread; none of them raises.

    Attributes:
        adapter, server: who counts.
        source: the server's own name of what it counts: a connector, a cache.
        sums: counts since the start, by the names of the event's fields; None where the server does not show it.
        held_unread: of the blocks that are held now, those that nobody has loaded so far.
        pool_blocks: the most blocks that it was seen to hold at once, or what the server says that it can hold.
        sample: uses of a sample of its blocks (`kvprobe size`).
        reuse: what pools of other sizes would miss, for the metrics.
    """

    def __init__(self, adapter: str, source: str) -> None:
        self.adapter, self.server, self.source = adapter, adapter.partition(".")[0], source
        self.sums: dict[str, int | None] = dict.fromkeys(
            (
                "requests",
                "prompt_tokens",
                "gpu_hit_tokens",
                "hit_tokens",
                "stored_blocks",
                "stored_bytes",
                "loaded_blocks",
                "loaded_bytes",
                "unread_blocks",
                "unread_bytes",
                "waits",
                "waited_ns",
            )
        )
        self._blocks: dict[Hashable, list[int]] = {}  # key -> [bytes, 1 once it was loaded], of what is held
        self.held_unread = 0
        self.pool_blocks = 0
        self.sample = BlockSample()
        self.reuse = ReuseEstimate(metrics.POOL_SIZES)
        self._block_bytes = -1
        self._counted = 0  # uses that the metrics know of
        self._missed = self.reuse.missed
        self._requests: dict[Hashable, None] = {}  # counted already: a scheduler asks again and again
        self._waiting: dict[Hashable, int] = {}
        self._steps: deque[tuple[int, int]] = deque(maxlen=_STEPS)  # tokens of prefill, ns
        self._told_ns = 0
        self._told: dict[str, int] = {}
        self._due = False
        _all.add(self)

    def add(self, field: str, amount: int) -> None:
        """Count: `field` is seen from now on, also where `amount` is 0."""
        self.sums[field] = (self.sums[field] or 0) + amount
        if not self._due:
            self._due = True
            event_log.later(self._tell)

    def admitted(self, request: Hashable, prompt_tokens: int, gpu_hit_tokens: int | None, hit_tokens: int) -> None:
        """A request was admitted: its prompt, what lay on the GPU already, what the offload has beyond that.

        `gpu_hit_tokens` is None where nobody here knows it.
        """
        if request in self._requests:
            return
        self._requests[request] = None
        if len(self._requests) > _MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        self.add("requests", 1)
        self.add("prompt_tokens", prompt_tokens)
        if gpu_hit_tokens is not None:
            self.add("gpu_hit_tokens", gpu_hit_tokens)
        self.add("hit_tokens", hit_tokens)

    def waits(self, request: Hashable, at_ns: int | None = None) -> None:
        """A request waits from then on, or from now on, until its blocks have arrived."""
        if len(self._waiting) < _MAX_REQUESTS:
            self._waiting.setdefault(request, time.monotonic_ns() if at_ns is None else at_ns)

    def arrived(self, request: Hashable, at_ns: int | None = None) -> None:
        """The blocks of a request have arrived, then or now."""
        since_ns = self._waiting.pop(request, None)
        if since_ns is not None:
            self.waited((time.monotonic_ns() if at_ns is None else at_ns) - since_ns)

    def waited(self, wait_ns: int) -> None:
        """A request, or the thread that runs the model, waited so long for a load."""
        self.add("waits", 1)
        self.add("waited_ns", wait_ns)

    def stored(self, keys: Iterable[Hashable], size_bytes: int = 0) -> None:
        """Blocks go into the offload; `size_bytes` of each, where it is known."""
        keys, count = list(keys), 0
        self.sample.note(STORED, keys)
        for key in keys:
            count += 1
            if key in self._blocks:  # written over
                self.evicted((key,))
            if len(self._blocks) < _MAX_BLOCKS:
                self._blocks[key] = [size_bytes, 0]
                self.held_unread += 1
        self.pool_blocks = max(self.pool_blocks, len(self._blocks))
        self._block_bytes = size_bytes or self._block_bytes
        self.add("stored_blocks", count)
        self.add("unread_blocks", 0)  # what is evicted is seen, too
        if size_bytes:
            self.add("stored_bytes", count * size_bytes)

    def loaded(self, keys: Iterable[Hashable], size_bytes: int = 0) -> None:
        """Blocks are read out of the offload."""
        keys, count = list(keys), 0
        self.sample.note(LOADED, keys)
        self._block_bytes = size_bytes or self._block_bytes
        for key in keys:
            held = self._blocks.get(key)
            if held is not None and not held[1]:
                held[1] = 1
                self.held_unread -= 1
            count += 1
        self.add("loaded_blocks", count)
        if size_bytes:
            self.add("loaded_bytes", count * size_bytes)

    def evicted(self, keys: Iterable[Hashable]) -> None:
        """Blocks were overwritten or thrown away; those that nobody loaded were stored for nothing."""
        for key in keys:
            held = self._blocks.pop(key, None)
            if held is not None and not held[1]:
                self.held_unread -= 1
                self.add("unread_blocks", 1)
                if held[0]:
                    self.add("unread_bytes", held[0])

    def step(self, prefill_tokens: int, took_ns: int) -> None:
        """The engine made one step, with so many tokens of prefill in it."""
        self._steps.append((prefill_tokens, took_ns))

    def prefill_ns(self) -> float | None:
        """What one token of prefill costs: the median over large steps, less what a step without prefill takes."""
        steps = list(self._steps)
        largest = max((tokens for tokens, _ in steps), default=0)
        large = [step for step in steps if step[0] and step[0] * 4 >= largest]
        if len(large) < _ENOUGH_STEPS:
            return None
        plain = [took_ns for tokens, took_ns in steps if not tokens]
        base_ns = statistics.median(plain) if plain else 0
        return max(0.0, statistics.median((took_ns - base_ns) / tokens for tokens, took_ns in large))

    def _tell(self) -> None:
        """On kvprobe's own thread; again later where the last event is less than a second old."""
        if time.monotonic_ns() - self._told_ns < _EVERY_NS:
            event_log.later(self._tell)
            return
        self._due = False
        self.tell()

    def tell(self) -> None:
        """Write the sums as they stand now."""
        self._told_ns = time.monotonic_ns()
        seen = {name: value for name, value in self.sums.items() if value is not None}
        if not seen:
            return
        metrics.offload(self.server, {name: value - self._told.get(name, 0) for name, value in seen.items()})
        self._told = dict(seen)
        fields: dict[str, Any] = {**self.sums, "prefill_ns_per_token": self.prefill_ns()}
        if self.sums["stored_blocks"] is not None:
            fields["held_unread_blocks"] = self.held_unread
        whose = {"adapter": self.adapter, "server": self.server, "source": self.source}
        event_log.emit("offload", **whose, **fields)
        self._tell_blocks(whose)

    def _tell_blocks(self, whose: dict[str, str]) -> None:
        """The uses of blocks since the last time."""
        found = self.sample.fetch()
        if not any(found.counts.values()):
            return
        self.reuse.lower(found.threshold)
        for _, block, _ in found.notes:
            self.reuse.use(block)
        uses = sum(found.counts.values())
        self.reuse.skip(uses - self.reuse.uses)
        metrics.reuse(self.server, uses - self._counted, self.reuse.missed, self._missed)
        self._counted, self._missed = uses, self.reuse.missed
        for first in range(0, max(len(found.notes), 1), _NOTES):
            event_log.emit(
                "blocks",
                **whose,
                threshold=found.threshold,
                counts={WORDS[what]: count for what, count in found.counts.items()},
                blocks=self.pool_blocks or None,
                block_bytes=self._block_bytes if self._block_bytes >= 0 else None,
                notes=found.notes[first : first + _NOTES],
            )


def _at_end() -> None:
    event_log.flush()  # what adapters left to be counted
    for account in list(_all):
        account.tell()
    event_log.flush()


atexit.register(_at_end)
