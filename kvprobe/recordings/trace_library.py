"""The native library that reads traces, through ctypes; optional: without it each reader does its work in Python.

It is loaded from its file and shares nothing with the other native libraries, so reading a recording never needs them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

__all__ = ["BROKEN", "END", "FULL", "MEMORY", "MORE", "ROW_BYTES", "native_library"]

MORE, END, FULL, BROKEN, MEMORY = range(5)  # how a scan ended
ROW_BYTES = 88  # kvt_row of native/trace/kineto.h
_LIBRARY = Path(__file__).parents[1] / "native" / "lib" / "libkvprobe_trace.so"


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library; None where it was not built, or is of another layout."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.kvt_row_bytes.restype = size
        if library.kvt_row_bytes() != ROW_BYTES:
            return None
        library.kvt_open.restype = pointer
        library.kvt_close.argtypes = [pointer]
        library.kvt_want.argtypes = [pointer, ctypes.c_char_p, ctypes.c_uint8]
        library.kvt_scan.argtypes = [pointer, pointer, size, pointer, size, ctypes.POINTER(size), ctypes.POINTER(size)]
        library.kvt_bad.argtypes, library.kvt_bad.restype = [pointer], ctypes.c_uint64
        library.kvt_names.argtypes, library.kvt_names.restype = [pointer], ctypes.c_uint32
        library.kvt_categories.argtypes, library.kvt_categories.restype = [pointer], ctypes.c_uint32
        length = ctypes.POINTER(ctypes.c_uint32)
        library.kvt_name.argtypes, library.kvt_name.restype = [pointer, ctypes.c_uint32, length], pointer
        library.kvt_category.argtypes = [pointer, ctypes.c_uint32, length, ctypes.POINTER(ctypes.c_uint64)]
        library.kvt_category.restype = pointer
        library.kvt_table_open.argtypes = [ctypes.c_int, ctypes.c_uint32, pointer, pointer, ctypes.c_int, ctypes.c_int]
        library.kvt_table_open.restype = pointer
        library.kvt_table_close.argtypes = [pointer]
        library.kvt_table_read.argtypes = [pointer, pointer, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)]
    except (OSError, AttributeError):
        return None
    return library
