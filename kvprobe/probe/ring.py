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
import numpy.typing as npt

from kvprobe.errors import RecordingError
from kvprobe.runfolder.identity import Identity

__all__ = [
    "BUCKETS",
    "CALLS",
    "STATES",
    "ThreadSection",
    "RingSnapshot",
    "bucket_bounds",
    "handles_of",
    "percentile",
    "read_ring",
    "stream_handles",
    "stream_number",
]

Array = npt.NDArray[Any]

BUCKETS = 128
PAGEABLE, PINNED = 1, 2  # enum kvp_memory
TRANSFER = 64  # the call that stands for a whole transfer of an engine
HEADER_BYTES = 4096
STATES = ("starting", "running", "closed")
MAGIC = b"KVPRING1"
UNTIMED = 2**64 - 1
SECTIONS = 1024  # a file has no more
SANE = 2**62  # no time and no count is as large; a damaged file's may be

# calls that name no stream; 0 there is not the default stream
NO_STREAM = np.array([19, 20, 21, 22, 23, 24, 25, 26, 34, 35, 36, 37, 38, 39, 42, 43, 44, 45])
OF_EVENTS = np.array([18, 33])  # waits for an event: the stream on which it was recorded, 0 where that is not known
FIRST_ADDRESS = 1 << 20  # a stream's handle from here on is an address; below, the number that CUDA or a recorder gave

# number in the file -> (kind as in recordings.model.CallKind, name); kvp.h's KVP_CALLS, a test compares them
CALLS: dict[int, tuple[str, str]] = {
    1: ("COPY", "cudaMemcpyAsync"),
    2: ("COPY", "cudaMemcpy2DAsync"),
    3: ("BATCH", "cudaMemcpyBatchAsync"),
    4: ("COPY", "cuMemcpyAsync"),
    5: ("COPY", "cuMemcpyHtoDAsync"),
    6: ("COPY", "cuMemcpyDtoHAsync"),
    7: ("COPY", "cuMemcpyDtoDAsync"),
    8: ("COPY", "cuMemcpy2DAsync"),
    9: ("BATCH", "cuMemcpyBatchAsync"),
    10: ("COPY_SYNC", "cudaMemcpy"),
    11: ("MEMSET", "cudaMemsetAsync"),
    12: ("LAUNCH", "cudaLaunchKernel"),
    13: ("LAUNCH", "cudaLaunchKernelExC"),
    14: ("LAUNCH", "cuLaunchKernel"),
    15: ("LAUNCH", "cuLaunchKernelEx"),
    16: ("GRAPH", "cudaGraphLaunch"),
    17: ("SYNC", "cudaStreamSynchronize"),
    18: ("SYNC", "cudaEventSynchronize"),
    19: ("SYNC", "cudaDeviceSynchronize"),
    20: ("CREATE", "cudaStreamCreate"),
    21: ("CREATE", "cudaEventCreate"),
    22: ("ALLOC", "cudaMalloc"),
    23: ("ALLOC", "cudaHostAlloc"),
    24: ("ALLOC", "cudaHostRegister"),
    25: ("FREE", "cudaFree"),
    26: ("FREE", "cudaFreeHost"),
    27: ("EVENT", "cudaEventRecord"),
    28: ("EVENT", "cudaStreamWaitEvent"),
    29: ("ALLOC", "cudaMallocAsync"),
    30: ("COPY", "cudaMemcpy3DAsync"),
    31: ("COPY", "cudaMemcpyPeerAsync"),
    32: ("SYNC", "cuStreamSynchronize"),
    33: ("SYNC", "cuEventSynchronize"),
    34: ("SYNC", "cuCtxSynchronize"),
    35: ("CREATE", "cuStreamCreate"),
    36: ("CREATE", "cuEventCreate"),
    37: ("ALLOC", "cuMemAlloc"),
    38: ("ALLOC", "cuMemHostAlloc"),
    39: ("ALLOC", "cuMemHostRegister"),
    40: ("COPY", "cudaMemcpyWithAttributesAsync"),
    41: ("COPY", "cuMemcpy3DAsync"),
    42: ("FREE", "cudaHostUnregister"),
    43: ("FREE", "cuMemFree"),
    44: ("FREE", "cuMemFreeHost"),
    45: ("FREE", "cuMemHostUnregister"),
    TRANSFER: ("TRANSFER", "transfer"),
}

