"""The saturation detector against the truth: false alarms among healthy copies, misses among seeded saturations.

    python benchmarks/detector_truth.py [--healthy 1000000] [--saturations 1000] [--small-blocks 100] [--seed 1]
    python benchmarks/detector_truth.py --device cuda [--small-blocks 100]

Everything runs through the real engine on the embedded host runtime, which knows the truth: it counts the calls that
waited for a place in a queue. Healthy copies are made in bursts under everything that looks like a full queue and is
none: signal handlers that sleep inside a submission, pauses between submissions, processes that burn every CPU,
pageable memory, deep queues, completions that nobody has looked up. An alarm in a burst in which the runtime blocked no
call is a false one; a burst in which it did block some is not counted as healthy. A saturation is a burst, behind a
gate or behind a slow copy engine, in which the runtime blocked calls (four or more, or one for as long as a stream that
itself waits blocks it); it is missed when the detector does not name it.
Small blocks: the copy engine needs 2 to 3 times what a submission costs, so a blocked call is hardly longer than a fast
one; it is late when it is named more than 50 ms of the program's own time after the runtime first blocked a call.

A GPU does not say which calls it blocked. With `--device cuda` small blocks alone are played, scattered ones, and what
counts is this program's own clock beside the count of what is outstanding: the queue was full from the first load on
behind which nine tenths of its places were taken and whose copies took twice the calibrated baseline each, if those
from there on did so as a mean.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes as ct
import gc
import json
import logging
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvprobe.cuda import Region, Runtime, device_region, find_runtime, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import KvprobeError
from kvprobe.launchqueue import QueueLimits, calibrate
from kvprobe.launchqueue.constants import FENCE_NS, STEADY_CALLS
from kvprobe.offload import BlockPool, OffloadEngine

PAUSE_SIGNAL = 64  # its handler is libc's usleep, which takes the signal's number: 64 us, and what a timer adds
DEPTHS = (64, 128, 256, 512, 1021, 2048, 4096)
BLOCKS = tuple(4096 << shift for shift in range(11))  # 4 KiB to 4 MiB
POOL_BYTES = 16 << 20
WORTH_NAMING_NS = 1_000_000  # time that the runtime blocked a burst's calls; below it there is nothing to name
HEALTHY = {  # kind of burst -> share of the copies
    "shallow": 0.3,
    "deep": 0.3,
    "brim": 0.1,
    "not looked up": 0.2,
    "pageable": 0.1,
}


def blocked(runtime: HostRuntime) -> tuple[int, int]:
    """The truth: calls that waited for a place in a queue so far, and the time they waited (ns)."""
    stats = runtime.stats
    return stats.blocked_calls, stats.blocked_ns


def worth_naming(calls: int, ns: int) -> bool:
    """Whether blocked calls are a saturation: several, or a few that a stream itself made wait, as the judge has it.

    On a busy machine a burst may end, or auto may leave the stream for another reason, after a call or two.
    """
    return ns >= WORTH_NAMING_NS and (calls >= STEADY_CALLS or ns >= calls * FENCE_NS)


def reset(runtime: HostRuntime, depth: int = 0, bytes_per_s: float = 0.0) -> None:
    """A fresh runtime; everything made with it before is gone."""
    runtime.reset(depth=depth, h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)


def calibrated(runtime: Runtime) -> QueueLimits:
    """The queue's limits; a machine too busy to count them is asked again."""
    for _ in range(10):
        with contextlib.suppress(KvprobeError):
            return calibrate(runtime, cache=False)
    return calibrate(runtime, cache=False)


# -- healthy ---------------------------------------------------------------------------------------------------------


def _burn(stop: Any) -> None:
    while not stop.is_set():
        sum(range(20_000))


