"""A CSV file of copies is told by its first line, read whole, found in a folder, and known for cut off where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprobe.errors import RecordingError
from kvprobe.recordings import expand, open_recording, sniff

HEAD = "name,start_ns,end_ns,stream,bytes\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "copies.csv"
    lines = [f"cudaMemcpyAsync,{n * 1000},{n * 1000 + 500},{7 + n % 2},65536\n" for n in range(100)]
    path.write_text(HEAD + "".join(lines))
    return path


def test_it_is_read(file):
    assert sniff(file) == "csv"
    recording = open_recording(file)
    assert recording.source[0].format == "csv"
    assert recording.calls.rows == 100 and int(recording.calls["bytes"].sum()) == 100 * 65536
    assert recording.text(recording.calls["name"][0]) == "cudaMemcpyAsync"
    assert list(recording.streams["handle"]) == [7, 8]
    assert not recording.incomplete


def test_a_folder_is_looked_through_for_it(file):
    assert expand(file.parent) == [file]


def test_another_csv_file_is_not_taken_for_one(file):
    file.write_text("a,b\n1,2\n")
    with pytest.raises(RecordingError, match="unknown format"):
        sniff(file)


def test_a_file_that_is_cut_off_is_read_up_to_there(file):
    file.write_text(file.read_text()[:-20])
    recording = open_recording(file)
    assert recording.calls.rows == 99 and recording.incomplete


@pytest.mark.parametrize("instead", ["many", "9" * 30, "x" * 200_000], ids=["a word", "too large", "too long"])
def test_a_file_that_is_damaged_is_refused(file, instead):
    file.write_text(file.read_text().replace("5000", instead))
    with pytest.raises(RecordingError, match="damaged"):
        open_recording(file)
