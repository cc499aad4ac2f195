"""A real cgroup's limit: kept pinned memory goes before it is reached, and who exceeds it ends as without kvprobe."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.native.test_recycle import MIB, noted, watched

LIMIT_BYTES = 400 * MIB  # the reserve is 256 of it
ROOT = Path("/sys/fs/cgroup")


def make_group() -> tuple[Path, str] | None:
    """A cgroup of this test's own with a limit, and the file that says what it uses; None where none can be made."""
    second = ROOT / "cgroup.controllers"
    try:
        if second.exists() and "memory" in second.read_text().split():
            group, limit, used = ROOT / f"kvprobe-test-{os.getpid()}", "memory.max", "memory.current"
        else:
            group, limit, used = ROOT / "memory" / f"kvprobe-test-{os.getpid()}", "memory.limit_in_bytes", ""
            used = "memory.usage_in_bytes"
        group.mkdir()
    except OSError:
        return None
    try:
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError:
        group.rmdir()
        return None
    return group, used


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    made = make_group()
    if made is None:
        pytest.skip("no cgroup with a limit of memory can be made here")
    try:
        yield made
    finally:
        for _ in range(100):  # the kernel lets go of a process a moment after its end
            with contextlib.suppress(OSError):
                made[0].rmdir()
                break
            time.sleep(0.05)


@pytest.fixture(scope="module")
def program(compile_c: Callable[..., Path], libraries: Path) -> Path:
    include = Path(__file__).parents[2] / "kvprobe" / "native" / "hostrt"
    return compile_c("recycled", f"-I{include}", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


@pytest.fixture(scope="module")
def pageable(compile_c: Callable[..., Path], libraries: Path) -> Path:
    include = Path(__file__).parents[2] / "kvprobe" / "native" / "hostrt"
    return compile_c("pageable", f"-I{include}", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}")


def play(group: Path, program: Path, what: str, **environment: str) -> tuple[str, int]:
    """What it printed in that cgroup, and how it ended."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KV")} | environment
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", str(program), what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.returncode


def test_what_is_kept_goes_before_the_limit_is_reached(
    program: Path, libraries: Path, tmp_path: Path, group: tuple[Path, str]
) -> None:
    alone = play(group[0], program, "presses")
    assert alone == ("0 wrong\n", 0)
    assert play(group[0], program, "presses", **watched(libraries, tmp_path, 300 * MIB)) == alone
    pressed = re.search(r"(\d+) when memory was short", noted(tmp_path))
    assert pressed and int(pressed[1]) > 0


def test_who_exceeds_the_limit_ends_as_without_kvprobe_and_leaves_nothing(
    program: Path, libraries: Path, tmp_path: Path, group: tuple[Path, str]
) -> None:
    alone = play(group[0], program, "exceeds")
    assert alone[1] != 0
    assert play(group[0], program, "exceeds", **watched(libraries, tmp_path, 300 * MIB)) == alone
    procs = (group[0] / "cgroup.procs").read_text()
    assert not procs.strip()


@pytest.mark.parametrize(("what", "fits"), [("fills-most", True), ("fills-more", False)])
def test_staged_copies_need_no_more_than_the_program_s(
    pageable: Path, libraries: Path, tmp_path: Path, group: tuple[Path, str], what: str, fits: bool
) -> None:
    given = {"KVHOST_PAGEABLE_GBPS": "2", "KVPROBE_LOCKED_BYTES": str(8 * MIB)}
    alone = play(group[0], pageable, what)
    assert (alone == ("0 wrong\n", 0)) == fits
    assert play(group[0], pageable, what, **watched(libraries, tmp_path, **given)) == alone
    assert not fits or "pageable copies went through 8 MiB" in noted(tmp_path)
    assert not (group[0] / "cgroup.procs").read_text().strip()
