"""The CPU pool's contents: which block holds which hash, who still reads or writes it, and what may be given up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvprobe.errors import UsageError
from kvprobe.offload.eviction import Eviction, eviction
from kvprobe.reuse.sample import LOADED, STORED, BlockSample


@dataclass
class _Entry:
    block: int
    users: int = 0  # transfers that read or write it now
    ready: bool = False  # its store has completed


class BlockCache:
    """Hash -> CPU block, with a count of the transfers that use each block; a block in use is never evicted.

    Attributes:
        blocks: that it holds at most.
        sample: where the uses of a sample of its blocks are noted, or None.
    """

    def __init__(self, blocks: int, policy: str = "lru", sample: BlockSample | None = None) -> None:
        """All `blocks` are free.

        Args:
            blocks: how many there are.
            policy: "lru" or "arc".
            sample: notes uses of blocks for `kvprobe.recording_of(engine, caches=[cache])`, and `kvprobe size` says
                from them how many blocks to have.

        Raises:
            UsageError: no blocks, or an unknown policy.
        """
        if blocks < 1:
            raise UsageError(f"a block cache needs at least 1 block, not {blocks}")
        self.blocks, self.sample = blocks, sample
        self._eviction: Eviction = eviction(policy, blocks)
        self._entries: dict[Hashable, _Entry] = {}
        self._free = list(range(blocks - 1, -1, -1))
        self.evictions = 0

    def __len__(self) -> int:
        """Blocks that hold something or are being filled."""
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a hash can be loaded now."""
        entry = self._entries.get(key)
        return entry is not None and entry.ready

    def hits(self, keys: Sequence[Hashable]) -> int:
        """How many leading keys can be loaded now."""
        for count, key in enumerate(keys):
            if key not in self:
                return count
        return len(keys)

    def begin_load(self, keys: Sequence[Hashable]) -> list[int]:
        """Pins and returns the blocks of keys that are all present; `end` lets them go.

        Raises:
            UsageError: a key is absent.
        """
        missing = next((key for key in keys if key not in self), None)
        if missing is not None:
            raise UsageError(f"block {missing!r} is not in the CPU pool")
        for key in keys:
            self._entries[key].users += 1
            self._eviction.used(key)
        if self.sample is not None:
            self.sample.note(LOADED, keys)
        return [self._entries[key].block for key in keys]

    def begin_store(self, keys: Sequence[Hashable]) -> list[tuple[Hashable, int]]:
        """Gives blocks to the keys that are absent, evicting where needed; stops early when nothing more may go.

        Returns:
            The keys that got a block, with it, in order; they count as used until `end`.
        """
        given: list[tuple[Hashable, int]] = []
        for key in keys:
            if key in self._entries:
                continue
            if not self._free:
                victim = self._eviction.victim(self._may_go, key)
                if victim is None:
                    break
                self._free.append(self._entries.pop(victim).block)
                self.evictions += 1
            entry = self._entries[key] = _Entry(self._free.pop(), users=1)
            self._eviction.inserted(key)
            given.append((key, entry.block))
        if self.sample is not None:
            self.sample.note(STORED, [key for key, _ in given])
        return given

    def give_up(self, count: int) -> list[int]:
        """Evicts up to so many blocks that nobody uses, and returns them: they are free, for the next `begin_store`.

        A packed pool gets its reserve back when they are discarded (`PackedPool.discard`).
        """
        blocks: list[int] = []
        while len(blocks) < count:
            victim = self._eviction.victim(self._may_go, None)
            if victim is None:
                break
            blocks.append(self._entries.pop(victim).block)
            self.evictions += 1
        self._free += blocks
        return blocks

    def end(self, keys: Sequence[Hashable], *, ok: bool = True) -> None:
        """A transfer over these keys has ended. A store that failed leaves nothing behind."""
        for key in keys:
            entry = self._entries[key]
            entry.users -= 1
            if entry.ready or ok:
                entry.ready = True
            elif not entry.users:
                self._eviction.removed(key)
                del self._entries[key]
                self._free.append(entry.block)

    def _may_go(self, key: Hashable) -> bool:
        entry = self._entries[key]
        return not entry.users and entry.ready
