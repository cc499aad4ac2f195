"""A thread that submits has no CPU: others run on it, or the container's quota is used up.

Mechanism: Linux takes the CPU from a thread, in a call or between two calls. The thread gets the CPU back some
milliseconds later or, if its control group has used up its CPU quota, at the next period (100 ms). The thread does
nothing in between.

Signature: kvprobe reads Linux's counters of the thread about every 20 ms, and one of these is true:
 - Slow submissions: the thread waited for a CPU between the two readings around them, for at least half of the time
   that the submissions took longer than usual. But the thread may also have slept for that long between the readings,
   for example because of a lock. Then it must have waited for a CPU for at least the whole time that the submissions
   took longer than usual. Submissions that a full queue, pageable memory or a label of the recorder explains do not
   count: a thread that waits there uses its CPU.
 - Pauses between calls: in pauses of at least a millisecond, the thread waited for a CPU for at least a tenth of its
   time.

The larger of the two losses is the title of the finding. The other one is evidence.

Predicted saving: a CPU for the thread saves the whole time that the thread waited for one. A larger quota saves the
part of this time that the quota took.
Source: `/proc/<pid>/task/<tid>/schedstat` (Documentation/scheduler/sched-stats.rst), `cpu.stat` of the control group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account import Line, Times
from kvprobe.diagnosis.finding import Change, Evidence, Finding, Loss, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.diagnosis.pauses import long_pauses
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct

CAUSE = cause_of(__name__)
PROVES = Line.NO_CPU
LINUX = "counted by Linux"
LEAST_SHARE = 0.10  # of a thread's time, waited between its calls


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs the kernel's count, of which a run's observer notes what is worth it."""
    watched = any(source.format == "kvprobe" and source.command for source in joined.recording.source)
    if watched or joined.recording.cpu_waits.rows:
        return None
    return NotLookedFor("the recording does not tell how long threads waited for a CPU", "kvprobe run")


@dataclass
class _CpuWait:
    """Calls, what is lost in each (or in the pause after it), and the rows of `cpu_waits` that say so."""

    rows: Array
    ns: Array
    notes: Array
    sure: bool = True

    @property
    def lost_ns(self) -> int:
        """In all."""
        return int(self.ns.sum())


def find(joined: JoinedRecording) -> Finding | None:
    """Slow submissions of threads that waited for a CPU, or pauses between their calls."""
    if not joined.recording.cpu_waits.rows:
        return None
    inside = _slow_submissions(joined)
    between = _pauses(joined, inside.lost_ns if inside else 0)
    if between and (not inside or between.lost_ns > inside.lost_ns):
        return _between_calls(joined, between, inside)
    return _inside_calls(joined, inside, between) if inside else None


def _notes_of(joined: JoinedRecording, row: int) -> Array:
    """Rows of `cpu_waits` of the thread that made a call."""
    waits = joined.recording.cpu_waits
    return np.flatnonzero((waits["process"] == joined.process[row]) & (waits["thread"] == joined.thread[row]))


def _slow_submissions(joined: JoinedRecording) -> _CpuWait | None:
    """Slow submissions in whose time their thread waited for a CPU."""
    waits = joined.recording.cpu_waits
    left = np.minimum(joined.host.free_ns, joined.excess_ns)
    slow = np.flatnonzero(joined.submits & joined.slow & (joined.host.owner < 0) & (left > 0))
    claimed: list[Array] = []
    ns: list[Array] = []
    notes: list[Array] = []
    sure = True
    for caller in distinct(joined.caller[slow]):
        rows = slow[joined.caller[slow] == caller]
        mine = _notes_of(joined, rows[0])
        if not len(mine):
            continue
        rows = rows[np.argsort(joined.start[rows], kind="stable")]
        # rows of one group lie in the same spans: a long call joins all it touches
        first = np.searchsorted(waits["end_ns"][mine], joined.start[rows], side="right")
        last = np.searchsorted(waits["start_ns"][mine], joined.end[rows], side="left") - 1
        touches = last >= first
        rows, first, last = rows[touches], first[touches], last[touches]
        if not len(rows):
            continue
        group = np.cumsum(np.append(True, first[1:] > np.maximum.accumulate(last)[:-1])) - 1
        for number in range(int(group[-1]) + 1):
            these = group == number
            inside = mine[first[these].min() : last[these].max() + 1]
            excess = left[rows[these]]
            lost, waited = int(excess.sum()), int(waits["waited_ns"][inside].sum())
            length = int((waits["end_ns"] - waits["start_ns"])[inside].sum())
            slept = length - waited - int(waits["ran_ns"][inside].sum())
            may_have_slept = 2 * slept >= lost
            if waited < (lost if may_have_slept else lost / 2):
                continue
            sure &= not may_have_slept
            claimed.append(rows[these])
            ns.append((excess * min(1.0, waited / lost)).astype(np.int64))
            notes.append(inside)
    if not claimed:
        return None
    return _CpuWait(np.concatenate(claimed), np.concatenate(ns), distinct(np.concatenate(notes)), sure)


