"""The GPU idles between launches because the interpreter is slow to make the next one.

Mechanism: each launch costs Python and framework work. If kernels are shorter than this work, the GPU idles after
each kernel. Or the thread waits for the interpreter's lock while another thread computes in Python, and gets the lock
back after the switch interval of 5 ms. Or the interpreter collects garbage.

Signature: a gap is a time in which the GPU executes nothing, although the launch that ends the gap was made only after
the gap began. Gaps belong to this cause if one of these is true:
 - There are many short gaps, one for each launch: at least 64 gaps below 200 µs, which together take at least a tenth
   of the time. (Fewer short gaps belong to `waiting_for_host`.) If most of them begin while the thread waits for the
   GPU, the finding says so, and the first change is not to wait after each kernel. If the thread waits for the GPU
   more often than once in 32 launches, a CUDA graph cannot hold them, and the finding says so. `kvprobe run` counts
   launches and does not keep each one. In its recordings, the short gaps must take most of the time of all gaps that
   were observed, and the thread may wait for the GPU at most once in four launches.
 - Long gaps (1 ms or more) last one or several switch intervals: hardly any long gap is shorter than 4.8 ms, the
   shortest are close to 5 ms, and at least a quarter are below 8 ms. Then other threads hold the lock, and each gives
   the lock up 5 ms after it was asked to.
 - Long gaps lie mostly inside intervals that are labelled garbage collection.
 - Stacks that were taken in the gaps show the thread waiting for the lock, or in Python code.
 - Nsight recorded calls of the operating system (osrt), and in the gaps a thread that runs Python is in
   `pthread_cond_timedwait`. In CPython only `take_gil` waits there, one switch interval at a time.
 - `kvprobe run` noted CPU time, and a thread that runs Python has at least 16 gaps. In most of the time of these gaps,
   another thread of the process ran, and this one did not. This one waited for the interpreter's lock, a lock of the
   program's own, or a result of the other thread: the CPU time does not tell which.

Other gaps of 200 µs or more belong to `gpu_starved`.

If the GPU is never idle or was not recorded, kvprobe looks at the pauses between the calls of a thread that submits.
There must be at least 16 pauses. At least half of the long pauses must last a whole number of switch intervals, or up
to a fifth of an interval longer. Hardly any pause may last between 1 ms and one switch interval. A timer could have the
same period, so one of these must be true as well:
 - At least one pause in eight lasts more or fewer switch intervals than most pauses do, because the threads that hold
   the lock do not always take turns.
 - There are at least two functions whose calls are nearly all followed by a pause. A thread that sleeps on purpose
   sleeps only once in each round of its loop, and so after one function.

A driver's lock, a full queue and pageable memory hold a thread inside calls, not between them. Pauses in which the
thread waited for a CPU do not count, because time slices of the scheduler last some milliseconds, too (`cpu_starved`).
If a third of all pauses are of this kind, none counts, because Linux does not report these waits for every moment.
Two other kinds of pauses do not count, if the recording shows them: pauses in which no other thread of the process ran,
and pauses in which the thread waited for a request (in accept, poll, select, epoll_wait or recv).

Time lost: the part of the gaps in which the thread was outside of CUDA calls, or inside calls that submit.

Predicted saving: the same time. A CUDA graph launches many short kernels with one call. To avoid the lock and garbage
collection, move the other work out of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvprobe.account import OPEN, OUTSIDE_CALLS, Line, Times, Worked, covers_of, who_worked
from kvprobe.account.outside import waits_for_others
from kvprobe.account.stretches import NOBODY
from kvprobe.account.threads import runs_python
from kvprobe.diagnosis.counted_launches import counted_gaps
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, Loss, Where, cause_of
from kvprobe.diagnosis.gaps import (
    NO_WORK_NS,
    Gaps,
    gaps_chart,
    hidden,
    idle_gaps,
    outside_calls,
    waited_before,
)
from kvprobe.diagnosis.in_functions import in_functions, outside_in_functions
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.diagnosis.pauses import long_pauses, waited_within
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.model import CallKind

CAUSE = cause_of(__name__)
PROVES = Line.PYTHON
SHORT_NS, LEAST_SHARE, MANY = 200_000, 0.10, 64
MANY_PAUSES = 16
SWITCH_NS = 5_000_000  # sys.getswitchinterval()
TIMER = 3  # switch intervals: a thread whose pauses all last so many, or one higher number, sleeps
TAKES_LOCK = "pthread_cond_timedwait"
GRAPHS = "Launch many kernels at once: a CUDA graph, torch.compile(mode='reduce-overhead')"
GRAPHS_ONCE = f"{GRAPHS}, once nothing waits between the kernels"
FUSED = "Use larger batches or fused kernels"
IN_A_GRAPH = 32  # launches between two waits of the thread: with fewer, no CUDA graph is worth its making
OTHERS = 8  # one in so many pauses lasts another number of intervals than most do, where threads take turns


def _by_lock(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask of the long gaps, where they have the switch interval for a floor."""
    waited_ns = waited_within(joined, joined.caller[gaps.call], gaps.start, gaps.end)
    long = (gaps.host_ns >= 1_000_000) & ~_held_by_nobody(joined, gaps.call, gaps.start, gaps.end)
    starved = long & (2 * waited_ns >= gaps.host_ns)
    long &= ~starved
    if long.sum() < 5 or 2 * starved.sum() >= long.sum():
        return np.zeros(len(long), dtype=bool)
    shortest, lower = np.percentile(gaps.host_ns[long], (2, 25))
    floor = bool(SWITCH_NS * 0.96 <= shortest <= SWITCH_NS * 1.14 and lower <= SWITCH_NS * 1.6)
    mask: Array = long & (floor and _taking_turns(gaps.host_ns[long] / SWITCH_NS))
    return mask