FILE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("record_bytes", "<u4"),
        ("slot_bytes", "<u4"),
        ("buckets", "<u4"),
        ("slot_count", "<u4"),
        ("ring_capacity", "<u8"),
        ("slow_capacity", "<u8"),
        ("section_bytes", "<u8"),
        ("sections_max", "<u4"),
        ("sections_used", "<u4"),
        ("slow_ns", "<u8"),
        ("pid", "<u4"),
        ("ppid", "<u4"),
        ("start_monotonic_ns", "<u8"),
        ("start_realtime_ns", "<u8"),
        ("state", "<u4"),
        ("forks", "<u4"),
        ("end_monotonic_ns", "<u8"),
        ("clock", "S16"),
        ("producer", "S32"),
        ("over_count", "<u8", 128),
        ("over_bytes", "<u8", 128),
        ("over_dur_ns", "<u8", 128),
        ("command", "S512"),
        ("rank", "S16"),
        ("pid_namespace", "<u8"),  # 0 in files of earlier versions, and so is start_ticks
        ("start_ticks", "<u8"),
    ]
)
SECTION = np.dtype(
    [
        ("head", "<u8"),
        ("slow_head", "<u8"),
        ("tid", "<u4"),
        ("owners", "<u4"),
        ("busy", "<u4"),
        ("slots_used", "<u4"),
        ("name", "S32"),
        ("ring_records", "<u8"),
        ("slow_records", "<u8"),
        ("in_call", "<u4"),
        ("in_sequence", "<u4"),
        ("in_since_ns", "<u8"),
        ("in_stream", "<u8"),
    ]
)
SLOT = np.dtype(
    [
        ("stream", "<u8"),
        ("call", "u1"),
        ("direction", "u1"),
        ("pad", "V6"),
        ("count", "<u8"),
        ("bytes", "<u8"),
        ("copies", "<u8"),
        ("dur_ns", "<u8"),
        ("last_ns", "<u8"),
        ("max_ns", "<u8"),
        ("slow", "<u8"),
        ("slow_ns", "<u8"),
        ("errors", "<u8"),
        ("untimed", "<u8"),
        ("node_bytes", "<u8", 4),
        ("histogram", "<u8", BUCKETS),
    ]
)
RECORD = np.dtype(
    [
        ("start_ns", "<u8"),
        ("dur_ns", "<u8"),
        ("stream", "<u8"),
        ("src", "<u8"),
        ("dst", "<u8"),
        ("bytes", "<u8"),
        ("tid", "<u4"),
        ("transfer", "<u4"),
        ("count", "<u4"),
        ("result", "<u2"),
        ("call", "u1"),
        ("direction", "u1"),
    ]
)


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
    records: Array = field(default_factory=lambda: np.zeros(0, RECORD))
    slow: Array = field(default_factory=lambda: np.zeros(0, RECORD))


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
    pid_namespace: int = 0  # inode of the namespace that `pid` is of; 0: not known
    start_ticks: int = 0  # when the process began, as in /proc/<pid>/stat; 0: not known

    def running(self) -> bool | None:
        """Whether its process runs now; None where it is of a pid namespace that cannot be seen from here."""
        return Identity(self.pid, self.pid_namespace, self.start_ticks).running()

    def slots(self) -> Array:
        """The slots of all sections, one after another."""
        return np.concatenate([section.slots for section in self.sections] or [np.zeros(0, SLOT)])

    def records(self) -> Array:
        """All detail in order of start: both rings of every section, each call once."""
        parts = []
        for section in self.sections:
            # a slow call is in both rings for as long as the large one holds it
            parts += [section.slow[~np.isin(_keys(section.slow), _keys(section.records))], section.records]
        together = np.concatenate(parts or [np.zeros(0, RECORD)])
        return together[np.argsort(together["start_ns"], kind="stable")]

    def calls(self) -> dict[str, tuple[int, int, int]]:
        """Exact totals by call name: (calls, copies, bytes), whatever the stream; calls in over_* count one copy."""
        totals: dict[str, list[int]] = {}
        for slot in self.slots():
            row = totals.setdefault(_name(int(slot["call"])), [0, 0, 0])
            for place, column in enumerate(("count", "copies", "bytes")):
                row[place] += int(slot[column])
        for call in np.flatnonzero(self.over_count):
            row = totals.setdefault(_name(int(call)), [0, 0, 0])
            row[0] += int(self.over_count[call])
            row[1] += int(self.over_count[call])
            row[2] += int(self.over_bytes[call])
        return {name: (row[0], row[1], row[2]) for name, row in totals.items()}


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


