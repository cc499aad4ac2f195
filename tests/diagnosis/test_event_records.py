"""A record of an event takes a place of its stream's queue: what waits in it is named, and never passed over."""

from __future__ import annotations

import numpy as np
import pytest
from hostruntime import D2H, QUEUE_FULL, STREAM_LOCK, Runtime, recording_of
from scenarios import KiB, Stage

from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_full_queue, of_recording
from kvprobe.recordings.buckets import BUCKETS, bucket
from kvprobe.recordings.model import CallKind, Recording, Table

KEPT_NS = 20_000  # shorter launches and records `kvprobe run` only counts


def without_executions(recording: Recording) -> Recording:
    recording.tables["executions"] = Table("executions")
    recording.has_executions = False
    return recording


def without_streams_of_events(recording: Recording) -> Recording:
    """As the PyTorch profiler records."""
    calls = recording.calls
    calls.columns["stream"] = np.where(calls["kind"] == CallKind.EVENT, -1, calls["stream"])
    return recording


def as_kept_by_default(recording: Recording) -> Recording:
    """As `kvprobe run` keeps it: of launches and records the slow ones, and sums of all."""
    without_executions(recording)
    calls = recording.calls
    took, kind = calls["end_ns"] - calls["start_ns"], calls["kind"]
    number = np.cumsum(kind == CallKind.LAUNCH)
    says = (kind == CallKind.LAUNCH) | (kind == CallKind.SYNC)
    keys, row = np.unique(
        np.stack((calls["name"], kind.astype(np.int64), calls["stream"])), axis=1, return_inverse=True
    )
    totals = {"name": keys[0], "kind": keys[1], "stream": keys[2], "process": np.zeros(keys.shape[1])}
    totals |= {"calls": np.bincount(row.ravel()), "thread": np.full(keys.shape[1], calls["thread"][0])}
    recording.tables["totals"] = Table("totals", totals)
    recording.histograms = np.zeros((keys.shape[1], BUCKETS), dtype=np.int64)
    np.add.at(recording.histograms, (row.ravel(), bucket(took)), 1)
    keep = ~np.isin(kind, (CallKind.LAUNCH, CallKind.EVENT)) | (took >= KEPT_NS)
    columns = {**calls.columns, "launches": np.where(says, number, -1)}
    recording.tables["calls"] = Table("calls", {name: column[keep] for name, column in columns.items()})
    return recording


def whole(recording: Recording) -> Recording:
    return recording


def copies_with_an_event_each(stage: Stage) -> None:
    """Two places a copy: half of the calls wait, and it is the records that do."""
    for burst in range(3):
        for i in range(1_200):
            stage.load(1_200 * burst + i, 64 * KiB, stage.streams[0])
            stage.rt.record(stage.events[i % 64], stage.streams[0])
        stage.rt.sleep(100_000_000)


def records_behind_a_forward(stage: Stage) -> None:
    for burst in range(3):
        stage.rt.launch(stage.compute, 30_000_000)
        for i in range(1_500):
            stage.rt.record(stage.events[i % 64], stage.compute)
        for i in range(100):
            stage.load(100 * burst + i, 64 * KiB, stage.streams[0])
        stage.rt.sleep(50_000_000)


def launches_with_an_event_each(stage: Stage) -> None:
    for _ in range(4):
        for i in range(1_500):
            stage.rt.launch(stage.compute, 30_000)
            stage.rt.record(stage.events[i % 64], stage.compute)
        stage.rt.sync(stage.compute)


def examined(runtime: Runtime, body, seen):
    """Findings by cause, the two verdicts, and what waited for room in truth."""
    stage = Stage(runtime, depth=1_021, h2d=4e9)
    records, _ = runtime.trace(lambda: body(stage))
    waited = records["reason"] == QUEUE_FULL
    truth = int((records["end_ns"] - records["start_ns"])[waited].sum())
    recording = seen(recording_of(runtime, records))
    findings = examine(recording)
    verdicts = of_recording(recording, findings).state, of_full_queue(recording, findings).state
    return {one.cause: one for one in findings if not one.abstains}, verdicts, truth


