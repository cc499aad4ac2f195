"""Pauses that a finding counts as waits for Python's lock are no open question in the account."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.account import OPEN, Line
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"


@pytest.mark.parametrize(
    "path",
    [
        "accounts/nsys/tokenizer_threads_that_hold_the_lock.sqlite.gz",
        "accounts/kineto/tokenizer_threads_that_hold_the_lock.json.gz",
        "corpus/nsys/launches_while_other_threads_hold_the_lock.sqlite.gz",
        "corpus/kineto/launches_while_other_threads_hold_the_lock.json.gz",
    ],
)
def test_the_account_knows_what_the_finding_knows(path, tmp_path):
    """Other threads hold the lock all the time; the thread that launches is outside of its calls, waiting for it."""
    found = examine(open_recording(unpack(DATA / path, tmp_path)))
    (finding,) = [one for one in found if one.cause == "python_or_gil_bound"]
    (gpu,) = found.account.gpus
    assert finding.severity == "critical" and finding.device_ns > 0.98 * gpu.ns(Line.PYTHON)
    assert sum(gpu.unknown_ns().get(one, 0) for one in OPEN) < 0.01 * gpu.window_ns
    assert "waiting_for_host" not in {one.cause for one in found}
    assert finding.device_ns == finding.cure[0].predicted_saving_ns <= gpu.not_computing_ns
    assert gpu.share(Line.PYTHON) > 0.9


def test_what_is_only_concluded_says_so(tmp_path):
    path = DATA / "accounts/nsys/tokenizer_threads_that_hold_the_lock.sqlite.gz"
    found = examine(open_recording(unpack(path, tmp_path)))
    (finding,) = [one for one in found if one.cause == "python_or_gil_bound"]
    (long,) = [one for one in finding.evidence if "longer than 8 intervals" in one.text]
    assert long.how == "inferred" and long.value == pytest.approx(851e6, rel=0.01)
