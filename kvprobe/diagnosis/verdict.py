"""What is said of a recording in one word: found, healthy, or undecided with what is missing and how to record it.

Undecided is never green. A recording is healthy only where enough was seen to say so: it was read to its end, it holds
submissions, and what could not be explained in it is too little to matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvprobe.account import COPIES, HOST, OPEN, Account, GpuAccount, Line, Unknown
from kvprobe.diagnosis import FULL_QUEUE, UNEXPLAINED
from kvprobe.durations import percent_text, time_text
from kvprobe.launchqueue.constants import WARNING_SHARE
from kvprobe.output.parts import VerdictJson
from kvprobe.recordings.assemble import among
from kvprobe.recordings.buckets import bucket_floor_ns
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Recording
from kvprobe.recordings.serving import ServingWindow, serving_window

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.finding import Finding

__all__ = ["MissingPart", "Verdict", "missing", "not_known_of", "of_full_queue", "of_recording", "statement"]

State = Literal["found", "healthy", "undecided"]

ENOUGH = 32  # submissions in the window; a queue cannot be full with fewer
LONG_NS = 1_000_000_000  # of a window in which GPUs compute: then fewer are enough
UNSEEN_SHARE = 0.05  # the same, of slow calls that were only counted
UNKNOWN_SHARE = 0.10  # of a GPU's window: where more is not known, it is not called healthy
WAITED_SHARE = 0.10  # the same of what it waited, for copies or for the host

_AGAIN = "record again and let the recorder end by itself"
_COPIES = (
    "record while blocks are copied: `kvprobe run -- COMMAND`, `nsys profile -t cuda,nvtx`, or torch.profiler "
    "with ProfilerActivity.CUDA"
)
_LONGER = f"record for longer, and {_COPIES}"
_DEVICE = "record with device activity: `kvprobe run --nsys`, `nsys profile -t cuda`, or torch.profiler with CUDA"
_REQUESTS = "record where threads sleep: `kvprobe run --nsys`, or `nsys profile -t cuda,nvtx,osrt`"
_ALL_AT_ONCE = "keep a batch in flight for each GPU, or split each layer over the GPUs, and record again"
_LAUNCHES = "record every launch and event call: `kvprobe run --detail launches`"
_DETAIL = "keep more calls: `kvprobe run --max-size`, or a shorter run"


@dataclass(frozen=True)
class MissingPart:
    """What a recording lacks, and how to record it; both are half sentences."""

    what: str
    how: str


@dataclass(frozen=True)
class Verdict:
    """One word and why.

    Attributes:
        state: "found", "healthy" or "undecided".
        reason: one sentence without its full stop.
        missing: what keeps a recording from being called healthy; of "found" as well, where it is incomplete.
    """

    state: State
    reason: str
    missing: tuple[MissingPart, ...] = ()

    def to_json(self) -> VerdictJson:
        """The three fields."""
        return {
            "state": self.state,
            "reason": self.reason,
            "missing": [{"what": one.what, "how": one.how} for one in self.missing],
        }


def missing(
    recording: Recording, window: ServingWindow | None = None, account: Account | None = None
) -> list[MissingPart]:
    """What this recording lacks to be called healthy, whatever was found in it; empty where it lacks nothing.

    By its account, where that is given, few submissions are enough where GPUs compute nearly all of a second or more.
    """
    out = [MissingPart(line, _AGAIN) for line in recording.incomplete]
    calls, totals = recording.calls, recording.totals
    window = window or recording.window or serving_window(recording)
    submits = among(calls["kind"], SUBMITTING)
    inside = int((submits & window.holds(calls["process"], calls["start_ns"])).sum()) if submits.any() else 0
    counted = int(totals["calls"][among(totals["kind"], SUBMITTING)].sum())
    inside = max(inside, _between_marks(recording, window))
    made = inside if inside or window.given else max(inside, counted)
    if not calls.rows and not counted and not recording.executions.rows:
        out.append(MissingPart("the recording holds no CUDA call and no device activity", _COPIES))
    elif not made:
        seen = "device activity and no call that submits" if recording.executions.rows else "no submission"
        out.append(MissingPart(f"the recording holds {seen}" + (" in that window" if window.given else ""), _COPIES))
    elif made < ENOUGH and not (account and _computes(account)):
        few = "too few to tell a full queue from chance"
        if counted >= ENOUGH and not window.given:
            out.append(
                MissingPart(
                    f"the recording has the details of only {made} of {counted:,} submissions, {few}", _LAUNCHES
                )
            )
        else:
            out.append(MissingPart(f"the recording holds {made} submission{'s' if made > 1 else ''}, {few}", _LONGER))
    out += _unseen(recording)
    out += _unseen_records(recording)
    return out


def _computes(account: Account) -> bool:
    """Whether all GPUs were seen, and compute for all of a long window but what would not be called waiting."""
    gpus = account.gpus
    return account.seen and all(
        gpu.window_ns >= LONG_NS and gpu.share(Line.COMPUTING) > 1 - WAITED_SHARE for gpu in gpus
    )


def _between_marks(recording: Recording, window: ServingWindow) -> int:
    """Submissions in the window by the timing events of `kvprobe run`: launches are not kept one by one."""
    spans = recording.spans
    return int(spans["count"][window.holds(spans["process"], spans["start_ns"])].sum()) if spans.rows else 0


def _unseen_records(recording: Recording) -> list[MissingPart]:
    """Records of events that waited, each too short to be kept: they take slots of a queue as submissions do."""
    totals, calls = recording.totals, recording.calls
    named = np.array(["eventrecord" in name.lower() for name in recording.names] or [False])
    rows = np.flatnonzero(named[totals["name"]]) if len(recording.histograms) == totals.rows else np.zeros(0, np.int64)
    kept = named[calls["name"]] if calls.rows else np.zeros(0, dtype=bool)
    if not len(rows) or int(kept.sum()) >= int(totals["calls"][rows].sum()):
        return []
    lost, quick = _slower(recording.histograms[rows].sum(axis=0))
    took = np.maximum(calls["end_ns"] - calls["start_ns"], 0)[kept]
    lost -= float(np.maximum(took[took > 3 * quick] - quick, 0).sum())
    span = float(calls["end_ns"].max() - calls["start_ns"].min()) if calls.rows else 0.0
    threads = max(len(np.unique(totals["thread"][rows])), 1)
    if lost <= UNSEEN_SHARE * max(span * threads, 1.0):
        return []
    said = f"calls that record an event took {time_text(lost)} longer than quick ones; they were not kept one by one"
    return [MissingPart(said, _LAUNCHES)]


def _slower(counts: Array) -> tuple[float, float]:
    """How much longer than quick calls those of a histogram took that are thrice as long; what a quick one takes."""
    floors = np.array([bucket_floor_ns(bucket) for bucket in range(len(counts))], dtype=np.float64)
    quick = max(float(floors[int(np.searchsorted(np.cumsum(counts), 0.02 * counts.sum()))]), 200.0)
    slow = floors > 3 * quick
    return float((counts[slow] * (floors[slow] - quick)).sum()), quick


def _unseen(recording: Recording) -> list[MissingPart]:
    """Slow calls that are in the totals alone, where they held their threads up."""
    totals = recording.totals
    if not any(recording.lost.values()) or len(recording.histograms) != totals.rows:
        return []
    rows = np.flatnonzero(
        among(totals["kind"], (CallKind.COPY, CallKind.BATCH, CallKind.MEMSET))
        & np.isin(totals["process"], [p for p, n in recording.lost.items() if n])
    )
    counts = recording.histograms[rows].sum(axis=0) if len(rows) else np.zeros(0, np.int64)
    if not counts.sum():
        return []
    lost, quick = _slower(counts)
    calls = recording.calls
    detail = np.maximum(calls["end_ns"] - calls["start_ns"], 0)[among(calls["kind"], SUBMITTING)]
    lost -= float(np.maximum(detail[detail > 3 * quick] - quick, 0).sum())
    span = float(calls["end_ns"].max() - calls["start_ns"].min()) if calls.rows else 0.0
    threads = max(len(np.unique(totals["thread"][rows])), 1)
    if lost <= UNSEEN_SHARE * max(span * threads, 1.0):
        return []
    return [
        MissingPart(
            f"calls that took {time_text(lost)} longer than quick ones were counted, but not kept one by one",
            _DETAIL,
        )
    ]


def of_recording(recording: Recording, found: Examination) -> Verdict:
    """The verdict on all that was looked for: found from one finding on that is more than information.

    Healthy is a statement about the account: the GPUs compute, or nobody asked for anything, and what is not known is
    too little to matter.
    """
    lacks = missing(recording, found.serving, found.account)
    named = [one for one in found if not one.abstains and one.severity != "info"]
    if named:
        return Verdict("found", named[0].title.rstrip("."), tuple(lacks))
    seen = [gpu for gpu in found.account.gpus if gpu.seen]
    waited = [_waited(gpu, len(seen) > 1) for gpu in seen if gpu.waited_share >= WAITED_SHARE]
    if waited and any(not one.abstains and one.device_ns for one in found):
        lacks += [lack for gpu in seen if (lack := not_known_of(gpu)) is not None]
        return Verdict("found", waited[0], tuple(lacks))
    lacks += _open([one for one in found if one.at_stake != "info"])
    lacks += [lack for gpu in found.account.gpus for lack in _not_computing(gpu)]
    if lacks:
        return Verdict("undecided", lacks[0].what, tuple(lacks))
    return Verdict("healthy", statement(found.account))


def _waited(gpu: GpuAccount, several: bool) -> str:
    """What a GPU waited for, in a clause; `several`: which GPU has to be said."""
    copies, host = (gpu.ns(*lines) / gpu.asked_ns for lines in (COPIES, HOST))
    return (
        f"{f'GPU {gpu.device}' if several else 'the GPU'} waited for {percent_text(gpu.waiting_share)} of "
        f"{_with_work_to_do(gpu)}: "
        f"{percent_text(copies)} for copies and {percent_text(host)} for the host"
    )


def _with_work_to_do(gpu: GpuAccount) -> str:
    """Names the time that shares of waiting are of."""
    if gpu.asked_ns == gpu.window_ns:
        return time_text(gpu.asked_ns)
    return f"the {time_text(gpu.asked_ns)} in which there was work to do"


def not_known_of(gpu: GpuAccount) -> MissingPart | None:
    """What is not known of a GPU that was seen, and how to record it; None where it is too little to matter."""
    unknown = gpu.matters_ns()
    share = sum(unknown.values()) / gpu.window_ns
    if share < UNKNOWN_SHARE:
        return None
    why = max(unknown, key=lambda reason: unknown[reason])
    if why in OPEN:  # that nothing ran is known
        open_ns = {one: unknown[one] for one in OPEN if unknown.get(one, 0) >= WARNING_SHARE * gpu.window_ns}
        reasons = f", and {why.text}"
        if len(open_ns) > 1:
            parts = (f"for {percent_text(ns / gpu.window_ns)}, {one.text}" for one, ns in open_ns.items())
            reasons = ": " + "; and ".join(parts)
        return MissingPart(f"for {percent_text(share)} of the time the GPU had nothing to run{reasons}", _REQUESTS)
    if why == Unknown.ANOTHER_GPU:
        return MissingPart(f"for {percent_text(share)} of the time, a GPU waited for another GPU", _ALL_AT_ONCE)
    what = f"for {percent_text(share)} of the time, it is not known what the GPU did, because {why.text}"
    return MissingPart(what, _DEVICE)


def _not_computing(gpu: GpuAccount) -> list[MissingPart]:
    """What keeps a GPU's account from being a healthy one."""
    if not gpu.seen:
        return [MissingPart("the recording does not show what the GPU did", _DEVICE)]
    lack = not_known_of(gpu)
    out = [lack] if lack else []
    waited = gpu.waiting_share
    if waited >= WAITED_SHARE:
        time = _with_work_to_do(gpu)
        out.append(
            MissingPart(
                f"the GPU waited for {percent_text(waited)} of {time}, and nothing shows whether a model was running "
                "then",
                _COPIES,
            )
        )
    return out


