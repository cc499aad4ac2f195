"""Pools of cells: blocks come back as they were, on fewer bytes; damage is found, named, and harms nobody else."""

from __future__ import annotations

import ctypes as ct
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvprobe.cuda import Region, device_region, host_region
from kvprobe.cuda.copies import METHOD_NAMES, PinnedList, columns, submit_copies
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import TransferError, UsageError
from kvprobe.launchqueue import QueueLimits
from kvprobe.offload import BlockPool, OffloadEngine
from kvprobe.offload.blocks import Mapping
from kvprobe.offload.cells import wire_for
from kvprobe.offload.methods import copier_for
from kvprobe.offload.options import EngineOptions
from kvprobe.offload.wire import CellError

Bytes = np.ndarray[Any, Any]
LINK = 55e9


def numbers(size: int, dtype: str = "bf16", seed: int = 1) -> Bytes:
    """Bytes of normal numbers of deviation 0.02."""
    random_numbers = np.random.default_rng(seed)
    if dtype == "random":
        return random_numbers.integers(0, 256, size, dtype=np.uint8)
    words = (random_numbers.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32)
    halves = words.view(np.uint8) if dtype == "fp32" else (words >> 16).astype(np.uint16).view(np.uint8)
    return halves[:size].copy()


class Pools:
    """A GPU and a CPU pool on a virtual clock, their memory in sight."""

    def __init__(self, runtime: HostRuntime, blocks: int, gpu_bytes: int, cpu_bytes: int, layers: int, dtype: str):
        self.runtime, size = runtime, blocks * max(gpu_bytes, cpu_bytes)
        self.device = [device_region(runtime, size) for _ in range(layers)]
        self.pinned = [host_region(runtime, size) for _ in range(layers)]
        self.gpu = BlockPool(runtime, self.device, gpu_bytes, dtype=dtype)
        self.cpu = BlockPool(runtime, self.pinned, cpu_bytes)

    @staticmethod
    def view(region: Region) -> Bytes:
        return np.frombuffer((ct.c_ubyte * region.bytes).from_address(region.address), np.uint8)

    def fill(self, kind: str) -> list[Bytes]:
        """Writes numbers into the GPU's memory and returns what it holds, layer by layer."""
        for layer, region in enumerate(self.device):
            self.view(region)[:] = numbers(region.bytes, kind, seed=layer)
        return [self.view(region).copy() for region in self.device]

    def engine(self, wire: str = "coded", **how: Any) -> OffloadEngine:
        how = {"policy": "pooled", "limits": QueueLimits(256, 4, 1024, 300, 600), "stuck_after_s": 0.0, **how}
        return OffloadEngine(self.runtime, self.gpu, self.cpu, wire=wire, **how)

    def close(self) -> None:
        for region in (*self.device, *self.pinned):
            region.owner.close()
        if self.cpu.cells is not None and self.cpu.cells.memory is not None:
            self.cpu.cells.memory.close()


Make = Callable[..., Pools]


@pytest.fixture
def pools(host: Callable[..., HostRuntime]) -> Iterator[Make]:
    made: list[Pools] = []

    def make(
        blocks: int = 64,
        gpu_bytes: int = 16384,
        cpu_bytes: int = 0,
        layers: int = 1,
        dtype: str = "bf16",
        **config: Any,
    ) -> Pools:
        while made:
            made.pop().close()
        config = {"virtual_clock": True, "h2d_bytes_per_s": LINK, "d2h_bytes_per_s": LINK, **config}
        made.append(Pools(host(**config), blocks, gpu_bytes, cpu_bytes or gpu_bytes, layers, dtype))
        return made[-1]

    yield make
    for each in made:
        each.close()


