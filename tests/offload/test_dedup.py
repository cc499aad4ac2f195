"""Redundant loads: a follower waits no longer than its own load would take, and is released however its leader ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvprobe.offload import LoadDedup


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def dedup(mode: str = "on", takes: int = 100) -> tuple[LoadDedup, Clock]:
    clock = Clock()
    return LoadDedup(clock, lambda size: takes, 10, mode), clock


def everything(key: object) -> bool:
    return True


def test_a_follower_waits_until_its_leader_is_done_and_then_loads_nothing():
    d, clock = dedup()
    assert d.lookup("leader", ["a", "b"], everything) == 2
    d.started(["a", "b"])
    assert d.lookup("follower", ["a", "b"], everything) is None
    clock.now = 50
    assert d.ended(["a", "b"]) == ["follower"]
    assert d.lookup("follower", [], everything) == 0  # both are on the GPU now
    assert (d.stats.avoided_bytes, d.stats.waited_ns, d.waiting) == (20, 50, [])
    assert (d.stats.waits, d.stats.gave_up, d.stats.redundant_bytes, d.stats.switches) == (1, 0, 0, [])


def test_after_a_failed_leader_one_follower_loads_and_the_others_wait_for_it():
    d, _ = dedup()
    d.started(["a"])
    assert [d.lookup(request, ["a"], everything) for request in (1, 2, 3)] == [None, None, None]
    assert d.ended(["a"]) == [1, 2, 3]  # first come, first served
    assert d.lookup(1, ["a"], everything) == 1
    d.started(["a"])
    assert [d.lookup(request, ["a"], everything) for request in (2, 3)] == [None, None]
    assert d.stats.avoided_bytes == 0


def test_nobody_waits_longer_than_an_own_load_would_take():
    d, clock = dedup(takes=100)
    d.started(["a"])
    assert d.lookup(1, ["a"], everything) is None
    clock.now = 99
    assert d.lookup(1, ["a"], everything) is None
    clock.now = 100
    assert d.lookup(1, ["a"], everything) == 1
    assert d.stats.gave_up == 1


def test_auto_turns_on_when_loads_are_redundant_and_off_when_waiting_costs_more():
    d, clock = dedup("auto", takes=100)
    assert d.lookup(1, ["a"], everything) == 1
    d.started(["a"])
    assert not d.on
    assert d.lookup(2, ["a"], everything) == 1
    d.started(["a"])
    assert d.on
    assert d.stats.redundant_bytes == 10
    for request in range(10, 40):  # a convoy: every follower waits for nothing
        d.lookup(request, ["a"], everything)
        clock.now += 100
        d.lookup(request, ["a"], everything)
    assert not d.on
    assert [on for _, on, _ in d.stats.switches] == [True, False]


def test_auto_stays_on_where_waiting_costs_no_more_than_it_saves():
    d, clock = dedup("auto", takes=100)
    for _ in range(2):
        d.started(["a"])
    for request in range(40):  # each waits as long as its own load would have taken, and need not load
        d.lookup(request, ["a"], everything)
        clock.now += 100
        d.lookup(request, [], everything)
    assert d.on


def test_auto_gives_up_by_the_balance_of_so_many_followers_and_not_before():
    d, clock = dedup("auto", takes=100)
    for _ in range(2):
        d.lookup(0, ["a"], everything)
        d.started(["a"])
    for request in range(1, 17):
        assert d.on, request
        d.lookup(request, ["a"], everything)
        clock.now += 100
        d.lookup(request, ["a"], everything)
    assert not d.on


def test_a_block_that_the_cpu_pool_does_not_hold_ends_the_count():
    d, _ = dedup()
    assert d.lookup(1, ["a", "b", "c"], lambda key: key != "b") == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 4), min_size=1), st.booleans()), max_size=60))
def test_whatever_happens_every_request_gets_through_and_nothing_is_left(events):
    d, clock = dedup("auto", takes=30)
    flying: list[list[int]] = []
    for request, keys, finish in events:
        clock.now += 10
        count = d.lookup(request, sorted(keys), everything)
        if count:
            d.started(sorted(keys)[:count])
            flying.append(sorted(keys)[:count])
        if finish and flying:
            d.ended(flying.pop(0))
    for keys in flying:
        d.ended(keys)
    for request in list(d.waiting):
        assert d.lookup(request, [0], everything) == 1
    assert d.waiting == []
