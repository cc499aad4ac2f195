"""A flight recorder: ring files hold the newest calls of each thread, and are kept when something is worth it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvprobe.probe.live import ProcessView
from kvprobe.runfolder.files import copy, make_folder, write

__all__ = ["FlightRecorder"]

_BESIDE = ("run.json", "checkin-*.json", "steps-*.jsonl", "told-*.jsonl", "tiers-*.jsonl", "queue-*.json")


class FlightRecorder:
    """Copies a run folder's recording into a folder of its own, by itself when the live view suspects a full queue.

    Each copy is a recording like any other (`kvprobe report`). No more than `keep` are kept, the oldest go; after one
    the next comes `pause_s` later at the earliest. `newest` is the last one, None where there is none.
    """

    def __init__(self, folder: Path, keep: int = 8, pause_s: float = 60.0) -> None:
        """Takes the folder that copies go to; it is made when the first one does."""
        self.folder, self.keep, self.pause_s = folder, keep, pause_s
        self._next = 0.0
        self.newest: Path | None = None

    def look(self, views: list[ProcessView]) -> Path | None:
        """Writes a copy if one of these is suspected; its folder, None where nothing was written.

        Raises:
            OSError: the copy could not be written; nothing is left of it.
        """
        suspected = [view for view in views if any(stream.suspected for stream in view.streams)]
        return self.take([Path(view.path) for view in suspected], suspected[0].pid) if suspected else None

    def take(self, rings: Iterable[Path], pid: int, why: dict[str, Any] | None = None) -> Path | None:
        """Writes a copy of these ring files of one run; `why` goes into `alert.json`. Returns and raises as `look`."""
        rings = list(rings)
        if not rings or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self.pause_s
        source = rings[0].parent
        name = f"flight-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{pid}"
        target = self.folder / name
        partial = self.folder / f".{name}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_folder(partial)
        try:
            for ring in rings:
                copy(ring, partial / ring.name)
            for pattern in _BESIDE:
                for path in source.glob(pattern):
                    copy(path, partial / path.name)
            if why is not None:
                write(partial / "alert.json", json.dumps(why, indent=1).encode(errors="replace"))
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.newest = target
        for old in sorted(self.folder.glob("flight-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target
