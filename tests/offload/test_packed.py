"""Packed pools: more blocks in the same memory, what does not shrink goes on in a reserve, and nothing is ever lost."""

from __future__ import annotations

import contextlib
import ctypes as ct
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvprobe.cuda import Region, device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import CudaError, PoolFullError, TransferError, UsageError
from kvprobe.launchqueue import QueueLimits
from kvprobe.native.library import core
from kvprobe.offload import BlockCache, BlockPool, OffloadEngine, PackedPool
from kvprobe.offload.wire import CellError

Bytes = np.ndarray[Any, Any]
DAY_NS = 24 * 3600 * 10**9


def content(size: int, kind: str, seed: int) -> Bytes:
    """Bytes of numbers of deviation 0.02, or of none that shrink."""
    dice = np.random.default_rng(seed)
    if kind == "random":
        return dice.integers(0, 256, size, dtype=np.uint8)
    words = (dice.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32)
    return (words.view(np.uint8) if kind == "fp32" else (words >> 16).astype(np.uint16).view(np.uint8))[:size].copy()


class Pools:
    """A GPU pool and a packed CPU pool on a virtual clock."""

    def __init__(self, runtime: HostRuntime, gpu_blocks: int, memory_blocks: int, size: int, layers: int, **how: Any):
        self.runtime, self.size = runtime, size
        self.device = [device_region(runtime, gpu_blocks * size) for _ in range(layers)]
        self.pinned = host_region(runtime, memory_blocks * layers * how.pop("cpu_bytes", size))
        self.gpu = BlockPool(runtime, self.device, size, dtype=how.get("dtype", "bf16"))
        self.cpu = self.pool(layers, how)

    def pool(self, layers: int, how: dict[str, Any]) -> PackedPool:
        how = {"dtype": "bf16", "layers": layers, **how}
        return PackedPool(self.runtime, self.pinned, how.pop("block_bytes", self.size), **how)

    def engine(self, **how: Any) -> OffloadEngine:
        how = {"wire": "coded", "policy": "pooled", "limits": QueueLimits(256, 4, 1024, 300, 600), **how}
        return OffloadEngine(self.runtime, self.gpu, self.cpu, **how)

    def put(self, block: int, data: list[Bytes]) -> None:
        """Writes a GPU block, every layer."""
        for region, each in zip(self.device, data, strict=True):
            view(region)[block * self.size : (block + 1) * self.size] = each

    def get(self, block: int) -> list[Bytes]:
        return [view(region)[block * self.size : (block + 1) * self.size].copy() for region in self.device]

    def close(self) -> None:
        for region in (*self.device, self.pinned):
            with contextlib.suppress(CudaError):  # of a device that was lost
                region.owner.close()


def view(region: Region) -> Bytes:
    return np.frombuffer((ct.c_ubyte * region.bytes).from_address(region.address), np.uint8)


Make = Callable[..., Pools]


@pytest.fixture
def pools(host: Callable[..., HostRuntime]) -> Iterator[Make]:
    made: list[Pools] = []

    def make(gpu_blocks: int = 32, memory_blocks: int = 32, size: int = 16384, layers: int = 1, **how: Any) -> Pools:
        while made:
            made.pop().close()
        runtime = host(virtual_clock=True, h2d_bytes_per_s=55e9, d2h_bytes_per_s=55e9)
        made.append(Pools(runtime, gpu_blocks, memory_blocks, size, layers, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def same(left: list[Bytes], right: list[Bytes]) -> bool:
    return all((a == b).all() for a, b in zip(left, right, strict=True))


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2048, 4096, 16384, 32768, 65536, 262144])
@pytest.mark.parametrize("layers", [1, 3])
def test_memory_holds_a_quarter_more_blocks_and_each_comes_back(pools: Make, size: int, layers: int) -> None:
    p = pools(gpu_blocks=40, memory_blocks=32, size=size, layers=layers)
    assert p.cpu.blocks == 40
    assert (p.cpu.blocks * layers * size) >= 1.25 * p.pinned.bytes
    with p.engine() as engine:
        held = [[content(size, "bf16", 100 * block + layer) for layer in range(layers)] for block in range(40)]
        for block, data in enumerate(held):
            p.put(block, data)
        for block in range(40):
            engine.store([block], [39 - block]).wait()
        assert p.cpu.tails_left == p.cpu.tails  # normal numbers need none
        for region in p.device:
            view(region)[:] = 0
        engine.load(range(40), range(39, -1, -1)).wait()
        for block, data in enumerate(held):
            assert same(p.get(block), data)
            assert same([p.cpu.read(layer, 39 - block) for layer in range(layers)], data)


