"""Several inputs on one page: a table of all of them, then each under its own name, judged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvprobe.recordings.merge import NO_CLOCK, ONE_BY_ONE
from kvprobe.reporting import recorded
from kvprobe.reporting.headline import sure_text
from kvprobe.reporting.units import NONE, count_text, duration, percent
from kvprobe.reporting.views import Cell, Section, TableView, table

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy

__all__ = ["Input", "sections", "under"]

SHOWN = ("overview", "distributions", "transfers", "streams")  # of each input
MOST = 8  # inputs with a section of their own, those that lost most; `kvprobe reduce` compares more
UNFOLDED = 3  # more of them are opened one by one


@dataclass(frozen=True)
class Input:
    """One input as it was read and judged by itself; `queues` is worked out where it is not given."""

    name: str
    recording: Recording
    findings: Examination
    queues: Occupancy | None = None

    @property
    def lost_ns(self) -> int:
        """Time that its findings account for."""
        return sum(one.lost_ns for one in self.findings if one.confidence != "cannot tell" and one.severity != "info")


def under(section: Section, prefix: str, title: str) -> Section:
    """A section under another name; its charts zoom with each other, and not with those of the same name elsewhere."""
    made = []
    for chart in section.charts:
        spec = dict(chart.spec)
        if "group" in spec:
            spec["group"] = f"{prefix}-{spec['group']}" if spec["group"] else ""
        made.append(replace(chart, id=f"{prefix}-{chart.id}", spec=spec))
    return Section(f"{prefix}-{section.id}", title, section.lead, made, section.tables)


def sections(inputs: Sequence[Input], notes: Sequence[str] = ()) -> tuple[Section, list[Section]]:
    """The table of all inputs, and a section for each of the MOST that lost most, in the order given.

    `notes` are those of the recording that was made of all: whether its times can be compared is said with the table.
    """
    costly = sorted(range(len(inputs)), key=lambda i: -inputs[i].lost_ns)[:MOST]
    rows, own = [], []
    for i, one in enumerate(inputs):
        prefix = f"input-{i + 1}"
        found = recorded.submissions(one.recording)
        shown = i in costly
        view = recorded.view(one.recording, one.findings, one.queues) if shown else None
        judged = view.verdict if view is not None else recorded.judged(one.recording, one.findings)
        span_ns = found.span[1] - found.span[0]
        rows.append(
            [
                Cell(one.name, to=prefix if shown else ""),
                judged.headline,
                (duration(one.lost_ns) if one.lost_ns else NONE, one.lost_ns),
                (count_text(found.calls), found.calls),
                (duration(found.host_ns), found.host_ns),
                (duration(span_ns), span_ns),
            ]
        )
        if view is not None:
            own.append(_own(prefix, one, view, folded=len(inputs) > UNFOLDED))
    left = len(inputs) - len(own)
    lead = "Here each input is judged by itself; the verdict and findings above are of all inputs together."
    if left:
        lead += (
            f" The {len(own)} that lost most have a section of their own; kvprobe reduce compares all {len(inputs)}."
        )
    told = [note for note in notes if note in (NO_CLOCK, ONE_BY_ONE)]
    lead += "".join(f" {note[:1].upper()}{note[1:]}." for note in told)
    columns = ["Input", "By itself", "Time lost", "Submissions", "Host time in them", "Recorded"]
    return Section("inputs", "Inputs", lead, [], [table("Inputs", columns, rows)]), own


def _own(prefix: str, one: Input, view: recorded.View, folded: bool) -> Section:
    parts = [under(section, prefix, section.title) for section in view.sections if section.id in SHOWN]
    made = Section(
        prefix,
        one.name,
        f"{view.verdict.headline} {view.verdict.detail}".strip(),
        [chart for part in parts for chart in part.charts],
        [found for found in (_findings(one), *(t for part in parts for t in part.tables)) if found.rows],
    )
    made.folded = folded
    return made


def _findings(one: Input) -> TableView:
    rows: list[list[Any]] = []
    for finding in one.findings:
        first = finding.cure[0] if finding.cure else None
        rows.append(
            [
                finding.title,
                sure_text(finding),
                (duration(finding.lost_ns) if finding.lost_ns else NONE, finding.lost_ns),
                (percent(finding.share) if finding.of_ns else NONE, finding.share),
                first.text + (f", at {first.at}" if first.at else "") if first else NONE,
            ]
        )
    columns = ["Finding", "How sure", "Time lost", "Share", "First change"]
    return table(f"Findings in {one.name}", columns, rows)
