"""Demo stories for tests of the page: a queue that fills, a switch, and calls that are fast again."""

from __future__ import annotations

import numpy as np

from kvprobe.reporting import Story, Switch


def story(**changes: object) -> Story:
    """A plausible run: 2 s on a shared stream, then 4 s of which the first 40 ms are before the switch."""
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

    def ramp(t0: float, t1: float, top: int) -> tuple[np.ndarray, np.ndarray]:
        t = np.arange(t0, t1, 3e6)
        level = np.clip(np.abs(np.sin((t - t0) / 9e7)) * top * 1.3, 0, top)
        return t.astype(np.int64), level.astype(np.int64)

    occupancy = {"shared h2d": ramp(5e9, switch, depth)}
    occupancy |= {f"pooled {i}": ramp(switch + i * 4e6, 11.1e9, 300 + 10 * i) for i in range(12)}
    after = durations[(times >= switch) & (phases == 1)]
    values: dict[str, object] = {
        "device": "embedded host runtime",
        "provider": "host",
        "queue_depth": depth,
        "channels": 4,
        "calibrated": "filled a gated stream until a submission blocked, 3 times",
        "baseline_submit_ns": float(base),
        "phases": {
            "shared": {
                "submit_p50_ns": 1130.0,
                "submit_p99_ns": float(np.quantile(one[1], 0.99)),
                "longest_call_ns": float(one[1].max()),
                "step_p50_ns": 11.6e6,
                "step_p99_ns": 46.2e6,
                "bytes_per_s": 11.2e9,
                "link_bytes_per_s": 12e9,
            },
            "auto": {
                "submit_p50_ns": 1041.0,
                "submit_p99_ns": float(np.quantile(after, 0.99)),
                "longest_call_ns": float(after.max()),
                "step_p50_ns": 11.4e6,
                "step_p99_ns": 11.9e6,
                "bytes_per_s": 11.6e9,
                "link_bytes_per_s": 12e9,
            },
        },
        "switches": [Switch(switch, "shared", "pooled", "the queue of stream 7 stayed full for 31 ms", 128.0)],
        "onset_ms": 18.4,
        "blocked_calls_before_switch": 41,
        "bytes_verified": 3 * 2**30,
        "redundant_bytes_avoided": 700 * 2**20,
        "dedup": "212 of 640 requests waited for a load in flight",
        "submit_time_ns": times,
        "submit_dur_ns": durations,
        "submit_phase": phases,
        "step_time_ns": step_t,
        "step_dur_ns": step_d,
        "occupancy": occupancy,
        "command": "kvprobe demo --device host --report reports/demo.html",
        "split": {
            "shared": {"build": 2.1e6, "submit": 913e6, "queue_wait": 644e6, "copy": 310e6, "poll_delay": 12e6},
            "auto": {"build": 2.2e6, "submit": 21e6, "queue_wait": 388e6, "copy": 305e6, "poll_delay": 13e6},
        },
    }
    return Story(**{**values, **changes})  # type: ignore[arg-type]
