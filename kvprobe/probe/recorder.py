"""Keeps this process's ring file open for the engines that write to it, and adds their transfers."""

from __future__ import annotations

import atexit
import ctypes as ct
import logging
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvprobe.environment import RUN
from kvprobe.native.library import DETAIL, Record, RingOptions, core
from kvprobe.runfolder import files, identity, leftovers

log = logging.getLogger("kvprobe")
TRANSFER = 64  # enum kvp_call


@dataclass(frozen=True)
class _File:
    path: Path
    pid: int  # of the process that opened it
    temporary: bool


_lock = threading.Lock()
_users = 0
_file: _File | None = None
_process = 0  # counts forks: what an earlier process opened is not this one's


class _Split(Protocol):
    @property
    def build_ns(self) -> int: ...
    @property
    def submit_ns(self) -> int: ...
    @property
    def wait_ns(self) -> int: ...
    @property
    def copy_ns(self) -> int: ...


class _Transfer(Protocol):
    id: int
    direction: str
    copies: int
    stream: int
    thread: int
    requested_ns: int
    noticed_ns: int
    error: Exception | None

    @property
    def bytes(self) -> int: ...

    def split(self) -> _Split: ...


class Recorder:
    """Writes to the process's ring file; with detail "off" an object that does nothing.

    The file lies in the run folder of `kvprobe run` where there is one, else in the user's temporary folder, and is
    removed there when the last engine closes. In a forked child a recorder of the parent does nothing.
    """

    def __init__(self, detail: str, records: int = 0) -> None:
        """Opens the ring file, or joins the one that is open; `records` a thread are kept, 0: the default."""
        self._level = DETAIL[detail]
        self._process = _process
        self._joined = self._level > 0 and _join(records)

    @property
    def _open(self) -> bool:
        return self._joined and self._process == _process

    @property
    def path(self) -> Path | None:
        """The ring file; None where nothing is recorded."""
        return _file.path if self._open and _file else None

    def transfer(self, transfer: _Transfer) -> None:
        """Adds a transfer that ended, with its split."""
        if not self._open:
            return
        split = transfer.split()
        micro = [part / 1e3 for part in (split.build_ns, split.submit_ns, split.wait_ns, split.copy_ns)]
        record = Record(
            start_ns=transfer.requested_ns,
            dur_ns=max(transfer.noticed_ns - transfer.requested_ns, 0),
            stream=transfer.stream,
            src=int.from_bytes(struct.pack("<2f", *micro[:2]), "little"),
            dst=int.from_bytes(struct.pack("<2f", *micro[2:]), "little"),
            bytes=transfer.bytes,
            tid=transfer.thread,
            transfer=transfer.id & 0xFFFFFFFF,
            count=transfer.copies,
            result=int(transfer.error is not None),
            call=TRANSFER,
            direction=1 if transfer.direction == "load" else 2,
        )
        core().kvp_ring_write(ct.byref(record), int(self._level >= DETAIL["transfers"]))

    def close(self) -> None:
        """Leaves the ring file; the last one out closes it."""
        if self._open:
            self._joined = False
            _leave()


def _join(records: int) -> bool:
    global _users, _file
    with _lock:
        if not _users and not core().kvp_ring_is_open():
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
