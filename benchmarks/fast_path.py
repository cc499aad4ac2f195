"""The engine's fast path against its floor: stores behind a forward pass, bursts of loads, and every block size.

    python benchmarks/fast_path.py [--device cuda|host] [--repeat 5] [--only work|sizes|parts] [--json FILE]

Floors: bytes over the link's rate (one large copy, best of five, taken again in every round), plus what is left of the
forward pass where the copies wait for it. Every figure of a row is taken in turn with the others of its round, so that
what the machine does besides falls on all alike; the middle of the rounds is printed.

* work: beside a model loop of 10 ms steps, through the public API alone; "polled": `poll()` once a step, "not at all":
  never. One large copy of the same bytes at the same place is what the machine allows there. `held`: time inside
  `load`/`store`; auto is played twice: as it is in a server that has been running, and with the burst in which it
  decides, whose longest call after the switch is told apart. `step`: p99 of the loop's steps, over the p99 of the loop
  alone; where copies go by kernel, beside what the calibration made at the start predicts of as many CTAs as they took.
* parts: what a request of 64 and of 8,192 blocks consists of, each alone: the floor of handing over.
* sizes: scattered blocks from 4 KiB to 4 MiB, both directions, what the engine chooses beside each single method; three
  transfers that are asked for one after another.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import Runtime, device_region, find_runtime, host_region
from kvprobe.cuda.copies import METHOD_NAMES
from kvprobe.launchqueue import calibrate
from kvprobe.native.library import REQUEST, core
from kvprobe.offload import BlockPool, OffloadEngine, method_cache, method_calibration
from kvprobe.offload.blocks import passed
from kvprobe.offload.methods import copier_for

STEP_NS, FORWARD_NS = 10_000_000, 30_000_000
now = core().kvp_now_ns


MODELS = {
    "spin": "one multiprocessor's work",
    "memory": "kernels that saturate the GPU's memory",
    "matmul": "matrix products",
}


class Model:
    """Compute on a stream: steps of a given length."""

    def __init__(self, runtime: Runtime, kind: str) -> None:
        self.runtime, self.kind = runtime, kind
        self.marks = [runtime.event_create(), runtime.event_create()]
        self.torch: Any = None
        if runtime.provider == "cuda":
            import torch

            self.torch = torch
            self.torch_stream = torch.cuda.Stream()
            self.stream = self.torch_stream.cuda_stream
            with torch.cuda.stream(self.torch_stream):
                shape = (4096, 4096) if kind == "matmul" else (64 << 20,)
                self.a = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
                self.b = torch.empty_like(self.a)
            self.unit_ns = self._unit()
        else:
            self.stream, self.unit_ns = runtime.stream_create(), 1_000_000

    def _kernel(self) -> None:
        if self.kind == "matmul":
            self.torch.mm(self.a, self.a, out=self.b)
        elif self.kind == "memory":
            self.torch.add(self.a, 1, out=self.b)
        else:
            self.torch.cuda._sleep(200_000)

    def _unit(self) -> float:
        """Time of one kernel."""
        start, end = self.torch.cuda.Event(enable_timing=True), self.torch.cuda.Event(enable_timing=True)
        with self.torch.cuda.stream(self.torch_stream):
            for _ in range(2):
                start.record()
                for _ in range(100):
                    self._kernel()
                end.record()
                end.synchronize()
        return start.elapsed_time(end) * 1e4

    def run(self, duration_ns: int) -> None:
        """Puts work of that length on the stream."""
        if self.torch is None:
            self.runtime.launch_delay(self.stream, duration_ns)
            return
        with self.torch.cuda.stream(self.torch_stream):
            for _ in range(max(int(duration_ns / self.unit_ns), 1)):
                self._kernel()

    def forward_ms(self) -> float:
        """What a forward of 30 ms takes here, alone."""
        self.run(STEP_NS)
        self.runtime.stream_synchronize(self.stream)
        begin = now()
        self.run(FORWARD_NS)
        self.runtime.stream_synchronize(self.stream)
        return (now() - begin) / 1e6

    def steps(self, until: Callable[[], bool], each: Callable[[], object], least: int = 0) -> list[int]:
        """Steps until `until()`, one prepared while the one before runs, as a server does; their durations in ns."""
        took: list[int] = []
        self.runtime.event_record(self.marks[1], self.stream)
        before = now()
        count = 0
        while count < least or not until():
            self.run(STEP_NS)
            self.runtime.event_record(self.marks[count % 2], self.stream)
            each()
            self.runtime.event_synchronize(self.marks[(count + 1) % 2])
            count += 1
            took.append(now() - before)
            before = now()
        self.runtime.event_synchronize(self.marks[(count + 1) % 2])
        return took[1:]


def link(runtime: Runtime, device: int, host: int, size: int, direction: str, rounds: int = 5) -> float:
    """Bytes per second of one large copy, the best of `rounds`."""
    stream, start, end = runtime.stream_create(), runtime.event_create(True), runtime.event_create(True)
    best = 0.0
    for _ in range(rounds):
        runtime.event_record(start, stream)
        dst, src = (device, host) if direction == "load" else (host, device)
        runtime.memcpy_async(dst, src, size, "h2d" if direction == "load" else "d2h", stream)
        runtime.event_record(end, stream)
        runtime.event_synchronize(end)
        best = max(best, size / runtime.event_elapsed_ms(start, end) * 1e3)
    for event in (start, end):
        runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    return best


class Memory:
    """One region on each side, cut into blocks of any size."""

    def __init__(self, runtime: Runtime, size: int) -> None:
        self.runtime, self.size = runtime, size
        self.device, self.host = device_region(runtime, size), host_region(runtime, size)

    def pools(self, block: int) -> tuple[BlockPool, BlockPool]:
        """Both sides in blocks of that size."""
        return BlockPool(self.runtime, [self.device], block), BlockPool(self.runtime, [self.host], block)

    def link(self, direction: str) -> float:
        """Bytes per second of one large copy."""
        return link(self.runtime, self.device.address, self.host.address, self.size, direction)


class Calibrated:
    """What the engine goes by on this machine, and what `kvprobe calibrate` says of the price; both measured now."""

    def __init__(self, runtime: Runtime) -> None:
        copier = copier_for(runtime)
        quick = method_calibration.measure(runtime, copier, quick=True)
        copier.measured = method_cache.table_of(quick)
        self.result = method_calibration.measure(runtime, copier)

    def _longer(self, work: str, kind: str, ctas: int) -> tuple[float, float]:
        """How much longer work takes beside copies, in the worst round: as a share, and ns a kernel."""
        for one in self.result["beside"]:
            if (one["work"], one["direction"], one["ctas"]) == (work, kind, ctas):
                more = max(one["beside_most_ns"] - one["alone_ns"], 0.0)
                return more / one["alone_ns"], more / one["kernels"]
        return 0.0, 0.0

    def step(self, model: Model, direction: str, mean_ctas: float) -> float:
        """How many times as long a step takes at most that copy kernels of so many CTAs run beside all the time."""
        kind = "h2d" if direction == "load" else "d2h"
        ctas = min(each for each in method_calibration.CTAS if each >= mean_ctas - 0.1)
        like = {"matmul": "matmul", "memory": "sum"}.get(model.kind)
        if like:
            return 1 + self._longer(like, kind, ctas)[0]
        return 1 + self._longer("short", kind, ctas)[1] / model.unit_ns


def p99(values: list[int]) -> float:
    return float(np.quantile(values, 0.99)) if values else 0.0


def scattered(rng: np.random.Generator, blocks: int, count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Block ids of one request after another: all blocks in random order, again and again; no two neighbours share."""
    while True:
        order = rng.permutation(blocks)
        for at in range(0, blocks - count + 1, count):
            yield order[at : at + count].copy()