def _pauses(joined: JoinedRecording, inside_ns: int) -> _CpuWait | None:
    """Pauses of submitting threads that waited for a CPU for a good part of their time; `inside_ns` of it in calls."""
    pauses = long_pauses(joined)
    waited = np.flatnonzero((pauses.waited_ns > 0) & ~joined.outside[pauses.before])
    rows: list[Array] = []
    ns: list[Array] = []
    notes: list[Array] = []
    for caller in distinct(pauses.caller[waited]):
        mine = waited[pauses.caller[waited] == caller]
        before, lost = pauses.before[mine], pauses.waited_ns[mine]
        if int(lost.sum()) < LEAST_SHARE * joined.caller_span_ns(before):
            continue
        if joined.submits[joined.caller == caller].any():
            rows.append(before)
            ns.append(lost)
            notes.append(_notes_of(joined, before[0]))
    if not rows:
        return None
    found = _CpuWait(np.concatenate(rows), np.concatenate(ns), np.concatenate(notes))
    outside_ns = int(joined.recording.cpu_waits["waited_ns"][found.notes].sum()) - inside_ns
    found.ns = (found.ns * min(1.0, max(outside_ns, 0) / found.lost_ns)).astype(np.int64)
    return found if found.lost_ns else None


def _by_quota(joined: JoinedRecording, notes: Array) -> tuple[int, float]:
    """What the quota took of the time waited, at most, and its share."""
    waits = joined.recording.cpu_waits
    throttled = int(np.minimum(waits["throttled_ns"], waits["waited_ns"])[notes].sum())  # of each thread's own wait
    return throttled, min(1.0, throttled / max(int(waits["waited_ns"][notes].sum()), 1))


def _quota_evidence(throttled: int) -> list[Evidence]:
    if not throttled:
        return []
    text = f"for up to {ms(throttled)} of this time, the CPU quota of the control group was used up"
    return [Evidence(text, throttled, "ns", LINUX)]


def _cure(by_quota: float) -> list[Change]:
    changes = [
        Change(
            "Give the process more CPUs than it has busy threads: stop what else runs on them, pin it to its own "
            "(taskset, cpuset), start fewer threads (OMP_NUM_THREADS, tokenizer and data loader workers)",
            "setting",
            "CPUs",
            share=1 - by_quota,
        ),
        Change(
            "Raise the CPU quota of the container (Kubernetes: resources.limits.cpu; docker: --cpus), or set none",
            "setting",
            "CPU quota",
            share=by_quota,
        ),
    ]
    return [change for change in changes if change.share]


def _inside_calls(joined: JoinedRecording, inside: _CpuWait, between: _CpuWait | None) -> Finding | None:
    waits, rows = joined.recording.cpu_waits, inside.rows
    left = np.minimum(joined.host.free_ns[rows], joined.excess_of(rows))
    waited = int(waits["waited_ns"][inside.notes].sum())
    length = int((waits["end_ns"] - waits["start_ns"])[inside.notes].sum())
    throttled, by_quota = _by_quota(joined, inside.notes)
    evidence = [
        Evidence(
            f"{len(rows):,} submissions took {ms(int(left.sum()))} longer than usual; in the {ms(length)} around them, "
            f"their threads waited {ms(waited)} for a CPU",
            waited,
            "ns",
            LINUX,
        ),
        *_quota_evidence(throttled),
    ]
    if between:
        evidence.append(
            Evidence(
                f"between their calls, the threads waited another {ms(between.lost_ns)} for a CPU",
                between.lost_ns,
                "ns",
                LINUX,
            )
        )
    return joined.host_finding(
        CAUSE,
        "{calls} submissions took {lost} too long because their thread had no CPU",
        "certain" if inside.sure else "likely",
        rows,
        inside.ns,
        evidence=evidence,
        cure=_cure(by_quota),
        chart=joined.slow_calls_chart(rows, "Submissions of threads that waited for a CPU"),
    )


def _waited_for(joined: JoinedRecording, callers: Array) -> Times:
    """Where GPUs waited for these threads while they had no CPU, as the account has it."""
    parts = [(joined.start[:0], joined.start[:0], joined.start[:0])]
    for place, gpu in enumerate(joined.account.gpus):
        cut = gpu.stretches
        mine = (cut.line == PROVES) & among(cut.caller, callers)
        parts.append((cut.start[mine], cut.end[mine], np.full(int(mine.sum()), place)))
    return Times(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _between_calls(joined: JoinedRecording, between: _CpuWait, inside: _CpuWait | None) -> Finding | None:
    rows, lost = between.rows, between.lost_ns
    pauses = long_pauses(joined)
    mine = np.isin(pauses.before, rows)
    span = joined.caller_span_ns(rows)
    throttled, by_quota = _by_quota(joined, between.notes)
    evidence = [
        Evidence(
            f"submitting threads spent {share(lost, span)} of their time waiting for a CPU outside of CUDA calls, in "
            f"{len(rows):,} pauses of a millisecond or more",
            lost,
            "ns",
            LINUX,
        ),
        *_quota_evidence(throttled),
    ]
    if inside:
        text = f"{len(inside.rows):,} submissions waited another {ms(inside.lost_ns)} for a CPU, inside the call"
        evidence.append(Evidence(text, inside.lost_ns, "ns", LINUX))
        joined.host.claim(CAUSE, inside.rows, inside.ns)
    return joined.finding(
        CAUSE,
        "Submitting threads waited {lost} for a CPU between their calls",
        "likely",
        Loss(
            lost,
            len(rows),
            on="host",
            window=(int(pauses.start[mine].min()), int(pauses.end[mine].max())),
            span_ns=span,
            places=joined.places(rows, between.ns),
            gaps=_waited_for(joined, distinct(joined.caller[rows])),
        ),
        evidence=evidence,
        cure=_cure(by_quota),
        reason="what the thread would have done in that time is not recorded: a thread that only polls loses nothing",
    )
