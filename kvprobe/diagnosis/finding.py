"""What a diagnosis says: a named cause with its evidence, its cost and its cure, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import numpy as np
import numpy.typing as npt

from kvprobe.output.parts import CallJson, ChangeJson, EvidenceJson, FindingJson, WhereJson

if TYPE_CHECKING:
    from kvprobe.account import Line, Times
    from kvprobe.recordings.model import Recording

__all__ = [
    "SEVERITIES",
    "Change",
    "ChangeKind",
    "Confidence",
    "Evidence",
    "EvidenceChart",
    "Explanation",
    "Finding",
    "Loss",
    "LostOn",
    "NotLookedFor",
    "Series",
    "Severity",
    "TracedCall",
    "Where",
    "best_first",
    "cause_of",
    "ranked",
]

Severity = Literal["critical", "warning", "info"]
Confidence = Literal["certain", "likely", "cannot tell"]
LostOn = Literal["host", "copy engine", "device", "none"]
ChangeKind = Literal["environment", "setting", "call", "rung", "recording"]

# Ways a figure can have been obtained; `Evidence.how` is one of these or a sentence of its own.
MEASURED = "measured"
LABELLED = "labelled by the recorder (CUPTI)"
INFERRED = "inferred"
COUNTED = "counted"


class Series(TypedDict):
    """One line or cloud of a chart: `x` and `y` of one length."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    style: Literal["points", "line", "steps", "bars"]


