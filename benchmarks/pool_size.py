"""The size that `kvprobe size` advises, tried: a served series recorded with a small pool, then with the advised one.

    python benchmarks/pool_size.py --device host           # virtual time
    python benchmarks/pool_size.py --record FOLDER         # the first recording alone, for `kvprobe size FOLDER`

A server in miniature answers requests of many conversations through the real engine: blocks that the CPU pool has are
loaded, others computed and stored. Printed: hit share and time saved against computing everything, as predicted from
the first recording, and as measured. On the host runtime computing is a timed operation in virtual time; on a GPU it is
torch's spin kernel, of as many cycles as were measured to take that long.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvprobe
from kvprobe.cuda import device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.recordings.parquet import write
from kvprobe.sizing import Sizing, of_recording

LAYERS, PIECE_BYTES = 2, 32 << 10
BLOCK_TOKENS = 16
PREFILL_NS = 5_000  # a token: 200,000 a second
MOST = 64  # blocks of a request
SMALL = 500  # blocks of the first pool


def requests(seed: int, count: int) -> list[list[int]]:
    """Blocks of each request: a shared prompt, and one of many conversations so far, which grows and ends."""
    random = np.random.default_rng(seed)
    conversations: list[tuple[int, int]] = []  # first block, length
    made, new = [], 1_000
    for _ in range(count):
        if len(conversations) < 120 or random.random() < 0.1:
            conversations.append((new, 0))
            new += 1_000
        if len(conversations) > 160:
            conversations.pop(0)
        who = len(conversations) - 1 - int(min(random.exponential(45), len(conversations) - 1))
        first, length = conversations[who]
        length = min(length + int(random.integers(2, 8)), MOST - 8)
        conversations[who] = first, length
        made.append([*range(8), *range(first, first + length)])
    return made


@dataclass
class Served:
    """What serving all requests took, and found."""

    took_ns: int
    asked: int
    found: int
    recording: kvprobe.Recording | None = None

    @property
    def hit_share(self) -> float:
        """Of the blocks asked for, those that the pool had."""
        return self.found / self.asked


class Server:
    """One engine with a CPU pool of some blocks; without any it computes everything."""

    def __init__(self, runtime: kvprobe.Runtime, blocks: int) -> None:
        self.runtime, self.blocks = runtime, blocks
        self.simulated = isinstance(runtime, HostRuntime)
        self.stream = runtime.stream_create()
        self.regions = [device_region(runtime, 2 * MOST * PIECE_BYTES) for _ in range(LAYERS)]
        self.host = [host_region(runtime, max(blocks, 1) * PIECE_BYTES) for _ in range(LAYERS)]
        pools = [kvprobe.BlockPool(runtime, layers, PIECE_BYTES) for layers in (self.regions, self.host)]
        limits = kvprobe.QueueLimits(1024, 4, 4096, 300, 600) if self.simulated else kvprobe.calibrate(runtime)
        self.engine = kvprobe.OffloadEngine(runtime, *pools, policy="pooled", limits=limits, compute_stream=self.stream)
        self.cache = kvprobe.BlockCache(max(blocks, 1), sample=kvprobe.BlockSample(now_ns=self.now))
        self.stores: list[Any] = []  # of the request before: its blocks on the GPU are written again after the next

    def now(self) -> int:
        """The clock."""
        return self.runtime.now_ns() if isinstance(self.runtime, HostRuntime) else time.monotonic_ns()

    def compute(self, blocks: int) -> None:
        """So many blocks, on the compute stream."""
        self.runtime.launch_delay(self.stream, blocks * BLOCK_TOKENS * PREFILL_NS)

    def serve(self, series: list[list[int]]) -> Served:
        """All requests, one after another."""
        asked = found = 0
        start = self.now()
        for number, keys in enumerate(series):
            half = number % 2 * MOST
            held = [key for key in keys if self.blocks and key in self.cache]
            held_now = set(held)
            missing = [key for key in keys if key not in held_now]
            asked, found = asked + len(keys), found + len(held)
            for transfer, kept in self.stores[:-1]:
                transfer.wait()
                self.cache.end(kept)
            del self.stores[:-1]
            if held:
                load = self.engine.load(self.cache.begin_load(held), range(half, half + len(held)), after=None)
                load.wait()
                self.cache.end(held)
            if missing:
                self.compute(len(missing))
                given = self.cache.begin_store(missing) if self.blocks else []
                if given:
                    gpu = range(half + len(held), half + len(held) + len(given))
                    stored = self.engine.store(gpu, [block for _, block in given])
                    self.stores.append((stored, [key for key, _ in given]))
                self.runtime.stream_synchronize(self.stream)
        return Served(self.now() - start, asked, found)

    def recording(self) -> kvprobe.Recording:
        """Of all that it served."""
        return kvprobe.recording_of(self.engine, what="pool_size", caches=[self.cache])

    def close(self) -> None:
        """Gives everything back."""
        self.engine.wait()
        self.engine.close()
        self.runtime.stream_destroy(self.stream)
        for region in (*self.regions, *self.host):
            region.owner.close()


def runtime_for(device: str) -> kvprobe.Runtime:
    """The host runtime in virtual time, or a GPU's."""
    if device == "host":
        return host_runtime(virtual_clock=1, depth=1024, submit_ns=1000, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9)
    return kvprobe.find_runtime(device)


def served(runtime: kvprobe.Runtime, series: list[list[int]], blocks: int, record: bool = False) -> Served:
    """The whole series by a new server."""
    server = Server(runtime, blocks)
    try:
        done = server.serve(series)
        if record:
            server.engine.wait()
            done.recording = server.recording()
    finally:
        server.close()
    return done


def tried(runtime: kvprobe.Runtime, series: list[list[int]]) -> dict[str, Any]:
    """What was advised after the first run, what was predicted of it, and what the second run measured."""
    served(runtime, series[:1], 0)  # the first launch on a GPU imports torch
    computed = served(runtime, series, 0)
    before = served(runtime, series, SMALL, record=True)
    assert before.recording is not None
    advised = sized(before.recording)
    point = advised.advised
    if point is None or point.saved_ns is None:
        raise SystemExit(f"nothing was advised: {advised.undecided or advised.rates.lacks}")
    after = served(runtime, series, point.blocks)
    now = advised.now
    return {
        "blocks": [SMALL, point.blocks],
        "hit_share_now": [round(now.hit_share, 4) if now else None, round(before.hit_share, 4)],
        "hit_share_predicted": round(point.hit_share, 4),
        "hit_share_measured": round(after.hit_share, 4),
        "saved_s_predicted": round(point.saved_ns / 1e9, 4),
        "saved_s_measured": round((computed.took_ns - after.took_ns) / 1e9, 4),
        "break_even_tokens": advised.break_even_tokens,
        "option": advised.option,
    }


def sized(recording: kvprobe.Recording) -> Sizing:
    """What `kvprobe size --prefill-rate ... --block-tokens ...` says of it."""
    return of_recording(recording, prefill_ns=PREFILL_NS, tokens=BLOCK_TOKENS)[0]


def main() -> None:
    """Prints the figures, or writes a recording."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="host", choices=("host", "cuda"))
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the recording of the small pool, and end")
    options = parser.parse_args()
    runtime = runtime_for(options.device)
    series = requests(options.seed, options.requests)
    if options.record is not None:
        recording = served(runtime, series, SMALL, record=True).recording
        assert recording is not None
        write(recording, options.record)
        return
    print(json.dumps(tried(runtime, series), indent=1))


if __name__ == "__main__":
    main()
