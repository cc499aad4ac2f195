"""CPU memory of a server whose blocks may lie coded: which do, who must copy them, and whether coding them pays.

Coding a store is a cure as any other: it begins where stores plainly use the link and a sample of what they left in
memory would shrink, it is kept where the copies became faster, and it is taken back where they did not. In a trial two
stores are coded, two are not, and so on; once coding is kept, two of 64 are not. What counts is each store whose
neighbour in time was made in the other way: a model that computes beside the copies, or copies of the other direction,
slow both, and neither way is judged by what the other one took at another time. Loads are not made in turns: they count
where one of coded rows and one of plain rows came next to each other.

What lies coded stays readable, by flags: a row that may lie coded is loaded by kernels that decode, whatever else moves
the rows beside it; whoever stores over it in the server's own way makes it a plain one again. Before somebody reads the
memory who knows nothing of this, `close` has every row lie there as it is.
"""

from __future__ import annotations

import ctypes as ct
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.cuda import Region
from kvprobe.errors import KvprobeError
from kvprobe.instrument.hooks import Call
from kvprobe.instrument.submissions import CODED, POOLED
from kvprobe.launchqueue.constants import NOTABLE_SHARE
from kvprobe.offload.cells import Cells, Rows
from kvprobe.offload.rungs import Comparison, Costs, Rung, Sample, compare
from kvprobe.offload.submitter import Submitter
from kvprobe.offload.wire import predict

if TYPE_CHECKING:
    from kvprobe.instrument.device import Device
    from kvprobe.instrument.transfers import WatchedTransfer

__all__ = ["CodedRows"]

log = logging.getLogger("kvprobe")

TRIAL = 8  # pairs of neighbours that either way is judged by
MOST_TRIAL = 8 * TRIAL  # stores after which sizes that do not meet are no comparison
TURN = 2  # stores that are made in one way before it is the other one's turn
PERIOD = 64  # stores, of which one turn is plain once coding is kept: so all that a program does has its part in it
SETTLED = 2 * TRIAL  # stores on one rung after which auto has found no better one than it
PAYS = 1.03  # times as fast as the copies as they are, at least
LOSES = 1.2  # times as slow: clearly
LEAST_SAVING = 0.9  # of a sample's bytes that may travel
SAMPLED = 8  # blocks
COOL_DOWN_NS = 60_000_000_000  # until what gained nothing is tried again; doubles each time

Ids = npt.NDArray[Any]


class _RowsCall(Call):
    __slots__ = ("before",)

    def __init__(self, call: Call, coded: CodedRows, direction: str, rows: Ids) -> None:
        super().__init__(call.func, call.args, call.kwargs)
        self.before = functools.partial(coded.before_own, direction, rows)


