"""What a cure is predicted to save is what it saves when it is really applied, on the same runtime."""

import pytest
from hostruntime import D2H
from scenarios import BLOCK, KiB, Stage, queue_ns

from kvprobe.diagnosis import Change, diagnose
from kvprobe.diagnosis.finding import best_first
from kvprobe.reporting.verdict import saving_text


def found(played, cause):
    return next(f for f in diagnose(played.recording) if f.cause == cause)


def predicted(finding, name):
    """What the change of this name (or of a text with these words) alone is predicted to save."""
    return next(c.predicted_saving_ns for c in finding.cure if c.name == name or name in c.text)


QUEUE = ("launch_queue_saturation", "fence_before_copies")


def agree(play):
    """Whether prediction and measurement agree: `play` gives (predicted, measured, tolerance in ns).

    The machine may take a core away for long enough to change what one of the two runs lost: two of three, then.
    """

    def wrong():
        expected, measured, tolerance = play()
        return "" if abs(expected - measured) <= tolerance else f"predicted {expected}, measured {measured}"

    first = wrong()
    again = [wrong(), wrong(), wrong()] if first else []
    assert sum(map(bool, again)) < 2, [first, *again]


def blocked(records, _):
    return {"blocked": int(sum(queue_ns(records)).sum())}


def loads(runtime, streams=1, depth=128):
    stage = Stage(runtime, depth=depth)

    def body():
        for _ in range(100):
            runtime.launch(stage.compute, 2_000_000)
        for i in range(180):
            stage.load(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=depth, channels=4)


def stores_behind_a_forward(runtime, streams=1, depth=64):
    stage = Stage(runtime, depth=depth)

    def body():
        runtime.launch(stage.compute, 60_000_000)
        for stream in stage.streams[:streams]:
            stage.after(stream, stage.compute, 0)
        for i in range(65):
            stage.store(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=depth, channels=4)


@pytest.mark.parametrize("play, cause", [(loads, "launch_queue_saturation"),
                                         (stores_behind_a_forward, "fence_before_copies")])  # fmt: skip
def test_pooled_streams_save_what_was_predicted(runtime, play, cause):
    def compare():
        before = play(runtime, 1)
        finding = found(before, cause)
        saved = before.truth["blocked"] - play(runtime, 4).truth["blocked"]
        assert predicted(finding, "pooled") <= finding.lost_ns
        return predicted(finding, "pooled"), saved, 0.15 * saved

    agree(compare)


def long_stores_behind_a_forward(runtime, depth=32):
    stage = Stage(runtime, depth=depth)

    def body():
        for _ in range(2):
            runtime.launch(stage.compute, 40_000_000)
            stage.after(stage.streams[0], stage.compute, 0)
            for i in range(80):
                stage.store(i, BLOCK, stage.streams[0])
            runtime.synchronize()

    return stage.play(body, blocked, queue_depth=depth, channels=4)


@pytest.mark.parametrize("play", [loads, stores_behind_a_forward, long_stores_behind_a_forward])
def test_a_queue_four_times_as_deep_saves_what_was_predicted(runtime, play):
    def compare():
        before = play(runtime)
        findings = diagnose(before.recording)
        after = play(runtime, depth=4 * before.recording.machine["queue_depth"]).truth["blocked"]
        saving = sum(predicted(f, "CUDA_SCALE_LAUNCH_QUEUES") for f in findings if f.cause in QUEUE)
        return saving, before.truth["blocked"] - after, 0.15 * before.truth["blocked"]

    agree(compare)


@pytest.mark.parametrize("factor", [1, 1.5, 2, 3])
def test_the_replay_agrees_with_a_queue_of_that_depth(runtime, factor):
    """Part of the copies fit: how much is left to wait is what the model has to know."""
    from kvprobe.diagnosis.frame import Frame
    from kvprobe.diagnosis.queue_full import full
    from kvprobe.diagnosis.room import spared

    def compare():
        before = long_stores_behind_a_forward(runtime)
        frame = Frame(before.recording)
        blocks = full(frame)
        lost = {shape: int(ns.sum()) for shape, ns in blocks.ns.items()}
        saving = sum(spared(frame, blocks, shape, factor) * lost[shape] for shape in ("saturation", "fence"))
        after = long_stores_behind_a_forward(runtime, depth=int(32 * factor)).truth["blocked"]
        return saving, before.truth["blocked"] - after, 0.1 * before.truth["blocked"]

    agree(compare)


def test_more_connections_are_no_cure_for_one_stream(runtime):
    for play in (loads, stores_behind_a_forward):
        for finding in diagnose(play(runtime).recording):
            assert all(change.name != "CUDA_DEVICE_MAX_CONNECTIONS" for change in finding.cure)


def test_what_is_printed_first_saves_most_and_no_saving_is_printed_that_was_not_modelled():
    changes = (Change("a"), Change("b", share=0.5), Change("c", share=0.0), Change("d", share=0.9))
    ordered = best_first(change.of(1_000) for change in changes)
    assert [(c.text, c.predicted_saving_ns) for c in ordered] == [("d", 900), ("b", 500), ("a", None), ("c", 0)]
    assert saving_text(ordered[2]) == "saving not predicted"


def test_a_fence_with_more_copies_than_all_channels_take_is_not_promised_anything(runtime):
    """Four times the room still blocks for the rest of the forward; a batch for each transfer does not."""

    def play():
        stage = Stage(runtime, depth=32)

        def body():
            runtime.launch(stage.compute, 60_000_000)
            stage.after(stage.streams[0], stage.compute, 0)
            for i in range(140):
                stage.store(i, 64 * KiB, stage.streams[0])

        return stage.play(body, lambda records, _: {}, queue_depth=32, channels=4)

    def pooled():
        finding = found(play(), "fence_before_copies")
        return predicted(finding, "pooled"), 0, 0.2 * finding.lost_ns

    def batched():
        finding = found(play(), "fence_before_copies")
        return predicted(finding, "cudaMemcpyBatchAsync"), finding.lost_ns, 0.1 * finding.lost_ns

    agree(pooled)
    agree(batched)


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
