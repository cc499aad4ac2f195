"""Measures what each method of copying does on this machine: the chooser's table, and what `kvprobe calibrate` shows.

One copy, and fewer and more submissions of many behind one another, of the same size and scattered, give a line: a
fixed time, and the time that each copy adds while submissions follow one another, as the submitter keeps them. No two
submissions move the same blocks: the GPU would still know where those lie. (A batch is begun when its call returns:
alone it takes its submit time and its copies' time, behind another one the longer of the two.) All times are host times
from the first submitting call to completion, the best of a few rounds: what other users of the machine add is not the
method's.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from kvprobe.cuda import MEMCPY_KIND, Runtime
from kvprobe.cuda.copies import PinnedList, columns, submit_copies
from kvprobe.cuda.kernels import BULK
from kvprobe.cuda.memory import Buffer
from kvprobe.launchqueue import calibration
from kvprobe.native.library import SubmitOptions, SubmitResult, core
from kvprobe.offload.method_cache import FORMAT, identity, table_of
from kvprobe.offload.methods import SIZES, Methods, choose, default_table, method_table

__all__ = ["measure"]

CTAS = (1, 2, 4, 8, 16)
QUICK_SIZES = tuple(1024 << i for i in (0, 2, 3, 4, 5, 6, 10, 12))  # the others lie between their neighbours
SUBMISSION_S = {"loop": 0.4e-3, "batch": 0.4e-3, "kernel": 0.8e-3}  # of the link: as large as the submitter's
SUBMISSIONS = 4  # behind one another
FEWER_MORE = {"loop": (1, 4), "batch": (2, 5), "kernel": (1, 4)}  # the first batch is not overlapped
MOST_COPIES = {"loop": 200, "batch": 2048, "kernel": 8192}  # of one
LOOP_COPIES, MANY_COPIES = 512, 8192
PATTERN_SIZES = (4096, 16384, 65536, 1 << 20)
BURST_BYTES = 64 << 10
BESIDE_BYTES = 64 << 20  # of a submission beside other work: some 1.2 ms, as the submitter's
BESIDE_ROUNDS = 8  # the worst of them is about a p99
PACED_SHARE = 0.89  # of the link: where store kernels beside compute neither saturate it nor lose much
PACED_PRODUCTS = {1: 0.26, 2: 0.28, 4: 0.58}  # what products lose by CTAs of such stores (an H200)
SHORT_KERNELS, SHORT_BYTES = 50, 64 << 20  # one after another, each as long as what copy kernels have under way takes

Progress = Callable[[str, float], None]


class _Bench:
    """Streams, events and memory that all measurements share."""

    def __init__(self, runtime: Runtime, methods: Methods, quick: bool) -> None:
        self.runtime, self.methods = runtime, methods
        self.quick = quick
        self.rounds = 2 if quick else 5
        self.ways = _ways(methods, quick)
        free = runtime.mem_info()[0]
        host = runtime.provider == "host"
        # large, as a server's are: blocks scattered over more than the GPU has translations for take longer
        self.pool = min(64 << 20 if host else 1 << 30, max(free // 16, 16 << 20))
        self.made: list[Any] = []
        self.device, self.host = self._buffer(self.pool, "device"), self._buffer(self.pool, "pinned")
        self.weights_bytes = min(16 << 20 if host else 1 << 30, free // 4) // 65536 * 65536
        self.weights = self._buffer(self.weights_bytes, "device")
        self.lists = {kind: PinnedList(runtime, 1 << 15) for kind in ("h2d", "d2h")}
        self.made += self.lists.values()
        self.streams = [runtime.stream_create() for _ in range(3)]
        self.events = [runtime.event_create(timing=True) for _ in range(2)]
        self.random = np.random.default_rng(1)
        self.link = {kind: self._link(kind) for kind in ("h2d", "d2h")}

    def _buffer(self, size: int, kind: str) -> Buffer:
        made = Buffer(self.runtime, size, kind)
        self.made.append(made)
        return made

    def close(self) -> None:
        self.runtime.synchronize()
        for stream in self.streams:
            self.runtime.stream_destroy(stream)
        for event in self.events:
            self.runtime.event_destroy(event)
        for one in self.made:
            one.close()

    def _link(self, kind: str) -> float:
        """Bytes per second of one large copy."""
        size = min(self.pool, (8 << 20) if self.runtime.provider == "host" else 256 << 20)
        dst, src = self.sides(kind)
        best = min(
            self.timed(lambda: self.runtime.memcpy_async(dst, src, size, kind, self.streams[0])) for _ in range(3)
        )
        return size / best * 1e9

    def timed(self, submit: Callable[[], Any], stream: int | None = None) -> float:
        """Ns from the first call to completion."""
        begin = time.perf_counter_ns()
        submit()
        self.runtime.stream_synchronize(self.streams[0] if stream is None else stream)
        return float(time.perf_counter_ns() - begin)

    def on_device(self, launch: Callable[[], Any]) -> float:
        """Ns between two events around work on the second stream."""
        start, end = self.events
        self.runtime.event_record(start, self.streams[1])
        launch()
        self.runtime.event_record(end, self.streams[1])
        self.runtime.event_synchronize(end)
        return self.runtime.event_elapsed_ms(start, end) * 1e6

    def sides(self, kind: str) -> tuple[int, int]:
        """Base addresses of destination and source."""
        device, host = self.device.address, self.host.address
        return (device, host) if kind == "h2d" else (host, device)

    def copies(self, kind: str, size: int, count: int, pattern: str = "scattered") -> np.ndarray[Any, Any]:
        """Copies over the pools: "scattered", in "runs" of 8 neighbours, or "contiguous"."""
        slots = self.pool // size
        count = min(count, slots)
        dst, src = self.sides(kind)
        if pattern == "contiguous":
            order = [np.arange(count), np.arange(count)]
        elif pattern == "runs" and slots >= 8:
            order = [
                (self.random.permutation(slots // 8)[:, None] * 8 + np.arange(8)).ravel()[:count] for _ in range(2)
            ]
        else:
            order = [self._scattered(slots, count) for _ in range(2)]
        least = min(len(each) for each in order)
        at = [each[:least].astype(np.uint64) * np.uint64(size) for each in order]
        return columns(np.uint64(dst) + at[0], np.uint64(src) + at[1], size)

    def _scattered(self, slots: int, count: int) -> np.ndarray[Any, Any]:
        """So many different slots, far from one another; a permutation of all of them would take longer than copies."""
        step = int(self.random.integers(slots // 2, slots)) | 1
        while math.gcd(step, slots) != 1:
            step += 2
        return (int(self.random.integers(slots)) + np.arange(count) * step) % slots

    def many(self, kind: str, method: str, size: int) -> int:
        """How many copies make a submission that shows a rate."""
        wanted = int(self.link[kind] * SUBMISSION_S[method] / size)
        return max(4, min(wanted, MOST_COPIES[method], self.pool // size))

    def submitter(self, kind: str, method: str, ctas: int, copies: np.ndarray[Any, Any], stream: int) -> Any:
        """A function that submits the copies natively, and returns the host ns that took."""
        now = core().kvp_now_ns
        if method == "loop":
            dst, src, sizes = (np.ascontiguousarray(copies[name]) for name in ("dst", "src", "bytes"))
            options = SubmitOptions(copy=self.runtime.address("cudaMemcpyAsync"), stream=stream, kind=MEMCPY_KIND[kind])
            result = SubmitResult()

            def loop() -> float:
                begin = now()
                code = core().kvp_submit(
                    ct.byref(options),
                    len(dst),
                    dst.ctypes.data,
                    src.ctypes.data,
                    sizes.ctypes.data,
                    0,
                    ct.byref(result),
                )
                if code:
                    raise self.runtime.error("cudaMemcpyAsync", code)
                return float(now() - begin)

            return loop

        def other() -> float:
            begin = now()
            submit_copies(
                self.runtime, self.methods.native, method, kind, copies, stream, ctas=ctas, pinned=self.lists[kind]
            )
            return float(now() - begin)

        return other

    def transfer(
        self, way: tuple[str, str, int], size: int, each: int, times: int, pattern: str = "scattered"
    ) -> tuple[float, float, int]:
        """`times` submissions of `each` copies, none of which moves what another one did; the best of the rounds.

        Returns ns to completion, ns in the submitting calls, copies.
        """
        kind, method, ctas = way
        times = min(times, max(self.pool // size // each, 1))
        took, spent = [], []
        for _ in range(self.rounds):
            copies = self.copies(kind, size, times * each, pattern)
            parts = [copies[i * each : (i + 1) * each] for i in range(times)]
            submits = [self.submitter(kind, method, ctas, part, self.streams[0]) for part in parts]
            took.append(self.timed(lambda: spent.append(sum(submit() for submit in submits))))  # noqa: B023
        return min(took), min(spent), times * each


def measure(
    runtime: Runtime, methods: Methods, *, quick: bool = False, progress: Progress = lambda what, fraction: None
) -> dict[str, Any]:
    """All figures, as `kvprobe calibrate --json` prints them.

    Args:
        runtime: the CUDA runtime.
        methods: of its device.
        quick: only what the chooser needs, in under two seconds.
        progress: called with what is measured and the share that is done.

    Raises:
        CudaError: a call failed.
        KvprobeError: the launch queue could not be measured.
    """
    began = time.perf_counter()
    progress("the launch queue", 0.0)
    result: dict[str, Any] = {
        "format": FORMAT,
        "quick": quick,
        **identity(runtime),
        "queue": asdict(calibration.calibrate(runtime)),
        "missing": dict(methods.missing),
        "kernels": methods.kernels,
    }
    bench = _Bench(runtime, methods, quick)
    try:
        result["link_bytes_per_s"] = bench.link
        ways = [(kind, method, ctas) for kind in ("h2d", "d2h") for method, ctas in bench.ways]
        result["rows"] = []
        for number, (kind, method, ctas) in enumerate(ways):
            progress(f"{method}, {kind}", 0.05 + 0.6 * number / len(ways))
            result["rows"].append(_row(bench, kind, method, ctas))
        result["paced_store_bytes_per_s"] = _paced(bench)
        progress("what copies cost other work", 0.65)
        methods.native.store_bytes_per_s = result["paced_store_bytes_per_s"]
        result["beside"] = _beside(bench)
        methods.native.store_bytes_per_s = 0
        _add_price(result, methods)
        if not quick:
            progress("patterns", 0.75)
            result["patterns"] = _patterns(bench)
            progress("both directions at once", 0.85)
            result["both"] = _both(bench)
            progress("a small copy behind a burst", 0.95)
            result["behind_burst"] = _behind_burst(bench)
    finally:
        methods.native.store_bytes_per_s = 0
        bench.close()
    result["choices"] = _choices(result, methods)
    result["seconds"] = round(time.perf_counter() - began, 3)
    return result


def _ways(methods: Methods, quick: bool) -> list[tuple[str, int]]:
    """The rows of a table: methods, kernels with several numbers of CTAs."""
    plain = [(name, 0) for name in ("loop", "batch") if name not in methods.missing]
    if not methods.has_kernel:
        return plain
    numbers = CTAS[:-1] if quick else CTAS  # so many are never worth their price
    return plain + [("kernel", ctas) for ctas in numbers if ctas <= methods.native.load_kernel.max_ctas]


def _row(bench: _Bench, kind: str, method: str, ctas: int) -> dict[str, Any]:
    sizes = QUICK_SIZES if bench.quick else SIZES
    each: list[float] = []
    fixed, submit, rate, counts = [], [], [], []
    for size in sizes:
        count, (fewer, more) = bench.many(kind, method, size), FEWER_MORE[method]
        one_ns, _, _ = bench.transfer((kind, method, ctas), size, 1, 1)
        few_ns, _, few = bench.transfer((kind, method, ctas), size, count, fewer)
        all_ns, spent, all_count = bench.transfer((kind, method, ctas), size, count, more)
        a_copy = (all_ns - few_ns) / max(all_count - few, 1)
        if method == "batch":
            a_copy = max(a_copy, spent / all_count)
        else:
            a_copy = max(a_copy, (all_ns - one_ns) / max(all_count - 1, 1))
        a_copy = min(max(a_copy, size / bench.link[kind] * 1e9), all_ns / all_count)
        if each and not ctas:  # larger copies by DMA are never slower a byte: something else used the link just then
            a_copy = min(a_copy, each[-1] * size / sizes[len(each) - 1])
        each.append(a_copy)
        # half: of a machine that was busy just then
        fixed.append(max(min(one_ns, few_ns * count / (2 * few)) - a_copy, 0.0))
        submit.append(spent / all_count)
        rate.append(size / a_copy * 1e9)
        counts.append(all_count)
    filled = {
        name: np.interp(SIZES, sizes, values).tolist()
        for name, values in (("fixed_ns", fixed), ("copy_ns", each), ("submit_ns", submit))
    }
    return {
        "direction": kind,
        "method": method,
        "ctas": ctas,
        "sizes": list(SIZES),
        **filled,
        "measured": [
            {"copy_bytes": size, "copies": count, "bytes_per_s": speed}
            for size, count, speed in zip(sizes, counts, rate, strict=True)
        ],
    }


def _paced(bench: _Bench) -> int:
    """Bytes per second at which store kernels spare the kernels beside them; 0 where they do not keep to it here."""
    kernel = bench.methods.native.store_kernel
    if not bench.methods.has_kernel or kernel.kind != BULK:
        return 0
    asked, size, native = int(PACED_SHARE * bench.link["d2h"]), 16384, bench.methods.native
    native.store_bytes_per_s = asked
    way, count = ("d2h", "kernel", 2), bench.many("d2h", "kernel", size)
    few_ns, _, few = bench.transfer(way, size, count, 1)
    all_ns, _, copies = bench.transfer(way, size, count, SUBMISSIONS)
    native.store_bytes_per_s = 0
    reached = (copies - few) * size / max(all_ns - few_ns, 1.0) * 1e9
    return asked if copies > few and 0.9 * asked <= reached <= 1.1 * asked else 0


# -- the price --------------------------------------------------------------------------------


class _Work:
    """Kernels of a model, of one kind, on the second stream."""

    def __init__(self, bench: _Bench, name: str, launch: Callable[[], None], kernels: int, cover: _Work | None) -> None:
        """`cover`: runs first, so that these stand in the queue by then: else the host's launching is measured."""
        self._bench, self._launch, self._cover = bench, launch, cover
        self.name, self.kernels = name, kernels
        self.took()
        self.alone_ns = min(self.took() for _ in range(3))
        self.whole_ns = self.alone_ns + (cover.alone_ns if cover else 0.0)

    def run(self) -> None:
        """Launches them."""
        self._launch()

    def took(self) -> float:
        """Ns on the device."""
        if self._cover:
            self._cover.run()
        return self._bench.on_device(self._launch)


