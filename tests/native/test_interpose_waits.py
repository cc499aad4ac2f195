"""Waits for somebody outside: the interposer notes those in which nobody asked for anything, and changes no answer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvprobe.recordings.kvprobe_run import read
from tests.native.test_interpose_counts import environment


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("waits", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}", "-lpthread")


def play(program: Path, env: dict[str, str], mode: str) -> tuple[list[str], str]:
    """The waits that are to be told, in their order, and the answers that calls had."""
    done = subprocess.run([program, mode], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    waits, _, results = done.stdout.partition("results\n")
    return waits.split("\n")[:-1], results


def told(folder: Path) -> list[str]:
    """The waits that were noted, in their order; each of them lasted."""
    recording = read(folder)
    waits = recording.os_calls
    assert (waits["end_ns"] - waits["start_ns"] >= 1_000_000).all()
    order = waits["start_ns"].argsort()
    return [recording.text(int(name)) for name in waits["name"][order]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def real_clock(libraries: Path, run: Path, **more: str) -> dict[str, str]:
    return environment(libraries, run, KVHOST_CLOCK="real", **more)


def test_waits_at_what_others_ask_by_are_told_and_no_others_and_every_answer_is_as_without(
    program: Path, libraries: Path, run: Path
) -> None:
    env = real_clock(libraries, run)
    own, with_it = play(program, env, "all")
    assert told(run) == own and {*own} == {"accept", "poll", "select", "epoll_wait", "recv"}
    bare = {name: value for name, value in env.items() if name not in ("LD_PRELOAD", "KVPROBE_RUN")}
    assert (own, with_it) == play(program, bare, "all")
    assert all(f" -1 {error}\n" in with_it for error in (4, 9, 14, 88))  # EINTR, EBADF, EFAULT, ENOTSOCK


def test_what_came_when_somebody_asked_is_read_from_then_on(program: Path, libraries: Path, run: Path) -> None:
    play(program, real_clock(libraries, run), "all")
    recording = read(run)
    reads, waits = recording.tier_operations, recording.os_calls
    kinds = dict(zip(recording.tiers["place"].tolist(), recording.tiers["kind"].tolist(), strict=True))
    asked = np.isin(reads["start_ns"], waits["end_ns"])
    assert (reads["bytes"][reads["writes"] == 0] == 32 << 10).all()
    assert [recording.text(kinds[place]) for place in reads["place"][asked].tolist()] == ["socket", "socket"]
    own = (reads["writes"] == 0) & ~asked  # of a connection and a peer of the program's own, and of its worker
    texts = [recording.text(kinds[place]) for place in reads["place"][own].tolist()]
    assert texts == ["socket", "unix socket", "socket"]
    assert (reads["end_ns"][own] - reads["start_ns"][own] >= 1_000_000).all()


def test_threads_that_are_cancelled_in_a_wait_clean_up(program: Path, libraries: Path, run: Path) -> None:
    own, _ = play(program, real_clock(libraries, run), "cancelled")
    assert own == ["cleaned up", "cleaned up", "accept"] and told(run) == ["accept"]


def test_a_child_of_fork_waits_as_it_would_and_is_told_of_once_it_submits(
    program: Path, libraries: Path, run: Path
) -> None:
    own, _ = play(program, real_clock(libraries, run), "forked")
    assert own == ["accept"] == told(run)


@pytest.mark.parametrize(("mode", "detail"), [("elsewhere", "copies"), ("all", "totals")])
def test_nothing_is_told_of_threads_that_submit_nothing_nor_where_only_totals_are_kept(
    program: Path, libraries: Path, run: Path, mode: str, detail: str
) -> None:
    play(program, real_clock(libraries, run, KVPROBE_DETAIL=detail), mode)
    assert not read(run).os_calls.rows and list(run.glob("*.kvp"))
