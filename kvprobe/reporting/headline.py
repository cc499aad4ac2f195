"""The sentence on top of the page: what blocked, where, why, what it cost, what to change, or what was gained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvprobe.diagnosis import WAITS_LEFT
from kvprobe.diagnosis.finding import ranked
from kvprobe.diagnosis.look_next import look_next
from kvprobe.diagnosis.verdict import of_recording as diagnosis_verdict
from kvprobe.recordings.model import Direction
from kvprobe.recordings.serving import recorded_span
from kvprobe.reporting.units import count_text, duration, percent

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.finding import Change, Finding, TracedCall, Where
    from kvprobe.diagnosis.verdict import Verdict
    from kvprobe.recordings.model import Recording

__all__ = [
    "NO_CAUSE",
    "Fact",
    "WORDS",
    "PageHead",
    "Part",
    "call_text",
    "change_lines",
    "change_parts",
    "changes_parts",
    "cure_parts",
    "direction_text",
    "of_recording",
    "only_waited",
    "saving_text",
    "shown_changes",
    "sure_text",
    "terminal_lines",
    "waited_text",
    "with_units",
]

DIRECTIONS = {
    Direction.H2D: "CPU to GPU (H2D)",
    Direction.D2H: "GPU to CPU (D2H)",
    Direction.D2D: "GPU to GPU (D2D)",
}

_ALIKE = 0.02  # two times that differ by less are one
_FOLDERS = re.compile(r"\((?:[^()]*/)?(?=[^()/]+:\d+\)$)")  # before the name of a file

WORDS = {
    "critical": "Critical",
    "warning": "Warning",
    "info": "For information",
    "unknown": "Undecided",
    "ok": "Healthy",
    "cured": "Cured while running",
    "better": "Better",
    "worse": "Worse",
    "mixed": "Better and worse",
    "same": "About the same",
}


@dataclass(frozen=True)
class Fact:
    """One figure under the verdict."""

    label: str
    value: str
    note: str = ""
    before: str = ""


@dataclass(frozen=True)
class Part:
    """A piece of a cure: prose, inline code, or a command on a line of its own that can be copied."""

    text: str
    code: bool = False
    inline: bool = False


@dataclass
class PageHead:
    """What stands at the head of the page: the verdict in a sentence, its figures, what to change, the worst call.

    `state` is a key of WORDS; the template gives each a shape and a word.

    `call` says which call lost most, `call_row` is its row in the recording's calls, for a link; -1: none.
    """

    state: str
    headline: str
    detail: str = ""
    facts: list[Fact] = field(default_factory=list)
    cures: list[list[Part]] = field(default_factory=list)
    saving: str = ""
    action: str = "What to change"
    call: list[Part] = field(default_factory=list)
    call_row: int = -1

    @property
    def word(self) -> str:
        """The state in words."""
        return WORDS[self.state]


# A setting or a command can be copied; a call or a flag inside a sentence is set as code.
_SETTING = re.compile(r"(?<![\w`.])[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+=[\w.:/x-]*\w")
_CALL = re.compile(r"(?<![\w`])\.?[A-Za-z_][\w.]*\w\([^()`]*\)|\bcu(?:da)?[A-Z]\w+|(?<![\w`-])--[a-z][\w-]+")
_COMMAND = re.compile(
    r"(?:\$ )?((?:export |env )?(?:[A-Z][A-Z0-9_]+=[^\s,]+\s*)+(?:(?:kvprobe|vllm|nsys|python3?|numactl) \S.*)?"
    r"|kvprobe (?:run|report|bench|demo|doctor|patches|top|weights)\b[^,;]*"
    r"|(?:vllm|nsys|python3?|numactl|nvidia-smi|sudo) \S[^,;]*)"
)


def cure_parts(text: str) -> list[Part]:
    """Splits a cure into prose and code.

    Text between backticks, calls, flags and settings become code in their sentence; commands and settings follow the
    sentence as a line to copy. A cure that is a command is nothing else, and a command that ends its sentence behind a
    colon stands in that line alone.
    """
    text = text.strip()
    whole = _COMMAND.fullmatch(text)
    if whole:
        return [Part(whole.group(1).strip(), code=True)]
    parts: list[Part] = []
    copied: list[str] = []
    pieces = text.split("`")
    if len(pieces) > 2 and pieces[-1] in ("", ".") and pieces[-3].endswith(": ") and _COMMAND.fullmatch(pieces[-2]):
        copied.append(pieces[-2])
        pieces = [*pieces[:-3], pieces[-3].rstrip()]
    for i, piece in enumerate(pieces):
        if i % 2:
            parts.append(Part(piece, inline=True))
            if _COMMAND.fullmatch(piece):
                copied.append(piece)
            continue
        at = 0
        for match in sorted([*_SETTING.finditer(piece), *_CALL.finditer(piece)], key=lambda one: one.start()):
            if match.start() < at:
                continue
            parts += [Part(piece[at : match.start()]), Part(match.group(), inline=True)]
            at = match.end()
            if _SETTING.fullmatch(match.group()):
                copied.append(match.group())
        parts.append(Part(piece[at:]))
    lines = [Part(f"export {one}" if _SETTING.fullmatch(one) else one, code=True) for one in dict.fromkeys(copied)]
    return [one for one in parts if one.text] + lines


def shown_changes(finding: Finding) -> tuple[Change, ...]:
    """The changes of a finding as they are shown: where no GPU was seen, what they save is the time of threads."""
    if finding.device_ns is not None or finding.lost_on != "host":
        return finding.cure
    return tuple(
        replace(one, predicted_saving_ns=None, thread_saving_ns=one.predicted_saving_ns or one.thread_saving_ns)
        for one in finding.cure
    )


def saving_text(change: Change, before: Sequence[Change] = ()) -> str:
    """What a change alone saves, as far as it was predicted: "predicted to save 53.9 ms"; "" for another recording.

    The thread time that it saves stands beside it where that is more: the host's own time, which the GPU did not wait
    for. A saving is promised once: one that equals that of a change `before` it is the same time.
    """
    promise = change.predicted_saving_ns, change.thread_saving_ns
    promised = [(one.predicted_saving_ns, one.thread_saving_ns) for one in before]
    if any(promise) and promise in promised:
        does, much = "saves" if promise[0] else "gives the thread back", duration(promise[0] or promise[1])
        return f"an alternative to change {promised.index(promise) + 1}, {does} the same {much}"
    if change.kind == "recording":
        return ""
    if change.predicted_saving_ns is None and change.thread_saving_ns:
        freed = f"predicted to give the thread back {duration(change.thread_saving_ns)}"
        return f"{freed}; nothing shows whether that saves wall time"
    if change.predicted_saving_ns is None:
        return "saving not predicted"
    saved, spared = change.predicted_saving_ns, change.thread_saving_ns or 0
    if saved <= 0:
        if spared:
            freed = f"predicted to give the thread back {duration(spared)}"
            return f"{freed}; saves no wall time, because the GPU does not wait for this thread"
        return "predicted to save nothing here"
    if spared > saved:
        return f"predicted to save {duration(saved)} of wall time, and to give the thread back {duration(spared)}"
    return f"predicted to save {duration(saved)}"


WAIT_MEASURED = "the wait is measured"


def sure_text(finding: Finding) -> str:
    """How sure a finding is, for people; of a wait that no cause explains, the wait alone is certain."""
    alone = finding.cause in WAITS_LEFT and finding.confidence == "certain"
    return f"{WAIT_MEASURED}, its cause is not" if alone else finding.confidence


def waited_text(finding: Finding) -> str:
    """How long the GPU waited for what threads or copies lost, behind a title; "" if that is not known, or the same."""
    own = finding.lost_on not in ("device", "none") and not only_waited(finding)
    if finding.device_ns is None or finding.no_kernel_follows or not own:
        return ""
    if not finding.device_ns:
        return ", but the GPU did not have to wait"
    if finding.lost_on == "copy engine":  # it may be longer than what is lost: these copies may have been needed
        return f"; the GPU waited {duration(finding.device_ns)} for these copies"
    return f", which kept the GPU waiting for {duration(finding.device_ns)}"


def terminal_lines(recording: Recording, finding: Finding) -> list[str]:
    """The first finding for a terminal: its title, cause, the call that lost most, and the first change."""
    out = [
        f"{WORDS[finding.severity]}: {finding.title}{waited_text(finding)}",
        f"  cause           {finding.cause} ({sure_text(finding)}); `kvprobe causes {finding.cause}` explains it",
    ]
    for call in finding.calls[:1]:
        same = [one for one in finding.where if one.thread == call.thread]
        stream = call.stream_name or (same[0].stream_name if same else "")
        made = f", called {' '.join(call.called)}" if call.line else ""
        out.append(f"  costliest call  {call.name}{call_text(call, direction_text(recording, call.row), stream)}{made}")
    for one in [place for place in finding.where if place.function][:1]:
        out.append(f"  mostly in       {one.function}, in thread {one.thread}")
    return out + change_lines(finding)


def change_lines(finding: Finding) -> list[str]:
    """The first change of a finding for a terminal, and what it saves."""
    out = []
    for first in shown_changes(finding)[:1]:
        saving = saving_text(first)
        out.append(f"  first change    {first.text}{f', at {first.at}' if first.at else ''}")
        out += [f"                  {saving}"] if saving else []
    return out


def changes_parts(changes: Sequence[Change]) -> list[list[Part]]:
    """The changes of one finding, each as prose and code."""
    return [change_parts(one, changes[:i]) for i, one in enumerate(changes)]


def change_parts(change: Change, before: Sequence[Change] = ()) -> list[Part]:
    """A change as prose and code, with the line to change where it is known, and what it saves; `before`: the others.

    Those that the reader has seen, whose savings are not promised again.
    """
    parts = cure_parts(change.text)
    said = [Part(f", at {change.at}")] if change.at else []
    saving = saving_text(change, before)
    if saving and change.text.rstrip().endswith(")") and not said:  # no second brackets behind the first
        said.append(Part(f". {saving[:1].upper()}{saving[1:]}"))
    elif saving:
        said.append(Part(f" ({saving})"))
    last = next((i for i, part in enumerate(parts) if part.code), len(parts))  # lines to copy come after the sentence
    return parts[:last] + said + parts[last:]


def place(finding: Finding, limit: int = 2, brief: bool = False) -> str:
    """Where a finding's time was lost, in words; brief leaves out the thread of the first and all ranges."""
    words: list[str] = []
    first: dict[tuple[int, int, int, int], Where] = {}
    for one in finding.where:  # a thread is named once, whatever streams it lost its time on
        first.setdefault((one.pid, one.rank, one.thread, -1 if one.thread >= 0 else one.stream), one)
    named = list(first.values())
    for one in named[:limit]:
        bits = []
        if one.thread >= 0 and not (brief and not words):
            bits.append(f"thread {one.thread}")
        if one.stream_name or one.stream >= 0:
            bits.append(one.stream_name if "stream" in one.stream_name else f"stream {one.stream_name or one.stream}")
        if one.rank >= 0:
            bits.append(f"rank {one.rank}" + (f" (process {one.pid})" if one.pid > 0 else ""))
        elif one.pid > 0:
            bits.append(f"process {one.pid}")
        if one.range and not brief:
            bits.append(f"in “{one.range}”")
        if one.function and not brief:
            bits.append(f"mostly in {one.function}")
        if bits:
            words.append(", ".join(bits))
    more = len(named) - limit
    return "; ".join(words) + (f" and {more} other {_places(named, more)}" if more > 0 and words else "")


