"""Pageable copies under `--fix auto` without an adapter: staged where that pays; only the clock can tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprobe.probe.ring import read_ring
from kvprobe.recordings import open_recording

MIB = 1 << 20
PLAYS = [
    "overwrites",
    "remaps",
    "behind-work",
    "gated",
    "synchronous",
    "forks",
    "registers",
    "refusals",
    "captures",
    "device",
    "threads",
]


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    include = Path(__file__).parents[2] / "kvprobe" / "native" / "hostrt"
    return compile_c("pageable", f"-I{include}", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


@pytest.fixture(scope="module")
def account(compile_c: Callable[..., Path]) -> Path:
    return compile_c("cure_account")


def play(program: Path, *arguments: object, code: int = 0, **environment: str) -> tuple[str, str]:
    """What the program printed, and what it said of itself. A pageable copy is 8 times slower than the link."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
    env |= {"KVHOST_PAGEABLE_GBPS": "0.5", **environment}
    done = subprocess.run(
        [program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def watched(libraries: Path, folder: Path, **more: str) -> dict[str, str]:
    preload = str(libraries / "libkvprobe_interpose.so")
    return {"LD_PRELOAD": preload, "KVPROBE_RUN": str(folder), "KVPROBE_FIX": "auto", **more}


def decisions(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def staged(folder: Path) -> tuple[int, int]:
    """Loads and stores that were, as the interposer says at the process's end."""
    (note,) = [one["why"] for one in decisions(folder) if one["what"] == "note"]
    loads, stores = re.search(r"(\d+) loads", note), re.search(r"(\d+) stores", note)
    return int(loads[1]) if loads else 0, int(stores[1]) if stores else 0


@pytest.mark.parametrize("what", PLAYS)
def test_a_program_sees_the_same_with_staged_copies(program: Path, libraries: Path, tmp_path: Path, what: str) -> None:
    alone, _ = play(program, what, 1)
    assert alone.endswith("\n0 wrong\n") or alone == "0 wrong\n"
    seen, _ = play(program, what, 60, **watched(libraries, tmp_path))
    assert seen == alone
    loads, stores = staged(tmp_path)
    assert loads >= 5 and stores >= 5
    assert len(list(tmp_path.glob("events-*.jsonl"))) == 1, "a forked child decides nothing"


@pytest.mark.parametrize("what", ["large", "large-driver", "large-refusals"])
def test_a_large_copy_is_tried_both_ways_part_by_part(
    program: Path, libraries: Path, tmp_path: Path, what: str
) -> None:
    given = {"KVHOST_PAGEABLE_GBPS": "2"}
    alone, _ = play(program, what, **given)
    seen, _ = play(program, what, **watched(libraries, tmp_path, **given))
    assert seen == alone and seen.endswith("0 wrong\n")
    assert min(staged(tmp_path)) >= 1
    said = "\n".join(one["why"] for one in decisions(tmp_path) if one["what"] != "note")
    for kind in ("loads from 64 MiB", "stores from 64 MiB:", "stores from 64 MiB into memory that has no pages yet"):
        assert f"pageable {kind}" in said, "decided within the first copy"


def test_finding_out_whether_it_pays_takes_few_bytes_of_a_large_copy(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    # a machine without a processor to spare may take too long for a part, whose rest then goes as it is, too
    tries = (play(program, "large-counts", **watched(libraries, tmp_path))[0] for _ in range(5))
    assert "20 MiB up, 20 MiB down\n0 wrong\n" in tries, "five samples of 4 MiB each go as they are"


def test_three_of_four_processors_help_to_make_pages(
    program: Path, libraries: Path, compile_c: Callable[..., Path], tmp_path: Path
) -> None:
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists() and not quota.read_text().startswith("max"):
        pytest.skip("this cgroup's quota is what counts here")
    sixteen = compile_c("sixteen_processors", "-shared", "-fPIC", output="libsixteen.so")
    given = watched(libraries, tmp_path)
    play(program, "large", **given | {"LD_PRELOAD": f"{sixteen} {given['LD_PRELOAD']}"})
    assert "moved by 13 threads" in decisions(tmp_path)[-1]["why"], "12 and the caller"


def test_a_part_that_fails_is_not_the_program_s(program: Path, libraries: Path, tmp_path: Path) -> None:
    given = {"KVHOST_PAGEABLE_GBPS": "2"}
    seen, _ = play(program, "large-fails", **watched(libraries, tmp_path, **given))
    assert seen == "0 wrong\n"
    assert any("a staged copy failed" in one["why"] and "error 999" in one["why"] for one in decisions(tmp_path))


def test_a_load_behind_work_is_left_alone_and_counted(program: Path, libraries: Path, tmp_path: Path) -> None:
    play(program, "gated", 60, **watched(libraries, tmp_path))
    behind = re.search(r"(\d+) loads with work before them", decisions(tmp_path)[-1]["why"])
    assert behind and int(behind[1]) == 15


def test_a_call_that_does_not_wait_returns_where_others_hold_its_copy_up(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    given = {"KVHOST_CHANNELS": "1", "KVPROBE_LOCKED_BYTES": str(4 * MIB)}
    seen, _ = play(program, "held-up", 60, **watched(libraries, tmp_path, **given))
    assert seen == "0 wrong\n"
    assert any("the device took nothing for 100 ms" in one["why"] for one in decisions(tmp_path))


@pytest.mark.parametrize("what", ["record-fails", "query-fails", "load-fails", "store-fails"])
def test_a_failure_inside_is_not_the_program_s(program: Path, libraries: Path, tmp_path: Path, what: str) -> None:
    # marks make some of the same calls, and would meet the fault first
    seen, _ = play(program, what, 60, **watched(libraries, tmp_path, KVPROBE_MARKS="off"))
    assert seen == "0 wrong\n"
    (failure,) = [one for one in decisions(tmp_path) if "error 999" in one["why"]]
    assert failure["what"] == "refuse" and failure["why"].startswith("a staged copy failed")


@pytest.mark.parametrize("what", ["record-fails", "query-fails"])
def test_a_failure_that_a_mark_meets_is_not_the_program_s(
    program: Path, libraries: Path, tmp_path: Path, what: str
) -> None:
    seen, _ = play(program, what, 60, **watched(libraries, tmp_path, KVPROBE_MARKS="on"))
    assert seen == "0 wrong\n"


def test_a_program_that_confines_itself_is_left_alone_from_then_on(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    seen, _ = play(program, "confined", 60, **watched(libraries, tmp_path))
    assert seen == "0 wrong\n"
    assert "note" not in {one["what"] for one in decisions(tmp_path)}, "a file that is opened at the end would kill it"


def test_the_driver_is_not_asked_about_each_copy_of_a_healthy_program(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    seen, _ = play(program, "pinned", 60, **watched(libraries, tmp_path))
    assert seen == "0 questions\n0 wrong\n"


# ---- how it ends, and limits -----------------------------------------------------------------------------------------


def test_who_ends_while_a_thread_copies_ends_as_without(program: Path, libraries: Path, tmp_path: Path) -> None:
    alone = play(program, "exits", 1, code=7)
    assert play(program, "exits", 60, code=7, **watched(libraries, tmp_path)) == alone == ("ends, 0 wrong\n", "")
    assert min(staged(tmp_path)) >= 5


def test_children_that_are_made_while_a_thread_copies_copy_as_without(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    alone = play(program, "forks-beside", 1)
    seen = play(program, "forks-beside", 60, **watched(libraries, tmp_path))
    assert seen == alone == ("0 " * 12 + "ended, 0 wrong\n", "")
    assert min(staged(tmp_path)) >= 5


def test_who_is_killed_in_a_copy_leaves_a_recording_and_no_thread(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    given = watched(libraries, tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
    env |= {"KVHOST_PAGEABLE_GBPS": "0.5", **given}
    with subprocess.Popen([program, "goes-on"], env=env, stdout=subprocess.PIPE) as process:
        while not decisions(tmp_path):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -9 and process.communicate()[0] == b""
    (ring,) = (read_ring(path) for path in tmp_path.glob("*.kvp"))
    assert ring.state == "running" and sum(int(slot["count"]) for slot in ring.slots()) > 0


@pytest.mark.parametrize(
    ("what", "why"),
    [("limited-space", "too little memory is left"), ("limited-threads", "no thread"), ("limited-locks", "")],
)
def test_limits_of_the_process_are_the_programs_own(program: Path, libraries: Path, what: str, why: str) -> None:
    one = {"MALLOC_ARENA_MAX": "1"}  # others take address space whenever a thread begins
    alone, _ = play(program, what, 1, **one)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o777)  # a user of its own has the limit on threads, and may enter no folder of the tests
        seen, _ = play(program, what, 60, **watched(libraries, folder, **one))
        said = decisions(folder)
        loads, stores = (0, 0) if why else staged(folder)
    assert seen == alone and seen.endswith("0 wrong\n")
    assert what != "limited-space" or "all of it 1" in seen
    if why:
        assert said[0]["what"] == "refuse" and why in said[0]["why"]
    else:
        assert min(loads, stores) >= 5


def test_a_device_that_is_reset_is_served_again(program: Path, libraries: Path, tmp_path: Path) -> None:
    seen, said = play(program, "resets", 60, **watched(libraries, tmp_path))
    assert seen == "0 wrong\n"
    assert not [one for one in decisions(tmp_path) if "error" in one["why"]]
    assert said.endswith(f" {32 * MIB} bytes pinned\n"), "what a context had pinned is pinned again for the next one"


def test_off_unless_asked_for(program: Path, libraries: Path, tmp_path: Path) -> None:
    for given in ({"KVPROBE_FIX": "off"}, {"KVPROBE_FIX": ""}, {"KVPROBE": "off"}):
        _, said = play(program, "overwrites", 0.2, **watched(libraries, tmp_path, **given))
        assert said.endswith(" 0 bytes pinned\n")
    assert not decisions(tmp_path)


@pytest.mark.parametrize("limit", [4 * MIB, 7 * MIB, 200 * MIB])
def test_no_more_is_locked_than_allowed(program: Path, libraries: Path, tmp_path: Path, limit: int) -> None:
    _, said = play(program, "overwrites", 60, **watched(libraries, tmp_path, KVPROBE_LOCKED_BYTES=str(limit)))
    pinned = int(said.split()[3])
    assert pinned == min(limit // MIB, 64) * MIB
    assert min(staged(tmp_path)) >= 5


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"KVPROBE_LOCKED_BYTES": "1000000"}, "KVPROBE_LOCKED_BYTES leaves less than the 4 MiB"),
        ({"KVHOST_PINNED_BYTES": "1000000"}, "could not be locked .* error 2"),
        ({"KVHOST_ATTRIBUTES": "100=1"}, "the GPU reads this machine's pageable memory by itself"),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(
    program: Path, libraries: Path, tmp_path: Path, given: dict[str, str], why: str
) -> None:
    seen, said = play(program, "overwrites", 2, **watched(libraries, tmp_path, **given))
    assert seen == "0 wrong\n" and said.endswith(" 0 bytes pinned\n")
    (refusal,) = decisions(tmp_path)
    assert refusal["what"] == "refuse" and re.search(why, refusal["why"])


def test_the_recording_says_what_was_decided(program: Path, libraries: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "kvprobe", "run", "--fix", "auto", "--report", "none", "--no-stacks"]
    command += ["-o", str(folder), "--", str(program), "overwrites"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
    done = subprocess.run(
        command, env=env | {"KVHOST_PAGEABLE_GBPS": "0.5"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "0 wrong\n" and done.returncode == 0, done.stderr
    recording = open_recording(folder)
    whats = [recording.text(int(what)) for what in recording.decisions["what"]]
    assert whats[-1] == "kvprobe.staging: note" and len(whats) >= 3
    decided = tuple(f"kvprobe.staging: {what}" for what in ("keep", "refuse", "rollback"))
    assert all(what.startswith(decided) for what in whats[:-1])


# ---- whether it pays -------------------------------------------------------------------------------------------------


def course(account: Path, costs: list[tuple[float, float]]) -> list[str]:
    """Which way each of these calls goes, and what is concluded from it."""
    text = "\n".join(f"{before} {after}" for before, after in costs)
    done = subprocess.run([account], input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_both_ways_take_turns_and_a_gain_of_a_quarter_is_kept(account: Path) -> None:
    assert course(account, [(5.0, 4.0)] * 11) == ["a", "c"] * 4 + ["a", "c keep"] + ["c"]


def test_less_is_refused_and_tried_again_later_each_time_later(account: Path) -> None:
    ways = course(account, [(4.9, 4.0)] * (10 + 1024 + 10 + 2048 + 1))
    tried = ["a", "c"] * 4 + ["a", "c refuse"]
    assert ways == tried + ["r"] * 1024 + tried + ["r"] * 2048 + ["a"]


def test_one_call_in_65_goes_as_it_is_and_what_no_longer_pays_is_taken_back(account: Path) -> None:
    ways = course(account, [(5.0, 1.0)] * 400 + [(5.0, 5.0)] * 400)
    kept = ways[10:]
    assert kept[:130] == (["c"] * 64 + ["a"]) * 2
    changed = kept.index("a rollback")
    assert 390 < changed < 390 + 4 * 65, "three of the five newest samples decide"
    assert kept[changed + 1] == "r"


def test_a_call_that_was_held_up_decides_nothing(account: Path) -> None:
    costs = [(5.0, 1.0)] * 11
    costs[3] = (5.0, 500.0)
    costs[7] = (5.0, 300.0)
    assert course(account, costs)[9] == "c keep"
