"""What a cure is predicted to save is what it saves when it is really applied, on the same runtime."""

from types import SimpleNamespace

import numpy as np
import pytest
from hostruntime import D2H
from scenarios import BLOCK, KiB, Stage, queue_ns

from kvprobe.diagnosis import Change, diagnose
from kvprobe.diagnosis.deeper_queue import spared
from kvprobe.diagnosis.finding import best_first
from kvprobe.diagnosis.joined import JoinedRecording
from kvprobe.diagnosis.queue_full import Full
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table
from kvprobe.reporting.headline import saving_text


def found(played, cause):
    return next(f for f in diagnose(played.recording) if f.cause == cause)


def predicted(finding, name):
    """What the change of this name (or of a text with these words) alone is predicted to save."""
    change = next(c for c in finding.cure if c.name == name or name in c.text)
    return change.thread_saving_ns or change.predicted_saving_ns


def blocked(records, _):
    return {"blocked": int(sum(queue_ns(records)).sum())}


def loads(runtime, streams=1):
    stage = Stage(runtime, depth=128)

    def body():
        for _ in range(100):
            runtime.launch(stage.compute, 2_000_000)
        for i in range(180):
            stage.load(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=128, channels=4)


def stores_behind_a_forward(runtime, streams=1):
    stage = Stage(runtime, depth=64)

    def body():
        runtime.launch(stage.compute, 60_000_000)
        for stream in stage.streams[:streams]:
            stage.after(stream, stage.compute, 0)
        for i in range(65):
            stage.store(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=64, channels=4)


@pytest.mark.parametrize(
    "play, cause", [(loads, "launch_queue_saturation"), (stores_behind_a_forward, "fence_before_copies")]
)
def test_pooled_streams_save_what_was_predicted(runtime, play, cause):
    before = play(runtime, 1)
    finding = found(before, cause)
    saved = before.truth["blocked"] - play(runtime, 4).truth["blocked"]
    assert predicted(finding, "pooled") <= finding.lost_ns
    assert predicted(finding, "pooled") == pytest.approx(saved, rel=0.15)


def bursts(runtime, depth):
    """Four bursts of loads; between two of them the thread has something else to do until all is done."""
    stage = Stage(runtime, depth=depth)

    def body():
        for burst in range(4):
            for i in range(400):
                stage.load(400 * burst + i, 64 * KiB, stage.streams[0])
            runtime.sleep(100_000_000)

    return stage.play(body, blocked, queue_depth=depth)


@pytest.mark.parametrize("executions", [True, False])
def test_a_burst_saves_by_itself_however_early_the_pause_before_it_ended(runtime, executions):
    """The device begins a burst when the thread does: what an earlier one saved is not waited for in the next."""
    before = bursts(runtime, 64)
    if not executions:
        before.recording.tables["executions"] = Table("executions")
        before.recording.has_executions = False
    saved = before.truth["blocked"] - bursts(runtime, 256).truth["blocked"]
    finding = found(before, "launch_queue_saturation")
    assert predicted(finding, "CUDA_SCALE_LAUNCH_QUEUES") == pytest.approx(saved, rel=0.15)


DEPTH = 1021


