"""A launch queue by arithmetic: recordings whose ceiling and loss are known because they are computed here."""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.links import link
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table


def simulate(
    streams=1,
    calls=4000,
    cap=1021,
    api_ns=1000,
    gpu_ns=20_000,
    think_ns=0,
    jitter=0.1,
    gate_ns=0,
    seed=1,
    executions=True,
    wake_ns=3000,
    burst=0,
    pause_ns=0,
    chunk=1,
):
    """A thread a stream submits `calls` copies; a call entered at `cap` outstanding waits for the oldest.

    After each `burst` calls it pauses; a full queue frees `chunk` places at once.
    """
    rng = np.random.default_rng(seed)
    out = {name: [] for name in ("start", "end", "stream", "begin", "done")}
    lost = 0
    for stream in range(streams):
        now, free = 1_000_000, 1_000_000 + gate_ns
        done = []
        oldest = 0
        for _ in range(calls):
            start = now
            cost = int(api_ns * (1 + jitter * rng.random()))
            while oldest < len(done) and done[oldest] <= start:
                oldest += 1
            wait = 0
            if len(done) - oldest >= cap:
                last = len(done) - cap
                wait = max(done[last + -last % chunk] + wake_ns - start, 0)
            lost += wait
            now = start + cost + wait
            begin = max(free, now)
            free = begin + int(gpu_ns * (1 + jitter * rng.random()))
            done.append(free)
            for name, value in zip(out, (start, now, stream, begin, free), strict=True):
                out[name].append(value)
            now += think_ns + (pause_ns if burst and len(done) % burst == 0 else 0)
    n = len(out["start"])
    stream = np.array(out["stream"])
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": out["start"],
                "end_ns": out["end"],
                "process": np.zeros(n, int),
                "thread": 100 + stream,
                "name": np.ones(n, int),
                "kind": np.full(n, CallKind.COPY),
                "correlation": np.arange(n),
                "stream": stream,
                "count": np.ones(n, int),
            },
        ),
        "streams": Table("streams", {"process": np.zeros(streams, int), "handle": np.arange(streams) + 7}),
        "processes": Table("processes", {"pid": [1]}),
    }
    if executions:
        tables["executions"] = Table(
            "executions",
            {
                "start_ns": out["begin"],
                "end_ns": out["done"],
                "process": np.zeros(n, int),
                "stream": stream,
                "engine": np.full(n, Engine.COPY),
                "direction": np.full(n, Direction.H2D),
                "count": np.ones(n, int),
                "memory": np.full(n, Memory.PINNED),
                "bytes": np.full(n, 65536),
                "correlation": np.arange(n),
            },
        )
    recording = Recording([Source("simulated", "test")], tables, ["", "cudaMemcpyAsync"], has_executions=executions)
    link(recording)
    return recording, lost
