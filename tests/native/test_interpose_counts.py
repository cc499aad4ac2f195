"""The interposer counts what a program counts for itself, and changes nothing that the program sees."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvprobe.native import build
from kvprobe.probe.ring import RingSnapshot, read_ring

# what the program calls its calls -> (call numbers of the ring file, direction, None: found out from the addresses)
MEANING = {
    "H2D": ((1, 5), 1),
    "D2H": ((1, 6), 2),
    "D2D": ((1, 7), 3),
    "unknown": ((4,), None),
    "batch": ((3,), 1),
    "sync": ((10,), 1),
    "wait": ((17,), 0),
    "HtoD": ((75,), 1),
    "DtoH": ((76,), 2),
    "DtoD": ((77,), 3),
    "any": ((74,), None),
    "2D": ((78,), 1),
    "trim": ((79,), 0),
    "cuTrim": ((80,), 0),
}
Counts = dict[str, tuple[int, int, int]]


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("copies", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


@pytest.fixture(scope="module")
def resolver(compile_c: Callable[..., Path], libraries: Path) -> Path:
    return compile_c("resolver", "-ldl")


def environment(libraries: Path, folder: Path | None, **more: str) -> dict[str, str]:
    env = {**os.environ, "RUNTIME": str(libraries / "libkvprobe_hostrt.so"), "KVHOST_LATENCY_US": "0.001", **more}
    env["LD_PRELOAD"] = str(libraries / "libkvprobe_interpose.so")
    for name in ("KVPROBE", "KVPROBE_RUN"):
        env.pop(name, None)
    if folder is not None:
        env["KVPROBE_RUN"] = str(folder)
    return env | more


def said(text: str) -> Counts:
    rows = (line.split() for line in text.splitlines() if len(line.split()) == 4)
    return {name: (int(calls), int(copies), int(size)) for name, calls, copies, size in rows}


def recorded(folder: Path) -> tuple[Counts, list[RingSnapshot]]:
    snapshots = [read_ring(path) for path in sorted(folder.glob("*.kvp"))]
    totals: dict[str, Counter[str]] = {name: Counter() for name in MEANING}
    for snapshot in snapshots:
        assert not snapshot.over_count.any()
        for slot in snapshot.slots():
            for name, (numbers, direction) in MEANING.items():
                if int(slot["call"]) in numbers and direction in (None, int(slot["direction"]) & 15):
                    for column in ("count", "copies", "bytes"):
                        totals[name][column] += int(slot[column])
    found = {name: (c["count"], c["copies"], c["bytes"]) for name, c in totals.items() if c["count"]}
    return found, snapshots


def run(program: Path, env: dict[str, str], *arguments: object) -> str:
    done = subprocess.run([program, *map(str, arguments)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("via", ["link", "dlsym", "driver", "entry", "waits", "trims", "batch", "sync", "mixed"])
def test_every_way_to_reach_a_copy_is_counted_exactly(program: Path, libraries: Path, tmp_path: Path, via: str) -> None:
    own = said(run(program, environment(libraries, tmp_path), via, 5000, 3, 2))
    found, snapshots = recorded(tmp_path)
    assert found == own and len(snapshots) == 2
    assert all(snapshot.state == "closed" for snapshot in snapshots)


@pytest.mark.parametrize(("threads", "processes"), [(1, 1), (8, 1), (1, 8), (8, 8), (64, 1), (1, 64)])
def test_counts_are_exact_across_threads_and_processes(
    program: Path, libraries: Path, tmp_path: Path, threads: int, processes: int
) -> None:
    own = said(run(program, environment(libraries, tmp_path), "mixed", 20000 // threads, threads, processes))
    found, snapshots = recorded(tmp_path)
    assert found == own and len(snapshots) == processes


@pytest.mark.slow
def test_a_million_calls_of_eight_threads_are_counted_exactly(program: Path, libraries: Path, tmp_path: Path) -> None:
    quick = {"KVHOST_SUBMIT_NS": "0", "KVHOST_DEPTH": "16384", "KVHOST_H2D_GBPS": "1000"}
    own = said(run(program, environment(libraries, tmp_path, **quick), "loads", 125_000, 8, 1))
    found, (snapshot,) = recorded(tmp_path)
    assert found == own and own["H2D"][0] == 1_000_000
    assert (
        sorted(int(one.slots["count"][one.slots["call"] == 1].sum()) for one in snapshot.sections if len(one.slots))
        == [125_000] * 8  # the thread that reads marks makes no calls
    )
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 128 << 20


@pytest.mark.parametrize("processes", [1, 8])
def test_a_fork_in_the_middle_gives_the_child_its_own_file(
    program: Path, libraries: Path, tmp_path: Path, processes: int
) -> None:
    own = said(run(program, environment(libraries, tmp_path), "mixed", 2000, 1, processes, "fork"))
    found, snapshots = recorded(tmp_path)
    assert found == own and len(snapshots) == 2 * processes
    assert sum(snapshot.forks for snapshot in snapshots) == processes


def test_a_child_of_a_process_that_is_loading_a_library_lives(
    compile_c: Callable[..., Path], libraries: Path, tmp_path: Path
) -> None:
    fifo, needy = tmp_path / "fifo.so", tmp_path / "needy.so"
    cc = [*build.compiler(), "-shared", "-x", "c", "/dev/null"]
    subprocess.run([*cc, f"-Wl,-soname,{fifo}", "-o", fifo], check=True)
    subprocess.run([*cc[:-3], "-o", needy, "-Wl,--no-as-needed", fifo], check=True)
    fifo.unlink()
    os.mkfifo(fifo)
    program = compile_c("forked_loading", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")
    assert run(program, environment(libraries, tmp_path), needy, fifo) == "0 0\n"


def test_forty_short_children_leave_forty_files(program: Path, libraries: Path, tmp_path: Path) -> None:
    own = said(run(program, environment(libraries, tmp_path), "link", 3, 1, 40))
    found, snapshots = recorded(tmp_path)
    assert found == own and len(snapshots) == 40


def test_a_program_that_closes_all_descriptors_is_recorded_to_its_end(
    program: Path, libraries: Path, tmp_path: Path
) -> None:
    own = said(run(program, environment(libraries, tmp_path), "link", 100000, 2, 1, "closeall"))
    assert recorded(tmp_path)[0] == own


def test_totals_are_exact_when_the_recording_must_stay_small(program: Path, libraries: Path, tmp_path: Path) -> None:
    env = environment(libraries, tmp_path, KVPROBE_MAX_BYTES=str(2_400_000))
    own = said(run(program, env, "link", 20000, 1, 12))
    assert recorded(tmp_path)[0] == own
    written = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvp"))
    assert written < 2_400_000


def test_kill_at_random_moments_leaves_exact_totals(program: Path, libraries: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    for turn in range(100):
        folder = tmp_path / str(turn)
        folder.mkdir()
        counts = folder / "counts"
        env = environment(libraries, folder, COUNTS=str(counts))
        process = subprocess.Popen([program, "mixed", "0", "1", "1", "kill"], env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0, 0.01))
        process.kill()
        process.wait()
        process.stdout.close()
        own = np.fromfile(counts, dtype="<u8")[: 3 * len(MEANING)].reshape(-1, 3)
        (snapshot,) = recorded(folder)[1]
        found = recorded(folder)[0]
        assert snapshot.state == "running"
        in_flight = 0
        for row, name in enumerate(MEANING):
            calls, copies, size = found.get(name, (0, 0, 0))
            # the program counts after a call has returned: the call it was killed in may be recorded, and is whole
            assert 0 <= calls - int(own[row, 0]) <= 1
            in_flight += calls - int(own[row, 0])
            per_call = 3 if name == "batch" else 1
            assert copies - calls * per_call in (0, per_call)
            least, most = (33, 45) if name == "batch" else (16, 22)
            assert size >= int(own[row, 2]) - most and calls * least <= size <= calls * most
        assert in_flight <= 1


@pytest.mark.parametrize("switch", [{"KVPROBE": "off"}, {"KVPROBE_RUN": ""}])
def test_switched_off_it_records_nothing(
    program: Path, libraries: Path, tmp_path: Path, switch: dict[str, str]
) -> None:
    assert said(run(program, environment(libraries, tmp_path, **switch), "mixed", 500, 2, 1))
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_cannot_be_written_harms_nothing(program: Path, libraries: Path, tmp_path: Path) -> None:
    own = said(run(program, environment(libraries, tmp_path / "absent"), "mixed", 500, 2, 2))
    assert own == said(run(program, environment(libraries, None), "mixed", 500, 2, 2))


@pytest.mark.parametrize("on", [True, False])
def test_dlsym_means_what_it_meant(resolver: Path, libraries: Path, tmp_path: Path, on: bool) -> None:
    env = environment(libraries, tmp_path if on else None)
    with_it = run(resolver, env, libraries / "libkvprobe_hostrt.so")
    del env["LD_PRELOAD"]
    without = run(resolver, env, libraries / "libkvprobe_hostrt.so")
    assert with_it == without
    assert "next 1" in without and "before 0" in without and "global 1" in without and "errno 77" in without


PYTHON = """
import ctypes, os, sys
runtime = ctypes.CDLL(sys.argv[1])
device, host, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(4096))
assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(4096), 0)
assert not runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0)
def copies(n):
    for i in range(n):
        assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, stream)
