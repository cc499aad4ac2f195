"""The GPU is idle while the host prepares the next step.

Mechanism: the host schedules, tokenises, loads data or builds descriptors for longer than the GPU needs for the queued
work, so the GPU runs out of work. Nothing in CUDA is slow.

Signature: a gap is a time in which the GPU executes nothing. A gap counts if the launch that ends the gap was made
after the gap began. (So the queue was empty. A kernel that starts long after its launch is no sign of a starved GPU.)
Between the beginning of the gap and this launch, the launching thread must have spent at least 200 µs outside of CUDA
calls. Every program has some gaps. So the finding needs at least five of these gaps, and in all of them together the
thread must have spent at least 10% of the recorded time outside of CUDA calls. Three kinds of gaps do not count:
 - gaps with less than 200 µs outside of CUDA calls, as they occur between all launches: many of them belong to
   `python_or_gil_bound`, a few of them to `waiting_for_host`;
 - gaps in which the recording shows that the Python interpreter was the reason (its lock, its garbage collection):
   their cause is `python_or_gil_bound`, too;
 - gaps that the report counts as "nothing to do", because there was no request to work on.

These gaps can have another reason: the thread notices the end of a step too late, because it asks the GPU again and
again whether the step is done (`cudaEventQuery`), and sleeps in between. So if the thread makes these calls, the
evidence says how much time passed from the beginning of each gap to the first of these calls in the gap.

A PyTorch profile that was recorded `with_stack=True` holds Python functions. Then the evidence names the innermost
functions of the program in which the thread was longest in these gaps. `kvprobe run` takes a Python stack now and then,
and those that it took in these gaps show the functions. In other recordings, py-spy or NVTX ranges show what the thread
does.

`kvprobe run` sees by timing events when the GPU is idle, and the account says what its thread did meanwhile. There a
gap counts if the thread spent most of its time outside of CUDA calls in Python: if it slept, or read files, more is
known than that the GPU starved (`waiting_for_host`, `slow_tier`).

Time lost: the part of these gaps, up to the launch that ends each of them, in which the thread was in no CUDA call: it
neither submitted work nor waited for the GPU. Predicted saving: the host prepares the next step while the GPU runs the
current one. So kvprobe predicts for each gap the shorter of two times: the preparation, or the GPU's work between this
gap and the gap before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvprobe.account import OUTSIDE_CALLS, Line, Times
from kvprobe.account.chain import STEP_NS
from kvprobe.diagnosis.counted_launches import launched_much
from kvprobe.diagnosis.finding import (
    INFERRED,
    MEASURED,
    Change,
    Evidence,
    Finding,
    Loss,
    NotLookedFor,
    Where,
    cause_of,
    executions_not_shown,
)
from kvprobe.diagnosis.gaps import (
    Gaps,
    Outside,
    gaps_by_events,
    gaps_chart,
    hidden,
    idle_gaps,
    nothing_to_do,
    outside_calls,
)
from kvprobe.diagnosis.in_functions import WITH_STACK, outside_in_functions, without_functions
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.diagnosis.python_or_gil_bound import explained
from kvprobe.diagnosis.server_options import with_options
from kvprobe.diagnosis.who_worked import who_worked
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct, in_time, union
from kvprobe.recordings.model import CallKind, Direction

CAUSE = cause_of(__name__)
LONG_NS, LEAST_SHARE, MANY = STEP_NS, 0.10, 5
_MOST = 0.9  # of the preparation that fits beside the GPU's work: where less does, it has to become shorter
_HALF = 0.5  # where less than this fits, a shorter preparation comes first
MOVE = "Prepare the next step while the current one runs"
PARTLY = f"{MOVE}. This hides only a part: some preparations take longer than the GPU work that they could hide behind"
SHORTEN = (
    "Prepare the next step while the current one runs, and make the preparation shorter. The saving is predicted for "
    "the first alone: the GPU works for a shorter time than the preparation takes"
)
OPTIONS = {
    "DataLoader": "In a data loader: load the data in worker processes (num_workers, pin_memory)",
    "vLLM": "In vLLM: --async-scheduling",
    "SGLang": "In SGLang: leave its overlap schedule on",
}


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs to know when the device was idle: by what it executed, or by timing events."""
    lacks = executions_not_shown(joined.recording)
    return None if lacks is None or joined.account.seen else lacks


