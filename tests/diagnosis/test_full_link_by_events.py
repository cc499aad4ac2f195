"""A full link in a recording of `kvprobe run`: timing events tell when only copies ran, and its calls the bytes."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import GPU, HOST, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind, Direction, Engine, Table

MS, RATE = 1_000_000, 50.0  # bytes a ns, which is GB/s
STEP_NS, STEPS = 2 * MS, 300
COPY, KERNEL = Engine.COPY, Engine.KERNEL


def steps(
    moved_ns: int,
    kernels_from_ns: int,
    *,
    copied_ns: int = 0,
    kernels_ns: int = MS // 5,
    direction: Direction = Direction.H2D,
):
    """Steps of 2 ms that each move what the link carries in `moved_ns`, then compute; copies begin with each step.

    Copies run for `copied_ns`, which is `moved_ns` if it is 0.
    """
    size = int(moved_ns * RATE)
    calls = []
    for step in range(STEPS):
        place = {"src": HOST + step % 8 * size, "dst": GPU + step % 4 * size, "direction": direction}
        if direction == Direction.D2H:
            place["src"], place["dst"] = place["dst"], place["src"]
        calls.append({"kind": CallKind.COPY, "stream": 0, "bytes": size, **place, "dur_ns": 2_000})
        calls.append({"kind": CallKind.LAUNCH, "stream": 0, "dur_ns": 2_000, "gap_ns": 0})
        calls.append({"kind": CallKind.SYNC, "stream": 0, "dur_ns": STEP_NS - 20_000, "gap_ns": 0})
    out = recording(calls)
    out.machine["link_bytes_per_s"] = RATE * 1e9
    begins = np.asarray(out.calls["end_ns"][::3])
    ends = begins + (copied_ns or moved_ns)
    rows = [(*one, COPY, direction, size) for one in zip(begins, ends, strict=True)]
    computes = begins + kernels_from_ns
    rows += [(at, at + kernels_ns, KERNEL, Direction.UNKNOWN, 0) for at in computes.tolist()]
    rows.sort()
    columns = dict(
        zip(("start_ns", "end_ns", "engine", "direction", "bytes"), map(np.array, zip(*rows, strict=True)), strict=True)
    )
    out.tables["spans"] = Table("spans", {**columns, "count": np.ones(len(rows)), "stream": np.zeros(len(rows))})
    end = int(out.calls["end_ns"].max())
    out.tables["coverage"] = Table("coverage", {"start_ns": np.array([0]), "end_ns": np.array([end])})
    return out


def causes(found):
    return [one.cause for one in found if one.severity != "info"]


@pytest.mark.parametrize("direction", [Direction.H2D, Direction.D2H])
def test_a_link_that_carries_all_it_can_is_named_and_what_helps_is_fewer_bytes(direction):
    found = examine(steps(1_700_000, 1_720_000, direction=direction))
    assert causes(found)[0] == "link_bound"
    one = found[0]
    assert one.confidence == "certain" and one.lost_ns == pytest.approx(STEPS * 1_700_000, rel=0.03)
    assert one.cure[0].text.startswith("Move fewer bytes")
    assert ("store only" in one.cure[0].text) == (direction == Direction.D2H)
    assert one.evidence[0].value == pytest.approx(STEPS * 1_700_000 * RATE, rel=0.01)
    assert "waiting_for_copies" not in causes(found), "what one finding explains, no other has"


def test_a_wait_for_a_link_that_could_carry_more_is_a_wait_for_copies():
    """Nothing runs for half of each step: the link would carry as much in half of the time."""
    found = examine(steps(1_000_000, 1_020_000))
    assert "link_bound" not in causes(found) and "waiting_for_copies" in causes(found)


def test_copies_below_the_link_s_rate_are_no_full_link():
    found = examine(steps(900_000, 1_720_000, copied_ns=1_700_000))
    assert "link_bound" not in causes(found) and "waiting_for_copies" in causes(found)


def test_a_full_link_that_kernels_hide_is_none():
    found = examine(steps(1_700_000, 100_000, kernels_ns=1_600_000))
    assert "link_bound" not in causes(found)
