from __future__ import annotations

import gzip
import json
import os
import sqlite3
import stat

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from queue_model import simulate

from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings import nsys_rep, open_recording, parquet, perfetto, sniff
from kvprobe.recordings.model import SCHEMAS
from kvprobe.recordings.occupancy import occupancy


def assert_same(a, b):
    for kind, table in a.tables.items():
        other = b.tables[kind]
        assert table.rows == other.rows, kind
        for name, dtype in SCHEMAS[kind].items():
            if dtype == "name":
                assert [a.text(i) for i in table[name]] == [b.text(i) for i in other[name]], (kind, name)
            else:
                assert (table[name] == other[name]).all(), (kind, name)


@pytest.mark.parametrize("name", ["h100", "v100", "extrap"])
def test_parquet_gives_back_what_was_written(shared, name, tmp_path):
    r = shared.open(name)
    parquet.write(r, tmp_path / "out")
    again = open_recording([tmp_path / "out"])
    assert_same(r, again)
    assert (again.machine, again.source, again.notes, again.lost) == (r.machine, r.source, r.notes, r.lost)
    assert again.has_executions


def test_parquet_is_readable_by_others_in_words(shared, tmp_path):
    parquet.write(shared.open("h100"), tmp_path / "out")
    calls = pq.read_table(tmp_path / "out" / "calls.parquet").to_pylist()
    copies = [c for c in calls if c["kind"] == "copy"]
    assert len(copies) == 914 and {c["name"] for c in copies} == {"cudaMemcpyAsync"}
    assert {c["direction"] for c in copies} == {"unknown", "h2d", "d2h", "d2d"}


def test_parquet_keeps_histograms(tmp_path):
    r, _ = simulate(calls=10)
    r.tables["totals"] = type(r.calls)("totals", {"calls": [5, 6]})
    r.histograms = np.arange(256, dtype=np.int64).reshape(2, 128)
    parquet.write(r, tmp_path / "out")
    assert (open_recording([tmp_path / "out"]).histograms == r.histograms).all()


def test_writers_never_replace_what_is_there_unasked(tmp_path):
    r, _ = simulate(calls=10)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError):
        parquet.write(r, tmp_path)
    with pytest.raises(UsageError):
        perfetto.write(r, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "x"


def load(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)


def test_perfetto_has_blocked_calls_and_occupancy_counters(shared, tmp_path):
    r = shared.open("h100")
    assert perfetto.write(r, tmp_path / "t.json.gz") == []
    trace = load(tmp_path / "t.json.gz")
    events = trace["traceEvents"]
    blocked = [e for e in events if e.get("cat") == "blocked"]
    assert len(blocked) == 198 and {e["pid"] for e in blocked} == {111, 112}
    assert sum(e["args"]["blocked_us"] for e in blocked) == pytest.approx(912_982.9, abs=1)
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"outstanding on stream 7", "outstanding on stream 15"}
    assert max(e["args"]["outstanding"] for e in counters) in (1141, 1142)
    assert len([e for e in events if e.get("cat") == "execution"]) == r.executions.rows
    assert trace["otherData"]["verdict"] == "full"


def test_perfetto_thins_all_but_blocked_calls_and_says_so(tmp_path):
    r, _ = simulate(calls=6000)
    blocked = int(occupancy(r).blocked.sum())
    notes = perfetto.write(r, tmp_path / "t.json.gz", limit=blocked + 3000)
    events = load(tmp_path / "t.json.gz")["traceEvents"]
    assert len([e for e in events if e.get("cat") == "blocked"]) == blocked
    assert len(events) <= blocked + 3000
    assert any(note.startswith("executions: the longest") for note in notes)
    assert max(e["args"]["outstanding"] for e in events if e["ph"] == "C") == 1022


@pytest.mark.parametrize("limit", [0, 1, 7, 40, 300, 4000])
def test_a_perfetto_trace_keeps_its_limit_and_its_counters(tmp_path, limit):
    r, _ = simulate(calls=6000)
    notes = perfetto.write(r, tmp_path / "t.json.gz", limit=limit)
    events = load(tmp_path / "t.json.gz")["traceEvents"]
    assert len(events) <= limit and notes
    if limit >= 40:
        assert max(e["args"]["outstanding"] for e in events if e["ph"] == "C") >= 1022


def test_names_from_recordings_stay_text(tmp_path):
    r, _ = simulate(calls=10)
    r.names[1] = 'evil"}],\n\u2028\ud800</script>'
    perfetto.write(r, tmp_path / "t.json.gz")
    names = {e["name"] for e in load(tmp_path / "t.json.gz")["traceEvents"] if e.get("cat") == "call"}
    assert names == {r.names[1]}


