"""Finds a CUDA runtime library and calls it: every error code becomes a CudaError that names the call."""

from __future__ import annotations

import ctypes as ct
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kvprobe.environment import HOSTRT
from kvprobe.errors import CudaError, KvprobeError, NativeError, UsageError
from kvprobe.native.library import path_of

MEMCPY_KIND = {"h2h": 0, "h2d": 1, "d2h": 2, "d2d": 3, "default": 4}
NOT_READY = 600  # cudaErrorNotReady: the one code that is an answer, not an error
DISABLE_TIMING = 2  # cudaEventDisableTiming
NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the legacy default stream
RELAXED = 2  # cudaStreamCaptureModeRelaxed
_MEMORY = {0: "pageable", 1: "pinned", 2: "device", 3: "managed"}  # enum cudaMemoryType

_p, _i, _u, _z = ct.c_void_p, ct.c_int, ct.c_uint, ct.c_size_t


class _Attributes(ct.Structure):
    """`cudaPointerAttributes`."""

    _fields_ = [("type", _i), ("device", _i), ("device_pointer", _p), ("host_pointer", _p), ("reserved", ct.c_long * 8)]


# Every function that Python calls, with its arguments. Those that only native code calls are reached by `address`.
_SIGNATURES: dict[str, list[Any]] = {
    "cudaGetDeviceCount": [_p],
    "cudaGetDevice": [_p],
    "cudaSetDevice": [_i],
    "cudaDeviceGetStreamPriorityRange": [_p, _p],
    "cudaDeviceSynchronize": [],
    "cudaRuntimeGetVersion": [_p],
    "cudaDriverGetVersion": [_p],
    "cudaMemGetInfo": [_p, _p],
    "cudaMalloc": [_p, _z],
    "cudaFree": [_p],
    "cudaHostAlloc": [_p, _z, _u],
    "cudaFreeHost": [_p],
    "cudaHostRegister": [_p, _z, _u],
    "cudaHostUnregister": [_p],
    "cudaPointerGetAttributes": [_p, _p],
    "cudaMemcpy": [_p, _p, _z, _i],
    "cudaMemcpyAsync": [_p, _p, _z, _i, _p],
    "cudaMemsetAsync": [_p, _i, _z, _p],
    "cudaStreamCreateWithPriority": [_p, _u, _i],
    "cudaStreamDestroy": [_p],
    "cudaStreamQuery": [_p],
    "cudaStreamSynchronize": [_p],
    "cudaStreamWaitEvent": [_p, _p, _u],
    "cudaStreamIsCapturing": [_p, _p],
    "cudaThreadExchangeStreamCaptureMode": [_p],
    "cudaEventCreateWithFlags": [_p, _u],
    "cudaEventDestroy": [_p],
    "cudaEventRecord": [_p, _p],
    "cudaEventQuery": [_p],
    "cudaEventSynchronize": [_p],
    "cudaEventElapsedTime": [_p, _p, _p],
    "cudaLaunchHostFunc": [_p, _p, _p],
}


