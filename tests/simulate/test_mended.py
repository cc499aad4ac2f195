"""Defects that histories found, each as short as it became, and the seeds that showed them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvprobe.cuda import device_region, host_region
from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.offload import BlockPool, OffloadEngine

from .history import Series, Violation, play
from .many import chunk

BLOCK, BLOCKS = 16384, 16


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("kvprobe"), "disabled", True)
    yield
    host_runtime().reset()


@pytest.mark.parametrize("seed", [36931, 107575, 176451, 188462])
def test_loads_into_the_same_blocks_end_in_their_order(seed: int) -> None:
    """A load that somebody's fence hurried was joined with the next one into the same blocks, in one submission."""
    play(seed, 1)


@pytest.mark.parametrize("seed", [72022526, 72049811, 73000454, 74036630])
def test_times_stay_right_where_the_clocks_are_compared_beside_copies(seed: int) -> None:
    """The clocks' event stood behind copies: the pair was wrong by half of that, and by a fault it stayed."""
    play(seed, 1)


@pytest.mark.parametrize("seed", [70034630, 73049354, 74023189])
def test_a_refused_store_that_waited_leaves_tails_to_other_callers(seed: int) -> None:
    """The check took no account of stores that another caller had asked for when the wait for all was over."""
    play(seed, 1)


def test_marks_without_an_event_do_not_outgrow_their_line() -> None:
    """Events bound how many marks the shared stream has; where recording them fails, marks were without bound."""
    play(1000494381, 1, length=16)


def test_a_recording_of_more_streams_than_it_keeps_apart_knows_every_transfer() -> None:
    """Of a stream beyond those 256 sums it knows calls and bytes alone, and the check did not look there."""
    assert chunk((72008456, 64, 1, 40, None))["wrong"] == []


def test_after_a_recording_that_was_wrong_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Series, "READ", 1)
    series = Series()
    try:
        series._recorded = 1  # that nobody made
        with pytest.raises(Violation, match="transfers were made, and the recording knows"):
            series.play(1)
        series.play(1)
    finally:
        series.close()


def test_a_load_that_a_fence_hurries_stays_before_the_next_one() -> None:
    for seed in range(1, 9):
        runtime = host_runtime(virtual_clock=True, seed=seed)
        gpu, cpu = device_region(runtime, BLOCKS * BLOCK), host_region(runtime, 2 * BLOCKS * BLOCK)
        runtime.fill_pieces(cpu.address, BLOCK, range(1, 2 * BLOCKS + 1))
        compute = runtime.stream_create()
        pools = BlockPool(runtime, [gpu], BLOCK), BlockPool(runtime, [cpu], BLOCK)
        with OffloadEngine(runtime, *pools, policy="pooled", method="batch", compute_stream=compute) as engine:
            runtime.launch_delay(compute, 1_000_000)
            first = engine.load(range(BLOCKS), range(BLOCKS))
            engine.load(range(2 * BLOCKS - 1, BLOCKS - 1, -1), range(BLOCKS), after=None)
            engine.fence(first, compute)
            engine.wait()
        assert runtime.compare_pieces(gpu.address, BLOCK, range(2 * BLOCKS, BLOCKS, -1)) == -1
