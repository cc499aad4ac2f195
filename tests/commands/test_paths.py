"""Paths that commands are given: an empty one is none."""

from __future__ import annotations

import shutil
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