def _places(where: Sequence[Where], count: int) -> str:
    """What these places are besides the ones that are named: threads, streams or processes; for "and 2 other ..."."""
    several = "s" if count > 1 else ""
    if len({(one.pid, one.rank) for one in where}) == len(where):
        return f"process{'es' if several else ''}"
    if len({(one.pid, one.rank, one.thread) for one in where}) == len(where):
        return f"thread{several}"
    return f"stream{several}" if all(one.stream >= 0 for one in where) else f"place{several}"


_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|[kMGT]B|[KMGT]iB)\b)")


def with_units(text: str) -> str:
    """A number and its unit stay on one line; "us", as auto and older recordings spell it, becomes µs."""
    return _UNIT.sub("\u00a0", re.sub(r"(?<=\d) us\b", " µs", text))


def _sentences(texts: Sequence[str], headline: str) -> str:
    """The first two of these that say more than the headline does, as sentences."""
    said = set(re.findall(r"[\w.]+", headline.lower()))
    new = [one for one in texts if len(said & set(re.findall(r"[\w.]+", one.lower()))) < 0.6 * len(said)]
    return " ".join(with_units(one)[:1].upper() + with_units(one)[1:].rstrip(".") + "." for one in new[:2])


NO_CAUSE = "; no single cause explains much of this"  # behind what a GPU waited


