"""Where a GPU stood idle because nothing had been submitted: shared by the two causes that explain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvprobe.account import COPIES, HOST, LINE_TITLES, OPEN, OUTSIDE_CALLS, GpuAccount, Line, Unknown
from kvprobe.account.chain import hidden_beside_work
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.finding import EvidenceChart
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct, in_time, union
from kvprobe.recordings.model import CallKind, Label

__all__ = [
    "Gaps",
    "Outside",
    "busy",
    "gaps_by_events",
    "gaps_chart",
    "hidden",
    "idle_gaps",
    "nothing_to_do",
    "outside_calls",
    "waited_before",
]

NO_WORK_NS = 1_000_000_000  # longer pauses: the server had no requests, or the recording cannot say


@dataclass
class Gaps:
    """Idle stretches of the device and what the host did in them; arrays of one entry a gap.

    Attributes:
        gpu, where: the one that was idle, as `Joined.gpu_number`, and by its number in the account.
        start, end: the gap, on the recording's clock.
        call: row of the call that ended it; by timing events the next of its thread, as launches may not be kept.
        host_ns: part of it in which the launching thread was in no CUDA call at all: it prepared.
        gc_ns: part of it that the recorder labelled garbage collection.
    """

    gpu: Array
    where: Array
    start: Array
    end: Array
    call: Array
    host_ns: Array
    gc_ns: Array


def nothing_to_do(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask of gaps in which, for most of the time, nobody asked for anything, or nothing shows whether anybody did."""
    mask = np.zeros(len(gaps.start), dtype=bool)
    for place, gpu in enumerate(joined.account.gpus):
        cut, mine = gpu.stretches, gaps.where == place
        nobody = (cut.line == Line.NOTHING_TO_DO) | among(cut.detail, OPEN)
        idle = Cover(cut.start[nobody], cut.end[nobody]).within(gaps.start[mine], gaps.end[mine])
        mask[mine] = 2 * idle > gaps.end[mine] - gaps.start[mine]
    return mask


class Outside(NamedTuple):
    """How long threads neither submitted work nor waited for the GPU: `ns`, and `text` for a sentence.

    The text has the same time split into the lines of the account, in brackets, where it is in more than one.
    """

    ns: int
    text: str


def outside_calls(joined: JoinedRecording, gaps: Gaps, some: Array, otherwise_ns: int) -> Outside:
    """What the launching threads spent so in the gaps of this mask, as the account has it, before any is claimed.

    Gaps of several processes on one GPU may overlap, and count once. Where the account has nothing of it, it is what
    the gaps themselves came to, `otherwise_ns`.
    """
    spent = dict.fromkeys((*OUTSIDE_CALLS, Line.NOTHING_TO_DO), 0)
    for place, gpu in enumerate(joined.account.gpus):
        cut, here = gpu.stretches, some & (gaps.where == place)
        mine = cut.cut(*union(gaps.start[here], gaps.end[here])) & (cut.cause == NOBODY)
        for line in spent:
            spent[line] += cut.sum_ns(mine & (cut.line == line))
    total = sum(spent.values())
    if not total:
        return Outside(otherwise_ns, ms(otherwise_ns))
    told = [f'{ms(ns)} "{LINE_TITLES[line].split(": ")[-1]}"' for line, ns in spent.items() if ns >= 0.005 * total]
    return Outside(total, ms(total) + (f" ({', '.join(told)})" if len(told) > 1 else ""))


def hidden(joined: JoinedRecording, gaps: Gaps, mine: Array) -> int:
    """How much of these gaps' preparation fits beside what the device does in the step before, ns."""
    out = 0
    for gpu in distinct(gaps.gpu[mine]).tolist():
        one = mine & (gaps.gpu == gpu)
        out += hidden_beside_work(_working(joined, gpu), gaps.start[one], gaps.end[one], gaps.host_ns[one])
    return out


def _working(joined: JoinedRecording, number: int) -> Cover:
    """When a GPU ran anything: what was executed, else what timing events told."""
    if joined.recording.has_executions:
        theirs = joined.x_gpu == number
        return Cover(joined.x_start[theirs], joined.x_end[theirs])
    covers = [busy(gpu) for gpu in joined.account.gpus if number in joined.gpu_numbers(gpu)]
    return Cover(np.concatenate([one.start for one in covers]), np.concatenate([one.end for one in covers]))


def busy(gpu: GpuAccount) -> Cover:
    """When a GPU computes or copies, as its account has it."""
    cut = gpu.stretches
    works = among(cut.line, (Line.COMPUTING, *COPIES)) | (cut.detail == Unknown.GRAPH)
    return Cover(cut.start[works], cut.end[works])


def waited_before(joined: JoinedRecording, gaps: Gaps) -> Array:
    """Mask over gaps: the launching thread was in a call that waits for the device when the gap began."""
    mask = np.zeros(len(gaps.start), dtype=bool)
    waits = np.flatnonzero((joined.kind == CallKind.SYNC) & ~joined.nested)
    for caller in distinct(joined.caller[gaps.call]):
        theirs = joined.caller[gaps.call] == caller
        mine = waits[joined.caller[waits] == caller]
        cover = Cover(joined.start[mine], joined.end[mine])
        mask[theirs] = cover.within(gaps.start[theirs] - 1, gaps.start[theirs]) > 0
    return mask