# ---- exports of Nsight Systems as folders ---------------------------------------------------------------------------


def as_folder(source, folder, form):
    """The tables of an SQLite export as nsys writes them into a folder."""
    folder.mkdir()
    db = sqlite3.connect(f"file:{source}?mode=ro&immutable=1", uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        cursor = db.execute(f'SELECT * FROM "{table}"')
        columns = [c[0] for c in cursor.description]
        rows = cursor.fetchall()
        made = pa.table({c: [row[i] for row in rows] for i, c in enumerate(columns)})
        if form == "parquet":
            pq.write_table(made, folder / f"{table}.parquet")
        else:
            with pa.OSFile(str(folder / f"{table}.arrow"), "wb") as sink:
                new = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
                with new(sink, made.schema) as writer:
                    writer.write_table(made)
    return folder


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_folder_of_tables_reads_like_the_sqlite_export(shared, tmp_path, form):
    folder = as_folder(shared.path("mfu_before"), tmp_path / "export", form)
    assert sniff(folder) == "nsys-arrow"
    assert_same(shared.open("mfu_before"), open_recording([folder]))


# ---- reports that Nsight Systems itself must export -----------------------------------------------------------------


def tool(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def report(tmp_path, monkeypatch):
    path = tmp_path / "a.nsys-rep"
    path.write_bytes(b"not read by kvprobe itself")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return path


def test_a_report_is_exported_by_the_installed_nsys(shared, tmp_path, report):
    tool(tmp_path / "bin" / "nsys", f'test "$1 $2 $3" = "export --type sqlite" && cp {shared.path("extrap")} "$7"\n')
    r = open_recording([report])
    assert_same(shared.open("extrap"), r)
    assert r.source[0].format == "nsys-rep" and r.source[0].path == str(report)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nsys-rep", "bin"], "nothing is left beside the report"


def test_a_stream_is_imported_first(shared, tmp_path, report):
    raw = report.with_suffix(".qdstrm")
    report.rename(raw)
    tool(tmp_path / "bin" / "QdstrmImporter", 'cp "$2" "$4"\n')
    tool(tmp_path / "bin" / "nsys", f'case "$8" in *.nsys-rep) cp {shared.path("extrap")} "$7";; esac\n')
    assert open_recording([raw]).calls.rows == 184


def test_a_missing_library_is_named_with_its_package(tmp_path, report):
    tool(
        tmp_path / "bin" / "nsys",
        'echo "nsys: error while loading shared libraries: libdw.so.1: cannot open shared '
        'object file: No such file or directory" >&2; exit 127\n',
    )
    with pytest.raises(RecordingError, match=r"lacks libdw\.so\.1: install libdw1"):
        open_recording([report])


def test_a_failing_export_passes_on_its_reason(tmp_path, report):
    tool(tmp_path / "bin" / "nsys", 'echo "FATAL ERROR: wrong version" >&2; exit 3\n')
    with pytest.raises(RecordingError, match=r"exit code 3 \(FATAL ERROR: wrong version\)"):
        open_recording([report])


def test_without_any_nsys_the_way_out_is_one_line(report, monkeypatch):
    monkeypatch.setattr(nsys_rep, "find_nsys", lambda: None)
    with pytest.raises(RecordingError, match="no nsys was found: install Nsight Systems") as error:
        open_recording([report])
    assert "\n" not in str(error.value)


def test_copies_of_nsys_are_found_where_nvidias_packages_put_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsys_rep.find_nsys(tmp_path) is None and nsys_rep.find_importer(tmp_path) is None
    inside = tool(tmp_path / "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys", "")
    importer = tool(
        tmp_path / "opt/nvidia/nsight-compute/2025.3.1/host/linux-desktop-glibc_2_11_3-x64/QdstrmImporter", ""
    )
    assert nsys_rep.find_nsys(tmp_path) == inside and nsys_rep.find_importer(tmp_path) == importer
    old = tool(tmp_path / "opt/nvidia/nsight-systems/2024.6.2/bin/nsys", "")
    assert nsys_rep.find_nsys(tmp_path) == old, "Nsight Systems itself comes first"
    new = tool(tmp_path / "opt/nvidia/nsight-systems-cli/2025.10.1/target-linux-x64/nsys", "")
    assert nsys_rep.find_nsys(tmp_path) == new, "the newest version by number, not by text"
