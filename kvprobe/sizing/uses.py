"""Who used which block when: from the notes of adapters and caches, else from addresses and bytes of copies.

Addresses alone tell a block only until its place in the pool is written again: a block that was given up and comes back
looks new. Where the recorder looked at the bytes of what a place held (`kvprobe run`), equal bytes are one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.model import Array, CallKind, Direction, Recording
from kvprobe.reuse.sample import LOADED, STORED

__all__ = ["Uses", "uses_of"]

LEAST_BLOCK = 16 << 10  # bytes of a copy that may be a block: what a step sends and reads back is smaller
MOST_POOLS = 64  # that are looked at, those that were asked most
LEAST_PLACES = 64  # that are stored to and loaded from
KNOWN_SHARE = 0.9  # of what places held: from so much on bytes tell blocks that come back
BY_NOTES, BY_ADDRESS, BY_BYTES = "block ids", "addresses", "bytes"


@dataclass(frozen=True)
class Uses:
    """Uses of the blocks of one pool, in order.

    Attributes:
        server, source: whose pool; the source is the server's own name of it.
        how: BY_NOTES, BY_ADDRESS or BY_BYTES.
        block: (uses,) int64, equal for uses of one block.
        what: (uses,) uint8, LOADED or STORED.
        followed: share of the blocks whose uses these are.
        loaded, stored: how often, of all blocks.
        pool_blocks: that the pool holds; -1: unknown.
        block_bytes: -1: unknown.
        span_ns: from the first use to the last.
    """

    server: str
    source: str
    how: str
    block: Array
    what: Array
    followed: float
    loaded: int
    stored: int
    pool_blocks: int
    block_bytes: int
    span_ns: int

    @property
    def asked(self) -> int:
        """Blocks that were asked for: found and loaded, or computed and stored."""
        return self.loaded + self.stored

    @property
    def comes_back(self) -> bool:
        """Whether a block that was given up is known when it comes back."""
        return self.how != BY_ADDRESS


def uses_of(recording: Recording) -> list[Uses]:
    """One for each pool of each process; those with most uses first."""
    found = _noted(recording)
    if not found:
        by_address = _addressed(recording)
        found = [by_address] if by_address is not None else []
    return sorted(found, key=lambda one: -one.asked)


def _noted(recording: Recording) -> list[Uses]:
    pools, table = recording.block_pools, recording.block_uses
    found = []
    asked = pools["loaded"] + pools["stored"]
    for row in np.argsort(-asked, kind="stable")[:MOST_POOLS].tolist():
        mine = np.ones(table.rows, dtype=bool)
        for name in ("process", "server", "source"):
            mine &= table[name] == pools[name][row]
        what, time = table["what"][mine], table["time_ns"][mine]
        followed = float(pools["followed"][row])
        if not 0 < followed <= 1:
            continue
        loaded, stored = int(pools["loaded"][row]), int(pools["stored"][row])
        kept = int(np.isin(what, (LOADED, STORED)).sum())
        if (
            followed == 1 and kept < loaded + stored
        ):  # an event file that reached its size, or a process that was killed
            loaded, stored = int((what == LOADED).sum()), int((what == STORED).sum())
        found.append(
            Uses(
                recording.text(int(pools["server"][row])),
                recording.text(int(pools["source"][row])),
                BY_NOTES,
                table["block"][mine].astype(np.int64),
                what,
                followed,
                loaded,
                stored,
                int(pools["blocks"][row]) if pools["blocks"][row] > 0 else -1,
                int(pools["block_bytes"][row]) if pools["block_bytes"][row] > 0 else -1,
                int(time[-1] - time[0]) if len(time) else 0,
            )
        )
    return found


def _addressed(recording: Recording) -> Uses | None:
    """Copies of one size between the GPU and places in CPU memory, of the process that makes most of them."""
    calls = recording.calls
    if not calls["src"].any():
        return None
    mask = (calls["kind"] == CallKind.COPY) & (calls["src"] != 0) & (calls["dst"] != 0) & (calls["result"] == 0)
    mask &= np.isin(calls["direction"], (Direction.H2D, Direction.D2H)) & (calls["bytes"] >= LEAST_BLOCK)
    rows = np.flatnonzero(mask)
    if not len(rows):
        return None
    kinds, count = np.unique(
        np.stack([calls["process"][rows].astype(np.int64), calls["bytes"][rows]]), axis=1, return_counts=True
    )
    process, size = kinds[:, int(np.argmax(count))].tolist()
    rows = rows[(calls["process"][rows] == process) & (calls["bytes"][rows] == size)]
    rows = rows[np.argsort(calls["start_ns"][rows], kind="stable")]
    store = calls["direction"][rows] == Direction.D2H
    place = np.where(store, calls["dst"][rows], calls["src"][rows]).astype(np.uint64)
    if not store.any() or store.all():
        return None
    held = _held(place, store)
    block, known = _by_bytes(recording, held, place, calls["start_ns"][rows], process)
    both = np.intersect1d(place[store], place[~store])
    if len(both) < LEAST_PLACES:  # what is stored is hardly ever loaded: buffers, and no pool
        return None
    time = calls["start_ns"][rows]
    return Uses(
        "",
        "",
        BY_BYTES if known >= KNOWN_SHARE else BY_ADDRESS,
        block,
        np.where(store, STORED, LOADED).astype(np.uint8),
        1.0,
        int((~store).sum()),
        int(store.sum()),
        len(np.unique(place)),
        int(size),
        int(time[-1] - time[0]),
    )


def _held(place: Array, store: Array) -> Array:
    """For each use the number of what its place held then: what the store before it there had brought."""
    order = np.argsort(place, kind="stable")
    new = store[order].copy()
    new[0] = True
    new[1:] |= place[order][1:] != place[order][:-1]
    held = np.empty(len(place), dtype=np.int64)
    held[order] = np.cumsum(new) - 1
    return held


def _by_bytes(recording: Recording, held: Array, place: Array, time: Array, process: int) -> tuple[Array, float]:
    """Blocks by the bytes that places held, where the recorder looked; and the share of uses of which it is known."""
    looks = recording.contents
    mine = np.flatnonzero((looks["process"] == process) & (looks["blank"] == 0))
    if not len(mine):
        return held, 0.0
    of_load = looks["direction"][mine] == Direction.H2D
    where = np.where(of_load, looks["src"][mine], looks["dst"][mine]).astype(np.uint64)
    at = looks["time_ns"][mine] - ~of_load  # a store's look comes before it: of what was there
    places, number = np.unique(np.concatenate([place, where]), return_inverse=True)
    key, looked = number[: len(place)], number[len(place) :]
    order = np.lexsort((time, key))
    first = int(min(time.min(), at.min()))
    length = int(max(time.max(), at.max())) - first + 1
    if len(places) * length >= 1 << 62:
        return held, 0.0
    line = key[order] * length + (time[order] - first)
    before = np.searchsorted(line, looked * length + (at - first), side="right") - 1
    fits = (before >= 0) & (key[order][np.maximum(before, 0)] == looked)
    whose, words = held[order][before[fits]], looks["hash"][mine][fits]
    hashes = np.unique(words, return_inverse=True)[1]
    told = np.full(int(held.max()) + 1, -1, dtype=np.int64)
    told[whose] = hashes
    block = np.where(told[held] >= 0, told[held], len(hashes) + held)
    return block, float((told[held] >= 0).mean())
