"""What the demo adds to a recording: the two phases it ran, the switch between them, and what it verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Story", "Switch"]

Array = npt.NDArray[Any]


def _empty() -> Array:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Switch:
    """One change of policy.

    Attributes:
        time_ns: when, on the clock of the series.
        before, after: the policies' names.
        reason: one sentence.
        gain: submit p99 before over after; 0 where it was not measured.
    """

    time_ns: int
    before: str
    after: str
    reason: str = ""
    gain: float = 0.0


@dataclass
class Story:
    """Everything the page says about a demo run, measured by the run itself.

    Attributes:
        device: the device's name ("NVIDIA H200", "embedded host runtime").
        provider: "host" or "cuda".
        queue_depth, channels: as calibrated in the process.
        calibrated: how, in one sentence.
        baseline_submit_ns: submit time of a copy into a queue that is not full.
        phases: "shared" and "auto", each with submit_p50_ns, submit_p99_ns, longest_call_ns, step_p50_ns,
            step_p99_ns, bytes_per_s, link_bytes_per_s.
        switches: in order of time.
        onset_ms: from the first blocked call to the detector's alarm.
        blocked_calls_before_switch: submissions that blocked before the switch took effect.
        bytes_verified: compared on both sides, all equal.
        redundant_bytes_avoided: not loaded because they were being loaded already.
        submit_time_ns, submit_dur_ns: one entry a submission, int64; submit_phase indexes `phase_names`.
        step_time_ns, step_dur_ns: one entry a step of the model-like loop, int64.
        phase_names: names that `submit_phase` indexes.
        occupancy: stream name -> (time_ns, outstanding), a step function.
        split: phase -> nanoseconds summed over its transfers: build, submit, queue_wait, copy, poll_delay.
        dedup: one sentence on redundant loads; empty where none was seen.
        command: the exact command that made the report.
    """

    device: str
    provider: str
    queue_depth: int
    channels: int
    baseline_submit_ns: float
    phases: Mapping[str, Mapping[str, float]]
    calibrated: str = ""
    switches: Sequence[Switch] = ()
    onset_ms: float | None = None
    blocked_calls_before_switch: int | None = None
    bytes_verified: int = 0
    redundant_bytes_avoided: int = 0
    submit_time_ns: Array = field(default_factory=_empty)
    submit_dur_ns: Array = field(default_factory=_empty)
    submit_phase: Array = field(default_factory=_empty)
    phase_names: Sequence[str] = ("shared", "auto")
    step_time_ns: Array = field(default_factory=_empty)
    step_dur_ns: Array = field(default_factory=_empty)
    occupancy: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    split: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    dedup: str = ""
    command: str = ""
