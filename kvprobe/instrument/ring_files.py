"""Finds the ring files of a run folder, and reads those whose process still runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.probe import processes
from kvprobe.probe.ring import RingSnapshot, read_ring
from kvprobe.runfolder.folder import RunFolder

__all__ = ["RingFiles"]

FIND_S = 0.1  # between two looks for new ring files


class RingFiles:
    """The ring files of one run folder, as its processes come and go."""

    def __init__(self, folder: RunFolder) -> None:
        """Nothing is looked at yet."""
        self._folder = folder
        self._running: dict[Path, bool] = {}
        self._find_at = 0.0

    def look(self) -> Iterator[tuple[Path, RingSnapshot]]:
        """Each ring file whose process runs, with its threads' sections and without detail."""
        if time.monotonic() >= self._find_at:
            self._find_at = time.monotonic() + FIND_S
            with contextlib.suppress(OSError):
                for entry in os.scandir(self._folder.path):
                    if entry.name.endswith(".kvp"):
                        self._running.setdefault(Path(entry.path), True)
        for path in [path for path, running in self._running.items() if running]:
            try:
                ring = read_ring(path, detail=False, slots=False)
            except KvprobeError:
                continue
            if ring.state == "closed" or not processes.alive(ring.pid):
                self._running[path] = False
            else:
                yield path, ring