def by_arithmetic(depth, copies, *, forward_ns=30_000_000, copy_ns=9_000, submit_ns=1_000, rounds=3, executions=True):
    """Bursts of copies behind a forward, each waited for: (joined, rows that waited, ns that each waited).

    A copy that finds `depth` outstanding waits for the oldest of them, on one thread, one stream.
    """
    calls, ran, waited = [], [], []
    now = 0
    for _ in range(rounds):
        free, done = now + forward_ns, []
        for _ in range(copies):
            enter = now
            room = done[len(done) - depth] if len(done) >= depth else 0
            wait = max(room - enter, 0)
            if wait:
                waited.append((len(calls), wait))
            now = enter + wait + submit_ns
            free = max(free, now) + copy_ns
            done.append(free)
            ran.append((free - copy_ns, free, len(calls)))
            calls.append((enter, now, CallKind.COPY))
            now += 500
        calls.append((now, max(free, now) + 2_000, CallKind.SYNC))
        now = calls[-1][1] + 100_000
    start, end, kind = map(np.array, zip(*calls, strict=True))
    n = len(calls)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": end,
                "kind": kind,
                "correlation": np.arange(n),
                "stream": np.zeros(n, int),
                "process": np.zeros(n, int),
            },
        ),
        "streams": Table("streams", {"handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    if executions:
        begin, over, correlation = map(np.array, zip(*ran, strict=True))
        tables["executions"] = Table(
            "executions",
            {
                "start_ns": begin,
                "end_ns": over,
                "correlation": correlation,
                "stream": np.zeros(len(ran), int),
                "process": np.zeros(len(ran), int),
                "engine": np.full(len(ran), Engine.COPY),
            },
        )
    recording = Recording([Source("arithmetic", "kineto-json")], tables, has_executions=executions)
    rows, ns = (np.array([one[i] for one in waited], dtype=np.int64) for i in (0, 1))
    joined = JoinedRecording(recording, SimpleNamespace(depth=np.full(n, depth)))
    return joined, rows, ns


@pytest.mark.parametrize("executions", [True, False])
@pytest.mark.parametrize("copies", [1500, 3000, 6000])
@pytest.mark.parametrize("factor", [1, 1.5, 2, 4, 8])
def test_the_replay_saves_what_a_queue_of_that_depth_saves(copies, factor, executions):
    joined, rows, ns = by_arithmetic(DEPTH, copies, executions=executions)
    none = np.zeros(0, dtype=np.int64)
    shapes = {"saturation": rows, "fence": none, "alias": none, "channels": none}
    lost = {"saturation": ns, "fence": none, "alias": none, "channels": none}
    saved = spared(joined, Full(shapes, lost, [], "plateau", DEPTH), "saturation", factor)
    after = by_arithmetic(int(DEPTH * factor), copies)[2].sum()
    assert saved == pytest.approx(1 - after / ns.sum(), abs=0.02)


def test_more_connections_are_no_cure_for_one_stream(runtime):
    for play in (loads, stores_behind_a_forward):
        for finding in diagnose(play(runtime).recording):
            assert all(change.name != "CUDA_DEVICE_MAX_CONNECTIONS" for change in finding.cure)


def test_what_is_printed_first_saves_most_and_no_saving_is_printed_that_was_not_modelled():
    changes = (Change("a"), Change("b", share=0.5), Change("c", share=0.0), Change("d", share=0.9))
    ordered = best_first(change.of(1_000, 1_000) for change in changes)
    assert [(c.text, c.predicted_saving_ns) for c in ordered] == [("d", 900), ("b", 500), ("a", None), ("c", 0)]
    assert saving_text(ordered[2]) == "saving not predicted"


def test_what_a_thread_is_spared_stands_beside_a_smaller_saving_and_not_beside_an_equal_one():
    def said(change):
        return " ".join(saving_text(change).split())  # a number and its unit are kept on one line

    modelled = Change("a", share=1.0)
    assert (
        said(modelled.of(6_530, 10_187_345))
        == "predicted to save 6.53 µs of wall time, and to give the thread back 10.2 ms"
    )
    assert said(modelled.of(0, 23_100_000)) == (
        "predicted to give the thread back 23.1 ms; saves no wall time, because the GPU does not wait for this thread"
    )
    assert said(modelled.of(1_000, 1_000)) == "predicted to save 1.00 µs"


def test_joining_runs_saves_what_was_predicted(runtime):
    def small(joined):
        stage = Stage(runtime, depth=4096, d2h=4e9)

        def body():
            for run in range(300):
                at = (run * 16) * 4 * KiB
                for i in range(1 if joined else 8):
                    size = (8 if joined else 1) * 4 * KiB
                    runtime.copy(stage.host + at + i * size, stage.device + at + i * size, size, D2H, stage.streams[0])

        def truth(records, _):
            took = (records["exec_end_ns"] - records["exec_start_ns"])[records["direction"] == D2H]
            return {"engine": int(took.sum())}

        return stage.play(body, truth, link_bytes_per_s=4e9)

    before = small(False)
    assert predicted(found(before, "small_copies"), "Join contiguous") == pytest.approx(
        before.truth["engine"] - small(True).truth["engine"], rel=0.15
    )
