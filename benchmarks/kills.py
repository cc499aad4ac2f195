"""Kills recorded programs at random moments, and checks that what they recorded is whole and exact up to the kill.

A turn starts a program, kills it without warning (SIGKILL) after a random time, start-up included, and reads what is
left. Two kinds of turns alternate:

- `kvprobe run` of a program whose one to four threads copy, some of them ending and beginning anew all the time. Killed
  is the program, or first the observer, or first `kvprobe run` itself, or all at once;
- an engine, with two threads that load and store through it.

The program counts for itself, in memory that outlives it, the calls (of the engine: transfers) that each thread began
and that returned. Checked in every turn: the recording opens; it holds no call less than returned and none more than
was begun, so at most one for each thread beside those that it saw return; the bytes are as many as the calls say; and
where the program alone was killed, `kvprobe run` ended as the program did.

    python benchmarks/kills.py [--turns 200] [--seed 1]

Prints what was killed when, and how many calls were in flight; exit code 1 when anything was not so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import KvprobeError
from kvprobe.native import build
from kvprobe.probe.ring import read_ring
from kvprobe.recordings import open_recording

HERE = Path(__file__).resolve().parent
COPY_BYTES, BLOCK, BLOCKS = 64, 4096, 64  # of a copy of kills.c; of the engine's transfers, and its pools
FIRST, APART = 8, 8  # of the words: where the threads' begin, and how far they are apart
LONGEST_S = 0.8  # after the program has begun; a third of the kills come before that
WAYS = ("program", "observer first", "kvprobe run first", "all at once")


def words_of(path: Path) -> Any:
    """The words that a program counts in, all 0."""
    path.write_bytes(bytes(4096))
    return np.memmap(path, "<u8", "r+")


def engine(counts: Path) -> None:
    """Loads and stores until it is killed; the program of the second kind."""
    import threading

    from kvprobe.cuda import device_region, find_runtime, host_region
    from kvprobe.offload import BlockPool, OffloadEngine

    words = np.memmap(counts, "<u8", "r+")
    runtime = find_runtime("host")
    pools = [BlockPool(runtime, [make(runtime, BLOCK * BLOCKS)], BLOCK) for make in (device_region, host_region)]
    offload = OffloadEngine(runtime, *pools, policy="pooled")
    words[0] = os.getpid()

    def transfers(at: int, ids: range, request: Callable[..., Any]) -> None:
        while True:
            words[at] += 1
            request(ids, ids).wait()
            words[at + 1] += 1

    for number, request in enumerate((offload.load, offload.store)):
        ids = range(number * 8, number * 8 + 8)
        threading.Thread(target=transfers, args=(FIRST + number * APART, ids, request)).start()


def kill(pid: int) -> None:
    """Without warning; whoever has gone is left alone."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def observer_of(run: Path) -> int:
    """The pid of the observer of a run; 0 where there is none yet."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kvprobe.instrument.observer" in line and os.fsencode(run) in line:
                return int(entry.name)
    return 0


def begins(process: subprocess.Popen[bytes], words: Any, seconds: float) -> None:
    """Waits until the program has begun and `seconds` have passed; from a time before 0: may come before that."""
    if seconds < 0:
        time.sleep(-seconds)
        return
    while not words[0] and process.poll() is None:
        time.sleep(0.002)
    time.sleep(seconds)


def judge(run: Path, words: Any, call: str, each: int) -> tuple[list[str], int, int]:
    """What is wrong with what was left; the calls recorded, and those that had begun and not returned."""
    begun, returned = int(words[FIRST::APART].sum()), int(words[FIRST + 1 :: APART].sum())
    recorded = size = 0
    wrong = []
    for path in run.glob("*.kvp"):
        calls, _, bytes_of = read_ring(path).calls().get(call, (0, 0, 0))
        recorded, size = recorded + calls, size + bytes_of
    if not returned <= recorded <= begun:
        wrong.append(f"{recorded:,} {call} recorded, {returned:,} returned, {begun:,} begun")
    if size != recorded * each:
        wrong.append(f"{size:,} bytes of {recorded:,} {call}")
    try:
        open_recording(run)
    except KvprobeError as error:
        if returned:
            wrong.append(f"does not open: {error}")
    return wrong, recorded, begun - returned


def a_run(chance: random.Random, program: Path, folder: Path) -> tuple[str, list[str], int, int]:
    """One turn of the first kind."""
    run, words = folder / "run", words_of(folder / "counts")
    how = chance.choice(WAYS)
    after = chance.uniform(-LONGEST_S / 2, LONGEST_S)
    command: list[str | Path] = [sys.executable, "-m", "kvprobe", "run", "--report", "none", "-o", run, "--", program]
    command += [folder / "counts", str(chance.randint(1, 4)), chance.choice(["0", "300"])]
    env = os.environ | {"KVHOST_LATENCY_US": "0.001", "KVHOST_SUBMIT_NS": "0"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=env, start_new_session=True)
    begins(process, words, after)
    observer = observer_of(run) if how in ("observer first", "all at once") else 0
    if how == "kvprobe run first":
        kill(process.pid)
    kill(observer)
    if how in ("observer first", "kvprobe run first"):
        time.sleep(chance.uniform(0, 0.1))
    if how == "all at once":
        kill(process.pid)
    alone = how == "program" and bool(words[0])
    if words[0]:
        kill(int(words[0]))
    else:
        os.killpg(process.pid, signal.SIGKILL)  # kvprobe run, and the command that it may just be starting
    wrong = []
    try:
        code = process.wait(60)
        if alone and code != -signal.SIGKILL:
            wrong.append(f"kvprobe run ended with {code}: {(folder / 'said').read_text().strip()}")
    except subprocess.TimeoutExpired:
        wrong.append("kvprobe run did not end")
        kill(process.pid)
        process.wait()
    while words[0] and Path(f"/proc/{int(words[0])}").exists():
        time.sleep(0.002)
    found, recorded, flying = judge(run, words, "cudaMemcpyAsync", COPY_BYTES)
    return how if words[0] else f"{how}, before it began", wrong + found, recorded, flying


def an_engine(chance: random.Random, folder: Path) -> tuple[str, list[str], int, int]:
    """One turn of the second kind."""
    run, words = folder / "run", words_of(folder / "counts")
    run.mkdir()
    env = os.environ | {"KVPROBE_RUN": str(run), "KVHOST_LATENCY_US": "0.001"}
    command = [sys.executable, str(HERE / "kills.py"), "--engine", str(folder / "counts")]
    process = subprocess.Popen(command, env=env)
    begins(process, words, chance.uniform(-LONGEST_S / 2, LONGEST_S))
    kill(process.pid)
    wrong = [] if process.wait() == -signal.SIGKILL else ["the engine ended by itself"]
    found, recorded, flying = judge(run, words, "transfer", 8 * BLOCK)
    return "engine" if words[0] else "engine, before it began", wrong + found, recorded, flying


def main() -> int:
    """Plays the turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        engine(asked.engine)
        return 0
    build.build()
    kinds: Counter[str] = Counter()
    flying: Counter[int] = Counter()
    calls = bad = 0
    with tempfile.TemporaryDirectory() as made:
        program = Path(made) / "kills"
        runtime = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
        source = str(HERE / "kills.c")
        compiled = [*build.compiler(), "-std=gnu11", "-O2", "-pthread", "-o", str(program), source, *runtime]
        subprocess.run(compiled, check=True)
        for turn in range(asked.turns):
            chance = random.Random(asked.seed * 1_000_000 + turn)
            folder = Path(made) / str(turn)
            folder.mkdir()
            how, wrong, recorded, open_calls = a_run(chance, program, folder) if turn % 2 else an_engine(chance, folder)
            kinds[how] += 1
            flying[open_calls] += 1
            calls += recorded
            bad += bool(wrong)
            for what in wrong:
                print(f"turn {turn}, {how}: {what}", flush=True)
    print(f"{asked.turns} kills, seed {asked.seed}: {bad} wrong; {calls:,} calls and transfers recorded")
    for how, count in sorted(kinds.items()):
        print(f"  {count:4d}  {how}")
    print("calls in flight at the kill: " + ", ".join(f"{n} in {count}" for n, count in sorted(flying.items())))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
