"""Compiles the C programs that the tests of the native part run, and runs them under the compiler's sanitizers."""

from __future__ import annotations

import fcntl
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
    """Returns `compile(name, sanitizer, sources, *flags)`; skips where the compiler cannot.

    Each source is compiled once a session and sanitizer, whichever worker wants it first, and each program is linked
    once: `flags` are of a program's own sources and of linking, and the same `name` is the same program.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared /= "sanitized"
    common = [*build.compiler(), "-std=gnu11", "-g1", "-O1", "-Wall", "-Wextra", "-pthread", "-fno-omit-frame-pointer"]
    # wrap.c inlines one body in some 3000 functions: compiled as calls, they read and write the same, in half the time
    native = ["-fPIC", "-fvisibility=hidden", "-Dalways_inline=noinline", "-Wno-attributes"]

    def made(output: Path, command: Sequence[str]) -> str:
        """What the compiler said, unless it made `output`; another worker may have."""
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.with_name(f"{output.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if output.exists():
                return ""
            partial = output.with_name(f"{output.name}.partial")
            done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
            if done.returncode:
                return done.stderr or "failed"
            partial.replace(output)
        return ""

    def compile_program(name: str, sanitizer: str, sources: Sequence[Path], *flags: str) -> Path:
        folder = shared / sanitizer.replace(",", "-")  # the linker's options have commas between them
        program = folder / "in" / name
        # dl_iterate_phdr: ThreadSanitizer knows that the loader, under its lock, wrote a library's name, but misses the
        # zero behind a name of so many whole words, and would report whoever reads that
        if len(str(program)) % 8 == 0:
            program = folder / "inside" / name
        command = [*common, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined"]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{os.getpid()}.c"
        probe.write_text("int main(void) { return 0; }\n")
        if made(folder / "probe", [*command, str(probe)]):
            pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
        # the interposer has a core of its own; its objects are nobody else's
        private = [flag for flag in flags if flag.startswith("-DKVP_PRIVATE_CORE")]
        objects, own = [], []
        for source in sources:
            if build.NATIVE not in source.parents:
                own.append(str(source))
                continue
            kind = "private-" if private else ""
            one = folder / f"{kind}{source.parent.name}-{source.name}.o"
            # the same loads and stores are watched, and most functions never run
            plain = ["-O0"] if source.name == "wrap.c" else []
            said = made(one, [*command, *plain, *native, *private, *INCLUDES, "-c", str(source)])
            assert not said, said
            objects.append(str(one))
        said = made(program, [*command, *INCLUDES, *own, *objects, *flags, "-ldl", "-lm"])
        assert not said, said
        return program

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
