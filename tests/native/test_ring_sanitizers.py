"""libkvprobe's ring writer under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: not one report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvprobe.native import build
from kvprobe.probe.ring import read_ring

PROGRAM = Path(__file__).parent / "programs" / "ring_writer.c"


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("sanitized") / "ring_writer"
    command = [*build.compiler(), "-std=gnu11", "-g", "-O1", "-pthread", f"-fsanitize={request.param}"]
    command += ["-fno-sanitize-recover=undefined", f"-I{build.NATIVE / 'src'}", "-o", str(program)]
    probe = program.with_name("probe.c")
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([*command[:-1], str(program), str(probe)], capture_output=True, check=False).returncode:
        pytest.skip(f"the compiler has no -fsanitize={request.param}")
    sources = [PROGRAM, *sorted((build.NATIVE / "src").glob("*.c"))]
    done = subprocess.run([*command, *map(str, sources), "-ldl", "-lm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("mode", ["plain", "small", "sequence", "streams"])
def test_no_report_while_threads_come_and_go(writer: Path, tmp_path: Path, mode: str) -> None:
    options = {"TSAN_OPTIONS": "exitcode=66", "ASAN_OPTIONS": "detect_leaks=1:exitcode=67"}
    command = [str(writer), mode, str(tmp_path / "a.kvp"), "2000", "12"]
    done = subprocess.run(command, env=os.environ | options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:6000]
    assert "WARNING" not in done.stderr and "runtime error" not in done.stderr, done.stderr[:6000]
    assert read_ring(tmp_path / "a.kvp").calls()["cudaMemcpyAsync"][0] >= 2000
