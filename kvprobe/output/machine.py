"""What `--json` prints of machines and running processes: demo, bench, calibrate, doctor, patches, weights, top."""

from __future__ import annotations

from typing import Any, TypedDict

from kvprobe.output.requests import LiveRequestsJson

__all__ = [
    "BenchJson",
    "CalibrateJson",
    "DemoJson",
    "DoctorJson",
    "OverheadJson",
    "PatchesJson",
    "TopJson",
    "WeightsJson",
]


class DemoPhaseJson(TypedDict):
    """Figures of one phase."""

    load_p50_ns: int
    load_p99_ns: int
    longest_call_ns: int
    step_p50_ns: int
    step_p99_ns: int
    seconds: float
    bytes_per_s: int
    requests_per_s: float
    bytes: int
    copies: int
    requests: int
    redundant_bytes: int


class DemoSharedJson(DemoPhaseJson):
    """The same of the shared stream, with the submitting calls of its thread."""

    submit_p50_ns: int
    submit_p99_ns: int


class SwitchJson(TypedDict):
    """One switch of policy."""

    before: str
    after: str
    reason: str
    gain: float


class DemoJson(TypedDict):
    """The demo: a queue that fills, and what auto made of it; null where auto noticed nothing."""

    device: str
    provider: str
    queue_depth: int
    channels: int
    baseline_submit_ns: int
    copy_bytes: int
    link_bytes_per_s: float
    shared: DemoSharedJson
    auto: DemoPhaseJson
    onset_ms: float | None
    blocked_calls_before_switch: int | None
    switches: int
    switch_log: list[SwitchJson]
    bytes_verified: int
    redundant_bytes_avoided: int
    dedup: str
    report: str


class MedianJson(TypedDict):
    """A median over rounds."""

    median: float


class FigureJson(MedianJson, total=False):
    """The same, with ratios to what it is compared with, taken within a round."""

    ratio: float
    ratio_low: float
    ratio_high: float


Figures = dict[str, dict[str, FigureJson]]  # figure -> policy, or level of detail


class BlockSizeJson(TypedDict):
    """Copies of one size in one direction, by method."""

    direction: str
    block_bytes: int
    copies: int
    rounds: int
    bytes_per_s: dict[str, FigureJson]
    submit_ns_a_copy: dict[str, FigureJson]


class CopyMethodsJson(TypedDict):
    """The methods of copying compared."""

    link_bytes_per_s: dict[str, float]
    link_how: dict[str, str]
    blocks: list[BlockSizeJson]


class PoliciesJson(TypedDict):
    """The policies compared."""

    rounds: int
    seconds_a_round: float
    copy_bytes: int
    link_bytes_per_s: float
    figures: Figures


class QueueLimitsJson(TypedDict):
    """What launch queues hold, in submissions, and what one costs while slots are free."""

    depth: int
    channels: int
    capacity: int
    baseline_ns: int
    p99_ns: int
    how: str


class BenchJson(QueueLimitsJson):
    """Policies and methods on this machine."""

    provider: str
    copy_methods: CopyMethodsJson
    policies: PoliciesJson


class OverheadJson(TypedDict):
    """What recording costs."""

    device: str
    provider: str
    rounds: int
    figures: Figures


class RateJson(TypedDict):
    """Copies of one size."""

    copy_bytes: int
    copies: int
    bytes_per_s: float


class MethodRowBase(TypedDict):
    """One method in one direction: cost by size of a copy."""

    direction: str
    method: str
    ctas: int
    sizes: list[int]
    fixed_ns: list[float]
    copy_ns: list[float]
    submit_ns: list[float]
    measured: list[RateJson]
    slowdown: float
    product: float


class MethodRowJson(MethodRowBase, total=False):
    """The same; kernel_end_ns where it was measured."""

    kernel_end_ns: float


class BesideJson(TypedDict):
    """What copies cost other work on the device."""

    work: str
    kernels: int
    direction: str
    method: str
    ctas: int
    alone_ns: float
    beside_ns: float
    beside_most_ns: float


class ChoiceJson(TypedDict):
    """The method that is chosen for copies of this size."""

    direction: str
    copy_bytes: int
    method: str
    ctas: int
    bytes_per_s: float
    of_link: float


class CalibrateBase(TypedDict):
    """What the chooser needs."""

    format: str
    quick: bool
    provider: str
    cuda: int
    driver: str
    gpu: str
    pcie: str
    queue: QueueLimitsJson
    missing: dict[str, str]
    kernels: str
    link_bytes_per_s: dict[str, float]
    rows: list[MethodRowJson]
    paced_store_bytes_per_s: int
    beside: list[BesideJson]
    choices: list[ChoiceJson]
    seconds: float


