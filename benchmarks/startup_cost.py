"""What the start-up part costs a process that never imports a server: CPU time of its own code, in new processes.

    python benchmarks/startup_cost.py [--times 200] [--json OUT]

* `idle`: installed, the environment asks for nothing (any program on a machine with kvprobe);
* `run`: under a run folder, as every process of a server under `kvprobe run`;
* `carried`: the same in a Python of another environment, by PYTHONPATH and `sitecustomize`;
* `import`: what one more import of the program costs then (the least of 20 in a process, less the same without).

The processes run with -S and do by themselves, between two readings of their CPU clock, what Python does at its start;
so neither Python's own start nor what else the machine does is in the figures. Printed are the least and the median.
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

import kvprobe.instrument

START = Path(kvprobe.instrument.__file__).parent
CLOCK = "import os, sys, time; now = time.process_time_ns; "  # what site has imported by then
IMPORTS = """
least = 1 << 60
for name in ["colorsys", "this_does_not_exist"] * 10:
    began = now()
    try:
        __import__(name)
    except ImportError:
        pass
    if name != "colorsys":
        least = min(least, now() - began)
print(least)
"""


def spent_ns(code: str, env: dict[str, str]) -> int:
    """The number that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", CLOCK + code], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "PYTHON")) and k != "LD_PRELOAD"}
    line = (START / "zz_kvprobe.pth").read_text().strip()
    with tempfile.TemporaryDirectory() as folder:
        here = {**kept, "PYTHONPATH": str(START / "carried")}
        watched = {**here, "KVPROBE_RUN": folder}
        carried = {**watched, "KVPROBE_CARRY": str(START.parents[1])}
        did = f"began = now(); exec({line!r}); print(now() - began)"
        arms = {
            "idle": (did, here),
            "run": (did, watched),
            "carried": ("began = now(); import sitecustomize; print(now() - began)", carried),
            "import": (f"import sitecustomize{IMPORTS}", carried),
            "import, bare": (IMPORTS, kept),
        }
        found: dict[str, list[int]] = {name: [] for name in arms}
        for _ in range(options.times):
            for name, (code, env) in arms.items():
                found[name].append(spent_ns(code, env))
    out = {name: {"least_ns": min(took), "median_ns": round(statistics.median(took))} for name, took in found.items()}
    for name, one in out.items():
        print(f"{name:13} least {one['least_ns'] / 1e6:7.3f} ms   median {one['median_ns'] / 1e6:7.3f} ms")
    if options.json:
        options.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    sys.exit(main())
