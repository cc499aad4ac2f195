"""Makes the small recordings of tests/gpu/data: known programs under Nsight Systems and under the PyTorch profiler.

    python tests/gpu/record.py SCENARIO TRUTH.json                  the program alone (run it under nsys)
    python tests/gpu/record.py SCENARIO TRUTH.json --trace T.json   under the PyTorch profiler

The truth is what the program itself measured: how many copies it made, and the host time inside the calls that took
at least 20 us. Scenarios: saturated (3,000 copies of 256 KiB behind a 20 ms kernel, one stream), healthy (1,500 copies
in batches that are waited for), pageable (200 copies of 1 MiB from ordinary memory), batch (40 batch calls of 500).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from kvprobe.cuda import find_runtime

LONG_NS = 20_000


def play(scenario: str, runtime: object) -> dict[str, float]:
    copy, now = torch.empty, time.perf_counter_ns
    piece = {"saturated": 1 << 18, "healthy": 1 << 16, "pageable": 1 << 20, "batch": 1 << 13}[scenario]
    count = {"saturated": 3000, "healthy": 1500, "pageable": 200, "batch": 20000}[scenario]
    host = copy(64 * piece, dtype=torch.uint8, pin_memory=scenario != "pageable")
    device = copy(64 * piece, dtype=torch.uint8, device="cuda")
    stream, compute = torch.cuda.Stream(), torch.cuda.Stream()
    durations = []
    torch.cuda.synchronize()
    if scenario == "saturated":
        with torch.cuda.stream(compute):
            torch.cuda._sleep(40_000_000)
        stream.wait_stream(compute)
    if scenario == "batch":
        for _ in range(40):
            offsets = [(i % 64) * piece for i in range(500)]
            start = now()
            runtime.memcpy_batch_async(
                [device.data_ptr() + o for o in offsets],
                [host.data_ptr() + o for o in offsets],
                [piece] * 500,
                stream.cuda_stream,
            )
            durations.append(now() - start)
    else:
        for number in range(count):
            offset = (number % 64) * piece
            start = now()
            runtime.memcpy_async(device.data_ptr() + offset, host.data_ptr() + offset, piece, "h2d", stream.cuda_stream)
            durations.append(now() - start)
            if scenario == "healthy" and number % 100 == 99:
                stream.synchronize()
    torch.cuda.synchronize()
    slow = [duration for duration in durations if duration >= LONG_NS]
    return {
        "scenario": scenario,
        "copies": count,
        "calls": len(durations),
        "bytes": count * piece,
        "slow_calls": len(slow),
        "slow_ns": sum(slow),
        "longest_ns": max(durations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("truth", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    runtime = find_runtime("cuda")
    nvtx = torch.cuda.nvtx
    if options.trace:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            truth = play(options.scenario, runtime)
        profile.export_chrome_trace(str(options.trace))
    else:
        with nvtx.range("whole"):
            for number in range(3):
                with nvtx.range(f"part {number % 2}"):
                    time.sleep(0.001)
            with nvtx.range(options.scenario):
                truth = play(options.scenario, runtime)
    truth |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    options.truth.write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
