"""A run folder in which somebody else has put something, and a program whose name steers terminals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.probe.processes import alive
from kvprobe.runfolder.folder import RunFolder
from tests.commands.watched import COPIES, KVPROBE, observer_of, run_watched, wait_for_end


@pytest.mark.parametrize("name", ["end.json", "stacks.jsonl", "processes.jsonl", "report.html"])
def test_a_link_that_is_planted_while_it_runs_is_never_written_through(tmp_path, name):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("untouched")
    plant = f"import os\npath = {str(folder / name)!r}\nif os.path.lexists(path): os.remove(path)\n"
    plant += f"os.symlink({str(victim)!r}, path)\n"
    done = run_watched(folder, sys.executable, "-c", COPIES + plant + "copies(3)\n")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    deadline = time.monotonic() + 60  # a hang of the observer fails the test; how long it takes is not asked
    while (pid := observer_of(folder)) and alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert victim.read_text() == "untouched"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    done = run_watched(folder, sys.executable, "-c", "print('ran')")
    assert done.returncode == 2 and "ran" not in done.stdout
    assert done.stderr.count("\n") == 1 and str(folder) in done.stderr
    assert not list(folder.iterdir())


def test_a_program_named_with_escapes_reaches_no_terminal_as_such(tmp_path):
    name = tmp_path / "evil\x1b]0;title\x07\x1b[31m"
    name.symlink_to("/bin/sleep")
    program = COPIES + f"copies(3)\nimport subprocess\nsubprocess.run([{str(name)!r}, '0.01'], env={{}}, check=True)\n"
    done = run_watched(tmp_path / "run", sys.executable, "-c", program)
    end = wait_for_end(tmp_path / "run")
    shown = run_shown(tmp_path / "run")
    for text in (done.stdout, done.stderr, shown, *end["warnings"], (tmp_path / "run" / "observer.log").read_text()):
        assert "\x1b" not in text and "\x07" not in text


def test_arguments_that_are_not_utf8_are_written_as_far_as_they_are(tmp_path):
    folder = tmp_path / "run"
    done = run_watched(
        folder, sys.executable, "-c", COPIES + "copies(3)\nprint(ascii(sys.argv[1]))", os.fsdecode(b"a\xff")
    )
    assert (done.returncode, done.stdout) == (0, "'a\\udcff'\n")
    wait_for_end(folder)
    run = RunFolder(folder)
    assert run.run()["command"][-1] == "a?"
    assert run.checkins()[0]["argv"][-1] == "a?"
    assert "a?" in next(run.ended())["command"]
    assert run.damaged == []


def run_shown(folder: Path) -> str:
    done = subprocess.run([*KVPROBE, "triage", str(folder)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
