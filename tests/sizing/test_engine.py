"""The advised size tried on the real engine in virtual time: predicted against measured."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.errors import UsageError
from kvprobe.reporting import build_page

POOL_SIZE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "pool_size.py"))


@pytest.fixture
def runtime() -> Iterator[Any]:
    yield POOL_SIZE["runtime_for"]("host")
    host_runtime().reset()


def test_hits_and_time_saved_are_as_predicted_once_the_pool_is_resized(runtime: Any) -> None:
    told = POOL_SIZE["tried"](runtime, POOL_SIZE["requests"](2, 1_500))
    assert told["blocks"][1] > 2 * told["blocks"][0]
    assert told["hit_share_measured"] > told["hit_share_now"][1] + 0.2
    assert told["hit_share_predicted"] == pytest.approx(told["hit_share_measured"], abs=0.02)
    assert told["saved_s_predicted"] == pytest.approx(told["saved_s_measured"], rel=0.15)
    assert told["option"].startswith(f"kvprobe.BlockCache({told['blocks'][1]})")


def test_the_page_shows_the_sizes(runtime: Any) -> None:
    recording = POOL_SIZE["served"](runtime, POOL_SIZE["requests"](3, 400), 200, record=True).recording
    page = build_page(recording, findings=None)
    assert "How large should the pool be?" in page and "kvprobe BlockCache" in page


def test_a_cache_without_a_sample_is_refused(runtime: Any) -> None:
    import kvprobe

    server = POOL_SIZE["Server"](runtime, 8)
    try:
        with pytest.raises(UsageError, match="give it a sample"):
            kvprobe.recording_of(server.engine, caches=[kvprobe.BlockCache(8)])
    finally:
        server.close()
