"""What `kvprobe requests` and the page say of steps and requests: sentences, tables, the distribution by phase."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvprobe.account import LINE_TITLES, Line
from kvprobe.reporting import charts
from kvprobe.reporting.units import NONE, count_text, duration
from kvprobe.reporting.views import Cell, Chart, Section, TableView, left_out, table
from kvprobe.requests import PART_KEYS, PhaseTimes, Requests, Waits

__all__ = [
    "PHASE_COLUMNS",
    "REQUEST_COLUMNS",
    "STEP_COLUMNS",
    "late_section",
    "phase_rows",
    "request_rows",
    "sentences",
    "step_rows",
]

LEAD = (
    "A step is timed from the end of the previous step with the same request. Its time is split into the lines of the "
    "account. A step is late if it took much longer than similar steps, which have the same phase and about the same "
    "size. Much longer means above the third quartile of these steps plus three times their interquartile range."
)
PHASE_COLUMNS = ("Phase", "Size", "Steps", "Median", "Late from", "Late", "Mostly")
REQUEST_COLUMNS = ("Request", "First token", "Late tokens", "Longer by", "Mostly", "Late steps")
STEP_COLUMNS = ("Step", "Phase", "Requests", "Took", "Longer by", "Mostly", "Cause", "Longest call")
SHOWN = 20  # late steps and requests in a table
_BINS = 24
_TITLES = {
    **{line.key: LINE_TITLES[line] for line in Line},
    PART_KEYS[-2]: "waiting for its turn",
    PART_KEYS[-1]: "waiting for the load of its own blocks",
}


def _most(parts: Mapping[str, int]) -> str:
    """The largest part and how much it is."""
    key = max(parts, key=lambda one: parts[one], default="")
    return f"{_TITLES[key]} {duration(parts[key])}" if key and parts[key] > 0 else NONE


def _waits(name: str, one: Waits) -> str:
    said = one.to_json()
    if not said["count"]:
        return f"{name}: none was recorded."
    parts = sorted(said["tail_ns"].items(), key=lambda item: -item[1])
    waits = [key for key, ns in parts if key != Line.COMPUTING.key and ns > 0][:2]
    told = [f"{duration(ns)} {_TITLES[key]}" for key, ns in parts if key in (Line.COMPUTING.key, *waits) and ns > 0]
    text = f"{name}: p50 {duration(said['p50_ns'])}, p99 {duration(said['p99_ns'])}"
    if not waits:
        return f"{text}."
    listed = " and ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else told[0]
    return f"{text}. On average, the slowest 1% include {listed} each."


def sentences(told: Requests) -> list[str]:
    """What the figures say, in the order in which somebody asks."""
    out = [_waits("Time between tokens", told.between_tokens), _waits("Time to first token", told.first_token)]
    if told.arrivals < told.requests:
        from_step = told.requests - told.arrivals
        out[1] += f" For {from_step:,} requests, the arrival was not recorded: they are timed from their first step."
    if told.undecided:
        return [*out, f"It is undecided which steps were late: {told.undecided}."]
    late = f"{told.late_steps:,} of {told.steps:,} steps and {len(told.late_requests):,} of {told.requests:,} requests"
    out.append(f"Late: {late}.")
    rare = sum(one.usual.count - one.late for one in told.phases if one.undecided)
    if rare:
        out.append(f"Undecided: {rare:,} steps, because too few steps are similar to them.")
    return out


def _size(one: PhaseTimes) -> str:
    to = 2 * one.least - 1
    return f"{one.least:,}{f' to {to:,}' if to > one.least else ''} {one.counted}"


def _late_from(one: PhaseTimes) -> str:
    if not np.isfinite(one.usual.late_ns):
        return "undecided"
    return duration(one.usual.late_ns) + (", undecided below" if one.undecided else "")


def phase_rows(told: Requests) -> list[list[str]]:
    """Texts for a table of PHASE_COLUMNS."""
    return [
        [
            one.phase.name.lower(),
            _size(one),
            count_text(one.usual.count),
            duration(one.usual.median_ns),
            _late_from(one),
            count_text(one.late),
            _most(one.to_json()["lines_ns"]),
        ]
        for one in told.phases
    ]


def request_rows(told: Requests) -> list[list[str]]:
    """Texts for a table of REQUEST_COLUMNS: those that lost most."""
    return [
        [
            one.name,
            (duration(one.first_token_ns) if one.first_token_ns >= 0 else NONE) + (", late" if one.first_late else ""),
            f"{one.late_tokens:,} of {one.tokens:,}",
            duration(one.longer_ns),
            _most(one.to_json()["surplus_ns"]),
            ", ".join(str(step) for step in one.steps[:4]) + (" …" if len(one.steps) > 4 else ""),
        ]
        for one in told.late_requests[:SHOWN]
    ]


def step_rows(told: Requests) -> list[list[str]]:
    """Texts for a table of STEP_COLUMNS: those that took most longer."""
    return [
        [
            str(one.step) if one.step >= 0 else NONE,
            one.phase.name.lower(),
            count_text(one.requests),
            duration(one.to_ns - one.from_ns),
            duration(one.longer_ns),
            _most(one.to_json()["surplus_ns"]),
            one.cause or NONE,
            f"{one.inside.calls[0].name} {duration(one.inside.calls[0].ns)}" if one.inside.calls else NONE,
        ]
        for one in told.late[:SHOWN]
    ]


def late_section(told: Requests | None) -> Section:
    """The page's section; empty, and so not shown, where a recording tells no steps."""
    if told is None:
        return Section("requests", "Which requests were late?")
    lead = " ".join([*sentences(told), LEAD])
    chart = _distribution(told)
    return charts.section("requests", "Which requests were late?", lead, [chart], _tables(told))


