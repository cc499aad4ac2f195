"""Copies by address in the native thread's hands: bytes, order, merging, what it waits for, what fails."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvprobe.errors import TransferError, UsageError
from kvprobe.offload import Bounds, Copies, Submitter

BLOCK = 4096


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
    assert one.copy_end_ns > one.copy_start_ns > 0
    assert one.copy_ns == one.copy_end_ns - one.copy_start_ns
    assert submitter.expected_ns(direction, BLOCK, 64) > 0 or method == "loop"


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
    with pytest.raises(TransferError, match=r"load 1 did not end within 0\.5 s"):
        slow.wait(0.5)
    assert slow.wait() is slow
    submitter.close()
