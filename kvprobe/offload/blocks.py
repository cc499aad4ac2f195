"""Block pools: where the blocks of each layer lie, and the copies that moving a set of them takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.cuda import Region, Runtime, region_of
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.native.library import Side
from kvprobe.offload.job import Refusal

INT64 = np.dtype(np.int64)
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

COPIED_IDS = 4096


class BlockPool:
    """The blocks of one memory: for every layer one contiguous region, block i of a layer at `base + i * block_bytes`.

    Attributes:
        layers: number of layers.
        block_bytes: bytes of one block of one layer.
        blocks: number of blocks.
        kind: "device", "pinned" or "pageable", the same for all layers.
    """

    def __init__(self, runtime: Runtime, layers: Sequence[Any], block_bytes: int) -> None:
        """Takes one object with memory for each layer (see `region_of`).

        Raises:
            UsageError: no layers, layers of different lengths or kinds, a block size that does not divide a layer.
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
        self.kind = kinds.pop()
        self._bases = np.array([region.address for region in self.regions], dtype=np.uint64)

    def addresses(self, ids: I64, piece_bytes: int) -> U64:
        """Addresses of pieces `ids` (counted in pieces of `piece_bytes`) in every layer, layer after layer."""
        offsets = ids.astype(np.uint64) * np.uint64(piece_bytes)
        every: U64 = (self._bases[:, None] + offsets[None, :]).reshape(-1)
        return every

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
            UsageError: different numbers of layers, or block sizes of which neither is a multiple of the other.
        """
        if gpu.layers != cpu.layers:
            raise UsageError(f"the GPU pool has {gpu.layers} layers, the CPU pool {cpu.layers}")
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
        """The error for what native code refused: an id out of range, a destination twice, no memory."""
        if why == Refusal.TWICE:
            return UsageError(f"a {direction} names the same destination block twice")
        if why != Refusal.BAD_ID:
            return KvprobeError("no memory for a transfer")
        side, pool = ("GPU", self.gpu) if ((gpu < 0) | (gpu >= self.gpu.blocks)).any() else ("CPU", self.cpu)
        return UsageError(f"{side} block {bad} is out of range: the pool has {pool.blocks} blocks")


def pointer(ids: I64) -> bytes | int:
    """Contiguous ids as native code takes them, as long as the array lives; asking numpy for an address takes 2 us."""
    return ids.tobytes() if len(ids) <= COPIED_IDS else int(ids.__array_interface__["data"][0])


def _ids(side: str, blocks: Iterable[int]) -> I64:
    if type(blocks) is np.ndarray and blocks.dtype is INT64 and blocks.ndim == 1 and blocks.flags.c_contiguous:
        if not len(blocks):
            raise UsageError(f"a transfer needs at least one {side} block")
        return blocks
    try:
        if isinstance(blocks, np.ndarray):
            ids = np.ascontiguousarray(blocks, dtype=np.int64).reshape(-1)
        elif isinstance(blocks, Sequence):
            ids = np.fromiter(blocks, dtype=np.int64, count=len(blocks))
        else:
            ids = np.fromiter(blocks, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{side} block ids must be whole numbers") from None
    if not len(ids):
        raise UsageError(f"a transfer needs at least one {side} block")
    return ids


def _refuse_overlap(regions: Sequence[Region]) -> None:
    ordered = sorted(regions, key=lambda region: region.address)
    for left, right in itertools.pairwise(ordered):
        if left.address + left.bytes > right.address:
            raise UsageError(
                f"memory regions overlap: {left.bytes} bytes at {left.address:#x}, {right.bytes} at {right.address:#x}"
            )
