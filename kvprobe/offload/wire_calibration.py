"""Measures coded copies on a GPU, beside the copies that would be made without: which CTAs, and whether coding pays.

Blocks of bf16 numbers, of a scale a channel as KV has them, are moved scattered between the GPU's and the CPU's memory,
several launches behind one another, and timed by events; the copies as they are, by the method that the chooser takes,
take turns with them: once for a GPU, driver, CUDA, link and version of the kernels.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import hashlib
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import Runtime
from kvprobe.cuda.copies import DIRECTIONS, METHOD_NAMES, PinnedList, columns, submit_copies
from kvprobe.cuda.kernels import CODED_SOURCES
from kvprobe.cuda.memory import Buffer
from kvprobe.environment import caches
from kvprobe.errors import KvprobeError
from kvprobe.native.library import CopyKernel, MethodTable, core
from kvprobe.offload.method_cache import identity, keep
from kvprobe.offload.methods import SIZES, Methods, method_table

__all__ = ["default", "known", "measure", "slower", "table_of"]

log = logging.getLogger("kvprobe")

FORMAT = "kvprobe-wire 3"
CTAS = (1, 2, 3, 4, 8, 16)
MEASURED = (4096, 8192, 16384, 32768, 65536, 262144, 1 << 20, 4 << 20)  # bytes of a block
POOL, LAUNCH, LAUNCHES, ROUNDS = 256 << 20, 32 << 20, 3, 3  # bytes; bytes; behind one another; of which the best counts
LEVEL = 1 << 20  # bytes of a block up to which the rate only rises (reports/h100-wire.txt)
TILE, CHANNELS, DEVIATION = 16 << 20, 128, 0.02
PAYS = 1.03  # times as fast as copies as they are, at least
NEAR = 1.01  # rows within 1% are equally fast: 3 CTAs load 1.4 to 2.5% slower than 4 (reports/h100-wire.txt)
PIECE = 16384  # KVP_WIRE_CELL
MANY = 8192
QUIET = -1  # enum kvp_compute
REFUSED = 256  # LEAST_ADDRESS of cells.c
# What products of 8192 x 8192 lose to 32 KiB blocks, a share of the copies' time: of an H100 (reports/h100-wire.txt);
# by 3 CTAs the mean of 2 and 4.
PRODUCTS = {
    "h2d": {1: 0.05, 2: 0.11, 3: 0.145, 4: 0.18, 8: 0.35, 16: 0.7},
    "d2h": {1: 0.04, 2: 0.09, 3: 0.095, 4: 0.10, 8: 0.43, 16: 0.9},
}
SLOWDOWN = {1: 0.0, 2: 0.005, 3: 0.01, 4: 0.015, 8: 0.04, 16: 0.3}  # as copies as they are by so many CTAs
# The same report: a smaller block takes as long as one of so many bytes; bytes a ns of large ones, by CTAs. By 3
# they are 0.98 and 0.89 of those by 4, as in its last table.
H100 = {
    "h2d": (8192, {1: 32.0, 2: 57.0, 3: 60.0, 4: 61.0, 8: 63.0, 16: 64.0}),
    "d2h": (16384, {1: 20.0, 2: 39.0, 3: 55.0, 4: 62.0, 8: 65.0, 16: 66.0}),
}
READ_CTA_BYTES, READ_THREADS = 16384, 256  # of kvp_read

_LAUNCH = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, *[ct.c_uint] * 7, ct.c_void_p, ct.c_void_p, ct.c_void_p)
_ENTRY = np.dtype([("dst", "u8"), ("src", "u8"), ("note", "u8")])  # kvp_wire_entry
_WORK = np.dtype(  # kvp_wire_work
    [
        *(("list", "u8"), ("count", "u4"), ("raw", "u4"), ("type", "u4"), ("check", "u4"), ("pace", "u4")),
        *(("room", "u4"), ("tails", "u8")),
    ]
)
_KERNEL = METHOD_NAMES.index("kernel")


class _Bench:
    """Memory, streams and events."""

    def __init__(self, runtime: Runtime, methods: Methods) -> None:
        self.runtime, self.methods = runtime, methods
        with contextlib.ExitStack() as made:

            def buffer(size: int, kind: str) -> Buffer:
                one = Buffer(runtime, size, kind)
                made.callback(one.close)
                return one

            self.device, self.host = buffer(POOL, "device"), buffer(POOL, "pinned")
            self.entries = {kind: buffer(_ENTRY.itemsize * MANY, "pinned") for kind in DIRECTIONS}
            self.notes = buffer(16 * MANY, "pinned")
            self.near, self.far = buffer(TILE, "device"), buffer(TILE, "pinned")
            self.lists = {kind: PinnedList(runtime, MANY) for kind in DIRECTIONS}
            for pinned in self.lists.values():
                made.callback(pinned.close)
            self.streams = [runtime.stream_create() for _ in range(2)]
            for stream in self.streams:
                made.callback(runtime.stream_destroy, stream)
            self.events = [runtime.event_create(timing=True) for _ in range(2)]
            for event in self.events:
                made.callback(runtime.event_destroy, event)
            self._fill()
            self.close = made.pop_all().close

    def _fill(self) -> None:
        draw = np.random.default_rng(1)
        scale = np.exp(draw.standard_normal(CHANNELS)).astype(np.float32) * np.float32(DEVIATION)
        values = draw.standard_normal(TILE // 2, np.float32) * np.resize(scale, TILE // 2)
        tile = (values.view(np.uint32) >> 16).astype(np.uint16)
        for at in range(0, POOL, TILE):
            self.runtime.memcpy(self.device.address + at, tile.ctypes.data, TILE, "h2d")

    def lay(self, size: int) -> int:
        """Chooses scattered places for blocks of `size`, once nothing moves any more; how many."""
        self.runtime.synchronize()
        count, draw, pieces = LAUNCH // size, np.random.default_rng(size), -(-size // PIECE)
        gpu, cpu = (
            draw.permutation(POOL // size)[:count].astype(np.uint64) * np.uint64(size) + np.uint64(base.address)
            for base in (self.device, self.host)
        )
        notes = np.arange(count, dtype=np.uint64) * np.uint64(16 * pieces) + np.uint64(self.notes.address)
        self.work, self.copies = {}, {}
        for kind, (dst, src) in {"h2d": (gpu, cpu), "d2h": (cpu, gpu)}.items():
            entries = np.frombuffer(self.entries[kind].view(), _ENTRY)[:count]
            entries["dst"], entries["src"], entries["note"] = dst, src, notes
            self.work[kind] = np.array([(self.entries[kind].address, count, size, 1, 0, 0, 0, 0)], _WORK)
            self.copies[kind] = columns(dst, src, size)
        return count

    def coded(self, kind: str, ctas: int) -> None:
        """One launch of a coded kernel."""
        kernel: CopyKernel = getattr(self.methods.native, f"coded_{'load' if kind == 'h2d' else 'store'}_kernel")
        given = (ct.c_void_p * 1)(self.work[kind].ctypes.data)
        launch = _LAUNCH(self.methods.native.cuda.launch_kernel)
        code = launch(
            kernel.function, ctas, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, self.streams[0], given, None
        )
        if code:
            raise self.runtime.error("cuLaunchKernel", code)

    def raw(self, kind: str, way: tuple[str, int]) -> None:
        """The same blocks as they are."""
        submit_copies(
            self.runtime, self.methods.native, way[0], kind, self.copies[kind], self.streams[0], ctas=way[1] or 1,
            pinned=self.lists[kind],
        )  # fmt: skip

    def check(self) -> None:
        """Whether loads found all cells whole.

        Raises:
            KvprobeError: they did not.
        """
        self.runtime.synchronize()
        count = int(self.work["h2d"]["count"][0])
        if (np.frombuffer(self.entries["h2d"].view(), _ENTRY)["note"][:count] < REFUSED).any():
            raise KvprobeError("a load refused what a store wrote")

    def timed(self, submit: Any, times: int) -> float:
        """Ns on the device of so many submissions behind one another; a copy before them hides the host's own time."""
        r = self.runtime
        r.memcpy_async(self.near.address, self.far.address, TILE, "h2d", self.streams[0])
        r.event_record(self.events[0], self.streams[0])
        for _ in range(times):
            submit()
        r.event_record(self.events[1], self.streams[0])
        r.event_synchronize(self.events[1])
        return r.event_elapsed_ms(*self.events) * 1e6


