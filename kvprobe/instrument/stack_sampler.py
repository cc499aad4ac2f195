"""Takes the Python stacks of threads that make calls, now and then, whatever they do: where they are between calls.

py-spy looks without stopping the process. It takes a core some 10 ms each time, so the time between two looks follows
from what the last one cost: all together take `DUTY` of a core, and less of it the longer a run lasts.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from typing import Any

from kvprobe.probe import stacks
from kvprobe.probe.ring import RingSnapshot

__all__ = ["StackSampler"]

log = logging.getLogger("kvprobe")

DUTY = 0.02  # of one core
LEAST_S = 0.25  # between two looks
TRIES = 3  # in a row: a look may find what the process is changing
SLOWER_AFTER = 200  # looks; each time as many more, the time between two of them doubles


class StackSampler:
    """Looks at processes by turns, each of which has made calls since it was looked at; begins and ends as a context.

    A process that py-spy may not look into, or that runs no Python, is left alone from then on.
    """

    def __init__(self, write: Callable[[int, dict[str, Any]], None]) -> None:
        """Nothing is looked at yet.

        Args:
            write: takes a process id and a line of its file.
        """
        self._write = write
        self._seen: dict[tuple[int, int], int] = {}  # process and thread -> its newest call
        self._calling: dict[int, set[int]] = {}  # process -> threads that made calls since it was looked at
        self._alone: set[int] = set()
        self._failed: dict[int, int] = {}
        self._looks = 0
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvprobe-stacks", daemon=True)

    def __enter__(self) -> StackSampler:
        """Begins to look."""
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends; a look that is going on is waited for."""
        self._ends.set()
        self._thread.join()

    def look_at(self, path: object, ring: RingSnapshot) -> None:
        """Learns which threads of a process make calls, from what its ring file at `path` holds now."""
        if ring.pid in self._alone:
            return
        for section in ring.sections:
            key = ring.pid, section.tid
            if section.tid and self._seen.get(key, 0) != section.in_sequence:
                self._seen[key] = section.in_sequence
                with self._lock:
                    self._calling.setdefault(ring.pid, set()).add(section.tid)

    def _run(self) -> None:
        wait_s = LEAST_S
        while not self._ends.wait(wait_s * random.uniform(0.5, 1.5)):  # or it might go in step with a program
            with self._lock:
                pid = next(iter(self._calling), None)
                threads = self._calling.pop(pid, set()) if pid is not None else set()
            if pid is None:
                wait_s = LEAST_S
                continue
            before = os.times()
            self._look(pid, threads)
            after = os.times()
            cost_s = after.children_user + after.children_system - before.children_user - before.children_system
            wait_s = max(LEAST_S, cost_s / DUTY) * 2 ** (self._looks // SLOWER_AFTER)

    def _look(self, pid: int, threads: set[int]) -> None:
        self._looks += 1
        try:
            t_ns, found = stacks.sample(pid, threads)
            if found:
                shown = [{"thread": one["thread"], "frames": one["frames"]} for one in found]
                self._write(pid, {"t_ns": t_ns, "threads": shown})
            self._failed.pop(pid, None)
        except stacks.NoPythonError:
            self._alone.add(pid)
        except RuntimeError:  # why is said of blocked calls
            self._failed[pid] = self._failed.get(pid, 0) + 1
            if self._failed[pid] >= TRIES:
                self._alone.add(pid)
        except OSError as error:
            self._alone.add(pid)
            log.warning("stacks of %d were not kept: %s", pid, error)
