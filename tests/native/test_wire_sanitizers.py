"""Damaged cells under AddressSanitizer and UndefinedBehaviorSanitizer: refused, and never read or written too far."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build

PROGRAM = Path(__file__).parent / "programs" / "wire_damaged.c"


def test_damaged_cells_are_read_within_their_bounds(
    compile_sanitized: Callable[..., Path], without_report: Callable[..., str]
) -> None:
    program = compile_sanitized("wire_damaged", "address,undefined", [PROGRAM, build.NATIVE / "src" / "wire.c"])
    refused, _, tried, _ = without_report(program, 4000, 7).split()
    assert int(tried) > 10_000
    assert refused == tried


def test_the_format_is_one_header_for_c_and_c_plus_plus(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    source = tmp_path / "wire.cpp"
    source.write_text('#include "wire.h"\nunsigned long long f(unsigned long long n) { return kvp_wire_seed(n); }\n')
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{build.NATIVE / 'src'}", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
