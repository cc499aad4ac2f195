"""`kvprobe report`: says what is wrong in recordings, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kvprobe.commands._paths import GivenPath, refuse_input
from kvprobe.commands._reading import WindowOptions, window_options
from kvprobe.output import REPORT

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.finding import Finding
    from kvprobe.diagnosis.look_next import LookNext
    from kvprobe.diagnosis.verdict import Verdict
    from kvprobe.recordings.model import Recording

__all__ = ["command"]


@click.command(short_help="Write an HTML page that says what is wrong in recordings.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option("-o", "--output", default="kvprobe.html", show_default=True, type=GivenPath())
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Overwrite the output file whatever it is. Without -f, kvprobe overwrites only a report of its own.",
)
@click.option("--interactive", is_flag=True, help="Draw the charts with plotly, which adds 4.6 MiB to the page.")
@click.option("--title", help="Title of the page; default: the recording's file name.")
@click.option("--json", "as_json", is_flag=True, help="Print where the page is and what was found as one JSON object.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar and no summary.")
@window_options
def command(
    inputs: tuple[Path, ...],
    output: Path,
    force: bool,
    interactive: bool,
    title: str | None,
    as_json: bool,
    show: bool,
    quiet: bool,
    window: WindowOptions,
) -> None:
    """Read recordings of Nsight Systems, the PyTorch profiler or kvprobe and write a page that says what is wrong.

    Several inputs are the ranks of one job, which are judged together. A folder with one file for each rank is judged
    in the same way. The page first compares the inputs, and then has a section for each input. The page is one file
    that opens without a network.
    """
    from kvprobe.reporting import check_writable, report_of_others, write_report

    check_writable(output, force=force)
    refuse_input(output, inputs)
    from kvprobe.commands._reading import diagnosed_apart, plain
    from kvprobe.diagnosis.look_next import look_next
    from kvprobe.diagnosis.verdict import of_recording
    from kvprobe.reporting.account import account_lines

    recording, findings, queues, apart = diagnosed_apart(inputs, quiet=quiet, window=window)
    verdict = of_recording(recording, findings)
    told = [one for one in findings if one.confidence != "cannot tell"]
    named = [one for one in told if one.severity != "info"]
    look = look_next(recording, findings) if verdict.state == "found" and not named else None
    others = ""
    if not quiet and click.get_current_context().get_parameter_source("output") is ParameterSource.DEFAULT:
        others = report_of_others(output, recording)  # whoever names a page knows what stands there
    path = write_report(
        recording, output, findings=findings, queues=queues, inputs=apart, title=title, interactive=interactive
    )
    if others:
        click.echo(plain(f"{path}: replaced the report of {others}; name a page with -o to keep both"), err=True)
    if as_json:
        REPORT.print(
            {
                "report": str(path),
                "bytes": path.stat().st_size,
                "verdict": verdict.to_json(),
                "account": findings.account.to_json(),
                "findings": [one.to_json() for one in findings],
                "next": look.to_json() if look else None,
            }
        )
    elif not quiet:
        for line in account_lines(findings.account):
            click.echo(plain(line))
        if verdict.state == "undecided":
            _print_undecided(verdict, findings)
        elif named:
            _print_found(recording, named, [one for one in told if one.severity == "info"])
            _print_open(findings, named[0])
        else:
            _print_unnamed(verdict, findings, look)
        _print_beside(recording)
        click.echo(f"{path}")
    if show:
        click.launch(path.resolve().as_uri())


def _print_unnamed(verdict: Verdict, findings: Examination, look: LookNext | None) -> None:
    """What is said where no finding is more than information."""
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.headline import NO_CAUSE, waited_text

    said = f"{verdict.reason}{NO_CAUSE}" if verdict.state == "found" else verdict.reason
    click.echo(plain(f"{'Warning' if verdict.state == 'found' else 'Healthy'}: {said}."))
    for one in [one for one in findings if not one.abstains and one.lost_ns][:1]:
        click.echo(plain(f"For information: {one.title}{waited_text(one)}"))
    if verdict.state == "found":
        for lack in verdict.missing[:1]:
            click.echo(plain(f"Not decided: {lack.what}"))
            click.echo(plain(f"To decide it: {lack.how}"))
    if look is not None:
        click.echo(plain(f"Look at next: {look.text}"))
        click.echo(plain(f"To narrow it down: {look.narrower}"))


def _print_found(recording: Recording, named: Sequence[Finding], small: Sequence[Finding]) -> None:
    """The most severe finding; of each other one its title, and its change where none saves as much."""
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.headline import WORDS, change_lines, terminal_lines, waited_text

    best = max(named, key=lambda one: one.predicted_saving_ns or 0)
    lines = terminal_lines(recording, named[0])
    for one in (*named[1:], *small):
        lines.append(f"also, {WORDS[one.severity].lower()}: {one.title}{waited_text(one)} ({one.cause})")
        lines += change_lines(one) if one is best else []
    for line in lines:
        click.echo(plain(line))


def _print_open(findings: Examination, first: Finding) -> None:
    """What cost more than the first finding and could not be decided, and how to record it so that it can be."""
    from kvprobe.commands._reading import plain

    unproven = [one for one in findings if one.abstains and one.lost_ns > _cost(first, one)]
    if not unproven:
        return
    largest = max(unproven, key=lambda one: one.lost_ns)
    how = next((change.text for change in largest.cure if change.kind == "recording"), "")
    click.echo(plain(f"Undecided: {largest.title} ({largest.cause})"))
    if how:
        click.echo(plain(f"To decide it: {how[:1].lower()}{how[1:]}"))


def _cost(first: Finding, other: Finding) -> int:
    """What the first finding cost in the time that the other is about: a GPU's, or that of threads and copies."""
    of_gpu = other.lost_on == "device" and first.device_ns is not None and not first.no_kernel_follows
    return first.device_ns if of_gpu and first.device_ns is not None else first.lost_ns


def _print_beside(recording: Recording) -> None:
    """What is no finding: what offloads brought, and whether loads brought what had been stored."""
    from kvprobe.commands._reading import plain
    from kvprobe.diagnosis import offload_benefit
    from kvprobe.recordings import witnessed
    from kvprobe.reporting.verified import sentence

    for benefit in offload_benefit.of_recording(recording):
        click.echo(plain(benefit.sentence))
    found = witnessed.of_recording(recording)
    if found is not None:
        click.echo(plain(f"Bytes: {sentence(found)}"))


def _print_undecided(verdict: Verdict, findings: Examination) -> None:
    """What is missing, how to record it, and what was seen all the same."""
    from kvprobe.commands._reading import plain

    lacks = [one for one in verdict.missing if one.what == verdict.reason]
    click.echo(plain(f"Undecided: {verdict.reason}"))
    click.echo(plain(f"To decide it: {lacks[0].how}")) if lacks else None
    unproven = [one for one in findings if one.abstains]
    if unproven:
        click.echo(plain(f"Seen, but not proven: {max(unproven, key=lambda one: one.lost_ns).title}"))
