"""What handing a transfer over costs the thread that asks, told without a GPU and beside other work.

    python benchmarks/hand_over.py [--against TREE] [--rounds 5] [--kinds array list range tensor] [--json FILE]

Counted, so that no other work on the machine changes it: instructions (valgrind's callgrind, where it is installed,
with a C compiler), calls of Python and C functions, objects that the garbage collector counts (a collection comes every
700 of them), system calls (strace, where it is installed) and page faults. Timed, in rounds that take turns with the
built tree of another version where one is given: the least and the middle of requests in bursts, the copies of which
stand behind a kernel meanwhile, and of requests after the caches were filled with something else.

"Long calls": 100 rounds of requests and polls beside a heap of a million objects, as a server's is, with the garbage
collector on: which calls used more than 1 ms of their thread's CPU. What other work takes does not count there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
COUNTS = (64, 8192)
KINDS = ("array", "list", "range", "tensor")
BLOCK = 4096
FIRST, BURST, COLD, COUNTED = 20, 16, 20, 100
ROUNDS, LONG_NS, HEAP = 100, 1_000_000, 1_000_000
TOGGLE = "#include <valgrind/callgrind.h>\nvoid toggle(void) { CALLGRIND_TOGGLE_COLLECT; }\n"


def ids(kind: str, order: Any) -> Any:
    """Block ids in the form that a caller may have them in."""
    if kind == "list":
        return order.tolist()
    if kind == "range":
        return range(len(order))
    if kind == "tensor":
        import torch

        return torch.from_numpy(order)
    return order


def child(what: str, kind: str, count: int, helper: str) -> dict[str, float]:
    """Measures the tree that is first on the path of this process."""
    import numpy as np

    from kvprobe.cuda import device_region, find_runtime, host_region
    from kvprobe.launchqueue import QueueLimits
    from kvprobe.native.library import core
    from kvprobe.offload import BlockPool, OffloadEngine

    runtime, rng = find_runtime("host"), np.random.default_rng(1)
    memory = device_region(runtime, 16384 * BLOCK), host_region(runtime, 16384 * BLOCK)
    gpu, cpu = (BlockPool(runtime, [each], BLOCK) for each in memory)
    stream, now = runtime.stream_create(), core().kvp_now_ns
    asked = [ids(kind, rng.permutation(gpu.blocks)[:count]) for _ in range(2)]
    gc.freeze()
    limits = QueueLimits(1021, 8, 8021, 1000, 2000)
    with OffloadEngine(runtime, gpu, cpu, policy="pooled", limits=limits, compute_stream=stream) as engine:

        def behind(requests: int, request: Callable[[], Any]) -> list[Any]:
            runtime.launch_delay(stream, 20_000_000)
            kept = [request() for _ in range(requests)]
            engine.wait()
            engine.poll()
            return kept

        def load() -> object:
            return engine.load(*asked)

        def timed() -> int:
            begin = now()
            load()
            return int(now() - begin)

        if what == "instructions":
            import ctypes

            toggle = ctypes.PyDLL(helper).toggle
            toggle.argtypes, toggle.restype = [], None

            def toggled() -> None:
                toggle()
                load()
                toggle()

            for _ in range(FIRST):
                load()
            engine.wait()
            for _ in range(COUNTED // 10):
                behind(10, toggled)
            return {}
        faults = -resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        first = behind(FIRST, timed)
        faults += resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        behind(FIRST, load)
        if what == "calls":
            seen = [0]

            def hook(_: Any, event: str, __: Any) -> None:
                seen[0] += event in ("call", "c_call")

            def profiled() -> None:
                sys.setprofile(hook)
                load()
                sys.setprofile(None)

            behind(1, profiled)
            gc.disable()
            before, kept = gc.get_count()[0], [load() for _ in range(BURST)]
            found = {"calls": seen[0] - 2, "collected objects": (gc.get_count()[0] - before) / len(kept)}
            engine.wait()
            return found
        if what == "system calls":
            marks = iter([b"[", b"]"] * BURST)

            def marked() -> None:
                os.write(2, next(marks))
                load()
                os.write(2, next(marks))

            behind(BURST, marked)
            return {}
        if what == "long calls":
            return long_calls(engine, load, behind, max(1, 1024 // count))
        burst = [each for _ in range(16) for each in behind(BURST, timed)]
        other, cold = np.zeros(8 << 20, dtype=np.int64), []
        for _ in range(COLD):
            other += 1
            cold += behind(1, timed)
        return {
            "least us": min(burst) / 1e3,
            "middle us": statistics.median(burst) / 1e3,
            "99th of 100 us": statistics.quantiles(burst, n=100)[98] / 1e3,
            "least us, caches cold": min(cold) / 1e3,
            "middle us, caches cold": statistics.median(cold) / 1e3,
            "middle us, first burst": statistics.median(first) / 1e3,
            "page faults, first burst": faults / FIRST,
        }


def long_calls(engine: Any, load: Callable[[], object], behind: Any, requests: int) -> dict[str, float]:
    """Of requests and polls, while a server's objects live beside: CPU time that the thread itself used in each."""
    heap = [[i] for i in range(HEAP)]
    gc.unfreeze()
    took: list[int] = []

    def cpu(call: Callable[[], object]) -> object:
        begin = time.thread_time_ns()
        made = call()
        took.append(time.thread_time_ns() - begin)
        return made

    kept = []
    for _ in range(ROUNDS):
        kept = behind(requests, lambda: (cpu(load), cpu(engine.poll)))
    assert len(heap) == HEAP
    assert kept
    return {"calls over 1 ms of CPU": sum(each > LONG_NS for each in took), "longest us of CPU": max(took) / 1e3}


