"""`kvprobe weights` on a recording."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from kvprobe.output import SCHEMA_VERSION


def test_weights_reads_a_recording_that_is_a_folder(kvprobe, export: Path, tmp_path: Path) -> None:
    kvprobe("export", export, "--to", "parquet", "-o", tmp_path / "out")
    code, of_folder, err = kvprobe("weights", tmp_path / "out", "--json")
    assert (code, err) == (0, "")
    assert json.loads(of_folder) == json.loads(kvprobe("weights", export, "--json")[1])
    (tmp_path / "model").mkdir()
    code, _, err = kvprobe("weights", tmp_path / "model", "--report", tmp_path / "w.html")
    assert code == 2 and "--gpu-fraction" in err


def test_weights_predicts_what_coding_would_save(kvprobe, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ones = struct.pack("<H", 0x3F80) * 32768
    header = json.dumps({"w": {"dtype": "BF16", "shape": [32768], "data_offsets": [0, len(ones)]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + ones)
    code, out, err = kvprobe("weights", tmp_path, "--predict", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "kvprobe_json": SCHEMA_VERSION,
        "total_bytes": 65536,
        "coded_bytes": 49184,
        "share": 49184 / 65536,
        "dtypes": [{"dtype": "BF16", "bytes": 65536, "sample_bytes": 65536, "share": 49184 / 65536}],
    }
    code, out, _ = kvprobe("weights", tmp_path, "--predict")
    assert code == 0 and "0.750" in out and "coding has not been tried here" in " ".join(out.split())
    code, _, err = kvprobe("weights", tmp_path / "nowhere", "--predict")
    assert code == 2 and "no such folder" in err
