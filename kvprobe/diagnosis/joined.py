"""What the causes share: a recording's calls joined with their executions, and the ledger of time already explained.

A cause reads columns, picks rows, and *claims* nanoseconds of them. The ledger gives each nanosecond once, so causes
run from the best-evidenced to the least, and the sum of what they claim is never more than what was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.account import COPIES, Account, GpuAccount, Line, Times, account_of
from kvprobe.diagnosis.explaining import ExplainedTime, Explainer
from kvprobe.diagnosis.finding import (
    SEVERITIES,
    Change,
    Confidence,
    DeviceQuestion,
    Evidence,
    EvidenceChart,
    Explanation,
    Finding,
    Loss,
    LostOn,
    Question,
    Severity,
    TracedCall,
    Where,
    best_first,
    singular,
)
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.diagnosis.traced import longest
from kvprobe.diagnosis.usual import SLOW_NS, UsualCosts
from kvprobe.durations import bytes_text, percent_text, time_text
from kvprobe.launchqueue.constants import LEAST_NS, NOTABLE_NS, NOTABLE_SHARE, WARNING_SHARE
from kvprobe.recordings.intervals import distinct, group_starts
from kvprobe.recordings.joined import on_gpu
from kvprobe.recordings.model import Array, Direction, Recording, Table
from kvprobe.recordings.occupancy import Occupancy

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SLOW_NS", "Array", "JoinedRecording", "Ledger", "ms", "share", "size"]

CRITICAL = 0.10
IDLE = "The GPU was idle for {lost}"  # how titles of gaps begin
ALIKE = 0.98  # what GPUs lost: closer together, a title names none of them
LOUD = 0.3  # of a GPU's time with work to do: what no cause explains is critical from here, a warning from CRITICAL


ms = time_text  # a duration for a sentence
size = bytes_text  # bytes for a sentence

DIRECTIONS = {Direction.H2D: "CPU to GPU", Direction.D2H: "GPU to CPU"}  # for a sentence


def range_of(values: Array) -> str:
    """The least and the greatest of these counts for a sentence, as one where they are equal."""
    low, high = int(values.min(initial=values[0])), int(values.max(initial=values[0]))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def share(part: float, whole: float) -> str:
    """A percentage for a sentence."""
    return percent_text(part / whole) if whole > 0 else "0%"


def of_the_time(ns: int, gpu: GpuAccount) -> str:
    """A part of the time in which a GPU had something to do, for a sentence: what loudness is measured by.

    Pauses are spoken of where they change the figure: one that they change by its rounding alone is the account's.
    """
    if gpu.asked_ns >= 0.99 * gpu.window_ns:
        return f"{share(ns, gpu.window_ns)} of the time"
    return f"{share(ns, gpu.asked_ns)} of the time in which there was work to do"


def _places(owner: Array, stream: Array, lost: Array, most: int) -> Iterator[tuple[Array, int]]:
    """The rows of each owner and stream, by number, and what they lost in ns; those that lost most first."""
    streams = stream.astype(np.int64) + 1
    key = owner * (int(streams.max()) + 1) + streams
    order = np.argsort(key, kind="stable")
    edges = group_starts(key[order])
    sums = np.add.reduceat(lost[order], edges)
    parts = np.split(order, edges[1:])
    for place in np.argsort(-sums, kind="stable")[:most].tolist():
        yield parts[place], int(sums[place])


class Ledger:
    """Who has claimed how much of each row; a row is one caller's interval (a call, an execution)."""

    def __init__(self, free_ns: Array) -> None:
        """`free_ns`: what can be claimed of each row at most."""
        self.free_ns = free_ns.astype(np.int64)  # a copy
        self.owner = np.full(len(free_ns), -1, dtype=np.int16)
        self.causes: list[str] = []

    def claim(self, cause: str, rows: Array, ns: Array) -> Array:
        """Gives a cause up to `ns` of each row (rows distinct); returns what it got."""
        got: Array = np.clip(ns, 0, self.free_ns[rows]).astype(np.int64)
        self.free_ns[rows] -= got
        if cause not in self.causes:
            self.causes.append(cause)
        fresh = (got > 0) & (self.owner[rows] < 0)
        self.owner[rows[fresh]] = self.causes.index(cause)
        return got


