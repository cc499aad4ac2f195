"""The GPU ran nothing while its thread was busy with something that no other cause explains.

Mechanism: the next operation had not been submitted yet. The report says what the thread that submitted this operation
did until then.

Signature: this cause has no signature of its own. The lines "waiting for the host" of the report say for how long the
GPU ran nothing, and what its thread did. This cause gets the part of these lines that no other cause explains.

A program can put a function of the host into a stream: `cudaLaunchHostFunc`, `cudaStreamAddCallback`. What was
submitted behind it waits until CUDA has called the function and the function has returned. If the GPU runs nothing
until then, the time is in the line "asleep, or in other code", and the evidence names the call that put the function
there.
Another case is a thread that puts a function into a stream and then waits for the GPU, in a call such as
`cudaStreamSynchronize`: this call returns only when the function has returned.

Nsight Systems and the PyTorch profiler do not record which stream a function was put into. In these recordings, kvprobe
goes by the order of calls. An operation began late because of a function if both of these are true:
 - One thread put the function into a stream, whichever that was, and then submitted the operation.
 - The thread did so after the operation before it in the same stream had been submitted.

Before the first kernel of the window, and after the last one, nothing shows whether a model waited: weights may have
been loaded, or the model may have ended. kvprobe does not decide about this time. If no kernel runs in the window at
all, and the thread spends at least half of the time between the copies in CUDA calls, then the copies are the work, and
this time counts. kvprobe predicts no saving then, because nothing shows who waits for these copies. Some pauses are far
longer than the usual time between the results of a step and the next submission. If the recording does not show what
the thread did in a pause of this kind, kvprobe does not decide about the pause, either: the thread may have prepared a
request, or waited for one. If `kvprobe run` took stacks in these pauses, the evidence names the functions that they
show.

Time lost: the wall time in which the GPU ran nothing because of this wait. Predicted saving: the time that the change
removes. If the thread no longer waits for the GPU, it can submit while the GPU computes: the part of the submission
time that then overlaps with computing is saved, too. If the next step is prepared in advance, the saving is limited to
the preparation that can overlap with the GPU's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account import HOST, IDLE, OPEN, OUTSIDE_CALLS, GpuAccount, Line, Unknown, Worked
from kvprobe.account.chain import hidden_beside_work
from kvprobe.account.lines import line_of_calls
from kvprobe.diagnosis.counted_launches import launched_much
from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, Loss, TracedCall, Where, cause_of
from kvprobe.diagnosis.gaps import busy
from kvprobe.diagnosis.host_functions import (
    HELD,
    IN_FUNCTIONS,
    IN_WAITS,
    OUT_OF_STREAM,
    WAITED,
    functions_of,
    waits_for_functions,
)
from kvprobe.diagnosis.in_functions import in_functions
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording, ms, of_the_time, share
from kvprobe.diagnosis.left import most_left
from kvprobe.diagnosis.traced import longest
from kvprobe.diagnosis.who_worked import spent_by, who_worked
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Array, CallKind

CAUSE = cause_of(__name__)
DID = {
    Line.FULL_QUEUE: "was blocked by a full queue",
    Line.WAITING_FOR_DEVICE: "waited for the GPU, which had nothing to do",
    Line.ALLOCATING: "allocated, pinned or freed memory",
    Line.PAGEABLE: "copied pageable memory",
    Line.SUBMITTING: "submitted, operation by operation",
    Line.PYTHON: "was in Python, outside of CUDA calls",
    Line.NO_CPU: "had no CPU",
    Line.TIER: "read or wrote files or sockets",
    Line.ELSEWHERE: "was in other code",
}
SHOWN_BY = (
    "Record with `kvprobe run --nsys` or `nsys profile -t cuda,nvtx,osrt`, which show where the thread sleeps, or mark "
    "what it does with NVTX ranges"
)
CURES: dict[Line, Change] = {
    Line.FULL_QUEUE: Change("Submit less at once, or through several streams", "setting"),
    Line.WAITING_FOR_DEVICE: Change(
        "Do not let the host wait between two steps: submit the next step first, and order the work with events",
        share=1.0,
    ),
    Line.ALLOCATING: Change("Allocate and pin once, before serving, and keep the memory", share=1.0),
    Line.PAGEABLE: Change("Copy from pinned memory (`kvprobe run --fix auto` does it for large copies)", share=1.0),
    Line.SUBMITTING: Change(
        "Submit many operations at once: a CUDA graph, a batch of copies, one kernel for many blocks", share=1.0
    ),
    Line.PYTHON: Change(
        "Prepare the next step while this one runs, in another process or thread: the GPU waits for Python", share=1.0
    ),
    Line.NO_CPU: Change("Give the server CPUs of its own (a larger quota, `taskset`, fewer processes)", share=1.0),
    Line.TIER: Change("Read ahead of the step that needs the bytes, and write behind it, on another thread", share=1.0),
    Line.ELSEWHERE: Change("Do the thread's other work while the GPU runs the step before", share=1.0),
}
SLEPT = "slept, or waited for something outside CUDA"
WAKE = Change(
    "Do not let the thread sleep between steps: wait for an event of the step, or submit the next step before that",
    share=1.0,
)
AT_ONCE = 1 << 19  # calls looked at together: a recording may have millions
BESIDE = (Line.PYTHON, Line.TIER, Line.ELSEWHERE)  # their changes move work beside the GPU's, and take none away


@dataclass(frozen=True)
class _Part:
    """What the GPU waited for: a line, or host functions in its streams (`line` is None), and where that is.

    Of host functions, `did` is set where the thread itself waited for them.
    """

    ns: int
    line: Line | None
    mine: Array
    did: str = ""  # what is known beyond the line

    @property
    def said(self) -> str:
        """Of the time in which nothing ran, in a sentence."""
        if self.line is None:
            return WAITED if self.did else HELD
        return f"the thread that submits {self.did or DID[self.line]}"

    @property
    def title(self) -> str:
        """The same in a title."""
        if self.line is None:
            return self.did or IN_FUNCTIONS
        return f"the thread {self.did or DID[self.line]}"

    @property
    def cure(self) -> tuple[Change, ...]:
        """What to change."""
        if self.did == SLEPT:
            return (WAKE,)
        return OUT_OF_STREAM if self.line is None else (CURES[self.line],)


def find(joined: JoinedRecording) -> Finding | None:
    """What is left of waiting for the host; else pauses of which nothing shows whether anybody asked for anything."""
    left, open_ = _left(joined), _between_requests(joined)
    if left is None or (open_ is not None and left.confidence == "cannot tell" and open_.lost_ns > left.lost_ns):
        return open_
    return left


def _between_requests(joined: JoinedRecording) -> Finding | None:
    """Of the GPU with most such pauses."""
    gpu = max((one for one in joined.account.gpus if one.seen), key=lambda one: one.open_ns, default=None)
    if gpu is None or gpu.open_ns < CRITICAL * gpu.window_ns:
        return None
    cut = gpu.stretches
    mine = among(cut.detail, OPEN)
    ns = cut.ns[mine]
    unknown = gpu.unknown_ns()
    why = max(OPEN, key=lambda one: unknown.get(one, 0))
    seen = (
        "no thread of the process used the CPU"
        if why == Unknown.OUTSIDE
        else "after most of its other waits for the GPU, the thread submits at once"
    )
    window = int(cut.start[mine].min()), int(cut.end[mine].max())
    _, functions = _in_pauses(joined, gpu)
    return joined.finding(
        CAUSE,
        "The GPU ran nothing for {lost}, in {calls} pauses of its thread",
        "cannot tell",
        Loss(gpu.open_ns, len(ns), on="device", window=window, span_ns=gpu.window_ns),
        severity="info",
        evidence=(
            Evidence(
                f"in {len(ns):,} pauses, the longest of {ms(int(ns.max()))}, nothing was pending and its thread made "
                f"no call; {seen}",
                gpu.open_ns,
                "ns",
                MEASURED,
            ),
            *functions,
        ),
        reason=f"cannot tell, because nothing ran for {share(gpu.open_ns, gpu.window_ns)} of the time, and {why.text}",
        cure=(Change(SHOWN_BY, "recording"),),
    )


def _in_pauses(joined: JoinedRecording, gpu: GpuAccount) -> tuple[tuple[Where, ...], list[Evidence]]:
    """In which functions the thread that the GPU waits for most was in the pauses that are not known."""
    cut = gpu.stretches
    mine = np.flatnonzero(among(cut.detail, OPEN))
    whose = np.full(len(mine), gpu.main_caller)
    return in_functions(joined, (), whose, cut.start[mine], cut.end[mine], "the pauses that are not known")


def _left(joined: JoinedRecording) -> Finding | None:
    """On the GPU that waited longest."""
    gpu, mine, lacks = most_left(joined, HOST)
    if gpu is None:
        return None
    cut = gpu.stretches
    lost = cut.sum_ns(mine)
    held = mine & gpu.held_by_functions
    waited, put = waits_for_functions(joined, gpu, mine)
    parts = [_part(joined, gpu, line, mine & ~held & ~waited & (cut.line == line)) for line in HOST]
    parts += [_Part(cut.sum_ns(held), None, held), _Part(cut.sum_ns(waited), None, waited, IN_WAITS)]
    parts = sorted((part for part in parts if part.ns), key=lambda part: -part.ns)
    first = parts[0]
    evidence = [
        Evidence(
            f"for {ms(part.ns)}, {share(part.ns, gpu.window_ns)} of the serving window, nothing ran: {part.said}",
            part.ns,
            "ns",
            MEASURED,
        )
        for part in parts
        if 100 * part.ns >= gpu.window_ns or part is first
    ]
    functions = functions_of(joined, gpu, held, waited, put)
    evidence[1:1] = functions.evidence
    places = tuple(sorted((*functions.places, *_threads(joined, gpu, mine)), key=lambda one: -one.lost_ns)[:16])
    of_first = first.mine & (cut.caller >= 0)
    places, in_python = in_functions(joined, places, cut.caller[of_first], cut.start[of_first], cut.end[of_first])
    evidence += in_python
    if gpu.open_ns >= CRITICAL * gpu.window_ns:
        evidence += _in_pauses(joined, gpu)[1]
    evidence += who_worked(joined, gpu, mine & ~held & among(cut.line, (Line.PYTHON, Line.ELSEWHERE)))
    start, end = cut.start[mine], cut.end[mine]
    loss = Loss(
        lost,
        int(mine.sum()),
        on="device",
        window=(int(start.min()), int(end.max())),
        span_ns=gpu.window_ns,
        places=places,
        calls=functions.calls if first.line is None else _calls(joined, gpu, first),
    )
    only_copies = not gpu.runs_kernels and 2 * cut.sum_ns(mine & among(cut.line, OUTSIDE_CALLS)) <= lost
    if lacks and not only_copies:
        title = f"Nothing ran for {{lost}} between copies, and {lacks}"
        return joined.line_question(CAUSE, title, gpu, loss, evidence, lacks)
    part = "all this time" if first.ns == lost else f"for {ms(first.ns)} of this wait"
    work = " between copies, which are all it does here" if only_copies else ""
    title = f"The GPU waited {{lost}} for the host{work}, {of_the_time(lost, gpu)}: {part}, {first.title}"
    matter = [part for part in parts[:3] if 100 * part.ns >= lost]
    ahead = _submitted_ahead(gpu, mine)
    if ahead and any(part.line == Line.WAITING_FOR_DEVICE for part in matter):
        text = f"without the waits for the GPU, {ms(ahead)} of submitting would run while the GPU computes"
        evidence.append(Evidence(text, ahead, "ns", INFERRED))
    saved = [_saved(gpu, part) + (ahead if part.line == Line.WAITING_FOR_DEVICE else 0) for part in matter]
    cure = [_of_part(change, ns / lost) for part, ns in zip(matter, saved, strict=True) for change in part.cure]
    if only_copies:  # whether anybody waits for them, nothing shows
        cure = [Change(one.text, one.kind) for one in sorted(cure, key=lambda one: -(one.share or 0.0))]
    return joined.line_finding(CAUSE, title, gpu, loss, evidence=evidence, cure=cure)


def _part(joined: JoinedRecording, gpu: GpuAccount, line: Line, mine: Array) -> _Part:
    """A line's part, with the call or the other GPU that its thread was held up by for most of it, where one is."""
    cut = gpu.stretches
    ns, did = cut.sum_ns(mine), ""
    if ns and line == Line.ELSEWHERE:
        name, inside = _call_of_most(joined, gpu, mine)
        did = f"was in {name}" if 2 * inside > ns else SLEPT if _slept(joined, gpu, mine) else ""
    elif ns and line == Line.PYTHON:
        did = "was in Python, or launched kernels" if launched_much(joined, cut.caller[mine], ns) else ""
    elif ns and line == Line.WAITING_FOR_DEVICE:
        others = [one for one in joined.account.gpus if one is not gpu and {*one.processes} & {*gpu.processes}]
        works = [busy(one) for one in others]
        inside = sum(int(cover.within(cut.start[mine], cut.end[mine]).sum()) for cover in works)
        did = "waited for another GPU" if 2 * inside > ns else ""
    return _Part(ns, line, mine, did)


