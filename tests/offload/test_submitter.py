"""Copies by address in the native thread's hands: bytes, order, merging, what it waits for, what fails."""

from __future__ import annotations

import contextlib
import ctypes as ct
import dataclasses
import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvprobe.cuda.copies import METHOD_NAMES
from kvprobe.errors import TransferError, UsageError
from kvprobe.offload import Bounds, Copies, Submitter

BLOCK = 4096
FAST = 2  # CTAs where nothing computes


@pytest.fixture
def made(bench):
    """One pool of 64 blocks on each side, and a submitter that copies in a loop, where calls are copies."""
    opened = []

    def make(method="loop", **config):
        b = bench(layers=1, **config)
        opened.append(Submitter(b.runtime, limits=b.limits, method=method))
        return b, opened[-1]

    yield make
    for one in opened:
        one.close(drain=False)


def copies(b, direction, pairs, bounds=None):
    """Copies of whole blocks, from the first of each pair to the second."""
    gpu, cpu = b.gpu.regions[0].address, b.cpu.regions[0].address
    to, of = (gpu, cpu) if direction == "load" else (cpu, gpu)
    src = np.array([of + a * BLOCK for a, _ in pairs], dtype=np.uint64)
    dst = np.array([to + c * BLOCK for _, c in pairs], dtype=np.int64)
    return Copies(dst, src, np.full(len(pairs), BLOCK, dtype=np.int64), bounds)


