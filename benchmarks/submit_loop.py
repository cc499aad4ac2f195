"""What the engine adds to a shared-stream transfer: engine.load() against a bare C loop, interleaved in one process.

    python benchmarks/submit_loop.py [--device host|cuda] [--rounds 60] [--copies 2000] [--detail copies] [--json]

The bare loop is kvp_submit at detail "off": one native call that issues the copies, no clock, no record, no event; its
addresses are ready. engine.load() takes block ids and does all an engine does: descriptors, events, records, detector;
"loop" is the part of it that issues the copies, to be compared with the bare loop; "submission" is all after the
descriptors are built, "load" all of it. The floor is the bare loop against itself.

"room": the queue holds all copies (on the host runtime behind a gate, so that nothing competes for the CPU; on a GPU
set CUDA_SCALE_LAUNCH_QUEUES=4x). "full": twice what a queue of the default depth holds, so each way waits for it.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import statistics
from typing import Any

import numpy as np

from kvprobe.cuda import MEMCPY_KIND, Runtime, device_region, find_runtime, host_region
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.launchqueue import calibrate
from kvprobe.native.library import SubmitOptions, SubmitResult, core
from kvprobe.offload import BlockPool, OffloadEngine

WAYS = ("bare", "bare again", "load")


def measure(runtime: Runtime, rounds: int, copies: int, block: int, detail: str, gated: bool) -> dict[str, Any]:
    """Median ns of each way, and the median and range of its ratio to the bare loop within a round."""
    if isinstance(runtime, HostRuntime):
        runtime.reset(depth=4 * copies if gated else 0)
    limits = calibrate(runtime, cache=False)
    gpu = BlockPool(runtime, [device_region(runtime, copies * block)], block)
    cpu = BlockPool(runtime, [host_region(runtime, copies * block)], block)
    engine = OffloadEngine(runtime, gpu, cpu, policy="shared", limits=limits, detail=detail)
    stream = runtime.stream_create()
    ids = np.random.default_rng(1).permutation(copies)
    gpu_ids, cpu_ids, _ = engine.mapping.request(ids, ids)
    dst, src = gpu.addresses(gpu_ids, block), cpu.addresses(cpu_ids, block)
    options = SubmitOptions(copy=runtime.address("cudaMemcpyAsync"), stream=stream, kind=MEMCPY_KIND["h2d"])
    result, submit, now = SubmitResult(), core().kvp_submit, core().kvp_now_ns
    taken: dict[str, list[int]] = {way: [] for way in (*WAYS, "loop", "submission")}
    order = np.random.default_rng(2)
    for number in range(rounds + 3):
        for way in order.permutation(WAYS):
            gate = runtime.gate() if gated and isinstance(runtime, HostRuntime) else None
            if gate:
                gate.launch(engine.streams["shared"][0] if way == "load" else stream)
            begin = now()
            if way == "load":
                transfer = engine.load(ids, ids)
            else:
                submit(ct.byref(options), copies, dst.ctypes.data, src.ctypes.data, None, block, ct.byref(result))
            end = now()
            if gate:
                gate.open()
            runtime.stream_synchronize(stream)
            engine.wait()
            engine.poll()
            if gate:
                gate.close()
            if number >= 3:
                taken[way].append(end - begin)
                if way == "load":
                    taken["loop"].append(transfer.submit_ns)
                    taken["submission"].append(end - transfer.built_ns)
    engine.close()
    for region in (*gpu.regions, *cpu.regions):
        region.owner.close()
    runtime.stream_destroy(stream)
    figures: dict[str, Any] = {"depth": limits.depth, "copies": copies, "block_bytes": block, "rounds": rounds}
    for way, values in taken.items():
        ratios = sorted(value / base for value, base in zip(values, taken["bare"], strict=True))
        figures[way] = {
            "ns": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
    return figures


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["host", "cuda"], default="host")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--copies", type=int, default=2000)
    parser.add_argument("--detail", choices=["off", "totals", "transfers", "copies"], default="copies")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        import torch

        torch.cuda.init()
    runtime = find_runtime(arguments.device)
    outcome = {
        name: measure(
            runtime,
            arguments.rounds,
            arguments.copies,
            block,
            arguments.detail,
            gated=name == "room" and runtime.provider == "host",
        )
        for name, block in (("room", 4096), ("full", 65536))
    }
    if arguments.json:
        print(json.dumps(outcome, indent=1))
        return
    for case, one in outcome.items():
        print(
            f"{case}: {one['copies']:,} copies of {one['block_bytes'] >> 10} KiB, depth {one['depth']:,}, "
            f"{one['rounds']} rounds: bare {one['bare']['ns'] / 1e3:,.1f} us"
        )
        for way, name in (("bare again", "floor"), ("loop", "loop"), ("submission", "submission"), ("load", "load")):
            low, high = one[way]["ratio_quartiles"]
            print(
                f"  {name:10} {one[way]['ns'] / 1e3:10,.1f} us  {one[way]['ratio']:.3f} of bare "
                f"(quartiles {low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    main()