@pytest.mark.parametrize(
    "body, seen",
    [
        (copies_with_an_event_each, whole),
        (copies_with_an_event_each, without_executions),
        (records_behind_a_forward, whole),
        (records_behind_a_forward, without_executions),
        (launches_with_an_event_each, whole),
        (launches_with_an_event_each, without_executions),
        (launches_with_an_event_each, as_kept_by_default),
    ],
)
def test_a_queue_that_records_helped_to_fill_is_named_with_what_it_cost(runtime, body, seen):
    found, verdicts, truth = examined(runtime, body, seen)
    assert verdicts[1] == "found"
    # where the device computes meanwhile, the GPU loses nothing
    assert verdicts[0] == ("healthy" if body is launches_with_an_event_each and seen is whole else "found")
    assert set(found) - {"gpu_starved", "load_not_ordered"} == {"launch_queue_saturation"}
    assert found["launch_queue_saturation"].lost_ns == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("seen", [whole, without_executions])
def test_fewer_events_are_a_cure_where_they_took_half_of_the_places(runtime, seen):
    found, _, _ = examined(runtime, copies_with_an_event_each, seen)
    finding = found["launch_queue_saturation"]
    (change,) = (one for one in finding.cure if one.text.startswith("Record one event"))
    assert 0.6 * finding.lost_ns <= change.thread_saving_ns < finding.lost_ns


@pytest.mark.parametrize("body", [copies_with_an_event_each, records_behind_a_forward])
@pytest.mark.parametrize("seen", [as_kept_by_default, without_streams_of_events])
def test_records_that_waited_keep_a_recording_from_being_green(runtime, body, seen):
    """Their streams, or most of them, are not in the recording: it cannot be told what they waited for."""
    found, verdicts, truth = examined(runtime, body, seen)
    shallow = body is records_behind_a_forward and seen is without_streams_of_events  # what was submitted is known
    assert verdicts == ("undecided", "healthy" if shallow else "undecided")
    assert truth > 30_000_000 and "launch_queue_saturation" not in found


def test_launches_that_are_slow_from_no_known_depth_on_are_not_called_healthy(runtime):
    """Slow from five hundred on, with no event behind them: no queue that is known."""

    def body(stage: Stage) -> None:
        for _ in range(4):
            for _ in range(1_500):
                runtime.launch(stage.compute, 30_000)
            runtime.sync(stage.compute)

    stage = Stage(runtime, depth=511)
    records, _ = runtime.trace(lambda: body(stage))
    recording = as_kept_by_default(recording_of(runtime, records))
    findings = examine(recording)
    states = of_recording(recording, findings).state, of_full_queue(recording, findings).state
    assert states == ("undecided", "undecided")


def test_events_that_found_room_are_healthy(runtime):
    def body(stage: Stage) -> None:
        for _ in range(10):
            for i in range(400):
                stage.load(i, 64 * KiB, stage.streams[0])
                runtime.record(stage.events[i % 64], stage.streams[0])
            runtime.sleep(30_000_000)

    for seen in (whole, without_executions, as_kept_by_default, without_streams_of_events):
        found, verdicts, truth = examined(runtime, body, seen)
        assert (truth, verdicts, set(found)) == (0, ("undecided", "healthy"), set())  # nothing computes in it


@pytest.mark.parametrize("seen", [whole, without_executions, as_kept_by_default])
@pytest.mark.parametrize("call", ["records an event", "waits for an event"])
def test_a_call_that_names_a_stream_which_another_thread_fills_waits_for_its_submission(runtime, call, seen):
    """One thread is blocked behind a forward; the other names its stream, and is held for as long."""

    def body(stage: Stage) -> None:
        def store() -> None:
            for i in range(1_060):
                at = i * 16 * KiB
                runtime.copy(stage.host + at, stage.device + at, 16 * KiB, D2H, stage.streams[0])

        for step in range(4):
            runtime.launch(stage.compute, 30_000_000)
            stage.after(stage.streams[0], stage.compute, step)
            thread = runtime.thread(store)
            runtime.sleep(4_000_000)
            if call == "records an event":
                runtime.record(stage.events[40], stage.streams[0])
            else:
                runtime.wait(stage.streams[0], stage.events[40])
            runtime.launch(stage.compute, 100_000)
            thread.join()
            runtime.sleep(20_000_000)

    stage = Stage(runtime, depth=1_021, d2h=4e9)
    records, _ = runtime.trace(lambda: body(stage))
    held = int(records["blocked_ns"][records["reason"] == STREAM_LOCK].sum())
    found = {one.cause: one for one in examine(seen(recording_of(runtime, records))) if not one.abstains}
    assert found["context_lock_stall"].lost_ns == pytest.approx(held, rel=0.1)
    assert not any("Allocate" in change.text for change in found["context_lock_stall"].cure)
