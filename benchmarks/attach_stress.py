"""Attaches to programs and detaches again, hundreds of times on a busy machine, and looks whether they notice.

Three kinds of turns, one after the other:

- in and out of a C program that copies on four threads, forks, spawns, and loads and unloads libraries, and of a Python
  program whose threads copy, fork, start programs and import. Both count for themselves: every child ends with 0, so do
  the programs, and what is recorded between two pauses is exactly what they made;
- `kvprobe attach` is interrupted, terminated or killed at a random moment: the program goes on, and is recorded only
  where the command was done;
- the program is killed at a random moment while `kvprobe attach` is at work: the command ends and says so.

    python benchmarks/attach_stress.py [--turns 200] [--busy 2] [--seed 1] [--runtime LIBCUDART]

`--seconds N` is a soak in place of those: both programs run for so long, and every five seconds (`--every`) each is
attached to, counted and detached from; nothing of it may be left in them: memory, descriptors, threads.

`--runtime`: the CUDA runtime that the programs are linked with, on a machine with a GPU; else the embedded one.

Prints deaths, changed statuses, how long threads were held, and how long attaching took; exit code 1 when anything was
not so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import KvprobeError
from kvprobe.instrument import attach
from kvprobe.native import build
from kvprobe.probe.ring import read_ring

HERE = Path(__file__).resolve().parent
TODO, PAUSED, COPIES, BYTES, CHILDREN, BAD_CHILDREN, BAD_LIBRARIES = range(7)
MEMORY_SLACK_MIB = 16  # a program's own ups and downs
COPYING = 4  # threads that copy, in either program
ENDS_S, HELD_MS, LETS_GO_S = 5.0, 100.0, 1.0  # what is promised
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

COUNTS = "COUNTS"  # in a command: the file that it counts in

PYTHON = """
import ctypes, importlib, os, subprocess, sys, threading, time
import numpy as np
words, lock = np.memmap(sys.argv[1], "<u8", "r+"), threading.Lock()
plugin, runtime = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[3])
def copies():
    device, host = ctypes.c_void_p(), ctypes.c_void_p()
    assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(8192))
    assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(8192), 0)
    while words[0] != 2:
        if words[0] == 1:
            with lock: words[1] += 1
            while words[0] == 1: time.sleep(0.0005)
            with lock: words[1] -= 1
        with lock:
            for i in range(20):
                assert plugin.copy_by_plugin(device, host, ctypes.c_size_t(4096), 1, None) == 0
            words[2] += 20; words[3] += 20 * 4096
def ended(status):
    words[4] += 1; words[5] += status != 0
def forks():
    while words[0] != 2:
        child = os.fork()
        if not child: os._exit(0)
        ended(os.waitpid(child, 0)[1]); time.sleep(0.001)
def starts():
    while words[0] != 2:
        ended(subprocess.run(["true"]).returncode); time.sleep(0.005)
def imports():
    while words[0] != 2:
        sys.modules.pop("_decimal", None); importlib.import_module("_decimal"); time.sleep(0.002)
threads = [threading.Thread(target=f) for f in (copies,) * 4 + (forks, starts, imports)]
for t in threads: t.start()
for t in threads: t.join()
"""


class Watched:
    """A program while it runs."""

    def __init__(self, command: list[Any], counts: Path) -> None:
        counts.write_bytes(bytes(4096))
        self.words = np.memmap(counts, "<u8", "r+")
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
        env |= {"KVHOST_LATENCY_US": "0.001"}
        words = [str(counts if word is COUNTS else word) for word in command]
        self.process = subprocess.Popen(words, env=env)
        self.pid = self.process.pid
        self.wait_for(lambda: int(self.words[COPIES]) > 100)

    def wait_for(self, true: Callable[[], bool], seconds: float = 60) -> None:
        """It must not end before."""
        end = time.monotonic() + seconds
        while not true():
            if self.process.poll() is not None:
                raise RuntimeError(f"the program ended with {self.process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError("the program does not go on")
            time.sleep(0.001)

    def more(self, copies: int = 200) -> None:
        """It goes on."""
        goal = int(self.words[COPIES]) + copies
        self.wait_for(lambda: int(self.words[COPIES]) >= goal)

    def pause(self) -> tuple[int, int]:
        """Copies and bytes so far, all threads between two calls."""
        self.words[TODO] = 1
        self.wait_for(lambda: int(self.words[PAUSED]) == COPYING)
        return int(self.words[COPIES]), int(self.words[BYTES])

    def go(self) -> None:
        """After a pause."""
        self.words[TODO] = 0
        self.wait_for(lambda: int(self.words[PAUSED]) == 0)

    def end(self) -> str:
        """Empty where it ended as it should, with every child."""
        self.words[TODO] = 2
        code = self.process.wait(60)
        bad = {"status": code, "children": int(self.words[BAD_CHILDREN]), "libraries": int(self.words[BAD_LIBRARIES])}
        return ", ".join(f"{name}: {count}" for name, count in bad.items() if count)


class Tally:
    """What was seen, and what should not have been."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.held_ms: list[float] = []
        self.attach_s: list[float] = []
        self.seen: Counter[str] = Counter()

    def say(self, what: str) -> None:
        """Something was not as it should be."""
        print(f"WRONG: {what}", flush=True)
        self.wrong.append(what)

    def refused(self, error: KvprobeError) -> None:
        """What was asked is to be tried again: a thread got no processor in time, or stayed in the allocator."""
        if str(error).endswith("try again"):
            self.seen[f"refused: {str(error).rpartition(': ')[0].rpartition(': ')[2]}"] += 1
        else:
            self.say(str(error))


