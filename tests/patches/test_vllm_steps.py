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
