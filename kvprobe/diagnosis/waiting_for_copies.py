"""The GPU waited for copies, and no cause with a signature of its own explains this wait.

Mechanism: the model's next kernel needs bytes that are still being copied, or the thread launches the kernel only after
the copies. Loads that are submitted when they are needed, and not a step ahead, run alone however fast the link is.
Loads that are submitted ahead run alone, too, if their stream makes them wait until the kernels have ended. Loads that
need not wait run beside the kernels, and run alone only for the time by which the loads are longer than these kernels.

Signature: this cause has no signature of its own. The lines "waiting for copies" of the report say for how long only
copies ran. This cause gets the part of these lines that no other cause explains. The evidence says what the recording
shows about the copies: whether they were submitted too late, or early but had to wait in their stream. The report says
"the wait is measured, its cause is not": kvprobe knows for certain how long the GPU waited, but not why the copies were
late.

Before the first kernel of the window, and after the last one, nothing shows whether a model waited: weights may have
been loaded, or the model may have ended. kvprobe does not decide about this time.

Time lost: the wall time in which only copies ran. Predicted saving: kvprobe predicts a saving for loads that are
submitted ahead, for stores that the next step does not wait for, and for copies inside the GPU that overlap with
kernels. The saving is the time of these copies that kernels could have hidden, and at most the time of the kernels. If
the copies are smaller than 64 KiB, joining them saves at least 61.5% of the time for which they ran alone, as in
`small_copies`. For fewer bytes, kvprobe predicts none, because the saving depends on how many fewer bytes there are.
Fewer bytes are the first change where kernels can hide less than a tenth of a wait for loads or stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvprobe.account import COPIES, GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms, of_the_time, share
from kvprobe.diagnosis.left import most_left
from kvprobe.diagnosis.link_bound import FEWER, FEWER_STORES
from kvprobe.diagnosis.server_options import with_options
from kvprobe.diagnosis.small_copies import BATCH_GAIN, BATCH_IS_FASTER, MANY_SMALL, SMALL_BYTES
from kvprobe.diagnosis.synchronisation import CAUSE as WAITS
from kvprobe.diagnosis.waited_copies import WaitedCopies, waited_copies
from kvprobe.diagnosis.weights_not_overlapped import CAUSE as WEIGHTS
from kvprobe.diagnosis.weights_not_overlapped import MOVE_FEWER
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.joined import on_gpu
from kvprobe.recordings.model import Array, Direction, Engine

CAUSE = cause_of(__name__)
LOADS, STORES, INSIDE = "loads", "stores", "copies inside the GPU"
HARDLY = 0.01  # of what is lost: a change that saves less is none
LITTLE = 0.1  # of what is lost: where kernels can hide less, fewer bytes come first
AHEAD = Change(
    "Submit each load as soon as it is known that it is needed, one step earlier if that is possible, on a stream of "
    "its own, and let the compute stream wait for its event just before the first kernel that needs it",
    share=1.0,
)
HELD = Change(
    "Let loads run while the model computes: load into a second buffer, which no running kernel reads, on a stream for "
    "loads only. In this recording, most loads are submitted while kernels run, but their stream makes them wait until "
    "these kernels have ended",
    share=1.0,
)
BEHIND_STORES = (
    "Let loads run while the model computes: submit them on a stream for loads only. In this recording, they share a "
    "stream with {} stores, and wait until these are done. If they also wait for a kernel that reads their buffer, "
    "load into a second buffer"
)
BEHIND = Change(
    "Let the next step begin before the stores of this step have ended: submit stores on a stream of their own, and "
    "wait for their events only before their blocks are reused",
    share=1.0,
)
ALONE = Change(
    "Let the copies inside the GPU run on a stream of their own while the model computes, or leave them out: let the "
    "next kernel read their source"
)
FASTER = Change(
    "Reach the link's rate: pinned memory, larger or merged copies, one batch or one kernel for many blocks "
    "(`kvprobe run --fix auto`)",
)
JOINED = (
    "Join these small copies: keep blocks that travel together in one buffer, submit them by one batch call "
    "(cudaMemcpyBatchAsync), or copy them with one kernel (`kvprobe run --fix auto`)"
)


def find(joined: JoinedRecording) -> Finding | None:
    """What is left of waiting for copies, on the GPU that waited longest."""
    gpu, mine, lacks = most_left(joined, COPIES)
    if gpu is None:
        return None
    lost = gpu.stretches.sum_ns(mine)
    start, end = gpu.stretches.start[mine], gpu.stretches.end[mine]
    alone = Cover(start, end)
    copies = _copies(joined, gpu, alone)
    rows, by_direction = copies.rows, copies.by_direction
    late = gpu.stretches.sum_ns(mine & (gpu.stretches.caller != NOBODY))
    slow, full = (
        gpu.stretches.sum_ns(mine & (gpu.stretches.line == line)) for line in (Line.BELOW_LINK_RATE, Line.AT_LINK_RATE)
    )
    evidence = [*_alone(lost, full, by_direction, gpu), *_submitted(copies), *_launched(joined, gpu, late, lost)]
    waited = waited_copies(joined, rows)
    evidence[1:1] = waited.evidence()
    promised = joined.account.claimed_ns(gpu, WEIGHTS, COPIES)
    others = promised + joined.account.claimed_ns(gpu, WAITS, COPIES)
    hidden = gpu.ns(Line.COMPUTING) - _beside(joined, gpu) - others  # what computes can hide only so much, once
    evidence += _no_room(gpu, hidden, lost, others)
    first = _held(joined, rows[copies.held]) if 2 * int(copies.held.sum()) > len(rows) else _ahead(joined)
    changes = waited.change(first), waited.change(BEHIND)
    beside = _beside_compute(by_direction, changes, min(hidden / lost, 1.0) if lost else 1.0)
    fewer = [FEWER_STORES if [name for name, _ in by_direction] == [STORES] else FEWER]
    if promised:
        evidence.append(_no_more(promised))
        beside = [one for one in beside if (one.share or 0.0) >= HARDLY]
        fewer = [_fewer_loads(waited)]
    small = _small(joined, gpu, alone)
    evidence += small.evidence
    mostly_inside = max(by_direction, key=lambda one: one[1], default=("", 0))[0] == INSIDE  # they can be left out
    if mostly_inside or sum(one.share or 0.0 for one in beside) >= LITTLE:
        cure = [*beside, *fewer]
    else:  # what is predicted would come first: the evidence has how little it is
        cure = [*fewer, *(replace(one, share=None) for one in beside)]
    if 2 * slow >= lost:
        cure.insert(0, small.change(lost))
    loss = Loss(
        lost,
        len(rows),
        on="device",
        window=(int(start.min()), int(end.max())),
        span_ns=gpu.window_ns,
        places=joined.device_places(rows, alone.within(joined.x_start[rows], joined.x_end[rows])),
    )
    if lacks:
        return joined.line_question(CAUSE, f"Only copies ran for {{lost}}, and {lacks}", gpu, loss, evidence, lacks)
    title = f"The GPU waited {{lost}} for {_noun(by_direction, lost)}, {of_the_time(lost, gpu)}"
    return joined.line_finding(CAUSE, title, gpu, loss, evidence=evidence, cure=cure)


def _alone(lost: int, full: int, by_direction: list[tuple[str, int]], gpu: GpuAccount) -> Iterator[Evidence]:
    """For how many ns only copies ran, by direction, and for how many at the link's rate."""
    parts = ", ".join(f"{name} {ms(spent)}" for name, spent in by_direction)
    both = sum(spent for _, spent in by_direction) - lost
    parts += f"; {ms(both)} of this at the same time as another" if both >= HARDLY * lost else ""
    told = f"all of them {by_direction[0][0]}" if len(by_direction) == 1 else parts
    text = f"only copies ran for {ms(lost)}, {share(lost, gpu.window_ns)} of the serving window: {told}"
    yield Evidence(text, lost, "ns", MEASURED)
    if full:
        of = f"for {share(full, lost)} of these {ms(lost)}" if full < lost else "for all this time"
        yield Evidence(f"{of}, copies ran at the link's full rate", full, "ns", MEASURED)


