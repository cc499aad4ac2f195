"""A decoder of 24 layers without CUDA graphs: kernels of some microseconds, each launched by Python.

    python tests/gpu/eager_decoder.py SECONDS WIDTH [TRACE]

Prints how many steps it made. With TRACE it is recorded by the PyTorch profiler. `data/eager` was recorded on an H200
by `kvprobe run --no-stacks`, of the same layers, for 2.5 s at a width of 512.
"""

from __future__ import annotations

import sys
import time

import torch

LAYERS = 24


def serve(seconds: float, width: int) -> int:
    """Steps that were made in so many seconds; each result is read back."""
    shape = (LAYERS, 4, width, width)
    layers = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / width**0.5
    state = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
    norm, steps, end = torch.nn.functional.rms_norm, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for gate, up, inner, out in layers:
            normed = norm(state, (width,))
            state = state + torch.nn.functional.silu(normed @ gate) * (normed @ up)
            state = state + torch.relu(norm(state, (width,)) @ inner) @ out
        state = norm(state, (width,))
        state.float().sum().item()
        steps += 1
    return steps


def main() -> int:
    seconds, width, *trace = sys.argv[1:]
    if not trace:
        print(serve(float(seconds), int(width)), "steps")
        return 0
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        print(serve(float(seconds), int(width)), "steps")
    profile.export_chrome_trace(trace[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
