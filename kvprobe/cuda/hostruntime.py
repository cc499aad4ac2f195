"""The embedded host runtime and the controls that CUDA has no words for: its configuration, clock, faults and trace.

The one place that knows the C structures of `kvhost.h`. `host_runtime(depth=64, virtual_clock=True)` is the process's
host runtime with that configuration; with a virtual clock it is a simulation that is the same, event for event, on any
machine under any load.
"""

from __future__ import annotations

import ctypes as ct
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvprobe.cuda.runtime import Runtime, find_runtime
from kvprobe.errors import CudaError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Actor", "Gate", "HostConfig", "HostRuntime", "HostStats", "host_runtime", "trace_type"]

LAUNCH_TIMEOUT = 702  # cudaErrorLaunchTimeout: a simulated call that nothing can wake
NEVER = 2**64 - 1

_u16, _u32, _u64, _p, _i, _f = ct.c_uint16, ct.c_uint32, ct.c_uint64, ct.c_void_p, ct.c_int, ct.c_double
_STEP = ct.CFUNCTYPE(_u64, _p, _u64)
_CONDITION = ct.CFUNCTYPE(_i, _p)
_FUNCTION = ct.CFUNCTYPE(None, _p)


class HostConfig(ct.Structure):
    """`kvhost_config`; 0 in a field means: from the environment, else the default."""

    _fields_ = (
        ("depth", _u64),
        ("compute_channels", _u64),
        ("copy_channels", _u64),
        ("h2d_bytes_per_s", _f),
        ("d2h_bytes_per_s", _f),
        ("latency_ns", _f),
        ("memory_bytes", _u64),
        ("pinned_bytes", _u64),
        ("runtime_version", _u64),
        ("submit_ns", _f),
        ("virtual_clock", _u64),
        ("seed", _u64),
        ("pageable_bytes_per_s", _f),
        ("reserved", _u64 * 3),
    )


class HostStats(ct.Structure):
    """`kvhost_stats`: what the runtime holds and has done."""

    _fields_ = (
        ("outstanding", _u32 * 32 * 3),
        ("waiting", _u32 * 32 * 3),
        ("capacity", _u64 * 3),
        ("copies_submitted", _u64),
        ("copies_done", _u64),
        ("bytes_done", _u64 * 5),
        ("launches", _u64),
        ("blocked_calls", _u64),
        ("blocked_ns", _u64),
        ("operations_pending", _u64),
        ("streams", _u64),
        ("events", _u64),
        ("device_bytes", _u64),
        ("pinned_bytes", _u64),
        ("host_functions", _u64),
        ("sticky", _u64),
        ("pointers_asked", _u64),
    )


_TRACE = (
    *((name, "<u8") for name in ("sequence", "correlation", "start_ns", "end_ns", "blocked_ns", "queue_ns")),
    *((name, "<u8") for name in ("exec_start_ns", "exec_end_ns", "stream", "src", "dst", "bytes")),
    *((name, "<u4") for name in ("tid", "count", "chunks", "executed", "outstanding", "stream_number")),
    ("result", "<u2"),
    ("api", "<u2"),
    *((name, "u1") for name in ("call", "reason", "op_class", "channel", "direction", "memory", "dropped", "pad")),
    ("end", "<u4"),
)


def trace_type() -> np.dtype[Any]:
    """`kvhost_trace_record`, 136 bytes: one call and what it became on the device."""
    import numpy as np

    return np.dtype(list(_TRACE))


