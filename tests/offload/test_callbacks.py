"""Callbacks run once each, whatever two threads that deliver do between any two instructions of one another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvprobe.offload import callbacks as module
from kvprobe.offload.callbacks import Callbacks


class Ended:
    """A transfer that has ended, as far as callbacks are concerned."""

    direction, id = "load", 1

    def __init__(self, told: list[object]) -> None:
        self._callbacks: list[Callable[[Any], None]] | None = [lambda _: told.append(self)]


def test_the_first_is_called_and_removed_also_where_it_raises() -> None:
    told: list[object] = []

    def raises(transfer: Any) -> None:
        told.append("first")
        raise ValueError

    transfer: Any = Ended(told)
    waiting: list[Callable[[Any], None]] = [raises, lambda _: told.append("second")]
    module.call_first(waiting, transfer)
    assert told == ["first"] and len(waiting) == 1
    module.call_first(waiting, transfer)
    assert told == ["first", "second"] and not waiting


def interrupted_at(instruction: int, work: Callable[[], None], meanwhile: Callable[[], None]) -> bool:
    """Runs `work`; before the n-th instruction of the module `meanwhile`, on another thread. False: there are fewer."""
    left = instruction

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                other = threading.Thread(target=meanwhile)
                other.start()
                other.join()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left < 0


def test_none_is_lost_and_none_runs_twice_where_two_threads_deliver() -> None:
    instruction = 0
    while True:
        told: list[object] = []
        every = [Ended(told) for _ in range(3)]
        due = Callbacks(threading.Lock())

        def deliver(*some: Ended, to: Callbacks = due) -> None:
            to.due.extend(some)  # type: ignore[arg-type]
            to.run()

        came = interrupted_at(instruction, lambda: deliver(*every[:2]), lambda: deliver(every[2]))  # noqa: B023
        if not came:
            break
        assert sorted(map(id, told)) == sorted(map(id, every)), f"before instruction {instruction}"
        assert due.free and not due.due
        instruction += 1
    assert instruction > 100


def test_who_runs_them_knows_that_it_is_inside() -> None:
    callbacks = Callbacks(threading.Lock())
    seen: list[tuple[bool, bool]] = []

    def look(transfer: Any) -> None:
        seen.append((callbacks.inside, callbacks.free))
        other = threading.Thread(target=lambda: seen.append((callbacks.inside, callbacks.free)))
        other.start()
        other.join()

    transfer: Any = Ended([])
    transfer._callbacks = [look]
    callbacks.due.append(transfer)
    callbacks.run()
    assert seen == [(True, False), (False, False)] and (callbacks.inside, callbacks.free) == (False, True)
