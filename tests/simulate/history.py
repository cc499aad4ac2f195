"""One history: an engine on a simulated runtime, random requests from a seed, and the same in a plain dictionary.

The program orders what conflicts as a server does: transfers of one direction follow one another by the engine's
promise; between directions, and between transfers and compute, a fence on the compute stream or a wait comes first.
What the memory must hold afterwards therefore follows from the order of the requests alone, and is worked out when it
is known which transfers failed: the bytes that a failed one was to write are undefined.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvprobe.cuda import Buffer, device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import CudaError, KvprobeError, TransferError
from kvprobe.offload import BlockPool, OffloadEngine, Transfer

FAULTS = (  # CUDA calls that the engine makes, "copy": the n-th copy call, "execution": a copy that fails on the device
    "copy",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaStreamWaitEvent",
    "cudaEventElapsedTime",
    "cudaMemcpyBatchAsync",
    "cudaStreamCreateWithPriority",
    "cudaEventCreateWithFlags",
    "execution",
    "lost device",
)
STICKY = ("execution", "lost device")
UNDEFINED = -1


class Violation(AssertionError):
    """The engine broke a promise."""


@dataclasses.dataclass
class Step:
    """What was asked for: each entry of `moves` gives a place the value of another place, or a value."""

    what: str
    moves: list[tuple[tuple[str, int], tuple[str, int] | int]]
    transfer: Transfer | None = None
    ran: bool = True  # of a kernel: it was executed
    seen: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)  # by a kernel that reads


class History:
    """Plays the history of one seed; `play` raises Violation, or returns what was counted."""

    def __init__(self, seed: int, faults: int = 0, say: Callable[[str], None] | None = None) -> None:
        """A history of `seed`, in which up to `faults` calls fail."""
        self.random = random.Random(seed)
        self.seed, self.say = seed, say
        self.lines = hashlib.sha256()
        self.steps: list[Step] = []
        self.told: dict[int, int] = {}
        self.expected_told: dict[int, int] = {}
        self.transfers: list[Transfer] = []
        self.armed: list[str] = []
        self.faults = faults
        self.raised = 0
        self.values = itertools.count(1)

    # -- the machine ---------------------------------------------------------------------------------------------

    def play(self) -> dict[str, Any]:
        """Plays it to its end and checks every promise."""
        choose = self.random.choice
        self.depth, self.channels = choose((16, 32, 64, 256, 1021, 4096)), choose((1, 2, 4, 8, 32))
        self.runtime = host_runtime(
            virtual_clock=True,
            seed=self.random.randrange(1, 1 << 40),
            depth=self.depth,
            copy_channels=self.channels,
            compute_channels=choose((1, 4)),
            latency_ns=choose((-1, 500, 2000, 20_000)),
            h2d_bytes_per_s=choose((1e9, 4e9, 50e9)),
            d2h_bytes_per_s=choose((1e9, 4e9, 50e9)),
            submit_ns=choose((-1, 300, 1000, 3000)),
        )
        memory = self._pools()
        self.compute = self.runtime.stream_create()
        before = self._held()
        engine = None
        try:
            engine = self._open()
            if engine is not None:
                self._requests(engine)
                self._end(engine, before)
                self._check_bytes()
        except BaseException:
            self._give_up(engine, memory)
            raise
        for each in memory:
            with contextlib.suppress(CudaError):
                each.close()
        self.note(f"end {self.runtime.now_ns()} after {self.runtime.events} events")
        counted = {"digest": self.lines.hexdigest()[:16], "transfers": len(self.transfers), "faults": self.armed}
        self.runtime.reset()
        return counted

    def note(self, line: str) -> None:
        """One line of the history: printed, and part of the digest."""
        self.lines.update(line.encode() + b"\n")
        if self.say:
            self.say(line)

    def _give_up(self, engine: OffloadEngine | None, memory: list[Buffer]) -> None:
        """Nothing of this history may be given back to the runtime of the next one: its addresses come again."""
        self.runtime.lose_device()
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()
        for each in memory:
            each.address = 0

    def _held(self) -> tuple[int, int]:
        stats = self.runtime.stats
        return stats.streams, stats.events

    def _pools(self) -> list[Buffer]:
        choose = self.random.choice
        self.layers = choose((1, 1, 2, 4))
        self.piece = choose((1024, 4096, 4096, 16_384, 65_536, 1 << 20))
        many = 8 if self.piece > 65_536 else 32
        self.factor, large = choose((1, 1, 1, 2, 4)), choose(("gpu", "cpu"))
        self.factors = {"gpu": self.factor if large == "gpu" else 1, "cpu": self.factor if large == "cpu" else 1}
        self.pieces = many * self.factor
        size = self.pieces * self.piece
        regions = {
            "gpu": [device_region(self.runtime, size) for _ in range(self.layers)],
            "cpu": [host_region(self.runtime, size) for _ in range(self.layers)],
        }
        self.pool = {
            side: BlockPool(self.runtime, regions[side], self.piece * self.factors[side]) for side in ("gpu", "cpu")
        }
        self.initial: dict[tuple[str, int], int] = {}
        for side, of in regions.items():
            for at in range(self.pieces):
                value = self.initial[side, at] = next(self.values)
                for layer in range(len(of)):
                    ct.memmove(of[layer].address + at * self.piece, self._bytes(value, layer), self.piece)
        self.note(
            f"seed {self.seed}: depth {self.depth}, channels {self.channels}, {self.layers} layers of {self.pieces} "
            f"pieces of {self.piece} bytes, blocks of {self.factors}"
        )
        return [region.owner for side in regions.values() for region in side]

    def _bytes(self, value: int, layer: int) -> bytes:
        return (value * 31 + layer).to_bytes(8, "little") * (self.piece // 8)

    def _open(self) -> OffloadEngine | None:
        choose = self.random.choice
        how: dict[str, Any] = {
            "policy": choose(("shared", "pooled", "auto")),
            "method": choose(("auto", "loop", "batch")),
            "bound": choose((None, 1, 2)),
            "detail": choose(("off", "totals", "transfers", "copies")),
        }
        early = self.faults and self.random.random() < 0.1
        if early:
            self._arm(choose(("cudaStreamCreateWithPriority", "cudaEventCreateWithFlags")), 2000)
        before = self._held()
        try:
            engine = OffloadEngine(self.runtime, self.pool["gpu"], self.pool["cpu"], compute_stream=self.compute, **how)
        except CudaError as error:
            self.note(f"no engine: {error}")
            self._must(bool(self.armed), f"no fault was armed, and the engine could not be made: {error}")
            self._must(self._held() == before, "an engine that was not made left streams or events")
            return None
        self.note(f"engine {how}")
        return engine

    def _arm(self, fault: str, of: int = 60) -> None:
        number = self.random.randrange(1, of)
        self.note(f"fault: {fault}, number {number}")
        self.armed.append(fault)
        if fault == "copy":
            self.runtime.fail_copy(number)
        elif fault == "execution":
            self.runtime.fail_execution(number)
        elif fault == "lost device":
            self.runtime.lose_device()
        else:
            self.runtime.fail_call(fault, number, self.random.choice((1, 2, 719)))

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    # -- requests ------------------------------------------------------------------------------------------------

    def _requests(self, engine: OffloadEngine) -> None:
        kinds = {
            "load": 8,
            "store": 8,
            "write": 4,
            "read": 4,
            "wait": 2,
            "poll": 2,
            "advance": 4,
            "policy": 1,
            "fence": 2,
        }
        names, weights = list(kinds), list(kinds.values())
        late = sorted(self.random.sample(range(60), self.faults)) if self.faults else []
        for number in range(self.random.randrange(10, 80)):
            if late and number >= late[0]:
                late.pop(0)
                self._arm(self.random.choice(FAULTS))
            kind = self.random.choices(names, weights)[0]
            try:
                getattr(self, f"_{kind}")(engine)
            except (CudaError, TransferError) as error:
                self.note(f"{kind} raised {type(error).__name__}: {_plain(error)}")
                self._must(bool(self.armed), f"no fault was armed, and {kind} raised {error}")

    def _take(self, side: str, other: str) -> tuple[list[int], list[int], list[int], list[int]]:
        """Blocks of both sides that cover as many pieces: ids and pieces of each."""
        unit = self.factor
        runs = self.random.randrange(1, self.pieces // unit + 1)
        if self.random.random() < 0.7:
            runs = min(runs, 4)
        found = []
        for one in (side, other):
            per = unit // self.factors[one]
            blocks = self.random.sample(range(self.pieces // self.factors[one]), runs * per)
            pieces = [block * self.factors[one] + at for block in blocks for at in range(self.factors[one])]
            found.append((blocks, pieces))
        return found[0][0], found[1][0], found[0][1], found[1][1]

    def _load(self, engine: OffloadEngine) -> None:
        self._transfer(engine, "load", "cpu", "gpu")

    def _store(self, engine: OffloadEngine) -> None:
        self._transfer(engine, "store", "gpu", "cpu")

    def _transfer(self, engine: OffloadEngine, direction: str, source: str, target: str) -> None:
        sources, targets, from_pieces, to_pieces = self._take(source, target)
        touched = {(source, at) for at in from_pieces} | {(target, at) for at in to_pieces}
        written = {(target, at) for at in to_pieces}
        self._order(engine, touched, written, other_than=direction)
        callbacks = self.random.choice((0, 0, 1, 2))
        call = engine.load if direction == "load" else engine.store
        transfer = call(sources, targets)
        step = Step(direction, [((target, to), (source, at)) for at, to in zip(from_pieces, to_pieces, strict=True)])
        step.transfer = transfer
        self.steps.append(step)
        self.transfers.append(transfer)
        self.told[transfer.id] = 0
        self.expected_told[transfer.id] = callbacks
        for _ in range(callbacks):
            transfer.add_done_callback(self._tell)
        self.note(f"{self.runtime.now_ns()} {direction} {transfer.id}: {sources} to {targets}")

    def _tell(self, transfer: Transfer) -> None:
        self.told[transfer.id] += 1
        self.note(f"{self.runtime.now_ns()} told of {transfer.id}")
        if not transfer.done:
            raise Violation(f"transfer {transfer.id} was told of before its end")
        if self.random.random() < 0.2:
            self.raised += 1
            raise RuntimeError("a callback that raises")

    def _pending(self) -> Iterator[Step]:
        return (step for step in self.steps if step.transfer is not None and not step.transfer.done)

    def _order(
        self, engine: OffloadEngine, touched: set[tuple[str, int]], written: set[tuple[str, int]], other_than: str = ""
    ) -> None:
        """Has what is pending and conflicts come first: a fence on the compute stream, or a wait."""
        for step in list(self._pending()):
            if step.what == other_than or step.transfer is None:
                continue
            writes = {move[0] for move in step.moves}
            reads = {move[1] for move in step.moves if isinstance(move[1], tuple)}
            if touched & writes or written & reads:
                if self.random.random() < 0.7:
                    self.note(f"fence {step.transfer.id}")
                    engine.fence(step.transfer, self.compute)
                else:
                    self.note(f"wait {step.transfer.id}")
                    engine.wait(step.transfer)

    def _write(self, engine: OffloadEngine) -> None:
        """A kernel that writes blocks of the GPU."""
        places = self.random.sample(range(self.pieces), self.random.randrange(1, 6))
        touched = {("gpu", at) for at in places}
        self._order(engine, touched, touched)
        step = Step("kernel", [(("gpu", at), next(self.values)) for at in places], ran=False)
        regions = self.pool["gpu"].regions

        def run() -> None:
            step.ran = True
            for (_, at), value in step.moves:
                assert isinstance(value, int)
                for layer, region in enumerate(regions):
                    ct.memmove(region.address + at * self.piece, self._bytes(value, layer), self.piece)

        self.runtime.launch_work(self.compute, run, self.random.randrange(0, 200_000))
        self.steps.append(step)
        self.note(f"{self.runtime.now_ns()} kernel writes {places}")

    def _read(self, engine: OffloadEngine) -> None:
        """A kernel that reads blocks of the GPU; what it saw is compared at the end."""
        places = self.random.sample(range(self.pieces), self.random.randrange(1, 6))
        self._order(engine, {("gpu", at) for at in places}, set())
        step = Step("read", [])

        def run() -> None:
            step.seen = [(at, self._ends("gpu", at)) for at in places]

        self.runtime.launch_work(self.compute, run, self.random.randrange(0, 50_000))
        self.steps.append(step)
        self.note(f"{self.runtime.now_ns()} kernel reads {places}")

    def _ends(self, side: str, at: int) -> bytes:
        """The first and last 8 bytes of a piece in every layer; all between them is compared at the end."""
        return b"".join(
            ct.string_at(region.address + at * self.piece, 8)
            + ct.string_at(region.address + (at + 1) * self.piece - 8, 8)
            for region in self.pool[side].regions
        )

    def _wait(self, engine: OffloadEngine) -> None:
        which = self.random.choice([None, *self._pending()])
        self.note(f"wait {which.transfer.id if which and which.transfer else 'all'}")
        engine.wait(which.transfer if which else None)

    def _poll(self, engine: OffloadEngine) -> None:
        self.note(f"polled {[each.id for each in engine.poll()]}")

    def _advance(self, engine: OffloadEngine) -> None:
        self.runtime.advance(self.random.choice((100, 2000, 50_000, 1_000_000)))

    def _policy(self, engine: OffloadEngine) -> None:
        policy = self.random.choice(("shared", "pooled"))
        self.note(f"policy {policy}")
        engine.set_policy(policy)

    def _fence(self, engine: OffloadEngine) -> None:
        pending = [step.transfer for step in self._pending() if step.transfer]
        if pending:
            transfer = self.random.choice(pending)
            self.note(f"fence {transfer.id}")
            engine.fence(transfer, self.compute)

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, engine: OffloadEngine, before: tuple[int, int]) -> None:
        runtime = self.runtime
        lost = False
        try:
            engine.wait()
            runtime.synchronize()
        except (CudaError, TransferError) as error:
            self.note(f"the end raised {_plain(error)}")
            self._must(bool(self.armed), f"no fault was armed, and the end raised {error}")
        engine.poll()
        lost = bool(runtime.stats.sticky)
        for transfer in self.transfers:
            self._must(transfer.done, f"{transfer} has not ended")
            told, due = self.told[transfer.id], self.expected_told[transfer.id]
            self._must(told == due, f"{transfer}: {told} of {due} callbacks ran")
            if transfer.state == "failed":
                self._must(bool(self.armed), f"no fault was armed, and {transfer} failed")
                with contextlib.suppress(TransferError):
                    transfer.result()
                    raise Violation(f"{transfer} failed and has a result")
        self.note(f"states {[transfer.state for transfer in self.transfers]}, broken {_plain(engine.broken)}")
        if engine.broken is None:
            self._must(engine.idle, "all has ended, and the engine is not idle")
            self._must(not any(engine.held.values()), f"an idle engine holds {engine.held}")
            self._disarm()
            if not lost:
                self._next(engine)
        try:
            engine.close()
        except CudaError as error:
            self.note(f"close raised {_plain(error)}")
            self._must(bool(self.armed), f"no fault was armed, and close raised {error}")
        with contextlib.suppress(TransferError):
            engine.load([0], [0] * 1)
            raise Violation("a closed engine took a transfer")
        if not lost and engine.broken is not None and "closed" in str(engine.broken):
            self._must(self._held() == before, f"streams and events {before} before, {self._held()} after")

    def _disarm(self) -> None:
        """Faults that did not come are no more: what follows must be right."""
        self.runtime.fail_copy(0)
        self.runtime.fail_execution(0)
        for fault in set(self.armed) - {"copy", *STICKY}:
            self.runtime.fail_call(fault, 0)

    def _next(self, engine: OffloadEngine) -> None:
        """After whatever happened the next transfer of each direction is right."""
        for direction in ("load", "store"):
            (self._load if direction == "load" else self._store)(engine)
            engine.wait()
            self._must(self.transfers[-1].state == "done", f"the next {direction} failed: {self.transfers[-1].error}")

    def _check_bytes(self) -> None:
        """Memory against the dictionary; on a lost device nothing is promised."""
        if self.runtime.stats.sticky:
            return
        held = dict(self.initial)
        for step in self.steps:
            failed = step.transfer is not None and step.transfer.state == "failed"
            if not step.ran:
                raise Violation(f"{step.what} was never executed")
            for at, seen in step.seen:
                value = held["gpu", at]
                if value == UNDEFINED:
                    continue
                wanted = b"".join(self._bytes(value, layer)[:8] * 2 for layer in range(self.layers))
                self._must(seen == wanted, f"a kernel read other bytes in piece {at}")
            for place, value in [(to, held[of] if isinstance(of, tuple) else of) for to, of in step.moves]:
                held[place] = UNDEFINED if failed else value
        for (side, at), value in held.items():
            if value == UNDEFINED:
                continue
            for layer, region in enumerate(self.pool[side].regions):
                found = ct.string_at(region.address + at * self.piece, self.piece)
                self._must(found == self._bytes(value, layer), f"{side} piece {at} of layer {layer} holds other bytes")
        for side in ("gpu", "cpu"):
            for region in self.pool[side].regions:
                data = np.frombuffer((ct.c_ubyte * region.bytes).from_address(region.address), np.uint8)
                self.lines.update(data.tobytes())


def _plain(error: object) -> str:
    """An error without what differs between two runs: addresses."""
    return " ".join(word for word in str(error).split() if not word.startswith("0x"))


def play(seed: int, faults: int = 0, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Plays the history of a seed.

    Raises:
        Violation: the engine broke a promise.
    """
    return History(seed, faults, say).play()


__all__ = ["FAULTS", "History", "HostRuntime", "KvprobeError", "Violation", "play"]
