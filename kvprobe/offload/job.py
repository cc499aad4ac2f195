"""A transfer in the hands of the native submitter: what it tells of itself, how to wait for it, why it failed.

Transfers of the engine and submissions of adapters are both jobs: one status, one set of errors, one way to wait.
"""

from __future__ import annotations

import ctypes as ct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvprobe.cuda.copies import METHOD_NAMES
from kvprobe.errors import KvprobeError, TransferError
from kvprobe.native.library import JobStatus

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvprobe.cuda import Runtime
    from kvprobe.native.library import SubmitterStats

DIRECTION = {"load": 1, "store": 2}  # enum kvp_direction, and cudaMemcpyKind
STATES = ("waiting", "submitting", "in flight", "done", "failed")
_DONE, _FAILED = STATES.index("done"), STATES.index("failed")
_NO_LIMIT = 2**64 - 1


class Refusal(IntEnum):
    """`enum kvp_job_refusal`: why the submitter did not take a job, or did not order a stream behind one."""

    BAD_ID = -1
    TWICE = -2
    NO_MEMORY = -3
    BROKEN = -4
    FORKED = -5
    SIGNALS = -6  # the calling thread should look at signals and ask again
    STUCK = -7  # nothing outstanding can free a slot for it
    NO_ROOM = -8  # a packed pool has too few tails left for a store


class RunEnd(IntEnum):
    """`enum kvp_run_end`: how far a run of submissions in the caller's thread came."""

    MORE_IS_LEFT = 0
    ALL_SUBMITTED = 1
    COPY_FAILED = 2


class WaitEnd(IntEnum):
    """`enum kvp_wait_end`: why a wait for a job came back."""

    WOULD_NEVER_END = -2
    LOOK_AT_SIGNALS = -1
    TIME_RAN_OUT = 0
    HAS_ENDED = 1


class Fault(IntEnum):
    """`enum kvp_job_fault`: what made a job fail."""

    COPY = 1
    WAIT = 2
    DEVICE = 3
    CLOSED = 4
    STUCK = 5
    RESET = 6
    CELL = 7
    LAUNCH = 8


_CALLS = {
    Fault.COPY: "cudaMemcpyAsync",
    Fault.WAIT: "cudaStreamWaitEvent",
    Fault.DEVICE: "cudaEventQuery",
    Fault.LAUNCH: "cuLaunchKernel",
}


class Owner(Protocol):
    """What asks the native submitter for jobs: the engine, or the submitter of adapters."""

    runtime: Runtime
    _native: ct.CDLL
    _held: ct.CDLL  # for calls that are shorter than giving up the GIL
    _handle: int | None  # None: closed

    def wait(self, job: Any = None, /, timeout_s: float | None = None) -> None:
        """Sleeps until a job has ended (None: all have).

        Raises:
            TransferError: the time ran out, or it would never end.
        """

    def _refused(self, code: int) -> KvprobeError:
        """The error for a refusal."""


OwnerT = TypeVar("OwnerT", bound=Owner)


class Job(Generic[OwnerT]):
    """A transfer that the native submitter knows; reading it is cheap, and nothing depends on reading it.

    Times are CLOCK_MONOTONIC, or the virtual clock's, in ns.

    Attributes:
        owner: what it was asked of.
        address: of the native job.
        id: counts from 1 in one owner.
        direction: "load" (CPU to GPU) or "store" (GPU to CPU).
        copies: how many were asked for; neighbours may be copied as one.
    """

    __slots__ = ("__weakref__", "_read", "address", "copies", "direction", "id", "owner")

    def __init__(self, owner: OwnerT, direction: str, address: int, number: int, copies: int) -> None:
        """Takes over one reference to the native job at `address`."""
        self.owner, self.direction, self.id, self.copies = owner, direction, number, copies
        self._read: JobStatus | None = None  # made when asked for: who hands over does not wait for ctypes to make it
        self.address = address

    @property
    def _status(self) -> JobStatus:
        read = self._read
        if read is None:
            read = self._read = JobStatus.from_address(self.address)
        return read

    def __del__(self) -> None:
        """Gives the native job back; an interrupted constructor may have taken none."""
        if hasattr(self, "address"):
            self.owner._held.kvp_job_release(self.address)

    def __repr__(self) -> str:
        return f"<{self.direction} {self.id}: {self.copies} copies of {self.bytes} bytes, {self.state}>"

    @property
    def state(self) -> str:
        """One of "waiting", "submitting", "in flight", "done", "failed"."""
        return STATES[self._status.state]

    @property
    def done(self) -> bool:
        """Whether it has ended, either way."""
        return bool(self._status.state >= _DONE)

    @property
    def failed(self) -> bool:
        """Whether it ended without all of its copies; its destination holds undefined bytes."""
        return bool(self._status.state == _FAILED)

    @property
    def faulty(self) -> bool:
        """Whether it failed, or will: one of its copies was refused, and what went before still runs."""
        return self.failed or bool(self._status.fault)

    @property
    def error(self) -> Exception | None:
        """Why it failed; None where it has not."""
        return job_error(self.owner.runtime, self._status) if self.failed else None

    @property
    def bytes(self) -> int:
        """Payload."""
        return int(self._status.bytes)

    @property
    def thread(self) -> int:
        """OS thread id that asked for it."""
        return int(self._status.tid)

    @property
    def stream(self) -> int:
        """Handle of the stream of its newest submission; 0 before."""
        return int(self._status.stream)

    @property
    def submitted(self) -> int:
        """Copies submitted so far."""
        return int(self._status.submitted)

    @property
    def descriptors(self) -> int:
        """As how many pieces they were submitted: neighbours are merged, large copies may be cut."""
        return int(self._status.descriptors)

    @property
    def calls(self) -> int:
        """Submitting calls made for it; a call that carried other jobs too counts for each of them."""
        return int(self._status.calls)

    @property
    def methods(self) -> tuple[str, ...]:
        """How it was submitted: "loop", "batch", "kernel", "staged", or several of them."""
        return tuple(name for bit, name in enumerate(METHOD_NAMES) if self._status.methods >> bit & 1)

    @property
    def longest_ns(self) -> int:
        """The longest submitting call, on whichever thread made it."""
        return int(self._status.longest_ns)

    @property
    def submit_ns(self) -> int:
        """Host time in submitting calls, on whichever thread made them."""
        return int(self._status.submit_ns)

    @property
    def requested_ns(self) -> int:
        """When it was asked for."""
        return int(self._status.requested_ns)

    @property
    def built_ns(self) -> int:
        """When it was checked and put together, before it was handed over or submitted."""
        return int(self._status.built_ns)

    @property
    def submitted_ns(self) -> int:
        """When its last copy was submitted; 0: not yet."""
        return int(self._status.submitted_ns)

    @property
    def copy_start_ns(self) -> int:
        """When the device began with it, by the device's clock; 0: not known."""
        return int(self._status.copy_start_ns)

    @property
    def copy_end_ns(self) -> int:
        """When the device was done with it; 0: not known."""
        return int(self._status.copy_end_ns)

    @property
    def noticed_ns(self) -> int:
        """When its end was noticed; 0: not yet."""
        return int(self._status.noticed_ns)

    def result(self) -> Self:
        """The job itself if it completed or still runs.

        Raises:
            TransferError: it failed; its destination holds undefined bytes.
        """
        error = self.error
        if error is not None:
            raise TransferError(f"{name_of(self)} of {self.bytes} bytes failed: {error}") from error
        return self

    def wait(self, timeout_s: float | None = None) -> Self:
        """Sleeps until it has ended; of an engine's, until its callbacks have run too.

        Raises:
            TransferError: it failed, the time ran out, or it would never end.
        """
        self.owner.wait(self, timeout_s)
        return self.result()


