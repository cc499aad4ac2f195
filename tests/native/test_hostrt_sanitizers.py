"""The host runtime under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: not one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build

HERE = Path(__file__).parent
SOURCES = ("clock.c", "image.c", "wire.c")
RUNTIME = [*sorted((build.NATIVE / "hostrt").glob("*.c")), *(build.NATIVE / "src" / name for name in SOURCES)]


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 40), ("address,undefined", 60)])
def test_no_report_while_everything_happens_at_once(
    compile_sanitized: Callable[..., Path], without_report: Callable[..., str], sanitizer: str, rounds: int
) -> None:
    program = compile_sanitized("stress", sanitizer, [HERE / "test_hostrt_stress.c", *RUNTIME])
    assert "done" in without_report(program, rounds)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report_of_the_virtual_clock(
    compile_sanitized: Callable[..., Path], without_report: Callable[..., str], sanitizer: str
) -> None:
    program = compile_sanitized("virtual", sanitizer, [HERE / "test_hostrt_virtual.c", *RUNTIME])
    for case in ("actors", "stuck", "reset", "functions", "same_seed_same_history"):
        without_report(program, case)
