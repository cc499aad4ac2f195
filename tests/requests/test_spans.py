"""Spans of requests: beside the server's own, with the account's lines, at the time of day."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import RequestTime, Table
from kvprobe.recordings.vocabulary import Names
from kvprobe.requests import of_account
from kvprobe.requests.spans import PREFIX, emit, spans_of

LATE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "late_requests.py"))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OFFSET = 1_700_000_000_000_000_000


def test_each_request_has_spans_that_add_up_below_the_servers_own() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    recording, _ = LATE["played"](200, 8, 1, 1 / 100)
    times = {key: column.copy() for key, column in dict(recording.request_times).items()}
    chosen = int(np.flatnonzero(times["what"] == RequestTime.ARRIVED)[60])
    names = Names(recording.names)
    times["trace"][chosen] = names.add(TRACE)
    recording.names = names.list
    recording.tables["request_times"] = Table("request_times", times)
    found = examine(recording)
    told = of_account(recording, found.account, found.serving)
    assert told is not None
    spans = {span.attributes["kvprobe.request"]: span for span in spans_of(recording, found.account, found.serving)}
    assert len(spans) == told.requests
    for span in spans.values():
        for below in (one for one in span.below if one.name in ("kvprobe first token", "kvprobe late token")):
            lines = sum(s for key, s in below.attributes.items() if key.startswith(PREFIX))
            assert lines == pytest.approx((below.end_ns - below.start_ns) / 1e9, abs=1e-6)
    for late in told.late_requests:
        assert spans[late.name].attributes["kvprobe.late_tokens"] == late.late_tokens + late.first_late
        loads = [one for one in spans[late.name].below if one.name == "kvprobe load"]
        assert len(loads) == 1

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    own = recording.text(int(times["request"][chosen]))
    assert emit([spans[own]], provider.get_tracer("test"), OFFSET) == 1 + len(spans[own].below)
    made = {one.name: one for one in exporter.get_finished_spans()}
    root = made["kvprobe request"]
    assert (
        f"{root.context.trace_id:032x}" == TRACE.split("-")[1] and f"{root.parent.span_id:016x}" == TRACE.split("-")[2]
    )
    assert root.start_time == spans[own].start_ns + OFFSET and root.end_time == spans[own].end_ns + OFFSET
    assert made["kvprobe first token"].parent.span_id == root.context.span_id
