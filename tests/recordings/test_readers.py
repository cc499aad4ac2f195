"""Each reader offers what `Reader` says, and what says itself what is its own needs no second line."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvprobe import recordings
from kvprobe.recordings import FORMATS, expand, expand_deeply, open_recording, sniff
from kvprobe.recordings.reader import Reader, load_reader
from tests.contracts import functions, shape


@pytest.mark.parametrize("form", FORMATS)
def test_a_reader_offers_what_its_contract_says(form):
    module = import_module(f"kvprobe.recordings.{FORMATS[form][0]}")
    inspect.signature(module.read).bind(Path("x"))
    inspect.signature(module.read).bind(Path("x"), None)
    assert inspect.signature(module.read).return_annotation == "Recording", f"{form}: annotate read() -> Recording"
    if hasattr(module, "sniff"):
        assert shape(module.sniff) == shape(functions(Reader)["sniff"]), (
            f"{form}: write sniff(path: Path, start: bytes) -> bool"
        )
    loaded = load_reader(FORMATS[form][0])
    assert isinstance(loaded.suffixes, tuple), f'{form}: write suffixes = (".ending",)'
    assert form in recordings._TOLD_HERE or hasattr(module, "sniff"), (
        f"nothing tells that a file is {form}: give its reader sniff(path, start)"
    )


def test_every_reader_has_its_line():
    registered = {module for module, _ in FORMATS.values()}
    for path in sorted(Path(recordings.__file__).parent.glob("*.py")):
        if path.name != "__init__.py" and re.search(r"^def sniff\(", path.read_text(), re.MULTILINE):
            assert path.stem in registered, (
                f"{path.name} reads nothing: add its line to kvprobe/recordings/__init__.py:FORMATS"
            )


def test_a_reader_that_fills_executions_has_seen_the_device(monkeypatch, tmp_path):
    (tmp_path / "reader_of_executions.py").write_text(
        "from kvprobe.recordings.model import Recording, Source, Table\n"
        "def sniff(path, start): return start == b'seen'\n"
        "def read(path, progress=None):\n"
        "    executions = Table('executions', {'start_ns': [1], 'end_ns': [2]})\n"
        "    return Recording(source=[Source(str(path), 'seen')], tables={'executions': executions})\n"
    )
    monkeypatch.setattr("kvprobe.recordings.__path__", [*recordings.__path__, str(tmp_path)])
    monkeypatch.setitem(FORMATS, "seen", ("reader_of_executions", "A format of tests"))
    (file := tmp_path / "one").write_text("seen")
    assert open_recording(file).has_executions


def test_a_reader_of_elsewhere_says_what_is_its_own(monkeypatch, tmp_path):
    """Before a weaker sign is taken for another format's, in folders, too."""
    (tmp_path / "reader_of_tests.py").write_text(
        "from kvprobe.recordings.model import Recording, Source\n"
        "suffixes = ('.mine',)\n"
        "def sniff(path, start): return start.startswith(b'{\"mine\"') or path.is_dir() and (path / 'mine').exists()\n"
        "def read(path, progress=None): return Recording(source=[Source(str(path), 'mine')])\n"
    )
    monkeypatch.setattr("kvprobe.recordings.__path__", [*recordings.__path__, str(tmp_path)])
    monkeypatch.setitem(FORMATS, "absent", ("reader_that_is_not_installed", "A format of another machine"))
    monkeypatch.setitem(FORMATS, "mine", ("reader_of_tests", "A format of tests"))
    file = tmp_path / "files" / "one.mine"
    file.parent.mkdir()
    file.write_text('{"mine": 1}')
    assert sniff(file) == "mine" and expand(file.parent) == [file] == expand_deeply(file.parent)
    assert open_recording(file).source[0].format == "mine"
    file.write_text('{"traceEvents": []}')
    assert sniff(file) == "kineto-json"
    (file.parent / "mine").touch()
    assert sniff(file.parent) == "mine"


def test_to_ask_what_a_file_is_loads_no_reader_that_need_not_be_asked(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": []}')
    code = f"import sys; from kvprobe.recordings import sniff; print(sniff({str(file)!r}), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    form, *loaded = done.stdout.split()
    assert form == "kineto-json"
    assert not {f"kvprobe.recordings.{module}" for module, _ in recordings._TOLD_HERE.values()} & set(loaded)
