"""The byte witness names each block that was overwritten, and no other: real processes on the host runtime."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprobe.recordings import open_recording
from kvprobe.recordings.witnessed import Witnessed, of_recording
from kvprobe.runfolder.folder import RunFolder

BLOCKS, ROUNDS = 42, 3  # all looks of a round fit into what the budget saves up, however slow this machine is
SEEDED = len(range(0, BLOCKS, 7)) * ROUNDS


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("verified", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


@pytest.fixture
def watched(program: Path, libraries: Path, tmp_path: Path) -> Callable[..., tuple[list[int], Witnessed]]:
    """Runs the program: addresses of the blocks that it says it overwrote, and what was seen of them."""

    def run(how: str, *size: int, budget: str = "100") -> tuple[list[int], Witnessed]:
        folder = tmp_path / how
        folder.mkdir(mode=0o700)
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
        env |= {
            "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"),
            "KVPROBE_RUN": str(folder),
            "KVPROBE_VERIFY": budget,
        }
        words = [program, how, *map(str, size or (BLOCKS, ROUNDS))]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100, check=True)
        found = of_recording(open_recording(folder))
        assert found is not None
        return [int(word) for word in done.stdout.split()], found

    return run


def told(found: Witnessed, kind: str) -> list[int]:
    assert {one.kind for one in found.mismatches} <= {kind}
    return [one.address for one in found.mismatches]


@pytest.mark.parametrize("how", ["changed", "batch", "contained"])
def test_each_block_that_was_overwritten_before_its_load_is_named_with_both_times(watched, how: str) -> None:
    seeded, found = watched(how)
    assert len(seeded) == SEEDED
    assert sorted(told(found, "changed")) == sorted(seeded)
    assert found.verdict == "mismatch" and found.changed == SEEDED and not found.rewritten
    assert found.counts["compared"] == BLOCKS * ROUNDS
    for one in found.mismatches:
        assert one.pages >= 1 and one.changed == one.pages and one.address <= one.first <= one.last
        assert one.store_ns is not None and one.summed_ns is not None
        assert one.store_ns < one.summed_ns < one.load_ns < one.found_ns
        assert one.store_address is not None and one.store_address <= one.address
        assert one.home <= one.address < one.home + one.home_bytes


def test_each_load_whose_source_is_overwritten_while_it_waits_in_its_stream_is_named(watched) -> None:
    seeded, found = watched("overwritten")
    assert len(seeded) == SEEDED
    assert told(found, "overwritten") == seeded
    assert found.counts["overwritten"] == SEEDED and not found.counts["changed"]
    assert all(one.load_ns < one.found_ns and one.changed for one in found.mismatches)


def test_thousands_of_copies_beside_rewritten_inputs_and_reads_of_files_give_no_alarm(watched) -> None:
    seeded, found = watched("healthy", 256, 12)
    assert not seeded and not found.mismatches
    assert found.counts["changed"] == found.counts["overwritten"] == 0
    assert found.counts["loads"] == 256 + 12 * (8 + 2 * 256) and found.counts["stores"] == 12 * 256
    assert found.verdict == "equal"


def test_a_source_that_the_call_itself_reads_may_be_rewritten_at_once(watched) -> None:
    seeded, found = watched("taken", 8, 1)
    assert len(seeded) == 1 and not found.mismatches
    assert found.counts["compared"] == 1 and found.counts["overwritten"] == 0


def test_a_block_that_another_store_or_a_free_came_between_is_not_compared_with_what_it_held(watched) -> None:
    _, crossing = watched("crossing")
    assert not crossing.mismatches and crossing.counts["compared"] >= BLOCKS * ROUNDS // 2
    seeded, freed = watched("freed")
    assert len(seeded) == SEEDED and not freed.mismatches
    assert freed.counts["compared"] == 0 and freed.verdict == "cannot tell"


def test_a_buffer_that_the_program_rewrites_before_each_load_is_told_apart_and_no_mismatch(watched) -> None:
    _, found = watched("reused")
    assert found.counts["changed"] == 8 * ROUNDS and found.changed == 0 and not found.mismatches
    (home,) = found.rewritten
    assert (home.compared, home.changed) == (8 * ROUNDS, 8 * ROUNDS)
    assert found.verdict == "equal"


def test_blocks_without_a_whole_page_are_counted_and_nothing_is_said_of_them(watched) -> None:
    _, found = watched("changed", BLOCKS, 1, 2048)
    assert found.verdict == "cannot tell" and not found.mismatches
    assert found.counts["small"] == found.counts["loads"] + found.counts["stores"] == 3 * BLOCKS
    assert found.left_out() == [("held no whole page of 4 KiB", 3 * BLOCKS)]


def test_without_the_variable_nothing_is_compared(program: Path, libraries: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
    env |= {"LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(tmp_path)}
    # the program waits for the witness only where there is one that looks
    done = subprocess.run([program, "healthy", "8", "1"], env=env, timeout=100, check=False)
    assert done.returncode == 0
    assert not list(tmp_path.glob("verify-*")) and of_recording(open_recording(tmp_path)) is None


def test_damaged_files_of_the_witness_are_named_and_read_as_far_as_they_can_be(watched, tmp_path: Path) -> None:
    watched("changed")
    folder = tmp_path / "changed"
    (path,) = folder.glob("mismatches-*.jsonl")
    lines = path.read_text().splitlines()
    wrong: dict[str, Any] = {**json.loads(lines[0]), "address": -1}
    path.write_text("\n".join([json.dumps(wrong), *lines[1:-1], lines[-1][:40]]))
    files = RunFolder(folder)
    pid = int(path.stem.split("-")[1])
    assert len(files.mismatches(pid)) == len(lines) - 2
    assert len(files.damaged) == 1 and "line 1" in files.damaged[0]
    (folder / f"verify-{pid}.json").write_text('{"t_ns": "late"}')
    assert files.witness(pid) == {} and len(files.damaged) == 2
