"""The guard of a process refuses every act that is more than reading, and reading goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ACTS = {
    "open for writing": "open('new', 'w')",
    "open for appending": "open('there', 'a')",
    "open for both": "open('there', 'r+b')",
    "os.open": "os.open('new', os.O_CREAT | os.O_RDONLY)",
    "path": "pathlib.Path('new').touch()",
    "mkdir": "os.mkdir('new')",
    "temporary": "tempfile.TemporaryDirectory()",
    "temporary file": "tempfile.TemporaryFile()",
    "remove": "os.remove('there')",
    "rename": "os.rename('there', 'new')",
    "replace": "os.replace('there', 'new')",
    "link": "os.link('there', 'new')",
    "symlink": "os.symlink('there', 'new')",
    "chmod": "os.chmod('there', 0)",
    "truncate": "os.truncate('there', 0)",
    "utime": "os.utime('there', (0, 0))",
    "rmtree": "shutil.rmtree('folder')",
    "copy": "shutil.copy('there', 'new')",
    "subprocess": "subprocess.run(['touch', 'new'])",
    "shell": "os.system('touch new')",
    "spawn": "os.posix_spawn('/bin/touch', ['touch', 'new'], {})",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/touch', ['touch', 'new'])",
    "kill": "os.kill(os.getppid(), 0)",
    "connect": "socket.create_connection(('127.0.0.1', 9))",
    "datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "bind": "socket.socket(socket.AF_UNIX).bind('new')",
    "name service": "socket.getaddrinfo('example.invalid', 80)",
    "database": "sqlite3.connect('new')",
}
PROGRAM = """
import os, pathlib, shutil, socket, sqlite3, subprocess, sys, tempfile
from kvprobe.agents.guard import Guard, RefusedError
tempfile.gettempdir()
Guard().install()
for act in sys.argv[1:]:
    try:
        eval(act)
    except RefusedError as error:
        print("refused", error)
    else:
        print("done", act)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "there").write_text("here")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    return tmp_path


def said_by(program: str, folder: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_every_act_is_refused_and_nothing_is_changed(folder):
    before = {path: path.lstat() for path in folder.rglob("*")}
    said = said_by(PROGRAM, folder, *ACTS.values())
    assert [line.split()[0] for line in said] == ["refused"] * len(ACTS), said
    assert {path: path.lstat() for path in folder.rglob("*")} == before


def test_reading_goes_on(folder):
    reads = ["open('there').read()", "open(os.devnull, 'w')", "os.listdir('.')", "pathlib.Path('there').read_bytes()",
             "__import__('wave')", "os.stat('there')", "list(os.walk('.'))"]  # fmt: skip
    assert [line.split()[0] for line in said_by(PROGRAM, folder, *reads)] == ["done"] * len(reads)


CONVERTING = """
import os, pathlib, shutil, subprocess, sys, tempfile
from kvprobe.agents.guard import Guard, RefusedError
folder = tempfile.tempdir = os.path.realpath(sys.argv[1])
Guard(pathlib.Path(folder), frozenset(["/bin/true"])).install()
with tempfile.TemporaryDirectory() as inner:
    pathlib.Path(inner, "file").write_text("x")
    os.mkdir(os.path.join(inner, "deeper"))
assert os.listdir(folder) == ["link"]
subprocess.run(["/bin/true"], check=True)
for act in (
    lambda: pathlib.Path(folder, "..", "beside").write_text("x"),
    lambda: pathlib.Path(folder, "link", "beside").write_text("x"),
    lambda: pathlib.Path(folder + "-beside").write_text("x"),
    lambda: os.mkdir("beside"),
    lambda: subprocess.run(["true"]),
    lambda: subprocess.run(["/bin/touch", "beside"]),
):
    try:
        act()
    except RefusedError:
        print("refused")
"""


def test_with_a_folder_for_temporary_files_only_these_are_written(folder):
    (temporary := folder / "temporary").mkdir()
    (temporary / "link").symlink_to(folder)
    assert said_by(CONVERTING, folder, str(temporary)) == ["refused"] * 6
    assert not [path for path in folder.rglob("*") if "beside" in path.name]
