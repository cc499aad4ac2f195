"""The ring files of short processes that have ended, together in one file, `ended.pack`: each is taken in whole.

A ring file takes 33 KiB of the disk at the least; of a process that made a few calls hardly 1 KiB of it says anything.
So a run of thousands of short processes keeps within its `--max-size`, and each process's totals and calls are kept.

An entry is two lengths, a line of JSON (name, size, where its data lie) and the data, compressed; holes are left out.
Entries are only appended, so of a file that was cut off the first ones can be read.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec

from kvprobe.errors import RecordingError
from kvprobe.runfolder import files

__all__ = ["NAME", "add", "opened"]

NAME = "ended.pack"
LARGEST_BYTES = 1 << 20  # data of one entry: larger files are left as they are
_LENGTHS = struct.Struct("<4sII")  # magic, bytes of the line, bytes of the compressed data
_MAGIC = b"KVPE"
_LINE_BYTES = 1 << 16

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**44)]


class _Entry(msgspec.Struct):
    """What an entry's line says: `extents` are the file's data, (offset, bytes) of each."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,200}$")]
    size: _Offset
    extents: list[tuple[_Offset, _Offset]]


def add(pack: Path, paths: Iterable[Path]) -> list[Path]:
    """Takes files in and removes them; which were taken: one that is too large or cannot be read stays as it is.

    Raises:
        OSError: the pack cannot be written. Of the entry that failed nothing is left, and no file was removed.
    """
    taken = []
    fd = files.open_append(pack)
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                entry = _encoded(path)
                if entry:
                    _append(fd, entry, pack)
                    taken.append(path)
    finally:
        os.close(fd)
    # at once: a file system may take 10 ms for each to give its blocks back
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda path: path.unlink(missing_ok=True), taken))
    return taken


def _encoded(path: Path) -> bytes:
    """The entry of a file; empty where it is too large."""
    with path.open("rb") as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        extents = list(_extents(fd, size))
        if sum(length for _, length in extents) > LARGEST_BYTES:
            return b""
        data = zlib.compress(b"".join(os.pread(fd, length, at) for at, length in extents), 1)
    line = msgspec.json.encode(_Entry(path.name, size, extents))
    return _LENGTHS.pack(_MAGIC, len(line), len(data)) + line + data if len(line) <= _LINE_BYTES else b""


def _append(fd: int, entry: bytes, pack: Path) -> None:
    before = os.fstat(fd).st_size
    try:
        written = os.write(fd, entry)
    except OSError:
        written = 0
    if written < len(entry):
        os.ftruncate(fd, before)
        raise OSError(28, "the disk is full", str(pack))


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # no data behind it
            return
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, at - begin


def opened(pack: Path) -> Iterator[tuple[str, int]]:
    """Each file of a pack: its name and a descriptor of it in memory, which is closed when the next one is asked for.

    Raises:
        RecordingError: the pack is cut off or damaged from here on; those before were whole.
        OSError: it cannot be read.
    """
    data = files.read(pack, pack.stat().st_size)
    at = 0
    while at < len(data):
        try:
            entry, content, at = _next(data, at)
        except (struct.error, msgspec.MsgspecError, UnicodeError, ValueError, zlib.error) as error:
            raise RecordingError(
                f"{pack}: cut off or damaged behind {at:,} of its {len(data):,} bytes ({error})"
            ) from None
        fd = os.memfd_create(entry.name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, entry.size)
            used = 0
            for offset, length in entry.extents:
                os.pwrite(fd, content[used : used + length], offset)
                used += length
            yield entry.name, fd
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)


def _next(data: bytes, at: int) -> tuple[_Entry, bytes, int]:
    magic, line_bytes, data_bytes = _LENGTHS.unpack_from(data, at)
    start = at + _LENGTHS.size
    end = start + line_bytes + data_bytes
    if magic != _MAGIC or end > len(data) or line_bytes > _LINE_BYTES:
        raise ValueError("no entry begins there")
    entry: _Entry = msgspec.json.decode(data[start : start + line_bytes], type=_Entry)
    room = sum(length for _, length in entry.extents)
    if room > LARGEST_BYTES or any(offset + length > entry.size for offset, length in entry.extents):
        raise ValueError("its data lie outside of it")
    content = zlib.decompressobj().decompress(data[start + line_bytes : end], room + 1)
    if len(content) != room:
        raise ValueError("its data are not as long as it says")
    return entry, content, end