class EvidenceChart(TypedDict):
    """A zoomed chart of the evidence; whoever draws it decides how."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, Series]


@dataclass(frozen=True)
class Evidence:
    """One figure and the sentence it belongs to.

    Attributes:
        text: the sentence, figure included, plain language.
        value: the figure.
        unit: "ns", "bytes", "calls", "bytes/s", "1" ...
        how: "measured", "labelled by the recorder (CUPTI)", "inferred", "counted", or a sentence.
    """

    text: str
    value: float
    unit: str
    how: str = MEASURED

    def to_json(self) -> EvidenceJson:
        """The four fields."""
        return {"text": self.text, "value": float(self.value), "unit": self.unit, "how": self.how}


@dataclass(frozen=True)
class NotLookedFor:
    """Why a recording cannot show a cause: it was neither found nor ruled out.

    Attributes:
        because: what the recording lacks, a clause that follows "because".
        shown_by: what to record instead.
        cause: name of the cause; `diagnosis.examine` fills it in.
    """

    because: str
    shown_by: str
    cause: str = ""

    def to_json(self) -> dict[str, str]:
        """The three fields."""
        return {"cause": self.cause, "because": self.because, "shown_by": self.shown_by}


# What shows the device's activity where a recording by Nsight Systems holds none.
DEVICE_BY_NSYS = (
    "Nsight Systems with device activity: nsys profile -t cuda (kvprobe run --nsys) while no other tool traces CUDA, "
    "and all tables exported"
)


def is_of_nsys(recording: Recording) -> bool:
    """Whether all of a recording was made by Nsight Systems, so that the advice to use it leads in a circle."""
    return bool(recording.source) and all(one.format.startswith("nsys") for one in recording.source)


def executions_not_shown(recording: Recording) -> NotLookedFor | None:
    """That the recording does not show what the device executed, None where it does."""
    if recording.has_executions:
        return None
    by = "Nsight Systems (kvprobe run --nsys) or the PyTorch profiler"
    because = "the recording does not show what the device executed"
    return NotLookedFor(because, DEVICE_BY_NSYS if is_of_nsys(recording) else by)


@dataclass(frozen=True)
class Change:
    """Something to change, with the time that this change alone is predicted to save.

    Attributes:
        text: what to do, in a sentence.
        kind: "environment" (a variable, set before the program starts), "setting" (of a server, a library, the
            machine), "call" (the program's own code), "rung" (kvprobe does it: `kvprobe run --fix`, its engine),
            "recording" (changes nothing in the program: record again, so that more can be told).
        name: the variable, the setting, or the rung; "" where the change is one of the code.
        value: what it is to be set to.
        at: "file:line" of the call to change, where a stack of the finding's calls tells it.
        share: share of the finding's lost time that this change alone saves, 0 to 1, by a model of the mechanism; None
            where it was not modelled.
        ends: whether it takes away what the calls waited for. Any other change lets the thread go on, and saves no more
            than until the thread waits for the same thing elsewhere.
        predicted_saving_ns: wall time that it saves: of the time that a GPU waits, and where no GPU was seen, of the
            thread's; filled in when the loss is known, None where it was not modelled, or where no kernel follows that
            a GPU could have waited with.
        thread_saving_ns: time that threads are held up less, whether or not a GPU waits for them; None where it was not
            modelled.
    """

    text: str
    kind: ChangeKind = "call"
    name: str = ""
    value: str = ""
    at: str = ""
    share: float | None = None
    ends: bool = False
    predicted_saving_ns: int | None = None
    thread_saving_ns: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What is the same change in two findings."""
        return self.kind, self.name or self.text, self.value

    def of(self, wall_ns: int | None, thread_ns: int) -> Change:
        """This change for a finding without which `wall_ns` would be saved, and threads held up less by `thread_ns`.

        `wall_ns` is None where nothing shows whether a GPU waited.
        """
        if self.share is None:
            return self
        share = min(max(self.share, 0.0), 1.0)
        saving = None if wall_ns is None else int(wall_ns * share)
        return replace(self, predicted_saving_ns=saving, thread_saving_ns=int(thread_ns * share))

    def to_json(self) -> ChangeJson:
        """The fields that a program needs; `predicted_saving_ns` is null where it was not modelled."""
        return {
            "text": self.text,
            "kind": self.kind,
            "name": self.name,
            "value": self.value,
            "at": self.at,
            "predicted_saving_ns": self.predicted_saving_ns,
            "thread_saving_ns": self.thread_saving_ns,
        }


def best_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Changes by predicted saving; then those that were not modelled, in their order; last what saves nothing."""

    def place(change: Change) -> tuple[int, int, int]:
        saving, spared = change.predicted_saving_ns, change.thread_saving_ns or 0
        if saving is None and spared:
            return 0, 0, -spared
        return (1, 0, 0) if saving is None else (0, -saving, -spared) if saving or spared else (2, 0, 0)

    return tuple(sorted(changes, key=place))


_PLURALS = re.compile(
    r"(?<![\d.,])1 ((?:\w+ ){0,2})"
    r"(copies|submissions|calls|loads|stores|allocations|gaps|pauses|points|ranks|recordings)\b"
    r"( are\b| were\b| that record\b)?"
)

_VERBS = {" are": " is", " were": " was", " that record": " that records"}


def singular(text: str) -> str:
    """The same words where they count one: "1 calls were" becomes "1 call was"."""

    def one(found: re.Match[str]) -> str:
        noun = "copy" if found[2] == "copies" else found[2][:-1]
        if found[1].startswith("of "):  # "1 of 174 copies was"
            noun = found[2]
        return f"1 {found[1]}{noun}{_VERBS.get(found[3] or '', '')}"

    return _PLURALS.sub(one, text)


@dataclass(frozen=True)
class Where:
    """A place that lost time: the fields that do not apply are empty (or -1)."""

    process: int = -1  # row of the recording's `processes`
    pid: int = -1
    rank: int = -1
    thread: int = -1
    stream: int = -1  # row of the recording's `streams`
    stream_name: str = ""
    range: str = ""  # innermost NVTX range, annotation or operator around most of the lost time
    function: str = ""  # innermost Python function of the program around most of it, where a profile holds functions
    lost_ns: int = 0
    calls: int = 0

    def to_json(self) -> WhereJson:
        """All fields."""
        return {
            "process": self.process,
            "pid": self.pid,
            "rank": self.rank,
            "thread": self.thread,
            "stream": self.stream,
            "stream_name": self.stream_name,
            "range": self.range,
            "function": self.function,
            "lost_ns": self.lost_ns,
            "calls": self.calls,
        }


@dataclass(frozen=True)
class TracedCall:
    """One call of a finding: where it is in the recording, and where it is in the program.

    Attributes:
        row: its row in the recording's `calls`.
        name, pid, thread, stream_name: the call, its process and thread, its stream ("" where it names none).
        start_ns, dur_ns: on the recording's clock.
        lost_ns: what the finding says it lost.
        depth: submissions outstanding on its stream when it was entered; -1 unknown.
        line: "file:line" of the program that made it, "" where no stack is known. Where the profile holds Python
            functions, the line is where the function begins that made it, and `function` is its name; else "".
        function: see there.
        stack: function (file:line), innermost first.
    """

    row: int
    name: str
    pid: int
    thread: int
    stream_name: str
    start_ns: int
    dur_ns: int
    lost_ns: int
    depth: int = -1
    line: str = ""
    function: str = ""
    stack: tuple[str, ...] = ()

    @property
    def called(self) -> tuple[str, str]:
        """Who made it, for a sentence: a word and the place; the place is "" where it is not known."""
        return ("in", f"{self.function} ({self.line})") if self.function else ("at", self.line)

    def to_json(self) -> CallJson:
        """All fields."""
        return cast("CallJson", asdict(self))


@dataclass(frozen=True)
class Loss:
    """What a cause lost.

    Attributes:
        ns: time, of all calls or gaps together.
        count: how many these are.
        on: as `Finding.lost_on`.
        window: as in Finding.
        span_ns: what `ns` is a share of; None: the serving window.
        places, calls: as `where` and `calls` of Finding.
        gaps: of a loss that is not one of calls or copies, the stretches in which a device stood idle; None: none is
            known. Of a GPU's, `ns` becomes what the account has of them.
        in_calls: of these stretches, the lines inside of calls that are lost as well (`kvprobe.account.Line`).
        copies: of a loss of copy engines, the rows of the executions; None: none is known.
        stretches: of a loss of threads outside of calls, where it begins and ends, and whose it is (`Joined.caller`).
        spans: as `copies`, of stretches that are no copies' own: waits for them, or what timing events tell of copies
            alone.
    """

    ns: int
    count: int
    on: LostOn
    window: tuple[int, int]
    span_ns: int | None = None
    places: tuple[Where, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    gaps: Times | None = None
    in_calls: tuple[Line, ...] = ()
    copies: npt.NDArray[Any] | None = None
    spans: Times | None = None
    stretches: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]] | None = None


class _Evidence(TypedDict):
    evidence: Sequence[Evidence]
    cure: Sequence[Change]


class Explanation(_Evidence, total=False):
    """What a cause says about a loss; fields as in Finding. `severity` None: the share of the span decides."""

    reason: str
    severity: Severity | None
    chart: EvidenceChart | None


class Question(TypedDict):
    """What is told of calls of which the recording cannot tell: `because` of what; how to `record` what is missing."""

    evidence: Sequence[Evidence]
    because: str
    record: str
    chart: EvidenceChart


class DeviceQuestion(TypedDict):
    """The same of what the device did, which was not recorded."""

    evidence: Sequence[Evidence]
    because: str
    cure: Sequence[Change]


def cause_of(module: str) -> str:
    """A cause's name is its file's."""
    return module.rpartition(".")[2]


@dataclass(frozen=True)
class Finding:
    """One cause, found in one recording (all its processes together, split in `where`).

    Attributes:
        cause: name of the cause, which is the name of its file in `kvprobe/diagnosis/`.
        title: one line for a heading.
        severity: "critical" from 10% of the recording's span lost by one caller (or wrong results), "warning" from 2%,
            else "info".
        confidence: "certain", "likely" or "cannot tell"; the last abstains, and `reason` says why.
        lost_ns: time lost by the caller. Findings of one caller never claim the same nanosecond of the same thread or
            engine, so their sum means something.
        lost_on: which caller lost it: "host" (a thread inside a call), "copy engine", "device" (compute idle or
            waiting), "none" (nothing lost: the finding is about correctness or an explanation).
        evidence: most convincing first.
        cure: changes that help, the one that is predicted to save most first; how savings are predicted is in the
            docstring of the cause's module.
        where: places, most time lost first.
        calls: the calls that lost most, with the Python line that made each, where a stack tells it.
        window: (start_ns, end_ns) in which it happened, on the recording's clock.
        reason: for "cannot tell": a sentence that begins "cannot tell, because"; otherwise what speaks against.
        chart: named series with axis labels for a zoomed chart, or None.
        of_ns: what `lost_ns` is a share of: the time that the threads which lost it spent in the serving window, added
            up; of engines and devices, the window itself for each process.
        device_ns: of the time in which a GPU ran no kernel, what this explains (`kvprobe.account`); None where the
            recording does not show what the GPUs did.
        window_ns: length of the window of that GPU; 0 where none was seen.
        no_kernel_follows: most of what threads lost lies behind the last kernel, or a GPU was seen and ran none:
            whether it waited, nothing shows.
        cost_share: what its severity goes by, 0 to 1: the GPU's loss, of the window; or what its threads lost where
            nothing shows what that cost the GPU, of their time; the greater of the two.
        at_stake: the severity by the time lost alone: of one that abstains, what it would have were it told.
    """

    cause: str
    title: str
    severity: Severity
    confidence: Confidence
    lost_ns: int
    evidence: tuple[Evidence, ...] = ()
    cure: tuple[Change, ...] = ()
    where: tuple[Where, ...] = ()
    window: tuple[int, int] = (0, 0)
    lost_on: LostOn = "host"
    reason: str = ""
    chart: EvidenceChart | None = None
    calls: tuple[TracedCall, ...] = ()
    of_ns: int = 0
    device_ns: int | None = None
    window_ns: int = 0
    no_kernel_follows: bool = False
    cost_share: float = 0.0
    at_stake: Severity = "info"

    @property
    def device_share(self) -> float | None:
        """Part of the window in which a GPU ran no kernel for this reason, 0 to 1; None where no GPU was seen."""
        if self.device_ns is None or self.window_ns <= 0:
            return None
        return min(self.device_ns / self.window_ns, 1.0)

    @property
    def share(self) -> float:
        """Part of the time of the threads (or engines) concerned that was lost: 0 to 1, also where many lost it."""
        return min(self.lost_ns / self.of_ns, 1.0) if self.of_ns > 0 else 0.0

    @property
    def abstains(self) -> bool:
        """Whether the finding only says that it cannot tell."""
        return self.confidence == "cannot tell"

    @property
    def predicted_saving_ns(self) -> int | None:
        """What the first change alone is predicted to save; None where it was not modelled."""
        return self.cure[0].predicted_saving_ns if self.cure else None

    def to_json(self, charts: bool = False) -> FindingJson:
        """The finding as JSON types; chart series only where asked for (they can be long)."""
        out: FindingJson = {
            "cause": self.cause,
            "title": self.title,
            "severity": self.severity,
            "confidence": self.confidence,
            "lost_ns": int(self.lost_ns),
            "lost_on": self.lost_on,
            "share": self.share,
            "device_ns": self.device_ns,
            "device_share": self.device_share,
            "evidence": [one.to_json() for one in self.evidence],
            "cure": [one.to_json() for one in self.cure],
            "predicted_saving_ns": self.predicted_saving_ns,
            "where": [one.to_json() for one in self.where],
            "calls": [one.to_json() for one in self.calls],
            "window": [int(self.window[0]), int(self.window[1])],
            "reason": self.reason,
        }
        if charts and self.chart is not None:
            chart = {
                "title": self.chart["title"],
                "x_label": self.chart["x_label"],
                "y_label": self.chart["y_label"],
                "series": {
                    name: {"x": np.asarray(s["x"]).tolist(), "y": np.asarray(s["y"]).tolist(), "style": s["style"]}
                    for name, s in self.chart["series"].items()
                },
            }
            return cast("FindingJson", {**out, "chart": chart})
        return out


SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order in which they deserve a reader.

    What abstains comes last. Before it the severest lead, and among those first what loses no time: wrong results
    beat any delay. Then by time lost.
    """
    return sorted(
        findings, key=lambda one: (one.abstains, SEVERITIES.index(one.severity), one.lost_on != "none", -one.lost_ns)
    )
