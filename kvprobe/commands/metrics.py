"""`kvprobe metrics`: watching for good, from beside: metrics, and a flight recorder."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvprobe.commands._device import Seconds
from kvprobe.commands._paths import GivenPath
from kvprobe.errors import UsageError

if TYPE_CHECKING:
    from kvprobe.probe.flight import FlightRecorder
    from kvprobe.probe.live import ProcessView
    from kvprobe.requests.live import Alerts, LiveRequests

__all__ = ["command"]


@click.command(short_help="Export metrics to Prometheus or OpenTelemetry, and keep the calls around each slow moment.")
@click.argument("target", required=False, metavar="[PID|NAME|FOLDER]")
@click.option("--port", default=9464, show_default=True, type=click.IntRange(0, 65535), help="0: serve nothing.")
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to serve on; 0.0.0.0: all interfaces.",
)
@click.option("--otlp", metavar="URL", help="Send to this OpenTelemetry endpoint as well: http://HOST:4318/v1/metrics.")
@click.option(
    "--interval",
    default=5.0,
    show_default=True,
    type=Seconds(0.1, 3600),
    help="Seconds between reads of the run's files.",
)
@click.option(
    "--flight-recorder",
    "flights",
    type=GivenPath(),
    metavar="DIR",
    help="Save the newest calls here when a queue seems to be full, or too many tokens are late.",
)
@click.option(
    "--late-tokens",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Alert when more than this share of a process's tokens in the last minute were late.",
)
@click.option(
    "--keep", default=8, show_default=True, type=click.IntRange(1, 1000), help="How many of these recordings are kept."
)
@click.option("--once", is_flag=True, help="Print the metrics once, as Prometheus reads them, and exit.")
@click.option("--rules", type=GivenPath(), metavar="DIR", help="Write the alert rules and dashboard here.")
def command(
    target: str | None,
    port: int,
    listen: str,
    otlp: str | None,
    interval: float,
    flights: Path | None,
    late_tokens: float | None,
    keep: int,
    once: bool,
    rules: Path | None,
) -> None:
    """Serve what `kvprobe run --detail totals -- COMMAND` counts, for as long as it runs.

    kvprobe only reads the files of the run, so a scrape costs the server nothing, and neither its memory nor the files
    grow. You name the run as for `kvprobe top`. The command ends when the run ends, or with Ctrl-C.

    With --flight-recorder, kvprobe saves the newest calls of each thread when submissions become slow, as they do when
    a launch queue is full. `kvprobe report DIR/flight-...` reads what was saved: all copies if the server runs under
    `kvprobe run --detail copies`, and only slow calls under --detail totals.

    If the server marks its steps (`kvprobe.mark`, an adapter, the run folder's socket), kvprobe also serves the times
    to the first token and between tokens. The OpenMetrics exemplars of these times name the request, its step and its
    trace. With --late-tokens, an alert prints a line and writes an `alert.json` into the saved folder. `kvprobe
    requests DIR/flight-...` says which requests were late and why.
    """
    if rules is not None:
        _write_rules(rules)
        if target is None and not once and flights is None and otlp is None and late_tokens is None:
            return
    from kvprobe.commands.top import find_target
    from kvprobe.probe.exposed import as_text, served
    from kvprobe.probe.flight import FlightRecorder
    from kvprobe.requests.live import Alerts, LiveRequests

    requests = LiveRequests()
    run = None if target is None else find_target(target)
    if once:
        click.echo(as_text(run, requests), nl=False)
        return
    with ExitStack() as open_until_end:
        if otlp is not None:
            from kvprobe.probe.telemetry import provider

            open_until_end.callback(provider(run, otlp, interval).shutdown)
        if port:
            url = open_until_end.enter_context(served(run, port, listen, requests))
            click.echo(f"kvprobe: serving {url}; Ctrl-C ends it", err=True)
        if flights is not None:
            click.echo(
                f"kvprobe: flight recorder on; when submissions become slow, recordings go to {flights}", err=True
            )
        recorder = FlightRecorder(flights, keep) if flights is not None else None
        alerts = Alerts(requests, late_tokens) if late_tokens is not None else None
        _watch(run, interval, recorder, requests, alerts)


def _write_rules(folder: Path) -> None:
    import kvprobe.monitoring as monitoring
    from kvprobe.reporting.page import write_whole

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in monitoring.FILES:
            write_whole(folder / name, Path(monitoring.__file__).with_name(name).read_bytes())
            click.echo(f"kvprobe: wrote {folder / name}", err=True)
    except OSError as error:
        raise UsageError(f"--rules {folder}: {error.strerror}") from None


def _watch(
    run: Path | None, interval: float, recorder: FlightRecorder | None, requests: LiveRequests, alerts: Alerts | None
) -> None:
    """Looks at the run until it has ended, or a signal says to end; alerts, and keeps flights."""
    from kvprobe.probe.exposed import folders
    from kvprobe.probe.live import Live, over

    live = Live(run)
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        live.look()
        while not ended.wait(interval):
            views = live.look()
            if recorder is not None:
                _keep(recorder, views)
            if alerts is not None:
                requests.look(folders(run))
                _alert(alerts, recorder, views)
            if run is not None and not views and over(run):
                break
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep(recorder: FlightRecorder, views: list[ProcessView]) -> None:
    try:
        written = recorder.look(views)
    except OSError as error:
        _say_not_kept(recorder, error)
        return
    if written is not None:
        click.echo(f"kvprobe: submissions became slow; the newest calls are kept in {written}", err=True)


def _alert(alerts: Alerts, recorder: FlightRecorder | None, views: list[ProcessView]) -> None:
    for one in alerts.look(time.monotonic_ns()):
        kept = None
        if recorder is not None:
            rings = [Path(view.path) for view in views if Path(view.path).parent == one.folder]
            try:
                kept = recorder.take(rings, one.pid, one.to_json()) or recorder.newest
            except OSError as error:
                _say_not_kept(recorder, error)
        where = f"; the newest calls are kept in {kept}" if kept is not None else ""
        click.echo(f"kvprobe: {one.sentence}{where}", err=True)


def _say_not_kept(recorder: FlightRecorder, error: OSError) -> None:
    click.echo(f"kvprobe: the newest calls could not be kept in {recorder.folder}: {error.strerror}", err=True)
