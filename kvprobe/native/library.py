"""Loads the native libraries through ctypes and declares the types of `kvp.h` and `kvp_engine.h`."""

from __future__ import annotations

import ctypes as ct
import functools
import struct
from pathlib import Path
from typing import Any

from kvprobe.environment import NATIVE_LIB
from kvprobe.errors import NativeError

LIB = Path(NATIVE_LIB.value() or Path(__file__).parent / "lib").resolve()  # as in build.py, which imports nothing
u8, u16, u32, u64, i32 = ct.c_uint8, ct.c_uint16, ct.c_uint32, ct.c_uint64, ct.c_int32

# enum kvp_detail: how much is recorded of a submission
DETAIL = {"off": 0, "totals": 1, "transfers": 2, "copies": 3}


class Record(ct.Structure):
    """`kvp_record`: one call, 64 bytes."""

    _fields_ = [
        ("start_ns", u64),
        ("dur_ns", u64),
        ("stream", u64),
        ("src", u64),
        ("dst", u64),
        ("bytes", u64),
        ("tid", u32),
        ("transfer", u32),
        ("count", u32),
        ("result", u16),
        ("call", u8),
        ("direction", u8),
    ]


class RingOptions(ct.Structure):
    """`kvp_ring_options`; zeros mean defaults."""

    _fields_ = [
        ("ring_capacity", u64),
        ("slow_capacity", u64),
        ("slot_count", u32),
        ("sections_max", u32),
        ("slow_ns", u64),
    ]


class SubmitOptions(ct.Structure):
    """`kvp_submit_options`."""

    _fields_ = [
        ("copy", ct.c_void_p),
        ("stream", ct.c_void_p),
        ("kind", i32),
        ("transfer", u32),
        ("direction", u8),
        ("detail", u8),
        ("pad", u8 * 2),
        ("stop_after", u32),
        ("blocked_ns", u64),
        ("stop_after_ns", u64),
        ("event_record", ct.c_void_p),
        ("events", ct.c_void_p),
        ("every", u32),
        ("events_max", u32),
        ("range_push", ct.c_void_p),
        ("range_pop", ct.c_void_p),
    ]


class SubmitResult(ct.Structure):
    """`kvp_submit_result`."""

    _fields_ = [
        ("submitted", u64),
        ("bytes", u64),
        ("start_ns", u64),
        ("end_ns", u64),
        ("fast", u64),
        ("fast_ns", u64),
        ("blocked", u64),
        ("blocked_sum_ns", u64),
        ("first_blocked", u64),
        ("first_blocked_ns", u64),
        ("events", u64),
        ("max_ns", u64),
        ("max_index", u64),
        ("cpu_ns", u64),
        ("preempted", u64),
        ("preempted_ns", u64),
        ("result", i32),
        ("pad", i32),
    ]


class CalibrateCalls(ct.Structure):
    """`kvp_calibrate_calls`: addresses of the runtime's functions."""

    _fields_ = [
        (name, ct.c_void_p)
        for name in ("launch_host_func", "event_record", "stream_wait_event", "stream_synchronize", "copy")
    ]


class Calibration(ct.Structure):
    """`kvp_calibration`."""

    _fields_ = [("accepted", u64), ("blocked", u64), ("median_ns", u64), ("p99_ns", u64), ("result", i32), ("pad", i32)]


class CudaCalls(ct.Structure):
    """`kvp_cuda_calls`: addresses of functions of the CUDA runtime and driver; None where there is none."""

    _fields_ = [
        ("memcpy_async", ct.c_void_p),
        ("memcpy_batch_async", ct.c_void_p),
        ("event_record", ct.c_void_p),
        ("event_query", ct.c_void_p),
        ("event_elapsed", ct.c_void_p),
        ("stream_wait_event", ct.c_void_p),
        ("get_last_error", ct.c_void_p),
        ("launch_kernel", ct.c_void_p),
        ("set_device", ct.c_void_p),
        ("runtime_version", u64),
        ("stream_query", ct.c_void_p),
        ("event_synchronize", ct.c_void_p),
        ("event_create", ct.c_void_p),
        ("event_destroy", ct.c_void_p),
        ("capture_mode", ct.c_void_p),
    ]


