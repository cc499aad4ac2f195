"""Compiles the C programs that the tests of the native part run, and runs them under the compiler's sanitizers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvprobe.native import build

SOURCES = Path(__file__).parent / "programs"
INCLUDES = [f"-I{folder}" for folder in (build.NATIVE / "src", build.NATIVE / "hostrt", SOURCES.parent)]
REPORTS = {
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1",
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=67",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


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


@pytest.fixture(scope="session")
def nvtx_tool(compile_c: Callable[..., Path]) -> Path:
    """A tool for NVTX_INJECTION64_PATH that writes ranges of the domain `kvprobe` to the file NVTX_SEEN."""
    include = build.nvtx_include()
    if include is None:
        pytest.skip("the package nvidia-nvtx is not installed")
    return compile_c("nvtx_tool", "-shared", "-fPIC", "-isystem", str(include), output="libtool.so")


@pytest.fixture(scope="session")
def compile_sanitized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns `compile(name, sanitizer, sources, *flags)`: built once a session; skips where the compiler cannot."""
    made: dict[tuple[str, str], Path] = {}

    def compiled(output: Path, sanitizer: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
        command = [*build.compiler(), "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-pthread", *INCLUDES]
        command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        command += ["-o", str(output), *map(str, sources), *flags, "-ldl", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stderr or "failed" if done.returncode else ""

    def compile_program(name: str, sanitizer: str, sources: Sequence[Path], *flags: str) -> Path:
        if (name, sanitizer) not in made:
            program = tmp_path_factory.mktemp("sanitized") / name
            probe = program.with_name("probe.c")
            probe.write_text("int main(void) { return 0; }\n")
            if compiled(probe.with_suffix(""), sanitizer, [probe], []):
                pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
            said = compiled(program, sanitizer, sources, flags)
            assert not said, said
            made[name, sanitizer] = program
        return made[name, sanitizer]

    return compile_program


@pytest.fixture(scope="session")
def without_report() -> Callable[..., str]:
    """Returns `run(program, *arguments, **environment)`: what it printed, once no sanitizer has reported anything."""

    def run(program: Path, *arguments: object, **environment: str) -> str:
        command = [str(program), *map(str, arguments)]
        variables = os.environ | REPORTS | environment
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr[:6000]}"
        said = [line for line in done.stderr.splitlines() if "ASan doesn't fully support makecontext" not in line]
        assert not any("WARNING" in line or "runtime error" in line for line in said), done.stderr[:6000]
        return done.stdout

    return run
