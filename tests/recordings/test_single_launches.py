"""Kernels that a slow host launches one by one: how long the device computed, and how far that may be off."""

from __future__ import annotations

import numpy as np

from kvprobe.probe.ring import COVERAGE, SPAN
from kvprobe.probe.ring_layout import RECORD
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table
from kvprobe.recordings.run_events import RingRecords
from kvprobe.recordings.run_marks import MARK_NS, REASONS, marks
from kvprobe.recordings.vocabulary import Names

US, KERNELS = 1_000, 1  # of enum mark_kind


def computed(runs: list[tuple[int, int, float, float]]) -> tuple[int, int]:
    """How long kernels of these runs ran, and the error that is said, ns.

    A run, one every millisecond: launches, length, how long its mark was reached after the newest launch, and how long
    they take by the one that was looked at (its length where none was), us.
    """
    recording = Recording([Source("made", "trace")], names=["", "cudaLaunchKernel", *REASONS[1:]])
    end = (len(runs) + 1) * 1_000 * US
    columns = {"start_ns": [0], "end_ns": [end], "name": [1], "thread": [7], "kind": [CallKind.SYNC]}
    recording.tables["calls"] = Table("calls", {name: np.array(one) for name, one in columns.items()})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    records = np.zeros(len(runs) + 1, dtype=RECORD)
    records["call"], records["start_ns"] = SPAN, np.arange(len(runs) + 1) * 1_000 * US
    records[-1:]["call"], records[-1:]["start_ns"], records[-1:]["dur_ns"] = COVERAGE, 0, end
    for at, (launches, length, late, told) in enumerate(runs):
        one = records[at : at + 1]
        one["result"], one["count"], one["dur_ns"] = KERNELS, launches, length * US
        one["tid"], one["dst"] = 1 + int(late * US), int(told * US)
    zero = np.zeros(len(records), dtype=np.int64)
    marks(recording, RingRecords(records, zero, zero, zero), Names(recording.names))
    spans = recording.spans
    assert (spans["engine"] == Engine.KERNEL).all()
    return int((spans["end_ns"] - spans["start_ns"]).sum()), int(spans["error_ns"].sum())


EACH_US = 3.3 + MARK_NS / US  # of a launch that was looked at: its kernel and a mark
LOOKED_AT = [(32, 320, 2.5, 32 * EACH_US)] * 4
KNOWN_NS, NO_ERROR = computed(LOOKED_AT)


def test_launches_that_were_looked_at_take_as_long_as_the_one_between_two_marks():
    assert abs(KNOWN_NS - 4 * 32 * 3_300) < 4 * 2 * MARK_NS and NO_ERROR == 0


def test_a_run_whose_end_was_not_seen_computed_for_as_long_as_its_launches_take_elsewhere():
    ns, error = computed([*LOOKED_AT, (100, 800, 0, 800)])
    assert abs(ns - KNOWN_NS - 100 * 3_300) < 5 * US and error == 0


def test_from_the_newest_launch_to_its_end_the_device_had_work():
    ns, _ = computed([*LOOKED_AT, (100, 800, 300, 800)])
    assert abs(ns - KNOWN_NS - 100 * 3_300 - 300 * US) < 10 * US


def test_a_device_that_is_behind_its_host_computes_all_the_time():
    ns, error = computed([*LOOKED_AT, (100, 800, 700, 800)])
    assert abs(ns - KNOWN_NS - 800 * US) < 110 * US and error == 0


def test_where_launches_differ_the_error_is_half_of_what_tells_them_apart():
    short = [(32, 320, 2.5, 32 * (1.3 + MARK_NS / US))] * 4
    only, _ = computed([*LOOKED_AT, *short])
    ns, error = computed([*LOOKED_AT, *short, (100, 800, 0, 800)])
    assert abs(ns - only - 100 * 2_300) < 5 * US
    assert abs(error - 100 * (3_300 - 1_300) / 2) < 5 * US


def test_without_a_launch_that_was_looked_at_a_run_computed_all_the_time():
    ns, error = computed([(100, 800, 0, 800)] * 5)
    assert ns > 5 * 690 * US and error == 0
