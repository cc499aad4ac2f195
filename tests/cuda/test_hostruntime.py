"""The host runtime's controls from Python: the virtual clock, actors, faults, gates, the trace."""

from __future__ import annotations

import ctypes as ct

import pytest

from kvprobe.cuda.hostruntime import HostConfig, HostRuntime, HostStats, host_runtime, trace_type
from kvprobe.errors import CudaError, UsageError

START_NS = 1_000_000_000


@pytest.fixture
def runtime():
    runtime = host_runtime(virtual_clock=True, seed=1)
    yield runtime
    runtime.reset()


def test_structures_are_those_of_the_library(runtime):
    assert ct.sizeof(HostConfig) == 128
    assert trace_type().itemsize == 136
    config = runtime.config
    assert (config.depth, config.virtual_clock, config.seed, config.submit_ns) == (1021, 1, 1, 1000)
    assert runtime.reset(depth=64, h2d_bytes_per_s=1e9, seed=9, submit_ns=-1).config.depth == 64
    stats = runtime.stats
    assert list(stats.capacity) == [4 * 56 + 8] * 3
    assert (stats.streams, stats.events, stats.sticky) == (0, 0, 0)
    assert ct.sizeof(HostStats) == 936


def test_unknown_setting_is_refused_before_anything_is_reset(runtime):
    stream = runtime.stream_create()
    with pytest.raises(UsageError, match="no setting 'bandwidth'"):
        runtime.reset(bandwidth=1)
    assert runtime.stream_query(stream)


def test_configures_only_what_is_unused():
    runtime = host_runtime(virtual_clock=True)
    assert runtime.configure(depth=32, virtual_clock=True)
    runtime.stream_create()
    assert not runtime.configure(depth=64)
    assert runtime.config.depth == 32
    runtime.reset()


def test_environment_chooses_the_clock(monkeypatch):
    monkeypatch.setenv("KVHOST_CLOCK", "virtual")
    monkeypatch.setenv("KVHOST_SEED", "5")
    runtime = host_runtime(depth=0)
    assert runtime.simulated
    assert runtime.config.seed == 5
    assert not runtime.reset(virtual_clock=2).simulated
    monkeypatch.delenv("KVHOST_CLOCK")
    assert not runtime.reset().simulated
    with pytest.raises(CudaError, match="kvhostAdvance"):
        runtime.advance(1)
    with pytest.raises(UsageError, match="virtual clock"):
        runtime.actor(lambda now: None)


def test_time_is_what_the_model_says(runtime):
    assert runtime.now_ns() == START_NS
    host, device, stream = runtime.host_alloc(1 << 20), runtime.malloc(1 << 20), runtime.stream_create()
    begin, end = runtime.event_create(timing=True), runtime.event_create(timing=True)
    runtime.event_record(begin, stream)
    runtime.memcpy_async(device, host, 1 << 20, "h2d", stream)
    runtime.event_record(end, stream)
    assert runtime.now_ns() == START_NS + 3000
    runtime.stream_synchronize(stream)
    assert runtime.now_ns() == START_NS + 1000 + 2000 + (1 << 18)
    assert runtime.event_elapsed_ms(begin, end) == pytest.approx((3000 + (1 << 18)) / 1e6)
    runtime.launch_delay(stream, 10**12)
    runtime.synchronize()
    assert runtime.now_ns() >= START_NS + 10**12


def test_polling_ends(runtime):
    stream = runtime.stream_create()
    runtime.launch_delay(stream, 1_000_000)
    polls = 0
    while not runtime.stream_query(stream):
        polls += 1
    assert polls == (1_000_000 - 1000) // 100


def test_gate_is_opened_by_an_actor_while_the_caller_waits(runtime):
    stream = runtime.stream_create()
    steps = []
    with runtime.gate() as gate:
        gate.launch(stream)

        def open_later(now_ns):
            steps.append(now_ns)
            if now_ns < START_NS + 5_000_000:
                return START_NS + 5_000_000
            gate.open()
            return None

        with runtime.actor(open_later) as actor:
            runtime.stream_synchronize(stream)
            assert runtime.now_ns() == START_NS + 5_000_000
            actor.wake()
            runtime.advance(1)
        assert gate.reached == 1
    assert steps == [START_NS + 1000, START_NS + 5_000_000, START_NS + 5_000_000]


