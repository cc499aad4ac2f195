"""The offload engine: takes transfers, has their copies submitted, and tells when they are done.

How a transfer travels: `load`/`store` check the block ids and make a native job of them. Under the pooled policy the
job is handed to the submitter, one native thread that alone touches the pooled streams, and the caller leaves. Under
the shared policy the caller's own thread submits every copy to a shared stream, as a server without kvprobe does, and
what its calls took is judged. Either way the native thread sees when the device is done and tells whoever waits.

Within a direction transfers start and end in the order they were asked for, whatever stream they are on. Nothing
relaxes that, and nothing relaxes a wait on compute.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes as ct
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvprobe.cuda import Runtime
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import CudaError, KvprobeError, TransferError, UsageError
from kvprobe.launchqueue import Detector, calibrate
from kvprobe.native.library import (
    DETAIL,
    REQUEST,
    CellsConfig,
    JobRefused,
    MethodTable,
    SubmitterStats,
    core,
    core_held,
)
from kvprobe.offload.auto import Auto
from kvprobe.offload.blocks import BlockPool, Mapping, passed
from kvprobe.offload.callbacks import Callbacks, call_first
from kvprobe.offload.cells import wire_for
from kvprobe.offload.job import DIRECTION, Fault, Refusal, broken_by, fence, refused, wait_for
from kvprobe.offload.methods import METHOD_NAMES, ExpectedTimes, Methods, copier_for, measure_now, method_table
from kvprobe.offload.options import EngineKeywords, EngineOptions
from kvprobe.offload.resources import Resources
from kvprobe.offload.rungs import Rung, Sample, decision_text
from kvprobe.offload.shared import SharedSubmission
from kvprobe.offload.submitter import open_native, table_rate
from kvprobe.offload.transfer import Transfer
from kvprobe.probe.nvtx_ranges import listening, ranges
from kvprobe.probe.recorder import Recorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("kvprobe")

COMPUTE = object()  # `after`: the engine's compute stream
HAND_OVER_NS = 10_000  # of its caller's time that a request takes: 4 µs and 7 ns a block (H200, `h200-fast-path.json`)
ASKED = {"load": 0, "store": 1}  # enum kvp_request_what; with a wait for compute, and to be handed over:
AFTER, PUSH = 2, 4
LARGE = 1 << 20  # bytes of a piece from which on the link, and not the copy's own overhead, sets its rate
LEFT_NS = 100_000_000  # what requests leave to whoever polls or waits, a request does after so long
MOST_LEFT = 16  # samples of the pooled policy: more than a trial takes
NEVER = 1 << 63
UNCLAIMED = 4096  # ended transfers that nobody asked for are taken along by requests from here on
TAKEN = 256  # ids that are taken from the native side at once
KEPT = 1 << 17  # ended transfers that wait for somebody to poll


class OffloadEngine:
    """Moves blocks between a GPU pool and a CPU pool, and measures every submission.

    All methods may be called from any thread. Under the pooled policy no call waits for a launch queue or for the
    device, `wait` aside; under the shared policy a submission that blocks holds its caller, as in a server.

    Attributes:
        policy: the policy in force now, "shared" or "pooled".
        limits: the calibrated launch queue.
        detector: what it saw.
        auto: what auto decided, and why.
        broken: why the engine takes no more transfers; None while it works.
    """

    def __init__(self, runtime: Runtime, gpu: BlockPool, cpu: BlockPool, **options: Unpack[EngineKeywords]) -> None:
        """Creates streams and events up front, and the native thread.

        Args:
            runtime: where the pools live.
            gpu: the GPU's blocks.
            cpu: the CPU's blocks.
            options: each attribute of `EngineOptions`: `policy`, `method`, `wire`, `witness`, `bound`, `priority`,
                `compute_stream`, `detail`, `limits`, `link_bytes_per_s`, `max_bytes_per_s`, `max_slowdown`,
                `stuck_after_s`, `records`.

        Raises:
            UsageError: an unknown policy, method, wire or detail, a bound below 1, pools that do not fit each other, a
                wire or a witness that cannot be had.
            CudaError: the runtime could not make a stream, an event or pinned memory.
        """
        chosen = EngineOptions(**options)
        self.runtime, self.mapping, self.compute_stream = runtime, Mapping(gpu, cpu), chosen.compute_stream
        self._layers = gpu.layers
        self.limits = chosen.limits or calibrate(runtime)
        self.link_bytes_per_s = chosen.link_bytes_per_s
        self.detector = Detector(self.limits)
        self.broken: Exception | None = None
        self._closed = KvprobeError("it is closed")
        self._native, self._held = core(), core_held() if not runtime.simulated else core()
        copier = copier_for(runtime)
        self._wire = wire_for(runtime, chosen, self.mapping, copier)
        self._stand_on_a_rung(chosen)
        self._expect_transfers()
        if runtime.provider == "cuda" and copier.measured is None and chosen.method == "auto":
            measure_now(runtime, copier)
        self.simulated = runtime.simulated
        self._now: Callable[[], int] = self._native.kvp_now_ns if self.simulated else time.monotonic_ns
        if runtime.provider == "host":
            self._native.kvp_set_clock(runtime.address("kvhostNow") if self.simulated else None)
        self._make_native(copier, chosen)
        self._streams = {
            "shared": list(self._resources.shared),
            **{name: list(pool.streams) for name, pool in zip(DIRECTION, self._resources.pooled, strict=True)},
        }
        self._shared = {name: SharedSubmission(self, name, chosen.detail) for name in DIRECTION}
        self._pid = os.getpid()
        _open_engines.add(self)
        runtime.users.add(self)

    def _stand_on_a_rung(self, chosen: EngineOptions) -> None:
        """The policy in force, and auto, which may change it."""
        auto = chosen.policy == "auto" and self._wire.cells is None
        self.policy = "shared" if auto else "pooled" if chosen.policy == "auto" else chosen.policy
        self._rungs = {"shared": Rung("shared", "loop"), "pooled": Rung("pooled", chosen.method)}
        self.auto = Auto(
            list(self._rungs.values()),
            self._decided,
            active=auto,
            baseline_ns=self.limits.baseline_ns,
            slow_ns=HAND_OVER_NS,
            now=lambda: int(self._now()),
        )
        self._unjudged: deque[Sample] = deque()  # what transfers cost their callers: comparing costs 20 to 60 µs
        self._to_say: deque[tuple[int, str, Rung, Rung, str]] = deque()  # lines for the log (100 µs each), when due
        self._due_ns = NEVER  # when a request must see to those

    def _expect_transfers(self) -> None:
        """What is asked for, what has ended, and who is told of it: nothing yet."""
        self._ids = itertools.count(1)
        self._live: dict[int, Transfer] = {}
        self._ended: deque[Transfer] = deque(maxlen=KEPT)
        self._delivering = self.runtime.lock()
        self._callbacks = Callbacks(self._delivering)
        self._telling = threading.RLock()  # held by the thread that calls back while nobody polls, as long as it lives
        self._has_teller = False
        self._job_refused = JobRefused()  # guarded by _delivering
        self._why = ct.addressof(self._job_refused)
        self._ending = threading.RLock()
        self._taken = (ct.c_uint64 * TAKEN)()  # guarded by _delivering
        self._missed = False  # what has ended was taken from the native side, and perhaps not told of

    def _make_native(self, copier: Methods, chosen: EngineOptions) -> None:
        """The ring file, streams and events, and the native thread; what is made goes where a later step fails."""
        self._handle: int | None = None  # None: closed
        self._memory: int | None = None
        self.recorder = Recorder(chosen.detail, chosen.records)
        try:
            priority = self.runtime.priority_range()[1] if chosen.priority is None else chosen.priority
            streams = chosen.bound or self.limits.channels
            self._resources = Resources(self.runtime, streams, priority, copier.has_kernel)
            try:
                self._table: MethodTable = method_table(copier, chosen.method, chosen.max_slowdown)
                self._expected = ExpectedTimes(self._table)
                self._memory = self._handle = self._open(copier.native, chosen)
            except BaseException:
                self._resources.close()
                raise
        except BaseException:
            self.recorder.close()
            raise

    def _open(self, copier: Any, chosen: EngineOptions) -> int:
        mapping, most = self.mapping, int(chosen.max_bytes_per_s)
        return open_native(
            self.runtime,
            self._resources,
            self._table,
            copier,
            gpu=mapping.gpu.side(mapping.gpu_factor),
            cpu=mapping.cpu.side(mapping.cpu_factor),
            copy_bytes=mapping.piece_bytes,
            layers=mapping.gpu.layers,
            pageable=mapping.cpu.kind == "pageable",
            depth=self.limits.depth,
            detail=DETAIL[chosen.detail],
            bytes_per_s=(ct.c_uint64 * 2)(most, most),
            link_bytes_per_s=(ct.c_uint64 * 2)(*(self._rate_of(side) for side in range(2))),
            stuck_ns=int(chosen.stuck_after_s * 1e9),
            ceiling=self.detector.ceiling,
            cells=self._wire.cells or CellsConfig(),
            ranges=int(listening() and self._native.kvp_nvtx_listening()),
        )

    def _rate_of(self, side: int) -> int:
        """Bytes per second of large copies, as far as it is known: what the submitter begins with."""
        return int(self.link_bytes_per_s or table_rate(self._table, side))

    # -- asking for transfers ------------------------------------------------------------------------------------

    def load(
        self,
        cpu_blocks: Iterable[int],
        gpu_blocks: Iterable[int],
        *,
        after: int | None | object = COMPUTE,
        tag: Any = None,
        done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """CPU to GPU. Waits for whatever still reads the GPU blocks: the compute stream, or `after`.

        Args:
            cpu_blocks: source ids; fastest as an array of int64.
            gpu_blocks: destination ids.
            after: stream handle whose present work comes first; None: no wait; default: the engine's compute stream.
            tag: kept on the transfer, for the caller's own use.
            done: called once with the transfer when it has ended (see `Transfer.add_done_callback`).

        Raises:
            UsageError: ids out of range, repeated or of different amounts.
            TransferError: the engine is closed or its device was lost.
            CudaError: the compute stream could not be marked; nothing was asked for.
        """
        return self._request("load", gpu_blocks, cpu_blocks, after, tag, done)

    def store(
        self,
        gpu_blocks: Iterable[int],
        cpu_blocks: Iterable[int],
        *,
        after: int | None | object = COMPUTE,
        tag: Any = None,
        done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """GPU to CPU. Waits for the compute stream that wrote the blocks, or `after`; arguments as `load`."""
        return self._request("store", gpu_blocks, cpu_blocks, after, tag, done)

    def _request(
        self,
        direction: str,
        gpu_blocks: Iterable[int],
        cpu_blocks: Iterable[int],
        after: Any,
        tag: Any,
        done: Callable[[Transfer], None] | None,
    ) -> Transfer:
        requested = self._now()
        if requested >= self._due_ns:
            self._catch_up(requested)
            requested = self._now()
        gpu, cpu, pieces = self.mapping.request(gpu_blocks, cpu_blocks)
        handle = self._handle
        if handle is None:
            raise self._refused(Refusal.BROKEN)
        stream = self.compute_stream if after is COMPUTE else after
        pooled = self.policy != "shared"
        policy = "pooled" if pooled else ""  # of shared ones it is known when they are submitted
        what = ASKED[direction] | (AFTER if stream is not None else 0) | (PUSH if pooled else 0)
        number = 0
        transfer: Transfer | None = None
        try:
            with self._delivering:  # what ends at once is not looked for before it is known here
                number = next(self._ids)  # here: numbers and what is handed over are in one order
                job = self._held.kvp_job_request(
                    REQUEST.pack(handle, self._why, stream or 0, number, pieces, len(gpu), len(cpu), requested, what),
                    passed(gpu),
                    passed(cpu),
                )
                if job:
                    transfer = Transfer(self, direction, job, number, pieces * self._layers, policy, tag)
                    self._live[number] = transfer
                    if done:
                        self._add_callback(transfer, done)
                else:
                    why, bad = self._job_refused.why, self._job_refused.bad
            if transfer is None:
                raise self._not_taken(direction, gpu, cpu, why, bad)
            if pooled:
                if self.auto.looks(requested):
                    self._cost(transfer, "pooled", transfer.copies, self._now() - requested)
            elif not self._shared[direction].submit(transfer):
                self._hand_over(transfer)
        except KvprobeError:
            raise
        except BaseException:
            made = 0 if pooled or self._job_refused.made != number else self._job_refused.bad
            self._interrupted(transfer, made)
            raise
        if len(self._live) > UNCLAIMED:
            self._deliver(2)  # as many as come in, so that no call pays for all
        return transfer

    def _interrupted(self, transfer: Transfer | None, job: int) -> None:
        """A signal's exception came in between: what has begun goes on, what has not is forgotten."""
        if transfer is not None:
            if transfer._status.state < 2 and self._handle is not None:
                self._held.kvp_job_push(self._handle, transfer.address)
        elif job and self._handle is not None:
            self._native.kvp_job_unused(self._handle, job)

    def _not_taken(self, direction: str, gpu: Any, cpu: Any, why: int, bad: int) -> KvprobeError:
        if why in (Refusal.BROKEN, Refusal.FORKED):
            return self._refused(why)
        if why < 0:
            return self.mapping.refused(direction, gpu, cpu, why, bad)
        self._note_broken()
        return self._refused(Refusal.BROKEN) if self.broken else self.runtime.error("cudaEventRecord", why)

    def _hand_over(self, transfer: Transfer) -> None:
        """Gives a transfer, or the rest of one, to the native thread."""
        begin = self._now()
        transfer.policy = "pooled"
        code = self._held.kvp_job_push(self._handle, transfer.address)
        if code:
            self._live.pop(transfer.id, None)
            self._native.kvp_job_unused(self._handle, transfer.address)
            raise self._refused(code)
        if self.auto.looks(begin):
            self._cost(transfer, "pooled", transfer.copies - transfer.submitted, self._now() - begin)

    def _cost(
        self, transfer: Transfer, policy: str, copies: int, host_ns: int, outstanding: int = 0, later: bool = False
    ) -> None:
        """Tells auto what copies cost their caller, submitting them or handing them over; `later`: in the next call."""
        if copies <= 0 or (policy == "pooled" and len(self._unjudged) >= MOST_LEFT):
            return
        each, end = transfer.piece_bytes, self._now()
        sample = Sample(
            copies, host_ns, copies * each, self._rungs[policy], outstanding, end_ns=end, of=transfer.copies
        )
        self._unjudged.append(sample)
        if policy == "pooled":
            self._leave()
            return
        sample.expected_ns = self._expected.ns(transfer.direction, each, copies)
        sample.own_ns = self._expected.loop_ns(transfer.direction, each, copies)
        if later:
            self._due_ns = 0
        else:
            self._judge()

    def _judge(self) -> None:
        with contextlib.suppress(IndexError):  # another thread did it
            while self._unjudged:
                self.auto.submitted(self._unjudged.popleft())

    def _leave(self) -> None:
        """To whoever polls or waits; to a request only if nobody does."""
        self._due_ns = min(self._due_ns, self._now() + LEFT_NS)

    def _decided(self, what: str, why: str, *, before: Rung, after: Rung, **_: Any) -> None:
        """Auto changed its mind: the policy follows. A line of the log takes longer than a request: it comes later."""
        self._to_say.append((self._now() + LEFT_NS, what, before, after, why))
        self._leave()
        if what != "keep":
            self.set_policy(after.policy, why)

    def _catch_up(self, now_ns: int = NEVER) -> None:
        """What requests left undone: auto's judgement of what they cost, and lines for the log that are due by then."""
        self._due_ns = NEVER
        self._judge()
        with contextlib.suppress(IndexError):  # another thread said it
            while self._to_say and self._to_say[0][0] <= now_ns:
                _, what, before, after, why = self._to_say.popleft()
                log.warning("auto: %s: %s", decision_text(what, before, after), why)
            if self._to_say:
                self._due_ns = min(self._due_ns, self._to_say[0][0])

    def _refused(self, code: int) -> TransferError:
        if code != Refusal.FORKED:
            self._note_broken()
        return refused("engine", code, self.broken)

    def _note_broken(self) -> None:
        self.broken = self.broken or broken_by(self.runtime, self.read())

    # -- completion ----------------------------------------------------------------------------------------------

    def poll(self) -> list[Transfer]:
        """The transfers that ended since the last poll. Nothing depends on how often it is called."""
        if self._due_ns != NEVER:
            self._catch_up()
        self._deliver()
        ended: list[Transfer] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _deliver(self, most: int = 0) -> None:
        """Takes what has ended from the native side (at most so many; 0: all of it); runs callbacks."""
        handle = self._handle
        if handle is None:
            return
        ids, most = self._taken, most or TAKEN  # one array for all: the collector counts those that are made
        with self._delivering:
            again, self._missed = self._missed, True
            if again:  # an exception came in the last time
                for transfer in [transfer for transfer in self._live.values() if transfer.done]:
                    self._settle(transfer, again)
            while count := self._held.kvp_take_ended(handle, ids, most):
                for number in ids[:count]:
                    found = self._live.get(number)
                    if found is not None:
                        self._settle(found)
                if most < TAKEN:
                    break
            self._missed = False
        self._callbacks.run()

    def _settle(self, transfer: Transfer, again: bool = False) -> None:
        """Puts an ended transfer where it is told of; `again`: perhaps it is there already."""
        status = transfer._status
        if transfer.failed:
            if status.fault in (Fault.DEVICE, Fault.STUCK, Fault.RESET):
                self._note_broken()
        elif self.link_bytes_per_s and transfer.piece_bytes >= LARGE and status.copy_end_ns > status.copy_start_ns:
            rate = transfer.bytes / (status.copy_end_ns - status.copy_start_ns) * 1e9
            self.detector.link(rate, self.link_bytes_per_s)
        if not again or transfer not in self._ended:
            self._ended.append(transfer)
        if not transfer._callbacks:
            transfer._callbacks = None
        elif not again or transfer not in self._callbacks.due:
            self._callbacks.due.append(transfer)
        self._live.pop(transfer.id, None)

    def _add_callback(self, transfer: Transfer, callback: Callable[[Transfer], None]) -> None:
        with self._delivering:
            if transfer._callbacks is not None:
                if not self._has_teller and not self.simulated and (handle := self._handle) is not None:
                    self._native.kvp_submitter_hold(handle)
                    # not a threading.Thread, whose start() leaves a lock taken where a signal's exception comes in
                    _thread.start_new_thread(_tell, (weakref.ref(self), self._native, handle, self._telling))
                    self._has_teller = True
                if not isinstance(transfer._callbacks, list):
                    transfer._callbacks = []
                transfer._callbacks.append(callback)
                return
        call_first([callback], transfer)

    def wait(self, transfer: Transfer | None = None, timeout_s: float | None = None) -> None:
        """Sleeps until one transfer has ended, or all, and their callbacks have run (not inside a callback).

        Raises:
            TransferError: the time ran out. A transfer's own failure is raised by `Transfer.result`.
        """
        self._catch_up()
        wait_for(self, transfer, timeout_s)
        if self._handle is None:
            return
        self._deliver()
        if self._callbacks.inside:
            return
        while transfer._callbacks is not None if transfer else self._callbacks.due:
            if isinstance(self.runtime, HostRuntime) and self.simulated:
                self.runtime.run_until(lambda: self._callbacks.free)
            self._callbacks.await_runner()
            self._deliver()

    def fence(self, transfer: Transfer, stream: int) -> None:
        """Makes later work of `stream` wait for a transfer.

        Returns at once where the transfer is submitted. One that is not goes to the front of what is submitted, with
        its waits for compute on the device; the call returns when all of it is submitted, so a stream never waits for
        copies that stand behind its own wait in a launch queue.

        Raises:
            TransferError: the transfer failed.
            CudaError: the wait could not be made.
        """
        fence(self, transfer, stream)
        if transfer.done:
            transfer.result()

    @property
    def wire(self) -> str:
        """How the newest stores travelled, "raw" or "coded"; "coded" before the first one, where they are to be."""
        if self._wire.cells is None or not self._wire.cells.type:
            return "raw"
        stats = self.read()
        stored = sum(stats.launches[1])
        return "coded" if stats.coding or not stored else "raw"

    @property
    def wire_reason(self) -> str:
        """Why `wire` is not what was asked for; "" where it is."""
        if self._wire.why or self.wire == "coded" or self._wire.cells is None or not self._wire.cells.type:
            return self._wire.why
        return f"cells take {self.read().cell_share:.0%} of their blocks"

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self.read().pending

    # -- policy and state ----------------------------------------------------------------------------------------

    def set_policy(self, policy: str, reason: str = "asked for") -> None:
        """Changes the policy while transfers are in flight; what is submitted stays where it is, order holds.

        Raises:
            UsageError: not "shared" or "pooled", or "shared" where blocks lie in cells.
        """
        if policy not in ("shared", "pooled"):
            raise UsageError(f"unknown policy {policy!r}: use shared or pooled (auto: when the engine is made)")
        if policy == "shared" and self._wire.cells is not None:
            raise UsageError("blocks that lie in cells are moved under the pooled policy alone")
        before, self.policy = self.policy, policy
        if policy != before:
            ranges().mark(f"kvprobe: policy {before} -> {policy}: {reason}")

    def read(self) -> SubmitterStats:
        """The native side's own counts: pending, in flight, calls and bytes by method, the longest call."""
        stats = SubmitterStats()
        if self._handle is not None:
            self._native.kvp_submitter_read(self._handle, ct.byref(stats))
        return stats

    def outstanding(self) -> dict[int, int]:
        """Operations submitted and not known to be complete, by stream handle."""
        stats, found = self.read(), {}
        for which in range(2):
            for stream, places in (
                (self._streams["shared"][which], stats.shared_places[which]),
                (stats.stream[which], stats.in_flight_places[which]),
            ):
                if places:
                    found[int(stream)] = int(places)
        return found

    def pending_bytes(self, direction: str) -> int:
        """Bytes of a direction that were asked for and are not known to be copied, those that wait here included."""
        return int(self.read().pending_bytes[DIRECTION[direction] - 1])

    @property
    def methods_lost(self) -> dict[str, str]:
        """Methods that failed and are not used any more, with the error."""
        stats = self.read()
        return {
            name: str(self.runtime.error(name, stats.method_error))
            for bit, name in enumerate(METHOD_NAMES)
            if stats.methods_off >> bit & 1
        }

    @property
    def streams(self) -> dict[str, list[int]]:
        """Stream handles the engine made, by use."""
        return {name: list(each) for name, each in self._streams.items()}

    @property
    def held(self) -> dict[str, int]:
        """Streams and events that are in use now; all zero when the engine is idle."""
        stats = self.read()
        return {
            "streams": sum(1 for places in stats.in_flight_places if places),
            "events": int(stats.events - stats.events_free),
            "fences": int(stats.fences_used),
        }

    def close(self) -> None:
        """Waits for what is in flight, then destroys streams and events. The engine takes nothing afterwards.

        Raises:
            CudaError: something could not be destroyed; the rest is.
        """
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        handle = self._handle
        if handle is None:
            return
        if os.getpid() != self._pid:  # a forked child: everything belongs to its parent
            self._handle, self.broken = None, KvprobeError("it belongs to the parent process")
            return
        self._catch_up()
        if drain:
            self.wait()
        self._note_broken()
        self.broken = self.broken or self._closed
        self._native.kvp_submitter_stop(handle)  # the thread that calls back leaves first
        with self._telling:  # it has left, unless it is the one that closes
            pass
        with self._ending:
            self._native.kvp_submitter_close(handle, int(drain))
        self._deliver()
        _open_engines.discard(self)
        self.recorder.close()
        code = 0
        try:
            if self.broken is self._closed:  # on a lost device nothing can be destroyed, and nothing need be
                code = self._native.kvp_submitter_destroy_events(handle)
                self._resources.close()
        except CudaError:
            self._handle = None
            raise
        with self._ending:
            self._handle = None  # at the end: a close that an interrupt ended can be called again
        if code:
            raise self.runtime.error("cudaEventDestroy", code)

    def runtime_reset(self) -> None:
        """The runtime was torn down: what is in flight fails, and no handle is used again."""
        if os.getpid() != self._pid:
            return
        with self._ending:  # another thread may be closing it, or freeing it
            if self._handle is None:
                return
            self._native.kvp_submitter_abandon(self._handle)
            self._note_broken()
        self._deliver()

    def __del__(self) -> None:
        """An engine that nobody closed: what was not submitted is not submitted any more."""
        memory = getattr(self, "_memory", None)
        if memory is not None:
            try:
                self._close(drain=False)
            except Exception:
                log.debug("an engine that was not closed could not be closed at its end", exc_info=True)
            self._native.kvp_submitter_free(memory)

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _tell(engine: weakref.ref[OffloadEngine], native: ct.CDLL, handle: int, telling: threading.RLock) -> None:
    """Runs callbacks while nobody polls; sleeps in the native library meanwhile."""
    try:
        with telling:
            while native.kvp_wait_ended(handle) >= 0:
                alive = engine()
                if alive is None or alive._handle is None:
                    return
                alive._deliver()
                del alive
    finally:
        native.kvp_submitter_free(handle)


_open_engines: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The native threads leave before the CUDA runtime does; what was never submitted is not submitted any more."""
    for engine in list(_open_engines):
        try:
            engine._close(drain=False)
        except Exception:
            log.debug("an engine could not be closed at exit", exc_info=True)