def run(tree: Path, *arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done


def instructions(tree: Path, kind: str, count: int, folder: Path) -> float | None:
    """Of one request, the thread's own; what turning the count on and off takes is in it (some 400)."""
    if not shutil.which("valgrind"):
        return None
    helper = folder / "toggle.so"
    if not helper.exists():
        (folder / "toggle.c").write_text(TOGGLE)
        made = ["cc", "-O2", "-shared", "-fPIC", "-o", str(helper), str(folder / "toggle.c")]
        if not shutil.which("cc") or subprocess.run(made, capture_output=True, check=False).returncode:
            return None
    tool = ("valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={folder / 'out'}")
    done = run(tree, "instructions", kind, str(count), str(helper), under=tool)
    return int(re.findall(r"Collected : (\d+)", done.stderr)[0]) / COUNTED


def system_calls(tree: Path, kind: str, count: int, folder: Path) -> float | None:
    """Of one request, the thread's own."""
    if not shutil.which("strace"):
        return None
    trace, inside, found = folder / "trace", "", 0
    run(tree, "system calls", kind, str(count), under=("strace", "-f", "-o", str(trace)))
    for line in trace.read_text().splitlines():
        thread, call = line.split(maxsplit=1)
        if 'write(2, "["' in call:
            inside = thread
        elif 'write(2, "]"' in call:
            inside = ""
        else:
            found += thread == inside and not call.startswith("<...")
    return found / BURST


def counted(tree: Path, kind: str, count: int) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "instructions": instructions(tree, kind, count, Path(folder)),
            **json.loads(run(tree, "calls", kind, str(count)).stdout),
            "system calls": system_calls(tree, kind, count, Path(folder)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the source tree of another version, built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["array"], help="how the ids are given")
    parser.add_argument("--json")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, kind, count, helper = (*given.child, "")[:4]
        print(json.dumps(child(what, kind, int(count), helper)))
        return
    trees = {"now": TREE, **({"before": given.against.resolve()} if given.against else {})}
    result: dict[str, Any] = {}
    for kind in given.kinds:
        for count in COUNTS:
            rows = {name: counted(tree, kind, count) for name, tree in trees.items()}
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for _ in range(given.rounds):
                for name, tree in trees.items():
                    told = json.loads(run(tree, "time", kind, str(count)).stdout)
                    rounds[name].append(told | json.loads(run(tree, "long calls", kind, str(count)).stdout))
            print(f"{count} blocks, ids as {kind}:")
            for name, row in rows.items():
                for key in rounds[name][0]:
                    values = [each[key] for each in rounds[name]]
                    row[key] = min(values)  # the quietest round's
            for key, value in rows["now"].items():
                before = rows["before"][key] if given.against else None
                shown = "not counted here" if value is None else f"{value:12,.2f}"
                ratio = f"   before {before:12,.2f}   now/before {value / before:5.2f}" if before and value else ""
                print(f"  {key:24} {shown}{ratio}", flush=True)
            result[f"{count} {kind}"] = rows
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
