"""Recordings of generated uploads of experts, whose misses are known to the count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table

STRIDE = 96 << 10
GPU = 0x7F0000000000


def routed(
    seed: int, steps: int, layers: int, experts: int, picked: int, skew: float = 1.2
) -> Iterator[list[list[int]]]:
    """For each step and layer the experts that a router picks, ascending; some are picked more often than others."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1) ** skew
    of_layer = [random.permutation(experts) for _ in range(layers)]
    for _ in range(steps):
        yield [
            sorted(one[random.choice(experts, picked, replace=False, p=weights / weights.sum())].tolist())
            for one in of_layer
        ]


@dataclass
class Trace:
    """Calls that copy; `copy` adds one."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # src, dst, bytes, direction

    def copy(self, src: int, dst: int, size: int, direction: int = Direction.H2D) -> None:
        self.rows.append((src, dst, size, direction))

    def recording(self) -> Recording:
        src, dst, size, direction = (np.array(column) for column in zip(*self.rows, strict=True))
        start = np.arange(len(src)) * 1000
        columns = {"start_ns": start, "end_ns": start + 500, "process": start * 0, "thread": start * 0 + 7}
        columns |= {"name": start * 0 + 1, "kind": start * 0 + CallKind.COPY, "stream": start * 0}
        columns |= {"src": src, "dst": dst, "bytes": size, "direction": direction, "memory": start * 0 + Memory.PINNED}
        tables = {"calls": Table("calls", columns), "processes": Table("processes", {"pid": [1]})}
        return Recording([Source("made", "kvprobe")], tables, ["", "cudaMemcpyAsync"])


def runs(picked: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    first = last = picked[0]
    for one in picked[1:]:
        if one != last + 1:
            yield first, last
            first = one
        last = one
    yield first, last


def as_llama_cpp(
    seed: int = 1, steps: int = 40, layers: int = 3, experts: int = 32, picked: int = 4
) -> tuple[Trace, int]:
    """As llama.cpp copies: runs of picked experts of three tensors a layer, and 512 bytes more unless at the end."""
    trace, uploads = Trace(), 0
    tensor = experts * STRIDE
    for step in routed(seed, steps, layers, experts, picked):
        for layer, mine in enumerate(step):
            for part in range(3):
                # in a file one tensor follows the other, with something else between layers
                base = 0x100000000 + (3 * layer + part) * tensor + layer * 4096
                gpu = GPU + part * (tensor + 256)
                for first, last in runs(mine):
                    more = 512 if last < experts - 1 else 0
                    trace.copy(base + first * STRIDE, gpu + first * STRIDE, (last - first + 1) * STRIDE + more)
                uploads += len(mine)
    return trace, uploads


@dataclass
class Slots:
    """A cache on the GPU that gives up the expert not used longest."""

    count: int
    held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    misses: int = 0

    def use(self, expert: int) -> int | None:
        """The slot that it must be copied to; None where it is there."""
        if expert in self.held:
            self.held.move_to_end(expert)
            return None
        self.misses += 1
        slot = len(self.held) if len(self.held) < self.count else self.held.popitem(last=False)[1]
        self.held[expert] = slot
        return slot


def in_slots(count: int, seed: int = 1, steps: int = 60, layers: int = 4, experts: int = 32) -> tuple[Trace, Slots]:
    """As a cache of experts copies: what is missing, to any slot; all layers share the slots."""
    trace, slots = Trace(), Slots(count)
    for step in routed(seed, steps, layers, experts, 4):
        for layer, mine in enumerate(step):
            for expert in mine:
                slot = slots.use(layer * experts + expert)
                if slot is not None:
                    base = 0x100000000 + layer * (experts * STRIDE + 4096)
                    trace.copy(base + expert * STRIDE, GPU + slot * STRIDE, STRIDE)
    return trace, slots


def as_run(recording: Recording, unseen: Sequence[tuple[int, int]] = ()) -> Recording:
    """As `kvprobe run` would have recorded it: spans between marks, but of these times, and no call that launches."""
    calls, ran = recording.calls, recording.executions
    holes = Cover(np.array([one for one, _ in unseen]), np.array([one for _, one in unseen]))
    kept = holes.within(ran["start_ns"], ran["end_ns"]) == 0
    columns = ("start_ns", "end_ns", "process", "device", "stream", "engine", "direction", "bytes")
    spans = {name: ran[name][kept] for name in columns}
    spans |= {"count": np.ones(int(kept.sum())), "graph": np.full(int(kept.sum()), -1)}
    edges = np.array([calls["start_ns"].min(), *(at for pair in unseen for at in pair), calls["end_ns"].max()])
    begin, end = edges[:-1], edges[1:]
    hidden = np.arange(len(begin)) % 2 == 1
    names = [*recording.names, "the budget of marks was spent"]
    coverage = {"start_ns": begin, "end_ns": end, "reason": np.where(hidden, len(names) - 1, 0)}
    coverage |= {"process": begin * 0, "device": begin * 0, "stopped": hidden}
    tables = {name: recording.tables[name] for name in ("streams", "processes") if name in recording.tables}
    tables["calls"] = Table("calls", {name: calls[name][calls["kind"] != CallKind.LAUNCH] for name in calls.columns})
    tables |= {"spans": Table("spans", spans), "coverage": Table("coverage", coverage)}
    assert (spans["engine"] == Engine.KERNEL).any() and names[0] == ""
    return Recording(recording.source, tables, names)