class CalibrateJson(CalibrateBase, total=False):
    """Methods of copying on this machine; without `--quick` patterns, both directions at once, and behind a burst."""

    patterns: list[dict[str, Any]]
    both: list[dict[str, Any]]
    behind_burst: list[dict[str, Any]]


class CheckedJson(TypedDict):
    """One thing that was looked at. verdict: good, bad, note or unknown."""

    topic: str
    name: str
    value: str
    verdict: str
    todo: str


class DoctorJson(TypedDict):
    """This machine and environment, and how many of each verdict."""

    checks: list[CheckedJson]
    good: int
    bad: int
    note: int
    unknown: int


class TargetJson(TypedDict):
    """One function that an adapter touches."""

    target: str
    state: str


class AdapterJson(TypedDict):
    """One adapter and where it stands; version is null where its server is not installed."""

    adapter: str
    server: str
    distribution: str
    version: str | None
    versions: str
    state: str
    reason: str
    summary: str
    changes: str
    option: str
    fix: str
    targets: list[TargetJson]


class PatchesJson(TypedDict):
    """The adapters of all servers."""

    adapters: list[AdapterJson]


class LayerJson(TypedDict):
    """One offloaded layer."""

    name: str
    bytes: int
    copies: float
    copy_ns: float
    compute_ns: float
    wait_ns: float
    hidden: float


class WeightProfileJson(TypedDict):
    """What a forward consists of; predicted and measured: by window."""

    forwards: int
    window: int
    forward_ns: float
    copy_ns: float
    compute_ns: float
    wait_ns: float
    bytes: int
    hidden: float
    link_bytes_per_s: float
    bound_ns: float
    predicted: dict[str, float]
    measured: dict[str, float]
    layers: list[LayerJson]
    unmeasured: int
    rest_ns: float


class LoadTimeJson(TypedDict):
    """Copies to the GPU beside computation, of one process of a recording."""

    process: int
    copies: int
    bytes: int
    copy_ns: int
    compute_ns: int
    exposed_ns: int
    hidden: float
    busy_ns: int
    bound_ns: int


class CodedShareJson(TypedDict):
    """Weights of one dtype: `share` of their bytes would travel coded, predicted from `sample_bytes` of them."""

    dtype: str
    bytes: int
    sample_bytes: int
    share: float


class WeightsJson(TypedDict, total=False):
    """A model with weights in CPU memory; of a recording, `processes` alone; of a prediction what has `share`.

    profile and report: where something is offloaded; forward_ns: where nothing is.
    """

    processes: list[LoadTimeJson]
    tokens: int
    total_bytes: int
    limit_bytes: int
    gpu_bytes: int
    offloaded_bytes: int
    offloaded_layers: int
    grain: str
    pinned_bytes: int
    pin_ns: int
    notes: list[str]
    forward_ns: float
    profile: WeightProfileJson
    report: str
    coded_bytes: int
    share: float
    dtypes: list[CodedShareJson]


class LiveStreamJson(TypedDict):
    """One stream over the last interval; `stream` is its handle, null is not known."""

    stream: str
    name: str
    submissions_per_s: float
    p50_ns: float | None
    p99_ns: float | None
    baseline_ns: float | None
    blocked_share: float
    outstanding: int | None
    bytes_per_s: dict[str, float]
    suspected: bool


class InFlightJson(TypedDict):
    """A call that a thread is inside of."""

    tid: int
    call: str
    stream: str
    age_ns: int
    name: str


class LiveProcessJson(TypedDict):
    """One process that is recorded; account: ns of each thread by line, with its name and window."""

    pid: int
    command: str
    producer: str
    path: str
    state: str
    interval_s: float
    streams: list[LiveStreamJson]
    longest: InFlightJson | None
    errors: int
    first_error: str
    account: list[dict[str, Any]]


class BenefitJson(TypedDict):
    """What one offload of one server brought so far; null is not seen."""

    server: str
    source: str
    requests: int | None
    prompt_tokens: int | None
    gpu_hit_tokens: int | None
    hit_tokens: int | None
    stored_blocks: int | None
    stored_bytes: int | None
    loaded_blocks: int | None
    loaded_bytes: int | None
    unread_blocks: int | None
    unread_bytes: int | None
    held_unread_blocks: int | None
    waits: int | None
    waited_ns: int | None
    prefill_ns_per_token: float | None
    conclusion: str
    sentence: str


class TopJson(TypedDict):
    """Recorded processes now; time_ns is of the monotonic clock."""

    time_ns: int
    processes: list[LiveProcessJson]
    offload: list[BenefitJson]
    requests: list[LiveRequestsJson]
