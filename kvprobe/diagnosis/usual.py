"""What a recording's calls usually cost, and how full its queues were: the causes of a full queue are told from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from kvprobe.recordings.assemble import among, pairs, positions, rows_of
from kvprobe.recordings.intervals import Cover, distinct, group_starts, in_time
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Label, Memory, Recording
from kvprobe.recordings.occupancy import Occupancy, occupancy

T = TypeVar("T")

__all__ = ["SLOW_NS", "UsualCosts"]

SLOW_NS = 60_000  # a submission this long is worth an explanation: ten times any recorder's cost per call


class UsualCosts(Joined):
    """A recording, joined once, with what is usual in it.

    Attributes, beyond those of `Joined`:
        outside: mask of the calls that are not in the serving window, of which nothing is claimed.
    """

    def __init__(self, recording: Recording, known: Occupancy | None = None) -> None:
        """Joins calls with executions; costs a few sorts. `known`: the recording's occupancy, where it is at hand."""
        self._made: dict[Callable[..., Any], Any] = {}
        self._common: dict[int, int] = {}
        self._launches: dict[int, Array] = {}
        if known is not None:
            self.occupancy = known
        super().__init__(recording)
        self.outside = ~self.serving.holds(self.process, self.start)

    # ---- what was usual -----------------------------------------------------------------------------------------

    @cached_property
    def usual_ns(self) -> Array:
        """What a call of its name and process usually takes when nothing is in its way, for each call.

        The lower quartile, so that a recording in which most calls are slow still knows; a name that is seen fewer
        than eight times takes its kind's, and all take at most the process's for submissions, as records of events do.
        """
        out = np.zeros(len(self.dur), dtype=np.int64)
        groups, place = pairs(self.process, self.name)  # there may be as many names as calls
        for (process, _), rows in zip(groups, positions(place, len(groups)), strict=True):
            if process < 0:
                continue
            common, kind = self.common_ns(process), self.kind[rows[0]]
            if len(rows) < 8 and kind != CallKind.GRAPH:
                out[rows] = common
                continue
            low = int(np.percentile(self.dur[rows[:: 1 + len(rows) // 100_000]], 25))
            if kind != CallKind.GRAPH:  # a graph launch costs by its nodes: only its own kind tells
                alike = self.submits[rows[0]] or kind == CallKind.EVENT
                low = min(low, 4 * common) if alike else low
            out[rows] = low
        return out

    def once(self, make: Callable[[Any], T]) -> T:
        """What `make` says of this recording, made at the first call: several causes ask for the same."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def common_ns(self, process: int) -> int:
        """Lower quartile of a process's submissions, pageable copies left out; 5 µs where there are hardly any."""
        known = self._common
        if process not in known:
            quick = self.dur[(self.process == process) & self.submits & (self.memory != Memory.PAGEABLE)]
            known[process] = int(np.percentile(quick[:: 1 + len(quick) // 100_000], 25)) if len(quick) >= 8 else 5_000
        return known[process]

    def common_ns_of(self, rows: Array) -> Array:
        """The same of the process of each of these calls."""
        out: Array = np.zeros(len(rows), dtype=np.int64)
        for process in distinct(self.process[rows]).tolist():
            out[self.process[rows] == process] = self.common_ns(process)
        return out

    def launches(self, process: int) -> Array:
        """Rows of a process's kernel and graph launches, in the order of their start."""
        known = self._launches
        if process not in known:
            mine = (self.kind == CallKind.LAUNCH) | (self.kind == CallKind.GRAPH)
            known[process] = in_time(rows_of(mine & (self.process == process)), self.start)
        return known[process]

    def call_counts(self, kinds: Sequence[CallKind]) -> Array:
        """Calls of these kinds by stream, (streams,) float64: those in the recording, or in its totals where more."""
        calls, totals, streams = self.recording.calls, self.recording.totals, self.recording.streams.rows
        kept = (calls["stream"] >= 0) & among(calls["kind"], kinds)
        counted = (totals["stream"] >= 0) & among(totals["kind"], kinds)
        detail = np.bincount(calls["stream"][kept], minlength=streams)
        whole = np.bincount(totals["stream"][counted], weights=totals["calls"][counted], minlength=streams)
        more: Array = np.maximum(detail, whole)
        return more

    def between_kernels(self, copies: Array) -> Array:
        """Of these copies, rows of calls, those whose stream has as many launches, (copies,) bool.

        A stream of copies has a few launches too, to begin with.
        """
        launches, stream = self.call_counts((CallKind.LAUNCH, CallKind.GRAPH)), self.stream[copies]
        count = np.bincount(stream[stream >= 0], minlength=len(launches))
        mask: Array = np.append(launches >= count, False)[stream]  # -1, no known stream: the last
        return mask

    @property
    def excess_ns(self) -> Array:
        """How much longer each call took than such a call usually takes; not kept, as there may be millions."""
        return self.excess_of(slice(None))

    def excess_of(self, rows: Array | slice) -> Array:
        """The same of these calls alone."""
        excess: Array = np.maximum(self.dur[rows] - self.usual_ns[rows], 0)
        return excess

    @cached_property
    def slow(self) -> Array:
        """Mask of calls that took at least SLOW_NS, most of it more than such a call usually takes."""
        mask: Array = self.dur > SLOW_NS
        rows = np.flatnonzero(mask)
        mask[rows] = 2 * self.excess_of(rows) > self.dur[rows]
        return mask

    def on_launching_thread(self, rows: Array) -> Array:
        """Mask over `rows`: the call is made by a thread that launches compute."""
        return among(self.caller[rows], self.launching_callers)

    def label_cover(self, *labels: Label, process: int | None = None) -> Cover:
        """Instants that the recorder labelled so, on whatever thread (a flush on a worker delays others)."""
        table = self.recording.labels
        keep = among(table["label"], labels)
        if process is not None:
            keep &= table["process"] == process
        return Cover(table["start_ns"][keep], table["end_ns"][keep])

    def busy(
        self,
        *engines: Engine,
        gpu: int | None = None,
        direction: Direction | None = None,
    ) -> Cover:
        """Instants at which a device executed something of these kinds; `gpu`: this one (`x_gpu`)."""
        table = self.recording.executions
        keep = among(table["engine"], engines)
        if gpu is not None:
            keep &= self.x_gpu == gpu
        if direction is not None:
            keep &= table["direction"] == direction
        return Cover(self.x_start[keep], self.x_end[keep])

    def busy_inside(self, rows: Array, *engines: Engine) -> Array:
        """For how long, inside each of these calls, its GPU executed something of these kinds; (rows,) int64 ns."""
        out, table = np.zeros(len(rows), dtype=np.int64), self.recording.executions
        of_kind = among(table["engine"], engines)
        for gpu in distinct(self.call_gpu[rows]).tolist():
            mine = self.call_gpu[rows] == gpu
            theirs = of_kind & self.meant_by(gpu, table)
            ran = Cover(self.x_start[theirs], self.x_end[theirs])
            out[mine] = ran.within(self.start[rows[mine]], self.end[rows[mine]])
        return out

    # ---- the queue ----------------------------------------------------------------------------------------------

    @cached_property
    def occupancy(self) -> Occupancy:
        """Depth, ceiling and blocked time of every queue."""
        return occupancy(self.recording)

    def caller_span_ns(self, rows: Array) -> int:
        """Summed recorded spans of the threads that made these calls."""
        callers, spans = self._caller_spans
        at = np.searchsorted(callers, distinct(self.caller[rows[~self.outside[rows]]]))
        return int(spans[at].sum())

    @cached_property
    def _caller_spans(self) -> tuple[Array, Array]:
        order = self.by_caller
        order = order[~self.outside[order]] if self.outside.any() else order
        callers = self.caller[order]
        edges = group_starts(callers)
        last = np.maximum.reduceat(self.end[order], edges) if len(edges) else edges
        last = np.minimum(last, self.serving.end_ns)
        first = edges if not len(edges) else order[edges]
        return callers[edges], np.maximum(last - self.start[first], 1)
