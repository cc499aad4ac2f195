"""A played demo for tests of the page: a queue that fills, a switch, and calls that are fast again."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvprobe.recordings.engine import PHASES
from kvprobe.recordings.model import CallKind, Direction, Recording, Source, Table
from kvprobe.recordings.vocabulary import Names


def played(device: str = "embedded host runtime", **changes: Any) -> tuple[Recording, dict[str, Any]]:
    """A plausible run and its figures: 2 s on a shared stream, then 4 s of which the first 40 ms are before the switch.

    `changes` replace figures; every text of the recording that a run gives is `device`, if that is given.
    """
    rng = np.random.default_rng(7)
    depth, base, service = 1021, 1040, 7100

    def phase(start_ns: float, seconds: float, full_until: float) -> tuple[np.ndarray, np.ndarray]:
        times, durations, now = [], [], start_ns
        while now < start_ns + seconds * 1e9:
            burst = rng.integers(900, 2600)
            fill = min(burst, depth)
            slow = now < full_until
            dur = rng.lognormal(np.log(base), 0.12, burst)
            if slow and burst > depth:
                dur[fill:] = rng.normal(service, 600, burst - fill).clip(2000)
                if rng.random() < 0.3:
                    dur[fill] = rng.uniform(8e6, 28e6)
            t = now + np.cumsum(dur + 120)
            times.append(t)
            durations.append(dur)
            now = t[-1] + rng.uniform(8e6, 16e6)
        return np.concatenate(times), np.concatenate(durations)

    one, two = phase(5e9, 2.0, 1e18), phase(7.1e9, 4.0, 7.14e9)
    times = np.concatenate([one[0], two[0]]).astype(np.int64)
    durations = np.concatenate([one[1], two[1]]).astype(np.int64)
    phases = np.concatenate([np.zeros(len(one[0])), np.ones(len(two[0]))]).astype(np.int64)
    switch = 7_138_000_000
    step_t = np.arange(5e9, 11.1e9, 12e6).astype(np.int64)
    slow = (step_t < switch) & (rng.random(len(step_t)) < 0.55)
    step_d = np.where(slow, rng.uniform(24e6, 48e6, len(step_t)), rng.normal(11.4e6, 0.2e6, len(step_t))).astype(
        np.int64
    )

    def text(usual: str) -> str:
        return usual if device == "embedded host runtime" else device

    why = text("the queue of stream 7 stayed full for 31 ms")
    names = Names()
    own = (phases == 0) | (times < switch)
    load_t = np.arange(5e9, 11.1e9, 20e6).astype(np.int64)
    share = np.where(load_t < switch, rng.normal(8000, 500, len(load_t)), rng.normal(40, 5, len(load_t)).clip(20))
    calls = len(times)  # after the switch they are the submitter's, on a thread of its own
    tables = {
        "calls": {
            "start_ns": times,
            "end_ns": times + durations,
            "process": np.zeros(calls),
            "thread": np.where(own, 77, 78),
            "name": np.full(calls, names.add("cudaMemcpyAsync")),
            "kind": np.full(calls, CallKind.COPY),
            "stream": np.zeros(calls),
            "bytes": np.full(calls, 131072),
            "count": np.ones(calls),
            "direction": np.full(calls, Direction.H2D),
        },
        "server_calls": {
            "start_ns": load_t,
            "end_ns": load_t + (share * 576).astype(np.int64),
            "process": np.zeros(len(load_t)),
            "thread": np.full(len(load_t), 77),
            "server": np.full(len(load_t), names.add("demo")),
            "name": np.full(len(load_t), names.add("load")),
            "count": np.full(len(load_t), 576),
        },
        "ranges": {
            "start_ns": np.array([4_990_000_000, 7_100_000_000]),
            "end_ns": np.array([7_099_000_000, 11_200_000_000]),
            "process": np.zeros(2),
            "thread": np.full(2, 77),
            "domain": np.full(2, names.add(PHASES)),
            "name": names.map(["shared", "auto"]),
        },
        "transfers": {
            "start_ns": np.array([5_000_000_000, 7_200_000_000]),
            "end_ns": np.array([6_000_000_000, 8_200_000_000]),
            "process": np.zeros(2),
            "count": np.array([576, 576]),
            "direction": np.full(2, Direction.H2D),
            "build_ns": np.array([2_100_000, 2_200_000]),
            "submit_ns": np.array([913_000_000, 21_000_000]),
            "wait_ns": np.array([644_000_000, 388_000_000]),
            "copy_ns": np.array([310_000_000, 305_000_000]),
            "poll_ns": np.array([12_000_000, 13_000_000]),
        },
        "samples": {
            "time_ns": step_t,
            "process": np.zeros(len(step_t)),
            "device": np.zeros(len(step_t)),
            "metric": np.full(len(step_t), names.add("step_time_ns")),
            "value": step_d,
        },
        "decisions": {
            "time_ns": np.array([switch]),
            "process": np.zeros(1),
            "what": names.map([text("auto: shared to pooled")]),
            "reason": names.map([why]),
            "gain": np.array([128.0]),
        },
        "streams": {
            "process": np.zeros(1),
            "device": np.zeros(1),
            "handle": np.array([7]),
            "name": names.map([text("shared loads")]),
        },
        "processes": {"pid": np.array([70]), "name": names.map([text("kvprobe")])},
    }
    figures: dict[str, Any] = {
        "device": device,
        "provider": "host",
        "queue_depth": depth,
        "channels": 4,
        "baseline_submit_ns": base,
        "link_bytes_per_s": 12e9,
        "shared": {
            "submit_p50_ns": 1130.0,
            "submit_p99_ns": float(np.quantile(one[1], 0.99)),
            **_phase(9100.0, 124e6, 46.2e6, 11.2e9, 0.2),
        },
        "auto": _phase(45.0, 61e3, 11.9e6, 11.6e9, 0.0),
        "onset_ms": 18.4,
        "blocked_calls_before_switch": 41,
        "switches": 1,
        "switch_log": [{"before": text("shared"), "after": text("pooled"), "reason": why, "gain": 128.0}],
        "bytes_verified": 3 << 30,
        "redundant_bytes_avoided": 700 << 20,
        "dedup": "212 of 640 requests waited for a load in flight",
    }
    recording = Recording(
        [Source("kvprobe demo", "kvprobe", command=text("kvprobe demo --device host --report reports/demo.html"))],
        tables={kind: Table(kind, columns) for kind, columns in tables.items()},
        names=names.list,
        machine={"queue_depth": depth, "channels": 4},
    )
    return recording, {**figures, **changes}


def _phase(p99_ns: float, longest_ns: float, step_ns: float, bytes_per_s: float, redundant: float) -> dict[str, float]:
    return {
        "load_p50_ns": float(p99_ns) * 0.9,
        "load_p99_ns": float(p99_ns),
        "longest_call_ns": longest_ns,
        "step_p50_ns": 11.6e6,
        "step_p99_ns": step_ns,
        "bytes_per_s": bytes_per_s,
        "requests": 102,
        "requests_per_s": 24.0,
        "copies": 28032,
        "bytes": 3 << 30,
        "redundant_bytes": int(redundant * (3 << 30)),
    }
