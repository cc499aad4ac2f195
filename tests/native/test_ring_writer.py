"""The ring file's writer: totals stay exact and the writer's process is never harmed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvprobe.native import build
from kvprobe.probe import ring
from kvprobe.probe.ring import read_ring


@pytest.fixture(scope="module")
def writer(compile_c: Callable[..., Path]) -> Path:
    return compile_c("ring_writer", *(str(build.NATIVE / "src" / name) for name in ("ring.c", "clock.c", "secrets.c")))


def run(program: Path, *arguments: object) -> dict[str, int]:
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}


def test_a_clock_that_ran_ahead_comes_back_without_a_step_back(compile_c: Callable[..., Path]) -> None:
    done = subprocess.run([str(compile_c("clock_ahead"))], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "no counter":
        pytest.skip("this machine's counter is not used")
    ahead, after, back = map(int, done.stdout.split())
    assert ahead > 40_000 and abs(after) < 5_000 and not back


def test_the_reader_knows_every_call_of_the_header() -> None:
    header = (build.NATIVE / "src" / "kvp.h").read_text()
    calls = {int(i): (kind, name) for i, kind, name in re.findall(r"X\((\d+), (\w+), (\w+)\)", header)}
    assert calls == ring.CALLS


def test_totals_are_exact_with_many_threads_at_once(writer: Path, tmp_path: Path) -> None:
    said = run(writer, "plain", tmp_path / "a.kvp", 20000, 64)
    snapshot = read_ring(tmp_path / "a.kvp")
    assert snapshot.calls() == {"cudaMemcpyAsync": (said["written"], said["written"], said["written"] * 100)}
    assert snapshot.state == "closed" and snapshot.end_monotonic_ns > snapshot.start_monotonic_ns
    slots = snapshot.slots()
    assert (slots["histogram"].sum(axis=1) == slots["count"]).all()
    assert slots["slow"].sum() == 64 * 20 and slots["max_ns"].max() == 30000


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a CPU")
def test_a_section_says_when_its_thread_began_and_what_it_had_waited_for_a_cpu(writer: Path, tmp_path: Path) -> None:
    before = time.monotonic_ns()
    run(writer, "small", tmp_path / "a.kvp", 1000, 3)  # no thread ends before all have begun
    snapshot = read_ring(tmp_path / "a.kvp")
    assert len(snapshot.sections) == 3
    for section in snapshot.sections:
        assert before < section.begun_ns <= snapshot.end_monotonic_ns
        assert 0 <= section.begun_ran_ns + section.begun_waited_ns < section.begun_ns - before


def test_threads_one_after_another_share_a_section(writer: Path, tmp_path: Path) -> None:
    said = run(writer, "sequence", tmp_path / "a.kvp", 10, 400)
    snapshot = read_ring(tmp_path / "a.kvp")
    assert len(snapshot.sections) == 1 and snapshot.sections[0].owners == 400
    assert snapshot.sections[0].begun_ns == 0  # its first owner's, who has gone
    assert snapshot.calls()["cudaMemcpyAsync"][0] == said["written"]


def test_more_threads_than_sections_and_more_streams_than_slots_are_counted(writer: Path, tmp_path: Path) -> None:
    said = run(writer, "small", tmp_path / "threads.kvp", 1000, 40)
    snapshot = read_ring(tmp_path / "threads.kvp")
    assert len(snapshot.sections) == 4
    assert snapshot.calls()["cudaMemcpyAsync"] == (said["written"],) * 2 + (said["written"] * 100,)
    said = run(writer, "streams", tmp_path / "streams.kvp", 1000)
    snapshot = read_ring(tmp_path / "streams.kvp")
    assert len(snapshot.slots()) == 128 and snapshot.over_count[1] == 1000 - 128
    assert snapshot.calls()["cudaMemcpyAsync"] == (1000, 1000, 10000)


def test_a_wrapped_ring_keeps_the_newest_calls_and_every_slow_one(writer: Path, tmp_path: Path) -> None:
    run(writer, "small", tmp_path / "a.kvp", 50000, 1)
    snapshot = read_ring(tmp_path / "a.kvp")
    section = snapshot.sections[0]
    assert section.head == 50000 and len(section.records) == 1024
    assert (np.diff(section.records["start_ns"].astype(np.int64)) >= 0).all()
    assert section.slow_head == len(section.slow) == 50
    merged = snapshot.records()
    in_ring = int((section.records["dur_ns"] >= snapshot.slow_ns).sum())
    assert in_ring and len(merged) == 1024 + 50 - in_ring


def test_calls_in_signal_handlers_are_counted(writer: Path, tmp_path: Path) -> None:
    said = run(writer, "signals", tmp_path / "a.kvp", 5000000)
    assert said["written"] > 5000000
    assert read_ring(tmp_path / "a.kvp").calls()["cudaMemcpyAsync"][0] == said["written"]


@pytest.mark.parametrize("mode", ["fork", "rawfork"])
def test_a_forked_child_never_writes_into_its_parents_file(writer: Path, tmp_path: Path, mode: str) -> None:
    assert run(writer, mode, tmp_path / "a.kvp")["child"] == 0
    parent, child = read_ring(tmp_path / "a.kvp"), read_ring(tmp_path / "a.kvp.child")
    assert parent.calls()["cudaMemcpyAsync"][0] == 2 and child.calls()["cudaMemcpyAsync"][0] == 5
    assert child.ppid == parent.pid and parent.forks == (1 if mode == "fork" else 0)


def test_a_file_that_was_deleted_costs_detail_and_not_the_process(writer: Path, tmp_path: Path) -> None:
    assert run(writer, "unlink", tmp_path / "a.kvp", 100000)["open"] == 0
    assert not (tmp_path / "a.kvp").exists()


@pytest.mark.parametrize("limit", [0, 5000, 30000, 200000, 1400000, 3000000])
def test_a_file_size_limit_never_kills_the_process_and_totals_stay_exact(
    writer: Path, tmp_path: Path, limit: int
) -> None:
    said = run(writer, "limit", tmp_path / "a.kvp", 100000, limit)
    if limit < 4096:
        assert said["open"] < 0 and not (tmp_path / "a.kvp").exists()
    else:
        assert read_ring(tmp_path / "a.kvp").calls()["cudaMemcpyAsync"] == (100000, 100000, 10000000)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("size_kib", [4, 16, 64, 256, 1024])
def test_a_full_disk_never_kills_the_process_and_totals_stay_exact(writer: Path, tmp_path: Path, size_kib: int) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", tmp_path], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        said = run(writer, "plain", tmp_path / "a.kvp", 100000, 3)
        assert said["open"] == 0
        snapshot = read_ring(tmp_path / "a.kvp")
        assert snapshot.calls()["cudaMemcpyAsync"] == (300000, 300000, 30000000)
        for section in snapshot.sections:
            assert (section.records["bytes"] == 100).all() and len(section.records) <= 16384
        if size_kib == 256:  # some detail fitted, and it is the newest
            kept = [section for section in snapshot.sections if len(section.records)]
            assert kept
            for section in kept:
                ends_ns = section.records["start_ns"] + section.records["dur_ns"]
                assert ends_ns.max() == section.slots["last_ns"].max()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("mode", ["attaching", "writing"])
def test_the_next_file_is_opened_when_no_thread_is_at_work_in_the_one_before(
    compile_c: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    program = compile_c("ring_reopened", *(str(build.NATIVE / "src" / n) for n in ("ring.c", "clock.c", "secrets.c")))
    run(program, mode, tmp_path, 1000)
    opened = read_ring(tmp_path / "next.kvp")
    slots = opened.slots()
    assert {int(slot["stream"]): int(slot["count"]) for slot in slots} == {1: 1000, 2: 1000, 3: 1}
    assert not opened.over_count.any()


def test_a_file_is_readable_while_it_is_written_and_after_a_kill(writer: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    for turn in range(10):
        path = tmp_path / f"{turn}.kvp"
        process = subprocess.Popen([str(writer), "kill", path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            pass
        previous = 0
        for _ in range(5):
            time.sleep(chance.uniform(0, 0.004))
            snapshot = read_ring(path)
            count = snapshot.calls().get("cudaMemcpyAsync", (0, 0, 0))[0]
            assert count >= previous
            previous = count
            for section in snapshot.sections:  # no torn record: the writer's constants in each of them
                assert (section.records["bytes"] == 100).all() and (section.records["dur_ns"] == 500).all()
                assert (np.diff(section.records["start_ns"].astype(np.int64)) >= 0).all()
        process.kill()
        process.wait()
        process.stdout.close()
        snapshot = read_ring(path)
        assert snapshot.state == "running"
        calls, _, size = snapshot.calls().get("cudaMemcpyAsync", (0, 0, 0))  # it may end before its first call
        assert size == calls * 100 and calls >= previous
        assert abs(sum(section.head for section in snapshot.sections) - calls) <= 1
