"""Scenarios that really run on the embedded host runtime: a recording, and what the runtime itself says is true of it.

Each scenario returns a `Played`: the recording as a profiler would have made it, and the truth, cause -> ns lost,
computed from what the runtime traced about itself (why and how long each call was blocked), which the recording does
not contain. Time is virtual: a scenario is the same on every machine under any load.
"""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hostruntime import (
    CONTEXT_LOCK,
    D2H,
    H2D,
    QUEUE_FULL,
    STREAM_LOCK,
    SYNC,
    Runtime,
    recording_of,
)

from kvprobe.diagnosis.finding import Finding
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Recording

Records = npt.NDArray[Any]
KiB, MiB = 1 << 10, 1 << 20
RATE = 1e9  # bytes per second of each direction, unless a scenario says otherwise
BLOCK = 1 * MiB  # 1.05 ms


@dataclass
class Played:
    """A recording and its truth."""

    recording: Recording
    truth: dict[str, int]
    records: Records


SCENARIOS: dict[str, Callable[[Runtime], Played]] = {}


def scenario(function: Callable[[Runtime], Played]) -> Callable[[Runtime], Played]:
    SCENARIOS[function.__name__] = function
    return function


class Stage:
    """A runtime that was set up anew: memory, streams, events, all made before the trace begins."""

    def __init__(
        self,
        rt: Runtime,
        *,
        depth: int = 256,
        channels: int = 4,
        h2d: float = RATE,
        d2h: float = RATE,
        latency_ns: float = 2000,
        size: int = 64 * MiB,
        streams: int = 4,
        events: int = 64,
    ) -> None:
        rt.reset(
            depth=depth,
            compute_channels=channels,
            copy_channels=channels,
            h2d_bytes_per_s=h2d,
            d2h_bytes_per_s=d2h,
            latency_ns=latency_ns,
        )
        self.rt, self.size, self.depth = rt, size, depth
        self.host, self.device = rt.host_alloc(size), rt.malloc(size)
        self.streams = [rt.stream() for _ in range(streams)]
        self.compute = rt.stream()
        self.events = [rt.event() for _ in range(events)]
        for stream in [*self.streams, self.compute]:  # every path once, so that nothing is a first call
            rt.copy(self.device, self.host, 4096, H2D, stream)
            rt.copy(self.host, self.device, 4096, D2H, stream)
            rt.launch(stream, 1000)
            rt.record(self.events[0], stream)
            rt.wait(stream, self.events[0])
        rt.synchronize()

    def load(self, block: int, size: int, stream: int) -> int:
        at = (block * size) % (self.size - size + 1)
        return self.rt.copy(self.device + at, self.host + at, size, H2D, stream)

    def store(self, block: int, size: int, stream: int) -> int:
        at = (block * size) % (self.size - size + 1)
        return self.rt.copy(self.host + at, self.device + at, size, D2H, stream)

    def after(self, later: int, earlier: int, event: int) -> None:
        """`later` waits for all that `earlier` has been given."""
        self.rt.record(self.events[event], earlier)
        self.rt.wait(later, self.events[event])

    def play(
        self,
        body: Callable[[], Any],
        truth: Callable[[Records, Any], dict[str, int]],
        *,
        channels: bool = False,
        **machine: Any,
    ) -> Played:
        records, result = self.rt.trace(body)
        recording = recording_of(self.rt, records, channels)
        recording.machine.update(machine)
        return Played(recording, truth(records, result), records)


# ---- truth from the runtime's own trace -----------------------------------------------------------------------------


def ran(records: Records, mask: npt.NDArray[np.bool_]) -> Cover:
    chosen = records[mask & (records["exec_end_ns"] > 0)]
    return Cover(chosen["exec_start_ns"].astype(np.int64), chosen["exec_end_ns"].astype(np.int64))


def kernels(records: Records) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = records["op_class"] == 0
    return mask & (records["correlation"] > 0)


