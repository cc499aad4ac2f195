"""Keeps a process from writing files, starting programs and talking to others, whatever its code comes to.

An audit hook of Python sees these acts before they happen and cannot be taken out again. It stands behind the code,
which does none of them: a recording that found a way would meet an error.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Guard", "RefusedError"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# what is never done, by the names of Python's audit events
_NEVER = {
    *("os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr"),
    *("os.removexattr", "os.system", "os.exec", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "os.kill"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
    *("socket.gethostbyname", "socket.gethostbyaddr", "sqlite3.enable_load_extension"),
}
_CHANGES = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1}  # event -> which of its arguments is the folder's descriptor
_STARTS = ("subprocess.Popen", "os.posix_spawn")
_READ_ONLY = "?mode=ro&immutable=1"  # how the readers open a database


class RefusedError(PermissionError):
    """What was tried is not done here."""

    def __init__(self, what: str) -> None:
        """`what` was tried."""
        super().__init__(errno.EPERM, f"kvprobe mcp only reads: refused: {what}")


class Guard:
    """Refuses all that is not reading; files below one folder may be written, and some programs started, if named."""

    def __init__(self, folder: Path | None = None, programs: frozenset[str] = frozenset()) -> None:
        """`folder`: for temporary files, links resolved; `programs`: their files."""
        self._folder, self._programs = str(folder) if folder else None, programs
        self._checks: dict[str, Callable[[str, tuple[Any, ...]], bool]] = {
            "open": self._opens,
            "sqlite3.connect": lambda _, args: str(args[0]).endswith(_READ_ONLY),
            **dict.fromkeys(_CHANGES, self._changes),
            **dict.fromkeys(_STARTS, lambda _, args: str(args[0]) in self._programs),
            **dict.fromkeys(_NEVER, lambda _, args: False),
        }

    def install(self) -> None:
        """From now on, for as long as the process lives; what is imported later leaves no compiled file, either."""
        sys.dont_write_bytecode = True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        check = self._checks.get(event)
        if check is not None and not check(event, args):
            raise RefusedError(event)

    def _opens(self, _: str, args: tuple[Any, ...]) -> bool:
        path, _mode, flags = args
        if not flags & _WRITES or isinstance(path, int):  # a number is a file that is open already
            return True
        return os.fsdecode(path) == os.devnull or self._is_temporary(path, -1)

    def _changes(self, event: str, args: tuple[Any, ...]) -> bool:
        return self._is_temporary(args[0], args[_CHANGES[event]])

    def _is_temporary(self, path: Any, folder: int) -> bool:
        if self._folder is None:
            return False
        base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")  # noqa: PTH109, PTH115
        whole = os.path.realpath(os.path.join(base, os.fsdecode(path)))  # noqa: PTH118
        return whole.startswith(f"{self._folder}/") or whole == self._folder
