"""What is missing of a run is seen: a ring file cut, wiped or gone makes the verdict undecided, and hides no red."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.errors import RecordingError
from kvprobe.native.library import Record, core
from kvprobe.probe.ring import FILE, HEADER_BYTES, read_ring
from kvprobe.recordings import open_recording
from kvprobe.runfolder import packed
from kvprobe.runfolder.folder import RunFolder

CALLS = 200


def ring(path: Path, took_ns: int = 1000, close: bool = True) -> int:
    """A ring file of copies, written by a process of its own; returns its pid."""

    def work() -> None:
        lib = core()
        assert lib.kvp_ring_open(os.fsencode(path), b"interposer", None) == 0
        start = lib.kvp_now_ns()
        for i in range(CALLS):
            record = Record(
                start_ns=start + i * 10_000_000, dur_ns=took_ns, stream=7, bytes=64, call=1, direction=0x21, count=1
            )
            lib.kvp_ring_write(ctypes.byref(record), 1)
        if close:
            lib.kvp_ring_close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0 and process.pid is not None
    return process.pid


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run of three processes."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    folder.mkdir()
    pids = [ring(folder / f"{name}.kvp") for name in ("100-1", "200-1", "300-1")]
    files = RunFolder(folder)
    files.write_run({"command": ["server"], "realtime_ns": 10**18, "monotonic_ns": 1, "pid": pids[0]})
    finish(folder)
    return folder


def finish(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in RunFolder(folder).rings()}
    RunFolder(folder).write_end({"t_ns": 10**15, "status": 0, "warnings": [], "rings": sizes})


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(kvprobe: Callable[..., tuple[int, str, str]]) -> Said:
    """Exit code of a command, and all that it printed."""

    def run(*words: object) -> tuple[int, str]:
        code, out, err = kvprobe(*words)
        return code, out + err

    return run


def wipe(path: Path, first: int, last: int | None = None) -> None:
    with path.open("r+b") as file:
        end = path.stat().st_size if last is None else last
        for at in range(first, end, 1 << 20):
            file.seek(at)
            file.write(bytes(min(1 << 20, end - at)))


def unknown_end(path: Path) -> None:
    path.unlink()
    ring(path, close=False)


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "empty": cut(0),
    "shorter than its header": cut(2000),
    "its header alone": cut(HEADER_BYTES),
    "its totals cut off": cut(2 * HEADER_BYTES),
    "its newest calls cut off": cut(300_000),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "wiped": lambda path: wipe(path, 0),
    "wiped behind its header": lambda path: wipe(path, HEADER_BYTES),
    "its totals wiped": lambda path: wipe(path, 2 * HEADER_BYTES, 3 * HEADER_BYTES),
    "its calls wiped": lambda path: wipe(path, 2 * HEADER_BYTES + 128 * 1152, 3 * HEADER_BYTES + 128 * 1152),
    "its end not known": unknown_end,
}


def test_a_whole_run_is_healthy(said: Said, whole: Path) -> None:
    assert not open_recording(whole).incomplete
    assert said("check", "--no", "saturation", whole)[0] == 0


@pytest.mark.parametrize("how", DAMAGE)
def test_every_command_says_that_a_ring_file_is_missing(said: Said, whole: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGE[how](folder / "200-1.kvp")
    assert open_recording(folder).incomplete
    code, text = said("check", "--no", "saturation", folder)
    assert code == 1 and "Undecided: " in text
    assert said("triage", folder)[1].splitlines()[1].startswith("undecided")
    assert "Undecided: " in said("stats", folder)[1]
    code, text = said("diff", whole, folder)
    assert (code == 1 and "cannot be told" in text) or "ndecided" in text
    assert "ndecided" in said("report", folder, "-o", tmp_path / "r.html")[1]


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_red_in_one_process_stays_red(said: Said, whole: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "100-1.kvp").unlink()
    ring(folder / "100-1.kvp", took_ns=5_000_000)
    finish(folder)
    DAMAGE[how](folder / "200-1.kvp")
    code, text = said("check", "--max-call", "1ms", folder)
    assert code == 1 and "FAIL  max-call" in text


def test_a_process_without_a_ring_file_is_said(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "not-recorded-77-28").mkdir()
    assert any("process 77" in line for line in open_recording(folder).incomplete)


# ---- short processes, which share a file -----------------------------------------------------------------------------


def test_packed_files_say_what_they_said_before(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", "--sparse=always", whole, folder], check=True)
    before = open_recording(folder)
    taken = packed.add(folder / packed.NAME, sorted(folder.glob("*.kvp")))
    assert len(taken) == 3 and not list(folder.glob("*.kvp"))
    finish(folder)
    after = open_recording(folder)
    assert not after.incomplete
    for name, table in before.tables.items():
        for column in table.columns:
            assert (table[column] == after.tables[name][column]).all(), (name, column)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.999])
def test_a_pack_that_was_cut_off_is_seen(whole: Path, tmp_path: Path, part: float) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", "--sparse=always", whole, folder], check=True)
    packed.add(folder / packed.NAME, sorted(folder.glob("*.kvp"))[1:])
    finish(folder)
    pack = folder / packed.NAME
    os.truncate(pack, int(pack.stat().st_size * part))
    assert open_recording(folder).incomplete
    assert 1 <= open_recording(folder).processes.rows <= 2  # those that lie whole in front of the cut


def test_a_file_that_lies_beside_its_pack_is_read_once(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", "--sparse=always", whole, folder], check=True)
    packed.add(folder / packed.NAME, sorted(folder.glob("*.kvp")))
    shutil.copy(whole / "100-1.kvp", folder)
    assert open_recording(folder).processes.rows == 3


def test_a_pack_of_anything_is_an_error_of_one_line(tmp_path: Path) -> None:
    pack = tmp_path / packed.NAME
    for entry in (
        b"KVPE",
        b"KVPE" + (1 << 31).to_bytes(4, "little") * 2,
        b"KVPE" + (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"{}x",
    ):
        pack.write_bytes(entry)
        with pytest.raises(RecordingError) as error:
            list(packed.opened(pack))
        assert "\n" not in str(error.value) and str(pack) in str(error.value)


def test_processes_without_room_count_their_calls_together(tmp_path: Path) -> None:
    path = tmp_path / "no-room.kvp"

    def work() -> None:
        lib = core()
        assert lib.kvp_ring_open_shared(os.fsencode(path), b"interposer") == 0
        for _ in range(10):
            record = Record(start_ns=1, dur_ns=5, stream=7, bytes=64, call=1, direction=1, count=1)
            lib.kvp_ring_write(ctypes.byref(record), 1)
        lib.kvp_ring_close()
        os._exit(0)

    started = [multiprocessing.get_context("fork").Process(target=work) for _ in range(8)]
    for one in started:
        one.start()
    for one in started:
        one.join()
        assert one.exitcode == 0
    assert path.stat().st_size == HEADER_BYTES >= FILE.itemsize
    shared = read_ring(path)
    assert shared.sharers == 8 and shared.calls() == {"cudaMemcpyAsync": (80, 80, 80 * 64)}
    RunFolder(tmp_path).write_run({"command": ["x"]})
    finish(tmp_path)
    recording = open_recording(tmp_path)
    assert recording.totals["calls"].tolist() == [80] and recording.totals["dur_ns"].tolist() == [400]
    assert any("8 processes" in line for line in recording.incomplete)
