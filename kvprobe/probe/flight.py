"""A flight recorder: ring files hold the newest calls of each thread, and are kept when a queue is suspected full."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from kvprobe.probe.live import ProcessView
from kvprobe.runfolder.files import make_folder

__all__ = ["FlightRecorder"]

_CHUNK = 4096
_BESIDE = ("run.json", "checkin-*.json")


class FlightRecorder:
    """Copies a run folder's recording into a folder of its own when the live view suspects a full queue.

    Each copy is a recording like any other (`kvprobe report`). No more than `keep` are kept, the oldest go; after one
    the next comes `pause_s` later at the earliest.
    """

    def __init__(self, folder: Path, keep: int = 8, pause_s: float = 60.0) -> None:
        """Takes the folder that copies go to; it is made when the first one does."""
        self.folder, self.keep, self.pause_s = folder, keep, pause_s
        self._next = 0.0

    def look(self, views: list[ProcessView]) -> Path | None:
        """Writes a copy if one of these is suspected; its folder, None where nothing was written.

        Raises:
            OSError: the copy could not be written; nothing is left of it.
        """
        suspected = [view for view in views if any(stream.suspected for stream in view.streams)]
        if not suspected or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self.pause_s
        source = Path(suspected[0].path).parent
        name = f"flight-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{suspected[0].pid}"
        target = self.folder / name
        partial = self.folder / f".{name}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_folder(partial)
        try:
            for view in suspected:
                _copy(Path(view.path), partial / Path(view.path).name)
            for pattern in _BESIDE:
                for path in source.glob(pattern):
                    shutil.copyfile(path, partial / path.name)
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in sorted(self.folder.glob("flight-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target


def _copy(source: Path, target: Path) -> None:
    """A ring file is larger than what was written: what holds nothing takes no space in the copy either."""
    with source.open("rb") as read, target.open("wb") as written:
        while chunk := read.read(_CHUNK):
            if chunk.count(0) == len(chunk):
                written.seek(len(chunk), os.SEEK_CUR)
            else:
                written.write(chunk)
        written.truncate(read.tell())
