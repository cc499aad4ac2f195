"""100,000 small loads asked for at once: all end, in order, in bounded memory, on no more streams than the bound.

Floor: one copy each, at the host runtime's latency, one after another.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from kvprobe import BlockPool, OffloadEngine, calibrate, find_runtime
from kvprobe.cuda import device_region, host_region

BLOCKS, BLOCK_BYTES = 256, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--loads", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runtime = find_runtime(options.device)
    limits = calibrate(runtime)
    gpu = BlockPool(runtime, [device_region(runtime, BLOCKS * BLOCK_BYTES)], BLOCK_BYTES)
    cpu = BlockPool(runtime, [host_region(runtime, BLOCKS * BLOCK_BYTES)], BLOCK_BYTES)
    ended: list[int] = []
    streams: set[int] = set()
    with OffloadEngine(runtime, gpu, cpu, policy="pooled", limits=limits) as engine:
        held = 0
        start = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(options.loads):
            block = number % BLOCKS
            engine.load([block], [block], done=lambda transfer: ended.append(transfer.id))
            if not number % 1000:
                streams |= set(engine.outstanding())
                held = max(held, *engine.held.values())
        asked = time.perf_counter() - start
        engine.wait()
        took = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {
            "loads": options.loads,
            "ended": len(ended),
            "in_order": ended == sorted(ended),
            "streams_used": len(streams),
            "bound": len(engine.streams["load"]),
            "held_at_most": held,
            "held_after": engine.held,
            "asked_s": round(asked, 2),
            "all_done_s": round(took, 2),
            "bytes_a_waiting_load": round((peak - before) * 1024 / options.loads),
        }
    print(json.dumps(figures) if options.json else "\n".join(f"{name:22} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