def gaps_chart(joined: JoinedRecording, gaps: Gaps, mine: Array) -> EvidenceChart:
    """The first 2,000 of the gaps that `mine` selects, by when they began and the host's part of them."""
    return {
        "title": "Idle gaps of the device",
        "x_label": "time in the recording (ms)",
        "y_label": "gap (µs)",
        "series": {
            "gaps": {
                "x": (gaps.start[mine] - joined.serving.first_ns)[:2000] / 1e6,
                "y": gaps.host_ns[mine][:2000] / 1e3,
                "style": "points",
            }
        },
    }


def idle_gaps(joined: JoinedRecording) -> Gaps:
    """Gaps between executions that ended with an operation submitted only after they had begun."""
    return joined.once(_idle_gaps)


def gaps_by_events(joined: JoinedRecording) -> Gaps:
    """The same where timing events tell what the device did: what the account has of waiting for the host.

    Where a thread was elsewhere for longer than in Python, or another cause explains that, more is known: no such gap.
    """
    parts: list[tuple[Array, ...]] = []
    for place, gpu in enumerate(joined.account.gpus):
        cut = gpu.stretches
        rows = np.flatnonzero(among(cut.line, HOST))
        if not len(rows):
            continue
        begins = np.flatnonzero(np.r_[True, cut.start[rows][1:] != cut.end[rows][:-1]])
        whole = np.add.reduceat
        unclaimed = (cut.line[rows] == Line.PYTHON) & (cut.cause[rows] == NOBODY)
        python = whole(np.where(unclaimed, cut.ns[rows], 0), begins)
        outside = whole(np.where(among(cut.line[rows], OUTSIDE_CALLS), cut.ns[rows], 0), begins)
        last = np.append(begins[1:], len(rows)) - 1
        caller = cut.caller[rows][last]
        keep = (2 * python > outside) & among(caller, _launching_by_totals(joined))
        start, end, caller = cut.start[rows][begins][keep], cut.end[rows][last][keep], caller[keep]
        call = np.zeros(len(start), dtype=np.int64)
        for one in distinct(caller):
            theirs = in_time(np.flatnonzero(joined.caller == one), joined.start)
            mine = caller == one
            at = np.searchsorted(joined.start[theirs], end[mine])
            call[mine] = theirs[np.minimum(at, len(theirs) - 1)]
        nothing = np.zeros(len(start), dtype=np.int64)
        number = joined.gpu_number(joined.process[call], gpu.device)
        parts.append((number, np.full(len(start), place), start, end, call, python[keep], nothing))
    return _gaps_of(parts)


def _gaps_of(parts: list[tuple[Array, ...]]) -> Gaps:
    columns = [np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, dtype=np.int64) for i in range(7)]
    return Gaps(*columns)


def _launching_by_totals(joined: JoinedRecording) -> Array:
    """Callers that launch kernels or graphs, where launches may be counted and not kept."""
    totals = joined.recording.totals
    made = among(totals["kind"], (CallKind.LAUNCH, CallKind.GRAPH)) & (totals["calls"] > 0)
    threads = {*zip(totals["process"][made].tolist(), totals["thread"][made].tolist(), strict=True)}
    callers = [(one, int(np.argmax(joined.caller == one))) for one in distinct(joined.caller).tolist()]
    found = [one for one, row in callers if (int(joined.process[row]), int(joined.thread[row])) in threads]
    return np.array(found, dtype=np.int64)


def _idle_gaps(joined: JoinedRecording) -> Gaps:
    parts: list[tuple[Array, ...]] = []
    garbage = joined.label_cover(Label.GC)
    counts = joined.submits & among(joined.caller, joined.launching_callers)
    gpus = distinct(joined.x_gpu)
    for gpu in gpus:
        if len(gpus) == 1 and not (joined.x_start[1:] < joined.x_start[:-1]).any():
            mine: Array | slice = slice(None)  # the columns themselves: copies are as long as the recording
        else:
            mine = in_time(np.flatnonzero(joined.x_gpu == gpu), joined.x_start)
        begin = joined.x_start[mine]
        start, end = Cover(begin, joined.x_end[mine]).gaps()
        if not len(start):
            continue
        first = np.searchsorted(begin, end)  # the execution that ends the gap
        if not isinstance(mine, slice):
            first = mine[first]
        call = joined.x_call[first]
        keep = (call >= 0) & (end - start < NO_WORK_NS)
        start, end, call = start[keep], end[keep], call[keep]
        # Only if a launching thread ended it, after the gap had begun, was the host behind.
        keep = counts[call] & (joined.start[call] > start) if len(call) else np.zeros(0, dtype=bool)
        start, end, call = start[keep], end[keep], call[keep]
        host = np.zeros(len(start), dtype=np.int64)
        for caller in distinct(joined.caller[call]):
            theirs = joined.caller[call] == caller
            inside = joined.occupied(joined.caller == caller)
            upto = joined.start[call[theirs]]
            host[theirs] = (upto - start[theirs]) - inside.within(start[theirs], upto)
        place = joined.where(joined.recording.executions, first[:1])[0]
        whose = np.full(len(start), gpu), np.full(len(start), place)
        parts.append((*whose, start, end, call, host, garbage.within(start, end)))
    return _gaps_of(parts)
