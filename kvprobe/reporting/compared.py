"""Before and after as a page: what changed on top, then each recording's charts under its own name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.reporting import charts, recorded
from kvprobe.reporting.alike import LineChange, account_table
from kvprobe.reporting.compare import VERDICTS, CallChange, FindingChange, Shift, interval
from kvprobe.reporting.headline import Fact, PageHead
from kvprobe.reporting.inputs import under
from kvprobe.reporting.units import NONE, change_text, duration, percent
from kvprobe.reporting.views import Section, table

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.conclusion import Conclusion

__all__ = ["sections", "verdict"]

WHAT = {
    "undecided": "undecided",
    "gone": "gone",
    "new": "new",
    "less": "less than before",
    "more": "more than before",
    "same": "as before",
}
SHOWN = ("overview", "distributions", "transfers", "streams")  # of each recording


def sections(
    changes: Sequence[FindingChange],
    calls: Sequence[CallChange],
    sides: Sequence[tuple[str, Recording, Examination]],
    lines: list[LineChange],
) -> list[Section]:
    """What changed, then the charts of each side; `sides` are (name, recording, findings), before first."""
    out = [
        charts.section(
            "changes",
            "What changed",
            "Recordings differ in length, so what a finding cost is compared as a share of the serving window. If the "
            "recording shows the GPU, this is the share in which the GPU waited. The time lost is that of threads or "
            "copies. A call counts as faster or slower if it changed by more than 5% and the 95% interval of the "
            "change does not include 1.",
            [],
            [account_table(lines), _findings(changes), _calls(calls)],
        )
    ]
    for which, (name, recording, findings) in zip(("before", "after"), sides, strict=True):
        shown = recorded.view(recording, findings)
        title = f"{which.capitalize()}, {name}"
        out += [under(one, which, f"{title}: {one.title}") for one in shown.sections if one.id in SHOWN]
    return out


def _findings(changes: Sequence[FindingChange]) -> Any:
    rows = [
        [
            WHAT[one.what],
            one.title,
            *((text, share) for text, share in zip(costs_text(one), (one.share_before, one.share_after), strict=True)),
        ]
        for one in changes
    ]
    return table("Findings", ["Now", "Finding", "Cost before", "Cost after"], rows)


def costs_text(change: FindingChange) -> tuple[str, str]:
    """What a finding cost before and after."""
    return (
        cost_text(change.lost_before_ns, change.share_before, change.below_limit == "before"),
        cost_text(change.lost_after_ns, change.share_after, change.below_limit == "after"),
    )


def cost_text(ns: int, share: float, below: bool = False) -> str:
    """What a finding cost: the share of the window, and beside it the time that its threads, copies or GPU lost.

    `below`: it was too little for a finding.
    """
    if not ns:
        return "nothing"
    if not share:
        return f"nothing ({duration(ns)} lost beside the GPU's work)"
    return f"{percent(share)} ({duration(ns)} lost{', below the limit of a finding' if below else ''})"


def _calls(calls: Sequence[CallChange]) -> Any:
    rows = []
    for one in calls:
        for figure, moved in (("median", one.median), ("p99", one.p99)):
            rows.append(
                [
                    one.name,
                    figure,
                    (duration(moved.before), moved.before),
                    (duration(moved.after), moved.after),
                    (_change(moved), moved.ratio),
                    interval(moved),
                    VERDICTS[moved.verdict],
                ]
            )
    columns = ["Call", "Figure", "Before", "After", "Change", "95% interval of the change", "Verdict"]
    return table("Time inside each call, on the host", columns, rows)


def _change(moved: Shift) -> str:
    if moved.verdict == "same":
        return "unchanged"
    if moved.verdict == "unsure":
        return NONE
    return change_text(moved.ratio) if moved.ratio else NONE


def verdict(conclusion: Conclusion, changes: Sequence[FindingChange], calls: Sequence[CallChange]) -> PageHead:
    """The conclusion, and how many findings and calls moved."""
    by = {what: [one for one in changes if one.what == what] for what in WHAT}
    facts = [
        Fact(WHAT[what].capitalize(), str(len(by[what])), by[what][0].title)
        for what in ("gone", "less", "same", "more", "new", "undecided")
        if by[what]
    ]
    for said, word in (("Calls slower", "slower"), ("Calls faster", "faster")):
        some = [one for one in calls if word in (one.median.verdict, one.p99.verdict)]
        if some:
            facts.append(Fact(said, str(len(some)), some[0].name))
    state = "unknown" if conclusion.state == "undecided" else conclusion.state
    beside = conclusion.beside.removeprefix("and ").removeprefix("though ")
    below = [f"{beside[:1].upper()}{beside[1:]}." if beside else "", conclusion.detail]
    return PageHead(state, conclusion.headline, " ".join(filter(None, below)), facts)