class CopyKernel(ct.Structure):
    """`kvp_copy_kernel`: a copy kernel that was compiled and loaded."""

    _fields_ = [("function", ct.c_void_p), ("threads", u32), ("shared_bytes", u32), ("max_ctas", u32), ("kind", u32)]


class CopyList(ct.Structure):
    """`kvp_copy_list`: pinned memory from which a kernel reads its copies."""

    _fields_ = [("host", ct.c_void_p), ("device", u64), ("capacity", u32), ("used", u32)]


class Copier(ct.Structure):
    """`kvp_copier`: what the methods of copying have to work with."""

    _fields_ = [
        ("cuda", CudaCalls),
        ("load_kernel", CopyKernel),
        ("store_kernel", CopyKernel),
        ("batch_places", ct.c_double),
        ("batch_max", u32),
        ("staging", u64),
        ("staging_bytes", u64),
        ("store_bytes_per_s", u64),
        ("coded_load_kernel", CopyKernel),
        ("coded_store_kernel", CopyKernel),
    ]


CHOOSE_SIZES, CHOOSE_ROWS, METHODS = 13, 16, 4


class MethodRow(ct.Structure):
    """`kvp_method_row`: what one way of moving copies takes, by size of a copy."""

    _fields_ = [
        ("method", u32),
        ("ctas", u32),
        ("slowdown", ct.c_float),
        ("product", ct.c_float),
        ("fixed_ns", ct.c_float * CHOOSE_SIZES),
        ("copy_ns", ct.c_float * CHOOSE_SIZES),
        ("submit_ns", ct.c_float * CHOOSE_SIZES),
    ]


class MethodTable(ct.Structure):
    """`kvp_method_table`: which method is done first, by direction."""

    _fields_ = [
        ("rows", u32 * 2),
        ("measured", u32),
        ("max_slowdown", ct.c_float),
        ("near", ct.c_float),
        ("paced_store", u64),
        ("row", MethodRow * CHOOSE_ROWS * 2),
    ]


class JobStatus(ct.Structure):
    """`kvp_job_status`: what a caller may read of a job."""

    _fields_ = [
        ("state", u32),
        ("error", i32),
        ("fault", u32),
        ("methods", u32),
        ("id", u64),
        ("stream", u64),
        ("copies", u64),
        ("submitted", u64),
        ("descriptors", u64),
        ("bytes", u64),
        ("calls", u64),
        ("submit_ns", u64),
        ("longest_ns", u64),
        ("blocked", u64),
        ("copy_start_ns", u64),
        ("copy_end_ns", u64),
        ("noticed_ns", u64),
        ("submitted_ns", u64),
        ("requested_ns", u64),
        ("built_ns", u64),
        ("tid", u64),
        ("cell", u64),
        ("cell_stored_ns", u64),
        ("cell_loaded_ns", u64),
        ("cell_lost", u32),
    ]


class JobRefused(ct.Structure):
    """`kvp_job_refused`: why a job was not made; where the newest one that was made lies."""

    _fields_ = [("bad", ct.c_int64), ("made", u64), ("why", i32)]


# `kvp_request`: the submitter, where a refusal goes, the stream; id, copies, GPU blocks, CPU blocks, ns; what. Packed,
# since ctypes takes longer to convert so many arguments than the call itself takes.
REQUEST = struct.Struct("@PPPQQQQQI0P")
# `kvp_addresses`: offsets, bases, ends, bounds; how many lists of offsets, jobs, bounds.
ADDRESSES = struct.Struct("@PPPPIII0P")


class Side(ct.Structure):
    """`kvp_side`: a pool as the submitter sees it."""

    _fields_ = [("bases", ct.c_void_p), ("blocks", u64), ("factor", u32), ("bounds", u32), ("bound", ct.c_void_p)]


class CellsConfig(ct.Structure):
    """`kvp_cells`: what makes the CPU's pool one of cells."""

    _fields_ = [
        ("notes", ct.c_void_p),
        ("stored_ns", ct.c_void_p),
        ("methods", ct.c_void_p),
        *(("type", u32), ("check", u32), ("look", u32), ("room", u32)),
        *(("step_bytes", u64), ("tails", u64), ("reserve", ct.c_void_p)),
    ]


