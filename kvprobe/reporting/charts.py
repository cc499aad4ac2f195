"""Charts of a recording as data: binned series with the words and the table that say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.diagnosis.finding import singular
from kvprobe.reporting import series
from kvprobe.reporting.units import count_text, duration, moved_text, number_text, percent, rate
from kvprobe.reporting.views import Chart, Section, TableView, numbers, table

__all__ = [
    "Axis",
    "Besides",
    "Mark",
    "Points",
    "heat_chart",
    "histogram_chart",
    "how_drawn",
    "quantiles",
    "split_chart",
    "timeline",
]

Array = npt.NDArray[Any]

BINS = 2400  # of a timeline: five to the pixel column of a phone, two to the column of a wide screen
HOW_BINNED = (
    "Each step of the line is the longest call in its slice of time. The shaded area reaches down to the shortest "
    "call. Nothing is averaged."
)
TABLE_ROWS = 24
_TEXT = {"ns": duration, "bytes": moved_text, "rate": rate, "share": percent}
EXACT = 1200  # up to here every value is drawn as it is


@dataclass(frozen=True)
class Mark:
    """A moment worth a line across the chart."""

    time_ns: float
    label: str


@dataclass(frozen=True)
class Points:
    """Values at times, one series of a timeline; `steps` says that a value holds until the next."""

    name: str
    time_ns: Array
    value: Array
    steps: bool = False


def how_drawn(lines: Sequence[Points]) -> str:
    """How the calls of a timeline are drawn: those of a long line are binned."""
    return HOW_BINNED if any(len(one.time_ns) > EXACT for one in lines) else "Every call is drawn by itself."


def quantiles(values: Array, *at: float) -> list[float]:
    """Quantiles of `values` without interpolation (a value that occurred); NaN where there are none."""
    if not len(values):
        return [float("nan")] * len(at)
    last = len(values) - 1
    ranks = [min(last, int(np.ceil(q * len(values))) - 1 if q > 0 else 0) for q in at]
    part = np.partition(values, sorted(set(ranks)))
    return [float(part[rank]) for rank in ranks]


def _binned(one: Points, style: int, start: float, end: float, bins: int, zero: float) -> dict[str, Any]:
    make = series.bin_step if one.steps else series.bin_max
    found = make(one.time_ns, one.value, bins, start, end)
    drawn: dict[str, Any] = {
        "name": one.name,
        "style": style,
        "t0": start - zero,
        "dt": round(found.width_ns, 3),
        "hi": numbers(found.high),
    }
    if np.any(found.low != found.high):
        drawn["lo"] = numbers(found.low)
    return drawn


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a chart over time: its unit, its label, a shorter one for narrow pages, and its scale."""

    label: str
    short: str = ""
    unit: str = "ns"
    log: bool = False


@dataclass(frozen=True)
class Besides:
    """What is drawn over a timeline besides its lines.

    Attributes:
        marks: moments.
        spans: shaded (start, end, label, hot), in ns.
        levels: horizontal lines (value, label).
    """

    marks: Sequence[Mark] = ()
    spans: Sequence[tuple[float, float, str, bool]] = ()
    levels: Sequence[tuple[float, str]] = ()


def timeline(
    caption: tuple[str, str, str],
    lines: Sequence[Points],
    span: tuple[float, float],
    axis: Axis,
    besides: Besides | None = None,
    *,
    group: str = "time",
    height: int = 250,
    how: str = "",
    bins: int = BINS,
    zero: float | None = None,
) -> Chart:
    """A chart over time.

    Args:
        caption: identifier, title, summary.
        lines: what is drawn, in time.
        span: (start, end) in nanoseconds.
        axis: the vertical one.
        besides: marks, spans and levels.
        group: charts of one group are zoomed together; "": by itself.
        height: in pixels.
        how: how the figures were obtained.
        bins: to which long lines are reduced.
        zero: the instant from which the axis and the table count; None: the start of `span`.
    """
    besides = besides or Besides()
    start, end = span
    zero = start if zero is None else zero
    end = max(end, start + 1)
    drawn: list[dict[str, Any]] = []
    for style, one in enumerate(lines):
        if not one.steps and len(one.time_ns) <= EXACT:
            drawn.append(
                {"name": one.name, "style": style, "t": numbers(one.time_ns - zero, 12), "v": numbers(one.value)}
            )
        else:
            drawn.append(_binned(one, style, start, end, bins, zero))
    spec: dict[str, Any] = {
        "kind": "timeline",
        "height": height,
        "x": {"unit": "ns", "span": end - start, "from": start - zero},
        "y": {
            "unit": axis.unit,
            "scale": "log" if axis.log else "linear",
            "label": axis.label,
            "short": axis.short or axis.label,
        },
        "series": drawn,
        "marks": [{"t": mark.time_ns - zero, "label": mark.label} for mark in besides.marks],
        "spans": [{"a": a - zero, "b": b - zero, "label": text, "hot": hot} for a, b, text, hot in besides.spans],
        "levels": [{"v": value, "label": text} for value, text in besides.levels],
    }
    if group:
        spec["group"] = group
    return Chart(*caption, spec, _time_table(caption[1], lines, (start, end), axis.unit, zero), how)