# name -> (arguments, result)
_CONTROLS: dict[str, tuple[list[Any], Any]] = {
    "kvhostConfigure": ([_p], _i),
    "kvhostGetConfig": ([_p], _i),
    "kvhostReset": ([_p], _i),
    "kvhostNow": ([], _u64),
    "kvhostIsVirtual": ([], _i),
    "kvhostActorAdd": ([_STEP, _p], _i),
    "kvhostActorAddInline": ([_STEP, _p], _i),
    "kvhostActorAddThread": ([_STEP, _p], _i),
    "kvhostActorWake": ([_i], None),
    "kvhostActorRemove": ([_i], None),
    "kvhostAdvance": ([_u64], _i),
    "kvhostRunUntil": ([_CONDITION, _p], _i),
    "kvhostRunUntilTime": ([_CONDITION, _p, _u64], _i),
    "kvhostStuck": ([], ct.c_char_p),
    "kvhostEvents": ([], _u64),
    "kvhostDigest": ([], _u64),
    "kvhostFailed": ([ct.c_char_p], _u64),
    "kvhostLaunchDelay": ([_p, _u64], _i),
    "kvhostLaunchWork": ([_p, _p, _p, _u64], _i),
    "kvhostGateCreate": ([], _p),
    "kvhostGateLaunch": ([_p, _p], _i),
    "kvhostGateOpen": ([_p], None),
    "kvhostGateReached": ([_p], _i),
    "kvhostGateDestroy": ([_p], None),
    "cudaStreamBeginCapture": ([_p, _i], _i),
    "cudaStreamEndCapture": ([_p, _p], _i),
    "kvhostFailCopy": ([_u64, _i], _i),
    "kvhostFailExecution": ([_u64, _i], _i),
    "kvhostFailCall": ([ct.c_char_p, _u64, _i], _i),
    "kvhostLoseDevice": ([], _i),
    "kvhostTraceStart": ([_u64], _i),
    "kvhostTraceStop": ([], _i),
    "kvhostTraceRead": ([_p, _u64, _u64], _u64),
    "kvhostTraceDropped": ([], _u64),
    "kvhostCallName": ([_u16], ct.c_char_p),
    "kvhostLastCorrelation": ([], _u64),
    "kvhostStats": ([_p], _i),
    "kvhostFillPieces": ([_p, _u64, _p, _u64], None),
    "kvhostComparePieces": ([_p, _u64, _p, _u64], ct.c_int64),
}


