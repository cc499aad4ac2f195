"""Copies by stream and direction: the page shows what the copies were cut into, and says once what was not recorded."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import KiB, blocks, recording

from kvprobe.recordings.model import CallKind, Direction, Table
from kvprobe.reporting import build_page
from kvprobe.reporting.recorded import view
from kvprobe.reporting.summaries import summary
from kvprobe.reporting.units import NONE
from tests.examining import examination


def section(made):
    return next(one for one in view(made, examination(made)).sections if one.id == "descriptors")


def cells(shown, row=0, which=0):
    columns, listed = shown.tables[which].columns, shown.tables[which].rows
    return {name: cell.text.replace("\u00a0", " ") for name, cell in zip(columns, listed[row], strict=True)}


def bursts():
    """Two bursts of 50 loads in one run each, and 30 slower stores that are apart."""
    out = []
    for i in range(2):
        burst = blocks(range(100 * i, 100 * i + 50))
        burst[0]["gap_ns"] = 1_000_000
        out += burst
    return out + blocks(range(0, 60, 2), stream=1, direction=Direction.D2H, dur_ns=4_000)


def test_a_row_a_stream_and_direction_most_time_first():
    shown = section(recording(bursts()))
    stores, loads = cells(shown, 0), cells(shown, 1)
    assert (stores["Direction"], stores["Runs"], stores["Merging would save"]) == ("to the CPU", "30", "nothing")
    assert (loads["Direction"], loads["Copies"], loads["Bursts"], loads["Runs"]) == ("to the GPU", "100", "2", "2")
    assert (loads["Size, median"], loads["A call, median"]) == ("16.0 KiB", "1.00 µs")
    assert (loads["Merging would save"], loads["Submit rate"]) == ("98.0 µs, 98 calls", "16.4 GB/s")
    assert "Link" not in loads
    assert "A run is a series of copies" in shown.lead


def test_the_links_rate_has_a_column_where_it_is_known():
    assert cells(section(recording(bursts(), link_bytes_per_s={"h2d": 55e9})), 1)["Link"] == "55.0 GB/s"


def test_a_recording_without_addresses_says_so_once_and_guesses_nothing():
    made = recording(bursts())
    columns = {name: made.calls[name] for name in made.calls if name not in ("src", "dst")}
    made.tables["calls"] = Table("calls", columns)
    shown = section(made)
    assert "leaves out the addresses" in shown.lead and "kvprobe run" in shown.lead
    loads = cells(shown, 1)
    assert (loads["Copies"], loads["Size, median"]) == ("100", "16.0 KiB")
    assert not {"Bursts", "Runs", "Merging would save"} & set(loads)  # columns that hold nothing are left out
    assert build_page(made, findings=examination(made)).count("leaves out the addresses") == 1
    table = summary(made, "descriptors")
    assert "not known" in table.note
    assert table.to_json()["rows"][0]["runs"] is None


def test_rows_that_cost_nothing_are_summed_up():
    few = [call for stream in range(2) for call in blocks([7], stream=stream, direction=Direction.D2D)]
    shown = section(recording([*bursts(), *few]))
    assert len(shown.tables[0].rows) == 2
    assert shown.tables[0].note.replace("\u00a0", " ") == "2 more rows, 2.00 µs in all."


def test_the_window_decides_in_the_page_and_not_in_the_tables_of_stats():
    setting_up = [*blocks([1]), {"kind": CallKind.ALLOC, "stream": -1, "dur_ns": 500_000_000, "gap_ns": 0}]
    made = recording([*setting_up, *bursts()])
    assert cells(section(made), 1)["Copies"] == "100"
    (loads,) = (row for row in summary(made, "descriptors").to_json()["rows"] if row["operation"] == "Host-to-Device")
    assert (loads["copies"], loads["runs"]) == (101, 3)


@pytest.mark.parametrize("made, expected", [(20, ("20", "32")), (-1, (NONE, NONE))])
def test_what_kvprobe_submitted_is_shown_before_and_after_merging(made, expected):
    one = recording(blocks([0]))
    sums = {"transfers": [4], "copies": [640], "descriptors": [made], "calls": [8], "bytes": [1 << 20]}
    one.tables["submitters"] = Table(
        "submitters", {**sums, "direction": [int(Direction.H2D)], "dur_ns": [80_000], "stream": [-1], "server": [0]}
    )
    shown = cells(section(one), which=1)
    assert (shown["Whose"], shown["Copies asked for"]) == ("engine", "640")
    assert (shown["Submitted"], shown["Merged into one, mean"]) == expected
    assert shown["A call, mean"] == "10.0 µs"
    assert shown["Stream"] == NONE


def test_the_sizes_are_told_by_tenths():
    assert cells(section(recording(blocks(range(0, 40, 2)))))["Sizes, p10 to p90"] == "all alike"
    calls = [*blocks(range(0, 40, 2)), *blocks([90, 92], size=256 * KiB)]
    assert cells(section(recording(calls)))["Sizes, p10 to p90"] == "16.0 KiB, largest 256 KiB"
