"""The coded copy kernels' own source, each thread a fiber of the CPU: the CPU reads their cells, and blocks are as before.

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
    assert shape.threads(store=False) == shape.threads(store=True) == CODED_THREADS


def test_every_block_comes_back_and_the_cpu_reads_every_cell(bench: ModuleType, host_runtime: Runtime) -> None:
    bench.checks(host_runtime, bench.Fibers(bench.DEFAULT), small=True)


def test_teams_of_another_size_make_cells_as_good(bench: ModuleType, host_runtime: Runtime) -> None:
    kernels = bench.Fibers(bench.Shape((256, 2, 2), (128, 2, 2, 1), 2))
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
