"""`kvprobe export`: what is written can be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import RecordingError
from kvprobe.recordings import open_recording, parquet


def test_parquet_reads_back_as_the_same_recording(kvprobe, export: Path, tmp_path: Path) -> None:
    code, out, _ = kvprobe("export", export, "--to", "parquet", "-o", tmp_path / "out")
    assert code == 0
    assert "files" in out
    one, two = open_recording(export), open_recording(tmp_path / "out")
    assert one.calls.rows == two.calls.rows == 50_000
    for column in ("start_ns", "end_ns", "correlation", "stream", "bytes"):
        assert np.array_equal(one.calls[column], two.calls[column]), column


def test_a_perfetto_trace_is_valid_json_within_its_limit(kvprobe, export: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    code, *_ = kvprobe("export", export, "--to", "perfetto", "-o", target, "--limit", "20000")
    assert code == 0
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert 5000 < sum(event["ph"] != "M" for event in events) <= 20_010
    assert any(event["ph"] == "C" for event in events), "a counter of outstanding submissions"


def test_what_is_there_is_not_overwritten_without_force(kvprobe, export: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    target.write_text("mine")
    code, _, err = kvprobe("export", export, "--to", "perfetto", "-o", target)
    assert code == 2
    assert "-f" in err
    assert target.read_text() == "mine"
    assert kvprobe("export", export, "--to", "perfetto", "-o", target, "-f")[0] == 0


def test_a_limit_on_parquet_means_nothing(kvprobe, export: Path, tmp_path: Path) -> None:
    code, _, err = kvprobe("export", export, "--to", "parquet", "-o", tmp_path / "out", "--limit", "20000")
    assert code == 2
    assert err.count("\n") == 1


def test_an_export_that_breaks_off_over_an_earlier_one_is_no_recording(export: Path, tmp_path: Path) -> None:
    recording = open_recording(export)
    parquet.write(recording, tmp_path / "out")

    def break_off(what: str, share: float) -> None:
        if share:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        parquet.write(recording, tmp_path / "out", overwrite=True, progress=break_off)
    with pytest.raises(RecordingError):
        open_recording(tmp_path / "out")


@pytest.mark.parametrize("force", [(), ("-f",)])
def test_a_file_is_no_folder_for_parquet(kvprobe, export: Path, tmp_path: Path, force: tuple[str, ...]) -> None:
    (tmp_path / "mine").write_text("mine")
    code, _, err = kvprobe("export", export, "--to", "parquet", "-o", tmp_path / "mine", *force)
    assert (code, err) == (2, f"kvprobe: {tmp_path / 'mine'} is not a folder; name one for the Parquet files\n")
    assert (tmp_path / "mine").read_text() == "mine"
