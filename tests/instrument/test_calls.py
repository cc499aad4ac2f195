"""Timing of generator functions: what is sent, thrown and returned passes through."""

import types

import pytest

from kvprobe.instrument import sidecar
from kvprobe.instrument.adapter import APPLIED
from kvprobe.instrument.calls import TimedCalls, timed
from kvprobe.instrument.guard import Guard, Patcher

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
    name, server, distributions, versions = "toy.steps", "toy", ("toy",), ">=0"
    timed = (timed("toymodule", "steps", ("n",), "load"),)


@pytest.fixture
def module():
    made = types.ModuleType("toymodule")
    exec(SOURCE, made.__dict__)
    patcher = Patcher(Guard("toy.steps", lambda reason: None))
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
    with sidecar.subscribed() as events:
        assert drive(module.steps) == drive(plain["steps"]) == [0, 1, 2, ("returned", 112)]
    assert [e["steps"] for e in events] == [4]
    assert events[0]["dur_ns"] >= events[0]["longest_step_ns"] > 0


def test_a_generator_that_is_dropped_early_is_closed(module):
    with sidecar.subscribed() as events:
        one = module.steps(5)
        next(one)
        one.close()
    assert [e["steps"] for e in events] == [1]


def test_an_exception_of_the_servers_passes(module):
    with sidecar.subscribed():
        one = module.steps(5)
        next(one)
        with pytest.raises(ZeroDivisionError):
            one.throw(ZeroDivisionError())
