"""`kvprobe weights` on a recording."""

from __future__ import annotations

import json
from pathlib import Path


def test_weights_reads_a_recording_that_is_a_folder(kvprobe, export: Path, tmp_path: Path) -> None:
    kvprobe("export", export, "--to", "parquet", "-o", tmp_path / "out")
    code, of_folder, err = kvprobe("weights", tmp_path / "out", "--json")
    assert (code, err) == (0, "")
    assert json.loads(of_folder) == json.loads(kvprobe("weights", export, "--json")[1])
    (tmp_path / "model").mkdir()
    code, _, err = kvprobe("weights", tmp_path / "model", "--report", tmp_path / "w.html")
    assert code == 2 and "--gpu-fraction" in err
