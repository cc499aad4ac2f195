"""What belongs to the demo alone: its verdict, and the section that tells its phases apart in its recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvprobe.diagnosis import CPU_STARVED
from kvprobe.diagnosis.finding import singular
from kvprobe.recordings.engine import PHASES
from kvprobe.recordings.model import CallKind, Recording
from kvprobe.reporting import charts, series
from kvprobe.reporting.charts import Mark, Points
from kvprobe.reporting.headline import Fact, PageHead, cure_parts, with_units
from kvprobe.reporting.units import (
    ABOVE_LINK,
    count_text,
    duration,
    link_share,
    moved_text,
    rate,
    ratio,
)
from kvprobe.reporting.views import Chart, Section, TableView, table

if TYPE_CHECKING:
    from kvprobe.diagnosis.finding import Finding

__all__ = ["Cost", "costs", "load_costs", "sections", "verdict"]

Array = npt.NDArray[Any]


class Cost(NamedTuple):
    """What copies cost the model's thread in one phase: one entry a call or load, int64 and float64 nanoseconds."""

    time_ns: Array
    ns: Array


def _phases(recording: Recording) -> dict[str, tuple[int, int]]:
    """Phase -> its first and last instant."""
    rows = recording.ranges
    return {
        recording.text(int(name)): (int(start), int(end))
        for domain, name, start, end in zip(rows["domain"], rows["name"], rows["start_ns"], rows["end_ns"], strict=True)
        if recording.text(int(domain)) == PHASES
    }


def _switched(recording: Recording, span: tuple[int, int]) -> int:
    """When auto last switched in a phase; 0: never."""
    times = recording.decisions["time_ns"]
    inside = times[(times >= span[0]) & (times <= span[1])]
    return int(inside.max()) if len(inside) else 0


def costs(recording: Recording) -> dict[str, Cost]:
    """By phase: the submitting calls of the model's thread; after a switch, each load's time by its copies.

    A phase with a switch is two: its name is what lies after it, and "before the switch" what lies before.
    """
    calls, loads = recording.calls, recording.server_calls
    copying = calls["kind"] == CallKind.COPY
    if loads.rows:
        copying &= calls["thread"] == loads["thread"][0]
    share = (loads["end_ns"] - loads["start_ns"]) / np.maximum(loads["count"], 1)
    out: dict[str, Cost] = {}
    for name, span in _phases(recording).items():
        since = _switched(recording, span)
        end = since or span[1]
        rows = np.flatnonzero(copying & (calls["start_ns"] >= span[0]) & (calls["start_ns"] < end))
        before = Cost(calls["start_ns"][rows], calls["end_ns"][rows] - calls["start_ns"][rows])
        if since:
            after = (loads["start_ns"] >= since) & (loads["start_ns"] <= span[1])
            out["before the switch"] = before
            out[name] = Cost(loads["start_ns"][after], share[after])
        else:
            out[name] = before
    return out


def load_costs(recording: Recording) -> dict[str, Cost]:
    """By phase: the time of each `load()` divided by its copies; of a phase with a switch, after it.

    It is the same measure under every policy, so phases are compared by it: who submits does not matter.
    """
    loads = recording.server_calls
    share = (loads["end_ns"] - loads["start_ns"]) / np.maximum(loads["count"], 1)
    out: dict[str, Cost] = {}
    for name, span in _phases(recording).items():
        rows = (loads["start_ns"] >= max(span[0], _switched(recording, span))) & (loads["start_ns"] <= span[1])
        out[name] = Cost(loads["start_ns"][rows], share[rows])
    return out


def sections(recording: Recording, outcome: Mapping[str, Any]) -> list[Section]:
    """The demo's own section: before, the switch, after."""
    spans = _phases(recording)
    if not {"shared", "auto"} <= set(spans):
        return []
    cost = costs(recording)
    return [
        charts.section(
            "demo",
            "Before and after",
            "How much time of the model's thread a copy took. The two phases are compared by the time of each load() "
            "divided by its number of copies. Both phases serve the same number of requests.",
            [
                _cost_chart(recording, outcome, spans, cost),
                _histogram(outcome, load_costs(recording)),
                _split(recording, spans),
            ],
            [_table(outcome)],
        )
    ]