@pytest.mark.parametrize("method", ["loop", "batch", "auto"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_bytes_arrive_and_the_times_are_the_devices(made, direction, method):
    b, submitter = made(method)
    there, here = (b.gpu, b.cpu) if direction == "load" else (b.cpu, b.gpu)
    b.bytes_of(here)[0][:] = np.arange(64, dtype=np.uint8)[:, None]
    pairs = [(i, 63 - i) for i in range(64)]
    one = submitter.submit(copies(b, direction, pairs), direction)
    one.wait()
    assert one.done
    assert not one.failed
    assert one.error is None
    assert (b.bytes_of(there)[0] == np.arange(63, -1, -1, dtype=np.uint8)[:, None]).all()
    assert one.bytes == 64 * BLOCK
    assert one.copy_end_ns >= one.copy_start_ns > 0  # alike where its thread lost its core meanwhile
    by_device = one.copy_end_ns - one.copy_start_ns
    assert one.copy_ns == (by_device or max(1, one.noticed_ns - one.submitted_ns))
    assert submitter.expected.ns(direction, BLOCK, 64) > 0 or method == "loop"


@pytest.mark.parametrize("behind_copies", [False, True])
def test_a_wait_for_others_copies_is_no_sign_of_compute(made, behind_copies):
    """The first store's stream waits for 5 ms; while compute is seen stores are paced to a fiftieth of the link."""
    b, submitter = made("kernel", virtual_clock=True, h2d_bytes_per_s=55e9, d2h_bytes_per_s=55e9)
    submitter._table.paced_store = 1_000_000_000
    stream, whole = b.runtime.stream_create(), [(i, 63 - i) for i in range(64)]
    b.runtime.launch_delay(stream, 5_000_000)
    ones = [
        submitter.submit(copies(b, "store", whole), "store", after=stream, behind_copies=behind_copies),
        submitter.submit(copies(b, "store", whole), "store"),
    ]
    for one in ones:
        one.wait()
    paced_ns = 64 * BLOCK  # at a byte a ns
    assert all((one.copy_ns > paced_ns / 2) != behind_copies for one in ones)


def test_neighbours_become_one_copy_but_never_over_a_bound(made):
    b, submitter = made()
    run = [(i, i) for i in range(16)]
    one = submitter.submit(copies(b, "load", run), "load")
    one.wait()
    assert (one.copies, one.calls) == (16, 1)
    middle = b.cpu.regions[0].address + 8 * BLOCK
    other = submitter.submit(copies(b, "load", run, Bounds([middle, b.gpu.regions[0].address])), "load")
    other.wait()
    assert other.calls == 2


def test_it_waits_for_the_stream_it_is_told_and_not_for_others(made):
    b, submitter = made()
    stream = b.runtime.stream_create()
    seen, layer = b.bytes_of(b.cpu)[0], b.bytes_of(b.gpu)[0]
    layer[:] = 1
    with b.runtime.gate() as gate:
        gate.launch(stream)
        b.runtime.launch_work(stream, lambda: layer.fill(2))
        submitter.submit(copies(b, "store", [(0, 0)]), "store").wait()
        assert seen[0, 0] == 1
        held = submitter.submit(copies(b, "store", [(0, 0)]), "store", after=stream)
        behind = submitter.submit(copies(b, "store", [(1, 1)]), "store")
        assert not held.done
        gate.open()
        behind.wait()
        assert held.done
    assert seen[0, 0] == 2


def test_a_fence_makes_a_stream_wait_for_it(made):
    b, submitter = made(h2d_bytes_per_s=1e8)
    stream = b.runtime.stream_create()
    b.bytes_of(b.cpu)[0][:] = 7
    one = submitter.submit(copies(b, "load", [(i, 63 - i) for i in range(64)]), "load")
    submitter.fence(one, stream)
    b.runtime.stream_synchronize(stream)
    assert (b.bytes_of(b.gpu)[0] == 7).all()


def test_the_arrays_of_a_submission_are_the_callers_again(made):
    """What waits for compute is copied by what its arrays held when it was handed over."""
    b, submitter = made()
    stream = b.runtime.stream_create()
    b.bytes_of(b.cpu)[0][:], b.bytes_of(b.gpu)[0][:] = 7, 1
    given = copies(b, "load", [(i, 63 - i) for i in range(64)])
    with b.runtime.gate() as gate:
        gate.launch(stream)
        one = submitter.submit(given, "load", after=stream)
        for array in (given.dst, given.src, given.sizes):
            array[:] = 0
        gate.open()
        one.wait()
    assert (b.bytes_of(b.gpu)[0] == 7).all()


def test_as_many_loads_stand_behind_a_forward_as_the_queue_has_places_for(bench):
    """On the virtual clock, where a wait that nothing can end is refused: each is a submission with two events."""
    b = bench(layers=1, depth=1024, blocks=256, virtual_clock=1)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    submitter = Submitter(b.runtime, limits=b.limits, method="batch")
    with b.runtime.gate() as gate:
        gate.launch(compute)
        loads = [submitter.submit(copies(b, "load", [(i, i)]), "load", after=compute) for i in range(120)]
        for load in loads:
            submitter.fence(load, forward)
        assert not any(load.done for load in loads)
        gate.open()
    b.runtime.stream_synchronize(forward)
    assert (b.bytes_of(b.gpu)[0][:120] == b.bytes_of(b.cpu)[0][:120]).all()
    submitter.close()


def test_a_copy_that_fails_behind_others_ends_its_submission_with_nothing_after_it(bench):
    """On the virtual clock: the first copies are on their way for a second when the next one is refused."""
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1e5)
    submitter = Submitter(b.runtime, limits=b.limits, method="loop")
    first = submitter.submit(copies(b, "load", [(i, 2 * i) for i in range(20)]), "load")
    while first.state != "in flight":
        b.runtime.advance(1000)
    b.runtime.fail_copy(2, 1)
    broken = submitter.submit(copies(b, "load", [(20, 41), (22, 43), (24, 45)]), "load")
    with pytest.raises(TransferError, match="cudaErrorInvalidValue"):
        broken.wait()
    assert first.done and not first.failed
    submitter.close()


@pytest.mark.parametrize("number", [1, 2])
def test_a_copy_behind_a_forward_that_fails_leaves_the_forward_and_the_next_load_alone(bench, number):
    b = bench(layers=1, virtual_clock=1)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    submitter = Submitter(b.runtime, limits=b.limits, method="loop")
    with b.runtime.gate() as gate:
        gate.launch(compute)
        broken = submitter.submit(copies(b, "load", [(0, 1), (2, 3)]), "load", after=compute)
        b.runtime.fail_copy(number, 1)
        submitter.fence(broken, forward)
        good = submitter.submit(copies(b, "load", [(5, 5)]), "load", after=compute)
        submitter.fence(good, forward)
        gate.open()
    b.runtime.stream_synchronize(forward)
    submitter.wait()
    assert broken.failed and not good.failed
    assert (b.bytes_of(b.gpu)[0][5] == b.bytes_of(b.cpu)[0][5]).all()
    stats = submitter.read()
    assert stats.wrong is None and stats.events_free == stats.events and list(stats.in_flight_places) == [0, 0]
    submitter.close()


def test_what_the_thread_asks_breaks_no_capture_of_a_graph(made):
    b, submitter = made()
    runtime = b.runtime
    stream = runtime.stream_create()
    b.bytes_of(b.cpu)[0][:] = 7
    runtime.call("cudaStreamBeginCapture", stream, 0)  # cudaStreamCaptureModeGlobal, as torch.cuda.graph begins it
    one = submitter.submit(copies(b, "load", [(i, i) for i in range(64)]), "load")
    one.wait()
    runtime.call("cudaStreamEndCapture", stream, ct.byref(ct.c_void_p()))
    one.result()
    assert (b.bytes_of(b.gpu)[0] == 7).all()


def test_a_failing_copy_fails_its_submission_alone(made):
    b, submitter = made()
    b.runtime.fail_copy(2, 1)
    broken = submitter.submit(copies(b, "load", [(0, 3), (5, 9), (9, 1)]), "load")
    good = submitter.submit(copies(b, "load", [(1, 2)]), "load")
    good.wait()
    assert broken.failed
    assert "cudaErrorInvalidValue" in str(broken.error)
    assert not good.failed


def test_what_cannot_be_taken_is_refused_in_one_line(made):
    b, submitter = made()
    with pytest.raises(UsageError, match="unknown direction"):
        submitter.submit(copies(b, "load", [(0, 0)]), "sideways")
    with pytest.raises(UsageError, match="at least one"):
        submitter.submit(copies(b, "load", []), "load")
    child = os.fork()
    if not child:
        try:
            submitter.submit(copies(b, "load", [(0, 0)]), "load")
        except TransferError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    submitter.close()
    with pytest.raises(TransferError, match="closed"):
        submitter.submit(copies(b, "load", [(0, 0)]), "load")


def test_thousands_of_submissions_leave_nothing_behind(made):
    b, submitter = made()
    newest = None
    for i in range(3000):
        newest = submitter.submit(copies(b, "load", [(i % 64, 63 - i % 64)]), "load")
    newest.wait()
    assert submitter.read().pending == 0
    assert submitter.read().events_free == submitter.read().events


def test_whoever_has_seen_an_end_finds_it_counted(made):
    b, submitter = made()
    for _ in range(300):
        one = submitter.submit(copies(b, "load", [(0, 0)]), "load")
        while not one.done:  # without a wait, which would be woken later
            pass
        assert submitter.read().pending == 0


def test_one_that_does_not_move_is_given_up_and_says_so(bench):
    """On the virtual clock: a copy of 4 KiB takes 41 s there, and after 2 s without a move it is given up."""
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=100.0)
    submitter = Submitter(b.runtime, limits=b.limits, method="loop", stuck_after_s=2.0)
    stuck = submitter.submit(copies(b, "load", [(0, 0)]), "load")
    with pytest.raises(TransferError, match=r"load 1 of 4096 bytes failed: the device did not go on .*stuck_after_s"):
        stuck.wait()
    assert stuck.failed
    with pytest.raises(TransferError, match=r"takes no more transfers: transfer 1 did not go on .*stuck_after_s"):
        submitter.submit(copies(b, "load", [(1, 1)]), "load")
    submitter.close(drain=False)


