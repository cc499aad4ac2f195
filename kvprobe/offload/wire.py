"""The cell format from Python: coding and decoding blocks on the CPU, and what coding would save.

The format is described in `docs/wire.md` and, for C and CUDA, in `native/src/wire.h`; `cells.py` has pools of cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.native.library import core

__all__ = ["TYPES", "CellError", "Prediction", "checksum", "code", "decode", "guess", "predict"]

Bytes = npt.NDArray[np.uint8]

TYPES = {"bf16": 1, "fp32": 2}  # enum kvp_wire_type; numbers of other types travel as they are
REFUSALS = {
    1: "it has more or fewer bytes than its header says",
    2: "it is no cell of a version and type that this kvprobe knows",
    3: "it is the cell of a block of another size",
    4: "it contradicts itself: damaged",
    5: "its checksum is that of other bytes: damaged",
    6: "nothing lies there: it was never stored, or given up",
}


class CellError(KvprobeError):
    """A cell that cannot be decoded; one line that says why."""


@dataclass(frozen=True)
class Prediction:
    """What coding makes of some bytes.

    Attributes:
        dtype: "bf16", "fp32", or the name of numbers that are not coded.
        raw_bytes: the bytes that were looked at.
        coded_bytes: what would travel of them: never more.
    """

    dtype: str
    raw_bytes: int
    coded_bytes: int

    @property
    def share(self) -> float:
        """What would travel, as a share of the raw bytes; 1.0: coding saves nothing."""
        return self.coded_bytes / self.raw_bytes if self.raw_bytes else 1.0


def code(block: Any, dtype: str) -> Bytes | None:
    """The cell of a block, as uint8; None where the block would not shrink: it travels as it is.

    Args:
        block: anything with a buffer of contiguous bytes.
        dtype: of the numbers in it; only "bf16" and "fp32" are ever coded.
    """
    raw = _bytes_of(block)
    cell = np.empty(len(raw), np.uint8)
    travels = core().kvp_wire_code(TYPES.get(dtype, 0), raw.ctypes.data, len(raw), cell.ctypes.data)
    return None if travels == len(raw) else cell[:travels]


def decode(cell: Any, raw_bytes: int) -> Bytes:
    """The block of `raw_bytes` bytes that a cell holds, as uint8.

    Raises:
        CellError: it is no such cell, or it is damaged.
    """
    given, raw = _bytes_of(cell), np.empty(raw_bytes, np.uint8)
    refused = core().kvp_wire_decode(given.ctypes.data, len(given), raw.ctypes.data, raw_bytes)
    if refused:
        raise CellError(f"a cell of {len(given)} bytes for a block of {raw_bytes} was refused: {REFUSALS[refused]}")
    return raw


def checksum(block: Any) -> int:
    """The checksum of a block's bytes, 64 bits; it depends on their places."""
    raw = _bytes_of(block)
    return int(core().kvp_wire_checksum(raw.ctypes.data, len(raw)))


def predict(blocks: Iterable[Any], dtype: str) -> Prediction:
    """What coding makes of these blocks, each with a cell of its own.

    Args:
        blocks: a sample of what would be moved, each as large as what one copy moves.
        dtype: of the numbers in them.
    """
    raw_bytes = coded_bytes = 0
    for block in blocks:
        raw = _bytes_of(block)
        raw_bytes += len(raw)
        coded_bytes += int(core().kvp_wire_size(TYPES.get(dtype, 0), raw.ctypes.data, len(raw)))
    return Prediction(dtype, raw_bytes, coded_bytes)


def guess(blocks: Iterable[Any]) -> Prediction:
    """The same for blocks of which nobody says what numbers they hold: as the type that saves most of them.

    Where none saves anything, `dtype` is "unknown".
    """
    held = [_bytes_of(block) for block in blocks]
    best = min((predict(held, dtype) for dtype in TYPES), key=lambda one: one.coded_bytes)
    return best if best.coded_bytes < best.raw_bytes else Prediction("unknown", best.raw_bytes, best.raw_bytes)


def _bytes_of(block: Any) -> Bytes:
    """The bytes, not copied.

    Raises:
        UsageError: no buffer, or not contiguous.
    """
    try:
        return np.frombuffer(block, np.uint8) if memoryview(block).nbytes else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise UsageError(f"{type(block).__name__} is no contiguous block of bytes") from None
