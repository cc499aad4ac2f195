"""The sections of the page that a demo run fills: before, the switch, after."""

from __future__ import annotations

import numpy as np

from kvprobe.reporting import charts, series
from kvprobe.reporting.charts import Mark, Points
from kvprobe.reporting.story import Array, Story
from kvprobe.reporting.units import NONE, TIMES_SIGN, count_text, duration, percent, rate, ratio
from kvprobe.reporting.verdict import micro
from kvprobe.reporting.views import Chart, Section, TableView, table

__all__ = ["sections"]

LANES = 3  # streams drawn by themselves; the rest are one line, their maximum


def sections(story: Story) -> list[Section]:
    """Sections of the page, in reading order; what was not measured has no chart."""
    start, end = _span(story)
    marks = [Mark(one.time_ns, f"{one.before} → {one.after}") for one in story.switches]
    return [
        charts.section(
            "overview",
            "What happened",
            "What each copy cost the model's thread: its submitting call, and after the switch its share of handing "
            "the transfer over. The charts share one time axis: zoom one, all follow.",
            [
                _submissions(story, start, end, marks),
                _occupancy(story, start, end, marks),
                _steps(story, start, end, marks),
            ],
        ),
        charts.section(
            "distributions", "Before and after", "", [_histogram(story), _heat(story, start, end, marks), _split(story)]
        ),
        charts.section("phases", "The two phases in numbers", "", tables=[_phases(story), _switches(story, start)]),
    ]


def _span(story: Story) -> tuple[float, float]:
    times = [
        one for one in (story.submit_time_ns, story.step_time_ns, *(t for t, _ in story.occupancy.values())) if len(one)
    ]
    if not times:
        return 0.0, 1.0
    return float(min(one.min() for one in times)), float(max(one.max() for one in times)) + 1


def _phase_spans(story: Story) -> list[tuple[float, float, str, bool]]:
    spans = []
    for i, name in enumerate(story.phase_names):
        inside = story.submit_time_ns[story.submit_phase == i] if len(story.submit_phase) else story.submit_time_ns[:0]
        if len(inside):
            spans.append((float(inside.min()), float(inside.max()), f"{name} phase", False))
    return spans


def _submissions(story: Story, start: float, end: float, marks: list[Mark]) -> Chart | None:
    if not len(story.submit_time_ns):
        return None
    shared, auto = story.phases.get("shared", {}), story.phases.get("auto", {})
    words = [f"{len(story.submit_time_ns):,} submissions."]
    if shared:
        words.append(
            f"On the shared stream: {duration(shared.get('submit_p50_ns'))} at the median, "
            f"{duration(shared.get('submit_p99_ns'))} at p99."
        )
    for one in story.switches[:2]:
        words.append(
            f"At {duration(one.time_ns - start)} kvprobe went from {one.before} to {one.after}"
            + (f" because {micro(one.reason)}." if one.reason else ".")
        )
    if story.switches and auto:
        words.append(f"After that: {duration(auto.get('submit_p50_ns'))} and {duration(auto.get('submit_p99_ns'))}.")
    return charts.timeline(
        "submissions",
        "Submit time",
        " ".join(words),
        [Points("longest submission", story.submit_time_ns, story.submit_dur_ns)],
        (start, end),
        label="host time of one submission, log scale",
        short="submit time, log",
        marks=marks,
        spans=_phase_spans(story),
        levels=[(story.baseline_submit_ns, f"baseline {duration(story.baseline_submit_ns)}")],
        height=300,
        how=charts.HOW_BINNED,
    )


def _occupancy(story: Story, start: float, end: float, marks: list[Mark]) -> Chart | None:
    if not story.occupancy:
        return None
    peak = {name: float(level.max()) if len(level) else 0.0 for name, (_, level) in story.occupancy.items()}
    names = sorted(peak, key=lambda name: -peak[name])
    lines = [Points(name, *story.occupancy[name], steps=True) for name in names[:LANES]]
    rest = names[LANES:]
    if len(rest) == 1:
        lines.append(Points(rest[0], *story.occupancy[rest[0]], steps=True))
    elif rest:
        lines.append(
            _highest(f"highest of {len(rest)} other streams", [story.occupancy[name] for name in rest], start, end)
        )
    top = names[0]
    summary = (
        f"Submitted and not yet completed, by stream. “{top}” reached {count_text(peak[top])}, the queue is "
        f"{story.queue_depth:,} deep; "
        f"a copy submitted at the full depth waits until one ahead of it completes."
    )
    return charts.timeline(
        "occupancy",
        "Launch queue occupancy",
        summary,
        lines,
        (start, end),
        unit="count",
        log=False,
        label="submissions outstanding",
        short="outstanding",
        marks=marks,
        levels=[(float(story.queue_depth), f"depth {story.queue_depth:,}")],
        how=f"Depth and {story.channels} channels: {story.calibrated or 'calibrated in this process'}. "
        "Outstanding: kvprobe's own count at each step; a copy counts until a completion after it was looked up, "
        "so the count can stand above the depth.",
    )


