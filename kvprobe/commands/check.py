"""`kvprobe check`: fails with an exit code, and a JUnit file for CI, when a recording breaks a limit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvprobe.commands._account_limits import AccountLimits, account_limits
from kvprobe.commands._paths import GivenPath, refuse_input
from kvprobe.commands._reading import WindowOptions, window_options
from kvprobe.output import CHECK

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination, Finding
    from kvprobe.diagnosis.verdict import Verdict
    from kvprobe.output.recorded import LimitJson
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy

__all__ = ["command"]

NO_CRITICAL = "no critical finding"  # what is asked where no limit is given
_SATURATION = "saturation"  # what the option calls all causes that go back to a full launch queue


@dataclass(frozen=True)
class CheckedLimit:
    """One limit and what the recording makes of it; `undecided` says why it is neither kept nor broken."""

    name: str
    allowed: str
    found: str
    broken: bool
    detail: str = ""
    undecided: str = ""
    at: str = ""  # "file:line" of the call to change, where a stack tells it

    def to_json(self) -> LimitJson:
        """All fields."""
        return cast("LimitJson", vars(self))

    @property
    def said(self) -> str:
        """What was found, beside its limit where that is a figure."""
        return self.found if self.allowed == "none" else f"{self.found} (limit {self.allowed})"

    @property
    def title(self) -> str:
        """What was looked at, as a terminal names it: "critical findings", "max-call", causes by a part of the name."""
        if self.name == NO_CRITICAL:
            return "critical findings"
        if not self.name.startswith("no "):
            return self.name
        if _SATURATION in self.name.lower():
            return f"causes that go back to a full launch queue (“{self.name[3:]}”)"
        return f"causes whose name contains “{self.name[3:]}”"


@click.command(short_help="Fail with an exit code when a recording breaks a limit.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option(
    "--max-blocked",
    metavar="SHARE|TIME",
    help="Time that one thread may lose in blocked calls: 20ms, or 1% of the thread's time.",
)
@click.option("--max-submit-p50", metavar="TIME", help="Median host time of a submission: 5us.")
@click.option("--max-submit-p99", metavar="TIME", help="99th percentile of the host time of a submission: 50us.")
@click.option("--max-call", metavar="TIME", help="Host time of the longest submission: 1ms.")
@click.option(
    "--max-lost",
    metavar="SHARE|TIME",
    help="Most time that threads, copies or the GPU may lose because of one finding: 100ms. Or a share of their time: "
    "5%. The profiler's own work does not count.",
)
@account_limits
@click.option("--no", "banned", multiple=True, metavar="CAUSE", help="A cause that must not be found; may be repeated.")
@click.option("--allow-undecided", is_flag=True, help="Exit with 0 even if a limit cannot be decided.")
@click.option("--junit", type=GivenPath(), help="Write the outcome as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "github"]),
    default="text",
    show_default=True,
    help="github: annotations for GitHub Actions. If a Python stack was recorded, they point at the line to change.",
)
@window_options
def command(
    inputs: tuple[Path, ...],
    max_blocked: str | None,
    max_submit_p50: str | None,
    max_submit_p99: str | None,
    max_call: str | None,
    max_lost: str | None,
    banned: tuple[str, ...],
    allow_undecided: bool,
    junit: Path | None,
    as_json: bool,
    output_format: str,
    of_account: AccountLimits,
    window: WindowOptions,
) -> int:
    """Check recordings against limits: exit code 1 if a limit is exceeded or cannot be decided, 0 if all limits hold.

    If you set no limit, the check fails on any critical finding. If you set limits, the check looks only at these
    limits. CAUSE is the name of a cause or a part of the name, such as "pageable". "saturation" stands for every cause
    that goes back to a full launch queue. Only the serving window is judged, not the start-up.

    A recording may be cut off, be empty, or not show enough. Then check reports a limit as failed only if it is
    certainly exceeded. Other limits are undecided: the exit code is then 1 as well, unless you pass --allow-undecided.
    """
    from kvprobe.errors import RecordingError
    from kvprobe.reporting import check_writable

    asked = AskedLimits(
        shares={"max-blocked": _amount(max_blocked, "--max-blocked"), "max-lost": _amount(max_lost, "--max-lost")},
        times={
            "max-submit-p50": _time(max_submit_p50, "--max-submit-p50"),
            "max-submit-p99": _time(max_submit_p99, "--max-submit-p99"),
            "max-call": _time(max_call, "--max-call"),
        },
        account=of_account.shares(),
        causes={name: _causes(name) for name in banned},
    )
    if junit is not None:
        check_writable(junit)
        refuse_input(junit, inputs)
    from kvprobe.commands._reading import diagnosed
    from kvprobe.diagnosis.verdict import of_recording

    try:
        recording, findings, queues = diagnosed(inputs, quiet=as_json, window=window)
    except RecordingError as error:
        if junit is not None:
            _write_junit(junit, [CheckedLimit("readable", "a recording", "", False, undecided=str(error))], inputs)
        raise
    verdict = of_recording(recording, findings)
    limits = _limits(recording, findings, queues, asked, verdict)
    if junit is not None:
        _write_junit(junit, limits, inputs)
    undecided = any(one.undecided for one in limits)
    failed = any(one.broken for one in limits) or (undecided and not allow_undecided)
    if as_json:
        CHECK.print(
            {
                "ok": not failed,
                "verdict": verdict.to_json(),
                "limits": [one.to_json() for one in limits],
                "account": findings.account.to_json(),
            }
        )
    elif output_format == "github":
        for one in limits:
            click.echo(_annotation(one, "warning" if allow_undecided else "error"))
    else:
        _print(findings, limits)
    return 1 if failed else 0


@dataclass(frozen=True)
class AskedLimits:
    """What the command line asks for; None: not asked.

    Attributes:
        shares: by name, ("share", most) or ("ns", most).
        times: by name, ns.
        account: shares of the account's lines, by name.
        causes: for each `--no NAME` the causes that it stands for.
    """

    shares: dict[str, tuple[str, float] | None]
    times: dict[str, float | None]
    account: dict[str, float]
    causes: dict[str, list[str]]


def _causes(name: str) -> list[str]:
    """The causes that a name or a part of one stands for; "saturation" for all whose root is a full launch queue."""
    from kvprobe.diagnosis import CAUSES, FULL_QUEUE
    from kvprobe.errors import UsageError

    found = [cause for cause in CAUSES if name.strip() and name.replace("-", "_").lower() in cause]
    if any(cause in FULL_QUEUE for cause in found) and _SATURATION in name.lower():
        found = list(dict.fromkeys([*found, *FULL_QUEUE]))
    if not found:
        raise UsageError(f"--no {name}: unknown cause; use one of {', '.join(CAUSES)}")
    return found


def _limits(
    recording: Recording, findings: Examination, queues: Occupancy, asked: AskedLimits, verdict: Verdict
) -> list[CheckedLimit]:
    """Each limit, decided as far as the recording says enough."""
    from kvprobe.diagnosis import FULL_QUEUE
    from kvprobe.diagnosis.verdict import of_full_queue

    of_account = [_of_account(findings, *one) for one in asked.account.items()]
    queue = of_full_queue(recording, findings)
    full_only = [f"no {name}" for name, causes in asked.causes.items() if set(causes) <= set(FULL_QUEUE)]
    return of_account + [
        _decided(one, queue if one.name in full_only else verdict) for one in _judge(recording, findings, queues, asked)
    ]


def _print(findings: Examination, limits: Sequence[CheckedLimit]) -> None:
    from kvprobe.commands._reading import plain
    from kvprobe.reporting.account import account_lines

    for line in account_lines(findings.account):
        click.echo(plain(line))
    for one in limits:
        word = "FAIL" if one.broken else "undecided" if one.undecided else "ok  "
        click.echo(plain(f"{word}  {one.title}: {one.said}"))
        if one.broken and one.detail:
            click.echo(plain(f"      {one.detail}"))
    undecided = next((one.undecided for one in limits if one.undecided), "")
    if undecided:
        click.echo(plain(f"Undecided: {undecided}"))


def _of_account(found: Examination, name: str, most: float) -> CheckedLimit:
    """A limit of a line of the account, on the GPU that is worst by it."""
    from kvprobe.commands._account_limits import worst_share
    from kvprobe.reporting.units import duration, percent

    worst = worst_share(found.account, name)
    if worst.share is None:
        lacks = "the recording does not show what the GPU did; record with device activity"
        return CheckedLimit(name, percent(most), "not known", False, undecided=lacks)
    broken = worst.share < most if name.startswith("min") else worst.share > most
    said = f"{percent(worst.share)}, {duration(worst.ns)}"
    if worst.passed_ns:
        said += f" (and {duration(worst.passed_ns)} of short delays before the GPU started what was submitted)"
    undecided = worst.lacks if not broken and worst.share + worst.unknown > most else ""
    return CheckedLimit(name, percent(most), said, broken, f"on {worst.gpu}", undecided=undecided)


def _decided(limit: CheckedLimit, verdict: Verdict) -> CheckedLimit:
    """A limit that is not broken holds only where the recording says enough."""
    if limit.broken or not verdict.missing:
        return limit
    lacks = verdict.missing[0]
    return replace(limit, undecided=f"{lacks.what}; {lacks.how}")


_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}


def _time(text: str | None, option: str) -> float | None:
    """Nanoseconds of "50us"."""
    from kvprobe.errors import UsageError

    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ns|us|µs|ms|s)", text.strip())
    if not match:
        raise UsageError(f"{option} {text}: not a time; write it like 50us, 1.5ms or 2s")
    return float(match.group(1)) * _UNITS[match.group(2)]


def _amount(text: str | None, option: str) -> tuple[str, float] | None:
    """("share", 0.01) of "1%", ("ns", 2e7) of "20ms"."""
    from kvprobe.errors import UsageError

    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*%", text.strip())
    if match:
        return "share", float(match.group(1)) / 100
    try:
        value = _time(text, option)
    except UsageError:
        raise UsageError(f"{option} {text}: neither a share nor a time; write it like 1% or 20ms") from None
    return ("ns", value) if value is not None else None


def _judge(recording: Recording, findings: Examination, queues: Occupancy, asked: AskedLimits) -> list[CheckedLimit]:
    """Every limit but those of the account; without any limit at all, that there is no critical finding."""
    from kvprobe.diagnosis import PROFILER
    from kvprobe.reporting.charts import quantiles
    from kvprobe.reporting.recorded import submissions
    from kvprobe.reporting.units import duration, percent

    found = submissions(recording)
    named = [one for one in findings if one.confidence != "cannot tell"]
    out: list[CheckedLimit] = []

    span_ns = max(recording.window.span_ns if recording.window else found.span[1] - found.span[0], 1)

    def add_amount(name: str, lost_ns: float, share: float, detail: str, at: str = "") -> None:
        limit = asked.shares[name]
        if limit is not None:
            kind, most = limit
            allowed = percent(most) if kind == "share" else duration(most)
            text = f"{duration(lost_ns)}, {percent(share)} of the time"
            out.append(CheckedLimit(name, allowed, text, (share if kind == "share" else lost_ns) > most, detail, at=at))

    blocked_ns, who = _most_blocked(recording, named, queues)
    add_amount("max-blocked", blocked_ns, min(blocked_ns / span_ns, 1.0), who)
    by_share = asked.shares["max-lost"]
    first = max(
        [one for one in named if one.cause != PROFILER],  # nobody's but the recorder's
        key=lambda one: (one.share if by_share and by_share[0] == "share" else 0, one.lost_ns),
        default=None,
    )
    add_amount(
        "max-lost",
        float(first.lost_ns) if first else 0.0,
        first.share if first else 0.0,
        _named(first) if first else "",
        _at([first]) if first else "",
    )
    inside = recording.window.holds(recording.calls["process"][found.rows], found.start_ns) if recording.window else ...
    took = found.dur_ns[inside]
    measured = dict(zip(asked.times, quantiles(took, 0.5, 0.99, 1.0), strict=True))
    for name, most in asked.times.items():
        if most is not None:
            value = measured[name]
            none = value != value
            detail = "" if none else f"of {len(took):,} submissions"
            out.append(
                CheckedLimit(name, duration(most), "no submissions" if none else duration(value), value > most, detail)
            )
    for name, causes in asked.causes.items():
        out.append(_absent(f"no {name}", [one for one in named if one.cause in causes]))
    if not out and not asked.account:
        out.append(_absent(NO_CRITICAL, [one for one in named if one.severity == "critical"]))
    return out


def _named(finding: Finding) -> str:
    """A finding in one line, with its first change and what that saves."""
    from kvprobe.reporting.headline import saving_text, shown_changes

    line = f"{finding.cause}: {finding.title}"
    for change in shown_changes(finding)[:1]:
        saving = saving_text(change)
        line += f" | {change.text}{f', at {change.at}' if change.at else ''}{f' | {saving}' if saving else ''}"
    return line


def _absent(name: str, hits: Sequence[Finding]) -> CheckedLimit:
    detail = "; ".join(map(_named, hits))
    found = ", ".join(one.cause for one in hits) or "none found"
    return CheckedLimit(name, "none", found, bool(hits), detail, at=_at(hits))


def _at(findings: Iterable[Finding]) -> str:
    return next((change.at for one in findings for change in one.cure if change.at), "")


def _annotation(limit: CheckedLimit, of_undecided: str) -> str:
    """One workflow command of GitHub Actions: an error, or a notice of what holds."""
    from kvprobe.errors import plain

    def escaped(text: str, more: str = "") -> str:
        text = "\n".join(map(plain, text.split("\n")))
        return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)

    level = "error" if limit.broken else of_undecided if limit.undecided else "notice"
    said = limit.said
    if limit.broken and limit.detail:
        said += f"\n{limit.detail}"
    elif limit.undecided:
        said = f"undecided: {limit.undecided}"
    properties = [("title", f"kvprobe: {limit.name}")]
    file, _, line = limit.at.rpartition(":")
    if limit.broken and file and line.isdigit():
        path = Path(file)
        here = Path.cwd()
        properties = [
            ("file", str(path.relative_to(here) if path.is_relative_to(here) else path)),
            ("line", line),
            *properties,
        ]
    where = ",".join(f"{name}={escaped(value, ':,')}" for name, value in properties)
    return f"::{level} {where}::{escaped(said)}"


def _most_blocked(recording: Recording, named: Sequence[Finding], queues: Occupancy) -> tuple[float, str]:
    """The longest that one thread was blocked: by full queues, or by all causes on the host together."""
    import numpy as np

    from kvprobe.diagnosis import PROFILER
    from kvprobe.recordings.assemble import pairs

    lost: dict[tuple[int, int], float] = {}
    for one in named:
        if one.lost_on == "host" and one.cause != PROFILER:  # nobody's but the recorder's
            for where in one.where:
                key = (where.process, where.thread)
                lost[key] = lost.get(key, 0.0) + where.lost_ns
    calls = recording.calls
    rows = np.flatnonzero(queues.blocked_ns)
    if recording.window is not None:
        rows = rows[recording.window.holds(calls["process"][rows], calls["start_ns"][rows])]
    threads, place = pairs(calls["process"][rows], calls["thread"][rows])
    blocked = np.bincount(place, weights=queues.blocked_ns[rows], minlength=len(threads)).tolist()
    for key, full in zip(threads, blocked, strict=True):
        lost[key] = max(lost.get(key, 0.0), full)
    if not lost:
        return 0.0, ""
    (process, thread), most = max(lost.items(), key=lambda item: item[1])
    causes = ", ".join(one.cause for one in named if one.lost_on == "host" and one.cause != PROFILER)
    from kvprobe.reporting.streams import process_name

    return most, f"thread {thread} of {process_name(recording, process)}" + (f": {causes}" if causes else "")


def _write_junit(path: Path, limits: Sequence[CheckedLimit], inputs: Sequence[Path]) -> None:
    """One test case a limit, as Jenkins, GitLab and GitHub actions read it."""
    from xml.etree import ElementTree

    from kvprobe.reporting.page import write_whole

    broken = sum(one.broken for one in limits)
    suite = ElementTree.Element(
        "testsuite",
        name="kvprobe check",
        tests=str(len(limits)),
        failures=str(broken),
        errors="0",
        skipped=str(sum(bool(one.undecided) and not one.broken for one in limits)),
    )
    where = _xml(", ".join(str(one) for one in inputs))
    for one in limits:
        case = ElementTree.SubElement(suite, "testcase", classname=where, name=_xml(one.name))
        if one.broken:
            said = one.said
            failure = ElementTree.SubElement(case, "failure", message=_xml(said), type="limit")
            failure.text = _xml(one.detail)
        elif one.undecided:
            ElementTree.SubElement(case, "skipped", message=_xml(f"undecided: {one.undecided}"))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(one.said)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    write_whole(path, ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold at all."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
