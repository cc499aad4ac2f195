"""Memory that is made anew in each of a few long steps is no set-up, however few the submissions are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import blocks, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind

MAKE = {"kind": CallKind.ALLOC, "dur_ns": 40_000_000}
WAIT = {"kind": CallKind.SYNC, "dur_ns": 20_000_000}


@pytest.mark.parametrize("steps", [8, 20, 60])
def test_memory_made_in_each_step_is_found(steps):
    calls = [call for step in range(steps) for call in (MAKE, MAKE, *blocks([step]), WAIT)]
    found = {one.cause: one for one in examine(recording(calls))}
    assert found["allocation_on_hot_path"].severity == "critical"


def test_memory_made_before_a_few_steps_is_set_up():
    calls = [MAKE] * 8 + [call for step in range(20) for call in (*blocks([step]), WAIT)]
    assert not any(one.cause == "allocation_on_hot_path" for one in examine(recording(calls)))