def _held_by_nobody(joined: JoinedRecording, before: Array, start: Array, end: Array) -> Array:
    """Mask of pauses after the calls `before` in which the thread did not wait for the interpreter's lock.

    No other thread of the process had the CPU, as `run` noted, or it waited for what others send, which takes no lock.
    """
    mask, recording = np.zeros(len(before), dtype=bool), joined.recording
    for caller in distinct(joined.caller[before]) if recording.pauses.rows or recording.os_calls.rows else ():
        mine = np.flatnonzero(joined.caller[before] == caller)
        process, thread = (int(column[before[mine[0]]]) for column in (joined.process, joined.thread))
        who = who_worked(recording, process, thread, start[mine], end[mine])
        mask[mine] = among(who, (Worked.THREAD, Worked.NOBODY))
        mask[mine] |= waits_for_others(recording, process, thread, start[mine], end[mine])
    return mask


def _intervals(times: Array) -> tuple[Array, Array]:
    """How many switch intervals each pause lasts, and which pauses last so many and not some other time.

    A thread wakes late, never early, and each holder in turn keeps the lock for an interval.
    """
    whole = np.maximum(np.round(times), 1)
    return whole, (whole <= 8) & (times >= 0.97 * whole) & (times <= whole + 0.2 * np.sqrt(whole))


def _taking_turns(times: Array) -> bool:
    """Whether pauses, counted in switch intervals, last now one number of them and now another, as no timer does."""
    whole, fits = _intervals(times)
    most = int(np.bincount(whole[fits].astype(np.int64), minlength=9).max())
    others = int(fits.sum()) - most
    return OTHERS * others >= int(fits.sum()) > 0 and 2 * others >= int((~fits).sum())


def _after_every_call(joined: JoinedRecording, rows: Array, calls: Array) -> bool:
    """Whether these pauses (after the calls `rows`) follow nearly all `calls` of their thread, of several functions."""
    begins = joined.start[rows]
    between = (joined.start[calls] >= begins.min()) & (joined.start[calls] <= begins.max())
    names = np.bincount(joined.name[rows])
    return 5 * len(rows) >= 4 * int(between.sum()) and int((OTHERS * names >= len(rows)).sum()) > 1