def work(memory: Memory, model: Model, limits: Any, what: dict[str, Any], how: str) -> dict[str, Any]:
    """One play of one row."""
    policy, polled, burst = HOW[how]
    runtime, block, rng = memory.runtime, what["block"], np.random.default_rng(1)
    gpu, cpu = memory.pools(block)
    with OffloadEngine(runtime, gpu, cpu, policy=policy, limits=limits, compute_stream=model.stream) as engine:
        requests = []
        blocks = [scattered(rng, gpu.blocks, what["copies"]) for _ in range(2)]
        for _ in range(what["transfers"]):
            requests.append(tuple(next(each) for each in blocks))
        ask = engine.store if what["direction"] == "store" else engine.load
        for _ in range(8):  # of a store's size auto has decided by then
            ask(*requests[0], after=None).wait()
        if burst:  # as a server that has been running
            for left, right in requests[:64]:
                ask(left, right, after=None)
            engine.wait()
        gc.collect()  # the engines of other rows
        gc.freeze()
        held: list[int] = []
        before = engine.read()
        each = engine.poll if polled else (lambda: None)
        runtime.stream_synchronize(model.stream)
        begin = now()
        if what["direction"] == "store":
            model.run(FORWARD_NS)
        transfers = []
        for left, right in requests:
            start = now()
            transfers.append(ask(left, right))
            held.append(now() - start)
        steps = model.steps(lambda: transfers[-1].done, each)
        end = max(each.noticed_ns for each in transfers)
        methods = sorted({name for transfer in transfers for name in transfer.methods})
        read, side, kernel = engine.read(), int(what["direction"] == "store"), METHOD_NAMES.index("kernel")
        by_kernel = read.bytes[side][kernel] - before.bytes[side][kernel]
        switched = [(each.time_ns - begin) / 1e6 for each in list(engine.auto.decisions)[:1]]
        handed = [took for took, each in zip(held, transfers, strict=True) if each.policy == "pooled"]
    return {
        "done_ms": (end - begin) / 1e6,
        "held_ms": sum(held) / 1e6,
        "hand_over_p99_us": p99(held) / 1e3,
        "longest_call_us": max(held) / 1e3,
        "longest_handed_over_us": max(handed, default=0) / 1e3,
        "step_p99_ms": p99(steps) / 1e6,
        "methods": methods,
        "mean_ctas": (read.cta_bytes[side] - before.cta_bytes[side]) / max(by_kernel, 1),
        "switched_after_ms": switched[0] if switched else None,
        "submitter_longest_call_us": read.longest_call_ns / 1e3,
    }