class HostRuntime(Runtime):
    """The embedded host runtime: a CUDA runtime without a GPU, with a configuration, a clock, faults and a trace.

    An exception that an actor, a condition or a function of the device raises comes out of the next `advance`,
    `run_until` or `check_raised`.
    """

    def __init__(self, path: str) -> None:
        """Loads the library at `path`."""
        super().__init__(path, "host")
        for name, (arguments, result) in _CONTROLS.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function
        self._raised: BaseException | None = None
        self._kept: list[Any] = []  # callbacks that the device may still call

    def error(self, name: str, code: int) -> CudaError:
        """The error of a call's return code; of a call that nothing can wake it says what is outstanding."""
        if code != LAUNCH_TIMEOUT:
            return super().error(name, code)
        self._lib.cudaGetLastError()
        return CudaError(name, code, f"it would wait forever: {self.stuck}")

    # -- configuration -------------------------------------------------------------------------------------------

    def reset(self, **settings: float) -> HostRuntime:
        """Tears all down and starts afresh; settings are fields of `HostConfig`, the rest environment and defaults.

        All streams, events, device memory and memory of `host_alloc` are gone after it, faults are forgotten. Engines
        that are still open are broken: their transfers fail.
        """
        self.call("kvhostReset", ct.byref(_config(settings)))
        self.generation += 1
        for user in list(self.users):
            user.runtime_reset()
        self._raised = None
        self._kept.clear()
        self._tell_clock()
        return self

    def configure(self, **settings: float) -> bool:
        """As `reset`, but only while nothing was created or submitted; False: it is in use, nothing was changed."""
        code = self._lib.kvhostConfigure(ct.byref(_config(settings)))
        self._tell_clock()
        return not code

    def _tell_clock(self) -> None:
        """Records, and whatever else kvprobe times, are in this runtime's time."""
        from kvprobe.native.library import core

        core().kvp_set_clock(self.address("kvhostNow") if self.simulated else None)

    @property
    def config(self) -> HostConfig:
        """The configuration in force."""
        config = HostConfig()
        self.call("kvhostGetConfig", ct.byref(config))
        return config

    @property
    def stats(self) -> HostStats:
        """What the runtime holds and has done."""
        stats = HostStats()
        self.call("kvhostStats", ct.byref(stats))
        return stats

    # -- time ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The runtime's time: virtual, or CLOCK_MONOTONIC."""
        return int(self._lib.kvhostNow())

    def advance(self, duration_ns: int) -> None:
        """Runs all that is due in the next `duration_ns` of virtual time."""
        self.call("kvhostAdvance", self.now_ns() + duration_ns)
        self.check_raised()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Runs until the condition holds, which is asked after every event and must only look.

        Raises:
            CudaError: it can never hold (702); the text says what is outstanding.
        """

        def ask(_: int | None) -> int:
            try:
                return bool(condition())
            except BaseException as error:
                self._raised = self._raised or error
                return 1

        code = self._lib.kvhostRunUntil(_CONDITION(ask), None)
        self.check_raised()
        if code:
            raise self.error("kvhostRunUntil", code)

    def actor(self, step: Callable[[int], int | None]) -> Actor:
        """Adds a simulated thread: `step(now_ns)` is called now, and then at the time (ns) that it returns.

        None: only when it is woken. A call in it that blocks holds back the calls that were entered before it.
        """
        return Actor(self, step)

    def thread(self, function: Callable[[], None]) -> Actor:
        """A simulated thread that runs `function` once, on an OS thread of its own; one of all runs at any time."""

        def step(_: int) -> None:
            function()

        return Actor(self, step, own_thread=True)

    def lock(self) -> AbstractContextManager[Any]:
        """A lock that may be held over calls: where time is virtual, who wants it lets the others go on."""
        return SimulatedLock(self) if self.simulated else super().lock()

    @property
    def stuck(self) -> str:
        """What was outstanding when a call last could never return; "" if that never was."""
        return str(self._lib.kvhostStuck().decode())

    @property
    def digest(self) -> int:
        """Of what happened, when and in which order: equal where two simulations ran alike."""
        return int(self._lib.kvhostDigest())

    @property
    def events(self) -> int:
        """Events that the simulation has executed."""
        return int(self._lib.kvhostEvents())

    def check_raised(self) -> None:
        """Raises what a callback raised."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    # -- work ----------------------------------------------------------------------------------------------------

    def launch_delay(self, stream: int, duration_ns: int) -> None:
        """A kernel of a given duration."""
        self.call("kvhostLaunchDelay", stream, duration_ns)

    def launch_work(self, stream: int, function: Callable[[], None], duration_ns: int = 0) -> None:
        """A kernel of a given duration, whose effects on memory are those of `function`, called when it ends."""
        self.call("kvhostLaunchWork", stream, self._callback(function), None, duration_ns)

    def launch_host_function(self, stream: int, function: Callable[[], None]) -> None:
        """A host function in stream order (cudaLaunchHostFunc)."""
        self.call("cudaLaunchHostFunc", stream, self._callback(function), None)

    def _callback(self, function: Callable[[], None]) -> Any:
        def run(_: int | None) -> None:
            try:
                function()
            except BaseException as error:
                self._raised = self._raised or error

        made = _FUNCTION(run)
        self._kept.append(made)
        return ct.cast(made, _p)

    def gate(self) -> Gate:
        """A kernel that runs until it is opened."""
        return Gate(self)

    # -- faults --------------------------------------------------------------------------------------------------

    def fail_copy(self, number: int, code: int = 1) -> None:
        """The copy call that is `number`-th from now (1: the next; a batch is one) returns `code`; 0 disarms."""
        self.call("kvhostFailCopy", number, code)

    def fail_execution(self, number: int, code: int = 700) -> None:
        """The `number`-th copy from now fails while it executes: `code` becomes sticky. 0 disarms."""
        self.call("kvhostFailExecution", number, code)

    def fail_call(self, name: str, number: int = 1, code: int = 2) -> None:
        """The `number`-th call of a function from now returns `code` and does nothing else; 0 disarms the function.

        Raises:
            CudaError: no such function, or more than 16 calls are armed.
        """
        self.call("kvhostFailCall", os.fsencode(name), number, code)

    def failed(self, name: str) -> int:
        """How often a function failed on demand since the reset; also "copy" and "execution"."""
        return int(self._lib.kvhostFailed(os.fsencode(name)))

    def lose_device(self) -> None:
        """From now on every call returns cudaErrorDevicesUnavailable."""
        self.call("kvhostLoseDevice")

    # -- patterns in memory --------------------------------------------------------------------------------------

    def fill_pieces(self, address: int, piece_bytes: int, words: Sequence[int]) -> None:
        """Fills pieces of memory, one after another, each with its word of 64 bits."""
        self._lib.kvhostFillPieces(address, piece_bytes, (_u64 * len(words))(*words), len(words))

    def compare_pieces(self, address: int, piece_bytes: int, words: Sequence[int]) -> int:
        """The first piece that does not hold its word throughout, or -1; 0 is not looked at."""
        array = (_u64 * len(words))(*words)
        return int(self._lib.kvhostComparePieces(address, piece_bytes, array, len(words)))

    # -- trace ---------------------------------------------------------------------------------------------------

    def trace_start(self, capacity: int = 200_000) -> None:
        """Starts recording every call but queries; what came before is forgotten."""
        self.call("kvhostTraceStart", capacity)

    def trace_stop(self) -> None:
        """Stops recording; executions still under way are filled in."""
        self.call("kvhostTraceStop")

    def trace(self) -> npt.NDArray[Any]:
        """The recorded calls, `trace_type()`, in the order in which they were entered.

        Raises:
            UsageError: calls were lost, because `capacity` was too small.
        """
        import numpy as np

        lost = self._lib.kvhostTraceDropped()
        if lost:
            raise UsageError(f"the trace is too small: {lost} calls were not recorded; start it with a larger capacity")
        records = np.zeros(self._lib.kvhostTraceRead(None, 0, 0), dtype=trace_type())
        self._lib.kvhostTraceRead(records.ctypes.data, 0, len(records))
        return records

    def call_name(self, api: int) -> str:
        """The function of a trace record's `api`."""
        return str(self._lib.kvhostCallName(api).decode())


