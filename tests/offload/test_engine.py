"""The engine moves every byte, in order, gives everything back, and never submits past the queue's depth."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes as ct
import gc
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.errors import CudaError, TransferError, UsageError
from kvprobe.offload import BlockPool, Copies, Submitter


def test_load_and_store_move_every_byte(bench):
    b = bench(layers=3, blocks=32)
    with b.engine(policy="pooled") as engine:
        engine.load(range(32), range(31, -1, -1)).wait()
        for cpu, gpu in zip(b.bytes_of(b.cpu), b.bytes_of(b.gpu), strict=True):
            assert np.array_equal(cpu, gpu[::-1])
        want = [layer.copy() for layer in b.bytes_of(b.gpu)]
        for layer in b.bytes_of(b.cpu):
            layer[:] = 0
        engine.store(range(32), range(32)).wait()
        for cpu, gpu in zip(b.bytes_of(b.cpu), want, strict=True):
            assert np.array_equal(cpu, gpu)


@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
@pytest.mark.parametrize(("gpu_bytes", "cpu_bytes"), [(4096, 16384), (16384, 4096), (1000, 3000)])
def test_block_sizes_that_differ_by_a_whole_factor_fit(bench, policy, gpu_bytes, cpu_bytes):
    b = bench(blocks=12, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes)
    factor = max(gpu_bytes, cpu_bytes) // min(gpu_bytes, cpu_bytes)
    coarse = [5, 0, 3]
    fine = [block * 2 % b.gpu.blocks for block in range(len(coarse) * factor)]
    gpu_ids, cpu_ids = (fine, coarse) if cpu_bytes > gpu_bytes else (coarse, fine)
    with b.engine(policy=policy) as engine:
        engine.load(cpu_ids, gpu_ids).wait()
    piece = min(gpu_bytes, cpu_bytes)
    for cpu, gpu in zip(b.bytes_of(b.cpu), b.bytes_of(b.gpu), strict=True):
        cpu_pieces, gpu_pieces = cpu.reshape(-1, piece), gpu.reshape(-1, piece)
        expanded = [block * factor + part for block in coarse for part in range(factor)]
        left, right = (
            (gpu_pieces[fine], cpu_pieces[expanded])
            if cpu_bytes > gpu_bytes
            else (gpu_pieces[expanded], cpu_pieces[fine])
        )
        assert np.array_equal(left, right)


def test_block_sizes_that_do_not_fit_are_refused_by_name(bench):
    with pytest.raises(UsageError, match=r"4096 bytes.*6144 bytes do not fit"):
        bench(blocks=12, gpu_bytes=4096, cpu_bytes=6144).engine()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda e: e.load([64], [0]), "CPU block 64 is out of range"),
        (lambda e: e.load([-1], [0]), "CPU block -1 is out of range"),
        (lambda e: e.load([0], [2**70]), "whole numbers|out of range"),
        (lambda e: e.load([0, 1], [3, 3]), "same destination block twice"),
        (lambda e: e.store([0, 1], [3, 3]), "same destination block twice"),
        (lambda e: e.load([], []), "at least one"),
        (lambda e: e.load([0, 1], [0]), "not the same amount"),
        (lambda e: e.set_policy("best"), "unknown policy 'best'"),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_leaves_nothing(bench, call, text):
    with bench().engine() as engine:
        with pytest.raises(UsageError, match=text) as caught:
            call(engine)
        assert "\n" not in str(caught.value)
        assert engine.idle
        assert set(engine.held.values()) == {0}


@pytest.mark.parametrize("how", [{"policy": "fast"}, {"bound": 0}, {"detail": "all"}, {"priority": 99}])
def test_a_wrong_option_is_refused(bench, how):
    with pytest.raises(UsageError):
        bench().engine(**how)


def test_pools_that_overlap_are_refused(bench):
    b = bench()
    region = b.gpu.regions[0]
    with pytest.raises(UsageError, match="overlap"):
        BlockPool(b.runtime, [region, (region.address + 4096, region.bytes)], 4096)


def test_torch_dlpack_and_raw_pointers_are_taken(bench):
    torch = pytest.importorskip("torch")
    b = bench(layers=1, blocks=8)
    tensor = torch.arange(8 * 4096, dtype=torch.uint8).reshape(8, 4096)
    array = np.zeros((8, 4096), dtype=np.uint8)
    for source in (tensor, array, (array.ctypes.data, array.nbytes)):
        pool = BlockPool(b.runtime, [source], 4096)
        assert (pool.blocks, pool.kind) == (8, "pageable")
    with pytest.raises(UsageError, match="not contiguous"):
        BlockPool(b.runtime, [tensor.t()], 4096)

    class Capsule:
        def __dlpack__(self):
            return tensor.__dlpack__()

    assert BlockPool(b.runtime, [Capsule()], 4096).regions[0].address == tensor.data_ptr()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sequence_of_transfers_and_switches_ends_as_if_done_one_by_one(bench, data):
    b = bench(
        layers=2, blocks=24, gpu_bytes=512, cpu_bytes=512, depth=64, channels=2, h2d_bytes_per_s=1e8, latency_ns=5000.0
    )
    gpu, cpu = ([layer.copy() for layer in b.bytes_of(pool)] for pool in (b.gpu, b.cpu))
    with b.engine(policy=data.draw(st.sampled_from(["shared", "pooled", "auto"]))) as engine:
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                engine.set_policy(data.draw(st.sampled_from(["shared", "pooled"])))
            size = data.draw(st.integers(1, 24))
            ids = st.lists(st.integers(0, 23), min_size=size, max_size=size, unique=True)
            source, target = data.draw(ids), data.draw(ids)
            if data.draw(st.booleans()):
                # a direction is ordered by itself; between directions the caller orders, as a server does
                engine.wait()
                engine.load(source, target)
                for layer in range(2):
                    gpu[layer][target] = cpu[layer][source]
            else:
                engine.wait()
                engine.store(source, target)
                for layer in range(2):
                    cpu[layer][target] = gpu[layer][source]
        engine.wait()
        assert set(engine.held.values()) == {0}
    for layer in range(2):
        assert np.array_equal(b.bytes_of(b.gpu)[layer], gpu[layer])
        assert np.array_equal(b.bytes_of(b.cpu)[layer], cpu[layer])


@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
def test_transfers_of_a_direction_start_and_end_in_order(bench, policy):
    """Each load overwrites the blocks of the one before: the last one must win, whatever stream it was on."""
    b = bench(layers=1, blocks=64, depth=64, channels=4, latency_ns=20000.0)
    with b.engine(policy=policy) as engine:
        transfers = [engine.load([source] * 1, [0]) for source in range(64)]
        engine.wait()
        assert np.array_equal(b.bytes_of(b.gpu)[0][0], b.bytes_of(b.cpu)[0][63])
        ends = [(transfer.copy_start_ns, transfer.copy_end_ns) for transfer in transfers]
        assert ends == sorted(ends)
        assert all(transfer.state == "done" for transfer in transfers)


def test_a_store_waits_for_the_compute_that_wrote_the_blocks(bench):
    """Validates itself: without the wait the old bytes arrive, with it the new ones."""
    b = bench(layers=1, blocks=1)
    layer, seen = b.bytes_of(b.gpu)[0], b.bytes_of(b.cpu)[0]
    layer[:] = 1
    compute = b.runtime.stream_create()
    # by DMA: a copy kernel may share a channel with the gated compute stream
    with b.engine(policy="pooled", method="loop", compute_stream=compute) as engine, b.runtime.gate() as gate:
        gate.launch(compute)
        b.runtime.launch_work(compute, lambda: layer.fill(2))
        engine.store([0], [0], after=None).wait()
        assert seen[0, 0] == 1
        ordered = engine.store([0], [0])
        engine.store([0], [0], after=None)  # behind it in its direction, so it waits as well
        assert not ordered.done
        gate.open()
        engine.wait()
        assert seen[0, 0] == 2


def test_pooled_submission_never_meets_a_full_queue_and_keeps_to_the_bound(bench):
    b = bench(layers=4, blocks=64, depth=128, channels=2, h2d_bytes_per_s=2e8)
    with b.engine(policy="pooled", bound=2, detail="copies") as engine:
        transfers = [engine.load(range(64), range(64)) for _ in range(20)]
        streams = set()
        while not engine.idle:
            engine.poll()
            streams |= set(engine.outstanding())
            assert all(count < 128 for count in engine.outstanding().values())
        assert streams <= set(engine.streams["load"])
        assert len(engine.streams["load"]) == 2
        assert sum(transfer.copies for transfer in transfers) == 20 * 256
    assert engine.detector.saturations == []


def test_auto_switches_when_the_shared_queue_fills_and_says_why(bench):
    sizes = {"gpu_bytes": 65536, "cpu_bytes": 65536}
    b = bench(layers=4, blocks=64, depth=128, h2d_bytes_per_s=1e9, submit_ns=1000, virtual_clock=1, **sizes)
    with b.engine(policy="auto") as engine:
        first = engine.load(range(64), range(64))
        assert first.done or engine.policy == "pooled"
        rest = [engine.load(range(64), range(64)) for _ in range(12)]
        engine.wait()
        decision = engine.auto.decisions[0]
        assert (decision.before.policy, decision.after.policy) == ("shared", "pooled")
        assert "blocked with" in decision.reason
        assert "the queue holds 128" in decision.reason
        seen = engine.detector.saturations[0]
        assert seen.stream == engine.streams["shared"][0]
        assert seen.thread == threading.get_native_id()
        assert seen.blocked_calls < 64
        assert decision.gain > 1
        assert all(transfer.state == "done" for transfer in [first, *rest])
    for cpu, gpu in zip(b.bytes_of(b.cpu), b.bytes_of(b.gpu), strict=True):
        assert np.array_equal(cpu, gpu)


@pytest.mark.parametrize("then", ["poll", "wait", "load"])
def test_auto_says_what_it_did_where_somebody_polls_or_waits(bench, caplog, then):
    """A line of the log costs as much as some ten requests: only where nobody else says it a later one does."""
    b = bench(layers=4, blocks=64, depth=128, h2d_bytes_per_s=1e9, submit_ns=1000, virtual_clock=1)
    with b.engine(policy="auto") as engine:
        while engine.policy == "shared":
            engine.load(range(64), range(64))
        engine.load(range(64), range(64))
        assert caplog.messages == []
        if then == "load":
            b.runtime.advance(110_000_000)
            engine.load(range(64), range(64))
        else:
            getattr(engine, then)()
        assert caplog.messages[0].startswith("auto: switch shared/loop -> pooled/auto")
        engine.wait()


def test_requests_under_the_shared_policy_say_a_line_in_time(bench, caplog):
    """Each of them leaves something to the next one, which must not put the line off."""
    b = bench(layers=2, blocks=32, virtual_clock=1)
    with b.engine(policy="auto") as engine:
        base = engine.auto.base
        engine._decided("note", "nothing is left to try", before=base, after=base)
        for _ in range(12):
            engine.load(range(16), range(16))
            assert engine.policy == "shared"
            b.runtime.advance(10_000_000)
        assert caplog.messages == [f"auto: note {base} -> {base}: nothing is left to try"]


def test_a_line_of_the_log_names_what_auto_keeps_first(bench, caplog):
    b = bench(layers=2, blocks=32, virtual_clock=1)
    with b.engine(policy="auto") as engine:
        base = engine.auto.base
        engine._decided("keep", "it is cheaper", before=base, after=base._replace(policy="pooled"))
        engine.wait()
        assert caplog.messages == [f"auto: keep {base._replace(policy='pooled')} (before: {base}): it is cheaper"]


@pytest.mark.parametrize("then", ["load", "poll"])
def test_what_a_shared_transfer_cost_is_judged_in_the_next_call(bench, monkeypatch, then):
    b = bench(layers=2, blocks=32, virtual_clock=1)
    with b.engine(policy="auto") as engine:
        seen = []
        monkeypatch.setattr(engine.auto, "submitted", seen.append)
        engine.load(range(16), range(16))
        assert seen == []
        engine.poll() if then == "poll" else engine.load(range(16, 32), range(16, 32))
        assert [sample.copies for sample in seen] == [32]


def test_a_burst_behind_compute_makes_no_events(bench):
    """More are there than stand on a stream before requests share them."""
    b = bench(layers=1, blocks=8)
    compute = b.runtime.stream_create()
    with b.engine(policy="pooled", method="loop", compute_stream=compute) as engine, b.runtime.gate() as gate:
        gate.launch(compute)
        b.runtime.fail_call("cudaEventCreateWithFlags")
        transfers = [engine.load(range(8), range(8)) for _ in range(150)]
        assert b.runtime.failed("cudaEventCreateWithFlags") == 0
        b.runtime.fail_call("cudaEventCreateWithFlags", 0)
        gate.open()
        engine.wait()
        assert {transfer.state for transfer in transfers} == {"done"}
    b.runtime.stream_destroy(compute)


@pytest.mark.parametrize("then", ["poll", "wait", "load"])
def test_a_trial_is_judged_where_somebody_polls_or_waits(bench, then):
    """Comparing costs more than handing over does."""
    b = bench(layers=4, blocks=64, depth=128, h2d_bytes_per_s=1e9, submit_ns=1000, virtual_clock=1)
    with b.engine(policy="auto") as engine:
        while engine.policy == "shared":
            engine.load(range(64), range(64))
        for _ in range(100):
            engine.load(range(64), range(64))
        assert engine.auto.decisions[0].gain == 0
        if then == "load":
            b.runtime.advance(110_000_000)
            engine.load(range(64), range(64))
        else:
            getattr(engine, then)()
        assert engine.auto.decisions[0].gain > 1
        engine.wait()


def test_streams_and_events_go_back_when_a_copy_fails(bench):
    b = bench(layers=2, blocks=32)
    with b.engine(policy="pooled", method="loop") as engine:
        b.runtime.fail_copy(20, 1)
        broken = engine.load(range(32), range(31, -1, -1))
        good = engine.load(range(32), range(32))
        engine.wait()
        with pytest.raises(TransferError, match="cudaErrorInvalidValue"):
            broken.result()
        good.result()
        assert set(engine.held.values()) == {0}


@pytest.mark.parametrize("call", [b"cudaEventRecord", b"cudaStreamWaitEvent", b"cudaMemcpyAsync"])
@pytest.mark.parametrize("nth", range(1, 6))
def test_every_failing_call_ends_a_transfer_and_leaks_nothing(bench, call, nth):
    b = bench(layers=1, blocks=16)
    with b.engine(policy="pooled", method="loop") as engine:
        b.runtime.library.kvhostFailCall(call, nth, 2)
        for _ in range(4):
            with contextlib.suppress(CudaError):  # the mark on the compute stream: nothing was asked for
                engine.load(range(16), range(15, -1, -1))
        engine.wait()
        b.runtime.library.kvhostFailCall(call, 0, 0)
        assert engine.idle
        assert set(engine.held.values()) == {0}
        engine.load(range(16), range(16)).wait()


def test_a_lost_device_fails_what_is_in_flight_and_returns_everything(bench):
    b = bench(layers=2, blocks=64, h2d_bytes_per_s=1e4)  # none ends before the device is lost
    engine = b.engine(policy="pooled")
    transfers = [engine.load(range(64), range(64)) for _ in range(10)]
    b.runtime.lose_device()
    engine.wait()
    assert all(transfer.state == "failed" for transfer in transfers)
    assert set(engine.held.values()) == {0}
    with pytest.raises(TransferError, match="takes no more transfers"):
        engine.load([0], [0])


@pytest.mark.parametrize("policy", ["shared", "pooled", "auto"])
def test_many_small_loads_at_once_finish_and_are_told_of_in_order(bench, policy):
    count = 10_000
    b = bench(layers=1, blocks=64, gpu_bytes=256, cpu_bytes=256, depth=1021, latency_ns=100.0)
    with b.engine(policy=policy, detail="totals") as engine:
        ended: list[int] = []
        transfers = [
            engine.load([i % 64], [i % 64], done=lambda transfer: ended.append(transfer.id)) for i in range(count)
        ]
        engine.wait()
        assert ended == list(range(1, count + 1))
        assert [transfer.error for transfer in transfers if transfer.error] == []
        assert set(engine.held.values()) == {0}


def test_a_transfer_can_be_awaited_beside_others(bench):
    b = bench(layers=2, blocks=32)

    async def main(engine):
        return await asyncio.gather(*(engine.load(range(32), range(32)) for _ in range(5)))

    with b.engine(policy="pooled") as engine:
        ids = [transfer.id for transfer in asyncio.run(main(engine))]
        assert ids == [1, 2, 3, 4, 5]


def test_a_callback_may_ask_for_the_next_transfer(bench):
    b = bench(layers=1, blocks=8, depth=32, channels=1)
    with b.engine(policy="pooled") as engine:
        order = []

        def again(transfer):
            order.append(transfer.id)
            if len(order) < 50:
                engine.load(range(8), range(8), done=again)

        for _ in range(4):
            engine.load(range(8), range(8), done=again)
        while len(order) < 53:
            engine.poll()
        assert order == sorted(order)


def test_the_split_adds_up_to_the_whole(bench):
    b = bench(layers=2, blocks=64, h2d_bytes_per_s=1e8)
    with b.engine(policy="pooled", method="loop") as engine:
        for transfer in [engine.load(range(64), range(64)) for _ in range(3)]:
            transfer.wait()
            split = transfer.split()
            assert split.total_ns == transfer.noticed_ns - transfer.requested_ns
            # 128 copies of 4 KiB at 100 MB/s cannot take less
            assert split.copy_ns + split.submit_ns >= 128 * 4096 / 1e8 * 1e9 * 0.99


def test_work_on_a_stream_can_be_made_to_wait_for_a_transfer(bench):
    b = bench(layers=1, blocks=1, h2d_bytes_per_s=2e5)
    seen = []
    consumer = b.runtime.stream_create()
    with b.engine(policy="pooled") as engine:
        layer = b.bytes_of(b.gpu)[0]
        read = ct.CFUNCTYPE(None, ct.c_void_p)(lambda _: seen.append(layer.copy()))
        transfer = engine.load([0], [0])
        engine.fence(transfer, consumer)
        b.runtime.library.kvhostLaunchWork(ct.c_void_p(consumer), read, None, ct.c_uint64(1000))
        b.runtime.stream_synchronize(consumer)
        assert np.array_equal(seen[0], b.bytes_of(b.cpu)[0])


def test_threads_may_share_an_engine(bench):
    b = bench(layers=1, blocks=64, depth=64)
    with b.engine(policy="pooled") as engine:
        done: list[str] = []

        def work(offset: int) -> None:
            for _ in range(20):
                done.append(engine.load(range(offset, offset + 8), range(offset, offset + 8)).wait().state)

        threads = [threading.Thread(target=work, args=(8 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == ["done"] * 160
    for cpu, gpu in zip(b.bytes_of(b.cpu), b.bytes_of(b.gpu), strict=True):
        assert np.array_equal(cpu, gpu)


def test_a_slow_link_is_named_and_is_not_saturation(bench):
    b = bench(layers=1, blocks=4, gpu_bytes=1 << 20, cpu_bytes=1 << 20, h2d_bytes_per_s=2e8)
    with b.engine(policy="auto", link_bytes_per_s=4e9) as engine:
        engine.load(range(4), range(4)).wait()
        assert "slow link" in engine.detector.losses()
        assert "GB/s on a link of 4.0" in engine.detector.reason
        assert engine.detector.saturations == []
        assert engine.policy == "shared"


def test_a_device_lost_while_completions_are_looked_up_fails_the_transfer_being_submitted(bench):
    b = bench(layers=4, blocks=64, depth=64, h2d_bytes_per_s=1e8)
    engine = b.engine(policy="shared")
    first = engine.load(range(8), range(8))
    b.runtime.fail_execution(1, 719)
    transfers = [first]
    with contextlib.suppress(CudaError, TransferError):  # once it is known to be lost, nothing more is taken
        for _ in range(3):
            transfers.append(engine.load(range(64), range(64)))
    engine.wait()
    assert all(transfer.done for transfer in transfers)
    assert any(transfer.state == "failed" for transfer in transfers)
    assert set(engine.held.values()) == {0}


def test_what_an_engine_holds_is_told_while_it_is_in_use(bench):
    b = bench(layers=1, virtual_clock=1)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    with b.engine(policy="pooled", method="batch", compute_stream=compute) as engine, b.runtime.gate() as gate:
        gate.launch(compute)
        engine.fence(engine.load([0], [0]), forward)
        assert engine.held == {"streams": 1, "events": 2, "fences": 0}  # in front of the copies and behind them
        engine.fence(engine.store([1], [1]), forward)
        assert engine.held == {"streams": 2, "events": 4, "fences": 0}
        gate.open()
        engine.wait()
        assert set(engine.held.values()) == {0}


@pytest.mark.parametrize("depth", [64, 256])
def test_a_direction_takes_up_to_half_of_a_launch_queue_and_never_more(bench, depth):
    """Both may stand in one hardware channel; room for 16 to 32 operations of others is left."""
    b = bench(layers=1, depth=depth, blocks=4 * depth, virtual_clock=1, h2d_bytes_per_s=1e8)
    with b.engine(policy="pooled", method="loop", link_bytes_per_s=1e12) as engine:
        load, most = engine.load(range(0, 4 * depth, 2), range(0, 4 * depth, 2)), 0
        while not load.done:
            b.runtime.advance(10_000)
            most = max(most, engine.read().in_flight_places[0])
    assert depth / 2 - 18 <= most <= depth / 2


def test_a_transfer_of_many_submissions_began_with_its_first_copy(bench):
    """On the virtual clock, at a byte a nanosecond: 8 MiB take what they take, and the engine submits ahead."""
    b = bench(layers=1, blocks=2048, virtual_clock=1, h2d_bytes_per_s=1e9)
    order = np.random.default_rng(1).permutation(2048)
    with b.engine(policy="pooled", method="batch", link_bytes_per_s=1e9) as engine:
        load = engine.load(order, order).wait()
        assert sum(engine.read().launches[0]) > 3
    assert 2048 * 4096 <= load.copy_end_ns - load.copy_start_ns < 1.2 * 2048 * 4096


@pytest.mark.parametrize("method", ["loop", "batch", "kernel"])
def test_a_rate_that_is_asked_for_is_kept_over_a_whole_transfer(bench, method):
    """A tenth of the link's; what a first submission carries at once is short beside all of it."""
    b = bench(layers=1, blocks=2048, gpu_bytes=16384, cpu_bytes=16384, virtual_clock=1, h2d_bytes_per_s=1e10)
    order = np.random.default_rng(1).permutation(2048)
    with b.engine(policy="pooled", method=method, max_bytes_per_s=1e9) as engine:
        load = engine.load(order, order).wait()
    assert 0.8 * 2048 * 16384 < load.copy_end_ns - load.copy_start_ns < 1.2 * 2048 * 16384