def recorded(folder: Path, pid: int) -> tuple[int, int]:
    """Copies and bytes in a process's ring file."""
    for path in folder.glob("*.kvp"):
        ring = read_ring(path)
        if ring.pid == pid:
            slots = ring.slots()
            slots = slots[slots["call"] == 1]
            return int(slots["count"].sum()), int(slots["bytes"].sum())
    return 0, 0


def in_and_out(program: Watched, folder: Path, tally: Tally) -> None:
    """One turn."""
    folder.mkdir()
    start = time.monotonic()
    attachment = attach.Attachment(program.pid, build.LIB / attach.LIBRARY, folder, "totals", 1 << 30)
    try:
        attachment.result()
        attachment.keep()
    except KvprobeError as error:
        tally.refused(error)
        attachment.close()
        if attach.recorded_into(program.pid):
            tally.say("it was refused, and the program is recorded")
        shutil.rmtree(folder)
        return
    finally:
        attachment.close()
        tally.attach_s.append(time.monotonic() - start)
        tally.held_ms.append(attachment.held_ns / 1e6)
    own, first = program.pause(), recorded(folder, program.pid)
    program.go()
    program.more()
    later, second = program.pause(), recorded(folder, program.pid)
    program.go()
    if np.subtract(second, first).tolist() != np.subtract(later, own).tolist():
        tally.say(f"recorded {np.subtract(second, first)}, made {np.subtract(later, own)}")
    tally.seen["copies counted"] += int(later[0] - own[0])
    while attach.recorded_into(program.pid):
        start = time.monotonic()
        try:
            attach.detach(program.pid)
        except KvprobeError as error:
            tally.refused(error)
        tally.attach_s.append(time.monotonic() - start)
    shutil.rmtree(folder)


def ended_early(program: Watched, folder: Path, tally: Tally, chance: random.Random) -> None:
    """`kvprobe attach` meets a signal; the program goes on, and is recorded where the command was done alone."""
    number = chance.choice(SIGNALS)
    command = [sys.executable, "-m", "kvprobe", "attach", str(program.pid), "-o", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(chance.uniform(0.1, 1.0))
    process.send_signal(number)
    out = process.communicate()[0]
    let_go = time.monotonic()
    with contextlib.suppress(RuntimeError):  # it lets go: none is recorded, or the command was done
        program.wait_for(lambda: "recording process" in out or not attach.recorded_into(program.pid), 3 * LETS_GO_S)
    late = time.monotonic() - let_go
    kept = attach.recorded_into(program.pid) is not None
    tally.seen[f"{signal.Signals(number).name}, {'attached' if kept else 'not attached'}"] += 1
    if late > LETS_GO_S:
        tally.say(f"let go after {late:.1f} s of {number}")
    program.more()
    if kept:
        attach.detach(program.pid)
        (folder / "detached").touch()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "observer.pid").read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def killed_program(command: list[Any], folder: Path, tally: Tally, chance: random.Random) -> None:
    """The program is killed while `kvprobe attach` is at work."""
    counts = folder.with_suffix(".counts")
    program = Watched(command, counts)
    words = [sys.executable, "-m", "kvprobe", "attach", str(program.pid), "-o", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(chance.uniform(0.1, 0.8))
    program.process.kill()
    start = time.monotonic()
    error = process.communicate()[1]
    took = time.monotonic() - start
    program.process.wait()
    tally.seen[f"program killed, attach ended with {process.returncode}"] += 1
    if took > ENDS_S:
        tally.say(f"attach ended {took:.1f} s after the program")
    if process.returncode and (process.returncode not in (1, 2) or len(error.splitlines()) != 1):
        tally.say(f"attach said {error!r}, and ended with {process.returncode}")
    shutil.rmtree(folder, ignore_errors=True)


def held(pid: int) -> tuple[int, int, int]:
    """MiB, descriptors and threads of a process, the least of some looks: the programs open files as well."""
    proc = Path("/proc", str(pid))
    looks = []
    for _ in range(20):
        pages = int((proc / "statm").read_text().split()[1])
        mib = pages * os.sysconf("SC_PAGESIZE") >> 20
        looks.append((mib, len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))))
        time.sleep(0.005)
    return min(one[0] for one in looks), min(one[1] for one in looks), min(one[2] for one in looks)


