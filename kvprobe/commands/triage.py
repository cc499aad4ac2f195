"""`kvprobe triage`: one line a recording, as quickly as can be: was a launch queue full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.commands._reading import WindowOptions, plain, window_options
from kvprobe.output import TRIAGE

if TYPE_CHECKING:
    from kvprobe.output.parts import VerdictWord
    from kvprobe.output.recorded import QueueJson, TriagedJson, TriageJson
    from kvprobe.recordings.quick_triage import Triage

__all__ = ["command", "document", "triaged"]

_WORST = ("found", "undecided", "healthy")
_PACKED = (".kvprobe.tar.gz",)  # a run folder in an archive: it is refused with a word, not passed over
_QUEUE = {"found": "full", "undecided": "undecided", "healthy": "not full"}


@click.command(short_help="Print for each recording whether a launch queue was full, where, and what it cost.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: each recording, its queues, the reasons.")
@window_options
def command(inputs: tuple[Path, ...], as_json: bool, window: WindowOptions) -> int:
    """For each recording, print one line that says whether a launch queue was full, worst first.

    triage looks only at launch queues, and gives one answer for each recording: full, not full, or undecided. A
    recording is undecided if it is cut off, empty, or has no submissions. `kvprobe check --no saturation` and `kvprobe
    report` give the same answer for each recording. `kvprobe report` also finds other causes.

    Each line shows the answer, the time that threads lost, how many submissions the queue held when it was full, the
    stream, and the file. If this number varied, the greatest is shown. "not seen" means that the recording does not
    show it. "channel" means that several streams filled a channel that they share, and "-" that no queue was full. If
    several causes share the time lost, the next line says how much each cost. Threads lost this time: `kvprobe report`
    says whether the GPU waited, too. A folder stands for all recordings below it; a run folder is one recording.
    --from, --to and --range judge a part of each recording. The exit code is 1 if an input cannot be read, or has no
    calls in that part.
    """
    from kvprobe.durations import time_text
    from kvprobe.recordings import expand_deeply

    if window != WindowOptions():
        window.check()
    found, errors = triaged([path for given in inputs for path in expand_deeply(given, _PACKED)], window)
    if as_json:
        TRIAGE.print(document(found, errors))
    else:
        rows = [_cells(one) for one in found]
        width = max([21, *(len(row[3]) for row in rows)])
        if found:
            click.echo(_row(("launch queue", "time lost", "full at", "stream", "recording"), width))
        for one, row in zip(found, rows, strict=True):
            click.echo(_row(row, width))
            if len(one.causes) > 1:
                parts = ", ".join(f"{cause} {time_text(ns)}" for cause, ns in one.causes)
                click.echo(f"              of which {parts}")
            for what, how in one.missing[:1] if one.verdict == "undecided" else ():
                click.echo(plain(f"              {what}; {how}"))
    for error in errors:
        click.echo(plain(f"kvprobe: {error}"), err=True)
    return 1 if errors else 0


def triaged(paths: Sequence[Path], window: WindowOptions) -> tuple[list[Triage], list[str]]:
    """The answers for recordings, worst first; and why others could not be read."""
    from kvprobe.recordings.quick_triage import Triage, certain, quick_triages

    quick = quick_triages(paths) if window == WindowOptions() else [None] * len(paths)
    answers = [
        answer if isinstance(answer, Exception) or (answer is not None and certain(answer)) else _whole(path, window)
        for path, answer in zip(paths, quick, strict=True)
    ]
    found = [answer for answer in answers if isinstance(answer, Triage)]
    found.sort(key=lambda one: (-one.lost_ns, _WORST.index(one.verdict)))
    errors = [str(answer) for answer in answers if not isinstance(answer, Triage)]
    return found, errors


def document(found: Sequence[Triage], errors: Sequence[str]) -> TriageJson:
    """What `--json` prints of them."""
    return {"recordings": [_json(one) for one in found], "errors": list(errors)}


def _whole(path: Path, window: WindowOptions) -> Triage | Exception:
    from kvprobe.commands._reading import reuse_memory
    from kvprobe.diagnosis.whole_triage import whole_triage
    from kvprobe.errors import RecordingError, UsageError

    reuse_memory()
    try:
        return whole_triage(path, window.of)
    except (RecordingError, UsageError) as error:
        return error if str(path) in str(error) else UsageError(f"{path}: {error}")


def _cells(one: Triage) -> tuple[str, ...]:
    from kvprobe.durations import time_text

    full = [queue for queue in one.queues if queue.verdict == "found"]
    shown = full or [queue for queue in one.queues if queue.verdict == "undecided"]
    lost = time_text(one.lost_ns) if one.lost_ns and one.verdict == "found" else "-"
    known = full and full[0].ceiling > 0
    if one.verdict != "found":
        ceiling = "-"
    elif not full:  # the streams share it, and none of their own queues was full
        ceiling = "channel"
    else:
        ceiling = f"{full[0].ceiling:,}" if known else "not seen"
    stream = shown[0].title + (f" and {len(shown) - 1} more" if len(shown) > 1 else "") if shown else "-"
    return _QUEUE[one.verdict], lost, ceiling, stream, plain(str(one.path))


def _row(cells: tuple[str, ...], width: int) -> str:
    """`width`: of the stream's column."""
    queue, lost, full_at, stream, path = cells
    return f"{queue:12}  {lost:>12}  {full_at:>8}  {stream:{width}}  {path}"


def _json(one: Triage) -> TriagedJson:
    return {
        "path": str(one.path),
        "verdict": cast("VerdictWord", one.verdict),
        "reason": one.reason,
        "how": one.how,
        "lost_ns": one.lost_ns,
        "missing": [{"what": what, "how": how} for what, how in one.missing],
        "queues": [cast("QueueJson", vars(queue)) for queue in one.queues],
    }