class _Small(NamedTuple):
    """Copies so small that their fixed cost is what they take, as timing events tell them: executions have a cause.

    Attributes:
        ns: for how long they ran alone.
        evidence: their figures, where there are any.
    """

    ns: int
    evidence: list[Evidence]

    def change(self, lost: int) -> Change:
        """What makes copies below the link's rate faster, with its part of `lost` ns where that is known."""
        return Change(JOINED, share=BATCH_GAIN * self.ns / lost) if self.ns >= HARDLY * lost else FASTER


def _small(joined: JoinedRecording, gpu: GpuAccount, alone: Cover) -> _Small:
    """Those of SMALL_BYTES at most that ran alone."""
    spans = joined.recording.spans
    if joined.recording.has_executions or not spans.rows:
        return _Small(0, [])
    count = np.maximum(spans["count"], 1)
    copies = (spans["engine"] == Engine.COPY) & (spans["bytes"] > 0) & (spans["bytes"] < SMALL_BYTES * count)
    rows = np.flatnonzero(copies & on_gpu(spans, gpu))
    inside = alone.within(spans["start_ns"][rows], spans["end_ns"][rows])
    rows, ns = rows[inside > 0], int(inside.sum())
    many, size = int(count[rows].sum()), int(spans["bytes"][rows].sum())
    if many < MANY_SMALL:
        return _Small(0, [])
    took = max(int((spans["end_ns"][rows] - spans["start_ns"][rows]).sum()), 1)
    text = (
        f"copies of {size / many / 1024:.3g} KiB (mean of {many:,} that were observed) reached {size / took:.3g} GB/s: "
        f"what they cost is fixed, and does not fall with their bytes; {BATCH_IS_FASTER}"
    )
    return _Small(ns, [Evidence(text, size / took * 1e9, "bytes/s", MEASURED)])