class Runtime:
    """One loaded CUDA runtime.

    Handles (streams, events) and pointers are plain integers, so they pass to torch, to native code and into records
    without conversion. All methods raise CudaError; blocking calls release the GIL.

    Attributes:
        provider: "cuda" or "host".
        path: the library's file.
        version: of the runtime, 13000 for 13.0.
        generation: how often it was torn down and started afresh; what was made in an earlier one is gone, and its
            handles and addresses may be somebody else's now.
        users: who must know at once that it was: `runtime_reset()` of each is called.
        pinned: the pool that `kvprobe.cuda.pinned.shared_pool` has made; None until then.
    """

    def __init__(self, path: str, provider: str) -> None:
        """Loads the library at `path` and types its functions."""
        try:
            self._lib = ct.CDLL(path)
        except OSError as error:
            raise NativeError(f"CUDA runtime {path} does not load: {error}") from None
        self.path = path
        self.provider = provider
        self.generation = 0
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.pinned: Any = None
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes = arguments
            function.restype = _i
        self._lib.cudaGetErrorName.argtypes = [_i]
        self._lib.cudaGetErrorName.restype = ct.c_char_p
        self._functions = {name: getattr(self._lib, name) for name in _SIGNATURES}
        self.version = self._int("cudaRuntimeGetVersion")

    def __repr__(self) -> str:
        return f"Runtime({self.provider!r}, {self.version}, {self.path!r})"

    # -- plumbing ------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a runtime function and raises CudaError unless it returns 0."""
        code = self._functions[name](*arguments)
        if code:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> CudaError:
        """The error of a call's return code; clears the runtime's last error."""
        self._lib.cudaGetLastError()
        text = self._lib.cudaGetErrorName(code)
        return CudaError(name, code, text.decode() if text else "unknown")

    def address(self, name: str) -> int:
        """Address of a runtime function, for native code; 0 where this runtime has no such function."""
        try:
            return ct.cast(getattr(self._lib, name), _p).value or 0
        except AttributeError:
            return 0

    @property
    def simulated(self) -> bool:
        """Whether time is virtual: the embedded host runtime, so configured."""
        virtual = getattr(self._lib, "kvhostIsVirtual", None) if self.provider == "host" else None
        return bool(virtual and virtual())

    def lock(self) -> AbstractContextManager[Any]:
        """A lock that may be held over calls of the runtime, taken again by the thread that holds it."""
        return threading.RLock()

    @property
    def library(self) -> ct.CDLL:
        """The library itself, for functions that only one provider has."""
        return self._lib

    def _int(self, name: str) -> int:
        value = _i()
        self.call(name, ct.byref(value))
        return value.value

    def _handle(self, name: str, *arguments: Any) -> int:
        value = _p()
        self.call(name, ct.byref(value), *arguments)
        return value.value or 0

    # -- device --------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Number of devices."""
        return self._int("cudaGetDeviceCount")

    def driver_version(self) -> int:
        """Newest CUDA version that the driver supports, 13000 for 13.0."""
        return self._int("cudaDriverGetVersion")

    def device(self) -> int:
        """The calling thread's device."""
        return self._int("cudaGetDevice")

    def set_device(self, device: int) -> None:
        """Makes `device` the calling thread's device."""
        self.call("cudaSetDevice", device)

    def priority_range(self) -> tuple[int, int]:
        """Lowest and highest stream priority; the highest is the smaller number."""
        low, high = _i(), _i()
        self.call("cudaDeviceGetStreamPriorityRange", ct.byref(low), ct.byref(high))
        return low.value, high.value

    def mem_info(self) -> tuple[int, int]:
        """Free and total device memory in bytes."""
        free, total = _z(), _z()
        self.call("cudaMemGetInfo", ct.byref(free), ct.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        self.call("cudaDeviceSynchronize")

    # -- memory --------------------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        """Device memory of `size` bytes."""
        return self._handle("cudaMalloc", size)

    def free(self, pointer: int) -> None:
        """Frees device memory."""
        self.call("cudaFree", pointer)

    def host_alloc(self, size: int) -> int:
        """Pinned host memory of `size` bytes."""
        return self._handle("cudaHostAlloc", size, 0)

    def free_host(self, pointer: int) -> None:
        """Frees pinned host memory."""
        self.call("cudaFreeHost", pointer)

    def host_register(self, pointer: int, size: int) -> None:
        """Pins memory that exists."""
        self.call("cudaHostRegister", pointer, size, 0)

    def host_unregister(self, pointer: int) -> None:
        """Undoes host_register."""
        self.call("cudaHostUnregister", pointer)

    def memory_kind(self, pointer: int) -> str:
        """One of "pageable", "pinned", "device" or "managed"."""
        attributes = _Attributes()
        code = self._functions["cudaPointerGetAttributes"](ct.byref(attributes), pointer)
        if code:  # runtimes before 11.0 answer an error for memory they do not know
            self._lib.cudaGetLastError()
            return "pageable"
        return _MEMORY.get(attributes.type, "pageable")

    def memcpy(self, dst: int, src: int, size: int, kind: str) -> None:
        """Synchronous copy; `kind` is a key of MEMCPY_KIND."""
        self.call("cudaMemcpy", dst, src, size, MEMCPY_KIND[kind])

    def memcpy_async(self, dst: int, src: int, size: int, kind: str, stream: int) -> None:
        """One asynchronous copy; blocks when the stream's launch queue is full."""
        self.call("cudaMemcpyAsync", dst, src, size, MEMCPY_KIND[kind], stream)

    def memset_async(self, dst: int, value: int, size: int, stream: int) -> None:
        """Fills device memory with a byte."""
        self.call("cudaMemsetAsync", dst, value, size, stream)

    def memcpy_batch_async(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Many copies in one call (CUDA 12.8 on), sources read in stream order.

        Raises:
            UsageError: this runtime has no cudaMemcpyBatchAsync.
        """
        import numpy as np

        from kvprobe.native.library import SubmitOptions, SubmitResult, core

        batch = self.address("cudaMemcpyBatchAsync")
        if not batch:
            raise UsageError(f"cudaMemcpyBatchAsync is not in {self.path}: it needs CUDA 12.8")
        columns = [np.ascontiguousarray(column, dtype=np.uint64) for column in (dsts, srcs, sizes)]
        result = SubmitResult()
        options = SubmitOptions(stream=stream)
        code = core().kvp_submit_batch(
            ct.byref(options),
            batch,
            int(self.version < 13000),
            len(columns[0]),
            *(column.ctypes.data for column in columns),
            0,
            ct.byref(result),
        )
        if code:
            raise self.error("cudaMemcpyBatchAsync", code)

    # -- streams and events --------------------------------------------------------------------------------------

    def stream_create(self, priority: int = 0) -> int:
        """A new, distinct, non-blocking stream. Takes the context lock: waits while any submitter is blocked."""
        return self._handle("cudaStreamCreateWithPriority", NON_BLOCKING, priority)

    def stream_destroy(self, stream: int) -> None:
        """Destroys a stream; its work completes first."""
        self.call("cudaStreamDestroy", stream)

    def stream_query(self, stream: int) -> bool:
        """Whether all work of a stream is done."""
        return self._ready("cudaStreamQuery", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Waits for all work of a stream."""
        self.call("cudaStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Later work of `stream` waits for the event's newest record."""
        self.call("cudaStreamWaitEvent", stream, event, 0)

    def stream_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on a stream; such a capture may be spoilt already."""
        status = _i()
        self.call("cudaStreamIsCapturing", stream, ct.byref(status))
        return status.value != 0

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Calls that captures forbid are allowed here; they must not touch what is captured."""
        mode = _i(RELAXED)
        self.call("cudaThreadExchangeStreamCaptureMode", ct.byref(mode))
        try:
            yield
        finally:
            self.call("cudaThreadExchangeStreamCaptureMode", ct.byref(mode))

    def event_create(self, timing: bool = False) -> int:
        """A new event. Takes the context lock, as stream_create does."""
        return self._handle("cudaEventCreateWithFlags", 0 if timing else DISABLE_TIMING)

    def event_destroy(self, event: int) -> None:
        """Destroys an event."""
        self.call("cudaEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Marks this point of the stream; takes one slot of its launch queue."""
        self.call("cudaEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether the event's newest record is reached."""
        return self._ready("cudaEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Waits until the event's newest record is reached."""
        self.call("cudaEventSynchronize", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two reached timing events."""
        value = ct.c_float()
        self.call("cudaEventElapsedTime", ct.byref(value), start, end)
        return value.value

    def _ready(self, name: str, handle: int) -> bool:
        code = self._functions[name](handle)
        if code == 0:
            return True
        if code == NOT_READY:
            return False
        raise self.error(name, code)

    def launch_delay(self, stream: int, duration_ns: int) -> None:
        """Compute work of a given duration on a stream: a stand-in for a model's kernels.

        On a GPU it is torch's spin kernel at the device's clock rate, on the host runtime a timed operation.
        """
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.cuda._sleep(int(duration_ns * _clock_ghz()))


@functools.cache
def _clock_ghz() -> float:
    """Cycles per ns of torch's spin kernel, measured once: the SM clock differs from its nominal rate."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return float(20_000_000 / (start.elapsed_time(end) * 1e6))


def _loaded_cudart() -> str | None:
    """The libcudart that this process has mapped already (torch's, as a rule)."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = line.rsplit(" ", 1)[-1].strip()
            if "/libcudart.so" in path:
                return path
    return None


def gpu_present() -> bool:
    """Whether the kernel shows an NVIDIA device, decided without loading anything."""
    if any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return True
    return Path("/proc/driver/nvidia/version").exists()


@functools.cache
def _cuda_runtime() -> Runtime:
    path = _loaded_cudart()
    if path is None:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        try:
            path = load_nvidia_dynamic_lib("cudart").abs_path
        except (DynamicLibNotFoundError, RuntimeError, OSError):
            path = None
    if path is None:
        raise KvprobeError("no CUDA runtime found: install torch with CUDA or nvidia-cuda-runtime, or --device host")
    runtime = Runtime(path, "cuda")
    try:
        count = runtime.device_count()
    except CudaError as error:
        raise KvprobeError(f"no usable NVIDIA GPU: {error}; use --device host") from None
    if not count:
        raise KvprobeError("no NVIDIA GPU found; use --device host")
    return runtime


@functools.cache
def _host_runtime() -> Runtime:
    from kvprobe.cuda.hostruntime import HostRuntime

    return HostRuntime(HOSTRT.value() or str(path_of("libkvprobe_hostrt.so")))


def find_runtime(device: str = "auto") -> Runtime:
    """The CUDA runtime of this process: "cuda", "host", or "auto" (cuda where the kernel shows a GPU).

    On a GPU machine it is the libcudart that torch has loaded, else the one that cuda-pathfinder finds; import torch
    first if it will be used. Elsewhere it is the embedded host runtime.

    Raises:
        UsageError: `device` is none of the three.
        KvprobeError: "cuda" without a usable GPU.
        NativeError: a library does not load.
    """
    if device == "host":
        return _host_runtime()
    if device == "cuda":
        if not gpu_present():
            raise KvprobeError("no NVIDIA GPU on this machine; use --device host")
        return _cuda_runtime()
    if device != "auto":
        raise UsageError(f"unknown device {device!r}: use auto, host or cuda")
    return _cuda_runtime() if gpu_present() else _host_runtime()
