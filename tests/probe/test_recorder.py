"""The ring file of engines: its own in each process, private, gone when it is over, swept where it could not go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import RecordingError
from kvprobe.probe.ring import FILE, read_ring
from kvprobe.runfolder import identity, leftovers


def python(tmp_path: Path, code: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")} | {"TMPDIR": str(tmp_path)} | env
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, text=True, check=False, capture_output=True, timeout=120, env=environment)


START = """
import os, sys
from pathlib import Path
from kvprobe.probe.recorder import Recorder
from kvprobe.probe.ring import read_ring
recorder = Recorder("copies")
path = recorder.path
"""


@pytest.mark.parametrize("leave", ["sys.exit(0)", "recorder.close(); sys.exit(0)"])
def test_a_forked_child_that_leaves_lets_its_parents_file_be(tmp_path: Path, leave: str) -> None:
    done = python(
        tmp_path,
        START
        + f"""
if not os.fork():
    assert recorder.path is None
    {leave}
assert os.wait()[1] == 0
print(path.exists(), recorder.path == path)
""",
    )
    assert done.stdout == "True True\n", done.stderr


def test_a_forked_childs_engine_has_a_file_of_its_own(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        START
        + """
if not os.fork():
    own = Recorder("copies")
    assert own.path != path and read_ring(own.path).pid == os.getpid()
    own.close()
    os._exit(0 if not own.path and path.exists() else 1)
assert os.wait()[1] == 0
recorder.close()
print(path.exists())
""",
    )
    assert done.stdout == "False\n", done.stderr


def test_files_opened_and_closed_one_after_another_take_no_more_memory_than_one(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        START
        + """
import ctypes as ct
from kvprobe.native.library import Record, core
def maps():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(".kvp" in line for line in lines), len(lines)
recorder.close()
found = []
for turn in range(40):
    recorder = Recorder("copies")
    core().kvp_ring_write(ct.byref(Record(call=1, count=1, dur_ns=1)), 1)
    assert read_ring(recorder.path).calls()["cudaMemcpyAsync"][0] == 1
    recorder.close()
    found.append(maps())
print(found[-1][0], found[-1][1] - found[5][1])
""",
    )
    mapped, more = map(int, done.stdout.split())
    assert mapped == 0 and more < 5, done.stderr


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    done = python(
        tmp_path, START + "print(oct(path.stat().st_mode), oct(path.parent.stat().st_mode), path.parent.name)"
    )
    assert done.stdout.split() == ["0o100600", "0o40700", f".kvprobe-{os.geteuid()}"], done.stderr


def test_a_temporary_folder_that_somebody_took_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f".kvprobe-{os.geteuid()}").symlink_to(elsewhere)
    done = python(tmp_path, START + "print(path)")
    assert done.stdout == "None\n" and "it is a link" in done.stderr and not list(elsewhere.iterdir())


def test_what_a_killed_engine_left_is_swept_by_the_next(tmp_path: Path) -> None:
    done = python(tmp_path, START + f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    folder = tmp_path / f".kvprobe-{os.geteuid()}"
    (left,) = folder.glob("engine-*")
    (metrics := tmp_path / f"kvprobe-metrics-{left.name.split('-', 1)[1]}-x").mkdir()
    me = identity.of(os.getpid())
    names = (f"{me}-1", f"{me.pid}-{me.namespace + 1}-1-1", "1", f"{me.pid}-{me.namespace}-0-1")
    kept = [folder / f"engine-{name}.kvp" for name in names]
    for path in kept:
        path.touch()
    done = python(tmp_path, START + "print(path)")
    assert done.returncode == 0 and not left.exists() and not metrics.exists()
    assert all(path.exists() for path in kept)  # alive, of another namespace, of nobody known


def test_a_sweep_makes_nothing_and_follows_no_link(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert leftovers.sweep() == [] and not list(tmp_path.iterdir())
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").touch()
    dead = f"{2**22 + 1}-{identity.of(os.getpid()).namespace}-5"
    (tmp_path / f"kvprobe-metrics-{dead}-x").symlink_to(precious)
    assert len(leftovers.sweep()) == 1 and (precious / "file").exists()


def header(**fields: object) -> bytes:
    sizes = {"version": 1, "header_bytes": 4096, "record_bytes": 64, "slot_bytes": 1152, "buckets": 128}
    claims = {"slot_count": 65536, "ring_capacity": 2**32, "slow_capacity": 2**32, "section_bytes": 2**40, "pid": 1}
    made = {"magic": b"KVPRING1", "sections_max": 1024, "sections_used": 1024, **sizes, **claims, **fields}
    one = np.zeros(1, FILE)
    for name, value in made.items():
        one[name] = value
    return one.tobytes().ljust(4096, b"\0")


@pytest.mark.parametrize("claims", [{}, {"section_bytes": 2**39 + 2**30}, {"ring_capacity": 64, "slow_capacity": 64}])
def test_a_header_that_claims_more_than_the_file_holds_costs_no_memory(tmp_path: Path, claims: dict[str, int]) -> None:
    section = (
        b"\xff" * 7
        + b"\x10"
        + b"\x40\0\0\0\0\0\0\0"
        + b"\xff\xff\0\0" * 4
        + bytes(32)
        + b"\xff\xff\xff\xff\0\0\0\0" * 2
    )
    (tmp_path / "x.kvp").write_bytes((header(**claims) + section).ljust(8320, b"\0"))
    done = python(
        tmp_path,
        """
import resource, sys
from kvprobe.probe.ring import read_ring
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_ring(sys.argv[1]).records()
except Exception as error:
    assert type(error).__name__ == "RecordingError", error
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""",
        tmp_path / "x.kvp",
        OPENBLAS_NUM_THREADS="1",
    )
    assert int(done.stdout) < 100_000, done.stderr  # KiB


def test_a_pipe_that_is_named_as_a_ring_file_does_not_hold_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.kvp")
    with pytest.raises(RecordingError, match="not a regular file"):
        read_ring(tmp_path / "x.kvp")


def test_a_process_is_known_by_more_than_its_number() -> None:
    me = identity.of(os.getpid())
    assert me.running() is True
    assert identity.Identity(me.pid, me.namespace, me.start_ticks + 1).running() is False  # the number went round
    assert identity.Identity(me.pid, me.namespace + 1, me.start_ticks).running() is None
    assert identity.Identity(2**22 + 1, me.namespace, 5).running() is False


def test_a_ring_file_says_whose_it_is(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        START
        + """
ring = read_ring(path)
from kvprobe.runfolder import identity
assert identity.Identity(ring.pid, ring.pid_namespace, ring.start_ticks) == identity.of(os.getpid())
print(ring.running())
""",
    )
    assert done.stdout == "True\n", done.stderr
