"""The adapter of toyserver times its swap, over a package of that name that lies in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.instrument import installation


@pytest.fixture
def toyserver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package, metadata = tmp_path / "toyserver", tmp_path / "toyserver-1.4.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "cache.py").write_text("def swap_in(blocks):\n    return len(blocks)\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toyserver\nVersion: 1.4\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("toyserver.cache", "toyserver"):
        sys.modules.pop(name, None)


def test_it_fits_the_version_that_is_installed(toyserver):
    assert [(row["adapter"], row["state"]) for row in installation.table("toyserver")] == [
        ("toyserver.cache", "would apply")
    ]


def test_a_call_is_timed_and_passes_unchanged(toyserver):
    with installation.observe("toyserver") as seen:
        from toyserver.cache import swap_in

        assert swap_in(range(5)) == 5
    assert seen.states["toyserver.cache"].startswith("removed")
    assert [(call["copies"], call["cause"]) for call in seen.calls] == [(5, "waits for its copies")]