def test_what_can_never_be_is_said(runtime: HostRuntime):
    stream, other = runtime.stream_create(), runtime.stream_create()
    event = runtime.event_create()
    with runtime.gate() as gate:
        gate.launch(stream)
        runtime.event_record(event, stream)
        runtime.stream_wait_event(other, event)
        with pytest.raises(CudaError, match="would wait forever") as error:
            runtime.stream_synchronize(other)
        assert error.value.code == 702
        assert "stream 2: 1 operations, the first is a wait for an event recorded on stream 1" in str(error.value)
        with pytest.raises(CudaError, match=r"kvhostRunUntil.*would wait forever"):
            runtime.run_until(lambda: False)
        gate.open()
        runtime.run_until(lambda: runtime.stream_query(other))


def test_what_callbacks_raise_comes_out(runtime: HostRuntime):
    def fail(*_):
        raise ValueError("in a callback")

    stream = runtime.stream_create()
    with runtime.actor(fail) as actor, pytest.raises(ValueError, match="in a callback"):
        runtime.advance(1000)
    assert actor.done
    with pytest.raises(ValueError, match="in a callback"):
        runtime.run_until(fail)
    runtime.launch_work(stream, fail, 500)
    runtime.launch_host_function(stream, fail)
    with pytest.raises(ValueError, match="in a callback"):
        runtime.advance(10_000)
    runtime.check_raised()


def test_faults(runtime: HostRuntime):
    host, device, stream = runtime.host_alloc(64), runtime.malloc(64), runtime.stream_create()
    runtime.fail_copy(2)
    runtime.memcpy_async(device, host, 64, "h2d", stream)
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        runtime.memcpy_async(device, host, 64, "h2d", stream)
    runtime.fail_call("cudaEventCreateWithFlags", 1, 2)
    with pytest.raises(CudaError, match="cudaErrorMemoryAllocation"):
        runtime.event_create()
    with pytest.raises(CudaError, match="kvhostFailCall"):
        runtime.fail_call("cudaNothing")
    runtime.fail_call("cudaEventCreateWithFlags", 1)
    runtime.fail_call("cudaEventCreateWithFlags", 2)
    runtime.fail_call("cudaEventCreateWithFlags", 0)
    runtime.event_create()
    runtime.event_create()
    runtime.fail_execution(1, 700)
    runtime.memcpy_async(device, host, 64, "h2d", stream)
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        runtime.stream_synchronize(stream)
    assert runtime.stats.sticky == 700
    runtime.reset(virtual_clock=True).lose_device()
    with pytest.raises(CudaError, match="cudaErrorDevicesUnavailable"):
        runtime.stream_create()


def test_trace_holds_calls_and_executions(runtime: HostRuntime):
    host, device, stream = runtime.host_alloc(4096), runtime.malloc(4096), runtime.stream_create()
    runtime.trace_start(10)
    runtime.memcpy_async(device, host, 4096, "h2d", stream)
    runtime.stream_synchronize(stream)
    runtime.trace_stop()
    copy, sync = runtime.trace()
    assert runtime.call_name(copy["api"]) == "cudaMemcpyAsync"
    assert (copy["start_ns"], copy["end_ns"]) == (START_NS, START_NS + 1000)
    assert (copy["exec_start_ns"], copy["exec_end_ns"]) == (START_NS, START_NS + 3024)
    assert (sync["start_ns"], sync["end_ns"], sync["blocked_ns"]) == (START_NS + 1000, START_NS + 3024, 2024)
    runtime.trace_start(1)
    for _ in range(2):
        runtime.launch_delay(stream, 0)
    with pytest.raises(UsageError, match="1 calls were not recorded"):
        runtime.trace()


def test_bytes_of_a_copy_move_when_it_starts_or_ends_or_half_each():
    """A source that is overwritten while it is copied: what arrives depends on the seed, and on it alone."""

    def arrived(seed: int) -> tuple[int, int]:
        runtime = host_runtime(virtual_clock=True, seed=seed)
        host, device, stream = runtime.host_alloc(4096), runtime.malloc(4096), runtime.stream_create()
        ct.memset(host, 1, 4096)
        runtime.memcpy_async(device, host, 4096, "h2d", stream)
        runtime.advance(500)
        ct.memset(host, 2, 4096)
        runtime.synchronize()
        return ct.c_ubyte.from_address(device).value, ct.c_ubyte.from_address(device + 4095).value

    seen = {seed: arrived(seed) for seed in range(1, 40)}
    assert set(seen.values()) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {seed: arrived(seed) for seed in range(1, 40)} == seen
    host_runtime().reset()
