"""What documents of `--json` share: verdict, account, findings. Times are integer ns, shares 0 to 1."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

__all__ = [
    "AccountJson",
    "CallJson",
    "ChangeJson",
    "EvidenceJson",
    "FindingJson",
    "GpuJson",
    "MissingJson",
    "NextJson",
    "PlaceJson",
    "SourceJson",
    "ThreadJson",
    "VerdictJson",
    "VerdictWord",
    "WhereJson",
]

VerdictWord = Literal["found", "healthy", "undecided"]


class MissingJson(TypedDict):
    """What a recording lacks to be called healthy, and how to record it."""

    what: str
    how: str


class VerdictJson(TypedDict):
    """One word and why; undecided is never green."""

    state: VerdictWord
    reason: str
    missing: list[MissingJson]


class GpuJson(TypedDict):
    """Where one GPU's time went: the lines add up to window_ns. from_ns and to_ns are on the recorder's own clock.

    waiting_for_copies_ns, waiting_for_host_ns: by line; not_known_ns: by reason. More lines may come.
    by_samples_ns: of all lines, what was not seen and is told by stretches before and after, or by later calls where
    calls were not kept; by_samples_error_ns: how far a line may be from the truth for that.
    by_counts_ns: of all lines, what is told by how many kernels and copies ran between two marks, and how long such
    kernels and copies take elsewhere; by_counts_error_ns: how much farther a line may be from the truth for that.
    """

    gpu: int
    pids: list[int]
    ranks: list[int]
    from_ns: int
    to_ns: int
    window_ns: int
    computing_ns: int
    waiting_for_copies_ns: dict[str, int]
    waiting_for_host_ns: dict[str, int]
    nothing_to_do_ns: int
    not_known_ns: dict[str, int]
    by_samples_ns: int
    by_samples_error_ns: int
    by_counts_ns: int
    by_counts_error_ns: int


class ThreadJson(TypedDict):
    """Where the time of one thread that submits went: the lines add up to window_ns.

    waited_for_device_ns: what the device did meanwhile, as computing, copying, idle, not_known.
    """

    pid: int
    thread: int
    name: str
    launches: bool
    from_ns: int
    to_ns: int
    window_ns: int
    full_queue_ns: int
    waiting_for_device_ns: int
    allocating_ns: int
    pageable_ns: int
    submitting_ns: int
    python_ns: int
    no_cpu_ns: int
    tier_ns: int
    elsewhere_ns: int
    nothing_to_do_ns: int
    waited_for_device_ns: dict[str, int]


class AccountJson(TypedDict):
    """Where every instant of the serving window went, by GPU and by thread that submits."""

    gpus: list[GpuJson]
    threads: list[ThreadJson]


class EvidenceJson(TypedDict):
    """One figure, the sentence it belongs to, and how it was obtained."""

    text: str
    value: float | None
    unit: str
    how: str


class ChangeJson(TypedDict):
    """Something to change. A saving is null where none was modelled; predicted_saving_ns is wall time."""

    text: str
    kind: Literal["environment", "setting", "call", "rung", "recording"]
    name: str
    value: str
    at: str
    predicted_saving_ns: int | None
    thread_saving_ns: int | None


class WhereJson(TypedDict):
    """A place that lost time; what does not apply is empty, or -1."""

    process: int
    pid: int
    rank: int
    thread: int
    stream: int
    stream_name: str
    range: str
    function: str
    lost_ns: int
    calls: int


class CallJson(TypedDict):
    """One call behind a finding; depth is -1 and line empty where they are not known.

    Where `function` is not empty, `line` is where it begins: a profile of Python functions does not tell more.
    """

    row: int
    name: str
    pid: int
    thread: int
    stream_name: str
    start_ns: int
    dur_ns: int
    lost_ns: int
    depth: int
    line: str
    function: str
    stack: list[str]


class FindingJson(TypedDict):
    """A named cause with its evidence; `window` is start and end, ns on the recording's clock."""

    cause: str
    title: str
    severity: Literal["critical", "warning", "info"]
    confidence: Literal["certain", "likely", "cannot tell"]
    lost_ns: int
    lost_on: Literal["host", "copy engine", "device", "none"]
    share: float
    device_ns: int | None
    device_share: float | None
    evidence: list[EvidenceJson]
    cure: list[ChangeJson]
    predicted_saving_ns: int | None
    where: list[WhereJson]
    calls: list[CallJson]
    window: list[int]
    reason: str


class PlaceJson(TypedDict):
    """A range, a call or a line of code, and how long a thread was there."""

    place: str
    ns: int


class NextJson(TypedDict):
    """Where to look next: the largest line of a GPU's account that is a wait, and the command that narrows it down.

    `pid` and `thread` are -1 where no thread is known. `from_ns` and `to_ns`, from the recording's first instant on,
    are the part of the serving window with most of the line, and part_ns is how much of it.
    """

    text: str
    command: str
    gpu: int
    line: str
    ns: int
    pid: int
    thread: int
    places: list[PlaceJson]
    from_ns: int
    to_ns: int
    part_ns: int


class SourceJson(TypedDict):
    """One file or folder that was read, and what recorded it."""

    path: str
    format: str
    tool: str
    command: str


# What a program found out about a machine: names and values that a recorder or CUDA gives.
Values = dict[str, Any]
