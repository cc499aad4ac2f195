"""Hostile recordings of every format; `make fuzz` reads many more mutants, and keeps in `corpus/` what failed."""

from __future__ import annotations

import bz2
import ctypes
import gzip
import io
import json
import lzma
import mmap
import os
import signal
import sqlite3
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import fuzz
import pytest
from fuzz_run_folder import make_run

from kvprobe.errors import RecordingError, plain
from kvprobe.recordings import compressed, expand_deeply, open_recording, sniff
from kvprobe.runfolder.folder import VERSION
from tests import public_recordings

GPU_DATA = Path(__file__).parents[1] / "gpu" / "data"


@pytest.mark.parametrize("form", fuzz.SHARES)
def test_mutants_are_read_or_refused_in_one_line(form: str) -> None:
    tally = fuzz.run(form, 60)
    assert not tally.wrong
    assert tally.different > 30 and tally.judged >= 2


@pytest.mark.parametrize("path", sorted(fuzz.CORPUS.iterdir()) if fuzz.CORPUS.is_dir() else [], ids=lambda p: p.name)
def test_what_failed_once_is_read_or_refused_in_one_line(path: Path) -> None:
    assert not fuzz.judge(path)[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(folder := tmp_path / "run")
    return folder


def put(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("run.json", {"command": None}),
        ("run.json", {"monotonic_ns": "soon"}),
        ("end.json", {"warnings": None}),
        ("end.json", {"status": []}),
        ("checkin-*.json", {"pid": "x"}),
        ("checkin-*.json", {"rank": 7}),
        ("queue-*.json", {"depth": 10**40}),
        ("run.json", {"cpus": 1e300}),
    ],
)
def test_a_file_of_a_run_folder_with_wrong_contents_is_left_out_and_named(run: Path, name: str, fields) -> None:
    (path,) = run.glob(name)
    put(path, **fields)
    recording = open_recording([run])
    assert recording.calls.rows and any(note.startswith(f"not read: {path.name}: ") for note in recording.notes)


@pytest.mark.parametrize("line", ['{"pid":"x"}', '{"pid":1,"status":"killed"}', "[]", '{"t_ns":1e400}', "\x00"])
def test_a_line_with_wrong_contents_is_left_out_and_named(run: Path, line: str) -> None:
    path = run / "processes.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    recording = open_recording([run])
    assert any(note.startswith("not read: processes.jsonl, line 1") for note in recording.notes)
    assert recording.text(int(recording.tables["processes"]["state"][0])) == "closed"


def test_a_newer_run_folder_is_refused_and_one_without_a_version_is_read(run: Path) -> None:
    put(run / "run.json", schema=VERSION + 1)
    with pytest.raises(RecordingError, match=r"newer kvprobe \(run folder version 2, this one reads up to 1\); update"):
        open_recording([run])
    value = json.loads((run / "run.json").read_text())
    del value["schema"]
    (run / "run.json").write_text(json.dumps(value))
    assert open_recording([run]).calls.rows


def test_a_secret_of_an_older_run_folder_is_not_shown(run: Path) -> None:
    put(run / "run.json", command=["vllm", "--api-key", "hunter2"])
    assert open_recording([run]).source[0].command == "vllm --api-key ***"


def test_a_process_that_cannot_be_seen_from_here_is_not_called_running(run: Path) -> None:
    (path,) = run.glob("*.kvp")
    (run / "end.json").unlink()
    (run / "processes.jsonl").unlink()
    (run / "run.json").unlink()
    data = bytearray(path.read_bytes())
    from kvprobe.probe.ring import FILE

    state, namespace = FILE.fields["state"][1], FILE.fields["pid_namespace"][1]
    data[state] = 1
    for inode, said in (
        (int.from_bytes(data[namespace : namespace + 8], "little"), "running"),
        (77, "not known: of another pid namespace"),
    ):
        data[namespace : namespace + 8] = inode.to_bytes(8, "little")
        path.write_bytes(data)
        recording = open_recording([run])
        assert recording.text(int(recording.tables["processes"]["state"][0])) == said


@pytest.mark.parametrize("form", [gzip, lzma])
def test_a_compressed_export_is_read_as_the_export_itself(tmp_path: Path, form: ModuleType) -> None:
    data = gzip.decompress((GPU_DATA / "nsys_saturated.sqlite.gz").read_bytes())
    (plain_path := tmp_path / "x.sqlite").write_bytes(data)
    (packed := tmp_path / "x.packed").write_bytes(form.compress(data))
    one, other = open_recording([packed]), open_recording([plain_path])
    assert sniff(packed) == "nsys-sqlite-compressed" and one.calls.rows == other.calls.rows > 0
    assert one.source[0].path == str(packed)
    assert not list(fuzz.Path(tmp_path).glob("kvprobe-*"))


@pytest.mark.parametrize(("form", "times"), [(gzip, 100), (lzma, 400)])
def test_a_compressed_bomb_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch, form: ModuleType, times: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    with form.open(tmp_path / "x.packed", "wb") as file:
        file.write(b"SQLite format 3\0" + bytes(200 << 20))
    with pytest.raises(RecordingError, match=f"unpacks to more than {times} times"):
        open_recording([tmp_path / "x.packed"])
    assert not list((tmp_path / "t").iterdir())


def test_published_recordings_are_read_as_they_are_published() -> None:
    for packed in sorted((Path(__file__).parent / "public").glob("*/*.xz")):
        plain = public_recordings.folder() / packed.parent.name / packed.stem
        plain = plain if plain.exists() else plain.with_name(f"{packed.stem}.gz")
        if packed.stat().st_size < 500_000:
            one, other = open_recording([packed]), open_recording([plain])
            assert one.calls.rows == other.calls.rows and one.executions.rows == other.executions.rows > 0
        assert sniff(packed).startswith(sniff(plain)), packed