def test_a_packed_pool_takes_no_more_blocks_than_have_room(pools: Make) -> None:
    with pytest.raises(UsageError, match=r"41 have at most, 32 as they are"):
        pools(memory_blocks=32, blocks=42)
    assert pools(memory_blocks=32, blocks=41).cpu.tails >= 1
    with pytest.raises(UsageError, match=r": 0 have at most, 1 as they are"):
        pools(memory_blocks=1, blocks=1)
    with pytest.raises(UsageError, match="32 as they are"):
        pools(memory_blocks=32, dtype="fp32")  # takes 0.88 of its bytes
    p = pools(memory_blocks=32, dtype="fp32", blocks=35)
    with p.engine() as engine:
        data = [content(16384, "fp32", 1)]
        p.put(0, data)
        engine.store([0], [34]).wait()
        assert p.cpu.tails_left == p.cpu.tails
        assert same([p.cpu.read(0, 34)], data)


def test_parts_of_blocks_and_blocks_of_no_whole_cells_come_back(pools: Make) -> None:
    for size, block_bytes in ((16384, 65536), (40000, 40000), (8192, 40960)):
        p = pools(gpu_blocks=30, size=size, cpu_bytes=block_bytes, block_bytes=block_bytes, copy_bytes=size, blocks=30)
        per = block_bytes // size
        with p.engine() as engine:
            held = [content(size, ("bf16", "random")[i % 2], i) for i in range(2 * per)]
            for i, each in enumerate(held):
                p.put(i, [each])
            engine.store(range(2 * per), [7, 3]).wait()
            engine.load([7, 3], range(10, 10 + 2 * per)).wait()
            assert all(same(p.get(10 + i), [each]) for i, each in enumerate(held))
            for i in range(2):  # coded by the CPU, not by a kernel
                p.cpu.write(0, 9 + i, np.concatenate(held[i * per : (i + 1) * per]))
                assert same([p.cpu.read(0, 9 + i)], [np.concatenate(held[i * per : (i + 1) * per])])


# -- the reserve -------------------------------------------------------------------------------------------------------


