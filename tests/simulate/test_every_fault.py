"""A small history in which every call fails once: each alone, one after another, and pairs of them from a seed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from kvprobe.cuda.hostruntime import host_runtime

from .faults import KINDS, Fault
from .history import History

SEED, LENGTH = 12, 8
MOST = 400  # calls of one kind in so small a history
PAIRS = 60


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("kvprobe"), "disabled", True)
    yield
    host_runtime().reset()


def fails_at(kind: int, number: int) -> Fault:
    """The call of this kind that is `number`-th in the history; the device is lost before that request."""
    fault = Fault(random.Random(kind), kind)
    fault.number, fault.when = number, number if fault.name == "lost device" else 0
    return fault


def came(*faults: Fault) -> int:
    """Plays the history with these; how many of them happened."""
    history = History(SEED, length=LENGTH)
    history.faults = list(faults)
    try:
        return len(history.play()["came"])
    except Exception as error:
        raise AssertionError(f"with {[str(fault) for fault in faults]}") from error


def test_whichever_call_fails_every_promise_holds_and_so_it_does_in_pairs() -> None:
    calls = []
    for kind in range(len(KINDS)):
        for number in range(1, MOST):
            if not came(fails_at(kind, number)):
                break
            calls.append((kind, number))
        else:
            raise AssertionError(f"{KINDS[kind]} is called {MOST} times and more")
    assert len(calls) > 100 and len({kind for kind, _ in calls}) > 10
    dice = random.Random(1)
    for _ in range(PAIRS):
        came(*(fails_at(*call) for call in dice.sample(calls, 2)))
