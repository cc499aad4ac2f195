"""The native scanner of Kineto events as rows of numbers; optional: without it the reader decodes with msgspec."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import Array
from kvprobe.recordings.trace_library import ROW_BYTES, native_library, text_at
from kvprobe.recordings.trace_text import FULL, MEMORY

__all__ = ["META", "ROW", "Scanner", "scanner"]

META = 255
_ROOM = 8192

# kvt_row of native/trace/kineto.h
_LONG = ("start_ns", "dur_ns", "pid", "tid", "correlation", "bytes", "graph")
_SHORT = ("stream", "device", "channel", "count", "cbid", "name", "label")
ROW = np.dtype([*((n, "i8") for n in _LONG), *((n, "i4") for n in _SHORT), ("category", "u1"), ("pad", "V3")])
assert ROW.itemsize == ROW_BYTES


def scanner(categories: Sequence[str]) -> Scanner | None:
    """A scanner that gives the events of these categories (code: position + 1); None where there is no library."""
    library = native_library()
    return Scanner(library, categories) if library is not None else None


class Scanner:
    """Scans one trace, piece by piece; its names live as long as it."""

    def __init__(self, library: ctypes.CDLL, categories: Sequence[str]) -> None:
        self._library = library
        self._state = library.kvt_open()
        if not self._state:
            raise MemoryError("no memory for the scanner")
        self._wanted = len(categories)
        for code, category in enumerate(categories, 1):
            if library.kvt_want(self._state, category.encode(), code):
                raise MemoryError("no memory for the scanner")
        self._rows = np.zeros(_ROOM, dtype=ROW)
        self._texts: list[str] = []
        self._maps: dict[int, Array] = {}

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._library.kvt_close(self._state)
            self._state = None

    def scan(self, text: bytes, take: Callable[[Array], None], last: bool) -> tuple[int, int]:
        """Hands rows of the events in `text` to `take`; returns how it ended and the bytes that are done with.

        The rows are valid until `take` returns. Whether the text is the `last` makes no difference here.
        """
        address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0
        done = 0
        written, consumed = ctypes.c_size_t(), ctypes.c_size_t()
        while True:
            state = self._library.kvt_scan(
                self._state,
                address + done,
                len(text) - done,
                self._rows.ctypes.data,
                _ROOM,
                ctypes.byref(written),
                ctypes.byref(consumed),
            )
            done += consumed.value
            if state == MEMORY:
                raise MemoryError("no memory for the names of a trace")
            if written.value:
                take(self._rows[: written.value])
            if state != FULL:
                return state, done

    def text(self, number: int) -> str:
        """The text of a name."""
        number = int(number)
        while len(self._texts) <= number:
            length = ctypes.c_uint32()
            at = self._library.kvt_name(self._state, len(self._texts), ctypes.byref(length))
            self._texts.append(text_at(at, length.value))
        return self._texts[number]

    def indexes(self, numbers: Array, index: Mapping[str, int]) -> Array:
        """What `index` (a dict that makes its entries) has for each name, (len(numbers),) int32."""
        known = self._maps.get(id(index))
        count = self._library.kvt_names(self._state)
        if known is None or len(known) < count:
            grown = np.full(max(count * 2, 1024), -1, dtype=np.int32)
            if known is not None:
                grown[: len(known)] = known
            known = self._maps[id(index)] = grown
        out = known[numbers]
        if (out < 0).any():
            for number in distinct(numbers[out < 0]).tolist():
                known[number] = index[self.text(number)]
            out = known[numbers]
        return out

    def bad(self) -> int:
        """Events that were damaged."""
        return int(self._library.kvt_bad(self._state))

    def skipped(self) -> dict[str, int]:
        """Number of events of each category that was not asked for."""
        out: dict[str, int] = {}
        length, count = ctypes.c_uint32(), ctypes.c_uint64()
        for slot in (*range(self._wanted, self._library.kvt_categories(self._state)), 63):
            at = self._library.kvt_category(self._state, slot, ctypes.byref(length), ctypes.byref(count))
            if at and count.value:
                out[text_at(at, length.value)[:40] or "uncategorised"] = count.value
        return out
