"""The pytest plugin: with `--kvprobe`, a test fails when its hot path makes a copy or a call that holds it up.

* `@pytest.mark.kvprobe(...)`: the whole test is a hot path.
* the fixture `kvprobe`: `with kvprobe.hot_path(...):` is one.
* `--kvprobe-forbid RULES`: every test without the marker is one.

All take `forbid` (rules, by default all), `allow` (rules less) and `under` (modules: only calls beneath them count).
Without `--kvprobe` none of them does anything, and nothing of kvprobe is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvprobe.testing.gate import BlockReport, HotPathGate

_SESSION = pytest.StashKey["_Session"]()
_FAILED_LIMIT = 40  # lines of what is said about one test


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("kvprobe", "copies and calls that hold the hot path up")
    group.addoption("--kvprobe", action="store_true", help="fail tests whose hot path makes a copy that holds it up")
    group.addoption(
        "--kvprobe-device",
        choices=("auto", "cuda", "host"),
        default="auto",
        help="the GPU, or one that the embedded host runtime plays (default: the GPU where there is one)",
    )
    group.addoption(
        "--kvprobe-forbid", metavar="RULES", help="rules for every test without a marker: pageable,blocking"
    )
    group.addoption(
        "--kvprobe-under", metavar="MODULES", default="", help="with --kvprobe-forbid: only calls below these"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and puts the gate into the process before a test module is imported."""
    config.addinivalue_line(
        "markers",
        "kvprobe(forbid=None, allow=(), under=()): with --kvprobe, the test fails when it makes a pageable, blocking "
        "or synchronising copy, allocates, pins, or fills a launch queue",
    )
    if config.getoption("kvprobe"):
        config.stash[_SESSION] = _Session(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Puts everything back."""
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which device it is."""
    session = config.stash.get(_SESSION, None)
    return f"kvprobe: {session.what}" if session is not None else None


class _Session:
    """What a run with `--kvprobe` holds."""

    def __init__(self, config: pytest.Config) -> None:
        from kvprobe.errors import KvprobeError
        from kvprobe.testing.gate import HotPathGate
        from kvprobe.testing.rules import rules_of

        self._undo = contextlib.ExitStack()
        forbid = config.getoption("kvprobe_forbid")
        try:
            self.everywhere = rules_of(forbid) if forbid is not None else None
            self.under = tuple(word for word in config.getoption("kvprobe_under").split(",") if word)
            self.gate: HotPathGate = HotPathGate()
            self._undo.callback(self.gate.close)
            self.queue_full = 0
            self.what = self._device(config.getoption("kvprobe_device"))
        except KvprobeError as error:
            self._undo.close()
            raise pytest.UsageError(f"--kvprobe: {error}") from None

    def _device(self, asked: str) -> str:
        from kvprobe.cuda.hostruntime import host_runtime

        if asked == "cuda" or (asked == "auto" and Path("/dev/nvidiactl").exists()):
            return "the GPU's calls are watched"
        runtime = host_runtime(virtual_clock=True)
        self.queue_full = runtime.address("kvhostQueueFull")
        try:
            import torch  # noqa: F401
        except ImportError:
            return "the embedded host runtime plays a GPU (torch is not installed)"
        from kvprobe.testing.played_torch import PlayedTorch

        played = PlayedTorch(runtime).install()
        self._undo.callback(played.remove)
        return "the embedded host runtime plays torch's GPU"

    def close(self) -> None:
        self._undo.close()


class HotPath:
    """What the fixture `kvprobe` gives: `with kvprobe.hot_path():`; `seen` is what the newest one did."""

    def __init__(self, gate: HotPathGate | None, queue_full: int) -> None:
        self._gate, self._queue_full = gate, queue_full
        self.seen: BlockReport | None = None

    @contextlib.contextmanager
    def hot_path(self, forbid: Any = None, allow: Any = (), under: Any = ()) -> Iterator[BlockReport | None]:
        """Fails the test when the block breaks a rule; gives what was seen, None without `--kvprobe`.

        Args:
            forbid: rules, as names or one text; None: all of `kvprobe.testing.rules.RULES`.
            allow: rules that do not count.
            under: modules ("transformers.cache_utils"): only calls with one of them on the stack count.

        Raises:
            UsageError: no such rule, or a hot path inside another.
        """
        from kvprobe.testing.rules import rules_of

        rules = rules_of(forbid) - rules_of(allow)
        modules = (under,) if isinstance(under, str) else tuple(under)
        if self._gate is None:
            yield None
            return
        with self._gate.watch(rules, modules, self._queue_full) as self.seen:
            yield self.seen
        if self.seen is not None and (self.seen.violations or self.seen.left_out):
            pytest.fail(_said(self.seen), pytrace=False)


def _said(seen: BlockReport) -> str:
    lines = seen.text().splitlines()
    more = [f"    ... and {len(lines) - _FAILED_LIMIT} lines more"] if len(lines) > _FAILED_LIMIT else []
    return "\n".join(["the hot path was held up (kvprobe):", *lines[:_FAILED_LIMIT], *more])


@pytest.fixture
def kvprobe(request: pytest.FixtureRequest) -> HotPath:
    """`with kvprobe.hot_path():` fails the test when the block makes a copy or a call that holds it up."""
    session = request.config.stash.get(_SESSION, None)
    return HotPath(session.gate, session.queue_full) if session is not None else HotPath(None, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The body of a marked test is a hot path."""
    session = item.config.stash.get(_SESSION, None)
    mark = item.get_closest_marker("kvprobe")
    uses_fixture = "kvprobe" in getattr(item, "fixturenames", ())
    if session is None or (mark is None and (session.everywhere is None or uses_fixture)):
        return (yield)
    if mark is not None and mark.args:
        raise pytest.UsageError(f"{item.nodeid}: pytest.mark.kvprobe takes forbid=, allow= and under= by name")
    asked = dict(mark.kwargs) if mark is not None else {"forbid": session.everywhere, "under": session.under}
    with HotPath(session.gate, session.queue_full).hot_path(**asked):
        return (yield)
