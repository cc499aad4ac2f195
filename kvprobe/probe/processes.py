"""Looks at other processes through /proc: are they alive, what did they start with, can the interposer reach them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvprobe.runfolder.identity import alive, start_ticks

__all__ = [
    "alive",
    "children",
    "command_line",
    "descendants",
    "environment",
    "exit_status",
    "mapped_files",
    "named",
    "pid_in",
    "program",
    "start_ticks",
    "why_not_preloaded",
    "words",
]

_ENV_END = 48  # of /proc/<pid>/stat behind the command: where the environment ends


def environment(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None where it may not be read, or there is none (see below)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            data = file.read()
        if not data:  # it was emptied; or the process has ended, or is in the middle of calling exec: then its end is 0
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                if file.read().rpartition(b") ")[2].split()[_ENV_END] == b"0":
                    return None
    except (OSError, IndexError):
        return None
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if b"=" in item)
    return {name: value for name, _, value in pairs}


def program(pid: int) -> str:
    """Path of the program that a process runs; empty where it may not be asked or has gone."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)")
    except OSError:
        return ""


def children() -> dict[int, int]:
    """Parent of every process that exists: pid -> ppid."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123
                    parents[int(entry.name)] = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    return parents


def words(pid: int) -> list[str]:
    """A process's arguments; empty where there are none or they may not be read."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.rstrip(b"\0").decode(errors="replace").split("\0") if data else []


def command_line(pid: int) -> str:
    """A process's arguments, joined by spaces; empty where there are none or they may not be read."""
    return " ".join(words(pid)).strip()


def pid_in(text: str) -> int | None:
    """The process id that a text is, None where it is none."""
    return int(text) if text.isascii() and text.isdigit() else None


def named(name: str) -> list[int]:
    """Processes with `name` in their command line, without this process and those that it came from."""
    parents, mine, one = children(), set(), os.getpid()
    while one and one not in mine:
        mine.add(one)
        one = parents.get(one, 0)
    return [pid for pid in sorted(parents) if pid not in mine and name in command_line(pid)]


def descendants(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    by_parent: dict[int, list[int]] = {}
    for child, parent in children().items():
        by_parent.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        more = by_parent.get(todo.pop(), [])
        found += more
        todo += more
    return sorted(found)


def mapped_files(pid: int) -> set[str]:
    """Paths of the files that a process has mapped; empty where it may not be asked or has gone."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    fields = (line.split(None, 5) for line in text.splitlines())
    return {parts[5] for parts in fields if len(parts) > 5 and parts[5].startswith("/")}


def exit_status(pidfd: int) -> int | None:
    """Exit status of a process that has ended, of a pidfd opened before; -N for signal N; None where it is not known.

    Any process may ask (PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15 on), parent or not.
    """
    import fcntl

    request = 0xC000FF0B | 64 << 16  # _IOWR(0xFF, 11, 64 bytes)
    buffer = bytearray(struct.pack("<Q", 1 << 3) + bytes(56))
    try:
        fcntl.ioctl(pidfd, request, buffer)
    except OSError:
        return None
    mask, status = struct.unpack_from("<Q", buffer)[0], struct.unpack_from("<i", buffer, 60)[0]
    if not mask & 1 << 3:
        return None
    code: int = -(status & 127) if status & 127 else status >> 8 & 255
    return code


def why_not_preloaded(program: str | os.PathLike[str]) -> str:
    """Why LD_PRELOAD cannot reach this program, judged by its file; empty where nothing speaks against it."""
    path = Path(program)
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            start = file.read(64)
            if start[:4] != b"\x7fELF":
                return ""
            if mode & 0o6000:
                return "it is setuid or setgid: the system ignores LD_PRELOAD"
            if start[4] != 2:
                return "it is a 32-bit program"
            interpreter = _interpreter(file, start)
    except (OSError, struct.error):
        return ""
    if interpreter is None:
        return "it is statically linked"
    if "musl" in interpreter:
        return "it uses musl, and the interposer is built for glibc"
    return ""


def _interpreter(file, start: bytes) -> str | None:  # type: ignore[no-untyped-def]
    """The PT_INTERP of an ELF file; None where it has none."""
    (offset,) = struct.unpack_from("<Q", start, 32)
    size, count = struct.unpack_from("<HH", start, 54)
    for i in range(count):
        file.seek(offset + i * size)
        header = file.read(56)
        (kind,) = struct.unpack_from("<I", header)
        if kind == 3:
            (where,) = struct.unpack_from("<Q", header, 8)
            (length,) = struct.unpack_from("<Q", header, 32)
            file.seek(where)
            return str(file.read(min(length, 4096)).rstrip(b"\0").decode(errors="replace"))
    return None
