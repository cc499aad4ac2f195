"""One history: an engine on a simulated runtime, random requests from a seed, and the same in a plain list of values.

Everything follows from the seed: the machine, the pools, the engine, what its callers ask for and when, what fails. One
caller runs on the program's own thread, the others on simulated threads; the virtual clock says whose turn it is.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import gc
import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import Buffer, Region, device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import CudaError, TransferError, UsageError
from kvprobe.native.library import MethodTable, RingOptions, core
from kvprobe.offload import BlockPool, OffloadEngine, PackedPool, Transfer, packed
from kvprobe.offload import engine as engine_module
from kvprobe.offload.cells import Cells, pieces_of
from kvprobe.offload.methods import Methods, copier_for, method_table
from kvprobe.offload.wire import TYPES, CellError
from kvprobe.probe.ring import read_ring

from .caller import UNDEFINED, Caller
from .faults import KINDS, Fault
from .server import Server
from .violation import Violation

PIECES = (1024,) * 24 + (4096,) * 36 + (16384,) * 24 + (65536,) * 12 + (262144,) * 2 + (1 << 20, 4 << 20)
WORD = 8
LENGTH = 40
CROWDED, CROWD = 29, 7  # one history of so many has a crowd: those whose seed leaves that remainder
_methods: Methods | None = None  # of a machine on which nothing failed; the same on all of them
_tables: list[tuple[str, MethodTable]] = []


def wire_of(seed: int) -> tuple[str, bool, str, str]:
    """Wire, witness, dtype and packing of a seed's history, by dice of their own: raw ones are what they always were.

    Packing: "" for cells as large as their pieces; "packed": what is written fits its place; "tight": nothing does.
    """
    dice = random.Random(seed ^ 0x57495245)
    wire, witness = ("raw", "raw", "coded", "auto")[int(dice.random() * 4)], dice.random() < 0.2
    dtype = ("bf16", "bf16", "fp32")[int(dice.random() * 3)]
    packing = ("", "", "packed", "tight")[int(dice.random() * 4)]
    return wire, witness, dtype, packing if wire != "raw" else ""


class History:
    """Plays the history of one seed; `play` raises Violation, or returns what was counted."""

    def __init__(self, seed: int, faults: int = 0, length: int = LENGTH) -> None:
        """A history of `seed`, of about `length` requests; up to `faults` calls fail, of which kind goes by turns."""
        self.dice = random.Random(seed)
        self.seed, self.length = seed, length
        self.lines: list[str] = []
        self.transfers: list[Transfer] = []
        self.told: dict[int, list[int]] = {}  # by id: how often, and how often it should be
        self.values = itertools.count(1)
        self.engine: OffloadEngine | None = None
        self.violated = False
        self.asked = self.refused = 0
        self.faults = [Fault(self.dice, (seed // len(KINDS) ** i) % len(KINDS)) for i in range(faults)]
        self.callers: list[Caller] = []
        self.wire, self.witness, self.dtype, self.packing = wire_of(seed)
        self.celled = self.wire != "raw" or self.witness
        self.crowded = seed % CROWDED == CROWD  # hundreds of its requests come at once

    def choose(self, options: Any) -> Any:
        """One of them."""
        return options[int(self.dice.random() * len(options))]

    def must(self, holds: object, what: str) -> None:
        """A promise.

        Raises:
            Violation: it is broken.
        """
        if not holds:
            self.violated = True
            raise Violation(what)

    def excused(self, what: str) -> None:
        """Something failed: it may only where a fault was armed, and nothing may ever be stuck."""
        self.must(any(fault.armed for fault in self.faults), f"no fault was armed, and {what}")
        self.must(not self.runtime.stuck, f"{what}: {self.runtime.stuck}")

    @staticmethod
    def plain(error: object) -> str:
        """An error without what differs between two runs: addresses."""
        return " ".join(word for word in str(error).split() if not word.startswith("0x"))

    # -- the machine ---------------------------------------------------------------------------------------------

    def play(self) -> dict[str, Any]:
        """Plays it to its end and checks every promise."""
        memory: list[Buffer] = []
        self.runtime = self._machine()
        try:
            memory = self._pools()
            self._callers()
            before = self._held()
            self._open(before)
            assert self.engine is not None
            self._requests(self.engine)
            self._end(self.engine, before)
        except BaseException:
            self._leave(memory)
            raise
        self.lines.append(f"end {self.runtime.now_ns()}, {self.runtime.events} events {self.runtime.digest:x}")
        counted = {
            "digest": hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16],
            "transfers": len(self.transfers),
            "failed": sum(each.state == "failed" for each in self.transfers),
            "recorded": len(self.transfers) if self.detail != "off" else 0,
            "armed": [f"{fault.phase} {fault.name}" for fault in self.faults if fault.armed],
            "came": [f"{fault.phase} {fault.name}" for fault in self.faults if fault.came(self.runtime)],
            "events": self.runtime.events,
            "celled": self.celled,
            "packed": bool(self.packing),
            "refused": self.refused,
        }
        self._leave(memory)
        return counted

    def _leave(self, memory: list[Buffer]) -> None:
        """Nothing of this history is given back to the runtime of the next one: its addresses come again."""
        for each in memory:
            each.address = 0
        engine, self.engine = self.engine, None
        if engine is not None and engine._handle is not None:
            self.runtime.reset(virtual_clock=True)
            with contextlib.suppress(Exception):
                engine.close()

    def _machine(self) -> HostRuntime:
        _learn_methods()
        choose = self.choose
        self.depth, self.channels = choose((16, 32, 64, 256, 1021, 4096)), choose((1, 2, 4, 8, 32))
        runtime = host_runtime(
            virtual_clock=True,
            seed=1 + int(self.dice.random() * (1 << 40)),
            depth=self.depth,
            copy_channels=self.channels,
            compute_channels=choose((1, 4)),
            latency_ns=choose((-1, 500, 2000, 20_000)),
            h2d_bytes_per_s=choose((1e9, 4e9, 50e9)),
            d2h_bytes_per_s=choose((1e9, 4e9, 50e9)),
            submit_ns=choose((-1, 300, 1000, 3000)),
        )
        self.tables = _tables
        return runtime

    def _held(self) -> tuple[int, int, int]:
        stats = self.runtime.stats
        return int(stats.streams), int(stats.events), int(stats.pinned_bytes)

    def _pools(self) -> list[Buffer]:
        choose = self.choose
        self.piece = choose(PIECES)
        small = self.piece <= 16384
        self.layers = choose((1, 1, 2, 4)) if small else 1
        self.factor, large = choose((1, 1, 1, 2, 4)) if self.piece < 1 << 20 else 1, choose(("gpu", "cpu"))
        self.factors = {"gpu": self.factor if large == "gpu" else 1, "cpu": self.factor if large == "cpu" else 1}
        self.several = choose((1, 1, 1, 1, 2, 3)) if self.piece < 262144 else 1
        self.units = choose((4, 8, 16)) // (1 if self.factor == 1 else 2) if small else 4
        self.cached = 4 if self.factor == 1 else 0
        self.gpu_pieces = self.several * self.units * self.factor
        self.cpu_pieces = self.gpu_pieces + self.cached
        pieces = {"gpu": self.gpu_pieces, "cpu": self.cpu_pieces}
        make = {"gpu": device_region, "cpu": host_region}
        self.initial = [next(self.values) for _ in range(self.gpu_pieces + self.cpu_pieces)]
        if self.packing:
            del pieces["cpu"]
        self.regions: dict[str, list[Region]] = {
            side: [make[side](self.runtime, pieces[side] * self.piece) for _ in range(self.layers)] for side in pieces
        }
        for side, values in self._sides(self.initial):
            for layer, region in enumerate(self.regions.get(side, ())):
                self.runtime.fill_pieces(region.address, self.piece, self._words(values, layer))
        self.pool = {
            side: BlockPool(self.runtime, self.regions[side], self.piece * self.factors[side], dtype=self.dtype)
            for side in pieces
        }
        made = [region.owner for side in self.regions.values() for region in side]
        if self.packing:
            made.append(self._packed())
        elif self.celled:  # here: it is the pool's memory, not the engine's
            self.pool["cpu"].cells = Cells.beside(self.runtime, self.pool["cpu"], self.piece)
            made.append(self.pool["cpu"].cells.memory)
        self.lines.append(
            f"seed {self.seed}: depth {self.depth}, channels {self.channels}, {self.several} callers, {self.layers} "
            f"layers of {self.gpu_pieces} and {self.cpu_pieces} pieces of {self.piece} bytes, blocks of {self.factors}"
        )
        return made

    def _packed(self) -> Buffer:
        """The CPU's pool, packed, so that each cell could have a tail and as many again be promised; its memory."""
        blocks, size = self.cpu_pieces // self.factors["cpu"], self.piece * self.factors["cpu"]
        cells = self.cpu_pieces * self.layers * len(pieces_of(self.piece))
        memory = host_region(self.runtime, int(1.7 * blocks * size * self.layers) + 96 * cells + 4096)
        share = packed.SHARE[self.dtype]
        packed.SHARE[self.dtype] = 0.5 if self.packing == "tight" else share
        try:
            pool = PackedPool(
                self.runtime, memory, size, dtype=self.dtype, layers=self.layers, blocks=blocks, copy_bytes=self.piece
            )
        finally:
            packed.SHARE[self.dtype] = share
        for piece, value in enumerate(self.initial[self.gpu_pieces :]):
            for layer in range(self.layers):
                raw = np.full(self.piece // WORD, value * 31 + layer, np.uint64).view(np.uint8)
                pool.cells.put(layer, piece, raw, TYPES[self.dtype])
        self.pool["cpu"] = pool
        return memory.owner

    def _sides(self, values: list[int]) -> list[tuple[str, list[int]]]:
        return [("gpu", values[: self.gpu_pieces]), ("cpu", values[self.gpu_pieces :])]

    def _words(self, values: list[int], layer: int) -> list[int]:
        return [0 if value == UNDEFINED else value * 31 + layer for value in values]

    def fill(self, side: str, piece: int, value: int) -> None:
        """Writes a value into a piece, every layer."""
        for layer, region in enumerate(self.regions[side]):
            self.runtime.fill_pieces(region.address + piece * self.piece, self.piece, [value * 31 + layer])

    def ends(self, side: str, piece: int) -> bytes:
        """The first and last word of a piece, every layer; all between them is compared at the end."""
        at = piece * self.piece
        return b"".join(
            [
                ct.string_at(region.address + at, WORD) + ct.string_at(region.address + at + self.piece - WORD, WORD)
                for region in self.regions[side]
            ]
        )

    def word_ends(self, value: int) -> bytes:
        """What `ends` gives of a piece that holds a value."""
        return b"".join([(value * 31 + layer).to_bytes(WORD, "little") * 2 for layer in range(self.layers)])

    def _callers(self) -> None:
        self.callers = [Caller(self, number, number * self.units, self.units) for number in range(self.several)]
        if self.cached:
            self.callers[0].server = Server(self, self.callers[0], self.gpu_pieces, self.cached)

    # -- the engine ----------------------------------------------------------------------------------------------

    def _open(self, before: tuple[int, int, int]) -> None:
        choose = self.choose
        how: dict[str, Any] = {
            "policy": choose(("shared", "pooled", "auto")),
            "method": choose(("auto", "auto", "loop", "batch", "kernel")),
            "bound": choose((None, 1, 2, 3)),
            "detail": choose(("off", "totals", "transfers", "copies")),
            "max_bytes_per_s": choose((0.0, 0.0, 0.0, 2e9)),
            "max_slowdown": choose((-1.0, 0.03, 1.0)),
        }
        if self.celled:
            how.update(wire=self.wire, witness=self.witness)
            if how["policy"] == "shared":
                how["policy"] = "pooled"
            if how["method"] in ("loop", "batch"):
                how["method"] = "kernel"
            how["max_slowdown"] = max(how["max_slowdown"], 0.03)
        self.detail = how["detail"]
        early = [fault for fault in self.faults if fault.phase == "opening"]
        for fault in early:
            fault.arm(self.runtime)
        if early:
            self.tables = [each for each in _tables if each[0] == "loop"]
        else:
            engine_module.copier_for = _known_methods  # type: ignore[assignment]
        try:
            self.engine = self._make(how)
        except (CudaError, UsageError) as error:
            self.lines.append(f"no engine: {self.plain(error)}")
            self.excused(f"the engine could not be made: {error}")
            self.must(self._held() == before, "an engine that was not made left streams, events or memory")
        finally:
            engine_module.copier_for = copier_for
        for fault in early:
            fault.disarm(self.runtime)
        if self.engine is None:  # what failed has passed: the next one works
            self.engine = self._make(how)
        self.lines.append(f"engine {how}")

    def _make(self, how: dict[str, Any]) -> OffloadEngine:
        gpu, cpu = self.pool["gpu"], self.pool["cpu"]
        return OffloadEngine(self.runtime, gpu, cpu, compute_stream=self.callers[0].compute, **how)

    def promised(self) -> int:
        """Tails that stores of all callers may have been promised: of those that have not ended, one for each cell."""
        storing = [step for caller in self.callers for step in caller.pending() if step.what == "store"]
        pieces = sum(len(step.to) for step in storing) + sum(caller.asking for caller in self.callers)
        return pieces * self.layers * len(pieces_of(self.piece))

    def strike(self) -> None:
        """Arms the faults whose time has come."""
        self.asked += 1
        for fault in self.faults:
            if fault.phase == "running" and not fault.armed and fault.when <= self.asked:
                self.lines.append(f"fault {fault}")
                fault.arm(self.runtime)

    def tell(self, transfer: Transfer) -> None:
        """A transfer's callback; some raise."""
        told = self.told[transfer.id]
        told[0] += 1
        self.lines.append(f"{self.runtime.now_ns()} told of {transfer.id}")
        self.must(transfer.done, f"transfer {transfer.id} was told of before its end")
        if (transfer.id + told[0]) % 5 == 0:
            raise RuntimeError("a callback that raises")

    def _requests(self, engine: OffloadEngine) -> None:
        each = self.length // 5 + int(self.dice.random() * self.length / len(self.callers))
        actors = [self.runtime.thread(lambda caller=caller: caller.run(each)) for caller in self.callers[1:]]  # type: ignore[misc]
        self.callers[0].run(each)
        if actors:
            self.runtime.advance(1)  # whoever has not begun yet does
        for actor in actors:
            actor.remove()  # when it is done
        self.runtime.check_raised()
        self.must(all(caller.done for caller in self.callers), f"a caller never ended: {self.runtime.stuck}")

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, engine: OffloadEngine, before: tuple[int, int, int]) -> None:
        runtime = self.runtime
        try:
            engine.wait()
            runtime.synchronize()
        except (CudaError, TransferError) as error:
            self.lines.append(f"the end raised {self.plain(error)}")
            self.excused(f"the end raised {error}")
        engine.poll()
        lost = bool(runtime.stats.sticky)
        self._check_transfers()
        stats = engine.read()
        self.must(not stats.wrong, f"the submitter's state was wrong: {stats.wrong}")
        self.must(not stats.refused, f"{stats.refused} blocks were refused, and nobody damaged one")
        self.must(not runtime.stuck, f"a call could never return: {runtime.stuck}")
        for caller in self.callers:
            if caller.server is not None:
                caller.server.check()
        for fault in self.faults:
            if fault.phase == "running":
                fault.disarm(runtime)
        self.lines.append(f"states {[each.state for each in self.transfers]}, broken {self.plain(engine.broken)}")
        if engine.broken is None:
            self.must(not stats.pending, "all has ended, and the engine is not idle")
            self.must(not any(engine.held.values()), f"an idle engine holds {engine.held}")
            if not lost:
                self._next(engine)
        else:
            self.must(str(engine.broken), "the engine is broken and does not say why")
        self._close(engine, before, lost)
        if not lost:
            self._check_bytes()

    def _check_transfers(self) -> None:
        for transfer in self.transfers:
            told, due = self.told[transfer.id]
            self.must(transfer.done, f"{transfer} has not ended")
            self.must(told == due, f"{transfer}: {told} of {due} callbacks ran")
            if transfer.state == "failed":
                self.must(any(fault.armed for fault in self.faults), f"no fault was armed, and {transfer} failed")
                with contextlib.suppress(TransferError):
                    transfer.result()
                    self.must(False, f"{transfer} failed and has a result")

    def _next(self, engine: OffloadEngine) -> None:
        """After whatever happened the next transfer of each direction is right."""
        for caller in self.callers:
            for direction in ("load", "store"):
                getattr(caller, direction)(engine)
                engine.wait()
                newest = self.transfers[-1]
                self.must(newest.state == "done", f"the next {direction} failed: {newest.error}")

    def _close(self, engine: OffloadEngine, before: tuple[int, int, int], lost: bool) -> None:
        runtime = self.runtime
        broken = engine.broken is not None
        for fault in self.faults:
            if fault.phase == "closing":
                fault.arm(runtime)
        try:
            engine.close()
        except CudaError as error:
            self.lines.append(f"close raised {self.plain(error)}")
            self.excused(f"close raised {error}")
        left = [runtime.failed(name) for name in ("cudaStreamDestroy", "cudaEventDestroy", "cudaFreeHost")]
        for fault in self.faults:
            fault.disarm(runtime)
        with contextlib.suppress(TransferError):
            engine.load([0], [0])
            self.must(False, "a closed engine took a transfer")
        if not lost and not broken:
            after = self._held()
            held = after[0] - before[0], after[1] - before[1]
            self.must(
                held == tuple(left[:2]), f"{held} streams and events were left, {left[:2]} could not be destroyed"
            )
            self.must(left[2] or after[2] == before[2], "pinned memory was left")

    def _check_bytes(self) -> None:
        """Memory against the model; on a lost device nothing is promised."""
        held = list(self.initial)
        for caller in self.callers:
            caller.check(held)
        try:
            if self.packing:
                self._check_packed(self._sides(held)[1][1])
            else:
                self.pool["cpu"].uncode()
        except CellError as error:
            self.must(False, str(error))
        for side, values in self._sides(held):
            for layer, region in enumerate(self.regions.get(side, ())):
                piece = self.runtime.compare_pieces(region.address, self.piece, self._words(values, layer))
                self.must(piece < 0, f"{side} piece {piece} of layer {layer} holds other bytes")

    def _check_packed(self, values: list[int]) -> None:
        """Each piece of a packed pool; and a cell has a tail where it needs one, and nowhere else."""
        pool = self.pool["cpu"]
        assert isinstance(pool, PackedPool)
        for layer in range(self.layers):
            for piece, word in enumerate(self._words(values, layer)):
                if values[piece] == UNDEFINED:
                    continue
                raw = pool.cells.take(layer, piece)
                self.must((raw.view(np.uint64) == word).all(), f"cpu piece {piece} of layer {layer} holds other bytes")
        notes = pool.cells.notes
        tails = notes["summed"] >> 1
        used = tails[tails > 0]
        self.must(len(np.unique(used)) == len(used), "two cells have the same tail")
        self.must((tails[notes["bytes"] > pool.cells.space] > 0).all(), "a cell that needs a tail has none")
        if self.engine is not None and self.engine.broken is self.engine._closed:
            self.must(len(used) + pool.tails_left == pool.tails, "tails were left behind")
            self.must((tails[notes["bytes"] <= pool.cells.space] == 0).all(), "a cell that needs no tail has one")