def of_recording(
    recording: Recording,
    findings: Examination | None,
    submissions: int,
    blocked_ns: float,
    span_ns: float,
) -> PageHead:
    """The verdict on a recording: its costliest finding, that it is healthy, or what is missing to say so."""
    facts = [
        Fact("Submissions examined", count_text(submissions)),
        Fact("Recorded time", duration(span_ns)),
        Fact(
            "Host time in submissions",
            duration(blocked_ns),
            "of all threads together",
        ),
    ]
    if findings is None:
        return PageHead("info", f"{count_text(submissions)} submissions, not diagnosed.", "", facts)
    judged = diagnosis_verdict(recording, findings)
    if judged.state == "undecided":
        return _undecided(judged, findings, facts)
    if judged.state != "found":
        return PageHead("ok", f"Healthy: {judged.reason}.", "", facts)
    order = ranked([one for one in findings if one.confidence != "cannot tell"])
    first = order[0]
    if first.severity == "info":  # what the GPU waited is spread over many causes
        look = look_next(recording, findings)
        said = [f"{one[:1].upper()}{one[1:]}." for one in (look.text, look.narrower)] if look else []
        said[:0] = [f"Not decided: {one.what}. To decide it: {one.how}." for one in judged.missing[:1]]
        headline = f"{judged.reason[:1].upper()}{judged.reason[1:]}{NO_CAUSE}."
        return PageHead("warning", headline, "", facts, [*map(cure_parts, said)], action="Where to look next")
    headline = first.title.rstrip(".") + "."
    detail = _sentences([one.text for one in first.evidence[:3]], headline)
    if first.reason and first.confidence == "likely":  # what speaks against it weighs more than a second proof
        detail = f"{_sentences([first.evidence[0].text], headline)} {_sentences([first.reason], headline)}".strip()
    facts = _facts_of(first)
    if judged.missing:
        facts.append(Fact("Not decided", judged.missing[0].what))
    rest, undecided = len(order) - 1, len(findings) - len(order)
    if rest:
        more = f"{undecided} more {'is' if undecided == 1 else 'are'} undecided" if undecided else ""
        named = f"{'the next: ' if rest > 1 else ''}{with_units(order[1].title.rstrip('.'))}"
        note = "; ".join(filter(None, (named, _cost_of(order[1:]), more)))
        facts.append(Fact("Other findings", str(rest), f"{note[:1].upper()}{note[1:]}"))
    out = PageHead(first.severity, with_units(headline), detail, facts, changes_parts(shown_changes(first)[:3]))
    if first.calls:
        same = [one for one in first.where if one.thread == first.calls[0].thread]
        stream = first.calls[0].stream_name or (same[0].stream_name if same else "")
        row = first.calls[0].row
        direction = direction_text(recording, row)
        out.call = _call(first.calls[0], stream, direction, recorded_span(recording)[0])
        out.call_row = row
    return out


