"""Block pools: where the blocks of each layer lie, and the copies that moving a set of them takes."""

from __future__ import annotations

import contextlib
import ctypes as ct
import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.cuda import Region, Runtime, region_of
from kvprobe.errors import KvprobeError, PoolFullError, UsageError
from kvprobe.native.library import Side
from kvprobe.offload.cells import Cells
from kvprobe.offload.job import Refusal

INT64 = np.dtype(np.int64)
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MOST_BLOCKS = 1 << 32
COPIED_IDS = 4096  # up to so many are copied to be passed on, which is faster than asking for their address
_Memory = ct.c_char * 0


class BlockPool:
    """The blocks of one memory: for every layer one contiguous region, block i of a layer at `base + i * block_bytes`.

    Attributes:
        layers: number of layers.
        block_bytes: bytes of one block of one layer.
        blocks: number of blocks.
        kind: "device", "pinned" or "pageable", the same for all layers.
        dtype: of the numbers in it, such as "bf16"; None: not known.
        cells: in CPU memory, once an engine keeps its blocks in cells (`wire`, `witness`); else None.
    """

    def __init__(self, runtime: Runtime, layers: Sequence[Any], block_bytes: int, *, dtype: str | None = None) -> None:
        """Takes one object with memory for each layer (see `region_of`).

        Raises:
            UsageError: no layers, layers of different lengths or kinds, a block size that does not divide a layer, more
                than 2^32 blocks.
        """
        if not layers:
            raise UsageError("a block pool needs at least one layer")
        if block_bytes <= 0:
            raise UsageError(f"block size {block_bytes} must be positive")
        self.regions: list[Region] = [region_of(runtime, layer) for layer in layers]
        sizes, kinds = {region.bytes for region in self.regions}, {region.kind for region in self.regions}
        if len(sizes) > 1:
            raise UsageError(f"layers differ in size: {sorted(sizes)} bytes")
        if len(kinds) > 1:
            raise UsageError(f"layers lie in different kinds of memory: {', '.join(sorted(kinds))}")
        size = sizes.pop()
        if size % block_bytes:
            raise UsageError(f"block size {block_bytes} does not divide a layer of {size} bytes")
        _refuse_overlap(self.regions)
        self.layers, self.block_bytes, self.blocks = len(self.regions), block_bytes, size // block_bytes
        if self.blocks > MOST_BLOCKS:
            raise UsageError(f"{self.blocks} blocks of {block_bytes} bytes: a pool has at most {MOST_BLOCKS}")
        self.kind, self.dtype = kinds.pop(), dtype
        self.cells: Cells | None = None
        self._bases = np.array([region.address for region in self.regions], dtype=np.uint64)

    def addresses(self, ids: I64, piece_bytes: int) -> U64:
        """Addresses of pieces `ids` (counted in pieces of `piece_bytes`) in every layer, layer after layer."""
        offsets = ids.astype(np.uint64) * np.uint64(piece_bytes)
        every: U64 = (self._bases[:, None] + offsets[None, :]).reshape(-1)
        return every

    def read(self, layer: int, block: int) -> npt.NDArray[np.uint8]:
        """The bytes of a block in CPU memory, decoded where it lies coded; no transfer may write it meanwhile.

        Raises:
            UsageError: no such block, or the pool lies in device memory.
            CellError: its cell is damaged.
        """
        if not (0 <= layer < self.layers and 0 <= block < self.blocks):
            raise UsageError(
                f"no block {block} of layer {layer}: there are {self.layers} layers of {self.blocks} blocks"
            )
        if self.kind == "device":
            raise UsageError("the pool lies in device memory: copy its blocks to the CPU first")
        if self.cells is None:
            address = self.regions[layer].address + block * self.block_bytes
            return np.frombuffer(ct.string_at(address, self.block_bytes), np.uint8)
        parts = self.block_bytes // self.cells.copy_bytes
        whole: npt.NDArray[np.uint8] = np.concatenate(
            [self.cells.take(layer, block * parts + part) for part in range(parts)]
        )
        return whole

    def uncode(self) -> None:
        """Has every block lie in CPU memory as it is, for whoever reads that memory; no transfer may use it meanwhile.

        Raises:
            CellError: a cell is damaged; then nothing has changed.
        """
        if self.cells is not None:
            self.cells.uncode()
            self.cells = None

    def side(self, factor: int) -> Side:
        """The pool as native code sees it; valid as long as the pool lives."""
        return Side(bases=self._bases.ctypes.data, blocks=self.blocks, factor=factor)


