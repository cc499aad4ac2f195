"""Watches the CUDA calls of this process while a block runs, and says which broke a rule, on which Python line.

The interposer is loaded into the process itself and put before its CUDA calls, as `kvprobe attach` does it from
outside. A call that breaks a rule is written down as it returns, with the stack of its thread.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import faulthandler
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.native.library import path_of
from kvprobe.probe.ring import CALLS
from kvprobe.testing.rules import ALLOCATION, BLOCKING, FULL_QUEUE, PAGEABLE, PINNING, RULES, SYNCHRONISATION, rules_of

__all__ = ["Frame", "HotPathGate", "Seen", "Violation"]

ROOM = 1000  # forbidden calls of one block that are written down; the rest is counted
SLOW_NS = 20_000  # on a GPU: copies of at least that have their stack taken, for whoever finds the queue full
_ALWAYS, _IF_PAGEABLE, _COPIES = 1, 2, 128  # gate.c
_PAGEABLE = 1
_DIRECTIONS = {1: "CPU to GPU", 2: "GPU to CPU", 3: "GPU to GPU", 4: "CPU to CPU"}
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_OPEN_ARGUMENTS: Any = [ct.c_char_p, ct.c_void_p, ct.c_int, ct.c_int, ct.c_uint64, ct.c_void_p, ct.c_uint64]


@dataclass(frozen=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Violation:
    """One call that broke rules.

    Attributes:
        rules: names in RULES, the one that says most first; empty for a slow copy that breaks none by itself.
        call: its CUDA function.
        direction: "CPU to GPU", ...; "" for what copies nothing, or where it is not known.
        bytes: of the copy, or of the memory.
        stream: its handle.
        dur_ns: host time inside the call.
        frames: the thread's Python stack, innermost first; empty for a thread that runs no Python.
    """

    rules: tuple[str, ...]
    call: str
    direction: str
    bytes: int
    stream: int
    start_ns: int
    dur_ns: int
    thread: int
    frames: tuple[Frame, ...]

    @property
    def place(self) -> Frame | None:
        """The innermost frame that is neither torch's nor kvprobe's."""
        return next((frame for frame in self.frames if not _INTERNAL.search(frame.file)), None)

    def below(self, modules: Sequence[str]) -> bool:
        """Whether one of these modules is on its stack; without any: True."""
        paths = [module.replace(".", "/") for module in modules]
        return not paths or any(
            f"/{path}.py" in f"/{frame.file}" or f"/{path}/" in f"/{frame.file}"
            for frame in self.frames
            for path in paths
        )


_RUNNER = re.compile(r"/(_pytest|pluggy)/")
_INTERNAL = re.compile(r"/torch/|/kvprobe/(testing|cuda|native)/|/ctypes/|<frozen|/contextlib\.py$")


@dataclass
class Seen:
    """What a block did, filled when it has ended."""

    violations: list[Violation] = field(default_factory=list)
    left_out: int = 0  # calls that found no room

    def text(self) -> str:
        """A paragraph for each rule and place, with its line; "" where nothing was broken."""
        groups: dict[tuple[str, Frame | None], list[Violation]] = {}
        for one in self.violations:
            groups.setdefault((one.rules[0], one.place), []).append(one)
        lines = []
        for (rule, place), ones in sorted(groups.items(), key=lambda item: -len(item[1])):
            what, instead = RULES[rule]
            calls = ", ".join(dict.fromkeys(one.call for one in ones))
            sizes = f", {sum(one.bytes for one in ones):,} bytes" if any(one.bytes for one in ones) else ""
            ways = ", ".join(dict.fromkeys(one.direction for one in ones if one.direction))
            lines.append(f"{rule}: {what}: {place or 'a thread that runs no Python'}")
            lines.append(
                f"    {calls}, {len(ones)} time{'s' if len(ones) > 1 else ''}{sizes}{', ' if ways else ''}{ways}"
            )
            outer = [frame for frame in ones[0].frames if not _INTERNAL.search(frame.file)][1:]
            outer = list(itertools.takewhile(lambda frame: not _RUNNER.search(frame.file), outer))[:3]
            lines += [f"    called by {frame}" for frame in outer]
            lines.append(f"    instead: {instead}")
        if self.left_out:
            lines.append(f"and {self.left_out:,} more calls that broke a rule")
        return "\n".join(lines)


class _Sigaction(ct.Structure):
    _fields_ = [("handler", ct.c_void_p), ("rest", ct.c_char * 256)]


class HotPathGate:
    """The interposer in this process. One is enough; it stays until the process ends.

    Raises:
        KvprobeError: the interposer cannot be loaded here.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Loads the interposer; the process's calls are recorded into `folder` (None: a temporary one)."""
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvprobe-gate-"))
        library = path_of("libkvprobe_interpose.so")
        self._library: Any = ct.CDLL(str(library))
        self._library.kvprobe_attach.argtypes = [ct.c_char_p, ct.c_char_p, ct.c_char_p, ct.c_uint64]
        self._library.kvprobe_gate_open.argtypes = _OPEN_ARGUMENTS
        self._library.kvprobe_gate_close.restype = ct.c_uint64
        written = self._library.kvprobe_attach(
            os.fsencode(library), os.fsencode(self.folder), b"copies", ct.c_uint64(64 << 20)
        )
        if written == -114:  # EALREADY: `kvprobe run` has preloaded it
            self._attached = False
        elif written < 0:
            raise KvprobeError(f"CUDA calls of this process cannot be watched: {os.strerror(-written)}")
        else:
            self._attached = True
        self._path = self.folder / f"gate-{os.getpid()}"
        self._file = self._path.open("w+b", buffering=0)
        self.signal = _free_signal()
        faulthandler.register(self.signal, self._file, all_threads=False)
        action = _Sigaction()
        ct.CDLL(None).sigaction(self.signal, None, ct.byref(action))
        self._handler = action.handler

    def close(self) -> None:
        """Puts everything back."""
        faulthandler.unregister(self.signal)
        if self._attached:
            self._library.kvprobe_detach()
        self._file.close()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def watch(self, rules: Iterable[str] = RULES, under: Sequence[str] = (), queue_full: int = 0) -> Iterator[Seen]:
        """Watches every thread of the process while the block runs.

        Args:
            rules: names in RULES.
            under: modules ("transformers.cache_utils"): only calls with one of them on the stack count.
            queue_full: address of the host runtime's `kvhostQueueFull`; 0 on a GPU, where a full queue is judged by the
                recording.

        Raises:
            UsageError: a gate is open already: they cannot be nested.
        """
        forbidden = rules_of(rules)
        seen = Seen()
        asks = FULL_QUEUE in forbidden
        self._file.seek(0)
        self._file.truncate()
        slow_ns = SLOW_NS if asks and not queue_full else 0
        full = queue_full if asks and queue_full else None
        if self._library.kvprobe_gate_open(
            _table(forbidden), self._handler, self.signal, self._file.fileno(), slow_ns, full, ROOM
        ):
            raise UsageError("a hot path is being watched already: hot paths cannot be nested")
        try:
            yield seen
        finally:
            seen.left_out = self._library.kvprobe_gate_close()
            found = list(_read(self._path))
            if slow_ns:
                found = _full_by_recording(self.folder, found)
            for one in found:
                broken = tuple(rule for rule in one.rules if rule in forbidden)
                if broken and one.below(under):
                    seen.violations.append(Violation(broken, *list(vars(one).values())[1:]))


