"""Measures the launch queue of this process: its depth, the channels that streams share, the cost of a submission.

The figures differ between machines, drivers and environment variables (1,021 on one GPU, 1,022 on another, 4 to 32
channels by environment), so nothing here is a constant. One measurement holds the streams back by a gate, submits
small copies until one makes no progress, and opens the gate: a few milliseconds. A thread that merely lost the CPU is
told from one that waits for a slot; should it look like one nevertheless, the count is too low, never too high, so a
count is believed when it is the largest seen and was seen twice.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvprobe.cuda import MEMCPY_KIND, Runtime
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.cuda.memory import Buffer
from kvprobe.environment import RUN, caches
from kvprobe.errors import KvprobeError
from kvprobe.native.library import CalibrateCalls, Calibration, core
from kvprobe.runfolder import files, watched

STALL_NS = 4_000_000
TRIES = 8
FITTING_TRIES = 3  # of one stream and two, where what they take contradicts each other
LIMIT = 70_000  # more copies than 32 channels hold at the largest CUDA_SCALE_LAUNCH_QUEUES, halved: enough to tell
SMALLEST = 4  # copies: a queue that holds fewer is no queue, but a damaged cache
MANY = 32  # streams: as many as CUDA offers channels at most


@dataclass(frozen=True)
class QueueLimits:
    """What one process's launch queues hold and what a submission costs while they have free slots.

    Attributes:
        depth: copies that one stream takes before the next one blocks.
        channels: hardware channels that streams share.
        capacity: copies that all streams of one direction take together.
        baseline_ns: median host time of a submission while the queue has free slots.
        p99_ns: its 99th percentile.
        how: "calibrated", "cached" (calibrated by an earlier process in this environment) or "given".
    """

    depth: int
    channels: int
    capacity: int
    baseline_ns: int
    p99_ns: int
    how: str = "given"


def calibrate(runtime: Runtime, *, cache: bool = True) -> QueueLimits:
    """Measures, or reads what an earlier process measured in the same environment.

    Takes some 50 ms; the device's copy engine is held back meanwhile, other streams of this process go on. Under
    `kvprobe run` the result and its time are left in the run folder as `queue-<pid>.json`, for the recording's reader.

    Raises:
        CudaError: a runtime call failed.
        KvprobeError: no count could be reproduced.
    """
    if isinstance(runtime, HostRuntime) and runtime.simulated:
        return _of_simulation(runtime)
    start_ns = time.monotonic_ns()
    limits = _cached(runtime) if cache else None
    if limits is None:
        with _without_marks():
            limits = _measure(runtime)
        if cache:
            path = _cache_path(runtime)
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, asdict(limits))
    folder = RUN.text
    if folder:
        when = {"start_ns": start_ns, "end_ns": time.monotonic_ns()}
        with contextlib.suppress(OSError):
            watched.write_queue(folder, os.getpid(), when | asdict(limits))
    return limits


@contextlib.contextmanager
def _without_marks() -> Iterator[None]:
    """Meanwhile `kvprobe run` records no timing event of its own: each takes a slot of a queue."""
    switch = getattr(ct.CDLL(None), "kvprobe_marks", None)
    if switch is not None:
        switch(0)
    try:
        yield
    finally:
        if switch is not None:
            switch(1)


def _of_simulation(runtime: HostRuntime) -> QueueLimits:
    """What a simulated queue is configured to be: time that is not real cannot be measured."""
    config = runtime.config
    submit_ns = max(int(config.submit_ns), 1)
    return QueueLimits(config.depth, config.copy_channels, runtime.stats.capacity[1], submit_ns, submit_ns)


def _cached(runtime: Runtime) -> QueueLimits | None:
    try:
        found = QueueLimits(**json.loads(_cache_path(runtime).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (found.depth, found.channels, found.capacity, found.baseline_ns, found.p99_ns)
    if not all(type(number) is int and 0 < number < 1 << 40 for number in numbers):
        return None
    whole = found.capacity >= found.depth >= SMALLEST and found.channels <= MANY and found.p99_ns >= found.baseline_ns
    return replace(found, how="cached") if whole else None


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all; where it cannot be written, what it would have told is measured again or not known."""
    with contextlib.suppress(OSError):
        files.write(path, json.dumps(value).encode())


