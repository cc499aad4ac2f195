"""Stacks of threads that make calls, taken now and then: by the real py-spy, of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.instrument.stack_sampler import TRIES, StackSampler
from kvprobe.native import build
from kvprobe.probe.ring import RingSnapshot, ThreadSection
from kvprobe.recordings import open_recording
from tests.commands.watched import run_watched, wait_for_end
from tests.instrument.test_cpu_waits import ring as ring_file

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
PROGRAM = f"""
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(CORPUS)!r})
from device import Device

def prepare_batch(until_ns):
    while time.monotonic_ns() < until_ns:
        pass

samples = Path(os.environ["KVPROBE_RUN"], f"stack-samples-{{os.getpid()}}.jsonl")
threading.Thread(target=time.sleep, args=(3_600,), daemon=True).start()
d = Device(streams=1, events=8)
while not samples.exists() or samples.read_text().count("prepare_batch") < 3:
    for _ in range(8):
        prepare_batch(time.monotonic_ns() + 20_000_000)
        d.launch(3_000_000)
        d.sync(d.compute)
"""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    build.build()


def test_a_run_keeps_stacks_of_the_thread_that_makes_calls(tmp_path: Path) -> None:
    """What is said of them: tests/gpu_recordings/test_sampled_stacks.py."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_watched(tmp_path / "run", sys.executable, program, KVHOST_CLOCK="real", KVPROBE_MARKS="on")
    assert done.returncode == 0, done.stderr
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    table = recording.stack_samples
    (process,) = np.unique(table["process"])
    assert set(table["thread"].tolist()) == {int(recording.processes["pid"][process])}, "the other one only sleeps"
    stacks = [recording.text(int(one)) for one in table["stack"]]
    assert sum(stack.startswith(f"prepare_batch ({program}:") for stack in stacks) >= 3
    assert table["time_ns"].min() > recording.calls["start_ns"].min()


def ring(pid: int, *threads: tuple[int, int]) -> RingSnapshot:
    """What the ring file of a process shows: threads by kernel id, and the number of the newest call of each."""
    sections = [ThreadSection(number, tid, in_sequence=newest) for number, (tid, newest) in enumerate(threads)]
    return replace(ring_file("interposer", slow=0), pid=pid, sections=sections)


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end, "no stack came"
        time.sleep(0.02)


@pytest.fixture
def sleeper() -> Iterator[tuple[int, int, int]]:
    """A Python process of two threads, which sleep in functions of their own; with the kernel's ids of both."""
    code = (
        "import threading, time\n"
        "def first(): time.sleep(600)\n"
        "def second(): time.sleep(600)\n"
        "other = threading.Thread(target=second, daemon=True); other.start()\n"
        "print(threading.get_native_id(), other.native_id, flush=True)\n"
        "first()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first, second = map(int, process.stdout.readline().split())
    yield process.pid, first, second
    process.kill()
    process.communicate()


def test_only_threads_that_made_calls_are_written_and_only_once_for_each_look(sleeper: tuple[int, int, int]) -> None:
    pid, one, _ = sleeper
    lines: list[tuple[int, dict[str, Any]]] = []
    with StackSampler(lambda *line: lines.append(line)) as sampler:
        sampler.look_at("", ring(pid, (one, 1)))
        until(lambda: bool(lines))
        for _ in range(100):  # as the observer looks: no new call was made
            sampler.look_at("", ring(pid, (one, 1)))
            time.sleep(0.01)
        assert len(lines) == 1
        before = time.monotonic_ns()
        sampler.look_at("", ring(pid, (one, 2)))
        until(lambda: len(lines) == 2)
    for written, line in lines:
        assert written == pid
        assert [thread["thread"] for thread in line["threads"]] == [one]
        assert line["threads"][0]["frames"][0].startswith("first (")
    assert before < lines[1][1]["t_ns"] < time.monotonic_ns()


def test_a_process_without_python_keeps_no_other_from_being_looked_at(sleeper: tuple[int, int, int]) -> None:
    pid, one, _ = sleeper
    lines: list[tuple[int, dict[str, Any]]] = []
    process = subprocess.Popen(["sleep", "600"])
    try:
        with StackSampler(lambda *line: lines.append(line)) as sampler:
            for number in range(1, TRIES + 2):
                sampler.look_at("", ring(process.pid, (process.pid, number)))
                sampler.look_at("", ring(pid, (one, number)))
                until(lambda number=number: len(lines) >= number)  # type: ignore[misc]
    finally:
        process.kill()
        process.wait()
    assert {written for written, _ in lines} == {pid}


def test_a_line_that_cannot_be_written_ends_the_looks_and_nothing_else(sleeper: tuple[int, int, int]) -> None:
    pid, one, _ = sleeper
    asked: list[int] = []

    def refuses(written: int, line: dict[str, Any]) -> None:
        asked.append(written)
        raise OSError(28, os.strerror(28))

    with StackSampler(refuses) as sampler:
        sampler.look_at("", ring(pid, (one, 1)))
        until(lambda: bool(asked))
        for number in range(2, 60):
            sampler.look_at("", ring(pid, (one, number)))
            time.sleep(0.02)
    assert asked == [pid]
