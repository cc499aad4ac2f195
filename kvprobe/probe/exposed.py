"""What a permanent watch shows of ring files to whoever collects metrics: read at each scrape, no cost in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvprobe.errors import KvprobeError
from kvprobe.probe.live import DIRECTIONS, Live, Totals, find_rings, in_flight, snapshots, totals
from kvprobe.probe.ring import CALLS, TRANSFER, bucket_bounds

__all__ = [
    "COUNTERS",
    "GAUGES",
    "HISTOGRAM",
    "LATE",
    "WAITS",
    "CallTotals",
    "Collector",
    "as_text",
    "counts",
    "folders",
    "gauges",
    "served",
]

# field of Totals -> (Prometheus, its text, OpenTelemetry, unit)
COUNTERS = {
    "count": ("kvprobe_submissions", "Calls, by what was called.", "kvprobe.submissions", "{call}"),
    "copies": ("kvprobe_copies", "Copies in them; a batch has many.", "kvprobe.copies", "{copy}"),
    "bytes": ("kvprobe_bytes", "Bytes asked for.", "kvprobe.io", "By"),
    "slow_ns": (
        "kvprobe_blocked_seconds",
        "Host time inside calls at or above the recording's slow threshold.",
        "kvprobe.blocked.time",
        "s",
    ),
    "errors": ("kvprobe_errors", "Calls whose return code was not 0.", "kvprobe.errors", "{error}"),
}


class Gauge(NamedTuple):
    """A value that goes up and down: its text, OpenTelemetry's name and unit, and the labels of its samples."""

    text: str
    telemetry: str
    unit: str
    labels: tuple[str, ...]


