"""Which processes of a run the interposer could not reach, and why; with real processes, seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.instrument.process_tracking import ProcessTracker
from kvprobe.native import build
from kvprobe.probe import processes
from kvprobe.runfolder.folder import RunFolder

# A child that a scan meets between its fork and its exec has its parent's environment still.
EXEC = "(read go < go; exec env -i sleep 1000) & echo $!; wait"


def scan_until(tracker: ProcessTracker, true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        tracker.scan()


def test_a_process_that_was_met_before_its_exec_is_looked_at_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    run = tmp_path / "run"
    run.mkdir()
    environment = {**os.environ, "KVPROBE_RUN": str(run), "LD_PRELOAD": str(build.LIB / "libkvprobe_interpose.so")}
    environment["KVPROBE"] = "off"  # nobody completes what the shell hands on
    command = subprocess.Popen(["sh", "-c", EXEC], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    child = int(command.stdout.readline())
    try:
        tracker = ProcessTracker(RunFolder(run), command.pid, attached=False, command="sh")
        scan_until(tracker, lambda: child in {pid for pid, _ in tracker._known})
        assert not tracker.unseen
        (tmp_path / "go").write_text("go\n")
        scan_until(tracker, lambda: bool(tracker.unseen))
        assert {reason: list(pids) for reason, pids in tracker.unseen.items()} == {
            "their environment was emptied or replaced": [child]
        }
    finally:
        os.kill(child, 9)
        command.communicate()


NAMED = """
import ctypes, sys
fields = open("/proc/self/stat").read().rpartition(") ")[2].split()
begin, end = int(fields[45]), int(fields[46])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, b"VLLM::EngineCore", 16)
print("named", flush=True)
sys.stdin.read()
"""


def test_a_worker_has_the_name_that_it_gave_itself(tmp_path: Path) -> None:
    words = [sys.executable, "-c", NAMED]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        tracker = ProcessTracker(RunFolder(tmp_path), worker.pid, attached=False, command="python")
        tracker.scan()
        assert worker.stdout is not None and worker.stdout.readline() == "named\n"
        tracker.scan()
        worker.communicate()
    tracker.reap()
    (line,) = RunFolder(tmp_path).ended()
    assert line["command"] == "VLLM::EngineCore"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_a_process_of_another_user_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    environment = {**os.environ, "KVPROBE_RUN": str(run), "LD_PRELOAD": str(build.LIB / "libkvprobe_interpose.so")}
    words = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "1000"]
    reason = "they run as another user, who may not write into the run folder"
    command = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *words], env=environment | {"KVPROBE": "off"})
    try:
        tracker = ProcessTracker(RunFolder(run), command.pid, attached=False, command="sh")
        scan_until(tracker, lambda: "sleep 1000" in tracker.unseen.get(reason, {}).values())
    finally:
        for child in processes.descendants(command.pid):
            os.kill(child, 9)
        command.wait()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_process_in_a_sandbox_that_cannot_write_into_the_run_folder_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    environment = {**os.environ, "KVPROBE_RUN": str(run), "LD_PRELOAD": str(build.LIB / "libkvprobe_interpose.so")}
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec sleep 1000'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", str(run)]
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("namespaces are not permitted here")
    reason = "the run folder cannot be written where they run"  # met as sh and as mount, which is setuid, before
    command = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *words], env=environment | {"KVPROBE": "off"})
    try:
        tracker = ProcessTracker(RunFolder(run), command.pid, attached=False, command="sh")
        scan_until(tracker, lambda: "sleep 1000" in tracker.unseen.get(reason, {}).values())
    finally:
        for child in processes.descendants(command.pid):
            os.kill(child, 9)
        command.wait()


@pytest.mark.parametrize("environment", [{}, {"ONE": "1"}])
def test_an_environment_that_is_empty_is_told_from_none(environment: dict[str, str]) -> None:
    process = subprocess.Popen(["sleep", "1000"], env=environment)
    try:
        end = time.monotonic() + 60
        while processes.environment(process.pid) is None:  # it is still in the middle of its exec
            assert time.monotonic() < end
        assert processes.environment(process.pid) == environment
        assert Path(processes.program(process.pid)).exists()
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
        assert processes.environment(process.pid) is None and not processes.program(process.pid)
        process.wait()