def _measure(runtime: Runtime) -> QueueLimits:
    streams = [runtime.stream_create() for _ in range(MANY)]
    event = runtime.event_create()
    device, host = Buffer(runtime, 4096, "device"), Buffer(runtime, 4096, "pinned")
    try:

        def measured(count: int) -> Calibration:
            return _capacity(runtime, streams[:count], event, device, host)

        one, two = _that_fit(measured)
        taken: dict[int, int] = {1: one.accepted, 2: two.accepted}

        def channels_filled(count: int) -> int:
            """Channels that `count` streams fill: N channels hold depth + (N - 1) * step."""
            more, step = taken[count] - taken[1], max(taken[2] - taken[1], taken[1] // 2, 1)
            return 1 + round(max(more, 0) / step)

        def channels_of(count: int) -> int:
            taken[count] = measured(count).accepted
            return channels_filled(count)

        channels = channels_filled(2)
        if channels > 1:
            # Where streams share channels unevenly the fullest channel blocks early, so no one number of streams
            # tells: the most that any number fills does.
            channels = max(channels_of(count) for count in (MANY, 16, 8, 4))
            while channels < MANY and channels_of(channels + 1) > channels:
                channels += 1
    finally:
        for stream in streams:
            runtime.stream_destroy(stream)
        runtime.event_destroy(event)
        device.close()  # now, and not whenever they are collected: freeing device memory waits for the device
        host.close()
    return QueueLimits(one.accepted, channels, max(taken.values()), one.median_ns, one.p99_ns, "calibrated")


def _that_fit(measured: Callable[[int], Calibration]) -> tuple[Calibration, Calibration]:
    """What one stream takes, and what two do: no less, and no more than twice that, but for the waits in between.

    Raises:
        KvprobeError: a busy machine made one of them too low each time.
    """
    seen: list[int] = []
    for _ in range(FITTING_TRIES):
        one, two = measured(1), measured(2)
        spare = one.accepted // 16 + 8
        if one.accepted - spare <= two.accepted <= 2 * one.accepted + spare:
            return one, two
        seen += [one.accepted, two.accepted]
    raise _too_busy(seen)


def _too_busy(seen: list[int]) -> KvprobeError:
    return KvprobeError(
        f"the launch queue's depth came out differently each time ({sorted(seen)}): the machine is too busy; try again"
    )


def _capacity(runtime: Runtime, streams: list[int], event: int, device: Buffer, host: Buffer) -> Calibration:
    calls = CalibrateCalls(
        *(
            runtime.address(name)
            for name in (
                "cudaLaunchHostFunc",
                "cudaEventRecord",
                "cudaStreamWaitEvent",
                "cudaStreamSynchronize",
                "cudaMemcpyAsync",
            )
        )
    )
    handles = (ct.c_void_p * len(streams))(*streams)
    seen: list[int] = []
    for attempt in range(TRIES):
        result = Calibration()
        stall_ns = STALL_NS * (1 + attempt // 2)  # a busy machine gets more patience
        code = core().kvp_calibrate(
            ct.byref(calls),
            len(streams),
            handles,
            event,
            device.address,
            host.address,
            64,
            MEMCPY_KIND["h2d"],
            LIMIT,
            stall_ns,
            ct.byref(result),
        )
        if code:
            raise runtime.error("calibration", code)
        if not result.blocked:
            return result  # deeper than any queue that could trouble anyone
        seen.append(result.accepted)
        if result.accepted == max(seen) and seen.count(result.accepted) == 2:
            return result
    raise _too_busy(seen)


def _cache_path(runtime: Runtime) -> Path:
    """One file for all that decides the result: library, driver, device, environment."""
    relevant = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "KVHOST_"))}
    key = json.dumps(
        [
            runtime.provider,
            runtime.path,
            runtime.version,
            runtime.driver_version(),
            runtime.mem_info()[1],
            _driver_text(),
            sorted(relevant.items()),
        ]
    )
    return caches() / f"queue-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _driver_text() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