class Mapping:
    """How a GPU pool and a CPU pool correspond: the copy's size is the smaller block, the other is a whole multiple.

    A CPU block that is `factor` times as large as a GPU block holds GPU-sized piece j of it at `block * factor + j`,
    and the other way round.

    Attributes:
        piece_bytes: size of one copy.
        gpu_factor: pieces in a GPU block.
        cpu_factor: pieces in a CPU block.
    """

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        """Pairs the pools.

        Raises:
            UsageError: different numbers of layers or dtypes, or block sizes of which neither is a multiple of the
                other.
        """
        if gpu.layers != cpu.layers:
            raise UsageError(f"the GPU pool has {gpu.layers} layers, the CPU pool {cpu.layers}")
        if gpu.dtype and cpu.dtype and gpu.dtype != cpu.dtype:
            raise UsageError(f"the GPU pool holds {gpu.dtype}, the CPU pool {cpu.dtype}")
        small, large = sorted((gpu.block_bytes, cpu.block_bytes))
        if large % small:
            raise UsageError(
                f"GPU blocks of {gpu.block_bytes} bytes and CPU blocks of {cpu.block_bytes} bytes do not fit: "
                "one must be a whole multiple of the other"
            )
        _refuse_overlap([*gpu.regions, *cpu.regions])
        self.gpu, self.cpu, self.piece_bytes = gpu, cpu, small
        self.gpu_factor, self.cpu_factor = gpu.block_bytes // small, cpu.block_bytes // small
        self._alike = large == small

    def request(self, gpu_blocks: Iterable[int], cpu_blocks: Iterable[int]) -> tuple[I64, I64, int]:
        """Block ids of a transfer as arrays, and how many pieces of a layer they are.

        Args:
            gpu_blocks: GPU block ids, in order.
            cpu_blocks: CPU block ids, in order, covering the same bytes; the last block of the side whose blocks are
                larger may be filled in part.

        Raises:
            UsageError: not whole numbers, none at all, different amounts.
        """
        gpu, cpu = _ids("GPU", gpu_blocks), _ids("CPU", cpu_blocks)
        if self._alike and len(gpu) == len(cpu):
            return gpu, cpu, len(gpu)
        gpu_pieces, cpu_pieces = len(gpu) * self.gpu_factor, len(cpu) * self.cpu_factor
        if abs(gpu_pieces - cpu_pieces) >= max(self.gpu_factor, self.cpu_factor):
            raise UsageError(
                f"{len(gpu)} GPU blocks of {self.gpu.block_bytes} bytes and "
                f"{len(cpu)} CPU blocks of {self.cpu.block_bytes} bytes are not the same amount"
            )
        return gpu, cpu, min(gpu_pieces, cpu_pieces)

    def refused(self, direction: str, gpu: I64, cpu: I64, why: int, bad: int) -> KvprobeError:
        """The error for what native code refused: an id out of range, a destination twice, no space, no memory."""
        if why == Refusal.NO_ROOM:
            cells = self.cpu.cells
            pieces = min(len(gpu) * self.gpu_factor, len(cpu) * self.cpu_factor) * self.gpu.layers
            return PoolFullError(pieces * (cells.notes.shape[1] if cells else 1), bad)
        if why == Refusal.TWICE:
            return UsageError(f"a {direction} names the same destination block twice")
        if why != Refusal.BAD_ID:
            return KvprobeError("no memory for a transfer")
        side, pool = ("GPU", self.gpu) if ((gpu < 0) | (gpu >= self.gpu.blocks)).any() else ("CPU", self.cpu)
        return UsageError(f"{side} block {bad} is out of range: the pool has {pool.blocks} blocks")


def passed(ids: I64) -> Any:
    """Ids as native code takes them; asking numpy for an address takes longer than all the rest of a small request."""
    given: object = ids.base
    if type(given) is bytes and len(given) == ids.nbytes:  # from a list: packed a moment ago
        return given
    if len(ids) > COPIED_IDS:
        try:
            return _Memory.from_buffer(ids)  # type: ignore[arg-type]
        except TypeError:  # read-only, or not contiguous
            pass
    return ids.tobytes()


def _ids(side: str, blocks: Iterable[int]) -> I64:
    if type(blocks) is np.ndarray and blocks.dtype is INT64 and blocks.ndim == 1:
        ids = blocks
    else:
        try:
            ids = _converted(blocks)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"{side} block ids must be whole numbers") from None
    if not len(ids):
        raise UsageError(f"a transfer needs at least one {side} block")
    return ids


def _converted(blocks: Iterable[int]) -> I64:
    if isinstance(blocks, range):
        return np.arange(blocks.start, blocks.stop, blocks.step, dtype=np.int64)
    if isinstance(blocks, list) and blocks:
        try:
            # a third of numpy's time; "=" takes a fifth fewer instructions than the native form
            return np.frombuffer(struct.pack(f"={len(blocks)}q", *blocks), dtype=np.int64)
        except struct.error:  # other numbers than whole ones, or too large: numpy decides
            pass
    if type(blocks).__module__ == "torch" and getattr(blocks, "ndim", 0) == 1:
        with contextlib.suppress(TypeError, RuntimeError):  # on a GPU, or with a gradient: number by number
            blocks = np.asarray(blocks)
    if isinstance(blocks, np.ndarray):
        return np.ascontiguousarray(blocks, dtype=np.int64).reshape(-1)
    return np.fromiter(blocks, dtype=np.int64, count=len(blocks) if isinstance(blocks, Sequence) else -1)


def _refuse_overlap(regions: Sequence[Region]) -> None:
    ordered = sorted(regions, key=lambda region: region.address)
    for left, right in itertools.pairwise(ordered):
        if left.address + left.bytes > right.address:
            raise UsageError(
                f"memory regions overlap: {left.bytes} bytes at {left.address:#x}, {right.bytes} at {right.address:#x}"
            )
