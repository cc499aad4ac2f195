"""Measures the launch queues of a Kineto trace natively: neither columns of its events nor numpy are needed for it."""

from __future__ import annotations

import ctypes
from array import array

from kvprobe.errors import RecordingError
from kvprobe.recordings import vocabulary as words
from kvprobe.recordings.kinds import SUBMITTING, CallKind, Engine, Label, Memory
from kvprobe.recordings.trace_library import TraceQueue, native_library, text_at
from kvprobe.recordings.trace_text import MEMORY, MORE, UNFIT, TraceText

__all__ = ["measure"]

# queues.c
_CALL, _EXECUTION, _COPY, _LABEL = range(1, 5)
_SUBMITS, _GRAPH, _PAGEABLE = range(1, 4)


def measure(trace: TraceText) -> list[TraceQueue] | None:
    """What a verdict on each launch queue of a trace rests on, in order of device and handle.

    Args:
        trace: of a Kineto trace, its first event found.

    Returns:
        None where only the whole reader can tell: no native library, no executions, labels of full queues, a document
        that is damaged or cut off, numbers beyond what a recorder writes.

    Raises:
        RecordingError: an event that is longer than any recorder writes, or an unusual number in one.
        OSError: the file cannot be read.
    """
    library = native_library()
    if library is None:
        return None
    scan = _Scan(library)
    trace.scan(scan.read)
    return None if trace.cut_off else scan.measure()


class _Scan:
    """One trace's scan and its measures."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.state = library.kvt_queues_open()
        wanted = dict.fromkeys(words.KINETO_CALLS, _CALL)
        wanted |= {code: _COPY if e == Engine.COPY else _EXECUTION for code, e in words.KINETO_EXECUTIONS.items()}
        wanted |= dict.fromkeys(words.KINETO_LABELS, _LABEL)
        for code, category in enumerate(words.KINETO_CODES, 1):
            role = wanted.get(category)
            if not self.state or (role and library.kvt_queues_want(self.state, category.encode(), code, role)):
                raise MemoryError("no memory for the scanner")

    def __del__(self) -> None:
        self.library.kvt_queues_close(self.state)

    def read(self, text: bytes, last: bool) -> tuple[int, int]:
        """Takes events from `text` on; how that ended and the bytes that are done with."""
        done = ctypes.c_size_t()
        state = self.library.kvt_queues_scan(self.state, text, len(text), ctypes.byref(done))
        if state == MEMORY:
            raise MemoryError("no memory for the events of a trace")
        if state == UNFIT:
            raise RecordingError("numbers beyond what a recorder writes")
        return state, done.value

    def measure(self) -> list[TraceQueue] | None:
        """All queues that were submitted to; None where only the whole reader can tell."""
        library, state = self.library, self.state
        count = library.kvt_queues_words(state)
        meanings, groups = bytearray(count), array("I", bytes(4 * count))
        names: dict[str, int] = {}
        length, role, cbid = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_int32()
        for word in range(count):
            at = library.kvt_queues_word(state, word, ctypes.byref(length), ctypes.byref(role), ctypes.byref(cbid))
            text = text_at(at, length.value)
            if role.value == _CALL:
                name = words.base_name(text)[: words.Names.LONGEST]
                name = words.kineto_call(cbid.value) if name == "INVALID" else name
                kind = words.call_kind(name)
                meanings[word] = _GRAPH if kind == CallKind.GRAPH else _SUBMITS if kind in SUBMITTING else 0
                groups[word] = names.setdefault(name, word)
            elif role.value == _COPY:
                meanings[word] = _PAGEABLE if words.kineto_copy(text)[1] == Memory.PAGEABLE else 0
            elif words.label_of(text) == Label.COMMAND_BUFFER_FULL:
                return None
        done = library.kvt_queues_measure(state, bytes(meanings), groups.buffer_info()[0], count)
        if done == MEMORY:
            raise MemoryError("no memory for the queues of a trace")
        if done != MORE:
            return None
        found = library.kvt_queues_all(state)
        return [TraceQueue.from_buffer_copy(found[i]) for i in range(library.kvt_queues_count(state))]
