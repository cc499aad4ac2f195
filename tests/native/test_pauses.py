"""What CPU time a thread and its process use between two CUDA calls, of real processes; shares that are far apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.model import Table

PROGRAM = """
import ctypes as ct, os, threading, time
lib, stream, u64 = ct.CDLL(os.environ["KVPROBE_HOSTRT"]), ct.c_void_p(), ct.c_uint64
assert lib.cudaStreamCreateWithFlags(ct.byref(stream), 1) == 0
def step():
    assert lib.cudaMemsetAsync(None, 0, u64(0), stream) == 0
    assert lib.cudaStreamSynchronize(stream) == 0
def burn(clock):
    until = time.clock_gettime_ns(clock) + 200_000_000
    while time.clock_gettime_ns(clock) < until:
        pass
def waits():
    time.sleep(0.2)
def works():
    burn(time.CLOCK_THREAD_CPUTIME_ID)
def waits_for_another():
    other = threading.Thread(target=works)
    other.start()
    other.join()
step()
time.sleep(0.01)
step()  # from here on it is known what was used before a pause
within = []
for _ in range(3):
    within.append(time.monotonic_ns())
    {}()
    step()
open(os.path.join(os.environ["KVPROBE_RUN"], "within"), "w").write(repr(within))
"""


def pauses_of(libraries: Path, folder: Path, what: str, program: str = PROGRAM, **more: str) -> Table:
    env = {**os.environ, "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder)}
    env |= {"KVPROBE_HOSTRT": str(libraries / "libkvprobe_hostrt.so"), "KVHOST_CLOCK": "real", **more}
    subprocess.run([sys.executable, "-c", program.replace("{}", what)], env=env, check=True)
    return read(folder).pauses


def the_three(pauses: Table, folder: Path, slept: bool) -> list[tuple[int, int]]:
    """CPU time of the thread and of its process in the pauses that the program makes, whichever else there are."""
    within = np.array(json.loads((folder / "within").read_text()))[:, None]
    long = np.flatnonzero(((pauses["start_ns"] <= within) & (within < pauses["end_ns"])).any(axis=0))
    assert len(long) == 3 and (pauses["end_ns"] - pauses["start_ns"])[long].min() > 150_000_000
    assert not slept or (pauses["gave_up"][long] > 0).all()
    return [(int(pauses["thread_ns"][row]), int(pauses["process_ns"][row])) for row in long]


def test_a_thread_that_sleeps_uses_no_cpu_and_nobody_else_does(libraries: Path, tmp_path: Path) -> None:
    for thread, process in the_three(pauses_of(libraries, tmp_path, "waits"), tmp_path, True):
        assert max(thread, process) < 60_000_000


def test_a_thread_that_works_is_told_by_its_own_time(libraries: Path, tmp_path: Path) -> None:
    for thread, process in the_three(pauses_of(libraries, tmp_path, "works"), tmp_path, False):
        assert min(thread, process) > 195_000_000


def test_another_thread_that_works_is_told_by_the_processs_time(libraries: Path, tmp_path: Path) -> None:
    for thread, process in the_three(pauses_of(libraries, tmp_path, "waits_for_another"), tmp_path, True):
        assert process > 195_000_000
        assert thread < 60_000_000


OWN = """
import ctypes as ct, os, time
lib, stream, u64 = ct.CDLL(os.environ["KVPROBE_HOSTRT"]), ct.c_void_p(), ct.c_uint64
assert lib.cudaStreamCreateWithFlags(ct.byref(stream), 1) == 0
def step():
    assert lib.cudaMemsetAsync(None, 0, u64(0), stream) == 0
    assert lib.cudaStreamSynchronize(stream) == 0
def used():
    own = 0
    for task in os.listdir("/proc/self/task"):
        if open(f"/proc/self/task/{task}/comm").read() == "kvprobe-marks\\n":
            own = int(open(f"/proc/self/task/{task}/schedstat").read().split()[0])
    return time.process_time_ns(), own
step()
time.sleep(0.05)
step()
before, within = used(), time.monotonic_ns()
time.sleep(1.5)
after = used()
step()
told = [within, after[0] - before[0], after[1] - before[1]]
open(os.path.join(os.environ["KVPROBE_RUN"], "used"), "w").write(repr(told))
"""


def test_what_the_helper_that_reads_marks_uses_is_no_work_of_the_program(libraries: Path, tmp_path: Path) -> None:
    pauses = pauses_of(libraries, tmp_path, "", OWN, KVPROBE_MARKS="on")
    within, process, helper = json.loads((tmp_path / "used").read_text())
    assert helper > 3_000_000
    (row,) = np.flatnonzero((pauses["start_ns"] <= within) & (within < pauses["end_ns"]))
    assert int(pauses["process_ns"][row]) < process - helper + 2_000_000


def test_nothing_is_told_where_only_totals_are_kept(libraries: Path, tmp_path: Path) -> None:
    assert not pauses_of(libraries, tmp_path, "waits", KVPROBE_DETAIL="totals").rows
