"""The coded copy kernels' own source, each thread a fiber of the CPU: the CPU reads their cells, blocks come back.

What the GPU does with the same source, `benchmarks/wire_gpu.py` checks there.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvprobe.cuda import Runtime, find_runtime
from kvprobe.cuda.kernels import CODED_LOAD_BYTES, CODED_LOAD_THREADS, CODED_STORE_BYTES, CODED_STORE_THREADS
from kvprobe.offload.wire import predict

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "wire_gpu.py"


@pytest.fixture
def host_runtime() -> Runtime:
    return find_runtime("host")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    spec = importlib.util.spec_from_file_location("wire_gpu", BENCHMARK)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["wire_gpu"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_what_the_kernels_are_launched_with_is_what_their_source_says(bench: ModuleType) -> None:
    shape = bench.DEFAULT  # Fibers compares the sizes of its shared memory with the source's
    assert (shape.shared(store=False), shape.shared(store=True)) == (CODED_LOAD_BYTES, CODED_STORE_BYTES)
    assert (shape.threads(store=False), shape.threads(store=True)) == (CODED_LOAD_THREADS, CODED_STORE_THREADS)


def test_every_block_comes_back_and_the_cpu_reads_every_cell(bench: ModuleType, host_runtime: Runtime) -> None:
    bench.checks(host_runtime, bench.Fibers(bench.DEFAULT), small=True)


def test_teams_of_another_size_make_cells_as_good(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels = bench.Fibers(bench.Shape((256, 2, 2, 2), (256, 2, 3, 3, 4)))
    pool = bench.Pool(host_runtime, 1 << 20)
    for raw in (20001, 16384, 8192):
        bench.check_blocks(pool, kernels, bench.normal(6 * raw, 1, channels=True), raw)


def test_an_eighth_of_the_numbers_tells_nearly_the_best_codes(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels, pool = bench.Fibers(bench.DEFAULT), bench.Pool(host_runtime, 1 << 20)
    for channels in (False, True):
        numbers = bench.normal(16 * 16384, 1, channels=channels)
        best = predict(numbers.reshape(-1, 16384), "bf16").share
        assert best <= bench.check_blocks(pool, kernels, numbers, 16384) < 1.01 * best
    numbers = bench.normal(16384, 2).view("u2")
    numbers[:: 9 * 8] = 0x7F00  # some of those looked at are far from the others
    assert bench.check_blocks(pool, kernels, numbers.view("u1"), 16384) < 0.8


def test_pieces_that_do_not_shrink_are_looked_at_less_and_less(bench: ModuleType, host_runtime: Runtime) -> None:
    """Random blocks of one team, then normal ones: all come back, and of the normal ones all but a few are coded."""
    kernels, pool = bench.Fibers(bench.DEFAULT), bench.Pool(host_runtime, 2 << 20)
    noise = np.random.default_rng(5).integers(0, 256, 24 * 16384, np.uint8)
    rows = [bench.normal(24 * 16384, team) if team % 2 else noise for team in range(4)]  # of the four teams of a CTA
    assert bench.check_blocks(pool, kernels, np.concatenate(rows), 16384, ctas=1) < (1 + 0.76) / 2
    blocks = np.concatenate([noise, bench.normal(72 * 16384, 9)])
    assert bench.check_blocks(pool, kernels, blocks[: 24 * 4 * 16384], 16384, ctas=1) < 1
    passed = np.concatenate([noise[: 6 * 16384], bench.normal(18 * 16384, 9)])
    kinds = np.concatenate([passed] * 4)
    travelled = bench.check_blocks(pool, kernels, kinds, 16384, ctas=1)
    assert 6 + 18 * 0.75 < 24 * travelled < 6 + 3 + 15 * 0.76  # after six of noise the team passes three over


def test_where_nothing_is_coded_blocks_of_any_size_lie_as_they_are(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels, pool = bench.Fibers(bench.DEFAULT), bench.Pool(host_runtime, 1 << 20)
    for raw, gpu_off, cpu_off in ((16384, 0, 0), (40000, 0, 0), (20001, 0, 0), (4096, 2, 0), (20000, 0, 1)):
        numbers = bench.normal(12 * raw, raw)
        how = {"type_": 0, "ctas": 1, "gpu_off": gpu_off, "cpu_off": cpu_off}
        assert bench.check_blocks(pool, kernels, numbers, raw, **how) == 1
