"""Looks at what the device has where a load will go: they tell rewritten bytes from kept ones, and disturb nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.diagnosis import Finding, examine
from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.model import Engine, Recording

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
# Eight blocks come to their places at each step, behind which `rewrite` may change some of what is there.
STEPS = f"""
import ctypes as ct, random, sys, zlib
sys.path.insert(0, {str(CORPUS)!r})
from device import D2H, H2D, Device
from fresh_copies import clear
d = Device(streams=2, events=8)
fail, u64 = d.lib.kvhostFailCall, ct.c_uint64
blocks, size = 8, 256 << 10
ct.memmove(d.host, random.Random(1).randbytes(blocks * size), blocks * size)

def rewrite(step, block, at):
    pass

def load(block):
    d.copy(d.device + block * size, d.host + block * size, size, H2D, d.compute)

def steps(count):
    for step in range(count):
        for block in range(blocks):
            load(block)
        for block in range(blocks):
            rewrite(step, block, d.device + block * size)
        d.launch(1_000_000)
        d.sync(d.compute)

def told():
    back = d.host + d.size - blocks * size
    d.copy(back, d.device, blocks * size, D2H, d.compute)
    d.sync(d.compute)
    print(zlib.crc32(ct.string_at(back, blocks * size)), zlib.crc32(ct.string_at(d.host, blocks * size)))
"""
REWRITES = """
def rewrite(step, block, at):
    clear(d, at + %s, (step + block) %% 251, %s, d.compute)
"""
ALL_BUT_THE_END = REWRITES % ("0", "size - 4096")


def recorded(libraries: Path, folder: Path, body: str, **more: str) -> tuple[Recording, str]:
    """The recording of such a program, and what it printed."""
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder)}
    env |= {"KVPROBE_HOSTRT": str(libraries / "libkvprobe_hostrt.so"), "KVHOST_CLOCK": "virtual", "KVPROBE_MARKS": "on"}
    command = [sys.executable, "-c", STEPS + body]
    done = subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=True)
    return read(folder), done.stdout


def redundant(recording: Recording) -> Finding | None:
    return {one.cause: one for one in examine(recording)}.get("redundant_loads")


def test_loads_of_bytes_that_the_device_still_has_are_redundant(libraries: Path, tmp_path: Path) -> None:
    recording, _ = recorded(libraries, tmp_path, "steps(300)")
    looks = recording.destinations
    assert looks.rows >= 10 and looks["same"].all() and set(looks["looked"].tolist()) == {1024}
    assert len(set(looks["dst"].tolist())) >= 3, "not always the same places"
    one = redundant(recording)
    assert one is not None and one.confidence == "likely"
    assert any(f"{looks.rows} times they were still there" in said.text for said in one.evidence)


@pytest.mark.parametrize(
    "rewritten",
    [
        ALL_BUT_THE_END,
        REWRITES % ("size // 3", "size // 8"),
        REWRITES % ("8192 * (step % 30)", "8192"),
        REWRITES % ("0", "8192"),
        REWRITES % ("size - 8192", "8192"),
    ],
    ids=["all_but_the_end", "an_eighth", "pages_that_move", "the_first_pages", "the_last_pages"],
)
def test_loads_of_bytes_that_a_kernel_has_written_over_are_needed(
    libraries: Path, tmp_path: Path, rewritten: str
) -> None:
    recording, _ = recorded(libraries, tmp_path, rewritten + "steps(300)")
    looks = recording.destinations
    assert looks.rows >= 10 and 10 * int(looks["same"].sum()) < 9 * looks.rows
    assert redundant(recording) is None


def test_looks_change_neither_what_the_program_gets_nor_what_is_counted(libraries: Path, tmp_path: Path) -> None:
    said = {}
    for word in ("on", "off"):
        body = ALL_BUT_THE_END + "steps(100)\ntold()\nassert d.lib.cudaGetLastError() == 0"
        recording, text = recorded(libraries, tmp_path / word, body, KVPROBE_CONTENTS=word)
        assert (recording.destinations.rows > 0) == (word == "on")
        totals = recording.totals
        counted = {
            (recording.text(int(name)), int(way)): (int(calls), int(moved))
            for name, way, calls, moved in zip(
                *(totals[column] for column in ("name", "direction", "calls", "bytes")), strict=True
            )
        }
        said[word] = text, counted, recording.lost
    assert said["on"] == said["off"]


def test_a_look_is_in_no_span_of_the_device(libraries: Path, tmp_path: Path) -> None:
    """What copies from the device took is what the program's own took: it made none but those of its start."""
    spans = {}
    for word in ("on", "off"):
        recording, _ = recorded(libraries, tmp_path / word, "steps(200)", KVPROBE_CONTENTS=word)
        table = recording.spans
        copies = table["engine"] == Engine.COPY
        spans[word] = int((table["end_ns"] - table["start_ns"])[copies].sum()), int(table["bytes"][copies].sum())
    assert spans["on"][1] == spans["off"][1]
    assert spans["on"][0] == pytest.approx(spans["off"][0], rel=0.001)


