"""What the host side alone tells of loads by their addresses: loaded again, and loaded where the device computes."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import GPU, HOST, KiB, recording
from scenarios import SCENARIOS

from kvprobe.diagnosis import diagnose, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Table

SIZE, MiB = 64 * KiB, 1 << 20


def load(source, target, size=SIZE, **more):
    return {"src": HOST + source * size, "dst": GPU + target * size, "bytes": size, "kind": CallKind.COPY, **more}


def waves(requests=6, blocks=40, waves=8, pause_ns=200_000_000, prefix=lambda wave: wave, between=list, **more):
    """Requests that come together and load the same prefix, each into blocks of its own; a wait after each wave."""
    made = []
    for wave in range(waves):
        first = {"gap_ns": pause_ns}
        for request in range(requests):
            for block in range(blocks):
                made.append(
                    load(prefix(wave) * blocks + block, request * blocks + block, dur_ns=3_000, **first, **more)
                )
                first = {}
            made += between()
        made.append({"kind": CallKind.SYNC, "stream": 1, "dur_ns": 5_000})
    return made + [{"kind": CallKind.LAUNCH, "stream": 1} for _ in range(8)]


def finding(calls, cause, **machine):
    return {one.cause: one for one in examine(recording(calls, **machine))}.get(cause)


def test_requests_that_load_one_prefix_before_the_host_has_waited_load_it_again():
    found = finding(waves(), "redundant_loads")
    assert found.lost_ns == 8 * 5 * 40 * 3_000, "what the calls took their caller, where the link is not known"
    assert found.lost_on == "host" and found.confidence == "likely"
    assert any(one.text.startswith("1,600 of them were submitted before the host had waited") for one in found.evidence)
    known = finding(waves(), "redundant_loads", link_bytes_per_s=55e9)
    assert known.lost_ns == pytest.approx(1_600 * SIZE / 55e9 * 1e9, rel=0.01)


def test_what_one_gpu_has_another_may_lack():
    calls = [{**call, "stream": call.get("stream", 2 * (number // 40 % 2))} for number, call in enumerate(waves(2))]
    for devices, named in (([0, 0, 1], False), ([0, 0, 0], True)):
        made = recording(calls)
        made.tables["streams"] = Table("streams", {"handle": [9, 10, 11], "device": devices})
        assert any(one.cause == "redundant_loads" for one in examine(made)) == named


@pytest.mark.parametrize(
    "calls",
    [
        waves(between=lambda: [{"kind": CallKind.SYNC, "stream": 0, "dur_ns": 5_000}]),  # it may have been evicted
        waves(prefix=lambda wave: 0),  # a staging buffer comes again and again
        waves(waves=1),  # so does one at the start
        waves(waves=20, pause_ns=1_000),  # one burst of everything
        waves(stream=1),  # kernels of that stream may have changed it
        waves(memory=Memory.PAGEABLE),  # a call that copies at once
    ],
)
def test_what_may_have_been_needed_is_not_called_redundant(calls):
    assert finding(calls, "redundant_loads") is None


@pytest.mark.parametrize("base", [0, 4 * MiB, None])
def test_what_was_freed_is_loaded_again_because_it_is_gone(base):
    """Sleep and wake: the weights' memory is made anew, at the same addresses, and loaded. `base` is what is freed."""
    calls = []
    for _ in range(20):
        calls.append({"kind": CallKind.ALLOC, "dst": GPU, "bytes": 4 * MiB, "dur_ns": 90_000})
        calls += [load(block, block, MiB // 4) for block in range(16)]
        calls += [{"kind": CallKind.SYNC, "stream": 1}, *({"kind": CallKind.LAUNCH, "stream": 1} for _ in range(8))]
        if base is not None:
            calls.append({"kind": CallKind.FREE, "dst": GPU + base, "dur_ns": 90_000})
    found = finding(calls, "redundant_loads")
    assert (found is None) == (base == 0), "another memory was freed, or none"


def layers(steps=12, many=6, size=32 * MiB, stream=1, **more):
    calls = []
    for _ in range(steps):
        for layer in range(many):
            calls.append(load(layer, 0, size, stream=stream, **more))
            calls += [{"kind": CallKind.LAUNCH, "stream": 1} for _ in range(4)]
        calls.append({"kind": CallKind.SYNC, "stream": 1, "dur_ns": 6_000_000})
    return calls


def verdict(calls):
    made = recording(calls)
    return of_recording(made, examine(made))


def test_without_the_device_large_loads_where_it_computes_are_an_open_question_and_never_green():
    said = verdict(layers())
    assert said.state == "undecided" and "--nsys" in said.missing[0].how
    assert "large loads ran on the stream that computes" in said.reason
    asked = finding(layers(), "weights_not_overlapped")
    assert asked.abstains and asked.lost_ns == pytest.approx(72 * 32 * MiB / 55, rel=0.01)


@pytest.mark.parametrize("calls", [layers(stream=0), layers(size=256 * KiB), layers(many=1)])
def test_loads_that_may_run_beside_or_take_little_are_no_question(calls):
    made = recording(calls)
    assert not [one for one in examine(made) if one.cause == "redundant_loads"]


def executed(beside=False, sizes=(32 * MiB,), steps=40, many=(1,), out=False):
    """Loads right before kernels of the same length; `beside`: on a stream of its own, while the kernel runs."""
    begin, end, engine, size, stream = [], [], [], [], []
    at = 1_000_000
    for step in range(steps):
        for kind in (*[Engine.COPY] * many[step % len(many)], Engine.KERNEL):
            begin.append(at)
            at += 600_000
            end.append(at)
            engine.append(kind)
            size.append(sizes[step % len(sizes)] if kind == Engine.COPY else 0)
            stream.append(0 if beside and kind == Engine.COPY else 1)
            if beside and kind == Engine.COPY:
                at -= 600_000
    made = recording([load(i, i, dur_ns=1_000) for i in range(64)])
    columns = {"start_ns": begin, "end_ns": end, "engine": engine, "bytes": size, "stream": stream}
    rows = len(begin)
    made.tables["executions"] = Table(
        "executions",
        {
            **{name: np.array(values) for name, values in columns.items()},
            "process": np.zeros(rows, int),
            "direction": np.array([1 if one == Engine.COPY else 0 for one in engine]),
            "memory": np.full(rows, Memory.PINNED),
            "correlation": np.full(rows, -1),
        },
    )
    if out:
        made.executions["direction"][-2] = Direction.D2H
    made.has_executions = True
    return {one.cause: one for one in examine(made)}.get("weights_not_overlapped")


def test_equal_layers_without_addresses_are_known_by_where_they_stand():
    found = executed()
    assert found.lost_ns == pytest.approx(40 * 600_000, rel=0.05)
    assert any("follow kernels that they could have overlapped with" in one.text for one in found.evidence)
    assert executed(beside=True) is None and executed(steps=8) is None
    assert found.title.startswith("Loads between kernels ran alone")  # a KV cache would look the same
    assert "If the loads are weights" in found.cure[1].text and "a second buffer" in found.cure[0].text


def test_what_is_loaded_from_the_same_places_again_and_again_is_called_weights(runtime):
    found = {one.cause: one for one in diagnose(SCENARIOS["weights_copied_layer_by_layer"](runtime).recording)}
    weights = found["weights_not_overlapped"]
    assert weights.title.startswith("Weight copies ran alone") and weights.cure[0].text.startswith("Prefetch: copy lay")


def test_a_group_of_equal_layers_is_known_by_being_always_as_large():
    """Four layers' weights before each replay of their graph; what a request brings is now more and now less."""
    assert executed(many=(4,), steps=40).lost_ns == pytest.approx(40 * 600_000, rel=0.05)
    assert executed(many=(4,), steps=10) is None and executed(many=(4, 2, 5, 3), steps=40) is None
    assert executed(many=(4,), out=True) is None  # blocks of a cache, which leave again
