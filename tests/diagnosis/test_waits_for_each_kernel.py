"""Many short gaps between kernels: whether Python was slow to launch, or the thread waited for each kernel."""

from __future__ import annotations

import pytest
from hostruntime import recording_of
from scenarios import Stage

from kvprobe.diagnosis import examine

KERNELS, KERNEL_NS, PAUSE_NS = 300, 30_000, 40_000


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_waits_for_each_kernel_is_told_not_to_wait(runtime, waits):
    """Its pauses would fit beside kernels; of a thread that is slower than its kernels nothing can."""
    stage = Stage(runtime)

    def body():
        for _ in range(KERNELS):
            runtime.launch(stage.compute, KERNEL_NS)
            if waits:
                runtime.sync(stage.compute)
            runtime.sleep(PAUSE_NS if waits else KERNEL_NS + PAUSE_NS)

    found = {one.cause: one for one in examine(recording_of(runtime, runtime.trace(body)[0]))}
    finding = found["python_or_gil_bound"]
    first = finding.cure[0]
    if waits:
        assert finding.title.endswith("because the thread waits for each kernel")
        assert first.text.startswith("Do not wait for the GPU after each kernel")
        assert 0.6 * KERNELS * KERNEL_NS < first.predicted_saving_ns < KERNELS * KERNEL_NS, "no more than kernels hide"
    else:
        assert finding.title.endswith("because Python was slow to launch kernels")
        assert first.text.startswith("Launch many kernels at once")
    assert any("while the thread waited for the GPU" in one.text for one in finding.evidence) == waits