def _cost_of(others: Sequence[Finding]) -> str:
    """What these findings cost the GPU beside the first; "" where no GPU was seen."""
    waited = [one.device_ns for one in others if one.device_ns is not None]
    if not waited:
        return ""
    them = "it" if len(others) == 1 else f"these {len(others)}"
    if not sum(waited):
        return f"the GPU did not wait because of {them}"
    return f"the GPU waited another {duration(sum(waited))} because of {them}"


def direction_text(recording: Recording, row: int) -> str:
    """Which way a call copies: "CPU to GPU (H2D)"; "" of a call that copies nothing, or does not say."""
    directions = recording.calls["direction"]
    return DIRECTIONS.get(Direction(int(directions[row])), "") if 0 <= row < len(directions) else ""


def _undecided(judged: Verdict, findings: Examination, facts: list[Fact]) -> PageHead:
    """What is missing, and how to record it."""
    lacks = judged.missing[0]
    abstained = [one for one in findings if one.confidence == "cannot tell"]
    if abstained and abstained[0].reason.endswith(lacks.what):
        one = abstained[0]
        detail = one.reason[:1].upper() + one.reason[1:] if one.reason else one.title
        cures = changes_parts(shown_changes(one)[:3])
        return PageHead("unknown", f"Undecided. {one.title}".rstrip(".") + ".", detail, facts, cures)
    also = "; ".join(one.what for one in judged.missing[1:3])
    cures = [cure_parts(f"{lacks.how[:1].upper()}{lacks.how[1:]}.")]
    detail = f"Also: {also}." if also else ""
    return PageHead("unknown", f"Undecided: {lacks.what}.", detail, facts, cures, action="How to record it")


