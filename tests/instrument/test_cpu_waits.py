"""Waits for a CPU are noted once for each thread, however many ring files its process has."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvprobe.instrument import cpu_waits
from kvprobe.probe.cpu_time import ThreadTime
from kvprobe.probe.ring import RingSnapshot, ThreadSection
from kvprobe.runfolder.folder import RunFolder


def ring(producer: str, slow: int, begun: tuple[int, int, int] = (0, 0, 0)) -> RingSnapshot:
    """A ring file of this process in which this thread has had so many slow calls; when and how it began, ns."""
    none = np.zeros(128, np.uint64)
    section = ThreadSection(0, tid=threading.get_native_id(), slow_head=slow)
    section.begun_ns, section.begun_ran_ns, section.begun_waited_ns = begun
    said = {"producer": producer, "command": "", "rank": "", "state": "running", "clock": "", "slow_ns": 20_000}
    return RingSnapshot(
        "",
        os.getpid(),
        0,
        **said,
        start_monotonic_ns=0,
        start_realtime_ns=0,
        end_monotonic_ns=0,
        forks=0,
        over_count=none,
        over_bytes=none,
        over_dur_ns=none,
        sections=[section],
    )


def test_a_thread_of_an_engine_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_ms = iter(range(0, 100, 5))  # the kernel's count grows between any two looks
    monkeypatch.setattr(cpu_waits, "thread_time", lambda *_: ThreadTime(0, next(waited_ms) * 1_000_000))
    watcher = cpu_waits.CpuWaits(RunFolder(tmp_path).append_cpu_wait)
    for slow in (0, 1):
        for producer in ("interposer", "engine"):
            watcher.look_at(tmp_path / producer, ring(producer, slow))
    assert [line["waited_ns"] for line in told(tmp_path)] == [5_000_000]


def told(folder: Path) -> list[dict[str, int]]:
    """What was written."""
    file = folder / f"cpu-waits-{os.getpid()}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Looks:
    """A watcher whose clock and whose kernel's count go on as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = self.waited_ms = 0
        self._folder, self._watcher = folder, cpu_waits.CpuWaits(RunFolder(folder).append_cpu_wait)
        monkeypatch.setattr(cpu_waits, "thread_time", lambda *_: ThreadTime(0, self.waited_ms * 1_000_000))
        monkeypatch.setattr("time.monotonic_ns", lambda: self.now_ms * 1_000_000)

    def look(self, slow: int = 0, begun: tuple[int, int, int] = (0, 0, 0)) -> None:
        self._watcher.look_at(self._folder / "ring", ring("interposer", slow, begun))

    def quiet(self, ms: int, waited_of_twenty: int) -> None:
        """Looks every 20 ms for so long, without slow calls."""
        for _ in range(ms // 20):
            self.now_ms, self.waited_ms = self.now_ms + 20, self.waited_ms + waited_of_twenty
            self.look()

    def close(self) -> None:
        self._watcher.close()

    def spans(self) -> list[tuple[int, int, int]]:
        return [
            (*(line[name] // 1_000_000 for name in ("begin_ns", "end_ns", "waited_ns")),) for line in told(self._folder)
        ]


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    one = Looks(tmp_path, monkeypatch)
    one.look()
    return one


def test_a_thread_without_slow_calls_that_waits_is_told_of_once_a_second(looks: Looks) -> None:
    looks.quiet(2_500, waited_of_twenty=10)
    looks.close()
    assert looks.spans() == [(0, 1_000, 500), (1_000, 2_000, 500), (2_000, 2_500, 250)]


def test_a_thread_that_hardly_waits_is_not_told_of(looks: Looks) -> None:
    looks.quiet(2_500, waited_of_twenty=4)
    looks.close()
    assert not looks.spans()


def test_a_slow_call_has_a_line_of_its_own(looks: Looks) -> None:
    looks.quiet(100, waited_of_twenty=10)
    looks.now_ms, looks.waited_ms = looks.now_ms + 20, looks.waited_ms + 3
    looks.look(slow=1)
    looks.close()
    assert looks.spans() == [(0, 100, 50), (100, 120, 3)]


def test_what_a_thread_waited_before_the_first_look_is_told_from_its_first_call_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(tmp_path, monkeypatch)
    looks.now_ms, looks.waited_ms = 900, 600
    looks.look(slow=3, begun=(100_000_000, 0, 20_000_000))
    looks.close()
    assert looks.spans() == [(100, 900, 580)]