def _beside(bench: _Bench) -> list[dict[str, Any]]:
    """How much longer work takes while copies run: a memory-bound kernel, short kernels, torch's products and sums."""
    works: list[_Work] = []
    read = None
    if bench.methods.read_kernel:
        read = _Work(bench, "read", *_reader(bench), None)
        works.append(read)
        if not bench.quick:
            short = min(SHORT_BYTES, bench.weights_bytes)
            works.append(_Work(bench, "short", *_reader(bench, of=short, times=SHORT_KERNELS), read))
    if not bench.quick and bench.runtime.provider == "cuda":
        with contextlib.suppress(ImportError, RuntimeError):
            works.append(_Work(bench, "matmul", _matmul(bench, 4096, 25), 25, read))
            works.append(_Work(bench, "decode", _matmul(bench, 64, 100), 100, read))
            works.append(_Work(bench, "sum", _sum(bench, 50), 50, read))
    return [
        {
            "work": work.name,
            "kernels": work.kernels,
            "direction": kind,
            "method": "dma" if method == "loop" else method,
            "ctas": ctas,
            "alone_ns": work.alone_ns,
            **_while_copying(bench, work, kind, method, ctas),
        }
        for work in works
        for kind in ("h2d", "d2h")
        for method, ctas in [("loop", 0), *(way for way in bench.ways if way[1])]
    ]


