"""Timing of generator functions: what is sent, thrown and returned passes through."""

import types

import pytest

from kvprobe.instrument import event_log
from kvprobe.instrument.adapter import APPLIED
from kvprobe.instrument.calls import TimedCalls, timed
from kvprobe.instrument.hooks import CircuitBreaker, Patcher

SOURCE = """
def steps(n):
    total = 0
    for i in range(n):
        try:
            got = yield i
            total += got or 0
        except KeyError:
            total += 100
    return total
"""


class Steps(TimedCalls):
    name = "toy.steps"
    timed = (timed("toymodule", "steps", ("n",), "load"),)


@pytest.fixture
def module():
    made = types.ModuleType("toymodule")
    exec(SOURCE, made.__dict__)
    patcher = Patcher(CircuitBreaker("toy.steps", lambda reason: None))
    adapter = Steps()
    adapter.state.state = APPLIED
    adapter.patch(patcher, made)
    yield made
    patcher.undo()


def drive(function):
    def outer():
        result = yield from function(3)
        yield ("returned", result)

    one = outer()
    out = [next(one), one.send(5), one.throw(KeyError())]
    out.append(one.send(7))
    return out


def test_values_exceptions_and_results_pass_through(module):
    plain = {}
    exec(SOURCE, plain)
    with event_log.subscribed() as events:
        assert drive(module.steps) == drive(plain["steps"]) == [0, 1, 2, ("returned", 112)]
    assert [e["steps"] for e in events] == [4]
    assert events[0]["dur_ns"] >= events[0]["longest_step_ns"] > 0


def test_a_generator_that_is_dropped_early_is_closed(module):
    with event_log.subscribed() as events:
        one = module.steps(5)
        next(one)
        one.close()
    assert [e["steps"] for e in events] == [1]


def test_an_exception_of_the_servers_passes(module):
    with event_log.subscribed():
        one = module.steps(5)
        next(one)
        with pytest.raises(ZeroDivisionError):
            one.throw(ZeroDivisionError())