def _highest(name: str, steps: list[tuple[Array, Array]], start: float, end: float) -> Points:
    """Many step functions as one: their maximum in each bin of the drawing."""
    high = np.zeros(charts.BINS)
    for time_ns, level in steps:
        high = np.fmax(high, np.nan_to_num(series.bin_step(time_ns, level, charts.BINS, start, end).high))
    edges = start + (end - start) / charts.BINS * np.arange(charts.BINS)
    return Points(name, edges, high, steps=True)


def _steps(story: Story, start: float, end: float, marks: list[Mark]) -> Chart | None:
    if not len(story.step_time_ns):
        return None
    shared, auto = story.phases.get("shared", {}), story.phases.get("auto", {})
    summary = f"{len(story.step_time_ns):,} steps of the model-like loop, which shares the thread that submits."
    if shared.get("step_p99_ns") and auto.get("step_p99_ns"):
        summary += (
            f" p99 {duration(shared['step_p99_ns'])} on the shared stream, {duration(auto['step_p99_ns'])} under auto "
            f"({ratio(shared['step_p99_ns'], auto['step_p99_ns'])})."
        )
    return charts.step_chart("steps", story.step_time_ns, story.step_dur_ns, (start, end), marks, summary)


def _parts(story: Story) -> dict[str, Array]:
    """Durations before and after: the shared phase, and the auto phase from its last switch on."""
    out: dict[str, Array] = {}
    if not len(story.submit_phase):
        return {"all submissions": story.submit_dur_ns} if len(story.submit_dur_ns) else {}
    for i, name in enumerate(story.phase_names):
        chosen = story.submit_phase == i
        label = name
        if name == "auto" and story.switches:
            chosen = chosen & (story.submit_time_ns >= story.switches[-1].time_ns)
            label = f"auto, after the switch to {story.switches[-1].after}"
        if np.any(chosen):
            out[label] = story.submit_dur_ns[chosen]
    return out


def _histogram(story: Story) -> Chart | None:
    parts = _parts(story)
    if not parts:
        return None
    words = []
    for name, values in parts.items():
        half, high, top = charts.quantiles(values, 0.5, 0.99, 1.0)
        words.append(
            f"{name[:1].upper()}{name[1:]}: {len(values):,} calls, median {duration(half)}, "
            f"p99 {duration(high)}, longest {duration(top)}."
        )
    return charts.histogram_chart(
        "histogram",
        "Distribution of submit time",
        " ".join(words),
        {name: series.histogram(values) for name, values in parts.items()},
        marks=[(story.baseline_submit_ns, "baseline")],
    )


def _heat(story: Story, start: float, end: float, marks: list[Mark]) -> Chart | None:
    if len(story.submit_time_ns) < 5000:
        return None
    summary = (
        "How many calls took how long, when: a stronger cell holds more calls. "
        "One strong row at the bottom is a healthy queue."
    )
    return charts.heat_chart(
        "heat", "Submit time, all calls", summary, story.submit_time_ns, story.submit_dur_ns, (start, end), marks=marks
    )


def _split(story: Story) -> Chart | None:
    if not story.split:
        return None
    words = []
    for name, parts in story.split.items():
        total = sum(parts.values())
        if total:
            largest = max(parts, key=lambda part: parts[part])
            words.append(f"{name}: {percent(parts[largest] / total)} of transfer time is {largest.replace('_', ' ')}.")
    return charts.split_chart(
        "split",
        "Where the time of transfers went",
        " ".join(words),
        story.split,
        "Build, submit and poll delay are host time; queue wait and copy come from events on the stream.",
    )


PHASE_ROWS = (
    ("Submission, median", "submit_p50_ns", duration),
    ("Submission, p99", "submit_p99_ns", duration),
    ("Longest blocked call", "longest_call_ns", duration),
    ("Model step, median", "step_p50_ns", duration),
    ("Model step, p99", "step_p99_ns", duration),
    ("Copied at", "bytes_per_s", rate),
    ("Link", "link_bytes_per_s", rate),
)


def _phases(story: Story) -> TableView:
    names = list(story.phases)
    rows = []
    for label, key, text in PHASE_ROWS:
        values = [story.phases[name].get(key) for name in names]
        if any(value is not None for value in values):
            row: list[object] = [label, *((text(value), value) for value in values)]
            if len(values) == 2:
                row.append(ratio(values[0], values[1]))
            rows.append(row)
    return table("Phases", ["Figure", *names, *(["change"] if len(names) == 2 else [])], rows)


def _switches(story: Story, start: float) -> TableView:
    rows = [
        [
            (duration(one.time_ns - start), one.time_ns - start),
            one.before,
            one.after,
            micro(one.reason),
            (f"{one.gain:,.1f}{TIMES_SIGN}" if one.gain else NONE, one.gain),
        ]
        for one in story.switches
    ]
    return table("What kvprobe switched", ["At", "From", "To", "Why", "Submit p99, before over after"], rows)
