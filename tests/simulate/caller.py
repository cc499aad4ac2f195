"""One caller of the engine: random requests of its own blocks, and what they must leave in memory.

A caller orders what conflicts as a server does: transfers of one direction follow one another by the engine's promise;
between directions, and between transfers and compute, a fence on its compute stream or a wait comes first. What its
blocks must hold afterwards follows from the order of its requests alone, and is worked out when it is known which
transfers failed: the bytes that a failed one was to write are undefined. Callers share no block.
"""

from __future__ import annotations

import ctypes as ct
import dataclasses
import random
from typing import TYPE_CHECKING

from kvprobe.errors import CudaError, PoolFullError, TransferError
from kvprobe.offload import OffloadEngine, Transfer

from .violation import Violation

if TYPE_CHECKING:
    from .history import History
    from .server import Server

UNDEFINED = -1
REQUESTS = {
    "load": 8,
    "store": 8,
    "write": 4,
    "read": 4,
    "wait": 2,
    "give_up": 2,
    "poll": 2,
    "advance": 4,
    "policy": 1,
    "rung": 1,
    "fence": 2,
    "serve": 6,
}
CLOCKS_NS = 100_000  # that times of the device may be off by: two clocks are compared
PAUSES_NS = (100, 2000, 2000, 50_000, 50_000, 1_000_000, 1_000_000, 11_000_000_000)
KINDS = [kind for kind, weight in REQUESTS.items() for _ in range(weight)]


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One request: pieces that it writes, and from where or with which values. Pieces: GPU's, then CPU's."""

    what: str
    to: list[int]
    of: list[int]  # of a transfer: pieces
    values: list[int]  # of a kernel
    writes: int  # a bit a piece
    reads: int
    transfer: Transfer | None = None
    ran: bool = True
    ended_ns: int = 0  # of a kernel
    seen: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)  # by a kernel that reads
    keys: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # of a server: key, CPU piece


def bits(pieces: list[int]) -> int:
    """A bit a piece."""
    mask = 0
    for piece in pieces:
        mask |= 1 << piece
    return mask


class Caller:
    """A caller with its own blocks, compute stream and dice."""

    def __init__(self, history: History, number: int, first: int, units: int) -> None:
        """Owns `units` units from `first` on, of both pools; a unit is a block of the pool whose blocks are larger."""
        self.history, self.number = history, number
        self.dice = random.Random(history.seed * 1000 + number)
        self.first, self.units = first, units
        self.compute = history.runtime.stream_create()
        self.steps: list[Step] = []
        self.open: list[Step] = []  # transfers that had not ended when last looked at, and later ones
        self.asking = 0  # pieces of the store that it is inside of
        self.seldom = 8  # with more of them they are looked at before conflicts are looked for
        self.server: Server | None = None
        self.done = False

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        return int(self.dice.random() * bound)

    def note(self, line: str) -> None:
        """A line of the history."""
        self.history.lines.append(f"{self.number} {self.history.runtime.now_ns()} {line}")

    def run(self, requests: int) -> None:
        """All its requests, one after another."""
        history = self.history
        engine = history.engine
        assert engine is not None
        for number in range(requests):
            history.strike()
            crowd = history.crowded and number == requests // 2
            kind = "crowd" if crowd else KINDS[self.below(len(KINDS))]
            try:
                getattr(self, kind)(engine)
            except PoolFullError as error:  # stores under way were promised what is left; nothing was written
                self.note(f"{kind} refused: {error}")
                history.refused += 1
                engine.wait()
                history.must(not self.pending(), "a wait for all was over before they had ended")
                left, promised = history.pool["cpu"].tails_left, history.promised()
                history.must(
                    left + promised >= error.needs or engine.broken,
                    f"{left} tails are left, and {promised} are promised to stores that have not ended",
                )
            except (CudaError, TransferError) as error:
                self.note(f"{kind} raised {history.plain(error)}")
                history.excused(f"{kind} raised {error}")
            if history.violated:
                break
        self.done = True

    # -- transfers -----------------------------------------------------------------------------------------------

    def _some(self, count: int, of: int) -> list[int]:
        """Distinct numbers below `of`, a power of two: neighbours, or scattered."""
        start, stride = self.below(of), (1, 1, 3, 5, of - 1)[self.below(5)]
        return [(start + stride * i) & (of - 1) for i in range(count)]

    def _blocks(self, side: str, units: int) -> tuple[list[int], list[int]]:
        """Blocks of a side that cover so many units: their ids and pieces."""
        history = self.history
        factor, per_block = history.factor, history.factors[side]
        if per_block == factor:
            blocks = [self.first + each for each in self._some(units, self.units)]
        else:
            blocks = [self.first * factor + each for each in self._some(units * factor, self.units * factor)]
        if per_block == 1:
            return blocks, blocks
        return blocks, [block * per_block + i for block in blocks for i in range(per_block)]

    def load(self, engine: OffloadEngine) -> None:
        """Some CPU blocks into some GPU blocks."""
        self._transfer(engine, "load")

    def store(self, engine: OffloadEngine) -> None:
        """Some GPU blocks into some CPU blocks."""
        self._transfer(engine, "store")

    def _transfer(self, engine: OffloadEngine, direction: str) -> None:
        most = self.units if self.below(10) < 3 else min(4, self.units)
        units = 1 + self.below(most)
        gpu, gpu_pieces = self._blocks("gpu", units)
        cpu, cpu_pieces = self._blocks("cpu", units)
        self.transfer(engine, direction, gpu, gpu_pieces, cpu, cpu_pieces)

    def transfer(
        self,
        engine: OffloadEngine,
        direction: str,
        gpu: list[int],
        gpu_pieces: list[int],
        cpu: list[int],
        cpu_pieces: list[int],
    ) -> Step:
        """Asks for it, after what conflicts; remembers what it must do."""
        history = self.history
        above = history.gpu_pieces
        there = [above + piece for piece in cpu_pieces]
        source, target = (there, gpu_pieces) if direction == "load" else (gpu_pieces, there)
        step = Step(direction, target, source, [], bits(target), bits(source))
        self.order(engine, step, other_than=direction)
        callbacks = (0, 0, 1, 2)[self.below(4)]
        self.asking = len(cpu_pieces) if direction == "store" else 0
        try:
            step.transfer = transfer = (
                engine.load(cpu, gpu, after=self.compute)
                if direction == "load"
                else engine.store(gpu, cpu, after=self.compute)
            )
            self.steps.append(step)
            self.open.append(step)
        finally:
            self.asking = 0
        history.transfers.append(transfer)
        history.told[transfer.id] = [0, callbacks]
        for _ in range(callbacks):
            transfer.add_done_callback(history.tell)
        self.note(f"{direction} {transfer.id}: {gpu} {cpu}")
        return step

    def pending(self) -> list[Step]:
        """Transfers of its own that have not ended."""
        self.open = [step for step in self.open if step.transfer is not None and not step.transfer.done]
        return self.open

    def order(self, engine: OffloadEngine, new: Step, other_than: str = "") -> None:
        """Has what is pending and conflicts come first: a fence on the compute stream, or a wait."""
        if len(self.open) > self.seldom:  # a crowd asks hundreds of times while nothing ends
            self.seldom = 8 + 2 * len(self.pending())
        touched, writes = new.writes | new.reads, new.writes
        conflicts = [
            step.transfer
            for step in self.open
            if (step.writes & touched or step.reads & writes) and step.what != other_than
        ]
        for transfer in [each for each in conflicts if each is not None and not each.done]:
            if self.below(10) < 7:
                self.note(f"fence {transfer.id}")
                engine.fence(transfer, self.compute)
            else:
                self.note(f"wait {transfer.id}")
                engine.wait(transfer)

    # -- compute -------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[int]:
        factor = self.history.factor
        return [self.first * factor + each for each in self._some(1 + self.below(5), max(self.units * factor, 8))]

    def _own(self) -> list[int]:
        last = (self.first + self.units) * self.history.factor
        return [piece for piece in self._pieces() if piece < last]

    def write(self, engine: OffloadEngine) -> None:
        """A kernel that writes blocks of the GPU."""
        history, pieces = self.history, self._own()
        values = [next(history.values) for _ in pieces]
        step = Step("kernel", pieces, [], values, bits(pieces), 0, ran=False)
        self.order(engine, step)

        def run() -> None:
            step.ran, step.ended_ns = True, history.runtime.now_ns()
            for piece, value in zip(pieces, values, strict=True):
                history.fill("gpu", piece, value)

        history.runtime.launch_work(self.compute, run, self.below(200_000))
        self.steps.append(step)
        self.note(f"kernel writes {pieces}")

    def read(self, engine: OffloadEngine) -> None:
        """A kernel that reads blocks of the GPU; what it saw is compared at the end."""
        history, pieces = self.history, self._own()
        step = Step("read", [], [], [], 0, bits(pieces), ran=False)
        self.order(engine, step)

        def run() -> None:
            step.ran, step.ended_ns = True, history.runtime.now_ns()
            step.seen = [(piece, history.ends("gpu", piece)) for piece in pieces]

        history.runtime.launch_work(self.compute, run, self.below(50_000))
        self.steps.append(step)
        self.note(f"kernel reads {pieces}")

    def crowd(self, engine: OffloadEngine) -> None:
        """Hundreds of requests on one stream behind a long kernel: more fences stand there than are recorded singly."""
        direction = ("load", "store")[self.below(2)]
        self.history.runtime.launch_delay(self.compute, 20_000_000)
        self.note("a crowd")
        for _ in range(140 + self.below(160)):
            gpu, gpu_pieces = self._blocks("gpu", 1)
            cpu, cpu_pieces = self._blocks("cpu", 1)
            self.transfer(engine, direction, gpu, gpu_pieces, cpu, cpu_pieces)
            if self.below(20) == 0:
                self.history.runtime.advance(PAUSES_NS[self.below(6)])

    # -- the rest ------------------------------------------------------------------------------------------------

    def wait(self, engine: OffloadEngine) -> None:
        """For one transfer, or for all."""
        pending = self.pending()
        which = self.below(len(pending) + 1)
        transfer = pending[which].transfer if which < len(pending) else None
        self.note(f"wait {transfer.id if transfer else 'all'}")
        engine.wait(transfer)

    def give_up(self, engine: OffloadEngine) -> None:
        """A wait that is given up after a while."""
        pending = self.pending()
        transfer = pending[self.below(len(pending))].transfer if pending else None
        limit = (0.0, 1e-6, 20e-6, 1e-3)[self.below(4)]
        try:
            engine.wait(transfer, limit)
            self.note(f"waited for {transfer.id if transfer else 'all'}")
        except TransferError as error:
            if "did not end within" not in str(error):
                raise
            self.note(f"gave up on {transfer.id if transfer else 'all'}")

    def poll(self, engine: OffloadEngine) -> None:
        """What has ended."""
        self.note(f"polled {[each.id for each in engine.poll()]}")

    def advance(self, engine: OffloadEngine) -> None:
        """Something else for a while."""
        self.history.runtime.advance(PAUSES_NS[self.below(len(PAUSES_NS))])

    def policy(self, engine: OffloadEngine) -> None:
        """Changes the policy."""
        policy = ("shared", "pooled")[self.below(2)] if not self.history.celled else "pooled"
        self.note(f"policy {policy}")
        engine.set_policy(policy)

    def rung(self, engine: OffloadEngine) -> None:
        """Changes what the pooled streams' copies are submitted with."""
        method, table = self.history.tables[self.below(len(self.history.tables))]
        self.note(f"method {method}")
        ct.memmove(ct.addressof(engine._table), ct.addressof(table), ct.sizeof(table))

    def fence(self, engine: OffloadEngine) -> None:
        """The compute stream waits for a transfer."""
        pending = self.pending()
        if pending:
            transfer = pending[self.below(len(pending))].transfer
            assert transfer is not None
            self.note(f"fence {transfer.id}")
            engine.fence(transfer, self.compute)

    def serve(self, engine: OffloadEngine) -> None:
        """A request of a server: blocks by their hashes, through the cache and dedup."""
        if self.server is not None:
            self.server.request(engine)

    # -- the end -------------------------------------------------------------------------------------------------

    def _check_times(self) -> None:
        """No copy is said to have ended before the kernels that it waited for.

        Raises:
            Violation: one is, or the times of a transfer are not in their order.
        """
        computed_ns = 0
        for step in self.steps:
            transfer = step.transfer
            if transfer is None:
                computed_ns = max(computed_ns, step.ended_ns)
            elif transfer.state == "done":
                order = (transfer.built_ns, transfer.submitted_ns, transfer.noticed_ns)
                if not 0 < order[0] <= order[1] <= order[2]:
                    raise Violation(f"transfer {transfer.id} was built, submitted and noticed at {order}")
                begun, ended = transfer.copy_start_ns, transfer.copy_end_ns
                if ended and not begun <= ended <= order[2] + CLOCKS_NS:
                    raise Violation(f"transfer {transfer.id} began at {begun} and ended at {ended}, noticed {order[2]}")
                if ended and ended < computed_ns - CLOCKS_NS:
                    raise Violation(f"transfer {transfer.id} ended {computed_ns - ended} ns before compute did")

    def check(self, held: list[int]) -> None:
        """Plays its steps on `held`, a value a piece, and compares what kernels saw.

        Raises:
            Violation: they saw other bytes, or a key's block held something else.
        """
        history, stored = self.history, {}
        self._check_times()
        for step in self.steps:
            failed = step.transfer is not None and step.transfer.state == "failed"
            if not step.ran:
                raise Violation(f"a {step.what} was never executed")
            for piece, seen in step.seen:
                value = held[piece]
                if value != UNDEFINED and seen != history.word_ends(value):
                    raise Violation(f"a kernel read other bytes in piece {piece}")
            if step.what == "load":
                for key, piece in step.keys:
                    if UNDEFINED != held[piece] != stored.get(key):
                        raise Violation(f"key {key} was loaded from a block that holds another")
            values = step.values or [held[piece] for piece in step.of]
            for piece, value in zip(step.to, values, strict=False):
                held[piece] = UNDEFINED if failed else value
            if step.what == "store":
                for key, piece in step.keys:
                    stored[key] = held[piece]
