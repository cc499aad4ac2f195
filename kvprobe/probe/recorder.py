"""Keeps this process's ring file open for the engines that write to it."""

from __future__ import annotations

import atexit
import ctypes as ct
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvprobe.environment import RUN
from kvprobe.native.library import DETAIL, RingOptions, core
from kvprobe.runfolder import files, identity, leftovers

log = logging.getLogger("kvprobe")


@dataclass(frozen=True)
class _File:
    path: Path
    pid: int  # of the process that opened it
    temporary: bool


_lock = threading.Lock()
_users = 0
_file: _File | None = None
_process = 0  # counts forks: what an earlier process opened is not this one's


class Recorder:
    """Holds the process's ring file open; with detail "off" an object that does nothing.

    The file lies in the run folder of `kvprobe run` where there is one, else in the user's temporary folder, and is
    removed there when the last engine closes. In a forked child a recorder of the parent does nothing.
    """

    def __init__(self, detail: str, records: int = 0) -> None:
        """Opens the ring file, or joins the one that is open; `records` a thread are kept, 0: the default."""
        self._process = _process
        self._joined = DETAIL[detail] > 0 and _join(records)

    @property
    def _open(self) -> bool:
        return self._joined and self._process == _process

    @property
    def path(self) -> Path | None:
        """The ring file; None where nothing is recorded."""
        return _file.path if self._open and _file else None

    def close(self) -> None:
        """Leaves the ring file; the last one out closes it."""
        if self._open:
            self._joined = False
            _leave()


def _join(records: int) -> bool:
    global _users, _file
    with _lock:
        if not core().kvp_ring_is_open():
            try:
                folder = Path(RUN.text) if RUN.text else files.temporary_folder()
            except OSError as error:
                log.warning("nothing is recorded: %s: %s", error.filename, error.strerror)
                return False
            if not RUN.text:
                leftovers.sweep()
            me = identity.of(os.getpid())
            path = folder / f"{leftovers.RINGS}-{me}-{core().kvp_now_ns()}.kvp"
            code = core().kvp_ring_open(os.fsencode(path), b"engine", ct.byref(RingOptions(ring_capacity=records)))
            if code:
                log.warning("nothing is recorded: %s cannot be written (%s)", path, os.strerror(-code))
                return False
            _file = _File(path, me.pid, temporary=not RUN.text)
        _users += 1
    return True


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            _finish()


def _finish() -> None:
    global _file
    if _file is None or _file.pid != os.getpid():  # a child that fork made without telling Python leaves it alone
        return
    core().kvp_ring_close()
    core().kvp_ring_release()
    if _file.temporary:
        _file.path.unlink(missing_ok=True)
    _file = None


def _after_fork() -> None:
    """The file and its engines are the parent's; an engine that the child makes opens one of its own."""
    global _lock, _users, _file, _process
    _lock, _users, _file = threading.Lock(), 0, None
    _process += 1


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_finish)