def statement(account: Account) -> str:
    """How the GPUs spent the window, in one sentence without its full stop."""
    seen = [gpu for gpu in account.gpus if gpu.seen]
    if not seen:
        return "no submission waited for a reason that can be fixed"
    gpu = min(seen, key=lambda one: one.share(Line.COMPUTING))
    name = "the GPU" if len(seen) == 1 else f"GPU {gpu.device}, which computed least,"
    parts = [f"{name} computed for {percent_text(gpu.share(Line.COMPUTING))} of {time_text(gpu.window_ns)}"]
    shares = {
        "waited for copies for {}": gpu.share(*COPIES),
        "waited for the host for {}": gpu.share(*HOST),
        "had nothing to do for {}": gpu.share(Line.NOTHING_TO_DO),
    }
    parts += [text.format(percent_text(share)) for text, share in shares.items() if share >= 0.005]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def of_full_queue(recording: Recording, found: Examination) -> Verdict:
    """The verdict on full launch queues alone: what `kvprobe triage` says, and `kvprobe check --no saturation`.

    Where the device was not recorded, slow submissions that nothing explains may have met a full queue.
    """
    lacks = missing(recording, found.serving)
    open_causes = FULL_QUEUE if recording.has_executions else (*FULL_QUEUE, UNEXPLAINED)
    mine = [one for one in found if one.cause in open_causes]
    named = [one for one in mine if not one.abstains]
    if named:
        return Verdict("found", named[0].title.rstrip("."), tuple(lacks))
    lacks += _open([one for one in mine if one.share >= WARNING_SHARE])
    if lacks:
        return Verdict("undecided", lacks[0].what, tuple(lacks))
    return Verdict("healthy", "no launch queue was full")


def _open(findings: Sequence[Finding]) -> list[MissingPart]:
    """Of findings that are too large to pass over, those that could not be told."""
    return [
        MissingPart(
            one.reason.removeprefix("cannot tell, because ") or one.title.rstrip("."),
            one.cure[0].text[:1].lower() + one.cure[0].text[1:] if one.cure else _DEVICE,
        )
        for one in findings
        if one.abstains
    ]
