"""What `--json` prints of recordings: report, stats, check, diff, triage, reduce, try; times in ns, shares 0 to 1."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from kvprobe.output.parts import (
    AccountJson,
    ChangeJson,
    FindingJson,
    MissingJson,
    NextJson,
    SourceJson,
    Values,
    VerdictJson,
    VerdictWord,
)

__all__ = [
    "AnswerJson",
    "CausesJson",
    "CheckJson",
    "DiffJson",
    "ReduceJson",
    "ReportJson",
    "StartupJson",
    "StatsJson",
    "TableJson",
    "TriageJson",
    "TryJson",
]


class ReportJson(TypedDict):
    """Where the page is, and what was found; `next`: where to look where no single cause explains much, else null."""

    report: str
    bytes: int
    verdict: VerdictJson
    account: AccountJson
    findings: list[FindingJson]
    next: NextJson | None


class TableJson(TypedDict):
    """A summary table, numbers unrounded, a key for each column; null is not known.

    left_out: how many rows are not shown.
    """

    title: str
    rows: list[dict[str, Any]]
    left_out: int
    note: str


class StartupPartJson(TypedDict):
    """One kind of start-up work."""

    what: str
    calls: int
    ns: int
    bytes: int
    call: str
    longest_ns: int
    bytes_per_s: float


class StartupJson(TypedDict):
    """What lies before the serving window."""

    length_ns: int
    how: str
    submissions: int
    parts: list[StartupPartJson]


class StatsJson(TypedDict):
    """Everything that can be told of a recording. `lost`: detail records lost, by row of the process, as text."""

    source: list[SourceJson]
    machine: Values
    machine_how: dict[str, str]
    account: AccountJson
    findings: list[FindingJson]
    tables: dict[str, TableJson]
    verdict: VerdictJson
    startup: StartupJson
    notes: list[str]
    lost: dict[str, int]


class LimitJson(TypedDict):
    """One limit and what the recording makes of it; `undecided` says why it is neither kept nor broken, or is empty."""

    name: str
    allowed: str
    found: str
    broken: bool
    detail: str
    undecided: str
    at: str


class CheckJson(TypedDict):
    """Whether every limit is kept."""

    ok: bool
    verdict: VerdictJson
    limits: list[LimitJson]
    account: AccountJson


class ConclusionJson(TypedDict):
    """Whether the second recording is better."""

    state: Literal["better", "worse", "mixed", "same", "undecided"]
    sentence: str
    detail: str


class LineChangeJson(TypedDict):
    """One line of the account in two recordings, all GPUs together."""

    line: str
    title: str
    before_ns: int
    after_ns: int
    share_before: float
    share_after: float


class FindingChangeJson(TypedDict):
    """One cause in two recordings. what: gone, new, less, more, same or undecided.

    below_limit: "before" or "after" where that recording has no finding of this cause, because it cost too little.
    """

    cause: str
    what: str
    title: str
    lost_before_ns: int
    lost_after_ns: int
    share_before: float
    share_after: float
    severity: str
    confidence: str
    below_limit: str


class ShiftJson(TypedDict):
    """How one figure moved: after over before with a 95% interval. verdict: slower, faster, same or unsure."""

    before: float | None
    after: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


class CallChangeJson(TypedDict):
    """One call in two recordings: host time inside it."""

    name: str
    calls_before: int
    calls_after: int
    median: ShiftJson
    p99: ShiftJson


class DiffJson(TypedDict):
    """Two recordings side by side. unlike: in what they are not alike."""

    before: str
    after: str
    span_before_ns: int
    span_after_ns: int
    conclusion: ConclusionJson
    verdict_before: VerdictJson
    verdict_after: VerdictJson
    unlike: list[str]
    account: list[LineChangeJson]
    findings: list[FindingChangeJson]
    calls: list[CallChangeJson]


class QueueJson(TypedDict):
    """One stream's launch queue; ceiling is -1 where no full queue was found."""

    title: str
    stream: int
    device: int
    handle: int
    calls: int
    deepest: int
    verdict: VerdictWord
    reason: str
    ceiling: int
    lost_ns: int


class TriagedJson(TypedDict):
    """Whether a launch queue of one recording was full."""

    path: str
    verdict: VerdictWord
    reason: str
    how: str
    lost_ns: int
    missing: list[MissingJson]
    queues: list[QueueJson]


