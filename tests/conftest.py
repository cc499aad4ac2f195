"""What all tests need: an interrupt reaches the programs that they start, a hang ends the run, no test is hurried."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import public_recordings

STDERR = pytest.StashKey[int]()
WRITES_NONE = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell starts what runs in its background with Ctrl-C ignored, and every child of such a run inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public recordings, `<project>/<file>`."""
    return public_recordings.folder()


@pytest.fixture(scope="module", autouse=True)
def as_the_first_module() -> Iterator[None]:
    """What a module played in virtual time or recorded, the next one does not find: each may be the first."""
    yield
    recorders = sys.modules.get("kvprobe.probe.recorder")
    end = time.monotonic() + 60  # a thread may be closing the last engine
    while recorders and recorders._users and time.monotonic() < end:
        time.sleep(0.01)
    assert not recorders or not recorders._users, "an engine was left open: later recordings would hold its transfers"
    runtimes = sys.modules.get("kvprobe.cuda.runtime")
    if runtimes and runtimes._host_runtime.cache_info().currsize and runtimes.find_runtime("host").simulated:
        runtimes.find_runtime("host").reset()


def pytest_configure(config: pytest.Config) -> None:
    """Where stacks go is kept: while a test runs, its own output is captured."""
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else -1
    if hasattr(config, "workerinput"):
        _begin_elsewhere(config)
    with contextlib.suppress(ImportError):  # where a server's packages alone are installed
        from hypothesis import HealthCheck, settings

        # as Hypothesis' own profile for CI: the same examples everywhere, however long they take
        unhurried = [HealthCheck.too_slow]
        settings.register_profile("kvprobe", deadline=None, derandomize=True, suppress_health_check=unhurried)
        settings.load_profile("kvprobe")


def _begin_elsewhere(config: pytest.Config) -> None:
    """Each of pytest-xdist's workers collects from another place on, and finds compiled what the others came to first.

    That is most of collecting: pytest compiles anew each `assert`.
    """
    config.stash[WRITES_NONE], sys.dont_write_bytecode = sys.dont_write_bytecode, False
    number, of = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    parts: list[Path] = []
    for given in map(Path, config.args):
        inside = sorted(given.iterdir()) if given.is_dir() else [given]
        parts += [path for path in inside if path == given or path.match("test_*.py") or _is_of_tests(path)]
    at = len(parts) * number // of
    config.args[:] = map(str, parts[at:] + parts[:at])


def _is_of_tests(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("test_*.py"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take whole files from the front: those with slow tests, then by number, to end together."""
    if not hasattr(config, "workerinput"):
        return
    sys.dont_write_bytecode = config.stash[WRITES_NONE]
    files = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -files[item.path], item.path))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Once a test has failed, neither pytest's limit nor pytest-timeout's watches what it leaves behind."""
    _end_after_limit(item.config)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The interpreter waits for threads that a test left running: that ends, too."""
    _end_after_limit(config)


def _end_after_limit(config: pytest.Config) -> None:
    seconds = float(config.getini("faulthandler_timeout"))
    if seconds > 0 and config.stash[STDERR] >= 0:
        faulthandler.dump_traceback_later(seconds, file=config.stash[STDERR], exit=True)