def one_large_copy(memory: Memory, model: Model, what: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a row as one copy, or as several of the whole memory: what the machine allows there."""
    runtime, load = memory.runtime, what["direction"] == "load"
    stream, event = runtime.stream_create(), runtime.event_create()
    dst, src = memory.device.address, memory.host.address
    if not load:
        dst, src = src, dst
    left = what["block"] * what["copies"] * what["transfers"]
    runtime.stream_synchronize(model.stream)
    begin = now()
    if not load:
        model.run(FORWARD_NS)
        runtime.event_record(event, model.stream)
        runtime.stream_wait_event(stream, event)
    while left:
        size = min(left, memory.size)
        runtime.memcpy_async(dst, src, size, "h2d" if load else "d2h", stream)
        left -= size
    runtime.event_record(event, stream)
    ended: list[int] = []

    def over() -> bool:
        if not ended and runtime.event_query(event):
            ended.append(now())
        return bool(ended)

    watcher = threading.Thread(target=lambda: [time.sleep(0.0001) for _ in iter(over, True)])
    watcher.start()
    steps = model.steps(lambda: bool(ended), lambda: None)
    watcher.join()
    runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    return {"done_ms": (ended[0] - begin) / 1e6, "step_p99_ms": p99(steps) / 1e6}


WORK = [
    {
        "name": "store of 8,192 x 64 KiB behind a 30 ms forward",
        "direction": "store",
        "block": 65536,
        "copies": 8192,
        "transfers": 1,
        "limit": 1.10,
    },
    {
        "name": "store of 32,768 x 16 KiB behind it",
        "direction": "store",
        "block": 16384,
        "copies": 32768,
        "transfers": 1,
        "limit": 1.20,
    },
    {
        "name": "1,500 loads of 64 x 64 KiB",
        "direction": "load",
        "block": 65536,
        "copies": 64,
        "transfers": 1500,
        "limit": 1.10,
    },
    {
        "name": "1,500 loads of 64 x 16 KiB",
        "direction": "load",
        "block": 16384,
        "copies": 64,
        "transfers": 1500,
        "limit": 1.20,
    },
]
LARGE = "one large copy"
HOW = {  # policy, whether it is polled, whether a burst came before
    "shared, polled once a step": ("shared", True, False),
    "pooled, polled once a step": ("pooled", True, False),
    "pooled, not polled": ("pooled", False, False),
    "auto, polled once a step": ("auto", True, True),
    "auto, its first burst": ("auto", True, False),
}


def run_work(memory: Memory, model: Model, limits: Any, repeat: int, calibrated: Calibrated) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    alone: list[float] = []
    for _ in range(repeat):
        rates = {direction: memory.link(direction) for direction in ("load", "store")}
        alone.append(p99(model.steps(lambda: True, lambda: None, 40)) / 1e6)
        forward = model.forward_ms()
        played: dict[str, Any] = {"link": rates, "forward_ms": forward}
        for what in WORK:
            size = what["block"] * what["copies"] * what["transfers"]
            floor = size / rates[what["direction"]] * 1e3 + (forward if what["direction"] == "store" else 0)
            played[what["name"]] = {"floor_ms": floor, LARGE: one_large_copy(memory, model, what)}
            for key in HOW:
                row = played[what["name"]][key] = work(memory, model, limits, what, key)
                ctas = row["mean_ctas"]
                row["predicted_step"] = calibrated.step(model, what["direction"], ctas) if ctas else None
        rounds.append(played)
    return {"rounds": rounds, "alone_step_p99_ms": alone, "kernel_ns": model.unit_ns}


def rate_of(memory: Memory, limits: Any, block: int, direction: str, method: str, total: int) -> dict[str, Any]:
    gpu, cpu = memory.pools(block)
    count, rng = total // block, np.random.default_rng(2)
    with OffloadEngine(memory.runtime, gpu, cpu, policy="pooled", method=method, limits=limits) as engine:
        ids = [rng.permutation(gpu.blocks)[:count] for _ in range(2)]
        ask = engine.load if direction == "load" else engine.store
        ask(*ids, after=None).wait()
        best, used = 0.0, set()
        for _ in range(3):
            begin = now()
            transfers = [ask(*ids, after=None) for _ in range(3)]
            end = max(each.wait().noticed_ns for each in transfers)
            best = max(best, sum(each.bytes for each in transfers) / (end - begin) * 1e9)
            used.update(name for each in transfers for name in each.methods)
    return {"GB/s": best / 1e9, "methods": sorted(used)}


def run_sizes(memory: Memory, limits: Any, repeat: int) -> dict[str, Any]:
    total = min(memory.size, 512 << 20)
    rounds = []
    for _ in range(repeat):
        played: dict[str, Any] = {}
        for direction in ("load", "store"):
            peak = memory.link(direction)
            for shift in range(12, 23):
                block = 1 << shift
                row: dict[str, Any] = {"link": peak / 1e9}
                size = min(total, block * 65536)
                for method in ("auto", "loop", "batch", "kernel"):
                    if method == "loop" and block < 65536:
                        size_here = size // 16
                    else:
                        size_here = size
                    try:
                        row[method] = rate_of(memory, limits, block, direction, method, size_here)
                    except Exception as error:
                        row[method] = {"GB/s": 0.0, "error": str(error)}
                played[f"{direction} {block >> 10} KiB"] = row
        rounds.append(played)
    return {"rounds": rounds}


def run_parts(memory: Memory, limits: Any) -> dict[str, Any]:
    """Median and p99 in us of each part of a request, by number of blocks; none of them is handed over but the last."""
    gpu, cpu = memory.pools(65536)
    runtime, rng, found = memory.runtime, np.random.default_rng(3), {}
    stream, event = runtime.stream_create(), runtime.event_create()
    with OffloadEngine(runtime, gpu, cpu, policy="pooled", limits=limits, compute_stream=stream) as engine:

        def request(ids: tuple[Any, Any], what: int) -> None:
            count = len(ids[0])
            asked = REQUEST.pack(engine._handle, engine._why, stream, 1 << 40, count, count, count, 0, what)
            job = engine._held.kvp_job_request(asked, *(passed(each) for each in ids))
            engine._native.kvp_job_unused(engine._handle, job)
            engine._native.kvp_job_release(job)

        def whole(pause_s: float, ids: tuple[Any, Any]) -> None:
            engine.load(*ids).wait()
            time.sleep(pause_s)

        everything = rng.permutation(gpu.blocks)

        def keep_submitting() -> None:
            if engine.idle:
                engine.load(everything, everything[::-1], after=None)

        for count in (64, min(8192, gpu.blocks)):
            ids = (rng.permutation(gpu.blocks)[:count], rng.permutation(gpu.blocks)[:count])
            parts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "reading the clock twice": (lambda: (time.monotonic_ns(), time.monotonic_ns()), lambda: None),
                "checking arguments": (lambda ids=ids: engine.mapping.request(*ids), lambda: None),
                "an event record": (lambda: runtime.event_record(event, stream), lambda: None),
                "the same while copies are submitted": (lambda: runtime.event_record(event, stream), keep_submitting),
                "native request and its release": (lambda ids=ids: request(ids, 0), lambda: None),
                "the same with its mark": (lambda ids=ids: request(ids, 2), lambda: None),
                "whole, the thread naps": (
                    lambda ids=ids: engine.load(*ids),
                    lambda ids=ids: whole(0.002, ids),
                ),
                "whole, the thread sleeps": (
                    lambda ids=ids: engine.load(*ids),
                    lambda ids=ids: whole(0.05, ids),
                ),
            }
            for name, (part, before) in parts.items():
                took = []
                for _ in range(30 if "sleeps" in name else 300):
                    before()
                    start = now()
                    part()
                    took.append(now() - start)
                found[f"{count} blocks: {name}"] = [statistics.median(took) / 1e3, p99(took) / 1e3]
    runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    return found


def middle(values: list[float]) -> float:
    return statistics.median(values)


def show(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, depth {result['depth']}, {result['channels']} channels"]
    for name, (half, most) in result.get("parts", {}).items():
        lines.append(f"{name:50} p50 {half:7.2f} us, p99 {most:7.2f} us")
    for kind, played_with in result.get("work", {}).items():
        rounds = played_with["rounds"]
        alone = middle(played_with["alone_step_p99_ms"])
        lines.append(f"beside a model loop of {MODELS[kind]}: alone its step p99 is {alone:.2f} ms")
        for what in WORK:
            floors = [played[what["name"]]["floor_ms"] for played in rounds]
            floor = middle(floors)
            lines.append(f"{what['name']}: floor {floor:.1f} ms, asked: within {what['limit']:.2f}")
            allowed = [played[what["name"]][LARGE] for played in rounds]
            ratio = middle([row["done_ms"] / least for row, least in zip(allowed, floors, strict=True)])
            lines.append(
                f"  {LARGE:28} done {middle([row['done_ms'] for row in allowed]):7.1f} ms = {ratio:4.2f} x floor; "
                f"step p99 {middle([row['step_p99_ms'] for row in allowed]):5.2f} ms"
            )
            for key in HOW:
                rows = [played[what["name"]][key] for played in rounds]
                ctas = middle([row["mean_ctas"] for row in rows])
                predicted = middle([row["predicted_step"] or 1.0 for row in rows])
                mid = {
                    name: middle([row[name] for row in rows if row[name] is not None])
                    for name in rows[0]
                    if name.endswith(("_ms", "_us")) and rows[0][name] is not None
                }
                over = middle(
                    [
                        row["done_ms"] / played[what["name"]]["floor_ms"]
                        for row, played in zip(rows, rounds, strict=True)
                    ]
                )
                lines.append(
                    f"  {key:28} done {mid['done_ms']:7.1f} ms = {over:4.2f} x floor; held {mid['held_ms']:6.2f} ms, "
                    f"hand-over p99 {mid['hand_over_p99_us']:8.1f} us, longest {mid['longest_call_us']:8.1f} us; "
                    f"step p99 {mid['step_p99_ms']:5.2f} ms = {mid['step_p99_ms'] / alone:4.2f}"
                    + (f" of {predicted:4.2f} predicted" if ctas else "")
                    + "; "
                    + ", ".join(rows[0]["methods"])
                    + (f" ({ctas:.1f} CTAs)" if ctas else "")
                    + (
                        f"; switched after {mid['switched_after_ms']:.1f} ms, longest then "
                        f"{mid['longest_handed_over_us']:.1f} us"
                        if mid.get("switched_after_ms", -1) > 0
                        else ""
                    )
                )
    if "sizes" in result:
        lines.append("scattered blocks, GB/s (share of the link of the same round):")
        rounds = result["sizes"]["rounds"]
        for name in rounds[0]:
            cells = []
            for method in ("auto", "loop", "batch", "kernel"):
                value = middle([played[name][method]["GB/s"] for played in rounds])
                share = middle([played[name][method]["GB/s"] / played[name]["link"] for played in rounds])
                cells.append(f"{method} {value:5.1f} ({share:4.0%})")
            lines.append(f"  {name:15} {'  '.join(cells)}  auto used {rounds[0][name]['auto'].get('methods')}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=["work", "sizes", "parts"])
    parser.add_argument("--model", nargs="+", default=["spin", "memory", "matmul"], help="what the steps consist of")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.device != "host":
        try:
            import torch

            torch.cuda.init()
            name = torch.cuda.get_device_name()
        except Exception:
            name = "embedded host runtime"
    else:
        name = "embedded host runtime"
    runtime = find_runtime(given.device)
    gc.freeze()  # as servers do: a collection of all of torch's objects takes 80 ms of whoever meets it
    limits = calibrate(runtime)
    memory = Memory(runtime, 1 << 30 if runtime.provider == "cuda" else 64 << 20)
    if runtime.provider == "host":
        for what in WORK:
            what["copies"] = min(what["copies"], memory.size // what["block"])
            what["transfers"] = min(what["transfers"], 50)
    result: dict[str, Any] = {"device": name, "depth": limits.depth, "channels": limits.channels}
    if given.only in (None, "parts"):
        result["parts"] = run_parts(memory, limits)
    if given.only in (None, "work"):
        calibrated = Calibrated(runtime)
        result["work"] = {
            kind: run_work(memory, Model(runtime, kind), limits, given.repeat, calibrated) for kind in given.model
        }
    if given.only in (None, "sizes"):
        result["sizes"] = run_sizes(memory, limits, given.repeat)
    print(show(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
