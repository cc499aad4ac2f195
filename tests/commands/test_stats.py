"""`kvprobe stats`: the same figures as `nsys stats`, to the last digit that both print."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import fcntl
import io
import json
import multiprocessing
import os
import pty
import re
import shutil
import sqlite3
import statistics
import struct
import subprocess
import sys
import termios
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest

from kvprobe.commands.stats import fitting
from kvprobe.native.library import Record, core
from kvprobe.recordings.model import CallKind, Recording, Source, Table
from kvprobe.reporting.recorded import view

REPORTS = "cuda_api_sum,cuda_gpu_kern_sum,cuda_gpu_mem_time_sum,cuda_gpu_mem_size_sum,nvtx_sum"


def tables(text: str) -> list[list[list[str]]]:
    """CSV tables, set apart by empty lines."""
    return [list(csv.reader(io.StringIO(block))) for block in text.strip().split("\n\n")]


def expected(values: list[int], whole: int) -> list[str]:
    """A row by the definitions, from Python's own statistics module."""

    def one(value: float) -> str:
        return str(Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP))

    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [
        one(sum(values) * 100.0 / whole),
        str(sum(values)),
        str(len(values)),
        one(sum(values) / len(values)),
        one(statistics.median(values)),
        str(min(values)),
        str(max(values)),
        one(deviation),
    ]


def grouped(path: Path, query: str) -> dict[str, list[int]]:
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as connection:
        out: dict[str, list[int]] = {}
        for name, value in connection.execute(query):
            out.setdefault(re.sub(r"(_v\d+|_pt[sd][sz])+$", "", name), []).append(value)
    return out


CALLS = "SELECT s.value, r.end - r.start FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId"
COPIES = """SELECT CASE copyKind WHEN 1 THEN 'Host-to-Device' WHEN 2 THEN 'Device-to-Host'
WHEN 8 THEN 'Device-to-Device' END, {} FROM CUPTI_ACTIVITY_KIND_MEMCPY"""


@pytest.fixture(params=["made here", "nsys-ai/h100_2gpu_1s.sqlite", "nsys-ai/mfu_2gpu_after.sqlite"])
def recorded(request: pytest.FixtureRequest, export: Path) -> Path:
    return export if request.param == "made here" else request.getfixturevalue("shared_data") / request.param


def test_calls_have_the_figures_of_their_definition(kvprobe, recorded: Path) -> None:
    code, out, _ = kvprobe("stats", recorded, "--csv", "-r", "cuda_api_sum")
    assert code == 0
    head, *rows = tables(out)[0]
    assert ",".join(head) == ("Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name")
    truth = grouped(recorded, CALLS)
    whole = sum(map(sum, truth.values()))
    assert {row[-1]: row[:-1] for row in rows} == {name: expected(values, whole) for name, values in truth.items()}
    assert [int(row[1]) for row in rows] == sorted((int(row[1]) for row in rows), reverse=True)


KERNELS = "SELECT s.value, k.end - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"


def test_kernels_have_the_figures_of_their_definition(kvprobe, recorded: Path) -> None:
    code, out, _ = kvprobe("stats", recorded, "--csv", "-r", "cuda_gpu_kern_sum")
    assert code == 0
    head, *rows = tables(out)[0]
    assert ",".join(head) == ("Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name")
    with sqlite3.connect(f"file:{recorded}?mode=ro&immutable=1", uri=True) as connection:
        truth: dict[str, list[int]] = {}
        for name, value in connection.execute(KERNELS):
            truth.setdefault(name, []).append(value)
    whole = sum(map(sum, truth.values()))
    assert rows and {row[-1]: row[:-1] for row in rows} == {n: expected(values, whole) for n, values in truth.items()}


def test_copies_have_the_figures_of_their_definition_by_time_and_by_size(kvprobe, recorded: Path) -> None:
    _, out, _ = kvprobe("stats", recorded, "--csv", "-r", "cuda_gpu_mem_time_sum,cuda_gpu_mem_size_sum")
    by_time, by_size = tables(out)
    times = grouped(recorded, COPIES.format("end - start"))
    with sqlite3.connect(f"file:{recorded}?mode=ro&immutable=1", uri=True) as connection:
        has = connection.execute("SELECT 1 FROM sqlite_master WHERE name='CUPTI_ACTIVITY_KIND_MEMSET'").fetchall()
        sets = [n for (n,) in connection.execute("SELECT end - start FROM CUPTI_ACTIVITY_KIND_MEMSET")] if has else []
    whole = sum(map(sum, times.values())) + sum(sets)
    want = {f"[CUDA memcpy {name}]": expected(values, whole) for name, values in times.items()}
    if sets:
        want["[CUDA memset]"] = expected(sets, whole)
    assert {row[-1]: row[:-1] for row in by_time[1:]} == want
    sizes = grouped(recorded, COPIES.format("bytes"))
    for row in by_size[1:]:
        if "memset" not in row[-1]:
            values = sizes[row[-1][len("[CUDA memcpy ") : -1]]
            assert row[:2] == [f"{sum(values) / 1e6:.3f}", str(len(values))]
            assert row[4:6] == [f"{min(values) / 1e6:.3f}", f"{max(values) / 1e6:.3f}"]


