"""What pinning costs, and what a model's thread feels meanwhile: one `cudaHostAlloc` beside `PinnedPool`.

    python benchmarks/pinning.py [--device cuda|host] [--gib 8 16 32] [--rounds 2] [--ways NAME ...] [--json FILE]

While memory is pinned another thread launches something small every 0.5 ms and waits for it: its longest step is what a
model feels. The ways of one size take turns. `alloc` is one `cudaHostAlloc`, `pool` one registration of `PinnedPool`;
`pieces` registers 64 MiB at a time; `pool-1` and `pool-8` make the pages with so many threads; `again` takes what a
pool has kept. After each, a copy of the whole goes to the GPU and back where that has room, and is compared.
With `--device host` only the script itself is tried.

Exit code 1: a byte differs; or on a GPU, for the largest size, the pool takes more than a quarter of `alloc`'s time,
pieces let a step wait for more than 10 ms, or one registration for more than a fifteenth of `alloc`'s longest step.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import kvprobe
from kvprobe.cuda import Buffer, PinnedPool, Runtime

GIB = 1 << 30
PIECE = 64 << 20
SHARE, PIECES_MS, ONE_SHARE = 0.25, 10.0, 1 / 15


class Stepping:
    """A thread that launches a small copy every 0.5 ms and waits for it, and remembers its longest step."""

    def __init__(self, runtime: Runtime) -> None:
        """Starts it."""
        self.runtime = runtime
        self.longest_ns, self.steps, self.over = 0, 0, False
        self.memory, self.stream = Buffer(runtime, 4096, "device"), runtime.stream_create()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        """The steps."""
        while not self.over:
            began = time.perf_counter_ns()
            self.runtime.memset_async(self.memory.address, self.steps % 256, 4096, self.stream)
            self.runtime.stream_synchronize(self.stream)
            self.longest_ns = max(self.longest_ns, time.perf_counter_ns() - began)
            self.steps += 1
            time.sleep(0.0005)

    def close(self) -> None:
        """Ends it."""
        self.over = True
        self.thread.join()
        self.runtime.stream_destroy(self.stream)
        self.memory.close()

    def fresh(self) -> None:
        """Forgets the longest step so far; returns when one was made since."""
        self.longest_ns, seen = 0, self.steps
        while self.steps < seen + 2:
            time.sleep(0.001)
        self.longest_ns = 0


def same_bytes(runtime: Runtime, address: int, size: int) -> bool:
    """Whether the device gives back what it was given, from a page in each 64 MiB and from the last bytes.

    In copies of 64 MiB: pieces are of that size.
    """
    for at in range(0, size, PIECE):
        part = min(PIECE, size - at)
        device = Buffer(runtime, part, "device")
        marks = [*range(0, part - 8, 64 << 20), part - 8]
        for mark in marks:
            ct.c_uint64.from_address(address + at + mark).value = at + mark + 1
        runtime.memcpy(device.address, address + at, part, "h2d")
        for mark in marks:
            ct.c_uint64.from_address(address + at + mark).value = 0
        runtime.memcpy(address + at, device.address, part, "d2h")
        device.close()
        if any(ct.c_uint64.from_address(address + at + mark).value != at + mark + 1 for mark in marks):
            return False
    return True


def pin(runtime: Runtime, way: str, size: int, stepping: Stepping) -> dict[str, Any]:
    """Pins so, and frees; what it took."""
    threads = int(way.partition("-")[2] or 0)
    pool = PinnedPool(runtime, size if way == "again" else 0, threads=threads)
    if way == "again":
        pool.take(size).close()
    stepping.fresh()
    began = time.perf_counter_ns()
    buffer = None if way == "alloc" else pool.take(size, PIECE if way == "pieces" else 0)
    address = buffer.address if buffer else runtime.host_alloc(size)
    took, longest = time.perf_counter_ns() - began, stepping.longest_ns
    time.sleep(0.01)  # a step that waited to the end ends now
    longest = max(longest, stepping.longest_ns)
    same = same_bytes(runtime, address, size)
    stats = pool.stats
    stepping.fresh()
    began = time.perf_counter_ns()
    if buffer:
        buffer.close()
    else:
        runtime.free_host(address)
    freed = time.perf_counter_ns() - began
    time.sleep(0.01)
    found = {
        "way": way,
        "bytes": size,
        "pin_ns": took,
        "longest_step_ns": longest,
        "free_ns": freed,
        "longest_step_of_free_ns": stepping.longest_ns,
        "populate_ns": stats.populate_ns,
        "register_ns": stats.register_ns,
        "longest_register_ns": stats.longest_register_ns,
        "same": same,
    }
    pool.close()
    return found


def failed(rows: list[dict[str, Any]], size: int) -> list[str]:
    """What the largest size misses."""

    def of(way: str, key: str) -> float:
        return float(statistics.median([row[key] for row in rows if row["way"] == way and row["bytes"] == size] or [0]))

    wrong = [f"{row['way']}: bytes differ" for row in rows if not row["same"]]
    alloc, longest = of("alloc", "pin_ns"), of("alloc", "longest_step_ns")
    if alloc and of("pool", "pin_ns") > SHARE * alloc:
        wrong.append(f"one registration takes {of('pool', 'pin_ns') / alloc:.2f} of cudaHostAlloc's time")
    if of("pieces", "longest_step_ns") > PIECES_MS * 1e6:
        wrong.append(f"with pieces a step takes {of('pieces', 'longest_step_ns') / 1e6:.1f} ms")
    if longest and of("pool", "longest_step_ns") > ONE_SHARE * longest:
        wrong.append(f"with one registration a step takes {of('pool', 'longest_step_ns') / longest:.3f} of alloc's")
    return wrong


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--gib", type=float, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["alloc", "pool", "pieces", "pool-1", "pool-8", "again"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    runtime = kvprobe.find_runtime(asked.device)
    stepping = Stepping(runtime)
    rows: list[dict[str, Any]] = []
    try:
        for gib in asked.gib:
            for _ in range(asked.rounds):
                for way in asked.ways:
                    row = pin(runtime, way, int(gib * GIB), stepping)
                    rows.append(row)
                    print(
                        f"{gib:5.2f} GiB {way:8}{row['pin_ns'] / 1e6:8.1f} ms ({row['bytes'] / row['pin_ns']:.1f} GB/s;"
                        f" pages {row['populate_ns'] / 1e6:7.1f}, register {row['register_ns'] / 1e6:6.1f}), step "
                        f"{row['longest_step_ns'] / 1e6:8.2f} ms; free {row['free_ns'] / 1e6:7.1f}, step "
                        f"{row['longest_step_of_free_ns'] / 1e6:7.2f}; {'equal' if row['same'] else 'BYTES DIFFER'}",
                        flush=True,
                    )
                    if asked.json:
                        asked.json.write_text(json.dumps(rows))
    finally:
        stepping.close()
    wrong = failed(rows, int(max(asked.gib) * GIB)) if asked.device == "cuda" else []
    print("\n".join(wrong) or "held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
