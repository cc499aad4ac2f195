"""What a full queue cost is one figure: each blocked call counts once, and only a wait that a thread keeps is saved."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.diagnosis import Examination, Finding, examine
from kvprobe.recordings import open_recording
from kvprobe.reporting.compare import compare_findings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[2] / "tests" / "gpu" / "data"
STORES = "accounts/nsys/stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    """A program whose stores block behind a forward pass once, and then 1,421 times because the queue stays full."""
    return examine(open_recording(unpack(DATA / STORES, tmp_path_factory.mktemp("stores"))))


def of(found: Examination, cause: str) -> Finding:
    return next(one for one in found if one.cause == cause)


def test_a_wait_that_the_next_full_queue_only_makes_longer_saves_no_wall_time(stores) -> None:
    fence = of(stores, "fence_before_copies")
    assert fence.lost_ns > 5_000_000 and fence.device_ns < 100_000
    assert fence.predicted_saving_ns <= fence.device_ns and fence.severity == "info"


def test_what_the_full_queue_explains_is_what_a_deeper_one_saves(stores) -> None:
    full, link = of(stores, "launch_queue_saturation"), of(stores, "link_bound")
    (gpu,) = stores.account.gpus
    assert full.predicted_saving_ns == pytest.approx(full.device_ns, rel=0.01)
    assert full.predicted_saving_ns + link.device_ns <= gpu.not_computing_ns


def test_shares_in_a_comparison_are_of_the_time_that_the_gpu_waited(stores) -> None:
    changes = compare_findings(stores, [])
    (gpu,) = stores.account.gpus
    assert sum(change.share_before for change in changes) <= gpu.not_computing_ns / gpu.window_ns


def test_each_blocked_call_is_in_one_finding_and_every_place_counts_the_same(stores) -> None:
    full, fence = of(stores, "launch_queue_saturation"), of(stores, "fence_before_copies")
    counts = [sum(where.calls for where in one.where) for one in (full, fence)]
    for one, mine, others in ((full, *counts), (fence, *reversed(counts))):
        points = {name: len(series["x"]) for name, series in one.chart["series"].items()}
        assert points["blocked"] == mine and points["blocked, in another finding"] == others
        assert f"{mine:,} submission" in one.title and one.evidence[0].text.startswith(f"{mine:,} ")
        assert not any("leaves out" in line.text for line in one.evidence)
    assert counts == [1_421, 1]
    costliest = max(fence.calls, key=lambda call: call.dur_ns)
    assert np.isclose(fence.lost_ns, costliest.dur_ns, rtol=0.01)
