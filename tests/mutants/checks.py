"""What is run against a mutant, the quickest first, in a copy of the repository: the first that fails has caught it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from kvprobe.native import build, library

from . import histories, python_source
from .mutant import ROOT, Mutant

PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
QUICK = ("-O1", "-g0")


@dataclasses.dataclass(frozen=True)
class Check:
    """A command of Python's, and after how many seconds of the processor it counts as a hang, which catches the mutant.

    `histories`: played in a process that has imported all of it already, since most mutants die within a second.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    histories: bool = False


HISTORIES = Check("histories", ("1:96", "0:64", "2:32"), 40, histories=True)
ENGINE_HISTORIES = Check(  # of a changed Python file, which a process has to import anew
    "histories", ("-m", "tests.mutants.histories", *HISTORIES.command), HISTORIES.seconds
)
THREADS = Check("threads", ("-m", "tests.simulate", "0", "--threads", "--count", "300"), 40)
OWN = {  # of C files whose part the engine's histories use only by the way
    name: Check(" ".join(tests), (*PYTEST, *tests), 120)
    for name, tests in {
        "copy_methods.c": ["tests/offload/test_copy_calls.py"],
        "wire.c": ["tests/offload/test_wire.py", "tests/offload/test_packed.py"],
        "cells.c": ["tests/offload/test_cells.py"],
        "reserve.c": ["tests/native/test_reserve_sanitizers.py", "tests/offload/test_packed.py"],
    }.items()
}
ENGINE = (
    "test_waits.py",
    "test_fences.py",
    "test_methods.py",
    "test_blocks.py",
    "test_submitter.py",
    "test_failures.py",
    "test_engine.py",
    "test_packed.py",
)
RECORDS = Check("tests/offload/test_records.py", (*PYTEST, "tests/offload/test_records.py"), 60)
SANITIZED = Check(
    "sanitizers", (*PYTEST, "tests/native/test_submitter_sanitizers.py", "-k", "drain and undefined"), 120
)
SUITE = Check("tests/offload", (*PYTEST, *(f"tests/offload/{name}" for name in ENGINE)), 240)
MORE = Check("more histories", ("1:4000", "2:1000", "0:1000"), 300, histories=True)
STALLED_S = 40  # without any use of the processor


def checks_of(mutant: Mutant, quick: bool = False) -> list[Check]:
    """Those that run its file; `quick`: those that take seconds."""
    if mutant.file.endswith(".c"):
        own = OWN.get(Path(mutant.file).name)
        seconds = [own, HISTORIES] if own else [HISTORIES, RECORDS, THREADS]
        if mutant.file.endswith("cells.c"):
            seconds.reverse()  # whose own tests take longest
        slow = [SUITE, MORE] if own else [SUITE, SANITIZED, MORE]
        return seconds if quick else [*seconds, *slow]
    tests = python_source.FILES[mutant.file]
    own = Check(" ".join(tests), (*PYTEST, *tests), 240)
    with_engine = mutant.file.startswith("kvprobe/offload/")
    return [own, ENGINE_HISTORIES] if with_engine else [own]


def _code(text: str) -> str:
    """What Python makes of a file; empty: it is none."""
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return ""


