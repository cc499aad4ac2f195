"""What watching costs here: a copy, a transfer and a step at every level of detail, against the same unwatched."""

from __future__ import annotations

import ctypes as ct
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, UsageError

if TYPE_CHECKING:
    from kvprobe.cuda import Runtime

__all__ = ["LEVELS", "WORK", "overhead"]

LEVELS = ("off", "totals", "copies", "launches")
WORK = {"copy_ns": "a copy of 4 KiB", "transfer_ns": "a load of 64 blocks", "step_ns": "a step: 64 calls and a load"}
COPIES = 256  # fewer than a queue holds
BLOCK = 16384
BLOCKS = 64
SETTLE_S = 1.0  # of copies before anything is measured: marks take more of a first second, and the link wakes
REPEATS = 5  # of one kind of work in a round: the fastest counts, what interrupts it is not kvprobe's


def overhead(runtime: Runtime, rounds: int) -> dict[str, Any]:
    """Figure -> level -> median in ns, ratio to unwatched and its range; levels by turns, in this process.

    The interposer is attached and detached as `kvprobe attach` does it, so that neighbouring rounds differ by nothing
    else. What it costs later is measured, not what it costs at first: docs/recording-costs.md has what marks may take.

    Raises:
        UsageError: this process is recorded already.
        KvprobeError: the interposer could not be attached.
    """
    from kvprobe.commands.bench import summary
    from kvprobe.launchqueue import calibrate
    from kvprobe.native.library import path_of

    path = path_of("libkvprobe_interpose.so")
    library = ct.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.kvprobe_attach.argtypes = [ct.c_char_p, ct.c_char_p, ct.c_char_p, ct.c_uint64]
    limits = calibrate(runtime, cache=False)
    figures: dict[str, dict[str, list[float]]] = {name: {level: [] for level in LEVELS} for name in WORK}
    with tempfile.TemporaryDirectory(prefix="kvprobe-overhead-") as folder:
        for number in range(rounds):
            for place in range(len(LEVELS)):
                level = LEVELS[(number + place) % len(LEVELS)]
                if level != "off":
                    run = Path(folder) / f"{number}-{level}"
                    run.mkdir()
                    result = library.kvprobe_attach(bytes(path), bytes(run), level.encode(), 1 << 28)
                    if result == -114:
                        raise UsageError("this process is already being recorded: start bench without kvprobe run")
                    if result < 0:
                        raise KvprobeError(f"the interposer could not be attached: {os.strerror(-result)}")
                try:
                    for name, value in _measure(runtime, limits).items():
                        figures[name][level].append(value)
                finally:
                    if level != "off":
                        library.kvprobe_detach()
    return {"rounds": rounds, "figures": {name: summary(values, "off") for name, values in figures.items()}}


def _measure(known: Runtime, limits: Any) -> dict[str, float]:
    """The three figures as this process is now, after a second of copies."""
    import numpy as np

    import kvprobe
    from kvprobe.commands.bench import _submit
    from kvprobe.cuda import Runtime, device_region, host_region

    runtime = Runtime(known.path, known.provider)  # fetches its functions anew: the wrappers, while attached
    gpu = kvprobe.BlockPool(runtime, [device_region(runtime, BLOCKS * BLOCK)], BLOCK)
    cpu = kvprobe.BlockPool(runtime, [host_region(runtime, BLOCKS * BLOCK)], BLOCK)
    stream = runtime.stream_create()
    device, host = runtime.malloc(4096), runtime.host_alloc(4096)
    to, source = (np.full(COPIES, pointer, np.uint64) for pointer in (device, host))
    try:
        with kvprobe.OffloadEngine(runtime, gpu, cpu, policy="shared", limits=limits, detail="off") as engine:

            def copies() -> None:
                _submit(runtime, "loop", "h2d", stream, to, source, 4096)

            def transfer() -> None:
                engine.load(range(BLOCKS), range(BLOCKS)).wait()

            def step() -> None:
                for _ in range(64):
                    runtime.memcpy_async(device, host, 4096, "h2d", stream)
                engine.fence(engine.load(range(BLOCKS), range(BLOCKS)), stream)
                runtime.stream_synchronize(stream)

            def settle() -> None:
                runtime.stream_synchronize(stream)

            end = time.monotonic() + SETTLE_S
            while time.monotonic() < end:
                copies()
                settle()
            found = {"copy_ns": _fastest(copies, settle) / COPIES}
            return found | {"transfer_ns": _fastest(transfer, settle), "step_ns": _fastest(step, settle)}
    finally:
        runtime.synchronize()
        runtime.free(device)
        runtime.free_host(host)
        runtime.stream_destroy(stream)


def _fastest(work: Callable[[], None], settle: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        begin = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - begin)
        settle()
    return float(min(times[1:]))
