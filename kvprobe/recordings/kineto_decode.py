"""Decodes Kineto events with msgspec, where the native scanner was not built: the same rows, three times slower.

A piece of text is cut between two events and decoded by itself, with only the wanted fields typed. A cut is a guess
that decoding proves: a piece that was cut elsewhere than between two events of the list is no valid JSON.

A copy of no duration has an infinite bandwidth, which Kineto and Python write as no JSON has it ("inf", "NaN",
"-Infinity"). In a field that nobody reads that is no reason to give up the event: it is decoded as null, which is no
number where one is wanted.

Times are microseconds with decimals; a float64 of microseconds since 1970 has steps of 0.25 µs, so those are read as
integers, digit by digit.
"""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvprobe.recordings.kineto_scan import META, ROW
from kvprobe.recordings.model import Array
from kvprobe.recordings.trace_text import END, MORE

__all__ = ["Decoder"]

_MOST_TRIES = 64
_EXACT_BELOW_US = float(1 << 42)  # below, a float64 of microseconds is within half a nanosecond
_BOUNDARY = re.compile(rb'\}\s*(,)\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|id)"\s*:)')
_END = re.compile(rb'\}\s*(\])\s*(?:,\s*"|\}|$)')
_LONG_DECIMAL = re.compile(rb'"ts"\s*:\s*\d{13,}\.')
_NO_NUMBER = re.compile(rb"[:,\[]\s*(-?(?:NaN|Infinity|nan|inf))(?=\s*[,\]}])")
_MARK = re.compile(rb'["\[\]{},]')
_NUMBER = re.compile(rb"-?\d")
_DECIMAL = re.compile(rb"(-?)(\d{1,16})(?:\.(\d+))?")


class _Args(msgspec.Struct, gc=False, frozen=True):
    correlation: int = -1
    stream: int = -1
    device: int = -1
    in_device: int = msgspec.field(default=-1, name="inDevice")  # of a copy between GPUs, which has no `device`
    bytes: int = 0
    cbid: int = -1
    graph_node: int = msgspec.field(default=-1, name="graph node id")
    graph: int = msgspec.field(default=-1, name="graph id")
    channel: int = -1
    copies: int = msgspec.field(default=1, name="copyCount")


class _Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    ts: float
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    pid: int | str = -1
    dur: float = 0.0
    args: _Args = _Args()