def _newest(fd: int, section_at: int, at: int, head_name: str, capacity_name: str, room: int) -> tuple[int, Array]:
    """The records of one ring that are whole: copied, then checked against how far the writer got meanwhile."""
    before = _read(fd, SECTION, 1, section_at)[0]
    head, capacity = int(before[head_name]), int(before[capacity_name])
    if not capacity or capacity > room or head >= SANE:
        return 0 if head >= SANE else head, np.zeros(0, RECORD)
    claimed = min(head, capacity)
    held = _held(fd, RECORD, claimed, at)
    records = _read(fd, RECORD, held, at)
    if held < claimed:  # the file was cut off
        return head, records
    after = _read(fd, SECTION, 1, section_at)[0]
    first = head - held  # record i lies at i % capacity
    order = np.arange(first, head) % capacity
    records = records[order]
    # the record being written now replaces the oldest
    lost = int(after[head_name]) - int(after[capacity_name]) + (1 if after["busy"] else 0)
    return head, records[max(0, lost - first) :]


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
        return _read_open(fd, Path(path), detail, slots)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _read_open(fd: int, path: Path, detail: bool, slots: bool) -> RingSnapshot:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise RecordingError(f"{path}: not a regular file")
    start = os.pread(fd, 28, 0)
    if start[:8] != MAGIC or len(start) < 28:
        raise RecordingError(f"{path} is not a ring file of kvprobe (or its process was killed while it made it)")
    version, header_bytes, record_bytes, slot_bytes, buckets = struct.unpack_from("<5I", start, 8)
    if (version, header_bytes, record_bytes, slot_bytes, buckets) != (1, HEADER_BYTES, 64, SLOT.itemsize, BUCKETS):
        raise RecordingError(f"{path} is a ring file of version {version}; this kvprobe reads version 1")
    header = _read(fd, FILE, 1, 0)[0]
    slot_count, ring_capacity = int(header["slot_count"]), int(header["ring_capacity"])
    section_bytes = int(header["section_bytes"])
    size = HEADER_BYTES + slot_count * SLOT.itemsize + (ring_capacity + int(header["slow_capacity"])) * RECORD.itemsize
    times = [int(header[name]) for name in ("start_monotonic_ns", "start_realtime_ns", "end_monotonic_ns")]
    sections_used = int(header["sections_used"])
    too_large = (
        slot_count > 65536 or max(ring_capacity, int(header["slow_capacity"])) > 2**32 or sections_used > SECTIONS
    )
    if section_bytes < size or section_bytes > 2**44 or too_large or max(times) >= SANE:
        raise RecordingError(f"{path}: its header contradicts itself; the file is damaged")
    sections = []
    for number in range(min(sections_used, int(header["sections_max"]))):
        at = HEADER_BYTES + number * section_bytes
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
        )
        slots_at = at + HEADER_BYTES
        if slots:
            used = min(int(head["slots_used"]), slot_count)
            # a slot whose end no call has touched yet lies partly in a hole
            section.slots = _read(fd, SLOT, _held(fd, SLOT, used, slots_at, partly=True), slots_at)
        if detail:
            ring_at = slots_at + slot_count * SLOT.itemsize
            slow_at = ring_at + ring_capacity * RECORD.itemsize
            section.head, section.records = _newest(fd, at, ring_at, "head", "ring_records", ring_capacity)
            slow_room = int(header["slow_capacity"])
            section.slow_head, section.slow = _newest(fd, at, slow_at, "slow_head", "slow_records", slow_room)
        sections.append(section)
    state = int(header["state"])
    return RingSnapshot(
        path=str(path),
        pid=int(header["pid"]),
        ppid=int(header["ppid"]),
        producer=_text(header["producer"]),
        command=_text(header["command"]),
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
        pid_namespace=int(header["pid_namespace"]),
        start_ticks=int(header["start_ticks"]),
    )


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
