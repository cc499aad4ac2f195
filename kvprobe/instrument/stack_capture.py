"""Takes the Python stacks of threads that a CUDA call blocks, seen from outside in the ring files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.probe import processes, stacks
from kvprobe.probe.ring import CALLS, RingSnapshot, ThreadSection, read_ring
from kvprobe.runfolder.folder import RunFolder

__all__ = ["StackCapture"]

log = logging.getLogger("kvprobe")

FIND_S = 0.1  # between two looks for new ring files
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
        self._rings: dict[Path, bool] = {}  # ring file -> its process still runs
        self._entered: dict[tuple[Path, int], tuple[int, int]] = {}  # section -> (sequence, first seen ns)
        self._last_s: dict[tuple[int, bool], float] = {}
        self._taken: set[tuple[Path, int, int]] = set()  # section and sequence of calls whose stacks were taken
        self._find_at = 0.0

    def look(self) -> None:
        """One look at every thread of every process that runs."""
        if time.monotonic() >= self._find_at:
            self._find_at = time.monotonic() + FIND_S
            self._find()
        for path, running in list(self._rings.items()):
            if running:
                self._look_at(path)

    def _find(self) -> None:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder.path):
                if entry.name.endswith(".kvp"):
                    self._rings.setdefault(Path(entry.path), True)

    def _look_at(self, path: Path) -> None:
        try:
            ring = read_ring(path, detail=False, slots=False)
        except KvprobeError:
            return
        if ring.state == "closed" or not processes.alive(ring.pid):
            self._rings[path] = False
            return
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
        taken = stacks.take(self._folder.path, ring.pid, section.tid, inside=self._inside)
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