def find(joined: JoinedRecording) -> Finding | None:
    """Long idle gaps in which the host was elsewhere."""
    executions = joined.recording.has_executions
    gaps = idle_gaps(joined) if executions else gaps_by_events(joined)
    mine = (gaps.host_ns >= LONG_NS) & ~explained(joined, gaps) & ~nothing_to_do(joined, gaps)
    lost = int(gaps.host_ns[mine].sum())
    if not executions and launched_much(joined, joined.caller[gaps.call[mine]], lost):
        return None  # by timing events such gaps may hold launches, and kernels as short as they are
    span = joined.span_ns * max(len(distinct(gaps.gpu)), 1)
    if mine.sum() < MANY or lost < LEAST_SHARE * span:
        return None
    calls, ns = gaps.call[mine], gaps.host_ns[mine]
    places = joined.places(calls, ns)
    if not executions:  # the call behind a gap need not be the launch that ended it
        places = tuple(replace(one, stream=Where.stream, stream_name="", range="") for one in places)
    where, functions = outside_in_functions(joined, places, OUTSIDE_CALLS, gaps.start[mine], gaps.end[mine])
    outside = outside_calls(joined, gaps, mine, lost)
    worked = _who_worked(joined, gaps.start[mine], gaps.end[mine])
    beside = hidden(joined, gaps, mine)
    polls = _polls(joined, gaps, mine)
    did = "polled, or prepared" if polls.asked else "prepared"
    return joined.finding(
        CAUSE,
        f"The GPU was idle for {{lost}}, in {{calls}} gaps, while the host {did} the next step",
        "likely",
        Loss(
            lost,
            len(calls),
            on="device",
            window=(int(gaps.start[mine].min()), int(gaps.end[mine].max())),
            span_ns=span,
            places=where,
            gaps=Times(gaps.start[mine], gaps.end[mine], gaps.where[mine]),
        ),
        evidence=[
            *_evidence(gaps, mine, outside, round(outside.ns * beside / lost), span, worked),
            *functions,
            *polls.evidence(),
        ],
        cure=[
            *_cure(joined, calls, beside / lost, polls.sooner() if polls.before_ns >= _HALF * lost else ""),
            *([] if functions else [Change(_look(joined), "recording")]),
        ],
        chart=gaps_chart(joined, gaps, mine),
    )


def _who_worked(joined: JoinedRecording, start: Array, end: Array) -> list[Evidence]:
    """Who used the CPU in the gaps of the GPU with most of them, where that was noted."""
    if not joined.recording.pauses.rows:
        return []
    begins, ends = union(start, end)
    cuts = [(gpu, gpu.stretches.cut(begins, ends)) for gpu in joined.account.gpus]
    starved = [(gpu, inside & (gpu.stretches.line == Line.PYTHON)) for gpu, inside in cuts]
    return who_worked(joined, *max(starved, key=lambda one: one[0].stretches.sum_ns(one[1])))


class _Polls(NamedTuple):
    """How a thread learned in some gaps that the GPU was done.

    Attributes:
        asked: gaps in which it asked the GPU; 0 where it did so in less than half of them.
        before_ns: of these gaps, what passed before it asked first.
        name: the call by which it asked.
    """

    asked: int
    before_ns: int = 0
    name: str = ""

    def evidence(self) -> list[Evidence]:
        """That it polls, and how late."""
        if not self.asked:
            return []
        text = f"in {self.asked:,} of these gaps, the thread called {self.name} to learn whether the GPU was done"
        return [
            Evidence(
                f"{text}; from the beginning of a gap to the first of these calls in it, {ms(self.before_ns)} passed, "
                "added up over these gaps",
                self.before_ns,
                "ns",
                MEASURED,
            )
        ]

    def sooner(self) -> str:
        """What to change where most of the time passed before the thread asked."""
        return (
            "If the thread sleeps before it polls, let it notice sooner that the GPU is done: wait in "
            f"cudaEventSynchronize, or sleep for a shorter time between two calls of {self.name}. If it works before "
            f"it polls: {MOVE[:1].lower()}{MOVE[1:]}"
        )


