"""What a program saves by time taken out of a thread: never more than its GPU waited, and nothing before a wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvprobe.account import chain
from kvprobe.account.chain import saved_by_host
from kvprobe.account.lines import Line
from kvprobe.account.stretches import Stretches

US = 1_000


@dataclasses.dataclass
class Gpu:
    """The part of a GpuAccount that is looked at."""

    stretches: Stretches
    seen: bool = True


@dataclasses.dataclass
class Thread:
    """The part of a ThreadAccount that is looked at."""

    caller: int
    waits_from: np.ndarray
    waits_to: np.ndarray


@dataclasses.dataclass
class Account:
    """Of these."""

    gpus: list[Gpu]
    threads: list[Thread]


def gpu(*pieces: tuple[int, Line, int], seen: bool = True) -> Gpu:
    """Pieces of microseconds, line and caller."""
    us, line, caller = zip(*pieces, strict=True)
    edges = np.cumsum([0, *us]) * US
    return Gpu(Stretches.of(edges, np.array(line), np.array(caller), np.full(len(line), -1)), seen)


def thread(caller: int, *pieces: tuple[int, Line]) -> Thread:
    us, line = zip(*pieces, strict=True)
    edges = np.cumsum([0, *us]) * US
    waits = np.array(line) == Line.WAITING_FOR_DEVICE
    return Thread(caller, edges[:-1][waits], edges[1:][waits])


def saved(account: Account, *taken: tuple[int, int], caller: int = 1) -> int:
    """Microseconds; `taken`: when and how much, in microseconds."""
    at, us = (np.array([one[i] for one in taken], dtype=np.int64) * US for i in (0, 1))
    found: Any = account
    return saved_by_host(found, caller, at, us) // US


C, P, W, D = Line.COMPUTING, Line.PYTHON, Line.BELOW_LINK_RATE, Line.WAITING_FOR_DEVICE


@pytest.mark.parametrize(
    ("taken", "us"),
    [
        ([(2, 4)], 4),
        ([(2, 40)], 25),  # never more than the GPU waited
        ([(2, 4), (45, 4)], 8),
        ([(2, 4), (20, 40)], 19),  # what is taken behind an idle stretch helps those to come
        ([(10, 5)], 5),  # at its very end
        ([(11, 5)], 5),
        ([(60, 5)], 5),
        ([(61, 5)], 0),
    ],
)
def test_idle_stretches_become_shorter_by_what_the_thread_is_earlier(taken, us):
    pieces = [(10, P, 1), (30, C, -1), (10, W, 1), (5, P, 2), (5, P, 1), (5, P, 3), (40, C, -1)]
    assert saved(Account([gpu(*pieces)], []), *taken) == us


def test_a_wait_for_the_device_makes_the_thread_as_late_as_the_device():
    pieces = [(10, P, 1), (30, C, -1), (10, P, 1), (50, C, -1)]
    account = Account([gpu(*pieces)], [thread(2, (15, D), (85, P)), thread(1, (12, P), (8, D), (80, P))])
    assert saved(account, (2, 15)) == 10  # the 5 us that the GPU could not use are lost in the wait at 20
    account.threads[1] = thread(1, (12, P), (8, P), (80, P))
    assert saved(account, (2, 15)) == 15
    account.threads[1] = thread(1, (100, P))
    assert saved(account, (2, 15)) == 15


def test_a_wait_for_a_slot_that_stays_makes_the_thread_as_late_as_the_device():
    pieces = [(10, C, -1), (10, P, 1), (30, C, -1), (10, P, 1), (50, C, -1)]
    found: Any = Account([gpu(*pieces)], [])
    early, late = (np.array([at * US]) for at in (5, 25))
    took = np.array([15 * US])
    assert saved_by_host(found, 1, early, took) == 15 * US
    assert saved_by_host(found, 1, early, took, (late, took)) == 10 * US  # 5 us more are waited at 25


def test_a_wait_below_a_microsecond_changes_nothing_and_one_of_a_microsecond_does():
    pieces = [(10, P, 1), (30, C, -1), (10, P, 1), (50, C, -1)]
    account = Account([gpu(*pieces)], [Thread(1, np.array([12_000]), np.array([12_999]))])
    assert saved(account, (2, 15)) == 15
    account.threads[0].waits_to[0] = 13_000
    assert saved(account, (2, 15)) == 10


def test_an_idle_stretch_below_a_microsecond_changes_nothing_and_one_of_a_microsecond_does():
    short = gpu((10, C, -1), (1, P, 1), (9, C, -1))
    assert saved(Account([short], []), (2, 15)) == 1
    short.stretches.edges[2] -= 1
    assert saved(Account([short], []), (2, 15)) == 0


def test_only_what_waits_for_this_thread_counts_and_the_gpu_that_gains_most():
    other = gpu((10, P, 2), (10, Line.NOTHING_TO_DO, 1), (10, Line.NOT_KNOWN, 1), (10, C, 1))
    assert saved(Account([other], []), (0, 9)) == 0
    assert saved(Account([], []), (0, 9)) == 0
    some, more = gpu((3, P, 1), (30, C, -1)), gpu((7, W, 1), (30, C, -1))
    assert saved(Account([some, more, other], []), (0, 9)) == 7
    more.seen = False
    assert saved(Account([some, more, other], []), (0, 9)) == 3


def test_of_too_many_events_the_longest_are_played(monkeypatch):
    account = Account([gpu((2, P, 1), (30, C, -1), (9, P, 1), (30, C, -1), (8, P, 1), (2, C, -1))], [])
    monkeypatch.setattr(chain, "_MOST", 4)
    assert saved(account, (1, 19)) == 19
    monkeypatch.setattr(chain, "_MOST", 3)
    assert saved(account, (1, 19)) == 17
    assert saved(account, (1, 18)) == 17