def _cost_chart(
    recording: Recording, outcome: Mapping[str, Any], spans: Mapping[str, tuple[int, int]], cost: Mapping[str, Cost]
) -> Chart:
    start, end = min(a for a, _ in spans.values()), max(b for _, b in spans.values())
    before = [one for name, one in cost.items() if name != "auto" or not outcome["switches"]]
    lines = [
        Points(
            "submitting call",
            np.concatenate([one.time_ns for one in before]),
            np.concatenate([one.ns for one in before]),
        )
    ]
    if outcome["switches"] and len(cost["auto"].ns):
        lines.append(Points("load() time per copy, after the switch", *cost["auto"]))
    decisions = recording.decisions
    whats = [recording.text(int(what)) for what in decisions["what"]]
    marks = [Mark(float(t), what) for t, what in zip(decisions["time_ns"], whats, strict=True)]
    shared, auto = outcome["shared"], outcome["auto"]
    words = [
        f"On the shared stream a load() took {duration(shared['load_p50_ns'])} per copy at the median, "
        f"{duration(shared['load_p99_ns'])} at p99."
    ]
    for time_ns, one in zip(decisions["time_ns"][:2].tolist(), outcome["switch_log"][:2], strict=False):
        because = f" because {with_units(one['reason'])}." if one["reason"] else "."
        words.append(f"At {duration(time_ns - start)} kvprobe switched from {one['before']} to {one['after']}{because}")
    if outcome["switches"]:
        words.append(f"After the switch: {duration(auto['load_p50_ns'])} and {duration(auto['load_p99_ns'])}.")
    return charts.timeline(
        ("cost", "What a copy cost the model's thread", " ".join(words)),
        lines,
        (float(start), float(end)),
        charts.Axis("host time a copy, log scale", "a copy, log", log=True),
        charts.Besides(
            marks=marks,
            spans=[(float(a), float(b), f"{name} phase", False) for name, (a, b) in spans.items()],
            levels=[(outcome["baseline_submit_ns"], f"baseline {duration(outcome['baseline_submit_ns'])}")],
        ),
        group="",
        height=300,
        how=charts.how_drawn(lines),
    )


def _histogram(outcome: Mapping[str, Any], cost: Mapping[str, Cost]) -> Chart | None:
    after = f"auto, after the switch to {outcome['switch_log'][-1]['after']}" if outcome["switches"] else "auto"
    parts = {"shared": cost["shared"].ns, after: cost["auto"].ns}
    parts = {name: values for name, values in parts.items() if len(values)}
    if not parts:
        return None
    words = []
    for name, values in parts.items():
        half, high, top = charts.quantiles(values, 0.5, 0.99, 1.0)
        words.append(
            f"{name[:1].upper()}{name[1:]}: {len(values):,} loads, median "
            f"{duration(half)}, p99 {duration(high)}, longest {duration(top)}."
        )
    return charts.histogram_chart(
        "cost-histogram",
        "How the load() time per copy is distributed",
        " ".join(words),
        {name: series.histogram(values) for name, values in parts.items()},
        marks=[(outcome["baseline_submit_ns"], "baseline")],
    )


_SPENT = dict(
    zip(
        charts.SPLIT,
        ("preparing it", "submitting it", "waiting in the queue", "copying", "until the host noticed its end"),
        strict=True,
    )
)


def _split(recording: Recording, spans: Mapping[str, tuple[int, int]]) -> Chart | None:
    """Where a copy's time went, phase by phase: sums over the transfers of a phase by the number of their copies."""
    rows = recording.transfers
    split: dict[str, Mapping[str, float]] = {}
    for name in ("shared", "auto"):
        inside = (rows["start_ns"] >= spans[name][0]) & (rows["start_ns"] <= spans[name][1])
        copies = int(rows["count"][inside].sum())
        if copies:
            split[f"{name}, {count_text(copies)} copies"] = {
                part: float(np.maximum(rows[column][inside], 0).sum()) / copies for part, column in charts.SPLIT_OF
            }
    if not split:
        return None
    words = [
        f"{name}: {duration(sum(parts.values()))} per copy, most of it "
        f"{_SPENT[max(parts, key=lambda part, parts=parts: parts[part])]}."  # type: ignore[misc]
        for name, parts in split.items()
    ]
    return charts.split_chart(
        "cost-split",
        "Where the time of a copy went",
        " ".join(words),
        split,
        "The times of a phase's transfers, divided by their copies. Build, submit and poll delay are host time; queue "
        "wait and copy come from events on the stream.",
    )


