"""Packed pools: CPU memory that holds 1.25 times as many blocks, or more, with a reserve for those that do not shrink.

A cell has space for what normal numbers take of its piece. One that takes more goes on in a *tail*, of a reserve that
all blocks share; `native/src/wire.h` says where each byte lies, `native/src/reserve.c` who has which tail.
"""

from __future__ import annotations

import ctypes as ct
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.cuda import Region, Runtime, region_of
from kvprobe.errors import KvprobeError, PoolFullError, UsageError
from kvprobe.native.library import CellsConfig, MethodTable, WirePlace, core
from kvprobe.offload.blocks import BlockPool
from kvprobe.offload.cells import NOTE, Cells, pieces_of
from kvprobe.offload.wire import TYPES

__all__ = ["PackedPool"]

MORE = 1.25  # blocks, unless the caller says how many
HEADER = 32  # bytes of a cell's
SHARE = {"bf16": 3 / 4, "fp32": 7 / 8}  # of a piece that its cell takes beside header and escapes
ESCAPES = 1 / 256  # of a piece: four times what normal numbers need
ALIGNED = 16


class PackedPool(BlockPool):
    """A CPU pool whose blocks are coded, in one memory that holds more of them than as they are.

    It is used as any CPU pool of an engine with `wire="coded"`: order, fences, cancellation and errors are the same. A
    block of which some 16 KiB take more than their space (12,384 bytes of bf16) takes a tail for them from the reserve;
    no block is ever cut or dropped. A `store` is promised a tail for each of its cells when it is asked for, as nobody
    knows what they take before they are coded, and gets back what it did not need when it ends. Where the reserve has
    too few left, `store` raises `PoolFullError` and nothing was written: the caller waits for stores that are under
    way, discards blocks that it does not need, or stores fewer at once.

    Attributes:
        tails: in the reserve.
        tail_bytes: of each.
    """

    def __init__(
        self,
        runtime: Runtime,
        memory: Any,
        block_bytes: int,
        *,
        dtype: str,
        layers: int = 1,
        blocks: int | None = None,
        copy_bytes: int | None = None,
    ) -> None:
        """Divides pinned memory into places for cells, tails, and 16 bytes of notes a cell.

        Args:
            runtime: where the pool lives.
            memory: one object with pinned memory for all layers (see `region_of`).
            block_bytes: of a block of one layer, as the GPU has it.
            dtype: of the numbers in it: "bf16" or "fp32".
            layers: number of layers.
            blocks: of each layer; None: 1.25 times as many as the memory would hold as they are. More of them leave a
                smaller reserve.
            copy_bytes: the GPU pool's block size, where that is smaller.

        Raises:
            UsageError: memory of another kind or too small, numbers that are not coded, sizes that do not fit each
                other, or more blocks than there is space for; the text says how many there is space for.
        """
        region = region_of(runtime, memory)
        copy = copy_bytes or block_bytes
        if dtype not in TYPES:
            raise UsageError(f"numbers of type {dtype} are not coded, only {' and '.join(TYPES)}: use a BlockPool")
        if region.kind != "pinned":
            raise UsageError(f"a packed pool lies in pinned memory, not in {region.kind} memory")
        if block_bytes <= 0 or layers < 1 or copy <= 0 or block_bytes % copy:
            raise UsageError(f"{layers} layers of blocks of {block_bytes} bytes, copied by {copy}: no such pool")
        pieces = pieces_of(copy)
        space = min(_up(pieces[0] * (SHARE[dtype] + ESCAPES) + HEADER), _up(pieces[0]))
        span = _up((len(pieces) - 1) * space + min(space, pieces[-1]))
        self.tail_bytes = max(_up(pieces[0] - space), ALIGNED)
        a_block = layers * (block_bytes // copy) * (span + len(pieces) * NOTE.itemsize)
        begin = -(-region.address // ALIGNED) * ALIGNED
        size = region.address + region.bytes - begin
        wanted = int(MORE * region.bytes) // (layers * block_bytes) if blocks is None else blocks
        most = max((size - len(pieces) * self.tail_bytes) // a_block, 0)
        if not 0 < wanted <= most:
            raise UsageError(
                f"{wanted} blocks of {layers} x {block_bytes} bytes of {dtype} and a reserve have no space in "
                f"{region.bytes} bytes: {most} have at most, {region.bytes // (layers * block_bytes)} as they are"
            )
        self.layers, self.block_bytes, self.blocks = layers, block_bytes, wanted
        self.kind, self.dtype = region.kind, dtype
        a_layer = wanted * (block_bytes // copy) * span
        self.regions = [Region(begin + i * a_layer, a_layer, region.kind, region.owner) for i in range(layers)]
        self._bases = np.array([each.address for each in self.regions], dtype=np.uint64)
        self.tails = (size - wanted * a_block) // self.tail_bytes
        self.cells: PackedCells = PackedCells(self, copy, space, span, begin + layers * a_layer)

    @property
    def tails_left(self) -> int:
        """Tails that no block has and no store was promised."""
        return int(core().kvp_reserve_left(self.cells.reserve))

    def discard(self, blocks: Iterable[int]) -> None:
        """Gives blocks up, in every layer: their tails are free, and a load of them fails until they are stored again.

        Args:
            blocks: that no transfer uses.

        Raises:
            UsageError: no such block, or a store is on its way to one: those named before it are given up.
        """
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise UsageError(f"CPU block {block} is out of range: the pool has {self.blocks} blocks")
            if not self.cells.discard(block * (self.block_bytes // self.cells.copy_bytes)):
                raise UsageError(f"CPU block {block} is being stored: wait for that first")

    def write(self, layer: int, block: int, data: Any) -> None:
        """Puts a block's bytes there from the CPU; no transfer may use the block meanwhile.

        Args:
            layer: which.
            block: which.
            data: anything with a buffer of `block_bytes` contiguous bytes.

        Raises:
            UsageError: no such block, or other than `block_bytes` bytes.
            PoolFullError: too few tails are left; nothing was written.
        """
        raw = np.frombuffer(data, np.uint8)
        if len(raw) != self.block_bytes or not (0 <= layer < self.layers and 0 <= block < self.blocks):
            raise UsageError(f"block {block} of layer {layer} cannot hold these {len(raw)} bytes")
        parts = self.block_bytes // self.cells.copy_bytes
        for part, piece in enumerate(raw.reshape(parts, -1)):
            self.cells.put(layer, block * parts + part, piece, TYPES[self.dtype or ""])

    def uncode(self) -> None:
        """Refused: the memory has no space for the blocks as they are.

        Raises:
            UsageError: always.
        """
        raise UsageError("a packed pool cannot be uncoded: read() its blocks one by one")

    def addresses(self, ids: npt.NDArray[np.int64], piece_bytes: int) -> npt.NDArray[np.uint64]:
        """Refused: a block has no address of its own.

        Raises:
            UsageError: always.
        """
        raise UsageError("blocks of a packed pool are moved by an engine alone")


class PackedCells(Cells):
    """The cells of a packed pool, and its reserve.

    Attributes:
        space: bytes that a cell has of its own.
        reserve: the native one.
    """

    packed = True

    def __init__(self, pool: PackedPool, copy_bytes: int, space: int, step_bytes: int, tails_at: int) -> None:
        """Cells of which nothing is stored; tails begin at `tails_at`, and notes behind them.

        Raises:
            KvprobeError: no memory for the list of tails.
        """
        count = pool.layers * pool.blocks * (pool.block_bytes // copy_bytes) * len(pieces_of(copy_bytes))
        at = tails_at + pool.tails * pool.tail_bytes
        memory = memoryview((ct.c_ubyte * (count * NOTE.itemsize)).from_address(at))
        notes = np.frombuffer(memory, NOTE)
        super().__init__(pool, copy_bytes, notes)
        self.notes["bytes"], self._parts = 0, pool.block_bytes // copy_bytes
        self.space, self.step_bytes, self._place = space, step_bytes, WirePlace(space, tails_at)
        self.reserve = core().kvp_reserve_open(at, count, pool.tails, space)
        if not self.reserve:
            raise KvprobeError("no memory for a packed pool's list of tails")
        weakref.finalize(self, core().kvp_reserve_close, self.reserve)

    def config(self, number: int, table: MethodTable, *, check: bool, look: bool) -> CellsConfig:
        """What the submitter is told; it lives as long as this object."""
        config = super().config(number, table, check=check, look=look)
        config.room, config.step_bytes, config.tails = self.space, self.step_bytes, self._place.tails
        config.reserve = self.reserve
        return config

    def discard(self, copy: int) -> bool:
        """Gives up the copies of a block that begin with this one, in every layer; whether none is being stored."""
        pieces = self.notes.shape[1]
        firsts = [(layer * self.a_layer + copy) * pieces for layer in range(len(self._regions))]
        return all(core().kvp_reserve_discard(self.reserve, each, self._parts * pieces) for each in firsts)

    def put(self, layer: int, copy: int, raw: npt.NDArray[np.uint8], number: int) -> None:
        """Codes the bytes of a copy into its cells.

        Raises:
            PoolFullError: too few tails are left.
        """
        native, pieces = core(), self.notes.shape[1]
        first = (layer * self.a_layer + copy) * pieces
        if not native.kvp_reserve_claim(self.reserve, pieces):
            raise PoolFullError(pieces, int(native.kvp_reserve_left(self.reserve)))
        native.kvp_reserve_begin(self.reserve, first, pieces)
        native.kvp_reserve_unclaim(self.reserve, pieces)
        notes = self.notes[layer * self.a_layer + copy].ctypes.data
        at, place = self.address(layer, copy), ct.byref(self._place)
        native.kvp_wire_put(number, True, raw.ctypes.data, self.copy_bytes, at, notes, place)
        native.kvp_reserve_end(self.reserve, first, pieces, 0)


def _up(size: float) -> int:
    """The next multiple of what cells are aligned to."""
    return -(-int(size) // ALIGNED) * ALIGNED
