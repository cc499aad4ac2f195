"""Takes the Python stacks of threads that a CUDA call blocks, seen from outside in the ring files."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.probe import stacks
from kvprobe.probe.ring import CALLS, RingSnapshot, ThreadSection, read_ring
from kvprobe.runfolder.folder import RunFolder

__all__ = ["StackCapture"]

log = logging.getLogger("kvprobe")

EVERY_S = 5.0  # between two stacks of one process
MOST_OF_TOTALS = 1000  # of a run that keeps totals only: it may last for months


class StackCapture:
    """Looks at the calls in progress; a long one has its process's stacks taken, once."""

    def __init__(self, folder: RunFolder, *, after_ns: int, inside: bool, most: int | None = None) -> None:
        """Nothing is looked at yet.

        Args:
            folder: the run's; stacks go there.
            after_ns: how long a call has to last.
            inside: ask the process itself, where py-spy may not look into it.
            most: of the whole run; None: no limit.
        """
        self._folder, self._after_ns, self._inside, self._most = folder, after_ns, inside, most
        self._entered: dict[tuple[Path, int], tuple[int, int]] = {}  # section -> (sequence, first seen ns)
        self._last_s: dict[tuple[int, bool], float] = {}
        self._taken: set[tuple[Path, int, int]] = set()  # section and sequence of calls whose stacks were taken

    def look_at(self, path: Path, ring: RingSnapshot) -> None:
        """One look at every thread of a process: its ring file, and what that holds now."""
        now = time.monotonic_ns()
        for section in ring.sections:
            if not section.in_call or not section.tid:
                continue
            key = (path, section.number)
            sequence, since = self._entered.get(key, (-1, now))
            if sequence != section.in_sequence:
                since = now
                self._entered[key] = (section.in_sequence, now)
            blocked_ns = now - (section.in_since_ns or since)
            if blocked_ns >= self._after_ns and (*key, section.in_sequence) not in self._taken:
                self._take(ring, path, section, blocked_ns)

    def _take(self, ring: RingSnapshot, path: Path, section: ThreadSection, blocked_ns: int) -> None:
        if self._most is not None and len(self._taken) >= self._most:
            return
        kind, name = CALLS.get(section.in_call, ("", f"call {section.in_call}"))
        # of memory calls apart: pinning at the start must not use up what a blocked submission needs
        of = ring.pid, kind in ("ALLOC", "FREE")
        if time.monotonic() - self._last_s.get(of, -1e9) < EVERY_S:
            return
        self._last_s[of] = time.monotonic()
        self._taken.add((path, section.number, section.in_sequence))
        asked_ns = time.monotonic_ns()
        try:
            taken = stacks.take(self._folder.path, ring.pid, section.tid, inside=self._inside)
        except stacks.NoPythonError:
            self._last_s[of] = math.inf
            return
        # only a stack whose call had not returned by the time it was there is known to be the call's
        t_ns = asked_ns if _still_inside(path, section) else time.monotonic_ns()
        if taken["how"] == "failed" and not self._inside:
            log.warning("stacks of %d: %s", ring.pid, taken["error"])
        line = {"t_ns": t_ns, "pid": ring.pid, "thread": section.tid, "call": name, "stream": section.in_stream}
        self._folder.append_stacks(ring.pid, {**line, "blocked_ns": blocked_ns, **taken})


def _still_inside(path: Path, section: ThreadSection) -> bool:
    try:
        sections = read_ring(path, detail=False, slots=False).sections
    except KvprobeError:
        return False
    return any(
        one.number == section.number and one.in_call and one.in_sequence == section.in_sequence for one in sections
    )
