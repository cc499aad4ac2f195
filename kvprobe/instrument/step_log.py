"""Steps and requests of this process: `kvprobe.mark` and `kvprobe.mark_request`, for adapters and for any program.

Where nothing records, a mark is one look at the environment. Where something does, the caller pays for two reads of a
clock and one append; lines are made on kvprobe's own thread (`event_log.later`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from kvprobe.environment import DETAIL, MAX_BYTES, RUN, killed
from kvprobe.instrument import event_log, nvtx_marks
from kvprobe.runfolder.step_lines import TIMES, Alike, StepLines, limit_of

__all__ = [
    "AlikeSteps",
    "MarkedStep",
    "mark",
    "mark_request",
    "told",
    "wanted",
    "wanted_at",
    "write_step",
    "write_time",
]

_lines: StepLines | None = None
_lines_of = ""
_ASK_AGAIN_NS = 100_000_000
_MOST_LEFT = 100_000  # steps; a process whose writer starves loses them instead of memory
_HELD_BYTES = 65_536  # of lines: what one flush makes is written at its end
_answer = 0, False  # of `wanted`, and until when it is good
_lock = threading.RLock()  # to be taken again: a signal's handler may flush while its thread writes


def _after_fork() -> None:
    global _lines, _lines_of, _lock
    _lines, _lines_of, _lock = None, "", threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def wanted() -> bool:
    """Whether a step will be noted: a run folder is set."""
    return bool(RUN.text) and not killed()


def wanted_at(now_ns: int) -> bool:
    """The same for what runs at every step: the environment is asked again after a tenth of a second."""
    global _answer
    if now_ns >= _answer[0]:
        _answer = now_ns + _ASK_AGAIN_NS, wanted()
    return _answer[1]


def _file() -> StepLines | None:
    """Of the run folder that is set now."""
    global _lines, _lines_of
    folder = RUN.text
    if not folder:
        return None
    if _lines is None or _lines_of != folder:
        if _lines is not None:
            _lines.close()
        limit = limit_of(DETAIL.value() == "totals", MAX_BYTES.value())
        _lines, _lines_of = StepLines(folder, f"steps-{os.getpid()}", limit, _HELD_BYTES), folder
    return _lines


def told(
    times_ns: tuple[int, int],
    step: int | None,
    phase: str,
    requests: Iterable[Any],
    tokens: int | Sequence[int] = 1,
    computed: int | Sequence[int] | None = None,
    server: str = "",
) -> None:
    """A step that is over, for adapters, which know its times. Never raises; `requests` and lists are not kept."""
    event_log.later(
        write_step, times_ns, step, phase, tuple(requests), tokens, computed, (server, threading.get_native_id())
    )


def write_step(
    times_ns: tuple[int, int],
    step: int | None,
    phase: str,
    requests: Sequence[Any],
    tokens: int | Sequence[int],
    computed: int | Sequence[int] | None,
    of: tuple[str, int],
) -> None:
    """The same at once, for what runs on kvprobe's own thread (`event_log.later`); `of`: its server and its thread."""
    with _lock:
        lines = _file()
        if lines is not None:
            lines.step(times_ns, step, phase, requests, tokens, computed, of)


class AlikeSteps:
    """Steps that differ in their times and numbers alone, as most that decode: no more is left of each.

    So a server's thread need not name the requests again, and kvprobe's own makes one line of all that it finds.
    """

    __slots__ = ("_each", "_of", "_told")

    def __init__(
        self,
        phase: str,
        requests: Iterable[Any],
        tokens: int | Sequence[int],
        computed: int | Sequence[int] | None,
        server: str,
    ) -> None:
        """As in `told`; on the thread that makes the steps."""
        self._of = phase, tuple(requests), tokens, computed, (server, threading.get_native_id())
        self._each: deque[Alike] = deque(maxlen=_MOST_LEFT)
        self._told = True  # all of `_each`, or kvprobe's own thread will still look at it

    def add(self, begin_ns: int, end_ns: int, step: int | None) -> None:
        """One step that is over. Never raises."""
        self._each.append((begin_ns, end_ns, step))
        if self._told:
            self._told = False
            event_log.later(self._write)

    def _write(self) -> None:
        self._told = True  # before it looks: what comes meanwhile is either found or left once more
        each = []
        while self._each:
            each.append(self._each.popleft())
        with _lock:
            lines = _file()
            if lines is not None:
                lines.alike(each, *self._of)


