"""Timing of generator functions: what is sent, thrown and returned passes through."""

import threading
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


class Moves(TimedCalls):
    name = "toy.moves"
    timed = (timed("toymodule", "move", ("n",), "load", "a queue"),)

    def describe(self, entry, args, kwargs, result):
        return {"copies": 2, "bytes": result}


class MovesApart(Moves):
    apart = True

    def describe(self, entry, args, kwargs, result):
        return lambda: {"copies": 2, "bytes": result}


@pytest.mark.parametrize("listened", [True, False], ids=["listened to", "in a file"])
@pytest.mark.parametrize("kind", [Moves, MovesApart])
def test_calls_that_stand_apart_are_told_like_others(kind, listened, tmp_path, monkeypatch):
    made = types.ModuleType("toymodule")
    exec("def move(n):\n    return 10 // n", made.__dict__)
    patcher = Patcher(CircuitBreaker("toy.moves", pytest.fail))
    kind().patch(patcher, made)
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    monkeypatch.setattr(event_log, "_file", event_log._File())
    if listened:
        with event_log.subscribed() as events:
            assert made.move(5) == 2
    else:
        assert made.move(5) == 2
    with pytest.raises(ZeroDivisionError):
        made.move(0)
    event_log.flush()
    patcher.undo()
    if not listened:
        (path,) = tmp_path.glob("events-*.jsonl")
        events = event_log.read_events(path)
    (told,) = [event for event in events if event["kind"] == "call"]
    assert told.pop("t_ns") > told.pop("dur_ns") >= 0
    assert told == {
        "kind": "call",
        "adapter": "toy.moves",
        "server": "toy",
        "call": "move",
        "direction": "load",
        "thread": threading.get_native_id(),
        "cause": "a queue",
        "copies": 2,
        "bytes": 2,
    }
