"""A throttled file as a tier below CPU memory: is it named, and is its break-even the measured one?

    python benchmarks/tier_rate.py --device cuda   # or host: real reads, in real time

A loop of steps either reads a block from a file into pinned memory and copies it to the GPU, or computes its tokens.
The file's reads take as long as on a disk of a given rate (`throttle.c`, preloaded). First the loop runs alone at three
rates, and computing all: the rate at which both take equally long is measured. Then it runs under `kvprobe run`, at
half and at twice this rate, and `slow_tier` has to name the file, its rate, and the break-even.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvprobe
from kvprobe.cuda import device_region, host_region
from kvprobe.diagnosis import examine

BLOCK, TOKENS = 16 << 20, 256
PREFILL_NS, DECODE_NS = 100_000, 1_000_000  # of a token; of a step
STEPS = 40
RATE = BLOCK / (TOKENS * PREFILL_NS) * 1e9  # as long as computing, without copy and calls


def loop(device: str, file: Path, rate: float, computes: int) -> float:
    """What a step takes, s, the first quartile; every `computes`-th computes its block (1: all), others read it."""
    from kvprobe.instrument.benefit import BenefitTotals

    runtime = kvprobe.find_runtime(device)
    gpu, cpu = device_region(runtime, BLOCK), host_region(runtime, BLOCK)
    compute, copies = runtime.stream_create(), runtime.stream_create()
    told = BenefitTotals("bench.tier", "file")
    fd = os.open(file, os.O_RDONLY)
    if rate:
        slow: Any = ct.CDLL(None).throttle
        slow(fd, ct.c_double(rate))
    memory = (ct.c_char * BLOCK).from_address(cpu.address)

    def step(prefill: int) -> None:
        began = time.monotonic_ns()
        if prefill:
            runtime.launch_delay(compute, prefill * PREFILL_NS)
        runtime.launch_delay(compute, DECODE_NS)
        runtime.stream_synchronize(compute)
        told.step(prefill, time.monotonic_ns() - began)

    for _ in range(5):
        step(0)
    took: list[float] = []
    for number in range(STEPS):
        began = time.monotonic()
        hit = number % computes != 0
        told.admitted(number, TOKENS, None, TOKENS * hit)
        if hit:
            assert os.preadv(fd, [memory], 0) == BLOCK
            runtime.memcpy_async(gpu.address, cpu.address, BLOCK, "h2d", copies)
            runtime.stream_synchronize(copies)
            told.loaded([number], BLOCK)
        step(0 if hit else TOKENS)
        took.append(time.monotonic() - began)
    return statistics.quantiles(took, n=4)[0]


def own(options: argparse.Namespace, work: Path, rate: float, computes: int, run: Path | None = None) -> float:
    """The loop in a process of its own, recorded into `run` where one is named."""
    took = work / "took.json"
    words = [sys.executable, __file__, "--device", options.device, "--loop", str(work / "blocks"), str(rate)]
    words += [str(computes), str(took)]
    if run is not None:
        words = [sys.executable, "-m", "kvprobe", "run", "--report", "none", "-o", str(run), "--", *words]
    preload = ":".join(filter(None, (str(work / "throttle.so"), os.environ.get("LD_PRELOAD"))))
    subprocess.run(words, check=True, env={**os.environ, "LD_PRELOAD": preload})
    return float(json.loads(took.read_text()))


def measured(options: argparse.Namespace, work: Path) -> dict[str, float]:
    """The rate at which reading takes as long as computing, from the best of each way's runs."""
    computed: list[float] = []
    each: dict[float, list[float]] = {RATE / 2: [], RATE: [], 2 * RATE: []}
    for _ in range(options.rounds):
        computed.append(own(options, work, 0, 1))
        for rate, found in each.items():
            found.append(own(options, work, rate, STEPS))
    # what a step at a rate takes grows with 1 / rate: a line through the slowest and the fastest
    slow, fast = min(each[RATE / 2]), min(each[2 * RATE])
    slope = (slow - fast) / (2 / RATE - 0.5 / RATE)
    at = (min(computed) - fast) / slope + 0.5 / RATE
    return {
        "computing_ms": 1e3 * min(computed),
        "reading_ms": {f"{rate / 1e9:.3g} GB/s": 1e3 * min(found) for rate, found in each.items()},
        "break_even_gb_per_s": 1 / at / 1e9,
    }


def named(run: Path, file: Path) -> dict[str, Any]:
    """What `slow_tier` says of a recording."""
    recording = kvprobe.open_recording(run)
    found = [one for one in examine(recording) if one.cause == "slow_tier"]
    if not found:
        return {"named": False, "notes": recording.notes}
    (one,) = found
    said = [evidence for evidence in one.evidence if evidence.text.startswith("break-even")]
    return {
        "named": str(file.parent) in one.title,
        "title": one.title,
        "severity": one.severity,
        "lost_s": one.lost_ns / 1e9,
        "evidence": [evidence.text for evidence in one.evidence],
        "break_even_gb_per_s": said[0].value if said else None,
        "slower": "slower than computing" in one.title,
        "cure": [[change.text, change.predicted_saving_ns] for change in one.cure],
        "reason": one.reason,
    }


def main() -> int:
    """Prints both; 1 where the tier was not named, or the break-even is more than a tenth off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="host", choices=("host", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", nargs=4, metavar=("FILE", "RATE", "COMPUTES", "TOOK"))
    options = parser.parse_args()
    if options.loop:
        file, rate, computes, took = options.loop
        Path(took).write_text(json.dumps(loop(options.device, Path(file), float(rate), int(computes))))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvprobe-tier-") as folder:
        work = Path(folder)
        source = Path(__file__).with_name("throttle.c")
        shim = ["cc", "-O2", "-shared", "-fPIC", "-o", str(work / "throttle.so"), str(source), "-ldl"]
        subprocess.run(shim, check=True)
        (work / "blocks").write_bytes(os.urandom(BLOCK))
        truth = measured(options, work)
        at = truth["break_even_gb_per_s"] * 1e9
        told: dict[str, Any] = {}
        for key, rate in (("half", at / 2), ("twice", at * 2)):
            own(options, work, rate, 4, work / key)
            told[key] = named(work / key, work / "blocks")
        print(json.dumps({"measured": truth, "told": told}, indent=1))
        off = [abs((one.get("break_even_gb_per_s") or 0) * 1e9 / at - 1) for one in told.values()]
        print(f"break-even off by {', '.join(f'{one:.1%}' for one in off)}")
        right = told["half"].get("slower") is True and told["half"]["named"] and not told["twice"].get("slower")
        return int(not right or off[0] > 0.1)


if __name__ == "__main__":
    sys.exit(main())