def _slept(joined: JoinedRecording, gpu: GpuAccount, mine: Array) -> bool:
    """Whether threads slept in most of these stretches, by the CPU time that was noted of their pauses."""
    spent = spent_by(joined, gpu, mine, (Worked.NOBODY, Worked.LITTLE))
    return 2 * sum(spent.values()) > gpu.stretches.sum_ns(mine)


def _calls(joined: JoinedRecording, gpu: GpuAccount, part: _Part) -> tuple[TracedCall, ...]:
    """The calls inside of which the GPU waited for its threads longest; none where they were outside of calls."""
    cut = gpu.stretches
    covers = {}
    for caller in np.unique(cut.caller[part.mine]).tolist():
        here = part.mine & (cut.caller == caller)
        covers[caller] = Cover(cut.start[here], cut.end[here])
    rows, lost = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(joined.kind), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        kind = joined.kind[some]
        counts = (line_of_calls(kind, joined.memory[some]) == part.line) & ~joined.nested[some]
        of_line = first + np.flatnonzero(counts & (kind != CallKind.OTHER))
        for caller, cover in covers.items():
            theirs = of_line[joined.caller[of_line] == caller]
            inside = cover.within(joined.start[theirs], joined.end[theirs])
            rows.append(theirs[inside > 0])
            lost.append(inside[inside > 0])
    return longest(joined, np.concatenate(rows), np.concatenate(lost))


