"""What SGLang's steps are told as: tokens of each request, also of one that is in a step after it has ended."""

import json
import random
import weakref
from types import SimpleNamespace as Made

import pytest
from opentelemetry import propagate

from kvprobe.instrument import event_log
from kvprobe.patches.sglang_steps import Steps
from tests.patches.told_steps import told_in

STATS = Made(last_decode_finish_time=0.0, last_prefill_finished_time=0.0, last_chunked_prefill_finish_time=0.0)


class Server:
    """The adapter's hook, called as SGLang's scheduler would call it."""

    def __init__(self):
        self.steps = Steps()
        self.scheduler = Made(metrics_reporter=Made(is_stats_logging_rank=True), pp_group=Made(is_first_rank=True))

    def step(self, number, mode, requests, computed=None):
        batch = Made(forward_mode=Made(name=mode), reqs=requests, launch_ts=None, forward_iter=number)
        batch.extend_lens = computed
        self.steps.stepped(number * 1000, None, (self.scheduler, batch, None), {})


class Request:
    def __init__(self, name):
        self.rid, self.output_ids, self.finished_reason, self.time_stats = name, [], None, STATS


def test_tokens_and_ends_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    a, b = Request("a"), Request("b")
    server = Server()

    def step(*given):
        server.step(*given)
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
    told, ended = told_in(tmp_path)
    assert told == [
        (1, "prefill", ["a"], 0, 256),
        (2, "prefill", ["a"], 1, 100),
        (3, "mixed", ["b", "a"], 1, [50, 1]),
        (4, "decode", ["b", "a"], [2, 1], 1),
        (5, "decode", ["b", "a"], [1, 0], 1),
    ]
    assert ended == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_any_history_is_told_as_it_was(tmp_path, monkeypatch, seed):
    """Most steps are like the one before. Requests come and end, one is in a step more, one is put off and its tokens
    are moved."""
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    chance, server, running, names = random.Random(seed), Server(), [], iter(range(10_000))
    truth, ends, over = [], [], []
    for number in range(300):
        fresh = [Request(f"r{next(names)}") for _ in range(chance.choice([1, 2]))] if chance.random() < 0.05 else []
        if fresh or not (running or over):
            batch = fresh = fresh or [Request(f"r{next(names)}")]
            mode, computed = "EXTEND", [chance.choice([1, 300]) for _ in fresh]
        else:
            batch, mode, computed = [*running, *over], "DECODE", None
        running += fresh
        emitted = []
        for one in batch:
            new = 0 if one in over else 1 if one in fresh else chance.choice([1] * 150 + [0, 2])
            one.output_ids += [5] * new
            emitted.append(new)
        over = [] if mode == "DECODE" else over
        for one in [one for one in batch if one in running and chance.random() < 0.005]:
            one.finished_reason = "length"
            running.remove(one)
            ends.append(one.rid)
            over += [one] * (chance.random() < 0.5)  # it is in the next step still
        phase = "prefill" if mode == "EXTEND" else "decode"
        truth.append((number, phase, [one.rid for one in batch], emitted, computed or [1] * len(batch)))
        server.step(number, mode, batch, computed)
        for one in running:
            if chance.random() < 0.005:
                one.output_ids = [*one.output_ids]
        if chance.random() < 0.1:
            event_log.flush()
    event_log.flush()
    told, ended = told_in(tmp_path)
    each = [(*one[:3], *([of] * len(one[2]) if isinstance(of, int) else of for of in one[3:])) for one in told]
    assert each == truth
    assert ended == ends
    (path,) = tmp_path.glob("steps-*.jsonl")
    assert '"kind":"steps"' in path.read_text()


def test_nothing_is_held_of_a_request_that_has_ended(tmp_path, monkeypatch):
    """It may hold images."""
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    one, server = Request("a"), Server()
    for number in range(4):
        one.output_ids.append(5)
        one.finished_reason = "length" if number == 3 else None
        server.step(number, "DECODE" if number else "EXTEND", [one], [7])
    gone = weakref.ref(one)
    del one
    event_log.flush()
    assert gone() is None


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
