"""What each GPU did, as a recording shows it: kernels and copies, with the call that submitted each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvprobe.account.host_functions import of_executions, of_spans
from kvprobe.account.pageable import on_link
from kvprobe.account.stretches import NOBODY
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct, union
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Direction, Engine, Memory
from kvprobe.recordings.run_marks import PAUSED

__all__ = ["COPY_KERNELS", "Activity", "activities"]

# Kernels that copy between CPU and GPU: ours, SGLang's and LMCache's. A copy kernel is a copy.
COPY_KERNELS = ("kvp_copy_", "transfer_kernel_impl", "multi_layer_kv_transfer", "single_layer_kv_transfer")

# Copies of a batch begin when its call returns, so many at least (`python benchmarks/batch_begins.py` on an H200).
BATCH_COPIES = 3_000
# A call that is inside another thread's allocation for so long waits for the lock of its context: to submit takes less.
HELD_NS = 1_000_000


def _nothing() -> Array:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class OfCalls:
    """A column of calls, looked up for operations that are asked for: there may be millions, and few are.

    Attributes:
        call: the row of the call that submitted each operation; -1 where that is not known.
        column: one entry a call.
        otherwise: one entry an operation, for those whose call is not known.
    """

    call: Array
    column: Array
    otherwise: Array

    def __getitem__(self, rows: Array) -> Array:
        return _where(self.call[rows], self.column, self.otherwise[rows])


@dataclass
class Activity:
    """One GPU.

    Attributes:
        device: its number as the recording has it; -1 unknown.
        processes: rows of the processes that use it.
        copying: mask over its operations: they are copies.
        unclear: the same: what they hold was not recorded, as of a graph in one piece; all others compute.
        start, end: of each operation, ascending by start, ns.
        bytes, direction: of each operation.
        caller: who submitted each, as `Joined.caller`; NOBODY where that is not known.
        entered, returned: when the call that submitted it was entered and had returned, ns.
        behind: the call that put a host function into its stream, between it and what stood before it there; a row of
            the calls, NOBODY where there is none, UNNAMED where the call was not kept.
        error_ns: of each operation, so much may be of another kind, as it was not measured; 0: it was; empty: all were.
        seen_from, seen_to: disjoint, ascending intervals in which all of its operations are known; None: at all times.
        paused_from, paused_to: the same, in which its recorder did not look, as that would have cost too much.
    """

    device: int
    processes: tuple[int, ...]
    start: Array = field(default_factory=_nothing)
    end: Array = field(default_factory=_nothing)
    copying: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    unclear: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    bytes: Array = field(default_factory=_nothing)
    direction: Array = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    caller: Array = field(default_factory=_nothing)
    entered: Array | OfCalls = field(default_factory=_nothing)
    returned: Array | OfCalls = field(default_factory=_nothing)
    behind: Array = field(default_factory=_nothing)
    error_ns: Array = field(default_factory=_nothing)
    seen_from: Array | None = None
    seen_to: Array | None = None
    paused_from: Array = field(default_factory=_nothing)
    paused_to: Array = field(default_factory=_nothing)


def activities(joined: Joined) -> Iterator[Activity]:
    """The GPUs of a recording, by their number; one without operations for each process whose device was not seen."""
    if joined.recording.has_executions and joined.recording.executions.rows:
        yield from _of_executions(joined)
    elif joined.recording.spans.rows or joined.recording.coverage.rows:
        yield from _of_spans(joined)
    else:
        for process in np.unique(joined.process[joined.submits]).tolist():
            yield Activity(-1, (process,), seen_from=_nothing(), seen_to=_nothing())


def _gpus(joined: Joined, process: Array, device: Array) -> Iterator[tuple[int, tuple[int, ...], Array | None]]:
    """Rows by GPU: a device number of one machine, and where ranks are told apart, of one rank; None: all rows."""
    processes = joined.recording.processes
    known = range(processes.rows)
    node = [int(processes["node"][row]) for row in known]
    rank = [int(processes["rank"][row]) for row in known]
    least = int(device.min(initial=0))
    many = int(device.max(initial=0)) - least + 1
    both = distinct(process.astype(np.int64) * many + (device - least)).tolist()
    pairs = [(one // many, one % many + least) for one in both]
    by_gpu: dict[tuple[int, int, int], list[int]] = {}
    for row, one in pairs:
        where = (node[row], rank[row]) if 0 <= row < len(node) else (0, -1)
        by_gpu.setdefault((*where, one), []).append(row)
    for (_, _, one), members in sorted(by_gpu.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
        mine = None
        if len(members) < len(pairs):
            mine = np.flatnonzero((device == one) & np.isin(process, np.array(members)))
        yield one, tuple(members), mine


def _of_executions(joined: Joined) -> Iterator[Activity]:
    table = joined.recording.executions
    names = [(one, joined.recording.text(one)) for one in distinct(table["name"]).tolist()]
    copy_kernels = [one for one, name in names if any(part in name for part in COPY_KERNELS)]
    copying = table["engine"] == Engine.COPY
    if copy_kernels:
        copying |= np.isin(table["name"], np.array(copy_kernels, dtype=np.int32))
    for device, processes, mine in _gpus(joined, table["process"], table["device"]):
        rows = slice(None) if mine is None else mine
        start = joined.x_start[rows]
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            rows = order if mine is None else mine[order]
        call = joined.x_call[rows]
        begun = joined.x_start[rows]
        yield Activity(
            device,
            processes,
            begun,
            joined.x_end[rows],
            copying[rows],
            table["engine"][rows] == Engine.OTHER,
            table["bytes"][rows],
            table["direction"][rows],
            _where(call, joined.caller, NOBODY),
            OfCalls(call, joined.start, begun),
            OfCalls(call, joined.end, begun),
            of_executions(joined, rows),
        )


def _where(call: Array, column: Array, otherwise: Array | int) -> Array:
    """A column of calls for each operation; `otherwise` for those whose call is not known."""
    taken: Array = np.where(call >= 0, column[np.maximum(call, 0)] if len(column) else 0, otherwise)
    return taken


def _of_spans(joined: Joined) -> Iterator[Activity]:
    """From what `kvprobe run` measured between timing events."""
    spans, coverage = joined.recording.spans, joined.recording.coverage
    process = np.concatenate((spans["process"], coverage["process"]))
    device = np.concatenate((spans["device"], coverage["device"]))
    caller, entered, returned, begun, ended = _submitted(joined)
    for number, processes, some in _gpus(joined, process, device):
        mine = np.arange(len(process)) if some is None else some
        rows = mine[mine < spans.rows]
        rows = rows[among(spans["engine"][rows], (Engine.KERNEL, Engine.COPY, Engine.MEMSET, Engine.OTHER))]
        rows = rows[np.argsort(begun[rows], kind="stable")]
        covered = mine[mine >= spans.rows] - spans.rows
        paused = covered[coverage["stopped"][covered] == PAUSED] if len(processes) == 1 else covered[:0]
        paused_from, paused_to = union(coverage["start_ns"][paused], coverage["end_ns"][paused])
        covered = covered[coverage["reason"][covered] == 0]
        seen_from, seen_to = union(coverage["start_ns"][covered], coverage["end_ns"][covered])
        yield Activity(
            number,
            processes,
            begun[rows],
            ended[rows],
            spans["engine"][rows] == Engine.COPY,
            spans["engine"][rows] == Engine.OTHER,
            spans["bytes"][rows],
            spans["direction"][rows],
            caller[rows],
            entered[rows],
            returned[rows],
            of_spans(joined, rows),
            spans["error_ns"][rows],
            seen_from,
            seen_to,
            paused_from,
            paused_to,
        )


def _submitted(joined: Joined) -> tuple[Array, Array, Array, Array, Array]:
    """Who submitted each span, when the call was entered and had returned, and when the span's work began and ended.

    A span's call is the last one before it on its stream that was kept. What begins in a stream that was idle began
    when its submission returned, by the way marks are read; launches are counted and not kept one by one. A copy of
    pageable memory is there while its bytes are on the link (see `pageable`). Copies of a batch that an idle stream was
    given begin as its call returns. A copy whose call waited while another thread allocated or pinned memory began
    behind that: it is the other's.
    """
    spans = joined.recording.spans
    begun, ended = spans["start_ns"].copy(), spans["end_ns"].copy()
    start, stream, process = spans["start_ns"], spans["stream"], spans["process"]
    submits = np.flatnonzero(among(joined.kind, (*SUBMITTING, CallKind.COPY_SYNC)))
    caller = np.full(spans.rows, NOBODY, dtype=np.int64)
    entered, returned = start.copy(), start.copy()
    for one, owner in np.unique(np.stack((stream, process)), axis=1).T.tolist():
        mine = np.flatnonzero((stream == one) & (process == owner))
        mine = mine[np.argsort(start[mine], kind="stable")]
        own = submits[(joined.stream[submits] == one) & (joined.process[submits] == owner)]
        own = own[np.argsort(joined.start[own], kind="stable")]
        at = np.searchsorted(joined.start[own], start[mine], "right") - 1
        known = np.flatnonzero(at >= 0)
        call = own[at[known]]
        caller[mine] = _usual(joined, owner, one)
        caller[mine[known]] = joined.caller[call]
        busy = np.append(False, start[mine][1:] <= np.maximum.accumulate(spans["end_ns"][mine])[:-1])[known]
        entered[mine[known[busy]]], returned[mine[known[busy]]] = joined.start[call[busy]], joined.end[call[busy]]
        staged = (joined.memory[call] == Memory.PAGEABLE) & (spans["engine"][mine[known]] == Engine.COPY)
        of, by = mine[known[staged]], call[staged]
        entered[of], returned[of] = joined.start[by], joined.end[by]
        begun[of], ended[of] = on_link(
            (begun[of], ended[of]),
            (entered[of], returned[of]),
            spans["bytes"][of],
            spans["direction"][of],
            _at_link_rate(joined, of),
        )
        copies = spans["engine"][mine[known]] == Engine.COPY
        late = ~busy & copies & (joined.kind[call] == CallKind.BATCH) & (joined.count[call] <= BATCH_COPIES)
        of, by = mine[known[late]], call[late]
        entered[of], returned[of] = joined.start[by], joined.end[by]
        latest = ended[of] - _at_link_rate(joined, of).astype(np.int64)
        begun[of] = np.maximum(begun[of], np.minimum(joined.end[by], latest))
        first = np.flatnonzero((joined.end[call] > start[mine[known]]) & copies)
        holder = _holders(joined, call[first])
        of, first, holder = mine[known[first[holder >= 0]]], first[holder >= 0], holder[holder >= 0]
        latest = ended[of] - _at_link_rate(joined, of).astype(np.int64)
        begun[of] = np.maximum(begun[of], np.minimum(joined.end[holder], latest))
        caller[of] = joined.caller[holder]
        entered[of], returned[of] = joined.start[call[first]], joined.end[call[first]]
    return caller, np.minimum(entered, _not_later(joined, caller, begun)), returned, begun, ended


def _not_later(joined: Joined, caller: Array, begun: Array) -> Array:
    """When each span had been submitted at the latest: before the call in which its thread waits as it begins.

    Launches are counted and not kept one by one, and a mark is reached some microseconds after what it follows: so the
    span of a kernel that was launched long before seems to begin in an idle stream.
    """
    out: Array = begun.copy()
    waits = np.flatnonzero(among(joined.kind, (CallKind.SYNC, CallKind.COPY_SYNC)) & ~joined.nested)
    waits = waits[np.argsort(joined.start[waits], kind="stable")]
    for one in distinct(joined.caller[waits]).tolist():
        own = waits[joined.caller[waits] == one]
        mine = np.flatnonzero(caller == one)
        at = np.searchsorted(joined.start[own], begun[mine], "right") - 1
        inside = (at >= 0) & (joined.end[own[np.maximum(at, 0)]] > begun[mine])
        out[mine[inside]] = joined.start[own[at[inside]]]
    return out


def _at_link_rate(joined: Joined, rows: Array) -> Array:
    """How long the bytes of some spans take the link, ns."""
    spans = joined.recording.spans
    rates = [joined.link_or_assumed(one).bytes_per_s for one in (Direction.D2H, Direction.H2D)]
    took: Array = spans["bytes"][rows] * 1e9 / np.where(spans["direction"][rows] == Direction.D2H, *rates)
    return took


def _holders(joined: Joined, calls: Array) -> Array:
    """The call of another thread that each of these waited for as it allocated or pinned memory; -1: none."""
    found = np.full(len(calls), -1, dtype=np.int64)
    long = np.flatnonzero(joined.end[calls] - joined.start[calls] >= HELD_NS)
    holders = np.flatnonzero((joined.kind == CallKind.ALLOC) & (joined.end - joined.start >= HELD_NS))
    holders = holders[np.argsort(joined.end[holders], kind="stable")]
    for one in long.tolist() if len(holders) else ():
        call = calls[one]
        others = holders[
            (joined.caller[holders] != joined.caller[call]) & (joined.process[holders] == joined.process[call])
        ]
        begin, end = joined.start[call], joined.end[call]
        at = int(np.searchsorted(joined.end[others], end, "right")) - 1  # it goes on when that one returns
        if at < 0 or end - joined.end[others[at]] > (end - begin) // 10:
            continue
        inside = Cover(joined.start[others], joined.end[others]).within(np.array([begin]), np.array([end]))
        if 2 * inside[0] > end - begin:
            found[one] = others[at]
    return found


def _usual(joined: Joined, process: int, stream: int) -> int:
    """The thread of a process that submits most to a stream by its totals, else the one that calls most; NOBODY."""
    totals = joined.recording.totals
    made = (totals["process"] == process) & among(totals["kind"], SUBMITTING)
    for some in (made & (totals["stream"] == stream), made):
        calls = np.flatnonzero((joined.process == process) & np.isin(joined.thread, totals["thread"][some]))
        if len(calls):
            most = totals["thread"][some][
                np.argmax(np.where(np.isin(totals["thread"][some], joined.thread[calls]), totals["calls"][some], 0))
            ]
            return int(joined.caller[calls[joined.thread[calls] == most][0]])
    return NOBODY


def between_host_and_device(direction: Array) -> Array:
    """Mask of operations that the link carries."""
    mask: Array = (direction == Direction.H2D) | (direction == Direction.D2H)
    return mask
