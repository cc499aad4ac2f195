"""What the native thread asks of the runtime, and what it writes down of that: the ring, the status, the counts."""

from __future__ import annotations

import contextlib
import ctypes as ct
import os

import numpy as np
import pytest

from kvprobe.cuda.copies import METHOD_NAMES
from kvprobe.errors import CudaError
from kvprobe.native.library import RingOptions, core
from kvprobe.probe.ring import TRANSFER, read_ring


@pytest.fixture
def recorded(tmp_path):
    """Opens a ring for this process; called again, it returns the records."""
    path = tmp_path / "one.kvp"
    options = RingOptions(ring_capacity=4096, slow_capacity=64, slot_count=256)
    assert core().kvp_ring_open(os.fsencode(path), b"test", ct.byref(options)) == 0
    yield lambda: np.concatenate([section.records for section in read_ring(path).sections])
    core().kvp_ring_close()
    core().kvp_ring_release()


@pytest.mark.parametrize("method", ["batch", "kernel"])
def test_a_record_holds_the_bytes_that_were_submitted_and_the_parts_of_a_transfer(bench, recorded, method):
    b = bench(layers=1, blocks=256, virtual_clock=1, h2d_bytes_per_s=1e9)
    ids = np.random.default_rng(1).permutation(256)
    with b.engine(policy="pooled", method=method, detail="copies") as engine:
        for some in (ids, ids[:7], ids[:1]):
            engine.load(some, some).wait()
        moved = list(engine.read().bytes[0])
    records = recorded()
    of_calls, of_transfers = records[records["call"] != TRANSFER], records[records["call"] == TRANSFER]
    assert int(of_calls["bytes"].sum()) == sum(moved) == 264 * 4096 and moved[METHOD_NAMES.index(method)] == sum(moved)
    assert of_transfers["bytes"].tolist() == [256 * 4096, 7 * 4096, 4096]
    parts = np.stack([of_transfers["src"], of_transfers["dst"]], axis=1).astype("<u8").view("<f4") * 1e3
    took = of_transfers["dur_ns"].astype(float)
    assert (parts >= 0).all() and (parts.sum(axis=1) <= took + 100).all() and (parts.sum(axis=1) > took / 4).all()
    assert parts[0, 3] == pytest.approx(256 * 4096, rel=0.2)  # the copies alone, at a byte a nanosecond


@pytest.mark.parametrize("submit_ns", [-1.0, 100.0])
def test_the_parts_of_a_transfer_are_never_longer_than_it_where_the_devices_times_are_coarse(
    bench, recorded, submit_ns
):
    """So long after the clocks were compared, CUDA's times in float32 are off by up to a microsecond, either way."""
    b = bench(
        layers=1, virtual_clock=1, h2d_bytes_per_s=100.0, d2h_bytes_per_s=1e15, latency_ns=-1.0, submit_ns=submit_ns
    )
    with b.engine(policy="pooled", method="loop") as engine:
        load = engine.load([0], [0], after=None)
        b.runtime.advance(20_000_000_000)
        stores = []
        for _ in range(100):
            b.runtime.advance(1_000_003)
            stores.append(engine.store([1, 3], [1, 3], after=None).wait()._status)
        assert engine.read().wrong is None
        early = sum(one.copy_end_ns < one.built_ns + one.submit_ns for one in stores)
        assert 10 < early < 90
        assert not load.done
    parts = np.stack([recorded()["src"], recorded()["dst"]], axis=1).astype("<u8").view("<f4") * 1e3
    took = recorded()["dur_ns"].astype(float)
    assert (parts >= 0).all() and (parts.sum(axis=1) <= took * 1.001 + 1).all()


def test_a_stream_is_asked_only_where_its_event_does_not_tell(bench):
    b = bench(layers=1, blocks=256, virtual_clock=1, h2d_bytes_per_s=1e8)
    b.runtime.fail_call("cudaStreamQuery", 1, 999)
    with b.engine(policy="pooled") as engine:
        engine.load(range(256), range(256)).wait()
    assert b.runtime.failed("cudaStreamQuery") == 0


@contextlib.contextmanager
def _calls(b):
    """A letter for each call that takes a place of a queue: c, a copy; e, an event; w, a wait."""
    letters = {"cudaMemcpyAsync": "c", "cudaEventRecord": "e", "cudaStreamWaitEvent": "w"}
    made = []
    b.runtime.trace_start()
    yield made
    b.runtime.trace_stop()
    made.extend(letters.get(b.runtime.call_name(int(api)), "") for api in b.runtime.trace()["api"])


@pytest.mark.parametrize("depth", range(3, 12))
def test_what_a_short_queue_holds_is_submitted_piece_by_piece(bench, depth):
    """Half of the places that are not spared are the loads', two of them the events'; a copy at a time always goes."""
    b = bench(layers=1, depth=depth, virtual_clock=1, submit_ns=1_000)
    with b.engine(policy="pooled", method="loop") as engine:
        with _calls(b) as calls:
            engine.load(range(0, 64, 2), range(0, 64, 2))
            engine.wait(None, 10)
        assert engine.read().wrong is None and engine.read().longest_call_ns > 0
    assert ("cc" in "".join(calls)) == (depth >= 10)
    assert np.array_equal(b.bytes_of(b.gpu)[0][::2], b.bytes_of(b.cpu)[0][::2])