def test_damaged_and_cut_xz_is_as_damaged_and_cut_gzip(tmp_path: Path) -> None:
    whole = lzma.compress(gzip.decompress((GPU_DATA / "nsys_saturated.sqlite.gz").read_bytes()))
    (path := tmp_path / "x.sqlite.xz").write_bytes(whole[:5000] + bytes(100) + whole[5100:])
    with pytest.raises(RecordingError, match="cannot be unpacked \\(damaged xz data"):
        open_recording([path])
    text = lzma.compress(gzip.decompress((GPU_DATA / "kineto_saturated.json.gz").read_bytes()))
    (trace := tmp_path / "t.json.xz").write_bytes(text[: len(text) // 2])
    assert any("ends in the middle" in said for said in open_recording([trace]).incomplete)


def test_pieces_are_the_bytes_that_were_compressed_over_members_and_padding() -> None:
    data = bytes(range(256)) * 3000
    for form, module, padding in (("gzip", gzip, bytes(7)), ("xz", lzma, bytes(8))):
        packed = module.compress(data) + padding + module.compress(b"x" + data) + padding
        found = list(compressed.pieces(io.BytesIO(packed), form, 1000))
        assert b"".join(found) == data + b"x" + data and max(map(len, found)) <= 1000
        assert b"".join(compressed.pieces(io.BytesIO(packed + b"tail"), form, 1 << 20)) == data + b"x" + data
        with pytest.raises(EOFError, match=f"the {form} data ends in the middle"):
            list(compressed.pieces(io.BytesIO(packed[:-40]), form, 1 << 20))


def test_folders_are_looked_through_deeply(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    make_run(tmp_path / "a" / "run")
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("b/t.json", "b/c/x.sqlite.gz", "b/c/notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in expand_deeply(tmp_path)]
    assert sorted(found) == ["a/run", "b/c/x.sqlite.gz", "b/t.json"]


def test_an_error_is_one_line_and_steers_no_terminal() -> None:
    text = "a\x1b[2Jb\nc\u202e\x9b\x07"
    assert str(RecordingError(text)) == plain(text) == "a\ufffd[2Jb c\ufffd\ufffd\ufffd"


def test_a_table_whose_name_is_no_text_is_a_damaged_export(tmp_path: Path) -> None:
    db = sqlite3.connect(path := tmp_path / "x.sqlite")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    db.commit()
    db.close()
    path.write_bytes(path.read_bytes().replace(b"StringIds", b"String\xff\xfes"))
    with pytest.raises(RecordingError) as error:
        open_recording([path])
    assert "\n" not in str(error.value)


def test_executions_without_a_single_call_are_diagnosed(tmp_path: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pinned -> Device)",
            "ts": 10 * i,
            "dur": 5,
            "pid": 0,
            "tid": 7,
            "args": {"device": 0, "stream": 7, "bytes": 1 << 20, "correlation": i},
        }
        for i in range(40)
    ]
    (path := tmp_path / "x.json").write_text(json.dumps({"traceEvents": events}))
    assert not fuzz.judge(path)[0]


def test_the_program_itself_reads_mutants(capsys) -> None:
    assert fuzz.main(["3", "ring"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in said] == [["ring", "3", "mutants,"], ["all", "3", "mutants,"]]
    assert all(line.endswith("0 failures") for line in said)


def test_a_crash_a_hang_and_an_unexpected_error_are_told_and_reading_goes_on(monkeypatch) -> None:
    """The fuzzer itself."""
    real = fuzz.read
    reads = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))  # also by the worker that follows one that crashed

    def read(inputs: list[Path], fallback: bool = False) -> object:
        reads.value += 1
        if reads.value == 20:
            raise KeyError("nobody caught it")
        if reads.value == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        while reads.value == 35:
            signal.pause()
        return real(inputs, fallback)

    monkeypatch.setattr(fuzz, "read", read)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    tally = fuzz.run("summary", 60)
    said = [wrong.splitlines()[-1] for _, wrong in tally.wrong]
    assert any("KeyError" in line for line in said) and any("signal 9" in line for line in said)
    assert any("took more than 1 s" in wrong for _, wrong in tally.wrong)
    assert tally.different > 50


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("run.tar.gz", "tar -xf"),
        ("run.tgz", "tar -xf"),
        ("run.tar", "tar -xf"),
        ("run.tar.xz", "tar -xf"),
        ("packed", "tar -xf"),
        ("run.zip", "unzip"),
        ("1.kvp.gz", "gunzip"),
        ("1.kvp.xz", "unxz"),
        ("trace.json.bz2", "bunzip2"),
    ],
)
def test_what_is_packed_is_refused_with_how_to_unpack_it(run: Path, tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    if how == "tar -xf":
        form = {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}.get(path.suffix, "w:gz" if name == "packed" else "w")
        with tarfile.open(path, form) as archive:
            archive.add(run, "run")
    elif how == "unzip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(run / "run.json")
    else:
        (ring,) = run.glob("*.kvp")
        compress = {"gunzip": gzip, "unxz": lzma, "bunzip2": bz2}[how].compress
        path.write_bytes(compress(ring.read_bytes() if how != "bunzip2" else b'{"traceEvents":[]}'))
    with pytest.raises(RecordingError, match=rf": kvprobe does not unpack this: unpack it with {how} and pass the "):
        sniff(path)