def measure(runtime: Runtime, methods: Methods) -> dict[str, Any]:
    """What coded copies take by direction, CTAs and size, and what the best copies as they are take.

    Raises:
        CudaError: a call failed.
        KvprobeError: a load refused what a store wrote.
    """
    bench = _Bench(runtime, methods)
    raw_table = method_table(methods)
    result: dict[str, Any] = {"format": FORMAT, "key": _key(runtime), "sizes": list(MEASURED), "rows": [], "raw": {}}
    most = min(kernel.max_ctas for kernel in (methods.native.coded_load_kernel, methods.native.coded_store_kernel))
    took: dict[tuple[str, int], list[tuple[float, float]]] = {}
    try:
        for size in MEASURED:
            count = bench.lay(size)
            for kind in ("d2h", "h2d"):
                if kind == "h2d":  # loads read what coded stores wrote
                    bench.coded("d2h", 8)
                ways = {ctas: partial(bench.coded, kind, ctas) for ctas in CTAS if ctas <= most}
                for ctas, figures in _in_turns(bench, ways, count).items():
                    took.setdefault((kind, ctas), []).append(figures)
                way = _raw_way(raw_table, kind, size)
                if kind == "h2d":
                    bench.check()
                    bench.raw("d2h", way)  # the GPU's blocks stay what they are
                (plain,) = _in_turns(bench, {0: partial(bench.raw, kind, way)}, count).values()
                result["raw"].setdefault(kind, []).append([*plain, *way])
        for (kind, ctas), measured in took.items():
            fixed, each = zip(*measured, strict=True)
            result["rows"].append({"direction": kind, "ctas": ctas, "fixed_ns": fixed, "copy_ns": list(each)})
        _without_others(result)
        _add_price(bench, result)
    finally:
        runtime.synchronize()
        bench.close()
    return result


