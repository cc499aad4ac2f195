"""Pools of cells: CPU memory whose blocks are coded on the wire or summed by a witness, and which wire an engine takes.

A block is coded in pieces, each in a cell as large as itself, at its own address; a note beside the pool says what a
cell holds. `native/src/wire.h` describes both. A pool that no engine has stored to holds its blocks as they are.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvprobe.cuda import Buffer, Region, Runtime
from kvprobe.errors import UsageError
from kvprobe.native.library import CellsConfig, JobStatus, MethodTable, WirePlace, core
from kvprobe.offload import wire_calibration
from kvprobe.offload.wire import REFUSALS, TYPES, Bytes, CellError

if TYPE_CHECKING:
    from kvprobe.offload.blocks import BlockPool, Mapping
    from kvprobe.offload.methods import Methods
    from kvprobe.offload.options import EngineOptions

__all__ = ["Cells", "Rows", "Wire", "damaged", "wire_for"]

NOTE = np.dtype([("bytes", "u4"), ("summed", "u4"), ("checksum", "u8")])  # kvp_wire_note
PIECE_BYTES = 16384  # KVP_WIRE_CELL
MOST_BYTES = 1 << 32  # of a copy: a launch has 32 bits for them


class Rows(NamedTuple):
    """A server's CPU memory: as many rows in every region, one block a row; regions may lie in each other's gaps.

    Attributes:
        regions: where each begins.
        blocks: rows of each.
        block_bytes: of a block.
        step_bytes: from a row to the next.
    """

    regions: Sequence[Region]
    blocks: int
    block_bytes: int
    step_bytes: int

    @property
    def layers(self) -> int:
        """How many regions there are."""
        return len(self.regions)


class Cells:
    """The cells of one CPU pool, for engines that come one after another: what they stored stays readable.

    Attributes:
        copy_bytes: what one copy moves: a block, or part of one where GPU blocks are smaller.
        a_layer: copies that make up a layer.
        notes: what each holds, by copy and piece.
        step_bytes: from a copy's place in the CPU's memory to the next one's.
        packed: whether cells have less space than their pieces (`packed.py`).
    """

    packed = False
    memory: Buffer | None = None  # pinned, where the notes lie beside the pool

    def __init__(self, pool: BlockPool | Rows, copy_bytes: int, notes: npt.NDArray[Any]) -> None:
        """Takes the pool's memory as blocks that lie there as they are, and notes in pinned memory, one a piece."""
        self.copy_bytes, self.a_layer = copy_bytes, pool.blocks * (pool.block_bytes // copy_bytes)
        self._regions, count = pool.regions, pool.layers * self.a_layer
        self._pieces = np.array(pieces_of(copy_bytes), np.uint32)
        self.step_bytes, self._place = getattr(pool, "step_bytes", copy_bytes), WirePlace()
        self.notes = notes.reshape(count, len(self._pieces))
        self.notes["bytes"], self.notes["summed"] = self._pieces, 0
        self._stored_ns = np.zeros(count, np.uint64)

    @classmethod
    def beside(cls, runtime: Runtime, pool: BlockPool | Rows, copy_bytes: int) -> Cells:
        """The same, with pinned memory of its own for the notes: `memory`.

        Raises:
            CudaError: there is none.
        """
        count = pool.layers * pool.blocks * (pool.block_bytes // copy_bytes) * len(pieces_of(copy_bytes))
        memory = Buffer(runtime, count * NOTE.itemsize, "pinned")
        made = cls(pool, copy_bytes, np.frombuffer(memory.view(), NOTE))
        made.memory = memory
        return made

    def config(self, number: int, table: MethodTable, *, check: bool, look: bool) -> CellsConfig:
        """What the submitter is told; it lives as long as this object and `table`."""
        notes, stored, methods = self.notes.ctypes.data, self._stored_ns.ctypes.data, ct.addressof(table)
        return CellsConfig(notes, stored, methods, number, int(check), int(look), step_bytes=self.step_bytes)

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """Where each layer begins."""
        return np.array([region.address for region in self._regions], np.uint64)

    @property
    def travels_bytes(self) -> int:
        """What all cells hold: a load of the whole pool would put so many bytes on the wire."""
        return int(self.notes["bytes"].sum(dtype=np.uint64))

    def take(self, layer: int, copy: int) -> Bytes:
        """The bytes of a copy.

        Raises:
            CellError: the cells do not hold them.
        """
        raw = np.empty(self.copy_bytes, np.uint8)
        notes = self.notes[layer * self.a_layer + copy].ctypes.data
        at, place = self.address(layer, copy), ct.byref(self._place)
        refused = core().kvp_wire_take(notes, at, raw.ctypes.data, self.copy_bytes, place)
        if refused:
            raise CellError(f"part {copy} of layer {layer} was refused: {REFUSALS[refused]}")
        return raw

    def uncode(self) -> None:
        """Has every block lie there as it is; all or none of them.

        Raises:
            CellError: cells do not hold their block.
        """
        coded = np.flatnonzero((self.notes["bytes"] != self._pieces).any(axis=1))
        for only_look in (True, False):
            for number in coded:
                layer, copy = divmod(int(number), self.a_layer)
                raw = self.take(layer, copy)
                if not only_look:
                    self._lay(int(number), raw)

    def uncode_copy(self, copy: int) -> None:
        """The same for one copy of every layer: of layers before a damaged one it has happened.

        Raises:
            CellError: a cell does not hold its block.
        """
        for layer in range(len(self._regions)):
            number = layer * self.a_layer + copy
            if (self.notes["bytes"][number] != self._pieces).any():
                self._lay(number, self.take(layer, copy))

    def _lay(self, number: int, raw: Bytes) -> None:
        ct.memmove(self.address(*divmod(number, self.a_layer)), raw.ctypes.data, self.copy_bytes)
        self.notes["bytes"][number], self.notes["summed"][number] = self._pieces, 0

    def overwritten(self, copies: Any) -> None:
        """Somebody writes blocks as they are where these copies of every layer lie."""
        by_layer = self.notes.reshape(len(self._regions), self.a_layer, -1)
        by_layer["bytes"][:, copies], by_layer["summed"][:, copies] = self._pieces, 0

    def address(self, layer: int, copy: int) -> int:
        """Where the cells of a copy begin."""
        return self._regions[layer].address + copy * self.step_bytes


def pieces_of(copy_bytes: int) -> list[int]:
    """Bytes of the pieces that a copy is coded in."""
    return [min(PIECE_BYTES, copy_bytes - at) for at in range(0, copy_bytes, PIECE_BYTES)]


@dataclass(frozen=True)
class Wire:
    """How an engine's blocks travel.

    Attributes:
        name: "raw" or "coded".
        why: one line, where "auto" or a witness was asked for and something was decided.
        cells: what the submitter is told; None: the CPU's pool is none of cells.
        table: what was measured of coded copies; kept here for the submitter.
    """

    name: str
    why: str = ""
    cells: CellsConfig | None = None
    table: MethodTable | None = None


def wire_for(runtime: Runtime, chosen: EngineOptions, mapping: Mapping, methods: Methods) -> Wire:
    """The wire of an engine with these options, and the cells that it takes.

    Raises:
        UsageError: "coded" or a witness that cannot be had, or "raw" over a pool that has cells; the text says why.
        CudaError: no pinned memory for the notes.
    """
    cells, asked = mapping.cpu.cells, f"wire={chosen.wire!r}" if chosen.wire != "raw" else "a witness"
    if chosen.wire == "raw" and not chosen.witness:
        if cells is not None and cells.packed:
            raise UsageError("the CPU pool is packed: use wire='coded'")
        if cells is not None:
            raise UsageError("the CPU pool's blocks lie in cells: use wire='coded', or call its uncode() before")
        return Wire("raw")
    impossible = _no_cells(runtime, chosen, mapping, methods)
    if impossible:
        if chosen.wire == "coded" or chosen.witness or cells is not None:
            raise UsageError(f"{asked} cannot be had: {impossible}")
        return Wire("raw", impossible)
    dtype = mapping.gpu.dtype or mapping.cpu.dtype
    uncoded = _not_coded(runtime, dtype) if chosen.wire != "raw" else ""
    measured = wire_calibration.known(runtime, methods) if chosen.wire != "raw" and not uncoded else None
    if chosen.wire == "auto" and not uncoded and runtime.provider == "cuda":
        uncoded = wire_calibration.slower(measured, mapping.piece_bytes, chosen.max_slowdown)
    if uncoded and chosen.wire == "coded":
        raise UsageError(f"{asked} cannot be had: {uncoded}")
    if uncoded and not chosen.witness and cells is None:
        return Wire("raw", uncoded)
    if cells is None:
        cells = mapping.cpu.cells = Cells.beside(runtime, mapping.cpu, mapping.piece_bytes)
    elif cells.copy_bytes != mapping.piece_bytes:
        raise UsageError(
            f"the CPU pool has cells for copies of {cells.copy_bytes} bytes; here they have {mapping.piece_bytes}"
        )
    number = TYPES[dtype or ""] if chosen.wire != "raw" and not uncoded else 0
    table = wire_calibration.table_of(measured or wire_calibration.default(), "coded", chosen.max_slowdown)
    look = chosen.wire == "auto" and not cells.packed
    config = cells.config(number, table, check=chosen.witness, look=look)
    return Wire("coded" if number else "raw", uncoded, config, table)


def _no_cells(runtime: Runtime, chosen: EngineOptions, mapping: Mapping, methods: Methods) -> str:
    """Why there can be no cells; "" where there can."""
    if chosen.policy == "shared":
        return "policy 'shared' submits single copies, which cannot code: use pooled or auto"
    if chosen.method not in ("auto", "kernel"):
        return f"method {chosen.method!r} copies bytes as they are: use kernel or auto"
    if chosen.max_slowdown < 0:
        return "max_slowdown below 0 allows no copy kernels"
    if mapping.cpu.kind != "pinned":
        return f"the CPU pool lies in {mapping.cpu.kind} memory, which no copy kernel reaches: pin it"
    if mapping.piece_bytes >= MOST_BYTES:
        return f"blocks of {mapping.piece_bytes} bytes are too large for a launch"
    if mapping.cpu.cells is not None and mapping.cpu.cells.packed and runtime.provider == "cuda":
        return "the kernels for this GPU do not pack yet: the CPU pool must be a BlockPool"
    if not methods.has_coded:
        return methods.missing.get("kernel") or "there are no kernels that code on this GPU"
    return ""


def _not_coded(runtime: Runtime, dtype: str | None) -> str:
    """Why blocks travel as they are; "" where they are coded."""
    if dtype is None:
        return "the pools do not say what numbers they hold: give BlockPool a dtype"
    if dtype not in TYPES:
        return f"numbers of type {dtype} are not coded, only {' and '.join(TYPES)}"
    if dtype != "bf16" and runtime.provider == "cuda":
        return f"numbers of type {dtype} are not coded on a GPU yet"
    return ""


def damaged(status: JobStatus, mapping: Mapping) -> CellError:
    """Why a load failed whose block the CPU's memory does not hold: which one, both times, which side changed."""
    cells = mapping.cpu.blocks * mapping.cpu_factor
    layer, cell = divmod(int(status.cell), cells)
    block, part = divmod(cell, mapping.cpu_factor)
    which = f"CPU block {block} of layer {layer}" + (f", part {part}" if mapping.cpu_factor > 1 else "")
    stored = f"stored at {status.cell_stored_ns / 1e9:.6f} s" if status.cell_stored_ns else "stored at a time not known"
    side = (
        "the CPU's memory changed in between"
        if status.cell_lost
        else "the CPU's memory still holds it, so it changed on its way to the GPU"
    )
    loaded = f"loaded at {status.cell_loaded_ns / 1e9:.6f} s"
    return CellError(f"{which} ({stored}, {loaded}) was refused: {REFUSALS[status.error]}; {side}")
