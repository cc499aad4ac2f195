"""The CPU pool never gives up a block that a transfer reads or writes, whatever the eviction policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import UsageError
from kvprobe.offload import BlockCache
from kvprobe.offload.eviction import ARC


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_least_recently_used_goes_first(policy):
    cache = BlockCache(2, policy)
    for key in "ab":
        cache.begin_store([key])
        cache.end([key])
    cache.begin_load("a")
    cache.end("a")
    assert cache.begin_store("c")
    assert "a" in cache
    assert "b" not in cache


def test_arc_keeps_what_is_used_often_through_a_scan_and_lru_does_not():
    kept = {}
    for policy in ("lru", "arc"):
        cache = BlockCache(8, policy)
        for _ in range(3):
            for key in ("x", "y"):
                cache.end([k for k, _ in cache.begin_store([key])])
                cache.begin_load([key])
                cache.end([key])
        for key in range(100):
            cache.begin_store([key])
            cache.end([key])
        kept[policy] = "x" in cache and "y" in cache
    assert kept == {"lru": False, "arc": True}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_blocks_in_use_stay_and_a_failed_store_leaves_nothing(policy):
    cache = BlockCache(2, policy)
    assert len(cache.begin_store(["a", "b"])) == 2
    assert cache.begin_store(["c"]) == []  # both are being written
    assert "a" not in cache
    cache.end(["a"])
    cache.end(["b"], ok=False)
    assert cache.hits(["a", "b"]) == 1
    blocks = cache.begin_load(["a"])
    assert [key for key, _ in cache.begin_store(["c", "d"])] == ["c"]  # "a" is being read
    assert cache.begin_load(["a"]) == blocks


@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(actions=st.lists(st.tuples(st.sampled_from(["store", "load", "end"]), st.integers(0, 9)), max_size=120))
def test_no_block_ever_has_two_owners(policy, actions):
    cache, using = BlockCache(4, policy), []
    owner: dict[int, int] = {}
    for action, key in actions:
        if action == "store":
            for stored, block in cache.begin_store([key]):
                for other, blocks in using:
                    assert block not in blocks, f"{stored} took a block that {other} uses"
                owner[block] = stored
                using.append((stored, [block]))
        elif action == "load" and key in cache:
            blocks = cache.begin_load([key])
            assert [owner[block] for block in blocks] == [key]
            using.append((key, blocks))
        elif action == "end" and using:
            cache.end([using.pop(0)[0]])
    assert len(cache) <= 4


def test_wrong_use_is_refused():
    with pytest.raises(UsageError, match="unknown eviction policy 'mru'"):
        BlockCache(2, "mru")
    with pytest.raises(UsageError, match="at least 1"):
        BlockCache(0)
    with pytest.raises(UsageError, match="not in the CPU pool"):
        BlockCache(1).begin_load(["a"])


def test_arc_moves_its_target_by_what_it_gave_up_too_early():
    arc = ARC(4)
    for key in "abcd":
        arc.inserted(key)
    assert [arc.victim(lambda _: True, "x") for _ in range(2)] == ["a", "b"]
    arc.inserted("a")  # seen once, given up, seen again: more room for those seen once
    assert arc._target == 1
    arc.used("c")
    arc.used("d")
    assert [arc.victim(lambda _: True, "x") for _ in range(2)] == ["a", "c"]
    arc.inserted("c")  # seen often, given up, seen again: less of it
    assert arc._target == 0
    arc.inserted("b")
    assert arc._target == 1


def test_nothing_is_given_behind_a_key_that_got_no_block():
    cache = BlockCache(1, "lru")
    asked = []
    cache._eviction.victim = lambda may_go, key: asked.append(key)  # nothing may go
    assert cache.begin_store(["a", "b", "c"]) == [("a", 0)] and asked == ["b"]


def test_what_was_evicted_is_counted_whoever_asked_for_it():
    cache = BlockCache(3)
    cache.begin_store(["a", "b", "c"])
    cache.end(["a", "b", "c"])
    assert cache.evictions == 0
    assert len(cache.give_up(2)) == 2 and cache.evictions == 2
    cache.begin_store(["d", "e"])
    cache.end(["d", "e"])
    assert cache.evictions == 2  # there were blocks that nobody had
    cache.begin_store(["f"])
    assert cache.evictions == 3
