"""What a permanent watch shows of ring files to whoever collects metrics: read at each scrape, no cost in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.probe.live import DIRECTIONS, Live, Totals, find_rings, in_flight, snapshots, totals
from kvprobe.probe.ring import CALLS, TRANSFER, bucket_bounds

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAM", "Collector", "Sample", "counts", "gauges"]

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
GAUGES = {
    "kvprobe_call_in_flight_seconds": ("Time inside the longest call in progress.", "kvprobe.call.in_flight", "s"),
    "kvprobe_watched_processes": ("Processes that run and are recorded.", "kvprobe.watched.processes", "{process}"),
    "kvprobe_queue_suspected": (
        "1: submissions became several times slower, as a full launch queue makes them.",
        "kvprobe.queue.suspected",
        "1",
    ),
    "kvprobe_blocked_share": (
        "Part of the time since the last scrape lost in submissions.",
        "kvprobe.blocked.share",
        "1",
    ),
}
HISTOGRAM = ("kvprobe_submit_seconds", "Host time of a call.")
LABELS = ("pid", "stream", "call", "direction")
_BOUNDS = range(28, 128, 4)  # histogram buckets whose lower bound is a power of two: 512 ns to 8.6 s


@dataclass(frozen=True)
class Sample:
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


def counts(target: Path | None) -> Iterator[Sample]:
    """Exact sums of all processes that the target's ring files are of, ended ones included."""
    for snapshot in snapshots(find_rings(target)):
        for (stream, call, direction), total in totals(snapshot).items():
            if call != TRANSFER:
                name = CALLS[call][1] if call in CALLS else str(call)
                yield Sample(snapshot.pid, f"{stream:#x}", name, DIRECTIONS.get(direction, "other"), total)


def gauges(live: Live) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name of GAUGES, labels, value: since the look before."""
    running = 0
    for snapshot in snapshots(find_rings(live.target)):
        running += snapshot.state == "running" and snapshot.running() is not False
        for one in in_flight(snapshot, time.monotonic_ns())[:1]:
            labels = {"pid": str(snapshot.pid), "stream": f"{one.stream:#x}", "call": one.call}
            yield "kvprobe_call_in_flight_seconds", labels, one.age_ns / 1e9
    yield "kvprobe_watched_processes", {}, running
    for view in live.look():
        for stream in view.streams:
            labels = {"pid": str(view.pid), "stream": f"{stream.stream:#x}"}
            yield "kvprobe_queue_suspected", labels, float(stream.suspected)
            yield "kvprobe_blocked_share", labels, stream.blocked_share


class Collector:
    """For prometheus_client's registry."""

    def __init__(self, target: Path | None) -> None:
        """`target` as for `Live`."""
        self._target, self._live = target, Live(target)

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
        found: dict[str, Any] = {}
        names = {
            "kvprobe_call_in_flight_seconds": ("pid", "stream", "call"),
            "kvprobe_watched_processes": (),
            "kvprobe_queue_suspected": ("pid", "stream"),
            "kvprobe_blocked_share": ("pid", "stream"),
        }
        for name, (text, _, _) in GAUGES.items():
            found[name] = GaugeMetricFamily(name, text, labels=names[name])
        for name, labels, value in gauges(self._live):
            found[name].add_metric(list(labels.values()), value)
        yield from (*counters.values(), durations, *found.values())
