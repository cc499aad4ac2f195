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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.native.library import path_of
from kvprobe.probe.ring import CALLS
from kvprobe.testing.rules import ALLOCATION, BLOCKING, FULL_QUEUE, PAGEABLE, PINNING, RULES, SYNCHRONISATION, rules_of

__all__ = ["BlockReport", "Frame", "HotPathGate", "Violation"]

ROOM = 1000  # forbidden calls of one block that are written down, and slow ones; the rest is counted
SLOW_NS = 20_000  # on a GPU: copies of at least that have their stack taken, for whoever finds the queue full
_ALWAYS, _IF_PAGEABLE, _COPIES = 1, 2, 128  # gate.c
_PAGEABLE = 1
_DIRECTIONS = {1: "CPU to GPU", 2: "GPU to CPU", 3: "GPU to GPU", 4: "CPU to CPU"}
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CUT = re.compile(r"  (\.\.\.|<trunc.*)")  # faulthandler left the rest out; gate.c writes all frames behind it
_EBUSY = -16
# frames.c's functions of Python, in its order
_PYTHON = (
    "PyGILState_GetThisThreadState",
    "PyGILState_Check",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyGC_Disable",
    "PyGC_Enable",
    "PyThreadState_GetFrame",
    "PyFrame_GetBack",
    "PyFrame_GetCode",
    "PyFrame_GetLineNumber",
    "PyObject_GetAttrString",
    "PyUnicode_AsEncodedString",
    "PyBytes_AsString",
    "Py_DecRef",
    "PyErr_Clear",
)


class _Options(ct.Structure):
    """gate.c's kvp_gate_options."""

    _fields_ = [
        ("rules", ct.c_char_p),
        ("write_stack", ct.c_void_p),
        ("signal", ct.c_int32),
        ("fd", ct.c_int32),
        ("slow_ns", ct.c_uint64),
        ("queue_full", ct.c_void_p),
        ("room", ct.c_uint64),
        ("slow_room", ct.c_uint64),
        ("below", ct.c_char_p),
        ("python", ct.c_void_p * len(_PYTHON)),
    ]


class _GateCounts(ct.Structure):
    """gate.c's kvp_gate_seen."""

    _fields_ = [("left_out", ct.c_uint64), ("slow_left_out", ct.c_uint64), ("blind", ct.c_int32)]


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
        cut: frames at its end may be missing.
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
    cut: bool = False

    @property
    def place(self) -> Frame | None:
        """The innermost frame that is neither torch's nor kvprobe's."""
        return next((frame for frame in self.frames if not _INTERNAL.search(frame.file)), None)

    def below(self, modules: Sequence[str]) -> bool:
        """Whether one of these modules is on its stack, or may be where that is cut; without any: True."""
        paths = [path for module in modules for path in _paths(module)]
        return not paths or self.cut or any(path in f"/{frame.file}" for frame in self.frames for path in paths)


def _paths(module: str) -> tuple[str, str]:
    """What a name of a file of this module has in it, as faulthandler writes names of files."""
    path = module.replace(".", "/").encode("ascii", "backslashreplace").decode()
    return f"/{path}.py", f"/{path}/"


_RUNNER = re.compile(r"/(_pytest|pluggy)/")
_INTERNAL = re.compile(r"/torch/|/kvprobe/(testing|cuda|native)/|/ctypes/|<frozen|/contextlib\.py$")


