"""What fails is left alone or said: methods that fail, waits that fail, a device that is lost, a child of a fork."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import sys

import numpy as np
import pytest

from kvprobe.cuda import device_region
from kvprobe.errors import CudaError, TransferError


def _scattered(b):
    return np.random.default_rng(3).permutation(b.gpu.blocks), np.random.default_rng(4).permutation(b.cpu.blocks)


def _equal(b, cpu, gpu):
    return all(
        np.array_equal(left[cpu], right[gpu]) for left, right in zip(b.bytes_of(b.cpu), b.bytes_of(b.gpu), strict=True)
    )


@pytest.mark.parametrize(
    ("method", "call", "then"),
    [("batch", "cudaMemcpyBatchAsync", "loop"), ("kernel", "cuLaunchKernel", "batch")],
)
def test_a_method_that_fails_is_not_asked_again_and_the_next_one_moves_the_same_bytes(bench, method, call, then):
    b = bench(blocks=64)
    gpu, cpu = _scattered(b)
    with b.engine(policy="pooled", method=method) as engine:
        b.runtime.fail_call(call, 1, 801)
        first = engine.load(cpu, gpu).wait()
        assert first.methods == (then,)
        assert set(engine.methods_lost) == {method}
        assert "801" in engine.methods_lost[method]
        assert _equal(b, cpu, gpu)
        engine.load(cpu, gpu).wait()
        assert set(engine.held.values()) == {0}


def test_a_runtime_without_batches_copies_one_by_one(bench):
    b = bench(blocks=16)
    gpu, cpu = _scattered(b)
    b.runtime.fail_call("cudaMemcpyBatchAsync", 1, 801)  # when it is tried
    with b.engine(policy="pooled", max_slowdown=-1.0) as engine:  # no kernel is cheap enough
        assert engine.load(cpu, gpu).wait().methods == ("loop",)
    assert _equal(b, cpu, gpu)


@pytest.mark.parametrize("method", ["loop", "batch", "kernel"])
@pytest.mark.parametrize("detail", ["off", "totals", "copies"])
def test_transfers_larger_than_the_queue_end_at_every_detail(bench, method, detail):
    b = bench(layers=4, blocks=64, depth=64, channels=1)
    gpu, cpu = _scattered(b)
    with b.engine(policy="pooled", method=method, detail=detail) as engine:
        for _ in range(4):
            engine.load(cpu, gpu)
        engine.wait()
    assert _equal(b, cpu, gpu)


@pytest.mark.parametrize("detail", ["off", "totals", "transfers"])
def test_auto_ends_what_it_began_on_the_shared_stream(bench, detail):
    """Every call is slower than calibrated, so a switch can come at any copy of a transfer."""
    b = bench(layers=4, blocks=64, depth=64, channels=1, submit_ns=3200.0)
    gpu, cpu = _scattered(b)
    with b.engine(policy="auto", detail=detail) as engine:
        for _ in range(20):
            engine.load(cpu, gpu)
        engine.wait()
        assert set(engine.held.values()) == {0}
    assert _equal(b, cpu, gpu)


@pytest.mark.parametrize("policy", ["shared", "pooled"])
def test_after_a_wait_that_failed_the_next_transfer_still_comes_last(bench, policy):
    """A transfer that fails before its first copy must not let the next one overtake those before it."""
    b = bench(layers=1, blocks=64, h2d_bytes_per_s=5e7)
    with b.engine(policy=policy, method="loop") as engine:
        engine.load(np.arange(32), np.arange(32))
        b.runtime.fail_call("cudaStreamWaitEvent", 1, 2)
        failed = engine.load([40], [0])
        engine.load([41], [0], after=None)
        engine.wait()
        b.runtime.fail_call("cudaStreamWaitEvent", 0, 0)
        assert failed.done
        assert np.array_equal(b.bytes_of(b.gpu)[0][0], b.bytes_of(b.cpu)[0][41])


def test_one_failing_query_fails_nothing(bench):
    b = bench(blocks=32, h2d_bytes_per_s=1e8)
    gpu, cpu = _scattered(b)
    with b.engine(policy="pooled", method="loop") as engine:
        b.runtime.fail_call("cudaEventQuery", 2, 999)
        engine.load(cpu, gpu, after=None).wait()
        assert engine.broken is None
    assert _equal(b, cpu, gpu)


@pytest.mark.parametrize(("looks", "lost"), [([1, 2], False), ([1, 2, 3], True), ([1, 2, 4, 5], False)])
def test_a_device_that_does_not_answer_three_times_in_a_row_is_lost(bench, looks, lost):
    """At these looks neither the event nor its stream can be asked; on the virtual clock, where each has its number."""
    b = bench(blocks=32, virtual_clock=1, h2d_bytes_per_s=1e6)
    gpu, cpu = _scattered(b)
    with b.engine(policy="pooled", method="loop") as engine:
        before = b.runtime.failed("cudaStreamQuery")
        load = engine.load(cpu, gpu, after=None)
        for number in looks:
            b.runtime.fail_call("cudaEventQuery", number, 999)
        for number in range(1, len(looks) + 1):  # a stream is asked where its event does not tell
            b.runtime.fail_call("cudaStreamQuery", number, 999)
        with pytest.raises(TransferError) if lost else contextlib.nullcontext():
            load.wait()
        assert (engine.broken is not None) == lost
        assert b.runtime.failed("cudaStreamQuery") == before + len(looks)
    assert lost or _equal(b, cpu, gpu)


@pytest.mark.parametrize(("times", "lost"), [(2, False), (3, True)])
def test_after_a_copy_that_failed_a_device_that_does_not_answer_three_times_is_lost(bench, times, lost):
    """Nothing else is outstanding whose end would tell."""
    b = bench(blocks=32, virtual_clock=1)
    with b.engine(policy="pooled", method="loop") as engine:
        for number in range(1, times + 1):
            b.runtime.fail_call("cudaStreamQuery", number, 999)
        b.runtime.fail_copy(1, 1)
        with pytest.raises(TransferError):
            engine.load([0], [0], after=None).wait()
        b.runtime.fail_call("cudaStreamQuery", 0)
        assert engine.read().broken == (999 if lost else 0)


def test_a_callback_that_waits_or_raises_harms_nobody(bench):
    b = bench(blocks=16)
    seen = []
    with b.engine(policy="pooled") as engine:

        def wait(transfer):
            engine.load([1], [1]).wait()
            seen.append(transfer.id)

        def fail(transfer):
            seen.append(transfer.id)
            raise RuntimeError("it is the callback's own")

        transfers = [engine.load([0], [0], done=wait if number % 2 else fail) for number in range(10)]
        engine.wait()
        assert [transfer.state for transfer in transfers] == ["done"] * 10
        assert sorted(seen) == sorted(transfer.id for transfer in transfers)


def test_every_waiter_hears_of_a_lost_device_whatever_callbacks_do(bench):
    b = bench(layers=2, blocks=64, h2d_bytes_per_s=1e4)  # none ends before the device is lost
    engine = b.engine(policy="pooled", method="loop")

    def fail(transfer):
        raise RuntimeError("it is the callback's own")

    transfers = [engine.load(range(64), range(64), after=None, done=fail) for _ in range(5)]
    b.runtime.lose_device()
    for transfer in transfers:
        with pytest.raises(TransferError):
            transfer.wait()
    engine.close()
    with pytest.raises(TransferError):
        engine.load([0], [0])


@pytest.mark.parametrize("call", ["cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cudaHostAlloc"])
@pytest.mark.parametrize("number", [1, 3, 7])
def test_an_engine_that_cannot_be_made_leaves_nothing(bench, call, number):
    b = bench()
    before = b.runtime.stats
    b.runtime.fail_call(call, number, 2)
    with contextlib.suppress(CudaError):
        b.engine(policy="pooled").close()
    b.runtime.fail_call(call, 0, 0)
    after = b.runtime.stats
    assert (after.streams, after.events, after.pinned_bytes) == (before.streams, before.events, before.pinned_bytes)
    b.engine(policy="pooled").close()


def test_a_child_of_a_fork_is_told_and_touches_nothing(bench):
    b = bench(blocks=16)
    stream = b.runtime.stream_create()
    with b.engine(policy="pooled") as engine, b.runtime.gate() as gate:
        engine.load([0], [0]).wait()
        gate.launch(stream)
        before = engine.load([2], [2], after=stream)
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(10)  # its threads are the parent's: it would wait for ever
                with pytest.raises(TransferError, match="forked"):
                    engine.fence(before, stream)
                engine.load([0], [0])
            except TransferError as error:
                engine.close()
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        gate.open()
        engine.load([1], [1]).wait()


def test_waits_for_more_compute_streams_than_are_counted_all_end(bench):
    b = bench(blocks=16, depth=2000)
    streams = [b.runtime.stream_create() for _ in range(200)]
    with b.engine(policy="pooled") as engine, b.runtime.gate() as gate:
        for stream in streams:
            gate.launch(stream)
        for number in range(1000):
            engine.load([0], [0], after=streams[number % len(streams)])
        gate.open()
        engine.wait()
        assert set(engine.held.values()) == {0}
    for stream in streams:
        b.runtime.stream_destroy(stream)


@pytest.mark.parametrize("clock", [1, 2], ids=["virtual", "real"])
@pytest.mark.parametrize("policy", ["shared", "pooled"])
def test_a_reset_ends_the_engines_of_the_runtime_and_their_handles_are_not_used_again(bench, clock, policy):
    b = bench(virtual_clock=clock)
    old = b.engine(policy=policy)
    with b.runtime.gate() as gate:
        gate.launch(0)
        waiting = [old.load([i], [i]) for i in range(8)]
    gate_again = b.runtime.gate()
    gate_again.launch(0)
    waiting += [old.load([i], [i]) for i in range(8, 16)]
    kept = device_region(b.runtime, 4096).owner

    b.runtime.reset()
    b.runtime.reset()
    assert all(transfer.done for transfer in waiting)
    with pytest.raises(TransferError):
        waiting[-1].result()
    with pytest.raises(TransferError, match="runtime was reset"):
        old.load([0], [0])
    b = bench(virtual_clock=clock)  # handles and addresses are given out again
    with b.engine(policy=policy) as engine:
        again = {stream for streams in old.streams.values() for stream in streams}
        assert again & {stream for streams in engine.streams.values() for stream in streams}
        before = b.runtime.stats
        kept.close()
        old.close()
        del old, waiting
        gc.collect()
        after = b.runtime.stats
        assert (after.streams, after.events) == (before.streams, before.events)
        assert (after.device_bytes, after.pinned_bytes) == (before.device_bytes, before.pinned_bytes)
        gpu, cpu = _scattered(b)
        engine.load(cpu, gpu).wait()
        assert _equal(b, cpu, gpu)
        assert set(engine.held.values()) == {0}


class Interrupt(BaseException):
    pass


INTERRUPTED = (
    *(f"offload/{name}.py" for name in ("engine", "callbacks", "transfer", "job", "shared")),
    "/threading.py",
)


class InterruptAfter:
    """Raises in the main thread after so many calls of the engine's code, as a signal's handler does."""

    def __init__(self, calls):
        self.left, self.where = calls, ""

    def __enter__(self):
        sys.setprofile(self._profile)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _profile(self, frame, event, argument):
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.endswith(INTERRUPTED):
            return
        if "__del__" in (code.co_name, frame.f_back and frame.f_back.f_code.co_name):
            return  # what is raised in a destructor is only printed
        self.left -= 1
        if not self.left:
            self.where = f"{code.co_filename}:{frame.f_lineno} {event}"
            sys.setprofile(None)
            raise Interrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a transfer that was half made
@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
def test_an_interrupt_after_any_call_of_the_engine_loses_nothing_and_holds_nothing(bench, policy):
    b = bench(depth=64, channels=2)
    for calls in itertools.count(1):
        told, asked = [], []
        interrupt = InterruptAfter(calls)
        with b.engine(policy=policy) as engine:
            with contextlib.suppress(Interrupt), interrupt:
                for number in range(4):
                    asked.append(engine.load(range(64), range(64), done=None if number % 2 else told.append))
                    if number == 2:
                        engine.poll()
                asked[-1].wait()
                engine.poll()
            engine.wait()
            assert all(transfer.done and transfer.error is None for transfer in asked), interrupt.where
            assert set(asked[::2]) <= set(told) and len(set(told)) == len(told), interrupt.where
            assert not engine._live and set(engine.held.values()) == {0}, interrupt.where
            engine.load(range(64), range(64), done=told.append).wait()
            assert told[-1].done
        if not interrupt.where:
            break
    assert calls > 50  # as many were interrupted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised inside a destructor: no effect
@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
def test_an_exception_of_a_signal_handler_at_any_moment_loses_nothing(bench, policy):
    armed = False

    def stop(*_):  # again only once the loop goes on: what is raised in a destructor is only printed
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    b, chance = bench(depth=64, channels=2), random.Random(5)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        for _ in range(3):
            told, asked = [], []
            with b.engine(policy=policy) as engine:
                with pytest.raises(Interrupt):
                    signal.setitimer(signal.ITIMER_VIRTUAL, chance.uniform(1e-4, 1e-2), 0.1)
                    while True:
                        armed = True
                        done = told.append if len(asked) % 3 == 0 else None
                        asked.append(engine.load(range(64), range(64), done=done))
                        if len(asked) % 5 == 0:
                            engine.poll()
                        if len(asked) % 11 == 0:
                            asked[-1].wait()
                engine.wait()
                assert all(transfer.done and transfer.error is None for transfer in asked)
                assert not engine._live and set(engine.held.values()) == {0}
                gpu, cpu = _scattered(b)
                engine.load(cpu, gpu).wait()
                assert _equal(b, cpu, gpu)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
