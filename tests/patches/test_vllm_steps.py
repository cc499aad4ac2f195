"""What vLLM's requests are told with: the trace that they came with."""

import json
import time
from types import SimpleNamespace as Made

import pytest

from kvprobe.instrument import event_log
from kvprobe.patches.vllm_steps import Steps

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("headers", [{"traceparent": PARENT, "tracestate": "a=b"}, {"tracestate": "a=b"}, None])
def test_a_request_lies_in_the_trace_that_it_came_with(tmp_path, monkeypatch, headers):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    request = Made(request_id="a", arrival_time=time.time(), trace_headers=headers)
    Steps().added(lambda: None, None, request)
    event_log.flush()
    (path,) = tmp_path.glob("steps-*.jsonl")
    (arrived,) = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "arrived"]
    assert arrived.get("trace") == (headers or {}).get("traceparent")


@pytest.mark.parametrize("version", ["0.11.0", "0.33.0"])
def test_vllms_own_request_has_them(wheel_tree, version):
    text = (wheel_tree("vllm", version, "vllm/v1/request.py") / "vllm/v1/request.py").read_text()
    assert "self.trace_headers = trace_headers" in text


def told_in(folder):
    """Steps as they were told, by the names of their requests, and who ended."""
    (path,) = folder.glob("steps-*.jsonl")
    names, told, ended = {}, [], []
    for line in map(json.loads, path.read_text().splitlines()):
        if line["kind"] == "request":
            names[line["n"]] = line["request"]
        elif line["kind"] == "step":
            of = [names[n] for n in line["requests"]]
            told.append((line["step"], line["phase"], of, line["tokens"], line["computed"]))
        elif line["kind"] == "ended":
            ended.append(names[line["n"]])
    return told, ended


@pytest.mark.parametrize("apart", [False, True])
def test_who_got_how_many_tokens_is_told_of_every_step(tmp_path, monkeypatch, apart):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    steps = Steps()

    def step(computed, emitted, ended=(), resumed=()):
        """`apart`: each request is of another client, and the last one's outputs come first."""
        scheduled = Made(
            total_num_scheduled_tokens=sum(computed.values()),
            num_scheduled_tokens=computed,
            scheduled_cached_reqs=Made(resumed_req_ids=set(resumed)),
        )
        made = [
            Made(request_id=name, new_token_ids=[7] * new, finish_reason="stop" if name in ended else None)
            for name, new in emitted.items()
        ]
        now_ns = time.monotonic_ns()
        steps.scheduled(now_ns, scheduled, (None,), {})
        of_clients = [[one] for one in reversed(made)] if apart else [made]
        outputs = {n: Made(timestamp=now_ns / 1e9, outputs=of) for n, of in enumerate(of_clients)}
        steps.stepped(now_ns, outputs, (None, scheduled), {})

    step({"a": 256}, {})  # a chunk of its prompt: no token
    step({"a": 44}, {"a": 1})
    step({"a": 1, "b": 100, "c": 9}, {"a": 1, "c": 1})
    step({"a": 1, "b": 50, "c": 1}, {"a": 2, "b": 1, "c": 1}, ended=["c"])
    step({"a": 1, "b": 1}, {"a": 1, "b": 1})
    step({"a": 70, "b": 1}, {"a": 1, "b": 1}, resumed=["a"])
    step({"a": 1, "b": 1}, {"a": 1, "b": 1}, ended=["a", "b"])
    event_log.flush()
    told, ended = told_in(tmp_path)
    assert told == [
        (0, "prefill", ["a"], 0, 256),
        (1, "prefill", ["a"], 1, 44),
        (2, "mixed", ["a", "b", "c"], [1, 0, 1], [1, 100, 9]),
        (3, "mixed", ["a", "b", "c"], [2, 1, 1], [1, 50, 1]),
        (4, "decode", ["a", "b"], 1, 1),
        (5, "mixed", ["a", "b"], 1, [70, 1]),
        (6, "decode", ["a", "b"], 1, 1),
    ]
    assert sorted(ended) == ["a", "b", "c"]
