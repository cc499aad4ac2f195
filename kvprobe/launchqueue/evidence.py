"""What can be measured of a launch queue: numbers that the judge concludes from, one type for each way of looking.

Readers, causes, the live detector and auto fill these in and decide nothing. Needs neither numpy nor native code.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Deepest",
    "DepthStep",
    "Evidence",
    "Flood",
    "HeldAt",
    "InBurst",
    "Incomplete",
    "Labels",
    "LiveSums",
    "LiveWindow",
    "Made",
    "MetDepths",
    "NumberedLaunches",
    "OtherSlowCalls",
    "OverStreams",
    "Paced",
    "Pinned",
    "Plateau",
    "Regular",
    "SharedChannel",
    "StoodStill",
    "Together",
    "Transfers",
]


@dataclass(frozen=True, slots=True)
class Made:
    """All that was ever submitted, whatever became of it.

    Attributes:
        submissions: calls that take a slot.
        depth: what a queue takes as calibrated; 0 unknown.
    """

    submissions: int
    depth: float = 0


@dataclass(frozen=True, slots=True)
class Incomplete:
    """What a recording lacks, whatever its queues show: `lacks` is a sentence for each part, none where it is whole."""

    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deepest:
    """Where the device was recorded: the most that each stream had outstanding, and nothing else."""

    each: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Together:
    """Where the device was recorded: slow copies whose own stream had slots, of streams that may share a channel.

    Attributes:
        calls: entered while the copies of their direction together held what a channel takes.
        deepest: the most that these were.
    """

    calls: int
    deepest: int


@dataclass(frozen=True, slots=True)
class Labels:
    """Calls that the recorder itself labels "command buffer full".

    Attributes:
        calls: so many.
        shallowest, deepest: outstanding at a blocked call's entry.
        graphs: CUDA graphs are among what is outstanding.
    """

    calls: int
    shallowest: int
    deepest: int
    graphs: bool


@dataclass(frozen=True, slots=True)
class Plateau:
    """Where the device was recorded: calls at the deepest depths, and how they return.

    Attributes:
        deepest: submissions outstanding at a call's entry, at most.
        slow: calls at the deepest depths that cost more than shallow ones do.
        shallowest: the least that one of them was entered at.
        lost_ns: what they cost more, together.
        at_pin: calls that were entered at `shallowest` or deeper.
        aligned: share of the slow ones that return when an operation of the stream ends.
        chance: share of instants nearby that would.
        drained: share of the slow ones during which an operation of the stream ended.
        in_graphs: share of the slow ones that were entered while a graph was outstanding.
    """

    deepest: int
    slow: int = 0
    shallowest: int = -1
    lost_ns: int = 0
    at_pin: int = 0
    aligned: float = 0.0
    chance: float = 0.0
    drained: float = 0.0
    in_graphs: float = 0.0


@dataclass(frozen=True, slots=True)
class Regular:
    """Where the device was recorded: slow calls at the top that return late, but alike.

    Attributes:
        deepest, depth: outstanding at most; what a queue takes as calibrated, in submissions; 0 unknown.
        least: outstanding from which on a queue of unknown depth is believed to be full.
        streams: that share the queue.
        slow, top: slow calls at the top; all there.
        slow_below: share of the calls with a slot that are slow.
        delays: slow calls with an end of an operation before and after their return.
        gathered: how much their delays after it gather at one value: 0 by chance, 1 for one constant delay.
    """

    deepest: int
    depth: float
    least: float
    streams: int
    slow: int
    top: int
    slow_below: float
    delays: int
    gathered: float


@dataclass(frozen=True, slots=True)
class StoodStill:
    """Where the device was recorded, or timing events in the stream: a few long calls while their stream stood still.

    Attributes:
        deepest, depth: outstanding at most; what a queue takes as calibrated; 0 unknown.
        fences: calls for most of which nothing of the stream executed, and then it moved on; where the depth is unknown
            of those alone whose stream had been told to wait, while kernels ran. By timing events: that returned as the
            wait ended at which their stream stood.
        delays: calls for most of which one operation of the stream ran, or none, and that returned as the stream moved
            on.
    """

    deepest: int
    depth: float
    fences: int = 0
    delays: int = 0


@dataclass(frozen=True, slots=True)
class SharedChannel:
    """Where the device was recorded: calls that blocked while streams together held what fills a queue.

    Attributes:
        known: the recorder says that they share a channel.
        calls, streams: the blocked calls, and how many streams they went to.
        roomy: those of them whose own stream had slots.
    """

    known: bool
    calls: int
    streams: int
    roomy: int


@dataclass(frozen=True, slots=True)
class DepthStep:
    """From the host alone: calls at one depth against those with a slot.

    Attributes:
        depth: calibrated, or the one at which slow calls begin; 0: none can be told.
        slow, top: slow calls at the top; all there.
        slow_below, below: the same of those with a slot.
        passed: quick calls entered deeper than any queue has a slot.
        lost_ns: what the slow ones at the top took more.
        shallowest: the least that one of them was entered at.
        how: how depth is known, in words.
    """

    depth: int
    slow: int
    top: int
    slow_below: int
    below: int
    passed: int
    lost_ns: int
    shallowest: int
    how: str


@dataclass(frozen=True, slots=True)
class MetDepths:
    """From the host alone: depths, reckoned at the calls' own pace, at which slow calls began after a queue was empty.

    Attributes:
        low, middle, high: of these, the quartiles.
        times: how often.
        least: the depth that is believed, where all else fits.
        usual: least and most that GPUs have.
    """

    low: float
    middle: float
    high: float
    times: int
    least: float
    usual: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Paced:
    """From the host alone: where slow calls begin in a queue that is followed at the calls' own pace.

    Attributes:
        depth: that a full queue is taken to have.
        onsets: of each place what was outstanding by that pace, the most slots that had been free before, and how many
            slow calls follow.
    """

    depth: int
    onsets: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class Pinned:
    """From timing events in the stream: where the count of outstanding submissions gathers.

    Attributes:
        least, most: the band of counts, a hundredth and a half of a queue's depth wide, with the most calls in it.
        calls: entered there.
        elsewhere: in the fullest band as wide with a slot.
        below: entered with a slot, by a good margin.
        dearer: times as long as the quickest quarter of those at most the quickest quarter of `calls` takes; 0: there
            is nothing to compare with.
        inside: of the time from each of `calls` to the one after it, the share that was spent in the call.
        depths: least and most submissions that the queue may take.
        slow, lost_ns: of `calls`, those that took longer than half of those below, and what they took more.
    """

    least: int
    most: int
    calls: int
    elsewhere: int
    below: int
    dearer: float
    inside: float
    depths: tuple[float, float]
    slow: int
    lost_ns: int


@dataclass(frozen=True, slots=True)
class HeldAt:
    """From timing events in the stream: calls that waited for far more than a copy, and how many were outstanding.

    Attributes:
        calls, lost_ns: entered with as many outstanding as a queue takes, and what they took more than others.
        least, most: outstanding at those.
        elsewhere, elsewhere_ns: the same of calls as long that were entered with other counts, without what their
            threads waited for a CPU.
    """

    calls: int
    lost_ns: int
    least: int
    most: int
    elsewhere: int
    elsewhere_ns: int


@dataclass(frozen=True, slots=True)
class InBurst:
    """From the host alone: the number in its burst of the one call that waits for long.

    Attributes:
        bursts: with a call that waits for long, not far shorter than those that fit; `fits` those whose first is at the
            number that a queue takes.
        fits: see there.
        proven: something else shows that they met a full queue: an empty stream before the burst, slow calls behind the
            long one and hardly any before it, or another thread that waited for the lock the call held.
        calls, lost_ns: that waited, the slow ones behind the first counted, and what they took more.
        first, last: least and greatest number of the first ones.
        queues: what queues take, in words.
    """

    bursts: int
    fits: int
    proven: bool
    calls: int
    lost_ns: int
    first: int
    last: int
    queues: str


@dataclass(frozen=True, slots=True)
class Flood:
    """From the host alone: a stream that was given far more than a queue holds without a pause.

    Attributes:
        longest: submissions in a row, at most.
        waits, calls: slow calls beyond the first of a stretch that a queue takes; all there.
        lost_ns, spent_ns: what the slow ones took more; all time there.
        times: what a call must take to count as slow, in times of a quick one.
        spread: of the time for as many calls as no queue holds: from the tenth to the ninetieth percentile, of the
            median; 0 where there is one such time alone.
        pauses, slow_after: pauses in which a full queue would have freed slots; slow calls right after them.
        onsets, misfits: stretches that began empty; of them, those whose slow calls do not begin at the full depth.
        seen_waiting: calls are so much longer than quick ones, or fill so much of the time, that they wait.
        slow_before, before: slow calls with a slot, and all of them, where they are in the detail.
        alone: no other thread of the process called CUDA meanwhile.
        no_cpu: part of the time that the stream's threads waited for a CPU.
    """

    longest: int
    waits: int
    calls: int
    lost_ns: int
    spent_ns: int
    times: float
    spread: float
    pauses: int
    slow_after: int
    onsets: int
    misfits: int
    seen_waiting: bool
    slow_before: int
    before: int
    alone: bool
    no_cpu: float


@dataclass(frozen=True, slots=True)
class NumberedLaunches:
    """From the host alone: kernel launches of which each slow one tells its number.

    Attributes:
        slow, lost_ns: beyond the number that a queue takes, and what they took more.
        early_ns: what slow ones before it took more.
        slow_span: numbers from the first of the slow ones to the last.
        first: the number of the first.
        capacity: launches that the queue held there; 0: that cannot be reckoned.
        usual: least and most that queues hold.
    """

    slow: int
    lost_ns: int
    early_ns: int
    slow_span: int
    first: int
    capacity: int
    usual: tuple[float, float] = (1, float("inf"))


@dataclass(frozen=True, slots=True)
class OtherSlowCalls:
    """From the host alone: what is slow for no reason that is seen.

    Attributes:
        slow_ns, no_cpu_ns: what slow calls took more; of it what their threads waited for a CPU.
        span_ns: of the recording.
        what: calls in words; `how` the depth is known.
        how: see there.
        deepest, depth: outstanding at most, by that; what a queue takes where every call's depth was counted, else 0.
        top: calls at the top.
    """

    slow_ns: int
    no_cpu_ns: int
    span_ns: int
    what: str
    how: str
    deepest: int = 0
    depth: int = 0
    top: int = 0


@dataclass(frozen=True, slots=True)
class OverStreams:
    """From the host alone: the first long call of a burst over many streams of one direction.

    Attributes:
        submitted, own: before it in the burst, to all streams and to its own.
        channels: that the machine may have.
        after_event: its stream was told to wait for an event.
    """

    submitted: int
    own: int
    channels: tuple[int, ...]
    after_event: bool


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """Of a running stream: its calls at the top of the queue since that was last half empty.

    Attributes:
        longest_on_cpu_ns: the longest of the newest calls in which the thread kept its CPU.
        blocked, lost_ns, span_ns: slow calls, what they took above the baseline, and the time since the first.
        on_cpu, on_cpu_lost_ns, on_cpu_span_ns: the same without calls and time in which the thread lost its CPU.
        top_calls, top_slow, top_mean_ns: calls at the top, older ones at a falling weight.
        room_odds, room_mean_ns: slow calls for each fast one with a slot; what those take as a mean.
        baseline_ns: what a call costs with a slot.
    """

    longest_on_cpu_ns: int
    blocked: int
    lost_ns: int
    span_ns: int
    on_cpu: int
    on_cpu_lost_ns: float
    on_cpu_span_ns: int
    top_calls: float
    top_slow: float
    top_mean_ns: float
    room_odds: float
    room_mean_ns: float
    baseline_ns: float


@dataclass(frozen=True, slots=True)
class LiveSums:
    """Of a running stream of which sums alone are known: what it lost of the time that passed.

    Attributes:
        lost_ns, passed_ns: above the baseline; time between two looks.
        slow, timed: of one kind of call, those several times as long as the baseline, and all.
    """

    lost_ns: float
    passed_ns: float
    slow: int
    timed: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """Of an engine's newest transfers: how many were slow with the queue full.

    Attributes:
        outstanding: the most that each of the slow ones had outstanding.
        depth: calibrated; 0 where copies take no slot.
    """

    outstanding: tuple[int, ...]
    depth: int


Evidence = (
    Made
    | Incomplete
    | Deepest
    | Together
    | Labels
    | Plateau
    | Regular
    | StoodStill
    | SharedChannel
    | DepthStep
    | MetDepths
    | Paced
    | Pinned
    | HeldAt
    | InBurst
    | Flood
    | NumberedLaunches
    | OtherSlowCalls
    | OverStreams
    | LiveWindow
    | LiveSums
    | Transfers
)