def _ahead(joined: JoinedRecording) -> Change:
    """AHEAD, with the options of the servers that may be meant."""
    options = {"vLLM": "vLLM calls this asynchronous loading", "SGLang": "SGLang calls this prefetch"}
    return Change(with_options(joined.recording, AHEAD.text, options), share=AHEAD.share)


def _held(joined: JoinedRecording, rows: Array) -> Change:
    """What lets these copies begin earlier: HELD, or less where their stream holds loads behind stores."""
    table = joined.recording.executions
    loads = rows[table["direction"][rows] == Direction.H2D]
    streams, count = np.unique(table["stream"][loads], return_counts=True)
    if not len(streams):
        return HELD
    stream = table["stream"] == streams[np.argmax(count)]  # the one with most of these loads
    stores = int((stream & (table["engine"] == Engine.COPY) & (table["direction"] == Direction.D2H)).sum())
    computes = bool((stream & (table["engine"] == Engine.KERNEL)).any())
    if computes or 2 * stores < len(loads):
        return HELD
    return Change(BEHIND_STORES.format(f"{stores:,}"), share=HELD.share)


class _Activity(NamedTuple):
    """What ran on a GPU: by executions, or by what timing events told."""

    engine: Array
    direction: Array
    start: Array
    end: Array

    def mask(self, engine: Engine) -> Array:
        """Which of these are of this engine."""
        of: Array = self.engine == engine
        return of


def _seen(joined: JoinedRecording, gpu: GpuAccount) -> _Activity:
    table = joined.recording.executions if joined.recording.has_executions else joined.recording.spans
    mine = on_gpu(table, gpu)
    rows = slice(None) if mine.all() else mine
    return _Activity(*(table[name][rows] for name in ("engine", "direction", "start_ns", "end_ns")))


class _Alone(NamedTuple):
    """Copies that ran alone: their rows, which of them were held back or late, and the time of each direction.

    Attributes:
        held: between their submission and their beginning kernels ran for as long as the copy takes.
        late: submitted when no kernel ran, and none for as long ran before they began.
    """

    rows: Array
    held: Array
    late: Array
    by_direction: list[tuple[str, int]]


def _copies(joined: JoinedRecording, gpu: GpuAccount, alone: Cover) -> _Alone:
    table = joined.recording.executions
    rows = np.flatnonzero((table["engine"] == Engine.COPY) & on_gpu(table, gpu))
    rows = rows[alone.within(joined.x_start[rows], joined.x_end[rows]) > 0]
    names = {Direction.H2D: LOADS, Direction.D2H: STORES, Direction.D2D: INSIDE}
    spent = []
    seen = _seen(joined, gpu)
    for direction, name in names.items():
        copying = seen.mask(Engine.COPY) & (seen.direction == direction)
        ns = alone.intersect_ns(Cover(seen.start[copying], seen.end[copying]))
        if ns:
            spent.append((name, ns))
    nothing = np.zeros(len(rows), dtype=bool)
    if not len(joined.start):
        return _Alone(rows, nothing, nothing, spent)
    call = joined.x_call[rows]
    kernels = np.flatnonzero((table["engine"] == Engine.KERNEL) & on_gpu(table, gpu))
    computing = Cover(joined.x_start[kernels], joined.x_end[kernels])
    asked, begins = joined.start[np.maximum(call, 0)], joined.x_start[rows]
    held = (call >= 0) & (computing.within(asked, np.maximum(begins, asked)) >= np.maximum(joined.x_dur[rows], 1))
    late = (call >= 0) & ~held & (computing.within(asked, asked + 1) == 0)
    return _Alone(rows, held, late, spent)


