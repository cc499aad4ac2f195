"""The offload engine: takes transfers, submits their copies under a stream policy, and tells when they are done.

How a transfer travels: `load`/`store` build its descriptors and put it at the end of its direction's queue; `_pump`
submits from the head of that queue (everything at once under the shared policy, as much as the launch queue has room
for under the pooled one); events recorded between the copies tell `poll` how far the device has come. Within a
direction transfers start and finish in the order they were asked for: each waits for the one before it, whatever
stream it is on. Nothing relaxes that, and nothing relaxes a wait on compute.
"""

from __future__ import annotations

import ctypes as ct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvprobe.cuda import MEMCPY_KIND, Runtime
from kvprobe.errors import CudaError, KvprobeError, TransferError, UsageError
from kvprobe.launchqueue import Detector, Observation, QueueLimits, Verdict, calibrate
from kvprobe.native.library import DETAIL, SubmitOptions, SubmitResult, core
from kvprobe.offload.blocks import BlockPool, Mapping
from kvprobe.offload.controller import Controller
from kvprobe.offload.streams import EventPool, StreamPool
from kvprobe.offload.transfer import DONE, FAILED, IN_FLIGHT, SUBMITTING, Transfer
from kvprobe.probe.nvtx_ranges import listening, ranges
from kvprobe.probe.recorder import Recorder

POLICIES = ("shared", "pooled", "auto")
TIMED_TRANSFERS = 512  # transfers in flight at once, both directions; more wait in the engine
RESERVE = 32  # places of a stream's queue that stay free: events, waits, what the count does not see
STOP_CALLS, STOP_NS = 16, 5_000_000  # auto looks up after this many blocked calls, or this much time in them
LARGE = 1 << 20  # bytes of a copy from which on the link, and not the copy's own overhead, sets its rate
RENEW_CLOCK_NS = 10_000_000_000
COMPUTE = object()  # `after`: the engine's compute stream
DIRECTION = {"load": 1, "store": 2}  # enum kvp_direction
PAGEABLE, PINNED = 1, 2  # enum kvp_memory


@dataclass
class _Marker:
    """An event behind some operations of a stream: when it is reached they are done."""

    event: int
    stream: int
    operations: int
    transfer: Transfer | None  # set on a transfer's last marker
    pool: EventPool


@dataclass
class _Fence:
    """An event recorded on a compute stream, and how many transfers have yet to wait for it."""

    event: int
    users: int


class _Direction:
    """The state of one direction: its queue, its streams, what is in flight."""

    def __init__(self, name: str, kind: str, shared: int, pool: StreamPool) -> None:
        self.name = name
        self.kind = MEMCPY_KIND[kind]
        self.shared = shared
        self.pool = pool
        self.queue: deque[Transfer] = deque()  # not wholly submitted, oldest first
        self.markers: deque[_Marker] = deque()  # in submission order, which is completion order
        self.outstanding: dict[int, int] = {}  # by stream: operations not known to be complete
        self.unmarked: dict[int, int] = {}  # by stream: of these, how many no marker covers yet
        self.pumping = False
        self.last: Transfer | None = None  # newest transfer wholly submitted

    def add(self, stream: int, operations: int) -> None:
        """Operations were submitted to a stream."""
        self.outstanding[stream] = self.outstanding.get(stream, 0) + operations
        self.unmarked[stream] = self.unmarked.get(stream, 0) + operations

    def mark(self, marker: _Marker) -> None:
        """An event was recorded that covers some of them."""
        self.unmarked[marker.stream] -= marker.operations
        self.markers.append(marker)


