"""Who follows CONTRIBUTING.md to add a cause, a reader or a server passes every gate: its commands run as printed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # whole test files run in each
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## Add a (\w+)\n.*?^```sh\n(.*?)^```", PAGE, re.M | re.S))
# Environments and what tools leave behind; mypy's cache and compiled modules only save time.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".pytest_cache", ".ruff_cache", ".hypothesis")


# Damaged files of the formats that were there before: the added reader is asked no more than whether one is its own,
# which other tests of these files try. They take a third of the time, and run where nothing was added.
THERE_BEFORE = "not (mutants_are_read or compressed_bomb or damaged_and_cut_xz) or csv"


def run(command: str, tree: Path) -> None:
    # subprocesses of the tests import this tree, too, wherever they run
    options = f"-p no:cacheprovider --basetemp={shlex.quote(str(tree.parent / 'temporary'))}"
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": options}
    for name in [name for name in env if name.startswith("PYTEST_XDIST") or name == "PYTEST_CURRENT_TEST"]:
        del env[name]
    done = subprocess.run(["sh", "-ec", command], cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"


def steps(section: str) -> list[str]:
    return SECTIONS[section].replace("\\\n", "").splitlines()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree in which somebody did all that the page says."""
    copy = tmp_path_factory.mktemp("contributor") / "kvprobe"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for section in SECTIONS:
        for step in steps(section):
            if step.startswith(("cp ", "cat ", "sed ")):
                before = {path: path.read_bytes() for path in copy.glob("kvprobe/**/*.py")}
                run(step, copy)
                changed = [path for path, text in before.items() if path.read_bytes() != text]
                assert len(changed) == step.startswith("sed "), f"{step} changed {changed}"
    return copy


def test_there_are_three_ways_in_and_each_registers_by_one_line():
    assert list(SECTIONS) == ["cause", "reader", "server"]
    for section in SECTIONS:
        kinds = [step.split()[0] for step in steps(section)]
        assert set(kinds[:-3]) <= {"cp", "cat"} and kinds[-3:] == ["sed", "make", ".venv/bin/python"]


@pytest.mark.parametrize("check", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_linters_have_nothing_to_say(tree, check):
    tool = check.split()[0]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed here (make lint)")
    run(f"{shlex.quote(sys.executable)} -m {check}", tree)


def test_the_tests_of_each_way_in_pass(tree):
    """All in one run: the files that several of them name take most of the time."""
    commands = [steps(section)[-1].split() for section in SECTIONS]
    for command in commands:
        assert command[:3] == [".venv/bin/python", "-m", "pytest"]
    files = dict.fromkeys(file for command in commands for file in command[3:])
    run(f"{shlex.quote(sys.executable)} -m pytest -k {shlex.quote(THERE_BEFORE)} {' '.join(files)}", tree)


def test_the_intercepted_call_is_what_the_interposer_has():
    (example,) = re.findall(r"^   ```c\n(.*?)^   ```", PAGE, re.M | re.S)
    code = (ROOT / "kvprobe" / "native" / "interpose" / "wrap.c").read_text().splitlines()
    for line in example.splitlines():
        assert line.removeprefix("   ") in code, line


def test_every_command_knows_what_was_added(tree):
    kvprobe = f"{shlex.quote(sys.executable)} -m kvprobe"
    run(f"{kvprobe} causes slow_memsets", tree)
    run(f"{kvprobe} patches -v --server toyserver | grep -q toyserver.cache", tree)
    (tree / "copies.csv").write_text("name,start_ns,end_ns,stream,bytes\ncudaMemcpyAsync,1,2,7,8\n")
    run(f"{kvprobe} stats copies.csv | grep -q cudaMemcpyAsync", tree)