class CodedRows:
    """The rows of one CPU memory. Where a method takes rows, a row is one block of every tensor.

    Attributes:
        lock: held from `takes` until the transfer is handed over.
        coding: whether stores are coded now, but for those that they are compared with.
        submitter: of its own: it moves these blocks alone, and what lies coded is moved by no other.
        block_bytes: of one block of one tensor.
    """

    def __init__(self, device: Device, rows: Rows, decide: Callable[..., None]) -> None:
        """All lie there as they are.

        Args:
            device: where they are copied to and from.
            rows: the memory, pinned.
            decide: called with (what, why, before=, after=, **evidence) for every decision.

        Raises:
            KvprobeError: nothing here codes, or the memory for notes or a thread cannot be had.
        """
        self.lock = threading.RLock()
        self.coding = False
        self.block_bytes = rows.block_bytes
        self._decide, self._rows = decide, rows
        self._cells = Cells.beside(device.runtime, rows, rows.block_bytes)
        self.submitter = Submitter(device.runtime, limits=device.limits, cells=self._cells)
        self._may_be_coded = np.zeros(rows.blocks, np.bool_)
        self._any = self._closed = False
        self._newest: Any = None  # hand-over of a coded store
        self._under_way: deque[tuple[Any, Ids]] = deque()  # of those that may not have ended, and their rows
        self._plain_rung: dict[str, Rung] = {}  # by direction, what moved the newest that were not coded
        self._plain: Ids | None = None  # rows of the newest store that was not coded
        self._costs = {(name, coded): Costs() for name in ("load", "store") for coded in (False, True)}
        self._busy_ns = self._since_ns = self._again_ns = 0
        self._neighbours: dict[tuple[str, tuple[int, int]], tuple[Sample, bool]] = {}  # the newest of each size
        self._stores = self._often = 0  # stores since the newest decision, or look
        self._turn = 0  # stores that were made in turns
        self._kept = self._doubted = self._first = False

    @classmethod
    def of(cls, device: Device, tensors: Sequence[Any], block_bytes: int, decide: Callable[..., None]) -> CodedRows:
        """Of CPU tensors of two dimensions, bytes, each row of which begins with a block."""
        step, blocks = int(tensors[0].stride(0)), int(tensors[0].shape[0])
        span = (blocks - 1) * step + block_bytes
        regions = [Region(tensor.data_ptr(), span, "pinned") for tensor in tensors]  # the server may free them
        return cls(device, Rows(regions, blocks, block_bytes, step), decide)

    # ---- who copies ---------------------------------------------------------------------------------------------

    def takes(self, direction: str, rows: Ids) -> bool:
        """Whether a transfer of these rows must go to `submitter`; where it need not, a store makes them plain."""
        if direction == "load":
            return self._any and bool(self._may_be_coded[rows].any())
        period = PERIOD if self._kept else 2 * TURN
        plain = not self.coding or self._turn % period >= period - TURN
        if plain and self._is_under_way(rows):  # only its end says how they lie
            plain = False
        elif self.coding:
            self._turn += 1
        if plain:
            self._plain = rows
            self._overwritten(rows)
            return False
        self._may_be_coded[rows] = self._any = True
        return True

    def call(self, call: Call, direction: str, rows: Ids) -> Call:
        """The same call of the server's, with what `before_own` is to be told before it is made: `before`."""
        return _RowsCall(call, self, direction, rows)

    def handed_over(self, direction: str, rows: Ids, hand_over: Any) -> None:
        """The submitter has a transfer of these rows."""
        if direction == "store":
            while self._under_way and self._under_way[0][0].done:
                self._under_way.popleft()
            self._under_way.append((hand_over, rows))
            self._newest = hand_over

    def before_own(self, direction: str, rows: Ids) -> None:
        """The server's own code is about to copy these rows as they are, and no transfer of theirs is on its way.

        Of two stores into one block that are both on their way, for which vLLM never asks, an older one that a launch
        refused is made again behind the newer one.

        Raises:
            CellError: one of them is damaged: what a load would bring is not what was stored.
        """
        with self.lock:
            if self._is_storing():  # only its end says how they lie
                self._newest.wait()
            if direction == "store":
                self._overwritten(rows)
                return
            for row in rows[self._may_be_coded[rows]].tolist() if self._any else ():
                self._cells.uncode_copy(row)
                self._may_be_coded[row] = False

    def close(self, *, is_gone: bool = False) -> None:
        """Waits for what is on its way and has every row lie there as it is: the CPU decodes those that are coded.

        A damaged row stays as it is, and is named in the log. `is_gone`: the server has given the memory up.
        """
        with self.lock:
            if self._closed:
                return
            self.coding, self._closed = False, True
            try:
                self.submitter.wait()
            except KvprobeError as error:
                log.warning("kvprobe: copies of coded blocks did not end: %s", error)
            for row in np.flatnonzero(self._may_be_coded).tolist() if not is_gone else ():
                try:
                    self._cells.uncode_copy(row)
                except KvprobeError as error:
                    log.error("kvprobe: block %d of the CPU's memory is lost: %s", row, error)
            self._may_be_coded[:] = self._any = False
            self.submitter.close()

    def _overwritten(self, rows: Ids) -> None:
        if self._any and self._may_be_coded[rows].any():
            self._cells.overwritten(rows)
            self._may_be_coded[rows] = False
            self._any = bool(self._may_be_coded.any())

    def _is_storing(self) -> bool:
        return self._newest is not None and not self._newest.done

    def _is_under_way(self, rows: Ids) -> bool:
        """Whether a coded store into one of these rows has not ended."""
        return any(not one.done and bool(np.isin(rows, theirs).any()) for one, theirs in self._under_way)

    # ---- whether it pays ----------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Stores are not coded any more, and that is not tried again."""
        self._again_ns = 2**63
        if self.coding:
            self._leave("refuse", why)

    def heard(self, direction: str, live: WatchedTransfer, copy_ns: int) -> None:
        """What a transfer took on the device is known."""
        with self.lock:
            if self._closed or not live.copies:
                return
            coded = live.rung == CODED
            if not coded and live.rung != self._plain_rung.get(direction):  # auto took another one: it is judged anew
                self._plain_rung[direction] = live.rung
                self._forget(direction)
                if direction == "store" and not self.coding:
                    self._stores, self._busy_ns, self._since_ns = 0, 0, time.monotonic_ns()
            if coded and direction == "store" and self._first:  # it pays for what is loaded then
                self._first = False
                return
            self._pair(direction, Sample(live.copies, live.submit_ns, live.bytes, live.rung, copy_ns=copy_ns), coded)
            if direction == "store" and (self.coding or not coded):
                self._stores += 1
                self._busy_ns += copy_ns * live.one_in
            self._judge() if self.coding else self._look()

    def _pair(self, direction: str, sample: Sample, coded: bool) -> None:
        """It counts, and so does the one before it of its size, where that one was made in the other way."""
        before = self._neighbours.get((direction, sample.size))
        self._neighbours[direction, sample.size] = sample, coded
        if self.coding and before is not None and before[1] != coded:
            for one, way in (before, (sample, coded)):
                costs = self._costs[direction, way]
                costs.add(one).add_copies(one)

    def _look(self) -> None:
        """Whether to try it: stores use the link, and would shrink."""
        now = time.monotonic_ns()
        if self._stores < SETTLED or now < self._again_ns:
            return
        share = self._busy_ns / max(now - self._since_ns, 1)
        self._stores, self._busy_ns, self._since_ns = 0, 0, now
        if share < NOTABLE_SHARE or self._plain is None:
            return
        saves = self._predicted(self._plain)
        if saves > LEAST_SAVING:
            self._cool_down(now)
            why = f"a sample of what was stored would still need {saves:.0%} of its bytes"
            self._decide("note", f"blocks travel as they are: {why}", share=saves)
            return
        self.coding, self._kept, self._doubted, self._first, self._turn = True, False, False, True, 0
        self._forget("load")
        self._forget("store")
        why = f"stores use the link {share:.0%} of the time, and a sample of them needs {saves:.0%} of its bytes"
        self._decide("switch", why, before=self._name, after=str(CODED), share=saves)

    def _predicted(self, rows: Ids) -> float:
        """What a sample of plain rows would need, as a share of its bytes."""
        regions, step = self._rows.regions, self._rows.step_bytes
        sample = [
            ct.string_at(regions[i * len(regions) // SAMPLED].address + row * step, self.block_bytes)
            for i, row in enumerate(rows[np.linspace(0, len(rows) - 1, SAMPLED).astype(np.int64)].tolist())
        ]
        return predict(sample, "bf16").share

    def _judge(self) -> None:
        """Either direction whenever enough pairs have met."""
        self._judge_stores(self._compare("store"))
        loads = self._compare("load")
        if self.coding and self._kept and loads.transfers >= TRIAL:
            self._forget("load")
            if loads.copy_before and loads.whole_gain < 1 / PAYS:
                self._leave("return", f"loads: {loads.loss}", loads)

    def _judge_stores(self, seen: Comparison) -> None:
        """Coding is kept where it gains, a trial that clearly loses ends after half of it; once kept, it may lose once.

        One comparison of eight may be a bad moment of the machine's: what was kept is given back after two in a row.
        """
        enough = seen.transfers >= TRIAL
        if self._kept:
            if not enough:
                return
            loses = seen.whole_gain < 1 / PAYS
            if loses and self._doubted:
                self._leave("return", seen.loss, seen)
            self._doubted = loses
        elif seen.transfers >= TRIAL // 2 and seen.copy_before and seen.whole_gain < 1 / LOSES:
            self._leave("rollback", seen.loss, seen)
        elif not enough and self._stores < MOST_TRIAL:
            return
        elif not (enough and seen.whole_gain >= 1 and seen.copy_gain >= PAYS):
            self._leave("rollback", seen.loss if enough else "too few of one size were next to each other", seen)
        else:
            self._kept, self._turn = True, 0
            why = f"the copies are {seen.copy_gain:.2f} times as fast over {seen.transfers} transfers"
            self._decide("keep", why, before=self._name, after=str(CODED), **seen.evidence())
        self._forget("store")

    @property
    def _name(self) -> str:
        """Of what moves stores that are not coded."""
        return str(self._plain_rung.get("store", POOLED))

    def _compare(self, direction: str) -> Comparison:
        return compare(self._costs[direction, False], self._costs[direction, True])

    def _leave(self, what: str, why: str, seen: Comparison | None = None) -> None:
        """Stores are plain from now on."""
        now = time.monotonic_ns()
        self.coding, self._stores, self._busy_ns, self._since_ns = False, 0, 0, now
        self._cool_down(now)
        self._decide(what, why, before=str(CODED), after=self._name, **(seen.evidence() if seen is not None else {}))

    def _forget(self, direction: str) -> None:
        """What its transfers took counts no more."""
        for coded in (False, True):
            self._costs[direction, coded].clear()
        self._neighbours = {key: seen for key, seen in self._neighbours.items() if key[0] != direction}

    def _cool_down(self, now: int) -> None:
        self._again_ns = max(self._again_ns, now + COOL_DOWN_NS * 2**self._often)
        self._often += 1
