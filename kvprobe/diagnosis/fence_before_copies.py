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
submitted after the forward pass. But if further calls of the thread block because the queue stays full, the thread only
waits there for longer, and kvprobe predicts little. For a deeper queue, kvprobe simulates the calls with more slots:
the first copy that finds no slot blocks for the rest of the forward pass.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.deeper_queue import BATCHED, deeper, spared
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms, range_of
from kvprobe.diagnosis.launch_queue_saturation import cliff
from kvprobe.diagnosis.merging import merged
from kvprobe.diagnosis.queue_full import Full, full
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import CallKind, Direction, Engine

CAUSE = cause_of(__name__)
PROVES = Line.FULL_QUEUE


def find(joined: JoinedRecording) -> Finding | None:
    """Blocked calls during which their stream stood still."""
    found = full(joined)
    rows, ns = found.rows["fence"], found.ns["fence"]
    if not len(rows):
        return None
    waits = joined.is_named("streamwaitevent")
    told = int((waits & np.isin(joined.stream, np.unique(joined.stream[rows]))).sum())
    busy = joined.busy(Engine.KERNEL).within(joined.start[rows], joined.end[rows])
    behind = int((2 * busy > ns).sum())
    launching = among(joined.kind[rows], [CallKind.LAUNCH, CallKind.GRAPH, CallKind.MEMSET])
    of_launches = 2 * int(ns[launching].sum()) > int(ns.sum())
    streams = np.unique(joined.stream[rows])
    waited = joined.stream_name(int(streams[0])) if len(streams) == 1 else f"{len(streams)} streams"
    queue, it = ("launch queue", "the stream") if len(streams) == 1 else ("launch queues", "these streams")
    waited = waited.replace("{", "{{").replace("}", "}}")  # a program may name its streams as it likes
    return joined.host_finding(
        CAUSE,
        f"The {queue} of {waited} filled up while {it} waited for an event: {{calls}} submissions blocked for {{lost}}",
        "certain" if told and behind else "likely",
        rows,
        ns,
        chart=cliff(joined, rows),
        evidence=[*_of_calls(joined, found, told), *_of_the_fence(joined, found, told, behind)],
        cure=_of_launches(joined, found) if of_launches else _of_copies(joined, found),
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


def _of_the_fence(joined: JoinedRecording, found: Full, told: int, behind: int) -> list[Evidence]:
    """What the fence waits for; `behind`: blocked calls during most of which kernels ran."""
    rows, ns = found.rows["fence"], found.ns["fence"]
    evidence = []
    if told:
        text = f"their streams had been told {told:,} times to wait for an event"
        evidence.append(Evidence(text, told, "calls", COUNTED))
    if behind:
        text = f"during {_most_of(behind, len(rows))}, kernels of other streams ran: their stream waited for these"
        evidence.append(Evidence(text, behind, "calls", INFERRED))
        return evidence
    copying = joined.busy(Engine.COPY).within(joined.start[rows], joined.end[rows])
    copied = int((2 * copying > ns).sum())
    if copied:
        text = f"during {_most_of(copied, len(rows))}, copies of other streams ran: their stream waited for these"
        evidence.append(Evidence(text, copied, "calls", INFERRED))
    ran = joined.busy(*Engine).within(joined.start[rows], joined.end[rows])
    idle = int((2 * ran < ns).sum()) if joined.recording.has_executions else 0
    if not copied and idle:
        text = (
            f"during {_most_of(idle, len(rows))}, nothing ran on the GPU: their stream waited for something outside of "
            "the GPU, and no change below shortens that wait"
        )
        evidence.append(Evidence(text, idle, "calls", INFERRED))
    return evidence


def _most_of(count: int, calls: int) -> str:
    """So many of the blocked calls, of each of which most is meant."""
    whole = f"{count:,} of the {calls:,} blocked calls"
    return f"most of {whole if calls > count else f'each of the {calls:,} blocked calls' if calls > 1 else 'this call'}"


def _of_copies(joined: JoinedRecording, found: Full) -> tuple[Change, ...]:
    """What helps where it is copies that wait."""
    rows, ns = found.rows["fence"], found.ns["fence"]
    of_loads = 2 * int(ns[joined.direction[rows] == Direction.H2D].sum()) > int(ns.sum())
    channels = int(joined.recording.machine.get("channels") or 4)
    return (
        Change(
            "Submit the loads only after the work that they wait for has ended"
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
