"""The coded copy kernels' own source, each thread a fiber of the CPU: cells equal to the CPU coder's, blocks as before.

What the GPU does with the same source, `benchmarks/wire_gpu.py` checks there.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvprobe.cuda import Runtime, find_runtime
from kvprobe.cuda.kernels import CODED_LOAD_BYTES, CODED_STORE_BYTES, CODED_THREADS

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
    assert shape.load[0] * shape.load[1] == shape.store[0] * shape.store[1] == CODED_THREADS


def test_every_block_comes_back_and_every_cell_is_the_cpu_coders(bench: ModuleType, host_runtime: Runtime) -> None:
    bench.checks(host_runtime, bench.Fibers(bench.DEFAULT), small=True)


def test_teams_of_another_size_make_the_same_cells(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels = bench.Fibers(bench.Shape((256, 2, 4), (256, 2), 1))
    pool = bench.Pool(host_runtime, 1 << 20)
    for raw in (20001, 16384, 8192):
        bench.check_blocks(pool, kernels, bench.normal(6 * raw, 1, channels=True), raw)


def test_an_emax_from_a_few_numbers_still_brings_every_block_back(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels = bench.Fibers(bench.Shape(counts=8))
    pool = bench.Pool(host_runtime, 1 << 20)
    assert bench.check_blocks(pool, kernels, bench.normal(8 * 16384, 1), 16384) < 0.76
    numbers = bench.normal(16384, 2).view("u2")
    numbers[: 8 * 32] = 0x7F00  # the counted ones are far from the others
    bench.check_blocks(pool, kernels, numbers.view("u1"), 16384)
