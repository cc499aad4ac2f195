"""Spans of requests for OpenTelemetry, beside the server's own: queue, transfers, first token, late tokens.

Each has the lines of the account as attributes, in seconds. Where the server told the trace context of its own span of
a request, kvprobe's spans lie below it, in the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvprobe.account import Account
from kvprobe.recordings.model import Array, Phase, Recording
from kvprobe.recordings.serving import ServingWindow
from kvprobe.requests.late import joined
from kvprobe.requests.split import LOAD, PART_KEYS, TURN

__all__ = ["MOST_LATE", "Span", "emit", "spans_of"]

MOST_LATE = 100  # late tokens of a request that have a span of their own
PREFIX = "kvprobe.account."


@dataclass
class Span:
    """A stretch of a request's life, on the recorder's own clock; `trace`: the parent's traceparent, "" none."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    below: list[Span] = field(default_factory=list)


def spans_of(recording: Recording, account: Account, window: ServingWindow) -> list[Span]:
    """A span for each request that got a token in the window, with what it consists of below it."""
    join = joined(recording, account, window)
    if join is None:
        return []
    told = join.told
    traces = _traces(recording)
    waits = np.flatnonzero(join.counts)
    parts = join.parts(waits)
    out: dict[int, Span] = {}
    for wait, split in zip(waits.tolist(), parts, strict=True):
        pair = int(join.ends[wait])
        request, step = int(told.request[pair]), int(told.step[pair])
        begin, end = int(told.since_ns[join.begins[wait]]), int(told.to_ns[step])
        span = out.get(request)
        if span is None:
            key = int(told.of_process[request]), int(told.name[request])
            span = out[request] = Span("kvprobe request", begin, end, {}, traces.get(key, ""))
            name = recording.text(key[1])
            span.attributes = {"kvprobe.request": name, "kvprobe.tokens": 0, "kvprobe.late_tokens": 0}
        span.start_ns, span.end_ns = min(span.start_ns, begin), max(span.end_ns, end)
        span.attributes["kvprobe.tokens"] += 1
        late = bool(join.is_late[wait])
        span.attributes["kvprobe.late_tokens"] += late
        if join.is_first[wait]:
            span.below.append(Span("kvprobe first token", begin, end, {**_seconds(split), "kvprobe.late": late}))
            turn = int(told.turn_ns[join.begins[wait]])
            if turn:
                span.below.append(Span("kvprobe queue", begin, begin + turn, _seconds(split, (TURN, LOAD))))
        elif late and len(span.below) < MOST_LATE:
            more = {"kvprobe.step": int(told.number[step]), "kvprobe.late": True}
            span.below.append(Span("kvprobe late token", begin, end, {**_seconds(split), **more}))
    _transfers(recording, {_key(told, request): span for request, span in out.items()})
    return list(out.values())


def _key(told: Any, request: int) -> tuple[int, int]:
    return int(told.of_process[request]), int(told.name[request])


def _seconds(split: Array, only: tuple[int, ...] = ()) -> dict[str, float]:
    return {
        PREFIX + PART_KEYS[part]: ns / 1e9
        for part, ns in enumerate(split.tolist())
        if ns and (not only or part in only)
    }


def _traces(recording: Recording) -> dict[tuple[int, int], str]:
    """The traceparent of each request, by process and index of its name."""
    times = recording.request_times
    rows = np.flatnonzero(times["trace"] > 0)
    columns = (times[name][rows].tolist() for name in ("process", "request", "trace"))
    return {(process, request): recording.text(trace) for process, request, trace in zip(*columns, strict=True)}


def _transfers(recording: Recording, spans: dict[tuple[int, int], Span]) -> None:
    """Loads and stores of the requests' own blocks."""
    table, of = recording.steps, recording.step_requests
    kinds = {int(Phase.LOAD): "kvprobe load", int(Phase.STORE): "kvprobe store"}
    steps = np.flatnonzero(np.isin(table["phase"], np.array(list(kinds))))
    columns = (table[name][steps].tolist() for name in ("process", "id"))
    row_of = {own: row for row, own in zip(steps.tolist(), zip(*columns, strict=True), strict=True)}
    pairs = np.flatnonzero(np.isin(of["id"], table["id"][steps]))
    columns = (of[name][pairs].tolist() for name in ("process", "id", "request", "computed"))
    for process, number, request, size in zip(*columns, strict=True):
        row, span = row_of.get((process, number)), spans.get((process, request))
        if row is not None and span is not None:
            more = {"kvprobe.bytes": size} if size >= 0 else {}
            begin, end = int(table["start_ns"][row]), int(table["end_ns"][row])
            span.below.append(Span(kinds[int(table["phase"][row])], begin, end, more))


def emit(spans: list[Span], tracer: Any, unix_offset_ns: int) -> int:
    """Makes them with OpenTelemetry's tracer; returns how many. `unix_offset_ns` makes UNIX time of a recorder's."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    def one(span: Span, context: Any) -> int:
        made = tracer.start_span(
            span.name, context=context, attributes=span.attributes, start_time=span.start_ns + unix_offset_ns
        )
        inside = set_span_in_context(made)
        count = 1 + sum(one(below, inside) for below in span.below)
        made.end(span.end_ns + unix_offset_ns)
        return count

    count = 0
    for span in spans:
        context = None
        if span.trace:
            _, trace, parent, flags = span.trace.split("-")
            told = SpanContext(int(trace, 16), int(parent, 16), True, TraceFlags(int(flags, 16)))
            context = set_span_in_context(NonRecordingSpan(told)) if told.is_valid else None
        count += one(span, context)
    return count
