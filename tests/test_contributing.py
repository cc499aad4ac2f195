"""The exercises of CONTRIBUTING.md are the code that it says: a cause, a reader, a server, each with its one line."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path

import pytest

from kvprobe import diagnosis, recordings
from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.instrument import installation, registry
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S))


def put(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> types.ModuleType:
    """A module of this source, as if it lay there."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def csv(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "kvprobe.recordings.csv_copies", BLOCKS["reader"])
    monkeypatch.setitem(recordings.FORMATS, "csv", ("csv_copies", "CSV file of copies"))
    known = recordings.sniff
    monkeypatch.setattr(recordings, "sniff", lambda path: "csv" if Path(path).suffix == ".csv" else known(path))


@pytest.fixture
def recording(csv: None, tmp_path: Path):
    file = tmp_path / "copies.csv"
    lines = [(i * 1_000_000, 2_000 if i % 10 else 700_000) for i in range(100)]
    file.write_text("".join(f"cudaMemcpyAsync,{start},{start + took},7,65536\n" for start, took in lines))
    return open_recording(file)


def test_a_reader(recording):
    assert recording.calls.rows == 100
    assert recording.text(recording.calls["name"][0]) == "cudaMemcpyAsync"
    assert recording.source[0].format == "csv"


def test_a_cause(recording, monkeypatch):
    put(monkeypatch, "kvprobe.diagnosis.slow_memsets", BLOCKS["cause"])
    monkeypatch.setattr(diagnosis, "CAUSES", ("slow_memsets",))
    assert not diagnosis.examine_joined(JoinedRecording(recording), diagnosis.CAUSES).findings
    kinds = recording.calls.columns["kind"] = recording.calls["kind"].copy()
    kinds[:] = CallKind.MEMSET
    found = diagnosis.examine_joined(JoinedRecording(recording), diagnosis.CAUSES).findings
    assert [(one.cause, len(one.calls)) for one in found] == [("slow_memsets", 10)]
    assert found[0].title.startswith("10 memsets blocked their caller for ")
    assert found[0].cure[0].predicted_saving_ns == found[0].lost_ns


def test_a_server(monkeypatch, tmp_path):
    package = tmp_path / "toyserver"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cache.py").write_text("def swap_in(blocks):\n    return len(blocks)\n")
    metadata = tmp_path / "toyserver-1.4.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toyserver\nVersion: 1.4\n")
    monkeypatch.syspath_prepend(tmp_path)
    put(monkeypatch, "kvprobe.patches.toyserver", BLOCKS["server"])
    line = ast.literal_eval("{" + BLOCKS["line"] + "}")
    monkeypatch.setitem(registry.SERVERS, "toyserver", registry.Server(*line["toyserver"]))
    rows = installation.table("toyserver")
    assert [(row["adapter"], row["state"]) for row in rows] == [("toyserver.cache", "would apply")]
    with installation.observe("toyserver") as seen:
        from toyserver.cache import swap_in

        assert swap_in(range(5)) == 5
    assert seen.states["toyserver.cache"].startswith("removed")
    assert [(call["copies"], call["cause"]) for call in seen.calls] == [(5, "waits for its copies")]
    for name in ("toyserver", "toyserver.cache"):
        sys.modules.pop(name, None)