def test_ranges_are_named_with_their_domain_and_style(kvprobe, export: Path) -> None:
    _, out, _ = kvprobe("stats", export, "--csv", "-r", "nvtx_sum")
    head, row = tables(out)[0]
    assert head[-2:] == ["Style", "Range"]
    assert row[-2:] == ["PushPop", ":swap_blocks"]
    assert row[0] == "100.0"


@pytest.mark.gpu  # Nsight Systems comes with CUDA's tools
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_every_figure_equals_that_of_nsys_stats(kvprobe, export: Path, tmp_path: Path) -> None:
    copy = tmp_path / export.name
    shutil.copy(export, copy)
    _, mine, _ = kvprobe("stats", export, "--csv", "-r", REPORTS)
    for report, ours in zip(REPORTS.split(","), tables(mine), strict=True):
        done = subprocess.run(
            ["nsys", "stats", "-r", report, "--format", "csv", "-q", str(copy)],
            capture_output=True,
            text=True,
            check=True,
        )
        theirs = [row for row in csv.reader(io.StringIO(done.stdout)) if len(row) == len(ours[0])]
        assert [row[:-1] for row in theirs] == [row[:-1] for row in ours], report


def test_json_is_one_object_with_findings(kvprobe, export: Path) -> None:
    code, out, _ = kvprobe("stats", export, "--json")
    assert code == 0
    said = json.loads(out)
    full = next(one for one in said["findings"] if one["cause"] == "launch_queue_saturation")
    assert set(full) >= {"cause", "severity", "confidence", "lost_ns", "evidence", "cure", "predicted_saving_ns"}
    calls = {row["name"]: row for row in said["tables"]["cuda_api_sum"]["rows"]}
    assert calls["cudaMemcpyAsync"]["num_calls"] == 12_000


def test_calls_that_were_counted_and_not_timed_have_no_times(kvprobe, tmp_path: Path) -> None:
    def work() -> None:
        lib = core()
        assert lib.kvp_ring_open(str(tmp_path / "a.kvp").encode(), b"interposer", None) == 0
        for start_ns in range(0, 300_000, 100_000):
            one = {"count": 1, "stream": 7, "start_ns": start_ns}
            lib.kvp_ring_write(ctypes.byref(Record(call=12, dur_ns=2**64 - 1, **one)), 0)
            lib.kvp_ring_write(ctypes.byref(Record(call=1, dur_ns=1000, bytes=64, **one)), 0)
            lib.kvp_ring_write(ctypes.byref(Record(call=15, dur_ns=[1000, 2**64 - 1][start_ns > 0], **one)), 0)
        lib.kvp_ring_close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    _, out, _ = kvprobe("stats", tmp_path / "a.kvp", "--json", "-r", "cuda_api_sum")
    calls = {row["name"]: row for row in json.loads(out)["tables"]["cuda_api_sum"]["rows"]}
    launches = calls["cudaLaunchKernel"]
    assert launches.pop("num_calls") == 3 and launches.pop("name") and set(launches.values()) == {None}
    assert calls["cudaMemcpyAsync"]["med_ns"] == pytest.approx(1000, rel=0.2)
    one = calls["cuLaunchKernelEx"]  # of three, the one that was timed
    assert (one["num_calls"], one["total_time_ns"], one["avg_ns"], one["max_ns"]) == (3, 1000, 1000, 1000)
    assert one["med_ns"] == pytest.approx(1000, rel=0.2)
    _, out, _ = kvprobe("stats", tmp_path / "a.kvp", "-r", "cuda_api_sum")
    (line,) = (line.split() for line in out.splitlines() if line.endswith("cudaLaunchKernel"))
    assert line == ["\u2013", "\u2013", "3", *["\u2013"] * 5, "cudaLaunchKernel"]
    assert "5 calls were counted, but not timed" in out
    _, out, _ = kvprobe("stats", tmp_path / "a.kvp", "-r", "cuda_api_sum", "--csv")
    assert ",,3,,,,,,cudaLaunchKernel" in out.splitlines()


