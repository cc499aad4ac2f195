"""Neighbouring copies that could have been one: named where their calls limit the copying, else left alone."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import KiB, blocks, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind, Engine, Memory, Table

CAUSE = "unmerged_neighbours"


def bursts(places, size=16 * KiB, many=20, pause_ns=200_000, **common):
    """`many` bursts of these blocks, a pause before each."""
    out = []
    for _ in range(many):
        burst = blocks(places, size, **common)
        burst[0]["gap_ns"] = pause_ns
        out += burst
    return out


def named(found):
    return {one.cause: one for one in found.findings}.get(CAUSE)


def test_their_calls_are_named_with_what_merging_alone_saves():
    finding = named(examine(recording(bursts(range(100)))))
    assert finding.lost_ns == 20 * 99 * 1_000
    assert (finding.lost_on, finding.confidence) == ("host", "likely")
    assert "1,980 of 2,000 copies" in finding.evidence[0].text
    assert "20 runs, 100 copies to a run" in finding.evidence[0].text
    merge = finding.cure[0]
    assert merge.text.startswith("Merge neighbours before the call")
    assert merge.predicted_saving_ns == finding.lost_ns
    rung = next(one for one in finding.cure if one.kind == "rung")
    assert (rung.name, rung.value, rung.predicted_saving_ns) == ("pooled", "auto", None)


@pytest.mark.parametrize("pause_ns, severity", [(200_000, "warning"), (3_000_000, "warning"), (4_500_000, "info")])
def test_below_a_twentieth_of_the_callers_time_with_what_passes_between_the_calls_it_is_a_remark(pause_ns, severity):
    assert named(examine(recording(bursts(range(100), pause_ns=pause_ns)))).severity == severity


def beside_a_kernel(calls, whole):
    """The same with kernels on a stream of their own: one from the first call to the last, or two at the ends."""
    made = recording([*calls, {"kind": CallKind.LAUNCH, "stream": 1}])
    start, end = made.calls["start_ns"], made.calls["end_ns"]
    first, last = int(start[0]), int(end[-2])
    ran = [(first, last)] if whole else [(first - 2_000, first), (last, last + 2_000)]
    ones = np.ones(len(ran), dtype=np.int64)
    kernels = {"start_ns": [one[0] for one in ran], "end_ns": [one[1] for one in ran], "engine": ones * Engine.KERNEL}
    made.tables["executions"] = Table(
        "executions", {**kernels, "stream": ones, "process": 0 * ones, "correlation": 0 * ones + 1}
    )
    correlation = np.where(made.calls["kind"] == CallKind.LAUNCH, 1, -1)
    made.tables["calls"] = Table("calls", {**made.calls.columns, "correlation": correlation})
    made.has_executions = True
    return made


def test_calls_beside_a_kernel_that_runs_all_the_time_are_a_remark():
    """They cost the thread time, and the GPU none: nobody waits for the thread."""
    assert named(examine(beside_a_kernel(bursts(range(100)), whole=True))).severity == "info"
    assert named(examine(beside_a_kernel(bursts(range(100)), whole=False))).severity == "warning"


@pytest.mark.parametrize(
    "calls",
    [
        bursts(range(0, 200, 2)),  # scattered
        bursts(range(100), size=64 * KiB),  # hidden behind their bytes
        bursts(range(100), memory=Memory.PAGEABLE),
        bursts(range(100), many=10),  # a millisecond is not reached
        bursts(range(100), pause_ns=8_000_000),  # a small part of the thread's time
    ],
)
def test_what_gains_nothing_is_left_alone(calls):
    assert named(examine(recording(calls))) is None


@pytest.mark.parametrize("link, expected", [(55e9, True), (5e9, False)])
def test_a_known_link_decides_what_its_calls_hide(link, expected):
    """16 KiB take 0.3 us on one link and 3.3 us on the other; the call takes 1 us."""
    finding = named(examine(recording(bursts(range(100)), link_bytes_per_s=link)))
    assert (finding is not None) is expected
    if finding:
        assert any("the link carries the bytes of these loads" in one.text for one in finding.evidence)


def test_without_addresses_it_is_not_looked_for():
    made = recording(bursts(range(100)))
    columns = {name: made.calls[name] for name in made.calls if name not in ("src", "dst")}
    made.tables["calls"] = Table("calls", columns)
    found = examine(made)
    assert named(found) is None
    assert CAUSE in {one.cause for one in found.not_looked_for}


DEPTH, RUNS_NS = 1_021, 20_000


def full_queue(places):
    """Copies that take the device 20 us each: from the 1,022nd on a call waits until the oldest has been executed."""
    calls, done, now = blocks(places, size=4 * KiB), [], 0
    for i, call in enumerate(calls):
        now += 1_000
        call["dur_ns"] = max(done[i - DEPTH] - now, 0) + 1_000 if i >= DEPTH else 1_000
        now += call["dur_ns"]
        done.append(max(now, done[-1] if done else 0) + RUNS_NS)
    made = recording(calls, queue_depth=DEPTH)
    rows = np.arange(len(done))
    executions = {
        "start_ns": np.array(done) - RUNS_NS,
        "end_ns": np.array(done),
        "stream": np.zeros(len(done)),
        "process": np.zeros(len(done)),
        "engine": np.full(len(done), Engine.COPY),
        "direction": made.calls["direction"],
        "bytes": made.calls["bytes"],
        "count": np.ones(len(done)),
        "correlation": rows,
    }
    made.tables["executions"] = Table("executions", executions)
    made.tables["calls"] = Table("calls", {**made.calls.columns, "correlation": rows})
    made.has_executions = True
    return made


def test_a_full_queue_is_named_first_and_merging_is_one_of_its_changes():
    found = {one.cause: one for one in examine(full_queue(range(3_000)))}
    assert CAUSE not in found
    full = found["launch_queue_saturation"]
    merge = next(one for one in full.cure if one.text.startswith("Merge neighbouring copies"))
    assert "2,999 of 3,000 submissions" in merge.text
    assert merge.thread_saving_ns > 0.99 * full.lost_ns
    apart = {one.cause: one for one in examine(full_queue(range(0, 6_000, 2)))}["launch_queue_saturation"]
    assert not any(one.text.startswith("Merge neighbouring copies") for one in apart.cure)
    assert apart.lost_ns == full.lost_ns


def test_merging_is_predicted_by_the_places_that_it_frees():
    """In pairs 3,000 copies take 1,500 places of 1,021: some calls wait all the same."""
    pairs = [3 * (i // 2) + i % 2 for i in range(3_000)]
    full = {one.cause: one for one in examine(full_queue(pairs))}["launch_queue_saturation"]
    merge = next(one for one in full.cure if one.text.startswith("Merge neighbouring copies"))
    assert "1,500 slots would do" in merge.text
    assert 0.3 * full.lost_ns < merge.thread_saving_ns < 0.9 * full.lost_ns


def test_the_calls_of_the_finding_are_copies():
    made = recording(bursts(range(100)))
    assert all(made.calls["kind"][one.row] == CallKind.COPY for one in named(examine(made)).calls)
