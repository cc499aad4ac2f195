"""The coded copy kernels on a GPU: whether every byte comes back, and how fast, beside the copy kernels and the link.

    python benchmarks/wire_gpu.py                      checks, then every table
    python benchmarks/wire_gpu.py --only checks        bytes alone, for compute-sanitizer with --small
    python benchmarks/wire_gpu.py --variants           other teams and stages than the default ones, beside them
    python benchmarks/wire_gpu.py --only near          the kernels alone: both sides are GPU memory
    python benchmarks/wire_gpu.py --only engine        the same through an engine with a pool of cells
    python benchmarks/wire_gpu.py --device host        no GPU: the checks, the kernels' threads being fibers

GB/s are raw bytes over the time between two events on the stream, around one launch that moves --megabytes; "of the
link": over one large cudaMemcpyAsync of the same run. What is compared takes turns;
each figure is the median of its rounds. A column "32K/4" is blocks of 32 KiB and 4 CTAs.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import find_runtime
from kvprobe.cuda.copies import PinnedList, columns, copy_rate, submit_copies
from kvprobe.cuda.kernels import CODED_SOURCES, _compiled, _driver, _function, _module
from kvprobe.cuda.memory import Buffer
from kvprobe.offload import BlockPool, OffloadEngine, wire
from kvprobe.offload.methods import copier_for

CELL = 16384
WORK = np.dtype(
    [
        *(("list", "u8"), ("count", "u4"), ("raw", "u4"), ("type", "u4"), ("check", "u4"), ("pace", "u4")),
        *(("room", "u4"), ("tails", "u8")),
    ]
)
ENTRY = np.dtype([("dst", "u8"), ("src", "u8"), ("note", "u8")])
NOTE = np.dtype([("bytes", "u4"), ("summed", "u4"), ("checksum", "u8")])
SIZES = (8192, 16384, 32768, 65536, 262144, 1 << 20, 4 << 20)
CTAS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Shape:
    """How the kernels are cut.

    Attributes:
        load: threads of a team that decode, teams, stages, vectors of 16 bytes that a thread has in hand.
        store: threads of a team, teams, stages, cells, vectors of 16 bytes that a thread has in hand.
    """

    load: tuple[int, int, int, int] = (128, 4, 3, 4)
    store: tuple[int, int, int, int, int] = (128, 4, 2, 1, 8)

    def options(self) -> list[str]:
        """As a compiler takes it."""
        names = ["LOAD_TEAM", "LOAD_TEAMS", "LOAD_STAGES", "LOAD_HAND"]
        names += ["STORE_TEAM", "STORE_TEAMS", "STORE_STAGES", "STORE_CELLS", "STORE_HAND"]
        return [f"-DKVP_{name}={value}" for name, value in zip(names, (*self.load, *self.store), strict=True)]

    def shared(self, store: bool) -> int:
        """As sizeof(kvp_store_team), sizeof(kvp_load_team)."""
        stage, job = CELL + 128, 56
        if store:
            team, teams, stages, cells, _ = self.store
            parts = (stages + cells) * (stage + job + 8) + 3 * 4 * 136 + CELL // 8 + team // 4 + 8
        else:
            team, teams, stages, _ = self.load
            parts = stages * (stage + job + 2 * 8 + team // 4 + 4)
        return -(-parts // 128) * 128 * teams

    def threads(self, store: bool) -> int:
        """Of a CTA."""
        return self.store[0] * self.store[1] if store else (self.load[0] + 32) * self.load[1]

    def name(self, store: bool) -> str:
        """Of one direction."""
        *cut, hand = self.store if store else self.load
        return "x".join(map(str, cut)) + f" hand {hand}"

    def __str__(self) -> str:
        return f"load {self.name(store=False)}, store {self.name(store=True)}"


DEFAULT = Shape()
VARIANTS = (
    DEFAULT,
    Shape((128, 4, 3, 8), (128, 4, 2, 1, 4)),
    Shape((256, 2, 6, 4), (256, 3, 2, 2, 4)),
    Shape((128, 6, 2, 4), (128, 3, 2, 2, 8)),
)


class Kernels:
    """The two kernels of one shape, loaded."""

    def __init__(self, runtime: Any, shape: Shape, cubin: bytes) -> None:
        driver = _driver(runtime)
        module = _module(driver, cubin)
        self.launcher, self.shape = driver.cuLaunchKernel, shape
        self.function = [
            _function(driver, module, f"kvp_coded_{name}", shape.shared(name == "store")) for name in ("load", "store")
        ]

    def launch(self, store: bool, work: np.ndarray[Any, Any], ctas: int, stream: int) -> None:
        """One launch."""
        threads = self.shape.threads(store)
        given = (ct.c_void_p * 1)(work.ctypes.data)
        code = self.launcher(
            ct.c_void_p(self.function[store]), ctas, 1, 1, threads, 1, 1, self.shape.shared(store),
            ct.c_void_p(stream), given, None,
        )  # fmt: skip
        if code:
            raise SystemExit(f"cuLaunchKernel returned {code}")


class Fibers:
    """The same two kernels on ordinary memory."""

    def __init__(self, shape: Shape) -> None:
        root = Path(__file__).resolve().parent.parent
        native = root / "kvprobe" / "native"
        self.shape, self.lot = shape, 0
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "coded.so"
            command = ["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{native / 'src'}"]
            command += [f"-I{native / 'kernels'}", *shape.options(), "-o", str(made)]
            command.append(str(root / "tests" / "native" / "programs" / "coded_kernels.cpp"))
            subprocess.run(command, check=True)
            self.library = ct.CDLL(str(made))
        for store in (False, True):
            assert self.library.coded_shared_bytes(store) == shape.shared(store)

    def launch(self, store: bool, work: np.ndarray[Any, Any], ctas: int, stream: int) -> None:
        """One launch."""
        self.lot += 1
        if self.library.coded_run(int(store), ct.c_void_p(work.ctypes.data), ctas, ct.c_uint64(self.lot)):
            raise SystemExit("threads wait for one another without end")


def compiled(shapes: tuple[Shape, ...]) -> list[bytes | None]:
    """Machine code of each shape, by nvcc; None where it does not compile."""
    source = "".join(path.read_text() for path in CODED_SOURCES)

    def one(shape: Shape) -> bytes | None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "coded.cu").write_text(source)
            command = ["nvcc", "-std=c++17", "-arch=sm_90", "--cubin", "-Xptxas", "-v", *shape.options(), "coded.cu"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            used = [line.split("Used")[1].split(",")[0] for line in done.stderr.splitlines() if "Used" in line]
            spills = [line for line in done.stderr.splitlines() if "spill" in line and "0 bytes spill" not in line]
            print(shape, "registers of load, store:", used[:2], *(line.strip() for line in spills[:2]))
            if done.returncode:
                print(done.stderr[:2000])
                return None
            return (Path(folder) / "coded.cubin").read_bytes()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, shapes))


def normal(size: int, seed: int, channels: bool = False) -> np.ndarray[Any, Any]:
    """bf16 of deviation 0.02; `channels`: of a log-normal scale a channel, as KV has it."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(-(-size // 2), np.float32) * np.float32(0.02)
    if channels:
        scale = np.exp(draw.standard_normal(128)).astype(np.float32)
        values *= np.resize(scale, values.shape)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:size]


