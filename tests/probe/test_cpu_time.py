"""What the kernel counts of a thread's CPU is read as it says it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kvprobe.probe import cpu_time, stacks


def test_a_thread_that_runs_has_run() -> None:
    tid = threading.get_native_id()
    before = cpu_time.thread_time(os.getpid(), tid)
    assert before is not None
    after, end = before, time.monotonic() + 60
    while after.ran_ns == before.ran_ns and time.monotonic() < end:  # the kernel may count once a tick
        sum(range(1_000_000))
        after = cpu_time.thread_time(os.getpid(), tid)
        assert after is not None
    assert after.ran_ns > before.ran_ns and after.waited_ns >= before.waited_ns


def test_of_a_thread_that_is_gone_nothing_is_known() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert cpu_time.thread_time(os.getpid(), 2**22 + 1) is None
    assert cpu_time.throttled_ns(2**22 + 1) is None


@pytest.mark.parametrize(
    ("folder", "text", "ns"),
    [
        (".", "usage_usec 5\nnr_periods 2\nthrottled_usec 1234\n", 1_234_000),
        ("cpu", "nr_periods 40\nnr_throttled 36\nthrottled_time 2749339757\n", 2_749_339_757),
        ("cpu,cpuacct", "nr_periods 40\nthrottled_time 7\n", 7),
    ],
)
def test_the_quota_is_read_of_either_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, text: str, ns: int
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "cpu.stat").write_text(text)
    groups = tmp_path / "cgroup"
    groups.write_text(f"9:name=systemd:/\n1:{folder}:/some/where\n" if folder != "." else "0::/some/where\n")
    monkeypatch.setattr(cpu_time, "_GROUPS", tmp_path)
    monkeypatch.setattr(cpu_time, "_PROCESSES", tmp_path / "proc")
    (tmp_path / "proc" / "1").mkdir(parents=True)
    groups.rename(tmp_path / "proc" / "1" / "cgroup")
    assert cpu_time.throttled_ns(1) == ns


def test_a_process_without_python_has_no_stacks_to_take(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            with pytest.raises(stacks.NoPythonError):
                stacks.take(tmp_path, process.pid, process.pid, inside=False, timeout_s=60)
        finally:
            process.kill()
