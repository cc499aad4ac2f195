"""What is kept of many recordings: sums, maxima, histograms, the longest blocked calls, each rank's collectives.

Its size does not grow with a recording, and merging is associative and commutative: whoever finishes first is merged
first, and the bytes are the same. Each summary has an identity, and a merged one those of its parts, so that none is
counted twice.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from kvprobe.launchqueue.judge import STATES
from kvprobe.recordings.buckets import BUCKETS, bucket_floor_ns
from kvprobe.recordings.model import Array

__all__ = [
    "BlockedCall",
    "Collectives",
    "GpuTime",
    "QueueSummary",
    "Rank",
    "Stat",
    "Summary",
    "percentile_ns",
    "worst_of",
]

FORMAT, VERSION = "kvprobe-summary", 1
TOP = 100
BINS = 256  # of a rank's collectives
_VERDICTS = ("healthy", "cannot tell", "saturated")
_EXAMINED = ("healthy", "undecided", "found")
IN_FILES = dict(zip(STATES, _VERDICTS, strict=True))  # what a judge concludes, in this version's words


def percentile_ns(histogram: Sequence[int] | Array, share: float) -> int:
    """The duration below which this share (0 to 1) of a histogram lies: the middle of its bucket; 0 if empty."""
    counts = np.asarray(histogram, dtype=np.float64)
    total = float(counts.sum())
    if not total:
        return 0
    index = int(np.searchsorted(np.cumsum(counts), share * total))
    index = min(index, BUCKETS - 1)
    return int(bucket_floor_ns(index) + bucket_floor_ns(index + 1)) // 2


@dataclass
class Stat:
    """Sums over calls or executions of one sort; `histogram` counts durations by bucket."""

    count: int = 0
    copies: int = 0
    bytes: int = 0
    dur_ns: int = 0
    max_ns: int = 0
    errors: int = 0
    blocked: int = 0
    blocked_ns: int = 0
    histogram: tuple[int, ...] = (0,) * BUCKETS

    def merge(self, other: Stat) -> Stat:
        """Both together."""
        return Stat(
            self.count + other.count,
            self.copies + other.copies,
            self.bytes + other.bytes,
            self.dur_ns + other.dur_ns,
            max(self.max_ns, other.max_ns),
            self.errors + other.errors,
            self.blocked + other.blocked,
            self.blocked_ns + other.blocked_ns,
            tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)),
        )


@dataclass
class QueueSummary:
    """One stream of one rank: the deepest it was, its ceiling (-1 none found), what it cost, and the worst verdict."""

    submissions: int = 0
    deepest: int = 0
    ceiling: int = -1
    blocked: int = 0
    blocked_ns: int = 0
    labelled_ns: int = 0
    verdict: str = "healthy"

    def merge(self, other: QueueSummary) -> QueueSummary:
        """Both together."""
        return QueueSummary(
            self.submissions + other.submissions,
            max(self.deepest, other.deepest),
            max(self.ceiling, other.ceiling),
            self.blocked + other.blocked,
            self.blocked_ns + other.blocked_ns,
            self.labelled_ns + other.labelled_ns,
            _worst(self.verdict, other.verdict),
        )


@dataclass
class Collectives:
    """Device time that one process spent in collectives, by their order: whoever comes last waits least in each.

    Attributes:
        count: collectives.
        shift: sums[i] is of those with numbers i << shift up to (i + 1) << shift, no more than 256 sums.
        sums: device time in ns.
    """

    count: int = 0
    shift: int = 0
    sums: tuple[int, ...] = ()

    def at(self, shift: int) -> Collectives:
        """The same with wider sums."""
        sums = self.sums
        for _ in range(self.shift, shift):
            even = sums + (0,) * (len(sums) % 2)
            sums = tuple(a + b for a, b in zip(even[::2], even[1::2], strict=True))
        return Collectives(self.count, max(shift, self.shift), sums)

    def merge(self, other: Collectives) -> Collectives:
        """Both together, collective by collective."""
        shift = max(self.shift, other.shift)
        pairs = itertools.zip_longest(self.at(shift).sums, other.at(shift).sums, fillvalue=0)
        return Collectives(self.count + other.count, shift, tuple(a + b for a, b in pairs))


@dataclass
class Rank:
    """One process: how long it was recorded, what its threads lost, what is missing of it, and its collectives.

    `recordings` counts those that it is in: of one rank there should be one.
    """

    recorded_ns: int = 0
    blocked_ns: int = 0
    lost_records: int = 0
    verdict: str = "healthy"
    recordings: int = 0
    collectives: Collectives = field(default_factory=Collectives)

    def merge(self, other: Rank) -> Rank:
        """Both together."""
        return Rank(
            self.recorded_ns + other.recorded_ns,
            self.blocked_ns + other.blocked_ns,
            self.lost_records + other.lost_records,
            _worst(self.verdict, other.verdict),
            self.recordings + other.recordings,
            self.collectives.merge(other.collectives),
        )


def worst_of(verdicts: Iterable[str]) -> str:
    """The worst of some verdicts: healthy, undecided, found; healthy of none."""
    return max(verdicts, key=_EXAMINED.index, default="healthy")


@dataclass
class GpuTime:
    """Where the time of one GPU went: ns by the line of its account, as JSON calls it; they add up to its window.

    `verdict` is what all causes together say of it: healthy, undecided or found.
    """

    lines: dict[str, int] = field(default_factory=dict)
    verdict: str = "healthy"

    @property
    def window_ns(self) -> int:
        """Length of its serving window; of several recordings their sum."""
        return sum(self.lines.values())

    def share(self, group: str) -> float:
        """Share of the window in a line, or in all lines of a group such as "waiting_for_copies"; 0 to 1."""
        mine = sum(ns for line, ns in self.lines.items() if line == group or line.startswith(f"{group}."))
        return mine / self.window_ns if self.window_ns else 0.0

    def merge(self, other: GpuTime) -> GpuTime:
        """Both together."""
        names = self.lines | other.lines
        lines = {name: self.lines.get(name, 0) + other.lines.get(name, 0) for name in sorted(names)}
        return GpuTime(lines, worst_of((self.verdict, other.verdict)))


def _worst(a: str, b: str) -> str:
    return max(a, b, key=_VERDICTS.index)


@dataclass(frozen=True, order=True)
class BlockedCall:
    """A blocked call; ordered by time lost, then by what tells calls apart."""

    blocked_ns: int
    rank: str
    start_ns: int
    thread: int
    call: str
    stream: int
    depth: int
    bytes: int


@dataclass
class Summary:
    """What is kept of recordings.

    Attributes:
        inputs: how many recordings are in it.
        calls: (rank, call, kind, direction, memory) -> Stat of the host-side calls.
        executions: (rank, engine, direction, memory) -> Stat of what devices did.
        queues: (rank, device, stream handle) -> QueueSummary.
        ranks: rank -> Rank.
        gpus: (rank, number of the GPU) -> GpuTime; empty where the account was not asked for.
        top: the calls that lost most to full queues, longest first, at most `keep`.
        keep: how many of them are kept; of two summaries the smaller number holds.
        notes: remarks of the readers and how many inputs made each.
        failed: inputs that could not be read, with the reason.
        parts: the identities of the recordings in it; of one that is put together by hand, none.
    """

    inputs: int = 0
    calls: dict[tuple[str, str, str, str, str], Stat] = field(default_factory=dict)
    executions: dict[tuple[str, str, str, str], Stat] = field(default_factory=dict)
    queues: dict[tuple[str, int, int], QueueSummary] = field(default_factory=dict)
    ranks: dict[str, Rank] = field(default_factory=dict)
    top: list[BlockedCall] = field(default_factory=list)
    keep: int = TOP
    notes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    gpus: dict[tuple[str, int], GpuTime] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The worst verdict of a queue."""
        return max((queue.verdict for queue in self.queues.values()), key=_VERDICTS.index, default="healthy")

    @property
    def blocked_ns(self) -> int:
        """Host time lost to full queues, over all ranks."""
        return sum(queue.blocked_ns for queue in self.queues.values())

    def merge(self, other: Summary) -> Summary:
        """Both together; the order of merging makes no difference."""
        return Summary(keep=self.keep).absorb(self).absorb(other)

    def absorb(self, other: Summary) -> Summary:
        """Adds another to this one, unless it is in it already, and returns it.

        Raises:
            ValueError: they have recordings in common, and others not; or their sums are larger than any recorder's.
        """
        common = self.parts & other.parts
        if common and common == other.parts:
            other = Summary(keep=other.keep, failed=other.failed)
        elif common and common != self.parts:
            raise ValueError(f"{len(common):,} of its {len(other.parts):,} recordings are in another input, too")
        elif common:  # all of this one is in the other
            self.inputs, self.top, self.notes, self.parts = 0, [], {}, frozenset()
            for table in (self.calls, self.executions, self.queues, self.ranks, self.gpus):
                table.clear()
        tables = [
            (cast("dict[Any, Any]", mine), _added(mine, theirs))
            for mine, theirs in (
                (self.calls, other.calls),
                (self.executions, other.executions),
                (self.queues, other.queues),
                (self.ranks, other.ranks),
                (self.gpus, other.gpus),
            )
        ]
        for mine, added in tables:
            mine.update(added)
        self.inputs += other.inputs
        self.parts |= other.parts
        self.keep = min(self.keep, other.keep)
        self.top = heapq.nlargest(self.keep, [*self.top, *other.top])
        for note, count in other.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count
        for path, reason in other.failed.items():
            self.failed[path] = max(self.failed.get(path, ""), reason)
        return self

    def identified(self) -> Summary:
        """The same with the identity of what is in it, for one that has none: equal sums are the same recording's."""
        if self.parts or not self.inputs:
            return self
        content = replace(self, top=[], keep=0, failed={}, gpus={}).to_bytes()
        return replace(self, parts=frozenset([hashlib.blake2b(content, digest_size=12).hexdigest()]))

    def to_bytes(self) -> bytes:
        """JSON in one order of its keys: of what holds the same, the same bytes."""

        def rows(table: Mapping[Any, Any]) -> list[list[Any]]:
            return [[*(key if isinstance(key, tuple) else (key,)), _fields(table[key])] for key in sorted(table)]

        content = {
            "format": FORMAT,
            "version": VERSION,
            "inputs": self.inputs,
            "keep": self.keep,
            "calls": rows(self.calls),
            "executions": rows(self.executions),
            "queues": rows(self.queues),
            "ranks": rows(self.ranks),
            "top": [_fields(one) for one in self.top],
            "notes": self.notes,
            "failed": self.failed,
            **({"parts": sorted(self.parts)} if self.parts else {}),
            **({"gpus": rows(self.gpus)} if self.gpus else {}),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode(errors="replace") + b"\n"  # a path need not be UTF-8

    @staticmethod
    def from_bytes(data: bytes) -> Summary:
        """What `to_bytes` wrote.

        Raises:
            ValueError: it is no summary, or of another version.
        """
        try:
            head: _Head = msgspec.json.decode(data, type=_Head)
            if head.format != FORMAT:
                raise ValueError("not a summary")
            if head.version != VERSION:
                raise ValueError(f"a summary of version {head.version}; this kvprobe reads {VERSION}")
            content: _Content = msgspec.json.decode(data, type=_Content)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ValueError(f"damaged summary ({error})") from None
        return Summary(
            content.inputs,
            {(a, b, c, d, e): _stat(values) for a, b, c, d, e, values in content.calls},
            {(a, b, c, d): _stat(values) for a, b, c, d, values in content.executions},
            {(rank, device, stream): QueueSummary(*values) for rank, device, stream, values in content.queues},
            {rank: _rank(values) for rank, values in content.ranks},
            [BlockedCall(*values) for values in content.top],
            content.keep,
            content.notes,
            content.failed,
            frozenset(content.parts),
            {(rank, number): GpuTime(*values) for rank, number, values in content.gpus},
        ).identified()


def _added(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> dict[Any, Any]:
    """The rows of `mine` that `theirs` change; raises ValueError where one would not fit into a file."""
    out = {key: mine[key].merge(value) if key in mine else value for key, value in theirs.items()}
    for key in out.keys() & mine.keys():
        for value in _fields(out[key]):
            numbers = [*value.values()] if isinstance(value, dict) else value
            numbers = numbers if isinstance(numbers, (tuple, list)) else (numbers,)
            for one in numbers:
                if max((0, *one) if isinstance(one, tuple) else (0, one) if isinstance(one, int) else (0,)) > _LARGEST:
                    raise ValueError("together with another input's its sums are larger than any recorder's")
    return out


def _fields(one: object) -> list[Any]:
    return [_fields(value) if isinstance(value, Collectives) else value for value in vars(one).values()]


def _stat(values: _Stat) -> Stat:
    return Stat(*values)


def _rank(values: _Rank) -> Rank:
    return Rank(*values[:5], Collectives(*values[5]))


# ---- as it lies in a file, which may be anybody's work ---------------------------------------------------------------

_LARGEST = 2**60  # of a time or a size: 36 years in nanoseconds, an exabyte
_Int = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
_Sum = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Ceiling = Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST)]
_Verdict = Literal["healthy", "cannot tell", "saturated"]
_Histogram = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]
_Stat = tuple[_Sum, _Sum, _Sum, _Sum, _Sum, _Sum, _Sum, _Sum, _Histogram]
_Queue = tuple[_Sum, _Sum, _Ceiling, _Sum, _Sum, _Sum, _Verdict]
_Shift = Annotated[int, msgspec.Meta(ge=0, le=63)]
_Sums = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=BINS)]
_Rank = tuple[_Sum, _Sum, _Sum, _Verdict, _Sum, tuple[_Sum, _Shift, _Sums]]
_Line = Annotated[str, msgspec.Meta(pattern="^[a-z_.]{1,64}$")]
_Part = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{24}$")]


class _Head(msgspec.Struct):
    """What every version begins with."""

    format: str = ""
    version: int = 0


class _Content(msgspec.Struct):
    """This version's rows: keys, then values in the order of the classes above."""

    inputs: _Sum
    keep: _Sum
    calls: list[tuple[str, str, str, str, str, _Stat]]
    executions: list[tuple[str, str, str, str, _Stat]]
    queues: list[tuple[str, _Int, _Int, _Queue]]
    ranks: list[tuple[str, _Rank]]
    top: list[tuple[_Sum, str, _Int, _Int, str, _Int, _Sum, _Sum]]
    notes: dict[str, _Sum]
    failed: dict[str, str]
    parts: list[_Part] = []
    gpus: list[tuple[str, _Int, tuple[dict[_Line, _Sum], Literal["healthy", "undecided", "found"]]]] = []
