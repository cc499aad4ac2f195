"""A torch program that knows nothing of kvprobe: healthy copies, then a store behind a busy forward; prints its count.

    python benchmarks/gpu_torch_copies.py

4,000 copies of 64 KiB are submitted and drained in small groups; then 4,000 to the GPU and 4,000 from it go onto one
side stream each behind a kernel of about 100 ms, so that the launch queue fills and submissions block.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

BLOCK = 64 * 1024
N = 4000


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    gpu = torch.empty(256, BLOCK, dtype=torch.uint8, device="cuda")
    cpu = torch.empty(256, BLOCK, dtype=torch.uint8, pin_memory=True)
    load, store = torch.cuda.Stream(), torch.cuda.Stream()
    cycles = 200_000_000  # about 100 ms at 1.98 GHz
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    counts = {"H2D": 0, "D2H": 0}
    slow = 0.0

    def copy(to_gpu: bool, i: int) -> None:
        nonlocal slow
        start = time.perf_counter()
        if to_gpu:
            gpu[i % 256].copy_(cpu[i % 256], non_blocking=True)
        else:
            cpu[i % 256].copy_(gpu[i % 256], non_blocking=True)
        took = time.perf_counter() - start
        counts["H2D" if to_gpu else "D2H"] += 1
        if took > 20e-6:
            slow += took

    with torch.cuda.stream(load):
        for i in range(N):
            copy(True, i)
            if i % 100 == 99:
                load.synchronize()
    for to_gpu, stream in ((True, load), (False, store)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            for i in range(N):
                copy(to_gpu, i)
            stream.synchronize()
    total = sum(counts.values())
    print(json.dumps({**counts, "copies": total, "bytes": total * BLOCK, "slow_ms_seen_from_python": slow * 1e3}))


if __name__ == "__main__":
    main()
