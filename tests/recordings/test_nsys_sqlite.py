from __future__ import annotations

import contextlib
import gzip
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.errors import RecordingError
from kvprobe.recordings import nsys_sqlite, open_recording
from kvprobe.recordings.model import CallKind, Direction, Engine, Label, Memory
from kvprobe.recordings.trace_library import native_library


def count(recording, name):
    return int((recording.calls["name"] == recording.names.index(name)).sum()) if name in recording.names else 0


def test_newest_schema_gives_calls_copies_labels_and_ranges(shared):
    r = shared.open("h100")
    assert count(r, "cudaMemcpyAsync") == 914
    assert count(r, "cudaLaunchKernel") == 2788 and count(r, "cudaLaunchKernelExC") == 558
    assert r.ranges.rows == 16782
    full = r.labels["label"] == Label.COMMAND_BUFFER_FULL
    assert full.sum() == 198
    durations = (r.labels["end_ns"] - r.labels["start_ns"])[full]
    assert [round(durations[r.labels["process"][full] == p].sum() / 1e5) / 10 for p in (0, 1)] == [455.9, 456.1]
    copies = r.executions["engine"] == Engine.COPY
    kinds = r.executions["direction"][copies], r.executions["memory"][copies]
    assert copies.sum() == 904
    assert ((kinds[0] == Direction.H2D) & (kinds[1] == Memory.PINNED)).sum() == 446
    assert ((kinds[0] == Direction.H2D) & (kinds[1] == Memory.PAGEABLE)).sum() == 4
    assert (kinds[0] == Direction.D2D).sum() == 450 and (kinds[0] == Direction.D2H).sum() == 4
    assert r.processes["pid"].tolist() == [111, 112]
    assert sorted(r.streams["handle"].tolist()) == [7, 15, 22, 26, 30, 34]
    assert "pytest" in r.source[0].command and r.source[0].tool.endswith("(schema 3.25.0)")
    assert r.machine["driver"] == "580.95.05" and r.has_executions


def test_streams_that_only_wait_for_events_are_told(shared):
    """In h100 all waits are of streams that execute nothing, in the others some."""
    for name, waits in (("h100", 236), ("mfu_before", 200), ("mfu_after", 180)):
        r = shared.open(name)
        rows = r.calls["name"] == r.names.index("cudaStreamWaitEvent")
        assert rows.sum() == waits and (r.calls["stream"][rows] >= 0).all()
        executed = set(r.executions["stream"].tolist())
        assert not all(stream in executed for stream in r.calls["stream"][rows].tolist())
        assert r.streams["device"].tolist() == r.streams["process"].tolist()  # each rank has a GPU of its own


def test_a_stream_that_only_waits_is_of_no_device_where_its_process_has_several(tmp_path):
    one = 5 << 24
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "INSERT INTO StringIds VALUES (1, 'cudaStreamWaitEvent'), (2, 'cudaMemcpyAsync')",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, {one}, 1, 1), (3, 4, {one}, 2, 2), (5, 6, {one}, 3, 2)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (4, 5, 0, 7, 2, {one}, 8, 1), (6, 7, 1, 8, 3, {one}, 8, 1)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER, end INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, eventId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (1, 2, 9, 1, {one}, 3)",
    )
    r = open_recording([path])
    devices = dict(zip(r.streams["handle"].tolist(), r.streams["device"].tolist(), strict=True))
    assert devices == {7: 0, 8: 1, 9: -1}


def two_copies(path, *more, kind=1):
    """An export with two copies, of `kind` the second one, and whatever else is said."""
    one = 5 << 24
    return make(
        path,
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "INSERT INTO StringIds VALUES (1, 'cudaMemcpyAsync'), (2, 'cudaStreamSynchronize')",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, {one}, 1, 1), (3, 4, {one}, 2, 1), (5, 6, {one}, 3, 2)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (4, 5, 0, 7, 1, {one}, 8, 1), "
        f"(6, 7, 0, 8, 2, {one}, 8, {kind})",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER, end INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, eventId INTEGER)",
        *more,
    )


def test_what_synchronised_without_a_call_in_the_export_gives_no_other_call_its_stream(tmp_path):
    waits = "INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES"
    found = []
    for number, rows in enumerate([f"(5, 6, 8, 3, {5 << 24}, 0)", f"(5, 6, 8, 3, {5 << 24}, 0), (1, 2, 7, 99, 0, 4)"]):
        r = open_recording([two_copies(tmp_path / f"{number}.sqlite", f"{waits} {rows}")])
        found.append((r.calls["stream"].tolist(), r.calls["src"].tolist()))
    assert found[0] == found[1] and -1 not in found[0][0]