def _in_turns(bench: _Bench, ways: dict[Any, Any], count: int) -> dict[Any, tuple[float, float]]:
    """Of each way the fixed time of a submission and the time of a copy, in ns."""
    one = {way: min(bench.timed(submit, 1) for _ in range(ROUNDS)) for way, submit in ways.items()}
    many: dict[Any, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, submit in ways.items():
            many[way].append(bench.timed(submit, LAUNCHES))
    each = {way: (min(many[way]) - one[way]) / ((LAUNCHES - 1) * count) for way in ways}
    each = {way: max(ns, one[way] / count / 2) for way, ns in each.items()}  # of a machine that was busy just then
    return {way: (max(one[way] - each[way] * count, 0.0), each[way]) for way in ways}


def _without_others(result: dict[str, Any]) -> None:
    """Of blocks up to `LEVEL`: larger ones are never slower a byte, coded or not, nor are more CTAs than fewer.

    Where a figure says so, something else used the link just then, and the chooser would take too few CTAs for that
    size alone, for as long as the measurement is kept.
    """
    sizes = [size for size in result["sizes"] if size <= LEVEL]
    for plain in result["raw"].values():
        for i in range(1, len(sizes)):
            plain[i][1] = min(plain[i][1], plain[i - 1][1] * sizes[i] / sizes[i - 1])
    fewer: dict[str, list[float]] = {}
    for row in sorted(result["rows"], key=lambda row: row["ctas"]):
        each = row["copy_ns"]
        for i in range(len(sizes)):
            if i:
                each[i] = min(each[i], each[i - 1] * sizes[i] / sizes[i - 1])
            if row["direction"] in fewer:
                each[i] = min(each[i], fewer[row["direction"]][i])
        fewer[row["direction"]] = each


def _raw_way(table: MethodTable, kind: str, size: int) -> tuple[str, int]:
    methods = ~(1 << METHOD_NAMES.index("staged")) & 0xFFFFFFFF
    row = core().kvp_choose_row(ct.byref(table), methods, None, QUIET, DIRECTIONS[kind], size, MANY)
    chosen = table.row[kind == "d2h"][row]
    return METHOD_NAMES[chosen.method], chosen.ctas


def _add_price(bench: _Bench, result: dict[str, Any]) -> None:
    """To each row what a memory-bound kernel beside it takes longer than beside one large copy."""
    bench.lay(32768)
    bench.coded("d2h", 8)
    readers = POOL // READ_CTA_BYTES
    pointer, never = ct.c_void_p(bench.device.address), ct.c_void_p(bench.notes.address)
    given = (ct.c_void_p * 2)(*(ct.cast(ct.byref(value), ct.c_void_p) for value in (pointer, never)))
    launch = _LAUNCH(bench.methods.native.cuda.launch_kernel)
    r = bench.runtime

    def beside(submit: Any) -> float:
        for _ in range(8):
            submit()
        r.event_record(bench.events[0], bench.streams[1])
        for _ in range(16):  # 4 GiB: 1.5 ms
            if code := launch(
                bench.methods.read_kernel, readers, 1, 1, READ_THREADS, 1, 1, 0, bench.streams[1], given, None
            ):
                raise r.error("cuLaunchKernel", code)
        r.event_record(bench.events[1], bench.streams[1])
        r.event_synchronize(bench.events[1])
        r.stream_synchronize(bench.streams[0])
        return float(r.event_elapsed_ms(*bench.events))

    def dma(kind: str) -> None:
        dst, src = (bench.near, bench.far) if kind == "h2d" else (bench.far, bench.near)
        for _ in range(LAUNCH // TILE):
            r.memcpy_async(dst.address, src.address, TILE, kind, bench.streams[0])

    for row in result["rows"]:
        kind, ctas = row["direction"], row["ctas"]
        plain, took = (
            min(beside(submit) for _ in range(ROUNDS))
            for submit in (partial(dma, kind), partial(bench.coded, kind, ctas))
        )
        row["slowdown"], row["product"] = max(took / plain - 1, 0.0), PRODUCTS[kind][ctas]


# -- what is known -----------------------------------------------------------------------------------------------------


def known(runtime: Runtime, methods: Methods) -> dict[str, Any] | None:
    """What was measured on this GPU, measured now where nobody did; None on the host runtime, and where that failed."""
    if runtime.provider != "cuda" or not methods.has_coded:
        return None
    if methods.coded is None:
        methods.coded = _cached(runtime)
    if methods.coded is None:
        try:
            methods.coded = measure(runtime, methods)
        except KvprobeError as error:
            log.warning("coded copies could not be measured on this GPU: %s", error)
            return None
        keep(_path(runtime), methods.coded)  # where it cannot be kept, it is measured again
    return methods.coded


def default() -> dict[str, Any]:
    """What an H100 did, where nothing was measured: which CTAs are taken, not whether coding pays."""
    rows = [
        {
            "direction": kind,
            "ctas": ctas,
            "fixed_ns": [8000.0] * len(MEASURED),
            "copy_ns": [max(size, least) / rate for size in MEASURED],
            "slowdown": SLOWDOWN[ctas],
            "product": PRODUCTS[kind][ctas],
        }
        for kind, (least, rates) in H100.items()
        for ctas, rate in rates.items()
    ]
    return {"format": FORMAT, "sizes": list(MEASURED), "rows": rows, "raw": {}}


def table_of(result: dict[str, Any], what: str, max_slowdown: float) -> MethodTable:
    """The chooser's table of a measurement: of "coded" copies by CTAs, or of the best "raw" ones."""
    table = MethodTable(measured=1, max_slowdown=max_slowdown, near=NEAR)
    rows = result["rows"]
    if what == "raw":
        rows = [
            {"direction": kind, "ctas": 0, "fixed_ns": [one[0] for one in each], "copy_ns": [one[1] for one in each]}
            for kind, each in result["raw"].items()
        ]
    for row in rows:
        side = row["direction"] == "d2h"
        into = table.row[side][table.rows[side]]
        into.method, into.ctas = _KERNEL, row["ctas"]
        into.slowdown, into.product = row.get("slowdown", 0.0), row.get("product", 0.0)
        for name in ("fixed_ns", "copy_ns"):
            getattr(into, name)[:] = np.interp(SIZES, result["sizes"], row[name]).tolist()
        for i, size in enumerate(SIZES):  # smaller than what was measured: in proportion
            if size < result["sizes"][0]:
                into.copy_ns[i] = row["copy_ns"][0]
        table.rows[side] += 1
    return table


def slower(result: dict[str, Any] | None, copy_bytes: int, max_slowdown: float) -> str:
    """Why coded copies of this size do not pay within what the user allows; "" where they do.

    They do where one direction is at least 3% faster by them, and the other one not slower by more.
    """
    if result is None:
        return "coded copies could not be measured on this GPU: wire='coded' takes them all the same"
    coded, raw = (table_of(result, what, max_slowdown) for what in ("coded", "raw"))
    gains = []
    for kind in ("h2d", "d2h"):
        side = kind == "d2h"
        row = core().kvp_choose_row(ct.byref(coded), 1 << _KERNEL, None, QUIET, DIRECTIONS[kind], copy_bytes, MANY)
        if row < 0:
            return f"max_slowdown={max_slowdown:g} allows no coded copies on this GPU"
        as_is, by_cells = (
            core().kvp_method_ns(ct.byref(each), copy_bytes, MANY) for each in (raw.row[side][0], coded.row[side][row])
        )
        gains.append(as_is / by_cells)
    if max(gains) >= PAYS and min(gains) >= 1 / PAYS:
        return ""
    return f"coded loads of {copy_bytes} bytes are {gains[0]:.2f} times as fast as raw ones here, stores {gains[1]:.2f}"


def _key(runtime: Runtime) -> str:
    sources = b"".join(path.read_bytes() for path in CODED_SOURCES)
    text = json.dumps([FORMAT, identity(runtime), hashlib.sha256(sources).hexdigest()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(runtime: Runtime) -> Path:
    return caches() / f"wire-{_key(runtime)}.json"


def _cached(runtime: Runtime) -> dict[str, Any] | None:
    try:
        held: dict[str, Any] = json.loads(_path(runtime).read_text())
        if held["format"] != FORMAT or held["key"] != _key(runtime):
            return None
        for what in ("coded", "raw"):
            table_of(held, what, 0.0)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return held
