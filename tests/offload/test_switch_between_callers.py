"""The policy changes in the middle of a transfer while another caller waits for its turn on the shared stream."""

from __future__ import annotations

import threading

import numpy as np


def test_a_caller_that_waits_for_its_turn_loses_nothing_when_the_policy_changes(bench, monkeypatch):
    """It must not begin on the shared stream before the rest of the transfer in front of it was handed over."""
    b = bench(layers=4, blocks=512, gpu_bytes=512, cpu_bytes=512, depth=4096)
    with b.engine(policy="shared") as engine:
        other = threading.Thread(target=lambda: engine.load([1], [1]))
        shared, hand_over = engine._shared["load"], engine._hand_over

        def judge(*_):
            if engine.policy == "shared":
                other.start()
                while len(engine._live) < 2:  # it has asked, and waits for its turn
                    pass
                engine.set_policy("pooled")

        def late(transfer):  # the other one has time to begin, if it may
            if threading.current_thread() is not other:
                other.join(0.2)
            hand_over(transfer)

        monkeypatch.setattr(shared, "_judge", judge)
        monkeypatch.setattr(engine, "_hand_over", late)
        first = engine.load(range(512), range(512))
        other.join()
        engine.wait(timeout_s=60)
        assert first.state == "done"
    for gpu, cpu in zip(b.bytes_of(b.gpu), b.bytes_of(b.cpu), strict=True):
        assert np.array_equal(gpu, cpu)