class WirePlace(ct.Structure):
    """`kvp_wire_place`: where the cells of a pool lie."""

    _fields_ = [("room", u32), ("tails", ct.c_void_p)]


class SubmitterConfig(ct.Structure):
    """`kvp_submitter_config`."""

    _fields_ = [
        ("copier", Copier),
        ("methods", ct.c_void_p),
        ("gpu", Side),
        ("cpu", Side),
        ("copy_bytes", u64),
        ("layers", u32),
        ("pageable", u32),
        ("device", i32),
        ("depth", u32),
        ("detail", u32),
        ("streams", u32),
        ("pooled", ct.c_void_p * 2),
        ("shared", ct.c_void_p * 2),
        ("clock_stream", ct.c_void_p),
        ("clock_try_ns", u64),
        ("list", CopyList * 2),
        ("burst_ns", u64),
        ("bytes_per_s", u64 * 2),
        ("link_bytes_per_s", u64 * 2),
        ("stuck_ns", u64),
        ("ceiling", u32),
        ("every", u32),
        ("ranges", u32),
        ("actor_add", ct.c_void_p),
        ("actor_wake", ct.c_void_p),
        ("actor_remove", ct.c_void_p),
        ("run_until", ct.c_void_p),
        ("slots", ct.c_void_p),
        ("cells", CellsConfig),
    ]


class SubmitterStats(ct.Structure):
    """`kvp_submitter_stats`."""

    _fields_ = [
        ("pending", u64),
        ("pending_bytes", u64 * 2),
        ("in_flight_bytes", u64 * 2),
        ("in_flight_places", u64 * 2),
        ("shared_places", u64 * 2),
        ("stream", u64 * 2),
        ("launches", u64 * METHODS * 2),
        ("bytes", u64 * METHODS * 2),
        ("cta_bytes", u64 * 2),
        ("rate", u64 * 2),
        ("events_free", u64),
        ("events", u64),
        ("listed", u64 * 2),
        ("fences_used", u64),
        ("fences", u64),
        ("longest_call_ns", u64),
        ("steps", u64),
        ("broken", i32),
        ("fault", u32),
        ("methods_off", u32),
        ("method_error", i32),
        ("stuck_job", u64),
        ("wrong", ct.c_char_p),
        ("coding", u32),
        ("cell_share", ct.c_float),
        ("refused", u64),
    ]


class MemoryLeft(ct.Structure):
    """`kvp_memory`: what the machine or a cgroup has, and what is left of it."""

    _fields_ = [("total_bytes", u64), ("left_bytes", u64)]


class PinnedOptions(ct.Structure):
    """`kvp_pinned_options`: the runtime's functions, then how a pool pins and what it keeps."""

    _fields_ = [
        ("host_alloc", ct.c_void_p),
        ("free_host", ct.c_void_p),
        ("host_register", ct.c_void_p),
        ("host_unregister", ct.c_void_p),
        ("device_synchronize", ct.c_void_p),
        ("set_device", ct.c_void_p),
        ("get_last_error", ct.c_void_p),
        ("budget_bytes", u64),
        ("populate_bytes", u64),
        ("chunk_bytes", u64),
        ("threads", u32),
        ("node", i32),
        ("pages", u32),
        ("fork", u32),
        ("stop", ct.c_void_p),
        ("watch_ms", u32),
        ("device", i32),
        ("root", ct.c_char_p),
    ]


class PinnedCounts(ct.Structure):
    """`kvp_pinned_counts`."""

    _fields_ = [
        ("kept_bytes", u64),
        ("excess_bytes", u64),
        ("most_bytes", u64),
        ("reused", u64),
        ("reused_bytes", u64),
        ("kept", u64),
        ("given_up", u64),
        ("pressed", u64),
        ("out_bytes", u64),
        ("out", u64),
        ("made", u64),
        ("made_bytes", u64),
        ("made_ns", u64),
        ("populated", u64),
        ("populated_bytes", u64),
        ("populate_ns", u64),
        ("register_ns", u64),
        ("longest_register_ns", u64),
    ]


SHARED = (  # as kvp_layout counts them
    *(Record, RingOptions, SubmitOptions, SubmitResult, CalibrateCalls, Calibration, CudaCalls, CopyKernel, CopyList),
    *(Copier, MethodRow, MethodTable, JobStatus, JobRefused, REQUEST, ADDRESSES, Side, SubmitterConfig, SubmitterStats),
    *(MemoryLeft, PinnedOptions, PinnedCounts),
)


