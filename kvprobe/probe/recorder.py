"""Keeps this process's ring file open for the engines that write to it, and adds their transfers."""

from __future__ import annotations

import atexit
import ctypes as ct
import logging
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import Protocol

from kvprobe.native.library import DETAIL, Record, RingOptions, core

log = logging.getLogger("kvprobe")
TRANSFER = 64  # enum kvp_call
_lock = threading.Lock()
_users = 0
_path: Path | None = None


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

    The file lies in the run folder of `kvprobe run` where there is one, else in a temporary folder, and is removed
    there when the last engine closes.
    """

    def __init__(self, detail: str, records: int = 0) -> None:
        """Opens the ring file, or joins the one that is open; `records` a thread are kept, 0: the default."""
        self._level = DETAIL[detail]
        self._open = self._level > 0 and _join(records)

    @property
    def path(self) -> Path | None:
        """The ring file; None where nothing is recorded."""
        return _path if self._open else None

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
            self._open = False
            _leave()


def _join(records: int) -> bool:
    global _users, _path
    with _lock:
        if not _users and not core().kvp_ring_is_open():
            folder = os.environ.get("KVPROBE_RUN") or tempfile.gettempdir()
            path = Path(folder) / f"engine-{os.getpid()}-{core().kvp_now_ns()}.kvp"
            code = core().kvp_ring_open(os.fsencode(path), b"engine", ct.byref(RingOptions(ring_capacity=records)))
            if code:
                log.warning("nothing is recorded: %s cannot be written (%s)", path, os.strerror(-code))
                return False
            _path = path
            atexit.register(_finish)
        _users += 1
    return True


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            _finish()


def _finish() -> None:
    global _path
    if _path is None:
        return
    core().kvp_ring_close()
    if not os.environ.get("KVPROBE_RUN"):
        _path.unlink(missing_ok=True)
    _path = None
