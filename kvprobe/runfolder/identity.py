"""Which process wrote something, for good: its pid, the pid namespace that number is of, and when the process began."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "alive", "of", "start_ticks"]


def _stat(pid: int | str) -> list[bytes]:
    """Fields of /proc/<pid>/stat from the third on; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether a process exists (a zombie has ended)."""
    return _stat(pid)[:1] not in ([], [b"Z"], [b"X"])


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 if it is gone."""
    try:
        return int(_stat(pid)[19])
    except (IndexError, ValueError):
        return 0


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


@dataclass(frozen=True)
class Identity:
    """One process, past or present.

    Attributes:
        pid: its number.
        namespace: inode of the pid namespace that the number is of; 0: not known.
        start_ticks: when it began, as in /proc/<pid>/stat; 0: not known.
    """

    pid: int
    namespace: int = 0
    start_ticks: int = 0

    def running(self) -> bool | None:
        """Whether it runs now; None where its namespace is another, and nothing here tells."""
        if self.namespace and self.namespace != _namespace():
            return None
        if not alive(self.pid):
            return False
        return not self.start_ticks or self.start_ticks == start_ticks(self.pid)

    def __str__(self) -> str:
        """As part of a file's name."""
        return f"{self.pid}-{self.namespace}-{self.start_ticks}"


def of(pid: int) -> Identity:
    """The process of this namespace that has a pid now."""
    return Identity(pid, _namespace(), start_ticks(pid))