def path_of(name: str) -> Path:
    """Path of a native library, built at once in a source tree that has none yet.

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
        NativeError: absent, of another processor, or of other sources.
    """
    try:
        lib = ct.CDLL(str(path_of("libkvprobe.so")))
    except OSError as error:
        raise NativeError(f"native library does not load: {error}; run `python -m kvprobe.native.build`") from None
    _check_layout(lib)
    lib.kvp_now_ns.restype = u64
    lib.kvp_now_ns.argtypes = []
    lib.kvp_clock_name.restype = ct.c_char_p
    lib.kvp_ring_open.argtypes = [ct.c_char_p, ct.c_char_p, ct.POINTER(RingOptions)]
    lib.kvp_ring_open_shared.argtypes = [ct.c_char_p, ct.c_char_p]
    lib.kvp_ring_path.restype = ct.c_char_p
    lib.kvp_ring_write.argtypes = [ct.POINTER(Record), ct.c_int]
    lib.kvp_ring_write.restype = None
    lib.kvp_ring_close.restype = lib.kvp_ring_release.restype = None
    pointers: list[Any] = [ct.c_void_p, ct.c_void_p, ct.c_void_p, u64, ct.POINTER(SubmitResult)]
    lib.kvp_submit.argtypes = [ct.POINTER(SubmitOptions), ct.c_size_t, *pointers]
    lib.kvp_submit_batch.argtypes = [ct.POINTER(SubmitOptions), ct.c_void_p, ct.c_int, ct.c_size_t, *pointers]
    lib.kvp_calibrate.argtypes = [
        ct.POINTER(CalibrateCalls),
        ct.c_size_t,
        ct.c_void_p,
        ct.c_void_p,
        ct.c_void_p,
        ct.c_void_p,
        ct.c_size_t,
        ct.c_int,
        u64,
        u64,
        ct.POINTER(Calibration),
    ]
    _declare_submitter(lib)
    _declare_wire(lib)
    return lib


def _check_layout(lib: ct.CDLL) -> None:
    """A library that was built before the source tree changed would read and write past what Python gives it."""
    found = (u32 * len(SHARED))()
    expected = [one.size if isinstance(one, struct.Struct) else ct.sizeof(one) for one in SHARED]
    known = getattr(lib, "kvp_layout", None)
    if known is None or known(found, len(found)) != len(expected) or list(found) != expected:
        raise NativeError("native library of other sources than this Python code: run `python -m kvprobe.native.build`")


@functools.cache
def core_held() -> ct.PyDLL:
    """`libkvprobe.so` again, called with the GIL held: for calls shorter than giving it up and getting it back.

    Who gives it up may wait for `sys.getswitchinterval()`. On a virtual clock such a call may run other threads.

    Raises:
        NativeError: as `core`.
    """
    core()
    lib = ct.PyDLL(str(path_of("libkvprobe.so")))
    _declare_submitter(lib)
    _declare_wire(lib)
    return lib


def _declare_wire(lib: ct.CDLL) -> None:
    pointer = ct.c_void_p
    declared: dict[str, tuple[Any, list[Any] | None]] = {
        "kvp_wire_checksum": (u64, [pointer, u64]),
        "kvp_wire_histogram": (None, [u32, pointer, u64, pointer]),
        "kvp_wire_size": (u64, [u32, pointer, u64]),
        "kvp_wire_code": (u64, [u32, pointer, u64, pointer]),
        "kvp_wire_decode": (i32, [pointer, u64, pointer, u64]),
        "kvp_wire_put": (None, [u32, i32, pointer, u64, pointer, pointer, ct.POINTER(WirePlace)]),
        "kvp_wire_pack": (u64, [u32, pointer, u64, pointer]),
        "kvp_wire_unpack": (i32, [pointer, pointer, u64]),
        "kvp_wire_take": (i32, [pointer, pointer, pointer, u64, ct.POINTER(WirePlace)]),
        "kvp_reserve_open": (pointer, [pointer, u64, u64, u32]),
        "kvp_reserve_close": (None, [pointer]),
        "kvp_reserve_left": (u64, [pointer]),
        "kvp_reserve_claim": (i32, [pointer, u64]),
        "kvp_reserve_unclaim": (None, [pointer, u64]),
        "kvp_reserve_begin": (None, [pointer, u64, u32]),
        "kvp_reserve_end": (None, [pointer, u64, u32, i32]),
        "kvp_reserve_discard": (i32, [pointer, u64, u64]),
    }
    _declare(lib, declared)