def name_of(job: Job[Any] | None) -> str:
    """A job in an error's words; None: all of them."""
    return f"{job.direction} {job.id}" if job else "all transfers"


def wait_for(owner: Owner, job: Job[Any] | None, timeout_s: float | None = None) -> None:
    """Sleeps until a job of `owner` has ended (None: all have), or `owner` is closed.

    Raises:
        TransferError: the time ran out, or it would never end.
    """
    native = owner._native
    limit_ns = None if timeout_s is None else native.kvp_now_ns() + int(timeout_s * 1e9)
    address = job.address if job else None
    while (handle := owner._handle) is not None:
        left_ns = _NO_LIMIT if limit_ns is None else max(limit_ns - native.kvp_now_ns(), 0)
        code = native.kvp_job_wait(handle, address, left_ns)
        if code == WaitEnd.HAS_ENDED:
            return
        if code == WaitEnd.TIME_RAN_OUT:
            raise TransferError(f"{name_of(job)} did not end within {timeout_s} s")
        if code == WaitEnd.WOULD_NEVER_END:
            raise TransferError(f"{name_of(job)} would never end: nothing outstanding can complete it")


def fence(owner: Owner, job: Job[Any], stream: int) -> None:
    """Makes later work of `stream` wait for a job; returns once all of it is submitted.

    Raises:
        TransferError: it would never be submitted, or the process is a fork.
        CudaError: the wait could not be made.
    """
    code: int = Refusal.SIGNALS
    while code == Refusal.SIGNALS:
        handle = owner._handle
        code = owner._native.kvp_job_fence(handle, job.address, stream) if handle is not None else 0
    if code == Refusal.STUCK:
        raise TransferError(f"{name_of(job)} would never be submitted: nothing outstanding can free a slot for it")
    if code < 0:
        raise owner._refused(code)
    if code:
        raise owner.runtime.error("cudaStreamWaitEvent", code)


def refused(what: str, code: int, broken: Exception | None) -> TransferError:
    """The error of `what`, an engine or a submitter, that takes no more jobs: it is closed, broken, or forked."""
    if code == Refusal.FORKED:
        return TransferError(f"this {what} belongs to the process that this one was forked from: make another here")
    return TransferError(f"the {what} takes no more transfers: {broken or 'it is closed'}")


def job_error(runtime: Runtime, status: JobStatus) -> Exception:
    """Why a job failed, by its status."""
    if status.fault == Fault.CLOSED:
        return KvprobeError("it was closed before all copies were submitted")
    if status.fault == Fault.STUCK:
        return KvprobeError("the device did not go on with its copies within the time set (stuck_after_s)")
    if status.fault == Fault.RESET:
        return KvprobeError("the runtime was reset")
    return runtime.error(_CALLS.get(status.fault, "a CUDA call"), status.error)


def broken_by(runtime: Runtime, stats: SubmitterStats) -> Exception | None:
    """Why a native submitter takes no more jobs; None while it works, or where it was only closed."""
    if stats.fault == Fault.RESET:
        return KvprobeError("the runtime was reset")
    if stats.fault == Fault.STUCK:
        return KvprobeError(f"transfer {stats.stuck_job} did not go on within the time set (stuck_after_s)")
    if stats.broken > 0:
        return runtime.error("cudaEventQuery", stats.broken)
    return None
