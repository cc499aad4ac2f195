"""Loads the native libraries through ctypes and declares the types of `kvp.h` and `kvp_engine.h`."""

from __future__ import annotations

import ctypes as ct
import functools
from pathlib import Path
from typing import Any

from kvprobe.errors import NativeError

LIB = Path(__file__).resolve().parent / "lib"
u8, u16, u32, u64, i32 = ct.c_uint8, ct.c_uint16, ct.c_uint32, ct.c_uint64, ct.c_int32

# enum kvp_detail: how much is recorded of a submission
DETAIL = {"off": 0, "totals": 1, "transfers": 2, "copies": 3}


class Record(ct.Structure):
    """`kvp_record`: one call, 64 bytes."""

    _fields_ = [
        ("start_ns", u64), ("dur_ns", u64), ("stream", u64), ("src", u64), ("dst", u64), ("bytes", u64),
        ("tid", u32), ("transfer", u32), ("count", u32), ("result", u16), ("call", u8), ("direction", u8),
    ]  # fmt: skip


class RingOptions(ct.Structure):
    """`kvp_ring_options`; zeros mean defaults."""

    _fields_ = [("ring_capacity", u64), ("slow_capacity", u64), ("slot_count", u32), ("lanes_max", u32),
                ("slow_ns", u64)]  # fmt: skip


class SubmitOptions(ct.Structure):
    """`kvp_submit_options`."""

    _fields_ = [
        ("copy", ct.c_void_p), ("stream", ct.c_void_p), ("kind", i32), ("transfer", u32), ("direction", u8),
        ("detail", u8), ("pad", u8 * 2), ("stop_after", u32), ("blocked_ns", u64), ("stop_after_ns", u64),
        ("event_record", ct.c_void_p), ("events", ct.c_void_p), ("every", u32), ("events_max", u32),
        ("range_push", ct.c_void_p), ("range_pop", ct.c_void_p),
    ]  # fmt: skip


class SubmitResult(ct.Structure):
    """`kvp_submit_result`."""

    _fields_ = [
        ("submitted", u64), ("bytes", u64), ("start_ns", u64), ("end_ns", u64), ("fast", u64), ("fast_ns", u64),
        ("blocked", u64), ("blocked_sum_ns", u64), ("first_blocked", u64), ("first_blocked_ns", u64), ("events", u64),
        ("max_ns", u64), ("max_index", u64), ("cpu_ns", u64), ("preempted", u64), ("preempted_ns", u64),
        ("result", i32), ("pad", i32),
    ]  # fmt: skip


class CalibrateCalls(ct.Structure):
    """`kvp_calibrate_calls`: addresses of the runtime's functions."""

    _fields_ = [(name, ct.c_void_p) for name in
                ("launch_host_func", "event_record", "stream_wait_event", "stream_synchronize", "copy")]  # fmt: skip


class Calibration(ct.Structure):
    """`kvp_calibration`."""

    _fields_ = [("accepted", u64), ("blocked", u64), ("median_ns", u64), ("p99_ns", u64), ("result", i32),
                ("pad", i32)]  # fmt: skip


def path_of(name: str) -> Path:
    """Path of a native library, built on the spot in a source tree that has none yet.

    Raises:
        NativeError: it is absent and cannot be built; the text says what to do.
    """
    path = LIB / name
    if not path.exists():
        from kvprobe.native import build

        try:
            build.build()
        except (build.BuildError, OSError) as error:
            raise NativeError(f"native library {name} is missing and could not be built: {error}") from None
    if not path.exists():
        raise NativeError(f"native library {name} is missing: run `python -m kvprobe.native.build`")
    return path


@functools.cache
def core() -> ct.CDLL:
    """`libkvprobe.so`, typed.

    Raises:
        NativeError: absent, or of another processor.
    """
    try:
        lib = ct.CDLL(str(path_of("libkvprobe.so")))
    except OSError as error:
        raise NativeError(f"native library does not load: {error}; run `python -m kvprobe.native.build`") from None
    lib.kvp_now_ns.restype = u64
    lib.kvp_now_ns.argtypes = []
    lib.kvp_clock_name.restype = ct.c_char_p
    lib.kvp_ring_open.argtypes = [ct.c_char_p, ct.c_char_p, ct.POINTER(RingOptions)]
    lib.kvp_ring_path.restype = ct.c_char_p
    lib.kvp_ring_write.argtypes = [ct.POINTER(Record), ct.c_int]
    lib.kvp_ring_write.restype = None
    lib.kvp_ring_close.restype = None
    pointers: list[Any] = [ct.c_void_p, ct.c_void_p, ct.c_void_p, u64, ct.POINTER(SubmitResult)]
    lib.kvp_submit.argtypes = [ct.POINTER(SubmitOptions), ct.c_size_t, *pointers]
    lib.kvp_submit_batch.argtypes = [ct.POINTER(SubmitOptions), ct.c_void_p, ct.c_int, ct.c_size_t, *pointers]
    lib.kvp_record_event.argtypes = [ct.POINTER(SubmitOptions), ct.c_void_p, ct.POINTER(SubmitResult)]
    lib.kvp_calibrate.argtypes = [
        ct.POINTER(CalibrateCalls), ct.c_size_t, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_size_t,
        ct.c_int, u64, u64, ct.POINTER(Calibration),
    ]  # fmt: skip
    return lib