def test_what_synchronised_with_a_stream_that_is_not_known_has_no_other_ones(tmp_path):
    waits = f"INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (5, 6, 77, 3, {5 << 24}, 0)"
    r = open_recording([two_copies(tmp_path / "a.sqlite", waits)])
    assert r.calls["stream"].tolist() == [0, 1, -1]


@pytest.mark.parametrize("kind", [-1, 10**6, 1 << 40])
def test_a_copy_of_a_kind_that_no_tool_wrote_yet_is_read(tmp_path, kind):
    r = open_recording([two_copies(tmp_path / "a.sqlite", kind=kind)])
    assert r.executions["direction"].tolist()[0] == Direction.H2D and r.executions.rows == 2


def test_progress_is_told_in_parts_of_one_that_never_fall(tmp_path):
    told = []
    nsys_sqlite.read(two_copies(tmp_path / "a.sqlite"), lambda what, share: told.append(share))
    assert len(told) > 3 and told == sorted(told) and told[0] > 0 and told[-2] < told[-1] == 1


def test_oldest_schema_with_a_byte_that_is_no_utf8_is_read(shared):
    r = shared.open("extrap")
    assert count(r, "cudaMemcpyAsync") == 30 and count(r, "cudaLaunchKernel") == 12
    copies = r.executions["engine"] == Engine.COPY
    assert (r.executions["direction"][copies] == Direction.H2D).sum() == 15
    assert r.streams.rows == 15 and r.source[0].tool.endswith("(schema 2.9.1)")
    assert r.machine["gpu"] == "GeForce GTX 1060 with Max-Q Design" and r.machine["gpu_count"] == 1
    assert (r.labels["label"] == Label.BUFFER_FLUSH).any()  # "CUPTI: Buffer flush", with a colon
    assert {r.text(n) for n in r.ranges["domain"]} == {"de.tu-darmstadt.parallel.extra_prof"}


def test_driver_launches_in_the_runtime_table_are_launches(shared):
    for name, copies, launches, flushes in (("mfu_before", 1018, 402, 4), ("mfu_after", 900, 360, 4)):
        r = shared.open(name)
        assert count(r, "cudaMemcpyAsync") == copies and count(r, "cuLaunchKernelEx") == launches
        kinds = set(r.calls["kind"][r.calls["name"] == r.names.index("cuLaunchKernelEx")].tolist())
        assert kinds == {CallKind.LAUNCH}
        assert (r.labels["label"] == Label.BUFFER_FLUSH).sum() == flushes


def test_calls_learn_stream_direction_and_bytes_from_what_they_executed(shared):
    r = shared.open("h100")
    copies = r.calls["kind"] == CallKind.COPY
    known = copies & (r.calls["stream"] >= 0)
    assert known.sum() == 438  # the others execute after the window
    sent = r.executions["engine"] == Engine.COPY
    keys = {
        (p, c): b
        for p, c, b in zip(
            r.executions["process"][sent].tolist(),
            r.executions["correlation"][sent].tolist(),
            r.executions["bytes"][sent].tolist(),
            strict=True,
        )
    }
    for i in np.flatnonzero(known):
        assert r.calls["bytes"][i] == keys[int(r.calls["process"][i]), int(r.calls["correlation"][i])]


def make(path, *statements):
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    return path


def test_missing_tables_and_columns_count_as_no_such_events(tmp_path):
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "INSERT INTO StringIds VALUES (1, 'cudaMemcpyAsync_v3020')",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (10, 30, {(5 << 24) + 6}, 1, 1), "
        f"('x', NULL, {(5 << 24) + 6}, 2, 1)",
    )
    r = open_recording([path])
    assert r.calls.rows == 2 and r.calls["thread"].tolist() == [6, 6] and r.processes["pid"].tolist() == [5]
    assert not r.has_executions and any("inferred" in note for note in r.notes)


NOTHING = ("start", "end", "bytes", "copyKind", "returnValue", "priority", "flag", "domainId")
NOT_KNOWN = {"copyCount": 1, "srcKind": 7, "dstKind": 7, "memKind": 7}  # CUPTI: memory of a kind that it does not know


def absent(table: str, column: str) -> int:
    if (table, column) == ("NVTX_EVENTS", "end"):
        return -1  # it never ends
    if column in NOTHING or column.startswith(("global", "event")):
        return 0
    return NOT_KNOWN.get(column, -1)


