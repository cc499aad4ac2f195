"""Undecided is never green: broken, cut and empty recordings of every format, in every command that judges."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvprobe.recordings import open_recording

GPU_DATA = Path(__file__).parents[1] / "gpu" / "data"
CALL = (
    '{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":1,"ts":%d,"dur":2,'
    '"args":{"correlation":%d}}'
)
COPY = (
    '{"ph":"X","cat":"kernel","name":"work","pid":0,"tid":7,"ts":%d,"dur":19,'
    '"args":{"correlation":%d,"stream":7,"device":0}}'
)


def healthy_trace(calls: int = 400) -> str:
    """A healthy PyTorch trace: launches of 2 us whose kernels follow one another."""
    events = [line for i in range(calls) for line in (CALL % (20 * i, i + 1), COPY % (20 * i + 4, i + 1))]
    return '{"traceEvents":[' + ",\n".join(events) + "]}"


def healthy_export() -> bytes:
    return gzip.decompress((GPU_DATA / "nsys_healthy.sqlite.gz").read_bytes())


def emptied(path: Path, *tables: str) -> Path:
    """An export whose tables of these names hold nothing."""
    path.write_bytes(healthy_export())
    with sqlite3.connect(path) as base:
        for table in tables:
            base.execute(f"DELETE FROM {table}")
    base.close()
    return path


def a_file(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def a_folder(path: Path, **files: bytes | str) -> Path:
    path.mkdir()
    for name, data in files.items():
        a_file(path / name.replace("__", "."), data)
    return path


def parquet(path: Path, broken: Callable[[Path], None]) -> Path:
    from kvprobe.recordings.parquet import write

    a_file(path.with_suffix(".json"), healthy_trace())
    write(open_recording([path.with_suffix(".json")]), path)
    path.with_suffix(".json").unlink()
    broken(path)
    return path


def scrambled(data: bytes, seed: int) -> bytes:
    rng, out = random.Random(seed), bytearray(data)
    for _ in range(len(out) // 40):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _cut_json(folder: Path) -> None:
    text = (folder / "kvprobe.json").read_text()
    (folder / "kvprobe.json").write_text(text[: len(text) // 2])


RUN = json.dumps({"command": ["x"], "pid": 1, "realtime_ns": 2, "monotonic_ns": 1, "host": "h", "options": {}})
BROKEN: dict[str, Callable[[Path], Path]] = {
    # PyTorch profiler
    "trace-empty-file": lambda t: a_file(t / "a.json", ""),
    "trace-no-events": lambda t: a_file(t / "a.json", '{"traceEvents":[]}'),
    "trace-foreign": lambda t: a_file(t / "a.json", '{"traceEvents":[{"ph":"X","cat":"x","name":"s","ts":1,"dur":2}]}'),
    "trace-cut": lambda t: a_file(t / "a.json", healthy_trace()[: len(healthy_trace()) // 2]),
    "trace-cut-at-its-last-bracket": lambda t: a_file(t / "a.json", healthy_trace()[:-2]),
    "trace-gzip-cut": lambda t: a_file(t / "a.json.gz", gzip.compress(healthy_trace().encode())[:-200]),
    "trace-gzip-of-nothing": lambda t: a_file(t / "a.json.gz", gzip.compress(b"")),
    "trace-scrambled": lambda t: a_file(t / "a.json", scrambled(healthy_trace().encode(), 6)),
    "trace-a-few-calls": lambda t: a_file(t / "a.json", healthy_trace(5)),
    "trace-of-the-device-alone": lambda t: a_file(
        t / "a.json", '{"traceEvents":[' + ",".join(COPY % (3 * i, i) for i in range(300)) + "]}"
    ),
    "trace-another-document": lambda t: a_file(t / "a.json", '{"hello": "world"}'),
    # Nsight Systems
    "export-empty-base": lambda t: (
        sqlite3.connect(t / "a.sqlite").executescript("CREATE TABLE x(y)").close(),
        t / "a.sqlite",
    )[1],
    "export-cut": lambda t: a_file(t / "a.sqlite", healthy_export()[: len(healthy_export()) // 2]),
    "export-header-only": lambda t: a_file(t / "a.sqlite", healthy_export()[:100]),
    "export-scrambled": lambda t: a_file(t / "a.sqlite", scrambled(healthy_export(), 2)),
    "export-without-calls": lambda t: emptied(t / "a.sqlite", "CUPTI_ACTIVITY_KIND_RUNTIME"),
    "report-that-is-none": lambda t: a_file(t / "a.nsys-rep", "no report"),
    "arrow-folder-empty-tables": lambda t: a_folder(t / "a", StringIds__arrow="", META_DATA_EXPORT__arrow=""),
    # kvprobe's own
    "ring-empty": lambda t: a_file(t / "a.kvp", ""),
    "ring-header-only": lambda t: a_file(t / "a.kvp", b"KVPRING1" + bytes(56)),
    "ring-cut": lambda t: a_file(t / "a.kvp", b"KVPRING1" + bytes(2000)),
    "run-without-a-process": lambda t: a_folder(t / "a", run__json=RUN, end__json='{"status":0,"warnings":[]}'),
    "run-not-over": lambda t: a_folder(t / "a", run__json=RUN),
    "run-empty-json": lambda t: a_folder(t / "a", run__json=""),
    "parquet-without-calls": lambda t: parquet(t / "a", lambda f: (f / "calls.parquet").unlink()),
    "parquet-cut": lambda t: parquet(
        t / "a", lambda f: a_file(f / "calls.parquet", (f / "calls.parquet").read_bytes()[:-100]) and None
    ),
    "parquet-cut-index": lambda t: parquet(t / "a", _cut_json),
    "folder-of-nothing": lambda t: a_folder(t / "a"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_command_is_green_on_a_recording_that_says_nothing(kvprobe, tmp_path: Path, name: str) -> None:
    path = BROKEN[name](tmp_path)
    code, out, _ = kvprobe("check", path, "--no", "saturation", "--junit", tmp_path / "junit.xml")
    assert code == 1, out
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert [case.find("skipped") is not None for case in suite] == [True] * int(suite.get("skipped")) != []
    code, out, _ = kvprobe("triage", path, "--json")
    said = json.loads(out)
    assert said["errors"] or [one["verdict"] for one in said["recordings"]] == ["undecided"]
    code, out, _ = kvprobe("report", path, "-o", tmp_path / "page.html", "--json")
    assert code == 1 or json.loads(out)["verdict"]["state"] == "undecided"
    if code == 0:
        assert "Undecided" in (tmp_path / "page.html").read_text()
    code, out, _ = kvprobe("stats", path, "--json")
    assert code == 1 or json.loads(out)["verdict"]["state"] == "undecided"


def test_a_healthy_recording_is_green(kvprobe, tmp_path: Path) -> None:
    path = a_file(tmp_path / "a.json", healthy_trace())
    assert kvprobe("check", path)[0] == 0
    assert json.loads(kvprobe("triage", path, "--json")[1])["recordings"][0]["verdict"] == "healthy"


def test_undecided_may_be_allowed_and_is_still_said(kvprobe, tmp_path: Path) -> None:
    path = a_file(tmp_path / "a.json", healthy_trace(5))
    code, out, _ = kvprobe("check", path, "--allow-undecided")
    assert code == 0 and "\nundecided  " in out and "skip" not in out and "Undecided" in out


def test_a_cut_file_proves_no_cure(kvprobe, tmp_path: Path) -> None:
    before = tmp_path / "before.json.gz"
    shutil.copy(GPU_DATA / "kineto_saturated.json.gz", before)
    text = healthy_trace(5_000)
    code, out, _ = kvprobe("diff", before, a_file(tmp_path / "after.json", text[: len(text) // 2]), "--json")
    said = json.loads(out)
    assert code == 1 and said["verdict_before"]["state"] == "found" and said["verdict_after"]["state"] == "undecided"
    assert {change["what"] for change in said["findings"]} == {"undecided"}
    code, out, _ = kvprobe("diff", before, a_file(tmp_path / "whole.json", text), "--json")
    assert code == 0 and {change["what"] for change in json.loads(out)["findings"]} >= {"gone"}