def write_time(request: Any, what: str, at_ns: int, trace: str = "") -> None:
    """A time of a request at once, for what runs on kvprobe's own thread."""
    with _lock:
        lines = _file()
        if lines is not None:
            lines.time(request, what, at_ns, trace)


def _write() -> None:
    with _lock:
        if _lines is not None:
            _lines.write()


event_log.at_flush(_write)


class MarkedStep:
    """A step that `mark` began: it ends where its `with` is left, or with `end`."""

    __slots__ = ("_begin_ns", "_computed", "_over", "_phase", "_range", "_requests", "_server", "_step", "_tokens")

    def __init__(self, begin_ns: int, step: int | None, phase: str, requests: tuple[Any, ...], server: str) -> None:
        """Use `mark`."""
        self._begin_ns, self._step, self._phase, self._server = begin_ns, step, phase, server
        self._requests = requests
        self._tokens: int | Sequence[int] = 1
        self._computed: Sequence[int] | None = None
        self._over = False
        self._range: nvtx_marks.Range | None = None

    def end(self, tokens: int | Sequence[int] | None = None, end_ns: int | None = None) -> None:
        """Ends it, once; `tokens`: how many it emitted for each request, in their order, or for every one."""
        if self._over:
            return
        self._over = True
        end = time.monotonic_ns() if end_ns is None else end_ns
        emitted = self._tokens if tokens is None else tokens
        told((self._begin_ns, end), self._step, self._phase, self._requests, emitted, self._computed, self._server)

    def __enter__(self) -> MarkedStep:
        if nvtx_marks.listening():
            named = ",".join(str(one) for one in self._requests)
            number = -1 if self._step is None else self._step
            self._range = nvtx_marks.Range(f"kvprobe step {number} {self._phase} [{named}]").__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__()
        self.end()


class _Unheard(MarkedStep):
    """Where nothing records."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(0, None, "", (), "")

    def end(self, tokens: int | Sequence[int] | None = None, end_ns: int | None = None) -> None:
        return

    def __enter__(self) -> MarkedStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


_UNHEARD = _Unheard()


def mark(
    step: int | None = None,
    requests: Iterable[Any] = (),
    phase: str = "unknown",
    *,
    tokens: int | Sequence[int] = 1,
    computed: Sequence[int] | None = None,
    server: str = "",
    begin_ns: int | None = None,
) -> MarkedStep:
    """Says that a step of a server begins, and which requests are in it; next to free where nothing records.

    ::

        with kvprobe.mark(step=7, requests=["a", "b"], phase="decode"):
            model.forward(batch)

    Args:
        step: the program's own number of it; None where it counts none.
        requests: ids, anything that has a text.
        phase: "prefill", "decode", "mixed", or "load" and "store" of one request's blocks; any other is unknown.
        tokens: how many the step emits at its end for each request, in their order, or for every one.
        computed: tokens that the step computes for each request, so that steps are compared with like ones.
        server: a name for the program, where it holds several servers.
        begin_ns: when it began, CLOCK_MONOTONIC; None: now.

    Returns:
        what ends the step: a context manager, or its `end`.
    """
    if not (wanted() or nvtx_marks.listening()):
        return _UNHEARD
    begin = time.monotonic_ns() if begin_ns is None else begin_ns
    made = MarkedStep(begin, step, phase, tuple(requests), server)
    made._tokens, made._computed = tokens, computed
    return made


def mark_request(request: Any, what: str, at_ns: int | None = None, trace: str = "") -> None:
    """Says when a request "arrived", had its "first token" or "ended"; without it the steps it is in tell.

    Args:
        request: its id, as in `mark`.
        what: one of these three; anything else is not noted.
        at_ns: when, CLOCK_MONOTONIC; None: now.
        trace: the `traceparent` of the server's own span of it, so that kvprobe's spans and exemplars join that trace.
    """
    if what in TIMES and wanted():
        event_log.later(write_time, request, what, time.monotonic_ns() if at_ns is None else at_ns, trace)
