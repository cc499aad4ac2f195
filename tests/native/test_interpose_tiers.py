"""Reads and writes of tiers: the interposer counts what a program counts for itself, and changes no answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.probe.ring import CALLS, RingSnapshot, read_ring
from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.tier_uses import tier_uses
from kvprobe.reporting.summaries import summary
from tests.native.test_interpose_counts import environment

Counts = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("tiers", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def files(tmp_path: Path) -> Path:
    """A new folder of files."""
    folder = tmp_path / f"files-{len(list(tmp_path.iterdir()))}"
    for name in ("first", "second", "third"):
        (folder / name).mkdir(parents=True)
    return folder


def play(program: Path, env: dict[str, str], *arguments: object) -> tuple[Counts, str]:
    """What it counted, and the answers that its calls had."""
    done = subprocess.run(
        [program, *map(str, arguments)], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    counts, _, results = done.stdout.partition("results\n")
    rows = (line.split() for line in counts.splitlines())
    return {name: (int(calls), int(size)) for name, calls, size in rows}, results


def totals(snapshots: list[RingSnapshot]) -> Counts:
    """All that was recorded, with what no section could take."""
    found: dict[str, Counter[str]] = {}
    for snapshot in snapshots:
        for slot in snapshot.file_slots():
            row = found.setdefault(CALLS[int(slot["call"])][1], Counter())
            row["calls"] += int(slot["count"])
            row["bytes"] += int(slot["bytes"])
        for number, (kind, name) in CALLS.items():
            if kind == "FILE" and snapshot.over_count[number]:
                row = found.setdefault(name, Counter())
                row["calls"] += int(snapshot.over_count[number])
                row["bytes"] += int(snapshot.over_bytes[number])
    return {name: (row["calls"], row["bytes"]) for name, row in found.items()}


def recorded(folder: Path) -> list[RingSnapshot]:
    return [read_ring(path) for path in sorted(folder.glob("*.kvp"))]


def places(folder: Path) -> dict[int, dict[str, object]]:
    (told,) = folder.glob("tiers-*.jsonl")
    return {line["place"]: line for line in map(json.loads, told.read_text().splitlines())}


@pytest.mark.parametrize("detail", ["copies", "totals"])
def test_every_way_to_read_and_write_is_counted_exactly_and_answers_as_without(
    program: Path, libraries: Path, tmp_path: Path, run: Path, detail: str
) -> None:
    env = environment(libraries, run, KVPROBE_DETAIL=detail)
    own, with_it = play(program, env, folder := files(tmp_path), "all")
    bare = {name: value for name, value in env.items() if name not in ("LD_PRELOAD", "KVPROBE_RUN")}
    assert (own, with_it) == play(program, bare, files(tmp_path), "all")
    (snapshot,) = recorded(run)
    assert totals([snapshot]) == own and len(own) == 9
    assert " 11\n" in with_it and " 14\n" in with_it and " 32\n" in with_it  # EAGAIN, EFAULT, EPIPE
    kinds = {place: line["kind"] for place, line in places(run).items()}
    assert sorted(kinds.values()) == ["file", "pipe", "unix socket"]  # type: ignore[type-var]
    assert [line["path"] for line in places(run).values() if line["kind"] == "file"] == [str(folder)]
    kept = snapshot.files()
    assert len(kept) == sum(calls for calls, _ in own.values())
    assert set(kept["stream"].tolist()) == set(kinds)
    assert all(name.startswith("cuda") for name in snapshot.calls())


def test_where_a_read_went_and_from_where_is_kept(program: Path, libraries: Path, tmp_path: Path, run: Path) -> None:
    play(program, environment(libraries, run), files(tmp_path), "all")
    (snapshot,) = recorded(run)
    kept = snapshot.files()
    copies = snapshot.records()
    (copy,) = copies[copies["call"] == 1]
    reads = kept[kept["call"] == 46]
    assert reads["dst"].tolist() == [4096, 0, 4 * 65536 - 16385]
    assert set(reads["src"].tolist()) == {int(copy["src"])}  # the memory that the program had copied from
    assert (kept["dur_ns"] > 0).all() and set(kept["direction"].tolist()) == {5, 6}


def test_the_recording_has_a_table_of_places_and_one_of_operations(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    own, _ = play(program, environment(libraries, run), folder := files(tmp_path), "all")
    recording = read(run)
    tiers, operations = recording.tiers, recording.tier_operations
    kinds = [recording.text(int(kind)) for kind in tiers["kind"]]
    assert sorted(kinds) == ["file", "pipe", "unix socket"]
    assert recording.text(int(tiers["path"][kinds.index("file")])) == str(folder)
    read_bytes = sum(own[name][1] for name in ("pread", "preadv", "read", "recv"))
    assert int(tiers["read_bytes"].sum()) == read_bytes
    assert int(operations["bytes"][operations["writes"] == 0].sum()) == read_bytes
    assert operations.rows == int(tiers["reads"].sum() + tiers["writes"].sum())
    assert not recording.calls.rows or {recording.text(n) for n in recording.totals["name"]}.isdisjoint(own)
    table = summary(recording, "tiers")
    assert {(row[4], row[5]) for row in table.rows} == {
        (what, place) for what in ("read", "write") for place in (str(folder), "pipe", "unix socket")
    }


def test_a_file_that_is_only_flushed_is_a_place(program: Path, libraries: Path, tmp_path: Path, run: Path) -> None:
    """What is written to it is too little to be kept."""
    own, _ = play(program, environment(libraries, run), folder := files(tmp_path), "flushes")
    recording = read(run)
    tiers, operations = recording.tiers, recording.tier_operations
    assert own == {"fsync": (3, 0)} and [recording.text(int(one)) for one in tiers["path"]] == [str(folder)]
    assert (tiers["writes"].tolist(), tiers["write_bytes"].tolist()) == ([3], [0])
    assert tier_uses(recording).tier.tolist() == [True] * 3 and int(tiers["write_ns"][0]) == int(
        (operations["end_ns"] - operations["start_ns"]).sum()
    )


def test_a_process_without_a_call_of_cuda_leaves_nothing(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    play(program, environment(libraries, run), files(tmp_path), "no-cuda")
    assert not list(run.iterdir())


def test_eight_threads_are_counted_exactly(program: Path, libraries: Path, tmp_path: Path, run: Path) -> None:
    own, _ = play(program, environment(libraries, run), files(tmp_path), "threads", 2000)
    assert totals(recorded(run)) == own and own["pread"][0] == 16000


def test_a_descriptor_that_leads_elsewhere_is_another_place(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    own, _ = play(program, environment(libraries, run), folder := files(tmp_path), "reuse", 60)
    (snapshot,) = recorded(run)
    assert totals([snapshot]) == own
    by_path: Counter[str] = Counter()
    for slot in snapshot.file_slots():
        by_path[str(places(run)[int(slot["stream"])]["path"])] += int(slot["bytes"])
    least = 16 << 10
    assert by_path == {
        f"{folder}/first": 30 * least,
        f"{folder}/second": 30 * 2 * least,
        f"{folder}/third": 20 * 3 * least,
    }


def test_interrupted_reads_and_handlers_that_read_are_counted_exactly(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    own, _ = play(program, environment(libraries, run), files(tmp_path), "signals", 200)
    snapshots = recorded(run)
    assert totals(snapshots) == own and own["read"][0] >= 200 and own["pwrite"][0] == 200


def test_a_thread_cancelled_in_a_read_cleans_up_as_ever(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    play(program, environment(libraries, run), files(tmp_path), "cancelled", 50)
    (snapshot,) = recorded(run)
    assert snapshot.calls()["cudaMemcpyAsync"] == (51, 51, 65536 + 50 * 3)
    assert not snapshot.over_count.any()
    assert int((snapshot.records()["bytes"] == 3).sum()) == 50  # in full, not only counted


def test_a_child_of_fork_tells_its_places_itself(program: Path, libraries: Path, tmp_path: Path, run: Path) -> None:
    children = tmp_path / "children"
    own, _ = play(program, environment(libraries, run), folder := files(tmp_path), "forks", 4, children)
    said = {int(pid): int(size) for pid, size in (line.split() for line in children.read_text().splitlines())}
    snapshots = {snapshot.pid: snapshot for snapshot in recorded(run)}
    assert len(snapshots) == 5 and len(said) == 4
    for pid, size in said.items():
        assert totals([snapshots[pid]]) == {"pread": (1, size)}
        (line,) = (json.loads(line) for line in (run / f"tiers-{pid}.jsonl").read_text().splitlines())
        assert line["path"] == str(folder) and line["place"] == int(snapshots[pid].files()["stream"][0])
    (parent,) = set(snapshots) - set(said)
    assert totals([snapshots[parent]]) == own


READS = """
import ctypes as ct, os, sys
at = ct.c_void_p()
assert ct.CDLL(sys.argv[1]).cudaMalloc(ct.byref(at), 100) == 0
memory = bytearray(100_000)
assert os.preadv(os.open("/dev/zero", os.O_RDONLY), [memory], 0) == 100_000
print(memory[:3].decode())
"""


def test_a_library_that_was_preloaded_before_still_takes_the_programs_reads(
    compile_c: Callable[..., Path], libraries: Path, run: Path
) -> None:
    """It has no versions of its symbols, as the C library has, and comes first."""
    shim = compile_c("preloaded_reads", "-shared", "-fPIC", output="libshim.so")
    env = environment(libraries, run)
    env["LD_PRELOAD"] = f"{shim}:{env['LD_PRELOAD']}"
    words = [sys.executable, "-S", "-c", READS, str(libraries / "libkvprobe_hostrt.so")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "SSS\n"
    assert totals(recorded(run)) == {"preadv": (1, 100_000)}


def test_secrets_in_a_path_are_not_written(program: Path, libraries: Path, tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "cache?token=hunter2"
    folder.mkdir()
    play(program, environment(libraries, run), folder, "all")
    (told,) = run.glob("tiers-*.jsonl")
    assert "hunter2" not in told.read_text() and "token=***" in told.read_text()
    assert told.stat().st_mode & 0o777 == 0o600


def test_an_attach_in_the_middle_counts_from_there_on(
    program: Path, libraries: Path, tmp_path: Path, run: Path
) -> None:
    folder = files(tmp_path)
    env = {name: value for name, value in environment(libraries, None).items() if name != "LD_PRELOAD"}
    served = subprocess.Popen([program, folder, "serves"], env=env, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None and served.stdout.readline() == "ready\n"
    try:
        attached = [sys.executable, "-m", "kvprobe", "attach", str(served.pid), "-o", str(tmp_path / "attached")]
        subprocess.run(attached, check=True, capture_output=True)
        deadline = time.monotonic() + 60
        while not totals(recorded(tmp_path / "attached")) and time.monotonic() < deadline:
            time.sleep(0.02)
        (folder / "attached").touch()
        before = int(served.stdout.readline())
    finally:
        (folder / "stop").touch()
        rest, _ = served.communicate(timeout=60)
    said = {name: int(calls) for name, calls, _ in (line.split() for line in rest.partition("results")[0].splitlines())}
    found = totals(recorded(tmp_path / "attached"))
    assert said["pread"] == said["pwrite"] >= before + 100
    for name in ("pread", "pwrite"):  # of which one is attached to after the other
        assert said[name] - before <= found[name][0] <= said[name]
    assert found["pread"][1] == found["pread"][0] * 65536
