"""`kvprobe try -- COMMAND`: tries the changes that a diagnosis names, and prints what they save beside the prediction.

The command is recorded once. Of the changes that its findings name, those that can be made from outside are tried:
environment variables, and `--fix` where an adapter of kvprobe is in use or pageable copies can be staged. The command
then runs with and without each, by turns, every run under `kvprobe run` and with a folder of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.commands._watching import ends_by_sigterm, new_folder
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.output import TRY
from kvprobe.runfolder import files

if TYPE_CHECKING:
    from kvprobe.diagnosis import Change, Finding
    from kvprobe.output.recorded import TryJson
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.trial import TrialFigure, TrialResult, TrialRun

__all__ = ["command"]

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
OBSERVER_S = 30.0  # for what the command has left running


class CommandFailedError(KvprobeError):
    """A run of the command did not end with exit code 0."""


@click.command(
    short_help="Measure which suggested changes help a command, without editing the program.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, metavar="[--] COMMAND [ARGUMENT...]", type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    type=GivenPath(),
    metavar="DIR",
    help="Folder for all runs. Default: ./kvprobe-try-<command>-<time>.",
)
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(4, 100),
    help="Runs with each change, and as many runs without any change; fewer than 4 prove nothing.",
)
@click.option(
    "--figure",
    metavar="REGEX",
    help="Regular expression for a figure that COMMAND prints: group 1 of its last match is compared.",
)
@click.option("--env", "given", multiple=True, metavar="NAME=VALUE", help="Try this variable as well; may be repeated.")
@click.option(
    "--recording",
    "source",
    type=GivenPath(),
    metavar="INPUT",
    help="Take the changes from this recording of the same command, made by any tool.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    words: tuple[str, ...],
    output: Path | None,
    rounds: int,
    figure: str | None,
    given: tuple[str, ...],
    source: Path | None,
    as_json: bool,
) -> None:
    """Record COMMAND, then try the changes that leave the program as it is: run COMMAND with and without each.

    kvprobe tries environment variables, and `--fix auto` of `kvprobe run`. Runs with a change and runs without any
    change take turns. COMMAND must end by itself, and it gets no input.

    kvprobe measures the host time that submissions lost and the wall time. With --figure, kvprobe also compares a
    figure that COMMAND prints. A difference counts as a gain only if the Mann-Whitney U test tells it from noise at the
    5% level. kvprobe keeps the output and the exit code of every run in the folder. The exit code is 1 if a run of
    COMMAND failed.
    """
    from kvprobe.commands._reading import diagnosed
    from kvprobe.reporting.trial import compared

    if not words:
        raise UsageError("no command was given: kvprobe try [OPTIONS] -- COMMAND [ARGUMENT...]")
    pattern = _pattern(figure)
    wanted = _given(given)
    folder = new_folder(output, "kvprobe-try", words[0])
    say = _Said(quiet=as_json)
    if source is None:
        source = folder / "recorded"
        say(f"recording into {source}")
        _Run(source, words, None)
    recording, findings, _ = diagnosed([source], quiet=True)
    changes, left = _from_outside(findings, recording, wanted)
    for note in left:
        say(note)
    usual: dict[str, float] = {}
    turns: list[tuple[int, int, _Run]] = []
    choices: list[Change | None] = [None, *changes]
    for number in range(rounds if changes else 0):
        for place in range(len(choices)):  # ABC, BCA, CAB: nobody always comes after the same neighbour
            which = (number + place) % len(choices)
            change = choices[which]
            name = "as-it-is" if change is None else f"with-{which}"
            say(f"round {number + 1} of {rounds}: {_name(change)}")
            run = _Run(folder / f"round-{number + 1}-{name}", words, change)
            usual = run.measure(usual, pattern)
            turns.append((number, which, run))
    measured: list[list[TrialRun]] = [[] for _ in choices]
    for _, which, run in sorted(turns, key=lambda turn: turn[:2]):
        measured[which].append(run.measured(usual))
    tried = []
    for change, with_it in zip(changes, measured[1:], strict=True):
        tried.append(_tried(change, measured[0], with_it, compared))
    outcome = _outcome(folder, words, rounds, findings, tried, left)
    files.write(folder / "try.json", TRY.text(outcome).encode())
    if as_json:
        TRY.print(outcome)
    else:
        _print(findings, tried, rounds)
        click.echo(f"{folder / 'try.json'}")


class _Said:
    """Progress, a line a step, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            click.echo(f"kvprobe: {text}", err=True)


