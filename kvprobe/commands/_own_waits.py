"""Notes how long this process's own threads wait for a CPU while a command makes them copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.errors import KvprobeError
from kvprobe.instrument.cpu_waits import CpuWaits
from kvprobe.runfolder.folder import CpuWait

if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording

__all__ = ["OwnWaits", "own_waits"]

LOOK_S = 0.02


class OwnWaits:
    """Keeps in memory what a run's observer writes to its folder."""

    def __init__(self) -> None:
        """Nothing is noted yet."""
        self.lines: list[CpuWait] = []

    def add_to(self, recording: Recording) -> None:
        """Makes them the waits of a recording of this process."""
        from kvprobe.recordings.run_events import cpu_waits_table

        names = ("thread", "waited_ns", "ran_ns", "throttled_ns")
        rows = [(one["begin_ns"], one["end_ns"], 0, *(one[name] for name in names)) for one in self.lines]  # type: ignore[literal-required]
        recording.tables["cpu_waits"] = cpu_waits_table(rows)


@contextmanager
def own_waits(ring: Path) -> Iterator[OwnWaits]:
    """Looks at the threads that write to this process's ring file, from a thread of its own, until the block ends."""
    from kvprobe.probe.ring import read_ring

    noted, over = OwnWaits(), threading.Event()

    def look() -> None:
        # no interposer is in this process, so its engine's threads are looked at
        waits = CpuWaits(lambda _, line: noted.lines.append(line), producer="engine")
        while not over.wait(LOOK_S):
            with suppress(KvprobeError):
                waits.look_at(ring, read_ring(ring, detail=False, slots=False))
        waits.close()

    watcher = threading.Thread(target=look, name="kvprobe own waits", daemon=True)
    watcher.start()
    try:
        yield noted
    finally:
        over.set()
        watcher.join()
