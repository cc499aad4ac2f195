"""What lies in a run folder is written by kvprobe/runfolder alone: no other file of kvprobe opens one to write.

Read from the code: whoever writes a file stands in the list below, with what it writes. A file of a run folder has no
place in that list.
"""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

import kvprobe
from kvprobe.runfolder import files
from kvprobe.runfolder.folder import RunFolder

PACKAGE = Path(kvprobe.__file__).parent
ELSEWHERE = {
    "cli.py": "the null device",
    "commands/_speaking.py": "the null device",
    "commands/_watching.py": "the null device",
    "commands/demo.py": "a page: by reporting/page.py",
    "commands/export.py": "an export: by recordings/parquet.py and perfetto.py",
    "commands/run.py": "the interposer itself, where its path has a space: by runfolder/files.py",
    "commands/try_.py": "a trial's folder, in which run folders lie: by runfolder/files.py",
    "cuda/kernels.py": "the cache of compiled kernels",
    "instrument/carried/kvprobe_startup.py": "check-ins, states and stacks: it can import nothing of kvprobe",
    "instrument/finishing.py": "the user's terminal",
    "instrument/metrics.py": "the registry of metrics that a server serves",
    "instrument/published.py": "the cache of servers' published packages",
    "launchqueue/calibration.py": "the cache of calibrations: by runfolder/files.py",
    "offload/method_cache.py": "the cache of measured methods and coded copies: by runfolder/files.py",
    "probe/flight.py": "a recording that is kept, a run folder itself: by runfolder/files.py",
    "recordings/parquet.py": "an export",
    "recordings/perfetto.py": "an export",
    "recordings/nsys_sqlite_compressed.py": "a temporary file",
    "reporting/page.py": "a page, which others may read where the user's umask lets them",
}
OF_PATHS = {"write_text", "write_bytes", "touch", "copyfile", "copy2", "copytree", "move"}
TEMPORARY = {"mkstemp", "NamedTemporaryFile"}
OF_FILES = {"append", "copy", "created", "open_append", "write"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"}


def writes(call: ast.Call) -> bool:
    """Whether a call makes or changes a file, as far as its words tell."""
    if isinstance(call.func, ast.Attribute):
        name, of = call.func.attr, getattr(call.func.value, "id", "")
        known = name in OF_PATHS | TEMPORARY or (of == "files" and name in OF_FILES)
    else:  # a name that was imported; `append` and `write` would say nothing by themselves
        name = getattr(call.func, "id", "")
        known = name in OF_PATHS | TEMPORARY | OF_FILES
    if known:
        return True
    if name != "open":
        return False
    words = [word for argument in (*call.args, *(one.value for one in call.keywords)) for word in ast.walk(argument)]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    flags = {word.attr for word in words if isinstance(word, ast.Attribute)}
    return bool(flags & FLAGS) or any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)


def writers(root: Path) -> dict[str, list[int]]:
    """The lines of each file below `root` that write one."""
    found: dict[str, list[int]] = {}
    for path in root.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if lines := [call.lineno for call in calls if writes(call)]:
            found[path.relative_to(root).as_posix()] = lines
    return found


def test_nobody_else_writes_a_file_of_a_run_folder():
    found = {name: lines for name, lines in writers(PACKAGE).items() if not name.startswith(("runfolder/", "native/"))}
    assert found.keys() == ELSEWHERE.keys(), {name: found.get(name) for name in found.keys() ^ ELSEWHERE.keys()}
    assert not writers(PACKAGE.parent / "patches")


@pytest.mark.parametrize(
    "line",
    [
        "(folder / 'run.json').write_text('{}')",
        "open(folder / 'run.json', 'w')",
        "(folder / 'device.jsonl').open('ab')",
        "os.open(folder / 'observer.log', os.O_WRONLY | os.O_CREAT, 0o600)",
        "(folder / 'detached').touch()",
        "shutil.copyfile(source, folder / 'run.json')",
        "files.append(folder / 'device.jsonl', b'')",
    ],
)
def test_a_writer_is_seen(tmp_path, line):
    (tmp_path / "one.py").write_text(line)
    assert writers(tmp_path) == {"one.py": [1]}


@pytest.mark.parametrize("line", ["open(path)", "path.open('rb')", "rows.append(1)", "file.write(b'')", "table.copy()"])
def test_who_only_reads_is_no_writer(tmp_path, line):
    (tmp_path / "one.py").write_text(line)
    assert writers(tmp_path) == {}


def test_whatever_the_umask_its_files_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = RunFolder(tmp_path)
        folder.write_run({"pid": 1})
        folder.write_end({"t_ns": 1})
        folder.write_outcome(["done"])
        folder.write_observer(1)
        folder.write_inner(1, tmp_path)
        folder.mark_detached()
        folder.append_ended({"pid": 1})
        folder.append_stacks(1, {"pid": 1})
        folder.append_cpu_wait(1, {"thread": 1})
        folder.append_sample({"t_ns": 1})
        folder.ask_for_stacks(1)
        os.close(folder.open_log())
        files.copy(tmp_path / "run.json", tmp_path / "copy.json")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 13 and set(modes.values()) == {0o600}, modes


def test_a_copy_holds_the_same_bytes_and_no_more_room(tmp_path):
    whole = b"\0" * (1 << 20) + b"records" + b"\0" * (1 << 20)
    (tmp_path / "one").write_bytes(whole)
    files.copy(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == whole
    with pytest.raises(FileExistsError):
        files.copy(tmp_path / "one", tmp_path / "two")
