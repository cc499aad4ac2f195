"""Finds the ring files of a run folder, reads those whose process still runs, packs those of short ones that ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.probe import processes
from kvprobe.probe.ring import RingSnapshot, read_ring
from kvprobe.runfolder import packed
from kvprobe.runfolder.folder import RunFolder

__all__ = ["RingFiles"]

FIND_S = 0.1  # between two looks for new ring files
SHORT_BYTES = 128 << 10  # of the disk: a process's file that takes more is left as it is
MANY = 64  # files of short processes that have ended, and nothing is packed yet: few processes' files stay as they are
PART = 8  # or that part of what the run may take


class RingFiles:
    """The ring files of one run folder, as its processes come and go."""

    def __init__(self, folder: RunFolder) -> None:
        """Nothing is looked at yet."""
        self._folder = folder
        self._running: dict[Path, bool] = {}
        self._large: set[Path] = set()  # or cannot be packed
        self._find_at = 0.0

    def find(self) -> None:
        """Looks for new ones, now and then."""
        if time.monotonic() < self._find_at:
            return
        self._find_at = time.monotonic() + FIND_S
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder.path):
                if entry.name.endswith(".kvp"):
                    self._running.setdefault(Path(entry.path), True)

    def pack(self, limit_bytes: int) -> None:
        """Packs the files of short processes that have ended, if they are many; `limit_bytes`: of the run, 0 none."""
        small = [path for path in self._running if path not in self._large]
        if not limit_bytes or (len(small) <= MANY and len(small) * SHORT_BYTES < limit_bytes // PART):
            return
        ended, total_bytes = [], 0
        for path in small:
            try:
                size_bytes, ring = path.stat().st_blocks * 512, read_ring(path, detail=False, slots=False)
            except (KvprobeError, OSError):
                continue  # gone, or in the middle of being made
            if ring.sharers or ring.running() is not False:
                continue
            if size_bytes > SHORT_BYTES:
                self._large.add(path)
                continue
            ended.append(path)
            total_bytes += size_bytes
        if len(ended) <= MANY and total_bytes <= limit_bytes // PART:
            return
        try:
            taken = packed.add(self._folder.path / packed.NAME, ended)
        except OSError:  # they stay where they are
            taken = []
        self._large |= set(ended) - set(taken)
        for path in taken:
            del self._running[path]

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that was ever seen here, by name; 0 of one that has gone."""
        self._find_at = 0.0
        self.find()
        sizes: dict[str, int] = {}
        pack = self._folder.path / packed.NAME
        for path in [*self._running, *([pack] if pack.exists() else [])]:
            try:
                sizes[path.name] = path.stat().st_size
            except OSError:
                sizes[path.name] = 0
        return sizes

    def look(self) -> Iterator[tuple[Path, RingSnapshot]]:
        """Each ring file whose process runs, with its threads' sections and without detail."""
        self.find()
        for path in [path for path, running in self._running.items() if running]:
            try:
                ring = read_ring(path, detail=False, slots=False)
            except KvprobeError:
                continue
            if ring.state == "closed" or not processes.alive(ring.pid):
                self._running[path] = False
            else:
                yield path, ring
