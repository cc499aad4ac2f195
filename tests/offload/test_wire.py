"""Blocks come out of their cells as they went in; what does not shrink has no cell; damage is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import UsageError
from kvprobe.offload.wire import TYPES, CellError, checksum, code, decode, guess, predict

WIDTH = {"bf16": 2, "fp32": 4}


def normal(bytes_: int, dtype: str, scale: float = 0.02, seed: int = 1) -> bytes:
    values = (np.random.default_rng(seed).standard_normal(bytes_ // WIDTH[dtype]) * scale).astype(np.float32)
    words = values.view(np.uint32)
    return ((words >> 16).astype(np.uint16) if dtype == "bf16" else words).tobytes()


def comes_back(block: bytes, dtype: str) -> int:
    """Bytes that travel."""
    cell = code(block, dtype)
    if cell is None:
        return len(block)
    assert len(cell) < len(block)
    assert decode(cell, len(block)).tobytes() == block
    return len(cell)


def test_weights_travel_in_three_quarters_of_their_bytes() -> None:
    for size in (8192, 16384, 32768, 1 << 20):
        assert comes_back(normal(size, "bf16"), "bf16") / size == pytest.approx(0.752, abs=0.004)
    assert comes_back(normal(1 << 20, "fp32"), "fp32") / (1 << 20) == pytest.approx(0.876, abs=0.004)


def test_every_pattern_of_bf16_comes_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    most = np.frombuffer(normal(4 << 20, "bf16"), np.uint16)
    for patterns in (every, every[::-1], np.random.default_rng(2).permutation(every)):
        block = np.concatenate([most, patterns]).tobytes()
        assert comes_back(block, "bf16") < len(block)
        assert comes_back(patterns.tobytes(), "bf16") == 2 << 16  # all exponents alike: as it is


def test_every_upper_half_of_fp32_comes_back() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8001
    block = normal(8 << 20, "fp32") + halves.astype(np.uint32).tobytes()
    assert comes_back(block, "fp32") < len(block)


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param([0x7F80, 0xFF80], id="infinities"),
        pytest.param([0x7F81, 0x7FC0, 0xFFFF, 0x7FFF, 0xFF81], id="NaNs with payloads"),
        pytest.param([0x0001, 0x807F, 0x0040], id="denormals"),
        pytest.param([0x0000, 0x8000], id="zeros of both signs"),
        pytest.param([0x3C00], id="one value"),
    ],
)
def test_blocks_of_few_exponents_shrink(patterns: list[int]) -> None:
    block = np.resize(np.array(patterns, np.uint16), 4096).tobytes()
    assert comes_back(block, "bf16") == 32 + 4096 + 2048


def test_zeros_among_numbers_are_no_escapes() -> None:
    numbers = np.frombuffer(normal(32768, "bf16"), np.uint16).copy()
    without = comes_back(numbers.tobytes(), "bf16")
    numbers[1::2] = 0
    assert comes_back(numbers.tobytes(), "bf16") <= 1.001 * without


def test_a_block_of_nothing_but_escapes_travels_as_it_is() -> None:
    apart = (np.arange(4096, dtype=np.uint16) % 17 * 15 + 1) << 7  # no two of them within 14 exponents
    assert code(apart.tobytes(), "bf16") is None
    few = np.concatenate([np.full(100_000, 0x3C00, np.uint16), apart])
    assert comes_back(few.tobytes(), "bf16") < 2 * len(few)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_size_comes_back(dtype: str) -> None:
    block = normal(4096 + 8, dtype)
    coded = 0
    for size in range(4097):
        coded += comes_back(block[:size], dtype) < size
    assert coded > 3500


@pytest.mark.parametrize("dtype", TYPES)
def test_every_alignment_comes_back(dtype: str) -> None:
    block = normal(8192, dtype)
    for at in range(17):
        held = np.frombuffer(bytes(at) + block, np.uint8)[at:]
        cell = code(held, dtype)
        assert cell is not None
        moved = np.empty(len(cell) + at, np.uint8)
        moved[at:] = cell
        assert decode(moved[at:], len(block)).tobytes() == block


def test_random_bytes_and_other_types_travel_as_they_are() -> None:
    noise = np.random.default_rng(3).bytes(65536)
    assert all(code(noise, dtype) is None for dtype in TYPES)
    assert code(normal(65536, "bf16"), "fp8_e4m3") is None
    assert code(b"", "bf16") is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_come_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(TYPES)))
    mixed = data.draw(st.lists(st.sampled_from([b"\x00\x00", b"\x12\x3c", b"\x80\xff", b"\x01\x3d"]), max_size=400))
    comes_back(b"".join(mixed) + data.draw(st.binary(max_size=64)), dtype)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_cell_is_refused(data: st.DataObject) -> None:
    block = normal(data.draw(st.integers(500, 2000)), data.draw(st.sampled_from(sorted(TYPES))))
    cell = code(block, "bf16")
    if cell is None:
        cell = code(block, "fp32")
    assert cell is not None
    cell[data.draw(st.integers(0, len(cell) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CellError, match="was refused: it"):
        decode(cell, len(block))


def test_one_byte_short_and_one_byte_over_are_refused() -> None:
    block = normal(4096, "bf16")
    cell = code(block, "bf16")
    assert cell is not None
    for wrong in (cell[:-1], np.append(cell, np.uint8(0)), cell[:31], cell[:0]):
        with pytest.raises(CellError, match="more or fewer bytes than its header says"):
            decode(wrong, len(block))
    for size in (4095, 4097, 0):
        with pytest.raises(CellError, match="of a block of another size"):
            decode(cell, size)
    other = cell.copy()
    other[3] += 1  # a version to come
    with pytest.raises(CellError, match="no cell of a version"):
        decode(other, len(block))
    other = cell.copy()
    other[40] ^= 1  # a mantissa's bit: only the checksum can tell
    with pytest.raises(CellError, match="its checksum"):
        decode(other, len(block))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 4095])
def test_the_checksum_is_what_is_written_of_it(size: int) -> None:
    """Words of four bytes, each times its weight; the last one, where it is not whole, is filled up with zeros."""
    block = np.random.default_rng(size).integers(1, 256, size, dtype=np.uint8).tobytes()
    words = np.frombuffer(block + bytes(-size % 4), dtype="<u4").tolist()
    weights = [(i + 1) * 0x9E3779B1 % 2**32 for i in range(len(words))]
    expected = (size + 1) * 0x9E3779B97F4A7C15 + sum(a * b for a, b in zip(words, weights, strict=True))
    assert checksum(block) == expected % 2**64


def test_the_checksum_depends_on_bytes_places_and_length() -> None:
    block = normal(4096, "bf16")
    swapped = block[8:16] + block[:8] + block[16:]
    assert len({checksum(one) for one in (block, swapped, block + b"\0", block[:-1], b"", b"\0")}) == 6
    assert checksum(block) == checksum(bytearray(block))


def test_a_prediction_is_what_coding_gives() -> None:
    blocks = [normal(16384, "bf16", seed=seed) for seed in range(8)] + [np.random.default_rng(4).bytes(16384)]
    predicted = predict(blocks, "bf16")
    assert predicted.coded_bytes == sum(comes_back(block, "bf16") for block in blocks)
    assert predicted.share == pytest.approx((8 * 0.752 + 1) / 9, abs=0.004)
    assert predict(blocks, "fp16").share == 1.0
    assert predict([], "bf16").share == 1.0


def test_a_guess_names_the_type_that_saves_most() -> None:
    for dtype in TYPES:
        assert guess([normal(65536, dtype)]).dtype == dtype
    assert guess([np.random.default_rng(5).bytes(65536)]).dtype == "unknown"
    assert guess([np.random.default_rng(6).bytes(65536)]).share == 1.0


def test_what_is_no_contiguous_block_is_refused() -> None:
    with pytest.raises(UsageError, match="no contiguous block of bytes"):
        code(np.zeros((4, 4), np.uint8)[:, ::2], "bf16")
    with pytest.raises(UsageError, match="str is no contiguous"):
        code("text", "bf16")