def there_and_back(p: Pools, engine: OffloadEngine, kind: str) -> None:
    """Everything to the CPU, scattered, and back; compares every byte, and what the CPU reads of it."""
    held = p.fill(kind)
    order = np.random.default_rng(2).permutation(p.gpu.blocks)
    per = max(p.gpu.block_bytes, p.cpu.block_bytes)
    if p.cpu.blocks < p.gpu.blocks:
        order = np.random.default_rng(2).permutation(p.cpu.blocks)
    engine.store(_ids(order, p.gpu, per), _ids(np.arange(len(order)), p.cpu, per)).wait()
    for region in p.device:
        p.view(region)[:] = 0
    for layer, whole in enumerate(held):
        block = p.cpu.blocks - 1
        at = int(order[block * p.cpu.block_bytes // per]) * per + block * p.cpu.block_bytes % per
        assert (p.cpu.read(layer, block) == whole[at : at + p.cpu.block_bytes]).all()
    engine.load(_ids(np.arange(len(order)), p.cpu, per), _ids(order, p.gpu, per)).wait()
    for region, whole in zip(p.device, held, strict=True):
        assert (p.view(region) == whole).all()


def _ids(units: Bytes, pool: BlockPool, per: int) -> Bytes:
    """Blocks of a pool that units of `per` bytes are."""
    count = per // pool.block_bytes
    return (units[:, None] * count + np.arange(count)[None, :]).reshape(-1)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "random", "fp32"])
@pytest.mark.parametrize("size", [1, 2, 31, 33, 512, 4095, 4096, 16383, 16384, 16385, 16392, 40000, 65536, 1 << 20])
def test_blocks_of_every_size_come_back(pools: Make, size: int, kind: str) -> None:
    p = pools(blocks=8, gpu_bytes=size, dtype="fp32" if kind == "fp32" else "bf16")
    with p.engine() as engine:
        there_and_back(p, engine, kind)
        assert engine.read().launches[1][2] and not any(engine.read().launches[1][:2])  # by kernels alone
    assert p.cpu.cells is not None
    saves = kind != "random" and size >= 512
    if size % 4 == 0:  # else numbers lie across blocks
        assert (p.cpu.cells.travels_bytes < 0.95 * 8 * size) == saves


@pytest.mark.parametrize(("gpu_bytes", "cpu_bytes"), [(4096, 16384), (65536, 16384), (8192, 40960)])
def test_blocks_of_unlike_sizes_come_back(pools: Make, gpu_bytes: int, cpu_bytes: int) -> None:
    p = pools(blocks=8, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes, layers=3)
    with p.engine() as engine:
        there_and_back(p, engine, "bf16")


def test_neighbours_are_not_merged_and_large_blocks_not_cut(pools: Make) -> None:
    p = pools(blocks=4, gpu_bytes=16 << 20)
    with p.engine() as engine:
        p.fill("bf16")
        transfer = engine.store(range(4), range(4)).wait()
        assert transfer.descriptors == transfer.copies == 4


def test_another_engine_finds_the_blocks_and_the_pool_can_be_uncoded(pools: Make) -> None:
    p = pools(blocks=16, layers=2)
    held = p.fill("bf16")
    with p.engine() as engine:
        engine.store(range(16), range(16)).wait()
    with pytest.raises(UsageError, match="lie in cells: use wire='coded', or call its uncode"):
        p.engine("raw")
    with p.engine("auto", policy="auto") as engine:
        assert engine.wire == "coded"
        engine.load(range(16), range(15, -1, -1)).wait()
    assert (p.view(p.device[1]).reshape(16, -1)[::-1] == held[1].reshape(16, -1)).all()
    p.cpu.uncode()
    for region, whole in zip(p.pinned, held, strict=True):
        assert (p.view(region) == whole).all()
    with p.engine("raw") as engine:
        engine.load(range(16), range(16)).wait()
    assert (p.view(p.device[0]) == held[0]).all()


def test_what_the_cpu_held_before_is_loaded_as_it_is(pools: Make) -> None:
    p = pools(blocks=8)
    p.view(p.pinned[0])[:] = numbers(p.pinned[0].bytes)
    with p.engine() as engine:
        engine.load(range(8), range(8)).wait()
    assert (p.view(p.device[0]) == p.view(p.pinned[0])).all()


def test_a_load_that_waits_on_the_device_for_its_store_reads_what_that_one_wrote(pools: Make) -> None:
    """What a cell holds is not known when its load is submitted."""
    p = pools(blocks=8)
    held = p.fill("bf16")
    compute = p.runtime.stream_create()
    with p.engine(compute_stream=compute) as engine:
        p.runtime.launch_delay(compute, 1_000_000)
        store = engine.store(range(8), range(8))
        engine.fence(store, compute)
        load = engine.load(range(8), range(7, -1, -1))
        engine.fence(load, compute)
        assert not store.done
        load.wait()
    assert (p.view(p.device[0]).reshape(8, -1)[::-1] == held[0].reshape(8, -1)).all()


