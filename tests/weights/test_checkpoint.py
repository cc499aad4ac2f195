"""What coding would save of a checkpoint, by a sample of its own bytes; damaged files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.offload.wire import code
from kvprobe.weights.checkpoint import PIECE_BYTES, PIECES, shares

Tensors = dict[str, tuple[str, bytes]]


def write(file: Path, tensors: Tensors) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, held) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(held)], "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def bf16(count: int, scale: float = 0.02, seed: int = 1) -> bytes:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_every_dtype_has_its_share(folder: Path) -> None:
    write(
        folder / "model.safetensors",
        {
            "a": ("BF16", bf16(1 << 20)),
            "empty": ("I64", b""),
            "b": ("F32", np.random.default_rng(2).standard_normal(1 << 16).astype(np.float32).tobytes()),
            "c": ("F8_E4M3", bytes(1000)),
        },
    )
    found = {one.dtype: one for one in shares(folder)}
    assert list(found) == ["BF16", "F32", "F8_E4M3"]
    assert found["BF16"].share == pytest.approx(0.752, abs=0.002)
    assert found["BF16"].bytes == found["BF16"].sample_bytes == 2 << 20
    assert found["F32"].share == pytest.approx(0.876, abs=0.002)
    assert (found["F8_E4M3"].share, found["F8_E4M3"].sample_bytes) == (1.0, 0)


def test_a_sample_tells_what_all_bytes_would(folder: Path) -> None:
    """Of several files, one of which does not shrink: the sample takes its part of each."""
    noise = np.random.default_rng(3).bytes(8 << 20)
    parts = {"one": bf16(12 << 20), "two": noise, "three": bf16(2 << 20, 3.0)}
    for name, held in parts.items():
        write(folder / f"{name}.safetensors", {name: ("BF16", held)})
    names = {name: f"{name}.safetensors" for name in parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (found,) = shares(folder)
    all_bytes = b"".join(parts[name] for name in sorted(parts))
    pieces = [all_bytes[at : at + PIECE_BYTES] for at in range(0, len(all_bytes), PIECE_BYTES)]
    cells = [code(piece, "bf16") for piece in pieces]
    whole = sum(len(piece) if cell is None else len(cell) for piece, cell in zip(pieces, cells, strict=True))
    assert found.bytes == len(all_bytes)
    assert 0.99 * PIECES * PIECE_BYTES < found.sample_bytes <= PIECES * PIECE_BYTES  # less at a tensor's end
    assert found.coded_bytes == pytest.approx(whole, rel=0.01)


def test_what_is_no_checkpoint_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="no safetensors file"):
        shares(folder)
    write(folder / "model.safetensors", {})
    with pytest.raises(UsageError, match="holds no weights"):
        shares(folder)
    with pytest.raises(UsageError, match=r"no config\.json"):
        shares(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (b"", "its header is damaged"),
        (b"\xff" * 64, "its header reaches beyond its end"),
        (struct.pack("<Q", 2) + b"[]", "its header is damaged"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "its header is damaged"),
        (struct.pack("<Q", 12) + b'{"a": "text"', "its header is damaged"),
        (struct.pack("<Q", 8) + b'{"a": 3}', "its header is damaged"),
        (struct.pack("<Q", 47) + b'{"a": {"dtype": "BF16", "data_offsets": [0,9]}}', "a tensor lies outside of it"),
        (struct.pack("<Q", 47) + b'{"a": {"dtype": "BF16", "data_offsets": [9,0]}}', "a tensor lies outside of it"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(folder: Path, held: bytes, why: str) -> None:
    (folder / "model.safetensors").write_bytes(held)
    with pytest.raises(KvprobeError, match=f"damaged or half written.*{why}.*fetch the checkpoint again") as caught:
        shares(folder)
    assert "\n" not in str(caught.value)
