"""Large copies of pageable memory, and a program that needs no cure, with and without `kvprobe run --fix auto` in turn.

    python benchmarks/large_copies.py [--device cuda|host] [--gib 4 16] [--rounds 3] [--driver]
        [--module] [--pairs 20]

`copies`: one process copies so many GiB by cudaMemcpy (--driver: by cuMemcpyHtoD and cuMemcpyDtoH): up, down to memory
that was written before, down to memory whose pages are not there yet; all bytes of the first and last copy down are
compared. `module` (with --module): a torch module of 16 weights of 256 MiB goes to the CPU and back by `Module.to`,
blocking, in pageable memory. `healthy`: steps of products with small pinned copies both ways, no copy of pageable
memory; pairs of processes with and without take turns at going first.

Printed: GB/s of each copy, and of pinned memory (the link); of the healthy program the median step of each process, and
the ratio. `--device host` tries the script: its figures mean nothing.

Exit code 1: bytes differ; or on a GPU the healthy program's median ratio is above 1.01.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
TO_DEVICE, TO_HOST = 1, 2
MODULE_WEIGHTS, MODULE_MIB = 16, 256
STEPS, HEALTHY = 400, 1.01

# ---- the programs ----------------------------------------------------------------------------------------------------


class Copier:
    """Copies between one piece of device memory and the host's, by the runtime or by the driver."""

    def __init__(self, device: str, total: int, by_driver: bool) -> None:
        import kvprobe

        path = kvprobe.find_runtime(device).path
        self._runtime, self._total, self._by_driver = ct.CDLL(path), total, by_driver
        self._driver = ct.CDLL("libcuda.so.1" if device == "cuda" else path)
        self._there = ct.c_void_p()
        if self._runtime.cudaMalloc(ct.byref(self._there), ct.c_size_t(total)):
            raise SystemExit("no memory on the GPU")

    def copy(self, kind: int, address: int, size: int) -> float:
        """GB/s."""
        there, host = self._there, ct.c_void_p(address)
        to, source = (there, host) if kind == TO_DEVICE else (host, there)
        began = time.perf_counter()
        if self._by_driver:
            call = self._driver.cuMemcpyHtoD_v2 if kind == TO_DEVICE else self._driver.cuMemcpyDtoH_v2
            error = call(to, source, ct.c_size_t(size))
        else:
            error = self._runtime.cudaMemcpy(to, source, ct.c_size_t(size), kind)
        if error or self._runtime.cudaDeviceSynchronize():
            raise SystemExit("an error")
        return size / (time.perf_counter() - began) / 1e9

    def link(self) -> dict[str, list[float]]:
        """The same of pinned memory, the best of eight."""
        host, size = ct.c_void_p(), min(self._total, 256 << 20)
        if self._runtime.cudaHostAlloc(ct.byref(host), ct.c_size_t(size), 0):
            raise SystemExit("no pinned memory")
        best = {
            name: [max(self.copy(kind, host.value or 0, size) for _ in range(8))]
            for name, kind in (("link up", TO_DEVICE), ("link down", TO_HOST))
        }
        self._runtime.cudaFreeHost(host)
        return best