# -- time -------------------------------------------------------------------------------------------------------------


def rates(p: Pools, wire: str, kind: str) -> list[float]:
    """Bytes a second of a store and a load of everything, as shares of the link."""
    with p.engine(wire, method="kernel", max_slowdown=1.0) as engine:
        p.fill(kind)
        order = np.random.default_rng(2).permutation(p.gpu.blocks)
        both = (engine.store(order, np.arange(len(order))).wait(), engine.load(np.arange(len(order)), order).wait())
    return [each.bytes / (each.copy_end_ns - each.copy_start_ns) * 1e9 / LINK for each in both]


@pytest.mark.parametrize("size", [16384, 32768, 65536, 4 << 20])
def test_normal_numbers_move_at_a_third_more_than_raw_and_random_ones_as_fast(pools: Make, size: int) -> None:
    found = {
        (wire, kind): rates(pools(blocks=(64 << 20) // size, gpu_bytes=size), wire, kind)
        for wire in ("raw", "coded")
        for kind in ("bf16", "random")
    }
    for direction, ahead in ((0, 1.20), (1, 1.16)):
        raw, coded = found["raw", "bf16"][direction], found["coded", "bf16"][direction]
        assert coded / raw == pytest.approx(1 / 0.756, rel=0.01)
        assert coded > ahead  # of the link itself
        assert found["coded", "random"][direction] == pytest.approx(found["raw", "random"][direction], rel=0.01)


def test_stores_into_cells_are_paced_while_compute_is_seen_and_never_loads(pools: Make) -> None:
    """The rate of the table is a fiftieth of the link's."""
    p = pools(blocks=64, gpu_bytes=16384)
    compute, ids = p.runtime.stream_create(), np.random.default_rng(1).permutation(64)
    with p.engine(compute_stream=compute, method="kernel") as engine:
        p.fill("random")
        engine._table.paced_store = 1_000_000_000

        def took(ask: Callable[..., Any], before_ns: int) -> int:
            p.runtime.launch_delay(compute, before_ns)
            ended = ask(ids, ids).wait()
            return int(ended.copy_end_ns - ended.copy_start_ns)

        quiet, beside = took(engine.store, 0), took(engine.store, 1_000_000)
        assert beside > 5 * quiet
        assert took(engine.load, 1_000_000) < 5 * quiet


def test_loads_have_as_many_ctas_as_before_once_nobody_else_uses_the_link(pools: Make) -> None:
    """Somebody's copies take turns with theirs for a while, which makes them slow, whatever their CTAs are."""
    p = pools(blocks=512, gpu_bytes=65536)
    methods, stream = copier_for(p.runtime), p.runtime.stream_create()
    other = device_region(p.runtime, 8 << 20), host_region(p.runtime, 8 << 20), PinnedList(p.runtime, 1)
    theirs = columns([other[0].address], other[1].address, 8 << 20)
    ids, kernel = np.random.default_rng(1).permutation(512), METHOD_NAMES.index("kernel")
    with p.engine() as engine:
        p.fill("bf16")
        engine.store(ids, ids).wait()

        def ctas(others: int) -> float:
            before = engine.read()
            for _ in range(others):
                submit_copies(p.runtime, methods.native, "kernel", "h2d", theirs, stream, ctas=4, pinned=other[2])
            engine.load(ids, ids).wait()
            after = engine.read()
            p.runtime.stream_synchronize(stream)
            return (after.cta_bytes[0] - before.cta_bytes[0]) / (after.bytes[0][kernel] - before.bytes[0][kernel])

        usual = ctas(0)
        assert usual > 1
        for _ in range(4):
            ctas(16)
        assert [ctas(0) for _ in range(3)] == [usual, usual, usual]
    for region in other[:2]:
        region.owner.close()
    other[2].close()


# -- which wire -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"policy": "shared"}, "policy 'shared' submits single copies"),
        ({"method": "batch"}, "method 'batch' copies bytes as they are"),
        ({"max_slowdown": -1.0}, "max_slowdown below 0 allows no copy kernels"),
    ],
)
def test_a_wire_that_cannot_be_had_is_refused_or_raw(pools: Make, how: dict[str, Any], why: str) -> None:
    p = pools(blocks=8)
    with pytest.raises(UsageError, match=f"wire='coded' cannot be had: {why}"):
        p.engine("coded", **how)
    with pytest.raises(UsageError, match=f"a witness cannot be had: {why}"):
        p.engine("raw", witness=True, **how)
    with p.engine("auto", **how) as engine:
        assert engine.wire == "raw"
        assert engine.wire_reason.startswith(why)
        assert p.cpu.cells is None


