"""Pinned memory that a program frees under `--fix auto` is handed out again; only the clock and the budget can tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.probe.ring import read_ring
from kvprobe.probe.ring_layout import CALLS
from kvprobe.recordings import open_recording
from kvprobe.recordings.sleeps import sleeps

MIB = 1 << 20
SAMPLE = 2 * MIB  # of the runtime's own memory, for each set of flags
PLAYS = [
    "sleeps",
    "virtual",
    "flags",
    "wrong",
    "waits",
    "captures",
    "resets",
    "forks",
    "outlives",
    "memory",
    "locked",
    "in-vain",
    "threads",
    "answers",
    "driver",
]


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    include = Path(__file__).parents[2] / "kvprobe" / "native" / "hostrt"
    return compile_c("recycled", f"-I{include}", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


def play(program: Path, *arguments: object, **environment: str) -> tuple[str, int]:
    """What the program printed, and the most that was pinned beside what it held."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KV")}
    clock = "real" if {"threads", "forks", "outlives", "space"} & {*arguments} else "virtual"
    env |= {
        "KVHOST_CLOCK": clock,
        **({"KVHOST_PINNED_BYTES": str(16 * MIB)} if "memory" in arguments else {}),
        **environment,
    }
    done = subprocess.run(
        [program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout, int(done.stderr.split()[-1])


def watched(libraries: Path, folder: Path, keep: int | str = 64 * MIB, **more: str) -> dict[str, str]:
    preload = str(libraries / "libkvprobe_interpose.so")
    run = {"LD_PRELOAD": preload, "KVPROBE_RUN": str(folder), "KVPROBE_FIX": "auto"}
    return {**run, "KVPROBE_KEEP_BYTES": str(keep), **more}


def said(folder: Path) -> list[tuple[str, str]]:
    lines = [line for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return [(one["what"], one["why"]) for one in map(json.loads, lines)]


def decisions(folder: Path) -> dict[str, str]:
    return dict(said(folder))


def noted(folder: Path) -> str:
    return "\n".join(why for what, why in said(folder) if what == "note")


def reused(folder: Path) -> int:
    found = re.search(r"(\d+) pinned buffers were handed out again", noted(folder))
    return int(found[1]) if found else 0


def populated(folder: Path) -> int:
    found = re.search(r"(\d+) pinned buffers of [\d.]+ GB, up to \d+ threads made the pages", noted(folder))
    return int(found[1]) if found else 0


@pytest.mark.parametrize("keep", [0, 64 * MIB])
@pytest.mark.parametrize("populate", [0, MIB])
@pytest.mark.parametrize("what", PLAYS)
def test_a_program_sees_the_same_whatever_is_kept_or_populated(
    program: Path, libraries: Path, tmp_path: Path, what: str, populate: int, keep: int
) -> None:
    alone, nothing = play(program, what)
    seen, most = play(program, what, **watched(libraries, tmp_path, keep, KVPROBE_POPULATE_BYTES=str(populate)))
    assert seen == alone
    assert seen.endswith("\n0 wrong\n") or seen == "0 wrong\n"
    assert nothing == 0
    assert most <= (64 * MIB if keep else 5 * SAMPLE if populate else 0)
    assert (populated(tmp_path) > 0) == bool(populate)


@pytest.mark.parametrize("keep", [0, 64 * MIB])
def test_a_child_reads_populated_memory(program: Path, libraries: Path, tmp_path: Path, keep: int) -> None:
    said, _ = play(program, "shares", **watched(libraries, tmp_path, keep, KVPROBE_POPULATE_BYTES=str(MIB)))
    assert said == "child 0\n0 wrong\n"


def test_what_is_populated_goes_when_it_is_freed(program: Path, libraries: Path, tmp_path: Path) -> None:
    said, most = play(program, "sleeps", 400, **watched(libraries, tmp_path, 0, KVPROBE_POPULATE_BYTES=str(MIB)))
    assert said == "0 wrong\n"
    assert most == SAMPLE
    assert populated(tmp_path) == 400 * 5


def test_ten_thousand_sleeps_populate_once(program: Path, libraries: Path, tmp_path: Path) -> None:
    said, most = play(
        program, "sleeps", 10_000, **watched(libraries, tmp_path, 64 * MIB, KVPROBE_POPULATE_BYTES=str(MIB))
    )
    assert said == "0 wrong\n"
    assert most <= 64 * MIB
    assert populated(tmp_path) == 5
    assert reused(tmp_path) == 5 * 9999


def test_memory_that_cannot_be_registered_is_the_runtimes(program: Path, libraries: Path, tmp_path: Path) -> None:
    """Too much for the device's limit: the program hears what the runtime says."""
    alone, _ = play(program, "memory")
    seen, _ = play(program, "memory", **watched(libraries, tmp_path, 64 * MIB, KVPROBE_POPULATE_BYTES=str(MIB)))
    assert seen == alone
    assert re.search(r"it allocated [1-9]\d* buffers itself", noted(tmp_path))


def test_what_was_freed_is_free_where_address_space_is_limited(program: Path, libraries: Path, tmp_path: Path) -> None:
    one = {"MALLOC_ARENA_MAX": "1"}  # others take address space whenever a thread begins
    alone, _ = play(program, "space", **one)
    assert alone == "all of it 1, more 0\n0 wrong\n"
    assert play(program, "space", **watched(libraries, tmp_path, 512 * MIB, **one)) == (alone, 0)


def test_all_but_the_first_sleep_pin_nothing(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "sleeps", 3, **watched(libraries, tmp_path))
    assert reused(tmp_path) == 2 * 5  # the sixth is below 1 MiB
    assert "handed out again" in decisions(tmp_path)["keep"]


@pytest.mark.parametrize("keep", [3 * MIB, 9 * MIB, 64 * MIB])
def test_ten_thousand_sleeps_hold_no_more_than_is_allowed(
    program: Path, libraries: Path, tmp_path: Path, keep: int
) -> None:
    rounds = 10_000 if keep > 32 * MIB else 400
    said, most = play(program, "sleeps", rounds, **watched(libraries, tmp_path, keep))
    assert said == "0 wrong\n"
    assert 0 < most <= keep
    if keep > 32 * MIB:
        assert reused(tmp_path) == 5 * (rounds - 1)


def test_what_comes_and_goes_is_recorded_with_its_bytes(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "virtual", **watched(libraries, tmp_path))
    model = sum((4 * MIB, 2 * MIB, 3 * MIB + 4096, 2 * MIB, MIB, 8192))
    found = {
        CALLS[int(slot["call"])][1]: (int(slot["count"]), int(slot["bytes"]))
        for path in tmp_path.glob("*.kvp")
        for slot in read_ring(path).slots()
    }
    assert found["cuMemCreate"] == found["cuMemMap"] == found["cuMemSetAccess"] == (4 * 6, 4 * model)
    assert found["cuMemUnmap"] == (4 * 6 + 1, 4 * model + 4 * MIB)
    assert found["cuMemRelease"] == (4 * 6 + 1, 0)
    assert found["cudaHostAlloc"] == (3 * 6, 3 * model)
    slept = sleeps(open_recording([tmp_path]))
    assert [one.side for one in slept] == ["sleep", "wake"] * 3
    assert {one.phases["pin"].bytes for one in slept[0:6:2]} == {model}
    assert {one.phases["map"].bytes for one in slept[1:6:2]} == {model}


def test_page_faults_of_pinning_are_recorded(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "pages", **{**watched(libraries, tmp_path), "KVPROBE_FIX": "", "KVHOST_CLOCK": "real"})
    recording = open_recording([tmp_path])
    (told,) = range(recording.page_faults.rows)
    calls, faults = recording.calls, recording.page_faults
    pinned = calls["dst"][(calls["start_ns"] == faults["time_ns"][told]) & (calls["bytes"] == 256 * MIB)]
    assert len(pinned) == 1 and int(pinned[0]) > 0, "the call that made the pages, with where they lie"
    assert int(faults["minor"][told]) >= 256 * MIB // (2 * MIB), "huge pages at the largest"
    assert int(faults["nodes"][told]) >= 0


def test_other_flags_are_other_memory(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "flags", **watched(libraries, tmp_path))
    assert reused(tmp_path) == 0


def test_what_is_never_asked_for_again_is_no_longer_kept(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "in-vain", **watched(libraries, tmp_path, 16 * MIB))
    assert "none was needed again" in decisions(tmp_path)["rollback"]


@pytest.mark.parametrize("more", [{"KVPROBE_FIX": ""}, {"KVPROBE_KEEP_BYTES": "0"}, {"KVPROBE_KEEP_BYTES": "much"}])
def test_nothing_is_kept_unless_asked_for(program: Path, libraries: Path, tmp_path: Path, more: dict[str, str]) -> None:
    _, most = play(program, "sleeps", 3, **{**watched(libraries, tmp_path), **more})
    assert most == 0


def test_a_killed_program_leaves_nothing_behind(program: Path, libraries: Path, tmp_path: Path) -> None:
    env = {**os.environ, "KVHOST_CLOCK": "virtual", **watched(libraries, tmp_path)}
    process = subprocess.Popen([program, "sleeps", "1000000"], env=env, stdout=subprocess.PIPE)
    while not decisions(tmp_path):
        assert process.poll() is None
    process.kill()
    assert process.wait() == -9
