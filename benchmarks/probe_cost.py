"""What the probe adds to one copy: the submission loop at every level of detail against the bare loop, interleaved.

    python benchmarks/probe_cost.py [--rounds 400] [--copies 500] [--json]

Both loops are kvp_submit on the embedded host runtime in one process, one thread, one stream: detail "off" is the loop
without a clock and without a record. The queue is drained between rounds, so no call waits for room. "fast" has calls
that return as fast as the library can (KVHOST_SUBMIT_NS negative), "driver" calls of 1 us as a driver's are. The floor
is the bare loop against itself.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import MEMCPY_KIND, Buffer
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.native.library import DETAIL, RingOptions, SubmitOptions, SubmitResult, core

LEVELS = ("off", "off again", "totals", "copies")


def measure(runtime: HostRuntime, submit_ns: float, rounds: int, copies: int) -> dict[str, dict[str, float]]:
    """Nanoseconds a copy by level: the median of the rounds, and the median of what was added in each round."""
    runtime.reset(submit_ns=submit_ns, latency_ns=-1.0, h2d_bytes_per_s=1e15)
    device, host = Buffer(runtime, 64, "device"), Buffer(runtime, 64, "pinned")
    stream = runtime.stream_create()
    dst, src = np.full(copies, device.address, np.uint64), np.full(copies, host.address, np.uint64)
    submit, now = core().kvp_submit, core().kvp_now_ns
    options = {
        level: SubmitOptions(
            copy=runtime.address("cudaMemcpyAsync"),
            stream=stream,
            kind=MEMCPY_KIND["h2d"],
            direction=1,
            blocked_ns=1 << 40,
            detail=DETAIL[level.split()[0]],
        )
        for level in LEVELS
    }
    taken: dict[str, list[float]] = {level: [] for level in LEVELS}
    result, order = SubmitResult(), np.random.default_rng(1)
    for number in range(rounds + 10):
        for level in order.permutation(LEVELS):  # each comes after each: the neighbour's traces in the caches differ
            gate = runtime.gate()
            gate.launch(stream)
            begin = now()
            submit(ct.byref(options[level]), copies, dst.ctypes.data, src.ctypes.data, None, 64, ct.byref(result))
            spent = now() - begin
            assert result.submitted == copies
            gate.open()
            runtime.stream_synchronize(stream)
            gate.close()
            if number >= 10:  # the first rounds touch the ring's pages
                taken[level].append(spent / copies)
    runtime.stream_destroy(stream)
    device.close()
    host.close()
    return {
        level: {
            "ns_a_copy": statistics.median(values),
            "added_ns": statistics.median(value - base for value, base in zip(values, taken["off"], strict=True)),
        }
        for level, values in taken.items()
    }


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    runtime = host_runtime()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.kvp"
        assert core().kvp_ring_open(str(path).encode(), b"engine", ct.byref(RingOptions())) == 0
        outcome: dict[str, Any] = {"clock": core().kvp_clock_name().decode(), "limit_ns": 50}
        for name, submit_ns in (("fast", -1.0), ("driver", 1000.0)):
            outcome[name] = measure(runtime, submit_ns, arguments.rounds, arguments.copies)
        core().kvp_ring_close()
    if arguments.json:
        print(json.dumps(outcome, indent=1))
        return
    print(f"clock {outcome['clock']}; rounds {arguments.rounds} of {arguments.copies} copies; medians")
    for name in ("fast", "driver"):
        bare = outcome[name]["off"]["ns_a_copy"]
        print(f"{name}: bare loop {bare:.1f} ns a copy, floor {outcome[name]['off again']['added_ns']:+.1f} ns")
        for level in ("totals", "copies"):
            one = outcome[name][level]
            print(
                f"  {level:8} {one['ns_a_copy']:8.1f} ns a copy  {one['added_ns']:+6.1f} ns  "
                f"{one['ns_a_copy'] / bare:.3f} of bare"
            )


if __name__ == "__main__":
    main()
