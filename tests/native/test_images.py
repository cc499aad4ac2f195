"""Images: what is packed comes back, from the CPU and from the kernel's own source, and what is damaged is refused."""

from __future__ import annotations

import ctypes as ct
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.cuda.kernels import UNPACK_BYTES
from kvprobe.native.library import core

ROOT = Path(__file__).resolve().parents[2]
BF16 = 1
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def normal(size: int, seed: int = 1) -> Bytes:
    values = np.random.default_rng(seed).standard_normal(size // 2, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def kinds(size: int) -> dict[str, Bytes]:
    draw = np.random.default_rng(7)
    noise = draw.integers(0, 256, size, np.uint8)
    some = normal(size).copy()
    some.view("u2")[::97] = 0x7FC1  # NaNs with a payload: escapes
    mixed = np.where(np.arange(size) // 16384 % 2, noise, normal(size))
    every = np.resize(np.arange(65536, dtype=np.uint16), size // 2).view(np.uint8)
    return {"normal": normal(size), "noise": noise, "escapes": some, "mixed": mixed, "every pattern": every}


def packed(raw: Bytes) -> Bytes:
    image = np.full(len(raw) + 24 * (len(raw) // 16384 + 1) + 64, 0xA5, np.uint8)
    size = core().kvp_wire_pack(BF16, raw.ctypes.data, len(raw), image.ctypes.data)
    assert (image[size:] == 0xA5).all()
    return image[:size].copy()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Unpacks by the kernel's source, a fiber a thread: the bytes, and what it refused."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    made, native = tmp_path_factory.mktemp("kernel") / "coded.so", ROOT / "kvprobe" / "native"
    command = ["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{native / 'src'}", f"-I{native / 'kernels'}"]
    program = ROOT / "tests" / "native" / "programs" / "coded_kernels.cpp"
    subprocess.run([*command, "-o", str(made), str(program)], check=True)
    library, lots = ct.CDLL(str(made)), iter(range(1, 1000))
    assert library.unpack_shared_bytes() == UNPACK_BYTES

    def run(image: Bytes, size: int, ctas: int = 3) -> tuple[Bytes, int]:
        at, to, refused = aligned(image), aligned(np.full(size + 16, 0xEE, np.uint8)), np.zeros(1, np.uint32)
        work = np.array([at.ctypes.data, to.ctypes.data, size, refused.ctypes.data], np.uint64)
        assert library.coded_unpack(ct.c_void_p(work.ctypes.data), ctas, ct.c_uint64(next(lots))) == 0
        assert (to[size:] == 0xEE).all()
        return to[:size], int(refused[0])

    return run


def aligned(given: Bytes) -> Bytes:
    """The same bytes where a GPU's allocator could have put them."""
    memory = np.zeros(len(given) + 32, np.uint8)
    start = -memory.ctypes.data % 16
    memory[start : start + len(given)] = given
    return memory[start : start + len(given)]


@pytest.mark.parametrize("size", [16, 256, 16384, 16384 + 512, 5 * 16384 - 256])
def test_what_was_packed_comes_back(kernel: Any, size: int) -> None:
    for name, raw in kinds(size).items():
        image, back = packed(raw), np.empty(size, np.uint8)
        assert core().kvp_wire_unpack(image.ctypes.data, back.ctypes.data, size) == 0, name
        assert (back == raw).all(), name
        by_kernel, refused = kernel(image, size)
        assert (refused, (by_kernel == raw).all()) == (0, True), name


def test_normal_numbers_take_three_quarters(kernel: Any) -> None:
    raw = normal(64 * 16384)
    assert len(packed(raw)) < 0.754 * len(raw)
    noise = kinds(64 * 16384)["noise"]
    assert len(packed(noise)) == len(noise) + 64 * 8


@given(st.integers(0, 2**32 - 1), st.integers(1, 255), st.integers(0, 2**32 - 1))
def test_a_damaged_image_is_refused_or_means_the_same(kernel: Any, where: int, bits: int, seed: int) -> None:
    """A byte of a cell that changed: nobody takes other bytes for the right ones."""
    size = 2 * 16384 + 256
    raw = normal(size, seed % 5)
    image = packed(raw)
    cells = range(32, len(image))  # behind the index, which travels with its cells and has no checksum
    image[cells[where % len(cells)]] ^= bits
    back = np.empty(size, np.uint8)
    refused = core().kvp_wire_unpack(image.ctypes.data, back.ctypes.data, size)
    assert refused or (back == raw).all()
    by_kernel, too = kernel(image, size, ctas=1)
    assert too or (by_kernel == raw).all()
