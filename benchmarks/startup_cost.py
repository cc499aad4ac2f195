"""What the start-up part costs a process, with and without a server in it: CPU time of its own code, in new processes.

    python benchmarks/startup_cost.py [--times 200] [--json OUT]

* `idle`: installed, the environment asks for nothing (any program on a machine with kvprobe);
* `run`: under a run folder, as every process of a server under `kvprobe run`;
* `carried`: the same in a Python of another environment, by PYTHONPATH and `sitecustomize`;
* `import`: what one more import of the program costs then (the least of 20 in a process, less the same without);
* a server's name: all that a server which offloads nothing pays under a run folder, from the look for its package to
  the last stand-in, in the import of the modules that every program with it imports; of the servers that are installed
  in this Python. What the import itself takes is left out: the search for its files, and their code.

The processes run with -S and do by themselves, between two readings of their CPU clock, what Python does at its start;
so neither Python's own start nor what else the machine does is in the figures. Each first asks in vain for a module in
every folder of its path, as Python's own start does (for `usercustomize`): the first to ask a folder has it read.
Printed are the least and the median.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import kvprobe.instrument

START = Path(kvprobe.instrument.__file__).parent
CLOCK = """
import os, sys, time  # what site has imported by then
now = time.process_time_ns
try:
    import usercustomize
except ImportError:
    pass
"""
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


# server -> what any program that uses it imports
USUAL = {
    "transformers": "transformers.generation.utils",
    "accelerate": "accelerate.hooks",
    "diffusers": "diffusers.models.modeling_utils",
    "vllm": "vllm.v1.engine.llm_engine",
    "sglang": "sglang.srt.server_args",
    "lmcache": "lmcache",
}
SERVER = """
import kvprobe_startup as part
spent, inner, looked = [0], [], [0]
def timed(func, counts):
    def wrapper(*args, **kwargs):
        began = now()
        inner.append(0)
        try:
            return func(*args, **kwargs)
        finally:
            took = now() - began
            spent[0] += (took - inner.pop()) if counts else 0
            if inner:
                inner[-1] += took
    return wrapper
own, find = part._Waiting.find_spec, timed(part._Waiting.find_spec, True)
def find_spec(self, name, path=None, target=None):
    if name in self.awaited:
        return find(self, name, path, target)
    looked[0] += 1  # too quick for the clock: counted, and measured below
    return own(self, name, path, target)
part._found = timed(part._found, False)
part._Waiting.find_spec = find_spec
part._Waiting.put = timed(part._Waiting.put, True)
part.start()
spent[0] = 0
import {module}
(finder,) = [one for one in sys.meta_path if isinstance(one, part._Waiting)] or [None]
if finder is None:
    print(-1)
else:
    rounds = []
    for _ in range(20):
        began = now()
        for _ in range(1000):
            own(finder, "some.other.module", None, None)
        rounds.append((now() - began) // 1000)
    print(spent[0] + looked[0] * min(rounds))
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
        did = f"began = now()\nexec({line!r})\nprint(now() - began)"
        arms = {
            "idle": (did, here),
            "run": (did, watched),
            "carried": ("began = now()\nimport sitecustomize\nprint(now() - began)", carried),
            "import": (f"import sitecustomize{IMPORTS}", carried),
            "import, bare": (IMPORTS, kept),
        }
        found: dict[str, list[int]] = {name: [] for name in arms}
        for _ in range(options.times):
            for name, (code, env) in arms.items():
                found[name].append(spent_ns(code, env))
        for name, module in USUAL.items():
            if importlib.util.find_spec(name) is None:
                continue
            env = {**watched, "PYTHONPATH": os.pathsep.join([str(START / "carried"), *filter(None, sys.path)])}
            found[name] = [spent_ns(SERVER.format(module=module), env) for _ in range(min(options.times, 10))]
            if min(found[name]) < 0:
                raise SystemExit(f"{name}: its import alone let the adapters in")
    out = {name: {"least_ns": min(took), "median_ns": round(statistics.median(took))} for name, took in found.items()}
    for name, one in out.items():
        print(f"{name:13} least {one['least_ns'] / 1e6:7.3f} ms   median {one['median_ns'] / 1e6:7.3f} ms")
    if options.json:
        options.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
