"""Each reader offers what `Reader` says, and what says itself what is its own needs no second line."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import fuzz
import fuzz_seeds
import numpy as np
import pytest

from kvprobe import recordings
from kvprobe.recordings import FORMATS, expand, expand_deeply, open_recording, sniff
from kvprobe.recordings.model import SCHEMAS, Recording, Source, Table
from kvprobe.recordings.reader import Reader, load_reader
from tests.contracts import functions, shape

# Beginnings of files and folders of others; of a reader in FORMATS, nobody but its own file says more.
NOT_ITS_OWN = (
    *(b"", b"\n", b"x", b"\xff\xfe\x00", b"\x1f\x8b\x08", b"SQLite format 3\0", b"KVPRING1", b"a,b\n1,2\n"),
    *(b"{", b"{}", b"[]", b"7", b'"text"', b"null", b"[1]\n[2]", b'{"traceEvents": [{"ph": "X", "na', b'{"pid": 1}\n'),
)


def wrongly_told(reader: Reader, folder: Path) -> str:
    """What is wrong with a reader's `sniff`, asked of files and a folder of others; "" where nothing is."""
    (file := folder / "file").touch()
    for path, start in [(folder, b""), *((file, start) for start in NOT_ITS_OWN)]:
        file.write_bytes(start)
        try:
            said = reader.sniff(path, start)
        except Exception as error:
            return f"it is asked of every file and folder, and raised {error!r} at {start!r}"
        if said is not False:
            return f"it returned {said!r} for {start!r}, which is not its own"
    return ""


def out_of_range(recording: Recording) -> list[str]:
    """Columns that hold what is no row of the table they count, or no entry of `names`."""
    rows = {"process": recording.processes.rows, "stream": recording.streams.rows}
    said = {"process": "rows of `processes`", "stream": "rows of `streams`", "name": "entries of `names`"}
    found = []
    for kind, table in recording.tables.items():
        for column, dtype in SCHEMAS[kind].items():
            what = "name" if dtype == "name" else column
            many = len(recording.names) if what == "name" else rows.get(column)
            highest = int(np.max(table[column], initial=-1)) if many is not None else -1
            if many is not None and highest >= many:
                found.append(f"{kind}.{column} holds {highest}: it numbers {said[what]}, and there are {many}")
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_a_reader_offers_what_its_contract_says(form, tmp_path):
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
    if form in recordings._TOLD_HERE:
        return
    assert hasattr(module, "sniff"), f"nothing tells that a file is {form}: give its reader sniff(path, start)"
    wrong = wrongly_told(loaded, tmp_path)
    assert not wrong, f"{form}, sniff: {wrong}"
    assert [sniff(path) for path in fuzz.own_seeds().get(form, [])][:1] == [form], (
        f"nothing damages a file of {form}: put a small one into tests/recordings/corpus, called {form} and its ending"
    )


@pytest.mark.parametrize("form", [form for form in fuzz.SHARES if form != "summary"])
def test_a_reader_numbers_rows_and_names(form, tmp_path):
    for number, files in enumerate(fuzz_seeds.seeds()[form]):
        for name, data in files.items():
            (path := tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        assert not out_of_range(open_recording(sorted((tmp_path / str(number)).iterdir())))


def test_handles_in_place_of_rows_are_seen():
    made = Recording(source=[Source("made", "made")], names=["", "cudaMemcpyAsync"])
    made.tables["processes"] = Table("processes", {"pid": [41]})
    made.tables["streams"] = Table("streams", {"handle": [7], "process": [0]})
    made.tables["calls"] = Table("calls", {"start_ns": [1], "end_ns": [2], "name": [1], "stream": [0]})
    assert not out_of_range(made)
    columns = {"start_ns": [1], "end_ns": [2], "name": [2], "stream": [7], "process": [41]}
    made.tables["calls"] = Table("calls", columns)
    assert out_of_range(made) == [
        "calls.process holds 41: it numbers rows of `processes`, and there are 1",
        "calls.name holds 2: it numbers entries of `names`, and there are 2",
        "calls.stream holds 7: it numbers rows of `streams`, and there are 1",
    ]


@pytest.mark.parametrize(
    ("tells", "said"),
    [
        ("start.startswith(b'{')", "it returned True for b'{', which is not its own"),
        ("'mine' in json.loads(start)", "and raised JSONDecodeError"),
        ("bool(path.read_text())", "and raised IsADirectoryError"),
        ("start.startswith(b'{\"mine\"')", ""),
    ],
)
def test_a_sniff_that_takes_others_files_or_fails_at_them_is_seen(tells, said, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "kvprobe.recordings.reader_that_tells", raising=False)
    (tmp_path / "reader_that_tells.py").write_text(f"import json\ndef sniff(path, start): return {tells}\n")
    monkeypatch.setattr("kvprobe.recordings.__path__", [*recordings.__path__, str(tmp_path)])
    wrong = wrongly_told(load_reader("reader_that_tells"), tmp_path)
    assert said in wrong and bool(said) == bool(wrong)


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
