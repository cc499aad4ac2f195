"""The native library that reads traces, through ctypes; optional: without it each reader does its work in Python.

It is loaded from its file and shares nothing with the other native libraries, so reading a recording never needs them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvprobe.environment import NATIVE_LIB

__all__ = ["ROW_BYTES", "TraceQueue", "native_library", "text_at"]

ROW_BYTES = 88  # kvt_row of native/trace/kineto.h
_LIBRARY = Path(NATIVE_LIB.value() or Path(__file__).parents[1] / "native" / "lib") / "libkvprobe_trace.so"
_u8, _u32, _i32, _i64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_int32, ctypes.c_int64


class TraceQueue(ctypes.Structure):
    """`kvt_queue` of native/trace/queues.c: what was measured of one stream."""

    _fields_ = [
        ("row", _u32),
        ("device", _i32),
        ("handle", _i32),
        ("calls", _u32),
        ("before", _u32),
        ("after", _u32),
        ("graphs", _u32),
        ("deepest", _i32),
        ("shallowest", _i32),
        ("ceiling", _i32),
        ("slow", _u32),
        ("at_pin", _u32),
        ("lost_ns", _i64),
        ("aligned", ctypes.c_double),
        ("chance", ctypes.c_double),
        ("drained", ctypes.c_double),
        ("in_graphs", ctypes.c_double),
    ]


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library; None where it was not built, or is of another layout."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.kvt_row_bytes.restype = library.kvt_queue_bytes.restype = size
        if library.kvt_row_bytes() != ROW_BYTES or library.kvt_queue_bytes() != ctypes.sizeof(TraceQueue):
            return None
        length = ctypes.POINTER(_u32)
        for name, result, arguments in (
            ("kvt_open", pointer, []),
            ("kvt_close", None, [pointer]),
            ("kvt_want", ctypes.c_int, [pointer, ctypes.c_char_p, _u8]),
            (
                "kvt_scan",
                ctypes.c_int,
                [pointer, pointer, size, pointer, size, ctypes.POINTER(size), ctypes.POINTER(size)],
            ),
            ("kvt_bad", ctypes.c_uint64, [pointer]),
            ("kvt_names", _u32, [pointer]),
            ("kvt_name", pointer, [pointer, _u32, length]),
            ("kvt_categories", _u32, [pointer]),
            ("kvt_category", pointer, [pointer, _u32, length, ctypes.POINTER(ctypes.c_uint64)]),
            ("kvt_queues_open", pointer, []),
            ("kvt_queues_close", None, [pointer]),
            ("kvt_queues_want", ctypes.c_int, [pointer, ctypes.c_char_p, _u8, _u8]),
            ("kvt_queues_scan", ctypes.c_int, [pointer, ctypes.c_char_p, size, ctypes.POINTER(size)]),
            ("kvt_queues_words", _u32, [pointer]),
            ("kvt_queues_word", pointer, [pointer, _u32, length, length, ctypes.POINTER(_i32)]),
            ("kvt_queues_measure", ctypes.c_int, [pointer, ctypes.c_char_p, pointer, _u32]),
            ("kvt_queues_count", _u32, [pointer]),
            ("kvt_queues_all", ctypes.POINTER(TraceQueue), [pointer]),
            ("kvt_table_open", pointer, [ctypes.c_int, _u32, pointer, pointer, ctypes.c_int, ctypes.c_int]),
            ("kvt_table_close", None, [pointer]),
            ("kvt_table_read", ctypes.c_int, [pointer, pointer, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


def text_at(address: int, length: int) -> str:
    """The text of a JSON string that the library holds as it stands in the trace."""
    text = ctypes.string_at(address, length).decode("utf-8", "replace")
    if "\\" in text:
        import json

        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:
            pass
    return text