def test_numbers_of_other_types_travel_raw(pools: Make) -> None:
    for dtype, why in ((None, "do not say what numbers they hold"), ("fp8_e4m3", "type fp8_e4m3 are not coded")):
        p = pools(blocks=8, dtype=dtype)
        with pytest.raises(UsageError, match=why):
            p.engine("coded")
        with p.engine("auto") as engine:
            assert engine.wire == "raw"
            assert why in engine.wire_reason
    with pytest.raises(UsageError, match="unknown wire 'packed': use raw, coded, auto"):
        p.engine("packed")


def test_the_wire_is_raw_unless_it_is_asked_for(pools: Make) -> None:
    p = pools(blocks=8)
    with OffloadEngine(p.runtime, p.gpu, p.cpu) as engine:
        assert engine.wire == "raw"
    assert p.cpu.cells is None


def test_the_shared_policy_is_never_taken(pools: Make) -> None:
    p = pools(blocks=8)
    with p.engine(policy="auto") as engine:
        assert engine.policy == "pooled"
        with pytest.raises(UsageError, match="under the pooled policy alone"):
            engine.set_policy("shared")


def test_auto_codes_as_long_as_blocks_shrink(pools: Make) -> None:
    p = pools(blocks=16)
    with p.engine("auto") as engine:
        seen = []
        for kind in ("bf16", "random", "bf16"):
            p.fill(kind)
            for _ in range(70):
                engine.store(range(16), range(16)).wait()
            seen.append(engine.wire)
            if kind == "random":
                assert engine.wire_reason in ("cells take 99% of their blocks", "cells take 100% of their blocks")
                there_and_back(p, engine, "bf16")  # raw cells among coded ones
    assert seen == ["coded", "raw", "coded"]


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_cell_fails_its_own_load_and_is_named(pools: Make) -> None:
    p = pools(blocks=16, layers=2)
    held = p.fill("bf16")
    with p.engine() as engine:
        store = engine.store(range(16), range(16)).wait()
        p.view(p.pinned[1])[5 * 16384 + 9000] ^= 64
        both = engine.load([4, 5], [0, 1]), engine.load([6, 7], [2, 3])
        engine.wait()
        assert [each.state for each in both] == ["failed", "done"]
        assert (p.view(p.device[1])[2 * 16384 : 4 * 16384] == held[1][6 * 16384 : 8 * 16384]).all()
        with pytest.raises(TransferError) as raised:
            both[0].result()
        stored, loaded = store.copy_end_ns / 1e9, both[0].copy_end_ns / 1e9
        assert str(raised.value).endswith(
            f"failed: CPU block 5 of layer 1 (stored at {stored:.6f} s, loaded at {loaded:.6f} s) was refused: its "
            "checksum is that of other bytes: damaged; the CPU's memory changed in between"
        )
        with pytest.raises(CellError, match="part 5 of layer 1 was refused: its checksum"):
            p.cpu.read(1, 5)
        with pytest.raises(CellError):
            p.cpu.uncode()
        assert (p.cpu.read(1, 6) == held[1][6 * 16384 : 7 * 16384]).all()  # nothing was uncoded
        engine.store([5], [5]).wait()
        engine.load([5], [5]).wait()


