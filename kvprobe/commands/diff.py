"""`kvprobe diff`: compares two recordings, finding by finding and call by call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvprobe.commands._paths import GivenPath, refuse_input
from kvprobe.commands._reading import WindowOptions, window_options
from kvprobe.output import DIFF

if TYPE_CHECKING:
    from kvprobe.reporting.compare import CallChange, FindingChange
    from kvprobe.reporting.comparison import SideBySide
    from kvprobe.reporting.conclusion import Conclusion

__all__ = ["command", "side_by_side"]


@click.command(short_help="Compare two recordings, finding by finding.")
@click.argument("before", type=GivenPath())
@click.argument("after", type=GivenPath())
@click.option("-o", "--output", type=GivenPath(), help="Also write the comparison as one HTML page.")
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Overwrite the output file whatever it is. Without -f, kvprobe overwrites only a report of its own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@window_options
def command(before: Path, after: Path, output: Path | None, force: bool, as_json: bool, window: WindowOptions) -> int:
    """Say whether AFTER is better than BEFORE, and what changed: findings gone or new, calls slower or faster.

    kvprobe compares what each finding cost. For the calls that both recordings have, it compares how long a typical
    submission takes. Recordings differ in length, so the cost of a finding is a share: of the serving window if the
    recording shows the GPU, else of the time of the threads. A finding counts for "better" or "worse" only if its share
    changed by at least one percentage point, for example from 4% to 5%. The time in brackets is the time that threads,
    copies or the GPU lost. This time may be longer than the share says, because a thread can lose time while the GPU
    computes.

    The column "Change" is about the time of a call. "2.00x lower" means that the time is half of what it was: the call
    became faster. "2.00x higher" means that the time doubled: the call became slower. A call counts as faster or slower
    if its time changed by more than 5% and the 95% interval of the change (by block bootstrap) does not include 1.
    "unchanged" means that the time differs little. "unsure" means that the data do not tell whether the call became
    faster or slower.

    The column "95% interval" says how exact the change is. Beside "2.00x lower", "1.50x to 2.50x" means that the time
    may be anything from 1.50 to 2.50 times lower. Beside "unchanged", "-5% to +2%" means that the time may be anything
    from 5% shorter to 2% longer. Beside "unsure", the interval contains factors above and below 1: the time may have
    become shorter or longer.

    A recording that is cut off, empty or does not show enough cannot prove that a finding is gone. The result is then
    undecided, and the exit code is 1. --from, --to and --range compare a part of each recording.
    """
    from kvprobe.reporting import check_writable

    if output is not None:
        check_writable(output, force=force)
        refuse_input(output, (before, after))
    found = side_by_side(before, after, window, quiet=as_json)
    if output is not None:
        from kvprobe.reporting import compared, write_report

        write_report(
            None,
            output,
            title=" and ".join(_names(before, after)),
            extra=compared.sections(found.changes, found.calls, found.sides, found.lines),
            lead_verdict=compared.verdict(found.conclusion, found.changes, found.calls),
        )
    if as_json:
        DIFF.print(found.to_json(str(before), str(after)))
    else:
        _print_accounts(found)
        _print(found.conclusion, found.changes, found.calls, apart=bool(found.apart))
        if output is not None:
            click.echo(f"{output}")
    return 1 if found.conclusion.state == "undecided" else 0


def side_by_side(before: Path, after: Path, window: WindowOptions, *, quiet: bool) -> SideBySide:
    """Two recordings, judged and compared."""
    from kvprobe.commands._reading import cropped, diagnosed
    from kvprobe.reporting.comparison import compare_recordings

    one, found_before, _ = diagnosed([before], quiet=quiet, window=window)
    two, found_after, _ = diagnosed([after], quiet=quiet, window=window)
    parts = cropped(one, window), cropped(two, window)
    names = _names(before, after)
    return compare_recordings((names[0], one, found_before), (names[1], two, found_after), parts)


def _print_accounts(found: SideBySide) -> None:
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.units import percent

    for reason in found.apart:
        click.echo(plain(f"Careful: {reason}."))
    if found.lines and any(sum(gpu.seen for gpu in one.account.gpus) > 1 for _, _, one in found.sides):
        click.echo("All GPUs together, as shares of their serving windows:")
    for line in found.lines:
        shares = f"{percent(line.share_before):>6} -> {percent(line.share_after):>6}"
        click.echo(plain(f"  {shares}  {line.title}"))


def _names(before: Path, after: Path) -> tuple[str, str]:
    """The names of two recordings, and where they are called the same, their paths."""
    names = before.resolve().name, after.resolve().name
    return names if names[0] != names[1] else (str(before), str(after))


_SIGNS = {"undecided": "?", "gone": "-", "new": "+", "less": "v", "more": "^", "same": "="}


def _print(conclusion: Conclusion, changes: list[FindingChange], calls: list[CallChange], *, apart: bool) -> None:
    """The conclusion, findings and calls; `apart`: the recordings should not be compared, as was said above."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from kvprobe.commands._reading import plain
    from kvprobe.commands._tables import print_table, width_limit
    from kvprobe.reporting.compare import interval
    from kvprobe.reporting.compared import costs_text
    from kvprobe.reporting.units import change_text, duration

    console = Console(highlight=False)
    reservation = "As far as these recordings can be compared: " if apart else ""
    console.print(Text(plain(reservation + conclusion.sentence), "bold"))
    if conclusion.detail:
        console.print(Text(plain(conclusion.detail), "dim"))
    console.print()
    styles = {"gone": "green", "less": "green", "faster": "green", "new": "red", "more": "red", "slower": "red"}
    if not changes:
        console.print("Findings: none in either recording.")
    else:
        title = (
            "Findings: what each cost before -> after, as a share of the serving window (in brackets: the time that "
            "threads, copies or the GPU lost)"
        )
        console.print(Text(title, style="italic"))
        for change in changes:
            lost = costs_text(change)
            word = f"{_SIGNS[change.what]} {change.what}"
            said = Text(f"{word:13}", styles.get(change.what, ""))
            console.print(said.append(f"{change.cause}: {lost[0]} -> {lost[1]}", "default"))
            console.print(Padding(Text(plain(change.title), "dim"), (0, 0, 0, 13)))
    if not calls:
        console.print("Calls: no call is made often enough in both recordings to be compared.")
        return
    grid = Table(
        title="Time inside each call, on the host",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    wide = width_limit(console) >= 78
    moved_much = any({one.median.verdict, one.p99.verdict} & {"faster", "slower"} for one in calls)
    names = ("Call", "Before", "After", "Change", *(["95% interval"] if wide else []), *(["Verdict"] * moved_much))
    for name in names:
        grid.add_column(name, justify="left" if name in ("Call", "Verdict") else "right")
    for one in calls:
        grid.add_row(Text(plain(one.name)), f"{one.calls_before:,}", f"{one.calls_after:,}")
        for figure, moved in (("median", one.median), ("p99", one.p99)):
            times = duration(moved.before), duration(moved.after)
            moved_by = "unchanged" if moved.verdict == "same" else change_text(moved.ratio)
            sure, verdict = interval(moved), Text(moved.verdict, style=styles.get(moved.verdict, "dim"))
            if moved.verdict == "unsure":
                moved_by = "unsure"
            shown = verdict if moved.verdict in ("faster", "slower") else Text("")
            grid.add_row(f"  {figure}", *times, moved_by, *([sure] if wide else []), *([shown] * moved_much))
    print_table(console, grid, wrapped=("Call",))
