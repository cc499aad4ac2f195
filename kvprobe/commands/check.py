"""`kvprobe check`: fails with an exit code, and a JUnit file for CI, when a recording breaks a limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvprobe.diagnosis import Finding
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy

__all__ = ["command"]


@dataclass(frozen=True)
class Limit:
    """One limit and what the recording makes of it."""

    name: str
    allowed: str
    found: str
    broken: bool
    detail: str = ""


@click.command(short_help="Fail with an exit code when a recording breaks a limit.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path(path_type=Path))
@click.option("--max-blocked", metavar="SHARE", help="Recorded time one thread may lose in blocked calls: 1% or 20ms.")
@click.option("--max-submit-p50", metavar="TIME", help="Median host time of a submission: 5us.")
@click.option("--max-submit-p99", metavar="TIME", help="99th percentile of the same: 50us.")
@click.option("--max-call", metavar="TIME", help="Longest submission: 1ms.")
@click.option("--max-lost", metavar="SHARE", help="Time that any one finding may lose: 5% or 100ms.")
@click.option("--no", "banned", multiple=True, metavar="CAUSE", help="A cause that must not be found; may repeat.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write the outcome as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def command(
    inputs: tuple[Path, ...],
    max_blocked: str | None,
    max_submit_p50: str | None,
    max_submit_p99: str | None,
    max_call: str | None,
    max_lost: str | None,
    banned: tuple[str, ...],
    junit: Path | None,
    as_json: bool,
) -> int:
    """Check recordings against limits: exit code 1 when one is broken, 0 when all hold.

    Without a limit, the check is that there is no critical finding. CAUSE is the name of a cause or a part of it
    ("saturation", "pageable"); findings that abstain never break a limit.
    """
    from kvprobe.diagnosis import CAUSES
    from kvprobe.errors import UsageError
    from kvprobe.reporting import check_writable

    shares = {"max-blocked": _amount(max_blocked, "--max-blocked"), "max-lost": _amount(max_lost, "--max-lost")}
    times = {
        "max-submit-p50": _time(max_submit_p50, "--max-submit-p50"),
        "max-submit-p99": _time(max_submit_p99, "--max-submit-p99"),
        "max-call": _time(max_call, "--max-call"),
    }
    wanted: dict[str, list[str]] = {}
    for name in banned:
        wanted[name] = [cause for cause in CAUSES if name.replace("-", "_").lower() in cause]
        if not wanted[name]:
            raise UsageError(f"--no {name}: no cause of that name; there are {', '.join(CAUSES)}")
    if junit is not None:
        check_writable(junit)
    from kvprobe.commands._reading import diagnosed

    recording, findings, queues = diagnosed(inputs, quiet=as_json)
    limits = _judge(recording, findings, queues, shares, times, wanted)
    if junit is not None:
        _write_junit(junit, limits, inputs)
    broken = [one for one in limits if one.broken]
    if as_json:
        import json

        out = {"ok": not broken, "limits": [vars(one) for one in limits]}
        click.echo(json.dumps(out))
    else:
        for one in limits:
            click.echo(f"{'FAIL' if one.broken else 'ok  '}  {one.name}: {one.found} (limit {one.allowed})")
            if one.broken and one.detail:
                click.echo(f"      {one.detail}")
    return 1 if broken else 0


_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}


def _time(text: str | None, option: str) -> float | None:
    """Nanoseconds of "50us"."""
    from kvprobe.errors import UsageError

    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)", text.strip())
    if not match:
        raise UsageError(f"{option} {text}: not a time; write it like 50us, 1.5ms or 2s")
    return float(match.group(1)) * _UNITS[match.group(2)]


def _amount(text: str | None, option: str) -> tuple[str, float] | None:
    """("share", 0.01) of "1%", ("ns", 2e7) of "20ms"."""
    from kvprobe.errors import UsageError

    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match:
        return "share", float(match.group(1)) / 100
    try:
        value = _time(text, option)
    except UsageError:
        raise UsageError(f"{option} {text}: neither a share nor a time; write it like 1% or 20ms") from None
    return ("ns", value) if value is not None else None


def _judge(
    recording: Recording,
    findings: Sequence[Finding],
    queues: Occupancy,
    shares: dict[str, tuple[str, float] | None],
    times: dict[str, float | None],
    wanted: dict[str, list[str]],
) -> list[Limit]:
    from kvprobe.reporting.charts import quantiles
    from kvprobe.reporting.recorded import submissions
    from kvprobe.reporting.units import duration, percent

    found = submissions(recording)
    span_ns = found.span[1] - found.span[0]
    named = [one for one in findings if one.confidence != "cannot tell"]
    out: list[Limit] = []

    def add_amount(name: str, lost_ns: float, detail: str) -> None:
        limit = shares[name]
        if limit is not None:
            kind, most = limit
            share = lost_ns / span_ns
            allowed = percent(most) if kind == "share" else duration(most)
            text = f"{duration(lost_ns)}, {percent(share)} of recorded time"
            out.append(Limit(name, allowed, text, (share if kind == "share" else lost_ns) > most, detail))

    blocked_ns, who = _most_blocked(recording, named, queues)
    add_amount("max-blocked", blocked_ns, who)
    first = max(named, key=lambda one: one.lost_ns, default=None)
    add_amount("max-lost", float(first.lost_ns) if first else 0.0, f"{first.cause}: {first.title}" if first else "")
    measured = dict(zip(times, quantiles(found.dur_ns, 0.5, 0.99, 1.0), strict=True))
    for name, most in times.items():
        if most is not None:
            value = measured[name]
            none = value != value
            detail = "" if none else f"of {len(found.dur_ns):,} submissions"
            out.append(Limit(name, duration(most), "no submissions" if none else duration(value), value > most, detail))
    for name, causes in wanted.items():
        out.append(_absent(f"no {name}", [one for one in named if one.cause in causes]))
    if not out:
        out.append(_absent("no critical finding", [one for one in named if one.severity == "critical"]))
    return out


def _absent(name: str, hits: Sequence[Finding]) -> Limit:
    detail = "; ".join(f"{one.cause}: {one.title}" for one in hits)
    return Limit(name, "none", ", ".join(one.cause for one in hits) or "none found", bool(hits), detail)


def _most_blocked(recording: Recording, named: Sequence[Finding], queues: Occupancy) -> tuple[float, str]:
    """The longest that one thread was blocked: by full queues, or by all causes on the host together."""
    import numpy as np

    lost: dict[tuple[int, int], float] = {}
    for one in named:
        if one.lost_on == "host" and one.cause != "profiler_overhead":  # nobody's but the recorder's
            for where in one.where:
                key = (where.process, where.thread)
                lost[key] = lost.get(key, 0.0) + where.lost_ns
    calls = recording.calls
    rows = np.flatnonzero(queues.blocked_ns)
    owners = np.stack([calls["process"][rows].astype(np.int64), calls["thread"][rows]])
    for process, thread in np.unique(owners, axis=1).T.tolist():
        mine = rows[(owners[0] == process) & (owners[1] == thread)]
        full = float(queues.blocked_ns[mine].sum())
        lost[process, thread] = max(lost.get((process, thread), 0.0), full)
    if not lost:
        return 0.0, ""
    (process, thread), most = max(lost.items(), key=lambda item: item[1])
    causes = ", ".join(one.cause for one in named if one.lost_on == "host" and one.cause != "profiler_overhead")
    from kvprobe.reporting.lanes import process_name

    return most, f"thread {thread} of {process_name(recording, process)}" + (f": {causes}" if causes else "")


def _write_junit(path: Path, limits: Sequence[Limit], inputs: Sequence[Path]) -> None:
    """One test case a limit, as Jenkins, GitLab and GitHub actions read it."""
    from xml.etree import ElementTree

    from kvprobe.reporting.page import write_whole

    broken = sum(one.broken for one in limits)
    suite = ElementTree.Element(
        "testsuite", name="kvprobe check", tests=str(len(limits)), failures=str(broken), errors="0", skipped="0"
    )
    where = _xml(", ".join(str(one) for one in inputs))
    for one in limits:
        case = ElementTree.SubElement(suite, "testcase", classname=where, name=_xml(one.name))
        if one.broken:
            said = f"{one.found} (limit {one.allowed})"
            failure = ElementTree.SubElement(case, "failure", message=_xml(said), type="limit")
            failure.text = _xml(one.detail)
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(f"{one.found} (limit {one.allowed})")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    write_whole(path, ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold at all."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