class Pool:
    """Blocks on the GPU and their places in CPU memory, both scattered, and what launches read."""

    def __init__(self, runtime: Any, size: int, far: str = "pinned") -> None:
        self.runtime, self.size = runtime, size
        self.gpu, self.back = Buffer(runtime, size + 4096, "device"), Buffer(runtime, size + 4096, "device")
        self.cpu = Buffer(runtime, size + 4096, far)
        self.lists = [Buffer(runtime, 24 * (size // 4096 + 16), "pinned") for _ in range(2)]
        self.notes = Buffer(runtime, 16 * (size // 2048 + 4096), "pinned")
        self.pinned = [PinnedList(runtime, size // 4096 + 16) for _ in range(2)]
        self.wake = [Buffer(runtime, 16 << 20, "pinned"), Buffer(runtime, 16 << 20, "device")]
        self.stream = runtime.stream_create()
        self.start, self.end = (runtime.event_create(True) for _ in range(2))

    def fill(self, tile: np.ndarray[Any, Any]) -> None:
        """Fills the GPU's side with copies of `tile`."""
        tile = np.ascontiguousarray(tile)
        for at in range(0, self.size, len(tile)):
            some = min(len(tile), self.size - at)
            self.runtime.memcpy(self.gpu.address + at, tile.ctypes.data, some, "h2d")

    def lay(self, raw: int, count: int, gpu_off: int = 0, cpu_off: int = 0, stride: int = 0) -> None:
        """Chooses places for `count` blocks."""
        stride = stride or raw
        self.raw, self.count, self.units = raw, count, -(-raw // CELL)
        draw = np.random.default_rng(raw + count)
        slots = self.size // stride
        self.gpu_at = draw.permutation(slots)[:count].astype(np.uint64) * np.uint64(stride) + np.uint64(gpu_off)
        self.cpu_at = draw.permutation(slots)[:count].astype(np.uint64) * np.uint64(stride) + np.uint64(cpu_off)
        notes = np.uint64(self.notes.address) + np.arange(count, dtype=np.uint64) * np.uint64(16 * self.units)
        for store in (0, 1):
            entries = np.frombuffer(self.lists[store].view(), ENTRY)[:count]
            gpu = np.uint64(self.gpu.address if store else self.back.address) + self.gpu_at
            cpu = np.uint64(self.cpu.address) + self.cpu_at
            entries["dst"], entries["src"], entries["note"] = (cpu, gpu, notes) if store else (gpu, cpu, notes)

    def refused(self) -> int:
        """Blocks of the last loads that were not what was stored."""
        self.runtime.stream_synchronize(self.stream)
        return int((np.frombuffer(self.lists[0].view(), ENTRY)[: self.count]["note"] < 256).sum())

    def work(self, store: bool, type_: int = 1, check: int = 0, pace: int = 0) -> np.ndarray[Any, Any]:
        """The parameter of a launch."""
        return np.array([(self.lists[store].address, self.count, self.raw, type_, check, pace, 0, 0)], WORK)

    def copies(self, store: bool) -> np.ndarray[Any, Any]:
        """The same blocks for the raw kernels."""
        gpu = np.uint64(self.gpu.address if store else self.back.address) + self.gpu_at
        cpu = np.uint64(self.cpu.address) + self.cpu_at
        return columns(*((cpu, gpu) if store else (gpu, cpu)), self.raw)

    def read(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """The bytes of a buffer."""
        if buffer.kind == "pinned":
            return np.frombuffer(buffer.view(), np.uint8)
        out = np.empty(buffer.bytes, np.uint8)
        self.runtime.memcpy(out.ctypes.data, buffer.address, buffer.bytes, "d2h")
        return out

    def timed(self, submit: Any) -> float:
        """GB/s of raw bytes. A copy before it hides the host's own work, and wakes the link."""
        r = self.runtime
        r.memcpy_async(self.wake[1].address, self.wake[0].address, 16 << 20, "h2d", self.stream)
        r.event_record(self.start, self.stream)
        submit()
        r.event_record(self.end, self.stream)
        r.event_synchronize(self.end)
        return float(self.raw * self.count / r.event_elapsed_ms(self.start, self.end) / 1e6)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_blocks(pool: Pool, kernels: Kernels | Fibers, data: np.ndarray[Any, Any], raw: int, **how: Any) -> float:
    """Stores and loads blocks of `data`; cells equal to the CPU coder's; the share that travelled."""
    runtime, type_, check, ctas = pool.runtime, how.get("type_", 1), how.get("check", 0), how.get("ctas", 3)
    gpu_off, cpu_off = how.get("gpu_off", 0), how.get("cpu_off", 0)
    count = len(data) // raw
    stride = -(-raw // 16) * 16 + 16 * bool(raw % 16 or gpu_off or cpu_off)
    pool.lay(raw, count, gpu_off, cpu_off, stride)
    blocks = data[: count * raw].reshape(count, raw)
    image = np.full(pool.size + 4096, 0x5A, np.uint8)
    for at, block in zip(pool.gpu_at.tolist(), blocks, strict=True):
        image[at : at + raw] = block
    runtime.memcpy(pool.gpu.address, image.ctypes.data, len(image), "h2d")
    blank = np.full(pool.size + 4096, 0x77, np.uint8)
    runtime.memcpy(pool.back.address, blank.ctypes.data, len(blank), "h2d")
    host = np.frombuffer(pool.cpu.view(), np.uint8)
    host[:] = 0xEE
    kernels.launch(True, pool.work(True, type_, check), ctas, pool.stream)
    runtime.stream_synchronize(pool.stream)
    notes = np.frombuffer(pool.notes.view(), NOTE)[: count * pool.units]
    travelled = 0
    used = np.zeros(len(host), bool)
    for i, block in enumerate(blocks):
        at = int(pool.cpu_at[i])
        used[at : at + raw] = True
        for u in range(pool.units):
            piece, note = np.ascontiguousarray(block[u * CELL : (u + 1) * CELL]), notes[i * pool.units + u]
            cell = host[at + u * CELL : at + u * CELL + int(note["bytes"])].copy()
            travelled += len(cell)
            where = f"block {i} cell {u} of {raw} bytes"
            if len(cell) == len(piece):
                assert (cell == piece).all(), where
            if len(cell) < len(piece):
                assert (wire.decode(cell, len(piece)) == piece).all(), where
            if check or len(cell) < len(piece):
                assert note["summed"] == 1 and note["checksum"] == wire.checksum(piece), where
    assert (host[~used] == 0xEE).all(), "bytes written outside the cells"
    kernels.launch(False, pool.work(False), ctas, pool.stream)
    runtime.stream_synchronize(pool.stream)
    came = pool.read(pool.back)
    expected = blank
    for at, block in zip(pool.gpu_at.tolist(), blocks, strict=True):
        expected[at : at + raw] = block
    wrong = np.flatnonzero(came != expected)
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[:3]}"
    entries = np.frombuffer(pool.lists[0].view(), ENTRY)[:count]
    assert (entries["note"] >= 256).all(), "a good cell was refused"
    return travelled / (count * raw)


def check_damage(pool: Pool, kernels: Kernels | Fibers) -> str:
    """Every damaged cell is refused, and no other."""
    count, raw, runtime = 64, 4096, pool.runtime
    check_blocks(pool, kernels, normal(count * raw, 5), raw)
    host, notes = np.frombuffer(pool.cpu.view(), np.uint8), np.frombuffer(pool.notes.view(), NOTE)
    draw = np.random.default_rng(6)
    damaged = draw.permutation(count)[: count // 2]
    for i in damaged.tolist():
        at, size = int(pool.cpu_at[i]), int(notes["bytes"][i])
        kind = i % 4
        if kind == 0:
            notes["bytes"][i] = draw.integers(0, 2) and raw + 1
        elif kind == 1:
            notes["bytes"][i] -= 4
        else:
            host[at + draw.integers(0, 32 if kind == 2 else size)] ^= 1 << int(draw.integers(0, 8))
    kernels.launch(False, pool.work(False), 2, pool.stream)
    runtime.stream_synchronize(pool.stream)
    entries = np.frombuffer(pool.lists[0].view(), ENTRY)[:count]
    refused = np.flatnonzero(entries["note"] < 256)
    assert set(refused.tolist()) == set(damaged.tolist()), (sorted(damaged.tolist()), refused.tolist())
    codes = sorted(set(entries["note"][refused].tolist()))
    return f"{len(refused)} of {len(damaged)} damaged cells refused, codes {codes}"


def checks(runtime: Any, kernels: Kernels | Fibers, small: bool, say: Any = print) -> None:
    pool = Pool(runtime, 2 << 20)
    draw = np.random.default_rng(3)
    every = np.arange(1 << 16, dtype=np.uint16)
    some = normal(1 << 17, 4).view(np.uint16)
    some[draw.permutation(1 << 16)[: (1 << 16) // 12]] = draw.integers(0, 1 << 16, (1 << 16) // 12)
    mixed = np.concatenate([normal(4 << 16, 8), draw.permutation(every).view(np.uint8)]).view(np.uint16)
    sparse = normal(1 << 18, 9).view(np.uint16)
    sparse[::16] = np.resize(every, len(sparse[::16]))  # all patterns, each among fifteen normal ones
    nans = np.resize(np.array([0x7F81, 0x7FC0, 0xFFFF, 0xFF81, 0x7F80, 0xFF80, 0x7FFF], np.uint16), 8192)
    denormals = np.resize(np.array([1, 0x807F, 0x40, 0, 0x8000], np.uint16), 8192)
    escapes = (np.arange(8192, dtype=np.uint16) % 17 * 15 + 1) << 7
    named = {
        "normal": normal(1 << 18, 1),
        "kv": normal(1 << 18, 2, True),
        "every pattern in order": every.view(np.uint8),
        "every pattern among normal ones": np.concatenate([every.view(np.uint8), sparse.view(np.uint8)]),
        "shuffled patterns": mixed.view(np.uint8),
        "one twelfth escapes": some.view(np.uint8),
        "NaNs": nans.view(np.uint8),
        "denormals": denormals.view(np.uint8),
        "nothing but escapes": escapes.view(np.uint8),
        "random": draw.integers(0, 256, 1 << 18, dtype=np.uint8),
    }
    for name, data in named.items():
        sizes = [raw for raw in ((16384,) if small else (16384, 8192, 65536)) if raw <= len(data)]
        shares = [check_blocks(pool, kernels, data, raw, check=raw == 8192) for raw in sizes]
        say(f"  {name:34} {shares[0]:.4f} of its bytes travel, decoded by the CPU and by the kernel")
    odd = (1, 2, 15, 16, 17, 63, 64, 127, 129, 1000, 4095, 4096, 4098, 8190, 16383, 16385, 20001, 49153)
    for raw in odd[::5] if small else odd:
        for gpu_off, cpu_off in ((0, 0), (2, 0), (0, 1), (3, 5)):
            data = normal(raw * 5, raw)
            check_blocks(pool, kernels, data, raw, gpu_off=gpu_off, cpu_off=cpu_off, check=raw & 1)
    say("  odd sizes, one byte short and over, misaligned: equal")
    for ctas in (1, 16):
        check_blocks(pool, kernels, normal(1 << 20, 11), 4096, ctas=ctas)
    check_blocks(pool, kernels, normal(1 << 18, 12), 16384, type_=0, check=1)
    say(f"  as they are with a checksum: equal; {check_damage(pool, kernels)}")


# ---- speed -----------------------------------------------------------------------------------------------------------


class Bench:
    """What all tables share: the pool, the raw kernels, the link."""

    def __init__(self, runtime: Any, megabytes: int, rounds: int, far: str = "pinned") -> None:
        self.runtime, self.bytes, self.rounds, self.tile = runtime, megabytes << 20, rounds, ""
        self.pool = Pool(runtime, 4 * self.bytes, far)
        methods = copier_for(runtime)
        print(f"NVRTC compiles and the driver loads the coded kernels: {'yes' if methods.has_coded else 'NO'}")
        if not methods.has_coded:  # why not
            print(_compiled(_driver(runtime), 90, CODED_SOURCES))
        self.copier = methods.native
        self.copier.store_bytes_per_s = 0
        p = self.pool
        self.link = [0.0, 0.0]
        if far == "pinned":
            self.link[0] = copy_rate(runtime, p.gpu.address, p.cpu.address, 256 << 20, "h2d") / 1e9
            self.link[1] = copy_rate(runtime, p.cpu.address, p.gpu.address, 256 << 20, "d2h") / 1e9
        self.tiles = {
            "normal": normal(32 << 20, 1),
            "kv": normal(32 << 20, 2, True),
            "random": np.random.default_rng(3).integers(0, 256, 32 << 20, dtype=np.uint8),
        }

    def prepare(self, tile: str, raw: int) -> None:
        """Fills the pool and chooses places."""
        if self.tile != tile:
            self.pool.fill(self.tiles[tile])
        self.tile = tile
        self.pool.lay(raw, self.bytes // raw)

    def coded(self, kernels: Kernels, store: bool, ctas: int, type_: int = 1) -> Any:
        """Submits a coded launch."""
        work = self.pool.work(store, type_)
        return lambda: kernels.launch(store, work, ctas, self.pool.stream)

    def raw(self, store: bool, ctas: int) -> Any:
        """Submits a launch of the raw kernel."""
        copies, p = self.pool.copies(store), self.pool
        direction = "d2h" if store else "h2d"
        return lambda: submit_copies(
            self.runtime, self.copier, "kernel", direction, copies, p.stream, ctas=ctas, pinned=p.pinned[store]
        )

    def turns(self, contenders: dict[Any, Any]) -> dict[Any, float]:
        """Median GB/s of each; they take turns."""
        seen: dict[Any, list[float]] = {key: [] for key in contenders}
        for _ in range(self.rounds):
            for key, submit in contenders.items():
                seen[key].append(self.pool.timed(submit))
        return {key: statistics.median(values) for key, values in seen.items()}


def verify(bench: Bench, kernels: Kernels, ctas: int) -> None:
    """What this kernel's stores and loads of all blocks make of them."""
    pool = bench.pool
    bench.runtime.memcpy(pool.back.address, pool.cpu.address, pool.size, "h2d")  # something else
    kernels.launch(True, pool.work(True), ctas, pool.stream)
    kernels.launch(False, pool.work(False), ctas, pool.stream)
    bench.runtime.stream_synchronize(pool.stream)
    there, back = pool.read(pool.gpu), pool.read(pool.back)
    for at in pool.gpu_at.astype(np.int64).tolist():
        assert (there[at : at + pool.raw] == back[at : at + pool.raw]).all(), f"block at {at} of {pool.raw} differs"


def grid(bench: Bench, variants: list[Kernels], tile: str, sizes: tuple[int, ...] = SIZES) -> dict[Any, float]:
    """A table a direction: each variant and the raw kernel, at each size and number of CTAs."""
    got: dict[Any, float] = {}
    for raw in sizes:
        bench.prepare(tile, raw)
        for kernels in variants if raw in (8192, 65536) else ():
            verify(bench, kernels, 4)
        for store in (1, 0):
            if not store:  # the raw kernel's stores lie there
                variants[0].launch(True, bench.pool.work(True), 8, bench.pool.stream)
            for ctas in CTAS:
                ways: dict[Any, Any] = {v: bench.coded(v, bool(store), ctas) for v in variants}
                if bench.pool.cpu.kind == "pinned":
                    ways["raw kernel"] = bench.raw(bool(store), ctas)
                for way, value in bench.turns(ways).items():
                    got[store, way, raw, ctas] = value
            assert not bench.pool.refused(), "a load refused its cells: its time is none"
    points = [(raw, ctas) for raw in sizes for ctas in CTAS]
    for store in (1, 0):
        print(f"\n{'stores' if store else 'loads'} of {tile}, GB/s raw; link {bench.link[store]:.1f}")
        print(f"{'':32}" + "".join(f"{f'{raw >> 10}K/{ctas}':>8}" for raw, ctas in points))
        for way in dict.fromkeys(way for at, way, *_ in got if at == store):
            name = way if isinstance(way, str) else way.shape.name(bool(store))
            print(f"{name:32}" + "".join(f"{got[store, way, raw, ctas]:8.1f}" for raw, ctas in points))
    sys.stdout.flush()
    return got


def summary(bench: Bench, got: dict[str, dict[Any, float]]) -> None:
    """Of the link, for the best variant of each direction at 2 to 8 CTAs, and what each one has at those on average."""
    for store in (1, 0):
        score: dict[Any, list[float]] = {}
        for tile, values in got.items():
            for (at, way, _, ctas), value in values.items():
                if at == store and tile != "random" and 2 <= ctas <= 8 and not isinstance(way, str):
                    score.setdefault(way, []).append(min(value / bench.link[store], 1.25))
        order = sorted(score, key=lambda way: -statistics.mean(score[way]))
        print(f"\n{'stores' if store else 'loads'}: mean share of the link at 2 to 8 CTAs, at most 1.25 each")
        for way in order:
            print(f"  {way.shape.name(bool(store)):32} {statistics.mean(score[way]):.3f}")
        print(f"  the best one's shares of the link {bench.link[store]:.1f} (raw kernel's in brackets)")
        for tile, values in got.items():
            for raw in SIZES:
                line = f"  {tile:8}{raw >> 10:>5} K"
                for ctas in CTAS:
                    coded, plain = (
                        values[store, way, raw, ctas] / bench.link[store] for way in (order[0], "raw kernel")
                    )
                    line += f"  {ctas:>2}: {coded:.3f} ({plain:.3f})"
                print(line)


def beside_products(bench: Bench, kernels: Kernels) -> None:
    """Fourteen products of 8192 x 8192 while transfers of 32 KiB blocks run, of high priority."""
    import torch

    runtime, pool = bench.runtime, bench.pool
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    compute = torch.cuda.Stream()
    own, pool.stream = pool.stream, runtime.stream_create(runtime.priority_range()[1])
    bench.prepare("kv", 32768)
    kernels.launch(True, pool.work(True), 8, pool.stream)
    runtime.stream_synchronize(pool.stream)

    def large(store: bool) -> Any:
        dst, src = (pool.cpu, pool.gpu) if store else (pool.back, pool.cpu)
        kind = "d2h" if store else "h2d"
        return lambda: runtime.memcpy_async(dst.address, src.address, bench.bytes, kind, pool.stream)

    ways: dict[str, Any] = {"nothing": None}
    for store in (False, True):
        name = "stores" if store else "loads"
        ways[f"large copy, {name}"] = large(store)
        for ctas in (2, 4, 8):
            ways[f"raw kernel, {name}, {ctas} CTAs"] = bench.raw(store, ctas)
            ways[f"coded, {name}, {ctas} CTAs"] = bench.coded(kernels, store, ctas)
    took: dict[str, list[float]] = {name: [] for name in ways}
    moved: dict[str, list[float]] = {name: [] for name in ways}
    events = [runtime.event_create(True) for _ in range(60)]
    begin, end = (runtime.event_create(True) for _ in range(2))
    for turn in range(4):
        for name, submit in ways.items():
            torch.cuda.synchronize()
            runtime.event_record(events[0], pool.stream)
            for event in events[1:] if submit else ():
                submit()
                runtime.event_record(event, pool.stream)
            runtime.event_record(begin, compute.cuda_stream)
            with torch.cuda.stream(compute):
                for _ in range(14):
                    torch.mm(a, b, out=out)
            runtime.event_record(end, compute.cuda_stream)
            torch.cuda.synchronize()
            if turn:
                took[name].append(runtime.event_elapsed_ms(begin, end))
            if turn and submit:
                until = runtime.event_elapsed_ms(events[0], end)
                ended = [runtime.event_elapsed_ms(events[0], event) for event in events[1:]]
                inside = [ms for ms in ended if ms <= until]
                moved[name].append(bench.bytes * len(inside) / inside[-1] / 1e6 if len(inside) < len(ended) else 0.0)
    alone = statistics.median(took["nothing"])
    print(f"\n14 products 8192^3 alone {alone:.2f} ms; beside 32 KiB blocks, on a stream of high priority")
    for name in ways:
        rate = f"{statistics.median(moved[name]):7.1f} GB/s raw meanwhile" if moved[name] else ""
        print(f"  {name:34} {statistics.median(took[name]) / alone:6.3f} {rate}")
    pool.stream = own


def through_the_engine(runtime: Any, megabytes: int = 512) -> None:
    """Stores and loads of all of a pool by the public API, scattered; every byte compared; host time to the end."""
    size = megabytes << 20
    tile = normal(min(size, 32 << 20), 2, channels=True)
    device, back, host = Buffer(runtime, size, "device"), np.empty(size, np.uint8), Buffer(runtime, size, "pinned")
    whole = np.resize(tile, size)
    stream = runtime.stream_create()  # the engine waits for it, and nothing else
    for raw in (16384, 32768, 65536):
        took: dict[str, list[tuple[float, float]]] = {}
        for turn in range(6):  # of which the first is not counted
            for wire_ in ("raw", "coded", "auto"):
                gpu = BlockPool(runtime, [device.region], raw, dtype="bf16")
                cpu = BlockPool(runtime, [host.region], raw)
                order, places = (np.random.default_rng(seed).permutation(size // raw) for seed in (1, 2))
                how = {"wire": wire_, "policy": "pooled", "compute_stream": stream}
                with OffloadEngine(runtime, gpu, cpu, **how) as engine:
                    runtime.memcpy(device.address, whole.ctypes.data, size, "h2d")
                    begin = time.perf_counter()
                    engine.store(order, places).wait()
                    middle = time.perf_counter()
                    runtime.memcpy(device.address, host.address, size, "h2d")  # something else
                    again = time.perf_counter()
                    engine.load(places, order).wait()
                    end = time.perf_counter()
                    if turn:
                        took.setdefault(f"{wire_:5} ({engine.wire})", []).append((middle - begin, end - again))
                    elif wire_ == "auto":
                        print(f"  auto, {raw >> 10} KiB: {engine.wire} {engine.wire_reason}")
                    runtime.memcpy(back.ctypes.data, device.address, size, "d2h")
                    assert (back == whole).all(), f"{np.count_nonzero(back != whole)} bytes differ"
                if cpu.cells is not None:
                    cpu.cells.memory.close()
        for name, both in took.items():
            store, load = (size / statistics.median(one) / 1e9 for one in zip(*both, strict=True))
            print(
                f"  engine, wire {name:13} {raw >> 10:>3} KiB: stores {store:5.1f}, loads {load:5.1f} GB/s raw, equal"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "host"])
    parser.add_argument("--only", choices=["checks", "variants", "sizes", "near", "products", "engine"])
    parser.add_argument("--small", action="store_true", help="fewer checks, for compute-sanitizer")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    begun = time.perf_counter()
    runtime = find_runtime(options.device)
    shapes = VARIANTS if options.variants or options.only == "variants" else (DEFAULT,)
    if options.only == "engine":
        through_the_engine(runtime, 16 if options.device == "host" else 512)
        return
    if options.device == "host":
        for shape in shapes:
            checks(runtime, Fibers(shape), options.small)
            print(f"checks passed: {shape} (fibers)")
        return
    runtime.set_device(0)
    made = [Kernels(runtime, shape, code) for shape, code in zip(shapes, compiled(shapes), strict=True) if code]
    part = options.only
    good = []
    if part in (None, "checks", "variants"):
        for kernels in made:
            try:
                checks(runtime, kernels, options.small or kernels is not made[0])
                print(f"checks passed: {kernels.shape}")
                good.append(kernels)
            except AssertionError as error:
                print(f"WRONG: {kernels.shape}: {error}")
    else:
        good = made
    print(f"{time.perf_counter() - begun:.1f} s")
    if part == "checks" or not good:
        sys.exit(len(good) != len(made))
    bench = Bench(runtime, options.megabytes, options.rounds)
    print(f"link: {bench.link[0]:.2f} GB/s in, {bench.link[1]:.2f} out (one copy of 256 MiB)")
    got = {}
    for tile in ("kv", "normal", "random") if part in (None, "variants", "sizes") else ():
        got[tile] = grid(bench, good, tile)
        print(f"{time.perf_counter() - begun:.1f} s", flush=True)
    if part in (None, "variants", "near"):
        near = Bench(runtime, options.megabytes, options.rounds, "device")
        print("\nboth sides in GPU memory: what the threads can do")
        grid(near, good, "kv", (16384,))
        grid(near, good, "random", (16384,))
    if got:
        summary(bench, got)
        print(f"{time.perf_counter() - begun:.1f} s", flush=True)
    if part in (None, "products"):
        beside_products(bench, good[0])
        print(f"{time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
