"""The plugin without torch: what breaks a rule fails however it hides, and what breaks none passes beside what does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# a copy of its own for each module that names it: `under=` tells them apart
COPIES = """
import ctypes as ct, mmap
from kvprobe.native.library import path_of

runtime = ct.CDLL(str(path_of("libkvprobe_hostrt.so")))
MEMORY = mmap.mmap(-1, 8 << 20)
PAGEABLE = ct.addressof(ct.c_char.from_buffer(MEMORY)) + (2 << 20) - 1 & ~((2 << 20) - 1)
GPU, STREAM, PINNED = ct.c_void_p(), ct.c_void_p(), ct.c_void_p()
assert runtime.cudaMalloc(ct.byref(GPU), ct.c_size_t(4 << 20)) == 0
assert runtime.cudaStreamCreateWithPriority(ct.byref(STREAM), 1, 0) == 0
assert runtime.cudaHostAlloc(ct.byref(PINNED), ct.c_size_t(1 << 20), 0) == 0

def copy(address=PAGEABLE, size=4096):
    assert runtime.cudaMemcpyAsync(GPU, ct.c_void_p(address), ct.c_size_t(size), 1, STREAM) == 0

def pinned():
    copy(PINNED.value, 65536)
"""


NO_TORCH = "raise ImportError('none here: it takes longer than the rest')"


def outcomes(folder: Path, tests: str, *arguments: str, **files: str) -> dict[str, str]:
    """PASSED or FAILED of each test; `files` are modules beside it. Of plugins, kvprobe's alone is there."""
    for name, text in {"copies": COPIES, "test_it": tests, "torch": NO_TORCH, **files}.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", "--kvprobe"]
    command += ["-p", "kvprobe.testing.plugin", "--kvprobe-device", "host", *arguments, "test_it.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    lines = [line.split(" ", 2)[:2] for line in done.stdout.splitlines() if "::test_" in line]
    found = {name.partition("::")[2]: outcome for outcome, name in lines if outcome in ("PASSED", "FAILED", "ERROR")}
    assert found, done.stdout + done.stderr
    return found


def test_a_threads_first_call_that_finds_a_full_queue_is_told(tmp_path):
    tests = """
import pytest, threading
from copies import pinned

def fill():
    for _ in range(3000):
        pinned()

@pytest.fixture
def full():
    fill()

@pytest.mark.kvprobe(forbid="full-queue")
def test_one_copy(full):
    pinned()

@pytest.mark.kvprobe(forbid="full-queue")
def test_threads_of_one_copy_each(full):
    threads = [threading.Thread(target=pinned) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

@pytest.mark.kvprobe(forbid="full-queue")
def test_none(full):
    pass
"""
    found = outcomes(tmp_path, tests)
    assert found == {"test_one_copy": "FAILED", "test_threads_of_one_copy_each": "FAILED", "test_none": "PASSED"}


DEEP = """
import sys
from copies import copy
sys.setrecursionlimit(20000)

def go(depth):
    copy() if not depth else go(depth - 1)
"""


@pytest.mark.parametrize("held", [False, True], ids=["without the GIL", "with the GIL"])
def test_a_module_far_down_the_stack_is_seen(tmp_path, held):
    tests = """
import pytest
import outer, other

@pytest.mark.kvprobe(forbid="pageable", under="outer")
@pytest.mark.parametrize("depth", [50, 99, 100, 120, 5000])
def test_below(depth):
    outer.start(depth)

@pytest.mark.kvprobe(forbid="pageable", under="outer")
@pytest.mark.parametrize("depth", [50, 99, 100, 120, 5000])
def test_beside(depth):
    other.start(depth)
"""
    start = "import deep\ndef start(depth):\n    deep.go(depth)\n"
    copies = COPIES.replace("ct.CDLL", "ct.PyDLL") if held else COPIES
    found = outcomes(tmp_path, tests, deep=DEEP, outer=start, other=start, copies=copies)
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == {
        f"test_below[{depth}]" for depth in (50, 99, 100, 120, 5000)
    }
    assert len(found) == 10


def test_a_stack_that_cannot_be_seen_whole_passes_nothing(tmp_path):
    """The main thread holds the GIL until the copy has returned: nobody can walk the stack of the one that copies."""
    copies = COPIES + (
        """
import os
HERE, READY, DONE = os.pipe(), os.pipe(), os.pipe()

def copy(address=PAGEABLE, size=4096):  # tells, waits, copies and tells in one call, which needs no GIL
    program.run(GPU, ct.c_void_p(address), STREAM, HERE[1], READY[0], DONE[1])
"""
    )
    helper = r"""
#include <stddef.h>
#include <unistd.h>
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int run(void *to, void *from, void *stream, int here, int ready, int done) {
    char c = 0;
    int code = write(here, &c, 1) == 1 && read(ready, &c, 1) == 1 ? cudaMemcpyAsync(to, from, 4096, 1, stream) : -1;
    return write(done, &c, 1) == 1 ? code : -1;
}
int let_it_copy(int ready, int done) {
    char c = 0;
    return write(ready, &c, 1) == 1 && read(done, &c, 1) == 1;
}
"""
    from kvprobe.native.build import compiler
    from kvprobe.native.library import path_of

    runtime = path_of("libkvprobe_hostrt.so")
    rpath = f"-Wl,-rpath,{runtime.parent}"
    (tmp_path / "helper.c").write_text(helper)
    subprocess.run(
        [*compiler(), "-shared", "-fPIC", "-o", tmp_path / "helper.so", tmp_path / "helper.c", runtime, rpath],
        check=True,
    )
    copies = copies.replace("import os\n", "import os\nprogram = ct.CDLL('./helper.so')\n")
    tests = """
import ctypes as ct, os, pytest, threading
import copies, deep

@pytest.mark.kvprobe(forbid="pageable", under="nowhere")
def test_it():
    thread = threading.Thread(target=deep.go, args=(200,))
    thread.start()
    os.read(copies.HERE[0], 1)
    assert ct.PyDLL("./helper.so").let_it_copy(copies.READY[1], copies.DONE[0])  # with the GIL
    thread.join()
"""
    assert outcomes(tmp_path, tests, deep=DEEP, copies=copies) == {"test_it": "FAILED"}


def test_calls_outside_under_take_no_room(tmp_path):
    tests = """
import pytest
import copies, other

@pytest.mark.kvprobe(forbid="pageable", under="copies")
def test_below():
    other.many(copies.copy, 1)

@pytest.mark.kvprobe(forbid="pageable", under="other")
def test_many_below():
    other.many(copies.copy, 1001)

@pytest.mark.kvprobe(forbid="pageable", under="elsewhere")
def test_many_outside():
    other.many(copies.copy, 1001)

@pytest.mark.kvprobe(forbid="pageable", under="tiefer.gelände")
def test_below_a_name_that_is_not_ascii():
    import tiefer.gelände
    tiefer.gelände.go()
"""
    (tmp_path / "tiefer").mkdir()
    (tmp_path / "tiefer" / "gelände.py").write_text("import copies\ndef go():\n    copies.copy()\n")
    other = "def many(copy, count):\n    for _ in range(count):\n        copy()\n"
    found = outcomes(tmp_path, tests, other=other)
    assert found == {
        "test_below": "FAILED",
        "test_many_below": "FAILED",
        "test_many_outside": "PASSED",
        "test_below_a_name_that_is_not_ascii": "FAILED",
    }


def test_a_full_temporary_folder_lets_nothing_pass(tmp_path):
    """No file of the process can grow any more, as on a full disk."""
    tests = """
import copies, pytest, resource, signal

@pytest.fixture
def full():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

@pytest.mark.kvprobe(forbid="pageable")
def test_fifty(full):
    for _ in range(50):
        copies.copy()

@pytest.mark.kvprobe(forbid="pageable", under="copies")
def test_below(full):
    copies.copy()

@pytest.mark.kvprobe(forbid="pageable")
def test_none(full):
    copies.pinned()
"""
    assert outcomes(tmp_path, tests) == {"test_fifty": "FAILED", "test_below": "FAILED", "test_none": "PASSED"}


def test_pinned_memory_beside_pageable_memory_is_pinned(tmp_path):
    tests = """
import ctypes as ct, pytest
import copies

@pytest.fixture(autouse=True, scope="module")
def registered():
    for at in (0, 1 << 20):
        assert copies.runtime.cudaHostRegister(ct.c_void_p(copies.PAGEABLE + at), ct.c_size_t(65536), 0) == 0

@pytest.fixture
def neighbour():
    copies.copy(copies.PAGEABLE + (512 << 10))
    copies.copy(copies.PAGEABLE + 65536)

@pytest.mark.kvprobe(forbid="pageable")
def test_pinned(neighbour):
    for at in (0, 4096, 65535, 1 << 20):
        copies.copy(copies.PAGEABLE + at, 1)

@pytest.mark.kvprobe(forbid="pageable")
@pytest.mark.parametrize("at", [65536, 512 << 10, (1 << 20) - 1])
def test_beside(at):
    copies.copy(copies.PAGEABLE)
    copies.copy(copies.PAGEABLE + at, 1)
"""
    found = outcomes(tmp_path, tests)
    assert found.pop("test_pinned") == "PASSED"
    assert list(found.values()) == ["FAILED"] * 3
