"""Every environment variable of kvprobe: declared, typed, parsed and described here, and read nowhere else.

Two parts cannot import this and read what they need themselves: the start-up hook (`instrument/carried/`) and the
build (`native/build.py`). The interposer, which is C, reads those marked as native. A test holds all of them to this
list.
A value that cannot be parsed counts as not set, and `kvprobe doctor` says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
NO = frozenset({"off", "0", "no", "false"})


class Variable(Generic[T]):
    """One variable.

    Attributes:
        name: as in the environment.
        default: its value where it is not set, or cannot be parsed.
        values: what it may be, in words.
        what: what it is for, one sentence.
        native: whether the interposer reads it.
        set_by_run: whether `kvprobe run` sets it for the command: nobody needs to.
    """

    def __init__(
        self,
        name: str,
        default: T,
        parse: Callable[[str], T],
        values: str,
        what: str,
        *,
        native: bool = False,
        set_by_run: bool = False,
    ) -> None:
        self.name, self.default, self.values, self.what = name, default, values, what
        self.native, self.set_by_run = native, set_by_run
        self._parse = parse
        self._key = os.fsencode(name)
        self._seen: tuple[bytes | None, str | None] = None, None  # as it stood, and its text
        VARIABLES.append(self)

    @property
    def text(self) -> str | None:
        """As it stands in the environment; None where it is not set or empty."""
        # hot paths ask, too: what os.environ holds, without its encoding, its decoding and its exceptions
        held = getattr(os.environ, "_data", None)
        if held is None:
            return os.environ.get(self.name) or None
        seen, now = self._seen, held.get(self._key)
        if now is not seen[0]:
            seen = self._seen = now, os.environ.get(self.name) or None
        return seen[1]

    def value(self) -> T:
        """Parsed."""
        text = self.text
        if not text:
            return self.default
        try:
            return self._parse(text)
        except ValueError:
            return self.default

    def problem(self) -> str:
        """Why the value that is set does not count; empty where it does, or none is set."""
        text = self.text
        if text is None:
            return ""
        try:
            self._parse(text)
        except ValueError:
            return f"counts as not set: it must be {self.values}"
        return ""

    def set(self, value: str) -> None:
        """For this process and those that it starts."""
        os.environ[self.name] = value

    def take(self) -> str | None:
        """Its text; afterwards it is not set."""
        return os.environ.pop(self.name, None) or None


VARIABLES: list[Variable[Any]] = []


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(word)
        return word

    return parse


def _on(text: str) -> bool:
    return text.strip().lower() not in NO


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


FIXES = ("off", "auto")

SWITCH = Variable(
    "KVPROBE",
    None,
    _on,
    "on or off",
    "off: nothing of kvprobe acts in this process, whatever else is set; on: adapters may measure",
)
FIX = Variable(
    "KVPROBE_FIX",
    "off",
    _one_of(*FIXES),
    "off or auto",
    "auto: adapters and the interposer may change how a server copies, where that helps",
    native=True,
    set_by_run=True,
)
LOCKED_BYTES = Variable(
    "KVPROBE_LOCKED_BYTES",
    32 << 20,
    _number,
    "a number",
    "memory that KVPROBE_FIX=auto may lock in a process for staging pageable copies; below 4 MiB: none",
    native=True,
)
KEEP_BYTES = Variable(
    "KVPROBE_KEEP_BYTES",
    "auto",
    str,
    "a number, or auto: a quarter of the memory",
    "pinned memory that a program frees and KVPROBE_FIX=auto keeps for its next request; 0: none",
    native=True,
)
POPULATE_BYTES = Variable(
    "KVPROBE_POPULATE_BYTES",
    "auto",
    str,
    "a number, or auto: 16 MiB, while it pays",
    "from this size on KVPROBE_FIX=auto has several threads make the pages of pinned memory that a program asks for; "
    "0: none",
    native=True,
)
RUN = Variable(
    "KVPROBE_RUN", None, str, "a folder", "the run folder that this process records into", native=True, set_by_run=True
)
DETAIL = Variable(
    "KVPROBE_DETAIL",
    "copies",
    _one_of("totals", "copies", "launches"),
    "totals, copies or launches",
    "which single calls are kept; totals are exact in any case",
    native=True,
    set_by_run=True,
)
MAX_BYTES = Variable(
    "KVPROBE_MAX_BYTES",
    0,
    _number,
    "a number",
    "upper limit of the run folder's size; 0: none",
    native=True,
    set_by_run=True,
)
OBSERVER = Variable(
    "KVPROBE_OBSERVER", 0, _number, "a pid", "the process that may read this one's memory", native=True, set_by_run=True
)
INTERPOSER = Variable(
    "KVPROBE_INTERPOSER",
    None,
    str,
    "a file",
    "the library that records a process's calls: the start-up hook loads it where LD_PRELOAD was taken away",
    set_by_run=True,
)
STACKS = Variable(
    "KVPROBE_STACKS",
    "off",
    _one_of("off", "py-spy", "in-process"),
    "off, py-spy or in-process",
    "how Python stacks of blocked calls are taken",
    set_by_run=True,
)
RING_RECORDS = Variable(
    "KVPROBE_RING_RECORDS",
    0,
    _number,
    "a number",
    "calls kept as detail of each thread; 0: 131,072, or fewer where KVPROBE_MAX_BYTES allows no more",
    native=True,
)
SLOW_NS = Variable(
    "KVPROBE_SLOW_NS",
    0,
    _number,
    "a number of ns",
    "calls at least this long are kept in any case; 0: 20,000",
    native=True,
)
NVTX = Variable(
    "KVPROBE_NVTX",
    True,
    _on,
    "on or off",
    "off: no NVTX ranges, even where a tool asks for them (NVTX_INJECTION64_PATH)",
    native=True,
)
MARKS = Variable(
    "KVPROBE_MARKS",
    "auto",
    _one_of("auto", "on", *NO),
    "auto, on or off",
    "whether timing events in the program's streams tell what the device did: auto does on a GPU; on: on the host "
    "runtime, too",
    native=True,
)
CONTENTS = Variable(
    "KVPROBE_CONTENTS",
    True,
    _on,
    "on or off",
    "off: the bytes of copies are neither hashed nor compared with what the GPU has, and redundant loads are "
    "recognised by their addresses alone",
    native=True,
)
VERIFY = Variable(
    "KVPROBE_VERIFY",
    0.0,
    float,
    "a number",
    "share of the time, in percent, that comparing loaded bytes with stored ones may take; 0: they are not compared",
    native=True,
    set_by_run=True,
)
METRICS = Variable(
    "KVPROBE_METRICS",
    None,
    str,
    "a folder",
    "where the processes of one server keep their metrics; named by its first process",
)
DEVICE = Variable(
    "KVPROBE_DEVICE",
    "auto",
    _one_of("auto", "host", "cuda"),
    "auto, host or cuda",
    "which CUDA runtime adapters use: the GPU's, or the embedded host runtime",
)
HOSTRT = Variable("KVPROBE_HOSTRT", None, str, "a file", "another build of the embedded host runtime")
NATIVE_LIB = Variable("KVPROBE_NATIVE_LIB", None, str, "a folder", "where the native libraries are built and found")
DEBUG = Variable("KVPROBE_DEBUG", False, _on, "on or off", "on: errors of the command line show their traceback")
CARRY = Variable(
    "KVPROBE_CARRY", None, str, "folders", "where an environment without kvprobe finds the adapters", set_by_run=True
)
WHEELS = Variable("KVPROBE_WHEELS", None, str, "a folder", "servers' packages as published, fetched once")

# What the tests and benchmarks read for themselves.
OF_THE_TESTS = frozenset(
    {
        "KVPROBE_DOWNLOAD",
        "KVPROBE_GPU_RECORDINGS",
        "KVPROBE_RACE_ITERATIONS",
        "KVPROBE_SHARED_DATA",
        "KVPROBE_TEST_DEVICE",
    }
)


def caches() -> Path:
    """The user's cache folder of kvprobe; where no home can be found, one that cannot exist: nothing is cached then.

    A shared temporary folder is no way out, because what is read there might be somebody else's.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvprobe"
    except RuntimeError:
        return Path(os.devnull) / "kvprobe"


def killed() -> bool:
    """`KVPROBE=off`: nothing of kvprobe may act in this process."""
    return SWITCH.value() is False


def asked_for() -> bool:
    """The environment asks for kvprobe and does not forbid it."""
    return not killed() and bool(SWITCH.text or RUN.text or FIX.text)


def nvtx_listens() -> bool:
    """A tool that wants NVTX ranges injected itself into this process, and KVPROBE_NVTX does not forbid them."""
    return bool(os.environ.get("NVTX_INJECTION64_PATH")) and NVTX.value()


def unknown() -> Iterator[str]:
    """Names in the environment that begin like kvprobe's and are none of them: typing errors, most likely."""
    known = {variable.name for variable in VARIABLES} | OF_THE_TESTS
    for name in sorted(os.environ):
        if name.startswith("KVPROBE_") and name not in known:
            yield name
