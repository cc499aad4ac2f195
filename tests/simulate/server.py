"""A server's use of an engine: a cache of CPU blocks by hash, with eviction, and dedup of redundant loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.offload import OffloadEngine, Transfer
from kvprobe.offload.cache import BlockCache
from kvprobe.offload.dedup import LoadDedup

from .caller import Caller, bits
from .violation import Violation

if TYPE_CHECKING:
    from .history import History


class Server:
    """Requests of runs of keys: what the cache holds is loaded, the rest is computed and stored."""

    def __init__(self, history: History, caller: Caller, first: int, blocks: int) -> None:
        """The cache has the CPU pool's `blocks` blocks from `first` on."""
        self.history, self.caller, self.first, self.blocks = history, caller, first, blocks
        self.cache = BlockCache(blocks, ("lru", "arc")[caller.below(2)])
        mode = ("on", "off", "auto")[caller.below(3)]
        self.dedup = LoadDedup(history.runtime.now_ns, self._would_take, history.piece * history.layers, mode)
        self.waiting: dict[int, list[int]] = {}
        self.requests = 0

    def _would_take(self, size: int) -> int:
        return 5000 + size // 4

    def request(self, engine: OffloadEngine) -> None:
        """A new request, or one that waits asks again."""
        if self.waiting and self.caller.below(2):
            number = next(iter(self.waiting))
            keys = self.waiting.pop(number)
        else:
            self.requests += 1
            number, start = self.requests, self.caller.below(2 * self.blocks)
            keys = [start // 4 * 4 + i for i in range(1 + self.caller.below(min(4, self.caller.units)))]
        if self.caller.below(12) == 0:
            self.dedup.forget(number)
            self.caller.note(f"request {number} went away")
            return
        count = self.dedup.lookup(number, keys, self.cache.__contains__)
        self.caller.note(f"request {number} for {keys}: {count}")
        if count is None:
            self.waiting[number] = keys
            return
        if count:
            self._load(engine, keys[:count])
        if keys[count:]:
            self._store(engine, keys[count:])

    def _gpu(self, count: int) -> list[int]:
        caller = self.caller
        return [caller.first + each for each in caller._some(count, caller.units)]

    def _load(self, engine: OffloadEngine, keys: list[int]) -> None:
        blocks = [self.first + block for block in self.cache.begin_load(keys)]
        self.dedup.started(keys)
        self._move(engine, "load", keys, blocks)

    def _store(self, engine: OffloadEngine, keys: list[int]) -> None:
        given = self.cache.begin_store(keys)
        if given:
            self._move(engine, "store", [key for key, _ in given], [self.first + block for _, block in given])

    def _move(self, engine: OffloadEngine, direction: str, keys: list[int], blocks: list[int]) -> None:
        """A transfer of the cache's blocks; whatever becomes of it, the cache and dedup hear of its end."""
        caller = self.caller
        gpu, above = self._gpu(len(blocks)), self.history.gpu_pieces
        pieces = [above + block for block in blocks]
        mask = bits(pieces)
        for step in caller.pending():
            if mask & step.writes or (direction == "store" and mask & step.reads):
                raise Violation(f"the cache gave away a block that transfer {step.transfer} uses")
        try:
            step = caller.transfer(engine, direction, gpu, gpu, blocks, blocks)
        except Exception:
            self._ended(direction, keys, ok=False)
            raise
        assert step.transfer is not None
        step.keys = list(zip(keys, pieces, strict=True))
        self.history.told[step.transfer.id][1] += 1

        def done(transfer: Transfer) -> None:
            self._ended(direction, keys, ok=transfer.state == "done")
            self.history.told[transfer.id][0] += 1

        step.transfer.add_done_callback(done)

    def _ended(self, direction: str, keys: list[int], ok: bool) -> None:
        self.cache.end(keys, ok=ok)
        if direction == "load":
            self.dedup.ended(keys)

    def check(self) -> None:
        """All has ended: nobody waits for nothing, and every block may be given to somebody else.

        Raises:
            Violation: otherwise.
        """
        for number, keys in self.waiting.items():
            if self.dedup.lookup(number, keys, self.cache.__contains__) is None:
                raise Violation(f"request {number} waits for loads of others, and none is under way")
        if len(self.cache.begin_store(range(1 << 20, (1 << 20) + self.blocks))) != self.blocks:
            raise Violation("the cache holds on to blocks that nobody uses")
