"""Reads ring files: what the native writer left or is leaving, without a lock and without the native library.

The layout is that of ``kvprobe/native/src/kvp.h``. A file may be read while it is written and after its writer was
killed: totals are exact (one call in flight aside), detail holds the newest records of every section.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import RecordingError
from kvprobe.probe.ring_layout import (
    BUCKETS,
    CALLS,
    CONTENTS,
    COVERAGE,
    DESTINATION,
    FILE,
    FILE_CALLS,
    FIRST_ADDRESS,
    GRAPH,
    HEADER_BYTES,
    MAGIC,
    NO_CALLS,
    NO_STREAM,
    OF_EVENTS,
    PAGEABLE,
    PAGES,
    PAUSE,
    PINNED,
    RECORD,
    SANE,
    SECTION,
    SECTIONS,
    SEVERAL,
    SEVERAL_MOST,
    SLOT,
    SPAN,
    STATES,
    TRANSFER,
    UNTIMED,
    Array,
)
from kvprobe.runfolder.identity import Identity

__all__ = [
    "BUCKETS",
    "CALLS",
    "CONTENTS",
    "COVERAGE",
    "DESTINATION",
    "FILE",
    "GRAPH",
    "HEADER_BYTES",
    "PAGEABLE",
    "PAGES",
    "PAUSE",
    "PINNED",
    "RECORD",
    "SANE",
    "SECTION",
    "SLOT",
    "SPAN",
    "STATES",
    "TRANSFER",
    "UNTIMED",
    "RingSnapshot",
    "ThreadSection",
    "bucket_bounds",
    "handles_of",
    "percentile",
    "read_ring",
    "read_ring_fd",
    "stream_handles",
    "stream_number",
]


@dataclass
class ThreadSection:
    """One section: the totals and newest records of one thread, or of several that had the section one after another.

    Attributes:
        number: its place in the file.
        tid: kernel id of the owner now; 0 when it has gone.
        owners: threads that have had it.
        name: thread name of the newest owner.
        head: records ever published; `records` holds the newest of them.
        slow_head: likewise for `slow`.
        in_call: number (in CALLS) of the call the owner is inside of; 0 none.
        in_sequence: the same value in two snapshots means the same call.
        in_since_ns: when it entered, CLOCK_MONOTONIC; 0 where the call is counted and not timed.
        in_stream: stream handle of that call.
        slots: structured array SLOT, one row per (stream, call, direction).
        records: structured array RECORD, oldest first.
        slow: structured array RECORD of the calls of at least `slow_ns`, oldest first.
        notes: of `head`, records that are no calls.
        file_slots: as `slots`, of reads and writes of tiers: a row per (place, call, direction).
        failed: structured array RECORD of the first calls that failed, oldest first.
        begun_ns: when its first owner made it, CLOCK_MONOTONIC; 0: not known, or another thread has it now.
        begun_ran_ns: what the kernel had counted of that thread by then: time on a CPU.
        begun_waited_ns: and time waiting for one.
    """

    number: int
    tid: int = 0
    owners: int = 0
    name: str = ""
    head: int = 0
    slow_head: int = 0
    in_call: int = 0
    in_sequence: int = 0
    in_since_ns: int = 0
    in_stream: int = 0
    slots: Array = field(default_factory=lambda: np.zeros(0, SLOT))
    file_slots: Array = field(default_factory=lambda: np.zeros(0, SLOT))
    records: Array = field(default_factory=lambda: np.zeros(0, RECORD))
    slow: Array = field(default_factory=lambda: np.zeros(0, RECORD))
    notes: int = 0
    failed: Array = field(default_factory=lambda: np.zeros(0, RECORD))
    begun_ns: int = 0
    begun_ran_ns: int = 0
    begun_waited_ns: int = 0


@dataclass
class RingSnapshot:
    """One process's ring file at one moment; attributes as in kvp.h's file header.

    `over_count`, `over_bytes` and `over_dur_ns` (by call number) are calls that no section could take: they belong to
    the totals, without stream or direction.
    """

    path: str
    pid: int
    ppid: int
    producer: str
    command: str
    rank: str
    state: str  # of STATES; "running" is also what a killed process leaves
    clock: str
    slow_ns: int
    start_monotonic_ns: int
    start_realtime_ns: int
    end_monotonic_ns: int  # 0 unless closed
    forks: int
    over_count: Array
    over_bytes: Array
    over_dur_ns: Array
    sections: list[ThreadSection]
    damage: str = ""  # what is missing of it, half a sentence; empty of a whole one
    sharers: int = 0  # processes that share this file, whose calls over_count has; 0: it is one process's
    pid_namespace: int = 0  # inode of the namespace that `pid` is of; 0: not known
    start_ticks: int = 0  # when the process began, as in /proc/<pid>/stat; 0: not known

    def running(self) -> bool | None:
        """Whether its process runs now; None where it is of a pid namespace that cannot be seen from here."""
        return Identity(self.pid, self.pid_namespace, self.start_ticks).running()

    def slots(self) -> Array:
        """The slots of all sections, one after another."""
        return np.concatenate([section.slots for section in self.sections] or [np.zeros(0, SLOT)])

    def _kept(self) -> list[tuple[ThreadSection, Array]]:
        """Of each section that is not of marks alone the records of both its rings, each once."""
        out = []
        for section in self.sections:
            # a slow call is in both rings for as long as the large one holds it
            alone = section.slow[~np.isin(_keys(section.slow), _keys(section.records))]
            if not len(section.records) or not _of_marks(section.records).all():
                out.append((section, np.concatenate((alone, section.records))))
        return out

    def records(self) -> Array:
        """All calls kept, in order of start: both rings of every section and its first failures, each call once.

        Those of a record of several follow one another evenly.
        """
        together = np.concatenate([np.zeros(0, RECORD), *(records for _, records in self._kept())])
        together = _one_by_one(together[~_no_calls(together) & ~_of_files(together)])
        failed = np.concatenate([np.zeros(0, RECORD), *(section.failed for section in self.sections)])
        together = np.concatenate([failed[~np.isin(_keys(failed), _keys(together))], together])
        return together[np.argsort(together["start_ns"], kind="stable")]

    def files(self) -> Array:
        """Reads and writes of tiers that were kept, in order of start; `stream` is the number of the place."""
        kept = [section.records[_of_files(section.records)] for section in self.sections]
        together = _one_by_one(np.concatenate([np.zeros(0, RECORD), *kept]))
        return together[np.argsort(together["start_ns"], kind="stable")]

    def file_slots(self) -> Array:
        """Exact totals of reads and writes of tiers; `stream` is the number of the place."""
        return np.concatenate([section.file_slots for section in self.sections] or [np.zeros(0, SLOT)])

    def marks(self) -> Array:
        """What marks told of the device (SPAN, COVERAGE, GRAPH), as it was written."""
        return np.concatenate(
            [np.zeros(0, RECORD), *(section.records[_of_marks(section.records)] for section in self.sections)]
        )

    def overwritten(self) -> int:
        """Records of calls that were published and are gone."""
        gone = 0
        for section, records in self._kept():
            notes = int(_no_calls(records).sum())  # of what was written before they were counted: those that are left
            gone += section.head - max(section.notes, notes) - (len(records) - notes)
        return max(gone, 0)

    def notes(self, call: int) -> Array:
        """Records of this number, which are no calls (kvp.h), by section."""
        kept = [section.records[section.records["call"] == call] for section in self.sections]
        return np.concatenate([np.zeros(0, RECORD), *kept])

    def calls(self) -> dict[str, tuple[int, int, int]]:
        """Exact totals by call name: (calls, copies, bytes), whatever the stream; calls in over_* count one copy.

        Without reads and writes of tiers.
        """
        totals: dict[str, list[int]] = {}
        for slot in self.slots():
            row = totals.setdefault(_name(int(slot["call"])), [0, 0, 0])
            for place, column in enumerate(("count", "copies", "bytes")):
                row[place] += int(slot[column])
        for call in np.flatnonzero(self.over_count):
            if call in FILE_CALLS:
                continue
            row = totals.setdefault(_name(int(call)), [0, 0, 0])
            row[0] += int(self.over_count[call])
            row[1] += int(self.over_count[call])
            row[2] += int(self.over_bytes[call])
        return {name: (row[0], row[1], row[2]) for name, row in totals.items()}


def _no_calls(records: Array) -> Array:
    rows: Array = np.isin(records["call"], NO_CALLS)
    return rows


def _of_files(records: Array) -> Array:
    rows: Array = np.isin(records["call"] & (SEVERAL - 1), FILE_CALLS)
    return rows


def _of_marks(records: Array) -> Array:
    rows: Array = (records["call"] >= SPAN) & (records["call"] <= GRAPH)
    return rows


def _one_by_one(records: Array) -> Array:
    """The calls that these records stand for; of several in one record each takes what they took as a mean.

    Their addresses are not known.
    """
    several = (records["call"] & SEVERAL) != 0
    if not several.any():
        return records
    one = records.copy()
    count = np.clip(records["count"][several].astype(np.int64), 1, SEVERAL_MOST)
    mean = records["src"][several] // count.astype(np.uint64)
    room = np.maximum(records["dur_ns"][several], mean) - mean  # between the first one's entry and the last one's
    one["call"][several] &= SEVERAL - 1
    one["bytes"][several] //= count.astype(np.uint64)
    one["dur_ns"][several], one["src"][several], one["count"][several] = mean, 0, 1
    times = np.ones(len(records), dtype=np.int64)
    times[several] = count
    out = np.repeat(one, times)
    number = np.arange(len(out)) - np.repeat(np.cumsum(times) - times, times)
    gap = np.zeros(len(records), dtype=np.float64)
    gap[several] = room / np.maximum(count - 1, 1)
    out["start_ns"] += (number * np.repeat(gap, times)).astype(np.uint64)
    return out


def _keys(records: Array) -> Array:
    """A key that tells the calls of one section apart: a thread enters one call at a time."""
    keys: Array = records["start_ns"] ^ (records["tid"].astype(np.uint64) << np.uint64(40))
    return keys


def _name(call: int) -> str:
    return CALLS[call][1] if call in CALLS else f"call {call}"


def bucket_bounds() -> Array:
    """Bounds of the histogram's buckets in ns, (129,) float64; the last bucket has no upper bound (inf)."""
    lower = [b if b < 4 else (4 + b % 4) << (b // 4 - 1) for b in range(BUCKETS)]
    return np.array([*lower, np.inf])


def percentile(histogram: Array, q: float) -> Array:
    """Percentiles of histograms, within 12.5% of the truth (the middle of the bucket that holds it).

    Args:
        histogram: (..., 128) counts.
        q: 0 to 100.

    Returns:
        (...) float64 nanoseconds; nan where a histogram is empty.
    """
    counts = np.asarray(histogram, dtype=np.float64)
    total = counts.sum(axis=-1)
    cumulative = counts.cumsum(axis=-1)
    rank = np.maximum(np.ceil(total * q / 100.0), 1.0)
    bucket = np.minimum((cumulative < rank[..., None]).sum(axis=-1), BUCKETS - 1)
    bounds = bucket_bounds()
    lower, upper = bounds[bucket], bounds[bucket + 1]
    # a bucket one ns wide holds one value; the last one has no middle
    middle = np.where(np.isinf(upper) | (upper - lower <= 1), lower, (lower + upper) / 2)
    result: Array = np.where(total > 0, middle, np.nan)
    return result


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode("utf-8", "replace")


def _held(fd: int, dtype: np.dtype[Any], count: int, offset: int, partly: bool = False) -> int:
    """How many of `count` items at `offset`, or `partly` their starts, have data behind them in the file."""
    try:
        end = os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError:  # beyond the end
        return 0
    return max(0, min(count, (end - offset + (dtype.itemsize - 1 if partly else 0)) // dtype.itemsize))


def _read(fd: int, dtype: np.dtype[Any], count: int, offset: int) -> Array:
    """`count` items at `offset`; what lies beyond the file's end or in a hole reads as zeros."""
    wanted = count * dtype.itemsize
    data = bytearray()
    while len(data) < wanted:
        piece = os.pread(fd, wanted - len(data), offset + len(data))
        if not piece:
            data.extend(bytes(wanted - len(data)))
            break
        data.extend(piece)
    return np.frombuffer(data, dtype, count)


def _newest(
    fd: int, section_at: int, at: int, head_name: str, capacity_name: str, room: int
) -> tuple[int, Array, bool]:
    """The records of one ring that are whole: copied, then checked against how far the writer got meanwhile.

    Returns:
        How many were ever published; the records, oldest first; whether none is missing that should be there.
    """
    before = _read(fd, SECTION, 1, section_at)[0]
    head, capacity = int(before[head_name]), int(before[capacity_name])
    if not capacity or capacity > room or head >= SANE:
        return 0 if head >= SANE else head, np.zeros(0, RECORD), not (head and capacity)
    claimed = min(head, capacity)
    held = _held(fd, RECORD, claimed, at)
    records = _read(fd, RECORD, held, at)
    if held < claimed:  # the file was cut off
        return head, records, False
    after = _read(fd, SECTION, 1, section_at)[0]
    first = head - held  # record i lies at i % capacity
    order = np.arange(first, head) % capacity
    records = records[order]
    # the record being written now replaces the oldest
    lost = int(after[head_name]) - int(after[capacity_name]) + (1 if after["busy"] else 0)
    records = records[max(0, lost - first) :]
    # every record has the thread that wrote it: one of zeros was never written, or wiped
    return head, records, bool((records["tid"] != 0).all() or records["start_ns"].all())


def read_ring(path: str | os.PathLike[str], detail: bool = True, slots: bool = True) -> RingSnapshot:
    """Reads one ring file.

    Args:
        path: the file.
        detail: False reads totals alone (a few KiB a section).
        slots: False leaves out the totals, too: what every thread is in now, and nothing else.

    Raises:
        RecordingError: it is not a ring file, is of another version, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    try:
        return read_ring_fd(fd, Path(path), detail, slots)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)


def read_ring_fd(fd: int, path: Path, detail: bool = True, slots: bool = True) -> RingSnapshot:
    """As `read_ring`, of an open file; `path` is what it is called.

    Raises:
        RecordingError: as `read_ring`.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise RecordingError(f"{path}: not a regular file")
    header = _header(fd, path)
    section_bytes, used = int(header["section_bytes"]), min(int(header["sections_used"]), int(header["sections_max"]))
    sections, broken = [], []
    for number in range(used):
        section, whole = _section(fd, header, number, detail, slots)
        sections.append(section)
        if not whole:
            broken.append(number)
    state, sharers = int(header["state"]), int(header["sharers"])
    # the writer makes a section's last block before it counts the section
    size, whole_size = os.fstat(fd).st_size, HEADER_BYTES + used * section_bytes
    damage = ""
    if size < whole_size:
        damage = f"it was cut off: {size:,} of {whole_size:,} bytes are left"
    elif broken:
        damage = f"what {len(broken)} of its {used} threads wrote is missing or wiped"
    return RingSnapshot(
        path=str(path),
        pid=int(header["pid"]),
        ppid=int(header["ppid"]),
        producer=_text(header["producer"]),
        command=f"{sharers:,} processes without a file of their own" if sharers else _text(header["command"]),
        rank=_text(header["rank"]),
        state=STATES[state] if state < len(STATES) else "running",
        clock=_text(header["clock"]),
        slow_ns=int(header["slow_ns"]),
        start_monotonic_ns=int(header["start_monotonic_ns"]),
        start_realtime_ns=int(header["start_realtime_ns"]),
        end_monotonic_ns=int(header["end_monotonic_ns"]),
        forks=int(header["forks"]),
        over_count=np.minimum(header["over_count"], SANE),
        over_bytes=np.minimum(header["over_bytes"], SANE),
        over_dur_ns=np.minimum(header["over_dur_ns"], SANE),
        sections=sections,
        damage=damage,
        sharers=sharers,
        pid_namespace=int(header["pid_namespace"]),
        start_ticks=int(header["start_ticks"]),
    )


def _header(fd: int, path: Path) -> Any:
    """The file's header, of a version that is known and without contradictions."""
    start = os.pread(fd, 28, 0)
    if start[:8] != MAGIC or len(start) < 28:
        raise RecordingError(f"{path} is not a ring file of kvprobe (or its process was killed while it made it)")
    version, header_bytes, record_bytes, slot_bytes, buckets = struct.unpack_from("<5I", start, 8)
    if (version, header_bytes, record_bytes, slot_bytes, buckets) != (1, HEADER_BYTES, 64, SLOT.itemsize, BUCKETS):
        raise RecordingError(f"{path} is a ring file of version {version}; this kvprobe reads version 1")
    if os.fstat(fd).st_size < HEADER_BYTES:
        raise RecordingError(f"{path} ends inside its header; the file was cut off")
    header = _read(fd, FILE, 1, 0)[0]
    slot_count, ring_capacity = int(header["slot_count"]), int(header["ring_capacity"])
    slow_capacity, section_bytes = int(header["slow_capacity"]), int(header["section_bytes"])
    size = HEADER_BYTES + slot_count * SLOT.itemsize + (ring_capacity + slow_capacity) * RECORD.itemsize
    times = [int(header[name]) for name in ("start_monotonic_ns", "start_realtime_ns", "end_monotonic_ns")]
    too_large = (
        slot_count > 65536 or max(ring_capacity, slow_capacity) > 2**32 or int(header["sections_used"]) > SECTIONS
    )
    if section_bytes < size or section_bytes > 2**44 or too_large or max(times) >= SANE:
        raise RecordingError(f"{path}: its header contradicts itself; the file is damaged")
    return header


def _section(fd: int, header: Any, number: int, detail: bool, slots: bool) -> tuple[ThreadSection, bool]:
    """One section, and whether all that its header tells of is there; asked of what is read alone."""
    slot_count, ring_capacity = int(header["slot_count"]), int(header["ring_capacity"])
    at = HEADER_BYTES + number * int(header["section_bytes"])
    head = _read(fd, SECTION, 1, at)[0]
    section = ThreadSection(
        number=number,
        tid=int(head["tid"]),
        owners=int(head["owners"]),
        name=_text(head["name"]),
        head=int(head["head"]),
        slow_head=int(head["slow_head"]),
        in_call=int(head["in_call"]),
        in_sequence=int(head["in_sequence"]),
        in_since_ns=int(head["in_since_ns"]),
        in_stream=int(head["in_stream"]),
        notes=min(int(head["notes"]), int(head["head"])),
        failed=head["failed"][: int(head["failed_used"])].copy(),
        begun_ns=int(head["begun_ns"]),
        begun_ran_ns=int(head["begun_ran_ns"]),
        begun_waited_ns=int(head["begun_waited_ns"]),
    )
    whole = bool(head["ring_records"] or head["slow_records"] or head["owners"])  # else it was wiped, or never made
    slots_at = at + HEADER_BYTES
    if slots:
        used = min(int(head["slots_used"]), slot_count)
        # a slot whose end no call has touched yet lies partly in a hole
        section.slots = _read(fd, SLOT, _held(fd, SLOT, used, slots_at, partly=True), slots_at)
        # a slot is counted when its call is in it
        whole = whole and len(section.slots) == used and bool((section.slots["call"] != 0).all())
        of_files = _of_files(section.slots)
        section.slots, section.file_slots = section.slots[~of_files], section.slots[of_files]
    if detail:
        ring_at = slots_at + slot_count * SLOT.itemsize
        slow_at = ring_at + ring_capacity * RECORD.itemsize
        section.head, section.records, first = _newest(fd, at, ring_at, "head", "ring_records", ring_capacity)
        slow_room = int(header["slow_capacity"])
        section.slow_head, section.slow, second = _newest(fd, at, slow_at, "slow_head", "slow_records", slow_room)
        whole = whole and first and second
    return section, whole


def handles_of(rows: Array) -> Array:
    """The stream of each record or slot, (rows,) int64; -1 where its call names none."""
    handles = rows["stream"].astype(np.int64)
    unnamed = np.isin(rows["call"], NO_STREAM) | (np.isin(rows["call"], OF_EVENTS) & (handles == 0))
    return np.where(unnamed | (handles < 0), np.int64(-1), handles)


def stream_handles(rings: Iterable[RingSnapshot]) -> list[int]:
    """The streams of one process in the order in which its threads began to use them, transfers left out."""
    found: dict[int, None] = {}
    for ring in rings:
        for section in ring.sections:
            slots = section.slots[(section.slots["call"] != TRANSFER) & (section.slots["call"] != 0)]
            found.update(dict.fromkeys(handles_of(slots).tolist()))
    found.pop(-1, None)
    return list(found)


def stream_number(handles: Sequence[int], place: int) -> int:
    """The number by which people know the stream at this place among its process's: its own, or its turn from 1."""
    if handles[place] < FIRST_ADDRESS:
        return int(handles[place])
    return 1 + sum(handle >= FIRST_ADDRESS for handle in handles[:place])