@contextlib.contextmanager
def cpu_load(processes: int) -> Iterator[None]:
    """That many processes that do nothing but use the CPU."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    burners = [spawn.Process(target=_burn, args=(stop,), daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        stop.set()
        for burner in burners:
            burner.join()


@contextlib.contextmanager
def pauses_inside_calls(rng: random.Random, between_s: float = 0.003) -> Iterator[list[int]]:
    """Interrupts this thread at random moments by a handler that sleeps: a pause inside whatever call it is in."""
    libc = ct.CDLL(None)
    libc.signal.restype = ct.c_void_p
    libc.signal.argtypes = [ct.c_int, ct.c_void_p]
    before = libc.signal(PAUSE_SIGNAL, ct.cast(libc.usleep, ct.c_void_p))
    target, stop, sent = threading.get_ident(), threading.Event(), [0]

    def interrupt() -> None:
        while not stop.wait(rng.expovariate(1 / between_s)):
            for _ in range(rng.choice((1, 1, 3))):
                signal.pthread_kill(target, PAUSE_SIGNAL)
                sent[0] += 1

    thread = threading.Thread(target=interrupt, name="pauses", daemon=True)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()
        libc.signal(PAUSE_SIGNAL, before)


def healthy(copies: int, seed: int, burners: int = 3) -> dict[str, Any]:
    """Makes at least `copies` healthy copies, half of them under CPU load; says what alarms there were."""
    runtime, rng = host_runtime(), random.Random(seed)
    reset(runtime)
    limits = calibrated(runtime)
    block = 4096
    gpu = BlockPool(runtime, [device_region(runtime, 8 * limits.depth * block)], block)
    pinned = BlockPool(runtime, [host_region(runtime, gpu.blocks * block)], block)
    memory = np.zeros(gpu.blocks * block, np.uint8)
    pageable = BlockPool(runtime, [Region(memory.ctypes.data, memory.nbytes, "pageable", memory)], block)
    result: dict[str, Any] = {"copies": 0, "bursts": 0, "full": 0, "false_alarms": 0, "said": {}, "baseline_ns": []}
    alarms: list[str] = []
    said: Counter[str] = Counter()
    with pauses_inside_calls(rng) as sent:
        for load, share in ((0, 0.5), (burners, 0.5)):
            with cpu_load(load):
                for kind, part in HEALTHY.items():
                    engine = OffloadEngine(
                        runtime,
                        gpu,
                        pageable if kind == "pageable" else pinned,
                        policy="auto",
                        limits=limits,
                        detail="copies",
                    )
                    done = 0
                    while done < copies * share * part:
                        calls, named = blocked(runtime)[0], len(engine.detector.saturations)
                        made = _burst(engine, kind, limits, rng)
                        result["bursts"] += 1
                        if blocked(runtime)[0] > calls:
                            result["full"] += 1  # the load held the copy engine's thread back: the queue was full
                        else:
                            done += made
                            if len(engine.detector.saturations) > named:
                                alarms.append(f"{kind}, {load} burners: {engine.detector.reason}")
                        if engine.policy == "pooled":
                            engine.wait()
                            engine.set_policy("shared")
                    result["copies"] += done
                    result["baseline_ns"].append(engine.detector.baseline_ns)
                    said.update(engine.detector.losses())
                    engine.close()
    for pool in (gpu, pinned):
        for region in pool.regions:
            region.owner.close()
    result.update(false_alarms=len(alarms), alarms=alarms, pauses=sent[0], said=dict(said))
    return result


def _burst(engine: OffloadEngine, kind: str, limits: QueueLimits, rng: random.Random) -> int:
    """Some transfers that the queue has room for."""
    blocks = engine.mapping.gpu.blocks
    if kind in ("shallow", "pageable"):
        sizes = [rng.randint(1, 64) for _ in range(8)]
    elif kind == "deep":  # up to the last places, counting as if nothing were copied meanwhile
        sizes = [limits.depth - 40 - rng.randint(0, limits.depth // 4)]
    elif kind == "brim":  # every place but a few
        sizes = [limits.depth - 16 - rng.randint(0, 16)]
    else:  # more than the queue holds, in portions that each have been copied when the next one comes
        sizes = [limits.depth // 3] * 6
    for size in sizes:
        first = rng.randrange(blocks - size)
        engine.load(range(first, first + size), range(first, first + size))
        if kind == "not looked up":
            engine.runtime.synchronize()
        elif rng.random() < 0.02:
            gc.collect()
        elif rng.random() < 0.02:
            time.sleep(0.001)
    engine.wait()
    engine.poll()
    return sum(sizes)


# -- saturated -------------------------------------------------------------------------------------------------------


def saturations(count: int, seed: int) -> dict[str, Any]:
    """Fills a queue `count` times, each time of another depth, block size and shape; says which were missed."""
    runtime, rng = host_runtime(), random.Random(seed)
    known: dict[int, QueueLimits] = {}
    missed: list[str] = []
    calls_before, onset_ms, kinds = [], [], Counter()
    number = unsaturated = 0
    gc.disable()
    while number < count:
        depth, block = rng.choice(DEPTHS), rng.choice(BLOCKS)
        shape, policy = rng.choice(("draining", "gate", "gate, then draining")), rng.choice(("auto", "shared"))
        gc.collect()  # now: a buffer that is freed behind a closed gate waits for it
        reset(runtime, depth)
        if depth not in known:
            known[depth] = calibrated(runtime)
            gc.collect()
        engine, truth = _saturate(runtime, known[depth], block, shape, policy, rng)
        found = engine.detector.saturations
        if not found and not worth_naming(*truth):
            unsaturated += 1
        elif not found:
            missed.append(
                f"{number}: depth {depth}, block {block}, {shape}, {policy}; the runtime blocked {truth[0]} "
                f"calls for {truth[1] / 1e6:.2f} ms; said: {engine.detector.reason!r}"
            )
        else:
            kinds[shape] += 1
            if policy == "auto":  # the other one is not interrupted to look: its runs are as long as its transfers
                calls_before.append(found[0].blocked_calls)
                onset_ms.append((found[0].noticed_ns - found[0].onset_ns - found[0].longest_ns) / 1e6)
        number += bool(found) or worth_naming(*truth)
        runtime.lose_device()  # what is left in the queue need not be copied
        with contextlib.suppress(Exception):
            engine.poll()
        engine.recorder.close()
        for region in (*engine.mapping.gpu.regions, *engine.mapping.cpu.regions):
            region.owner.address = 0  # the reset frees it; freed again it might be the next engine's
    gc.enable()
    gc.collect()
    reset(runtime)
    return {
        "saturations": count,
        "not_saturated": unsaturated,
        "missed": len(missed),
        "misses": missed,
        "kinds": dict(kinds),
        "auto_blocked_calls_before_p50": _percentile(calls_before, 50),
        "auto_blocked_calls_before_max": max(calls_before, default=0),
        "auto_noticed_after_longest_call_ms_p50": _percentile(onset_ms, 50),
        "auto_noticed_after_longest_call_ms_max": max(onset_ms, default=0.0),
    }


def _saturate(
    runtime: Runtime, limits: QueueLimits, block: int, shape: str, policy: str, rng: random.Random
) -> tuple[OffloadEngine, tuple[int, int]]:
    """Loads until the runtime has blocked calls; the engine, and the truth: (blocked calls, their ns)."""
    blocks = max(POOL_BYTES // block, 8)
    gpu = BlockPool(runtime, [device_region(runtime, blocks * block)], block)
    cpu = BlockPool(runtime, [host_region(runtime, block)], block)
    compute = runtime.stream_create()
    engine = OffloadEngine(runtime, gpu, cpu, policy=policy, limits=limits, detail="copies", compute_stream=compute)
    before = blocked(runtime)
    gate = runtime.gate()
    if shape != "draining":
        gate.launch(compute)
    opened = threading.Timer(rng.uniform(0.005, 0.03) + limits.depth * 8e-6, gate.open)
    opened.start()
    over = {"draining": 64, "gate": 8, "gate, then draining": 64}[shape]
    submitted = 0
    size = min(rng.choice((16, 64, 256, 1024) if shape != "draining" else (256, 1024, 4096)), blocks)
    while True:
        engine.load([0] * size, range(size))
        submitted += size
        calls = blocked(runtime)[0] - before[0]
        if engine.detector.saturations or calls >= over or (shape == "gate" and submitted > 2 * limits.depth):
            break
        if submitted > 20 * limits.depth + 8192:
            break
    opened.join()
    after = blocked(runtime)
    return engine, (after[0] - before[0], after[1] - before[1])


# -- small blocks ----------------------------------------------------------------------------------------------------

NOTICED_MS = 50.0


def small_blocks(count: int, seed: int) -> dict[str, Any]:
    """Loads small blocks into a full queue `count` times, each time until it is noticed or twice the time is over."""
    runtime, rng = host_runtime(), random.Random(seed)
    reset(runtime)
    limits = calibrated(runtime)
    late: list[str] = []
    noticed_ms: list[float] = []
    times: list[float] = []
    blocked_of_64: list[float] = []
    gc.disable()
    for number in range(count):
        gc.collect()
        slower, size = rng.uniform(2.0, 3.0), rng.choice((256, 512, 1024, 2048))
        reset(runtime, limits.depth, 16_384 / (slower * limits.baseline_ns * 1e-9))
        gpu = BlockPool(runtime, [device_region(runtime, 2048 * 16_384)], 16_384)
        cpu = BlockPool(runtime, [host_region(runtime, 16_384)], 16_384)
        # not auto: it might change the policy for what submission costs, before the queue is full
        engine = OffloadEngine(runtime, gpu, cpu, policy="shared", limits=limits, detail="copies")
        zero, submitted, since, first = blocked(runtime)[0], 0, 0, 0
        end_ns = time.monotonic_ns() + 5_000_000_000
        while not engine.detector.saturations and time.monotonic_ns() < end_ns:
            before_ns = time.monotonic_ns()
            if since and before_ns - since > 2 * NOTICED_MS * 1e6:
                break
            engine.load([0] * size, range(size))
            submitted += size
            if not since and blocked(runtime)[0] > zero:
                since, first = before_ns, submitted - size
        found, calls = engine.detector.saturations, blocked(runtime)[0] - zero
        if found and since:
            noticed_ms.append(max(found[0].noticed_ns - since, 0) / 1e6)
            times.append(1 + found[0].lost_ns / max(found[0].blocked_calls, 1) / max(engine.detector.baseline_ns, 1))
            blocked_of_64.append(64 * calls / max(submitted - first, 1))
        if since and not (found and noticed_ms[-1] <= NOTICED_MS):
            late.append(
                f"{number}: {slower:.1f} times the baseline, loads of {size}; {calls} calls blocked; "
                f"said: {engine.detector.reason!r}"
            )
        runtime.lose_device()
        with contextlib.suppress(Exception):
            engine.poll()
        engine.recorder.close()
        for region in (*gpu.regions, *cpu.regions):
            region.owner.address = 0
    gc.enable()
    gc.collect()
    reset(runtime)
    return {
        "episodes": count,
        "full": len(noticed_ms) + len(late),
        "late": len(late),
        "misses": late,
        "noticed_ms_p50": _percentile(noticed_ms, 50),
        "noticed_ms_max": max(noticed_ms, default=0.0),
        "blocked_call_times_baseline_p50": _percentile(times, 50),
        "blocked_of_64_p50": _percentile(blocked_of_64, 50),
    }


FULL_FROM = 2.0  # times the baseline
SMALL = tuple(1 << shift for shift in range(14, 19))  # bytes; which fill a queue depends on the machine's baseline


def small_blocks_on_a_gpu(runtime: Runtime, count: int, seed: int) -> dict[str, Any]:
    """The same where the truth is a stopwatch beside a count of what is outstanding.

    An episode in which no load was slow while the queue was full, or one alone, is not counted as full.
    """
    rng = np.random.default_rng(seed)
    limits, blocks = calibrated(runtime), 4096
    device, host = (make(runtime, blocks * max(SMALL)) for make in (device_region, host_region))
    late: list[str] = []
    noticed_ms: list[float] = []
    times: list[float] = []
    for number in range(count):
        size, block = int(rng.choice((256, 512, 1024, 2048))), int(rng.choice(SMALL))
        pools = (BlockPool(runtime, [region], block) for region in (device, host))
        # not auto: see small_blocks
        with OffloadEngine(runtime, *pools, policy="shared", limits=limits, detail="copies") as engine:
            since, copies, took_ns = 0, 0, 0
            end_ns = time.monotonic_ns() + 1_000_000_000
            while not engine.detector.saturations and (now_ns := time.monotonic_ns()) < end_ns:
                if since and now_ns - since > 2 * NOTICED_MS * 1e6:
                    break
                full = engine.read().shared_places[0] >= 0.9 * limits.depth
                now_ns = time.monotonic_ns()
                engine.load(rng.permutation(blocks)[:size], rng.permutation(blocks)[:size])
                load_ns = time.monotonic_ns() - now_ns
                if not since and full and load_ns >= FULL_FROM * size * limits.baseline_ns:
                    since = now_ns
                if since:
                    copies, took_ns = copies + size, took_ns + load_ns
            each = took_ns / max(copies, 1) / limits.baseline_ns
            if each < FULL_FROM:
                continue
            times.append(each)
            found = engine.detector.saturations
            if found:
                noticed_ms.append(max(found[0].noticed_ns - since, 0) / 1e6)
            if not found or noticed_ms[-1] > NOTICED_MS:
                what = f"loads of {size} x {block >> 10} KiB, {each:.1f} times the baseline"
                late.append(f"{number}: {what}; said: {engine.detector.reason!r}")
    for region in (device, host):
        region.owner.close()
    return {
        "episodes": count,
        "full": len(times),
        "late": len(late),
        "misses": late,
        "noticed_ms_p50": _percentile(noticed_ms, 50),
        "noticed_ms_max": max(noticed_ms, default=0.0),
        "copy_times_baseline_p50": _percentile(times, 50),
    }


def _percentile(values: list[Any], q: float) -> float:
    return float(np.percentile(values, q)) if values else 0.0


def main() -> int:
    """Prints the counts; exit code 1 when the detector was wrong once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--healthy", type=int, default=1_000_000)
    parser.add_argument("--saturations", type=int, default=1_000)
    parser.add_argument("--small-blocks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a line for every switch of policy
    outcome: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    if arguments.device == "cuda":
        outcome["small blocks"] = small_blocks_on_a_gpu(find_runtime("cuda"), arguments.small_blocks, arguments.seed)
        arguments.saturations = arguments.small_blocks = arguments.healthy = 0
    if arguments.saturations:
        outcome["saturated"] = saturations(arguments.saturations, arguments.seed)
    if arguments.small_blocks:
        outcome["small blocks"] = small_blocks(arguments.small_blocks, arguments.seed)
    if arguments.healthy:
        outcome["healthy"] = healthy(arguments.healthy, arguments.seed)
    print(json.dumps(outcome, indent=1) if arguments.json else "\n".join(_lines(outcome)))
    wrong = outcome.get("saturated", {}).get("missed", 0) + outcome.get("healthy", {}).get("false_alarms", 0)
    small = outcome.get("small blocks")
    wrong += small["late"] + (small["full"] == 0) if small else 0  # no full queue: nothing was shown
    return int(wrong > 0)


def _lines(outcome: dict[str, Any]) -> Iterator[str]:
    for name, part in outcome.items():
        if isinstance(part, str):
            continue
        for key, value in part.items():
            if isinstance(value, list) and key in ("alarms", "misses"):
                yield from (f"{name}  {key}: {line}" for line in value[:20])
            else:
                yield f"{name}  {key}: {value}"


if __name__ == "__main__":
    sys.exit(main())
