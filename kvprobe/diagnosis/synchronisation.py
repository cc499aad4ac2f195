"""The thread that launches the model waits for a copy: explicit (`cudaStreamSynchronize`) or implicit (`cudaMemcpy`).

Mechanism: while the thread waits for a transfer, it launches nothing, so the GPU runs out of work, although the
transfer does not need its multiprocessors. A result that is read back in every step (`.item()`, `.cpu()`) does the
same: the thread gets the result only when the step is over, and has launched nothing after the step.

Signature: the thread launches kernels before and after a synchronising call, and one of these is true:
 - The call names a stream that carries no kernels, and a copy was outstanding on that stream.
 - The stream of the call is not known. The call returns when the copy that its thread submitted last ends; or it
   returns when another copy ends, and for at least a tenth of the call only copies ran.
 - The call waits for a read-back. The last operation before the call is a GPU-to-CPU copy of at most 64 KiB on a stream
   of kernels, and the GPU has nothing left to do when the call returns. This happens at least eight times.

Two kinds of waits do not count. The first is a wait for kernels alone (the end of a step), because the thread has
nothing else to do then. The second is a wait on the compute stream for large copies in that stream, because the stream
itself would have waited for them.

If the recording does not show what the GPU did, kvprobe knows only the stream that the call names and the copy before
the call. The confidence is then at most "likely", because the call may wait for an older copy, as a program does that
uses a few buffers in turn. If the thread launched kernels since its last copy, kvprobe cannot tell whether the copies
or the kernels were late. Waits for read-backs are then for information only: every server reads back what it sampled,
and whether that cost anything depends on what the GPU had to do meanwhile.

Time lost: the duration of all these waits. The thread could have launched work in this time. Predicted saving: the
thread saves all of this time if the stream waits for an event of the copy and the thread does not wait. The wall time
gets shorter only by a part of this time: the part in which the GPU ran nothing because of these waits. With stores, the
part can be longer. If the thread waits for stores and launches the next kernel only afterwards, the GPU may run only
these stores meanwhile. No kernel needs the stores, so this time counts, too, as far as kernels could have hidden it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.account import COPIES, Line
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct, running_max_by_group
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory

CAUSE = cause_of(__name__)
PROVES = Line.WAITING_FOR_DEVICE
SMALL_BYTES, MANY = 64 << 10, 8  # of a result that is read back, and how often that makes a habit
WOKEN_NS = 50_000  # after the end of what it waits for, a thread goes on within this
IDLE_NS = 2_000  # the device has nothing to do for so long after a wait
LAUNCHES = 10  # copies to one launch, from which on a stream is one of copies
HELD_SHARE = 0.01  # of the window: what stores that are waited for hold up for less is passed over
MOST_OF = 0.9  # of the waiting time
AHEAD = ", with more work launched before"
QUICK_NS = 10_000  # a synchronising call that found nothing to wait for
ORDER = Change(
    "Order with events instead of waiting: record an event after the copy, and let the compute stream wait for it "
    "(cudaStreamWaitEvent, torch.cuda.Stream.wait_event)",
    share=1.0,
)
# No kernel needs what a store brings to the host.
LEAVE = Change(
    "Do not let the thread wait for stores: submit them on a stream of their own into pinned memory (cudaMemcpyAsync), "
    "launch the next step, and check their event later (cudaEventQuery), before bytes are read or blocks reused",
    share=1.0,
)
# The host itself needs these bytes: an event that another stream waits for does not bring them.
RESULTS = Change(
    "Keep the result on the GPU for what comes next, or launch the next step before the result of this one is read",
    share=1.0,
)


def _for_copies(joined: JoinedRecording, rows: Array) -> Array:
    """Mask of waits that are known to be for a copy: cudaMemcpy, and a stream on which a copy was outstanding."""
    mask: Array = joined.kind[rows] == CallKind.COPY_SYNC
    table = joined.recording.executions
    for stream in distinct(joined.stream[rows][joined.stream[rows] >= 0]):
        mine = joined.stream[rows] == stream
        copies = np.flatnonzero((table["stream"] == stream) & (table["engine"] == Engine.COPY) & (joined.x_call >= 0))
        asked = ascending(joined.start[joined.x_call[copies]])
        over = ascending(joined.x_end[copies])
        at = joined.start[rows[mine]]
        mask[mine] |= np.searchsorted(asked, at) > np.searchsorted(over, at, "right")
    return mask


def _before(joined: JoinedRecording, rows: Array) -> Array:
    """The last submission of its thread before each of `rows`; -1 where there is none."""
    order = joined.by_caller
    position = np.where(joined.submits[order], np.arange(len(order)), -1)
    found = running_max_by_group(position, joined.caller[order])
    out = np.full(len(order), -1, dtype=np.int64)
    out[order] = np.where(found >= 0, order[np.maximum(found, 0)], -1)
    last = out[rows]
    return np.where((last >= 0) & (joined.caller[np.maximum(last, 0)] == joined.caller[rows]), last, -1)


def _read_back(joined: JoinedRecording, rows: Array, last: Array, kernels: Array) -> Array:
    """Mask over waits: for a small copy to the host on a stream of kernels, the newest thing launched."""
    at = np.maximum(last, 0)
    mask: Array = (
        (last >= 0)
        & (joined.kind[at] == CallKind.COPY)
        & (joined.direction[at] == Direction.D2H)
        & (joined.bytes[at] <= SMALL_BYTES)
        & among(joined.stream[at], kernels)
        & ((joined.stream[rows] < 0) | (joined.stream[rows] == joined.stream[at]))
        & ~joined.is_named("event")[rows]
    )
    if joined.recording.has_executions and mask.any():
        for gpu in distinct(joined.call_gpu[rows[mask]]).tolist():
            mine = np.flatnonzero(mask & (joined.call_gpu[rows] == gpu))
            theirs = joined.meant_by(gpu, joined.recording.executions)
            busy = Cover(joined.x_start[theirs], joined.x_end[theirs])
            end = joined.end[rows[mine]]
            mask[mine] = busy.within(end, end + IDLE_NS) == 0
    if mask.sum() < MANY:
        mask[:] = False
    return mask


def _ends_with_copy(joined: JoinedRecording, gpu: int, end: Array) -> Array:
    """Mask over instants: of the operations that `meant_by` has, the last to end before each is a copy."""
    table = joined.recording.executions
    theirs = np.flatnonzero(joined.meant_by(gpu, table) & (table["engine"] != Engine.OTHER))
    theirs = theirs[np.argsort(joined.x_end[theirs], kind="stable")]
    at = np.searchsorted(joined.x_end[theirs], end, "right") - 1
    mask: Array = (at >= 0) & (table["engine"][theirs[np.maximum(at, 0)]] == Engine.COPY)
    return mask


def _streams_of_kernels(joined: JoinedRecording) -> Array:
    """Streams that were given a launch for ten copies or more, in the recording's detail or in its totals.

    A wait for one of them may be for its kernels; a stream of copies was given a few to begin with at most.
    """
    counts = [
        joined.call_counts((CallKind.LAUNCH, CallKind.GRAPH)),
        joined.call_counts((CallKind.COPY, CallKind.BATCH)),
    ]
    return np.flatnonzero((counts[0] > 0) & (LAUNCHES * counts[0] >= counts[1]))


def _goes_on(joined: JoinedRecording, rows: Array) -> Array:
    """Mask over waits: their thread launches compute, and does so again after them."""
    launches = np.flatnonzero((joined.kind == CallKind.LAUNCH) | (joined.kind == CallKind.GRAPH))
    counted = joined.recording.calls["launches"]
    callers = int(joined.caller.max(initial=-1)) + 1  # there may be as many as calls
    newest = np.full(callers, np.iinfo(np.int64).min)
    np.maximum.at(newest, joined.caller[launches], joined.start[launches])
    most = np.full(callers, -1, dtype=np.int64)
    np.maximum.at(most, joined.caller, counted)
    reached = np.full(callers, np.iinfo(np.int64).max)  # when a thread had made all of its launches
    last = counted == most[joined.caller]
    np.minimum.at(reached, joined.caller[last], joined.start[last])
    own = joined.caller[rows]
    mask: Array = joined.end[rows] < newest[own]
    # launches that were counted and are not in the recording
    goes_on = np.where(counted[rows] < 0, joined.start[rows] < reached[own], counted[rows] < most[own])
    return mask | ((most[own] > 0) & goes_on)


def _after_launches(joined: JoinedRecording, rows: Array, last: Array) -> Array:
    """Mask over waits for events: since the copy `last` their thread may have launched what was only counted.

    It is known how many launches lie between two waits of a thread, not on which side of a copy between them: not
    behind it where the pause before it is by far the longer one.
    """
    counted = joined.recording.calls["launches"]
    order = joined.by_caller
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    mask = np.zeros(len(rows), dtype=bool)
    for caller in distinct(joined.caller[rows]):
        mine = np.flatnonzero((joined.caller[rows] == caller) & (last >= 0) & (counted[rows] > 0))
        waits = order[(joined.caller[order] == caller) & (joined.kind[order] == CallKind.SYNC) & (counted[order] >= 0)]
        at = np.searchsorted(joined.start[waits], joined.start[rows[mine]]) - 1
        made = counted[rows[mine]] - np.where(at >= 0, counted[waits[np.maximum(at, 0)]], 0)
        copy = last[mine]
        before = order[np.maximum(place[copy] - 1, 0)]
        begin = np.where(joined.caller[before] == caller, joined.end[before], joined.start[copy])
        mask[mine] = (made > 0) & (2 * (joined.start[rows[mine]] - joined.end[copy]) >= joined.start[copy] - begin)
    return mask & joined.is_named("event")[rows]


def _before_compute(joined: JoinedRecording, rows: Array) -> Array:
    """Mask over waits that end before their GPU's first kernel of the window, where timing events saw those.

    Nobody waits for what is loaded before anything computes. Launches alone do not tell: a program that warms up makes
    a few before the window begins.
    """
    spans, before = joined.recording.spans, np.zeros(len(rows), dtype=bool)
    computes = among(spans["engine"], (Engine.KERNEL, Engine.OTHER)) & (spans["end_ns"] > joined.serving.start_ns)
    for gpu in distinct(joined.call_gpu[rows]).tolist() if spans.rows else ():
        theirs = joined.meant_by(gpu, spans)
        kernels = spans["start_ns"][computes & theirs]
        first = kernels.min() if len(kernels) else np.iinfo(np.int64).max
        before |= (joined.call_gpu[rows] == gpu) & (joined.end[rows] <= first) & theirs.any()
    return before


def _open_question(joined: JoinedRecording, rows: Array, ns: Array) -> Finding | None:
    """Waits for events that may be for copies of a step before, or for the newest."""
    return joined.open_question(
        CAUSE,
        "The launching thread may have waited for copies: {lost} in {calls} waits for events",
        rows,
        ns,
        evidence=(
            Evidence(
                f"{len(rows):,} waits for events behind copies, {ms(int(ns.sum()))} together, on threads that may have "
                "launched compute since their last copy and went on with it afterwards",
                int(ns.sum()),
                "ns",
                MEASURED,
            ),
        ),
        because="which copy an event stands behind was not recorded, nor whether the device had compute left "
        "meanwhile: a thread that waits until a buffer of an earlier step is free loses nothing",
        record="Record what the device executed: kvprobe run --nsys, or the PyTorch profiler with kvprobe run "
        "--detail launches",
        chart=joined.slow_calls_chart(rows, "Waits for events on the launching thread"),
    )


def _by_executions(joined: JoinedRecording, rows: Array, last: Array, copy: Array, apart: Array) -> Array:
    """Mask over waits that are for copies, by the executions; `copy`: `last` is one, on a stream of copies."""
    table, named, at = joined.recording.executions, joined.stream[rows], np.maximum(last, 0)
    wanted = apart & _for_copies(joined, rows)
    # A wait for a stream that is not told, which begins after a copy was submitted and ends with that copy.
    late = joined.end[rows] - joined.exec_end[at]
    wanted |= copy & (named < 0) & (late >= 0) & (late < WOKEN_NS) & (joined.exec_end[at] > joined.start[rows])
    moves = (table["direction"] == Direction.H2D) | (table["direction"] == Direction.D2H)
    copies = (table["engine"] == Engine.COPY) & moves & ~among(table["stream"], joined.kernel_streams)
    for gpu in distinct(joined.call_gpu[rows]).tolist():
        mine = np.flatnonzero((joined.call_gpu[rows] == gpu) & (named < 0) & ~wanted)
        start, end = joined.start[rows[mine]], joined.end[rows[mine]]
        theirs = joined.meant_by(gpu, table)
        copying = Cover(joined.x_start[copies & theirs], joined.x_end[copies & theirs])
        theirs &= table["engine"] == Engine.KERNEL
        computing = Cover(joined.x_start[theirs], joined.x_end[theirs])
        either = Cover(np.concatenate((copying.start, computing.start)), np.concatenate((copying.end, computing.end)))
        alone = either.within(start, end) - computing.within(start, end)
        wanted[mine] |= (10 * alone >= end - start) & (alone > 0) & _ends_with_copy(joined, gpu, end)
    return wanted


def find(joined: JoinedRecording) -> Finding | None:
    """Waits for copies on launching threads."""
    implicit = (joined.kind == CallKind.COPY_SYNC) & (joined.memory != Memory.PAGEABLE)
    rows = np.flatnonzero((joined.kind == CallKind.SYNC) | implicit)
    rows = rows[_goes_on(joined, rows)] if len(rows) else rows
    if not len(rows):
        return None
    seen = joined.recording.has_executions
    last = _before(joined, rows)
    kernels = joined.kernel_streams if seen else _streams_of_kernels(joined)
    back = _read_back(joined, rows, last, kernels)
    named, at = joined.stream[rows], np.maximum(last, 0)
    apart = (named >= 0) & ~among(named, kernels)
    copy = (last >= 0) & ((joined.kind[at] == CallKind.COPY) | (joined.kind[at] == CallKind.BATCH))
    copy &= (joined.stream[at] >= 0) & ~among(joined.stream[at], kernels)
    wanted, unclear = implicit[rows] | back, rows[:0]
    if seen:
        wanted |= _by_executions(joined, rows, last, copy, apart)
    else:
        behind = apart & copy & (joined.stream[at] == named)
        doubtful = behind & ~wanted & _after_launches(joined, rows, last)
        wanted |= behind & ~doubtful
        unclear = rows[doubtful]
    ns = np.where(wanted, joined.dur[rows], 0)
    ns = np.where((ns > QUICK_NS) & ~_before_compute(joined, rows), ns, 0)
    stores = _of_stores(joined, rows, last, back)
    found = _waited(joined, _Waits(*(column[ns > 0] for column in (rows, ns, back, stores))))
    return found or _open_question(joined, unclear, joined.dur[unclear])


def _of_stores(joined: JoinedRecording, rows: Array, last: Array, back: Array) -> Array:
    """Mask over waits that are for stores alone: the newest copy is one, of no result, and no load ran meanwhile."""
    itself = joined.kind[rows] == CallKind.COPY_SYNC
    newest = np.where(itself, rows, np.maximum(last, 0))
    mask: Array = (itself | (last >= 0)) & (joined.direction[newest] == Direction.D2H) & ~back
    table = joined.recording.executions
    loads = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D)
    for gpu in distinct(joined.call_gpu[rows[mask]]).tolist():
        mine = mask & (joined.call_gpu[rows] == gpu)
        theirs = loads & joined.meant_by(gpu, table)
        loading = Cover(joined.x_start[theirs], joined.x_end[theirs])
        mask[mine] = loading.within(joined.start[rows[mine]], joined.end[rows[mine]]) == 0
    return mask


def _held_ns(joined: JoinedRecording, rows: Array) -> int:
    """How long, inside these waits, a GPU ran only copies and its next kernel had not been launched by their thread."""
    out = 0
    for gpu in joined.account.gpus if len(rows) else ():
        cut, ns = gpu.stretches, 0
        for caller in distinct(joined.caller[rows]).tolist():
            mine = rows[joined.caller[rows] == caller]
            alone = among(cut.line, COPIES) & (cut.caller == caller)
            ns += int(Cover(joined.start[mine], joined.end[mine]).within(cut.start[alone], cut.end[alone]).sum())
        out = max(out, ns)
    return out


def _ahead(joined: JoinedRecording, rows: Array) -> Array:
    """Mask over waits: when they ended, the GPU still had a kernel to run that had been launched before they began.

    Timing events show that a kernel ran at that instant: its thread, which stood in the wait, had launched it before.
    """
    mask, table = np.zeros(len(rows), dtype=bool), joined.recording.executions
    spans = joined.recording.spans
    for gpu in distinct(joined.call_gpu[rows]).tolist():
        mine = np.flatnonzero(joined.call_gpu[rows] == gpu)
        if not joined.recording.has_executions:
            ran, end = joined.meant_by(gpu, spans) & (spans["engine"] == Engine.KERNEL), joined.end[rows[mine]]
            mask[mine] = Cover(spans["start_ns"][ran], spans["end_ns"][ran]).within(end, end + 1) > 0
        kernels = np.flatnonzero(
            joined.meant_by(gpu, table) & (table["engine"] == Engine.KERNEL) & (joined.x_call >= 0)
        )
        if not len(kernels):
            continue
        asked = joined.start[joined.x_call[kernels]]
        order = np.argsort(asked, kind="stable")
        latest = np.maximum.accumulate(joined.x_end[kernels][order])
        before = np.searchsorted(asked[order], joined.start[rows[mine]]) - 1
        mask[mine] = (before >= 0) & (latest[np.maximum(before, 0)] > joined.end[rows[mine]])
    return mask


class _Waits(NamedTuple):
    """Waits for copies, arrays of one entry a wait.

    Attributes:
        rows, ns: of `calls`, and what each took.
        back: for a result that is read back.
        stores: for stores that no kernel needs.
    """

    rows: Array
    ns: Array
    back: Array
    stores: Array

    def most(self, mask: Array) -> bool:
        """Whether these took most of the time."""
        return 2 * int(self.ns[mask].sum()) > int(self.ns.sum())


def _waited(joined: JoinedRecording, waits: _Waits) -> Finding | None:
    """The finding: these waits were for copies."""
    rows, ns = waits.rows, waits.ns
    if not len(rows):
        return None
    seen, implicit = joined.recording.has_executions, (joined.kind == CallKind.COPY_SYNC)[rows]
    held = _held_ns(joined, rows[waits.stores]) if seen else 0
    matters = HELD_SHARE * joined.span_ns < held
    ahead = _ahead(joined, rows)
    free = not matters and int(ns[ahead].sum()) >= MOST_OF * int(ns.sum())  # the GPU went on with what it had
    what = "results that it reads back" if waits.most(waits.back) else "stores" if matters else "copies"
    title = f"The launching thread waited {{lost}} for {what}, in {{calls}} calls"
    first = RESULTS if waits.most(waits.back) else LEAVE if matters and waits.most(waits.stores) else ORDER
    return joined.host_finding(
        CAUSE,
        title + (", and launched the next kernel only afterwards" if matters else AHEAD if free else ""),
        "certain" if seen else "likely",
        rows,
        ns,
        # every server reads back what it sampled: only what the GPU did meanwhile tells whether that cost anything
        severity=None if joined.account.seen or not waits.most(waits.back) else "info",
        evidence=_evidence(joined, waits, held if matters else 0, free),
        cure=(
            first,
            Change("Where the host needs the bytes: poll cudaEventQuery between steps instead of synchronising"),
            *(
                (
                    Change(
                        "cudaMemcpy: use cudaMemcpyAsync on a stream of its own, with pinned memory",
                        share=int(ns[implicit].sum()) / int(ns.sum()),
                    ),
                )
                if implicit.any()
                else ()
            ),
        ),
        held=waits.stores if matters else None,
        chart=joined.slow_calls_chart(rows, "Waits for copies on the launching thread"),
    )


def _evidence(joined: JoinedRecording, waits: _Waits, held: int, free: bool) -> list[Evidence]:
    """What the waits took; for how long they held up the next kernel, `held` ns, or that they did not, `free`."""
    rows, ns, back = waits.rows, waits.ns, waits.back
    how = MEASURED if joined.recording.has_executions else INFERRED
    names = {joined.text(i): int(ns[joined.name[rows] == i].sum()) for i in np.unique(joined.name[rows])}
    worst = max(names, key=lambda name: names[name])
    implicit = int((joined.kind[rows] == CallKind.COPY_SYNC).sum())
    text = f"{len(rows):,} calls waited for copies, {ms(int(ns.sum()))} in all; the same threads launched kernels after"
    out = [Evidence(f"{text} them", int(ns.sum()), "ns", how)]
    if held:
        text = f"for {ms(held)} of this time, the GPU ran only stores: the next kernel was launched after the wait"
        out.append(Evidence(text, held, "ns", MEASURED))
    if free:
        text = (
            "when these waits ended, the GPU still had kernels to run that had been launched before: it did not wait "
            "for the thread"
        )
        out.append(Evidence(text, len(rows), "calls", MEASURED))
    if back.any():
        text = (
            f"{int(back.sum()):,} of them read back a result of at most 64 KiB before the thread had launched anything "
            "else"
        )
        out.append(Evidence(text, int(back.sum()), "calls", how))
    out.append(Evidence(f"calls of {worst} alone took {ms(names[worst])}", names[worst], "ns", MEASURED))
    if implicit:
        text = f"{implicit:,} of them are calls that always wait (cudaMemcpy)"
        out.append(Evidence(text, implicit, "calls", COUNTED))
    return out