def _declare(lib: ct.CDLL, declared: dict[str, tuple[Any, list[Any] | None]]) -> None:
    for name, (result, arguments) in declared.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments


def _declare_submitter(lib: ct.CDLL) -> None:
    pointer, status = ct.c_void_p, ct.c_void_p
    declared: dict[str, tuple[Any, list[Any] | None]] = {
        "kvp_submitter_open": (pointer, [ct.POINTER(SubmitterConfig), ct.POINTER(i32)]),
        "kvp_submitter_close": (None, [pointer, i32]),
        "kvp_submitter_destroy_events": (i32, [pointer]),
        "kvp_submitter_abandon": (None, [pointer]),
        "kvp_submitter_hold": (None, [pointer]),
        "kvp_submitter_free": (None, [pointer]),
        "kvp_submitter_stop": (None, [pointer]),
        "kvp_job_request": (status, None),  # REQUEST.pack(...), block ids, block ids, each as bytes or an array
        "kvp_job_request_addresses": (
            i32,
            [pointer, i32, u64, pointer, pointer, i32, u64, pointer],
        ),
        "kvp_job_unused": (None, [pointer, status]),
        "kvp_job_push": (i32, [pointer, status]),
        "kvp_job_inline": (
            i32,
            [pointer, status, ct.POINTER(SubmitOptions), u64, ct.POINTER(SubmitResult), ct.POINTER(u64)],
        ),
        "kvp_inline_free": (i32, [pointer, i32]),
        "kvp_job_release": (None, [status]),
        "kvp_job_wait": (i32, [pointer, status, u64]),
        "kvp_job_fence": (i32, [pointer, status, pointer]),
        "kvp_take_ended": (u64, [pointer, pointer, u64]),
        "kvp_wait_ended": (i32, [pointer]),
        "kvp_submitter_read": (None, [pointer, ct.POINTER(SubmitterStats)]),
        "kvp_copy_plan": (u32, [ct.POINTER(Copier), i32, pointer, u32, i32, u32, u64, u32, ct.POINTER(u32)]),
        "kvp_copy_submit": (
            i32,
            [ct.POINTER(Copier), i32, pointer, u32, i32, u32, pointer, pointer, ct.POINTER(u32), ct.POINTER(u32)],
        ),
        "kvp_choose_among": (i32, [ct.POINTER(MethodTable), u32, i32, u64, u32, ct.POINTER(u32)]),
        "kvp_choose_row": (i32, [ct.POINTER(MethodTable), u32, pointer, i32, i32, u64, u32]),
        "kvp_method_ns": (ct.c_double, [ct.POINTER(MethodRow), u64, u32]),
        "kvp_method_table_default": (None, [ct.POINTER(MethodTable), ct.POINTER(Copier)]),
        "kvp_choose": (i32, [ct.POINTER(MethodTable), i32, u64, u32, ct.POINTER(u32)]),
        "kvp_set_clock": (None, [pointer]),
        "kvp_memory_left": (MemoryLeft, [ct.c_char_p]),
        "kvp_memory_reserve": (u64, [ct.POINTER(MemoryLeft)]),
        "kvp_pinned_open": (pointer, [ct.POINTER(PinnedOptions)]),
        "kvp_pinned_take": (i32, [pointer, u64, u64, ct.POINTER(pointer), ct.POINTER(pointer)]),
        "kvp_pinned_give": (i32, [pointer, pointer]),
        "kvp_pinned_trim": (None, [pointer, u64]),
        "kvp_pinned_read": (None, [pointer, ct.POINTER(PinnedCounts)]),
        "kvp_pinned_reset": (None, [pointer]),
        "kvp_pinned_close": (None, [pointer]),
    }
    _declare(lib, declared)
    lib.kvp_now_ns.restype = u64
    lib.kvp_now_ns.argtypes = []