def _tables(told: Requests) -> list[TableView | None]:
    phases = table("Steps by phase", PHASE_COLUMNS, phase_rows(told))
    requests = table("Late requests", REQUEST_COLUMNS, request_rows(told), left_out(SHOWN, len(told.late_requests)))
    rows: list[list[str | Cell]] = []
    for one, texts in zip(told.late, step_rows(told), strict=False):
        call = one.inside.calls[0].row if one.inside.calls else -1
        rows.append([*texts[:-1], Cell(texts[-1], None, call)])
    steps = table("Late steps", STEP_COLUMNS, rows, left_out(SHOWN, told.late_steps))
    stacks = [
        [str(one.step), str(stack.thread), duration(stack.blocked_ns), " < ".join(stack.frames[:4])]
        for one in told.late[:SHOWN]
        for stack in one.inside.stacks[:1]
    ]
    named = table(
        "Python stacks taken in late steps", ("Step", "Thread", "Blocked for", "Stack, innermost first"), stacks
    )
    return [phases, requests if told.late_requests else None, steps if told.late else None, named if stacks else None]


def _distribution(told: Requests) -> Chart | None:
    """How long the steps of each phase took."""
    by_phase: dict[str, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    for one in told.phases:
        by_phase.setdefault(one.phase.name.lower(), []).append(one.took_ns)
    series = {}
    for phase, parts in by_phase.items():
        took = np.log10(np.maximum(np.concatenate(parts), 1) / 1e6)
        counts, edges = np.histogram(took, bins=_BINS)
        series[phase] = {
            "x": [float(x) for x in (edges[1:] + edges[:-1]) / 2],
            "y": [float(y) for y in counts / max(counts.sum(), 1) * 100],
            "style": "line",
        }
    if not series:
        return None
    return charts.plain(
        "steps-by-phase",
        {
            "title": "How long steps took, by phase",
            "x_label": "ms: 10 to the power of x",
            "y_label": "share of the phase's steps, %",
            "series": series,
        },
    )