def copies(device: str, total: int, rounds: int, by_driver: bool) -> dict[str, Any]:
    """One process: GB/s of each copy, by what it was."""
    import numpy as np

    copier = Copier(device, total, by_driver)
    rates = copier.link()

    def copied(name: str, kind: int, array: Any) -> None:
        rates.setdefault(name, []).append(copier.copy(kind, array.ctypes.data, total))

    given = np.arange(total // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    touched = np.zeros(total // 8, np.uint64)
    touched[:: 4096 // 8] = 1
    same = True
    for turn in range(rounds):
        copied("up", TO_DEVICE, given)
        with mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            fresh = np.frombuffer(memory, np.uint64)
            copied("down, without pages", TO_HOST, fresh)
            if turn in (0, rounds - 1):
                same &= bool(np.array_equal(fresh, given))
            del fresh
        copied("down, written before", TO_HOST, touched)
    return {"rates": rates, "same": same and bool(np.array_equal(touched, given))}


def module(rounds: int) -> dict[str, Any]:
    """One process: GB/s of each move of a module."""
    import torch

    size = MODULE_MIB << 20
    layers = [torch.nn.Linear(8192, size // 8192 // 4, bias=False) for _ in range(MODULE_WEIGHTS)]
    moved = torch.nn.Sequential(*layers)
    before = [layer.weight.detach()[::97, ::89].clone() for layer in layers]
    torch.zeros(1, device="cuda")
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way in ("cuda", "cpu"):
            torch.cuda.synchronize()
            began = time.perf_counter()
            moved.to(way)
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            rates.setdefault("up" if way == "cuda" else "down", []).append(MODULE_WEIGHTS * size / took / 1e9)
    same = all(
        bool((layer.weight.detach()[::97, ::89] == was).all()) for layer, was in zip(layers, before, strict=True)
    )
    return {"rates": rates, "same": same and not any(layer.weight.is_pinned() for layer in layers)}


def healthy(device: str) -> dict[str, Any]:
    """One process: the median of its steps after the first quarter."""
    import torch

    where = device if device == "cuda" else "cpu"
    width, times = (4096, 4) if device == "cuda" else (256, 1)
    weight = torch.randn(width, width, device=where) / width
    given, result = (torch.zeros(64, width, pin_memory=device == "cuda") for _ in range(2))
    took = []
    for _ in range(STEPS):
        began = time.perf_counter()
        x = given.to(where, non_blocking=True)
        for _ in range(times):
            weight_of_step = weight @ weight
        result.copy_(torch.relu(x @ weight_of_step), non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return {"step_s": statistics.median(took[STEPS // 4 :])}


# ---- the arms --------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace, program: str, cured: bool, gib: float = 0) -> dict[str, Any]:
    """One program with or without the cure; with it, what the cure says of itself."""
    own = [sys.executable, __file__, "--device", asked.device, "--rounds", str(asked.rounds), "--program", program]
    own += ["--driver"] if asked.driver else []
    own += ["--gib", str(gib)] if gib else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        watch = [
            sys.executable,
            "-m",
            "kvprobe",
            "run",
            "--fix",
            "auto",
            "--report",
            "none",
            "-o",
            f"{folder}/run",
            "--",
        ]
        done = subprocess.run([*watch, *own] if cured else own, env=env, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
        if not lines:
            raise SystemExit(f"{program} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(lines[-1])
        texts = [path.read_text() for path in sorted(Path(folder).glob("run/events-*.jsonl"))]
        found["said"] = [json.loads(line).get("why", "") for text in texts for line in text.splitlines()]
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """One program's rates, and what the cure says."""
    for what, each in found["rates"].items():
        print(f"{name:24} {what:21} GB/s {', '.join(f'{rate:.1f}' for rate in each)}")
    print(f"{name:24} {'bytes equal' if found['same'] else 'BYTES DIFFER'}", flush=True)
    for line in filter(None, found["said"]):
        print(f"{'':24} {line}")


def healthy_pairs(asked: argparse.Namespace) -> float:
    """The median of so many ratios, cured by as it is."""
    ratios = []
    for pair in range(asked.pairs):
        order = (False, True) if pair % 2 else (True, False)
        step = {cured: run(asked, "healthy", cured)["step_s"] for cured in order}
        ratios.append(step[True] / step[False])
        print(
            f"healthy pair {pair}: {step[False] * 1e3:.4f} ms, {step[True] * 1e3:.4f} cured: {ratios[-1]:.4f}",
            flush=True,
        )
    middle = statistics.median(ratios)
    low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[3 * len(ratios) // 4]
    print(f"healthy: median of {len(ratios)} pairs {middle:.4f} of its step, middle half {low:.4f} to {high:.4f}")
    return middle


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--gib", type=float, nargs="*", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--program", choices=("copies", "module", "healthy"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.program:
        one: dict[str, Any]
        if asked.program == "copies":
            one = copies(asked.device, int(asked.gib[0] * GIB) // 4096 * 4096, asked.rounds, asked.driver)
        else:
            one = module(asked.rounds) if asked.program == "module" else healthy(asked.device)
        print(json.dumps(one))
        return 0
    wrong = []
    wanted = [("copies", gib) for gib in asked.gib] + ([("module", 0.0)] if asked.module else [])
    for program, gib in wanted:
        for cured in (False, True):
            found = run(asked, program, cured, gib)
            name = f"{program} {gib:g} GiB" if gib else program
            show(f"{name} {'cured' if cured else 'as it is'}", found)
            if not found["same"]:
                wrong.append(f"{name}: bytes differ")
    if asked.pairs and healthy_pairs(asked) > HEALTHY and asked.device == "cuda":
        wrong.append("healthy is slower")
    print("\n".join(wrong) or "held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