ROWS = (
    ("load() time per copy, median", "load_p50_ns", duration),
    ("load() time per copy, p99", "load_p99_ns", duration),
    ("Longest load() of the model's thread", "longest_call_ns", duration),
    ("Model step, median", "step_p50_ns", duration),
    ("Model step, p99", "step_p99_ns", duration),
    ("Copied at", "bytes_per_s", rate),
    ("Requests served", "requests", count_text),
    ("Requests a second", "requests_per_s", count_text),
    ("Copies", "copies", count_text),
    ("Moved", "bytes", moved_text),
)


def _table(outcome: Mapping[str, Any]) -> TableView:
    rows: list[list[Any]] = []
    for label, key, text in ROWS:
        before, after = outcome["shared"].get(key), outcome["auto"].get(key)
        rows.append([label, (text(before), before), (text(after), after), ratio(before, after)])
    said = (
        "Under auto, the times are from after its last switch. The requests and the bytes are those of the whole phase."
    )
    return table("The phases in numbers", ["Figure", "shared", "auto", "Change"], rows, said)


def verdict(outcome: Mapping[str, Any], findings: Sequence[Finding] = ()) -> PageHead:
    """What was seen in the shared phase, what kvprobe did, what that gave back, and whether the CPUs were busy."""
    head = _played(outcome)
    for one in findings:
        if one.cause == CPU_STARVED and one.severity != "info" and not one.abstains:
            said = f"{one.title[:1].lower()}{one.title[1:].rstrip('.')}"
            busy = f"Other work kept the CPUs busy and made both phases slower: {said}."
            head.detail = f"{head.detail} {busy}".strip()
    return head


def _played(outcome: Mapping[str, Any]) -> PageHead:
    shared, auto = outcome["shared"], outcome["auto"]
    p99, base = shared["submit_p99_ns"], outcome["baseline_submit_ns"]
    facts = [
        Fact(label, duration(auto[key]), ratio(shared[key], auto[key]), duration(shared[key]))
        for key, label in (
            ("load_p99_ns", "load() time per copy, p99"),
            ("longest_call_ns", "Longest load()"),
            ("step_p99_ns", "Model step, p99"),
        )
    ]
    if outcome["onset_ms"] is not None:
        calls = singular(f"after {count_text(outcome['blocked_calls_before_switch'])} blocked calls")
        facts.append(Fact("Noticed within", duration(outcome["onset_ms"] * 1e6), calls))
    facts.append(Fact("Launch queue", f"{outcome['queue_depth']:,} deep", f"{outcome['channels']} hardware channels"))
    speed, link = auto["bytes_per_s"], outcome["link_bytes_per_s"]
    of_link = f"{link_share(speed / link)} of the link's {rate(link)}"
    if speed > ABOVE_LINK * link:
        of_link = f"more than the {rate(link)} of one large copy: the link carries more than that showed"
    facts.append(Fact("Copied at", rate(speed), of_link))
    if outcome["redundant_bytes_avoided"]:
        facts.append(Fact("Redundant loads avoided", moved_text(outcome["redundant_bytes_avoided"]), outcome["dedup"]))
    if outcome["bytes_verified"]:
        facts.append(
            Fact("Verified", moved_text(outcome["bytes_verified"]), "compared at source and destination, all equal")
        )
    if not outcome["switches"] and not (p99 and base and p99 > 3 * base):
        headline = f"No saturation: submitting a copy took {duration(p99)} at p99; usually it takes {duration(base)}."
        return PageHead("ok" if p99 else "unknown", headline, "", facts)
    times = f", {p99 / base:,.0f} times the usual {duration(base)}" if base else ""
    why = (
        f"The launch queue of the shared copy stream was full at {outcome['queue_depth']:,} submissions, so each "
        f"further submission waited in its thread: a submission took {duration(p99)} at p99{times}. The findings below "
        "are about the whole recording, and so mainly about the time before the switch."
    )
    if not outcome["switches"]:
        return PageHead(
            "critical",
            f"The launch queue was full: submitting one copy took {duration(p99)} instead of {duration(base)}.",
            why,
            facts,
            [cure_parts("Let kvprobe choose the streams: policy `auto`, or `pooled` from the start.")],
        )
    first = outcome["switch_log"][0]
    headline = (
        f"The launch queue filled, and a load cost the model's thread {duration(shared['load_p99_ns'])} per copy at "
        f"p99. kvprobe switched to {first['after']} streams by itself: now it costs {duration(auto['load_p99_ns'])}."
    )
    done = [
        cure_parts(f"{one['before']} → {one['after']}" + (f": {with_units(one['reason'])}" if one["reason"] else ""))
        for one in outcome["switch_log"][:4]
    ]
    return PageHead("cured", headline, why, facts, done, action="What kvprobe changed")