class OffloadEngine:
    """Moves blocks between a GPU pool and a CPU pool, and measures every submission.

    All methods may be called from any thread; a submission that blocks (shared policy) holds the engine's lock, as the
    server's own thread would be held.

    Attributes:
        policy: the policy in force now, "shared" or "pooled".
        limits: the calibrated launch queue.
        detector: what it saw.
        controller: what auto decided, and why.
    """

    def __init__(
        self,
        runtime: Runtime,
        gpu: BlockPool,
        cpu: BlockPool,
        *,
        policy: str = "auto",
        bound: int | None = None,
        priority: int = 0,
        compute_stream: int = 0,
        detail: str = "transfers",
        limits: QueueLimits | None = None,
        link_bytes_per_s: float = 0.0,
        records: int = 0,
    ) -> None:
        """Creates streams and events up front.

        Args:
            runtime: where the pools live.
            gpu: the GPU's blocks.
            cpu: the CPU's blocks.
            policy: "shared", "pooled" or "auto".
            bound: streams of the pool, each direction; default: as many as there are hardware channels.
            priority: of the pooled streams. It orders kernels; copies do not heed it.
            compute_stream: the stream whose work stores wait for and loads wait for, unless a call names another.
            detail: "off", "totals", "transfers" or "copies".
            limits: the launch queue, if known; default: calibrated now.
            link_bytes_per_s: what the link does with one large copy, if known: copies far below it are named.
            records: single copies kept in the ring file at detail "copies"; 0: the default, 16,384.

        Raises:
            UsageError: an unknown policy or detail, a bound below 1, pools that do not fit each other.
        """
        if policy not in POLICIES:
            raise UsageError(f"unknown policy {policy!r}: use {', '.join(POLICIES)}")
        if detail not in DETAIL:
            raise UsageError(f"unknown detail {detail!r}: use {', '.join(DETAIL)}")
        if bound is not None and bound < 1:
            raise UsageError(f"the stream bound must be at least 1, not {bound}")
        self.runtime, self.mapping, self.compute_stream = runtime, Mapping(gpu, cpu), compute_stream
        self.limits = limits or calibrate(runtime)
        self.link_bytes_per_s = link_bytes_per_s
        self.detector = Detector(self.limits)
        self.policy = "shared" if policy == "auto" else policy
        self.controller = Controller(self, active=policy == "auto")
        self.recorder = Recorder(detail, records)
        self.broken: Exception | None = None
        self._detail = DETAIL[detail]
        self._lock = threading.RLock()
        self._finished: deque[Transfer] = deque()
        self._ids = 0
        self._ranges = ranges()
        streams = bound or self.limits.channels
        # Loads and stores may share channels: each takes at most half of a channel's places.
        self._usable = self.limits.depth - min(RESERVE, self.limits.depth // 4)
        self._stream_limit = max(self._usable // 2, 1)
        self._every = max(self._stream_limit // 4, 1)
        self._resume = streams * self._stream_limit - self._every
        self._pools = [StreamPool(runtime, streams, priority) for _ in range(2)]
        self._shared = [runtime.stream_create() for _ in range(2)]
        self._directions = {
            "load": _Direction("load", "h2d", self._shared[0], self._pools[0]),
            "store": _Direction("store", "d2h", self._shared[1], self._pools[1]),
        }
        self._timed = EventPool(runtime, 2 * TIMED_TRANSFERS, timing=True)
        self._plain = EventPool(runtime, 4 * (streams + 1) * 8 + TIMED_TRANSFERS, timing=False)
        self._fences: dict[int, _Fence] = {}
        self._clock_stream = runtime.stream_create()
        self._clock_event = runtime.event_create(timing=True)
        self._clock_ns = 0
        self._renew_clock()
        native = core()
        self._submit = native.kvp_submit
        self._record_event = native.kvp_record_event
        self._now = native.kvp_now_ns
        self._options = SubmitOptions(copy=runtime.address("cudaMemcpyAsync"), detail=self._detail,
                                      event_record=runtime.address("cudaEventRecord"))  # fmt: skip
        if detail == "copies" and listening() and native.kvp_nvtx_listening():
            self._options.range_push = ct.cast(native.kvp_nvtx_push, ct.c_void_p).value
            self._options.range_pop = ct.cast(native.kvp_nvtx_pop, ct.c_void_p).value

    # -- asking for transfers ------------------------------------------------------------------------------------

    def load(self, cpu_blocks: Iterable[int], gpu_blocks: Iterable[int], **how: Any) -> Transfer:
        """CPU to GPU. Waits for whatever still reads the GPU blocks: the compute stream, or `after`.

        Args:
            cpu_blocks: source ids.
            gpu_blocks: destination ids.
            how: `after` (stream handle; None: no wait), `tag`, `done` (called once with the transfer when it ends).

        Raises:
            UsageError: ids out of range, repeated or of different amounts.
            TransferError: the engine is closed or its device was lost.
        """
        return self._request("load", gpu_blocks, cpu_blocks, **how)

    def store(self, gpu_blocks: Iterable[int], cpu_blocks: Iterable[int], **how: Any) -> Transfer:
        """GPU to CPU. Waits for the compute stream that wrote the blocks, or `after`; arguments as `load`."""
        return self._request("store", gpu_blocks, cpu_blocks, **how)

    def _request(
        self,
        direction: str,
        gpu_blocks: Iterable[int],
        cpu_blocks: Iterable[int],
        after: Any = COMPUTE,
        tag: Any = None,
        done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        requested = self._now()
        dst, src = self.mapping.descriptors(gpu_blocks, cpu_blocks, direction)
        with self._lock:
            if self.broken:
                raise TransferError(f"the engine takes no more transfers: {self.broken}")
            self._ids += 1
            transfer = Transfer(self._ids, direction, tag, len(dst), self.mapping.piece_bytes, self, dst, src)
            transfer.requested_ns = requested
            if done:
                transfer.callbacks.append(done)
            stream = self.compute_stream if after is COMPUTE else after
            if stream is not None:
                transfer.after = self._fence_on(stream)
            transfer.built_ns = self._now()
            self._directions[direction].queue.append(transfer)
            self._pump(self._directions[direction])
            return transfer

    def _fence_on(self, stream: int) -> _Fence:
        """Marks what a compute stream holds now.

        Events are finite: when they run short, transfers that still wait in the engine share the newest fence,
        recorded again (a later mark covers all that an earlier one did).
        """
        newest = self._fences.get(stream)
        if newest is None or not newest.users or len(self._plain) > self._plain.size // 4:
            while (event := self._plain.take()) is None:
                self._poll()
                time.sleep(0.00005)
            newest = self._fences[stream] = _Fence(event, 0)
        try:
            self.runtime.event_record(newest.event, stream)
        except CudaError:
            if not newest.users:
                self._plain.give(newest.event)
            raise
        newest.users += 1
        return newest

    def _drop_fence(self, transfer: Transfer) -> None:
        """A transfer waits for its fence in its stream now, or never will."""
        fence, transfer.after = transfer.after, None
        if fence is not None:
            fence.users -= 1
            if not fence.users:
                self._plain.give(fence.event)

    # -- submitting ----------------------------------------------------------------------------------------------

    def _pump(self, state: _Direction) -> None:
        """Submits from the head of a direction's queue until it is empty or the launch queue has no room."""
        if self.policy == "pooled" and sum(state.outstanding.values()) > self._resume:
            return  # in batches: the first call after a pause is slow, its caches have gone cold
        if state.pumping:  # a callback asked for a transfer while one is being submitted: it waits its turn
            return
        state.pumping = True
        try:
            while state.queue:
                transfer = state.queue[0]
                try:
                    if not self._advance(state, transfer):
                        return
                except CudaError as error:
                    self._abandon(state, transfer, error)
                    continue
                if state.queue and state.queue[0] is transfer:  # a lost device empties the queue
                    state.queue.popleft()
        finally:
            state.pumping = False

    def _advance(self, state: _Direction, transfer: Transfer) -> bool:
        """Submits what it can of one transfer; True when all of it is submitted."""
        if not transfer.stream and not self._begin(state, transfer):
            return False
        stream = transfer.stream
        while transfer.submitted < transfer.copies:
            if transfer.done:  # the device was lost meanwhile
                return True
            left = transfer.copies - transfer.submitted
            paced = self.policy != "shared" or transfer.policy != "shared"
            if paced:
                room = self._room(state, stream)
                if room < min(left, self._every):
                    return False
                left = min(left, room)
            if not self._submit_copies(state, transfer, left) and paced:
                return False
        self._end(state, transfer)
        return True

    def _begin(self, state: _Direction, transfer: Transfer) -> bool:
        """Gives a transfer its stream, its waits and its start event; False while there is none to give."""
        if len(self._timed) < 2:
            return False
        transfer.policy = self.policy
        transfer.stream = stream = state.shared if self.policy == "shared" else state.pool.take()
        transfer.state = SUBMITTING
        transfer.start_event, transfer.end_event = self._timed.take() or 0, self._timed.take() or 0
        previous = state.last
        if previous is not None and not previous.done and previous.stream != stream:
            self.runtime.stream_wait_event(stream, previous.end_event)
        if transfer.after is not None:
            # The wait captures the record that is newest now; the event may be recorded again afterwards.
            self.runtime.stream_wait_event(stream, transfer.after.event)
            self._drop_fence(transfer)
        self._record(state, transfer, transfer.start_event)
        transfer.range = self._ranges.start(f"{transfer.direction} {transfer.id} stream {stream:#x}", transfer.bytes)
        return True

    def _room(self, state: _Direction, stream: int) -> int:
        """Operations that a stream takes without any danger of blocking.

        The pooled streams were made one after another and lie on channels of their own; the shared stream lies on the
        channel of one of them, so what it still holds counts against each.
        """
        held = state.outstanding.get(stream, 0)
        others = state.outstanding.get(state.shared, 0) if stream != state.shared else 0
        return min(self._stream_limit, self._usable - others) - held

    def _submit_copies(self, state: _Direction, transfer: Transfer, count: int) -> bool:
        """One run of the native loop; True when it issued all it was to.

        Where the count of outstanding operations comes to the ceiling, completions are looked up and the run ends, so
        that the detector sees each run on one side of it.
        """
        stream, first = transfer.stream, transfer.submitted
        below = self._below_ceiling(state, stream, count)
        if transfer.done:  # looking up completions found that the device is lost
            return False
        count = min(count, below) if below > 0 else count
        watched = self.controller.active and transfer.policy == "shared" and self.policy == "shared"
        marks = self._plain.take_many(min(count // self._every, 64, max(len(self._plain) - 16, 0)))
        handles = (ct.c_void_p * max(len(marks), 1))(*marks)
        pageable = self.mapping.cpu.kind == "pageable"
        options, result = self._options, SubmitResult()
        options.stream, options.kind, options.transfer = stream, state.kind, transfer.id & 0xFFFFFFFF
        options.direction = DIRECTION[transfer.direction] | (PAGEABLE if pageable else PINNED) << 4
        options.blocked_ns = self.detector.threshold_ns
        options.stop_after, options.stop_after_ns = (STOP_CALLS, STOP_NS) if watched else (0, 0)
        options.events, options.every, options.events_max = ct.cast(handles, ct.c_void_p), self._every, len(marks)
        before = state.outstanding.get(stream, 0)
        uncovered = state.unmarked.get(stream, 0)
        dst, src = transfer.dst.ctypes.data + 8 * first, transfer.src.ctypes.data + 8 * first
        code = self._submit(ct.byref(options), count, dst, src, None, transfer.piece_bytes, ct.byref(result))
        done = result.submitted
        state.add(stream, done + result.events)
        for index, event in enumerate(marks):
            if index < result.events:
                state.mark(_Marker(event, stream, self._every + 1 + uncovered, None, self._plain))
                uncovered = 0
            else:
                self._plain.give(event)
        transfer.submitted += done
        # Between two runs of one transfer lies only Python, unless the queue had no room and it waited by design.
        gap = result.start_ns - transfer.run_end_ns if transfer.run_end_ns and transfer.policy == "shared" else 0
        transfer.run_end_ns = result.end_ns
        transfer.submit_ns += result.end_ns - result.start_ns
        transfer.blocked += result.blocked
        transfer.longest_ns = max(transfer.longest_ns, result.max_ns)
        if self._detail:
            self._judge(state, transfer, result, before, pageable, gap)
        if code:
            raise self.runtime.error("cudaMemcpyAsync", code)
        return bool(done == count)

    def _below_ceiling(self, state: _Direction, stream: int, count: int) -> int:
        """Operations that a stream takes below the detector's ceiling, completions looked up if `count` is too many."""
        below = self.detector.ceiling - state.outstanding.get(stream, 0)
        if below < count and self._detail:
            self._retire(state)
            below = self.detector.ceiling - state.outstanding.get(stream, 0)
        return below

    def _record(self, state: _Direction, transfer: Transfer, event: int) -> None:
        """Records an event of a transfer on its stream: it takes a place in the queue and may wait for one."""
        self._below_ceiling(state, transfer.stream, 1)
        before = state.outstanding.get(transfer.stream, 0)
        options, result = self._options, SubmitResult()
        options.stream, options.blocked_ns = transfer.stream, self.detector.threshold_ns
        code = self._record_event(ct.byref(options), event, ct.byref(result))
        if code:
            raise self.runtime.error("cudaEventRecord", code)
        state.add(transfer.stream, 1)
        if result.blocked and self._detail:
            transfer.blocked += result.blocked
            transfer.longest_ns = max(transfer.longest_ns, result.max_ns)
            self._judge(state, transfer, result, before, False)

    def _judge(
        self, state: _Direction, transfer: Transfer, run: SubmitResult, before: int, pageable: bool, gap_ns: int = 0
    ) -> None:
        blocked = run.first_blocked != 2**64 - 1
        verdict = self.detector.observe(Observation(
            transfer.stream, threading.get_native_id(), before, run.submitted, run.start_ns, run.end_ns, run.fast,
            run.fast_ns, run.blocked, run.blocked_sum_ns, run.first_blocked if blocked else -1, run.first_blocked_ns,
            run.max_ns, run.preempted, run.preempted_ns, pageable, gap_ns))  # fmt: skip
        self.controller.submitted(run.submitted, run.end_ns - run.start_ns, run.blocked)
        if verdict is Verdict.SATURATION:
            self.controller.saturated(self.detector.saturations[-1], self.detector.reason)

    def _end(self, state: _Direction, transfer: Transfer) -> None:
        """Marks the end of a wholly submitted transfer on its stream."""
        self._record(state, transfer, transfer.end_event)
        state.mark(_Marker(transfer.end_event, transfer.stream, state.unmarked[transfer.stream], transfer, self._timed))
        transfer.state = IN_FLIGHT
        state.last = transfer

    # -- completion ----------------------------------------------------------------------------------------------

    def poll(self) -> list[Transfer]:
        """Looks at the device, submits what has room now, and returns the transfers that ended since the last poll."""
        with self._lock:
            self._poll()
            ended = list(self._finished)
            self._finished.clear()
        return ended

    def _poll(self) -> None:
        for state in self._directions.values():
            self._retire(state)
            self._pump(state)
        if self._now() - self._clock_ns > RENEW_CLOCK_NS and not self.broken:
            self._renew_clock()

    def _retire(self, state: _Direction) -> None:
        """Takes back the markers that the device has reached."""
        try:
            while state.markers and self.runtime.event_query(state.markers[0].event):
                marker = state.markers.popleft()
                state.outstanding[marker.stream] -= marker.operations
                if marker.transfer is None:
                    marker.pool.give(marker.event)
                else:
                    self._finish(state, marker.transfer, None)
        except CudaError as error:
            # An asynchronous error is sticky: nothing on this device can be trusted or will ever complete.
            self._lose(error)

    def _finish(self, state: _Direction, transfer: Transfer, error: Exception | None) -> None:
        """Ends a transfer, one way or the other, and gives back all it held."""
        transfer.noticed_ns = self._now()
        if error is None and transfer.error is None:
            try:
                transfer.copy_start_ns, transfer.copy_end_ns = (
                    self._clock_ns + int(1e6 * self.runtime.event_elapsed_ms(self._clock_event, event))
                    for event in (transfer.start_event, transfer.end_event)
                )
            except CudaError as failure:
                error = failure
        if self.link_bytes_per_s and transfer.piece_bytes >= LARGE and transfer.copy_end_ns > transfer.copy_start_ns:
            rate = transfer.bytes / (transfer.copy_end_ns - transfer.copy_start_ns) * 1e9
            self.detector.link(rate, self.link_bytes_per_s)
        transfer.error = transfer.error or error
        transfer.state = FAILED if transfer.error else DONE
        for event in (transfer.start_event, transfer.end_event):
            if event:
                self._timed.give(event)
        self._drop_fence(transfer)
        if transfer.stream and transfer.policy == "pooled":
            state.pool.give(transfer.stream)
        transfer.start_event = transfer.end_event = 0
        if state.last is transfer:
            state.last = None
        transfer.dst = transfer.src = _NOTHING
        self._ranges.end(transfer.range)
        self.recorder.transfer(transfer)
        self._finished.append(transfer)
        if len(self._finished) > 1 << 17:
            self._finished.popleft()  # nobody polls for results; whoever waits holds the transfer itself
        for callback in transfer.callbacks:
            callback(transfer)
        transfer.callbacks.clear()

    def _abandon(self, state: _Direction, transfer: Transfer, error: CudaError) -> None:
        """A transfer whose submission failed: what was submitted of it drains, then it ends as failed."""
        if transfer.done:  # a look at the device found it lost, which ended every transfer
            return
        state.queue.popleft()
        transfer.error = error
        try:
            if transfer.stream:
                self._end(state, transfer)
            else:
                self._finish(state, transfer, error)
        except CudaError as second:
            self._lose(second, transfer)

    def _lose(self, error: Exception, *also: Transfer) -> None:
        """The device is gone: every transfer fails, every stream and event goes back without touching the device."""
        self.broken = self.broken or error
        for state in self._directions.values():
            pending = [marker.transfer for marker in state.markers if marker.transfer]
            for marker in state.markers:
                if marker.transfer is None:
                    marker.pool.give(marker.event)
            state.markers.clear()
            state.outstanding.clear()
            state.unmarked.clear()
            waiting = list(state.queue)
            state.queue.clear()
            for transfer in (*pending, *waiting, *(each for each in also if each.direction == state.name)):
                if not transfer.done:
                    self._finish(state, transfer, error)

    def wait(self, transfer: Transfer | None = None, timeout_s: float | None = None) -> None:
        """Blocks until one transfer has ended, or all.

        Raises:
            TransferError: the time ran out. A transfer's own failure is raised by `Transfer.result`.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.00002
        while True:
            with self._lock:
                self._poll()
                if transfer.done if transfer else self.idle:
                    return
            if limit is not None and time.monotonic() > limit:
                what = f"{transfer.direction} {transfer.id}" if transfer else "all transfers"
                raise TransferError(f"waited {timeout_s} s for {what} in vain")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.0005)

    def fence(self, transfer: Transfer, stream: int) -> None:
        """Makes later work of `stream` wait for a transfer, without blocking the host longer than its submission."""
        while True:
            with self._lock:
                if transfer.done:
                    transfer.result()
                    return
                if transfer.state == IN_FLIGHT:
                    self.runtime.stream_wait_event(stream, transfer.end_event)
                    return
                self._poll()
            time.sleep(0.00002)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not any(state.queue or state.markers for state in self._directions.values())

    # -- policy --------------------------------------------------------------------------------------------------

    def set_policy(self, policy: str, reason: str = "asked for") -> None:
        """Changes the policy while transfers are in flight; what is submitted stays where it is, order holds.

        A transfer that is half submitted to the shared stream finishes there, as room appears; the next one takes a
        pooled stream and waits for it. Back again likewise.

        Raises:
            UsageError: not "shared" or "pooled".
        """
        if policy not in ("shared", "pooled"):
            raise UsageError(f"unknown policy {policy!r}: use shared or pooled (auto: when the engine is made)")
        with self._lock:
            if policy != self.policy:
                before, self.policy = self.policy, policy
                self._ranges.mark(f"kvprobe: policy {before} -> {policy}: {reason}")

    def outstanding(self) -> dict[int, int]:
        """Operations submitted and not known to be complete, by stream handle."""
        with self._lock:
            return {stream: count for state in self._directions.values()
                    for stream, count in state.outstanding.items() if count}  # fmt: skip

    def pending_bytes(self, direction: str) -> int:
        """Bytes of a direction that were asked for and are not known to be copied, those that wait here included."""
        state = self._directions[direction]
        with self._lock:
            copies = sum(state.outstanding.values()) + sum(each.copies - each.submitted for each in state.queue)
        return copies * self.mapping.piece_bytes

    @property
    def streams(self) -> dict[str, list[int]]:
        """Stream handles the engine made, by use."""
        load, store = self._pools
        return {"shared": list(self._shared), "load": list(load.streams), "store": list(store.streams)}

    @property
    def held(self) -> dict[str, int]:
        """Streams and events that are out of their pools now; all zero when the engine is idle."""
        return {
            "streams": sum(pool.in_use for pool in self._pools),
            "timed events": self._timed.size - len(self._timed),
            "plain events": self._plain.size - len(self._plain),
        }

    def _renew_clock(self) -> None:
        """Pairs a device event with the host clock, so that event times can be put beside host times."""
        now = core().kvp_now_ns
        self.runtime.event_record(self._clock_event, self._clock_stream)
        self.runtime.event_synchronize(self._clock_event)
        self._clock_ns = now()

    def close(self) -> None:
        """Waits for what is in flight, then destroys streams and events. The engine takes nothing afterwards."""
        with self._lock:
            if self.broken is None:
                self.wait()
                self.broken = KvprobeError("it is closed")
                for stream in (*self._shared, self._clock_stream):
                    self.runtime.stream_destroy(stream)
                for pool in self._pools:
                    pool.close()
                self._timed.close()
                self._plain.close()
                self.runtime.event_destroy(self._clock_event)
            self.recorder.close()

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _nothing() -> Any:
    import numpy as np

    return np.empty(0, dtype=np.uint64)


_NOTHING = _nothing()
