"""Copies submitted by any method, from Python: for warming up, calibrating and testing; the engine submits natively."""

from __future__ import annotations

import ctypes as ct
from typing import Any

import numpy as np

from kvprobe.cuda.memory import Buffer
from kvprobe.cuda.runtime import Runtime
from kvprobe.errors import CudaError, UsageError
from kvprobe.native.library import Copier, CopyList, core

__all__ = ["COPY", "DIRECTIONS", "METHOD_NAMES", "PinnedList", "columns", "copy_rate", "submit_copies"]

COPY = np.dtype([("dst", "u8"), ("src", "u8"), ("bytes", "u8")])  # kvp_copy
METHOD_NAMES = ("loop", "batch", "kernel", "staged")  # enum kvp_method
DIRECTIONS = {"h2d": 1, "d2h": 2}  # enum kvp_direction

_CALLS = {
    "loop": "cudaMemcpyAsync",
    "batch": "cudaMemcpyBatchAsync",
    "kernel": "cuLaunchKernel",
    "staged": "staged copy",
}


class PinnedList:
    """Pinned memory for the copies of one launch; it must not change until that launch has completed."""

    def __init__(self, runtime: Runtime, capacity: int) -> None:
        """Allocates memory for `capacity` copies."""
        self._buffer = Buffer(runtime, max(capacity, 1) * COPY.itemsize, "pinned")
        self.native = CopyList(self._buffer.address, self._buffer.address, capacity)

    def close(self) -> None:
        """Frees the memory."""
        self._buffer.close()


def columns(dst: Any, src: Any, size: Any) -> np.ndarray[Any, Any]:
    """Copies of dtype COPY from addresses and sizes in bytes (arrays or numbers)."""
    made = np.zeros(np.broadcast(dst, src, size).shape, COPY)
    made["dst"], made["src"], made["bytes"] = dst, src, size
    return made


def copy_rate(runtime: Runtime, dst: int, src: int, size_bytes: int, kind: str) -> float:
    """Bytes per second of one copy, best of three: the first one wakes the link. `kind` as for `memcpy_async`."""
    stream, start, end = runtime.stream_create(), runtime.event_create(True), runtime.event_create(True)
    best = 0.0
    for _ in range(3):
        runtime.event_record(start, stream)
        runtime.memcpy_async(dst, src, size_bytes, kind, stream)
        runtime.event_record(end, stream)
        runtime.event_synchronize(end)
        best = max(best, size_bytes / (runtime.event_elapsed_ms(start, end) * 1e-3))
    for event in (start, end):
        runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    return best


def submit_copies(
    runtime: Runtime,
    copier: Copier,
    method: str,
    direction: str,
    copies: np.ndarray[Any, Any],
    stream: int,
    *,
    ctas: int = 1,
    pinned: PinnedList | None = None,
) -> int:
    """Submits all copies to a stream and returns how many calls that took.

    Args:
        runtime: whose functions `copier` holds.
        copier: what the methods have to work with.
        method: one of METHOD_NAMES.
        direction: "h2d" or "d2h".
        copies: array of dtype COPY.
        stream: where to.
        ctas: of a kernel's launch.
        pinned: the list that a kernel reads; free when the stream has completed.

    Raises:
        CudaError: a call failed.
        UsageError: the method does not exist on this copier, or the list is too small.
    """
    lib, calls, at = core(), 0, 0
    copies = np.ascontiguousarray(copies, COPY)
    if method == "loop":
        for copy in copies:
            runtime.memcpy_async(int(copy["dst"]), int(copy["src"]), int(copy["bytes"]), direction, stream)
        return len(copies)
    number, slots = METHOD_NAMES.index(method), ct.c_uint32()
    submitted, made = ct.c_uint32(), ct.c_uint32()
    native = ct.byref(pinned.native) if pinned else None
    capacity = pinned.native.capacity if pinned else 0
    while at < len(copies):
        rest = copies[at:]
        taken = lib.kvp_copy_plan(
            ct.byref(copier),
            number,
            rest.ctypes.data,
            len(rest),
            DIRECTIONS[direction],
            1 << 30,
            1 << 62,
            capacity,
            ct.byref(slots),
        )
        if not taken or (at and method != "batch"):  # a list belongs to one launch
            raise UsageError(f"{method} cannot take these copies here ({len(copies):,}, {direction})")
        code = lib.kvp_copy_submit(
            ct.byref(copier),
            number,
            rest.ctypes.data,
            taken,
            DIRECTIONS[direction],
            ctas,
            stream,
            native,
            ct.byref(submitted),
            ct.byref(made),
        )
        calls += made.value
        if code:
            raise CudaError(_CALLS[method], code, runtime.error(method, code).name)
        at += taken
    return calls
