"""The reserve of a packed pool under several threads and the compiler's sanitizers: not one report, no tail twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build

SOURCES = [Path(__file__).parent / "programs" / "reserve_threads.c", build.NATIVE / "src" / "reserve.c"]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report_and_no_tail_is_lost_while_threads_store_and_give_up(
    compile_sanitized: Callable[..., Path], without_report: Callable[..., str], sanitizer: str
) -> None:
    program = compile_sanitized("reserve_threads", sanitizer, SOURCES)
    first_report = {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}  # where one comes, thousands do
    assert int(without_report(program, 3000, **first_report).split()[-1]) > 1000
