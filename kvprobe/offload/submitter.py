"""Copies given by address, submitted by the native thread: what adapters hand a server's copies to.

A caller hands copies over and leaves; the submitter chooses the method by direction, size and count, merges neighbours,
and never submits more than a queue has slots for. Within a direction transfers start and end in the order they came.
"""

from __future__ import annotations

import atexit
import ctypes as ct
import itertools
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from kvprobe.cuda import Runtime
from kvprobe.errors import KvprobeError, TransferError, UsageError
from kvprobe.launchqueue import QueueLimits, calibrate
from kvprobe.native.library import (
    ADDRESSES,
    CopyList,
    MethodTable,
    Side,
    SubmitterConfig,
    SubmitterStats,
    core,
    core_held,
)
from kvprobe.offload.job import DIRECTION, Fault, Job, Refusal, WaitEnd, broken_by, fence, refused, wait_for
from kvprobe.offload.methods import DEFAULT_MAX_SLOWDOWN, ExpectedTimes, Methods, copier_for, measure_now, method_table
from kvprobe.offload.resources import Resources, handles
from kvprobe.offload.wire import REFUSALS, TYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvprobe.offload.cells import Cells

__all__ = ["Bounds", "Copies", "Submission", "SubmissionOptions", "Submitter", "open_native"]

log = logging.getLogger("kvprobe")

_CLOCK_TRY_NS = 200_000  # an event on the clock's stream that is not reached so soon is given up
_TAKE_EVERY = 256  # submissions between two times that the list of ended ones is emptied; nobody reads it
_U64 = np.dtype(np.uint64)
_Memory = ct.c_char * 0


def open_native(runtime: Runtime, made: Resources, table: MethodTable, copier: Any, **fields: Any) -> int:
    """Starts a native submitter over these resources; `fields` of `kvp_submitter_config` that are its owner's own.

    The table must live until it is closed. Returns its handle.

    Raises:
        CudaError: an event could not be made.
        KvprobeError: no memory, or no thread could be made.
    """
    pooled = [handles(list(pool.streams)) for pool in made.pooled]
    config = SubmitterConfig(
        copier=copier,
        methods=ct.addressof(table),
        device=runtime.device(),
        streams=len(pooled[0]),
        pooled=(ct.c_void_p * 2)(*(ct.cast(each, ct.c_void_p) for each in pooled)),
        shared=(ct.c_void_p * 2)(*made.shared),
        clock_stream=made.clock_stream,
        clock_try_ns=_CLOCK_TRY_NS,
        list=(CopyList * 2)(*made.lists),
        **fields,
    )
    if runtime.simulated:
        config.actor_add = runtime.address("kvhostActorAdd")
        config.actor_wake = runtime.address("kvhostActorWake")
        config.actor_remove = runtime.address("kvhostActorRemove")
        config.run_until = runtime.address("kvhostRunUntilTime")
        config.slots = runtime.address("kvhostSlots")
    why = ct.c_int32()
    handle = core().kvp_submitter_open(ct.byref(config), ct.byref(why))
    if why.value:
        raise runtime.error("cudaEventCreateWithFlags", why.value)
    if not handle:
        raise KvprobeError("the submitter could not be started: not enough memory, or too many threads (ulimit -u)")
    return int(handle)


def table_rate(table: MethodTable, side: int) -> int:
    """Bytes per second of large copies by a table's figures; 0: it has none."""
    rows = table.row[side][: table.rows[side]]
    known = [(4 << 20) / row.copy_ns[-1] * 1e9 for row in rows if row.copy_ns[-1] > 0]
    return int(max(known, default=0))


class Bounds:
    """Addresses at which allocations or registrations begin: no copy may reach over one of them."""

    def __init__(self, addresses: Sequence[int]) -> None:
        """Takes them in any order."""
        self._array = np.unique(np.array(list(addresses), dtype=np.uint64))
        self.address = self._array.ctypes.data if len(self._array) else None

    def __len__(self) -> int:
        return len(self._array)


