"""Notes how long threads that call CUDA waited for a CPU, seen from outside in the kernel's count.

A line spans the looks around slow calls, so that it says what these waited for. Where a thread had no slow calls, a
line spans a second, and is written if the thread waited for a quarter of it: then others had its time between calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvprobe.probe.cpu_time import ThreadTime, thread_time, throttled_ns
from kvprobe.probe.ring import RingSnapshot, ThreadSection
from kvprobe.runfolder.folder import CpuWait

__all__ = ["CpuWaits"]

log = logging.getLogger("kvprobe")

WAITED_NS = 100_000  # waited around slow calls; less explains none
QUIET_NS, QUIET_SHARE = 1_000_000_000, 0.25  # a line without slow calls, and how much of it the thread waited
MOST = 100_000  # lines of a run, some 15 MB


class _Look(NamedTuple):
    """What one look at a thread showed."""

    t_ns: int
    time: ThreadTime
    throttled_ns: int | None  # of its control group
    slow: int  # calls in its ring of slow ones


class _Thread(NamedTuple):
    """A thread: what is said of it up to `told`, and how it was at the last look."""

    pid: int
    tid: int
    told: _Look
    last: _Look


def _as_it_began(pid: int, section: ThreadSection, now: _Look) -> _Thread:
    """The thread at its first call, where its section tells that, else now: the first look may come much later."""
    first = now
    if 0 < section.begun_ns < now.t_ns:
        first = _Look(section.begun_ns, ThreadTime(section.begun_ran_ns, section.begun_waited_ns), None, 0)
    return _Thread(pid, section.tid, first, first)


class CpuWaits:
    """Looks at each thread that calls CUDA and says where it waited for a CPU."""

    def __init__(self, write: Callable[[int, CpuWait], None], producer: str = "interposer", most: int = MOST) -> None:
        """Nothing is looked at yet.

        Args:
            write: takes a process id and what is said of one of its threads.
            most: lines of a run.
            producer: whose ring files tell the threads. The interposer sees those of engines, too: once is enough.
        """
        self._write, self._producer = write, producer
        self._most = most
        self._threads: dict[tuple[Path, int, int], _Thread] = {}
        self._lines = 0

    def look_at(self, path: Path, ring: RingSnapshot) -> None:
        """One look at every thread of a process: its ring file, and what that holds now."""
        if self._lines >= self._most or ring.producer != self._producer:
            return
        throttled = throttled_ns(ring.pid)
        for section in ring.sections:
            key = (path, section.number, section.tid)
            if not section.tid or (count := thread_time(ring.pid, section.tid)) is None:
                self._tell_rest(self._threads.pop(key, None))
                continue
            now = _Look(time.monotonic_ns(), count, throttled, section.slow_head)
            before = self._threads.get(key) or _as_it_began(ring.pid, section, now)
            told = before.told
            if now.slow > before.last.slow or section.in_call:
                self._tell_rest(before)
                self._tell(before, before.last, now, WAITED_NS)
                told = now
            elif now.t_ns - told.t_ns >= QUIET_NS:
                self._tell(before, told, now, int(QUIET_SHARE * (now.t_ns - told.t_ns)))
                told = now
            self._threads[key] = _Thread(ring.pid, section.tid, told, now)

    def close(self) -> None:
        """Tells what is not told yet of each thread."""
        for thread in self._threads.values():
            self._tell_rest(thread)
        self._threads.clear()

    def _tell_rest(self, thread: _Thread | None) -> None:
        """What passed without slow calls up to the last look."""
        if thread is not None:
            self._tell(thread, thread.told, thread.last, int(QUIET_SHARE * (thread.last.t_ns - thread.told.t_ns)))

    def _tell(self, thread: _Thread, first: _Look, last: _Look, least_ns: int) -> None:
        """A line where the thread waited at least so long between two looks."""
        waited_ns = last.time.waited_ns - first.time.waited_ns
        if self._lines >= self._most or last.t_ns <= first.t_ns or waited_ns < max(least_ns, WAITED_NS):
            return
        known = first.throttled_ns is not None and last.throttled_ns is not None
        line = CpuWait(
            begin_ns=first.t_ns,
            end_ns=last.t_ns,
            thread=thread.tid,
            waited_ns=waited_ns,
            ran_ns=last.time.ran_ns - first.time.ran_ns,
            throttled_ns=(last.throttled_ns or 0) - (first.throttled_ns or 0) if known else 0,
        )
        self._write(thread.pid, line)
        self._lines += 1
        if self._lines == self._most:
            log.warning("waits for a CPU are no longer noted: %s lines are enough", f"{self._most:,}")
