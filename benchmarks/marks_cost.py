"""What a program loses to timing events in its streams, second by second: steps with a wait a layer, and small copies.

    python benchmarks/marks_cost.py [--rounds 5] [--seconds 4]

A process makes both kinds of work by turns for so many seconds: a step of 32 layers, each a load beside four kernels
and a wait of the compute stream for it; and 256 copies of 4 KiB, then a wait. It runs as it is, under `kvprobe run`
without marks, and with them, each after each. Printed: what a step and a copy take as a mean, in the first second and
after it, and how much more that is than without marks and than unwatched: the median of the rounds, and its range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "corpus"), str(ROOT)]

from copy_loop import loop_of  # noqa: E402
from device import H2D, Device, now  # noqa: E402

WAYS = ("unwatched", "off", "auto")
LAYERS, KERNEL_NS, COPIES = 32, 8_000, 256


def work(seconds: float) -> dict[str, list[float]]:
    """Mean ns of a step and of a copy, by whole seconds since the first of them began."""
    d = Device(64 << 20)
    copies = loop_of(d, 4096, 1)
    size = 64 << 10
    spent: dict[str, dict[int, list[int]]] = {"step": {}, "copy": {}}
    began = now()
    while (at := now()) - began < seconds * 1e9:
        second = int((at - began) / 1e9)
        for layer in range(LAYERS):
            d.copy(d.device + layer * size, d.host + layer * size, size, H2D, d.copies[0])
            d.order(d.compute, d.copies[0], layer)
            for _ in range(4):
                d.launch(KERNEL_NS)
        d.sync(d.compute)
        spent["step"].setdefault(second, []).append(now() - at)
        for _ in range(4):
            begin = now()
            copies(COPIES, d.copies[1])
            spent["copy"].setdefault(second, []).append((now() - begin) // COPIES)
            d.sync(d.copies[1])
    return {name: [statistics.fmean(some) for _, some in sorted(by.items())] for name, by in spent.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        print(json.dumps(work(given.seconds)))
        return 0
    found: dict[str, dict[str, list[list[float]]]] = {way: {"step": [], "copy": []} for way in WAYS}
    for number in range(given.rounds):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            for name, by_second in ran(way, given.seconds).items():
                found[way][name].append(by_second)
    for name, unit in (("step", "µs"), ("copy", "ns")):
        for label, part in (("first second", slice(0, 1)), ("after it", slice(1, None))):
            means = {way: [statistics.fmean(one[part]) for one in found[way][name]] for way in WAYS}
            plain = statistics.median(means["unwatched"])
            print(f"{name}, {label}: unwatched {plain / (1e3 if unit == 'µs' else 1):,.1f} {unit}", end="")
            for way, against in (("off", "unwatched"), ("auto", "off"), ("auto", "unwatched")):
                more = [one - other for one, other in zip(means[way], means[against], strict=True)]
                share = [100 * one / other for one, other in zip(more, means[against], strict=True)]
                print(
                    f"; marks {way} less {against}: {statistics.median(more):+,.0f} ns, "
                    f"{statistics.median(share):+.2f}% ({min(share):+.2f} to {max(share):+.2f})",
                    end="",
                )
            print(flush=True)
    return 0


def ran(way: str, seconds: float) -> dict[str, list[float]]:
    """The work in a process of its own, watched this way."""
    program = [sys.executable, __file__, "--work", "--seconds", str(seconds)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "KVPROBE_MARKS": way}
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "kvprobe", "run", "--no-stacks", "--report", "none", "-o", f"{folder}/run", "--"]
        command = program if way == "unwatched" else [*run, *program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(done.stderr)
    said: dict[str, list[float]] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return said


if __name__ == "__main__":
    sys.exit(main())
