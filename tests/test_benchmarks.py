"""Every benchmark starts: what it imports is there, and it says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_says_what_it_takes(path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.lower().startswith("usage"), done.stderr
