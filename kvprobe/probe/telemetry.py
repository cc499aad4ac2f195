"""Metrics for OpenTelemetry: its names where its conventions have them (hw.gpu.*, hw.errors), kvprobe.* elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvprobe.errors import UsageError
from kvprobe.probe.exposed import COUNTERS, GAUGES, counts, gauges
from kvprobe.probe.live import Live

__all__ = ["CONVENTIONS", "instruments", "provider"]

# what the semantic conventions for hardware name; a stream's GPU is not known to the recorder, so hw.id is its process
CONVENTIONS = {
    "hw.gpu.io": ("By", "Bytes that copies were asked to move to (receive) and from (transmit) GPUs."),
    "hw.errors": ("{error}", "Calls whose return code was not 0."),
}
_WAYS = {"h2d": "receive", "d2h": "transmit"}


def instruments(meter: Any, target: Path | None) -> None:
    """Makes the observable instruments of a meter; each reads the ring files when it is collected."""
    from opentelemetry.metrics import Observation

    live = Live(target)

    def counter(field: str) -> Any:
        def observe(_: Any) -> Iterator[Any]:
            for one in counts(target):
                value = getattr(one.sums, field)
                attributes: Any = {
                    "process.pid": one.pid,
                    "kvprobe.stream": one.stream,
                    "kvprobe.call": one.call,
                    "kvprobe.direction": one.direction,
                }
                yield Observation(value / 1e9 if field.endswith("_ns") else value, attributes)

        return observe

    def gpu_io(_: Any) -> Iterator[Any]:
        sums: dict[tuple[int, str], int] = {}
        for one in counts(target):
            if way := _WAYS.get(one.direction):
                sums[one.pid, way] = sums.get((one.pid, way), 0) + one.sums.bytes
        for (pid, way), value in sums.items():
            yield Observation(value, {"hw.id": f"pid:{pid}", "network.io.direction": way})

    def errors(_: Any) -> Iterator[Any]:
        for one in counts(target):
            if one.sums.errors:
                attributes: Any = {"hw.id": f"pid:{one.pid}", "hw.type": "gpu", "error.type": one.call}
                yield Observation(one.sums.errors, attributes)

    def gauge(name: str) -> Any:
        keys = [f"kvprobe.{label}" for label in GAUGES[name].labels]

        def observe(_: Any) -> Iterator[Any]:
            own = live if name == "kvprobe_queue_suspected" else Live(target)
            for found, labels, value in gauges(own):
                if found == name:
                    yield Observation(value, dict(zip(keys, labels, strict=True)))

        return observe

    for field, (_, text, name, unit) in COUNTERS.items():
        meter.create_observable_counter(name, [counter(field)], unit, text)
    for (name, (unit, text)), read in zip(CONVENTIONS.items(), (gpu_io, errors), strict=True):
        meter.create_observable_counter(name, [read], unit, text)
    for name, one in GAUGES.items():
        if name != "kvprobe_blocked_share":  # a look takes the interval since the one before: one instrument has it
            meter.create_observable_gauge(one.telemetry, [gauge(name)], one.unit, one.text)


def provider(target: Path | None, endpoint: str, interval_s: float) -> Any:
    """A meter provider that sends to an OTLP endpoint over HTTP; its `shutdown` sends the last figures.

    Raises:
        UsageError: OpenTelemetry's packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise UsageError("--otlp takes OpenTelemetry's packages: pip install 'kvprobe[otel]'") from None
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint), int(interval_s * 1000))
    made = MeterProvider([reader], Resource.create({"service.name": "kvprobe"}))
    instruments(made.get_meter("kvprobe"), target)
    return made
