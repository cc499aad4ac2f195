"""The workload of the demo and the bench: what fails in it ends it in order."""

from __future__ import annotations

import threading
import types

import pytest

from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.errors import CudaError, KvprobeError
from kvprobe.launchqueue import calibrate
from kvprobe.workload import Machine, WorkloadServer, _memory_told, shape_for


@pytest.fixture
def machine():
    runtime = host_runtime(depth=256, virtual_clock=1)
    made = Machine(runtime, shape_for(runtime, calibrate(runtime)))
    yield made
    made.close()
    runtime.reset()


def test_memory_is_freed_when_nobody_compares_it_any_more(machine):
    server = WorkloadServer(machine, calibrate(machine.runtime), "pooled", "off")
    inside, go, alive = threading.Event(), threading.Event(), []

    def verify(*_):
        inside.set()
        assert go.wait(60)

    machine.verify, free = verify, machine.model.close
    machine.model.close = lambda: (alive.append(server._verifier.is_alive()), free())
    server._verify.put(types.SimpleNamespace(blocks=[0], source=[0]))
    assert inside.wait(60)
    closing = threading.Thread(target=machine.close)
    closing.start()  # as after an interrupt: nobody closed the server
    go.set()
    closing.join()
    assert alive == [False]
    machine.close = lambda: None
    server.engine.close()


@pytest.mark.parametrize("call", ["cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaEventRecord"])
def test_a_call_that_fails_ends_the_workload_with_its_error(machine, call):
    server = WorkloadServer(machine, calibrate(machine.runtime), "shared", "off")
    machine.runtime.fail_call(call, 3, 700)
    with pytest.raises((CudaError, KvprobeError)):
        try:
            server.run(2.0)
        finally:
            server.close()
    assert not server._verifier.is_alive()


def test_memory_of_the_device_that_torch_cannot_have_is_told_in_one_line():
    torch = pytest.importorskip("torch")
    line = r"needs more memory of the device than the \d+ MiB that are free$"
    with pytest.raises(KvprobeError, match=line) as told, _memory_told(host_runtime()):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate ...")
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="another"), _memory_told(host_runtime()):
        raise RuntimeError("another")
