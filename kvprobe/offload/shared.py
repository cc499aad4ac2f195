"""The shared policy: the caller's thread submits every copy to one stream, as servers do, and its calls are judged."""

from __future__ import annotations

import ctypes as ct
from typing import TYPE_CHECKING

from kvprobe.launchqueue import Slowness, SubmissionRun
from kvprobe.native.library import DETAIL, SubmitOptions, SubmitResult, core
from kvprobe.offload.job import DIRECTION, RunEnd
from kvprobe.probe.nvtx_ranges import listening
from kvprobe.probe.ring import PAGEABLE, PINNED

if TYPE_CHECKING:
    from kvprobe.offload.engine import OffloadEngine
    from kvprobe.offload.transfer import Transfer

STOP_CALLS, STOP_NS = 16, 5_000_000  # auto looks up after this many blocked calls, or this much time in them
RUN = 1024  # pieces of one run at most
NONE = 2**64 - 1


class SharedSubmission:
    """Submits the transfers of one direction to its shared stream, one after another."""

    def __init__(self, engine: OffloadEngine, direction: str, detail: str) -> None:
        """Belongs to `engine`."""
        self._engine = engine
        self._direction = DIRECTION[direction]
        self._lock = engine.runtime.lock()
        self._pageable = engine.mapping.cpu.kind == "pageable"
        # auto cannot judge what was not timed
        self._timed = detail != "off" or engine.auto.active
        self._options = SubmitOptions(
            kind=DIRECTION[direction],
            direction=DIRECTION[direction] | (PAGEABLE if self._pageable else PINNED) << 4,
            detail=max(DETAIL[detail], int(self._timed)),
        )
        native = core()
        if detail == "copies" and listening() and native.kvp_nvtx_listening():
            self._options.range_push = ct.cast(native.kvp_nvtx_push, ct.c_void_p).value
            self._options.range_pop = ct.cast(native.kvp_nvtx_pop, ct.c_void_p).value
        self._submit = native.kvp_job_inline

    def submit(self, transfer: Transfer) -> bool:
        """Submits a transfer, or the part before the policy changed; False: none of it, it must be handed over.

        Raises:
            TransferError: the engine takes no more.
        """
        engine = self._engine
        with self._lock:
            handle = engine._handle
            if handle is None or not engine._native.kvp_inline_free(handle, self._direction):
                return False  # what was handed over before is not done: behind it
            transfer.policy = "shared"
            run_end_ns = 0
            while True:
                result, outstanding = SubmitResult(), ct.c_uint64()
                options = self._options
                options.transfer = transfer.id & 0xFFFFFFFF
                options.blocked_ns = engine.detector.threshold_ns
                watched = engine.auto.active and engine.policy == "shared"
                options.stop_after, options.stop_after_ns = (STOP_CALLS, STOP_NS) if watched else (0, 0)
                code = self._submit(
                    handle, transfer.address, ct.byref(options), RUN, ct.byref(result), ct.byref(outstanding)
                )
                if code < 0:
                    engine._live.pop(transfer.id, None)
                    engine._native.kvp_job_unused(handle, transfer.address)
                    raise engine._refused(code)
                if self._timed and result.start_ns:
                    gap = result.start_ns - run_end_ns if run_end_ns else 0
                    self._judge(transfer, result, outstanding.value, gap, bool(code))
                run_end_ns = result.end_ns
                if code != RunEnd.MORE_IS_LEFT:  # where it failed the transfer says so
                    return True
                if engine.policy != "shared":
                    break
            engine._hand_over(transfer)  # with the lock: nobody may begin on the shared stream behind the rest of it
        return True

    def _judge(self, transfer: Transfer, run: SubmitResult, outstanding: int, gap_ns: int, last: bool) -> None:
        engine = self._engine
        blocked = run.first_blocked != NONE
        verdict = engine.detector.observe(
            SubmissionRun(
                stream=transfer.stream,
                thread=transfer.thread,
                outstanding=outstanding,
                submitted=run.submitted,
                start_ns=run.start_ns,
                end_ns=run.end_ns,
                fast=run.fast,
                fast_ns=run.fast_ns,
                blocked=run.blocked,
                blocked_ns=run.blocked_sum_ns,
                first_blocked=run.first_blocked if blocked else -1,
                first_blocked_ns=run.first_blocked_ns,
                longest_ns=run.max_ns,
                preempted=run.preempted,
                preempted_ns=run.preempted_ns,
                pageable=self._pageable,
                gap_ns=gap_ns,
            )
        )
        if engine.auto.active:
            full = verdict is Slowness.SATURATION
            took = run.end_ns - run.start_ns
            if full:  # first: a full queue is a better reason than what it cost
                engine.auto.saturated(engine.detector.saturations[-1], engine.detector.reason)
            engine._cost(transfer, "shared", run.submitted, took, outstanding, later=last and not full)
