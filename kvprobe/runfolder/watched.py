"""What a watched process writes itself into the folder of its run; standard library alone, as it is carried."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvprobe.runfolder import files

__all__ = ["events_path", "open_events", "write_queue"]


def events_path(folder: str | os.PathLike[str]) -> Path:
    """Where this process's events are: events-<pid>.jsonl."""
    return Path(folder) / f"events-{os.getpid()}.jsonl"


def open_events(folder: str | os.PathLike[str]) -> int:
    """A descriptor to append this process's events with; raises as `files.open_append`."""
    return files.open_append(events_path(folder))


def write_queue(folder: str | os.PathLike[str], pid: int, queue: dict[str, Any]) -> None:
    """Writes queue-<pid>.json; raises as `files.write`."""
    files.write(Path(folder) / f"queue-{pid}.json", json.dumps(queue).encode())
