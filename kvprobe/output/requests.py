"""What `kvprobe requests --json` prints: steps, tokens, and who was late; times in ns."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "CallInStepJson",
    "LateRequestJson",
    "LateStepJson",
    "LiveRequestsJson",
    "PhaseJson",
    "RequestsCommandJson",
    "RequestsJson",
    "StackInStepJson",
    "WaitsJson",
]


class WaitsJson(TypedDict):
    """Times between tokens, or to first tokens; tail_ns: the mean of those from the 99th percentile on, by part."""

    count: int
    p50_ns: float | None
    p90_ns: float | None
    p99_ns: float | None
    max_ns: float | None
    late: int
    tail_ns: dict[str, int]


class PhaseJson(TypedDict):
    """Steps like each other, from `least` to below twice as many tokens or requests; lines_ns: mean, without late ones.

    late_from_ns: what takes longer is late; null where nothing tells. undecided: why less may be late, too.
    """

    phase: str
    least: int
    counted: str
    steps: int
    median_ns: float
    late_from_ns: float | None
    late: int
    lines_ns: dict[str, int]
    undecided: str


class CallInStepJson(TypedDict):
    """A call, and how long it was in the step."""

    call: str
    thread: int
    ns: int


class StackInStepJson(TypedDict):
    """A Python stack of a blocked thread, the innermost frame first."""

    thread: int
    blocked_ns: int
    frames: list[str]


class LateStepJson(TypedDict):
    """A late step: surplus_ns over the mean of its like, by line; `line` has most of it; `cause` explains that line."""

    step: int
    pid: int
    phase: str
    from_ns: int
    to_ns: int
    requests: int
    longer_ns: int
    surplus_ns: dict[str, int]
    line: str
    cause: str
    calls: list[CallInStepJson]
    stacks: list[StackInStepJson]


class LateRequestJson(TypedDict):
    """A request that was late; surplus_ns: of all its late waits, by part; `part` is the largest."""

    request: str
    pid: int
    first_token_ns: int | None
    first_late: bool
    tokens: int
    late_tokens: int
    longer_ns: int
    surplus_ns: dict[str, int]
    part: str
    late_steps: list[int]


class RequestsJson(TypedDict):
    """Steps and requests of a recording; `late` holds the costliest late steps, `late_steps` counts all of them."""

    steps: int
    requests: int
    arrivals_told: int
    between_tokens: WaitsJson
    first_token: WaitsJson
    phases: list[PhaseJson]
    late_steps: int
    late: list[LateStepJson]
    late_requests: list[LateRequestJson]
    undecided: str


class RequestsCommandJson(TypedDict):
    """null where the recording tells no steps."""

    served: RequestsJson | None


class LiveRequestsJson(TypedDict):
    """Steps of a running process since the look before: how many of each phase, waits for tokens, which were late.

    worst_request had the longest late wait, "" where none was late; lines_ns is the mean time between tokens, split as
    the time of the thread that serves them was in calls and outside of them.
    """

    pid: int
    steps: dict[str, int]
    tokens: int
    late_tokens: int
    between_p50_ns: float | None
    between_p99_ns: float | None
    first_p50_ns: float | None
    first_p99_ns: float | None
    worst_request: str
    worst_ns: int | None
    worst_step: int | None
    lines_ns: dict[str, int]