def _polls(joined: JoinedRecording, gaps: Gaps, mine: Array) -> _Polls:
    """Whether the launching threads polled in these gaps, by `cudaEventQuery` or the like."""
    queries = np.flatnonzero(joined.is_named("eventquery", "streamquery"))
    until, caller = joined.start[gaps.call[mine]], joined.caller[gaps.call[mine]]
    first = np.full(len(until), -1)
    for one in distinct(joined.caller[queries]):
        theirs = in_time(queries[joined.caller[queries] == one], joined.start)
        own = np.flatnonzero(caller == one)
        at = np.searchsorted(joined.start[theirs], gaps.start[mine][own])
        known = at < len(theirs)
        first[own[known]] = theirs[at[known]]
    polled = first >= 0
    polled[polled] = joined.start[first[polled]] < until[polled]
    if 2 * int(polled.sum()) < len(polled):
        return _Polls(0)
    before = int((joined.start[first[polled]] - gaps.start[mine][polled]).sum())
    return _Polls(int(polled.sum()), before, joined.text(int(joined.name[first[polled][0]])))


def _evidence(
    gaps: Gaps, mine: Array, outside: Outside, beside: int, span: int, worked: list[Evidence]
) -> list[Evidence]:
    ns, lost = gaps.host_ns[mine], outside.ns
    typical, longest = float(np.median(ns)), int(ns.max())
    said = [
        Evidence(
            f"in {len(ns):,} gaps of at least 200 µs, the GPU ran nothing, and the thread that launches neither "
            f"submitted work nor waited for the GPU: together {outside.text}, {share(lost, span)} of the serving "
            "window. Shorter gaps do not count",
            lost,
            "ns",
            MEASURED,
        ),
        *worked,
        Evidence(f"the median gap is {ms(typical)}, the longest {ms(longest)}", longest, "ns", MEASURED),
        Evidence(
            "each gap ended with a launch that was made after the gap began: the queue was empty, not full",
            len(ns),
            "calls",
            INFERRED,
        ),
    ]
    if beside < 0.995 * lost:
        said.append(
            Evidence(
                f"at most {ms(beside)} of these {ms(lost)} can overlap with the GPU's work, because some preparations "
                "take longer than the GPU work that they could hide behind",
                beside,
                "ns",
                INFERRED,
            )
        )
    return said


def _cure(joined: JoinedRecording, calls: Array, part: float, sooner: str) -> list[Change]:
    """Preparing ahead, with its part of the loss; then what the recording shows to be in the way of it.

    `sooner`: what may help as well as preparing ahead.
    """
    callers = among(joined.caller, distinct(joined.caller[calls]))
    reads = joined.direction == Direction.D2H
    waits = callers & ((joined.kind == CallKind.SYNC) | (joined.kind == CallKind.COPY_SYNC))
    move = MOVE if part >= _MOST else PARTLY if part >= _HALF else SHORTEN
    out = [Change(with_options(joined.recording, sooner or move, OPTIONS), share=part)]
    if waits.any():
        first = "read back the results of" if (callers & reads).any() else "wait for"
        out.append(Change(f"Launch step n+1 first, then {first} step n"))
    if _HALF <= part < _MOST:
        out.append(Change("Make the preparation itself shorter: it takes longer than the GPU's part of a step"))
    return out


def _look(joined: JoinedRecording) -> str:
    """How to see what the thread does in the gaps."""
    if without_functions(joined):
        return f"See what the thread does in the gaps: {WITH_STACK}"
    return (
        "See what the thread does in the gaps: run `py-spy dump --pid PID`, or mark its parts with NVTX ranges and "
        "record again"
    )
