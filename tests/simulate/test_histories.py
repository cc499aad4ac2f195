"""The short form of the simulation: some histories of every kind, and that a history is the same wherever it is played.

`python -m tests.simulate SEED --count 1000000 --faults 1` is the long form (`make simulate`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.cuda.hostruntime import host_runtime

from .caller import Caller
from .history import History, Violation, play
from .processes import KINDS, play_process


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kvprobe"), "disabled", True)  # callbacks that raise are part of it


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A history that was given up leaves a lost device; the tests that come next want one that works."""
    yield
    host_runtime().reset()


@pytest.mark.parametrize("faults", [0, 1, 2])
def test_every_promise_holds_in_random_histories(faults: int) -> None:
    for seed in range(1000 * faults, 1000 * faults + 66):
        try:
            play(seed, faults)
        except Exception as error:
            raise AssertionError(f"replay it: python -m tests.simulate {seed} --faults {faults}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_forks_leaves_or_is_killed_harms_nobody(kind: str) -> None:
    play_process(kind, 3)


def test_a_history_is_the_same_in_another_process() -> None:
    here = [play(seed, 2)["digest"] for seed in (7, 8)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulate", "7", "--count", "2", "--faults", "2", "--digests"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[1::2] == here
    assert here[0] != here[1]


def test_a_program_that_orders_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: without fences and waits kernels and copies see one another's bytes."""
    monkeypatch.setattr(Caller, "order", lambda *_, **__: None)
    caught = 0
    for seed in range(30):
        try:
            play(seed)
        except Violation as violation:
            caught += "other bytes" in str(violation)
    assert caught >= 5


def test_a_forgotten_callback_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "tell", lambda *_: None)
    with pytest.raises(Violation, match="callbacks ran"):
        for seed in range(10):
            play(seed)
