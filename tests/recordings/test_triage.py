"""Triage measures natively what the whole reader measures with numpy: the same answer, stream by stream."""

from __future__ import annotations

import gzip
import importlib.util
import random
import sys
from pathlib import Path

import kineto_text
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_text import event
from queue_model import simulate

from kvprobe.diagnosis.whole_triage import triage, whole_triage
from kvprobe.errors import RecordingError
from kvprobe.recordings import kineto_queues, kineto_scan, open_recording
from kvprobe.recordings.occupancy import occupancy
from kvprobe.recordings.quick_triage import WORDS, QueueTriage, Triage, certain, quick_triage, quick_triages
from kvprobe.recordings.trace_library import native_library

TRACES = ("v100", "trace_diff", "owlv2", "b200", "param", "resnet50")
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def native():
    if native_library() is None:
        pytest.skip("the native library was not built")


def said(one):
    return one.verdict, one.reason, one.how, one.lost_ns, [vars(queue) for queue in one.queues]


def measured(path):
    """What the whole reader measures of each queue, as the native scanner says it."""
    recording = open_recording([path])
    found, streams = occupancy(recording), recording.streams
    queues = [
        QueueTriage(
            q.stream,
            int(streams["device"][q.stream]),
            int(streams["handle"][q.stream]),
            len(q.calls),
            int(q.depth.max(initial=0)),
            WORDS[q.verdict],
            q.reason,
            q.ceiling,
            int(q.blocked_ns.sum()),
        )
        for q in found.streams
    ]
    return Triage(path, WORDS[found.verdict], found.reason, found.how, queues, native=False)


def agreed(path):
    """The native measures, which must be there and be the whole reader's; what they call healthy is healthy."""
    quick = quick_triage(path)
    assert quick is not None and quick.native, "measured natively"
    assert said(quick) == said(measured(path))
    if certain(quick):
        assert whole_triage(path).verdict == triage(path).verdict == "healthy"
    return quick


@pytest.mark.parametrize("name", TRACES)
def test_public_traces(shared, name):
    found = agreed(shared.path(name))
    if name == "v100":
        assert found.verdict == "found" and found.queues[0].ceiling == 1022
    if name == "trace_diff":
        assert found.verdict == "undecided" and "graphs" in found.reason


@pytest.mark.parametrize("events", [20_000, 70_000])
def test_traces_as_the_race_generates_them(tmp_path, events):
    spec = importlib.util.spec_from_file_location("hta_race", TESTS.parent / "benchmarks" / "hta_race.py")
    race = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(race)
    path = tmp_path / "t.json.gz"
    lost = race.generate(path, events, streams=2)
    found = agreed(path)
    assert found.verdict == "found" and len(found.queues) == 2
    assert {queue.ceiling for queue in found.queues} == {1022}
    assert found.lost_ns == pytest.approx(lost, rel=0.01)


@pytest.mark.parametrize(
    "how",
    [
        {"calls": 2500, "streams": 2},
        {"calls": 900},
        {"calls": 500, "cap": 253},
        {"calls": 8000, "api_ns": 1040, "gpu_ns": 2500, "wake_ns": 300},
        {"calls": 3000, "gate_ns": 30_000_000, "gpu_ns": 3500},
        {"calls": 12},
    ],
)
def test_a_queue_by_arithmetic(tmp_path, how):
    recording, lost = simulate(**how)
    found = agreed(kineto_text.of_recording(tmp_path / "t.json", recording))
    assert found.lost_ns == pytest.approx(lost, rel=0.15)


def scenarios():
    sys.path.append(str(TESTS / "diagnosis"))
    import hostruntime
    import scenarios

    return hostruntime.Runtime(), scenarios.SCENARIOS


@pytest.mark.parametrize(
    "name",
    [
        "loads_on_one_stream",
        "two_saturated_streams",
        "saturated_and_pageable",
        "pageable_copies",
        "healthy_pool_of_streams",
    ],
)
def test_recordings_of_the_host_runtime(tmp_path, name):
    runtime, known = scenarios()
    played = known[name](runtime)
    agreed(kineto_text.of_recording(tmp_path / "t.json", played.recording))


SEEDS = 150


def test_random_traces(tmp_path):
    """Also that they are of every kind, or agreement would say little."""
    verdicts, words = {}, ""
    for seed in range(SEEDS):
        found = agreed(kineto_text.random_trace(tmp_path / "t.json", seed))
        for queue in found.queues:
            verdicts[queue.verdict] = verdicts.get(queue.verdict, 0) + 1
            words += queue.reason
    assert min(verdicts[one] for one in ("found", "undecided", "healthy")) > 10
    for one in (
        "no call began with more",
        "took no longer",
        "graphs were in it",
        "too few",
        "but only",
        "proves nothing",
    ):
        assert one in words, one


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1000, 10**9), st.integers(1, 700))
def test_more_random_traces(tmp_path, seed, calls):
    agreed(kineto_text.random_trace(tmp_path / "t.json", seed, calls))


