"""Runs what callers want called when a transfer has ended: each once, in order, on one thread at a time.

A signal's exception (Ctrl-C) may come in after any call that the main thread makes. So a lock is only ever held by
`with` over a lock of the interpreter's own, which is taken and released in one instruction (a `threading.Condition` is
not), and what a call has claimed is given back by two `finally`, one for an exception in the other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.offload.transfer import Transfer

log = logging.getLogger("kvprobe")

_NOW = "now"


class Callbacks:
    """Of one engine's transfers.

    Attributes:
        due: transfers that have ended and whose callbacks are to run.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """`lock` guards the lists of callbacks of transfers; none is held while a callback runs."""
        self.due: deque[Transfer] = deque()
        self._lock = lock
        self._runner: dict[str, tuple[int]] = {}  # the thread that runs them now
        self._running = threading.Lock()  # that thread holds it meanwhile

    @property
    def free(self) -> bool:
        """Whether no thread runs any now."""
        return not self._runner

    @property
    def inside(self) -> bool:
        """Whether it is one of them that asks."""
        runner = self._runner.get(_NOW)
        return runner is not None and runner[0] == threading.get_ident()

    def run(self) -> None:
        """Runs what is due, unless another thread, or a caller of this one, runs it already."""
        claim = (threading.get_ident(),)
        try:
            try:
                while self.due and self._runner.setdefault(_NOW, claim) is claim:
                    with self._running:
                        while self.due:
                            self._run_first()
                    self._give_back(claim)  # then looks again: what came meanwhile was left to this call
            finally:
                self._give_back(claim)
        finally:
            self._give_back(claim)

    def await_runner(self) -> None:
        """Sleeps while another thread runs them."""
        with self._running:
            pass

    def _give_back(self, claim: tuple[int]) -> None:
        if self._runner.get(_NOW) is claim:
            del self._runner[_NOW]

    def _run_first(self) -> None:
        transfer = self.due[0]
        callbacks = transfer._callbacks
        while callbacks:
            call_first(callbacks, transfer)
        with self._lock:
            if not transfer._callbacks:  # none was added meanwhile
                transfer._callbacks = None
                self.due.popleft()


def call_first(callbacks: list[Callable[[Transfer], None]], transfer: Transfer) -> None:
    """Calls the first one and removes it; what it raises is logged."""
    callback = callbacks[0]  # no signal comes in between this and the call, nor before the removal
    try:
        callback(transfer)
    except Exception:
        log.exception("a callback of %s %d raised", transfer.direction, transfer.id)
    finally:
        del callbacks[0]
