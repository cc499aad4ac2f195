"""One table of thresholds: the native scanner repeats it, nobody else has one of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvprobe.launchqueue import constants
from kvprobe.launchqueue.baseline import Baseline

PACKAGE = Path(__file__).parents[2] / "kvprobe"


def test_the_native_scanner_has_the_same_thresholds() -> None:
    text = (PACKAGE / "native" / "trace" / "queues.c").read_text()
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)", text)}
    assert (found["ALIGNED_NS"], found["LEAST_DEPTH"], found["LEAST_BAND"]) == (
        constants.ALIGNED_NS,
        constants.LEAST_DEPTH,
        constants.LEAST_BAND,
    )
    assert f"{constants.SHALLOW_SHARE} * out->deepest" in text
    assert f"{constants.BAND_SHARE} * out->deepest" in text


def test_nobody_else_defines_one_of_them() -> None:
    names = [name for name in vars(constants) if name.isupper()]
    own = re.compile(rf"^(?:{'|'.join(names)})\b.*=", re.MULTILINE)
    for room in ("launchqueue", "probe", "recordings", "diagnosis", "instrument", "reporting", "commands"):
        for path in (PACKAGE / room).glob("*.py"):
            defined = set(own.findall(path.read_text())) if path.name != "constants.py" else set()
            # these two judge other things by names of their own
            assert not {line for line in defined if path.name not in ("first_calls.py", "window.py")}, path


@pytest.mark.parametrize("taught_ns", [100, 1_700, 100_000])
def test_a_baseline_cannot_be_taught_away_from_the_calibrated_one(taught_ns: int) -> None:
    baseline = Baseline(1_000, 1_500)
    for _ in range(10_000):
        baseline.learn(64, 64 * taught_ns)
    assert 1_000 / constants.BASELINE_DRIFT <= baseline.ns <= 1_000 * constants.BASELINE_DRIFT
    assert baseline.slow_ns <= 2_000
