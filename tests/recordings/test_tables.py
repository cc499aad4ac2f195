"""A recording's tables for Arrow and pandas, and how a recording and a table say what they are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import UsageError
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import SCHEMAS, Recording

FILE = Path(__file__).parents[1] / "gpu" / "data" / "nsys_saturated.sqlite.gz"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return open_recording(FILE)


def test_a_table_for_arrow_spells_codes_and_names_out(recording):
    calls = recording.to_arrow("calls")
    assert calls.num_rows == recording.calls.rows
    assert calls.column_names == list(SCHEMAS["calls"])
    assert "cudaMemcpyAsync" in calls["name"].to_pylist()
    assert {"copy", "launch"} <= set(calls["kind"].to_pylist())
    assert np.array_equal(calls["start_ns"].to_numpy(), recording.calls["start_ns"])


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_table_has_a_form_for_arrow(recording, kind):
    assert recording.to_arrow(kind).num_rows == recording.tables[kind].rows


def test_the_same_for_pandas(recording):
    pytest.importorskip("pandas")
    frame = recording.to_pandas("executions")
    assert len(frame) == recording.executions.rows
    assert set(frame["engine"].unique()) == {"kernel", "copy"}
    assert frame["end_ns"].dtype == "int64"


def test_without_pandas_it_says_what_to_do(recording, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        recording.to_pandas("calls")


def test_an_unknown_table_is_named(recording):
    with pytest.raises(UsageError, match="no table is called 'call'; there are calls"):
        recording.to_arrow("call")


def test_both_say_what_they_are_in_a_line(recording):
    assert repr(recording).startswith(
        "<Recording of nsys_saturated.sqlite.gz (nsys-sqlite): calls 3,152, executions 3,002"
    )
    assert repr(recording.calls).startswith("<Table calls: 3,152 rows of start_ns, end_ns, process")
    assert repr(Recording([])) == "<Recording of no source: empty>"
