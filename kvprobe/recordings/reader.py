"""What a module that reads recordings offers: `Reader`, and how one is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording

__all__ = ["Reader", "load_reader"]


class Reader(Protocol):
    """A reader's module. `read` is needed; what a module leaves out of the others is as it is here.

    Attributes:
        suffixes: how its files' names end: a folder is looked through for those.
    """

    suffixes: tuple[str, ...] = ()

    def read(self, path: Path, progress: Callable[[str, float], None] | None = None, /) -> Recording:
        """The recording in a file or folder; `progress` is called with what is being done and the fraction done.

        A RecordingError, ValueError or LookupError says that it is damaged beyond reading.
        """
        ...

    def sniff(self, path: Path, start: bytes, /) -> bool:
        """Whether it is this format: `start` is a file's first 512 bytes, nothing for a folder.

        It is asked of whatever a user names, and raises nothing.

        Formats that `kvprobe.recordings.sniff` tells by itself need none, and what cannot be imported is not asked.
        """
        return False


class _Module(Reader):
    """A module as a `Reader`, complete."""

    def __init__(self, name: str) -> None:
        self._module = import_module(f"kvprobe.recordings.{name}")
        for member in ("suffixes", "sniff"):
            if hasattr(self._module, member):
                setattr(self, member, getattr(self._module, member))

    def read(self, path: Path, progress: Callable[[str, float], None] | None = None, /) -> Recording:
        recording: Recording = self._module.read(path, progress)
        return recording


def load_reader(module: str) -> Reader:
    """The reader in a module of this package; an ImportError where it needs what is not installed."""
    return _Module(module)