def test_a_stream_whose_calls_were_not_timed_has_no_times_on_the_page_either() -> None:
    launches = {"process": [0], "stream": [0], "name": [1], "kind": [CallKind.LAUNCH], "calls": [9]}
    tables = {
        "totals": Table("totals", launches),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [5]}),
    }
    r = Recording([Source("made", "test")], tables, ["", "cudaLaunchKernel"], np.zeros((1, 128), np.int64))
    page = view(r, None)
    assert not [chart for section in page.sections for chart in section.charts if chart.id == "histogram"]
    (table,) = (one for section in page.sections for one in section.tables if one.caption == "Submissions by stream")
    (row,) = table.rows
    assert [(cell.text, cell.value) for cell in row[2:8]] == [("9", 9.0), *[("\u2013", None)] * 5]


def test_the_terminal_never_cuts_a_figure(kvprobe, shared_data: Path) -> None:
    _, out, _ = kvprobe("stats", shared_data / "nsys-ai/h100_2gpu_1s.sqlite", "-r", "cuda_gpu_mem_time_sum")
    assert "1,841,630,798" in out
    assert "10,321,759.7" in out


def on_a_terminal(columns: int, *arguments: str) -> list[str]:
    """What the command line prints on a terminal of so many columns, line by line."""
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        os.execve(sys.executable, [sys.executable, "-m", "kvprobe", *arguments], environment)
    said = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the program has ended
        while piece := os.read(terminal, 65536):
            said += piece
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).splitlines()


@pytest.mark.parametrize("columns", [80, 120, 400])
def test_a_table_is_as_wide_as_the_terminal_at_most_and_no_figure_is_cut(shared_data: Path, columns: int) -> None:
    table = ("-r", "cuda_gpu_kern_sum,cuda_gpu_mem_time_sum,descriptors", "--rows", "3")
    lines = on_a_terminal(columns, "stats", str(shared_data / "nsys-ai/h100_2gpu_1s.sqlite"), *table)
    assert max(map(len, lines)) <= columns
    assert any("1,841,630,798" in line for line in lines)
    assert any("too narrow for " in line and "--csv" in line for line in lines) == (columns < 400)


def test_fewer_columns_are_left_out_of_a_wider_terminal() -> None:
    columns = [
        ("Time (%)", "share"),
        ("Total Time (ns)", "ns"),
        ("Min (ns)", "ns"),
        ("StdDev (ns)", "ns1"),
        ("N", "text"),
    ]
    widths = [8, 16, 12, 12, 200]
    assert [len(fitting(columns, widths, wide)) for wide in (300, 82, 81, 68, 67, 54, 10)] == [5, 5, 4, 4, 3, 3, 2]
    assert fitting(columns, widths, 10) == [1, 4]


def test_a_name_cannot_steer_the_terminal(kvprobe, export: Path, tmp_path: Path) -> None:
    copy = tmp_path / "evil.sqlite"
    shutil.copy(export, copy)
    with sqlite3.connect(copy) as connection:
        connection.execute("UPDATE StringIds SET value = ? WHERE value = 'swap_blocks'", ("\x1b[2J[bold]gone[/bold]",))
    _, out, _ = kvprobe("stats", copy, "-r", "nvtx_sum")
    assert "\x1b" not in out
    assert "[bold]gone[/bold]" in out


def test_an_unknown_table_is_one_line(kvprobe, export: Path) -> None:
    code, out, err = kvprobe("stats", export, "-r", "everything")
    assert (code, out) == (2, "")
    assert "cuda_api_sum" in err
    assert err.count("\n") == 1


def test_as_many_rows_as_were_asked_for_are_in_json_too(kvprobe, export: Path) -> None:
    asked = ("stats", export, "--json", "-r", "cuda_api_sum")
    whole = json.loads(kvprobe(*asked)[1])["tables"]["cuda_api_sum"]
    cut = json.loads(kvprobe(*asked, "--rows", "1")[1])["tables"]["cuda_api_sum"]
    assert len(whole["rows"]) > 1 and whole["left_out"] == 0
    assert cut["rows"] == whole["rows"][:1] and cut["left_out"] == len(whole["rows"]) - 1


def test_the_tables_are_listed_without_a_recording_and_none_is_no_table(kvprobe, export: Path) -> None:
    code, out, err = kvprobe("stats", "-r", "help")
    assert (code, err) == (0, "") and "cuda_api_sum" in out
    assert kvprobe("stats")[0] == 2
    code, out, err = kvprobe("stats", export, "-r", ",")
    assert (code, out) == (2, "") and "no table is named" in err
