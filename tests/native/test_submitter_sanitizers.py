"""The submitter, its thread and its callers over the host runtime, under the compiler's sanitizers: not one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.native import build
from kvprobe.probe.ring import read_ring

SOURCES = [
    Path(__file__).parent / "programs" / "submitter_threads.c",
    *sorted((build.NATIVE / "src").glob("*.c")),
    *sorted((build.NATIVE / "hostrt").glob("*.c")),
]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("ending", ["drain", "close", "lose", "abandon"])
def test_no_report_while_callers_ask_wait_fence_and_close(
    compile_sanitized: Callable[..., Path],
    without_report: Callable[..., str],
    tmp_path: Path,
    sanitizer: str,
    ending: str,
) -> None:
    program = compile_sanitized("submitter_threads", sanitizer, SOURCES)
    said = without_report(program, ending, 60, tmp_path / "ring.kvp")
    transfers = int(said.split()[-1])
    assert transfers >= (360 if ending in ("drain", "abandon") else 20)
    assert read_ring(tmp_path / "ring.kvp").calls()["transfer"][0] >= transfers
