"""What a killed process could not remove itself: found by the name that it was given, and removed by the next one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from kvprobe.runfolder.files import temporary_folder
from kvprobe.runfolder.identity import Identity

__all__ = ["METRICS", "RINGS", "sweep"]

RINGS, METRICS = "engine", "kvprobe-metrics"
_NAME = re.compile(rf"({RINGS}|{METRICS})-(\d+)-(\d+)-(\d+)-")


def sweep() -> list[Path]:
    """Removes ring files and metrics of processes that have ended. Never raises.

    Only this user's, only in the temporary folder, and only where the name says which process: one of another pid
    namespace, whose end cannot be seen from here, keeps its files.

    Returns:
        what was removed.
    """
    removed = []
    folders = [Path(tempfile.gettempdir())]
    with contextlib.suppress(OSError):
        folders.append(temporary_folder(make=False))
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                match = _NAME.match(entry.name)
                if match is None or not _ended(match) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                with contextlib.suppress(OSError):
                    _remove(Path(entry.path))
                    removed.append(Path(entry.path))
    return removed


def _ended(match: re.Match[str]) -> bool:
    pid, namespace, ticks = (int(match[i]) for i in (2, 3, 4))
    return bool(namespace and ticks) and Identity(pid, namespace, ticks).running() is False


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)  # follows no link
    else:
        path.unlink()