@dataclass
class BlockReport:
    """What a block did, filled when it has ended."""

    violations: list[Violation] = field(default_factory=list)
    left_out: int = 0  # calls that broke a rule, or may have broken one, and that nothing more is known of

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
        library = path_of("libkvprobe_interpose.so")
        self._library: Any = ct.CDLL(str(library))
        self._library.kvprobe_attach.argtypes = [ct.c_char_p, ct.c_char_p, ct.c_char_p, ct.c_uint64]
        try:
            self.folder = folder or Path(tempfile.mkdtemp(prefix="kvprobe-gate-"))
            # in memory: a full disk must not let a test pass
            self._file = os.fdopen(os.memfd_create("kvprobe-gate"), "w+b", buffering=0)
        except OSError as error:
            raise KvprobeError(f"CUDA calls of this process cannot be watched: {error}") from None
        written = self._library.kvprobe_attach(
            os.fsencode(library), os.fsencode(self.folder), b"copies", ct.c_uint64(64 << 20)
        )
        if written == -114:  # EALREADY: `kvprobe run` has preloaded it
            self._attached = False
        elif written < 0:
            raise KvprobeError(f"CUDA calls of this process cannot be watched: {os.strerror(-written)}")
        else:
            self._attached = True
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
    def watch(
        self, rules: Iterable[str] = RULES, under: Sequence[str] = (), queue_full: int = 0
    ) -> Iterator[BlockReport]:
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
        seen, counted = BlockReport(), _GateCounts()
        judged = FULL_QUEUE in forbidden and not queue_full  # by the recording
        self._file.seek(0)
        self._file.truncate()
        options = _Options(
            rules=_table(forbidden),
            write_stack=self._handler,
            signal=self.signal,
            fd=self._file.fileno(),
            slow_ns=SLOW_NS if judged else 0,
            queue_full=queue_full if FULL_QUEUE in forbidden and queue_full else None,
            room=ROOM,
            slow_room=ROOM,
            below=_texts(under),
            python=_python(),
        )
        code = self._library.kvprobe_gate_open(ct.byref(options))
        if code == _EBUSY:
            raise UsageError("a hot path is being watched already: hot paths cannot be nested")
        if code:
            raise KvprobeError(f"CUDA calls of this process are not seen any more: is {self.folder} on a full disk?")
        try:
            yield seen
        finally:
            self._library.kvprobe_gate_close(ct.byref(counted))
            seen.left_out = counted.left_out
            self._file.seek(0)
            found = list(_read(self._file.read().decode(errors="replace")))
            if judged:
                found, unseen = _full_by_recording(self.folder, found, counted.slow_left_out)
                seen.left_out += unseen
            for one in found:
                broken = tuple(rule for rule in one.rules if rule in forbidden)
                if broken and one.below(under):
                    seen.violations.append(replace(one, rules=broken))
        if counted.blind:
            raise KvprobeError("CUDA calls of this process were not seen to the end of the hot path")


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


def _texts(modules: Sequence[str]) -> bytes | None:
    """What stacks of calls below these modules have in them, for gate.c."""
    if not modules:
        return None
    texts = [text for module in modules for path in _paths(module) for text in (path, f'  File "{path[1:]}')]
    return b"".join(text.encode() + b"\0" for text in texts) + b"\0"


def _python() -> Any:
    addresses = [ct.cast(getattr(ct.pythonapi, name), ct.c_void_p).value for name in _PYTHON]
    return (ct.c_void_p * len(_PYTHON))(*addresses)


def _read(text: str) -> Iterator[Violation]:
    numbers: list[int] = []
    frames: list[Frame] = []
    cut: list[Frame] = []  # the frames that were written first, where all of them follow
    for line in text.splitlines():
        if line == ".":
            if numbers:
                yield _violation(numbers, tuple(frames or cut), cut=bool(cut) and not frames)
            numbers = []
        elif not numbers:
            numbers, frames, cut = [int(word) for word in line.split()], [], []
        elif _CUT.fullmatch(line):
            cut, frames = cut or frames, []
        elif match := _FRAME.fullmatch(line):
            frames.append(Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))


def _violation(numbers: list[int], frames: tuple[Frame, ...], cut: bool) -> Violation:
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
    return Violation(tuple(rules), name, way, size, stream, start, took, thread, frames, cut)


def _full_by_recording(folder: Path, found: list[Violation], left_out: int) -> tuple[list[Violation], int]:
    """Slow copies that the judge of a full queue holds against one break that rule, too.

    Returns:
        The calls, and how many of the `left_out` slow copies that are not among them broke it, or may have.
    """
    import numpy as np

    from kvprobe.recordings import open_recording
    from kvprobe.recordings.occupancy import occupancy

    slow = {(one.thread, one.dur_ns) for one in found if one.dur_ns >= SLOW_NS and one.direction}
    if not slow:
        return found, left_out
    recording = open_recording([folder])
    calls, blocked = recording.calls, occupancy(recording).blocked
    keys = list(zip(calls["thread"].tolist(), (calls["end_ns"] - calls["start_ns"]).tolist(), strict=True))
    full = slow & {keys[row] for row in np.flatnonzero(blocked)}
    judged = [
        replace(one, rules=(FULL_QUEUE, *one.rules)) if (one.thread, one.dur_ns) in full else one for one in found
    ]
    if left_out:
        of_block = [start for start, key in zip(calls["start_ns"].tolist(), keys, strict=True) if key in slow]
        later = blocked & (calls["start_ns"] >= min(of_block)) if of_block else blocked
        unseen = sum(keys[row] not in slow for row in np.flatnonzero(later))
        left_out = min(left_out, unseen) if of_block else left_out
    return judged, left_out