def _facts_of(first: Finding) -> list[Fact]:
    """The costliest finding in figures."""
    facts = []
    several = first.lost_on != "host" and first.window_ns > 0 and first.of_ns > 1.5 * first.window_ns
    if first.device_share is not None and first.device_ns is not None and not first.no_kernel_follows:
        of_window = f"{percent(first.device_share)} of the serving window"
        if several:
            of_window += " of the GPU that waited most"
        elif first.lost_on == "device" and first.lost_ns > 1.005 * first.device_ns:
            rest = duration(first.lost_ns - first.device_ns)
            of_window += f". For the other {rest} of the {duration(first.lost_ns)}, the GPU did not wait"
        facts.append(Fact("The GPU waited", duration(first.device_ns), of_window))
    if first.lost_ns and first.lost_on != "device" and not only_waited(first):
        label = {"host": "Thread time lost", "copy engine": "Copy time lost"}.get(first.lost_on, "Time lost")
        whose = "the time of these threads" if first.lost_on == "host" else "the serving window"
        note = f"{percent(first.share)} of {'their serving windows' if several else whose}" if first.of_ns else ""
        note = f"sum of all GPUs; {note}" if several and note else note
        facts.append(Fact(label, duration(first.lost_ns), note))
    if first.where:
        top = first.where[0]
        name = f"Thread {top.thread}" if top.thread >= 0 else top.stream_name or f"Process {top.pid}"
        rest = place(first, 1, brief=True).removeprefix(name).removeprefix(", ")
        function = _FOLDERS.sub("(", top.function)
        note = ", ".join(filter(None, (rest, f"mostly in {function}" if function else "")))
        facts.append(Fact("Where", name, note))
    for change in shown_changes(first)[:1]:
        if change.predicted_saving_ns:
            facts.append(Fact("The first change saves", duration(change.predicted_saving_ns), "predicted"))
        elif change.predicted_saving_ns is None and change.thread_saving_ns:
            facts.append(Fact("The first change gives the thread back", duration(change.thread_saving_ns), "predicted"))
    if first.cause in WAITS_LEFT:
        facts.append(Fact("How sure", WAIT_MEASURED.capitalize(), "see the evidence for why the GPU waited"))
    else:
        facts.append(Fact("How sure of the cause", sure_text(first).capitalize()))
    return facts


def only_waited(finding: Finding) -> bool:
    """Whether what copies or threads lost is just what the GPUs waited for it: then one figure says both."""
    if not finding.device_ns or finding.window_ns <= 0:
        return False
    if finding.lost_on == "host":
        return duration(finding.lost_ns) == duration(finding.device_ns)
    if finding.lost_on != "copy engine":
        return False
    gpus = max(round(finding.of_ns / finding.window_ns), 1)
    return abs(finding.lost_ns - gpus * finding.device_ns) <= _ALIKE * finding.lost_ns


def call_text(call: TracedCall, direction: str, stream: str) -> str:
    """What a call cost, which way it copied, on which stream and by which thread: what follows its name.

    A call that returned before its copy ended cost more than it took: then the copy's time stands here.
    """
    way = f", {direction}," if direction else ""
    where = f" on {stream}" if stream else ""
    thread = f" in thread {call.thread}" if call.thread >= 0 else ""
    puts = any(name in call.name.lower() for name in ("launchhostfunc", "streamaddcallback"))
    what = "its copy" if direction else "its function" if puts else "what it submitted"
    longer = call.lost_ns > call.dur_ns
    cost = f"took {duration(call.dur_ns)}" + (f", and {what} cost {duration(call.lost_ns)}," if longer else "")
    return f"{way} {cost}{where}{thread}"


def _call(call: TracedCall, stream: str, direction: str, origin_ns: int) -> list[Part]:
    """The call that lost most: what it took, on which stream and thread, when, and who made it."""
    at = f", {duration(call.start_ns - origin_ns)} after the recording began"
    parts = [
        Part("The costliest call: "),
        Part(call.name, inline=True),
        Part(call_text(call, direction, stream) + at),
    ]
    if call.line:
        word, where = call.called
        parts += [Part(f", called {word} "), Part(where, inline=True)]
    return [*parts, Part(".")]
