"""What SGLang's steps are told as: tokens of each request, also of one that is in a step after it has ended."""

import json
from types import SimpleNamespace as Made

import pytest
from opentelemetry import propagate

from kvprobe.instrument import event_log
from kvprobe.patches.sglang_steps import Steps


def test_tokens_and_ends_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    stats = Made(last_decode_finish_time=0.0, last_prefill_finished_time=0.0, last_chunked_prefill_finish_time=0.0)
    a, b = (Made(rid=name, output_ids=[], finished_reason=None, time_stats=stats) for name in "ab")
    scheduler = Made(metrics_reporter=Made(is_stats_logging_rank=True), pp_group=Made(is_first_rank=True))
    steps = Steps()

    def step(number, mode, requests, computed=None):
        batch = Made(forward_mode=Made(name=mode), reqs=requests, launch_ts=None, forward_iter=number)
        batch.extend_lens = computed
        steps.stepped(number * 1000, None, (scheduler, batch, None), {})
        event_log.flush()

    step(1, "EXTEND", [a], [256])  # a chunk of its prompt: no token
    a.output_ids.append(5)
    step(2, "EXTEND", [a], [100])
    a.output_ids.append(5)
    b.output_ids.append(6)
    step(3, "MIXED", [b, a], [50, 1])
    a.output_ids.append(5)
    a.finished_reason = "length"
    b.output_ids += [6, 6]
    step(4, "DECODE", [b, a])
    b.output_ids.append(6)
    step(5, "DECODE", [b, a])  # was launched before the end of a was known
    step(6, "IDLE", [])
    (path,) = tmp_path.glob("steps-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names, told, ended = {}, [], []
    for line in lines:
        if line["kind"] == "request":
            names[line["n"]] = line["request"]
        elif line["kind"] == "step":
            of = [names[n] for n in line["requests"]]
            told.append((line["step"], line["phase"], of, line["tokens"], line["computed"]))
        elif line["kind"] == "ended":
            ended.append(names[line["n"]])
    assert told == [
        (1, "prefill", ["a"], 0, 256),
        (2, "prefill", ["a"], 1, 100),
        (3, "mixed", ["b", "a"], 1, [50, 1]),
        (4, "decode", ["b", "a"], [2, 1], 1),
        (5, "decode", ["b", "a"], [1, 0], 1),
    ]
    assert ended == ["a"]


@pytest.mark.parametrize("traced", [True, False])
def test_a_request_lies_below_the_servers_own_span(tmp_path, monkeypatch, traced):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    span = propagate.extract({"traceparent": own})  # so it comes from the process that began the request
    context = Made(tracing_enable=traced, root_span_context=span if traced else Made())
    scheduler = Made(metrics_reporter=Made(is_stats_logging_rank=True), pp_group=None)
    Steps().added(lambda: None, scheduler, Made(rid="a", time_stats=Made(created_time=1.0, trace_ctx=context)))
    event_log.flush()
    (path,) = tmp_path.glob("steps-*.jsonl")
    (arrived,) = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "arrived"]
    assert arrived.get("trace") == (own if traced else None)
