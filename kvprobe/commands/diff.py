"""`kvprobe diff`: compares two recordings, finding by finding and call by call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvprobe.commands._paths import GivenPath, refuse_input
from kvprobe.commands._reading import WindowOptions, window_options

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.verdict import Verdict
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.alike import LineChange
    from kvprobe.reporting.compare import CallChange, FindingChange
    from kvprobe.reporting.conclusion import Conclusion

__all__ = ["command"]


@click.command(short_help="Compare two recordings, finding by finding.")
@click.argument("before", type=GivenPath())
@click.argument("after", type=GivenPath())
@click.option("-o", "--output", type=GivenPath(), help="Write before and after as one HTML page.")
@click.option("-f", "--force", is_flag=True, help="Overwrite a file that is not a report of kvprobe.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@window_options
def command(before: Path, after: Path, output: Path | None, force: bool, as_json: bool, window: WindowOptions) -> int:
    """Say whether AFTER is better than BEFORE, and what changed: findings gone or new, calls slower or faster.

    Changes of at least 1% of the recorded time count: in what findings lost, and in what a typical submission costs, of
    the calls that both recordings hold.

    Time lost is compared as a share of the recorded time, because recordings differ in length. A call is called slower
    or faster when the 95% interval of the ratio does not include 1 and the change is over 5%; the interval is a block
    bootstrap.

    A recording that is cut off, empty or says too little proves no finding gone: what it does not show is undecided,
    and the exit code is 1. --from, --to and --range compare a part of each.
    """
    from kvprobe.reporting import check_writable

    if output is not None:
        check_writable(output, force=force)
        refuse_input(output, (before, after))
    names = _names(before, after)
    found = _compare(before, after, names, window, quiet=as_json)
    if output is not None:
        from kvprobe.reporting import compared, write_report

        write_report(
            None,
            output,
            title=" and ".join(names),
            extra=compared.sections(found.changes, found.calls, found.sides, found.lines),
            lead_verdict=compared.verdict(found.conclusion, found.changes, found.calls),
        )
    if as_json:
        import json

        click.echo(json.dumps({"before": str(before), "after": str(after), **found.to_json()}))
    else:
        _print_accounts(found)
        _print(found.conclusion, found.changes, found.calls)
        if output is not None:
            click.echo(f"{output}")
    return 1 if found.conclusion.state == "undecided" else 0


@dataclass(frozen=True)
class _Comparison:
    """Two recordings side by side.

    Attributes:
        sides: name, recording and findings of each.
        lengths: ns of each one's serving window.
        verdicts: of each by itself.
        apart: in what they are not alike.
        lines: of their accounts.
        changes: of findings; `calls` of calls.
        calls: see there.
        conclusion: whether the second is better.
    """

    sides: list[tuple[str, Recording, Examination]]
    lengths: tuple[int, int]
    verdicts: list[Verdict]
    apart: list[str]
    lines: list[LineChange]
    changes: list[FindingChange]
    calls: list[CallChange]
    conclusion: Conclusion

    def to_json(self) -> dict[str, Any]:
        """All but the recordings."""
        return {
            "span_before_ns": int(self.lengths[0]),
            "span_after_ns": int(self.lengths[1]),
            "conclusion": self.conclusion.to_json(),
            "verdict_before": self.verdicts[0].to_json(),
            "verdict_after": self.verdicts[1].to_json(),
            "unlike": self.apart,
            "account": [line.to_json() for line in self.lines],
            "findings": [change.to_json() for change in self.changes],
            "calls": [change.to_json() for change in self.calls],
        }


def _compare(before: Path, after: Path, names: tuple[str, str], window: WindowOptions, quiet: bool) -> _Comparison:
    from kvprobe.commands._reading import cropped, diagnosed
    from kvprobe.diagnosis.verdict import of_recording
    from kvprobe.reporting.alike import compare_accounts, unlike
    from kvprobe.reporting.compare import compare_calls, compare_findings, submission_cost
    from kvprobe.reporting.conclusion import conclude

    one, found_before, _ = diagnosed([before], quiet=quiet, window=window)
    two, found_after, _ = diagnosed([after], quiet=quiet, window=window)
    lengths = one.window.span_ns if one.window else 0, two.window.span_ns if two.window else 0
    verdicts = [of_recording(one, found_before), of_recording(two, found_after)]
    changes = compare_findings(found_before, found_after, not verdicts[0].missing, not verdicts[1].missing)
    parts = cropped(one, window), cropped(two, window)
    missing = {name: verdict.missing[0] for name, verdict in zip(names, verdicts, strict=True) if verdict.missing}
    return _Comparison(
        sides=[(names[0], one, found_before), (names[1], two, found_after)],
        lengths=lengths,
        verdicts=verdicts,
        apart=unlike(one, two),
        lines=compare_accounts(found_before.account, found_after.account),
        changes=changes,
        calls=compare_calls(*parts),
        conclusion=conclude(*names, changes, submission_cost(*parts, lengths), missing),
    )


def _print_accounts(found: _Comparison) -> None:
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.units import percent

    for reason in found.apart:
        click.echo(plain(f"Not alike: {reason}."))
    for line in found.lines:
        shares = f"{percent(line.share_before):>6} -> {percent(line.share_after):>6}"
        click.echo(plain(f"  {shares}  {line.title}"))


def _names(before: Path, after: Path) -> tuple[str, str]:
    """The names of two recordings, and where they are called the same, their paths."""
    names = before.resolve().name, after.resolve().name
    return names if names[0] != names[1] else (str(before), str(after))


_SIGNS = {"undecided": "?", "gone": "-", "new": "+", "less": "v", "more": "^", "same": "="}


def _print(conclusion: Conclusion, changes: list[FindingChange], calls: list[CallChange]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from kvprobe.commands._reading import plain
    from kvprobe.reporting.compare import interval
    from kvprobe.reporting.units import change_text, duration, percent

    console = Console(highlight=False)
    console.print(Text(plain(conclusion.sentence), "bold"))
    if conclusion.detail:
        console.print(Text(plain(conclusion.detail), "dim"))
    console.print()
    styles = {"gone": "green", "less": "green", "faster": "green", "new": "red", "more": "red", "slower": "red"}
    if not changes:
        console.print("Findings: nothing found in either recording.")
    else:
        console.print(Text("Findings, and the time that each lost", style="italic"))
        for change in changes:
            lost = [
                f"{duration(ns)} ({percent(share)})" if ns else "nothing"
                for ns, share in (
                    (change.lost_before_ns, change.share_before),
                    (change.lost_after_ns, change.share_after),
                )
            ]
            word = f"{_SIGNS[change.what]} {change.what}"
            said = Text(f"{word:13}", styles.get(change.what, ""))
            console.print(said.append(f"{change.cause}: {lost[0]} -> {lost[1]}", "default"))
            console.print(Padding(Text(plain(change.title), "dim"), (0, 0, 0, 13)))
    if not calls:
        console.print("Calls: no call occurs often enough in both recordings to be compared.")
        return
    grid = Table(title="Host time of calls", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    wide = console.width >= 78
    for name in ("Call", "Before", "After", "Change", *(["95% interval"] if wide else []), ""):
        grid.add_column(
            name, justify="left" if name in ("Call", "") else "right", no_wrap=name != "Call", overflow="fold"
        )
    for one in calls:
        grid.add_row(Text(plain(one.name)), f"{one.calls_before:,}", f"{one.calls_after:,}")
        for figure, moved in (("median", one.median), ("p99", one.p99)):
            verdict = Text(moved.verdict, style=styles.get(moved.verdict, "dim"))
            times = duration(moved.before), duration(moved.after)
            grid.add_row(f"  {figure}", *times, change_text(moved.ratio), *([interval(moved)] if wide else []), verdict)
    console.print(grid)