def queue_ns(records: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each call: ns it waited for a slot, where its stream executed, and where it stood still for most of it."""
    waited = np.where(records["reason"] == QUEUE_FULL, records["queue_ns"], 0).astype(np.int64)
    still = np.zeros(len(records), dtype=np.int64)
    end = records["end_ns"].astype(np.int64)
    for stream in np.unique(records["stream"][waited > 0]):
        mine = np.flatnonzero((records["stream"] == stream) & (waited > 0))
        cover = ran(records, records["stream"] == stream)
        still[mine] = waited[mine] - cover.within(end[mine] - waited[mine], end[mine])
    still = np.where((still > 200_000) & (2 * still > waited), waited, 0)  # a call is one finding's, as a whole
    return waited - still, still


def named(**causes: int) -> dict[str, int]:
    """What was lost, without what was not."""
    return {cause: int(ns) for cause, ns in causes.items() if ns > 0}


# ---- the queue ------------------------------------------------------------------------------------------------------


@scenario
def loads_on_one_stream(rt: Runtime) -> Played:
    stage = Stage(rt, depth=128)

    def body() -> None:
        for _ in range(100):
            rt.launch(stage.compute, 2_000_000)
        for i in range(180):
            stage.load(i, BLOCK, stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, _still = queue_ns(records)
        return named(launch_queue_saturation=moving.sum())

    return stage.play(body, truth, queue_depth=128)


@scenario
def launches_on_one_stream(rt: Runtime) -> Played:
    stage = Stage(rt, depth=128)

    def body() -> None:
        for _ in range(190):
            rt.launch(stage.compute, 1_000_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, _still = queue_ns(records)
        return named(launch_queue_saturation=moving.sum())

    return stage.play(body, truth, queue_depth=128)


@scenario
def two_saturated_streams(rt: Runtime) -> Played:
    stage = Stage(rt, depth=128)

    def flood(stream: int, store: bool) -> Callable[[], None]:
        def go() -> None:
            for i in range(180):
                (stage.store if store else stage.load)(i, BLOCK, stream)

        return go

    def body() -> None:
        for _ in range(100):
            rt.launch(stage.compute, 2_000_000)
        threads = [rt.thread(flood(stage.streams[0], False)), rt.thread(flood(stage.streams[1], True))]
        for thread in threads:
            thread.join()

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, _still = queue_ns(records)
        return named(launch_queue_saturation=moving.sum())

    return stage.play(body, truth, queue_depth=128)


def _fenced(rt: Runtime, steps: int, forward_ns: int, copies: int) -> Played:
    stage = Stage(rt, depth=64)

    def body() -> None:
        for step in range(steps):
            if step:
                rt.sleep(100_000_000)  # the stores of the step before have drained
            rt.launch(stage.compute, forward_ns)
            stage.after(stage.streams[0], stage.compute, step)
            for i in range(copies):
                stage.store(i, BLOCK, stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, still = queue_ns(records)
        return named(fence_before_copies=still.sum(), launch_queue_saturation=moving.sum())

    return stage.play(body, truth, queue_depth=64)


@scenario
def store_behind_a_forward(rt: Runtime) -> Played:
    return _fenced(rt, 2, 60_000_000, 65)


@scenario
def store_behind_a_forward_then_saturated(rt: Runtime) -> Played:
    return _fenced(rt, 1, 60_000_000, 130)


def _many_streams(rt: Runtime, ids: bool, **machine: Any) -> Played:
    stage = Stage(rt, depth=64, channels=2, streams=8)

    def body() -> None:
        for _ in range(50):
            rt.launch(stage.compute, 4_000_000)
        for i in range(190):
            stage.load(i, BLOCK, stage.streams[i % 8])

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, still = queue_ns(records)
        return named(channels_exhausted=(moving + still).sum())

    return stage.play(body, truth, channels=ids, **machine)


@scenario
def more_streams_than_channels_with_ids(rt: Runtime) -> Played:
    return _many_streams(rt, True, queue_depth=64)


@scenario
def more_streams_than_channels_without_ids(rt: Runtime) -> Played:
    return _many_streams(rt, False, queue_depth=64)


@scenario
def new_stream_that_is_in_use(rt: Runtime) -> Played:
    stage = Stage(rt, depth=128)
    shared = stage.streams[0]
    model: dict[str, int] = {}
    filled = threading.Event()

    def offload() -> None:
        for i in range(200):
            stage.load(i, BLOCK, shared)
            if i == 140:
                filled.set()

    def body() -> None:
        rt.launch(shared, 10_000)
        for _ in range(50):
            rt.launch(stage.compute, 4_000_000)
        thread = rt.thread(offload)
        rt.host.run_until(filled.is_set)
        model["tid"] = 0  # who is no simulated thread
        for step in range(6):
            for _ in range(2):
                rt.launch(stage.compute, 100_000)
            stage.load(900 + step, 4 * KiB, shared)
        thread.join()

    def truth(records: Records, _: Any) -> dict[str, int]:
        mine = (records["tid"] == model["tid"]) & (records["stream"] == shared)
        waits = np.isin(records["reason"], [QUEUE_FULL, STREAM_LOCK])
        others = ~mine & (records["correlation"] > 0)
        return named(
            aliased_stream=records["blocked_ns"][mine & waits].sum(),
            launch_queue_saturation=records["blocked_ns"][others & waits].sum(),
        )

    return stage.play(body, truth, queue_depth=128)


@scenario
def event_creation_behind_a_blocked_submitter(rt: Runtime) -> Played:
    stage = Stage(rt, depth=64)

    def offload() -> None:
        rt.launch(stage.compute, 40_000_000)
        stage.after(stage.streams[0], stage.compute, 0)
        for i in range(65):
            stage.store(i, BLOCK, stage.streams[0])

    def body() -> None:
        thread = rt.thread(offload)
        rt.sleep(12_000_000)
        rt.event()
        thread.join()

    def truth(records: Records, _: Any) -> dict[str, int]:
        moving, still = queue_ns(records)
        lock = records["reason"] == CONTEXT_LOCK
        return named(
            context_lock_stall=records["blocked_ns"][lock].sum(),
            fence_before_copies=still.sum(),
            launch_queue_saturation=moving.sum(),
        )

    return stage.play(body, truth, queue_depth=64)


# ---- the calling thread ---------------------------------------------------------------------------------------------


@scenario
def pageable_copies(rt: Runtime) -> Played:
    stage = Stage(rt)
    buffer = ct.create_string_buffer(4 * MiB)
    ct.memset(buffer, 1, 4 * MiB)

    def body() -> list[int]:
        ids = []
        for i in range(30):
            stage.load(i, 64 * KiB, stage.streams[0])
        for i in range(12):
            if i % 2:
                ids.append(rt.copy(stage.device, ct.addressof(buffer), 4 * MiB, H2D, stage.streams[0]))
            else:
                ids.append(rt.copy(ct.addressof(buffer), stage.device, 4 * MiB, D2H, stage.streams[1]))
        return ids

    def truth(records: Records, ids: list[int]) -> dict[str, int]:
        chosen = np.isin(records["correlation"], ids)
        return named(pageable_memory=(records["end_ns"] - records["start_ns"])[chosen].sum())

    return stage.play(body, truth)


@scenario
def waits_for_loads_on_the_model_thread(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(12):
            for i in range(4):
                stage.load(4 * step + i, 256 * KiB, stage.streams[0])
            rt.sync(stage.streams[0])
            rt.launch(stage.compute, 2_000_000)
            rt.sync(stage.compute)
        rt.launch(stage.compute, 100_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        waits = (records["reason"] == SYNC) & (records["stream"] == stage.streams[0])
        end = records["end_ns"][waits].astype(np.int64)
        blocked = records["blocked_ns"][waits].astype(np.int64)
        return named(synchronisation=(blocked - ran(records, kernels(records)).within(end - blocked, end)).sum())

    return stage.play(body, truth)


@scenario
def synchronous_copies_on_the_model_thread(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(10):
            rt.check(rt.lib.cudaMemcpy(stage.device + step * MiB, stage.host + step * MiB, MiB, H2D))
            rt.launch(stage.compute, 2_000_000)
            rt.sync(stage.compute)
        rt.launch(stage.compute, 100_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        mine = records["direction"] == H2D
        return named(synchronisation=(records["end_ns"] - records["start_ns"])[mine].sum())

    return stage.play(body, truth)


@scenario
def pinned_memory_allocated_in_every_step(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(60):
            stage.load(step, 64 * KiB, stage.streams[0])
            stage.after(stage.compute, stage.streams[0], step)
            rt.launch(stage.compute, 500_000)
        for _ in range(12):
            rt.free_host(rt.host_alloc(4 * MiB))
            stage.load(1, 64 * KiB, stage.streams[0])
            stage.after(stage.compute, stage.streams[0], 0)
            rt.launch(stage.compute, 100_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        names = {api: rt.call_name(int(api)) for api in np.unique(records["api"])}
        wanted = [api for api, name in names.items() if name in ("cudaHostAlloc", "cudaFreeHost", "cudaMallocHost")]
        mine = np.isin(records["api"], wanted)
        took = (records["end_ns"] - records["start_ns"])[mine]
        return named(allocation_on_hot_path=took[took >= 20_000].sum())

    return stage.play(body, truth)


@scenario
def batches_of_many_descriptors(rt: Runtime) -> Played:
    stage = Stage(rt, depth=4096, h2d=1e12, latency_ns=100)
    n = 6_000
    order = np.random.default_rng(1).permutation(n) * 256
    dst, src = [stage.device + int(o) for o in order], [stage.host + int(o) for o in order]

    def body() -> None:
        for _ in range(3):
            rt.batch(dst, src, 64, H2D, stage.streams[0])
            rt.sync(stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        batches = records["count"] > 1
        took = records["end_ns"] - records["start_ns"] - records["blocked_ns"]
        return named(descriptor_bound_batch=took[batches].sum())

    return stage.play(body, truth)


# ---- the copy engines -----------------------------------------------------------------------------------------------


@scenario
def shared_prefix_loaded_by_every_request(rt: Runtime) -> Played:
    stage = Stage(rt, depth=1021)

    def body() -> None:
        for request in range(5):
            for block in range(30):
                at, to = block * 128 * KiB, (request * 30 + block) * 128 * KiB
                rt.copy(stage.device + to, stage.host + at, 128 * KiB, H2D, stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        arrival: dict[int, int] = {}  # source -> when the last load of it in flight ends
        lost = 0
        for record in records[records["direction"] == H2D]:
            if arrival.get(int(record["src"]), 0) > record["start_ns"]:
                lost += int(record["exec_end_ns"] - record["exec_start_ns"])
            arrival[int(record["src"])] = int(record["exec_end_ns"])
        return named(redundant_loads=lost)

    return stage.play(body, truth)


@scenario
def thousands_of_small_stores(rt: Runtime) -> Played:
    stage = Stage(rt, depth=4096, d2h=4e9)
    order = np.random.default_rng(2).permutation(375)

    def body() -> None:
        for run in order:
            for i in range(8):
                stage.store(4096 + int(run) * 16 + i, 4 * KiB, stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        small = records["bytes"] == 4 * KiB
        took = (records["exec_end_ns"] - records["exec_start_ns"])[small].astype(np.int64)
        return named(small_copies=(took - int(4 * KiB / 4e9 * 1e9)).sum())

    return stage.play(body, truth, link_bytes_per_s=4e9)


@scenario
def small_copy_behind_a_burst(rt: Runtime) -> Played:
    stage = Stage(rt, channels=1)

    def body() -> list[int]:
        ids = []
        for step in range(4):
            for i in range(20):
                stage.load(20 * step + i, 128 * KiB, stage.streams[0])
            for i in range(3):
                ids.append(
                    rt.copy(stage.device + step * 4096, stage.host + (step * 8 + i) * 4096, 4096, H2D, stage.streams[1])
                )
                rt.sync(stage.streams[1])
        return ids

    def truth(records: Records, ids: list[int]) -> dict[str, int]:
        mine = np.isin(records["correlation"], ids)
        since = records["end_ns"][mine].astype(np.int64)
        until = records["exec_start_ns"][mine].astype(np.int64)
        late = until - since > 100_000
        return named(head_of_line_copies=Cover(since[late], until[late]).total_ns)

    return stage.play(body, truth)


def _layers(stage: Stage, forwards: int, layers: int, size: int, compute_ns: int, ahead: bool, same: bool) -> None:
    rt, copies, event = stage.rt, stage.streams[0], 0
    for forward in range(forwards):
        for layer in range(layers):
            block = layer if same else forward * layers + layer
            slot = (layer % 2 if same else block % 8) * size
            rt.copy(stage.device + slot, stage.host + block * size, size, H2D, copies)
            stage.after(stage.compute, copies, event % 64)
            rt.launch(stage.compute, compute_ns)
            if not ahead:
                stage.after(copies, stage.compute, (event + 1) % 64)
            event += 2


@scenario
def weights_copied_layer_by_layer(rt: Runtime) -> Played:
    stage = Stage(rt)

    def truth(records: Records, _: Any) -> dict[str, int]:
        copying, compute = ran(records, records["direction"] == H2D), ran(records, kernels(records))
        lost = min(copying.total_ns, compute.total_ns) - copying.intersect_ns(compute)
        return named(weights_not_overlapped=lost)

    return stage.play(lambda: _layers(stage, 4, 6, 1 * MiB, 900_000, False, True), truth)


@scenario
def prefetch_on_a_slow_link(rt: Runtime) -> Played:
    stage = Stage(rt)

    def truth(records: Records, _: Any) -> dict[str, int]:
        copying, compute = ran(records, records["direction"] == H2D), ran(records, kernels(records))
        return named(link_bound=copying.total_ns - copying.intersect_ns(compute))

    return stage.play(lambda: _layers(stage, 1, 25, 1 * MiB, 300_000, True, False), truth)


@scenario
def link_at_a_quarter_of_its_rate(rt: Runtime) -> Played:
    stage = Stage(rt, h2d=RATE / 4)

    def body() -> None:
        for i in range(16):
            stage.load(i, 1 * MiB, stage.streams[0])

    def truth(records: Records, _: Any) -> dict[str, int]:
        took = (records["exec_end_ns"] - records["exec_start_ns"]).astype(np.int64)
        loads = (records["direction"] == H2D) & (records["bytes"] == 1 * MiB)
        return named(link_degraded=(took[loads] - int(1 * MiB / RATE * 1e9)).sum())

    return stage.play(body, truth, link_bytes_per_s=RATE)


# ---- the device waits for the host ----------------------------------------------------------------------------------


@scenario
def slow_preparation_of_each_step(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> list[tuple[int, int]]:
        pauses = []
        for _ in range(12):
            rt.launch(stage.compute, 3_000_000)
            rt.sync(stage.compute)
            begin = rt.now_ns()
            rt.sleep(14_000_000)
            pauses.append((begin, rt.now_ns()))
        rt.launch(stage.compute, 3_000_000)
        return pauses

    def truth(records: Records, pauses: list[tuple[int, int]]) -> dict[str, int]:
        busy = ran(records, kernels(records))
        begin, end = np.array(pauses, dtype=np.int64).T
        return named(gpu_starved=(end - begin - busy.within(begin, end)).sum())

    return stage.play(body, truth)


@scenario
def python_work_before_every_launch(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for _ in range(500):
            rt.launch(stage.compute, 20_000)
            rt.sleep(70_000)
        rt.launch(stage.compute, 20_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        launches = records[kernels(records)]
        busy = ran(records, kernels(records))
        start = launches["start_ns"].astype(np.int64)
        # From one launch's return to the next one's entry the interpreter works, the explicit pause included.
        begin, end = launches["end_ns"].astype(np.int64)[:-1], start[1:]
        gaps = end - begin - busy.within(begin, end)
        return named(python_or_gil_bound=gaps.sum())

    return stage.play(body, truth)


@scenario
def another_thread_holds_the_interpreter(rt: Runtime) -> Played:
    """Who waited for the GPU without the lock gets it back after the interpreter's switch interval, or two of them."""
    stage = Stage(rt)

    def body() -> None:
        for step in range(40):
            rt.launch(stage.compute, 300_000)
            rt.sync(stage.compute)
            rt.sleep((1 + (step % 5 == 4)) * 5_000_000 + step % 7 * 20_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        busy = ran(records, kernels(records))
        order = np.argsort(records["start_ns"])
        begin = records["end_ns"][order].astype(np.int64)[:-1]
        end = records["start_ns"][order].astype(np.int64)[1:]
        lost = end - begin - busy.within(begin, end)
        return named(python_or_gil_bound=lost[lost > 1_000_000].sum())

    return stage.play(body, truth)


@scenario
def one_thread_holds_the_interpreter_at_every_call(rt: Runtime) -> Played:
    """Each call gives the lock up, and each time it takes one switch interval to get it back."""
    stage = Stage(rt)

    def body() -> None:
        for step in range(40):
            stage.load(step, 4 * KiB, stage.streams[0])
            rt.sleep(5_000_000 + step % 7 * 20_000)
            rt.record(stage.events[0], stage.streams[0])
            rt.sleep(5_000_000 + step % 5 * 20_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        order = np.argsort(records["start_ns"])
        begin, end = (records[key][order].astype(np.int64) for key in ("start_ns", "end_ns"))
        lost = begin[1:] - end[:-1]
        return named(python_or_gil_bound=lost[lost > 1_000_000].sum())

    return stage.play(body, truth)


@scenario
def healthy_poller_with_the_interpreters_period(rt: Runtime) -> Played:
    """Sleeps of 5 and of 10 ms are as long as switch intervals, and two timers'."""
    stage = Stage(rt)

    def body() -> None:
        def every_ten() -> None:
            for round_ in range(60):
                for i in range(3):
                    stage.store(3 * round_ + i, 64 * KiB, stage.streams[1])
                rt.sleep(10_000_000 + round_ % 3 * 30_000)

        thread = rt.thread(every_ten)
        for round_ in range(120):
            stage.load(round_, 64 * KiB, stage.streams[0])
            rt.sleep(5_000_000 + round_ % 7 * 30_000)
        thread.join()

    return stage.play(body, lambda *_: named())


@scenario
def healthy_thread_that_sleeps_between_its_calls(rt: Runtime) -> Played:
    """Twenty milliseconds are four switch intervals, and a timer's."""
    stage = Stage(rt)

    def body() -> None:
        for step in range(40):
            stage.store(step, 64 * KiB, stage.streams[0])
            rt.sync(stage.streams[0])
            rt.sleep(20_000_000 + step % 7 * 20_000)

    return stage.play(body, lambda *_: named())


def _small_copies_beside_compute(rt: Runtime, copy: str) -> Played:
    """Of 4 KiB, scattered, and all of them behind a forward that runs for longer."""
    stage = Stage(rt, depth=4096, d2h=4e9, h2d=4e9)
    order = np.random.default_rng(2).permutation(500)

    def body() -> None:
        rt.launch(stage.compute, 40_000_000)
        for block in order:
            getattr(stage, copy)(4096 + 2 * int(block), 4 * KiB, stage.streams[0])
        rt.sync(stage.compute)

    def truth(records: Records, _: Any) -> dict[str, int]:
        if copy == "store":
            return named()
        small = records["bytes"] == 4 * KiB
        took = (records["exec_end_ns"] - records["exec_start_ns"])[small].astype(np.int64)
        return named(small_copies=(took - int(4 * KiB / 4e9 * 1e9)).sum())

    return stage.play(body, truth, link_bytes_per_s=4e9)


@scenario
def healthy_small_stores_that_compute_hides(rt: Runtime) -> Played:
    return _small_copies_beside_compute(rt, "store")


@scenario
def small_loads_beside_compute(rt: Runtime) -> Played:
    """Somebody waits for a load, whatever else the device computes meanwhile."""
    return _small_copies_beside_compute(rt, "load")


# ---- results at stake -----------------------------------------------------------------------------------------------


def _steps_with_stores(rt: Runtime, ordered: bool) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(6):
            rt.launch(stage.compute, 4_000_000)
            if ordered:
                stage.after(stage.streams[0], stage.compute, step)
            for i in range(6):
                stage.store(6 * step + i, 64 * KiB, stage.streams[0])

    return stage.play(body, lambda records, _: {} if ordered else {"store_not_ordered": 0})


@scenario
def stores_without_a_wait(rt: Runtime) -> Played:
    return _steps_with_stores(rt, False)


@scenario
def healthy_stores_with_a_wait(rt: Runtime) -> Played:
    return _steps_with_stores(rt, True)


def _steps_with_loads(rt: Runtime, ordered: bool) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(6):
            for i in range(6):
                stage.load(6 * step + i, 128 * KiB, stage.streams[0])
            if ordered:
                stage.after(stage.compute, stage.streams[0], step)
            rt.launch(stage.compute, 4_000_000)

    return stage.play(body, lambda records, _: {} if ordered else {"load_not_ordered": 0})


@scenario
def loads_without_a_wait(rt: Runtime) -> Played:
    return _steps_with_loads(rt, False)


@scenario
def healthy_loads_with_a_wait(rt: Runtime) -> Played:
    return _steps_with_loads(rt, True)


# ---- healthy --------------------------------------------------------------------------------------------------------


@scenario
def healthy_offload_beside_a_model(rt: Runtime) -> Played:
    stage = Stage(rt, depth=1021)

    def body() -> None:
        loads, stores = stage.streams[:2]
        for step in range(10):
            for i in range(8):
                stage.load(8 * step + i, 64 * KiB, loads)
            stage.after(stage.compute, loads, 3 * step)
            for _ in range(6):
                rt.launch(stage.compute, 600_000)
            stage.after(stores, stage.compute, 3 * step + 1)
            for i in range(4):
                stage.store(8 * step + i, 64 * KiB, stores)

    return stage.play(body, lambda records, _: {})


@scenario
def healthy_but_deep(rt: Runtime) -> Played:
    stage = Stage(rt, depth=1021)

    def body() -> None:
        for _ in range(50):
            rt.launch(stage.compute, 1_000_000)
        for i in range(950):
            stage.load(i, 16 * KiB, stage.streams[0])

    return stage.play(body, lambda records, _: {})


@scenario
def healthy_pool_of_streams(rt: Runtime) -> Played:
    stage = Stage(rt, depth=1021, streams=8)

    def body() -> None:
        for _ in range(60):
            rt.launch(stage.compute, 1_000_000)
        for i in range(2000):
            stage.load(i, 16 * KiB, stage.streams[i % 8])

    return stage.play(body, lambda records, _: {})


# ---- mixtures -------------------------------------------------------------------------------------------------------


@scenario
def saturated_and_pageable(rt: Runtime) -> Played:
    stage = Stage(rt, depth=128)
    buffer = ct.create_string_buffer(4 * MiB)
    ct.memset(buffer, 1, 4 * MiB)

    def body() -> list[int]:
        for _ in range(50):
            rt.launch(stage.compute, 4_000_000)
        thread = rt.thread(lambda: [stage.load(i, BLOCK, stage.streams[0]) for i in range(180)])
        ids = [rt.copy(ct.addressof(buffer), stage.device, 4 * MiB, D2H, stage.streams[1]) for _ in range(8)]
        thread.join()
        return ids

    def truth(records: Records, ids: list[int]) -> dict[str, int]:
        moving, _still = queue_ns(records)
        chosen = np.isin(records["correlation"], ids)
        return named(
            launch_queue_saturation=moving[~chosen].sum(),
            pageable_memory=(records["end_ns"] - records["start_ns"])[chosen].sum(),
        )

    return stage.play(body, truth, queue_depth=128)


@scenario
def waits_and_allocations(rt: Runtime) -> Played:
    stage = Stage(rt)

    def body() -> None:
        for step in range(40):
            stage.load(step, 64 * KiB, stage.streams[1])
            stage.after(stage.compute, stage.streams[1], step)
            rt.launch(stage.compute, 300_000)
        rt.sync(stage.compute)
        for step in range(8):
            stage.load(step, 1 * MiB, stage.streams[0])
            rt.sync(stage.streams[0])
            rt.free_host(rt.host_alloc(4 * MiB))
            rt.launch(stage.compute, 1_500_000)
            rt.sync(stage.compute)
        rt.launch(stage.compute, 100_000)

    def truth(records: Records, _: Any) -> dict[str, int]:
        waits = (records["reason"] == SYNC) & (records["stream"] == stage.streams[0])
        names = {api: rt.call_name(int(api)) for api in np.unique(records["api"])}
        wanted = [api for api, name in names.items() if name in ("cudaHostAlloc", "cudaFreeHost")]
        mine = np.isin(records["api"], wanted)
        took = (records["end_ns"] - records["start_ns"])[mine]
        return named(
            synchronisation=records["blocked_ns"][waits].sum(), allocation_on_hot_path=took[took >= 20_000].sum()
        )

    return stage.play(body, truth)


# ---- scoring --------------------------------------------------------------------------------------------------------

REQUIRED_NS, SLACK_NS = 500_000, 100_000


def mistakes(played: Played, findings: list[Finding]) -> list[str]:
    """What a diagnosis got wrong: causes missed or made up, and times off by more than 10% (or 0.1 ms).

    A cause that really lost less than 0.5 ms may be named or not.
    """
    # What is left of the account is true whatever else is named: tests/account.
    left = ("waiting_for_copies", "waiting_for_host")
    named_ns = {one.cause: one.lost_ns for one in findings if not one.abstains and one.cause not in left}
    wrong = []
    for cause, ns in played.truth.items():
        if cause not in named_ns:
            if ns >= REQUIRED_NS or ns == 0:
                wrong.append(f"{cause} was not named; it lost {ns / 1e6:.2f} ms")
        elif abs(named_ns[cause] - ns) > max(ns // 10, SLACK_NS):
            wrong.append(f"{cause} lost {ns / 1e6:.2f} ms, not {named_ns[cause] / 1e6:.2f}")
    wrong += [
        f"{cause} was named with {ns / 1e6:.2f} ms, and is not there"
        for cause, ns in named_ns.items()
        if cause not in played.truth
    ]
    return wrong
