"""Is a full queue named, at every level of detail? Programs that fill one, and programs that only look alike, N times.

    python benchmarks/queue_truth.py [--runs 20] [--detail copies totals] [--only NAME ...]

Each program runs under `kvprobe run` and says itself whether its queue was full: by its own clock, how long its calls
took where the queue had no slot left. It runs on a GPU where there is one, else on the host runtime, whose queues are
bounded as a GPU's are. Prints, for each program and level of detail, how often the full queue was named, undecided or
missed; exit code 1 when a full queue was not named, or one was named that was never full.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "corpus"), str(ROOT)]

from copy_loop import loop_of  # noqa: E402
from device import H2D, Device, now  # noqa: E402

from kvprobe.cuda.hostruntime import HostStats  # noqa: E402

KiB = 1 << 10
# The host runtime as fast as a link: a copy of 16 KiB takes 2.5 us, as it does on an H200.
HOST = {"KVHOST_H2D_GBPS": "8", "KVHOST_D2H_GBPS": "8", "KVHOST_LATENCY_US": "0.5"}
PROGRAMS: dict[str, tuple[Callable[[Device], None], bool]] = {}


def program(full: bool) -> Callable[[Callable[[Device], None]], Callable[[Device], None]]:
    """Registers a program that fills its queue, or one that never does."""

    def register(body: Callable[[Device], None]) -> Callable[[Device], None]:
        PROGRAMS[body.__name__] = body, full
        return body

    return register


FILLED = 900  # outstanding by a program's own clock, which is off by a tenth; a queue takes 1,021 (H100, H200)
TRUTH = {"outstanding": 0}  # at most, where a program waited for its stream


def loads(d: Device, count: int, size: int = 16 * KiB, wait: bool = False) -> None:
    """Copies in a row; `wait`: for their end, which tells how many were outstanding."""
    loop = loop_of(d, size, d.size // size - 1)
    last = min(count, 512)
    loop(count - last, d.copies[0])
    begin = now()
    loop(last, d.copies[0])
    pace = (now() - begin) / last
    if wait:
        TRUTH["outstanding"] = max(TRUTH["outstanding"], round(d.sync(d.copies[0]) / pace))


# ---- full ------------------------------------------------------------------------------------------------------------


@program(full=True)
def small_blocks(d: Device) -> None:
    loads(d, 40_000, wait=True)


@program(full=True)
def small_blocks_for_long(d: Device) -> None:
    """More than the detail holds: what is kept shows no call with a slot."""
    loads(d, 150_000, wait=True)


@program(full=True)
def small_blocks_from_python(d: Device) -> None:
    """A call at the full queue costs little more than one with a slot: Python takes most of the time between."""
    if d.gpu:  # there Python is the slower one, and no queue fills
        loads(d, 40_000, wait=True)
        return
    for i in range(40_000):
        at = i % 1024 * 16 * KiB
        d.lib.cudaMemcpyAsync(d.device + at, d.host + at, 16 * KiB, H2D, d.copies[0])


@program(full=True)
def small_blocks_by_request(d: Device) -> None:
    for _ in range(4):
        for _ in range(96):
            loads(d, 256)
            until = now() + 100_000
            while now() < until:
                pass
        loads(d, 1024, wait=True)


@program(full=True)
def large_blocks(d: Device) -> None:
    loads(d, 4_000, 128 * KiB, wait=True)


@program(full=True)
def small_blocks_behind_a_forward(d: Device) -> None:
    for _ in range(4):
        d.launch(12_000_000)
        d.order(d.copies[0], d.compute, 0)
        loads(d, 3_000, wait=True)


# ---- never full ------------------------------------------------------------------------------------------------------


@program(full=False)
def deep_but_never_full(d: Device) -> None:
    for _ in range(40):
        loads(d, 950, wait=True)


@program(full=False)
def requests_that_are_waited_for(d: Device) -> None:
    for _ in range(400):
        loads(d, 100)
        d.sync(d.copies[0])


@program(full=False)
def a_host_that_is_slower_than_the_device(d: Device) -> None:
    copy, total = d.lib.cudaMemcpyAsync, 0
    for i in range(30_000):
        copy(d.device, d.host, 4 * KiB, H2D, d.copies[0])
        until = now() + 8_000
        while now() < until:
            total += i


@program(full=False)
def calls_that_are_slow_at_random(d: Device) -> None:
    """Another thread of Python takes the interpreter away, and makes and destroys events all the time."""
    over = threading.Event()

    def other() -> None:
        while not over.is_set():
            for _ in range(8):
                d.lib.cudaEventDestroy(d.event())
            time.sleep(0.0002)

    thread = threading.Thread(target=other)
    thread.start()
    rng = random.Random(1)
    for _ in range(150):
        loads(d, rng.randrange(50, 500), 4 * KiB)
        d.sync(d.copies[0])
    over.set()
    thread.join()


# ---- running ---------------------------------------------------------------------------------------------------------


def record(name: str, detail: str, run: Path) -> None:
    """The program under `kvprobe run`; what it says of itself lies beside the recording."""
    command = [sys.executable, "-m", "kvprobe", "run", "--no-stacks", "--detail", detail, "--report", "none"]
    command += ["-o", str(run), "--", sys.executable, __file__, "--program", name]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        raise SystemExit(done.stderr)
    until = time.monotonic() + 60
    while not (run / "end.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    said = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    run.with_suffix(".truth.json").write_text(said)


def judged(run: Path) -> tuple[str, str]:
    """What kvprobe says of a recording: "named", "undecided" or "nothing", and why."""
    from kvprobe.diagnosis import FULL_QUEUE, examine
    from kvprobe.diagnosis.verdict import of_recording
    from kvprobe.recordings import open_recording

    recording = open_recording([run])
    found = examine(recording)
    verdict = of_recording(recording, found)
    named = [one.title for one in found.findings if one.cause in FULL_QUEUE and not one.abstains]
    if named:
        return "named", named[0]
    return ("undecided" if verdict.state == "undecided" else "nothing"), verdict.reason


def told(name: str, detail: str, runs: list[Path]) -> int:
    """Prints what was said of these recordings of one program; how many were judged wrong."""
    full = PROGRAMS[name][1]
    said: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    truths = [json.loads(run.with_suffix(".truth.json").read_text()) for run in runs]
    if full and not any("blocked" in truth for truth in truths):  # on a GPU: a host that is as slow fills no queue
        filled = [truth["outstanding"] >= FILLED or not truth["outstanding"] for truth in truths]
        runs, truths = ([one for one, is_so in zip(all_, filled, strict=True) if is_so] for all_ in (runs, truths))
        print(f"     {filled.count(False)} of {len(filled)} did not fill their queue, by their own clocks")
        if not runs:
            return 0
    deepest = [truth["outstanding"] for truth in truths]
    waited = [truth.get("blocked", -1) for truth in truths]
    for run in runs:
        word, reason = judged(run)
        said[word] += 1
        if (word == "named") is not full:
            reasons[f"{run.name}: {reason}"] += 1
    right = said["named"] if full else len(runs) - said["named"]
    print(
        f"{'ok  ' if right == len(runs) else 'MISS'} {'full' if full else 'not full':8} {name:40} {detail:7}"
        f"  named {said['named']:2}  undecided {said['undecided']:2}  nothing {said['nothing']:2}"
        f"  outstanding {min(deepest):,} to {max(deepest):,}"
        + (f"  calls that waited {min(waited):,} to {max(waited):,}" if max(waited) >= 0 else ""),
        flush=True,
    )
    for reason, count in reasons.most_common(3):
        print(f"     {count} x {reason[:240]}", flush=True)
    return len(runs) - right


def main() -> int:
    """Prints a line a program and level of detail."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--detail", nargs="+", default=["copies", "totals"])
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--program", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help="a folder that the recordings are kept in, and nothing is judged")
    parser.add_argument("--judge", type=Path, help="judge the recordings of a folder that --record made")
    given = parser.parse_args()
    if given.program:
        device = Device(64 << 20)
        loop_of(device, 1, 1)  # compiled beforehand
        PROGRAMS[given.program][0](device)
        device.synchronize()
        if not device.gpu:
            stats = HostStats()
            device.lib.kvhostStats(ct.byref(stats))
            TRUTH["blocked"] = stats.blocked_calls
        print(json.dumps(TRUTH))
        return 0
    if not Path("/dev/nvidiactl").exists():
        os.environ.update(HOST)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.record or given.judge or Path(scratch)
        for name in given.only:
            for detail in given.detail:
                runs = [folder / f"{name}-{detail}-{number}" for number in range(given.runs)]
                if not given.judge:
                    folder.mkdir(parents=True, exist_ok=True)
                    for run in runs:
                        record(name, detail, run)
                runs = [run for run in runs if run.with_suffix(".truth.json").exists()]
                if runs and not given.record:
                    wrong += told(name, detail, runs)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