def test_an_engine_that_ends_without_its_transfers_carries_none_of_them_out(bench):
    b = bench(layers=1, virtual_clock=1)
    compute = b.runtime.stream_create()
    b.bytes_of(b.gpu)[0][:] = 1
    engine = b.engine(policy="pooled", compute_stream=compute)
    b.runtime.launch_delay(compute, 1_000_000)
    loads = [engine.load([i], [i]) for i in range(3)]
    engine._close(drain=False)  # as one does that nobody closed
    assert all(load.failed for load in loads)
    b.runtime.stream_synchronize(compute)
    assert (b.bytes_of(b.gpu)[0] == 1).all()


def allocated() -> int:
    """Bytes that this process has from the C library's allocator."""

    class Info(ct.Structure):
        _fields_ = [
            (name, ct.c_size_t)
            for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usm", "fsm", "used", "free", "keep"]
        ]

    try:
        ask = ct.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("the C library does not tell what is allocated")
    ask.restype = Info
    gc.collect()
    told = ask()
    return int(told.used + told.hblkhd)


@pytest.mark.parametrize("asked_for", ["blocks", "addresses"])
def test_what_is_closed_has_given_its_memory_back(bench, asked_for):
    b, before = bench(layers=1), 0
    whole, places = np.zeros(1, dtype=np.uint64), [(b.gpu.regions[0].address, b.cpu.regions[0].address)]
    for number in range(8):
        if number == 3:  # what is made once is there by now
            before = allocated()
        if asked_for == "blocks":
            with b.engine(policy="pooled") as engine:
                for i in range(200):
                    engine.load([i % 64], [i % 64])
        else:
            submitter = Submitter(b.runtime, limits=b.limits, method="loop")
            for _ in range(1000):
                submitter.submit(Copies(whole, whole, 4096, None, places), "load")
            submitter.wait()
            submitter.close()
            del submitter
    assert allocated() - before < 1 << 20


