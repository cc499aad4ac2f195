"""What requests wait for, on the virtual clock: streams of compute by their own events, or by one that many share."""

from __future__ import annotations

MANY = 150  # requests behind one stream: more than have an event each there


def test_nothing_goes_before_the_compute_that_it_waits_for_because_another_stream_is_done(bench):
    """So many stand behind the first stream that the next ones share an event; the other stream has its own."""
    b = bench(layers=1, virtual_clock=1, compute_channels=32)
    first, other = b.runtime.stream_create(), b.runtime.stream_create()
    b.bytes_of(b.gpu)[0][:], b.bytes_of(b.cpu)[0][:] = 7, 1
    with b.engine(policy="pooled") as engine, b.runtime.gate() as gate, b.runtime.gate() as later:
        gate.launch(first)
        later.launch(other)
        loads = [engine.load([i % 32], [i % 32], after=first) for i in range(MANY)]
        store = engine.store([40], [40], after=other)
        gate.open()
        for load in loads:
            load.wait()
        b.runtime.advance(10_000_000)
        assert not store.done and (b.bytes_of(b.cpu)[0][40] == 1).all()
        later.open()
        store.wait()
    assert (b.bytes_of(b.cpu)[0][40] == 7).all()


def test_nothing_goes_together_with_what_is_ready_before_the_event_it_shares_is_recorded(bench):
    """Two loads come at one instant: the first waits for nothing, the second for a stream behind which many stand."""
    b = bench(layers=1, virtual_clock=1)
    compute = b.runtime.stream_create()
    b.bytes_of(b.cpu)[0][:], b.bytes_of(b.gpu)[0][:] = 7, 1
    with b.engine(policy="pooled", method="batch") as engine, b.runtime.gate() as gate:
        gate.launch(compute)
        stores = [engine.store([i % 32], [i % 32], after=compute) for i in range(MANY)]
        ready, waits = engine.load([40], [40], after=None), engine.load([50], [50], after=compute)
        ready.wait()
        b.runtime.advance(10_000_000)
        assert not waits.done and (b.bytes_of(b.gpu)[0][50] == 1).all()
        gate.open()
        waits.wait()
        assert stores[-1].wait().done
    assert (b.bytes_of(b.gpu)[0][50] == 7).all()


def test_no_event_is_used_again_while_a_stream_is_still_to_wait_for_it(bench):
    """Another thread waits for a place on the stream, so that the fence lasts until long after its load has ended."""
    b = bench(layers=1, virtual_clock=1, depth=64, compute_channels=32, h2d_bytes_per_s=1e8)
    compute = b.runtime.stream_create()
    with b.engine(policy="pooled", method="batch") as engine:
        until = b.runtime.now_ns() + 5_000_000
        while b.runtime.now_ns() < until:  # till one of them has waited for a place
            b.runtime.launch_delay(compute, 5_000_000)
        with b.runtime.thread(lambda: b.runtime.launch_delay(compute, 1)):
            load = engine.load(range(0, 32, 2), range(0, 32, 2), after=None)
            more = [engine.load([i], [i], after=None) for i in range(1, 20, 2)]
            b.runtime.advance(1_000)
            assert not load.done
            began = b.runtime.now_ns()
            engine.fence(load, compute)
            assert load.done and more[-1].done and b.runtime.now_ns() - began > 1_000_000
            engine.wait()
        assert engine.read().wrong is None
        b.runtime.stream_synchronize(compute)


def test_a_shared_transfer_holds_no_fence_once_its_stream_waits(bench):
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1e8)
    compute = b.runtime.stream_create()
    with b.engine(policy="shared", compute_stream=compute) as engine:
        load = engine.load([0], [0])
        assert not load.done and engine.held["fences"] == 0
        load.wait()
        assert set(engine.held.values()) == {0}


def test_events_are_made_up_to_what_there_is_space_for_even_after_one_was_refused(bench):
    """Each load behind the compute takes two. They are made 16 at a time, and the refusal ends one such round early."""
    b = bench(layers=1, depth=8192, blocks=1024, virtual_clock=1, compute_channels=32, channels=32)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    with b.engine(policy="pooled", method="batch") as engine, b.runtime.gate() as gate:
        made, before = engine.read().events, b.runtime.failed("cudaEventCreateWithFlags")
        gate.launch(compute)
        b.runtime.fail_call("cudaEventCreateWithFlags", 45)
        for i in range(500):
            engine.fence(engine.load([i], [i], after=compute), forward)
            if i % 10 == 0:
                b.runtime.advance(20_000_000)
        assert b.runtime.failed("cudaEventCreateWithFlags") == before + 1
        assert made < engine.read().events == 1024
        gate.open()
        engine.wait()
        assert engine.read().wrong is None


def test_events_are_made_once_fewer_than_24_are_free(bench):
    """Each load takes one, and ends long after the last of them was asked for."""
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1e4)
    with b.engine(policy="pooled", method="loop") as engine:
        before, grown = engine.read(), 0
        for i in range(60):
            engine.load([i], [i], after=None)
            b.runtime.advance(1_000)
            after = engine.read()
            assert (after.events > before.events) == (before.events_free < 24), before.events_free
            grown += after.events > before.events
            before = after
        assert grown == 2
        engine.wait()


def test_no_more_marks_are_outstanding_than_there_is_space_for_where_no_event_can_be_recorded(bench):
    """Each small load is a launch of its own; without an event behind it nothing but the marks bounds their number.

    There is space for 1,024. The next launch waits where one is left.
    """
    b = bench(layers=1, depth=8192, blocks=1200, gpu_bytes=16, cpu_bytes=16, virtual_clock=1, h2d_bytes_per_s=1e5)
    with b.engine(policy="pooled", method="loop") as engine:
        before, most = b.runtime.failed("cudaEventRecord"), 0
        for i in range(1100):
            if b.runtime.failed("cudaEventRecord") == before + i:  # the one before was submitted
                b.runtime.fail_call("cudaEventRecord", 1, 1)
            engine.load([i], [i], after=None)
            b.runtime.advance(1_000)
            most = max(most, engine.read().in_flight_places[0])
        b.runtime.fail_call("cudaEventRecord", 0)
        assert most == 1_023
        engine.wait()
        assert engine.read().wrong is None
    assert (b.bytes_of(b.gpu)[0][:1100] == b.bytes_of(b.cpu)[0][:1100]).all()