def _learn_methods() -> None:
    global _methods
    if _methods is None:
        _methods = copier_for(host_runtime(virtual_clock=True))
        _tables.extend((name, method_table(_methods, name)) for name in ("auto", "loop", "batch", "kernel"))


def _known_methods(runtime: HostRuntime) -> Methods:
    assert _methods is not None
    return _methods


class Series:
    """Plays histories one after another into one recording, which is read now and then."""

    READ = 64  # histories between two looks at the recording

    def __init__(self) -> None:
        """Opens the recording."""
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "series.kvp")
        self._recorded = self._played = 0
        self._record()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _record(self) -> None:
        options = RingOptions(ring_capacity=64, slow_capacity=64, slot_count=256)
        code = core().kvp_ring_open(os.fsencode(self._path), b"series", ct.byref(options))
        if code:
            raise OSError(-code, os.strerror(-code), str(self._path))

    def play(self, seed: int, faults: int = 0, length: int = LENGTH) -> dict[str, Any]:
        """One history.

        Raises:
            Violation: the engine broke a promise.
        """
        try:
            counted = History(seed, faults, length).play()
        except BaseException:
            self._read(check=False)
            self._record()
            raise
        self._recorded += counted["recorded"]
        self._played += 1
        if self._played % self.READ == 0:
            gc.collect()
            try:
                self._read()
            finally:
                self._record()
        return counted

    def _read(self, check: bool = True) -> None:
        """The recording can be read, and knows every transfer.

        Raises:
            Violation: otherwise.
        """
        known = read_ring(self._path).calls().get("transfer", (0, 0, 0))[0]  # also of streams without sums of their own
        core().kvp_ring_close()
        core().kvp_ring_release()
        self._path.unlink()
        made, self._recorded = self._recorded, 0
        if check and known != made:
            raise Violation(f"{made} transfers were made, and the recording knows {known}")

    def close(self) -> None:
        """Reads the recording a last time."""
        try:
            self._read(True)
        finally:
            self._folder.cleanup()
            gc.enable()
            gc.unfreeze()


def play(seed: int, faults: int = 0, say: Callable[[str], None] | None = None, length: int = LENGTH) -> dict[str, Any]:
    """Plays the history of a seed; its lines go to `say`, also where it ends in a violation.

    Raises:
        Violation: the engine broke a promise.
    """
    history = History(seed, faults, length)
    try:
        return history.play()
    finally:
        for line in history.lines if say else ():
            say(line)


__all__ = ["History", "Series", "Violation", "play", "wire_of"]
