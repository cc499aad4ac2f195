"""PyTorch profiler traces as text: of recordings whose truth is known, and random ones with every oddity."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvprobe.recordings.model import SUBMITTING, Engine, Memory, Recording

BASE_NS = 1_712_195_495_000_000_000
HOST = {Memory.PAGEABLE: "Pageable", Memory.PINNED: "Pinned"}


def event(category, name, start_ns, dur_ns, tid, **args):
    """One complete event as JSON text, its times exact."""

    def us(ns):
        return f"{ns // 1000}.{ns % 1000:03d}"

    head = f'{{"ph":"X","cat":"{category}","name":{json.dumps(name)},"pid":1,"tid":{tid},'
    return f'{head}"ts":{us(BASE_NS + start_ns)},"dur":{us(dur_ns)},"args":{json.dumps(args)}}}'


def write(path: Path, events: list[str], **beside) -> Path:
    path.write_text(json.dumps(beside)[:-1] + (", " if beside else "") + '"traceEvents":[' + ",\n".join(events) + "]}")
    return path


def of_recording(path: Path, recording: Recording) -> Path:
    """What the profiler would have written of a recording: names, times, ids, streams numbered from 7 on."""
    calls, executions = recording.calls, recording.executions
    zero = int(min(calls["start_ns"].min(initial=1 << 62), executions["start_ns"].min(initial=1 << 62)))
    out = []
    for i in range(calls.rows):
        start, end = int(calls["start_ns"][i]), int(calls["end_ns"][i])
        name, thread, id_ = recording.text(int(calls["name"][i])), int(calls["thread"][i]), int(calls["correlation"][i])
        args = {"correlation": id_} if id_ >= 0 and calls["kind"][i] in SUBMITTING else {}
        out.append(event("cuda_runtime", name, start - zero, end - start, thread, **args))
    for i in range(executions.rows):
        start, end = int(executions["start_ns"][i]), int(executions["end_ns"][i])
        engine, stream = int(executions["engine"][i]), int(executions["stream"][i]) + 7
        memory = HOST.get(Memory(int(executions["memory"][i])), "Pinned")
        category, name = {
            Engine.COPY: ("gpu_memcpy", f"Memcpy HtoD ({memory} -> Device)"),
            Engine.MEMSET: ("gpu_memset", "Memset (Device)"),
        }.get(engine, ("kernel", "forward"))
        args = {"device": 0, "stream": stream, "correlation": int(executions["correlation"][i])}
        out.append(event(category, name, start - zero, end - start, stream, **args))
    return write(path, out)


def random_trace(path: Path, seed: int, calls: int = 400) -> Path:
    """Threads that submit to streams whose queues are bounded, with what real traces have, and more of it.

    Spellings of one call, calls known by callback id only, graphs, batches, pageable copies, memsets that leave
    nothing, executions from before the trace, several of one id, without an id or a stream, repeated ids, times that
    coincide.
    """
    rng = random.Random(seed)
    streams = [(rng.choice((0, 0, 1)), 7 + i) for i in range(rng.randint(1, 3))]
    threads = rng.randint(1, 3)
    cap = rng.choice((5, 17, 20, 25, 30, 50, 10_000))
    grain = rng.choice((1, 1, 1000))  # old traces have whole microseconds
    odd = rng.choice((0.0, 0.0, 0.02, 0.2))
    busy_ns = rng.choice((3_000, 20_000, 200_000))
    think_ns = rng.choice((0, 0, 500, busy_ns))
    late_ns = rng.choice((0, 3_000, 3_000, 40_000))
    kinds = rng.choices(("copy", "kernel", "batch", "memset"), k=4) + rng.choice(([], [], ["graph"], ["sync"]))
    clock = {t: rng.randrange(0, 50_000) for t in range(threads)}
    free = dict.fromkeys(streams, 0)
    done: dict[tuple[int, int], list[int]] = {one: [] for one in streams}
    out = []
    number = rng.choice((1, 100_000))

    def at(ns):
        return ns - ns % grain

    for stream in streams:  # from before the trace, and in a later stretch of it
        for _ in range(rng.choice((0, 0, 3, 30))):
            begin = free[stream]
            free[stream] += rng.randrange(1000, 2 * busy_ns)
            args = {
                "device": stream[0],
                "stream": stream[1],
                "correlation": rng.choice((-1, 5_000_000 + rng.randrange(9))),
            }
            out.append(event("kernel", "k", at(begin), at(free[stream] - begin), 7, **args))
            done[stream].append(free[stream])
    for i in range(calls):
        thread = min(clock, key=lambda t: clock[t])
        stream = streams[thread % len(streams)] if rng.random() < 0.9 else rng.choice(streams)
        what = rng.choice(kinds)
        start = clock[thread]
        if i % rng.choice((150, 10_000)) == 149:
            start = max(start, max(free.values()) + 1000)
        cost = rng.randrange(800, 1500) * (20 if rng.random() < 0.01 else 1)
        wait = 0
        if what != "sync" and len(done[stream]) >= cap and done[stream][-cap] > start:
            wait = done[stream][-cap] + late_ns - start
        pageable = what == "copy" and rng.random() < odd
        if pageable or what == "sync":
            wait = max(wait, free[stream] - start)
        clock[thread] = start + cost + max(wait, 0) + think_ns
        dur = clock[thread] - think_ns - start
        number += 1
        if rng.random() < odd / 10:
            number -= 1
        id_ = -1 if rng.random() < odd / 10 else number
        args = {"cbid": 41, "correlation": id_}
        name = {
            "copy": rng.choice(("cudaMemcpyAsync", "cudaMemcpyAsync", "cudaMemcpyAsync_ptsz", "cudaMemcpyAsync_v3020")),
            "kernel": "cudaLaunchKernel",
            "graph": "cudaGraphLaunch",
            "batch": "INVALID",
            "memset": "cudaMemsetAsync",
            "sync": rng.choice(("cudaStreamSynchronize", "cudaEventRecord", 'o\\dd "name"')),
        }[what]
        if what == "batch":
            args["cbid"] = rng.choice((482, 509, 41))
        category = rng.choice(("cuda_runtime", "cuda_runtime", "cuda_driver"))
        out.append(event(category, name, at(start), at(dur), 100 + thread, **args))
        if what == "sync" or (what == "memset" and rng.random() < 0.5) or rng.random() < odd / 4:
            continue
        begin = max(free[stream], start + cost // 2)
        for _ in range(rng.choice((1, 5, 40)) if what == "graph" else rng.choice((1, 3)) if what == "batch" else 1):
            length = rng.randrange(busy_ns // 2, busy_ns)
            where = {"device": stream[0], "stream": stream[1] if rng.random() >= odd / 10 else -1, "correlation": id_}
            engine, text = {
                "kernel": ("kernel", "k"),
                "graph": ("kernel", "node"),
                "memset": ("gpu_memset", "Memset (Device)"),
            }.get(what, ("gpu_memcpy", f"Memcpy HtoD ({'Pageable' if pageable else 'Pinned'} -> Device)"))
            out.append(event(engine, text, at(begin), at(length), stream[1], **where))
            begin += length
        free[stream] = begin
        done[stream].append(begin)
    out.append(event("kernel", "k", 0, 1000, 7, device=0, stream=streams[0][1], correlation=1 << 22))
    out.append(event("overhead", "Buffer Flush", 5, 10, 7))
    out.append(event("cpu_op", "aten::copy_", 5, 10, 7))
    if rng.random() < 0.5:
        rng.shuffle(out)
    return write(path, out, baseTimeNanoseconds=rng.choice((0, 10**15)))
