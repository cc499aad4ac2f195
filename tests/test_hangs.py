"""A test that hangs where no Python runs ends the run, with its name and the stacks of all threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HANG = "import ctypes, threading, pytest\ndef hang(): ctypes.PyDLL(None).pause()\n"
PLACES = {
    "call": "def test_that_hangs(): hang()",
    "teardown": """
@pytest.fixture
def things():
    yield
    hang()
def test_that_hangs(things): assert False
""",
    "exit": """
def hang_at_exit(): threading.Event().wait()
def test_that_ends(): threading.Thread(target=hang_at_exit).start()
""",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_hang_ends_the_run(place, tmp_path):
    test = tmp_path / "test_hang.py"
    test.write_text(HANG + PLACES[place])
    command = [sys.executable, "-m", "pytest", "-vv", "-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=8", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (0:00:08)!" in done.stderr, done.stdout
    assert "in hang" in done.stderr
    assert "test_hang.py::test_that_" in done.stdout