@pytest.mark.parametrize("there", [True, False])
def test_a_cell_that_is_null_means_the_same_as_a_column_that_is_absent(tmp_path, there):
    made = []
    for table, columns in nsys_sqlite.COLUMNS.items():
        names = list(columns) if there else sorted({"start", "end"} & set(columns)) or list(columns)[:1]
        made.append(f"CREATE TABLE {table} ({', '.join(f'{name} INTEGER' for name in [*names, 'other'])})")
        made.append(f"INSERT INTO {table} (other) VALUES (1), (2)")
    export = nsys_sqlite.Export(make(tmp_path / "a.sqlite", *made))
    for table, columns in nsys_sqlite.COLUMNS.items():
        read = {name: column.tolist() for name, column in export.columns(table).items()}
        assert read == {name: [absent(table, name)] * 2 for name in columns}, table
    export.db.close()


@pytest.mark.skipif(not hasattr(sqlite3.Connection, "getlimit"), reason="Python 3.11 and later limit it")
def test_no_text_of_an_export_is_longer_than_64_mib(tmp_path):
    export = nsys_sqlite.Export(make(tmp_path / "a.sqlite", "CREATE TABLE StringIds (id INTEGER, value TEXT)"))
    assert export.db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 1 << 26
    export.db.close()


def test_overhead_of_both_tools_tables_becomes_labels(tmp_path):
    one = (5 << 24) + 6
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "INSERT INTO StringIds VALUES (1, 'cuda_profiler'), (2, 'CUPTI_BUFFER_FLUSH')",
        "CREATE TABLE ENUM_CUPTI_OVERHEAD_TYPE (id INTEGER, name TEXT)",
        "INSERT INTO ENUM_CUPTI_OVERHEAD_TYPE VALUES (3, 'CUPTI_OVERHEAD_BUFFER_FLUSH'), (4, 'of no kind we know')",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER, overheadType INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_OVERHEAD VALUES (10, 30, {one}, 9, 1, 3), (40, 50, {one}, NULL, 1, 4)",
        "CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)",
        f"INSERT INTO PROFILER_OVERHEAD VALUES (20, 25, {one}, 1)",
    )
    r = open_recording([path])
    assert r.labels["start_ns"].tolist() == [10, 20, 40] and r.labels["end_ns"].tolist() == [30, 25, 50]
    assert r.labels["correlation"].tolist() == [9, -1, -1] and r.labels["thread"].tolist() == [6, 6, 6]
    assert r.labels["label"].tolist() == [Label.BUFFER_FLUSH, Label.OTHER, Label.OTHER]


def test_a_process_lasts_from_its_first_moment_to_its_last_in_any_table(tmp_path):
    calls = "CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId)"
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        f"CREATE TABLE {calls}",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (10, 30, {5 << 24}, 1, 1), (50, 55, {6 << 24}, 1, 1)",
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
        "globalTid INTEGER, domainId INTEGER)",
        f"INSERT INTO NVTX_EVENTS VALUES (20, 90, 59, 'own', NULL, {5 << 24}, 0)",
    )
    r = open_recording([path])
    assert [r.processes[name].tolist() for name in ("pid", "start_ns", "end_ns")] == [[5, 6], [10, 50], [90, 55]]


def test_text_kept_in_the_range_itself_is_read(tmp_path):
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "INSERT INTO StringIds VALUES (7, 'by id')",
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
        "globalTid INTEGER, domainId INTEGER)",
        "INSERT INTO NVTX_EVENTS VALUES (1, 9, 34, 'mark', NULL, 0, 0), (2, 8, 59, 'own', NULL, 0, 0), "
        "(3, NULL, 60, NULL, 7, 0, 4), (0, NULL, 75, 'domain', NULL, 0, 4)",
    )
    r = open_recording([path])
    assert [r.text(n) for n in r.ranges["name"]] == ["own", "by id"]
    assert [r.text(n) for n in r.ranges["domain"]] == ["", "domain"]
    assert r.ranges["end_ns"].tolist() == [8, 9] and r.ranges["style"].tolist() == [0, 1]
    assert [note for note in r.notes if note.startswith("1 NVTX ranges never end")]


def test_a_range_that_ends_at_once_at_the_first_moment_has_ended(tmp_path):
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
        "globalTid INTEGER, domainId INTEGER)",
        "INSERT INTO NVTX_EVENTS VALUES (0, 0, 59, 'own', NULL, 0, 0), (1, 9, 59, 'own', NULL, 0, 0)",
    )
    r = open_recording([path])
    assert r.ranges["end_ns"].tolist() == [0, 9] and not [note for note in r.notes if "never end" in note]


