"""Pinned memory that a sleep will ask for is there before it asks; only the clock and the budget can tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.recordings import open_recording
from kvprobe.reporting.slept import sleep_tables

MIB = 1 << 20
MODEL = 19 * MIB  # what saver.c's memory holds
SAMPLE = 2 * MIB  # of the runtime's own memory
SAVER = "torch_memory_saver_hook_mode_torch_cu13.abi3"
PLAYS = [
    "sleeps",
    "thrown-away",
    "no-backup",
    "pageable",
    "churn",
    "forks",
    "resets",
    "captures",
    "pages-first",
    "memory",
    "locked",
    "threads",
    "early",
]


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Callable[[str], Path]:
    """The program with an allocator whose library has that name."""
    include = Path(__file__).parents[2] / "kvprobe" / "native" / "hostrt"
    made: dict[str, Path] = {}

    def with_allocator(name: str) -> Path:
        if name not in made:
            host = (f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")
            saver = compile_c("saver", "-shared", "-fPIC", *host, output=f"{name}.so")
            flags = (f"-I{include}", str(saver), f"-Wl,-rpath,{saver.parent}", *host, "-ldl")
            made[name] = compile_c("prepared", *flags, output=f"prepared-{name}")
        return made[name]

    return with_allocator


def play(program: Path, *arguments: object, **environment: str) -> tuple[str, int]:
    """What the program printed, and the most that was pinned beside what it held."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KV")}
    env |= {"KVHOST_CLOCK": "virtual" if "sleeps" in arguments else "real", **environment}
    env |= {"KVHOST_PINNED_BYTES": str(16 * MIB)} if "memory" in arguments else {}
    done = subprocess.run(
        [program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout, int(done.stderr.split()[-1])


def watched(libraries: Path, folder: Path, keep: int = 64 * MIB, **more: str) -> dict[str, str]:
    run = {"LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder), "KVPROBE_FIX": "auto"}
    return {**run, "KVPROBE_KEEP_BYTES": str(keep), "KVPROBE_POPULATE_BYTES": str(MIB), **more}


def noted(folder: Path) -> str:
    lines = [line for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return "\n".join(one["why"] for one in map(json.loads, lines))


def prepared(folder: Path) -> tuple[int, int, int]:
    """Buffers that were prepared, asked for and given up."""
    pattern = r"(\d+) pinned buffers of \S+ GB were prepared .*; the program used (\d+) of them .*, and (\d+) \("
    found = re.search(pattern, noted(folder))
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)


@pytest.mark.parametrize("keep", [0, 8 * MIB, 64 * MIB])
@pytest.mark.parametrize("what", PLAYS)
def test_a_program_sees_the_same_whatever_is_prepared(
    program: Callable[[str], Path], libraries: Path, tmp_path: Path, what: str, keep: int
) -> None:
    alone, nothing = play(program(SAVER), what)
    seen, most = play(program(SAVER), what, **watched(libraries, tmp_path, keep))
    assert seen == alone
    assert seen.endswith("0 wrong\n")
    assert nothing == 0
    assert most <= keep + SAMPLE
    if not keep or what in ("no-backup", "pageable"):
        assert prepared(tmp_path) == (0, 0, 0)


def test_the_first_sleep_makes_nothing(program: Callable[[str], Path], libraries: Path, tmp_path: Path) -> None:
    there = {"PREPARED_BYTES": str(MODEL + SAMPLE)}
    seen, most = play(program(SAVER), "sleeps", 1, **watched(libraries, tmp_path, **there))
    assert seen == "0 wrong\n"
    assert most <= MODEL + SAMPLE
    assert prepared(tmp_path) == (6, 6, 0)
    assert re.search(r"\b6 pinned buffers of [\d.]+ GB, up to \d+ threads made the pages", noted(tmp_path))
    to_cpu, to_gpu = sleep_tables(open_recording([tmp_path]), 0)
    assert to_cpu and "6 pinned buffers of 0.020 GB were prepared for a sleep" in to_cpu.note
    assert to_gpu and "prepared" not in to_gpu.note


def test_a_sleep_that_comes_before_the_registration_finds_the_pages(
    program: Callable[[str], Path], libraries: Path, tmp_path: Path
) -> None:
    """Nothing is registered while a stream is captured; the sleep begins as soon as that ends."""
    seen, most = play(program(SAVER), "pages-first", **watched(libraries, tmp_path, PAGES_FIRST="1"))
    assert seen == "0 wrong\n"
    assert most <= MODEL + SAMPLE
    assert prepared(tmp_path) == (6, 6, 0)
    assert re.search(r"\b6 pinned buffers of [\d.]+ GB, up to \d+ threads made the pages", noted(tmp_path))


def test_ten_thousand_sleeps_prepare_once(program: Callable[[str], Path], libraries: Path, tmp_path: Path) -> None:
    there = {"PREPARED_BYTES": str(MODEL + SAMPLE)}
    seen, most = play(program(SAVER), "sleeps", 10_000, **watched(libraries, tmp_path, **there))
    assert seen == "0 wrong\n"
    assert most <= MODEL + SAMPLE
    assert prepared(tmp_path) == (6, 6, 0)


def test_no_more_is_prepared_than_may_be_kept(program: Callable[[str], Path], libraries: Path, tmp_path: Path) -> None:
    there = {"PREPARED_BYTES": str(8 * MIB + SAMPLE)}  # 6, 2 of them; 4 do not fit
    seen, most = play(program(SAVER), "sleeps", 2, **watched(libraries, tmp_path, 11 * MIB, **there))
    assert seen == "0 wrong\n"
    assert most <= 11 * MIB + SAMPLE


def test_what_no_sleep_asked_for_is_let_go(program: Callable[[str], Path], libraries: Path, tmp_path: Path) -> None:
    there = {"PREPARED_BYTES": str(MODEL + SAMPLE), "LEFT_BYTES": str(SAMPLE)}
    seen, _ = play(program(SAVER), "thrown-away", **watched(libraries, tmp_path, **there))
    assert seen == "0 wrong\n"
    assert prepared(tmp_path) == (6, 0, 6)


@pytest.mark.parametrize(("adapter", "found"), [("1", 6), ("0", 0)])
def test_of_vllms_allocator_its_adapter_says_what_sleeps(
    program: Callable[[str], Path], libraries: Path, tmp_path: Path, adapter: str, found: int
) -> None:
    """torch asks for powers of two."""
    there = {"ADAPTER": adapter, "PREPARED_BYTES": str(22 * MIB + SAMPLE if found else 0)}
    seen, _ = play(program("cumem_allocator.abi3"), "sleeps", 1, **watched(libraries, tmp_path, **there))
    assert seen == "0 wrong\n"
    assert prepared(tmp_path) == (found, found, 0)


def test_other_allocators_are_left_alone(program: Callable[[str], Path], libraries: Path, tmp_path: Path) -> None:
    there = {"PREPARED_BYTES": "0"}
    seen, _ = play(program("another_allocator"), "sleeps", 1, **watched(libraries, tmp_path, **there))
    assert seen == "0 wrong\n"
    assert prepared(tmp_path) == (0, 0, 0)


@pytest.mark.parametrize("more", [{"KVPROBE_FIX": ""}, {"KVPROBE_KEEP_BYTES": "0"}, {"KVPROBE_POPULATE_BYTES": "0"}])
def test_nothing_is_prepared_unless_asked_for(
    program: Callable[[str], Path], libraries: Path, tmp_path: Path, more: dict[str, str]
) -> None:
    play(program(SAVER), "sleeps", 1, **{**watched(libraries, tmp_path), **more})
    assert prepared(tmp_path) == (0, 0, 0)


def test_a_killed_program_leaves_nothing_behind(
    program: Callable[[str], Path], libraries: Path, tmp_path: Path
) -> None:
    env = {**os.environ, "KVHOST_CLOCK": "virtual", **watched(libraries, tmp_path)}
    process = subprocess.Popen([program(SAVER), "sleeps", "1000000"], env=env, stdout=subprocess.PIPE)
    while not noted(tmp_path):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
