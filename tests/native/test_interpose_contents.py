"""Looks at what copies carry, and the first calls that fail: what the interposer leaves of both in a ring file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvprobe.probe.ring import CONTENTS, RingSnapshot, read_ring
from kvprobe.recordings import open_recording

TIMES, SIZE = 200, 1 << 20


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("contents", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


def run(program: Path, libraries: Path, folder: Path, how: str, **more: str) -> tuple[str, RingSnapshot]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPROBE")}
    env |= {"LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder), **more}
    done = subprocess.run([program, how], env=env, capture_output=True, text=True, check=True)
    (ring,) = (read_ring(path) for path in folder.glob("*.kvp"))
    return done.stdout, ring


def test_looks_tell_bytes_that_are_the_same_from_bytes_that_were_rewritten(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    hashes = {}
    for how in ("same", "rewritten"):
        folder = tmp_path / how
        folder.mkdir()
        _, ring = run(program, libraries, folder, how)
        looks = ring.notes(CONTENTS)
        assert len(looks) >= 8 and set(looks["bytes"]) == {SIZE} and set(looks["count"]) == {4096}
        assert not looks["result"].any(), "not one word over and over"
        hashes[how] = len(set(looks["dur_ns"].tolist())), len(looks)
        table = open_recording(folder).contents
        assert table.rows == len(looks) and set(table["direction"]) == {1}
    assert hashes["same"][0] == 1
    assert hashes["rewritten"][0] == hashes["rewritten"][1]


def test_looks_at_batches_tell_bytes_that_are_the_same_from_those_that_were_rewritten(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    """Sixteen of forty copies are looked at, spread over the batch: the first one would be the same each time."""
    hashes = {}
    for how in ("batch", "rewritten-batch"):
        folder = tmp_path / how
        folder.mkdir()
        _, ring = run(program, libraries, folder, how)
        looks = ring.notes(CONTENTS)
        assert len(looks) >= 8 and set(looks["bytes"]) == {SIZE // 40 * 40} and set(looks["count"]) == {16 * 256}
        hashes[how] = len(set(looks["dur_ns"].tolist())), len(looks)
    assert hashes["batch"][0] == 1
    assert hashes["rewritten-batch"][0] == hashes["rewritten-batch"][1]


def test_looks_at_columns_tell_those_that_are_the_same_from_those_that_were_rewritten(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    """Nothing beside the columns is looked at, and nothing that goes to rows apart, whose memory is not known."""
    hashes, seen = {}, {}
    for how in ("rows", "rewritten-rows", "apart"):
        folder = tmp_path / how
        folder.mkdir()
        looks = run(program, libraries, folder, how)[1].notes(CONTENTS)
        seen[how], hashes[how] = len(looks), len(set(looks["dur_ns"].tolist()))
        assert set(looks["bytes"]) <= {SIZE // 4} and set(looks["count"]) <= {16 * 256}
    assert seen["rows"] >= 8 and hashes["rows"] == 1
    assert hashes["rewritten-rows"] == seen["rewritten-rows"] >= 8
    assert seen["apart"] == 0


def test_looks_are_no_calls_and_change_nothing_that_is_counted(program: Path, libraries: Path, tmp_path: Path) -> None:
    said = {}
    for word in ("on", "off"):
        folder = tmp_path / word
        folder.mkdir()
        text, ring = run(program, libraries, folder, "same", KVPROBE_CONTENTS=word)
        said[word] = text, ring.calls()["cudaMemcpyAsync"], int((ring.records()["call"] == 1).sum()), ring.overwritten()
        assert (len(ring.notes(CONTENTS)) > 0) == (word == "on")
        assert open_recording(folder).lost == {}
    assert said["on"] == said["off"]
    assert said["on"][1] == (TIMES, TIMES, TIMES * SIZE)


@pytest.mark.parametrize("detail", ["totals", "copies", "launches"])
def test_the_first_calls_that_fail_are_kept_at_every_level_of_detail(
    program: Path, libraries: Path, tmp_path: Path, detail: str
) -> None:
    text, ring = run(program, libraries, tmp_path, "failing", KVPROBE_DETAIL=detail, KVPROBE_RING_RECORDS="16")
    assert text.split()[0] == str(TIMES)
    (section,) = ring.sections
    assert len(section.failed) == 4 and set(section.failed["result"]) == {1}
    assert int(section.slots["errors"].sum()) == TIMES
    first = section.failed["start_ns"].astype(np.int64)
    assert (first < ring.records()["start_ns"][-1]).any() or detail == "totals"
    calls = open_recording(tmp_path).calls
    assert int((calls["result"] == 1).sum()) >= 4
    assert int(calls["start_ns"][calls["result"] == 1].min()) == int(first.min())