copies(300)
if sys.argv[2:]:
    import multiprocessing
    def child():
        global device, host, stream
        assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(4096))
        assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(4096), 0)
        assert not runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0)
        copies(50)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start(); process.join()
    assert process.exitcode == 0
"""


def test_a_python_program_that_loads_the_runtime_by_path_is_counted(libraries: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PYTHON)
    env = environment(libraries, tmp_path)
    subprocess.run([sys.executable, program, libraries / "libkvprobe_hostrt.so", "fork"], env=env, check=True)
    found, snapshots = recorded(tmp_path)
    assert found["H2D"] == (350, 350, 350 * 64)
    assert sorted(snapshot.calls()["cudaMemcpyAsync"][0] for snapshot in snapshots) == [50, 300]
    assert {snapshot.state for snapshot in snapshots} == {"closed"}


def test_two_runtimes_in_one_process_stay_apart(
    compile_c: Callable[..., Path], libraries: Path, tmp_path: Path
) -> None:
    """Extensions linked to different runtimes each reach their own, though one symbol stands before both."""
    code = "import ctypes, sys\nfor path in sys.argv[1:]: print(ctypes.CDLL(path).copy_once())\n"
    users = []
    for which in (12, 13):
        name = f"libcudart.so.{which}"
        runtime = compile_c("two_runtimes", "-shared", "-fPIC", f"-DWHICH={which}", f"-Wl,-soname,{name}", output=name)
        users.append(
            compile_c(
                "uses_runtime",
                "-shared",
                "-fPIC",
                "-fno-optimize-sibling-calls",
                str(runtime),
                f"-Wl,-rpath,{runtime.parent}",
                output=f"user{which}.so",
            )
        )
    done = subprocess.run(
        [sys.executable, "-c", code, *users, *users],
        env=environment(libraries, tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["12", "13", "12", "13"]
    (path,) = tmp_path.glob("*.kvp")
    slots = read_ring(path).slots()
    assert slots["count"].sum() == 4 and slots["errors"].sum() == 4 and slots["bytes"].sum() == 96


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_listening_nvtx_tool_gets_a_range_for_each_copy(
    program: Path, nvtx_tool: Path, libraries: Path, tmp_path: Path, switch: str
) -> None:
    seen = tmp_path / "seen"
    env = environment(
        libraries, tmp_path, NVTX_INJECTION64_PATH=str(nvtx_tool), NVTX_SEEN=str(seen), KVPROBE_NVTX=switch
    )
    own = said(run(program, env, "link", 100, 1, 1))
    lines = seen.read_text().splitlines() if seen.exists() else []
    assert recorded(tmp_path)[0] == own
    copies = [int(line.split()[1]) for line in lines if line.startswith("cudaMemcpyAsync")]
    if switch == "0":
        assert not lines
    else:
        assert len(copies) == 100 and sum(copies) == sum(own[name][2] for name in ("H2D", "D2H", "D2D"))
        assert lines.count("pop") == len(lines) - lines.count("pop")


@pytest.fixture(scope="module")
def confined(compile_c: Callable[..., Path]) -> Path:
    runtime = compile_c("tiny_runtime", "-shared", "-fPIC", "-Wl,-soname,libtiny.so", output="libtiny.so")
    return compile_c("confined", str(runtime), f"-Wl,-rpath,{runtime.parent}")


def counted(folder: Path) -> int:
    return sum(read_ring(path).calls()["cudaMemcpyAsync"][0] for path in folder.glob("*.kvp"))


def test_copies_made_in_signal_handlers_are_counted(confined: Path, libraries: Path, tmp_path: Path) -> None:
    made = int(run(confined, environment(libraries, tmp_path), "signals", 3_000_000))
    assert made > 3_000_000  # some came from the handler
    assert counted(tmp_path) == made


@pytest.mark.parametrize("mode", ["filter", "strict", "refused"])
def test_a_program_under_seccomp_lives_on_and_is_counted(
    confined: Path, libraries: Path, tmp_path: Path, mode: str
) -> None:
    made = int(run(confined, environment(libraries, tmp_path), mode, 20_000))
    assert made == 20_100
    assert counted(tmp_path) == (100 if mode == "strict" else made)  # strict mode allows no clock: kvprobe steps aside
    if mode == "strict":
        return
    (path,) = tmp_path.glob("*.kvp")
    kept = len(read_ring(path).records())
    # the room there was when it was confined; slow calls have a ring of their own
    assert kept == 20_100 if mode == "refused" else 256 <= kept < 512


def test_a_program_that_is_confined_before_its_first_copy_is_left_alone(
    confined: Path, libraries: Path, tmp_path: Path
) -> None:
    assert int(run(confined, environment(libraries, tmp_path), "unopened", 5000)) == 5000
    assert not list(tmp_path.iterdir())


def test_why_a_process_could_not_be_recorded_is_left_in_the_folder(
    confined: Path, libraries: Path, tmp_path: Path
) -> None:
    assert int(run(confined, environment(libraries, tmp_path), "descriptors", 1000)) == 1100
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(rf"not-recorded-\d+-{errno.EMFILE}", left.name)


def test_a_first_copy_while_a_library_is_being_loaded(
    compile_c: Callable[..., Path], libraries: Path, tmp_path: Path
) -> None:
    runtime = (f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")
    program = compile_c("loading", "-rdynamic", "-ldl", *runtime)
    plugin = compile_c("loading", "-DPLUGIN", "-shared", "-fPIC", output="plugin.so")
    assert run(program, environment(libraries, tmp_path), plugin) == "asked 1\n"
    assert recorded(tmp_path)[0]["H2D"] == (1, 1, 64)
