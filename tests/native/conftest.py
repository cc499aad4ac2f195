"""Compiles the C programs that the tests of the native part run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build

SOURCES = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the native libraries, up to date."""
    build.build()
    return build.LIB


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns `compile(name, *flags)`: programs/<name>.c as an executable."""
    folder = tmp_path_factory.mktemp("programs")

    def compile_program(name: str, *flags: str, output: str = "") -> Path:
        program = folder / (output or name)
        command = [*build.compiler(), "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread", f"-I{build.NATIVE / 'src'}"]
        command += ["-o", str(program), str(SOURCES / f"{name}.c"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return program

    return compile_program