CAPTURED = """
import time
steps(200)
graph = ct.c_void_p()
d.check(d.lib.cudaStreamBeginCapture(ct.c_void_p(d.%s), 2))
first = time.monotonic_ns()
for _ in range(100):
    for block in range(blocks):
        load(block)
    d.launch(1_000_000, d.copies[1])
    d.sync(d.copies[1])
last = time.monotonic_ns()
d.check(d.lib.cudaStreamEndCapture(ct.c_void_p(d.%s), ct.byref(graph)))
print(first, last)
"""


@pytest.mark.parametrize("stream", ["compute", "copies[0]"], ids=["of_the_loads", "of_another_stream"])
def test_no_copy_of_ours_comes_into_or_beside_a_capture(libraries: Path, tmp_path: Path, stream: str) -> None:
    """Which is whole at its end: the program would raise an error. Before it there are looks."""
    recording, text = recorded(libraries, tmp_path, CAPTURED % (stream, stream), KVHOST_CLOCK="real")
    first, last = map(int, text.split())
    times = recording.destinations["time_ns"]
    assert (times < first).any()
    assert not ((times >= first) & (times <= last)).any()


FULL = """
steps(20)
d.launch(60_000_000)
for i in range(%d):
    load(i %% blocks)
d.launch(20_000_000, d.copies[0])
d.sync(d.copies[0])  # another look is due
for i in range(100):
    load(i %% blocks)
    d.launch(50_000, d.copies[0])
    d.sync(d.copies[0])
d.sync(d.compute)
"""


@pytest.mark.parametrize("outstanding", [100, 420])
def test_a_queue_in_which_much_is_outstanding_is_given_no_copy_of_ours(
    libraries: Path, tmp_path: Path, outstanding: int
) -> None:
    recording, _ = recorded(libraries, tmp_path, FULL % outstanding)
    behind = int(recording.calls["start_ns"][recording.calls["bytes"] == 256 << 10][8 * 20 + outstanding])
    looks = int((recording.destinations["time_ns"] >= behind).sum())
    assert looks == 0 if outstanding > 400 else looks >= 1


@pytest.mark.parametrize("call", ["cuMemcpy2DAsync_v2", "cuMemHostAlloc"])
def test_looks_end_where_a_call_of_theirs_fails_and_the_report_says_so(
    libraries: Path, tmp_path: Path, call: str
) -> None:
    body = f"assert fail(b{call!r}, u64(1), 2) == 0\nsteps(200)\ntold()\nassert d.lib.cudaGetLastError() == 0"
    recording, text = recorded(libraries, tmp_path, body)
    looks = recording.destinations
    assert (looks.rows, looks["looked"].tolist(), looks["error"].tolist()) == (1, [0], [2])
    assert len(set(text.split())) == 1, "the device has what was loaded"
    one = redundant(recording)
    assert one is not None
    assert any("nobody looked at the GPU's own bytes" in said.text for said in one.evidence)
    assert any("failed with error 2" in said.text for said in one.evidence)


def test_the_slots_of_a_look_are_counted(libraries: Path, tmp_path: Path) -> None:
    """From one mark to the next: the submissions in between and the mark; around a look its copy and a mark as well."""
    recording, _ = recorded(libraries, tmp_path, "steps(300)")
    marks = recording.marks
    marks = marks.where(marks["stream"] == np.bincount(marks["stream"]).argmax())
    more = np.diff(marks["slots"]) - marks["count"][1:]
    behind = np.searchsorted(marks["given_ns"], recording.destinations["time_ns"]) - 1
    assert len(behind) >= 10 and set(more[behind].tolist()) == {3}
    assert np.median(np.delete(more, behind)) == 1