def test_the_schema_of_an_export_is_told_where_it_says_so(tmp_path):
    strings, meta = "CREATE TABLE StringIds (id INTEGER, value TEXT)", "(name TEXT, value TEXT)"
    one = make(
        tmp_path / "a.sqlite",
        strings,
        f"CREATE TABLE META_DATA_EXPORT {meta}",
        "INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.24'), ('EXPORT_PRODUCT_VERSION', '2026.1')",
    )
    assert open_recording([one]).source[0].tool == "Nsight Systems 2026.1 (schema 3.24)"
    assert open_recording([make(tmp_path / "b.sqlite", strings)]).source[0].tool == "Nsight Systems"


def test_a_view_in_place_of_a_table_is_never_evaluated(tmp_path):
    path = make(
        tmp_path / "a.sqlite",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 "
        "FROM n) SELECT start, start AS end, 0 AS globalTid, 1 AS correlationId, 1 AS nameId FROM n",
    )
    assert open_recording([path]).calls.rows == 0


def test_a_database_of_something_else_is_refused_in_one_line(tmp_path):
    path = make(tmp_path / "a.sqlite", "CREATE TABLE users (name TEXT)")
    with pytest.raises(RecordingError, match="not an export of Nsight Systems") as error:
        open_recording([path])
    assert "\n" not in str(error.value)


# ---- what an export may say, and what is believed of it ------------------------------------------------------------


def test_the_name_of_a_gpu_is_kept_up_to_200_characters(tmp_path):
    name = "".join(chr(ord("a") + i % 26) for i in range(1000))
    more = "CREATE TABLE TARGET_INFO_GPU (name TEXT)", f"INSERT INTO TARGET_INFO_GPU VALUES ('{name}')"
    assert open_recording([two_copies(tmp_path / "a.sqlite", *more)]).machine["gpu"] == name[:200]


def test_a_priority_that_no_stream_can_have_becomes_the_nearest_of_32_bits(tmp_path):
    path = two_copies(
        tmp_path / "a.sqlite",
        "CREATE TABLE TARGET_INFO_CUDA_STREAM (streamId INTEGER, processId INTEGER, priority INTEGER, flag INTEGER)",
        f"INSERT INTO TARGET_INFO_CUDA_STREAM VALUES (7, 5, {1 << 40}, 1), (8, 5, {-(1 << 40)}, 1)",
    )
    r = open_recording([path])
    told = dict(zip(r.streams["handle"].tolist(), r.streams["priority"].tolist(), strict=True))
    assert (told[7], told[8]) == ((1 << 31) - 1, -(1 << 31))


@pytest.mark.parametrize(("kind", "memory"), [(-5, Memory.UNKNOWN), (1, Memory.PINNED), (1 << 40, Memory.UNKNOWN)])
def test_memory_of_a_kind_that_no_tool_wrote_yet_is_unknown(tmp_path, kind, memory):
    table = "CUPTI_ACTIVITY_KIND_MEMSET"
    path = two_copies(
        tmp_path / "a.sqlite",
        f"CREATE TABLE {table} (start INTEGER, end INTEGER, streamId INTEGER, globalPid INTEGER, memKind INTEGER)",
        f"INSERT INTO {table} VALUES (8, 9, 7, {5 << 24}, {kind})",
    )
    r = open_recording([path])
    assert r.executions["memory"][r.executions["start_ns"] == 8].tolist() == [memory]


@pytest.mark.parametrize(("epoch_ns", "told"), [(1, [1]), (0, []), (-1, [])])
def test_when_the_clock_began_is_told_where_the_export_says_so(tmp_path, epoch_ns, told):
    table = "TARGET_INFO_SESSION_START_TIME"
    more = f"CREATE TABLE {table} (utcEpochNs INTEGER)", f"INSERT INTO {table} VALUES ({epoch_ns})"
    machine = open_recording([two_copies(tmp_path / "a.sqlite", *more)]).machine
    assert [machine[name] for name in machine if name == "unix_offset_ns"] == told


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_process_of_rows_takes_memory_only_where_there_are_several(tmp_path, processes):
    export = nsys_sqlite.Export(two_copies(tmp_path / "a.sqlite"))
    builder = nsys_sqlite._Builder(export, export.path, "nsys", None)
    threads = np.arange(9) % processes + 5 << 24
    rows = builder.process_rows(threads)
    assert rows.tolist() == [i % processes for i in range(9)]
    assert (rows.strides == (0,)) == (processes == 1)
    export.db.close()


