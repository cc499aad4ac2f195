"""What a cure is predicted to save is what it saves when it is really applied, on the same runtime."""

import pytest
from hostruntime import D2H
from scenarios import BLOCK, KiB, Stage, queue_ns

from kvprobe.diagnosis import diagnose


def lost_and_predicted(played, cause):
    finding = next(f for f in diagnose(played.recording) if f.cause == cause)
    return finding.lost_ns, finding.predicted_saving_ns


def blocked(records, _):
    return {"blocked": int(sum(queue_ns(records)).sum())}


def loads(runtime, streams):
    stage = Stage(runtime, depth=128)

    def body():
        for _ in range(100):
            runtime.launch(stage.compute, 2_000_000)
        for i in range(180):
            stage.load(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=128, channels=4)


def stores_behind_a_forward(runtime, streams):
    stage = Stage(runtime, depth=64)

    def body():
        runtime.launch(stage.compute, 60_000_000)
        for stream in stage.streams[:streams]:
            stage.after(stream, stage.compute, 0)
        for i in range(65):
            stage.store(i, BLOCK, stage.streams[i % streams])

    return stage.play(body, blocked, queue_depth=64, channels=4)


@pytest.mark.parametrize("play, cause", [(loads, "launch_queue_saturation"),
                                         (stores_behind_a_forward, "fence_before_copies")])  # fmt: skip
def test_pooled_streams_save_what_was_predicted(runtime, play, cause):
    before = play(runtime, 1)
    lost, predicted = lost_and_predicted(before, cause)
    after = play(runtime, 4).truth["blocked"]
    assert predicted == pytest.approx(before.truth["blocked"] - after, rel=0.15)
    assert predicted <= lost


def test_a_fence_with_more_copies_than_all_channels_take_is_not_promised_anything(runtime):
    stage = Stage(runtime, depth=32)

    def body():
        runtime.launch(stage.compute, 60_000_000)
        stage.after(stage.streams[0], stage.compute, 0)
        for i in range(140):
            stage.store(i, 64 * KiB, stage.streams[0])

    played = stage.play(body, lambda records, _: {}, queue_depth=32, channels=4)
    lost, predicted = lost_and_predicted(played, "fence_before_copies")
    assert lost > 40e6 and predicted == 0


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
    _, predicted = lost_and_predicted(before, "small_copies")
    assert predicted == pytest.approx(before.truth["engine"] - small(True).truth["engine"], rel=0.15)
