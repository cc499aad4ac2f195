"""How late the stacks are that `kvprobe run` takes now and then, and what a look costs: of a program that tells time.

    python benchmarks/stack_looks.py [--looks 40]

The program is in another function each half millisecond, so a stack says when it was so. Printed is how long before the
time that kvprobe notes, and the CPU time of a look, mostly py-spy's own to begin.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from kvprobe.probe import stacks

SLOT_NS, SLOTS = 500_000, 1_000
PROGRAM = f"""
import time
functions = []
for slot in range({SLOTS}):
    space = {{"time": time}}
    exec(f"def slot_{{slot}}(end):\\n    while time.monotonic_ns() < end: pass", space)
    functions.append(space[f"slot_{{slot}}"])
print("begun", flush=True)
while True:
    slot = time.monotonic_ns() // {SLOT_NS}
    functions[slot % {SLOTS}]((slot + 1) * {SLOT_NS})
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=int, default=40)
    looks = parser.parse_args().looks
    late_ms: list[float] = []
    cost_ms: list[float] = []
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None  # it was asked for
            process.stdout.readline()
            while len(late_ms) < looks:
                before = os.times()
                looked_ns, found = stacks.sample(process.pid, {process.pid})
                after = os.times()
                cost_ms.append(1e3 * sum(after[2:4]) - 1e3 * sum(before[2:4]))
                names = [frame.split(" ")[0] for one in found for frame in one["frames"] if frame.startswith("slot_")]
                if names:  # else it was between two of them
                    slot = int(names[0].removeprefix("slot_"))
                    late_ms.append((looked_ns // SLOT_NS - slot) % SLOTS * SLOT_NS / 1e6)
                time.sleep(0.01)
        finally:
            process.kill()
    late_ms.sort()
    print(f"late by {late_ms[0]:.1f} to {late_ms[-1]:.1f} ms, of {looks} looks, to half a millisecond")
    print(f"CPU time of a look: {statistics.median(cost_ms):.0f} ms (median)")


if __name__ == "__main__":
    main()
