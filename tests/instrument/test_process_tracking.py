"""Which processes of a run the interposer could not reach, and why; with real processes, seen from outside."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.instrument.process_tracking import ProcessTracker
from kvprobe.native import build
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


@pytest.mark.parametrize("environment", [{}, {"ONE": "1"}])
def test_an_environment_that_is_empty_is_told_from_none(environment: dict[str, str]) -> None:
    from kvprobe.probe import processes

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