def test_no_table_has_more_rows_than_the_file_has_room_for_at_four_bytes_each(tmp_path):
    """A damaged file may repeat a page without end; the last row's number, which may be any, is not believed."""
    table, wanted = "CUPTI_ACTIVITY_KIND_RUNTIME", {"start": 0, "end": 0}
    path = two_copies(tmp_path / "a.sqlite", f"UPDATE {table} SET rowid = 1 << 50 WHERE rowid = 3")
    export = nsys_sqlite.Export(path)
    assert export._rows_expected(table) == export.bytes // 4
    export.bytes = 3 * 4
    assert [column.tolist() for column in export._row_by_row(table, wanted, None)] == [[1, 3, 5], [2, 4, 6]]
    export.bytes -= 1
    with pytest.raises(sqlite3.DatabaseError, match="more rows than the file can hold"):
        export._row_by_row(table, wanted, None)
    export.db.close()


# ---- the native copy of a table's leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h100", "mfu_before", "mfu_after", "extrap"])
def test_leaf_by_leaf_gives_what_sqlite_gives(shared, name):
    export = nsys_sqlite.Export(shared.path(name))
    native = 0
    for table in set(nsys_sqlite.COLUMNS) & export.tables:
        wanted = {n: d for n, d in nsys_sqlite.COLUMNS[table].items() if n in export.names_of(table)}
        parts = export._leaf_by_leaf(table, wanted, None)
        if parts is not None:
            native += 1
            for ours, theirs in zip(parts, export._row_by_row(table, wanted, None), strict=True):
                assert ours.tolist() == theirs.tolist()
    assert native > 3 or native_library() is None
    export.db.close()


cells = st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.floats(-1e15, 1e15)
strange = cells | st.text(max_size=5) | st.binary(max_size=5) | st.floats()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(cells, strange, cells, st.binary(max_size=2000)), max_size=60),
    st.sampled_from([512, 4096]),
    st.booleans(),
)
def test_any_table_reads_the_same_leaf_by_leaf_or_not(tmp_path, rows, page, keyed):
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA page_size={page}")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    key = "correlationId INTEGER PRIMARY KEY" if keyed else "correlationId INTEGER"
    db.execute(
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, big BLOB, {key}, globalTid INTEGER, "
        "nameId INTEGER)"
    )
    db.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 5, NULL)",
        [(a, b, blob, i if keyed else c) for i, (a, b, c, blob) in enumerate(rows)],
    )
    db.commit()
    db.close()
    export = nsys_sqlite.Export(path)
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    wanted = {n: d for n, d in nsys_sqlite.COLUMNS[table].items() if n in export.names_of(table)}
    parts = export._leaf_by_leaf(table, wanted, None)
    if parts is not None:
        for ours, theirs in zip(parts, export._row_by_row(table, wanted, None), strict=True):
            assert ours.tolist() == theirs.tolist()
    small = all(
        len(blob) < 100 and not isinstance(b, (str, bytes)) and (not isinstance(b, float) or abs(b) < 1e15)
        for _, b, _, blob in rows
    )
    assert parts is not None or not small or native_library() is None, "plain rows are read natively"
    export.db.close()


def test_long_calls_of_the_operating_system_s_functions_are_kept_of_threads_that_use_a_gpu(tmp_path):
    """The table as Nsight's documentation has it (`-t osrt`), in an export of a real recording."""
    path = tmp_path / "healthy.sqlite"
    path.write_bytes(gzip.decompress((Path(__file__).parents[1] / "gpu/data/nsys_healthy.sqlite.gz").read_bytes()))
    with contextlib.closing(sqlite3.connect(path)) as db:
        (start, thread), (last,) = (
            db.execute("SELECT start, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start").fetchone(),
            db.execute("SELECT max(id) FROM StringIds").fetchone(),
        )
        db.execute("INSERT INTO StringIds VALUES (?, 'recv')", (last + 1,))
        db.execute(
            "CREATE TABLE OSRT_API (start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT, "
            "correlationId INT, nameId INT NOT NULL, returnValue INT NOT NULL, nestingLevel INT, callchainId INT)"
        )
        for took, whose in ((5_000_000, thread), (10_000, thread), (5_000_000, thread + (1 << 40))):
            row = (start, start + took, 27, whose, 1, last + 1, 0, None, None)
            db.execute("INSERT INTO OSRT_API VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.commit()
    recording = open_recording([path])
    (row,) = range(recording.os_calls.rows)
    told = {name: int(recording.os_calls[name][row]) for name in ("start_ns", "end_ns", "process", "thread")}
    assert recording.text(int(recording.os_calls["name"][row])) == "recv"
    assert told["end_ns"] - told["start_ns"] == 5_000_000
    assert (told["process"], told["thread"]) == (recording.calls["process"][0], recording.calls["thread"][0])
