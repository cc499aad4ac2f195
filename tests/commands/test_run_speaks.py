"""`kvprobe run` says where it records and what it found; exit code, signals and output stay the command's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.commands import _speaking
from kvprobe.native import build

from .watched import COPIES, KVPROBE, clean_environment


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    build.build()


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVPROBE, "run", "-o", str(folder), "--", *map(str, words)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_folder_comes_first_and_what_was_found_before_the_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(folder, sys.executable, "-c", COPIES + "copies(30)\nprint('mine')")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert lines[0] == f"kvprobe: recording into {folder}"
    assert lines[-1].startswith(f"kvprobe: report in {folder}/report.html")
    assert len(lines) > 2
    assert all(line.startswith("kvprobe: ") for line in lines)
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("code", [0, 7, 255])
def test_the_exit_code_is_the_commands(tmp_path: Path, code: int) -> None:
    assert run(tmp_path / "run", "sh", "-c", f"exit {code}").returncode == code


def test_it_dies_of_the_signal_that_killed_the_command(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == -signal.SIGSEGV
    assert "kvprobe: recording into" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_handed_on_once(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, time\ngot = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, frame: got.append(number))\n"
        "print('ready', flush=True)\nwhile not got: time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint([int(n) for n in got], flush=True)\nraise SystemExit(9)\n"
    )
    process = subprocess.Popen(
        [*KVPROBE, "run", "-o", tmp_path / "run", "--", sys.executable, program],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == f"[{int(number)}]\n"
    assert process.stdout.read() == ""  # its end comes with the command's, not with the report's
    assert process.wait() == 9


def test_what_the_command_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "program.sh"
    program.write_text("sleep 300 >/dev/null 2>&1 &\necho $! > " + str(tmp_path / "pid") + "\n")
    done = run(tmp_path / "run", "sh", program)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.returncode == 0
    assert f"the report will be in {tmp_path / 'run'}" in done.stderr
    while not (tmp_path / "run" / "outcome.txt").exists():
        time.sleep(0.1)


@pytest.fixture
def observer() -> Iterator[subprocess.Popen[str]]:
    """Stands for the observer: it writes its files into the folder that it is told, and ends."""
    script = "read folder; echo report > $folder/outcome.txt; echo {} > $folder/end.json; exec sleep 0.1"
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_an_observer_that_is_late_is_waited_for(
    tmp_path: Path, observer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a busy machine: it has not seen the command's end yet, and nothing is left running."""
    monkeypatch.setattr(_speaking, "LEFT_RUNNING_S", 0.0)
    monkeypatch.setattr(_speaking, "LATE_S", 120.0)
    looked, own = threading.Event(), _speaking._left_running
    monkeypatch.setattr(_speaking, "_left_running", lambda folder: (own(folder), looked.set())[0])
    saying = threading.Thread(target=_speaking.say_outcome, args=(tmp_path, observer.pid))
    saying.start()
    assert looked.wait(60)
    assert observer.stdin is not None
    observer.stdin.write(f"{tmp_path}\n")
    observer.stdin.flush()
    saying.join(120)
    assert capsys.readouterr().err == "kvprobe: report\n"


def test_an_observer_of_what_was_left_running_is_not(
    tmp_path: Path, observer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_speaking, "LEFT_RUNNING_S", 0.0)
    monkeypatch.setattr(_speaking, "LATE_S", 3600.0)
    left = subprocess.Popen(["sleep", "1000"], env=clean_environment(KVPROBE_RUN=str(tmp_path)))
    try:
        while not _speaking._left_running(tmp_path):  # it is still in the middle of its exec
            assert left.poll() is None
        _speaking.say_outcome(tmp_path, observer.pid)
    finally:
        left.kill()
        left.wait()
    assert "the report will be in" in capsys.readouterr().err


def test_in_place_the_command_has_the_pid_that_was_started(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*KVPROBE, "run", "--exec", "-o", tmp_path / "run", "--", "sh", "-c", "echo $$"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate()[0] == f"{process.pid}\n"


def test_a_command_that_cannot_be_started_has_a_shells_exit_code(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/nowhere/interpreter\n")
    bad.chmod(0o755)
    done = run(tmp_path / "run", bad)
    assert done.returncode == 126
    assert "kvprobe: " in done.stderr and "Traceback" not in done.stderr


INTERRUPTED = """
import os, signal, sys
from kvprobe.commands._speaking import Command
command = Command(lambda observer: os.execvp("sleep", ["sleep", "0"]))
os.kill(command.pid, signal.SIGINT)  # it waits for its observer, with signals held back
command.go(1)
sys.stderr.write(f"{command.wait()}\\n")
"""


def test_an_interrupt_between_fork_and_exec_ends_the_command_as_one_later() -> None:
    words = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stderr == f"{-signal.SIGINT}\n"


def test_no_file_of_a_run_folder_is_open_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = """
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.offload import BlockPool, OffloadEngine
runtime = find_runtime("host")
gpu = BlockPool(runtime, [device_region(runtime, 4 * 4096)], 4096)
cpu = BlockPool(runtime, [host_region(runtime, 4 * 4096)], 4096)
with OffloadEngine(runtime, gpu, cpu) as engine:
    engine.load(range(4), range(4)).wait()
"""
    command = [*KVPROBE, "run", "--nvml", "-o", str(folder), "--", sys.executable, "-c", engine]
    environment = clean_environment(XDG_CACHE_HOME=str(tmp_path))
    before = os.umask(0o022)
    try:
        subprocess.run(command, env=environment, capture_output=True, check=True)
    finally:
        os.umask(before)
    there = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {"run.json", "end.json", "outcome.txt", "report.html", "observer.log", "device.jsonl"} <= set(there)
    assert any(name.startswith("queue-") for name in there)
    assert {name: oct(mode) for name, mode in there.items() if mode != 0o600} == {}


mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@mounts
def test_in_a_folder_that_cannot_be_written_it_records_into_the_temporary_one(tmp_path: Path) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", here], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        done = subprocess.run(
            [*KVPROBE, "run", "--", "sh", "-c", "exit 7"],
            cwd=here,
            env=clean_environment(TMPDIR=str(elsewhere)),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run(["umount", "-l", here], check=False)
    assert done.returncode == 7
    under = elsewhere / f".kvprobe-{os.geteuid()}"
    first, second = done.stderr.splitlines()[:2]
    assert first == f"kvprobe: {here} cannot be written (Read-only file system): recording under {under}"
    assert second.startswith(f"kvprobe: recording into {under}/kvprobe-sh-")


@mounts
def test_a_full_disk_is_named_at_the_end(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    fill = f"try: open({str(tmp_path / 'fill')!r}, 'wb', 0).write(bytes(1 << 20))\nexcept OSError: pass\n"
    try:
        done = run(tmp_path / "run", sys.executable, "-c", COPIES + "copies(30)\n" + fill)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=False)
    assert done.returncode == 0
    assert f"the disk of {tmp_path / 'run'} is full" in done.stderr and "Traceback" not in done.stderr