class TriageJson(TypedDict):
    """Launch queues of each recording, worst first; errors: of inputs that could not be read."""

    recordings: list[TriagedJson]
    errors: list[str]


class RankGpuJson(TypedDict):
    """The account of one GPU of one rank, by line."""

    rank: str
    gpu: int
    window_ns: int
    lines_ns: dict[str, int]


class RankJson(TypedDict):
    """One rank beside the others; -1 is not known."""

    rank: str
    verdict: str
    recorded_ns: int
    lost_ns: int
    share: float
    submissions: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    made_wait_ns: int
    waited_ns: int
    computing: float
    waiting_for_copies: float
    waiting_for_host: float


class WaitingJson(TypedDict):
    """Who waited for whom in collectives; `missing` says why nothing can be told, or is empty."""

    ranks: int
    collectives: int
    left_out: int
    missing: str


class BlockedJson(TypedDict):
    """A blocked call."""

    blocked_ns: int
    rank: str
    start_ns: int
    thread: int
    call: str
    stream: int
    depth: int
    bytes: int


class ReduceJson(TypedDict):
    """Many ranks. failed: by input that could not be read, the reason."""

    inputs: int
    account: list[RankGpuJson]
    ranks: list[RankJson]
    waiting: WaitingJson
    top: list[BlockedJson]
    failed: dict[str, str]


# One figure without and with a change, round by round; `with` is no name that a class could have.
MeasuredJson = TypedDict(
    "MeasuredJson",
    {
        "without": list[float],
        "with": list[float],
        "saved_median": float,
        "saved_low": float,
        "saved_high": float,
        "p": float,
        "verdict": Literal["less", "more", "within the noise"],
    },
)


class TriedJson(TypedDict):
    """One change and what it did; figure: the command's own, null where it prints none."""

    change: ChangeJson
    measured_over_predicted: float | None
    blocked_ns: MeasuredJson
    wall_ns: MeasuredJson
    figure: MeasuredJson | None


class TryJson(TypedDict):
    """Changes that were tried, each with and without."""

    command: list[str]
    folder: str
    rounds: int
    test: str
    findings: list[FindingJson]
    tried: list[TriedJson]
    notes: list[str]


class PoolPointJson(TypedDict):
    """What a pool of one size would have done; null: not known. saved_ns: against computing every block."""

    blocks: int
    bytes: int | None
    hit_share: float
    loaded_bytes: int | None
    stored_bytes: int | None
    saved_ns: float | None
    undecided: str


class PoolRatesJson(TypedDict):
    """What loading and computing a block take, where the figures come from, and what is not known."""

    tokens: float | None
    prefill_ns: float | None
    wait_ns: float | None
    latency_ns: float | None
    ns_per_byte: float | None
    how: list[str]
    lacks: list[str]
    saved_ns: float | None


class PoolJson(TypedDict):
    """One pool: its curve, where it stands, what is advised; `undecided` says why nothing is."""

    server: str
    source: str
    how: str
    asked: int
    seen: int
    followed: float
    block_bytes: int | None
    hit_share: float
    points: list[PoolPointJson]
    now: PoolPointJson | None
    advised: PoolPointJson | None
    first_share: float
    too_small_share: float | None
    early_share: float | None
    unread_share: float | None
    tier_share: float | None
    tier_bytes_per_s: float | None
    rates: PoolRatesJson
    break_even_tokens: float | Literal["never"] | None
    undecided: str
    option: str
    pays: bool | None


class SizeJson(TypedDict):
    """How large pools in CPU memory should be; those that were asked most first."""

    pools: list[PoolJson]


class CausePartJson(TypedDict):
    """What is known of a cause under one heading; `heading` may be empty."""

    heading: str
    text: str


class CauseJson(TypedDict):
    """One cause, in words."""

    cause: str
    summary: str
    parts: list[CausePartJson]


class CausesJson(TypedDict):
    """The causes that a report names."""

    causes: list[CauseJson]


class CutJson(TypedDict):
    """What an answer left out: a list, an object or a text, of whose `total` items only the first ones are shown."""

    at: str
    shown: int
    total: int


class AnswerJson(TypedDict, total=False):
    """What a tool of `kvprobe mcp` answers; a failed one has `error` alone.

    document: the command whose `--json` prints it; at: the part of it, as a JSON pointer; value: that part, from
    item, key or character `offset` of `total` on.
    """

    about: str
    document: str
    at: str
    offset: int
    total: int
    value: Any
    cut: list[CutJson]
    cuts: int
    error: str