def soak(programs: dict[str, Watched], folder: Path, tally: Tally, seconds: float, every: float) -> None:
    """In and out of each, for so long."""
    began, turn, shown = time.monotonic(), 0, 0.0
    first: dict[str, tuple[int, int, int]] = {}
    while (passed := time.monotonic() - began) < seconds:
        for name, program in programs.items():
            in_and_out(program, folder / f"soak-{turn}-{name}", tally)
            if passed > seconds / 20:  # what is made once was made
                first.setdefault(name, held(program.pid))
        turn += 1
        if passed >= shown:
            now = {name: held(program.pid) for name, program in programs.items()}
            print(f"{passed:<6.0f} s {turn:>5} turns, {len(tally.wrong)} wrong, {now}", flush=True)
            shown += seconds / 10
        time.sleep(max(0.0, began + turn * every - time.monotonic()))
    tally.seen["turns of the soak"] = turn
    for name, program in programs.items():
        before, after = first[name], held(program.pid)
        print(f"{name}: MiB, descriptors, threads: {before} at first, {after} at last")
        if after[0] > before[0] + MEMORY_SLACK_MIB or after[1:] > before[1:]:
            tally.say(f"{name} holds {after}, and held {before}")


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processors are kept busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def programs(folder: Path, cuda: Path | None) -> dict[str, list[Any]]:
    """Commands by name, linked with the runtime at `cuda`, or the embedded one."""
    build.build()
    library = cuda or build.LIB / "libkvprobe_hostrt.so"
    runtime = [f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    cc = [*build.compiler(), "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread"]
    subprocess.run([*cc, "-o", folder / "stress", HERE / "attach_stress.c", *runtime], check=True)
    source = HERE.parent / "tests" / "native" / "programs" / "copy_plugin.c"
    subprocess.run([*cc, "-shared", "-fPIC", "-o", folder / "plugin.so", source, *runtime], check=True)
    return {
        "C": [folder / "stress", COUNTS],
        "Python": [sys.executable, "-c", PYTHON, COUNTS, folder / "plugin.so", library],
    }


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="a soak of so long")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two turns of the soak")
    parser.add_argument("--runtime", type=Path, help="libcudart of a machine with a GPU")
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as temporary, busy(options.busy):
        folder = Path(temporary)
        commands = programs(folder, options.runtime)
        if options.seconds:
            soaked(commands, folder, tally, options)
        else:
            stressed(commands, folder, tally, options)
    for what, count in sorted(tally.seen.items()):
        print(f"{what}: {count:,}")
    print(f"threads held, ms: median {np.median(tally.held_ms):.2f}, most {max(tally.held_ms):.2f}")
    print(f"attaching or detaching, s: median {np.median(tally.attach_s):.2f}, most {max(tally.attach_s):.2f}")
    if max(tally.held_ms) > HELD_MS or max(tally.attach_s) > ENDS_S:
        tally.say("held or attached for too long")
    print(f"wrong: {len(tally.wrong)}")
    return bool(tally.wrong)


def ended(name: str, program: Watched, tally: Tally) -> None:
    """A program and its children end as they should."""
    said = program.end()
    if said:
        tally.say(f"{name}: {said}")
    tally.seen[f"children of {name}"] += int(program.words[CHILDREN])


def soaked(commands: dict[str, list[Any]], folder: Path, tally: Tally, options: argparse.Namespace) -> None:
    """All programs at once."""
    watched: dict[str, Watched] = {}
    try:
        for name, command in commands.items():
            watched[name] = Watched(command, folder / f"counts-{name}")
        soak(watched, folder, tally, options.seconds, options.every)
        for name, program in watched.items():
            ended(name, program, tally)
    except RuntimeError as error:
        tally.say(str(error))
    finally:
        for program in watched.values():
            program.process.kill()
            program.process.wait()


def stressed(commands: dict[str, list[Any]], folder: Path, tally: Tally, options: argparse.Namespace) -> None:
    """One program after the other, and those that are killed."""
    chance = random.Random(options.seed)
    for name, command in commands.items():
        program = Watched(command, folder / "counts")
        try:
            for turn in range(options.turns // 2):
                in_and_out(program, folder / f"run-{turn}", tally)
                if turn % 5 == 4:
                    ended_early(program, folder / f"early-{turn}", tally, chance)
            ended(name, program, tally)
        except RuntimeError as error:
            tally.say(f"{name}: {error}")
            program.process.kill()
            program.process.wait()
        print(f"{name}: {len(tally.wrong)} wrong so far", flush=True)
    for turn in range(options.turns // 10):
        killed_program(commands["C"], folder / f"killed-{turn}", tally, chance)


if __name__ == "__main__":
    raise SystemExit(main())