def _time_table(title: str, lines: Sequence[Points], span: tuple[float, float], unit: str, zero: float) -> TableView:
    start, end = span
    text = _TEXT.get(unit, number_text)
    found = [
        (series.bin_step if one.steps else series.bin_max)(one.time_ns, one.value, TABLE_ROWS, start, end)
        for one in lines
    ]
    width = (end - start) / TABLE_ROWS
    rows = []
    for i in range(TABLE_ROWS):
        edges = [start - zero + j * width for j in (i, i + 1)]
        row: list[Any] = [(duration(edge), edge) for edge in edges]
        for one in found:
            row += [(text(one.high[i]), one.high[i]), (f"{one.count[i]:,}", float(one.count[i]))]
        rows.append(row)
    columns = ["From", "To"]
    for line in lines:
        columns += [f"{line.name}: highest" if len(lines) > 1 else "Highest", "Changes" if line.steps else "Number"]
    return table(f"{title}, in {TABLE_ROWS} equal parts of time", columns, rows)


def _ends(edges: Sequence[float], last: int) -> list[tuple[str, float]]:
    """Where each bucket between `edges` ends, as a cell; the last bucket of kvp.h, if that is `last`, has no end."""
    ends = [(duration(edge), edge) for edge in edges[1:]]
    return ends if last < series.BUCKETS - 1 else [*ends[:-1], ("or longer", math.inf)]


def histogram_chart(
    identifier: str,
    title: str,
    summary: str,
    counts: Mapping[str, Array],
    *,
    marks: Sequence[tuple[float, str]] = (),
    how: str = "",
) -> Chart:
    """Distributions of durations over the 128 buckets of kvp.h, one over the other."""
    stacked = np.array(list(counts.values()))
    used = np.flatnonzero(stacked.sum(axis=0))
    low, high = (int(used[0]), int(used[-1])) if len(used) else (10, 30)
    low, high = max(low - 2, 0), min(high + 2, series.BUCKETS - 1)
    edges = series.bucket_floor_ns(np.arange(low, high + 2)).tolist()
    ends = _ends(edges, high)
    spec = {
        "kind": "histogram",
        "unit": "ns",
        "edges": edges,
        "open": ends[-1][1] == math.inf,
        "height": 230,
        "series": [
            {"name": name, "style": i, "counts": one[low : high + 1].tolist()}
            for i, (name, one) in enumerate(counts.items())
        ],
        "marks": [{"v": value, "label": text} for value, text in marks if edges[0] <= value <= edges[-1]],
    }
    rows = [
        [(duration(edges[j - low]), edges[j - low]), ends[j - low]]
        + [(f"{int(one[j]):,}", float(one[j])) for one in counts.values()]
        for j in used.tolist()
    ]
    return Chart(identifier, title, summary, spec, table(title, ["From", "To", *counts], rows), how)


HEAT_COLUMNS = 200


def heat_chart(
    identifier: str,
    title: str,
    summary: str,
    time_ns: Array,
    dur_ns: Array,
    span: tuple[float, float],
    marks: Sequence[Mark] = (),
) -> Chart:
    """Calls counted by when and by how long: what a line of maxima cannot show of millions of calls."""
    start, end = span
    counts, width, floor = series.heat(time_ns, dur_ns, HEAT_COLUMNS, start, max(end, start + 1))
    rows = counts.shape[1]
    edges = series.bucket_floor_ns(floor + 2 * np.arange(rows + 1)).tolist()
    ends = _ends(edges, floor + 2 * rows - 1)
    column, row = np.nonzero(counts)
    cells = np.stack([column, row, counts[column, row]], axis=1).ravel().tolist()
    spec = {
        "kind": "heat",
        "unit": "ns",
        "x": {"unit": "ns", "span": max(end - start, 1)},
        "dt": round(width, 3),
        "edges": edges,
        "open": ends[-1][1] == math.inf,
        "cells": cells,
        "most": int(counts.max(initial=1)),
        "height": 230,
        "group": "time",
        "marks": [{"t": mark.time_ns - start, "label": mark.label} for mark in marks],
    }
    per_row = counts.sum(axis=0)
    listed = [
        [
            (duration(edges[i]), edges[i]),
            ends[i],
            (f"{int(per_row[i]):,}", float(per_row[i])),
            (count_text(int(np.count_nonzero(counts[:, i]))), float(np.count_nonzero(counts[:, i]))),
        ]
        for i in range(rows)
        if per_row[i]
    ]
    made = table(
        f"{title}: calls by duration", ["From", "To", "Calls", f"Columns with any (of {HEAT_COLUMNS})"], listed
    )
    return Chart(identifier, title, summary, spec, made, "")