def test_a_request_that_is_refused_has_given_its_memory_back(bench):
    b, ids, before = bench(layers=1, blocks=8192, gpu_bytes=16, cpu_bytes=16), np.arange(8192), 0

    def is_refused():
        """Of a load whose event cannot be recorded; the one that fails may be a probe's of the device's clock."""
        b.runtime.fail_call("cudaEventRecord", 1, 1)
        try:
            engine.load(ids, ids).wait()
        except CudaError:
            return True
        return False

    with b.engine(policy="pooled") as engine:
        for number in range(200):
            if number == 50:  # what is made once is there by now
                before = allocated()
            assert any(is_refused() for _ in range(8))
            engine.load(ids[:1], ids[:1]).wait()
        assert allocated() - before < 1 << 20


def test_memory_of_many_requests_at_once_is_given_back_but_for_what_the_next_ones_take(bench):
    b, ids, before = bench(layers=1, blocks=8192, gpu_bytes=16, cpu_bytes=16, virtual_clock=1), np.arange(8192), 0
    compute = b.runtime.stream_create()
    with b.engine(policy="pooled", compute_stream=compute) as engine:
        for number in range(8):
            if number == 3:  # what is kept is there by now
                before = allocated()
            b.runtime.launch_delay(compute, 1_000_000)
            for _ in range(100):  # 64 KiB each
                engine.load(ids, ids)
            engine.wait()
        assert allocated() - before < 1 << 20


def test_an_engine_that_nothing_can_end_is_closed_all_the_same_and_says_so(bench):
    b = bench(layers=1, virtual_clock=1)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    engine = b.engine(policy="pooled", compute_stream=compute, stuck_after_s=0.0)
    with b.runtime.gate() as gate:
        gate.launch(compute)
        load = engine.load([0], [0])
        engine.fence(load, forward)  # it stands behind the gate, on the device
        with pytest.raises(CudaError, match="wait forever"):
            engine._close(drain=False)
        assert not load.done
        gate.open()
