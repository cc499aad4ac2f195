"""The host runtime under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: not one report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvprobe.native import build

HERE = Path(__file__).parent


def compile_with(sanitizer: str, output: Path, sources: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [*build.compiler(), "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-pthread"]
    command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    command += [f"-I{build.NATIVE / 'hostrt'}", f"-I{build.NATIVE / 'src'}", "-o", str(output)]
    return subprocess.run([*command, *map(str, sources), "-ldl", "-lm"], capture_output=True, text=True, check=False)


def program_with(sanitizer: str, folder: Path, subject: str) -> Path:
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if compile_with(sanitizer, folder / "probe", [probe]).returncode:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    program = folder / subject
    sources = [HERE / f"test_hostrt_{subject}.c", *sorted((build.NATIVE / "hostrt").glob("*.c"))]
    built = compile_with(sanitizer, program, [*sources, build.NATIVE / "src" / "clock.c"])
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, *arguments: object) -> str:
    options = {
        "TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1",
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=67",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        env=os.environ | options,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr[:6000]}"
    said = [line for line in done.stderr.splitlines() if "ASan doesn't fully support makecontext" not in line]
    assert not any("WARNING" in line for line in said), done.stderr
    return done.stdout


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 100), ("address,undefined", 150)])
def test_no_report_while_everything_happens_at_once(tmp_path, sanitizer, rounds):
    assert "done" in run(program_with(sanitizer, tmp_path, "stress"), rounds)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report_of_the_virtual_clock(tmp_path, sanitizer):
    program = program_with(sanitizer, tmp_path, "virtual")
    for case in ("actors", "stuck", "reset", "functions", "same_seed_same_history"):
        run(program, case)