GAUGES = {
    "kvprobe_call_in_flight_seconds": Gauge(
        "Time inside the longest call in progress.", "kvprobe.call.in_flight", "s", ("pid", "stream", "call")
    ),
    "kvprobe_watched_processes": Gauge(
        "Processes that run and are recorded.", "kvprobe.watched.processes", "{process}", ()
    ),
    "kvprobe_queue_suspected": Gauge(
        "1: submissions became several times slower, as a full launch queue makes them.",
        "kvprobe.queue.suspected",
        "1",
        ("pid", "stream"),
    ),
    "kvprobe_blocked_share": Gauge(
        "Part of the time since the last scrape lost in submissions.", "kvprobe.blocked.share", "1", ("pid", "stream")
    ),
}
# of what servers tell of their steps, where they do
WAITS = {
    "first": ("kvprobe_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "between": ("kvprobe_time_between_tokens_seconds", "Between two tokens of a request."),
}
LATE = ("kvprobe_late_tokens", "Waits for tokens that were late: longer than those of like steps by far.")
HISTOGRAM = ("kvprobe_submit_seconds", "Host time of a call.")
LABELS = ("pid", "stream", "call", "direction")
_BOUNDS = range(28, 128, 4)  # histogram buckets whose lower bound is a power of two: 512 ns to 8.6 s


@dataclass(frozen=True)
class CallTotals:
    """The sums of one stream, call and direction of one process."""

    pid: int
    stream: str
    call: str
    direction: str
    sums: Totals

    @property
    def labels(self) -> list[str]:
        """In the order of LABELS."""
        return [str(self.pid), self.stream, self.call, self.direction]


def counts(target: Path | None) -> Iterator[CallTotals]:
    """Exact sums of all processes that the target's ring files are of, ended ones included until they are packed."""
    for snapshot in snapshots(find_rings(target)):
        for (stream, call, direction), total in totals(snapshot).items():
            if call != TRANSFER:
                name = CALLS[call][1] if call in CALLS else str(call)
                yield CallTotals(snapshot.pid, f"{stream:#x}", name, DIRECTIONS.get(direction, "other"), total)


def gauges(live: Live) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name of GAUGES, values of its labels, value: since the look before."""
    running = 0
    for snapshot in snapshots(find_rings(live.target)):
        running += snapshot.state == "running" and snapshot.running() is not False
        for one in in_flight(snapshot, time.monotonic_ns())[:1]:
            labels = str(snapshot.pid), f"{one.stream:#x}", one.call
            yield "kvprobe_call_in_flight_seconds", labels, one.age_ns / 1e9
    yield "kvprobe_watched_processes", (), running
    for view in live.look():
        for stream in view.streams:
            of_stream = str(view.pid), f"{stream.stream:#x}"
            yield "kvprobe_queue_suspected", of_stream, float(stream.suspected)
            yield "kvprobe_blocked_share", of_stream, stream.blocked_share


def folders(target: Path | None) -> set[Path]:
    """The run folders that `target` (as for `Live`) is, or is in."""
    found = {ring.parent for ring in find_rings(target)}
    return found | {target} if target is not None and target.is_dir() else found


class Collector:
    """For prometheus_client's registry."""

    def __init__(self, target: Path | None, requests: Any = None) -> None:
        """`target` as for `Live`; `requests`: a `requests.live.LiveRequests`, None for no metrics of requests."""
        self._target, self._live, self._requests = target, Live(target), requests

    def describe(self) -> list[Any]:
        """The metrics without samples."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics of one scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        counters = {
            field: CounterMetricFamily(name, text, labels=LABELS) for field, (name, text, _, _) in COUNTERS.items()
        }
        durations = HistogramMetricFamily(*HISTOGRAM, labels=LABELS)
        bounds = bucket_bounds()
        for one in counts(self._target):
            for field, family in counters.items():
                value = getattr(one.sums, field)
                family.add_metric(one.labels, value / 1e9 if field.endswith("_ns") else value)
            below = one.sums.histogram.cumsum()
            buckets = [(str(bounds[at] / 1e9), float(below[at - 1])) for at in _BOUNDS]
            durations.add_metric(one.labels, [*buckets, ("+Inf", float(below[-1]))], one.sums.dur_ns / 1e9)
        found = {name: GaugeMetricFamily(name, gauge.text, labels=gauge.labels) for name, gauge in GAUGES.items()}
        for name, labels, value in gauges(self._live):
            found[name].add_metric(labels, value)
        yield from (*counters.values(), durations, *found.values(), *self._of_requests())

    def _of_requests(self) -> Iterator[Any]:
        """What servers tell of their steps; exemplars name a request, its step and its trace (OpenMetrics alone)."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
        from prometheus_client.samples import Exemplar

        if self._requests is None:
            return
        self._requests.look(folders(self._target))
        waits = {kind: HistogramMetricFamily(*told, labels=("pid",)) for kind, told in WAITS.items()}
        late = CounterMetricFamily(*LATE, labels=("pid", "token"))
        for pid, sums in self._requests.sums():
            for kind, one in sums.items():
                buckets: list[Any] = []
                for bound, below, newest in one.cumulated():
                    label = "+Inf" if bound is None else str(bound)
                    shown = newest and Exemplar(newest.labels(), newest.ns / 1e9)
                    buckets.append((label, float(below), shown) if shown else (label, float(below)))
                waits[kind].add_metric([str(pid)], buckets, one.ns / 1e9)
                late.add_metric([str(pid), kind], one.late)
        yield from (*waits.values(), late)


def as_text(target: Path | None, requests: Any = None) -> str:
    """The metrics of one scrape, as Prometheus reads them; arguments as for `Collector`."""
    from prometheus_client import generate_latest

    return generate_latest(_registry(target, requests)).decode()


@contextmanager
def served(target: Path | None, port: int, address: str = "127.0.0.1", requests: Any = None) -> Iterator[str]:
    """Serves the metrics (arguments as for `Collector`) at http://address:port/metrics, and yields this URL.

    Raises:
        KvprobeError: the port cannot be used.
    """
    from prometheus_client import make_wsgi_app

    from kvprobe.probe.metrics_server import serve

    try:
        server, thread = serve(make_wsgi_app(_registry(target, requests)), port, address)
    except OSError as error:
        raise KvprobeError(f"port {port} of {address} cannot be used: {error.strerror}; choose another") from None
    try:
        yield f"http://{address}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _registry(target: Path | None, requests: Any = None) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(Collector(target, requests))
    return registry
