"""Paths that commands are given: an empty one is none, and a recording that is read is never written over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", ""],
        ["report", "a.sqlite", "-o", ""],
        ["check", "", "--no", "saturation"],
        ["check", "a.sqlite", ""],
        ["triage", ""],
        ["stats", ""],
        ["diff", "a.sqlite", ""],
        ["export", "", "--to", "parquet", "-o", "out"],
        ["reduce", ""],
        ["weights", ""],
        ["run", "-o", "", "--", "true"],
        ["try", "--recording", "", "--", "true"],
        ["detach", ""],
        ["metrics", "--rules", ""],
        ["metrics", "--once", "--flight-recorder", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    kvprobe, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "a.sqlite").symlink_to(export)
    monkeypatch.chdir(tmp_path)
    code, out, err = kvprobe(*arguments)
    assert (code, out) == (2, "")
    assert "empty" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.sqlite"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "a.sqlite", "--junit", "a.sqlite"],
        ["check", "a.sqlite", "--junit", "link.sqlite"],
        ["report", "a.sqlite", "-f", "-o", "./a.sqlite"],
        ["diff", "other.sqlite", "a.sqlite", "-f", "-o", "a.sqlite"],
        ["export", "a.sqlite", "--to", "perfetto", "-f", "-o", "a.sqlite"],
    ],
)
def test_a_recording_that_is_read_is_not_written_over(
    kvprobe, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name in ("a.sqlite", "other.sqlite"):
        shutil.copy(export, tmp_path / name)
    (tmp_path / "link.sqlite").symlink_to("a.sqlite")
    monkeypatch.chdir(tmp_path)
    code, out, err = kvprobe(*arguments)
    assert (code, out) == (2, "")
    assert "is a recording that is read" in err and err.count("\n") == 1
    assert (tmp_path / "a.sqlite").read_bytes() == export.read_bytes()


def test_a_parquet_folder_is_not_exported_onto_itself(kvprobe, export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert kvprobe("export", export, "--to", "parquet", "-o", folder)[0] == 0
    assert kvprobe("export", folder, "--to", "parquet", "-f", "-o", folder)[0] == 2
    assert kvprobe("stats", folder)[0] == 0


@pytest.mark.parametrize("name", [b"na\xffme", b"-o a\n name"])
def test_a_path_may_hold_any_bytes(kvprobe, export: Path, tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    given = Path(shutil.copy(export, folder / os.fsdecode(name + b".sqlite")))
    table, summary = folder / os.fsdecode(name), folder / os.fsdecode(name + b".kvsum")
    counted = kvprobe("stats", "--csv", "-r", "streams", export)[1]
    assert kvprobe("stats", "--csv", "-r", "streams", given)[:2] == (0, counted)
    assert kvprobe("export", given, "--to", "parquet", "-o", table)[0] == 0
    assert kvprobe("stats", "--csv", "-r", "streams", table)[:2] == (0, counted)
    assert kvprobe("reduce", given, folder / "nothing", "-o", summary)[0] == 1
    ranks = json.loads(kvprobe("reduce", given, "--json")[1])["ranks"]
    assert json.loads(kvprobe("reduce", summary, "--json")[1])["ranks"] == ranks


def test_triage_says_in_one_line_what_it_cannot_read_whatever_it_is_called(kvprobe, tmp_path: Path) -> None:
    damaged = tmp_path / "a\x1b[31m\nb.sqlite"
    damaged.write_bytes(b"SQLite format 3\0")
    code, out, err = kvprobe("triage", damaged)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["report", "{export}", "-o", "page.html"], "page.html"),
        (["reduce", "{export}", "-o", "rank.kvsum"], "rank.kvsum"),
        (["run", "-o", "run", "--", "true"], "run.json"),
        (["metrics", "--rules", "rules"], "rules"),
    ],
)
def test_where_a_disk_is_full_the_file_is_named_and_no_half_of_it_is_left(
    export: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    """No file may be larger than a block here, which ends a write as a full disk does."""
    words = [one.format(export=export) for one in arguments]
    limited = ["sh", "-c", 'ulimit -f 1; exec "$0" -m kvprobe "$@"', sys.executable, *words]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert named in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