def _by_stacks(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask of gaps in which a sampled stack shows the launching thread without the lock."""
    stacks = joined.recording.stacks
    mask = np.zeros(len(gaps.start), dtype=bool)
    if not stacks.rows or not len(mask):
        return mask
    for caller in np.unique(joined.caller[gaps.call]):
        mine = np.flatnonzero(joined.caller[gaps.call] == caller)
        row = gaps.call[mine[0]]
        theirs = (stacks["process"] == joined.process[row]) & (stacks["thread"] == joined.thread[row])
        waiting = np.sort(stacks["time_ns"][theirs & (stacks["gil"] == 0)])
        mask[mine] = np.searchsorted(waiting, gaps.end[mine]) > np.searchsorted(waiting, gaps.start[mine])
    return mask & (gaps.host_ns >= 1_000_000)


def _by_os_calls(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask of gaps in which the launching thread, of Python, waited as CPython waits for its lock, for most of them."""
    slept = joined.recording.os_calls
    mask = np.zeros(len(gaps.start), dtype=bool)
    if not slept.rows or not len(mask):
        return mask
    waits = np.array([name == TAKES_LOCK for name in joined.recording.names], dtype=bool)
    for caller in np.unique(joined.caller[gaps.call]):
        mine = np.flatnonzero(joined.caller[gaps.call] == caller)
        row = gaps.call[mine[0]]
        process, thread = int(joined.process[row]), int(joined.thread[row])
        if not runs_python(joined, process, thread):
            continue
        theirs = (slept["process"] == process) & (slept["thread"] == thread) & waits[slept["name"]]
        cover = Cover(slept["start_ns"][theirs], slept["end_ns"][theirs])
        mask[mine] = 2 * cover.within(gaps.start[mine], gaps.end[mine]) > gaps.host_ns[mine]
    return mask & (gaps.host_ns >= 1_000_000)


def explained(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask of gaps for which there is evidence of the interpreter."""
    mask: Array = (2 * gaps.gc_ns > gaps.host_ns) | _by_lock(joined, gaps) | _by_stacks(joined, gaps)
    mask |= _by_os_calls(joined, gaps)
    if len(gaps.call) and len(paused := _submission_pauses(joined)):
        mask |= np.isin(joined.caller[gaps.call], joined.caller[paused])
    return mask


def _submission_pauses(joined: JoinedRecording) -> Array:
    """Rows of calls after which their thread paused for switch intervals, of threads that do so habitually."""
    return joined.once(_pauses)


def _pauses(joined: JoinedRecording) -> Array:
    found = [joined.by_caller[:0]]
    pauses = long_pauses(joined)
    wanted, starved = pauses.ns < NO_WORK_NS, 2 * pauses.waited_ns >= pauses.ns
    wanted &= ~_held_by_nobody(joined, pauses.before, pauses.start, pauses.end)
    for caller in np.unique(pauses.caller[wanted]):
        theirs = (pauses.caller == caller) & wanted
        mine = np.flatnonzero(theirs & ~starved)
        if not len(mine) or 2 * (theirs & starved).sum() >= len(mine):
            continue  # others have its CPU, for slices of some milliseconds each
        times, before = pauses.ns[mine] / SWITCH_NS, pauses.before[mine]
        whole, fits = _intervals(times)
        early = times < 0.9
        if not _taking_turns(times):
            usual = int(np.bincount(whole[fits].astype(np.int64), minlength=9).argmax())
            if usual >= TIMER or not fits.any():
                continue
            if not _after_every_call(joined, before[fits], np.flatnonzero(joined.caller == caller)):
                continue
        if fits.sum() >= MANY_PAUSES and 2 * fits.sum() >= len(mine) and 10 * early.sum() <= fits.sum():
            found.append(before[~early])  # whoever waits long waits for several holders
    return np.concatenate(found)


def _by_submissions(joined: JoinedRecording) -> Finding | None:
    """Pauses of submitting threads that have the interpreter's period."""
    rows = _submission_pauses(joined)
    if not len(rows):
        return None
    pauses = long_pauses(joined)
    mine = np.isin(pauses.before, rows)
    rows, after, ns = pauses.before[mine], pauses.after[mine], pauses.ns[mine]
    lost, typical = int(ns.sum()), float(np.median(ns))
    span = joined.caller_span_ns(rows)
    if lost < LEAST_SHARE * span:
        return None
    calls = int(joined.submits[after].sum())
    inside = int(joined.dur[among(joined.caller, distinct(joined.caller[rows]))].sum())
    start, end = pauses.start[mine], pauses.end[mine]
    places, functions = in_functions(joined, joined.places(rows, ns), joined.caller[rows], start, end, "the pauses")
    return joined.finding(
        CAUSE,
        "A submitting thread waited {lost} for Python's interpreter lock (GIL), between {calls} calls",
        "likely",
        Loss(
            lost,
            len(rows),
            on="host",
            window=(int(joined.end[rows].min()), int(joined.start[after].max())),
            span_ns=span,
            places=places,
            gaps=Times(start, end),
        ),
        evidence=(
            Evidence(
                f"{len(rows):,} pauses between calls, {ms(typical)} each (median)"
                + (f", {calls:,} of them before a submission" if calls else "")
                + ": the interpreter's switch interval of 5 ms, once for each thread that held its lock",
                typical,
                "ns",
                INFERRED,
            ),
            Evidence(
                f"inside its calls the thread spent {ms(inside)} of {ms(span)}: neither a full queue nor the driver "
                f"blocked it",
                lost,
                "ns",
                MEASURED,
            ),
            *functions,
            *_perhaps_asked_for_nothing(joined, start, end),
        ),
        cure=(
            Change("Move the other thread's Python work to a process of its own", share=1.0),
            Change("Submit from native code, one call for many copies (cudaMemcpyBatchAsync, kvprobe's engine)"),
            Change("Call sys.setswitchinterval(0.0005) as a stopgap", share=0.9),
        ),
        reason="a thread that sleeps now 5, now 10 ms between its calls on purpose looks the same",
    )


def _perhaps_asked_for_nothing(joined: JoinedRecording, start: Array, end: Array) -> list[Evidence]:
    """For how much of the pauses the account does not know whether there was work: no saving is predicted for it."""
    pauses, open_ns = Cover(start, end), 0
    for gpu in joined.account.gpus:
        cut = gpu.stretches
        open_ = (cut.line == Line.NOT_KNOWN) & among(cut.detail, OPEN)
        open_ns = max(open_ns, pauses.intersect_ns(Cover(cut.start[open_], cut.end[open_])))
    if not open_ns:
        return []
    text = (
        f"for {ms(open_ns)} of these pauses, only their lengths tell of the lock: nothing shows whether the thread "
        "had work or waited for a request, and no saving is predicted for this part"
    )
    return [Evidence(text, open_ns, "ns", MEASURED)]


def find(joined: JoinedRecording) -> Finding | None:
    """Gaps that the interpreter makes."""
    return _by_submissions(joined) or _by_idle_gaps(joined) or _by_cpu_time(joined) or _by_counted_launches(joined)


def _by_counted_launches(joined: JoinedRecording) -> Finding | None:
    """Short gaps behind kernels whose launches `kvprobe run` counted, on the GPU that waited longest."""
    if not joined.recording.spans.rows:
        return None
    found = []
    for gpu in (one for one in joined.account.gpus if one.seen):
        each = [(one, counted_gaps(joined, gpu, one.caller, SHORT_NS, MANY)) for one in joined.account.threads]
        threads = [(int((gaps.end - gaps.start).sum()), one, gaps) for one, gaps in each if gaps]
        if threads:
            found.append((sum(lost for lost, *_ in threads), gpu, sorted(threads, key=lambda one: -one[0])))
    if not found:
        return None
    lost, gpu, threads = max(found, key=lambda each: each[0])
    if lost < LEAST_SHARE * gpu.window_ns:
        return None
    start = np.concatenate([gaps.start for *_, gaps in threads])
    end = np.concatenate([gaps.end for *_, gaps in threads])
    *_, first = threads[0]
    counts = [(gaps.launches, gaps.calls_ns, gaps.waits) for *_, gaps in threads]
    launches, calls_ns, waits = (sum(column) for column in zip(*counts, strict=True))
    whose = "the thread" if len(threads) == 1 else f"{len(threads)} threads"
    return joined.finding(
        CAUSE,
        "The GPU was idle for {lost}, because Python was slow to launch kernels",
        "likely",
        Loss(
            lost,
            len(start),
            on="device",
            window=(int(start.min()), int(end.max())),
            span_ns=gpu.window_ns,
            places=tuple(
                Where(pid=one.pid, thread=one.thread, lost_ns=ns, calls=len(gaps.start)) for ns, one, gaps in threads
            ),
            gaps=Times(start, end),
            in_calls=(Line.SUBMITTING,),
        ),
        evidence=(
            Evidence(
                f"between kernels, the GPU ran nothing: {ms(first.typical_ns)} each time (median), while a kernel took "
                f"{ms(first.kernel_ns)} (mean)",
                lost,
                "ns",
                MEASURED,
            ),
            Evidence(
                f"{whose} launched {launches:,} kernels, one call each, and {'was' if len(threads) == 1 else 'were'} "
                f"inside these calls for {ms(calls_ns)}; the calls are counted, and not kept one by one",
                launches,
                "launches",
                COUNTED,
            ),
            *_cut_short(launches, waits),
        ),
        cure=(*_graphs(1.0, launches, waits), Change(FUSED)),
    )


def _often(launches: int, waits: int) -> bool:
    """Whether a thread with so many launches and waits leaves a CUDA graph too few launches between two waits."""
    return 0 < launches <= waits * IN_A_GRAPH


def _cut_short(launches: int, waits: int) -> Iterator[Evidence]:
    """That a CUDA graph of these launches would end at a wait soon, where it would."""
    if _often(launches, waits):
        every = max(launches // waits, 1)
        text = f"the thread waited for the GPU {waits:,} times, about once in {every} launches: a CUDA graph ends there"
        yield Evidence(text, waits, "calls", COUNTED)


def _graphs(saves: float, launches: int, waits: int) -> list[Change]:
    """CUDA graphs, and what is to be done before they can hold these launches."""
    if not _often(launches, waits):
        return [Change(GRAPHS, share=saves)]
    return [
        Change(GRAPHS_ONCE, share=saves),
        Change("Read results back once a step, not between kernels: .item(), .tolist(), .cpu() and `if tensor:` wait"),
    ]


def _by_cpu_time(joined: JoinedRecording) -> Finding | None:
    """Idle time of GPUs in which another thread of the process had the CPU, as `kvprobe run` noted."""
    if not joined.recording.pauses.rows:
        return None
    parts, places = [(joined.start[:0], joined.start[:0])], []
    seen = [gpu for gpu in joined.account.gpus if gpu.seen]
    for gpu, one in itertools.product(seen, joined.account.threads):
        cut, process = gpu.stretches, int(joined.process[np.argmax(joined.caller == one.caller)])
        mine = np.flatnonzero((cut.line == PROVES) & (cut.cause == NOBODY) & (cut.caller == one.caller))
        start, end = cut.start[mine], cut.end[mine]
        cover = covers_of(joined.recording, process, one.thread, gpu.from_ns, gpu.to_ns)[Worked.ANOTHER]
        held = 2 * cover.within(start, end) > end - start
        if held.sum() >= MANY_PAUSES:
            parts.append((start[held], end[held]))
            ns = int((end - start)[held].sum())
            places.append(Where(pid=one.pid, thread=one.thread, lost_ns=ns, calls=int(held.sum())))
    start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    lost, span = int((end - start).sum()), sum(gpu.window_ns for gpu in seen)
    if not places or lost < LEAST_SHARE * span:
        return None
    typical = float(np.median(end - start))
    return joined.finding(
        CAUSE,
        "The GPU was idle for {lost}, in {calls} gaps, because its thread waited while another of its process ran",
        "likely",
        Loss(
            lost,
            len(start),
            on="device",
            window=(int(start.min()), int(end.max())),
            span_ns=span,
            places=tuple(sorted(places, key=lambda place: -place.lost_ns)[:16]),
            gaps=Times(start, end),
        ),
        evidence=(
            Evidence(
                f"in {len(start):,} gaps, {ms(typical)} each (median), another thread of the process ran, and the one "
                "that launches did not: it waited for the interpreter's lock or a lock of the program's own, or for "
                "what that thread makes; kvprobe cannot tell which",
                lost,
                "ns",
                MEASURED,
            ),
        ),
        cure=(
            Change("Move the other thread's work to a process of its own", share=1.0),
            Change("If it is a lock of the program's own, hold it for a shorter time"),
        ),
        reason="a thread that waits for what another one makes looks the same",
    )


class _Signs(NamedTuple):
    """Masks over idle gaps: what shows that the interpreter made them.

    Attributes:
        short: many, and each launch pays one.
        waited: most of these begin while the thread waits for the GPU: it launches nothing before a kernel has ended.
        collected: garbage was collected for most of it.
        locked: they have the switch interval for a floor.
        sampled: a stack shows the thread without the lock.
        slept: the thread was in the function that waits for the lock.
    """

    short: Array
    waited: Array
    collected: Array
    locked: Array
    sampled: Array
    slept: Array


def _signs(joined: JoinedRecording, gaps: Gaps, span: int) -> _Signs:
    short = (gaps.host_ns > 0) & (gaps.host_ns < SHORT_NS)
    if short.sum() < MANY or int(gaps.host_ns[short].sum()) < LEAST_SHARE * span:
        short[:] = False
    waited = short & waited_before(joined, gaps)
    if 2 * waited.sum() <= short.sum():
        waited[:] = False
    collected = 2 * gaps.gc_ns > gaps.host_ns
    return _Signs(
        short, waited, collected, _by_lock(joined, gaps), _by_stacks(joined, gaps), _by_os_calls(joined, gaps)
    )


def _by_idle_gaps(joined: JoinedRecording) -> Finding | None:
    """Idle gaps of the device that the interpreter makes."""
    gaps = idle_gaps(joined)
    if not len(gaps.start):
        return None
    span = joined.span_ns * max(len(distinct(gaps.gpu)), 1)
    signs = _signs(joined, gaps, span)
    mine = signs.short | signs.collected | signs.locked | signs.sampled | signs.slept
    host = int(gaps.host_ns[mine].sum())
    if not mine.any() or host < (LEAST_SHARE if not signs.collected.any() else 0.01) * span:
        return None
    start, end = gaps.start[mine], gaps.end[mine]
    outside = outside_calls(joined, gaps, mine, host)
    places, functions = outside_in_functions(
        joined, joined.places(gaps.call[mine], gaps.host_ns[mine]), OUTSIDE_CALLS, start, end
    )
    made = _between_waits(joined, gaps)
    cut_short = _cut_short(*made) if signs.short.any() and not signs.waited.any() else ()
    idle = Evidence(
        f"in {int(mine.sum()):,} gaps, the GPU ran nothing, and the thread that launches neither submitted work nor "
        f"waited for the GPU: together {outside.text}, {share(outside.ns, span)} of the serving window. For the rest "
        "of the gaps, the thread submitted",
        outside.ns,
        "ns",
        MEASURED,
    )
    return joined.finding(
        CAUSE,
        "The GPU was idle for {lost}, in {calls} gaps, because "
        + ("the thread waits for each kernel" if signs.waited.any() else "Python was slow to launch kernels"),
        "likely",
        Loss(
            host,
            int(mine.sum()),
            on="device",
            window=(int(start.min()), int(end.max())),
            span_ns=span,
            places=places,
            gaps=Times(start, end, gaps.where[mine]),
            in_calls=(Line.SUBMITTING,),
        ),
        evidence=[idle, *_evidence(gaps, signs), *cut_short, *functions],
        cure=[*_not_waiting(joined, gaps, signs), *_cure(gaps, signs, max(host, 1), made)],
        chart=gaps_chart(joined, gaps, mine),
    )


def _between_waits(joined: JoinedRecording, gaps: Gaps) -> tuple[int, int]:
    """Launches of the threads of these gaps, and their waits for the device."""
    mine = among(joined.caller, distinct(joined.caller[gaps.call]))
    waits = mine & among(joined.kind, (CallKind.SYNC, CallKind.COPY_SYNC))
    return int((mine & (joined.kind == CallKind.LAUNCH)).sum()), int(waits.sum())


def _evidence(gaps: Gaps, signs: _Signs) -> list[Evidence]:
    """A figure for each sign."""
    evidence = []
    if signs.short.any():
        between = float(np.median(gaps.host_ns[signs.short]))
        evidence.append(
            Evidence(
                f"before each launch, the thread was outside of CUDA calls for {ms(between)} while the GPU was idle "
                f"(median of {int(signs.short.sum()):,} gaps shorter than {ms(SHORT_NS)})",
                between,
                "ns",
                MEASURED,
            )
        )
    if signs.waited.any():
        count = int(signs.waited.sum())
        text = (
            f"{count:,} of these gaps began while the thread waited for the GPU: until then, it launched nothing more"
        )
        evidence.append(Evidence(text, count, "1", MEASURED))
    if signs.locked.any():
        typical = float(np.median(gaps.host_ns[signs.locked]))
        evidence.append(
            Evidence(
                f"{int(signs.locked.sum()):,} last {ms(typical)} (median), the interpreter's switch interval: "
                "another Python thread holds its lock",
                typical,
                "ns",
                INFERRED,
            )
        )
    if signs.sampled.any():
        count = int(signs.sampled.sum())
        text = f"in {count:,} of them a stack was taken in which the thread waited for the interpreter's lock"
        evidence.append(Evidence(text, count, "1", "py-spy"))
    if signs.slept.any():
        count = int(signs.slept.sum())
        text = (
            f"in {count:,} of them the thread was in {TAKES_LOCK}, where CPython waits for its lock, for most of the "
            "time"
        )
        evidence.append(Evidence(text, count, "1", "Nsight's trace of the operating system's functions"))
    if signs.collected.any():
        total = int(gaps.gc_ns[signs.collected].sum())
        text = f"{ms(total)} of them were garbage collection"
        evidence.append(Evidence(text, total, "ns", "labelled by the recorder"))
    return evidence


def _not_waiting(joined: JoinedRecording, gaps: Gaps, signs: _Signs) -> list[Change]:
    """What to do about waits for each kernel: what the thread does in the gaps then lies beside kernels, if it fits."""
    if not signs.waited.any():
        return []
    whole = replace(gaps, host_ns=gaps.end - gaps.start)  # waking and submitting take their part of them
    lasts = int(whole.host_ns[signs.short].sum())
    return [
        Change(
            "Do not wait for the GPU after each kernel: remove timers that were left on, .item() and synchronisations "
            "between kernels, or wait for an event of an earlier step",
            share=hidden(joined, whole, signs.waited) / max(lasts, 1),
        )
    ]


def _cure(gaps: Gaps, signs: _Signs, lost: int, made: tuple[int, int]) -> list[Change]:
    """Changes for each sign; `lost`: what all gaps lost, ns; `made`: launches and waits."""
    cure = []
    if signs.short.any():
        saves = int(gaps.host_ns[signs.short].sum()) / lost
        cure += [*([Change(GRAPHS_ONCE)] if signs.waited.any() else _graphs(saves, *made)), Change(FUSED)]
    if (held := signs.locked | signs.slept).any():
        cure += [
            Change(
                "Move the other thread's Python work to a process of its own",
                share=int(gaps.host_ns[held].sum()) / lost,
            ),
            Change("Call sys.setswitchinterval(0.0005) as a stopgap"),
        ]
    if signs.collected.any():
        total = int(gaps.gc_ns[signs.collected].sum())
        cure += [Change("gc.freeze() after start-up, and gc.collect() between requests", share=total / lost)]
    return cure