def test_a_wait_ends_when_its_time_is_over(bench):
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1000.0)
    submitter = Submitter(b.runtime, limits=b.limits, method="loop")
    slow = submitter.submit(copies(b, "load", [(0, 0)]), "load")
    before = b.runtime.now_ns()
    with pytest.raises(TransferError, match=r"load 1 did not end within 0\.5 s"):
        slow.wait(0.5)
    assert 500_000_000 <= b.runtime.now_ns() - before < 600_000_000
    assert slow.wait() is slow
    submitter.close()


def layered(b, direction, count, each=2):
    """Parts of a transfer that share their arrays: part i copies blocks i * each and on, to the same places."""
    gpu, cpu = b.gpu.regions[0].address, b.cpu.regions[0].address
    to, of = (gpu, cpu) if direction == "load" else (cpu, gpu)
    at = np.arange(each) * BLOCK
    return [[Copies(at, at, BLOCK, None, [(to + i * each * BLOCK, of + i * each * BLOCK)])] for i in range(count)]


@pytest.mark.parametrize("method", ["loop", "batch", "kernel"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_parts_of_a_request_end_one_by_one_in_their_order(bench, direction, method):
    """On the virtual clock: 8 KiB a part take 82 us; the first is there, and readable, while the last is not."""
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    there, here = (b.gpu, b.cpu) if direction == "load" else (b.cpu, b.gpu)
    b.bytes_of(here)[0][:], b.bytes_of(there)[0][:] = 7, 1
    submitter = Submitter(b.runtime, limits=b.limits, method=method)
    parts = submitter.submit_all(layered(b, direction, 32), direction)
    assert [part.id for part in parts] == list(range(1, 33))
    assert [(part.copies, part.bytes) for part in parts] == [(2, 2 * BLOCK)] * 32
    for i, part in enumerate(parts):
        part.wait()
        assert (b.bytes_of(there)[0][: 2 * i + 2] == 7).all()
        assert i == 31 or (not parts[-1].done and (b.bytes_of(there)[0][-1] == 1).all())
    assert [one.noticed_ns for one in parts] == sorted(one.noticed_ns for one in parts)
    submitter.close()


def test_parts_that_share_nothing_copy_what_each_says(made):
    b, submitter = made()
    b.bytes_of(b.cpu)[0][:] = np.arange(64, dtype=np.uint8)[:, None]
    one, two = copies(b, "load", [(0, 63), (2, 61)]), copies(b, "load", [(1, 62)])
    first, second = submitter.submit_all([[one, two], [copies(b, "load", [(9, 9)])]], "load")
    second.wait()
    assert first.done and (first.copies, second.copies) == (3, 1)
    assert b.bytes_of(b.gpu)[0][[61, 62, 63, 9], 0].tolist() == [2, 1, 0, 9]


def test_of_a_request_that_is_refused_nothing_is_asked_for(made):
    b, submitter = made()
    with pytest.raises(UsageError, match="at least one"):
        submitter.submit_all([*layered(b, "load", 2), []], "load")
    with pytest.raises(UsageError, match="at least one"):
        submitter.submit_all([], "load")
    assert submitter.read().pending == 0
    submitter.close()
    with pytest.raises(TransferError, match="closed"):
        submitter.submit_all(layered(b, "load", 2), "load")


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_part_that_fails_takes_no_other_with_it(made, number):
    b, submitter = made()
    b.bytes_of(b.cpu)[0][:] = 7
    b.runtime.fail_copy(number, 1)
    parts = [[Copies(c.dst[::-1], c.src[::-1], BLOCK, None, c.bases) for c in part] for part in layered(b, "load", 8)]
    given = submitter.submit_all(parts, "load")
    given[-1].wait()
    failed = (number - 1) // 2
    assert [part.failed for part in given] == [i == failed for i in range(8)]
    there = b.bytes_of(b.gpu)[0][:16].reshape(8, -1)
    assert all((there[i] == 7).all() for i in range(8) if i != failed)


@pytest.mark.parametrize("method", ["batch", "kernel"])
def test_a_stream_waits_for_every_part_while_the_compute_before_runs(bench, method):
    """On the virtual clock, where a wait that nothing can end is refused: all are submitted behind the gate."""
    b = bench(layers=1, virtual_clock=1)
    b.bytes_of(b.cpu)[0][:] = 7
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    submitter = Submitter(b.runtime, limits=b.limits, method=method)
    with b.runtime.gate() as gate:
        gate.launch(compute)
        parts = submitter.submit_all(layered(b, "load", 32), "load", after=compute)
        for part in parts:
            submitter.fence(part, forward)
        assert not any(part.done for part in parts)
        gate.open()
    b.runtime.stream_synchronize(forward)
    assert (b.bytes_of(b.gpu)[0] == 7).all()
    submitter.close()


def test_whoever_waits_for_one_part_finds_the_others_submitted(bench):
    """80 MB, more than is submitted ahead of the device else; what another request has stays where it is."""
    b = bench(layers=1, blocks=512, virtual_clock=1)
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    submitter = Submitter(b.runtime, limits=b.limits, method="loop")
    whole, places = np.zeros(1, dtype=np.uint64), [(b.gpu.regions[0].address, b.cpu.regions[0].address)]
    with b.runtime.gate() as gate:
        gate.launch(compute)
        parts = submitter.submit_all(40 * [[Copies(whole, whole, 512 * BLOCK, None, places)]], "load", after=compute)
        another = submitter.submit(copies(b, "load", [(0, 0)]), "load")
        submitter.fence(parts[0], forward)
        assert {part.state for part in parts} == {"in flight"}
        assert another.state == "waiting"
        gate.open()
    submitter.wait()
    submitter.close()


@pytest.mark.parametrize("method", ["batch", "kernel"])
def test_stores_behind_a_forward_hold_no_load_back(bench, method):
    """Another stream's forward waits for the load, which has nothing to do with the stores."""
    b = bench(layers=1, virtual_clock=1, channels=32, compute_channels=32)
    few = dataclasses.replace(b.limits, channels=4)  # so few streams that none shares a channel: it would hold it back
    compute, other = b.runtime.stream_create(), b.runtime.stream_create()
    submitter = Submitter(b.runtime, limits=few, method=method)
    with b.runtime.gate() as gate:
        gate.launch(compute)
        stores = [submitter.submit(copies(b, "store", [(i, i)]), "store", after=compute) for i in range(12)]
        for store in stores[:8]:
            submitter.fence(store, compute)
        load = submitter.submit(copies(b, "load", [(20, 20)]), "load")
        submitter.fence(load, other)
        load.wait()
        assert not any(store.done for store in stores)
        gate.open()
    submitter.wait()
    submitter.close()


def test_no_launch_reads_what_a_later_one_wrote_into_the_ring(bench, monkeypatch):
    """Launches that stand behind a forward keep their entries while the ring of 64 goes round."""
    monkeypatch.setattr("kvprobe.offload.resources.LIST_COPIES", 64)
    b = bench(layers=1, virtual_clock=1, h2d_bytes_per_s=1e8)
    submitter = Submitter(b.runtime, limits=b.limits, method="kernel")
    compute, forward = b.runtime.stream_create(), b.runtime.stream_create()
    rng, used = np.random.default_rng(3), []
    for number in range(60):
        b.bytes_of(b.cpu)[0][:] = rng.integers(0, 256, (64, BLOCK), dtype=np.uint8)
        before, to = b.bytes_of(b.gpu)[0].copy(), rng.permutation(64)
        ends = np.cumsum(rng.integers(1, 9, 5))
        with b.runtime.gate() as gate:
            gate.launch(compute)
            for first, end in zip([0, *ends], ends, strict=False):
                pairs = [(i, int(to[i])) for i in range(first, end)]
                submitter.fence(submitter.submit(copies(b, "load", pairs), "load", after=compute), forward)
            used.append(submitter.read().listed[0])
            gate.open()
        b.runtime.stream_synchronize(forward)
        submitter.wait()
        before[to[: ends[-1]]] = b.bytes_of(b.cpu)[0][: ends[-1]]
        assert (b.bytes_of(b.gpu)[0] == before).all(), number
    now, given = b.bytes_of(b.gpu)[0].copy(), []
    for _ in range(100):  # more than the ring takes
        pairs = list(zip(*(rng.permutation(64)[:5].tolist() for _ in range(2)), strict=True))
        given.append(submitter.submit(copies(b, "load", pairs), "load"))
        for of, to in pairs:
            now[to] = b.bytes_of(b.cpu)[0][of]
    submitter.wait()
    assert (b.bytes_of(b.gpu)[0] == now).all() and all(one.methods == ("kernel",) for one in given)
    stats = submitter.read()
    assert stats.wrong is None and list(stats.listed) == [0, 0]
    assert max(used) > 30 and sum(used) > 10 * 64  # many side by side, and the ring went round
    submitter.close()


def test_a_fault_of_the_submitters_thread_reaches_the_programs_handler_and_no_other_signal_does(made):
    """A blocked fault ends the process without a word: no crash handler's stack, no core's cause."""
    made()
    masks: list[str] = []
    while not masks:  # the thread gives itself its name once it runs; others may end meanwhile
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                masks += [status["SigBlk"]] * (status["Name"].strip() == "kvprobe-submit")
    for mask in masks:
        blocked = {number for number in range(1, 32) if int(mask, 16) >> (number - 1) & 1}
        assert not blocked & {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
        assert blocked >= {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM}


def test_what_was_gathered_and_not_submitted_is_gathered_again(bench):
    """1,024 loads of 4 blocks that one batch could hold more of than it may: not a batch a load from then on."""
    b = bench(layers=1, blocks=4096, depth=1024, virtual_clock=1, h2d_bytes_per_s=1e9)
    compute, order = b.runtime.stream_create(), np.random.default_rng(1).permutation(4096)
    with b.engine(policy="pooled", method="batch", compute_stream=compute, link_bytes_per_s=1e9) as engine:
        with b.runtime.gate() as gate:
            gate.launch(compute)
            for at in range(0, 4096, 4):
                engine.load(order[at : at + 4], order[at : at + 4])
            gate.open()
        engine.wait()
        assert engine.read().launches[0][1] < 100
    assert np.array_equal(b.bytes_of(b.gpu)[0], b.bytes_of(b.cpu)[0])


def test_compute_in_front_of_copies_is_spared_and_forgotten_in_proportion(bench):
    """Stores of 16 KiB, by the default figures: by DMA behind compute of a millisecond and just after, else a kernel.

    Each is one submission with nothing in front of it, so that nothing is learned of the methods.
    """
    b = bench(layers=1, blocks=256, gpu_bytes=16384, cpu_bytes=16384, depth=1024, virtual_clock=1)
    compute, ids = b.runtime.stream_create(), np.random.default_rng(1).permutation(256)
    with b.engine(policy="pooled", compute_stream=compute) as engine:
        used = []
        for pause_ns, before_ns in ((0, 0), (0, 1_000_000), (10_000_000, 0), (200_000_000, 0)):
            b.runtime.launch_delay(compute, pause_ns)
            b.runtime.stream_synchronize(compute)
            b.runtime.launch_delay(compute, before_ns)
            used += engine.store(ids, ids).wait().methods
        assert used == ["kernel", "batch", "batch", "kernel"]


def test_stores_by_kernel_are_paced_while_compute_is_seen_and_never_loads(bench):
    """The rate of the table is a quarter of the link's: beside compute 4 MiB take four times as long."""
    b = bench(layers=1, blocks=256, gpu_bytes=16384, cpu_bytes=16384, depth=1024, virtual_clock=1, d2h_bytes_per_s=4e9)
    compute, ids = b.runtime.stream_create(), np.random.default_rng(1).permutation(256)
    with b.engine(policy="pooled", method="kernel", compute_stream=compute) as engine:
        engine._table.paced_store = 1_000_000_000

        def took(ask, before_ns):
            b.runtime.launch_delay(compute, before_ns)
            status = ask(ids, ids).wait()._status
            return status.copy_end_ns - status.copy_start_ns

        quiet, beside = (took(engine.store, before_ns) for before_ns in (0, 1_000_000))
        assert 3 < beside / quiet < 4.5
        assert abs(beside - 256 * 16384) < 0.02 * beside
        assert took(engine.load, 1_000_000) < beside / 2
    assert np.array_equal(b.bytes_of(b.gpu)[0], b.bytes_of(b.cpu)[0])


@pytest.mark.parametrize("ask", ["store", "load"])
@pytest.mark.parametrize("guess", [0.5, 0.8, 1.2])
def test_the_end_of_many_launches_is_noticed_at_once_however_wrong_the_first_guess_of_the_rate_is(bench, ask, guess):
    """The thread looks when the newest launch is due: what was wrong of the ones before does not add up."""
    b = bench(layers=1, blocks=2048, gpu_bytes=16384, cpu_bytes=16384, depth=1024, virtual_clock=1)
    ids = np.random.default_rng(1).permutation(2048)
    with b.engine(policy="pooled", method="kernel", link_bytes_per_s=int(4e9 * guess)) as engine:
        status = getattr(engine, ask)(ids, ids).wait()._status
        assert status.calls >= 4
        assert status.noticed_ns - status.copy_end_ns < 60_000


@pytest.fixture
def computing(bench):
    """Transfers of 4 MiB by kernels behind the compute stream, by an H100's figures: 1 CTA while compute is seen.

    `slow` says how many of the transfers since the last time were submitted by that one.
    """
    with contextlib.ExitStack() as stack:

        def make(rate):
            device = {"compute_channels": 32, "h2d_bytes_per_s": rate, "d2h_bytes_per_s": rate, "virtual_clock": 1}
            b = bench(layers=1, blocks=256, gpu_bytes=16384, cpu_bytes=16384, depth=1024, **device)
            compute, ids = b.runtime.stream_create(), np.random.default_rng(1).permutation(256)
            engine = stack.enter_context(
                b.engine(policy="pooled", method="kernel", compute_stream=compute, link_bytes_per_s=int(rate))
            )
            engine._table.max_slowdown = 0.0
            kernel, last = METHOD_NAMES.index("kernel"), [engine.read()] * 2

            def slow(direction):
                side = int(direction == "store")
                before, last[side] = last[side], engine.read()
                moved = last[side].bytes[side][kernel] - before.bytes[side][kernel]
                by_ctas = last[side].cta_bytes[side] - before.cta_bytes[side]
                return (FAST * moved - by_ctas) / (FAST - 1) / (256 * 16384)

            def step(loads):
                asked = [engine.load(ids, ids) for _ in range(loads)]
                b.runtime.launch_delay(compute, 10_000_000)
                asked.append(engine.store(ids, ids))
                b.runtime.stream_synchronize(compute)
                return asked

            return engine, ids, step, slow

        yield make


@pytest.mark.parametrize(
    ("rate", "in_flight", "most"),
    [
        pytest.param(8e9, 1, 8, id="0.5 ms, one after another"),
        pytest.param(2e9, 1, 4, id="2 ms, one after another"),
        pytest.param(2e9, 8, 4, id="2 ms, eight in flight"),
        pytest.param(300e6, 1, 2, id="14 ms, one after another"),
    ],
)
def test_a_loop_of_transfers_is_soon_no_model_that_computes(computing, rate, in_flight, most):
    engine, ids, step, slow = computing(rate)
    step(0)[-1].wait()
    assert slow("store") == pytest.approx(1)
    asked = []
    for i in range(32):
        asked.append(engine.store(ids, ids))
        if i >= in_flight - 1:
            asked[i + 1 - in_flight].wait()
    asked[-1].wait()
    assert slow("store") <= most + 0.01
    for _ in range(4):
        engine.store(ids, ids).wait()
    assert slow("store") == pytest.approx(0)


@pytest.mark.parametrize("loads", [1, 6])
def test_steps_of_a_model_are_thought_to_compute_all_the_time(computing, loads):
    """At 40 GB/s six loads take 0.6 ms, and find the stream with nothing to do; the store waits for the kernels."""
    _engine, _ids, step, slow = computing(40e9)
    step(loads)[-1].wait()
    slow("load")
    slow("store")
    for _ in range(30):
        last = step(loads)[-1]
    last.wait()
    assert slow("load") == pytest.approx(30 * loads)
    assert slow("store") == pytest.approx(30)


def test_the_ctas_that_moved_the_bytes_are_counted(bench):
    b = bench(layers=1, blocks=256, gpu_bytes=16384, cpu_bytes=16384, depth=1024, virtual_clock=1)
    ids = np.random.default_rng(1).permutation(256)
    with b.engine(policy="pooled", method="kernel") as engine:
        for row in range(engine._table.rows[0]):
            engine._table.row[0][row].ctas = 3
        engine.load(ids, ids).wait()
        read, kernel = engine.read(), METHOD_NAMES.index("kernel")
        assert read.bytes[0][kernel] == 256 * 16384
        assert list(read.cta_bytes) == [3 * 256 * 16384, 0]


def test_no_bound_of_an_earlier_request_keeps_neighbours_apart(made):
    """The second has the memory of the first one, which had a bound more: in the middle of what both copy."""
    b, submitter = made()
    at, run = b.gpu.regions[0].address, [(i, i) for i in range(64)]
    two = submitter.submit(copies(b, "load", run, Bounds([at - BLOCK, at + 8 * BLOCK])), "load")
    two.wait()
    assert two.calls == 2
    for _ in range(8):
        one = submitter.submit(copies(b, "load", run, Bounds([at - BLOCK])), "load")
        one.wait()
        assert one.calls == 1


def test_a_transfer_begins_on_the_device_when_its_own_first_copy_does(bench):
    """Each takes several launches, of which the first waits behind those of the one before."""
    b = bench(layers=8, blocks=256, gpu_bytes=65536, cpu_bytes=65536, depth=1024, virtual_clock=1)
    draw = np.random.default_rng(1)
    with b.engine(policy="pooled", method="kernel") as engine:
        loads = [engine.load(draw.permutation(256), draw.permutation(256)) for _ in range(6)]
        loads[-1].wait()
        spans = [(load.copy_start_ns, load.copy_end_ns) for load in loads]
        assert min(load.calls for load in loads) > 1
    early = [before[1] - after[0] for before, after in itertools.pairwise(spans) if after[0] < before[1]]
    assert not early, f"so many ns before the copies in front of them had ended: {early}"


def test_a_short_rest_of_a_transfer_is_no_launch_of_its_own(bench):
    """At 30 GB/s a launch has 36 MB; transfers of 40 MiB."""
    rate = {"h2d_bytes_per_s": 30e9 / 0.9}
    b = bench(layers=5, blocks=128, gpu_bytes=65536, cpu_bytes=65536, depth=1024, virtual_clock=1, **rate)
    draw = np.random.default_rng(1)
    with b.engine(policy="pooled", method="kernel") as engine:
        loads = [engine.load(draw.permutation(128), draw.permutation(128)) for _ in range(12)]
        loads[-1].wait()
        assert [load.calls for load in loads[4:]] == [1] * 8
