"""A stream is told to wait for a forward pass, and is then given more copies than its queue holds.

Mechanism: a store must wait for the compute stream, but the program submits the store's copies while the forward pass
still runs. None of the copies can start, so the queue fills up. The next call blocks until the forward pass ends, on
the thread that should launch the next step. Measured on an H200: one call behind a forward pass of 30 ms blocked for
28.9 ms.

Signature: a submission blocks when the queue of its stream is full. For most of the call, the stream executes nothing,
and the call returns when the stream starts to execute. kvprobe takes a queue for full if several calls block with the
same number of outstanding submissions, or if one call blocks at a depth that is known from real GPUs. Calls that block
after the stream has started have another cause, `launch_queue_saturation`: there, the stream executes all the time, and
each call waits for one operation.

Time lost: how much longer these calls took than with a free slot. Predicted saving: all of this time, if the store is
submitted after the forward pass. But if the queue stays full, further calls of the thread block. The wait then only
moves to these calls, and kvprobe predicts little. For a deeper queue, kvprobe simulates the calls with more slots:
the first copy that finds no slot blocks for the rest of the forward pass.

A stream can also wait for something outside of the GPU, such as a host function (`cudaLaunchHostFunc`). If nothing runs
on the GPU while the calls block, the title says so. Then only a shorter wait saves what the GPU waited: kvprobe
predicts this for the first change. The other changes let the thread go on, until the thread itself waits
for the same thing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.account import Line
from kvprobe.account.host_functions import of_executions
from kvprobe.diagnosis.deeper_queue import BATCHED, deeper, spared
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, range_of
from kvprobe.diagnosis.launch_queue_saturation import cliff
from kvprobe.diagnosis.merging import merged
from kvprobe.diagnosis.queue_full import Full, full
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import CallKind, Direction, Engine
from kvprobe.recordings.vocabulary import base_name

CAUSE = cause_of(__name__)
PROVES = Line.FULL_QUEUE


class _Fence(NamedTuple):
    """What the streams of the blocked calls waited for: how many of the calls show each.

    Attributes:
        told: times that their streams were told to wait for an event.
        kernels: calls during most of which kernels of other streams ran.
        copies: the same of copies, where no kernels ran.
        idle: calls during most of which nothing ran on the GPU, where most of them are such and neither other is seen.
        function: the call that put a host function in front of what the streams ran next; "" where none is known.
    """

    told: int
    kernels: int
    copies: int
    idle: int
    function: str

    @property
    def outside(self) -> str:
        """What the streams waited for outside of the GPU; "" where it was inside, or nothing shows it."""
        if not self.idle:
            return ""
        return f"a host function ({self.function})" if self.function else "something outside of the GPU"


def _fence(joined: JoinedRecording, rows: Array, ns: Array) -> _Fence:
    told = int((joined.is_named("streamwaitevent") & np.isin(joined.stream, np.unique(joined.stream[rows]))).sum())
    kernels = int((2 * joined.busy_inside(rows, Engine.KERNEL) > ns).sum())
    copies = 0 if kernels else int((2 * joined.busy_inside(rows, Engine.COPY) > ns).sum())
    ran = joined.busy_inside(rows, *Engine)
    seen = joined.recording.has_executions and not kernels and not copies
    idle = int((2 * ran < ns).sum()) if seen else 0
    idle = idle if 2 * idle > len(rows) else 0
    return _Fence(told, kernels, copies, idle, _function(joined, rows) if idle else "")


def _function(joined: JoinedRecording, rows: Array) -> str:
    """The call that put a host function in front of what the streams of these calls ran next; "" for most of none."""
    behind, table = of_executions(joined, slice(None)), joined.recording.executions
    found = []
    for row in rows.tolist() if len(behind) else ():
        later = np.flatnonzero((table["stream"] == joined.stream[row]) & (joined.x_end > joined.start[row]))
        if len(later) and behind[first := later[np.argmin(joined.x_start[later])]] >= 0:
            found.append(base_name(joined.text(int(joined.name[behind[first]]))))
    return max(set(found), key=found.count) if 2 * len(found) > len(rows) else ""


def find(joined: JoinedRecording) -> Finding | None:
    """Blocked calls during which their stream stood still."""
    found = full(joined)
    rows, ns = found.rows["fence"], found.ns["fence"]
    if not len(rows):
        return None
    fence = _fence(joined, rows, ns)
    launching = among(joined.kind[rows], [CallKind.LAUNCH, CallKind.GRAPH, CallKind.MEMSET])
    of_launches = 2 * int(ns[launching].sum()) > int(ns.sum())
    streams = np.unique(joined.stream[rows])
    waited = joined.stream_name(int(streams[0])) if len(streams) == 1 else f"{len(streams)} streams"
    queue, it = ("launch queue", "the stream") if len(streams) == 1 else ("launch queues", "these streams")
    waited = waited.replace("{", "{{").replace("}", "}}")  # a program may name its streams as it likes
    what = fence.outside or "an event"
    return joined.host_finding(
        CAUSE,
        f"The {queue} of {waited} filled up while {it} waited for {what}: {{calls}} submissions blocked for {{lost}}",
        "certain" if fence.told and fence.kernels else "likely",
        rows,
        ns,
        chart=cliff(joined, rows),
        evidence=[
            *_outside(fence, len(rows)),
            *_of_calls(joined, found, fence.told),
            *_inside(fence, len(rows)),
        ],
        cure=(*_ending(fence), *(_of_launches(joined, found) if of_launches else _of_copies(joined, found, fence))),
    )


def _of_calls(joined: JoinedRecording, found: Full, told: int) -> list[Evidence]:
    """What the blocked calls took, and by what they are known; `told`: waits of their streams for an event."""
    rows, lost = found.rows["fence"], int(found.ns["fence"].sum())
    behind_what = (
        "while their stream executed nothing"
        if joined.recording.has_executions
        else "the first since their stream was told to wait for an event, and far longer than the calls after them"
        if told
        else "the first to meet the full queue, and far longer than the calls after them"
    )
    outstanding, longest = range_of(joined.occupancy.depth[rows]), int(joined.dur[rows].max())
    return [
        Evidence(
            f"{len(rows):,} submissions blocked for {ms(lost)}, with {outstanding} outstanding, {behind_what}",
            lost,
            "ns",
            MEASURED,
        ),
        Evidence(f"the longest single call took {ms(longest)}", longest, "ns", MEASURED),
    ]


def _outside(fence: _Fence, calls: int) -> list[Evidence]:
    """That the streams waited for something outside of the GPU, where they did."""
    if not fence.outside:
        return []
    text = (
        f"during {_most_of(fence.idle, calls)}, nothing ran on the GPU: their stream waited for {fence.outside}. Only "
        "the first change shortens that wait"
    )
    return [Evidence(text, fence.idle, "calls", INFERRED)]


def _inside(fence: _Fence, calls: int) -> list[Evidence]:
    """What the streams waited for on the GPU."""
    evidence = []
    if fence.told:
        text = f"their streams had been told {fence.told:,} times to wait for an event"
        evidence.append(Evidence(text, fence.told, "calls", COUNTED))
    for count, what in ((fence.kernels, "kernels"), (fence.copies, "copies")):
        if count:
            text = f"during {_most_of(count, calls)}, {what} of other streams ran: their stream waited for these"
            evidence.append(Evidence(text, count, "calls", INFERRED))
    return evidence


def _ending(fence: _Fence) -> list[Change]:
    """What shortens a wait for something outside of the GPU."""
    if not fence.outside:
        return []
    if fence.function:
        text = (
            f"Shorten what the stream waits for: {fence.function} put a host function into it. Let the function return "
            "sooner, or take it out of this stream: let another thread wait, and submit the copies then"
        )
    else:
        text = (
            "Find what the stream waits for outside of the GPU, and shorten that wait: a host function "
            "(cudaLaunchHostFunc), an event of another process, or a value in memory"
        )
    return [Change(text, share=1.0, ends=True)]


def _most_of(count: int, calls: int) -> str:
    """So many of the blocked calls, of each of which most is meant."""
    whole = f"{count:,} of the {calls:,} blocked calls"
    return f"most of {whole if calls > count else f'each of the {calls:,} blocked calls' if calls > 1 else 'this call'}"


def _of_copies(joined: JoinedRecording, found: Full, fence: _Fence) -> tuple[Change, ...]:
    """What helps where it is copies that wait."""
    rows, ns = found.rows["fence"], found.ns["fence"]
    of_loads = 2 * int(ns[joined.direction[rows] == Direction.H2D].sum()) > int(ns.sum())
    channels = int(joined.recording.machine.get("channels") or 4)
    return (
        Change(
            "Submit the copies only after what their stream waits for is over: until then, the thread is free"
            if fence.outside
            else "Submit the loads only after the work that they wait for has ended"
            if of_loads
            else "Submit the store after the forward pass that it waits for has ended, or at the start of the next "
            "step (vLLM "
            "0.14)",
            share=1.0,
        ),
        deeper(joined, found, "fence"),
        Change(
            "While the stream waits, submit no more than the queue holds: use one cudaMemcpyBatchAsync or one "
            "kernel per transfer",
            share=spared(joined, found, "fence", BATCHED),
        ),
        Change(
            f"Spread the copies over up to {channels} streams, one for each channel, that wait for the same event "
            "(kvprobe's engine: policy pooled; servers: `kvprobe run --fix auto`)",
            "rung",
            "pooled",
            "auto",
            share=spared(joined, found, "fence", channels),
        ),
        *merged(joined, found, "fence"),
    )


def _of_launches(joined: JoinedRecording, found: Full) -> tuple[Change, ...]:
    """What helps where it is launches that wait."""
    return (
        Change(
            "Launch only after the work that the stream waits for has ended: until then, the thread is free", share=1.0
        ),
        deeper(joined, found, "fence"),
        Change("Launch fewer, larger pieces of work after the wait: CUDA graphs, fused kernels"),
    )