class _CompleteExact(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    ts: msgspec.Raw
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    pid: int | str = -1
    dur: float = 0.0
    args: _Args = _Args()


class _MetaArgs(msgspec.Struct, gc=False):
    name: str | None | int = None


class _Meta(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    args: _MetaArgs = msgspec.field(default_factory=_MetaArgs)


def _skipped(phase: str) -> type:
    return msgspec.defstruct(f"_Skip{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)


# Every other phase of the trace event format, read no further than its tag.
_SKIPPED = tuple(_skipped(phase) for phase in "sftiIBEbenNODPRcCSTpFvV(),=")


def _decoder(complete: type) -> msgspec.json.Decoder[Any]:
    union: Any = complete | _Meta
    for struct in _SKIPPED:
        union = union | struct
    return msgspec.json.Decoder(list[union])


class _Numbers(dict[Any, int]):
    """Process or thread id as the trace has it -> number: 12, "12" and "stream 12" are 12, other text its CRC."""

    def __missing__(self, key: Any) -> int:
        match = re.fullmatch(r"(?:stream )?(-?\d{1,18})", str(key))
        number = self[key] = int(match.group(1)) if match else zlib.crc32(str(key).encode("utf-8", "replace"))
        return number


class _Texts(dict[str, int]):
    """Text -> number, in order of appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[str] = []

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self.list)
        self.list.append(text)
        return number


class Decoder:
    """Does what the native `Scanner` does."""

    def __init__(self, categories: Sequence[str]) -> None:
        self._codes = {category: code for code, category in enumerate(categories, 1)}
        self._fast, self._exact = _decoder(_Complete), _decoder(_CompleteExact)
        self._use_exact = False
        self._numbers = _Numbers()
        self._names = _Texts()
        self._bad = 0
        self._skipped: dict[str, int] = {}

    def scan(self, text: bytes, take: Callable[[Array], None], last: bool) -> tuple[int, int]:
        """Hands rows of the events in `text` to `take`; returns how it ended and the bytes that are done with."""
        collecting = gc.isenabled()
        gc.disable()  # large lists of objects without cycles
        try:
            events, state, done = self._last(text) if last else self._next(text)
            if events:
                self._file(events, take)
            return state, done
        finally:
            if collecting:
                gc.enable()

    # ---- cutting ----

    def _next(self, text: bytes) -> tuple[list[Any], int, int]:
        """Events up to the newest boundary between two of them."""
        cuts = [m.start(1) for m in _BOUNDARY.finditer(text, max(0, len(text) - (1 << 16)))]
        if not cuts:
            cuts = [m.start(1) for m in _BOUNDARY.finditer(text)]
        for cut in reversed(cuts[-_MOST_TRIES:]):
            try:
                return self._decode(text[:cut]), MORE, cut + 1
            except msgspec.DecodeError:
                continue
        boundary, end = _walk(text)
        if end is not None:
            return self._certain(text[:end]), END, end + 1
        return (self._certain(text[:boundary]), MORE, boundary + 1) if boundary else ([], MORE, 0)

    def _last(self, text: bytes) -> tuple[list[Any], int, int]:
        """The last events, up to the bracket that closes their list, or as many as there are."""
        boundary = 0
        for match in _BOUNDARY.finditer(text):
            boundary = match.start(1)
        for tries, match in enumerate(_END.finditer(text, boundary)):
            if tries == _MOST_TRIES:
                break
            try:
                return self._decode(text[: match.start(1)]), END, match.end(1)
            except msgspec.DecodeError:
                continue
        boundary, end = _walk(text)
        if end is not None:
            return self._certain(text[:end]), END, end + 1
        return (self._certain(text[:boundary]), MORE, boundary + 1) if boundary else ([], MORE, 0)

    def _decode(self, text: bytes) -> list[Any]:
        """A list of events, with exact times where a float64 would lose nanoseconds."""
        try:
            return self._decode_json(text)
        except msgspec.DecodeError:
            if _NO_NUMBER.search(text) is None:
                raise
            return self._decode_json(_with_nulls(text))

    def _decode_json(self, text: bytes) -> list[Any]:
        whole = b"[" + text + b"]"
        try:
            if not self._use_exact:
                events = self._fast.decode(whole)
                if not (_is_late(events) and _LONG_DECIMAL.search(text)):
                    return events  # type: ignore[no-any-return]
                self._use_exact = True
            return self._timed(self._exact.decode(whole))
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error

    def _timed(self, events: list[Any]) -> list[Any]:
        """Those without the complete events whose time, which was taken as it stood, is no number."""
        out = [event for event in events if type(event) is not _CompleteExact or _NUMBER.match(event.ts)]
        self._bad += len(events) - len(out)
        return out

    def _certain(self, text: bytes) -> list[Any]:
        """Events of a text that is known to hold whole ones; those that do not fit are left out and counted."""
        text = text.decode("utf-8", "replace").encode()
        try:
            return self._decode(text)
        except msgspec.DecodeError:
            pass
        out: list[Any] = []
        depth, start = 0, 0
        for at, token in _tokens(text + b","):
            if token in b"{[":
                depth += 1
            elif token in b"}]":
                depth -= 1
            elif depth == 0:
                try:
                    out += self._decode(text[start:at])
                except msgspec.DecodeError:
                    self._bad += 1
                start = at + 1
        return out

    # ---- rows ----

    def _file(self, events: list[Any], take: Callable[[Array], None]) -> None:
        groups: dict[tuple[type, str], list[Any]] = {}
        metas: list[Any] = []
        for event in events:
            kind = type(event)
            if kind is _Complete or kind is _CompleteExact:
                key = kind, event.cat
                if key in groups:
                    groups[key].append(event)
                else:
                    groups[key] = [event]
            elif kind is _Meta and event.name in ("process_name", "thread_name") and isinstance(event.args.name, str):
                metas.append(event)
        for (kind, category), group in groups.items():
            code = self._codes.get(category)
            if code is not None:
                take(self._rows(kind, group, code))
            elif category in self._skipped or len(self._skipped) < 40:
                self._skipped[category] = self._skipped.get(category, 0) + len(group)
        if metas:
            rows = np.zeros(len(metas), dtype=ROW)
            rows["category"] = META
            rows["pid"] = [self._numbers[event.pid] for event in metas]
            rows["tid"] = [self._numbers[event.tid] for event in metas]
            rows["name"] = [self._names[event.name] for event in metas]
            rows["label"] = [self._names[event.args.name] for event in metas]
            take(rows)

    def _rows(self, kind: type, group: list[Any], code: int) -> Array:
        rows = np.zeros(len(group), dtype=ROW)
        args = [event.args for event in group]
        names, numbers = self._names, self._numbers
        if kind is _CompleteExact:
            rows["start_ns"] = _exact_ns([event.ts for event in group])
        else:
            rows["start_ns"] = _to_ns(np.array([event.ts for event in group], dtype=np.float64))
        rows["dur_ns"] = np.maximum(_to_ns(np.array([event.dur for event in group], dtype=np.float64)), 0)
        rows["name"] = [names[event.name] for event in group]
        for field in ("pid", "tid"):
            values = [getattr(event, field) for event in group]
            try:
                rows[field] = np.fromiter(values, dtype=np.int64, count=len(values))
            except (TypeError, ValueError, OverflowError):
                rows[field] = _integers([numbers[value] for value in values])
        rows["correlation"] = _integers([a.correlation for a in args])
        rows["bytes"] = _integers([a.bytes for a in args])
        rows["graph"] = _integers([a.graph_node if a.graph_node > 0 else a.graph if a.graph > 0 else -1 for a in args])
        rows["device"] = _integers([a.device if a.device >= 0 else a.in_device for a in args]).clip(-1, (1 << 31) - 1)
        for field in ("stream", "channel", "cbid"):
            rows[field] = np.clip(_integers([getattr(a, field) for a in args]), -1, (1 << 31) - 1)
        rows["count"] = np.clip(_integers([a.copies for a in args]), -1, (1 << 31) - 1)
        rows["category"] = code
        return rows

    def text(self, number: int) -> str:
        """The text of a name."""
        return self._names.list[int(number)]

    def indexes(self, numbers: Array, index: dict[str, int]) -> Array:
        """What `index` (a dict that makes its entries) has for each name, (len(numbers),) int32."""
        distinct, inverse = np.unique(numbers, return_inverse=True)
        return np.array([index[self.text(number)] for number in distinct.tolist()], dtype=np.int32)[inverse]

    def bad(self) -> int:
        """Events that were damaged."""
        return self._bad

    def skipped(self) -> dict[str, int]:
        """Number of events of each category that was not asked for."""
        return {category[:40] or "uncategorised": count for category, count in self._skipped.items()}


def _walk(text: bytes) -> tuple[int, int | None]:
    """Where the last event boundary is (0 none), and where the list ends, if it does, token by token."""
    depth, boundary = 0, 0
    for at, token in _tokens(text):
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth < 0:
                return boundary, at
        elif depth == 0:
            boundary = at
    return boundary, None


def _with_nulls(text: bytes) -> bytes:
    """The text with null in place of what Kineto and Python write where a float is no number; strings stay."""
    out: list[bytes] = []
    done = at = 0  # copied up to; known to be outside strings up to
    for match in _NO_NUMBER.finditer(text):
        begin, end = match.span(1)
        while (quote := text.find(b'"', at, begin)) >= 0:
            at = _string_end(text, quote + 1)
            if not at:
                return b"".join((*out, text[done:]))
        if at <= begin:
            out += (text[done:begin], b"null")
            done = at = end
    return b"".join((*out, text[done:]))


def _string_end(text: bytes, at: int) -> int:
    """Past the quote that closes the string from `at` on; 0 where there is none."""
    while (quote := text.find(b'"', at)) >= 0:
        inside, at = text[at:quote], quote + 1
        if (len(inside) - len(inside.rstrip(b"\\"))) % 2 == 0:  # the quote is not escaped
            return at
    return 0


def _tokens(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Position and byte of each bracket and comma outside strings.

    No regular expression for whole strings: its stack would grow with the length of one.
    """
    at = 0
    while (match := _MARK.search(text, at)) is not None:
        at = match.end()
        if match.group() != b'"':
            yield match.start(), match.group()
            continue
        at = _string_end(text, at)
        if not at:
            return


def _is_late(events: list[Any]) -> bool:
    """True where times are so large that a float64 of microseconds cannot hold nanoseconds."""
    return any(type(event) is _Complete and abs(event.ts) >= _EXACT_BELOW_US for event in events)


def _integers(values: list[Any]) -> Array:
    """Ids as (len(values),) int64; what does not fit is -1."""
    try:
        return np.array(values, dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        return np.array([v if isinstance(v, int) and -(1 << 63) <= v < 1 << 63 else -1 for v in values], dtype=np.int64)


def _to_ns(us: Array) -> Array:
    """Microseconds (float64) -> integer nanoseconds; what no clock shows becomes 0."""
    us = np.where(np.abs(us) < 9.2e15, us, 0.0)
    whole = np.floor(us)
    # In two parts: whole microseconds since 1970 are exact in a float64, their nanoseconds are not.
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000.0).astype(np.int64))


def _exact_ns(raws: list[msgspec.Raw]) -> Array:
    """Microseconds written in decimal -> integer nanoseconds, (len(raws),) int64, digit by digit."""
    text = b"\n".join(raws) + b"\n"
    width = len(text) // len(raws)
    if len(text) == width * len(raws) and 6 < width <= 21:
        # All of one length, as a recorder writes them: a matrix of digits, with the point fourth from the right.
        digits = np.frombuffer(text, dtype=np.uint8).reshape(len(raws), width)
        if (digits[:, width - 5] == 46).all() and (digits[:, width - 1] == 10).all():
            ns = np.zeros(len(raws), dtype=np.int64)
            for column in (*range(width - 5), *range(width - 4, width - 1)):
                digit = digits[:, column] - np.uint8(48)
                if (digit > 9).any():
                    break
                ns *= 10
                ns += digit
            else:
                if (ns >= 0).all():  # nineteen digits can exceed an int64
                    return ns
    return np.array([_decimal_ns(bytes(raw)) for raw in raws], dtype=np.int64)


def _decimal_ns(text: bytes) -> int:
    """One decimal number of microseconds in nanoseconds; 0 where it is none or out of range."""
    match = _DECIMAL.fullmatch(text)
    if match is None:
        try:
            value = float(text)
        except ValueError:
            return 0
        return round(value * 1000) if abs(value) < 9e15 else 0
    sign, whole, decimals = match.groups()
    decimals = (decimals or b"").ljust(4, b"0")
    ns = int(whole) * 1000 + int(decimals[:3]) + (decimals[3:4] >= b"5")
    if ns >= 1 << 63:
        return 0
    return -ns if sign else ns
