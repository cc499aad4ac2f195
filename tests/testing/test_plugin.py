"""The pytest plugin: what breaks a rule is found with its line, what breaks none passes; no GPU is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TESTS = """
import pytest, torch

GPU = torch.device("cuda:0")

def pinned(n=1000):
    return torch.ones(n, pin_memory=True)

@pytest.fixture
def there():
    return torch.ones(1000, device=GPU), pinned()

def warm():
    pinned().to(GPU, non_blocking=True).to("cpu", non_blocking=True)
    torch.cuda.synchronize()

@pytest.mark.kvprobe
def test_good(there):
    gpu, cpu = there
    gpu.copy_(cpu, non_blocking=True)
    cpu.copy_(gpu, non_blocking=True)

@pytest.mark.kvprobe
def test_pageable(there):
    there[0].copy_(torch.ones(1000), non_blocking=True)      # line: pageable

@pytest.mark.kvprobe
def test_blocking(there):
    there[0].copy_(there[1])                                 # line: blocking

@pytest.mark.kvprobe
def test_synchronisation(there):
    torch.cuda.synchronize()                                 # line: synchronisation

@pytest.mark.kvprobe
def test_allocation(there):
    torch.empty(64 << 20, dtype=torch.uint8, device=GPU)     # line: allocation

@pytest.mark.kvprobe
def test_pinning():
    torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)  # line: pinning

@pytest.mark.kvprobe(forbid="full-queue")
def test_full_queue(there):
    big, host = torch.empty(1 << 16, device=GPU), torch.empty(1 << 16, pin_memory=True)
    for _ in range(1100):
        big.copy_(host, non_blocking=True)                   # line: full-queue

@pytest.mark.kvprobe(forbid="full-queue")
def test_queue_not_full(there):
    for _ in range(900):
        there[0].copy_(there[1], non_blocking=True)

def test_fixture(kvprobe, there):
    there[0].item() if there[0].numel() == 1 else there[0].sum().item()
    with kvprobe.hot_path(allow="synchronisation blocking"):
        there[0].sum().item()
    with kvprobe.hot_path():
        there[0].sum().item()                                # line: item

def copies(gpu):
    return gpu.to("cpu")

@pytest.mark.kvprobe(under="elsewhere")
def test_only_below_a_module(there):
    copies(there[0])

def test_not_marked(there):
    copies(there[0])

@pytest.mark.kvprobe
def test_wrong_by_itself(there):
    copies(there[0])
    assert 1 == 2, "its own failure"
"""


def pytest_run(folder: Path, *arguments: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *arguments, "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it.py::(\w+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {name: outcome for outcome, name in found}


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(TESTS.splitlines(), 1) if f"# line: {mark}" in line)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return pytest_run(tmp_path_factory.mktemp("gated"), "--kvprobe", "--kvprobe-device", "host")


def test_what_holds_up_nobody_passes(gated):
    passed = {name for name, outcome in outcomes(gated).items() if outcome == "PASSED"}
    assert passed == {"test_good", "test_queue_not_full", "test_only_below_a_module", "test_not_marked"}


@pytest.mark.parametrize("rule", ["pageable", "blocking", "synchronisation", "allocation", "pinning", "full-queue"])
def test_each_rule_names_its_line(gated, rule):
    body = re.split(r"^_{3,} (\w+) _{3,}$", gated.stdout, flags=re.MULTILINE)
    said = dict(zip(body[1::2], body[2::2], strict=True))[f"test_{rule.replace('-', '_')}"]
    rules = re.findall(r"^([a-z-]+): .*test_it.py:(\d+) in", said, re.MULTILINE)
    assert rules == [(rule, str(line_of(rule)))], said


def test_who_called_ends_at_the_test(gated):
    assert not re.findall(r"^    called by .*(?:/pluggy/|/_pytest/).*$", gated.stdout, re.MULTILINE)


def test_the_fixture_judges_its_block_only(gated):
    assert outcomes(gated)["test_fixture"] == "FAILED"
    assert (
        f"blocking: a copy that the host waits for: {gated_file(gated)}:{line_of('item')} in test_fixture"
        in gated.stdout
    )


def gated_file(done: subprocess.CompletedProcess[str]) -> str:
    return re.findall(r"(/\S+/test_it.py):\d+ in test_fixture", done.stdout)[0]


def test_a_test_that_fails_by_itself_keeps_its_own_failure(gated):
    assert "its own failure" in gated.stdout


def test_without_the_option_nothing_is_judged_and_nothing_loaded(tmp_path):
    tests = """
import sys, pytest
@pytest.mark.kvprobe(forbid="pageable")
def test_marked(): pass
def test_fixture(kvprobe):
    with kvprobe.hot_path() as seen:
        assert seen is None
def test_loaded():
    assert not [name for name in sys.modules if name.startswith(("kvprobe.native", "kvprobe.cuda"))]
"""
    done = pytest_run(tmp_path, tests=tests)
    assert set(outcomes(done).values()) == {"PASSED"}


def test_every_test_can_be_judged(tmp_path):
    done = pytest_run(tmp_path, "--kvprobe", "--kvprobe-device", "host", "--kvprobe-forbid", "blocking")
    assert outcomes(done)["test_not_marked"] == "FAILED"


def test_an_unknown_rule_is_a_line(tmp_path):
    done = pytest_run(tmp_path, "--kvprobe", "--kvprobe-forbid", "slowness")
    assert done.returncode == 4
    assert "--kvprobe: there is no rule 'slowness': use some of pageable, blocking" in done.stderr