def listed() -> list[str]:
    """The repository's files that a check may need."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    apart = ("reports/", "docs/", "benchmarks/", "tests/mutants/")
    return [name for name in names if name and (ROOT / name).is_file() and not name.startswith(apart)]


class Tree:
    """A copy of the repository in a temporary folder, whose native library is built from objects that are kept."""

    def __init__(self) -> None:
        """Copies and builds it.

        Raises:
            BuildError: the compiler refused it.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kvprobe-mutants-")
        self.root = Path(self._folder.name)
        for name in (*listed(), *(f"tests/mutants/{path.name}" for path in Path(__file__).parent.glob("*.py"))):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.native = self.root / "kvprobe" / "native"
        (self.native / "lib").mkdir(exist_ok=True)
        for path in build.build():
            shutil.copy(path, self.native / "lib")
        self._objects = self.root / "objects"
        self._objects.mkdir()
        for source in sorted((self.native / "src").glob("*.c")):
            self._compile(source, self._objects)
        self._link(self._objects)

    def close(self) -> None:
        """Deletes it."""
        self._folder.cleanup()

    def _compile(self, source: Path, to: Path) -> None:
        flags = [flag for flag in build.CFLAGS if flag not in ("-O3", "-g1", "-Werror")]
        command = [*build.compiler(), *flags, *QUICK, "-w", f"-I{self.native / 'src'}", "-c", "-o"]
        done = subprocess.run([*command, to / f"{source.stem}.o", source], capture_output=True, text=True, check=False)
        if done.returncode:
            raise build.BuildError(done.stderr.strip())

    def _link(self, *folders: Path) -> None:
        objects = {path.name: path for folder in folders for path in folder.glob("*.o")}  # the last one's count
        library = self.native / "lib" / "libkvprobe.so"
        subprocess.run([*build.compiler(), "-o", library, *objects.values(), *build.LDFLAGS], check=True)

    def apply(self, mutant: Mutant) -> bool:
        """Puts it in; False: it does not compile, or to the same code."""
        path = self.root / mutant.file
        path.write_text(mutant.text)
        os.utime(path, (0, 0))  # nobody builds it again
        if not mutant.file.endswith(".c"):
            return _code(mutant.text) not in ("", _code((ROOT / mutant.file).read_text()))
        changed = self.root / "changed"
        shutil.rmtree(changed, ignore_errors=True)
        changed.mkdir()
        try:
            self._compile(path, changed)
        except build.BuildError:
            return False
        name = f"{path.stem}.o"
        if (changed / name).read_bytes() == (self._objects / name).read_bytes():
            return False
        self._link(self._objects, changed)
        return True

    def restore(self, mutant: Mutant) -> None:
        """Takes it out again."""
        shutil.copy(ROOT / mutant.file, self.root / mutant.file)
        if mutant.file.endswith(".c"):
            self._link(self._objects)

    def run(self, check: Check) -> str | None:
        """None where it passes; else in a few words why not.

        A failure that names no history, no test and no report may be the machine's: it counts where it comes again.
        """
        code, why = self._once(check)
        if code == -signal.SIGXCPU:
            return f"{check.name}: no end within {check.seconds} s of the processor"
        if code == -signal.SIGKILL:
            return f"{check.name}: no end, and {STALLED_S} s without any use of the processor"
        if code and not why:
            code, why = self._once(check)
            why = why or f"ended with {code}, twice"
        return f"{check.name}: {' '.join(why.split())[:150]}" if code else None

    def _once(self, check: Check) -> tuple[int, str]:
        """Its exit code, and the first line that says what failed."""
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            pid = os.fork()
            if not pid:
                self._child(check, said.fileno())
            code = _end_of(pid)
            said.seek(0)
            text = said.read()
        said_why = (
            line for line in text.splitlines() if line.startswith(("seed ", "FAILED", "E  ")) or "ERROR" in line
        )
        return code, next(said_why, "")

    def _child(self, check: Check, said: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.chdir(self.root)
            resource.setrlimit(resource.RLIMIT_CPU, (check.seconds, check.seconds + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            command = (*(("-m", "tests.mutants.histories") if check.histories else ()), *check.command)
            loaded = library.core.cache_info().currsize  # the program as it is: then another process has to load
            if check.histories and not loaded:
                library.LIB = self.native / "lib"
                code = histories.play(check.command)
                sys.stdout.flush()
            else:
                folders = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
                environment = {**os.environ, "PYTHONPATH": folders, "PYTHONDONTWRITEBYTECODE": "1"}
                environment.pop("KVPROBE_NATIVE_LIB", None)
                os.execve(sys.executable, [sys.executable, *command], environment)
        finally:
            os._exit(code)


def _end_of(pid: int) -> int:
    """Its exit code. One that hangs without using the processor is killed."""
    used, since = -1, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        now = _ticks(pid)
        if now != used:
            used, since = now, time.monotonic()
        if time.monotonic() - since > STALLED_S:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)


def _ticks(pid: int) -> int:
    """Ticks of the processor that it and all of its session have used, dead ones included that were waited for."""
    total = 0
    for process in Path("/proc").iterdir():  # not by glob: it fails where a process ends as it looks
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (process / "stat").read_text().rpartition(") ")[2].split()
            if words[3] == str(pid):  # of its session
                total += sum(map(int, words[11:15]))
    return total
