"""Copies by stream and direction, and which of them continue the one before them."""

import numpy as np
import pytest
from copies import GPU, HOST, KiB, blocks, recording

from kvprobe.recordings.descriptors import copies_by_stream, has_addresses, neighbours
from kvprobe.recordings.model import CallKind, Direction, Table

SYNC = {"kind": CallKind.SYNC, "stream": 1}
LAUNCH = {"kind": CallKind.LAUNCH}


def continuing(calls):
    return np.flatnonzero(neighbours(recording(calls)).continues).tolist()


def test_a_copy_continues_the_one_before_it_where_both_sides_do():
    assert continuing(blocks([3, 4, 5, 9, 10])) == [1, 2, 4]
    assert continuing(blocks([5, 4, 3])) == []
    one_side = blocks([0, 1])
    one_side[1]["dst"] += 1
    assert continuing(one_side) == []


@pytest.mark.parametrize(
    "between",
    [
        [SYNC],  # the thread waited, though for another stream
        [LAUNCH],  # the stream was given something else
        [{**LAUNCH, "thread": 8}],  # by whomever
        [*blocks([40], thread=8)],
    ],
)
def test_what_comes_in_between_keeps_copies_apart(between):
    assert continuing([*blocks([0]), *between, *blocks([1])]) == []


@pytest.mark.parametrize(
    "second",
    [{"thread": 8}, {"stream": 1}, {"direction": Direction.D2H}, {"gap_ns": 60_000}, {"result": 1}, {"count": 2}],
)
def test_copies_belong_together_by_thread_stream_direction_and_time(second):
    assert continuing([*blocks([0]), *blocks([1], **second)]) == []


def test_what_another_thread_does_elsewhere_does_not_matter():
    elsewhere = [{**SYNC, "thread": 8}, *blocks([7], thread=8, stream=1)]
    assert continuing([*blocks([0]), *elsewhere, *blocks([1])]) == [3]


def test_the_view_counts_sizes_bursts_and_runs():
    calls = [*blocks([0, 1, 2, 7]), SYNC, *blocks([8, 9]), *blocks([50], size=64 * KiB)]
    (one,) = copies_by_stream(recording(calls))
    assert (one.stream, one.direction, one.calls, one.descriptors) == (0, Direction.H2D, 7, 7)
    assert one.sizes == (16 * KiB, 16 * KiB, 16 * KiB, 64 * KiB)
    assert (one.bursts, one.runs, one.bytes) == (2, 4, 6 * 16 * KiB + 64 * KiB)
    assert (one.call_ns, one.host_ns, one.saved_ns) == (1_000, 7_000, 3_000)
    assert one.link_bytes_per_s == 0


def test_what_merging_saves_is_not_what_a_full_queue_costs():
    """One call waited a millisecond for room: 1 us of it is what a call costs."""
    calls = blocks(list(range(9)))
    calls[5]["dur_ns"] = 1_000_000
    (one,) = copies_by_stream(recording(calls))
    assert one.host_ns == 1_008_000
    assert one.saved_ns == 8_000


def test_a_batch_tells_its_descriptors_and_nothing_of_their_neighbours():
    batch = {"kind": CallKind.BATCH, "count": 64, "bytes": 1 << 20, "src": HOST, "dst": GPU, "dur_ns": 20_000}
    (one,) = copies_by_stream(recording([batch, batch]))
    assert one.batches
    assert (one.calls, one.descriptors, one.sizes[1], one.runs, one.saved_ns) == (2, 128, 16 * KiB, -1, 0)
    (unknown,) = copies_by_stream(recording([{**batch, "count": 0}]))
    assert (unknown.descriptors, unknown.sizes) == (-1, (-1, -1, -1, -1))


def test_without_addresses_nothing_is_said_of_neighbours():
    known = recording(blocks([0, 1, 2]))
    assert has_addresses(known)
    columns = {name: known.calls[name] for name in known.calls if name not in ("src", "dst")}
    known.tables["calls"] = Table("calls", columns)
    assert not has_addresses(known)
    assert not neighbours(known).continues.any()
    (one,) = copies_by_stream(known)
    assert (one.calls, one.sizes[1], one.bursts, one.runs, one.saved_ns) == (3, 16 * KiB, -1, -1, 0)


def test_the_links_rate_is_said_where_the_recording_tells_it():
    (one,) = copies_by_stream(recording(blocks([0, 1]), link_bytes_per_s={"h2d": 55e9}))
    assert one.link_bytes_per_s == 55e9