def overwritten(p: Pools, engine: OffloadEngine, dice: random.Random) -> tuple[int, int]:
    """Stores everything, then changes bytes of one block in CPU memory: its layer and number."""
    engine.store(range(p.gpu.blocks), range(p.cpu.blocks)).wait()
    layer, block = dice.randrange(p.cpu.layers), dice.randrange(p.cpu.blocks)
    assert p.cpu.cells is not None
    notes = p.cpu.cells.notes[layer * p.cpu.blocks + block]["bytes"]
    piece = dice.randrange(len(notes))
    start = block * p.cpu.block_bytes + piece * 16384 + dice.randrange(int(notes[piece]))
    left = block * p.cpu.block_bytes + piece * 16384 + int(notes[piece]) - start
    size = min(dice.choice((1, 1, 8, 300)), left)
    memory = p.view(p.pinned[layer])[start : start + size]
    memory[:] = memory ^ np.uint8(dice.randrange(1, 256))
    return layer, block


@pytest.mark.parametrize("wire", ["raw", "coded"])
def test_the_witness_finds_every_overwrite_and_nothing_else(pools: Make, wire: str) -> None:
    p = pools(blocks=16, gpu_bytes=40000, layers=2)
    dice = random.Random(7)
    with p.engine(wire, witness=True) as engine:
        for seed in range(60):
            p.fill(("bf16", "random")[seed % 2])
            layer, block = overwritten(p, engine, dice)
            loads = {each: engine.load([each], [each]) for each in range(16)}
            engine.wait()
            for each, load in loads.items():
                assert load.failed == (each == block), (seed, layer, block, each)
            assert f"CPU block {block} of layer {layer} (stored at" in str(loads[block].error)
            assert str(loads[block].error).endswith("; the CPU's memory changed in between")
        assert engine.read().refused == 60


def test_without_the_witness_an_overwrite_of_a_raw_block_is_not_seen(pools: Make) -> None:
    p = pools(blocks=8)
    with p.engine() as engine:
        p.fill("random")
        engine.store(range(8), range(8)).wait()
        p.view(p.pinned[0])[5] ^= 1
        engine.load(range(8), range(8)).wait()


def test_what_changes_on_its_way_is_not_laid_to_the_cpus_memory(pools: Make) -> None:
    """The CPU's memory is right again when the load's end is noticed: the block changed on the way, or there."""
    p = pools(blocks=8)
    p.fill("random")
    with p.engine("raw", witness=True) as engine:
        engine.store(range(8), range(8)).wait()
        compute = p.runtime.stream_create()
        memory = p.view(p.pinned[0])
        memory[3] ^= 1
        load = engine.load(range(8), range(8), after=None)
        engine.fence(load, compute)
        p.runtime.launch_work(compute, lambda: memory.__setitem__(3, memory[3] ^ 1), 1)
        load_ended = engine.wait
        p.runtime.stream_synchronize(compute)
        load_ended()
    assert load.failed
    assert "still holds it, so it changed on its way to the GPU" in str(load.error)


def test_a_launch_that_fails_fails_its_transfer_and_no_other_method_takes_over(pools: Make) -> None:
    p = pools(blocks=8)
    held = p.fill("bf16")
    with p.engine() as engine:
        engine.store(range(8), range(8)).wait()
        p.runtime.fail_call("cuLaunchKernel", 1, 1)
        failed = engine.load(range(8), range(8))
        engine.wait()
        assert failed.failed
        assert "cuLaunchKernel failed" in str(failed.error)
        engine.load(range(8), range(8)).wait()
        assert not any(engine.read().launches[0][:2])
    assert (p.view(p.device[0]) == held[0]).all()


@pytest.mark.parametrize(("gib", "fit"), [(3, True), (4, False)])
def test_blocks_are_coded_whose_bytes_fit_in_the_32_bits_of_a_launch(
    host: Callable[..., HostRuntime], gib: int, fit: bool
) -> None:
    """Nothing reads or writes these pools, which are addresses alone."""
    runtime, size = host(), gib << 30
    gpu, cpu = (
        BlockPool(runtime, [Region(at << 40, size, kind)], size, dtype="bf16")
        for at, kind in ((1, "device"), (2, "pinned"))
    )
    options, methods = EngineOptions(policy="pooled", wire="coded"), copier_for(runtime)
    if not fit:
        with pytest.raises(UsageError, match="blocks of 4294967296 bytes are too large for a launch"):
            wire_for(runtime, options, Mapping(gpu, cpu), methods)
        return
    assert wire_for(runtime, options, Mapping(gpu, cpu), methods).name == "coded"
    assert cpu.cells is not None and cpu.cells.memory is not None
    cpu.cells.memory.close()
