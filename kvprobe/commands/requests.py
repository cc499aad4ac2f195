"""`kvprobe requests`: which requests were late, and what made them so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.commands._reading import WindowOptions, window_options
from kvprobe.errors import UsageError

if TYPE_CHECKING:
    from kvprobe.account import Account
    from kvprobe.output.requests import RequestsCommandJson
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.serving import ServingWindow
    from kvprobe.requests import Requests

__all__ = ["command", "document", "served"]


@click.command(short_help="Say which requests were late, and what made them so.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option(
    "--steps-by",
    default="",
    metavar="PATTERN",
    help="Take NVTX ranges as steps: a regular expression with named groups (step, phase, request).",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Also send spans of the requests to this OpenTelemetry endpoint: http://HOST:4318/v1/traces.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: waits, phases, late steps and requests.")
@window_options
def command(inputs: tuple[Path, ...], steps_by: str, otlp: str | None, as_json: bool, window: WindowOptions) -> int:
    """Say how long requests waited for their tokens, which requests were late, and which lines of the account say why.

    The account says where the time of each GPU went, in lines such as "computing" and "waiting for copies". The
    recording must show the steps of the server. Under `kvprobe run`, vLLM and SGLang that offload, and transformers'
    `generate`, tell them by themselves. Any other server calls `kvprobe.mark` at each step, sends each step to the
    socket `steps.sock` in the run folder, or names its steps in NVTX ranges (--steps-by). docs/requests.md shows how.

    A request is late if it waited too long for at least one token. A wait or a step is too long if it is above Tukey's
    outer fence of similar ones (the third quartile plus three times the interquartile range), and at least 10% longer
    than their median. The exit code is 1 if nothing can be decided.

    With --otlp, kvprobe sends spans of each request to OpenTelemetry: its queue, transfers, first token and late
    tokens. Each span carries the lines of the account as attributes. If the server named its trace, kvprobe's spans are
    children of the server's spans.
    """
    export = _spans_to(otlp) if otlp is not None else None
    told = served(inputs, window, steps_by, export=export)
    if as_json:
        from kvprobe.output import REQUESTS

        REQUESTS.print(document(told))
    elif told is None:
        click.echo(
            "Undecided: the recording shows no steps. Under `kvprobe run`, vLLM and SGLang that offload, and "
            "transformers' generate, tell them by themselves; in any other program, mark them (kvprobe.mark), or name "
            "NVTX ranges with --steps-by"
        )
    else:
        _print(told)
    return 0 if told is not None and not told.undecided else 1


def served(
    inputs: Sequence[Path],
    window: WindowOptions,
    steps_by: str = "",
    *,
    quiet: bool = False,
    export: Callable[..., None] | None = None,
) -> Requests | None:
    """What recordings tell of requests; None where they tell no steps. `steps_by`: a pattern of NVTX ranges.

    `export` is called with recording, account and window.
    """
    from kvprobe.commands._reading import opened
    from kvprobe.diagnosis import examined
    from kvprobe.recordings.steps import with_steps_of_ranges
    from kvprobe.requests import of_account

    recording = with_steps_of_ranges(opened(inputs, quiet=quiet), steps_by)
    found, _ = examined(recording, window.of(recording))
    if export is not None:
        export(recording, found.account, found.serving)
    return of_account(recording, found.account, found.serving)


def _spans_to(endpoint: str) -> Callable[..., None]:
    """What sends spans to an OTLP endpoint over HTTP.

    Raises:
        UsageError: OpenTelemetry's packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError("--otlp takes OpenTelemetry's packages: pip install 'kvprobe[otel]'") from None

    def send(recording: Recording, account: Account, window: ServingWindow) -> None:
        from kvprobe.requests.spans import emit, spans_of

        offset = recording.machine.get("unix_offset_ns")
        if offset is None:
            raise UsageError("--otlp: the recording does not tell what time of day it was (kvprobe run's does)")
        provider = TracerProvider(resource=Resource.create({"service.name": "kvprobe"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint), max_queue_size=1 << 20))
        count = emit(spans_of(recording, account, window), provider.get_tracer("kvprobe"), int(offset))
        provider.shutdown()
        click.echo(f"kvprobe: {count:,} spans went to {endpoint}", err=True)

    return send


def document(told: Requests | None) -> RequestsCommandJson:
    """What --json prints."""
    return {"served": told.to_json() if told is not None else None}


def _print(told: Requests) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvprobe.commands._reading import plain
    from kvprobe.commands._tables import print_table
    from kvprobe.reporting import late
    from kvprobe.reporting.units import NONE
    from kvprobe.reporting.views import left_out

    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    for sentence in late.sentences(told):
        console.print(Text(plain(sentence)))
    requests, steps = len(told.late_requests), told.late_steps
    for title, columns, rows, of, spared in (
        ("Steps by phase", late.PHASE_COLUMNS, late.phase_rows(told), len(told.phases), ("Late from",)),
        ("Late requests", late.REQUEST_COLUMNS, late.request_rows(told), requests, ("Late steps", "Late tokens")),
        ("Late steps", late.STEP_COLUMNS, late.step_rows(told), steps, ("Requests", "Took", "Phase")),
    ):
        if not rows:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        told_of = [i for i in range(len(columns)) if any(row[i] != NONE for row in rows)]
        for i in told_of:
            grid.add_column(Text(columns[i]))
        for row in rows:
            grid.add_row(*(Text(plain(row[i])) for i in told_of))
        wrapped = ("Request", "Mostly", "Cause", "Longest call")
        print_table(console, grid, wrapped=wrapped, spared=spared, rest="--json")
        if of > len(rows):
            console.print(Text(f"{left_out(len(rows), of)} --json has all.", style="dim"))