@dataclass(slots=True)
class Copies:
    """Copies by address, in the order in which neighbours are merged.

    Attributes:
        dst: where each goes, uint64 or int64, counted from a base.
        src: where each comes from, likewise.
        sizes: bytes of each, or one number for all.
        bounds: over which nothing is merged.
        bases: pairs of a destination and a source; from each pair all of them are copied.
    """

    dst: NDArray[Any]
    src: NDArray[Any]
    sizes: NDArray[Any] | int
    bounds: Bounds | None = None
    bases: Sequence[tuple[int, int]] = ((0, 0),)


class _Request:
    """The native side's view of what submissions copy, and the memory that it points into."""

    def __init__(self, parts: Sequence[Sequence[Copies]]) -> None:
        """Looks at each array once, however many share it.

        Raises:
            UsageError: arrays of different lengths, or nothing to copy.
        """
        known: dict[tuple[int, int, int], int] = {}
        lists: list[tuple[int, int, int, int, int]] = []  # of kvp_offsets
        self._columns: list[Any] = []
        bases: list[int] = []
        ends: list[int] = []
        self.copies: list[int] = []  # of each
        for part in parts:
            count = 0
            for copies in part:
                key = id(copies.dst), id(copies.src), id(copies.sizes)
                number = known.get(key)
                if number is None:
                    number = known[key] = len(lists)
                    lists.append(self._offsets(copies))
                count += lists[number][0] * len(copies.bases)
                for dst, src in copies.bases:
                    bases += (dst, src, number)
            if not count:
                raise UsageError("no copies: a transfer needs at least one")
            self.copies.append(count)
            ends.append(len(bases) // 3)
        if not ends:
            raise UsageError("no transfers: a request needs at least one")
        bounds = parts[0][0].bounds
        self._words = array("Q", [*itertools.chain.from_iterable(lists), *bases, *ends])
        at = self._words.buffer_info()[0]
        at_bases, at_ends = at + 8 * 5 * len(lists), at + 8 * (5 * len(lists) + len(bases))
        bound = (bounds.address or 0, len(bounds)) if bounds else (0, 0)
        self.native = ADDRESSES.pack(at, at_bases, at_ends, bound[0], len(lists), len(ends), bound[1])

    def _offsets(self, copies: Copies) -> tuple[int, int, int, int, int]:
        dst, src = _column(copies.dst), _column(copies.src)
        sizes = None if isinstance(copies.sizes, int) else _column(copies.sizes)
        if not len(dst) or len(dst) != len(src) or (sizes is not None and len(sizes) != len(dst)):
            raise UsageError(f"{len(dst)} destinations, {len(src)} sources: a transfer needs as many, and at least one")
        self._columns += dst, src, sizes
        if sizes is None:
            return len(dst), _address(dst), _address(src), 0, cast(int, copies.sizes)
        return len(dst), _address(dst), _address(src), _address(sizes), 0


class Submission(Job["Submitter"]):
    """A transfer of an adapter in the submitter's hands."""

    __slots__ = ()

    @property
    def error(self) -> Exception | None:
        """Why it failed; None where it has not."""
        if self.failed and self._status.fault == Fault.CELL:
            return KvprobeError(f"a block in the CPU's memory was refused: {REFUSALS[self._status.error]}")
        return super().error

    @property
    def copy_ns(self) -> int:
        """What the device took; where its times are not known, from the last submission to the notice; 0: not over."""
        if not self.done:
            return 0
        if self.copy_end_ns > self.copy_start_ns > 0:
            return self.copy_end_ns - self.copy_start_ns
        return max(1, self.noticed_ns - self.submitted_ns)


class SubmissionOptions(TypedDict, total=False):
    """What `Submitter.submit` and `submit_all` can be told besides; `submit_all` says what each means."""

    after: int | None
    since_ns: int
    behind_copies: bool


class Submitter:
    """One native thread, its streams and events, for one device. All methods may be called from any thread.

    Attributes:
        runtime: the CUDA runtime.
        limits: the launch queue as calibrated.
        methods: what exists here, and why the rest does not.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        limits: QueueLimits | None = None,
        method: str = "auto",
        max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
        stuck_after_s: float = 0.0,
        cells: Cells | None = None,
    ) -> None:
        """Creates streams and events and starts the thread; measures the methods where this machine's are not known.

        With `cells` it moves blocks of that memory alone, whole ones, and codes what it stores (as bf16, where they
        shrink); loads decode what lies there coded, and copy the rest.

        Raises:
            UsageError: no such method here, or nothing that codes within `max_slowdown`.
            CudaError: a stream or an event could not be made.
            KvprobeError: the thread could not be started.
        """
        self.runtime, self.limits = runtime, limits or calibrate(runtime)
        self.methods: Methods = copier_for(runtime)
        if runtime.provider == "cuda" and self.methods.measured is None and method == "auto":
            measure_now(runtime, self.methods)
        self._native, self._held = core(), core_held() if not runtime.simulated else core()
        self._table = method_table(self.methods, method, max_slowdown)
        if runtime.provider == "host":
            self._native.kvp_set_clock(runtime.address("kvhostNow") if runtime.simulated else None)
        self._number, self._numbering, self._pid = 1, threading.Lock(), os.getpid()
        self._handle: int | None = None
        self._ending = threading.RLock()
        self._memory: int | None = None
        self.expected = ExpectedTimes(self._table)
        # the highest priority: the few CTAs of a copy kernel need not wait until the model's kernels have all begun
        highest = runtime.priority_range()[1]
        self._resources = Resources(runtime, self.limits.channels, highest, self.methods.has_kernel)
        try:
            fields = {} if cells is None else self._of_cells(cells, max_slowdown)
            self._memory = self._handle = open_native(
                runtime,
                self._resources,
                self._table,
                self.methods.native,
                **fields,
                depth=self.limits.depth,
                link_bytes_per_s=(ct.c_uint64 * 2)(*(table_rate(self._table, side) for side in range(2))),
                stuck_ns=int(stuck_after_s * 1e9),
            )
        except BaseException:
            self._resources.close()
            raise
        _open.add(self)
        runtime.users.add(self)

    def _of_cells(self, cells: Cells, max_slowdown: float) -> dict[str, Any]:
        """What the native submitter is told of them; it copies all but the notes and their tables."""
        from kvprobe.offload import wire_calibration

        if not self.methods.has_coded:
            raise UsageError(self.methods.missing.get("kernel") or "there are no kernels that code on this GPU")
        measured = wire_calibration.known(self.runtime, self.methods) or wire_calibration.default()
        self._coded = cells, wire_calibration.table_of(measured, "coded", max_slowdown), cells.bases
        config = cells.config(TYPES["bf16"], self._coded[1], check=False, look=True)
        side = Side(bases=self._coded[2].ctypes.data, blocks=cells.a_layer, factor=1)
        return {"cells": config, "cpu": side, "gpu": side, "copy_bytes": cells.copy_bytes, "layers": len(cells.bases)}

    def submit(self, copies: Copies, direction: str, **options: Unpack[SubmissionOptions]) -> Submission:
        """Hands copies over and leaves: as `submit_all`, of one submission."""
        return self.submit_all([[copies]], direction, **options)[0]

    def submit_all(
        self,
        parts: Sequence[Sequence[Copies]],
        direction: str,
        *,
        after: int | None = None,
        since_ns: int = 0,
        behind_copies: bool = False,
    ) -> list[Submission]:
        """Hands over several submissions at once, all or none of them, that start and end in this order.

        That costs little more than one where they share their arrays and differ in their bases.

        Args:
            parts: what each copies, under the bounds of the first: pinned memory on the CPU's side; nobody may touch
                either side until the submission has ended.
            direction: "load" (CPU to GPU) or "store".
            after: stream handle whose present work comes first; None: no wait.
            since_ns: when the transfer was asked for (CLOCK_MONOTONIC); 0: now.
            behind_copies: that stream waits for copies which others make: a wait for it is no sign of compute.

        Raises:
            UsageError: arrays of different lengths, none at all, an unknown direction.
            TransferError: the submitter takes no more: it is closed, its device was lost, or the process is a fork.
            CudaError: the stream could not be marked; nothing was asked for.
        """
        if direction not in DIRECTION:
            raise UsageError(f"unknown direction {direction!r}: use load or store")
        given = _Request(parts)
        handle = self._handle
        if handle is None:
            raise TransferError("the submitter takes no more transfers: it is closed")
        with self._numbering:
            number, self._number = self._number, self._number + len(parts)
        jobs = (ct.c_void_p * len(parts))()
        code = self._held.kvp_job_request_addresses(
            handle,
            DIRECTION[direction],
            number,
            given.native,
            after,
            0 if after is None else 2 if behind_copies else 1,  # enum kvp_waits
            since_ns or self._native.kvp_now_ns(),
            jobs,
        )
        if code:
            raise self._refused(code)
        submissions = [
            Submission(self, direction, int(job or 0), number + i, given.copies[i]) for i, job in enumerate(jobs)
        ]
        if number // _TAKE_EVERY != (number + len(parts)) // _TAKE_EVERY:
            ids = (ct.c_uint64 * _TAKE_EVERY)()
            while self._held.kvp_take_ended(handle, ids, _TAKE_EVERY) == _TAKE_EVERY:
                pass
        return submissions

    def _refused(self, code: int) -> KvprobeError:
        if code == Refusal.NO_MEMORY:
            return KvprobeError("no memory for a transfer")
        if code > 0:
            return self.runtime.error("cudaEventRecord", code)
        return refused("submitter", code, broken_by(self.runtime, self.read()))

    def wait(self, submission: Submission | None = None, timeout_s: float | None = None) -> None:
        """Sleeps until a submission has ended, or all have.

        Raises:
            TransferError: the time ran out, or it would never end; its own failure is raised by `Submission.result`.
        """
        wait_for(self, submission, timeout_s)

    def fence(self, submission: Submission, stream: int) -> None:
        """Makes later work of `stream` wait for a submission; returns once all of it is submitted.

        Raises:
            TransferError: it would never be submitted, or the process is a fork.
            CudaError: the wait could not be made.
        """
        fence(self, submission, stream)

    def read(self) -> SubmitterStats:
        """The native side's own counts."""
        stats = SubmitterStats()
        if self._handle is not None:
            self._native.kvp_submitter_read(self._handle, ct.byref(stats))
        return stats

    def close(self, *, drain: bool = True) -> None:
        """Ends everything (those not submitted fail unless `drain`), stops the thread, destroys streams and events."""
        with self._ending:
            handle, self._handle = self._handle, None
        if handle is None or os.getpid() != self._pid:
            return
        if drain:
            while self._native.kvp_job_wait(handle, None, 2**64 - 1) == WaitEnd.LOOK_AT_SIGNALS:
                pass
        stats = SubmitterStats()
        self._native.kvp_submitter_read(handle, ct.byref(stats))
        lost = bool(stats.broken or stats.fault)
        self._native.kvp_submitter_stop(handle)
        self._native.kvp_submitter_close(handle, int(drain))
        _open.discard(self)
        if not lost:
            self._native.kvp_submitter_destroy_events(handle)
            self._resources.close()

    def runtime_reset(self) -> None:
        """The runtime was torn down: what is in flight fails, and no handle is used again."""
        with self._ending:
            if self._handle is not None and os.getpid() == self._pid:
                self._native.kvp_submitter_abandon(self._handle)

    def __del__(self) -> None:
        """What was not submitted is not submitted any more."""
        memory = getattr(self, "_memory", None)
        if memory is not None:
            try:
                self.close(drain=False)
            except Exception:
                log.debug("a submitter that was not closed could not be closed at its end", exc_info=True)
            self._native.kvp_submitter_free(memory)


def _column(values: NDArray[Any]) -> NDArray[Any]:
    """As contiguous 8-byte integers, without a copy where they are."""
    kind = values.dtype
    if (kind is _U64 or (kind.kind in "iu" and kind.itemsize == 8)) and values.flags.c_contiguous:
        return values
    return np.ascontiguousarray(values, dtype=_U64)


def _address(values: NDArray[Any]) -> int:
    """Where they lie; numpy's own way takes longer than making the job."""
    try:
        return ct.addressof(_Memory.from_buffer(values))  # type: ignore[arg-type]
    except TypeError:  # read-only
        return int(values.ctypes.data)


_open: weakref.WeakSet[Submitter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The native threads leave before the CUDA runtime does."""
    for submitter in list(_open):
        try:
            submitter.close(drain=False)
        except Exception:
            log.debug("a submitter could not be closed at exit", exc_info=True)