def _free_signal() -> int:
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    raise KvprobeError("no real-time signal is free in this process")


def _table(forbidden: frozenset[str]) -> bytes:
    """gate.c's rule of each call by number."""
    table = bytearray(128)
    for number, (kind, name) in CALLS.items():
        if kind in ("COPY", "BATCH", "COPY_SYNC"):
            always = kind == "COPY_SYNC" and BLOCKING in forbidden
            table[number] = _COPIES | (_ALWAYS if always else _IF_PAGEABLE if PAGEABLE in forbidden else 0)
        else:
            rules = {SYNCHRONISATION, BLOCKING} if kind == "SYNC" else _memory_rules(kind, name)
            table[number] = _ALWAYS if forbidden & rules else 0
    return bytes(table)


def _memory_rules(kind: str, name: str) -> set[str]:
    if kind not in ("ALLOC", "FREE"):
        return set()
    return {PINNING if "Host" in name else ALLOCATION}


def _read(path: Path) -> Iterator[Violation]:
    numbers: list[int] = []
    frames: list[Frame] = []
    for line in path.read_text(errors="replace").splitlines():
        if line == ".":
            if numbers:
                yield _violation(numbers, tuple(frames))
            numbers = []
        elif not numbers:
            numbers, frames = [int(word) for word in line.split()], []
        elif match := _FRAME.fullmatch(line):
            frames.append(Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))


def _violation(numbers: list[int], frames: tuple[Frame, ...]) -> Violation:
    call, direction, size, _, stream, start, took, thread, after_copy, full = numbers
    kind, name = CALLS.get(call, ("", f"call {call}"))
    rules: list[str] = [FULL_QUEUE] if full else []
    if kind in ("COPY", "BATCH", "COPY_SYNC"):
        rules += [PAGEABLE] if direction >> 4 == _PAGEABLE else []
        rules += [BLOCKING] if kind == "COPY_SYNC" else []
    elif kind == "SYNC":
        rules += [BLOCKING, SYNCHRONISATION] if after_copy else [SYNCHRONISATION]
    rules += _memory_rules(kind, name)
    way = _DIRECTIONS.get(direction & 15, "")
    return Violation(tuple(rules), name, way, size, stream, start, took, thread, frames)


def _full_by_recording(folder: Path, found: list[Violation]) -> list[Violation]:
    """Slow copies among these that the judge of a full queue holds against one: they break that rule, too."""
    import numpy as np

    from kvprobe.recordings import open_recording
    from kvprobe.recordings.occupancy import occupancy

    slow = [one for one in found if one.dur_ns >= SLOW_NS and one.direction]
    if not slow:
        return found
    recording = open_recording([folder])
    queues = occupancy(recording)
    rows = np.flatnonzero(queues.blocked)
    calls = recording.calls
    blocked = set(
        zip(calls["thread"][rows].tolist(), (calls["end_ns"] - calls["start_ns"])[rows].tolist(), strict=True)
    )
    return [
        Violation((FULL_QUEUE, *one.rules), *list(vars(one).values())[1:])
        if (one.thread, one.dur_ns) in blocked
        else one
        for one in found
    ]
