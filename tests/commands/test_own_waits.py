"""A command that makes its own copies notes how long its threads waited for a CPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvprobe.commands._own_waits import own_waits
from kvprobe.instrument import cpu_waits
from kvprobe.probe import ring
from kvprobe.probe.cpu_time import ThreadTime
from kvprobe.probe.recorder import Recorder
from kvprobe.recordings.kvprobe_run import read


def test_waits_of_an_engines_threads_become_those_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's count is played: it grows between any two looks, and slow calls come in."""
    counted = iter(range(10**9))
    monkeypatch.setattr(cpu_waits, "thread_time", lambda *_: ThreadTime(0, next(counted) * 5_000_000))
    me, looked = threading.get_native_id(), threading.Semaphore(0)
    real = ring.read_ring

    def with_a_slow_call(path: Path, **how: bool) -> ring.RingSnapshot:
        found = real(path, **how)
        found.sections = [ring.ThreadSection(0, tid=me, slow_head=next(counted))]
        looked.release()
        return found

    monkeypatch.setattr(ring, "read_ring", with_a_slow_call)
    recorder = Recorder("copies")
    try:
        with own_waits(recorder.path) as waits:
            for _ in range(4):
                looked.acquire()
        monkeypatch.undo()
        recording = read(recorder.path)
    finally:
        recorder.close()
    waits.add_to(recording)
    noted = recording.cpu_waits
    assert noted.rows >= 2
    assert set(noted["thread"].tolist()) == {me}
    assert (noted["waited_ns"] >= 5_000_000).all() and (noted["end_ns"] > noted["start_ns"]).all()


def test_where_nothing_waited_the_table_is_empty() -> None:
    recorder = Recorder("copies")
    try:
        with own_waits(recorder.path) as waits:
            pass
        recording = read(recorder.path)
    finally:
        recorder.close()
    waits.add_to(recording)
    assert recording.cpu_waits.rows == 0
