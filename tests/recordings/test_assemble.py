"""Columns as readers put them together: whatever the parts, the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.recordings.assemble import LARGEST, GrowingColumn, among, bounded, codes, narrowed, positions
from kvprobe.recordings.model import Recording, Table

parts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


@given(parts, st.integers(0, 12))
def test_a_column_holds_its_parts_in_order_whatever_was_expected(parts: list[list[int]], expected: int) -> None:
    column = GrowingColumn(expected)
    for part in parts:
        column.add(np.array(part, dtype=np.int64))
    assert column.whole().tolist() == [value for part in parts for value in part]


def test_one_value_throughout_is_stored_once_and_a_part_that_is_used_again_leaves_no_trace() -> None:
    column, part = GrowingColumn(10), np.full(4, 7)
    column.add(part)
    column.add(part)
    assert column.whole().strides == (0,)
    part[:] = 8
    column.add(part)
    part[:] = 9
    assert column.whole().tolist() == [7] * 8 + [8] * 4


@pytest.mark.parametrize("column", [np.broadcast_to(np.int64(1 << 40), (5,)), np.array([0, -(1 << 40), 1 << 40])])
def test_fewer_bytes_cut_and_never_wrap(column: np.ndarray) -> None:
    found = narrowed(column, np.int32)
    assert found.dtype == np.int32
    assert found.tolist() == np.clip(column, -(1 << 31), (1 << 31) - 1).tolist()
    assert found.strides == ((0,) if column.strides == (0,) else (4,))


@given(st.lists(st.integers(0, 40), max_size=60), st.sets(st.integers(-1, 300), max_size=20))
def test_few_values_are_looked_for_one_by_one_and_many_at_once(values: list[int], wanted: set[int]) -> None:
    for dtype in (np.uint8, np.int32, np.uint64):
        assert among(np.array(values, dtype=dtype), wanted).tolist() == [one in wanted for one in values]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_every_row_stands_at_the_position_of_its_code(values: list[int]) -> None:
    found, place = codes(np.array(values, dtype=np.int64))
    rows = positions(place, len(found))
    assert sorted(int(row) for part in rows for row in part) == list(range(len(values)))
    for value, part in zip(found.tolist(), rows, strict=True):
        assert part.tolist() == [row for row, one in enumerate(values) if one == value]


def test_numbers_that_no_recorder_writes_are_cut_and_the_recording_is_called_damaged():
    far = np.array([1, -(2**63), 2**63 - 1])
    recording = Recording(
        [],
        {"calls": Table("calls", {"start_ns": far, "end_ns": far[::-1], "bytes": far})},
        machine={"unix_offset_ns": 10**30},
    )
    calls = bounded(recording).calls
    durations = calls["end_ns"] - calls["start_ns"]
    assert (durations >= 0).all() and int(durations.max()) - int(durations.min()) < 2**63
    assert calls["bytes"].tolist() == [1, -LARGEST, LARGEST]
    assert "unix_offset_ns" not in recording.machine
    assert recording.incomplete == recording.notes and "the recording is damaged" in recording.incomplete[0]


def test_what_recorders_write_is_left_as_it_is():
    now = 1_790_000_000 * 10**9
    table = Table("calls", {"start_ns": np.array([now]), "end_ns": np.array([-1]), "bytes": np.array([1 << 40])})
    recording = bounded(Recording([], {"calls": table}))
    assert recording.calls is table and not recording.incomplete


def test_columns_that_a_reader_left_out_take_no_room_and_cannot_be_written():
    column = Table("calls", {"start_ns": np.arange(5)})["stream"]
    assert column.tolist() == [-1] * 5 and column.strides == (0,) and not column.flags.writeable
