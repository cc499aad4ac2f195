"""Distances and estimates against LRU pools that are played, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.reuse.distances import FIRST, last_uses, stack_distances
from kvprobe.reuse.estimate import ReuseEstimate, id_of
from tests.reuse.traces import TRACES

SIZES = (1, 2, 3, 5, 8, 13, 40)


def hits_of_lru(blocks: Iterable[int], size: int) -> int:
    """How often a pool of that size, which gives up the least recently used block, has the block that is asked for."""
    pool: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in blocks:
        if block in pool:
            hits += 1
            pool.move_to_end(block)
        else:
            pool[block] = None
            if len(pool) > size:
                pool.popitem(last=False)
    return hits


uses = st.lists(st.integers(0, 60), max_size=300)


@given(uses)
def test_a_pool_finds_exactly_the_uses_whose_distance_it_holds(blocks: list[int]) -> None:
    distance = stack_distances(np.array(blocks, dtype=np.int64))
    for size in SIZES:
        assert int(((distance != FIRST) & (distance <= size)).sum()) == hits_of_lru(blocks, size)


@given(uses)
def test_an_estimate_that_follows_all_blocks_is_exact(blocks: list[int]) -> None:
    estimate = ReuseEstimate(SIZES, most=64)  # renumbered every 128 uses
    for block in blocks:
        estimate.use(id_of(block))
    assert estimate.missed == [len(blocks) - hits_of_lru(blocks, size) for size in SIZES]


@given(uses, st.integers(0, 60))
@settings(max_examples=30)
def test_a_block_that_is_gone_is_new_again(blocks: list[int], gone: int) -> None:
    estimate, again = ReuseEstimate((1 << 20,)), 0
    known: set[int] = set()
    for block in blocks:
        again += block in known
        known.add(block)
        estimate.use(id_of(block))
        if block == gone:
            estimate.forget(id_of(block))
            known.discard(block)
    assert estimate.missed == [len(blocks) - again]


def test_the_use_before_is_found() -> None:
    assert last_uses(np.array([7, 8, 7, 7, 8])).tolist() == [-1, -1, 0, 2, 1]
    assert stack_distances(np.array([7, 8, 7, 7, 8])).tolist() == [FIRST, FIRST, 2, 1, 2]
    assert not len(stack_distances(np.zeros(0, dtype=np.int64)))


def test_ids_are_spread_evenly_and_differ() -> None:
    found = [id_of(block) for block in range(100_000)]
    assert len(set(found)) == len(found)
    shares = np.histogram(np.array(found) >> 24, bins=10, range=(0, 1 << 24))[0] / len(found)
    assert np.abs(shares - 0.1).max() < 0.004  # four standard deviations


@pytest.mark.parametrize("name", TRACES)
def test_a_sample_tells_hit_shares_within_a_point_on_average_over_all_sizes(name: str) -> None:
    blocks = TRACES[name](np.random.default_rng(7), 1)
    different, which = np.unique(blocks, return_inverse=True)
    distinct = len(different)
    sizes = [int((number + 0.5) * distinct / 100) for number in range(100)]
    distance = stack_distances(blocks)
    exact = np.searchsorted(np.sort(distance[distance != FIRST]), sizes, side="right") / len(blocks)
    estimate = ReuseEstimate(sizes)
    whole = estimate.bytes
    ids = np.array([id_of(block) for block in different.tolist()])[which]
    for some in np.array_split(ids, len(ids) // 1000):  # the threshold is lowered alone: what lies above it is skipped
        followed = some[some >> 24 < estimate.threshold].tolist()
        for block in followed:
            estimate.use(block)
        estimate.skip(len(some) - len(followed))
    assert estimate.uses == len(blocks)
    assert np.abs(np.array(estimate.hit_shares) - exact).mean() < 0.01
    assert estimate.bytes < whole + (1 << 20)  # however many blocks there are
    assert distinct > 100_000
