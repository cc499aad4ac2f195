"""What vLLM's requests are told with: the trace that they came with."""

import json
import random
import time
from types import SimpleNamespace as Made

import pytest

from kvprobe.instrument import event_log
from kvprobe.patches.vllm_steps import Steps
from tests.patches.told_steps import told_in

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


class Server:
    """The adapter's hooks, called as vLLM's scheduler would call them."""

    def __init__(self, apart=False):
        """`apart`: each request is of another client, and the last one's outputs come first."""
        self.steps, self.apart = Steps(), apart

    def step(self, computed, emitted, ended=(), resumed=()):
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
        self.steps.scheduled(now_ns, scheduled, (None,), {})
        of_clients = [[one] for one in reversed(made)] if self.apart else [made]
        outputs = {n: Made(timestamp=now_ns / 1e9, outputs=of) for n, of in enumerate(of_clients)}
        self.steps.stepped(now_ns, outputs, (None, scheduled), {})


@pytest.mark.parametrize("apart", [False, True])
def test_who_got_how_many_tokens_is_told_of_every_step(tmp_path, monkeypatch, apart):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    step = Server(apart).step

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


@pytest.mark.parametrize("seed", range(20))
def test_any_history_is_told_as_it_was(tmp_path, monkeypatch, seed):
    """Most steps are like the one before. Requests come, end, are given up and come again, are put off and resumed."""
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    chance, server, left, has_token = random.Random(seed), Server(apart=seed % 2 == 1), {}, set()
    truth, ends = [], []
    for number in range(300):
        if len(left) < 2 or chance.random() < 0.05:
            left.setdefault(chance.choice("abcdefgh"), chance.choice([1, 1, 900]))  # tokens of its prompt that are left
        resumed = {one for one in left if one in has_token and chance.random() < 0.005}
        has_token -= resumed
        left |= dict.fromkeys(resumed, chance.choice([1, 500]))
        computed = {one: min(tokens, 400) for one, tokens in left.items()}
        new = {one: chance.choice([1] * 150 + [0, 2]) for one, tokens in left.items() if tokens <= 400}
        emitted = {one: tokens for one, tokens in new.items() if tokens}
        ended = {one for one in emitted if chance.random() < 0.01}
        prefills = len(left.keys() - has_token)
        phase = "mixed" if 0 < prefills < len(left) else "prefill" if prefills else "decode"
        tokens = [emitted.get(one, 0) for one in left]
        truth.append((number, phase, [*left], tokens, [*computed.values()]))
        server.step(computed, emitted, ended, resumed)
        has_token |= emitted.keys()
        left = {one: 1 if one in emitted else max(1, tokens - 400) for one, tokens in left.items()}
        given_up = {one for one in left.keys() - ended if chance.random() < 0.005}
        if given_up:
            server.steps.finished(lambda: None, None, given_up, None)
        for one in (*ended, *given_up):
            has_token.discard(one)
            ends.append(one)
        left = {one: 1 for one in left if one not in ended and (one not in given_up or chance.random() < 0.5)} | {
            one: tokens for one, tokens in left.items() if one not in (*ended, *given_up)
        }  # half of those that were given up come again at once
        if chance.random() < 0.1:
            event_log.flush()
    event_log.flush()
    told, ended = told_in(tmp_path)
    each = [(*one[:3], *([of] * len(one[2]) if isinstance(of, int) else of for of in one[3:])) for one in told]
    assert each == truth
    assert sorted(ended) == sorted(ends)
    (path,) = tmp_path.glob("steps-*.jsonl")
    assert '"kind":"steps"' in path.read_text()