def _submitted(found: _Alone) -> list[Evidence]:
    """Whether these copies were submitted too late, or in time and held back: what most of them were comes first."""
    of = f"of {len(found.rows):,} copies were submitted"
    too_late = f"{of} only when no kernel was running any more: too late to run while the GPU computes"
    early = (
        f"{of} early enough to overlap with kernels. They began only after the kernels, because they had to wait for "
        "an event or for other copies in their stream"
    )
    counts = [(int(found.late.sum()), too_late), (int(found.held.sum()), early)]
    counts.sort(key=lambda one: -one[0])  # the page has the first of them under its verdict: the rule, no exception
    return [Evidence(f"{count:,} {text}", count, "calls", COUNTED) for count, text in counts if count]


def _launched(joined: JoinedRecording, gpu: GpuAccount, late: int, lost: int) -> list[Evidence]:
    """Whether the next kernel had been launched while only copies ran: for `late` ns of `lost` it had not."""
    if late:
        text = f"for {ms(late)} of these {ms(lost)}, the next kernel had not been launched yet"
        return [Evidence(text, late, "ns", MEASURED)]
    table = joined.recording.executions
    kernels = (table["engine"] == Engine.KERNEL) & on_gpu(table, gpu)
    if not kernels.any() or (joined.x_call[kernels] < 0).any():
        return []
    text = (
        "all this time, the next kernel had already been launched: its stream made it wait for these copies, and no "
        "thread held it up"
    )
    return [Evidence(text, lost, "ns", MEASURED)]


def _fewer_loads(waited: WaitedCopies) -> Change:
    """What is left to do where prefetching is promised already."""
    how = " without waiting for each copy (`.to(device, non_blocking=True)`)" if waited.most else ""
    return Change(
        f"{MOVE_FEWER}. What prefetching the rest{how} saves, `{WEIGHTS}` counts: it is no part of this finding",
        "setting",
    )


def _no_more(promised: int) -> Evidence:
    """That the time in which the GPU computes is promised already."""
    text = (
        f"{ms(promised)} of copies could run while the GPU computes, which `{WEIGHTS}` counts; for the rest, it "
        "computes too little to hide them"
    )
    return Evidence(text, promised, "ns", INFERRED)


def _no_room(gpu: GpuAccount, hidden: int, lost: int, others: int) -> list[Evidence]:
    """Why kernels can hide only `hidden` ns of `lost`; nothing where they can hide all, or others claim a part."""
    if not 0 < hidden < lost or others:
        return []
    computed = gpu.ns(Line.COMPUTING)
    beside = f", and for {ms(computed - hidden)} of that, copies already overlap with it" if hidden < computed else ""
    text = f"the GPU computes for {ms(computed)}{beside}: kernels can hide another {ms(hidden)} of copies at most"
    return [Evidence(text, hidden, "ns", INFERRED)]


def _beside(joined: JoinedRecording, gpu: GpuAccount) -> int:
    """How long copies ran beside kernels, ns."""
    seen = _seen(joined, gpu)
    copies, kernels = seen.mask(Engine.COPY), seen.mask(Engine.KERNEL)
    computing = Cover(seen.start[kernels], seen.end[kernels])
    return int(Cover(seen.start[copies], seen.end[copies]).intersect_ns(computing))


def _beside_compute(by_direction: list[tuple[str, int]], changes: tuple[Change, Change], hidden: float) -> list[Change]:
    """A change for each direction, with its part of what compute could have hidden, 0 to 1; none for a trifle."""
    spent = dict(by_direction)
    total = max(sum(spent.values()), 1)
    loading, storing = changes
    parts = [(loading, spent.get(LOADS, 0)), (storing, spent.get(STORES, 0)), (ALONE, spent.get(INSIDE, 0))]
    parts.sort(key=lambda one: -one[1])
    if not spent:
        parts = parts[:2]
    matter = [(change, ns) for change, ns in parts if not spent or ns >= HARDLY * total]
    return [Change(change.text, share=max(hidden, 0.0) * ns / total) for change, ns in matter]


def _noun(by_direction: list[tuple[str, int]], lost: int) -> str:
    """What was waited for `lost` ns: of one direction, where all is; else copies, and what nearly all of them are.

    That figure is not said to be of loads where the evidence has another one of loads.
    """
    total = sum(ns for _, ns in by_direction)
    names = {LOADS: "loads (CPU to GPU)", STORES: "stores (GPU to CPU)", INSIDE: INSIDE}
    one, spent = next(((names[name], ns) for name, ns in by_direction if ns >= 0.9 * total), ("", 0))
    nearly = f"copies, nearly all of them {one.removeprefix('copies ')}"
    return "copies" if not one else one if ms(spent) == ms(lost) else nearly
