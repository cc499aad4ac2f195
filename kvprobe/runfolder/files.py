"""Private files: made for the user alone, never through a link, whole or not at all.

A run folder may lie in a folder that others write to, and a watched program may run as root. So every file of kvprobe
is 0600, every folder 0700; a name that somebody else put there (a link, another's file, a device) is refused and not
followed; and a file is only ever replaced as a whole.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "append",
    "check_owner",
    "copy",
    "created",
    "full",
    "is_full",
    "make_folder",
    "open_append",
    "read",
    "read_new",
    "temporary_folder",
    "write",
]

LEAST_ROOM = 64 << 10  # bytes; a process's first piece of a ring file, end.json and the lines for the user
_CHUNK = 4096  # bytes; a page of a ring file
READ_LIMIT = 256 << 20  # bytes of one text file; a run folder's are far smaller


def open_append(path: str | os.PathLike[str]) -> int:
    """A descriptor to append whole lines with.

    Raises:
        OSError: it cannot be opened, is a link, is not a regular file, or is somebody else's.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        _check_file(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def append(path: str | os.PathLike[str], line: bytes) -> None:
    """Appends `line` and a line break.

    Raises:
        OSError: as `open_append`, or the disk is full.
    """
    fd = open_append(path)
    try:
        os.write(fd, line + b"\n")
    finally:
        os.close(fd)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole: under a name of its own first, then in place of what was there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600, and never an existing name
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(partial).replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            Path(partial).unlink()
        if isinstance(error, OSError) and not error.filename:  # a full disk says of which file nothing
            error.filename = str(path)
        raise


def created(path: str | os.PathLike[str]) -> BinaryIO:
    """A new file, open to be written.

    Raises:
        OSError: it cannot be made, or there is something of that name.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "wb")


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copies a file under a new name; what holds only zeros, as most of a ring file does, takes no place in the copy.

    Raises:
        OSError: it cannot be read or written, or there is something of that name.
    """
    with created(target) as written, _opened(source) as file:
        while chunk := file.read(_CHUNK):
            if chunk.count(0) == len(chunk):
                written.seek(len(chunk), os.SEEK_CUR)
            else:
                written.write(chunk)
        written.truncate(file.tell())


def read(path: str | os.PathLike[str], limit: int = READ_LIMIT) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it cannot be read, is not a regular file (a pipe would wait without end), or is larger than `limit`.
    """
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(27, f"larger than {limit >> 20} MiB", str(path))
        return file.read(limit)


def read_new(path: str | os.PathLike[str], since: int, most: int) -> tuple[int, bytes]:
    """What was appended to a file since that offset, of more than `most` bytes the last; and where this begins.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(since if since <= size else 0, size - most)
        file.seek(begin)
        return begin, file.read(size - begin)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not a regular file", str(path))
        yield file


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder for this user alone.

    Raises:
        FileExistsError: there is something of that name.
        OSError: it cannot be made.
    """
    Path(path).mkdir(mode=0o700)


def is_full(folder: str | os.PathLike[str]) -> bool:
    """Whether the disk that holds a folder has no space left for a file of any use; False where it does not tell."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_blocks > 0 and (
        room.f_bavail * room.f_frsize < LEAST_ROOM or (room.f_files > 0 and not room.f_favail)
    )


def full(folder: str | os.PathLike[str]) -> str:
    """The words for it."""
    return f"the disk of {folder} is full: sums are exact for processes that began before, single calls are missing"


def check_owner(path: str | os.PathLike[str]) -> None:
    """Refuses a folder that somebody else owns or may write to: they could swap what is written there.

    Raises:
        PermissionError: it is theirs, a link, or open to them.
        OSError: it is not there, or no folder.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise PermissionError(1, "it is a link; name the folder itself", str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "not a folder", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"it belongs to user {found.st_uid}", str(path))
    if found.st_mode & 0o022:
        raise PermissionError(1, "others may write to it; chmod go-w it", str(path))


def temporary_folder(make: bool = True) -> Path:
    """This user's own folder under the temporary folder, `.kvprobe-<uid>`, made where it is missing and `make` says so.

    Raises:
        OSError: it cannot be made, or somebody else has taken the name.
    """
    path = Path(tempfile.gettempdir()) / f".kvprobe-{os.geteuid()}"
    if make:
        with contextlib.suppress(FileExistsError):
            make_folder(path)
    check_owner(path)
    return path


def _check_file(fd: int, path: str | os.PathLike[str]) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "not a regular file", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"it belongs to user {found.st_uid}", str(path))
    if found.st_nlink > 1:
        raise PermissionError(1, "it has another name elsewhere (a hard link)", str(path))