def _call_of_most(joined: JoinedRecording, gpu: GpuAccount, mine: Array) -> tuple[str, int]:
    """In which CUDA function that neither submits, waits nor allocates its threads were longest, and for how long."""
    cut, spent = gpu.stretches, np.zeros(len(joined.recording.names), dtype=np.int64)
    for caller in np.unique(cut.caller[mine]).tolist():
        rows = np.flatnonzero((joined.caller == caller) & (joined.kind == CallKind.OTHER) & ~joined.nested)
        here = mine & (cut.caller == caller)
        inside = Cover(cut.start[here], cut.end[here]).within(joined.start[rows], joined.end[rows])
        np.add.at(spent, joined.name[rows], inside)
    most = int(spent.argmax())
    return joined.text(most), int(spent[most])


def _saved(gpu: GpuAccount, part: _Part) -> int:
    """Of a part's time, what its change saves at most, ns."""
    if part.line not in BESIDE:
        return part.ns
    cut = gpu.stretches
    here = part.mine
    return hidden_beside_work(busy(gpu), cut.start[here], cut.end[here], cut.ns[here])


def _submitted_ahead(gpu: GpuAccount, mine: Array) -> int:
    """Of submitting in idle gaps that begin with a wait for the GPU, what fits beside its work without the waits, ns.

    A thread that does not wait submits the next operation while this one runs.
    """
    cut = gpu.stretches
    idles = among(cut.line, IDLE)
    gap = np.cumsum(~idles)
    waits = mine & (cut.line == Line.WAITING_FOR_DEVICE)
    here = mine & (cut.line == Line.SUBMITTING) & np.isin(gap, gap[waits])
    return hidden_beside_work(busy(gpu), cut.start[here], cut.end[here], cut.ns[here])


def _of_part(change: Change, part: float) -> Change:
    share_of_all = None if change.share is None else change.share * part
    return Change(change.text, change.kind, share=share_of_all)


def _threads(joined: JoinedRecording, gpu: GpuAccount, mine: Array) -> tuple[Where, ...]:
    """The threads that the GPU waited for, the one that it waited for longest first."""
    cut = gpu.stretches
    out = []
    for one in joined.account.threads:
        ns = cut.sum_ns(mine & (cut.caller == one.caller))
        if ns:
            out.append(
                Where(pid=one.pid, thread=one.thread, lost_ns=ns, calls=int((cut.caller[mine] == one.caller).sum()))
            )
    return tuple(sorted(out, key=lambda where: -where.lost_ns)[:16])