def _pattern(figure: str | None) -> re.Pattern[str] | None:
    if figure is None:
        return None
    try:
        pattern = re.compile(figure)
    except re.error as error:
        raise UsageError(f"--figure {figure}: not a regular expression ({error})") from None
    if pattern.groups < 1:
        raise UsageError(f"--figure {figure}: put the number into a group, as in 'tokens/s: ([0-9.]+)'")
    return pattern


def _given(given: Sequence[str]) -> list[Change]:
    from kvprobe.diagnosis import Change

    for text in given:
        if not _VARIABLE.fullmatch(text):
            raise UsageError(f"--env {text}: write it as NAME=VALUE")
    pairs = [text.split("=", 1) for text in given]
    return [Change(f"{name}={value}", "environment", name, value) for name, value in pairs]


def _name(change: Change | None) -> str:
    if change is None:
        return "as it is"
    return f"{change.name}={change.value}" if change.kind == "environment" else f"--fix {change.value}"


def _blocked_less(change: Change) -> int | None:
    """What a change is predicted to spare the threads: it is measured by how long they are blocked."""
    return change.predicted_saving_ns if change.thread_saving_ns is None else change.thread_saving_ns


def _from_outside(
    findings: Sequence[Finding], recording: Recording, wanted: list[Change]
) -> tuple[list[Change], list[str]]:
    """The changes that can be tried, each once, with its savings in all findings added up; and why others are not."""
    from kvprobe.diagnosis.finding import best_first

    fixable = any(note.startswith("adapter ") and ": applied" in note for note in recording.notes)
    total: dict[tuple[str, str, str], Change] = {}
    left: dict[str, None] = {}
    for finding in findings:
        for change in finding.cure:
            if change.kind == "environment":
                if os.environ.get(change.name) == change.value:
                    left[f"not tried: {_name(change)} is set already"] = None
                    continue
            elif change.kind == "rung" and change.value == "auto":
                if not fixable and change.name != "staged":  # the interposer does that by itself
                    left["not tried: --fix auto, because no adapter of kvprobe is in use in this command"] = None
                    continue
            else:
                continue
            key = ("rung", "", change.value) if change.kind == "rung" else change.key  # --fix auto is one run for all
            known = total.get(key)
            savings = [_blocked_less(one) for one in (known, change) if one is not None]
            modelled = [one for one in savings if one is not None]
            total[key] = replace(change, thread_saving_ns=sum(modelled) if modelled else None)
    for change in wanted:
        total.setdefault(change.key, change)
    if not total:
        left["nothing to try: no finding names a change that kvprobe can make without editing the program"] = None
    return list(best_first(total.values())), list(left)