def _while_copying(bench: _Bench, work: _Work, kind: str, method: str, ctas: int) -> dict[str, float]:
    """Ns of the work on the device, in the best and the worst of a few rounds.

    Copies run from before its beginning until after its end, and submissions begin meanwhile, as the submitter's do:
    CTAs that are placed among a kernel's own cost it more than those that were there before it.
    """
    size = (4 << 20) if method == "loop" else 16384
    burst = min(bench.pool, BESIDE_BYTES // (16 if bench.runtime.provider == "host" else 1))
    copies = bench.copies(kind, size, max(burst // size, 1))
    submit = bench.submitter(kind, method, ctas, copies, bench.streams[0])
    one = bench.timed(submit)
    took = []
    for _ in range(2 if bench.quick else BESIDE_ROUNDS):
        for _ in range(int(1.6 * work.whole_ns / one) + 2):
            submit()  # the same list again and again: its contents stay the same
        took.append(work.took())
        bench.runtime.stream_synchronize(bench.streams[0])
    return {"beside_ns": min(took), "beside_most_ns": max(took)}


def _reader(bench: _Bench, of: int = 0, times: int = 0) -> tuple[Callable[[], None], int]:
    """A function that launches kernels that read so many bytes of memory each, and how many those are."""
    size = of or bench.weights_bytes
    ctas = size // 16384
    pointer, never = ct.c_void_p(bench.weights.address), ct.c_void_p(bench.device.address)
    parameters = (ct.c_void_p * 2)(*(ct.cast(ct.byref(value), ct.c_void_p) for value in (pointer, never)))
    function = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, *[ct.c_uint] * 7, ct.c_void_p, ct.c_void_p, ct.c_void_p)(
        bench.methods.native.cuda.launch_kernel
    )
    if not times:
        times = 1 if bench.runtime.provider == "host" else max(1, ((8 if bench.quick else 24) << 30) // size)

    def launch() -> None:
        for _ in range(times):
            code = function(bench.methods.read_kernel, ctas, 1, 1, 256, 1, 1, 0, bench.streams[1], parameters, None)
            if code:
                raise bench.runtime.error("cuLaunchKernel", code)

    launch.keeps = (pointer, never, parameters)  # type: ignore[attr-defined]
    return launch, times


def _matmul(bench: _Bench, rows: int, times: int) -> Callable[[], None]:
    """Products of `rows` x 4,096 by 4,096 x 4,096: of a prefill, or of a decode step, which reads the weights."""
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(bench.streams[1])):
        a = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
        weights = torch.zeros(1 if rows > 512 else 8, 4096, 4096, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(a)

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(bench.streams[1])):
            for i in range(times):
                torch.mm(a, weights[i % len(weights)], out=out)

    return launch


def _sum(bench: _Bench, times: int) -> Callable[[], None]:
    """Sums of 64 Mi numbers, which read and write 128 MiB each: element-wise work between a model's products."""
    import torch

    a = torch.zeros(64 << 20, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(bench.streams[1])):
            for _ in range(times):
                torch.add(a, 1, out=out)

    return launch


def _add_price(result: dict[str, Any], methods: Methods) -> None:
    """To each row what its kernel costs other work beyond what DMA costs it.

    `slowdown`: a memory-bound kernel; `product`: the matrix product that loses most. Without torch, and where it has to
    be quick, the products' price is the default's. `kernel_end_ns`, DMA's share included: what each kernel loses that
    ends meanwhile, however short it is; its end waits for what is under way on the link.
    """
    default = default_table(methods)
    known = {
        (kind, row.ctas): row.product
        for side, kind in enumerate(("h2d", "d2h"))
        for row in default.row[side][: default.rows[side]]
        if row.ctas
    }
    if result["paced_store_bytes_per_s"]:
        known.update({("d2h", ctas): lost for ctas, lost in PACED_PRODUCTS.items()})
    price: dict[tuple[str, str, int], float] = {}
    dma = {
        (one["work"], one["direction"]): one["beside_ns"] / one["alone_ns"]
        for one in result["beside"]
        if one["method"] == "dma"
    }
    ends = {
        (one["direction"], one["ctas"]): max(one["beside_ns"] - one["alone_ns"], 0.0) / one["kernels"]
        for one in result["beside"]
        if one["work"] == "short"
    }
    for one in result["beside"]:
        work = {"read": "slowdown", "matmul": "product", "decode": "product"}.get(one["work"])
        if one["ctas"] and work:
            key = (work, one["direction"], one["ctas"])
            more = one["beside_ns"] / one["alone_ns"] - dma[one["work"], one["direction"]]
            price[key] = max(price.get(key, 0.0), more)
    for row in result["rows"]:
        if ends:
            row["kernel_end_ns"] = ends.get((row["direction"], row["ctas"]))
        row["slowdown"] = price.get(("slowdown", row["direction"], row["ctas"]), 0.0)
        fallback = known.get((row["direction"], row["ctas"]), 0.0)
        row["product"] = price.get(("product", row["direction"], row["ctas"]), fallback)


# -- what the chooser does not need --------------------------------------------------------------------------------


def _patterns(bench: _Bench) -> list[dict[str, Any]]:
    found = []
    for kind in ("h2d", "d2h"):
        for method, ctas in [way for way in bench.ways if way[1] in (0, 2)]:
            for size in PATTERN_SIZES:
                speeds = {}
                for pattern in ("contiguous", "runs", "scattered"):
                    way, count = (kind, method, ctas), bench.many(kind, method, size)
                    took, _, copies = bench.transfer(way, size, count, SUBMISSIONS, pattern)
                    speeds[pattern] = copies * size / took * 1e9
                found.append(
                    {"direction": kind, "method": method, "ctas": ctas, "copy_bytes": size, "bytes_per_s": speeds}
                )
    return found


def _both(bench: _Bench) -> list[dict[str, Any]]:
    """Loads and stores at once: bytes per second of each while both run."""
    found = []
    for method, ctas in [way for way in bench.ways if way[1] in (0, 2, 4)]:
        for size in PATTERN_SIZES:
            best, total = float("inf"), 0
            submits = []
            for kind, stream in (("h2d", bench.streams[0]), ("d2h", bench.streams[2])):
                copies = bench.copies(kind, size, bench.many(kind, method, size))
                total += SUBMISSIONS * int(copies["bytes"].sum())
                submits.append(bench.submitter(kind, method, ctas, copies, stream))
            for _ in range(bench.rounds):
                begin = time.perf_counter_ns()
                for submit in submits * SUBMISSIONS:
                    submit()
                bench.runtime.stream_synchronize(bench.streams[0])
                bench.runtime.stream_synchronize(bench.streams[2])
                best = min(best, float(time.perf_counter_ns() - begin))
            found.append({"method": method, "ctas": ctas, "copy_bytes": size, "bytes_per_s": total / best * 1e9})
    return found


def _behind_burst(bench: _Bench) -> list[dict[str, Any]]:
    """Time of a copy of 4 KiB on another stream, submitted just after a burst of the same direction."""
    found = []
    for kind in ("h2d", "d2h"):
        dst, src = bench.sides(kind)
        for method, ctas in [way for way in bench.ways if way[1] in (0, 2)]:
            copies = bench.copies(kind, BURST_BYTES, LOOP_COPIES)
            burst = bench.submitter(kind, method, ctas, copies, bench.streams[0])
            burst_ns = bench.timed(burst)
            took = []
            for _ in range(5):
                burst()
                took.append(
                    bench.timed(
                        lambda: bench.runtime.memcpy_async(dst, src, 4096, kind, bench.streams[2]),  # noqa: B023
                        bench.streams[2],
                    )
                )
                bench.runtime.stream_synchronize(bench.streams[0])
            found.append(
                {
                    "direction": kind,
                    "method": method,
                    "ctas": ctas,
                    "burst_bytes": int(copies["bytes"].sum()),
                    "burst_ns": burst_ns,
                    "small_copy_ns": sorted(took)[2],
                }
            )
    return found


def _choices(result: dict[str, Any], methods: Methods) -> list[dict[str, Any]]:
    """What the chooser takes for many copies of each size, and what that did."""
    table, found = method_table(methods, measured=table_of(result)), []
    for kind in ("h2d", "d2h"):
        for size in SIZES:
            method, ctas = choose(table, kind, size, MANY_COPIES)  # so many that the fixed time does not count
            row = next(
                one for one in result["rows"] if (one["direction"], one["method"], one["ctas"]) == (kind, method, ctas)
            )
            rate = size / row["copy_ns"][SIZES.index(size)] * 1e9
            found.append(
                {
                    "direction": kind,
                    "copy_bytes": size,
                    "method": method,
                    "ctas": ctas,
                    "bytes_per_s": rate,
                    "of_link": rate / result["link_bytes_per_s"][kind],
                }
            )
    return found
