"""What each GPU did, as a recording shows it: kernels and copies, with the call that submitted each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvprobe.recordings.assemble import is_kind
from kvprobe.recordings.intervals import distinct, union
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import SUBMITTING, Array, Direction, Engine

__all__ = ["COPY_KERNELS", "Activity", "activities"]

# Kernels that copy between CPU and GPU: ours, SGLang's and LMCache's. A copy kernel is a copy.
COPY_KERNELS = ("kvp_copy_", "transfer_kernel_impl", "multi_layer_kv_transfer", "single_layer_kv_transfer")


def _nothing() -> Array:
    return np.zeros(0, dtype=np.int64)


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
        call: the row of the call that submitted each; -1 unknown.
        seen_from, seen_to: disjoint, ascending intervals in which all of its operations are known; None: at all times.
    """

    device: int
    processes: tuple[int, ...]
    start: Array = field(default_factory=_nothing)
    end: Array = field(default_factory=_nothing)
    copying: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    unclear: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    bytes: Array = field(default_factory=_nothing)
    direction: Array = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    call: Array = field(default_factory=_nothing)
    seen_from: Array | None = None
    seen_to: Array | None = None


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
    copy_kernels = [i for i, name in enumerate(joined.recording.names) if any(one in name for one in COPY_KERNELS)]
    copying = table["engine"] == Engine.COPY
    if copy_kernels:
        copying |= np.isin(table["name"], np.array(copy_kernels, dtype=np.int32))
    for device, processes, mine in _gpus(joined, table["process"], table["device"]):
        rows = slice(None) if mine is None else mine
        start = joined.x_start[rows]
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            rows = order if mine is None else mine[order]
        yield Activity(
            device,
            processes,
            joined.x_start[rows],
            joined.x_end[rows],
            copying[rows],
            table["engine"][rows] == Engine.OTHER,
            table["bytes"][rows],
            table["direction"][rows],
            joined.x_call[rows],
        )


def _of_spans(joined: Joined) -> Iterator[Activity]:
    """From what `kvprobe run` measured between timing events; a span's call is the last one before it on its stream."""
    spans, coverage = joined.recording.spans, joined.recording.coverage
    submits = np.flatnonzero(is_kind(joined.kind, SUBMITTING))
    seen_by: dict[tuple[int, int], Array] = {}
    process = np.concatenate((spans["process"], coverage["process"]))
    device = np.concatenate((spans["device"], coverage["device"]))
    for number, processes, some in _gpus(joined, process, device):
        mine = np.arange(len(process)) if some is None else some
        rows = mine[mine < spans.rows]
        rows = rows[is_kind(spans["engine"][rows], (Engine.KERNEL, Engine.COPY, Engine.MEMSET, Engine.OTHER))]
        rows = rows[np.argsort(spans["start_ns"][rows], kind="stable")]
        covered = mine[mine >= spans.rows] - spans.rows
        covered = covered[coverage["reason"][covered] == 0]
        seen_from, seen_to = union(coverage["start_ns"][covered], coverage["end_ns"][covered])
        call = np.full(len(rows), -1, dtype=np.int64)
        for stream in np.unique(spans["stream"][rows]).tolist():
            theirs = np.flatnonzero(spans["stream"][rows] == stream)
            if (stream, 0) not in seen_by:
                own = submits[joined.stream[submits] == stream]
                seen_by[stream, 0] = own[np.argsort(joined.start[own], kind="stable")]
            own = seen_by[stream, 0]
            at = np.searchsorted(joined.start[own], spans["start_ns"][rows[theirs]], "right") - 1
            call[theirs] = np.where(at >= 0, own[np.maximum(at, 0)] if len(own) else -1, -1)
        yield Activity(
            number,
            processes,
            spans["start_ns"][rows],
            spans["end_ns"][rows],
            spans["engine"][rows] == Engine.COPY,
            spans["engine"][rows] == Engine.OTHER,
            spans["bytes"][rows],
            spans["direction"][rows],
            call,
            seen_from,
            seen_to,
        )


def between_host_and_device(direction: Array) -> Array:
    """Mask of operations that the link carries."""
    mask: Array = (direction == Direction.H2D) | (direction == Direction.D2H)
    return mask