ids = st.integers(-1, 6)
few = st.integers(0, 5)
tiny = st.lists(
    st.builds(
        lambda what, start, dur, tid, id_, stream: event(
            *what, start * 1000, dur * 1000, tid, correlation=id_, **({} if stream is None else {"stream": stream})
        ),
        st.sampled_from(
            [
                ("cuda_runtime", "cudaMemcpyAsync"),
                ("cuda_driver", "cuLaunchKernel"),
                ("Runtime", "cudaGraphLaunch"),
                ("cuda_runtime", "cudaEventRecord"),
                ("kernel", "k"),
                ("gpu_memset", "m"),
                ("user_annotation", "a"),
                ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
                ("Memcpy", "Memcpy HtoD (Pinned -> Device)"),
            ]
        ),
        few,
        few,
        st.integers(1, 3),
        ids,
        st.none() | st.integers(-2, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(tiny)
def test_events_of_any_order_with_the_same_ids_and_times(tmp_path, some):
    some.append(event("kernel", "k", 1000, 1000, 7, correlation=3, stream=1))
    agreed(kineto_text.write(tmp_path / "t.json", some))


def saturated():
    return [
        *(event("cuda_runtime", "cudaMemcpyAsync", i * 1000, 900, 3, correlation=i) for i in range(30)),
        *(event("gpu_memcpy", "Memcpy", i * 9000, 9000, 7, correlation=i, stream=7, device=0) for i in range(30)),
    ]


@pytest.mark.parametrize("name", ["kept", "label", "no executions", "negative", "id", "ids apart", "long", "nameless"])
def test_what_is_out_of_the_ordinary_is_left_to_the_whole_reader(tmp_path, name):
    some = saturated()
    if name == "label":
        some.append(event("overhead", "Command Buffer Full", 29_100, 500, 3))
    elif name == "no executions":
        some = some[:30]
    elif name == "negative":
        some.append('{"ph":"X","cat":"kernel","name":"k","ts":-5,"dur":1}')
    elif name == "id":
        some.append(event("cuda_runtime", "cudaFree", 1, 1, 3, correlation=1 << 33))
    elif name == "ids apart":
        some.append(event("cuda_runtime", "cudaMemcpyAsync", 1, 1, 3, correlation=1 << 31))
    elif name == "long":
        some.append(event("kernel", "k", 1, 1 << 60, 3, correlation=1))
    elif name == "nameless":
        some += [event("cuda_runtime", "INVALID", 1, 1, 3, cbid=i) for i in range(100)]
    path = kineto_text.write(tmp_path / "t.json", some)
    if name == "kept":
        agreed(path)
        return
    assert quick_triage(path) is None
    found = triage(path)
    assert not found.native and said(found) == said(whole_triage(path))


def test_a_document_that_is_cut_off_is_left_to_the_whole_reader(tmp_path, shared):
    whole = shared.path("b200").read_bytes()
    text = gzip.decompress(whole)
    for data in (whole[: len(whole) // 2], text[: len(text) // 2], text[: text.index(b"]", len(text) // 2)] + b"\0"):
        path = tmp_path / "t.json"
        path.write_bytes(data)
        assert quick_triage(path) is None
        assert said(triage(path)) == said(whole_triage(path))


def test_damaged_events_cost_only_themselves(tmp_path):
    some = saturated()
    some[5:5] = ['{"no":"phase"}', '{"ph":"X","cat":"kernel","ts":"x"}', '{"ph":"X" "cat":1}', "[1]"]
    agreed(kineto_text.write(tmp_path / "t.json", some))


def mutate(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.5:
            del data[at : at + rng.randrange(1, 100)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 100)]
    return bytes(data)


def test_damaged_traces_have_the_same_answer_where_they_have_one(tmp_path):
    """Damage that leaves a document is measured natively as the whole reader reads it."""
    path, native = tmp_path / "t.json", 0
    for seed in range(150):
        rng = random.Random(seed)
        kineto_text.random_trace(path, seed, 150)
        path.write_bytes(mutate(path.read_bytes(), rng))
        try:
            quick = quick_triage(path)
        except RecordingError:
            continue
        if quick is not None:
            native += 1
            assert said(quick) == said(measured(path)), seed
    assert native > 30


def test_without_the_native_library_the_whole_reader_answers(tmp_path, monkeypatch):
    path = kineto_text.random_trace(tmp_path / "t.json", 1)
    expected = said(triage(path))
    monkeypatch.setattr(kineto_queues, "native_library", lambda: None)
    monkeypatch.setattr(kineto_scan, "native_library", lambda: None)
    found = triage(path)
    assert not found.native and said(found) == expected


def test_several_at_a_time_are_each_their_own(tmp_path):
    paths = [kineto_text.random_trace(tmp_path / f"{seed}.json", seed) for seed in range(8)]
    paths.append(tmp_path / "absent.json")
    paths.append(kineto_text.write(tmp_path / "host.json", saturated()[:30]))
    found = quick_triages(paths)
    assert [said(one) for one in found[:8]] == [said(quick_triage(path)) for path in paths[:8]]
    assert isinstance(found[8], RecordingError) and "absent.json" in str(found[8]) and found[9] is None


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(RecordingError):
        quick_triage(tmp_path)


def test_many_streams_and_names_stay_quick(tmp_path):
    """A queue's work grows with its own calls, not with all names or streams there are."""
    some = []
    for i in range(4000):
        some.append(event("cuda_runtime", f"cudaMemcpyAsync{i}Async", i * 1000, 900, i, correlation=i))
        some.append(event("gpu_memcpy", f"copy {i}", i * 1000, 900, 7, correlation=i, stream=i, device=i % 5))
    found = agreed(kineto_text.write(tmp_path / "t.json", some))
    assert len(found.queues) == 4000
    assert [queue.device for queue in found.queues] == np.sort([queue.device for queue in found.queues]).tolist()
