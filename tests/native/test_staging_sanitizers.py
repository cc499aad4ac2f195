"""Staged copies and their helpers over the host runtime, under the compiler's sanitizers: not one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build

SOURCES = [
    Path(__file__).parent / "programs" / "staging_threads.c",
    build.NATIVE / "interpose" / "staged_copy.c",
    *(build.NATIVE / "src" / name for name in ("clock.c", "image.c", "wire.c")),
    *sorted((build.NATIVE / "hostrt").glob("*.c")),
]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report_while_helpers_move_the_chunks(
    compile_sanitized: Callable[..., Path], without_report: Callable[..., str], sanitizer: str
) -> None:
    program = compile_sanitized("staging_threads", sanitizer, SOURCES, "-rdynamic")
    assert without_report(program, 30, KVHOST_H2D_GBPS="50", KVHOST_D2H_GBPS="50") == "120 copies\n"
