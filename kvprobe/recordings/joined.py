"""A recording's calls joined with their executions, once: what an account and the causes read."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.assemble import among, codes, constant, positions
from kvprobe.recordings.intervals import Cover, distinct, in_time, running_max_by_group
from kvprobe.recordings.link_rate import LinkRate, link_rate, rate_or_assumed
from kvprobe.recordings.links import links_of
from kvprobe.recordings.model import SUBMITTING, CallKind, Direction, Engine, Memory, Recording, Table
from kvprobe.recordings.serving import serving_window
from kvprobe.recordings.tier_uses import TierUses, tier_uses

Array: TypeAlias = npt.NDArray[Any]

__all__ = ["Joined", "on_gpu"]


class Gpu(Protocol):
    """A GPU of an account: its device number and the rows of its processes."""

    device: int
    processes: tuple[int, ...]


def on_gpu(table: Table, gpu: Gpu) -> Array:
    """Mask over rows of a table that has processes and devices, such as `executions`: those of this GPU."""
    mask: Array = among(table["process"], gpu.processes)
    mask &= table["device"] == gpu.device
    return mask


class Joined:
    """A recording, joined.

    Attributes (arrays of one entry a call unless said otherwise):
        start, end, dur: ns. process, thread, kind, name, stream, direction, memory, bytes, count, src, dst: as in the
            model, with what the call did not know filled in from its execution.
        caller: number of the call's (process, thread) pair.
        submits: the call submits work to a stream.
        nested: the call runs inside another one of its thread: it owns no time of its own.
        serving: the window that is judged.
        exec_start, exec_end: first start and last end of the executions the call caused; -1 where unknown.
        x_start, x_end: of each execution; x_call: the row of the call that caused it, -1 where none did.
    """

    def __init__(self, recording: Recording) -> None:
        """Joins calls with executions; costs a few sorts."""
        self.recording = recording
        calls, executions = recording.calls, recording.executions
        self.start, self.end = calls["start_ns"], calls["end_ns"]
        self.dur = self.end - self.start
        np.maximum(self.dur, 0, out=self.dur)
        self.process, self.thread = calls["process"], calls["thread"]
        self.kind, self.name, self.count = calls["kind"], calls["name"], calls["count"]
        self.src, self.dst = calls["src"], calls["dst"]
        self.transfer = calls["transfer"]
        self.submits = among(self.kind, SUBMITTING)
        threads, place = codes(self.thread)
        self.caller = self.process.astype(np.int32) * max(len(threads), 1) + place
        self.x_start, self.x_end = executions["start_ns"], executions["end_ns"]
        self._join()
        self.serving = recording.window or serving_window(recording)

    def _join(self) -> None:
        calls, executions = self.recording.calls, self.recording.executions
        links = links_of(self.recording)
        self.x_call, self.x_of_call = links.call, links.first
        self.exec_start, self.exec_end = links.began, links.done
        first_row = links.first

        def filled(column: str, unknown: int) -> Array:
            mine: Array = calls[column]
            gap = (mine == unknown) & (first_row >= 0)
            theirs = executions[column][first_row[gap]]
            if not (theirs != unknown).any():  # a kernel moves nothing anywhere
                return mine
            mine = mine.copy()
            mine[gap] = theirs
            return mine

        self.stream = filled("stream", -1)
        self.direction = filled("direction", Direction.UNKNOWN)
        self.memory = filled("memory", Memory.UNKNOWN)
        self.bytes = filled("bytes", 0)

    @cached_property
    def _devices(self) -> int:
        """More than any device number of the recording, plus one for those that are not known (-1)."""
        tables = self.recording.executions, self.recording.spans, self.recording.coverage, self.recording.streams
        return 2 + max(int(table["device"].max(initial=0)) for table in tables)

    def gpu_number(self, process: Array | int, device: Array | int) -> Array:
        """A number for each process's GPU, as one process may use several; int64, of the arguments' shape."""
        number: Array = np.asarray(process, dtype=np.int64) * self._devices + np.asarray(device) + 1
        return number

    def gpu_numbers(self, gpu: Gpu) -> Array:
        """`gpu_number` of a GPU of an account, for each of its processes."""
        return self.gpu_number(np.array(gpu.processes), gpu.device)

    @cached_property
    def x_gpu(self) -> Array:
        """`gpu_number` of each execution."""
        process, device = (self.recording.executions[name] for name in ("process", "device"))
        if len(process) and constant(process) and constant(device):  # stored once, however many there are
            return np.broadcast_to(self.gpu_number(process[0], device[0]), (len(process),))
        return self.gpu_number(process, device)

    @cached_property
    def call_device(self) -> Array:
        """Device number of each call's stream; -1 where that is not known."""
        device: Array = np.append(self.recording.streams["device"], -1)[self.stream]
        return device

    @cached_property
    def call_gpu(self) -> Array:
        """`gpu_number` of each call; where its stream's device is not known, that of no GPU (`meant_by`)."""
        return self.gpu_number(self.process, self.call_device)

    def meant_by(self, number: int, table: Table) -> Array:
        """Mask over a table's rows: those of the GPU of this `call_gpu`, or where it is of none, of its process."""
        mask: Array = table["process"] == number // self._devices
        return mask & (table["device"] == number % self._devices - 1) if number % self._devices else mask

    def calls_of_gpu(self, gpu: Gpu) -> Array:
        """Mask over calls of this GPU's processes, without those whose stream is another GPU's."""
        mask: Array = among(self.process, gpu.processes)
        mask &= (self.call_device == gpu.device) | (self.call_device < 0) | (gpu.device < 0)
        return mask

    @cached_property
    def by_caller(self) -> Array:
        """Rows sorted by caller, then start."""
        order = in_time(np.arange(len(self.start), dtype=np.int32), self.start)
        callers, place = codes(self.caller[order])
        return np.concatenate([order[:0], *(order[rows] for rows in positions(place, len(callers)))])

    @cached_property
    def _called(self) -> dict[int, str]:
        """The names of calls in small letters, by their index: few, where ids of requests are names, too."""
        used, most = distinct(self.name).tolist(), len(self.recording.names)
        return {one: self.recording.names[one].lower() for one in used if 0 <= one < most}

    @cached_property
    def nested(self) -> Array:
        """Calls that begin before an earlier call of their thread has ended."""
        out = np.zeros(len(self.start), dtype=bool)
        order = self.by_caller
        if len(order) > 1:
            caller, start, end = self.caller[order], self.start[order], self.end[order]
            if ((start[1:] < end[:-1]) & (caller[1:] == caller[:-1])).any():  # else no call begins inside another
                reach = running_max_by_group(end, caller)
                out[order[1:]] = (caller[1:] == caller[:-1]) & (start[1:] < reach[:-1])
        return out

    @cached_property
    def own_time(self) -> Array:
        """Rows of the calls that are nested in no other, sorted by caller, then start."""
        order = self.by_caller
        return order[~self.nested[order]] if self.nested.any() else order

    @cached_property
    def tier_uses(self) -> TierUses:
        """Which reads and writes below CPU memory are a tier's."""
        return tier_uses(self.recording)

    def tier_times(self, process: int, thread: int) -> tuple[Array, Array]:
        """Where a thread was in reads and writes of a tier, from and to in ns, (operations,) each."""
        table = self.recording.tier_operations
        if not table.rows:
            return table["start_ns"], table["end_ns"]
        uses = self.tier_uses
        mine = (table["process"] == process) & (table["thread"] == thread) & uses.tier & uses.timed
        return table["start_ns"][mine], table["end_ns"][mine]

    def occupied(self, calls: Array) -> Cover:
        """Where one thread, whose `calls` this mask tells, was in them or in reads and writes of a tier.

        Or another thread read what a copy of this one's takes to a GPU.
        """
        if not self.recording.tier_operations.rows or not calls.any():
            return Cover(self.start[calls], self.end[calls])
        first = int(np.argmax(calls))
        start, end = self.tier_times(int(self.process[first]), int(self.thread[first]))
        table, copy = self.recording.tier_operations, self.tier_uses.copy
        fed = (copy >= 0) & calls[copy] & (table["writes"] == 0)
        starts, ends = (self.start[calls], start, table["start_ns"][fed]), (self.end[calls], end, table["end_ns"][fed])
        return Cover(np.concatenate(starts), np.concatenate(ends))

    @cached_property
    def window(self) -> tuple[int, int]:
        """First and last instant of what is judged."""
        return self.serving.start_ns, self.serving.end_ns

    @property
    def span_ns(self) -> int:
        """Length of the window."""
        return self.window[1] - self.window[0]

    @property
    def x_dur(self) -> Array:
        """Duration of each execution, ns; not kept: there may be millions."""
        took: Array = self.x_end - self.x_start
        np.maximum(took, 0, out=took)
        return took

    @cached_property
    def launching_callers(self) -> Array:
        """Callers that launch kernels or graphs: the threads a model runs on."""
        return distinct(self.caller[(self.kind == CallKind.LAUNCH) | (self.kind == CallKind.GRAPH)])

    @cached_property
    def kernel_streams(self) -> Array:
        """Streams that carry kernels or graphs; -1 is never among them."""
        table = self.recording.executions
        ran = table["stream"][table["engine"] == Engine.KERNEL]
        asked = self.stream[(self.kind == CallKind.LAUNCH) | (self.kind == CallKind.GRAPH)]
        streams = np.union1d(distinct(ran), distinct(asked))
        streams = streams[streams >= 0]
        return np.asarray(streams)

    def link(self, direction: Direction) -> tuple[float, str]:
        """Bytes per second that one copy of this direction can reach, and how that is known; 0 where unknown."""
        return link_rate(self.recording, direction)

    def link_or_assumed(self, direction: Direction) -> LinkRate:
        """The same; where it is unknown, what the link carries that this GPU is made for."""
        return rate_or_assumed(self.recording, direction)

    def is_named(self, *parts: str) -> Array:
        """Mask of calls whose name contains one of the parts, case aside."""
        meant = [one for one, word in self._called.items() if any(part in word for part in parts)]
        if not meant:
            return np.zeros(len(self.name), dtype=bool)
        known = np.zeros(len(self.recording.names) + 1, dtype=bool)  # the last: no name
        known[meant] = True
        inside = (self.name >= 0) & (self.name < len(known))
        mask: Array = known[np.where(inside, self.name, -1)]
        return mask

    def text(self, index: int) -> str:
        """An interned name."""
        return self.recording.text(int(index))

    def pid(self, process: int) -> int:
        """Process id of a process row, or the row where unknown."""
        table = self.recording.processes
        return int(table["pid"][process]) if 0 <= process < table.rows else int(process)

    def rank(self, process: int) -> int:
        """Rank of a process row, -1 where it has none."""
        table = self.recording.processes
        return int(table["rank"][process]) if 0 <= process < table.rows else -1

    def stream_name(self, stream: int) -> str:
        """How to call a stream in a sentence."""
        return self.recording.stream_title(stream)
