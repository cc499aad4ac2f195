"""libkvprobe's ring writer under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: not one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build
from kvprobe.probe.ring import read_ring

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = [build.NATIVE / "src" / name for name in ("ring.c", "clock.c", "secrets.c")]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("mode", ["plain", "small", "sequence", "streams"])
def test_no_report_while_threads_come_and_go(
    compile_sanitized: Callable[..., Path],
    without_report: Callable[..., str],
    tmp_path: Path,
    sanitizer: str,
    mode: str,
) -> None:
    writer = compile_sanitized("ring_writer", sanitizer, [PROGRAMS / "ring_writer.c", *SOURCES])
    without_report(writer, mode, tmp_path / "a.kvp", 2000, 12)
    assert read_ring(tmp_path / "a.kvp").calls()["cudaMemcpyAsync"][0] >= 2000


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("mode", ["attaching", "writing"])
def test_no_report_while_a_file_is_opened_again(
    compile_sanitized: Callable[..., Path],
    without_report: Callable[..., str],
    tmp_path: Path,
    sanitizer: str,
    mode: str,
) -> None:
    program = compile_sanitized("ring_reopened", sanitizer, [PROGRAMS / "ring_reopened.c", *SOURCES])
    without_report(program, mode, tmp_path, 1000)
    assert read_ring(tmp_path / "next.kvp").calls()["cudaMemcpyAsync"][0] == 2001
