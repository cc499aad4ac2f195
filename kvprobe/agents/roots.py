"""Which recordings an agent may open: those below the folders that were named, and of formats that are only read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings import expand, sniff

__all__ = ["CONVERTED", "Roots"]

# formats whose readers write temporary files or start a program
CONVERTED = ("nsys-rep", "nsys-sqlite-compressed")
_MOST_FILES = 100_000  # of one recording, or of one folder that is looked through

Fingerprint = tuple[tuple[str, int, int, int], ...]


class Roots:
    """The folders that recordings may lie in."""

    def __init__(self, folders: Sequence[Path], *, convert: bool) -> None:
        """Takes the folders as they are now, links resolved.

        Args:
            folders: at least one.
            convert: whether formats of CONVERTED may be opened.

        Raises:
            UsageError: one of them is no folder.
        """
        self.folders: list[Path] = []
        self.convert = convert
        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder; name a folder with recordings")
            self.folders.append(folder.resolve())

    def path(self, given: str) -> Path:
        """A file or folder that an agent names, links resolved; a relative path begins at each folder in turn.

        Raises:
            UsageError: it leads out of the folders, whether or not anything is there.
            RecordingError: it does not exist.
        """
        try:
            found = [folder / given for folder in self.folders]  # of an absolute path: that path
            inside = [path for path in (one.resolve() for one in found) if self._holds(path)]
            there = next((path for path in inside if path.exists()), None)
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
            raise RecordingError(f"{given[:200]}: no such file or folder") from None
        if not inside:
            raise UsageError(f"{given[:200]}: not below the folders that kvprobe mcp was started with")
        if there is None:
            raise RecordingError(f"{given[:200]}: no such file or folder")
        return there

    def recording(self, given: str | Path) -> tuple[Path, Fingerprint]:
        """A recording that may be read, and what changes when its files do.

        Raises:
            UsageError: it leads out of the folders, or reading it would write or start something.
            RecordingError: it does not exist, or is no recording.
        """
        path = self.path(str(given))
        fingerprint = tuple(self._files(path))
        for one in expand(path):
            if sniff(one) in CONVERTED and not self.convert:
                raise UsageError(
                    f"{one}: reading it takes temporary files or another program: unpack or export it to SQLite first, "
                    "or start kvprobe mcp with --convert"
                )
        return path, fingerprint

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self.folders)

    def _files(self, path: Path) -> Iterator[tuple[str, int, int, int]]:
        """Name, inode, size and time of each file; no link among them leads out of the folders."""
        count = 0
        for folder, inner, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
            inner.sort()
            for name in sorted([*inner, *names]):
                one, count = Path(folder, name), count + 1
                if count > _MOST_FILES:
                    raise UsageError(f"{path}: more than {_MOST_FILES:,} files; name a folder further down")
                if one.is_symlink():
                    self.path(str(one))
                about = one.stat()
                yield str(one), about.st_ino, about.st_size, about.st_mtime_ns