def _within(places: Sequence[Where], lost_ns: int) -> tuple[Where, ...]:
    """Places that add up to no more than what was lost: the account may give a part of it to another line."""
    total = sum(one.lost_ns for one in places)
    if total <= lost_ns:
        return tuple(places)
    return tuple(replace(one, lost_ns=round(one.lost_ns * lost_ns / total)) for one in places)


def of_gpus(title: str, device: Array, lost: Array) -> str:
    """The title of what several GPUs lost: the worst one's time; where calls or gaps are counted, the sum."""
    gpus, place = np.unique(device, return_inverse=True)
    if len(gpus) < 2 or "{lost}" not in title:
        return title
    if "{calls}" in title and title.startswith(IDLE):
        return title.replace(IDLE, f"{len(gpus)} GPUs were idle for {{lost}} together", 1)
    if "{calls}" in title:
        return f"{title}, added up over {len(gpus)} GPUs"
    each = np.bincount(place, weights=lost)
    worst = int(each.argmax())
    alike = each.min() > ALIKE * each.max()
    whose = f"each of {len(gpus)} GPUs" if alike else f"GPU {gpus[worst]} (the worst of {len(gpus)})"
    ns = ms(int(each[worst]))
    if title.startswith(IDLE):
        return title.replace(IDLE, f"{whose[0].upper()}{whose[1:]} was idle for {ns}", 1)
    return title.replace("{lost}", f"{ns} on {whose}")


