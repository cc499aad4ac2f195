"""Metrics for good: equal to what was counted; the alert rules and the dashboard name nothing that is not there."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import kvprobe.monitoring as monitoring
from kvprobe.probe import exposed, telemetry
from kvprobe.probe.flight import FlightRecorder
from kvprobe.probe.live import ProcessView, StreamView
from kvprobe.recordings import open_recording
from kvprobe.requests.live import LiveRequests


def scraped(target: Path) -> dict[str, Any]:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry()
    registry.register(exposed.Collector(target, LiveRequests()))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics_are_the_counts(watched: Any) -> None:
    watched.write(990, dur_ns=1000, stream=7, bytes=4096)
    watched.write(10, dur_ns=400_000, stream=7, bytes=4096, direction=2)
    families = scraped(watched.path.parent)
    assert {one.labels["direction"]: one.value for one in families["kvprobe_bytes"].samples} == {
        "h2d": 990 * 4096,
        "d2h": 10 * 4096,
    }
    assert sum(one.value for one in families["kvprobe_submissions"].samples) == 1000
    durations = {one.labels.get("le"): one for one in families["kvprobe_submit_seconds"].samples}
    assert sum(one.value for one in families["kvprobe_submit_seconds"].samples if one.name.endswith("_count")) == 1000
    assert sum(one.value for one in families["kvprobe_submit_seconds"].samples if one.name.endswith("_sum")) == (
        pytest.approx((990 * 1000 + 10 * 400_000) / 1e9)
    )
    assert "+Inf" in durations
    assert [one.value for one in families["kvprobe_watched_processes"].samples] == [1]


def test_rules_and_dashboard_name_metrics_that_exist(watched: Any) -> None:
    watched.write(10, dur_ns=1000, stream=7, bytes=4096)
    names = set()
    for family in scraped(watched.path.parent).values():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    for file in monitoring.FILES:
        text = Path(monitoring.__file__).with_name(file).read_text()
        used = set(re.findall(r"\bkvprobe_\w+", text))
        assert used and used <= names, (file, used - names)
    dashboard = json.loads(Path(monitoring.__file__).with_name("dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == len(expressions)
    assert all(text.count("(") == text.count(")") for text in expressions)


def test_the_alert_rules_are_rules() -> None:
    yaml = pytest.importorskip("yaml")
    groups = yaml.safe_load(Path(monitoring.__file__).with_name("alerts.yaml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["expr"].strip()
        assert rule["expr"].count("(") == rule["expr"].count(")") and rule["annotations"]["summary"]


def test_opentelemetry_has_the_same_figures(watched: Any) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    watched.write(5, dur_ns=1000, stream=7, bytes=4096)
    reader = InMemoryMetricReader()
    telemetry.instruments(MeterProvider([reader]).get_meter("test"), watched.path.parent)
    data = reader.get_metrics_data()
    found = {
        metric.name: {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    pid = watched.process.pid
    assert found["hw.gpu.io"] == {(("hw.id", f"pid:{pid}"), ("network.io.direction", "receive")): 5 * 4096}
    assert list(found["kvprobe.submissions"].values()) == [5]
    assert list(found["kvprobe.watched.processes"].values()) == [1]


def view_of(watched: Any, suspected: bool) -> list[ProcessView]:
    stream = StreamView(7, 1.0, 1.0, 1.0, 1.0, 0.9, None, {}, suspected)
    path = str(watched.path)
    return [ProcessView(watched.process.pid, "", "interposer", path, "running", 1.0, [stream], None, 0)]


def test_a_flight_is_kept_when_a_queue_is_suspected_and_is_a_recording(watched: Any, tmp_path: Path) -> None:
    watched.write(100, dur_ns=1000, stream=7, bytes=4096)
    recorder = FlightRecorder(tmp_path / "flights", keep=2, pause_s=3600)
    assert recorder.look(view_of(watched, suspected=False)) is None and not recorder.folder.exists()
    kept = recorder.look(view_of(watched, suspected=True))
    assert kept is not None and open_recording([kept]).calls.rows == 100
    assert recorder.look(view_of(watched, suspected=True)) is None, "the next one comes later"
    original = watched.path.stat()
    copied = kept / watched.path.name
    assert copied.stat().st_size == original.st_size and copied.stat().st_blocks <= original.st_blocks


def test_old_flights_go(watched: Any, tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flights", keep=2, pause_s=0)
    for day in (1, 2, 3):
        (recorder.folder / f"flight-2020010{day}-000000-1").mkdir(parents=True)
    assert recorder.look(view_of(watched, suspected=True))
    names = sorted(path.name for path in recorder.folder.iterdir())
    assert len(names) == 2 and names[0] == "flight-20200103-000000-1"
    assert time.strftime("%Y") in names[1]