class _Run:
    """One run of the command under `kvprobe run`, in a folder of its own, to its end."""

    def __init__(self, folder: Path, words: Sequence[str], change: Change | None) -> None:
        self.folder = folder
        folder.parent.mkdir(exist_ok=True)
        env = dict(os.environ)
        fix = "off"
        if change is not None and change.kind == "environment":
            env[change.name] = change.value
        elif change is not None:
            fix = change.value
        options = ["--exec", "-o", str(folder), "--fix", fix, "--report", "none"]
        arguments = [sys.executable, "-m", "kvprobe", "run", *options, "--", *words]
        out, err = (folder.with_suffix(suffix) for suffix in (".out", ".err"))
        with files.created(out) as stdout, files.created(err) as stderr, ends_by_sigterm():
            process = subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            try:
                code = process.wait()
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
        ended = time.monotonic_ns()
        files.write(folder.with_suffix(".code"), f"{code}\n".encode())
        if code:
            said = (err.read_text(errors="replace").strip().splitlines() or ["it printed no message"])[-1]
            raise CommandFailedError(f"the command ended with {code} ({_name(change)}): {said} (all of it: {err})")
        self.wall_ns = ended - int(json.loads((folder / "run.json").read_text())["monotonic_ns"])
        self.figure: float | None = None
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + OBSERVER_S
        while not (self.folder / "end.json").exists() and time.monotonic() < end:
            time.sleep(0.02)

    def recording(self) -> Recording:
        from kvprobe.recordings import open_recording

        return open_recording([self.folder])

    def measure(self, usual: dict[str, float], pattern: re.Pattern[str] | None) -> dict[str, float]:
        """Takes the figure from the output; returns what calls usually cost, with this run's."""
        from kvprobe.reporting.trial import blocked_ns

        if pattern is not None:
            said = "".join(self.folder.with_suffix(end).read_text(errors="replace") for end in (".out", ".err"))
            found = pattern.findall(said)
            last = (found[-1] if isinstance(found[-1], str) else found[-1][0]) if found else ""
            try:
                self.figure = float(last.replace(",", ""))
            except ValueError:
                self.figure = None
            if self.figure is None or not math.isfinite(self.figure):
                raise CommandFailedError(
                    f"--figure {pattern.pattern}: no number matches it in the output of "
                    f"{self.folder.with_suffix('.out')}"
                )
        return blocked_ns(self.recording(), usual)[1]

    def measured(self, usual: dict[str, float]) -> TrialRun:
        from kvprobe.reporting.trial import TrialRun, blocked_ns

        return TrialRun(self.wall_ns, blocked_ns(self.recording(), usual)[0], self.figure)


def _tried(change: Change, without: Sequence[TrialRun], given: Sequence[TrialRun], compare: Any) -> TrialResult:
    from kvprobe.reporting.trial import TrialResult

    def of(name: str) -> TrialFigure:
        found: TrialFigure = compare([getattr(one, name) for one in without], [getattr(one, name) for one in given])
        return found

    figure = of("figure") if without and without[0].figure is not None else None
    return TrialResult(change, _blocked_less(change), of("blocked_ns"), of("wall_ns"), figure)


def _outcome(
    folder: Path,
    words: Sequence[str],
    rounds: int,
    findings: Sequence[Finding],
    tried: Sequence[TrialResult],
    left: list[str],
) -> TryJson:
    from kvprobe.reporting.trial import TEST

    return {
        "command": list(words),
        "folder": str(folder),
        "rounds": rounds,
        "test": TEST,
        "findings": [one.to_json() for one in findings],
        "tried": [one.to_json() for one in tried],
        "notes": left,
    }


def _print(findings: Sequence[Finding], tried: Sequence[TrialResult], rounds: int) -> None:
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.trial import TEST
    from kvprobe.reporting.units import duration

    for finding in findings[:3]:
        click.echo(plain(finding.title))
    if not tried:
        return
    for one in tried:
        expected = "not predicted" if one.predicted_ns is None else f"{duration(one.predicted_ns)} predicted"
        click.echo(f"\n{_name(one.change)}")
        for what, found, more in (
            ("time blocked", one.blocked, f", {expected}"),
            ("wall time", one.wall, ""),
            ("figure", one.figure, ""),
        ):
            if found is not None:
                click.echo(_line(what, found, more))
    click.echo(
        f"\nMedians of {rounds} alternating rounds, with their range. A difference counts if the test tells it from "
        f"noise: {TEST}."
    )


def _line(what: str, found: TrialFigure, more: str) -> str:
    from statistics import median

    from kvprobe.reporting.units import duration

    def show(value: float) -> str:
        return f"{value:,.4g}" if what == "figure" else duration(value)

    words = {"less": "a gain", "more": "a loss"}
    moved = f"saves {show(found.saved)} ({show(found.low)} to {show(found.high)})"
    if what == "figure":  # whether more of it is better only its owner knows
        words = {"less": "lower", "more": "higher"}
        moved = f"changes by {-found.saved:+,.4g} ({-found.high:+,.4g} to {-found.low:+,.4g})"
    return (
        f"  {what:12}  {show(median(found.without))} as it is, {show(median(found.given))} with it\n"
        f"  {'':12}  {moved}{more}: {words.get(found.verdict, found.verdict)} (p = {found.p:.2g})"
    )