class JoinedRecording(UsualCosts):
    """A recording, joined once, for all causes.

    Attributes, beyond those of `UsualCosts`:
        host: the ledger of calls. device: the ledger of executions.
    """

    def __init__(self, recording: Recording, known: Occupancy | None = None) -> None:
        """As `UsualCosts`."""
        self._ranges: dict[tuple[int, int], Array] = {}
        super().__init__(recording, known)
        owned = ~(self.nested | self.outside)
        self.host = Ledger(self.dur if owned.all() else np.where(owned, self.dur, 0))

    @cached_property
    def device(self) -> Ledger:
        """The ledger of executions."""
        table = self.recording.executions
        inside = self.serving.holds(table["process"], self.x_start)
        return Ledger(self.x_dur if inside.all() else np.where(inside, self.x_dur, 0))

    # ---- where the time went ------------------------------------------------------------------------------------

    @cached_property
    def account(self) -> Account:
        """Where every instant went; what causes have claimed of it by now is marked in it."""
        return account_of(self)

    @cached_property
    def explainer(self) -> Explainer:
        """Gives causes their part of the account."""
        blocked = np.flatnonzero(queue_blocked(self)) if self.account.seen else np.zeros(0, dtype=np.int64)
        return Explainer(self.account, (self.start[blocked], self.end[blocked], self.caller[blocked]))

    # ---- saying it ----------------------------------------------------------------------------------------------

    def notable(self, lost_ns: int, span_ns: int) -> bool:
        """Whether a loss is worth a line: at least 200 µs, and a millisecond or a hundredth of the span."""
        return lost_ns >= LEAST_NS and (lost_ns >= NOTABLE_NS or lost_ns >= NOTABLE_SHARE * span_ns)

    def severity(self, lost_ns: int, span_ns: int) -> Severity:
        """By share of the caller's span."""
        part = lost_ns / span_ns if span_ns > 0 else 0.0
        return "critical" if part >= CRITICAL else "warning" if part >= WARNING_SHARE else "info"

    def innermost_range(self, process: int, thread: int, at: int, but: tuple[int, int] | None = None) -> str:
        """Name of the innermost range of a thread around an instant; "" where there is none.

        `but`: ranges that contain all of this time, from its first to its last ns, do not count.
        """
        table = self.recording.ranges
        if not table.rows:
            return ""
        rows = self._ranges_of(process, thread)
        if not len(rows):
            return ""
        stop = int(np.searchsorted(table["start_ns"][rows], at, side="right"))
        near = rows[max(0, stop - 512) : stop][::-1]  # nested ranges that still run began recently, or are outermost
        inside = near[table["end_ns"][near] > at]
        if but is not None:
            inside = inside[(table["start_ns"][inside] > but[0]) | (table["end_ns"][inside] < but[1])]
        return self.text(table["name"][inside[0]]) if len(inside) else ""

    def _ranges_of(self, process: int, thread: int) -> Array:
        known = self._ranges
        if (process, thread) not in known:
            table = self.recording.ranges
            rows = np.flatnonzero((table["process"] == process) & (table["thread"] == thread))
            known[process, thread] = rows[np.argsort(table["start_ns"][rows], kind="stable")]
        return known[process, thread]

    def places(self, rows: Array, lost: Array, most: int = 16) -> tuple[Where, ...]:
        """Lost time of calls by process, thread and stream, most first."""
        if not len(rows):
            return ()
        out = []
        for members, ns in _places(self.caller[rows], self.stream[rows], lost, most):
            worst = rows[members[np.argmax(lost[members])]]
            process, thread = int(self.process[worst]), int(self.thread[worst])
            out.append(
                Where(
                    process=process,
                    pid=self.pid(process),
                    rank=self.rank(process),
                    thread=thread,
                    stream=int(self.stream[worst]),
                    stream_name=self.stream_name(int(self.stream[worst])) if self.stream[worst] >= 0 else "",
                    range=self.innermost_range(process, thread, int(self.start[worst])),
                    lost_ns=ns,
                    calls=len(members),
                )
            )
        return tuple(out)

    def device_places(self, rows: Array, lost: Array, most: int = 16) -> tuple[Where, ...]:
        """Lost time of executions by process and stream, most first."""
        if not len(rows):
            return ()
        table = self.recording.executions
        out = []
        for members, ns in _places(table["process"][rows].astype(np.int64), table["stream"][rows], lost, most):
            row = rows[members[0]]
            process, stream = int(table["process"][row]), int(table["stream"][row])
            out.append(
                Where(
                    process=process,
                    pid=self.pid(process),
                    rank=self.rank(process),
                    stream=stream,
                    stream_name=self.stream_name(stream) if stream >= 0 else "",
                    lost_ns=ns,
                    calls=len(members),
                )
            )
        return tuple(out)

    def host_finding(
        self,
        cause: str,
        title: str,
        confidence: Confidence,
        rows: Array,
        ns: Array,
        *,
        least_ns: int | None = None,
        held: Array | None = None,
        **explanation: Unpack[Explanation],
    ) -> Finding | None:
        """Claims `ns` of the calls `rows` and says so, or nothing where the loss is not worth a line.

        Args:
            cause: name of the cause's file.
            title: heading; "{lost}" in it becomes the time lost, "{calls}" the number of calls.
            confidence: as in Finding.
            rows: rows of `calls`, distinct.
            ns: what to claim of each.
            least_ns: a floor of its own instead of `notable`.
            held: mask over `rows`, as for `Explainer.host`.
            explanation: `evidence` (best first) and `cure`; `reason`, `severity` and `chart` where there are any.
        """
        if not len(rows):
            return None
        possible = np.clip(ns, 0, self.host.free_ns[rows])
        span = self.caller_span_ns(rows[possible > 0]) if (possible > 0).any() else 0
        total = int(possible.sum())
        if total <= 0 or not (self.notable(total, span) if least_ns is None else total >= least_ns):
            return None
        got = self.host.claim(cause, rows, ns)
        held = None if held is None else held[got > 0]
        rows, got = rows[got > 0], got[got > 0]
        window = int(self.start[rows].min()), int(self.end[rows].max())
        places, calls = self.places(rows, got), longest(self, rows, got)
        loss = Loss(int(got.sum()), len(rows), "host", window, span, places, calls)
        start, end = self.start[rows], self.end[rows]
        if confidence == "cannot tell":
            explained = self.explainer.question(cause, start, end, self.caller[rows], got)
        else:
            explained = self.explainer.host(cause, start, end, self.caller[rows], got, held)
        return self._finding(cause, title, confidence, loss, explanation, explained)

    def open_question(
        self, cause: str, title: str, rows: Array, ns: Array, **question: Unpack[Question]
    ) -> Finding | None:
        """As `host_finding`, where the recording cannot tell."""
        return self.host_finding(
            cause,
            title,
            "cannot tell",
            rows,
            ns,
            severity="info",
            evidence=question["evidence"],
            reason=f"cannot tell, because {question['because']}",
            cure=(Change(question["record"], "recording"),),
            chart=question["chart"],
        )

    def device_question(
        self,
        cause: str,
        title: str,
        rows: Array,
        ns: Array,
        *,
        lost_on: LostOn = "copy engine",
        **question: Unpack[DeviceQuestion],
    ) -> Finding | None:
        """As `open_question`, of what the device did with these calls, where it was not recorded.

        None where timing events show for how long it waited for copies: the account has that.
        """
        gpus = self.account.gpus
        if gpus and all(gpu.seen and gpu.share(Line.NOT_KNOWN) < WARNING_SHARE for gpu in gpus):
            return None
        window = int(self.start[rows].min()), int(self.end[rows].max())
        by_device = Change("Record what the GPU executes: `kvprobe run --nsys -- COMMAND`", "recording")
        return self.finding(
            cause,
            title,
            "cannot tell",
            Loss(int(ns.sum()), len(rows), on=lost_on, window=window, places=self.places(rows, ns)),
            severity="info",
            evidence=question["evidence"],
            reason=f"cannot tell, because the recording does not show {question['because']}",
            cure=(by_device, *question["cure"]),
        )

    def device_finding(
        self,
        cause: str,
        title: str,
        confidence: Confidence,
        rows: Array,
        ns: Array,
        *,
        lost_on: LostOn = "copy engine",
        **explanation: Unpack[Explanation],
    ) -> Finding | None:
        """As `host_finding`, for executions: claims time of copy engines."""
        if not len(rows):
            return None
        possible = int(np.clip(ns, 0, self.device.free_ns[rows]).sum())
        span = self.span_ns * max(len(distinct(self.x_gpu[rows])), 1)
        if not self.notable(possible, span):
            return None
        got = self.device.claim(cause, rows, ns)
        rows, got = rows[got > 0], got[got > 0]
        window = int(self.x_start[rows].min()), int(self.x_end[rows].max())
        places, calls = self.device_places(rows, got), self._calls_of(rows, got)
        loss = Loss(int(got.sum()), len(rows), lost_on, window, span, places, calls)
        device = self.recording.executions["device"][rows]
        explained = self._of_copies(cause, rows, loss.ns)
        return self._finding(cause, of_gpus(title, device, got), confidence, loss, explanation, explained)

    def _of_copies(self, cause: str, rows: Array, ns: int) -> ExplainedTime:
        """What a cause explains of these executions, of which `ns` are lost."""
        where = self.where(self.recording.executions, rows)
        return self.explainer.copies(cause, Times(self.x_start[rows], self.x_end[rows], where), ns)

    def where(self, table: Table, rows: Array) -> Array:
        """Of rows of executions or spans, the number of the account's GPU that each is of, (rows,); -1: of none."""
        out: Array = np.full(len(rows), -1, dtype=np.int32)
        for place, gpu in enumerate(self.account.gpus):
            out[on_gpu(table, gpu)[rows]] = place
        return out

    def finding(
        self, cause: str, title: str, confidence: Confidence, loss: Loss, **explanation: Unpack[Explanation]
    ) -> Finding | None:
        """As `host_finding`, for time that is neither a call's nor an engine's: waiting, idling, nothing at all."""
        if loss.on != "none" and not self.notable(loss.ns, self._span_of(loss)):
            return None
        explained = ExplainedTime()
        if loss.gaps is not None and confidence != "cannot tell":
            explained = self.explainer.gaps(cause, loss.gaps, loss.in_calls)
            if loss.on == "device" and explained.gpus_ns:  # one figure: what the account's lines say of these gaps
                loss = replace(loss, ns=explained.gpus_ns)
                title = self._of_claims(title, cause)
        elif loss.copies is not None and confidence != "cannot tell":
            explained = self._of_copies(cause, loss.copies, loss.ns)
        elif loss.stretches is not None and confidence != "cannot tell":
            start, end, caller = loss.stretches
            explained = self.explainer.host(cause, start, end, caller, end - start)
        elif loss.spans is not None and confidence != "cannot tell":
            explained = self.explainer.copies(cause, loss.spans, loss.ns)
        return self._finding(cause, title, confidence, loss, explanation, explained)

    def _of_claims(self, title: str, cause: str) -> str:
        """The title of what a cause has claimed of several GPUs."""
        gpus = self.account.gpus
        each = np.array([self.account.claimed_ns(gpu, cause, tuple(Line)) for gpu in gpus])
        lost = each > 0
        return of_gpus(title, np.array([gpu.device for gpu in gpus])[lost], each[lost])

    def line_finding(
        self, cause: str, title: str, gpu: GpuAccount, loss: Loss, **explanation: Unpack[Explanation]
    ) -> Finding | None:
        """What is left of lines of a GPU's account, under the lines' own name.

        Less than a tenth stays in the account, and so does what a window of less than `LEAST_NS` holds. It is as loud
        as its share of the time with work to do.
        """
        part = loss.ns / gpu.asked_ns if gpu.asked_ns > 0 else 0.0
        if part < CRITICAL or gpu.window_ns < LEAST_NS:
            return None
        title = title.replace("The GPU", self._subject(gpu), 1)
        few = loss.ns < LEAST_NS
        explanation["severity"] = "info" if few else "critical" if part >= LOUD else "warning"
        return self._finding(
            cause,
            title,
            "certain",
            loss,
            explanation,
            ExplainedTime(loss.ns, gpu.window_ns, 0, self.explainer.take(loss.ns)),
        )

    def _subject(self, gpu: GpuAccount) -> str:
        """What a title calls the GPU that lost most, where others were seen as well."""
        seen = sum(one.seen for one in self.account.gpus)
        if seen < 2 or gpu.device < 0:
            return "The GPU"
        rank = f" of rank {gpu.ranks[0]}" if gpu.ranks and gpu.ranks[0] >= 0 else ""
        return f"GPU {gpu.device}{rank} (the worst of {seen})"

    def line_question(
        self, cause: str, title: str, gpu: GpuAccount, loss: Loss, evidence: Sequence[Evidence], lacks: str
    ) -> Finding | None:
        """As `line_finding`, outside of the time in which it computes: that a model waited is an open question.

        `lacks` is what would show it: "no kernel ran before these copies", "no kernel ran after these copies".
        """
        if loss.ns < CRITICAL * gpu.asked_ns:
            return None
        explanation: Explanation = {
            "severity": "info",
            "evidence": evidence,
            "reason": f"cannot tell, because {lacks}, so nothing shows whether a model waited",
            "cure": (Change("Record a run in which the model computes from beginning to end", "recording"),),
        }
        return self._finding(cause, title, "cannot tell", loss, explanation, ExplainedTime(loss.ns, gpu.window_ns))

    def _severity(self, loss: Loss, explained: ExplainedTime) -> Severity:
        """By what the device, and so the program, lost; by the caller's own loss where that cannot be seen."""
        if explained.saved_ns is None or explained.window_ns <= 0 or loss.on == "none":
            return self.severity(loss.ns, self._span_of(loss))
        lost = max(explained.saved_ns, explained.device_ns or 0)
        by_device = self.severity(lost, explained.window_ns)
        by_caller = self.severity(min(explained.open_ns, loss.ns), self._span_of(loss))
        return min(by_device, by_caller, key=SEVERITIES.index)

    def _at_stake(self, confidence: Confidence, loss: Loss, explained: ExplainedTime) -> Severity:
        """`_severity` were it told; copies that hardly ever run alone cost next to nothing, whatever they are for."""
        seen = [gpu for gpu in self.explainer.account.gpus if gpu.seen]
        hidden = bool(seen) and all(gpu.ns(*COPIES) < CRITICAL * gpu.asked_ns for gpu in seen)
        if confidence == "cannot tell" and loss.on == "copy engine" and hidden:
            return "info"
        return self._severity(loss, explained)

    def _cost_share(self, loss: Loss, explained: ExplainedTime) -> float:
        """What `_severity` goes by, as a share."""
        span_ns = max(self._span_of(loss), 1)
        if explained.saved_ns is None or explained.window_ns <= 0 or loss.on == "none":
            return min(loss.ns / span_ns, 1.0)
        lost = max(explained.saved_ns, explained.device_ns or 0)
        return min(max(lost / explained.window_ns, min(explained.open_ns, loss.ns) / span_ns), 1.0)

    def _span_of(self, loss: Loss) -> int:
        return self.span_ns if loss.span_ns is None else loss.span_ns

    def _finding(
        self, cause: str, title: str, confidence: Confidence, loss: Loss, more: Explanation, explained: ExplainedTime
    ) -> Finding:
        line = next((call.line for call in loss.calls if call.line), "")
        if explained.saved_ns is not None:
            possible = min(loss.ns, explained.saved_ns)
            if explained.device_ns == 0 and possible < LEAST_NS:
                possible = 0  # no GPU waited, so what is left is a trifle of the model's
        elif confidence != "cannot tell" and loss.on != "none":
            possible = self.explainer.take_of_thread(loss.ns)
        else:
            possible = loss.ns
        # Where no time is known, none is predicted to be saved: 0 would put the change behind all others.
        spared = loss.ns if loss.on == "host" else 0
        if explained.saved_ns is not None:
            open_ = not possible and 2 * explained.open_ns > loss.ns
        else:
            open_ = explained.device_ns is not None and loss.on == "host"  # a GPU was seen, and none computes
        whole = possible
        if explained.device_ns and any(change.ends for change in more["cure"]):
            whole += self.explainer.take(min(loss.ns, explained.device_ns) - possible)
        saved = (
            change if loss.on == "none" else change.of(whole if change.ends else None if open_ else possible, spared)
            for change in more["cure"]
        )
        cure = (replace(change, at=line if change.kind == "call" else "") for change in saved)
        return Finding(
            cause=cause,
            title=singular(title.format(lost=ms(loss.ns), calls=f"{loss.count:,}")),
            severity=more.get("severity") or self._severity(loss, explained),
            confidence=confidence,
            lost_ns=loss.ns,
            evidence=tuple(replace(one, text=singular(one.text)) for one in more["evidence"]),
            cure=best_first(cure),
            calls=loss.calls,
            where=_within(loss.places, loss.ns) if loss.on == "device" else loss.places,
            window=loss.window,
            lost_on=loss.on,
            reason=more.get("reason", ""),
            chart=more.get("chart"),
            of_ns=self._span_of(loss),
            device_ns=explained.device_ns,
            window_ns=explained.window_ns,
            no_kernel_follows=open_ and loss.on == "host",
            cost_share=self._cost_share(loss, explained),
            at_stake=self._at_stake(confidence, loss, explained),
        )

    def _calls_of(self, executions: Array, ns: Array) -> tuple[TracedCall, ...]:
        """The calls that submitted these executions, with what all executions of each lost."""
        known = self.x_call[executions] >= 0
        rows, place = np.unique(self.x_call[executions][known], return_inverse=True)
        return longest(self, rows, np.bincount(place, weights=ns[known]).astype(np.int64))

    def slow_calls_chart(self, rows: Array, title: str) -> EvidenceChart:
        """The calls of a finding against time, thinned to the slowest 2,000."""
        if len(rows) > 2_000:
            rows = rows[np.argpartition(self.dur[rows], -2_000)[-2_000:]]
        rows = rows[np.argsort(self.start[rows], kind="stable")]
        return {
            "title": title,
            "x_label": "time in the recording (ms)",
            "y_label": "time inside the call (µs)",
            "series": {
                "calls": {
                    "x": (self.start[rows] - self.serving.first_ns) / 1e6,
                    "y": self.dur[rows] / 1e3,
                    "style": "points",
                }
            },
        }