class Actor:
    """A simulated thread of a virtual clock."""

    def __init__(self, runtime: HostRuntime, step: Callable[[int], int | None], own_thread: bool = False) -> None:
        """Use `HostRuntime.actor` or `HostRuntime.thread`."""
        self._runtime = runtime
        self.done = False  # its step raised

        def run(_: int | None, now_ns: int) -> int:
            try:
                at = None if self.done else step(now_ns)
            except BaseException as error:
                runtime._raised = runtime._raised or error
                self.done, at = True, None
            return NEVER if at is None else at

        self._callback = _STEP(run)
        add = runtime.library.kvhostActorAddThread if own_thread else runtime.library.kvhostActorAddInline
        self.id = add(self._callback, None)
        if self.id < 0:
            raise UsageError("actors need a virtual clock: host_runtime(virtual_clock=True)")

    def wake(self) -> None:
        """Its next step comes at the present time."""
        self._runtime.library.kvhostActorWake(self.id)

    def remove(self) -> None:
        """Waits for the step that is under way, then removes it."""
        self._runtime.library.kvhostActorRemove(self.id)

    def __enter__(self) -> Actor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


class SimulatedLock:
    """A lock of simulated threads, taken again by the one that holds it."""

    def __init__(self, runtime: HostRuntime) -> None:
        """Nobody holds it."""
        self._runtime, self._holder, self._depth = runtime, 0, 0

    def __enter__(self) -> bool:
        me = threading.get_ident()
        if self._holder != me:
            while self._holder:
                self._runtime.run_until(lambda: not self._holder)
            self._holder = me
        self._depth += 1
        return True

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = 0


class Gate:
    """A kernel that runs until it is opened; leaving its `with` opens and frees it."""

    def __init__(self, runtime: HostRuntime) -> None:
        """Use `HostRuntime.gate`."""
        self._runtime = runtime
        self._gate: int | None = runtime.library.kvhostGateCreate()

    def launch(self, stream: int) -> None:
        """Launches it on a stream."""
        self._runtime.call("kvhostGateLaunch", self._gate, stream)

    def open(self) -> None:
        """Ends all its launches, later ones too."""
        self._runtime.library.kvhostGateOpen(self._gate)

    @property
    def reached(self) -> int:
        """Launches of it that have started."""
        return int(self._runtime.library.kvhostGateReached(self._gate))

    def close(self) -> None:
        """Opens and frees it."""
        gate, self._gate = self._gate, None
        if gate is not None:
            self._runtime.library.kvhostGateDestroy(gate)

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _config(settings: dict[str, float]) -> HostConfig:
    config = HostConfig()
    known = {field[0]: field[1] for field in HostConfig._fields_}
    for name, value in settings.items():
        if name not in known or name == "reserved":
            raise UsageError(f"the host runtime has no setting {name!r}: use one of {', '.join(sorted(known))}")
        setattr(config, name, float(value) if known[name] is _f else int(value))
    return config


def host_runtime(**settings: float) -> HostRuntime:
    """The process's host runtime; with settings (fields of `HostConfig`) it is reset to them first.

    Everything that was made with it before is gone after a reset.

    Raises:
        UsageError: no such setting.
        NativeError: the library does not load.
    """
    runtime = find_runtime("host")
    assert isinstance(runtime, HostRuntime)
    return runtime.reset(**settings) if settings else runtime