def test_where_not_even_the_list_of_tails_has_memory_that_is_said() -> None:
    """In a process of its own, which takes all that it may have in small pieces first."""
    program = (
        "import ctypes, os, resource\n"
        "from kvprobe.native.library import core\n"
        "native, take = core(), ctypes.CDLL(None).malloc\n"
        "take.restype = ctypes.c_void_p\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "for size in range(256, 0, -8):\n"
        "    while take(size): pass\n"
        "os._exit(0 if native.kvp_reserve_open(None, 1, 1, 0) is None else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_blocks_that_do_not_shrink_take_tails_until_none_is_left(pools: Make) -> None:
    p = pools(gpu_blocks=40)
    tails = p.cpu.tails
    assert 0 < tails < 40
    with p.engine() as engine:
        for block in range(40):
            p.put(block, [content(16384, "random", block)])
        for block in range(tails):
            engine.store([block], [block]).wait()
            assert p.cpu.tails_left == tails - block - 1
        stored = p.cpu.read(0, tails - 1)
        with pytest.raises(PoolFullError, match=r"has 0 tails left, and this store could take 2: wait") as raised:
            engine.store([30, 31], [tails - 1, tails])
        assert (raised.value.needs, raised.value.left) == (2, 0)
        assert (p.cpu.read(0, tails - 1) == stored).all()  # nothing was written
        engine.load([0], [39]).wait()
        assert same(p.get(39), [content(16384, "random", 0)])

        p.cpu.discard([0, 1])
        assert p.cpu.tails_left == 2
        engine.store([30, 31], [tails - 1, tails]).wait()
        assert p.cpu.tails_left == 1  # the first had one already
        gone = engine.load([0], [39])
        engine.wait()
        assert gone.failed
        assert "CPU block 0 of layer 0" in str(gone.error)
        assert "nothing lies there: it was never stored, or given up" in str(gone.error)
        with pytest.raises(CellError, match="nothing lies there"):
            p.cpu.read(0, 1)

        p.put(5, [content(16384, "bf16", 5)])
        engine.store([5], [5]).wait()  # it shrinks now, and its tail is free again
        assert p.cpu.tails_left == 2


@pytest.mark.parametrize("said", [16385, 200_000, (1 << 32) - 1])
def test_a_note_of_more_bytes_than_a_block_has_is_refused(pools: Make, said: int) -> None:
    p = pools(gpu_blocks=4)
    with p.engine() as engine:
        p.put(0, [content(16384, "random", 1)])
        engine.store([0], [0]).wait()
        assert p.cpu.tails_left == p.cpu.tails - 1
        assert p.cpu.cells is not None
        p.cpu.cells.notes["bytes"][0] = said
        with pytest.raises(CellError, match="more or fewer bytes"):
            p.cpu.read(0, 0)


def test_promised_tails_come_back_when_stores_end_fail_or_are_cancelled(pools: Make) -> None:
    p = pools(gpu_blocks=40, layers=2)
    tails, compute = p.cpu.tails, p.runtime.stream_create()
    with p.engine(compute_stream=compute) as engine:
        for block in range(40):
            p.put(block, [content(16384, "bf16", block)] * 2)
        p.runtime.launch_delay(compute, 1_000_000)
        under_way = engine.store(range(3), range(3))
        assert p.cpu.tails_left == tails - 6
        with pytest.raises(PoolFullError, match="wait for stores"):
            engine.store(range(3, 3 + tails // 2), range(3, 3 + tails // 2))
        under_way.wait()
        assert p.cpu.tails_left == tails

        p.runtime.fail_call("cuLaunchKernel", 1, 1)
        failed = engine.store(range(3), range(3))
        engine.wait()
        assert failed.failed
        assert p.cpu.tails_left == tails
        with pytest.raises(UsageError, match="twice"):
            engine.store([1, 2], [4, 4])
        p.runtime.fail_call("cudaEventRecord", 1, 1)
        with pytest.raises(Exception, match="cudaEventRecord"):
            engine.store([1, 2], [4, 5])
        p.runtime.fail_call("cudaEventRecord", 0)
        assert p.cpu.tails_left == tails

        p.runtime.launch_delay(compute, 1_000_000)
        cancelled = engine.store(range(3), range(3))
        engine._close(drain=False)
    assert cancelled.failed
    assert p.cpu.tails_left == tails


def test_a_block_that_is_stored_twice_at_once_keeps_the_tail_of_the_later(pools: Make) -> None:
    p = pools(gpu_blocks=8)
    p.put(0, [content(16384, "random", 1)])
    p.put(1, [content(16384, "bf16", 2)])
    tails = p.cpu.tails
    with p.engine() as engine:
        for first, second in ((0, 1), (1, 0)):
            both = engine.store([first], [9]), engine.store([second], [9])
            with pytest.raises(UsageError, match="CPU block 9 is being stored"):
                while True:  # until the launches are on their way
                    p.runtime.advance(100)
                    p.cpu.discard([9])
            engine.wait()
            assert not any(each.failed for each in both)
            assert same([p.cpu.read(0, 9)], p.get(second))
            assert p.cpu.tails_left == tails - (second == 0)


def test_a_tail_stays_with_its_cell_while_any_store_to_it_is_on_its_way(pools: Make) -> None:
    p, native = pools(gpu_blocks=8), core()
    reserve, notes = p.cpu.cells.reserve, p.cpu.cells.notes
    for _ in range(2):
        assert native.kvp_reserve_claim(reserve, 1)
        native.kvp_reserve_begin(reserve, 3, 1)
        native.kvp_reserve_unclaim(reserve, 1)
    notes["bytes"][3] = 100  # the first one's cell has room; the second may need the tail
    native.kvp_reserve_end(reserve, 3, 1, 0)
    assert (p.cpu.tails_left, int(notes["summed"][3, 0] >> 1) > 0) == (p.cpu.tails - 1, True)
    native.kvp_reserve_end(reserve, 3, 1, 0)
    assert (p.cpu.tails_left, int(notes["summed"][3, 0] >> 1)) == (p.cpu.tails, 0)


@pytest.mark.parametrize(("layer", "block"), [(-1, 0), (2, 0), (0, -1), (0, "all")])
def test_no_bytes_are_put_where_no_block_is(pools: Make, layer: int, block: int | str) -> None:
    p = pools(gpu_blocks=8, layers=2)
    number = p.cpu.blocks if block == "all" else int(block)
    with pytest.raises(UsageError, match=f"block {number} of layer {layer} cannot hold these 16384 bytes"):
        p.cpu.write(layer, number, content(16384, "bf16", 1))
    p.cpu.write(1, p.cpu.blocks - 1, content(16384, "bf16", 1))
    p.cpu.write(0, 0, content(16384, "bf16", 1))
    with pytest.raises(UsageError, match="cannot hold these 16383 bytes"):
        p.cpu.write(0, 0, content(16384, "bf16", 1)[1:])


def test_a_cell_without_a_tail_is_refused_and_harms_no_neighbour(pools: Make) -> None:
    """What a kernel must do, whatever it is told."""
    p = pools(gpu_blocks=8)
    p.cpu.write(0, 1, content(16384, "bf16", 1))
    assert p.cpu.tails_left == p.cpu.tails  # what it did not need is free again
    p.cpu.write(0, 2, content(16384, "random", 2))
    assert p.cpu.tails_left == p.cpu.tails - 1
    with p.engine() as engine:
        engine.load([2], [2]).wait()
        p.cpu.cells.notes["summed"][2] = 1  # its tail's number is gone
        load = engine.load([2], [3])
        engine.load([1], [4]).wait()
        engine.wait()
        assert load.failed
        assert same(p.get(4), [content(16384, "bf16", 1)])


def test_another_engine_finds_the_blocks(pools: Make) -> None:
    p = pools(gpu_blocks=40)
    for block in range(6):
        p.put(block, [content(16384, ("bf16", "random")[block % 2], block)])
    with p.engine() as engine:
        engine.store(range(6), range(6)).wait()
    with p.engine(wire="auto", witness=True, policy="auto") as engine:
        assert engine.wire == "coded"
        engine.load(range(6), range(10, 16)).wait()
    assert all(same(p.get(10 + block), p.get(block)) for block in range(6))
    with pytest.raises(UsageError, match="the CPU pool is packed: use wire='coded'"):
        p.engine(wire="raw")
    with pytest.raises(UsageError, match="cannot be uncoded"):
        p.cpu.uncode()


def test_damage_in_a_cell_or_its_tail_is_found(pools: Make) -> None:
    p = pools(gpu_blocks=8)
    p.put(0, [content(16384, "random", 1)])
    with p.engine(witness=True) as engine:
        for where in ("cell", "tail"):
            engine.store([0], [3]).wait()
            cells = p.cpu.cells
            tail = cells._place.tails + (int(cells.notes["summed"][3, 0] >> 1) - 1) * p.cpu.tail_bytes
            at = cells.address(0, 3) if where == "cell" else tail
            p_byte = ct.c_ubyte.from_address(at + 7)
            p_byte.value ^= 1
            load = engine.load([3], [1])
            engine.wait()
            assert load.failed
            assert str(load.error).endswith("damaged; the CPU's memory changed in between")


# -- a day of a server -------------------------------------------------------------------------------------------------


class Server:
    """A block manager over a packed pool: a cache by key, with eviction, and what it does where the pool is full."""

    def __init__(self, p: Pools, engine: OffloadEngine, seed: int) -> None:
        self.p, self.engine, self.dice = p, engine, random.Random(seed)
        self.cache = BlockCache(p.cpu.blocks)
        self.holds: dict[int, tuple[str, int]] = {}  # key -> what its newest store wrote
        self.refused = self.loads = self.stores = self.evicted = 0

    def data(self, key: int) -> list[Bytes]:
        kind, seed = self.holds[key]
        return [content(self.p.size, kind, seed + layer) for layer in range(len(self.p.device))]

    def request(self, keys: list[int]) -> None:
        hits = self.cache.hits(keys)
        if hits:
            blocks = self.cache.begin_load(keys[:hits])
            self.engine.load(blocks, range(hits)).wait()
            self.cache.end(keys[:hits])
            self.loads += hits
            for at, key in enumerate(keys[:hits]):
                assert same(self.p.get(at), self.data(key)), key
        if keys[hits:]:
            self.store(keys[hits:])

    def store(self, keys: list[int]) -> None:
        given = self.cache.begin_store(keys)
        for at, (key, _) in enumerate(given):
            kind = "random" if self.dice.random() < 0.25 else "bf16"
            self.holds[key] = (kind, self.dice.randrange(1 << 40))
            self.p.put(at, self.data(key))
        keys, blocks = [key for key, _ in given], [block for _, block in given]
        while keys:
            try:
                self.engine.store(range(len(keys)), blocks).wait()
            except PoolFullError:
                self.refused += 1
                self.p.cpu.discard(blocks)  # what was evicted for these
                if self.p.cpu.tails_left < len(keys) * len(self.p.device):
                    given_up = self.cache.give_up(4)
                    assert given_up, "nothing is left to give up"
                    self.p.cpu.discard(given_up)
                    self.evicted += len(given_up)
                continue
            self.stores += len(keys)
            self.cache.end(keys)
            return


@pytest.mark.parametrize("seed", [1, 2])
def test_a_day_of_evictions_loses_nothing(pools: Make, seed: int) -> None:
    """A quarter of the blocks do not shrink, more than the reserve has tails for: some must go, none may be wrong."""
    p = pools(gpu_blocks=8, memory_blocks=48, size=4096, layers=2)
    with p.engine() as engine:
        assert p.cpu.blocks == 60
        server = Server(p, engine, seed)
        begun = p.runtime.now_ns()
        while p.runtime.now_ns() - begun < DAY_NS:
            start = server.dice.randrange(120)
            server.request([start + i for i in range(1 + server.dice.randrange(6))])
            p.runtime.advance(server.dice.randrange(120 * 10**9))
        assert server.loads > 300
        assert server.stores > 1000
        assert server.cache.evictions > 500
        assert server.refused
        for key in range(130):  # whatever the cache says it holds, it holds
            if key in server.cache:
                (block,) = server.cache.begin_load([key])
                assert same([p.cpu.read(layer, block) for layer in range(2)], server.data(key))
                server.cache.end([key])
        spilled = int((p.cpu.cells.notes["bytes"] > p.cpu.cells.space).sum())
        given_up = int(((p.cpu.cells.notes["bytes"] == 0) & (p.cpu.cells.notes["summed"] > 1)).sum())
        assert p.cpu.tails_left == p.cpu.tails - spilled
        assert not given_up


def test_a_transfer_of_an_engine_that_lost_its_device_keeps_its_tails(pools: Make) -> None:
    p = pools(gpu_blocks=8)
    tails = p.cpu.tails
    p.put(0, [content(16384, "random", 1)])
    compute = p.runtime.stream_create()
    engine = p.engine(compute_stream=compute)
    lost = engine.store([0], [0])
    p.runtime.advance(100)
    p.runtime.lose_device()
    engine.wait()
    with pytest.raises(TransferError):
        lost.result()
    assert p.cpu.tails_left in (tails, tails - 1)  # promised ones are back; that of a cell on its way stays with it
    engine.close()