def test_loads_behind_the_same_compute_go_together_once_it_is_over(bench):
    b = bench(layers=1, blocks=64, virtual_clock=1)
    compute, order = b.runtime.stream_create(), np.random.default_rng(2).permutation(64)
    with b.engine(policy="pooled", method="batch", compute_stream=compute) as engine:
        with b.runtime.gate() as gate:
            gate.launch(compute)
            for at in range(0, 64, 4):
                engine.load(order[at : at + 4], order[at : at + 4], after=compute)
            gate.open()
        engine.wait()
        assert engine.read().launches[0][METHOD_NAMES.index("batch")] <= 4


@pytest.mark.parametrize("method", ["batch", "kernel"])
def test_loads_to_the_same_block_never_go_in_one_launch(bench, method):
    """A launch says nothing of which of its copies comes first; loads that come at once to others go together."""
    b = bench(layers=1, blocks=64, virtual_clock=1)
    with b.engine(policy="pooled", method=method) as engine:
        for targets, launches in (([1, 3, 5, 7], 1), ([1, 3, 1, 3], 2), ([9, 9, 9, 9], 4)):
            before = sum(engine.read().launches[0])
            for i, target in enumerate(targets):
                engine.load([10 * i], [target], after=None)
            engine.wait()
            assert sum(engine.read().launches[0]) - before == launches
    assert np.array_equal(b.bytes_of(b.gpu)[0][[1, 3, 9]], b.bytes_of(b.cpu)[0][[20, 30, 30]])


def test_many_requests_on_one_stream_share_fences(bench):
    b = bench(layers=1, blocks=64, virtual_clock=1)
    compute = b.runtime.stream_create()
    with b.engine(policy="pooled", compute_stream=compute) as engine:
        with b.runtime.gate() as gate:
            gate.launch(compute)
            for i in range(1_000):
                engine.load([i % 64], [i % 64], after=compute)
            used = engine.read().fences_used
            gate.open()
        engine.wait()
    assert 100 < used < 200


@pytest.mark.parametrize("policy", ["pooled", "shared"])
def test_an_event_that_cannot_be_destroyed_is_said_whichever_it_is_and_no_other_is_left(bench, policy):
    b = bench(layers=1, virtual_clock=1)
    before, number = b.runtime.stats.events, 0
    while True:
        number += 1
        engine = b.engine(policy=policy)
        b.runtime.fail_call("cudaEventDestroy", number, 719)
        failed = b.runtime.failed("cudaEventDestroy")
        try:
            engine.close()
            raised = False
        except CudaError:
            raised = True
        came = b.runtime.failed("cudaEventDestroy") > failed
        b.runtime.fail_call("cudaEventDestroy", 0)
        assert raised == came, number
        if not came:
            break
        assert b.runtime.stats.events == before + number
    assert number > 50


def test_of_a_shared_transfer_the_time_in_calls_and_what_failed_are_said(bench):
    b = bench(layers=1, virtual_clock=1, submit_ns=1_000)
    compute = b.runtime.stream_create()
    with b.engine(policy="shared", compute_stream=compute, detail="copies") as engine:
        whole = engine.load(range(0, 64, 2), range(0, 64, 2)).wait()._status
        assert 32 * 1_000 <= whole.submit_ns <= whole.noticed_ns - whole.built_ns
        faults = []
        for fail in (lambda: b.runtime.fail_call("cudaStreamWaitEvent", 1, 1), lambda: b.runtime.fail_copy(1, 1)):
            fail()
            failed = engine.load([1], [1], after=compute)
            engine.wait()
            faults.append(failed._status.fault)
    assert 0 not in faults and faults[0] != faults[1]


def test_a_shared_transfer_has_a_mark_behind_every_so_many_copies(bench):
    b = bench(layers=1, depth=64, virtual_clock=1, submit_ns=1_000)
    with b.engine(policy="shared") as engine:
        b.runtime.trace_start()
        engine.load(range(0, 64, 2), range(63, -1, -2)).wait()
        b.runtime.trace_stop()
        names = [b.runtime.call_name(int(api)) for api in b.runtime.trace()["api"]]
    copies, marks = names.count("cudaMemcpyAsync"), names.count("cudaEventRecord")
    assert copies == 32 and 5 <= marks <= 8  # an eighth of the depth, and the end of each call


def test_no_two_marks_of_a_shared_transfer_stand_behind_the_same_copy_but_its_end(bench):
    """Behind compute that still runs, where an event in front tells when its copies begin."""
    b = bench(layers=1, depth=16, virtual_clock=1, submit_ns=1_000)
    compute = b.runtime.stream_create()
    with b.engine(policy="shared", compute_stream=compute) as engine:
        b.runtime.launch_delay(compute, 1_000)
        with _calls(b) as calls:
            engine.load(range(64), range(63, -1, -1), after=compute).wait()
    assert "".join(calls) == "ewe" + 32 * "cce" + "e"


def test_whoever_submits_himself_knows_first_what_the_device_has_done(bench, monkeypatch):
    """What he is told of as outstanding is what the judge of a full queue counts with."""
    b = bench(layers=1, virtual_clock=1, submit_ns=1_000)
    told = []
    with b.engine(policy="shared") as engine:
        observe = engine.detector.observe
        monkeypatch.setattr(engine.detector, "observe", lambda run: (told.append(run.outstanding), observe(run))[1])
        for pause in range(0, 60_000, 3_000):
            first = engine.load(range(0, 16, 2), range(0, 16, 2), after=None)
            b.runtime.advance(pause)
            second = engine.load([20], [20], after=None)
            second.wait()
            over = first._status.copy_end_ns < second._status.built_ns
            assert (told.pop() == 0) == over, pause
            assert told.pop() == 0