SPLIT = ("build", "submit", "queue_wait", "copy", "poll_delay")
SPLIT_OF = tuple(zip(SPLIT, ("build_ns", "submit_ns", "wait_ns", "copy_ns", "poll_ns"), strict=True))
SPLIT_NAMES = ("build", "submit", "queue wait", "copy", "poll delay")


def split_chart(
    identifier: str, title: str, summary: str, split: Mapping[str, Mapping[str, float]], how: str = ""
) -> Chart:
    """Where the time of transfers went, one bar a phase or direction; values are sums in nanoseconds."""
    rows = [{"label": name, "values": [float(parts.get(part, 0)) for part in SPLIT]} for name, parts in split.items()]
    spec = {"kind": "bars", "unit": "ns", "parts": list(SPLIT_NAMES), "rows": rows}
    listed = []
    for name, parts in split.items():
        total = sum(float(parts.get(part, 0)) for part in SPLIT) or 1.0
        for part, shown in zip(SPLIT, SPLIT_NAMES, strict=True):
            value = float(parts.get(part, 0))
            listed.append([name, shown, (duration(value), value), (percent(value / total), value / total)])
    return Chart(identifier, title, summary, spec, table(title, ["Of", "Part", "Time", "Share"], listed), how)


def plain(identifier: str, chart: Mapping[str, Any]) -> Chart:
    """A diagnosis' own chart: named series of x and y with axis labels that end in the unit, "host time (ns)".

    An x with a unit of time counts from the beginning of the recording, as every other time on the page does.
    """
    x_unit, x_scale, x_label = _unit(chart["x_label"])
    y_unit, y_scale, y_label = _unit(chart["y_label"])
    named = {
        name: (
            np.asarray(one["x"], dtype=np.float64) * x_scale,
            np.asarray(one["y"], dtype=np.float64) * y_scale,
            one["style"],
        )
        for name, one in chart["series"].items()
    }
    named = {name: one for name, one in named.items() if len(one[0])}
    low = min((float(x.min()) for x, _, _ in named.values()), default=0.0)
    high = max((float(x.max()) for x, _, _ in named.values()), default=1.0)
    edge = (high - low) * 0.02 or 1.0
    start = max(low - edge, min(low, 0.0)) if x_unit == "ns" else low - edge
    drawn = []
    for style, (name, (x, y, kind)) in enumerate(named.items()):
        if len(x) > 3 * EXACT and kind == "points":
            keep = series.slowest(y, 3 * EXACT)
            x, y = x[keep], y[keep]
        if kind == "points" or len(x) <= 3 * EXACT:
            drawn.append(
                {
                    "name": name,
                    "style": style % 6,
                    "t": numbers(x, 12),
                    "v": numbers(y),
                    "line": kind != "points",
                }
            )
        else:
            drawn.append(_binned(Points(name, x, y, kind == "steps"), style % 6, start, high + edge, BINS, 0.0))
    positive = [y[y > 0] for _, y, _ in named.values()]
    known = np.concatenate(positive) if positive else np.zeros(0)
    log = bool(len(known)) and y_unit in ("ns", "bytes") and float(known.max()) / float(known.min()) > 50
    spec = {
        "kind": "timeline",
        "height": 220,
        "x": {
            "unit": x_unit,
            "span": high + edge - start,
            "from": start,
            "label": "" if x_unit == "ns" else x_label,
        },
        "y": {"unit": y_unit, "scale": "log" if log else "linear", "label": y_label + (", log scale" if log else "")},
        "series": drawn,
    }
    rows = []
    for name, (x, y, _) in named.items():
        shown = series.slowest(y, 40)
        rows += [[name, (_shown(x_unit, x[i]), x[i]), (_shown(y_unit, y[i]), y[i])] for i in shown.tolist()]
    words = "; ".join(
        singular(f"{name}: {len(x):,} points, highest {_shown(y_unit, y.max())}") for name, (x, y, _) in named.items()
    )
    return Chart(
        identifier,
        chart["title"],
        words + ".",
        spec,
        table(f"{chart['title']}: the highest of each series", ["Series", x_label, y_label], rows),
    )


def _unit(label: str) -> tuple[str, float, str]:
    """("ns" | "bytes" | "count", factor to it, label without the unit) of an axis label."""
    text = label.strip()
    for unit, (kind, scale) in {
        "ns": ("ns", 1.0),
        "us": ("ns", 1e3),
        "µs": ("ns", 1e3),
        "ms": ("ns", 1e6),
        "s": ("ns", 1e9),
        "bytes": ("bytes", 1.0),
    }.items():
        for ending in (f"({unit})", f"[{unit}]", f", {unit}", f" {unit}"):
            if text.endswith(ending):
                return kind, scale, text.removesuffix(ending).strip()
    return "count", 1.0, text


def _shown(unit: str, value: float) -> str:
    return _TEXT.get(unit, number_text)(value)


def section(
    identifier: str, title: str, lead: str, charts: Sequence[Chart | None] = (), tables: Sequence[TableView | None] = ()
) -> Section:
    """A section of the charts and tables that exist."""
    return Section(identifier, title, lead, [one for one in charts if one], [one for one in tables if one and one.rows])
