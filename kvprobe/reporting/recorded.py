"""The sections of the page that a recording fills, and its findings made ready to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe import requests, sizing
from kvprobe.diagnosis import CAUSES, llama_cpp, offload_benefit
from kvprobe.diagnosis.finding import ranked
from kvprobe.diagnosis.startup import startup
from kvprobe.recordings.assemble import among, rows_of
from kvprobe.recordings.model import SUBMITTING, CallKind, Direction, Recording
from kvprobe.recordings.occupancy import Occupancy, occupancy
from kvprobe.recordings.serving import ServingWindow, serving_window
from kvprobe.reporting import (
    charts,
    descriptors,
    experts,
    headline,
    late,
    offloads,
    series,
    sized,
    slept,
    streams,
    verified,
)
from kvprobe.reporting.account import account_section
from kvprobe.reporting.charts import Mark, Points
from kvprobe.reporting.headline import PageHead
from kvprobe.reporting.rows import rows_chart
from kvprobe.reporting.units import (
    NONE,
    count_text,
    duration,
    moved_text,
    percent,
    rate,
    ratio,
    size_text,
    value_text,
)
from kvprobe.reporting.views import Cell, Chart, Section, TableView, left_out, table

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.finding import Finding

__all__ = ["Submissions", "View", "judged", "submissions", "view"]

Array = npt.NDArray[Any]

SLOWEST = 1200  # calls embedded one by one, so that zooming finds them with their names
SAMPLED = 16  # charts of samples: the device's counters are fifteen
FEW = 3  # values: fewer make a table, and no chart
_SUBMIT_TIME = charts.Axis("host time of one call, log scale", "call took, log", log=True)
COPIES = (CallKind.COPY, CallKind.BATCH)
KINDS = (
    ("copies", COPIES),
    ("launches and graphs", (CallKind.LAUNCH, CallKind.GRAPH)),
    ("memsets", (CallKind.MEMSET,)),
)


@dataclass
class View:
    """What the page shows of a recording; `findings` is None where no diagnosis was asked for."""

    verdict: PageHead
    sections: list[Section] = field(default_factory=list)
    findings: list[dict[str, Any]] | None = None
    lead: str = ""


@dataclass
class Submissions:
    """The submitting calls of a recording as columns, and the span of time that every chart shares.

    Attributes:
        rows: their rows in `recording.calls`, ascending.
        start_ns, dur_ns, kind: one entry a row.
        span: (first, last) nanosecond that the recording knows of.
        calls: submissions that were made; more than rows where single calls were only counted.
        host_ns: host time in all of them.
    """

    rows: Array
    start_ns: Array
    dur_ns: Array
    kind: Array
    span: tuple[float, float]
    calls: int
    host_ns: float


def submissions(recording: Recording) -> Submissions:
    """Picks the submitting calls."""
    calls = recording.calls
    rows = rows_of(among(calls["kind"], SUBMITTING))
    picked = rows if len(rows) < calls.rows else slice(None)  # of all, columns need no copy
    start = calls["start_ns"][picked]
    shown = (recording.calls, recording.executions, recording.transfers, recording.server_calls)
    tables = [one for one in shown if one.rows]
    low = min((int(one["start_ns"].min()) for one in tables), default=0)
    high = max((*(int(one["end_ns"].max()) for one in tables), low + bool(tables)))
    spent = calls["end_ns"][picked] - start
    np.maximum(spent, 0, out=spent)
    counted = among(recording.totals["kind"], SUBMITTING)
    calls_made, host_ns = (
        int(recording.totals["calls"][counted].sum()),
        float(recording.totals["dur_ns"][counted].sum()),
    )
    if calls_made <= len(rows):
        calls_made, host_ns = len(rows), float(spent.sum())
    return Submissions(rows, start, spent, calls["kind"][picked], (float(low), float(high)), calls_made, host_ns)


def judged(recording: Recording, findings: Examination | None, found: Submissions | None = None) -> PageHead:
    """The sentence on top; `findings` None: no diagnosis was asked for."""
    found = found or submissions(recording)
    return headline.of_recording(
        recording,
        findings,
        found.calls,
        found.host_ns,
        found.span[1] - found.span[0],
    )


def view(recording: Recording, findings: Examination | None, queues: Occupancy | None = None) -> View:
    """Everything the page says about a recording; charts that would be empty are left out."""
    found = submissions(recording)
    span_ns = found.span[1] - found.span[0]
    out = View(judged(recording, findings, found))
    benefits = offload_benefit.of_recording(recording)
    out.verdict.detail = " ".join([out.verdict.detail, *(one.sentence for one in benefits)]).strip()
    if found.calls > len(found.rows):
        kept = f"of {count_text(found.calls)}; the others are in the totals alone"
        out.verdict.facts.append(headline.Fact("Calls kept in detail", count_text(len(found.rows)), kept))
    if findings is not None:
        out.findings = [_finding(i, one, recording, found) for i, one in enumerate(ranked(findings))]
        examined = f"kvprobe examined {count_text(found.calls)} submissions in {duration(span_ns)}"
        if findings:
            out.lead = _lead(findings)
        elif out.verdict.state == "ok":
            out.lead = f"Nothing found: {examined}, and looked for {_looked_for(findings)}."
        else:
            out.lead = f"Not enough was recorded to tell: {examined}."
    queues = queues or (occupancy(recording) if len(found.rows) else None)
    account = findings.account if findings is not None else None
    with ThreadPoolExecutor(1) as beside:  # the largest chart on a second core: numpy works without Python's lock
        rows = beside.submit(rows_chart, recording, found, findings or (), account)
        out.sections = _sections(recording, findings, found, queues, benefits)
        overview = next(one for one in out.sections if one.id == "overview")
        overview.charts[:0] = [chart for chart in [rows.result()] if chart is not None]
    for one in out.sections:
        one.folded = one.id == "startup"
    return out


def _looked_for(findings: Examination) -> str:
    """How many of the known causes the recording can show."""
    if not findings.not_looked_for:
        return f"all {len(CAUSES)} known causes"
    return f"{len(CAUSES) - len(findings.not_looked_for)} of {len(CAUSES)} known causes"


def _sections(
    recording: Recording,
    findings: Examination | None,
    found: Submissions,
    queues: Occupancy | None,
    benefits: list[offload_benefit.Benefit],
) -> list[Section]:
    """Below the findings, from the account to what kvprobe did itself; without the chart of the threads."""
    marks = _marks(recording, found.span)
    outstanding, cliff = streams.occupancy_charts(recording, found, queues, marks)
    stream_table, stream_lead = streams.stream_table(recording, found, queues)
    window = recording.window or serving_window(recording)
    sampled, same = _samples(recording, found, marks)
    by_descriptor, copies = descriptors.descriptor_table(recording, window)
    pools = sizing.of_recording(recording)
    account = findings.account if findings is not None else None
    return [
        *([account_section(account)] if account is not None else []),
        late.late_section(requests.of_account(recording, account, window) if account is not None else None),
        charts.section(
            "overview",
            "Over time",
            "These charts share one time axis: zoom one and all follow.",
            [
                outstanding,
                _timeline(recording, found, marks, findings or ()),
                *sampled,
            ],
            [same],
        ),
        charts.section(
            "distributions", "How long calls took", "", [_histogram(recording, found), _heat(found, marks), cliff]
        ),
        charts.section("transfers", "Transfers", "", [_split(recording)]),
        charts.section(
            "descriptors",
            "Copies by stream and direction",
            by_descriptor,
            [],
            [copies, descriptors.submitters_table(recording)],
        ),
        charts.section("server_calls", "What the server's own functions moved", _SERVED, [], [_served(recording)]),
        charts.section("llama_cpp", "llama.cpp and Ollama", _LLAMA_CPP, [], [_llama_cpp(recording)]),
        charts.section("experts", *experts.expert_section(recording, account, window)),
        verified.section(recording),
        charts.section("offload", "Is offload helping?", offloads.LEAD, [], [offloads.benefits_table(benefits)]),
        charts.section(
            "size",
            "How large should the pool be?",
            sized.LEAD,
            sized.size_charts(pools),
            [*map(sized.size_table, pools)],
        ),
        charts.section("sleeps", "Sleep and wake", slept.LEAD, [], slept.sleep_tables(recording, int(found.span[0]))),
        charts.section("ranks", "Processes side by side", "", *streams.processes(recording, found, queues)),
        charts.section(
            "streams",
            "Streams and threads",
            stream_lead,
            [],
            [stream_table, streams.thread_table(recording, found, queues)],
        ),
        charts.section("stacks", "Python code that was waiting", _STACKS, [], [_stacks(recording)]),
        charts.section("startup", "Start-up, before the serving window", *_startup(recording, window)),
        charts.section("decisions", "What kvprobe switched, and why", "", [], [_decisions(recording, found)]),
    ]


def _startup(recording: Recording, window: ServingWindow) -> tuple[str, list[Chart | None], list[TableView | None]]:
    """What lies before the serving window: told apart, because no finding counts it."""
    before = startup(recording, window)
    if not before.parts:
        return "", [], []
    lead = (
        f"Start-up takes {duration(before.length_ns)}, with {count_text(before.submissions)} submissions. The serving "
        f"window {window.how.removeprefix('it ') if window.how.startswith('it ') else f'is {window.how}'}. A process "
        "starts up once, so the findings and shares above leave it out."
    )
    rows = [
        [
            part.what,
            (f"{part.calls:,}", part.calls),
            (duration(part.ns), part.ns),
            (moved_text(part.bytes) if part.bytes else NONE, part.bytes),
            (rate(part.bytes_per_s) if part.bytes else NONE, part.bytes_per_s),
            part.call,
            (duration(part.longest_ns), part.longest_ns),
        ]
        for part in before.parts
    ]
    columns = ["Work", "Calls", "Time", "Size", "Rate", "Mostly in", "Longest call"]
    return lead, [], [table("Start-up by kind of work", columns, rows)]


_SERVED = "As measured by kvprobe's adapters; calls made inside another call of this table are counted with that call."
_LLAMA_CPP = (
    "Recognised by the program's name, from its CUDA calls alone. Copies from pageable memory hold their thread: "
    "--no-mmap "
    "pins llama.cpp's weights on the CPU, GGML_CUDA_NO_PINNED in its environment unpins its staging buffers."
)
_STACKS = "Stacks taken while a call was blocked, innermost frame first, longest waits at the top."


def _marks(recording: Recording, span: tuple[float, float]) -> list[Mark]:
    rows = recording.decisions
    marks = [Mark(float(t), recording.text(int(what))) for t, what in zip(rows["time_ns"], rows["what"], strict=True)]
    return [one for one in marks if span[0] <= one.time_ns <= span[1]][:12]


def _groups(kind: Array) -> list[tuple[str, Array]]:
    found = [(name, among(kind, kinds)) for name, kinds in KINDS]
    return [(name, mask) for name, mask in found if mask.any()]


def _timeline(
    recording: Recording, found: Submissions, marks: Sequence[Mark], findings: Sequence[Finding]
) -> Chart | None:
    if len(found.rows) < FEW:
        return None
    lines, words = [], []
    for name, mask in _groups(found.kind):
        durations = found.dur_ns[mask]
        half, high, top = charts.quantiles(durations, 0.5, 0.99, 1.0)
        words.append(
            f"{len(durations):,} {name} (median {duration(half)}, p99 {duration(high)}, longest {duration(top)})"
        )
        lines.append(Points(name, found.start_ns[mask], durations))
    span_ns = found.span[1] - found.span[0]
    spans = [
        (float(one.window[0]), float(one.window[1]), "", True)
        for one in findings
        if one.severity != "info" and 0 < one.window[1] - one.window[0] < 0.7 * span_ns
    ]
    exact = series.slowest(found.dur_ns, SLOWEST) if len(found.rows) > charts.EXACT else None
    chart = charts.timeline(
        ("submissions", "Submit time", f"The whole recording has {', '.join(words)}."),
        lines,
        found.span,
        _SUBMIT_TIME,
        charts.Besides(marks=marks, spans=spans),
        height=300,
        how=charts.how_drawn(lines)
        + (
            f" The {len(exact):,} longest calls have their names: zoom in and point at one."
            if exact is not None
            else ""
        )
        + (" The shaded times are those of the findings above." if spans else ""),
    )
    if exact is None:
        return chart
    rows = found.rows[exact]
    calls = recording.calls
    names = [call_label(recording, int(row)) for row in rows]
    distinct = list(dict.fromkeys(names))
    index = {name: i for i, name in enumerate(distinct)}
    spec = dict(chart.spec)
    spec["labels"] = distinct
    spec["series"] = [
        *spec["series"],
        {
            "name": "longest calls",
            "style": 5,
            "t": (calls["start_ns"][rows] - found.span[0]).tolist(),
            "v": found.dur_ns[exact].tolist(),
            "label": [index[name] for name in names],
            "close": True,
        },
    ]
    return Chart(chart.id, chart.title, chart.summary, spec, chart.table, chart.how)


def call_label(recording: Recording, row: int) -> str:
    """One call in a few words, for a reader who points at it."""
    calls = recording.calls
    bits = [recording.text(int(calls["name"][row])) or CallKind(int(calls["kind"][row])).name.lower()]
    stream = int(calls["stream"][row])
    if stream >= 0:
        bits.append(f"on {streams.stream_name(recording, stream)}")
    bits.append(f"by thread {int(calls['thread'][row])}")
    return " ".join(bits)


def _histogram(recording: Recording, found: Submissions) -> Chart | None:
    counts: dict[str, Array] = {}
    words = []
    if found.calls == len(found.rows):
        for name, mask in _groups(found.kind):
            counts[name] = series.histogram(found.dur_ns[mask])
        how = "Counted from every recorded call."
    else:
        kind = recording.totals["kind"]
        for name, mask in _groups(kind):
            counts[name] = recording.histograms[mask].sum(axis=0)  # exact, single calls kept or not
        how = "Counted while recording, in a histogram: it includes calls that were not kept one by one."
        untimed = [name for name, one in counts.items() if not one.any()]
        if untimed:
            how += f" Counted, but not timed: {', '.join(untimed)}."
    counts = {name: one for name, one in counts.items() if one.any()}
    if not counts:
        return None
    for name, one in counts.items():
        words.append(f"{name}: {int(one.sum()):,} calls")
    return charts.histogram_chart("histogram", "Distribution of submit time", ", ".join(words) + ".", counts, how=how)


def _heat(found: Submissions, marks: Sequence[Mark]) -> Chart | None:
    if len(found.rows) < 5000:
        return None
    summary = (
        "How many calls took how long, and when: a darker cell holds more calls. Calls blocked by a full queue form a "
        "band of their own above the others."
    )
    return charts.heat_chart(
        "heat", "Submit time, all calls", summary, found.start_ns, found.dur_ns, found.span, marks=marks
    )


def _samples(recording: Recording, found: Submissions, marks: Sequence[Mark]) -> tuple[list[Chart], TableView]:
    """Charts of what was sampled, a line a device; what did not change needs none, and is a row of the table."""
    table_ = recording.samples
    several = len(np.unique(table_["device"])) > 1
    out: list[Chart] = []
    same: list[list[Any]] = []
    for metric in np.unique(table_["metric"]).tolist():
        name = recording.text(metric)
        rows = np.flatnonzero(table_["metric"] == metric)
        title = name.removesuffix("_ns").removesuffix("_bytes").replace("_", " ").capitalize()
        lines, words = [], []
        for device in np.unique(table_["device"][rows]).tolist():
            mine = rows[table_["device"][rows] == device]
            values = table_["value"][mine]
            least, most = value_text(name, float(values.min())), value_text(name, float(values.max()))
            if len(values) < FEW or values.min() == values.max():
                same.append([title, str(device), least if least == most else f"{least} to {most}", str(len(values))])
                continue
            what = f"GPU {device}" if several else title.lower()
            words.append(f"{what}: {len(values):,} samples, from {least} to {most}.")
            lines.append(Points(what, table_["time_ns"][mine], values))
        if not lines or len(out) == SAMPLED:
            continue
        unit = (
            "ns"
            if name.endswith("_ns")
            else "bytes"
            if name.endswith("_bytes")
            else "rate"
            if name.endswith("bytes_per_s")
            else "count"
        )
        out.append(
            charts.timeline(
                (f"sample-{metric}", title, " ".join(words)),
                lines,
                found.span,
                charts.Axis(title.lower(), unit=unit),
                charts.Besides(marks=marks),
                height=190,
                bins=900,
            )
        )
    return out, table(
        "Samples that did not change, or are few",
        ["Metric", "Device", "Value", "Samples"],
        same[:200],
        left_out(200, len(same)),
    )


def _split(recording: Recording) -> Chart | None:
    rows = recording.transfers
    split: dict[str, Mapping[str, float]] = {}
    for direction, name in (
        (Direction.H2D, "loads (CPU to GPU)"),
        (Direction.D2H, "stores (GPU to CPU)"),
        (Direction.UNKNOWN, "transfers"),
    ):
        mask = rows["direction"] == direction
        if mask.any():
            times = rows["one_in"][mask]
            sums: Mapping[str, float] = {
                part: float((np.maximum(rows[column][mask], 0) * times).sum()) for part, column in charts.SPLIT_OF
            }
            if any(sums.values()):
                about = "about " if times.max() > 1 else ""
                split[f"{name}, {about}{int(times.sum()):,}"] = sums
    if not split:
        return None
    words = []
    for name, sums in split.items():
        largest = max(sums, key=lambda part, sums=sums: sums[part])  # type: ignore[misc]
        words.append(
            f"{name}: {percent(sums[largest] / sum(sums.values()))} of the time is {largest.replace('_', ' ')}."
        )
    watched = int(rows["one_in"].max())
    how = (
        f"Estimated: the adapters measured one transfer in {watched} ({rows.rows:,} in all), and each counts "
        f"{watched} times here."
        if watched > 1
        else ""
    )
    return charts.split_chart("split", "Time of transfers, by part", " ".join(words), split, how)


def _stacks(recording: Recording) -> TableView:
    rows = recording.stacks
    if not rows.rows:
        return table("Stacks", ["Waited"], [])
    names, inverse = np.unique(rows["stack"], return_inverse=True)
    waited = np.bincount(inverse, weights=rows["blocked_ns"])
    seen = np.bincount(inverse)
    held = np.bincount(inverse, weights=(rows["gil"] == 1))
    order = np.argsort(-waited)[:30]
    listed = [
        [
            (duration(waited[i]), waited[i]),
            (f"{seen[i]:,}", seen[i]),
            (percent(held[i] / seen[i]), held[i] / seen[i]),
            recording.text(int(names[i])),
        ]
        for i in order
    ]
    return table("By stack", ["Waited", "Stacks", "Held the GIL", "Frames"], listed, left_out(30, len(names)))


def _served(recording: Recording) -> TableView:
    rows = recording.server_calls
    outer = rows.where(rows["inside"] == 0)
    key = np.stack([outer[name].astype(np.int64) for name in ("server", "name", "direction")], axis=1)
    kinds, group = np.unique(key, axis=0, return_inverse=True)

    def total(values: Array) -> Array:
        return np.bincount(group.ravel(), values.astype(np.float64), len(kinds)).astype(np.int64)

    sums = [total(outer[name]) for name in ("bytes", "count", "pageable", "blocking")]
    spent = total(outer["end_ns"] - outer["start_ns"])
    calls = np.bincount(group.ravel(), minlength=len(kinds))
    words = {Direction.H2D: "to the GPU", Direction.D2H: "to the CPU"}
    listed = []
    for i in np.argsort(-spent, kind="stable")[:200]:
        moved, copies, pageable, blocking = (int(one[i]) for one in sums)
        listed.append(
            [
                f"{recording.text(int(kinds[i][0]))} {recording.text(int(kinds[i][1]))}",
                words.get(Direction(int(kinds[i][2])), NONE),
                (count_text(int(calls[i])), int(calls[i])),
                (moved_text(moved), moved),
                (duration(int(spent[i])), int(spent[i])),
                (count_text(copies), copies),
                (count_text(pageable), pageable),
                (count_text(blocking), blocking),
            ]
        )
    columns = ["Function", "Direction", "Calls", "Moved", "Time of its thread", "Copies", "Pageable", "Blocking"]
    return table("What the server's own functions moved", columns, listed, left_out(200, len(kinds)))


def _llama_cpp(recording: Recording) -> TableView:
    listed = [
        [
            streams.process_name(recording, one.process),
            one.name,
            (count_text(one.copies), one.copies),
            (moved_text(one.size_bytes), one.size_bytes),
            (duration(one.held_ns), one.held_ns),
            (count_text(one.pageable), one.pageable),
            (percent(one.pageable_bytes / one.size_bytes), one.pageable_bytes / one.size_bytes)
            if one.size_bytes
            else NONE,
            (duration(one.pageable_ns), one.pageable_ns),
            "yes" if one.no_mmap else NONE,
        ]
        for one in llama_cpp.programs(recording)
        if one.copies
    ]
    columns = ["Process", "Program", "Copies to the GPU", "Bytes", "Host time", "Pageable", "Of the bytes"]
    return table("Copies to the GPU", [*columns, "Host time in pageable", "--no-mmap"], listed)


def _decisions(recording: Recording, found: Submissions) -> TableView:
    rows = recording.decisions
    listed = [
        [
            (duration(t - found.span[0]), float(t - found.span[0])),
            recording.text(int(what)),
            recording.text(int(reason)),
            (ratio(float(gain), 1.0) or NONE, float(gain)),
        ]
        for t, what, reason, gain in zip(rows["time_ns"], rows["what"], rows["reason"], rows["gain"], strict=True)
    ][:200]
    return table(
        "Decisions and states", ["At", "What", "Why", "Caller's time per copy"], listed, left_out(200, rows.rows)
    )


# ---- findings ------------------------------------------------------------------------------------------------------


def _finding(i: int, finding: Finding, recording: Recording, found: Submissions) -> dict[str, Any]:
    state = "unknown" if finding.confidence == "cannot tell" else finding.severity
    what = {"host": "of thread time", "copy engine": "of copy time", "device": "of GPU time"}.get(finding.lost_on, "")
    meta = [
        finding.cause.replace("_", " "),
        headline.sure_text(finding),
    ]
    where = headline.place(finding)
    if where:
        meta.append(where)
    said = dict.fromkeys(
        (headline.with_units(one.text), one.how) for one in finding.evidence
    )  # alike of two GPUs: once
    evidence = [{"text": text, "how": how} for text, how in said]
    if finding.reason:
        evidence.append({"text": finding.reason[:1].upper() + finding.reason[1:], "how": ""})
    places = None
    if len(finding.where) > 1:
        by_function = any(one.function for one in finding.where)
        places = table(
            "Time lost, by thread and stream",
            ["Rank", "Process", "Thread", "Stream", "Range", *["Function"] * by_function, "Time lost", "Calls"],
            [
                [
                    str(one.rank) if one.rank >= 0 else NONE,
                    str(one.pid) if one.pid > 0 else NONE,
                    str(one.thread) if one.thread >= 0 else NONE,
                    one.stream_name or NONE,
                    one.range or NONE,
                    *[one.function or NONE] * by_function,
                    (duration(one.lost_ns), one.lost_ns),
                    (f"{one.calls:,}", one.calls),
                ]
                for one in finding.where[:50]
            ],
            left_out(50, len(finding.where)),
        )
    return {
        "state": state,
        "open": i < 3 and (i == 0 or finding.severity != "info"),
        "word": headline.WORDS[state],
        "title": headline.with_units(finding.title),
        "meta": " · ".join(meta),
        "lost": _lost(finding, what),
        "evidence": evidence,
        "cures": headline.changes_parts(headline.shown_changes(finding)),
        "calls": _calls_table(finding, recording, found) if finding.calls else None,
        "places": places,
        "chart": _zoom(i, finding, recording, found),
    }


def _lead(findings: Examination) -> str:
    """In which order the findings stand, and what they cost the GPU together."""
    lead = "The most severe finding comes first." if len(findings) > 1 else ""
    told = [one for one in findings if one.confidence != "cannot tell"]
    waited = sum(one.device_ns or 0 for one in told)
    seen = [gpu for gpu in findings.account.gpus if gpu.seen]
    if len(told) < 2 or not waited or len(seen) != 1:
        return lead
    part = percent(waited / seen[0].window_ns)
    return f"{lead} Together, these findings made the GPU wait for {duration(waited)}, {part} of the serving window."


def _lost(finding: Finding, what: str) -> str:
    """What a finding cost: the threads or engines that lost time, and the GPU."""
    own = finding.lost_ns and finding.lost_on != "device" and not headline.only_waited(finding)
    said = [f"{duration(finding.lost_ns)} {what} lost"] if own else []
    several = finding.lost_on != "host" and finding.of_ns > 1.5 * finding.window_ns > 0
    whose = " of the GPU that waited most" if several else ""
    if finding.device_share is None or finding.device_ns is None:
        return "; ".join(said) or (f"{duration(finding.lost_ns)} lost" if finding.lost_ns else "")
    if finding.no_kernel_follows:
        said.append("no kernel follows, so nothing shows whether the GPU waited")
    elif finding.device_ns:
        waited = f"the GPU waited {duration(finding.device_ns)}"
        said.append(f"{waited}, {percent(finding.device_share)} of the serving window{whose}")
    elif finding.lost_ns:
        said.append("the GPU did not have to wait")
    return "; ".join(said)


def _calls_table(finding: Finding, recording: Recording, found: Submissions) -> TableView:
    """The calls that lost most: where in the recording, and where in the program."""
    moved = recording.calls["bytes"]
    places: dict[tuple[int, int], set[str]] = {}
    for where in finding.where:
        if where.stream_name:
            places.setdefault((where.pid, where.thread), set()).add(where.stream_name)
    streams_of = {thread: min(names) for thread, names in places.items() if len(names) == 1}
    listed = [
        [
            Cell(duration(one.start_ns - found.span[0]), one.start_ns - found.span[0], call=one.row),
            one.name,
            (duration(one.dur_ns), one.dur_ns),
            (duration(one.lost_ns), one.lost_ns),
            (f"{one.depth:,}", one.depth) if one.depth >= 0 else NONE,
            one.stream_name or streams_of.get((one.pid, one.thread)) or NONE,
            str(one.thread) if one.thread >= 0 else NONE,
            str(one.pid) if one.pid > 0 else NONE,
            (f"{one.row:,}", one.row),
            (size_text(moved[one.row]), int(moved[one.row])) if one.row >= 0 and moved[one.row] > 0 else NONE,
            "\n".join(one.stack) or NONE,
        ]
        for one in finding.calls
    ]
    names = [
        "At",
        "Call",
        "In the call",
        "Time lost",
        "Outstanding",
        "Stream",
        "Thread",
        "Process",
        "Row",
        "Bytes",
        "Python stack",
    ]
    shared = any(2 * one.lost_ns < one.dur_ns for one in finding.calls)
    note = "Where a call lost less than it took, the rest is its usual time or another finding's." if shared else ""
    if any(one.lost_ns > one.dur_ns for one in finding.calls):
        note = f"{note} A call returns before its copy ends: the time lost is the copy's.".strip()
    note = f"{note} Row is the call's number in the table of calls that `kvprobe export` writes.".strip()
    return table("The calls that lost most", names, listed, note)


def _zoom(i: int, finding: Finding, recording: Recording, found: Submissions) -> Chart | None:
    """The finding's own series where it has some, else the submissions around its window."""
    if finding.chart is not None and any(len(one["x"]) >= FEW for one in finding.chart["series"].values()):
        return charts.plain(f"finding-chart-{i}", finding.chart)
    start, end = finding.window
    whole = found.span[1] - found.span[0]
    if end <= start or end - start > 0.8 * whole or not len(found.rows):
        return None  # the overview shows it as well
    edge = 0.15 * (end - start)
    span = (max(start - edge, found.span[0]), min(end + edge, found.span[1]))
    inside = (found.start_ns >= span[0]) & (found.start_ns <= span[1])
    if inside.sum() < FEW:
        return None
    lines = [
        Points(name, found.start_ns[inside & mask], found.dur_ns[inside & mask])
        for name, mask in _groups(found.kind)
        if (inside & mask).any()
    ]
    summary = f"{count_text(int(inside.sum()))} submissions around the {duration(end - start)} in which it happened."
    return charts.timeline(
        (f"finding-chart-{i}", "Submissions in that window", summary),
        lines,
        span,
        _SUBMIT_TIME,
        charts.Besides(spans=[(float(start), float(end), "", True)]),
        group="",
        height=210,
        bins=1200,
        zero=found.span[0],
    )
