"""An offload's measured forwards as a recording: what the report draws and the diagnosis reads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, RangeStyle, Recording, Source, Table
from kvprobe.recordings.vocabulary import Names
from kvprobe.weights.timeline import RESIDENT, Forward

if TYPE_CHECKING:
    from kvprobe.weights.offload import WeightOffload

COPY_STREAM, COMPUTE_STREAM = 0, 1


def recording_of(held: WeightOffload, what: str, command: str = "", window: int | None = None) -> Recording:
    """The forwards measured so far.

    Copies and the computation of offloaded layers are executions; the computation between them is one execution a gap.
    A layer's wait is a range, as is its computation.

    Args:
        held: an active offload.
        what: the name of the model, for the page's title and provenance.
        command: that made the measurement.
        window: of the forwards to take; None: all, whatever their window.
    """
    names = Names()
    rows = _Rows(names)
    for forward in held.forwards:
        if window not in (None, forward.window):
            continue
        rows.forward(forward, [unit.name for unit in held.plan.units])
    runtime = held.runtime
    pinned = Memory.PINNED if held.pinned_bytes else Memory.PAGEABLE
    columns = rows.columns(int(pinned))
    columns["streams"] = {
        "process": [0, 0],
        "device": [0, 0],
        "handle": [held.copy_stream, 0],
        "name": [names.add("weight copies"), names.add("computation")],
    }
    columns["processes"] = {"pid": [os.getpid()], "name": [names.add(Path(what).name)], "command": [names.add(command)]}
    recording = Recording(
        [Source(what, "kvprobe weights", command=command)],
        tables={name: Table(name, one) for name, one in columns.items()},
        names=names.list,
        has_executions=True,
        notes=list(held.notes),
    )
    profile = held.profile()
    recording.machine = {
        "provider": runtime.provider,
        "cuda": runtime.version,
        "link_bytes_per_s": profile.link_bytes_per_s,
    }
    recording.machine_how = {
        "provider": "kvprobe's own",
        "cuda": "cudaRuntimeGetVersion",
        "link_bytes_per_s": "bytes of the layers' copies over their time",
    }
    if profile.unmeasured:
        recording.notes.append(f"{profile.unmeasured} forwards were not measured: the host was too far ahead")
    return recording


class _Rows:
    """Columns in the making."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._thread = threading.get_native_id()
        self.copies: list[tuple[int, ...]] = []
        self.kernels: list[tuple[int, ...]] = []
        self.ranges: list[tuple[int, ...]] = []

    def forward(self, forward: Forward, units: list[str]) -> None:
        """Adds one forward."""
        add, between, at = self._names.add, self._names.add("layers on the GPU"), forward.start_ns
        for visit in forward.visits:
            name = units[visit.unit]
            if visit.enter_ns > at:
                self.kernels.append((at, visit.enter_ns, between))
            begin = visit.enter_ns + visit.wait_ns
            if visit.wait_ns:
                self.ranges.append((visit.enter_ns, begin, add(f"weights: wait for {name}")))
            self.ranges.append((begin, visit.leave_ns, add(f"weights: compute {name}")))
            self.kernels.append((begin, visit.leave_ns, add(name)))
            at = visit.leave_ns
            if visit.bytes:
                end = visit.copy_start_ns + visit.copy_ns
                self.copies.append(
                    (
                        visit.copy_start_ns,
                        end,
                        visit.submitted_ns,
                        visit.submit_ns,
                        visit.bytes,
                        visit.src,
                        visit.dst,
                        add(f"load {name}"),
                    )
                )
        if forward.end_ns > at:
            self.kernels.append((at, forward.end_ns, between))
        what = "weights: forward" + (" without copies" if forward.window == RESIDENT else f", window {forward.window}")
        self.ranges.append((forward.start_ns, forward.end_ns, add(what)))

    def columns(self, memory: int) -> dict[str, dict[str, Any]]:
        """By table."""
        numbers = range(1, len(self.copies) + 1)
        starts, ends, submitted, took, sizes, sources, targets, copy_names = _turn(self.copies, 8)
        k_start, k_end, k_name = _turn(self.kernels, 3)
        r_start, r_end, r_name = _turn(self.ranges, 3)
        many, kernels = len(self.copies), len(self.kernels)
        memcpy, domain = self._names.add("cudaMemcpyAsync"), self._names.add("kvprobe")
        return {
            "calls": {
                "start_ns": submitted,
                "end_ns": [a + b for a, b in zip(submitted, took, strict=True)],
                "process": [0] * many,
                "thread": [self._thread] * many,
                "name": [memcpy] * many,
                "kind": [CallKind.COPY] * many,
                "stream": [COPY_STREAM] * many,
                "direction": [Direction.H2D] * many,
                "memory": [memory] * many,
                "bytes": sizes,
                "count": [1] * many,
                "correlation": list(numbers),
                "transfer": list(numbers),
                "src": sources,
                "dst": targets,
            },
            "executions": {
                "start_ns": starts + k_start,
                "end_ns": ends + k_end,
                "process": [0] * (many + kernels),
                "device": [0] * (many + kernels),
                "stream": [COPY_STREAM] * many + [COMPUTE_STREAM] * kernels,
                "engine": [Engine.COPY] * many + [Engine.KERNEL] * kernels,
                "direction": [Direction.H2D] * many + [Direction.UNKNOWN] * kernels,
                "memory": [memory] * many + [Memory.UNKNOWN] * kernels,
                "bytes": sizes + [0] * kernels,
                "count": [1] * (many + kernels),
                "correlation": [*numbers] + [-1] * kernels,
                "name": copy_names + k_name,
            },
            "ranges": {
                "start_ns": r_start,
                "end_ns": r_end,
                "process": [0] * len(r_start),
                "thread": [self._thread] * len(r_start),
                "domain": [domain] * len(r_start),
                "name": r_name,
                "style": [RangeStyle.START_END] * len(r_start),
            },
            "transfers": {
                "start_ns": submitted,
                "end_ns": [max(a, b) for a, b in zip(ends, submitted, strict=True)],
                "process": [0] * many,
                "thread": [self._thread] * many,
                "stream": [COPY_STREAM] * many,
                "direction": [Direction.H2D] * many,
                "bytes": sizes,
                "count": [1] * many,
                "transfer": list(numbers),
                "submit_ns": took,
                "copy_ns": [b - a for a, b in zip(starts, ends, strict=True)],
                "wait_ns": [max(a - b - c, 0) for a, b, c in zip(starts, submitted, took, strict=True)],
                "ok": [1] * many,
            },
        }


def _turn(rows: list[tuple[int, ...]], width: int) -> list[list[int]]:
    """Rows as columns."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
